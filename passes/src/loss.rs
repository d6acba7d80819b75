//! Attaches the loss to the forward graph.
//!
//! In: a forward graph. Out: the same with an input of labels (unless the loss is the model's own), and
//! the outputs `LossSum` (the f32 sum of the losses of this rank's micro-batch) and `LossCount` (the f32
//! number of elements summed). Sum and count stay apart so that ranks and micro-steps add up to the
//! mean over all elements. Source: `torch.nn.functional.{cross_entropy, mse_loss}`.

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{
    BinaryFn, Cast, CompareFn, Constant, CrossEntropy, Input, Reduce, ReduceFn, Reshape, Transpose,
};
use frit_ir::{
    DType, Diagnostic, Graph, GraphError, Op, Origin, OutputKind, Region, Shape, Tensor,
    TensorType, ValueId,
};

/// The contract of [`Loss`].
pub const INFO: PassInfo = PassInfo {
    name: "loss",
    summary: "attach the loss to the outputs of the model",
    requires: &[],
    ensures: &[Property::HasLoss],
    breaks: &[Property::Canonical],
    numerics: Numerics::Bitwise,
};

/// Which loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossKind {
    /// Cross-entropy of class indices.
    CrossEntropy,
    /// Squared difference from a target of the output's shape.
    Mse,
    /// An output of the model is the loss itself.
    Output,
    /// None: the plan only runs the model.
    None,
}

/// Attaches a loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// Which loss.
    pub kind: LossKind,
    /// The output that it reads; for [`LossKind::Output`] the loss itself.
    pub logits: String,
    /// Name of the input of labels or targets.
    pub labels: String,
    /// The label that leaves a row out.
    pub ignore_index: i64,
    /// Axis of the classes; the last if absent.
    pub class_axis: Option<usize>,
}

impl Pass for Loss {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        if self.kind == LossKind::None {
            return Ok(Changed::No);
        }
        if graph.outputs.iter().any(|o| o.kind == OutputKind::LossSum) {
            return Err(Diagnostic::error("E210", "the graph already has a loss"));
        }
        let logits = self.find_output(graph)?;
        let mut builder = Builder { origin: graph.def(logits).origin.by(INFO.name), graph };
        let (sum, count) = match self.kind {
            LossKind::CrossEntropy => self.cross_entropy(&mut builder, logits)?,
            LossKind::Mse => self.mse(&mut builder, logits)?,
            LossKind::Output | LossKind::None => self.own(&mut builder, logits)?,
        };
        let origin = builder.origin.clone();
        graph.add_output("loss_sum", sum, OutputKind::LossSum);
        graph.add_output("loss_count", count, OutputKind::LossCount);
        context.remark(&origin, format!("attached the loss to output `{}`", self.logits));
        Ok(Changed::Yes)
    }
}

impl Loss {
    fn find_output(&self, graph: &Graph) -> Result<ValueId, Diagnostic> {
        let results = || graph.outputs.iter().filter(|o| o.kind == OutputKind::Result);
        let found = results().find(|o| o.name == self.logits).ok_or_else(|| {
            let names: Vec<String> =
                results().map(|o| format!("`{}` {}", o.name, graph.ty(o.value))).collect();
            Diagnostic::error("E211", format!("the model has no output `{}`", self.logits))
                .note(format!("its outputs are {}", names.join(", ")))
                .help("name one of them in `loss.logits`")
        })?;
        let ty = graph.ty(found.value);
        if !ty.dtype.is_float() {
            let message = format!("output `{}` is {ty}; a loss needs floats", self.logits);
            return Err(Diagnostic::error("E212", message).at(&graph.def(found.value).origin));
        }
        Ok(found.value)
    }

    fn cross_entropy(
        &self,
        b: &mut Builder<'_>,
        logits: ValueId,
    ) -> Result<(ValueId, ValueId), Diagnostic> {
        let shape = b.graph.ty(logits).shape.clone();
        let last = shape.rank().checked_sub(1).ok_or_else(|| {
            let message = format!("output `{}` is a scalar: it has no class axis", self.logits);
            Diagnostic::error("E213", message).at(&b.origin)
        })?;
        let axis = self.class_axis.unwrap_or(last);
        if axis > last {
            let message = format!("`loss.class_axis` = {axis}, but the output has shape {shape}");
            return Err(Diagnostic::error("E213", message).at(&b.origin));
        }
        let mut logits = logits;
        if axis != last {
            let perm: Vec<usize> = (0..=last).filter(|&i| i != axis).chain([axis]).collect();
            logits = b.add(Op::Transpose(Transpose { perm }), &[logits])?;
        }
        let mut rows = shape.0.clone();
        rows.remove(axis);
        let ty = TensorType::new(DType::I64, rows);
        let labels = self.labels(b, ty, |found| matches!(found.dtype, DType::I64 | DType::I32))?;
        let op = CrossEntropy { ignore_index: self.ignore_index };
        let losses = b.add(Op::CrossEntropy(op), &[logits, labels])?;
        let sum = b.total(losses)?;

        let ignored = TensorType::scalar(b.graph.ty(labels).dtype);
        let ignored = Tensor::ints(ignored.dtype, ignored.shape, vec![self.ignore_index]);
        let ignored = b.constant(ignored)?;
        let counts = b.add(Op::Compare(CompareFn::Ne), &[labels, ignored])?;
        let counts = b.add(Op::Cast(Cast { to: DType::F32 }), &[counts])?;
        let count = b.total(counts)?;
        Ok((sum, count))
    }

