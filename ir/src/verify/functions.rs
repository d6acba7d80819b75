//! Invariants of functions that state their own gradient or precision.
//!
//! V501  a call has one `custom_gradient`, and what is computed of its cotangents is read only there, as a gradient
//! V502  what the forward pass computes of the operands that enter the precision of a call is read outside only as it leaves

use super::Report;
use crate::{Code, Graph, Node, Op, Region, ValueId};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The calls that a value is inside of: of whose cotangents, and of whose entering operands it is computed.
#[derive(Clone, Default, PartialEq)]
struct Inside {
    gradients: BTreeSet<u32>,
    precisions: BTreeSet<u32>,
}

pub(super) fn check(graph: &Graph, report: &mut Report) {
    let mut inside: HashMap<ValueId, Inside> = HashMap::new();
    let mut calls = HashSet::new();
    for (_, node) in graph.nodes() {
        if let Op::CustomGradient(op) = &node.op
            && !calls.insert(op.call)
        {
            let message = format!("two `custom_gradient` of call {}", op.call);
            report.add(Code::CotangentEscapes, &node.origin, message);
        }
        let result = result(node, &inside, report);
        if result != Inside::default() {
            inside.extend(node.outputs.iter().map(|v| (*v, result.clone())));
        }
    }
    for output in &graph.outputs {
        let Some(found) = inside.get(&output.value) else { continue };
        let origin = &graph.def(output.value).origin;
        let name = &output.name;
        if !found.gradients.is_empty() {
            let message = format!("output `{name}` is computed of a cotangent");
            report.add(Code::CotangentEscapes, origin, message);
        }
        if !found.precisions.is_empty() {
            let message = format!("output `{name}` does not leave the precision of its function");
            report.add(Code::PrecisionEscapes, origin, message);
        }
    }
}

/// The calls that the results of a node are inside of.
fn result(node: &Node, inside: &HashMap<ValueId, Inside>, report: &mut Report) -> Inside {
    let mut all = Inside::default();
    let gradients = match &node.op {
        Op::CustomGradient(op) => op.pairs(node.inputs.len()).map(|(_, dx)| dx).collect(),
        _ => Vec::new(),
    };
    for (i, input) in node.inputs.iter().enumerate() {
        let Some(found) = inside.get(input) else { continue };
        if !gradients.contains(&i) {
            all.gradients.extend(&found.gradients);
            all.precisions.extend(&found.precisions);
            continue;
        }
        let Op::CustomGradient(op) = &node.op else { continue };
        if found.gradients.iter().any(|call| *call != op.call) {
            let message =
                format!("operand {i} of call {} is computed of others' cotangents", op.call);
            report.add(Code::CotangentEscapes, &node.origin, message);
        }
    }
    // Backward nodes read what is inside.
    if node.region != Region::Forward {
        all.precisions.clear();
    }
    match &node.op {
        Op::Cotangent(op) => _ = all.gradients.insert(op.call),
        Op::EnterPrecision(op) => _ = all.precisions.insert(op.call),
        Op::LeavePrecision(op) => _ = all.precisions.remove(&op.call),
        _ => {}
    }
    all
}
