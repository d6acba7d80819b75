//! Replaces many slices that share out an axis by one split.
//!
//! Loops that an exporter unrolled read a step of their operand each. The gradient of a slice is as large as its operand, so those of n
//! slices would take n times the operand to write and to add; the gradient of a split is one concatenation.

use super::{Rewrite, Rewritten, Rule};
use crate::rule::Statement;
use frit_ir::ops::{Slice, Split};
use frit_ir::{Graph, Node, NodeId, Op, ValueId};

/// The fewest slices that are replaced: gradients of a few are padded where they are added.
const MANY: usize = 8;

/// The rule about slices.
pub(super) const RULES: &[Rule] = &[Rule {
    statement: Statement::bits(
        "slices-share-out-an-axis",
        "slice(x) = a part of split(x) if eight or more slices share out an axis of x",
        &[
            "i=slice{start=[0,1],size=[a,1],step=[1,1]}(x:f32[a,8]);j=slice{start=[0,2],size=[a,1],step=[1,1]}(x:f32[a,8]);k=slice{start=[0,3],size=[a,1],step=[1,1]}(x:f32[a,8]);l=slice{start=[0,4],size=[a,1],step=[1,1]}(x:f32[a,8]);m=slice{start=[0,5],size=[a,1],step=[1,1]}(x:f32[a,8]);n=slice{start=[0,6],size=[a,1],step=[1,1]}(x:f32[a,8]);o=slice{start=[0,7],size=[a,1],step=[1,1]}(x:f32[a,8]);slice{start=[0,0],size=[a,1],step=[1,1]}(x:f32[a,8])",
            "i=slice{start=[0,0],size=[1,b],step=[1,1]}(x:f32[8,b]);j=slice{start=[1,0],size=[1,b],step=[1,1]}(x:f32[8,b]);k=slice{start=[2,0],size=[1,b],step=[1,1]}(x:f32[8,b]);l=slice{start=[3,0],size=[1,b],step=[1,1]}(x:f32[8,b]);m=slice{start=[4,0],size=[1,b],step=[1,1]}(x:f32[8,b]);n=slice{start=[6,0],size=[1,b],step=[1,1]}(x:f32[8,b]);o=slice{start=[7,0],size=[1,b],step=[1,1]}(x:f32[8,b]);slice{start=[5,0],size=[1,b],step=[1,1]}(x:f32[8,b])",
            "i=slice{start=[0,0],size=[a,2],step=[1,1]}(x:f32[a,17]);j=slice{start=[0,2],size=[a,2],step=[1,1]}(x:f32[a,17]);k=slice{start=[0,4],size=[a,2],step=[1,1]}(x:f32[a,17]);l=slice{start=[0,6],size=[a,2],step=[1,1]}(x:f32[a,17]);m=slice{start=[0,8],size=[a,2],step=[1,1]}(x:f32[a,17]);n=slice{start=[0,10],size=[a,2],step=[1,1]}(x:f32[a,17]);o=slice{start=[0,12],size=[a,2],step=[1,1]}(x:f32[a,17]);p=slice{start=[0,14],size=[a,1],step=[1,1]}(x:f32[a,17]);slice{start=[0,15],size=[a,2],step=[1,1]}(x:f32[a,17])",
        ],
    ),
    apply: to_split,
}];

fn to_split(graph: &mut Graph, id: NodeId) -> Rewritten {
    let Some((axis, _)) = part(graph, graph.node(id)) else { return Ok(Rewrite::None) };
    let x = graph.node(id).inputs[0];
    let mut parts: Vec<(std::ops::Range<usize>, NodeId)> = Vec::new();
    for (other, node) in graph.nodes().filter(|(_, node)| node.inputs.first() == Some(&x)) {
        if let Some((of, range)) = part(graph, node)
            && of == axis
        {
            parts.push((range, other));
        }
    }
    parts.sort_by_key(|(range, _)| range.start);
    let meet = parts.windows(2).all(|pair| pair[0].0.end == pair[1].0.start);
    let ends =
        [parts.first().map(|(range, _)| range.start), parts.last().map(|(range, _)| range.end)];
    if parts.len() < MANY || !meet || ends != [Some(0), Some(graph.ty(x).shape.dims()[axis])] {
        return Ok(Rewrite::None);
    }
    let sizes = parts.iter().map(|(range, _)| range.len()).collect();
    let node = graph.node(id);
    let (origin, region) = (node.origin.clone(), node.region);
    let outputs = graph.add(Op::Split(Split { axis, sizes }), &[x], origin, region)?;
    let mut found = None;
    for (&output, &(_, other)) in outputs.iter().zip(&parts) {
        if other == id {
            found = Some(output);
        } else {
            read_whole(graph, other, output)?;
        }
    }
    Ok(found.into())
}

/// The axis of which a slice has a small part, and all of the others, and the part.
fn part(graph: &Graph, node: &Node) -> Option<(usize, std::ops::Range<usize>)> {
    let Op::Slice(op) = &node.op else { return None };
    let dims = graph.ty(node.inputs[0]).shape.dims();
    let mut cut = (0..dims.len()).filter(|&axis| op.size[axis] != dims[axis]);
    let axis = cut.next()?;
    let (start, size) = (op.start[axis], op.size[axis]);
    let is_part = cut.next().is_none() && op.step.iter().all(|step| *step == 1);
    (is_part && size > 0 && size * MANY <= dims[axis]).then(|| (axis, start..start + size))
}

/// Makes a slice one of all of a value.
fn read_whole(graph: &mut Graph, id: NodeId, of: ValueId) -> Result<(), frit_ir::GraphError> {
    let size = graph.ty(of).shape.dims().to_vec();
    let rank = size.len();
    let node = graph.node_mut(id);
    node.op = Op::Slice(Slice { start: vec![0; rank], size, step: vec![1; rank] });
    graph.set_inputs(id, vec![of])
}
