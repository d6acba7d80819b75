//! Attaches the loss to the forward graph.
//!
//! In: a forward graph. Out: the same with an input of labels (unless the model computes the loss), and the outputs
//! `LossSum` (the f32 sum of the losses of this rank's micro-batch) and `LossCount` (the f32 number of elements
//! summed). Sum and count are separate so that ranks and micro-steps add up to the mean over all elements; of one loss, or several
//! of the same class labels, the sum is weighted. Other losses are each divided by their own count, over all ranks, before they are
//! weighted and added: `LossSum` is then the loss of this rank's share and `LossCount` is 1, so that micro-steps add up to the mean of
//! their losses. What the kinds compute is in [`terms`].

pub mod evaluation;
pub mod metrics;
mod terms;

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{AllReduce, BinaryFn, Cast, Constant, Reduce, ReduceFn, ReduceKind};
use frit_ir::{
    Code, DType, Diagnostic, Graph, GraphError, Op, Origin, OutputKind, Region, Tensor, TensorType,
    ValueId,
};
use std::fmt;

/// The contract of [`Loss`].
pub const INFO: PassInfo = PassInfo {
    name: "loss",
    summary: "attach the loss to the outputs of the model",
    requires: &[],
    ensures: &[Property::HasLoss],
    breaks: &[Property::Canonical],
    numerics: Numerics::Bitwise,
};

frit_ir::choices! {
    /// Which loss.
    LossKind {
        /// Cross-entropy of class indices or, with soft targets, of probabilities.
        CrossEntropy = "cross_entropy",
        /// Squared difference from a target of the output's shape.
        Mse = "mse",
        /// Absolute difference.
        L1 = "l1",
        /// Squared difference where it is small, absolute difference elsewhere.
        SmoothL1 = "smooth_l1",
        /// Binary cross-entropy of the sigmoid with probabilities.
        BceWithLogits = "bce_with_logits",
        /// Kullback-Leibler divergence of the softmax from probabilities, per row.
        Kl = "kl",
        /// An output of the model is the loss itself.
        Output = "output",
        /// None: the plan only evaluates the model.
        None = "none",
    }
}

/// One loss of the sum.
#[derive(Clone, Debug, PartialEq)]
pub struct Term {
    /// Which loss.
    pub kind: LossKind,
    /// Its factor.
    pub weight: f64,
    /// The output that it reads; for [`LossKind::Output`] the loss itself.
    pub logits: String,
    /// Name of the input of labels or targets.
    pub labels: String,
    /// The label that is ignored.
    pub ignore_index: i64,
    /// Axis of the classes, from the end if negative; if absent the last, or 1 if only then the labels
    /// of the model fit.
    pub class_axis: Option<i64>,
    /// The fraction of every label that is spread over all classes.
    pub label_smoothing: f64,
    /// Whether labels are probabilities of all classes.
    pub soft_targets: bool,
    /// Where [`LossKind::SmoothL1`] becomes linear.
    pub beta: f64,
}

impl Default for Term {
    fn default() -> Self {
        Term {
            kind: LossKind::CrossEntropy,
            weight: 1.0,
            logits: "logits".into(),
            labels: "labels".into(),
            ignore_index: -100,
            class_axis: None,
            label_smoothing: 0.0,
            soft_targets: false,
            beta: 1.0,
        }
    }
}

impl fmt::Display for Term {
    /// As `loss.also` writes it, without the factor: `cross_entropy(logits, labels)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            LossKind::Output => write!(f, "output({})", self.logits),
            LossKind::None => f.write_str("none"),
            kind => write!(f, "{}({}, {})", kind.word(), self.logits, self.labels),
        }
    }
}

/// Attaches a loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// The losses.
    pub terms: Vec<Term>,
    /// Number of ranks.
    pub world_size: usize,
    /// Whether nothing may depend on the number of ranks.
    pub reproducible: bool,
}

impl Pass for Loss {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        if self.terms.iter().all(|t| t.kind == LossKind::None) {
            return Ok(Changed::No);
        }
        if graph.outputs.iter().any(|o| o.kind == OutputKind::LossSum) {
            return Err(Diagnostic::error(Code::PassFailed, "the graph already has a loss"));
        }
        let mut parts = Vec::new();
        for term in &self.terms {
            let logits = term.find_output(graph)?;
            let origin = graph.def(logits).origin.by(INFO.name);
            let mut builder = Builder { origin: origin.clone(), graph, examples: None };
            parts.push(term.attach(&mut builder, logits)?);
            context.remark(&origin, format!("attached the loss to output `{}`", term.logits));
        }
        let (sum, count) = match have_one_count(&self.terms) {
            true => self.sum(graph, &parts)?,
            false => self.sum_of_means(graph, &parts)?,
        };
        graph.add_output("loss_sum", sum, OutputKind::LossSum);
        graph.add_output("loss_count", count, OutputKind::LossCount);
        Ok(Changed::Yes)
    }
}

/// Whether losses count the same elements: there is one, or all are cross-entropies of the same class labels.
pub fn have_one_count(terms: &[Term]) -> bool {
    let labels = |t: &Term| (t.labels.clone(), t.ignore_index);
    let of_classes = |t: &Term| t.kind == LossKind::CrossEntropy && !t.soft_targets;
    terms.len() == 1 || terms.iter().all(|t| of_classes(t) && labels(t) == labels(&terms[0]))
}

