//! The kinds of loss, each as a sum over elements and the number of them.
//!
//! | kind | element | source |
//! |---|---|---|
//! | cross_entropy | −Σ t·ln softmax(x) over the classes, per row | `torch.nn.functional.cross_entropy` |
//! | mse | (x − t)² | `mse_loss` |
//! | l1 | \|x − t\| | `l1_loss` |
//! | smooth_l1 | ½(x − t)²/β where \|x − t\| < β, else \|x − t\| − ½β | `smooth_l1_loss` |
//! | bce_with_logits | ln(1 + eˣ) − x·t | `binary_cross_entropy_with_logits` |
//! | kl | Σ t·(ln t − ln softmax(x)) over the classes, per row | `kl_div`, reduction `batchmean` |
//!
//! Label smoothing ε replaces t by (1 − ε)·t + ε/C.

use super::{Builder, LossKind, Term};
use frit_ir::ops::{
    BinaryFn, Cast, CompareFn, CrossEntropy, Input, LogSoftmax, Reduce, ReduceFn, Reshape,
    Transpose, UnaryFn,
};
use frit_ir::{Code, DType, Diagnostic, Graph, Op, OutputKind, Shape, Tensor, TensorType, ValueId};

/// A sum and the number of its elements.
pub(super) type Part = Result<(ValueId, ValueId), Diagnostic>;

impl Term {
    pub(super) fn find_output(&self, graph: &Graph) -> Result<ValueId, Diagnostic> {
        let results = || graph.outputs.iter().filter(|o| o.kind == OutputKind::Result);
        // By default the only output is used, whatever its name.
        let only = results().next().filter(|_| results().count() == 1);
        let only = only.filter(|_| self.logits == Term::default().logits);
        let found = results().find(|o| o.name == self.logits).or(only).ok_or_else(|| {
            let names: Vec<String> =
                results().map(|o| format!("`{}` {}", o.name, graph.ty(o.value))).collect();
            Diagnostic::error(
                Code::OutputUnknown,
                format!("the model has no output `{}`", self.logits),
            )
            .note(format!("its outputs are {}", names.join(", ")))
            .help("name one of them in `loss.logits`")
        })?;
        let ty = graph.ty(found.value);
        if !ty.dtype.is_float() {
            let message = format!("output `{}` is {ty}; a loss needs floats", self.logits);
            return Err(
                Diagnostic::error(Code::OutputNotFloat, message).at(&graph.def(found.value).origin)
            );
        }
        Ok(found.value)
    }

    /// Adds the loss of this output.
    pub(super) fn attach(&self, b: &mut Builder<'_>, x: ValueId) -> Part {
        match self.kind {
            LossKind::CrossEntropy if self.soft_targets => self.soft_cross_entropy(b, x),
            LossKind::CrossEntropy => self.cross_entropy(b, x),
            LossKind::Kl => self.kl(b, x),
            LossKind::Mse => self.elementwise(b, x, |b, x, t| {
                let d = b.add(Op::Binary(BinaryFn::Sub), &[x, t])?;
                b.add(Op::Binary(BinaryFn::Mul), &[d, d])
            }),
            LossKind::L1 => self.elementwise(b, x, |b, x, t| {
                let d = b.add(Op::Binary(BinaryFn::Sub), &[x, t])?;
                b.add(Op::Unary(UnaryFn::Abs), &[d])
            }),
            LossKind::SmoothL1 => self.elementwise(b, x, |b, x, t| self.smooth_l1(b, x, t)),
            LossKind::BceWithLogits => self.elementwise(b, x, |b, x, t| {
                let log = b.add(Op::Unary(UnaryFn::Softplus), &[x])?;
                let product = b.add(Op::Binary(BinaryFn::Mul), &[x, t])?;
                b.add(Op::Binary(BinaryFn::Sub), &[log, product])
            }),
            LossKind::Output | LossKind::None => self.own(b, x),
        }
    }

