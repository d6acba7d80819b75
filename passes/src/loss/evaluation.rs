//! Losses and metrics over a data set: each is a sum and a count over the batch, so that batches with any number of counted examples
//! add up to the mean over all.
//!
//! An input of weights, one per example, marks the examples that count, since the last batch of a data set is padded. The elements of a
//! loss are assigned to examples by position: of `n` elements in row-major order, example `i` of `B` has the `i`-th `n / B`.

use super::metrics::{self, Metric};
use super::{Builder, LossKind, Term};
use crate::pass::bug;
use frit_ir::ops::{BinaryFn, CompareFn, Concat, Expand, Input, Reshape};
use frit_ir::plan::MetricSpec;
use frit_ir::{
    DType, Diagnostic, Graph, Node, Op, Origin, OutputKind, Region, Shape, Tensor, TensorType,
    ValueId,
};
use std::collections::BTreeSet;

/// Name of the output of statistics: f32 `[2 · parts]`, of each part the sum and the count. The losses come first,
/// then parts used only by metrics.
pub const STATISTICS: &str = "frit.statistics";

/// Name of the input of weights, f32 `[B]`: 1 for an example that counts, else 0.
pub const EXAMPLES: &str = "frit.examples";

/// The input of weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct Examples {
    value: ValueId,
    batch: usize,
}

/// Sums and counts, and the losses to which they belong.
#[derive(Default)]
pub(super) struct Parts {
    values: Vec<(ValueId, ValueId)>,
    losses: Vec<(Term, usize)>,
}

impl Parts {
    pub(super) fn push(&mut self, part: (ValueId, ValueId)) -> usize {
        self.values.push(part);
        self.values.len() - 1
    }

    /// The part of a loss, added if there is none yet.
    pub(super) fn of(
        &mut self,
        term: &Term,
        b: &mut Builder<'_>,
        logits: ValueId,
    ) -> Result<usize, Diagnostic> {
        // Its weight does not change what is summed.
        let term = Term { weight: 1.0, ..term.clone() };
        if let Some((_, part)) = self.losses.iter().find(|(known, _)| *known == term) {
            return Ok(*part);
        }
        let part = term.attach(b, logits)?;
        let part = self.push(part);
        self.losses.push((term, part));
        Ok(part)
    }
}

/// Attaches the losses and metrics to a forward graph, all in one output. Returns the positions of the metrics.
///
/// # Errors
/// If a loss or a metric does not fit the outputs of the model.
pub fn attach(
    graph: &mut Graph,
    terms: &[Term],
    metrics: &[Metric],
) -> Result<Vec<MetricSpec>, Diagnostic> {
    let terms: Vec<&Term> = terms.iter().filter(|t| t.kind != LossKind::None).collect();
    if terms.is_empty() && metrics.is_empty() {
        return Ok(vec![]);
    }
    let mut found = Vec::new();
    for term in &terms {
        found.push(term.find_output(graph)?);
    }
    // A loss that the model computes itself is a mean over the whole batch.
    let own = terms.iter().any(|t| t.kind == LossKind::Output);
    let mut compared = terms.clone();
    compared.extend(metrics.iter().map(|m| &m.term));
    let examples = if own { None } else { examples(graph, &compared)? };
    let mut parts = Parts::default();
    for (term, logits) in terms.iter().zip(found) {
        let origin = graph.def(logits).origin.by(super::INFO.name);
        let mut b = Builder { origin, graph, examples };
        // Every loss has its own part, in order.
        let part = term.attach(&mut b, logits)?;
        let part = parts.push(part);
        parts.losses.push((Term { weight: 1.0, ..(*term).clone() }, part));
    }
    let specs = metrics::attach(graph, metrics, examples, &mut parts)?;
    if parts.values.is_empty() {
        return Ok(specs);
    }
    let mut b = Builder { origin: Origin::none().by(super::INFO.name), graph, examples: None };
    let mut scalars = Vec::new();
    for value in parts.values.iter().flat_map(|(sum, count)| [*sum, *count]) {
        let shape = Shape::from(&[1][..]);
        scalars.push(b.add(Op::Reshape(Reshape { shape }), &[value])?);
    }
    let statistics = b.add(Op::Concat(Concat { axis: 0 }), &scalars)?;
    graph.add_output(STATISTICS, statistics, OutputKind::Result);
    Ok(specs)
}

