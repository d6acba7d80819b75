//! What training minimizes.
//!
//! A loss is a sum over elements and their number, so that sums over micro-steps and ranks divided by numbers over all of them are the
//! mean over all elements. With `x` the output, `t` the target, `p` the softmax of `x` over the classes, `C` classes:
//!
//! | loss | element | sum over |
//! |---|---|---|
//! | cross_entropy | −ln p of the label | rows whose label is not ignored |
//! | cross_entropy of probabilities | −Σ t·ln p over the classes | rows |
//! | kl | Σ t·(ln t − ln p) over the classes, 0 where t = 0 | rows |
//! | mse | (x − t)² | elements |
//! | l1 | \|x − t\| | elements |
//! | smooth_l1 | (x − t)²/(2β) where \|x − t\| < β, else \|x − t\| − β/2 | elements |
//! | bce_with_logits | ln(1 + eˣ) − x·t | elements |
//! | output | x | the one element |
//!
//! Smoothing ε replaces the probabilities t of a cross-entropy, for an index 1 at its class and 0 elsewhere, by (1 − ε)·t + ε/C.

use super::writer::{Stated, Writer};
use crate::unstated::Unstated;
use frit_ir::ops::{
    AllReduce, BinaryFn, CompareFn, CrossEntropy, Input, LogSoftmax, ReduceFn, ReduceKind,
    Transpose, UnaryFn,
};
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, Shape, Tensor, TensorType, ValueId};

/// Which loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossKind {
    /// Cross-entropy of class indices.
    CrossEntropy {
        /// The label of rows that do not count.
        ignore_index: i64,
        /// ε.
        smoothing: f64,
    },
    /// Cross-entropy of probabilities.
    SoftCrossEntropy {
        /// ε.
        smoothing: f64,
    },
    /// Kullback-Leibler divergence of the softmax from probabilities.
    Kl,
    /// Squared difference.
    Mse,
    /// Absolute difference.
    L1,
    /// Squared difference where it is small, else absolute.
    SmoothL1 {
        /// β.
        beta: f64,
    },
    /// Binary cross-entropy of the sigmoid with probabilities.
    BceWithLogits,
    /// The output itself.
    Output,
}

/// One loss of the sum that training minimizes.
#[derive(Clone, Debug, PartialEq)]
pub struct LossTerm {
    /// Which loss.
    pub kind: LossKind,
    /// Its factor in the sum.
    pub weight: f64,
    /// Name of the model's output; a model of one output has it under any name.
    pub output: String,
    /// Name of the input of labels or targets.
    pub labels: String,
    /// Axis of the classes, from the end if negative. If absent it is the last, or axis 1 if the model has an input of labels that fits
    /// only that.
    pub class_axis: Option<i64>,
}

/// A model with its loss, compiled for this number of ranks: the same graph with the outputs `LossSum` and `LossCount`.
///
/// Of one loss, and of cross-entropies of the same class indices, these are Σ weight · sum and the number of elements. Otherwise
/// `LossSum` is Σ weight · N · sum / number, the numbers of all N ranks together, whose mean over ranks is the sum of weighted means, and
/// `LossCount` is 1.
///
/// # Errors
/// If the model has no such output, or it has not the shape that the loss needs.
pub fn with_loss(model: &Graph, terms: &[LossTerm], ranks: usize) -> Result<Graph, Unstated> {
    let mut w = Writer::of(model, Region::Forward);
    let parts: Vec<[ValueId; 2]> =
        terms.iter().map(|term| term.sum_and_number(&mut w)).collect::<Result<_, _>>()?;
    let Some(&[_, number]) = parts.first() else { return Ok(w.graph) };
    let ignored = |term: &LossTerm| match term.kind {
        LossKind::CrossEntropy { ignore_index, .. } => Some((term.labels.clone(), ignore_index)),
        _ => None,
    };
    let first = ignored(&terms[0]);
    let is_one = terms.len() == 1 || first.is_some() && terms.iter().all(|t| ignored(t) == first);
    let weighted: Vec<Stated> = (terms.iter().zip(parts))
        .map(|(term, part)| match is_one {
            true => w.with(BinaryFn::Mul, part[0], term.weight),
            false => weighted_mean(&mut w, part, term.weight, ranks),
        })
        .collect();
    let sum = weighted.into_iter().reduce(|a, b| w.binary(BinaryFn::Add, a?, b?));
    let sum = sum.ok_or_else(|| unstated("there is none"))??;
    let number = if is_one { number } else { w.constant(Tensor::scalar(1.0))? };
    w.graph.add_output("loss_sum", sum, OutputKind::LossSum);
    w.graph.add_output("loss_count", number, OutputKind::LossCount);
    Ok(w.graph)
}

