//! Cross-entropy of logits whose class axis is cut: it reads the uncut rows and leaves their further columns out, so that neither
//! the logits nor their gradient are copied.

use super::{Rewrite, Rewritten, Rule, add};
use crate::rule::Statement;
use frit_ir::ops::{BinaryFn, CrossEntropy, Pad, Slice};
use frit_ir::{Graph, GraphError, NodeId, Op, ValueId};

/// Rules about cross-entropies.
pub(super) const RULES: &[Rule] = &[Rule {
    statement: Statement::bits(
        "loss-of-first-columns",
        "cross_entropy(slice(x)) = cross_entropy{classes}(x) if the slice has the first columns",
        &[
            "cross_entropy{ignore_index=-100}(slice{start=[0,0],size=[a,b],step=[1,1]}(x:f32[a,c]),l:i64[a])",
            "cross_entropy{ignore_index=-100,classes=a}(slice{start=[d,0],size=[a,b],step=[-1,1]}(x:f32[e,c]),l:i64[a])",
        ],
    ),
    apply: simplify,
}];

/// The rule that [`read_padded_logits`] applies before.
pub(crate) const BIAS: Statement = Statement::bits(
    "bias-before-cut",
    "cross_entropy(slice(x) + bias) = cross_entropy(slice(x + pad(bias))), with any number of additions and casts",
    &[
        "cross_entropy{ignore_index=-100}(add(slice{start=[0,0],size=[a,b],step=[1,1]}(x:f32[a,c]),y:f32[<b|1,b>]),l:i64[a])",
        "cross_entropy{ignore_index=-100}(cast{to=\"f32\"}(add(y:f16[b],slice{start=[0,0],size=[a,b],step=[1,1]}(x:f16[a,c]))),l:i64[a])",
    ],
);

/// `cross_entropy(slice(x))` → `cross_entropy {classes}(x)` where the slice has the first columns of `x`.
fn simplify(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let Op::CrossEntropy(CrossEntropy { ignore_index, classes }) = node.op else {
        return Ok(Rewrite::None);
    };
    let cut = graph.def(node.inputs[0]);
    let Op::Slice(slice) = &cut.op else { return Ok(Rewrite::None) };
    let (x, last) = (cut.inputs[0], slice.size.len() - 1);
    let shape = graph.ty(x).shape.clone();
    if slice.start[last] != 0 || slice.step[last] != 1 || slice.size[last] == shape.0[last] {
        return Ok(Rewrite::None);
    }
    let classes = Some(classes.unwrap_or(slice.size[last]));
    // The cut of other axes stays.
    let rest = Slice {
        size: slice.size[..last].iter().chain([&shape.0[last]]).copied().collect(),
        ..slice.clone()
    };
    let logits = match rest.size == shape.0 && rest.step.iter().all(|step| *step == 1) {
        true => x,
        false => add(graph, id, Op::Slice(rest), &[x])?,
    };
    let node = graph.node_mut(id);
    node.op = Op::CrossEntropy(CrossEntropy { ignore_index, classes });
    node.inputs[0] = logits;
    Ok(Rewrite::Edited)
}

/// `cross_entropy(slice(x) + bias)` → `cross_entropy(slice(x + pad(bias)))`, with any number of additions and casts.
///
/// The additional columns are finite, so their gradient, zero, stays zero.
pub(crate) fn move_cut_behind_bias(graph: &mut Graph, id: NodeId) -> Result<(), GraphError> {
    if !matches!(graph.node(id).op, Op::CrossEntropy(_)) {
        return Ok(());
    }
    let users = graph.users();
    // The casts of a model's outputs are not part of a training step.
    let is_computed = |reader: &&NodeId| {
        let node = graph.node(**reader);
        !matches!(node.op, Op::Cast(_)) || !users[node.outputs[0].0 as usize].is_empty()
    };
    let once: Vec<bool> =
        users.iter().map(|readers| readers.iter().filter(is_computed).count() == 1).collect();
    let is_read_once = |value: ValueId| once[value.0 as usize];
    // From the logits to the cut.
    let (mut at, mut chain) = (graph.node(id).inputs[0], Vec::new());
    while is_read_once(at) {
        let node = graph.def(at);
        let next = match &node.op {
            Op::Cast(_) => Some(node.inputs[0]),
            Op::Binary(BinaryFn::Add) => {
                let classes = graph.ty(at).shape.0.last().copied();
                let is_bias = |v: &ValueId| {
                    let shape = &graph.ty(*v).shape;
                    shape.0.last().copied() == classes && Some(shape.numel()) == classes
                };
                match (is_bias(&node.inputs[0]), is_bias(&node.inputs[1])) {
                    (true, false) => Some(node.inputs[1]),
                    (false, true) => Some(node.inputs[0]),
                    _ => None,
                }
            }
            _ => None,
        };
        let Some(next) = next else { break };
        chain.push((graph.value(at).def, next));
        at = next;
    }
    let Op::Slice(cut) = graph.def(at).op.clone() else { return Ok(()) };
    let last = cut.size.len() - 1;
    let whole = graph.def(at).inputs[0];
    let columns = graph.ty(whole).shape.0[last];
    let rows_stay = graph.ty(whole).shape.0[..last] == cut.size[..last]
        && cut.step.iter().all(|step| *step == 1);
    if chain.is_empty() || !rows_stay || cut.start[last] != 0 || !is_read_once(at) {
        return Ok(());
    }
    let mut moved = whole;
    for (node_id, read) in chain.into_iter().rev() {
        let node = graph.node(node_id).clone();
        let mut inputs = node.inputs.clone();
        for input in &mut inputs {
            if *input == read {
                *input = moved;
                continue;
            }
            let rank = graph.ty(*input).shape.rank();
            let mut high = vec![0; rank];
            high[rank - 1] = columns - cut.size[last];
            let pad = Pad { low: vec![0; rank], high, value: 0.0 };
            *input = add(graph, node_id, Op::Pad(pad), &[*input])?;
        }
        moved = add(graph, node_id, node.op, &inputs)?;
    }
    let logits = add(graph, id, Op::Slice(cut), &[moved])?;
    graph.node_mut(id).inputs[0] = logits;
    Ok(())
}

/// Applies the rules to all cross-entropies; the order of nodes and dead ones are left to the caller.
pub(crate) fn read_padded_logits(graph: &mut Graph) -> Result<(), GraphError> {
    for id in graph.order().to_vec() {
        move_cut_behind_bias(graph, id)?;
        simplify(graph, id)?;
    }
    Ok(())
}