/// The input of weights, if all inputs have examples in rows and every loss has elements that belong to them.
fn examples(graph: &mut Graph, terms: &[&Term]) -> Result<Option<Examples>, Diagnostic> {
    let mut found = Vec::new();
    for term in terms {
        found.push(term.find_output(graph)?);
    }
    let first_axis = |node: &Node| match &node.op {
        Op::Input(input) => input.ty.shape.dims().first().copied(),
        _ => None,
    };
    let sizes: BTreeSet<usize> = graph.nodes().filter_map(|(_, n)| first_axis(n)).collect();
    let Some(&batch) = sizes.first().filter(|n| **n > 0 && sizes.len() == 1) else {
        return Ok(None);
    };
    let divides = |(term, logits): (&&Term, &ValueId)| {
        let shape = &graph.ty(*logits).shape;
        let classes = match (term.kind, term.class_axis) {
            (LossKind::CrossEntropy | LossKind::Kl, None) => shape.dims().last().copied(),
            (LossKind::CrossEntropy | LossKind::Kl, Some(axis)) => {
                let axis = if axis < 0 { axis + shape.rank() as i64 } else { axis };
                shape.dims().get(axis as usize).copied()
            }
            _ => None,
        };
        (shape.numel() / classes.unwrap_or(1).max(1)).is_multiple_of(batch)
    };
    if !terms.iter().zip(&found).all(divides) {
        return Ok(None);
    }
    let ty = TensorType::new(DType::F32, [batch]);
    let op = Op::Input(Input { name: EXAMPLES.into(), ty });
    let value = graph
        .add1(op, &[], Origin::none().by(super::INFO.name), Region::Forward)
        .map_err(bug(super::INFO.name))?;
    graph.set_name(value, EXAMPLES);
    Ok(Some(Examples { value, batch }))
}

impl Builder<'_> {
    /// The elements of examples that count; zero for the others, even where they are NaN.
    pub(super) fn counted(&mut self, x: ValueId) -> Result<ValueId, Diagnostic> {
        let Some(Examples { value, batch }) = self.examples else { return Ok(x) };
        let ty = self.graph.ty(x).clone();
        let each = ty.shape.numel() / batch;
        let rows = Shape(vec![batch, each]);
        let x = self.add(Op::Reshape(Reshape { shape: rows.clone() }), &[x])?;
        let zero = self.constant(Tensor::scalar(0.0))?;
        let counts = self.add(Op::Compare(CompareFn::Gt), &[value, zero])?;
        let column = Shape(vec![batch, 1]);
        let counts = self.add(Op::Reshape(Reshape { shape: column }), &[counts])?;
        let counts = self.add(Op::Expand(Expand { shape: rows }), &[counts])?;
        let nothing = self.number(x, 0.0)?;
        let x = self.add(Op::Select, &[counts, x, nothing])?;
        self.add(Op::Reshape(Reshape { shape: ty.shape }), &[x])
    }

    /// The number of elements of `x` that belong to examples that count, as f32.
    pub(super) fn number_of(&mut self, x: ValueId) -> Result<ValueId, Diagnostic> {
        let numel = self.graph.ty(x).shape.numel();
        let Some(Examples { value, batch }) = self.examples.take() else {
            return self.constant(Tensor::scalar(numel as f64));
        };
        let counting = self.total(value)?;
        self.examples = Some(Examples { value, batch });
        let each = self.constant(Tensor::scalar((numel / batch) as f64))?;
        self.add(Op::Binary(BinaryFn::Mul), &[counting, each])
    }
}