/// This rank's part of a loss times its factor: `weight · N · sum / number over all ranks`.
fn weighted_mean(w: &mut Writer, [sum, number]: [ValueId; 2], weight: f64, ranks: usize) -> Stated {
    // Every rank has as many, if the number is known.
    if let Some(number) = w.graph.constant(number).map(|n| n.to_f64s()[0]) {
        return w.with(BinaryFn::Mul, sum, weight / number);
    }
    let everywhere = AllReduce { reduce: ReduceKind::Sum, unit: None, dtype: None };
    let all = if ranks == 1 { number } else { w.one(Op::AllReduce(everywhere), &[number])? };
    // The sum over no elements is zero.
    let one = w.number(all, 1.0)?;
    let all = w.binary(BinaryFn::Max, all, one)?;
    let sum = w.with(BinaryFn::Mul, sum, weight * ranks as f64)?;
    w.binary(BinaryFn::Div, sum, all)
}

impl LossTerm {
    fn sum_and_number(&self, w: &mut Writer) -> Result<[ValueId; 2], Unstated> {
        let x = self.output(&w.graph)?;
        let elements = match self.kind {
            LossKind::CrossEntropy { ignore_index, smoothing } => {
                return self.of_indices(w, x, ignore_index, smoothing);
            }
            LossKind::Output => w.reshape(x, Shape::scalar())?,
            LossKind::SoftCrossEntropy { .. } | LossKind::Kl => self.of_probabilities(w, x)?,
            LossKind::Mse | LossKind::L1 | LossKind::SmoothL1 { .. } | LossKind::BceWithLogits => {
                let t = self.labels(w, w.graph.ty(x).clone())?;
                self.of_targets(w, x, t)?
            }
        };
        let number = Tensor::scalar(w.shape(elements).numel() as f64);
        Ok([w.sum(elements)?, w.constant(number)?])
    }

    fn of_targets(&self, w: &mut Writer, x: ValueId, t: ValueId) -> Stated {
        if self.kind == LossKind::BceWithLogits {
            let log = w.unary(UnaryFn::Softplus, x)?;
            let product = w.binary(BinaryFn::Mul, x, t)?;
            return w.binary(BinaryFn::Sub, log, product);
        }
        let d = w.binary(BinaryFn::Sub, x, t)?;
        let square = w.binary(BinaryFn::Mul, d, d)?;
        let size = w.unary(UnaryFn::Abs, d)?;
        match self.kind {
            LossKind::Mse => Ok(square),
            LossKind::SmoothL1 { beta } => {
                let limit = w.number(x, beta)?;
                let small = w.one(Op::Compare(CompareFn::Lt), &[size, limit])?;
                let quadratic = w.with(BinaryFn::Mul, square, 0.5 / beta)?;
                let linear = w.with(BinaryFn::Sub, size, 0.5 * beta)?;
                w.one(Op::Select, &[small, quadratic, linear])
            }
            _ => Ok(size),
        }
    }

    /// Per row, of probabilities of all classes.
    fn of_probabilities(&self, w: &mut Writer, x: ValueId) -> Stated {
        let axis = self.axis(&w.graph, x)?;
        let t = self.labels(w, w.graph.ty(x).clone())?;
        let (mut t, x) = (last(w, t, axis)?, last(w, x, axis)?);
        let classes = w.shape(x).rank() - 1;
        let log = w.one(Op::LogSoftmax(LogSoftmax { axis: classes }), &[x])?;
        let terms = match self.kind {
            LossKind::SoftCrossEntropy { smoothing } => {
                if smoothing != 0.0 {
                    let n = w.shape(x).dims()[classes] as f64;
                    t = w.with(BinaryFn::Mul, t, 1.0 - smoothing)?;
                    t = w.with(BinaryFn::Add, t, smoothing / n)?;
                }
                let product = w.binary(BinaryFn::Mul, t, log)?;
                w.unary(UnaryFn::Neg, product)?
            }
            _ => {
                let zero = w.number(t, 0.0)?;
                let positive = w.one(Op::Compare(CompareFn::Gt), &[t, zero])?;
                let own = w.unary(UnaryFn::Log, t)?;
                let difference = w.binary(BinaryFn::Sub, own, log)?;
                let product = w.binary(BinaryFn::Mul, t, difference)?;
                w.one(Op::Select, &[positive, product, zero])?
            }
        };
        w.reduce(ReduceFn::Sum, terms, vec![classes])
    }