    /// A loss per element of the output, with a target of its shape.
    fn elementwise(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        loss: impl Fn(&mut Builder<'_>, ValueId, ValueId) -> Result<ValueId, Diagnostic>,
    ) -> Part {
        let ty = b.graph.ty(x).clone();
        let target = self.labels(b, ty.clone(), |found| found.dtype == ty.dtype)?;
        let losses = loss(b, x, target)?;
        Ok((b.total(losses)?, b.number_of(losses)?))
    }

    fn smooth_l1(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        t: ValueId,
    ) -> Result<ValueId, Diagnostic> {
        let d = b.add(Op::Binary(BinaryFn::Sub), &[x, t])?;
        let size = b.add(Op::Unary(UnaryFn::Abs), &[d])?;
        let square = b.add(Op::Binary(BinaryFn::Mul), &[d, d])?;
        let square = b.scaled(square, 0.5 / self.beta)?;
        let half = b.number(x, 0.5 * self.beta)?;
        let linear = b.add(Op::Binary(BinaryFn::Sub), &[size, half])?;
        let beta = b.number(x, self.beta)?;
        let small = b.add(Op::Compare(CompareFn::Lt), &[size, beta])?;
        b.add(Op::Select, &[small, square, linear])
    }

    fn cross_entropy(&self, b: &mut Builder<'_>, logits: ValueId) -> Part {
        let axis = self.axis_of_several(b, logits)?;
        let mut rows = b.graph.ty(logits).shape.0.clone();
        rows.remove(axis);
        let logits = classes_last(b, logits, axis)?;
        let labels = self.class_labels(b, rows)?;
        let op = CrossEntropy::ignoring(self.ignore_index);
        let mut losses = b.add(Op::CrossEntropy(op), &[logits, labels])?;
        let ignored = b.graph.ty(labels).dtype;
        let ignored = Tensor::ints(ignored, Shape::scalar(), vec![self.ignore_index]);
        if self.label_smoothing != 0.0 {
            let log = b.add(Op::LogSoftmax(LogSoftmax { axis: last(b, logits) }), &[logits])?;
            let mean = Reduce { f: ReduceFn::Mean, axes: vec![last(b, log)], keep_dims: false };
            let mean = b.add(Op::Reduce(mean), &[log])?;
            let spread = b.scaled(mean, -self.label_smoothing)?;
            let ignored = b.constant(ignored.clone())?;
            let kept = b.add(Op::Compare(CompareFn::Ne), &[labels, ignored])?;
            let zero = b.number(spread, 0.0)?;
            let spread = b.add(Op::Select, &[kept, spread, zero])?;
            losses = b.scaled(losses, 1.0 - self.label_smoothing)?;
            losses = b.add(Op::Binary(BinaryFn::Add), &[losses, spread])?;
        }
        let sum = b.total(losses)?;
        let ignored = b.constant(ignored)?;
        let counts = b.add(Op::Compare(CompareFn::Ne), &[labels, ignored])?;
        let counts = b.add(Op::Cast(Cast { to: DType::F32 }), &[counts])?;
        let count = b.total(counts)?;
        Ok((sum, count))
    }

    fn soft_cross_entropy(&self, b: &mut Builder<'_>, logits: ValueId) -> Part {
        let (mut targets, log) = self.probabilities(b, logits)?;
        if self.label_smoothing != 0.0 {
            let classes = *b.graph.ty(log).shape.0.last().unwrap_or(&1) as f64;
            targets = b.scaled(targets, 1.0 - self.label_smoothing)?;
            let spread = b.number(targets, self.label_smoothing / classes)?;
            targets = b.add(Op::Binary(BinaryFn::Add), &[targets, spread])?;
        }
        let products = b.add(Op::Binary(BinaryFn::Mul), &[targets, log])?;
        let products = b.add(Op::Unary(UnaryFn::Neg), &[products])?;
        self.per_row(b, products)
    }

    fn kl(&self, b: &mut Builder<'_>, logits: ValueId) -> Part {
        let (targets, log) = self.probabilities(b, logits)?;
        let own = b.add(Op::Unary(UnaryFn::Log), &[targets])?;
        let difference = b.add(Op::Binary(BinaryFn::Sub), &[own, log])?;
        let products = b.add(Op::Binary(BinaryFn::Mul), &[targets, difference])?;
        // 0·ln 0 is 0.
        let zero = b.number(targets, 0.0)?;
        let positive = b.add(Op::Compare(CompareFn::Gt), &[targets, zero])?;
        let products = b.add(Op::Select, &[positive, products, zero])?;
        self.per_row(b, products)
    }

    /// Target probabilities of all classes and the logarithms of the model's, classes last.
    fn probabilities(&self, b: &mut Builder<'_>, logits: ValueId) -> Part {
        let axis = self.axis_of_several(b, logits)?;
        let ty = b.graph.ty(logits).clone();
        let targets = self.labels(b, ty.clone(), |found| found.dtype == ty.dtype)?;
        let (targets, logits) = (classes_last(b, targets, axis)?, classes_last(b, logits, axis)?);
        let log = b.add(Op::LogSoftmax(LogSoftmax { axis: last(b, logits) }), &[logits])?;
        Ok((targets, log))
    }

    /// Sums the terms of every class of a row; counts rows.
    fn per_row(&self, b: &mut Builder<'_>, products: ValueId) -> Part {
        let sum = Reduce { f: ReduceFn::Sum, axes: vec![last(b, products)], keep_dims: false };
        let losses = b.add(Op::Reduce(sum), &[products])?;
        Ok((b.total(losses)?, b.number_of(losses)?))
    }

    fn own(&self, b: &mut Builder<'_>, loss: ValueId) -> Part {
        let ty = b.graph.ty(loss).clone();
        if ty.shape.numel() != 1 {
            let message = format!("output `{}` is {ty}, not one loss", self.logits);
            return Err(Diagnostic::error(Code::LossNotScalar, message)
                .at(&b.origin)
                .help("name a scalar output in `loss.logits`, or choose another `loss.kind`"));
        }
        if let Some(param) = parameter(b.graph, loss) {
            let message =
                format!("output `{}` is the parameter `{param}`, not a loss", self.logits);
            return Err(Diagnostic::error(Code::OutputUnusable, message).at(&b.origin).help(
                "name what the model computes in `loss.logits`, or choose another `loss.kind`",
            ));
        }
        let mut sum = loss;
        if ty.shape.rank() > 0 {
            sum = b.add(Op::Reshape(Reshape { shape: Shape::scalar() }), &[sum])?;
        }
        Ok((b.as_f32(sum)?, b.constant(Tensor::scalar(1.0))?))
    }

    /// The axis of the classes, of which there must be more than one: the probability of a single one is 1.
    fn axis_of_several(&self, b: &Builder<'_>, logits: ValueId) -> Result<usize, Diagnostic> {
        let axis = self.axis(b, logits)?;
        let shape = &b.graph.ty(logits).shape;
        if shape.0[axis] != 1 {
            return Ok(axis);
        }
        let name = b.graph.outputs.iter().find(|o| o.value == logits).map_or("", |o| &o.name);
        let message =
            format!("output `{name}` {shape} has one class (axis {axis}), of which the loss is 0");
        Err(Diagnostic::error(Code::OutputUnusable, message).at(&b.origin).help(
            "set `loss.kind`: \"mse\" for numbers, \"bce_with_logits\" for two classes, \"output\" if the \
             output is the loss",
        ))
    }

    /// The axis of the classes.
    pub(super) fn axis(&self, b: &Builder<'_>, logits: ValueId) -> Result<usize, Diagnostic> {
        let shape = &b.graph.ty(logits).shape;
        let rank = shape.rank();
        if rank == 0 {
            let name = b.graph.outputs.iter().find(|o| o.value == logits).map_or("", |o| &o.name);
            let message = format!("output `{name}` is a scalar: it has no class axis");
            return Err(Diagnostic::error(Code::NoClassAxis, message)
                .at(&b.origin)
                .help("if it is the loss, set `loss.kind = \"output\"`"));
        }
        if let Some(axis) = self.class_axis {
            let from_front = if axis < 0 { axis + rank as i64 } else { axis };
            return usize::try_from(from_front).ok().filter(|a| *a < rank).ok_or_else(|| {
                let message =
                    format!("`loss.class_axis` = {axis}, but the output has shape {shape}");
                Diagnostic::error(Code::NoClassAxis, message).at(&b.origin)
            });
        }
        let Some((_, labels)) = own_input(b.graph, &self.labels) else { return Ok(rank - 1) };
        let fits = |axis: usize| {
            let mut rows = shape.0.clone();
            rows.remove(axis);
            rows == labels.shape.0
        };
        match (fits(rank - 1), rank > 2 && fits(1)) {
            (true, true) => {
                let message = format!(
                    "the classes of output `{}` {shape} may be axis 1 or {}",
                    self.logits,
                    rank - 1
                );
                Err(Diagnostic::error(Code::ClassAxisAmbiguous, message)
                    .at(&b.origin)
                    .help("say which in `loss.class_axis`"))
            }
            (false, true) => Ok(1),
            _ => Ok(rank - 1),
        }
    }

    /// The input of class indices, of this shape.
    pub(super) fn class_labels(
        &self,
        b: &mut Builder<'_>,
        rows: Vec<usize>,
    ) -> Result<ValueId, Diagnostic> {
        let ty = TensorType::new(DType::I64, rows);
        self.labels(b, ty, |found| matches!(found.dtype, DType::I64 | DType::I32))
    }

    /// The input of labels: the model's own if it has one of that name, else a new one.
    pub(super) fn labels(
        &self,
        b: &mut Builder<'_>,
        ty: TensorType,
        dtype_fits: impl Fn(&TensorType) -> bool,
    ) -> Result<ValueId, Diagnostic> {
        match own_input(b.graph, &self.labels) {
            Some((id, found)) if found.shape == ty.shape && dtype_fits(found) => Ok(id),
            Some((_, found)) => {
                let message =
                    format!("input `{}` is {found}, but the loss needs {ty}", self.labels);
                Err(Diagnostic::error(Code::LabelsMismatch, message)
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

fn own_input<'g>(graph: &'g Graph, name: &str) -> Option<(ValueId, &'g TensorType)> {
    graph.nodes().find_map(|(_, node)| match &node.op {
        Op::Input(input) if input.name == name => Some((node.outputs[0], &input.ty)),
        _ => None,
    })
}

/// The parameter of which this is a view, if any.
fn parameter(graph: &Graph, mut value: ValueId) -> Option<&str> {
    loop {
        let node = graph.def(value);
        match &node.op {
            Op::Param(param) => return Some(&param.name),
            Op::Reshape(_) | Op::Transpose(_) | Op::Expand(_) | Op::Cast(_) => {
                value = node.inputs[0]
            }
            _ => return None,
        }
    }
}

pub(super) fn last(b: &Builder<'_>, x: ValueId) -> usize {
    b.graph.ty(x).shape.rank().saturating_sub(1)
}

/// The value with the class axis moved to the end.
pub(super) fn classes_last(
    b: &mut Builder<'_>,
    x: ValueId,
    axis: usize,
) -> Result<ValueId, Diagnostic> {
    let rank = b.graph.ty(x).shape.rank();
    if axis + 1 == rank {
        return Ok(x);
    }
    let perm: Vec<usize> = (0..rank).filter(|&i| i != axis).chain([axis]).collect();
    b.add(Op::Transpose(Transpose { perm }), &[x])
}
