//! Constant folding.
//!
//! A value is known if every operand of its node is. Known values are computed, but only those read by a node of unknown value become
//! constants, and only if the plan does not grow much: broadcast values are stored small and expanded, other large results stay
//! computed.

use frit_ir::interpret::{Options, eval_op, operations};
use frit_ir::ops::{Constant, Expand, Slice};
use frit_ir::{Graph, GraphError, Node, Op, Shape, Tensor, TensorType, ValueId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A result of at most this many bytes is always folded.
const SMALL_BYTES: usize = 1 << 16;

/// No value of more elements is computed while compiling.
const MAX_ELEMENTS: usize = 1 << 24;

/// Values of at most this many elements are computed whatever else was.
const SMALL_ELEMENTS: usize = 1 << 12;

/// Operations to compute such values.
const SMALL_OPERATIONS: u64 = 1 << 20;

/// Budget for computing large values, which small graphs can exceed by any amount. It counts operations, not time, so
/// that folding is deterministic.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowance {
    /// Elements in memory at once.
    elements: u64,
    /// Operations on elements.
    operations: u64,
}

impl Allowance {
    /// All of it.
    pub(super) const FULL: Allowance = Allowance { elements: 1 << 26, operations: 1 << 29 };

    /// Frees the value.
    fn give_back(&mut self, graph: &Graph, value: ValueId) {
        let elements = graph.ty(value).shape.numel();
        if elements > SMALL_ELEMENTS && !matches!(graph.def(value).op, Op::Constant(_)) {
            self.elements = (self.elements + elements as u64).min(Allowance::FULL.elements);
        }
    }

    /// Takes the cost of a value from the budget, if it suffices.
    fn take(&mut self, elements: u64, operations: u64) -> bool {
        let fits = elements <= self.elements && operations <= self.operations;
        if fits {
            self.elements -= elements;
            self.operations -= operations;
        }
        fits
    }
}