    /// Of class indices: smoothed, (1 − ε) times that of the label and ε times the mean over all classes.
    fn of_indices(
        &self,
        w: &mut Writer,
        x: ValueId,
        ignore_index: i64,
        smoothing: f64,
    ) -> Result<[ValueId; 2], Unstated> {
        let axis = self.axis(&w.graph, x)?;
        let mut rows = w.shape(x).0.clone();
        rows.remove(axis);
        let labels = self.labels(w, TensorType::new(DType::I64, rows))?;
        let x = last(w, x, axis)?;
        let ignored = Tensor::ints(w.dtype(labels), Shape::scalar(), vec![ignore_index]);
        let ignored = w.constant(ignored)?;
        let counts = w.one(Op::Compare(CompareFn::Ne), &[labels, ignored])?;
        let own = CrossEntropy::ignoring(ignore_index);
        let mut losses = w.one(Op::CrossEntropy(own), &[x, labels])?;
        if smoothing != 0.0 {
            let classes = w.shape(x).rank() - 1;
            let log = w.one(Op::LogSoftmax(LogSoftmax { axis: classes }), &[x])?;
            let mean = w.reduce(ReduceFn::Mean, log, vec![classes])?;
            let spread = w.with(BinaryFn::Mul, mean, -smoothing)?;
            let zero = w.number(spread, 0.0)?;
            let spread = w.one(Op::Select, &[counts, spread, zero])?;
            losses = w.with(BinaryFn::Mul, losses, 1.0 - smoothing)?;
            losses = w.binary(BinaryFn::Add, losses, spread)?;
        }
        let counts = w.cast(counts, DType::F32)?;
        Ok([w.sum(losses)?, w.sum(counts)?])
    }

    fn output(&self, graph: &Graph) -> Stated {
        let results: Vec<_> =
            graph.outputs.iter().filter(|o| o.kind == OutputKind::Result).collect();
        let found = results.iter().find(|o| o.name == self.output);
        let only = results.first().filter(|_| results.len() == 1);
        let missing = || unstated(format!("the model has no output `{}`", self.output));
        Ok(found.or(only).ok_or_else(missing)?.value)
    }

    /// The model's own input of this name, else a new one.
    fn labels(&self, w: &mut Writer, ty: TensorType) -> Stated {
        match input(&w.graph, &self.labels) {
            Some(own) if *w.shape(own) != ty.shape => {
                let (found, needed) = (w.shape(own), ty.shape);
                Err(unstated(format!("`{}` has shape {found}, not {needed}", self.labels)))
            }
            Some(own) => Ok(own),
            None => w.one(Op::Input(Input { name: self.labels.clone(), ty }), &[]),
        }
    }

    fn axis(&self, graph: &Graph, x: ValueId) -> Result<usize, Unstated> {
        let shape = &graph.ty(x).shape;
        let rank = shape.rank();
        let labels = input(graph, &self.labels).map(|labels| &graph.ty(labels).shape);
        let fits = |axis: usize| {
            let mut rows = shape.0.clone();
            rows.remove(axis);
            labels.is_some_and(|labels| labels.0 == rows)
        };
        let axis = match self.class_axis {
            Some(axis) if axis < 0 => rank.checked_add_signed(axis as isize),
            Some(axis) => usize::try_from(axis).ok(),
            None if rank > 2 && fits(1) => (!fits(rank - 1)).then_some(1),
            None => rank.checked_sub(1),
        };
        let missing = || unstated(format!("`{}` {shape} has no such class axis", self.output));
        axis.filter(|axis| *axis < rank).ok_or_else(missing)
    }
}

fn unstated(reason: impl Into<String>) -> Unstated {
    Unstated::new("loss", &Origin::none(), reason)
}

fn input(graph: &Graph, name: &str) -> Option<ValueId> {
    graph.nodes().find_map(|(_, node)| match &node.op {
        Op::Input(input) if input.name == name => Some(node.outputs[0]),
        _ => None,
    })
}

/// With this axis behind all others.
fn last(w: &mut Writer, x: ValueId, axis: usize) -> Stated {
    let rank = w.shape(x).rank();
    let perm: Vec<usize> = (0..rank).filter(|i| *i != axis).chain([axis]).collect();
    if axis + 1 == rank { Ok(x) } else { w.one(Op::Transpose(Transpose { perm }), &[x]) }
}
