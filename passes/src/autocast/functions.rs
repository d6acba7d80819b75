//! The nodes of functions that state the dtype they run in.

use frit_ir::{DType, Graph, NodeId, Op, ValueId};
use std::collections::{BTreeMap, HashMap};

/// The stated dtype of every node inside of such a function; of nested ones the innermost counts.
pub(super) fn stated(graph: &Graph) -> HashMap<NodeId, DType> {
    // By value the calls that it is inside of; an inner call has a greater number.
    let mut inside: HashMap<ValueId, BTreeMap<u32, DType>> = HashMap::new();
    let mut stated = HashMap::new();
    for (id, node) in graph.nodes() {
        // The gradients of a call are read inside of it, and are none of its results.
        let read = match &node.op {
            Op::CustomGradient(op) => op.results,
            _ => node.inputs.len(),
        };
        let calls = node.inputs[..read].iter().filter_map(|v| inside.get(v));
        let mut calls: BTreeMap<u32, DType> = calls.flatten().map(|(c, d)| (*c, *d)).collect();
        match &node.op {
            Op::EnterPrecision(op) => _ = calls.insert(op.call, op.dtype),
            Op::LeavePrecision(op) => _ = calls.remove(&op.call),
            _ => stated.extend(calls.values().next_back().map(|dtype| (id, *dtype))),
        }
        if !calls.is_empty() {
            inside.extend(node.outputs.iter().map(|v| (*v, calls.clone())));
        }
    }
    stated
}