impl Loss {
    /// `Σ weight · sum`, and the count that all have.
    fn sum(
        &self,
        graph: &mut Graph,
        parts: &[(ValueId, ValueId)],
    ) -> Result<(ValueId, ValueId), Diagnostic> {
        let mut b = Builder { origin: Origin::none().by(INFO.name), graph, examples: None };
        let mut total = None;
        for (term, &(sum, _)) in self.terms.iter().zip(parts) {
            let sum = b.scaled(sum, term.weight)?;
            total = Some(match total {
                Some(total) => b.add(Op::Binary(BinaryFn::Add), &[total, sum])?,
                None => sum,
            });
        }
        total.zip(parts.first().map(|part| part.1)).ok_or_else(no_loss)
    }

    /// `Σ weight · N · sum / count`, the counts summed over the N ranks: its mean over the ranks is the
    /// weighted sum of the means.
    fn sum_of_means(
        &self,
        graph: &mut Graph,
        parts: &[(ValueId, ValueId)],
    ) -> Result<(ValueId, ValueId), Diagnostic> {
        let mut b = Builder { origin: Origin::none().by(INFO.name), graph, examples: None };
        let mut total = None;
        for (term, &(sum, count)) in self.terms.iter().zip(parts) {
            let known = b.graph.constant(count).map(|c| c.to_f64s()[0]);
            let mean = match known {
                Some(count) => b.scaled(sum, term.weight / count)?,
                None => {
                    if self.reproducible {
                        let what = format!("run.reproducible with {term} beside other losses");
                        let help = "its elements are counted over all ranks at once, which depends on their number; use \
                            losses of the same class labels, or let the model compute the sum and set loss.kind = \"output\"";
                        return Err(Diagnostic::error(Code::ConfigContradiction, what).help(help));
                    }
                    let reduce = AllReduce { reduce: ReduceKind::Sum, unit: None, dtype: None };
                    let all = match self.world_size {
                        1 => count,
                        _ => b.add(Op::AllReduce(reduce), &[count])?,
                    };
                    let one = b.constant(Tensor::scalar(1.0))?;
                    // Without any element the sum is zero too.
                    let all = b.add(Op::Binary(BinaryFn::Max), &[all, one])?;
                    let sum = b.scaled(sum, term.weight * self.world_size as f64)?;
                    b.add(Op::Binary(BinaryFn::Div), &[sum, all])?
                }
            };
            total = Some(match total {
                Some(total) => b.add(Op::Binary(BinaryFn::Add), &[total, mean])?,
                None => mean,
            });
        }
        let total = total.ok_or_else(no_loss)?;
        Ok((total, b.constant(Tensor::scalar(1.0))?))
    }
}

fn no_loss() -> Diagnostic {
    Diagnostic::error(Code::PassFailed, "the graph has no loss")
}

/// The largest value of `LossCount`: the static number of elements that `LossSum` adds. `None` if the graph has no
/// loss.
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
            // Weighted, or with another of as many elements.
            Op::Binary(BinaryFn::Mul | BinaryFn::Add) => value = node.inputs[0],
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
    /// Which examples of the batch count; all if absent.
    examples: Option<evaluation::Examples>,
}

impl Builder<'_> {
    fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, Diagnostic> {
        let added: Result<ValueId, GraphError> =
            self.graph.add1(op, inputs, self.origin.clone(), Region::Forward);
        added.map_err(bug(INFO.name))
    }

    fn add_all(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, Diagnostic> {
        let added = self.graph.add(op, inputs, self.origin.clone(), Region::Forward);
        added.map_err(bug(INFO.name))
    }

    fn constant(&mut self, value: Tensor) -> Result<ValueId, Diagnostic> {
        self.add(Op::Constant(Constant { value }), &[])
    }

    /// `x` times a number.
    fn scaled(&mut self, x: ValueId, factor: f64) -> Result<ValueId, Diagnostic> {
        if factor == 1.0 {
            return Ok(x);
        }
        let factor = self.number(x, factor)?;
        self.add(Op::Binary(BinaryFn::Mul), &[x, factor])
    }

    /// A scalar constant in the dtype of `like`.
    fn number(&mut self, like: ValueId, value: f64) -> Result<ValueId, Diagnostic> {
        let ty = TensorType::scalar(self.graph.ty(like).dtype);
        self.constant(Tensor::splat(ty, value))
    }

    fn as_f32(&mut self, x: ValueId) -> Result<ValueId, Diagnostic> {
        if self.graph.ty(x).dtype == DType::F32 {
            return Ok(x);
        }
        self.add(Op::Cast(Cast { to: DType::F32 }), &[x])
    }

    /// The f32 sum of all elements of examples that count.
    fn total(&mut self, x: ValueId) -> Result<ValueId, Diagnostic> {
        let x = self.counted(x)?;
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
        let term = Term { kind, logits: "y".into(), ..Term::default() };
        let loss = Loss { terms: vec![term], world_size: 1, reproducible: false };
        loss.run(&mut graph, &mut PassContext::default()).expect("runs");
        capacity(&graph)
    }

    #[test]
    fn capacity_is_the_static_number_of_losses() {
        assert_eq!(capacity_with(LossKind::CrossEntropy, "[2, 3, 5]"), Some(6));
        assert_eq!(capacity_with(LossKind::CrossEntropy, "[5]"), Some(1));
        assert_eq!(capacity_with(LossKind::Mse, "[2, 3, 5]"), Some(30));
        assert_eq!(capacity_with(LossKind::BceWithLogits, "[2, 3, 5]"), Some(30));
        assert_eq!(capacity_with(LossKind::Kl, "[2, 3, 5]"), Some(6));
        assert_eq!(capacity_with(LossKind::Output, "[1, 1]"), Some(1));
        assert_eq!(capacity_with(LossKind::None, "[2, 3]"), None);
    }
}
