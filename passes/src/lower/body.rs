//! Kernel bodies: small graphs without names, origins and regions, so that equal work has equal text and is compiled once.

use super::internal;
use frit_ir::ops::Input;
use frit_ir::plan::Place;
use frit_ir::{Diagnostic, Graph, Node, Op, Origin, OutputKind, Region, TensorType, ValueId};
use std::collections::HashMap;

/// The body of a node and the values it reads. If `inlined`, constants with equal elements become part of it, and a
/// value that is read twice is one operand; otherwise every operand is separate.
pub(super) fn of_node(
    graph: &Graph,
    node: &Node,
    inlined: bool,
) -> Result<(Graph, Vec<ValueId>), Diagnostic> {
    let mut body = Graph::new("kernel");
    let mut operands = Vec::new();
    let mut inputs = Vec::new();
    for &value in &node.inputs {
        let splat = graph.constant(value).filter(|c| inlined && c.as_splat().is_some());
        if let Some(constant) = splat {
            let op = Op::Constant(frit_ir::ops::Constant { value: constant.clone() });
            inputs.push(add(&mut body, op, &[])?[0]);
            continue;
        }
        let ty = graph.ty(value).clone();
        let known = operands.iter().position(|v| inlined && *v == value);
        let input = match known {
            // The same value read twice is one operand.
            Some(i) => nth_input(&body, i),
            None => {
                operands.push(value);
                add(&mut body, input(operands.len() - 1, ty), &[])?[0]
            }
        };
        inputs.push(input);
    }
    let results = match &node.op {
        Op::Fusion(fusion) => inline(&mut body, &fusion.body, &inputs)?,
        op => add(&mut body, op.clone(), &inputs)?,
    };
    for (i, result) in results.into_iter().enumerate() {
        body.add_output(&i.to_string(), result, OutputKind::Result);
    }
    Ok((body, operands))
}

/// The body of one operation on operands of these types.
pub(super) fn of_op(op: Op, operands: &[TensorType]) -> Result<Graph, Diagnostic> {
    let mut body = Graph::new("kernel");
    let mut inputs = Vec::new();
    for (i, ty) in operands.iter().enumerate() {
        inputs.push(add(&mut body, input(i, ty.clone()), &[])?[0]);
    }
    for (i, result) in add(&mut body, op, &inputs)?.into_iter().enumerate() {
        body.add_output(&i.to_string(), result, OutputKind::Result);
    }
    Ok(body)
}

/// Adds an operation, and its result to those of the body.
pub(super) fn add_result(body: &mut Graph, op: Op, operands: &[ValueId]) -> Result<(), Diagnostic> {
    let result = add(body, op, operands)?[0];
    body.add_output(&body.outputs.len().to_string(), result, OutputKind::Result);
    Ok(())
}

/// One body that does the work of several, given each with the places that it reads, and what it reads: equal places are
/// one operand. Results stay in order.
pub(super) fn joined(bodies: &[(Graph, Vec<Place>)]) -> Result<(Graph, Vec<Place>), Diagnostic> {
    let mut body = Graph::new("kernel");
    let (mut reads, mut inputs): (Vec<Place>, Vec<ValueId>) = (Vec::new(), Vec::new());
    let mut results = Vec::new();
    for (one, places) in bodies {
        let mut operands = Vec::with_capacity(places.len());
        for place in places {
            let known = reads.iter().position(|read| read == place);
            operands.push(match known {
                Some(i) => inputs[i],
                None => {
                    inputs.push(add(&mut body, input(inputs.len(), place.ty.clone()), &[])?[0]);
                    reads.push(place.clone());
                    inputs[inputs.len() - 1]
                }
            });
        }
        results.extend(inline(&mut body, one, &operands)?);
    }
    for (i, result) in results.into_iter().enumerate() {
        body.add_output(&i.to_string(), result, OutputKind::Result);
    }
    Ok((body, reads))
}

/// The body that adds `n` operands of one type, from the first to the last.
pub(super) fn sum_of(n: usize, ty: &TensorType) -> Result<Graph, Diagnostic> {
    let mut body = Graph::new("kernel");
    let mut sum = None;
    let mut inputs = Vec::new();
    for i in 0..n {
        inputs.push(add(&mut body, input(i, ty.clone()), &[])?[0]);
    }
    for value in inputs {
        sum = Some(match sum {
            None => value,
            Some(sum) => add(&mut body, Op::Binary(frit_ir::ops::BinaryFn::Add), &[sum, value])?[0],
        });
    }
    let sum = sum.ok_or_else(|| internal("an empty sum"))?;
    body.add_output("0", sum, OutputKind::Result);
    Ok(body)
}

/// Floating-point operations of a body.
pub(super) fn flops(body: &Graph) -> u64 {
    body.nodes().map(|(_, n)| crate::cost::node_flops(body, n)).fold(0, u64::saturating_add)
}

/// Name of the operation that characterizes a body: the last that is neither pointwise nor layout, else the last.
pub(super) fn main_op(body: &Graph) -> &'static str {
    let inner = || body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf());
    inner()
        .rfind(|n| !n.op.is_pointwise() && !n.op.is_layout())
        .or_else(|| inner().next_back())
        .map_or("nothing", |n| n.op.name())
}

fn input(index: usize, ty: TensorType) -> Op {
    Op::Input(Input { name: index.to_string(), ty })
}

fn nth_input(body: &Graph, index: usize) -> ValueId {
    let is_input = |n: &&Node| matches!(&n.op, Op::Input(i) if i.name == index.to_string());
    body.nodes().map(|(_, n)| n).find(is_input).expect("invariant: operand was added").outputs[0]
}

fn add(body: &mut Graph, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, Diagnostic> {
    body.add(op, inputs, Origin::none(), Region::Forward).map_err(crate::pass::bug("lower"))
}

/// Copies a body, that of a fusion for example; returns its results.
fn inline(
    body: &mut Graph,
    fusion: &Graph,
    operands: &[ValueId],
) -> Result<Vec<ValueId>, Diagnostic> {
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    let mut next = operands.iter();
    for (_, node) in fusion.nodes() {
        if matches!(node.op, Op::Input(_)) {
            let operand = next.next().ok_or_else(|| internal("a fusion lacks an operand"))?;
            map.insert(node.outputs[0], *operand);
            continue;
        }
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| map[v]).collect();
        let outputs = add(body, node.op.clone(), &inputs)?;
        map.extend(node.outputs.iter().copied().zip(outputs));
    }
    Ok(fusion.outputs.iter().map(|o| map[&o.value]).collect())
}