/// Replaces values that are known by constants. Whether any was.
pub(super) fn fold(graph: &mut Graph, allowance: &mut Allowance) -> Result<bool, GraphError> {
    let mut map = HashMap::new();
    for (value, constant) in constants(graph, allowance) {
        let (origin, region) = (graph.def(value).origin.clone(), graph.def(value).region);
        let shape = graph.ty(value).shape.clone();
        let grows = *constant.shape() != shape;
        let op = Op::Constant(Constant { value: constant });
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

/// The known values that nodes of unknown values read, with the constants that replace them. A value is freed after
/// its last use.
fn constants(graph: &Graph, allowance: &mut Allowance) -> BTreeMap<ValueId, Tensor> {
    let mut uses: HashMap<ValueId, usize> = HashMap::new();
    for input in graph.nodes().flat_map(|(_, node)| &node.inputs) {
        *uses.entry(*input).or_default() += 1;
    }
    let outputs: HashSet<ValueId> = graph.outputs.iter().map(|o| o.value).collect();
    let mut known: HashMap<ValueId, Tensor> = HashMap::new();
    let mut found = BTreeMap::new();
    for (_, node) in graph.nodes() {
        let of_known = node.inputs.iter().all(|v| known.contains_key(v));
        let results = of_known.then(|| evaluate(graph, node, &known, allowance)).flatten();
        let mut read: Vec<ValueId> = Vec::new();
        match results {
            Some(results) => {
                read.extend(node.outputs.iter().filter(|v| outputs.contains(v)));
                known.extend(results);
            }
            None => read.extend(node.inputs.iter().filter(|v| known.contains_key(v))),
        }
        for value in read {
            found.entry(value).or_insert_with(|| constant(graph, value, &known[&value]));
        }
        for input in &node.inputs {
            let left = uses.entry(*input).or_default();
            *left = left.saturating_sub(1);
            if *left == 0 && known.remove(input).is_some() {
                allowance.give_back(graph, *input);
            }
        }
        for output in node.outputs.iter().filter(|v| !uses.contains_key(v)) {
            if known.remove(output).is_some() {
                allowance.give_back(graph, *output);
            }
        }
    }
    for value in known.keys() {
        allowance.give_back(graph, *value);
    }
    found.into_iter().filter_map(|(value, constant)| Some((value, constant?))).collect()
}

/// The constant that takes the place of a known value, if that does not make the plan much larger; it is smaller than
/// the value if that is broadcast of it.
fn constant(graph: &Graph, value: ValueId, tensor: &Tensor) -> Option<Tensor> {
    let op = &graph.def(value).op;
    if matches!(op, Op::Constant(_)) || (matches!(op, Op::Expand(_)) && is_minimal(graph, value)) {
        return None;
    }
    let small = compressed(tensor);
    let bytes = small.ty.bytes();
    if bytes > SMALL_BYTES && bytes > leaf_bytes(graph, value, bytes) {
        return None;
    }
    let grows = small.shape() != tensor.shape() && tensor.ty.bytes() > SMALL_BYTES;
    Some(if grows { small } else { tensor.clone() })
}

/// The value, if it depends on constants only and is not too large to compute.
pub(crate) fn known_value(graph: &Graph, value: ValueId) -> Option<Tensor> {
    let mut known = HashMap::new();
    let mut allowance = Allowance::FULL;
    let mut stack = vec![value];
    while let Some(&next) = stack.last() {
        let node = graph.def(next);
        if node.op.is_leaf() && !matches!(node.op, Op::Constant(_)) {
            return None;
        }
        let missing: Vec<ValueId> =
            node.inputs.iter().copied().filter(|v| !known.contains_key(v)).collect();
        if missing.is_empty() {
            known.extend(evaluate(graph, node, &known, &mut allowance)?);
            stack.pop();
        }
        stack.extend(missing);
    }
    known.remove(&value)
}

fn evaluate(
    graph: &Graph,
    node: &Node,
    known: &HashMap<ValueId, Tensor>,
    allowance: &mut Allowance,
) -> Option<Vec<(ValueId, Tensor)>> {
    let (op, outputs) = (&node.op, &node.outputs);
    let types =
        |values: &[ValueId]| -> Vec<&TensorType> { values.iter().map(|v| graph.ty(*v)).collect() };
    let (inputs, results) = (types(&node.inputs), types(outputs));
    let impure =
        matches!(op, Op::AllGather(_) | Op::ReduceScatter(_) | Op::AllReduce(_) | Op::Cotangent(_));
    if impure || results.iter().any(|ty| ty.shape.numel() > MAX_ELEMENTS) {
        return None;
    }
    let elements: usize = results.iter().map(|ty| ty.shape.numel()).sum();
    let operations = operations(op, &inputs, &results);
    let small = elements <= SMALL_ELEMENTS && operations <= SMALL_OPERATIONS;
    let free = small || matches!(op, Op::Constant(_));
    if !free && !allowance.take(elements as u64, operations) {
        return None;
    }
    let operands: Vec<&Tensor> = node.inputs.iter().map(|v| &known[v]).collect();
    let results = eval_op(op, &operands, Options::default()).ok()?;
    Some(outputs.iter().copied().zip(results).collect())
}

/// Whether the value is the expansion of a constant that cannot be smaller.
fn is_minimal(graph: &Graph, value: ValueId) -> bool {
    let small = graph.ty(value).bytes() <= SMALL_BYTES;
    let source = graph.constant(graph.def(value).inputs[0]);
    !small && source.is_some_and(|c| compressed(c).shape() == c.shape())
}

/// Bytes of the constants that the value is computed from, counted until they are as many as `enough`.
fn leaf_bytes(graph: &Graph, value: ValueId, enough: usize) -> usize {
    let mut seen = HashSet::from([value]);
    let mut stack = vec![value];
    let mut bytes = 0;
    while let Some(v) = stack.pop().filter(|_| bytes < enough) {
        let node = graph.def(v);
        if let Op::Constant(c) = &node.op {
            bytes += c.value.ty.bytes();
        }
        stack.extend(node.inputs.iter().copied().filter(|input| seen.insert(*input)));
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
