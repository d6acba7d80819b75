//! The lemmas: for each operation, the cotangents of its operands from those of its results.
//!
//! Here is the table; a lemma of more than a line is in the file of its family. Where several formulas are equal over the reals,
//! a lemma has the one in which a gradient operation of the graph says it.

mod attention;
mod conv;
mod index;
mod layout;
mod matmul;
mod norm;
mod pointwise;
mod reduce;
mod scatter;

use super::term::Term;
use super::{Cotangents, Site};
use frit_ir::ops::{CrossEntropyGrad, CumSum, LogSoftmaxGrad, Op, ReduceKind, SoftmaxGrad};

/// The lemma of an operation, if there is one for these cotangents.
pub(super) fn cotangents<'w>(op: &Op, at: &Site<'w>) -> Option<Cotangents<'w>> {
    if let Op::Split(op) = op {
        return Some(layout::split(op, at));
    }
    // The results after the first are indices, or statistics for gradient operations.
    let &[Some(dy), ref statistics @ ..] = &at.dy[..] else { return None };
    if statistics.iter().any(Option::is_some) {
        return None;
    }
    let (x, y) = (&at.x, &at.y);
    let one = |dx: Term<'w>| vec![Some(dx)];
    Some(match op {
        // The same elements, of another type or in more places.
        Op::Cast(_) | Op::EnterPrecision(_) | Op::LeavePrecision(_) | Op::Expand(_) => one(dy),
        Op::Unary(f) => pointwise::unary(*f, at, dy),
        Op::Clip(op) => pointwise::clip(op, at, dy),
        Op::Binary(f) => return pointwise::binary(*f, at, dy),
        Op::Select => pointwise::select(at, dy),

        Op::Reshape(_) => one(dy.reshape(x[0].dims())),
        Op::Transpose(op) => layout::transpose(op, dy),
        Op::Slice(op) => layout::slice(op, at, dy),
        Op::Pad(op) => one(dy.part(op.low.clone(), x[0].dims())),
        Op::Concat(op) => layout::concat(op, at, dy),

        Op::Embedding(op) => index::embedding(op, at, dy),
        Op::Gather(op) => index::gather(op, at, dy),
        Op::GatherElements(op) => index::gather_elements(op, at, dy),
        Op::GatherNd(op) => scatter::gather_nd(op, at, dy),
        Op::TopK(op) => scatter::top_k(op, at, dy),
        Op::ScatterElements(op) => scatter::scatter_elements(op, at, dy),
        Op::ScatterNd(op) => scatter::scatter_nd(op, at, dy),

        Op::Reduce(op) => reduce::reduce(op, at, dy),
        Op::SumTo(_) => one(dy.expand(x[0].dims())),
        Op::CumSum(op) => {
            one(Term::of(Op::CumSum(CumSum { reverse: !op.reverse, ..op.clone() }), &[dy]))
        }
        // The loss is the mean of those of the ranks, which all read the mean.
        Op::AllReduce(op) if op.reduce == ReduceKind::Mean && op.unit.is_none() => {
            one(Term::of(Op::AllReduce(op.clone()), &[dy]))
        }

        Op::MatMul(op) => matmul::matmul(op, at, dy),
        Op::Conv(op) => conv::conv(op, at, dy),
        Op::ConvGradInput(op) => conv::conv_grad_input(op, at, dy),
        Op::MaxPool(op) => conv::max_pool(op, at, dy),
        Op::SumPool(op) => conv::sum_pool(op, at, dy),
        Op::BatchNorm(op) => norm::batch_norm(op, at, dy),
        Op::LayerNorm(op) => norm::layer_norm(op, at, dy),
        Op::RmsNorm(op) => norm::rms_norm(op, at, dy),
        Op::Attention(op) => attention::attention(op, at, dy),

        Op::Softmax(op) => {
            one(Term::of(Op::SoftmaxGrad(SoftmaxGrad { axis: op.axis }), &[dy, y[0]]))
        }
        Op::LogSoftmax(op) => {
            one(Term::of(Op::LogSoftmaxGrad(LogSoftmaxGrad { axis: op.axis }), &[dy, y[0]]))
        }
        Op::CrossEntropy(op) => {
            let grad = CrossEntropyGrad { ignore_index: op.ignore_index, classes: op.classes };
            one(Term::of(Op::CrossEntropyGrad(grad), &[dy, x[0], x[1], y[1]]))
        }
        _ => return None,
    })
}