    fn mse(&self, b: &mut Builder<'_>, y: ValueId) -> Result<(ValueId, ValueId), Diagnostic> {
        let ty = b.graph.ty(y).clone();
        let count = ty.shape.numel() as f64;
        let target = self.labels(b, ty.clone(), |found| found.dtype == ty.dtype)?;
        let difference = b.add(Op::Binary(BinaryFn::Sub), &[y, target])?;
        let squares = b.add(Op::Binary(BinaryFn::Mul), &[difference, difference])?;
        Ok((b.total(squares)?, b.constant(Tensor::scalar(count))?))
    }

    fn own(&self, b: &mut Builder<'_>, loss: ValueId) -> Result<(ValueId, ValueId), Diagnostic> {
        let ty = b.graph.ty(loss).clone();
        if ty.shape.numel() != 1 {
            let message = format!("output `{}` is {ty}, not one loss", self.logits);
            return Err(Diagnostic::error("E214", message)
                .at(&b.origin)
                .help("name a scalar output in `loss.logits`, or choose another `loss.kind`"));
        }
        let mut sum = loss;
        if ty.shape.rank() > 0 {
            sum = b.add(Op::Reshape(Reshape { shape: Shape::scalar() }), &[sum])?;
        }
        Ok((b.as_f32(sum)?, b.constant(Tensor::scalar(1.0))?))
    }

    /// The input of labels: the model's own if it has one of that name, else a new one.
    fn labels(
        &self,
        b: &mut Builder<'_>,
        ty: TensorType,
        dtype_fits: impl Fn(&TensorType) -> bool,
    ) -> Result<ValueId, Diagnostic> {
        let own = b.graph.nodes().find_map(|(_, node)| match &node.op {
            Op::Input(input) if input.name == self.labels => Some((node.outputs[0], &input.ty)),
            _ => None,
        });
        match own {
            Some((id, found)) if found.shape == ty.shape && dtype_fits(found) => Ok(id),
            Some((_, found)) => {
                let message =
                    format!("input `{}` is {found}, but the loss needs {ty}", self.labels);
                Err(Diagnostic::error("E215", message)
                    .at(&b.origin)
                    .help("set `loss.labels` to another name, or `loss.class_axis`"))
            }
            None => {
                let id = b.add(Op::Input(Input { name: self.labels.clone(), ty }), &[])?;
                b.graph.set_name(id, &self.labels);
                Ok(id)
            }
        }
    }
}

/// The largest number of elements that `LossCount` can be: the static size of what `LossSum` sums.
/// `None` if the graph has no loss.
pub fn capacity(graph: &Graph) -> Option<usize> {
    let output = |kind| graph.outputs.iter().find(|o| o.kind == kind).map(|o| o.value);
    if let Some(count) = graph.constant(output(OutputKind::LossCount)?) {
        return count.to_f64s().first().map(|&c| c as usize);
    }
    let mut value = output(OutputKind::LossSum)?;
    loop {
        let node = graph.def(value);
        match &node.op {
            Op::Cast(_) | Op::Reshape(_) => value = node.inputs[0],
            Op::Reduce(reduce) if reduce.f == ReduceFn::Sum => {
                return Some(graph.ty(node.inputs[0]).shape.numel());
            }
            _ => return Some(graph.ty(value).shape.numel()),
        }
    }
}

/// Adds nodes at one place.
struct Builder<'a> {
    graph: &'a mut Graph,
    origin: Origin,
}

impl Builder<'_> {
    fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, Diagnostic> {
        let added: Result<ValueId, GraphError> =
            self.graph.add1(op, inputs, self.origin.clone(), Region::Forward);
        added.map_err(bug(INFO.name))
    }

    fn constant(&mut self, value: Tensor) -> Result<ValueId, Diagnostic> {
        self.add(Op::Constant(Constant { value }), &[])
    }

    fn as_f32(&mut self, x: ValueId) -> Result<ValueId, Diagnostic> {
        if self.graph.ty(x).dtype == DType::F32 {
            return Ok(x);
        }
        self.add(Op::Cast(Cast { to: DType::F32 }), &[x])
    }

    /// The f32 sum of all elements.
    fn total(&mut self, x: ValueId) -> Result<ValueId, Diagnostic> {
        let axes: Vec<usize> = (0..self.graph.ty(x).shape.rank()).collect();
        let mut sum = x;
        if !axes.is_empty() {
            let op = Reduce { f: ReduceFn::Sum, axes, keep_dims: false };
            sum = self.add(Op::Reduce(op), &[sum])?;
        }
        self.as_f32(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::text;

    fn capacity_with(kind: LossKind, shape: &str) -> Option<usize> {
        let text = format!(
            "graph @g world=1 {{\n %x: f32{shape} = input {{name = \"x\", \
             ty = {{\"dtype\": \"f32\", \"shape\": {shape}}}}}\n return %x as \"y\"\n}}"
        );
        let mut graph = text::parse(&text).expect("parses");
        let (logits, labels) = ("y".to_string(), "labels".to_string());
        let loss = Loss { kind, logits, labels, ignore_index: -100, class_axis: None };
        loss.run(&mut graph, &mut PassContext::default()).expect("runs");
        capacity(&graph)
    }

    #[test]
    fn capacity_is_the_static_number_of_losses() {
        assert_eq!(capacity_with(LossKind::CrossEntropy, "[2, 3, 5]"), Some(6));
        assert_eq!(capacity_with(LossKind::CrossEntropy, "[5]"), Some(1));
        assert_eq!(capacity_with(LossKind::Mse, "[2, 3, 5]"), Some(30));
        assert_eq!(capacity_with(LossKind::Output, "[1, 1]"), Some(1));
        assert_eq!(capacity_with(LossKind::None, "[2, 3]"), None);
    }
}
