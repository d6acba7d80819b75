//! Gradient rules, one file per operation family.
//!
//! A rule maps the cotangents of a node's results to those of its operands. It adds no node for an
//! operand whose cotangent is not wanted.

mod attention;
mod conv;
mod index;
mod layout;
mod loss;
mod matmul;
mod norm;
mod pointwise;
mod reduce;
mod scatter;

use super::builder::{Builder, Gradients, Rule, RuleError};
use frit_ir::ops::{GatherElements, GatherNd, Op, ScatterElements, ScatterNd};
use frit_ir::{Node, ValueId};

/// The cotangents of the operands of `node`.
pub(super) fn vjp(b: &mut Builder<'_>, node: &Node, dys: &[Option<ValueId>]) -> Gradients {
    let x = &node.inputs;
    match &node.op {
        Op::Split(op) => layout::split(b, op, node, dys),
        Op::TopK(op) => match dys[0] {
            Some(dy) => scatter::top_k(b, op, x, node.outputs[1], dy),
            None => Ok(vec![None]),
        },
        Op::LayerNorm(op) => {
            layer_result(node, dys).and_then(|dy| norm::layer_norm(b, op, x, &node.outputs, dy))
        }
        Op::RmsNorm(op) => {
            layer_result(node, dys).and_then(|dy| norm::rms_norm(b, op, x, &node.outputs, dy))
        }
        Op::BatchNorm(op) => {
            layer_result(node, dys).and_then(|dy| conv::batch_norm(b, op, x, &node.outputs, dy))
        }
        Op::Attention(op) => {
            layer_result(node, dys).and_then(|dy| attention::attention(b, op, x, &node.outputs, dy))
        }
        Op::CrossEntropy(op) => {
            layer_result(node, dys).and_then(|dy| loss::cross_entropy(b, op, x, &node.outputs, dy))
        }
        _ => {
            let Some(dy) = dys[0] else { return Ok(vec![None; x.len()]) };
            single(b, node, dy)
        }
    }
}

/// Rules of operations with one result.
fn single(b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
    let (x, y) = (&node.inputs, node.outputs[0]);
    match &node.op {
        Op::Unary(f) => pointwise::unary(b, *f, x[0], y, dy),
        Op::Cast(_) => pointwise::cast(b, x[0], dy),
        Op::Clip(op) => pointwise::clip(b, op, x[0], dy),
        Op::Binary(f) => pointwise::binary(b, *f, x, y, dy),
        Op::Select => pointwise::select(b, x, dy),
        Op::Reshape(_) => layout::reshape(b, x[0], dy),
        Op::Transpose(op) => layout::transpose(b, op, dy),
        Op::Expand(_) => layout::expand(b, x[0], dy),
        Op::Slice(op) => layout::slice(b, op, x[0], dy),
        Op::Concat(op) => layout::concat(b, op, x, dy),
        Op::Pad(op) => layout::pad(b, op, x[0], dy),
        Op::Embedding(op) => index::embedding(b, op, x, dy),
        Op::Gather(op) => index::gather(b, op, x, dy),
        Op::GatherElements(op) => index::gather_elements(b, op, x, dy),
        Op::GatherNd(op) => scatter::gather_nd(b, op, x, dy),
        Op::ScatterElements(op) => {
            let gather = Op::GatherElements(GatherElements { axis: op.axis });
            let scatter = |f| Op::ScatterElements(ScatterElements { axis: op.axis, f });
            scatter::scatter(b, op.f, (gather, &scatter), x, y, dy)
        }
        Op::ScatterNd(op) => {
            let batch_dims = op.batch_dims;
            let gather = Op::GatherNd(GatherNd { batch_dims });
            let scatter = |f| Op::ScatterNd(ScatterNd { batch_dims, f });
            scatter::scatter(b, op.f, (gather, &scatter), x, y, dy)
        }
        Op::CumSum(op) => index::cum_sum(b, op, dy),
        Op::AllReduce(op) => reduce::mean_over_ranks(b, op, dy),
        Op::Reduce(op) => reduce::reduce(b, op, x[0], y, dy),
        Op::SumTo(_) => reduce::sum_to(b, x[0], dy),
        Op::MatMul(op) => matmul::matmul(b, op, x, dy),
        Op::Conv(op) => conv::conv(b, op, x, dy),
        Op::ConvGradInput(op) => conv::conv_transposed(b, op, x, dy),
        Op::MaxPool(op) => conv::max_pool(b, op, x[0], dy),
        Op::SumPool(op) => conv::sum_pool(b, op, x[0], dy),
        Op::Softmax(op) => reduce::softmax(b, Op::SoftmaxGrad(op.clone()), y, dy),
        Op::LogSoftmax(op) => reduce::softmax(b, Op::LogSoftmaxGrad(op.clone()), y, dy),
        other => Err(unsupported(format!("`{}`", other.name()))),
    }
}

/// The cotangent of the first result, where the others are statistics that have no rule.
fn layer_result(node: &Node, dys: &[Option<ValueId>]) -> Rule<ValueId> {
    match (dys[0], dys[1..].iter().all(Option::is_none)) {
        (Some(dy), true) => Ok(dy),
        _ => Err(unsupported(format!("the statistics of `{}`", node.op.name()))),
    }
}

fn unsupported(what: impl Into<String>) -> RuleError {
    RuleError::Unsupported(what.into())
}
