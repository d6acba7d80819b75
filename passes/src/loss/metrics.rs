//! Metrics over a data set: each is a sum and a count, like losses.
//!
//! | metric | of a loss | its mean |
//! |---|---|---|
//! | accuracy | cross_entropy, kl | rows whose most likely class is the label; soft targets: their most likely class |
//! | accuracy | bce_with_logits | elements on the same side: x > 0 and t > ½, or neither |
//! | top_K | cross_entropy, kl | rows whose label is among the K most likely classes |
//! | perplexity | cross_entropy | e to the mean cross-entropy, without label smoothing |
//! | mean_absolute_error | mse, l1, smooth_l1 | \|x − t\| |
//!
//! Ties go to the lower class. Labels that a loss ignores are ignored by its metrics.

use super::evaluation::{Examples, Parts};
use super::{Builder, LossKind, Term};
use crate::loss::terms::{Part, classes_last, last};
use frit_ir::ops::{
    ArgReduce, BinaryFn, Cast, CompareFn, Expand, Reduce, ReduceFn, Reshape, Slice, TopK,
};
use frit_ir::plan::{EvalMetric, MetricKind, MetricSpec};
use frit_ir::{Code, DType, Diagnostic, Graph, Op, Shape, Tensor, ValueId};

/// Whether a metric applies to the operands of a loss of this kind.
pub fn fits(metric: MetricKind, loss: LossKind) -> bool {
    use LossKind::{BceWithLogits, CrossEntropy, Kl, L1, Mse, SmoothL1};
    match metric {
        MetricKind::Accuracy => matches!(loss, CrossEntropy | Kl | BceWithLogits),
        MetricKind::Top(_) => matches!(loss, CrossEntropy | Kl),
        MetricKind::Perplexity => loss == CrossEntropy,
        MetricKind::MeanAbsoluteError => matches!(loss, Mse | L1 | SmoothL1),
    }
}

/// A metric of the operands of a loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// The metric.
    pub kind: MetricKind,
    /// The loss.
    pub term: Term,
    /// Whether it is reported by default rather than requested; a default metric is omitted where it is uninformative.
    pub by_default: bool,
}

impl Metric {
    /// Whether a default metric is informative here.
    fn is_usual(&self, b: &Builder<'_>, x: ValueId) -> Result<bool, Diagnostic> {
        let shape = &b.graph.ty(x).shape;
        Ok(match self.kind {
            MetricKind::Top(k) => shape.dims()[self.term.axis(b, x)?] >= 2 * k,
            // Only for the tokens of sequences.
            MetricKind::Perplexity => {
                !self.term.soft_targets && shape.rank() == 3 && self.term.axis(b, x)? == 2
            }
            MetricKind::Accuracy | MetricKind::MeanAbsoluteError => true,
        })
    }

    /// The loss from whose mean it is computed, if any.
    fn loss(&self) -> Option<Term> {
        match self.kind {
            MetricKind::Perplexity => Some(Term { label_smoothing: 0.0, ..self.term.clone() }),
            MetricKind::MeanAbsoluteError => Some(Term { kind: LossKind::L1, ..self.term.clone() }),
            MetricKind::Accuracy | MetricKind::Top(_) => None,
        }
    }
}

/// Which of the most likely classes, in order, are the labels of rows.
struct Hits {
    /// f32 `[rows, most]`; zero where the label is ignored.
    hits: ValueId,
    /// The number of rows that count.
    count: ValueId,
}

/// Adds the metrics to the parts of the losses, and returns their positions.
pub(super) fn attach(
    graph: &mut Graph,
    metrics: &[Metric],
    examples: Option<Examples>,
    parts: &mut Parts,
) -> Result<Vec<MetricSpec>, Diagnostic> {
    let mut kept = Vec::new();
    for metric in metrics {
        let x = metric.term.find_output(graph)?;
        let origin = graph.def(x).origin.by(super::INFO.name);
        let b = Builder { origin, graph, examples };
        if !metric.by_default || metric.is_usual(&b, x)? {
            kept.push((metric, x));
        }
    }
    let mut hits: Vec<(&Term, Hits)> = Vec::new();
    let mut specs = Vec::new();
    for (metric, x) in &kept {
        let term = &metric.term;
        let origin = graph.def(*x).origin.by(super::INFO.name);
        let mut b = Builder { origin, graph, examples };
        let part = match (metric.kind, metric.loss()) {
            (_, Some(loss)) => parts.of(&loss, &mut b, *x)?,
            (_, None) if term.kind == LossKind::BceWithLogits => {
                let part = term.same_side(&mut b, *x)?;
                parts.push(part)
            }
            (kind, None) => {
                let k = if let MetricKind::Top(k) = kind { k } else { 1 };
                if !hits.iter().any(|(t, _)| *t == term) {
                    let of_term = kept.iter().filter(|(m, _)| m.term == *term);
                    let most =
                        of_term.map(|(m, _)| if let MetricKind::Top(k) = m.kind { k } else { 1 });
                    hits.push((term, term.hits(&mut b, *x, most.max().unwrap_or(1))?));
                }
                let found = hits.iter().find(|(t, _)| *t == term).map(|(_, hits)| hits);
                let part = first(&mut b, found.expect("invariant: pushed above"), k)?;
                parts.push(part)
            }
        };
        let alone = kept.iter().filter(|(m, _)| m.kind == metric.kind).count() == 1;
        let of = (!alone).then(|| (term.logits.clone(), term.labels.clone()));
        specs.push(MetricSpec { name: EvalMetric { kind: metric.kind, of }, part });
    }
    Ok(specs)
}

