//! Switches batch normalization to its running statistics.
//!
//! A batch normalization that keeps no statistics uses those of the batch in evaluation too.
//! Source: Ioffe and Szegedy 2015, §3.1.

use super::INFO;
use crate::pass::{PassContext, bug};
use frit_ir::ops::{BinaryFn, Cast, Constant, Reshape, UnaryFn};
use frit_ir::{
    Diagnostic, Graph, NodeId, Op, OutputKind, Region, Shape, Tensor, TensorType, ValueId,
};
use std::collections::{HashMap, HashSet};

pub(super) fn use_running_statistics(
    graph: &mut Graph,
    context: &mut PassContext,
) -> Result<(), Diagnostic> {
    let statistics = statistics(graph);
    let mut map = HashMap::new();
    for id in graph.order().to_vec() {
        if !matches!(graph.node(id).op, Op::BatchNorm(_)) {
            continue;
        }
        let origin = graph.node(id).origin.clone();
        if let (Some(mean), Some(var)) = (statistics.get(&(id, 1)), statistics.get(&(id, 2))) {
            let y = normalized(graph, id, *mean, *var)?;
            map.insert(graph.node(id).outputs[0], y);
            context.remark(&origin, "batch norm uses its running statistics");
        } else {
            context.remark(&origin, "batch norm keeps no statistics: it uses those of the batch");
        }
    }
    graph.substitute(&map);
    Ok(())
}

/// The leaf that each statistic (result 1 or 2) of a batch normalization is blended into.
fn statistics(graph: &Graph) -> HashMap<(NodeId, usize), ValueId> {
    let mut found = HashMap::new();
    for output in &graph.outputs {
        let OutputKind::Carry(leaf) = output.kind else { continue };
        let (mut open, mut seen) = (vec![output.value], HashSet::new());
        while let Some(value) = open.pop() {
            let node = graph.def(value);
            if matches!(node.op, Op::BatchNorm(_)) {
                let at = graph.value(value);
                found.insert((at.def, at.index), leaf);
            } else if seen.insert(value) {
                open.extend(&node.inputs);
            }
        }
    }
    found
}

/// `(x − mean) · scale / √(var + eps) + bias` of the node `id`, computed as `x · factor + shift`.
fn normalized(
    graph: &mut Graph,
    id: NodeId,
    mean: ValueId,
    var: ValueId,
) -> Result<ValueId, Diagnostic> {
    let node = graph.node(id).clone();
    let Op::BatchNorm(norm) = &node.op else { return Ok(node.outputs[0]) };
    let origin = node.origin.by(INFO.name);
    let (x, scale, bias) = (node.inputs[0], node.inputs[1], node.inputs[2]);
    let dtype = graph.ty(var).dtype;
    let mut add = |op: Op, inputs: &[ValueId]| {
        graph.add1(op, inputs, origin.clone(), Region::Forward).map_err(bug(INFO.name))
    };
    let eps = Tensor::splat(TensorType::scalar(dtype), norm.eps);
    let eps = add(Op::Constant(Constant { value: eps }), &[])?;
    let mut as_statistic = |v: ValueId| add(Op::Cast(Cast { to: dtype }), &[v]);
    let (scale, bias, mean) = (as_statistic(scale)?, as_statistic(bias)?, as_statistic(mean)?);
    let shifted = add(Op::Binary(BinaryFn::Add), &[var, eps])?;
    let rstd = add(Op::Unary(UnaryFn::Rsqrt), &[shifted])?;
    let factor = add(Op::Binary(BinaryFn::Mul), &[scale, rstd])?;
    let moved = add(Op::Binary(BinaryFn::Mul), &[mean, factor])?;
    let shift = add(Op::Binary(BinaryFn::Sub), &[bias, moved])?;
    let mut channels = vec![1; graph.ty(x).shape.rank() - 1];
    channels[0] = graph.ty(x).shape.dims()[1];
    let to = graph.ty(x).dtype;
    let per_channel = |graph: &mut Graph, v: ValueId| {
        let shape = Op::Reshape(Reshape { shape: Shape(channels.clone()) });
        let v = graph.add1(shape, &[v], origin.clone(), Region::Forward)?;
        graph.add1(Op::Cast(Cast { to }), &[v], origin.clone(), Region::Forward)
    };
    let factor = per_channel(graph, factor).map_err(bug(INFO.name))?;
    let shift = per_channel(graph, shift).map_err(bug(INFO.name))?;
    let mut add = |op: Op, inputs: &[ValueId]| {
        graph.add1(op, inputs, origin.clone(), Region::Forward).map_err(bug(INFO.name))
    };
    let y = add(Op::Binary(BinaryFn::Mul), &[x, factor])?;
    add(Op::Binary(BinaryFn::Add), &[y, shift])
}
