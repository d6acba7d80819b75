//! Rewrites softmax over an inner axis as softmax over the last axis between two transposes: kernels reduce contiguous rows, and the
//! rules then move the transposes to where they cost least.

use crate::canonicalize::sort;
use crate::pass::bug;
use crate::rule::Statement;
use frit_ir::ops::{LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad, Transpose};
use frit_ir::{Diagnostic, Graph, NodeId, Op, ValueId};
use std::collections::HashMap;

/// What the rewrite states.
pub(crate) const LAST_AXIS: Statement = Statement::bits(
    "softmax-over-last-axis",
    "softmax over an inner axis = transpose(softmax over the last axis(transpose(x))); likewise its logarithm and gradients",
    &[
        "<softmax|log_softmax>{axis=<0|1|2>}(x:f32[a,b,c,d])",
        "<softmax_grad|log_softmax_grad>{axis=<0|1>}(x:f32[a,b,c],y:f32[a,b,c])",
    ],
);

/// Rewrites every softmax, logarithm of one, and gradient of either. Whether there was one to rewrite.
pub(crate) fn over_last_axis(graph: &mut Graph) -> Result<bool, Diagnostic> {
    let mut replaced = HashMap::new();
    for id in graph.order().to_vec() {
        let (make, axis): (fn(usize) -> Op, usize) = match &graph.node(id).op {
            Op::Softmax(op) => (|axis| Op::Softmax(Softmax { axis }), op.axis),
            Op::LogSoftmax(op) => (|axis| Op::LogSoftmax(LogSoftmax { axis }), op.axis),
            Op::SoftmaxGrad(op) => (|axis| Op::SoftmaxGrad(SoftmaxGrad { axis }), op.axis),
            Op::LogSoftmaxGrad(op) => (|axis| Op::LogSoftmaxGrad(LogSoftmaxGrad { axis }), op.axis),
            _ => continue,
        };
        let y = graph.node(id).outputs[0];
        let sizes = graph.ty(y).shape.dims();
        if sizes[axis + 1..].iter().all(|&n| n == 1) {
            continue;
        }
        let rank = sizes.len();
        let inward: Vec<usize> = (0..rank).filter(|&i| i != axis).chain([axis]).collect();
        let outward: Vec<usize> = (0..axis).chain([rank - 1]).chain(axis..rank - 1).collect();
        let operands = graph.node(id).inputs.clone();
        let inner = |x| add(graph, id, transpose(&inward), &[x]);
        let operands: Vec<ValueId> = operands.into_iter().map(inner).collect::<Result<_, _>>()?;
        let rows = add(graph, id, make(rank - 1), &operands)?;
        replaced.insert(y, add(graph, id, transpose(&outward), &[rows])?);
    }
    if replaced.is_empty() {
        return Ok(false);
    }
    graph.substitute(&replaced);
    graph.remove_dead();
    sort(graph)?;
    Ok(true)
}

fn transpose(perm: &[usize]) -> Op {
    Op::Transpose(Transpose { perm: perm.into() })
}

/// Adds a node that stands for (part of) the node `id`.
fn add(graph: &mut Graph, id: NodeId, op: Op, inputs: &[ValueId]) -> Result<ValueId, Diagnostic> {
    let (origin, region) = (graph.node(id).origin.clone(), graph.node(id).region);
    graph.add1(op, inputs, origin, region).map_err(bug(super::INFO.name))
}
