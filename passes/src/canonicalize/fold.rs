//! Constant folding.
//!
//! A value is known if every operand of its node is. Known values are computed, but only those that a
//! node of unknown value reads become constants, and only if that does not make the plan much larger:
//! what is broadcast is kept small and expanded, and other large results stay as they are computed.

use frit_ir::interpret::{Options, eval_op};
use frit_ir::ops::{Constant, Expand, Slice};
use frit_ir::{Graph, GraphError, Op, Shape, Tensor, ValueId};
use std::collections::HashMap;

/// A result of at most this many bytes is always folded.
const SMALL_BYTES: usize = 1 << 16;

/// No value of more elements is computed while compiling.
const MAX_ELEMENTS: usize = 1 << 24;

/// Replaces values that are known by constants. Whether any was.
pub(super) fn fold(graph: &mut Graph) -> Result<bool, GraphError> {
    let known = known_values(graph);
    let mut read: Vec<ValueId> = Vec::new();
    for (_, node) in graph.nodes() {
        if !node.outputs.iter().all(|o| known.contains_key(o)) {
            read.extend(&node.inputs);
        }
    }
    read.extend(graph.outputs.iter().map(|o| o.value));
    read.sort_unstable();
    read.dedup();

    let mut map = HashMap::new();
    for value in read {
        let Some(tensor) = known.get(&value) else { continue };
        let op = &graph.def(value).op;
        if matches!(op, Op::Constant(_))
            || (matches!(op, Op::Expand(_)) && is_minimal(graph, value))
        {
            continue;
        }
        let small = compressed(tensor);
        if small.ty.bytes() > SMALL_BYTES.max(leaf_bytes(graph, value)) {
            continue;
        }
        let (origin, region) = (graph.def(value).origin.clone(), graph.def(value).region);
        let grows = small.shape() != tensor.shape() && tensor.ty.bytes() > SMALL_BYTES;
        let tensor = if grows { small } else { tensor.clone() };
        let shape = graph.ty(value).shape.clone();
        let op = Op::Constant(Constant { value: tensor });
        let mut folded = graph.add1(op, &[], origin.clone(), region)?;
        if grows {
            folded = graph.add1(Op::Expand(Expand { shape }), &[folded], origin, region)?;
        }
        map.insert(value, folded);
    }
    graph.substitute(&map);
    let folded = !map.is_empty();
    if folded {
        graph.remove_dead();
        graph.sort().ok();
    }
    Ok(folded)
}

/// The value, if it depends on constants only and is not too large to compute.
pub(crate) fn known_value(graph: &Graph, value: ValueId) -> Option<Tensor> {
    let mut known = HashMap::new();
    let mut stack = vec![value];
    while let Some(&next) = stack.last() {
        let node = graph.def(next);
        if node.op.is_leaf() && !matches!(node.op, Op::Constant(_)) {
            return None;
        }
        let missing: Vec<ValueId> =
            node.inputs.iter().copied().filter(|v| !known.contains_key(v)).collect();
        if missing.is_empty() {
            known.extend(evaluate(graph, &node.op, &node.inputs, &node.outputs, &known)?);
            stack.pop();
        }
        stack.extend(missing);
    }
    known.remove(&value)
}

fn known_values(graph: &Graph) -> HashMap<ValueId, Tensor> {
    let mut known = HashMap::new();
    for (_, node) in graph.nodes() {
        if node.inputs.iter().all(|v| known.contains_key(v)) {
            let results = evaluate(graph, &node.op, &node.inputs, &node.outputs, &known);
            known.extend(results.into_iter().flatten());
        }
    }
    known
}

fn evaluate(
    graph: &Graph,
    op: &Op,
    inputs: &[ValueId],
    outputs: &[ValueId],
    known: &HashMap<ValueId, Tensor>,
) -> Option<Vec<(ValueId, Tensor)>> {
    let impure = matches!(op, Op::AllGather(_) | Op::ReduceScatter(_) | Op::AllReduce(_));
    if impure || outputs.iter().any(|o| graph.ty(*o).shape.numel() > MAX_ELEMENTS) {
        return None;
    }
    let operands: Vec<&Tensor> = inputs.iter().map(|v| &known[v]).collect();
    let results = eval_op(op, &operands, Options::default()).ok()?;
    Some(outputs.iter().copied().zip(results).collect())
}

/// Whether the value is the expansion of a constant that cannot be smaller.
fn is_minimal(graph: &Graph, value: ValueId) -> bool {
    let small = graph.ty(value).bytes() <= SMALL_BYTES;
    let source = graph.constant(graph.def(value).inputs[0]);
    !small && source.is_some_and(|c| compressed(c).shape() == c.shape())
}

/// Bytes of the constants that the value is computed from.
fn leaf_bytes(graph: &Graph, value: ValueId) -> usize {
    let mut seen = vec![value];
    let mut next = 0;
    let mut bytes = 0;
    while let Some(&v) = seen.get(next) {
        next += 1;
        let node = graph.def(v);
        if let Op::Constant(c) = &node.op {
            bytes += c.value.ty.bytes();
        }
        for &input in &node.inputs {
            if !seen.contains(&input) {
                seen.push(input);
            }
        }
    }
    bytes
}

/// The smallest tensor of the same rank that broadcasts to this one.
fn compressed(tensor: &Tensor) -> Tensor {
    let mut small = tensor.clone();
    for axis in 0..tensor.shape().rank() {
        let dims = small.shape().dims().to_vec();
        if dims[axis] > 1 && constant_along(&small, axis) {
            let mut size = dims.clone();
            size[axis] = 1;
            let slice = Slice { start: vec![0; size.len()], size, step: vec![1; dims.len()] };
            if let Ok(mut parts) = eval_op(&Op::Slice(slice), &[&small], Options::default()) {
                small = parts.swap_remove(0);
            }
        }
    }
    small
}

fn constant_along(tensor: &Tensor, axis: usize) -> bool {
    let Shape(dims) = tensor.shape();
    let inner: usize = dims[axis + 1..].iter().product();
    let period = inner * dims[axis];
    if period == 0 {
        return false;
    }
    let first = |i: usize| i / period * period + i % inner;
    match (tensor.as_floats(), tensor.as_ints()) {
        (Some(v), _) => (0..v.len()).all(|i| v[i].to_bits() == v[first(i)].to_bits()),
        (_, Some(v)) => (0..v.len()).all(|i| v[i] == v[first(i)]),
        (None, None) => false,
    }
}