/// The rows whose label is among the first `k` classes.
fn first(b: &mut Builder<'_>, Hits { hits, count }: &Hits, k: usize) -> Part {
    let dims = b.graph.ty(*hits).shape.0.clone();
    let rank = dims.len();
    let mut hits = *hits;
    if k < dims[rank - 1] {
        let mut size = dims;
        size[rank - 1] = k;
        let op = Slice { start: vec![0; rank], size, step: vec![1; rank] };
        hits = b.add(Op::Slice(op), &[hits])?;
    }
    let sum = Reduce { f: ReduceFn::Sum, axes: vec![rank - 1], keep_dims: false };
    let rows = b.add(Op::Reduce(sum), &[hits])?;
    Ok((b.total(rows)?, *count))
}

impl Term {
    /// Compares the labels of rows with the `most` most likely classes.
    fn hits(&self, b: &mut Builder<'_>, x: ValueId, most: usize) -> Result<Hits, Diagnostic> {
        let axis = self.axis(b, x)?;
        let mut rows = b.graph.ty(x).shape.0.clone();
        let classes = rows.remove(axis);
        if most > classes {
            let message = format!("`metrics.report`: top_{most} of {classes} classes");
            return Err(Diagnostic::error(Code::OutputUnusable, message).at(&b.origin).help(
                format!("output `{}` has {classes} classes; choose a smaller K", self.logits),
            ));
        }
        let soft = self.soft_targets || self.kind == LossKind::Kl;
        let ty = b.graph.ty(x).clone();
        let logits = classes_last(b, x, axis)?;
        let mut column = rows.clone();
        column.push(1);
        let (labels, kept) = if soft {
            let targets = self.labels(b, ty.clone(), |found| found.dtype == ty.dtype)?;
            let targets = classes_last(b, targets, axis)?;
            let op = ArgReduce { axis: last(b, targets), largest: true, last: false };
            (b.add(Op::ArgReduce(op), &[targets])?, None)
        } else {
            let labels = self.class_labels(b, rows.clone())?;
            let ignored = b.graph.ty(labels).dtype;
            let ignored = Tensor::ints(ignored, Shape::scalar(), vec![self.ignore_index]);
            let ignored = b.constant(ignored)?;
            let kept = b.add(Op::Compare(CompareFn::Ne), &[labels, ignored])?;
            let kept = b.add(Op::Cast(Cast { to: DType::F32 }), &[kept])?;
            let mut labels = labels;
            if b.graph.ty(labels).dtype != DType::I64 {
                labels = b.add(Op::Cast(Cast { to: DType::I64 }), &[labels])?;
            }
            (b.add(Op::Reshape(Reshape { shape: Shape(column.clone()) }), &[labels])?, Some(kept))
        };
        let found = match most {
            1 => {
                let op = ArgReduce { axis: last(b, logits), largest: true, last: false };
                b.add(Op::ArgReduce(op), &[logits])?
            }
            _ => {
                let op = Op::TopK(TopK { axis: last(b, logits), k: most, largest: true });
                b.add_all(op, &[logits])?[1]
            }
        };
        let mut shape = rows.clone();
        shape.push(most);
        let wide = |b: &mut Builder<'_>, v| {
            if most == 1 {
                return Ok(v);
            }
            b.add(Op::Expand(Expand { shape: Shape(shape.clone()) }), &[v])
        };
        let labels = wide(b, labels)?;
        let hits = b.add(Op::Compare(CompareFn::Eq), &[found, labels])?;
        let mut hits = b.add(Op::Cast(Cast { to: DType::F32 }), &[hits])?;
        let count = match kept {
            Some(kept) => {
                let count = b.total(kept)?;
                let kept = b.add(Op::Reshape(Reshape { shape: Shape(column) }), &[kept])?;
                let kept = wide(b, kept)?;
                hits = b.add(Op::Binary(BinaryFn::Mul), &[hits, kept])?;
                count
            }
            None => {
                let sum = Reduce { f: ReduceFn::Sum, axes: vec![rows.len()], keep_dims: false };
                let rows = b.add(Op::Reduce(sum), &[hits])?;
                b.number_of(rows)?
            }
        };
        Ok(Hits { hits, count })
    }

    /// Elements whose logit agrees with their target.
    fn same_side(&self, b: &mut Builder<'_>, x: ValueId) -> Part {
        let ty = b.graph.ty(x).clone();
        let target = self.labels(b, ty.clone(), |found| found.dtype == ty.dtype)?;
        let (zero, half) = (b.number(x, 0.0)?, b.number(target, 0.5)?);
        let mut side = |v, limit| {
            let above = b.add(Op::Compare(CompareFn::Gt), &[v, limit])?;
            b.add(Op::Cast(Cast { to: DType::F32 }), &[above])
        };
        let (found, wanted) = (side(x, zero)?, side(target, half)?);
        let same = b.add(Op::Compare(CompareFn::Eq), &[found, wanted])?;
        let same = b.add(Op::Cast(Cast { to: DType::F32 }), &[same])?;
        Ok((b.total(same)?, b.number_of(same)?))
    }
}
