//! Constants that the low dtype does not hold exactly.
//!
//! An elementwise node that reads one computes in f32 and rounds its result, as PyTorch's kernels do with a Python scalar. Rounded alone,
//! a factor of 1.003 would be 1 in bf16: an error that all elements share, and which no average removes.

use super::FILL;
use super::assign::{Assignment, Precision, Problem, subject, wants_f32};
use crate::pass::PassContext;
use frit_ir::ops::BinaryFn;
use frit_ir::{DType, Graph, NodeId, Op, Tensor, ValueId};
use std::collections::HashSet;

/// Lets these nodes compute in f32. Their results stay f32 where nothing reads them in the low dtype.
pub(super) fn widen(problem: &Problem<'_>, low: DType, assignment: &mut Assignment) {
    let graph = problem.graph;
    let other = of_constants(graph, low);
    // Nodes that read f32, layout operations through each other.
    let mut wide: HashSet<NodeId> = HashSet::new();
    for (id, node) in graph.nodes().rev() {
        let mut users = node.outputs.iter().flat_map(|v| &problem.users[v.0 as usize]);
        let is_read_wide = users.all(|u| wide.contains(u));
        let is_free_layout = problem.is_free_layout(id, node, assignment);
        if is_read_wide && is_free_layout || wants_f32(graph, id, assignment, false) {
            wide.insert(id);
        }
        if !other.contains(&id) {
            continue;
        }
        let precision = match assignment.get(&id) {
            Some(Precision::Low) if is_read_wide && !problem.bound.contains_key(&id) => {
                Precision::F32
            }
            Some(Precision::Low) => Precision::F32ToLow,
            Some(Precision::LowToF32) => Precision::F32,
            _ => continue,
        };
        assignment.insert(id, precision);
        wide.insert(id);
    }
}

/// The elementwise nodes that read a constant which the low dtype does not hold, and those behind them that read constants too, such as a
/// clip: of values that are rounded in between, those just inside of a bound would be on it and have no gradient.
fn of_constants(graph: &Graph, low: DType) -> HashSet<NodeId> {
    let mut found = HashSet::new();
    for (id, node) in graph.nodes() {
        let constants = || {
            let of = |v: &ValueId| graph.constant(*v).filter(|_| subject(graph, *v));
            node.inputs.iter().filter_map(of)
        };
        let is_other = |bound: f64| bound.abs() < FILL && low.round(bound) != bound;
        let follows = || node.inputs.iter().any(|v| found.contains(&graph.value(*v).def));
        let reads = match &node.op {
            _ if constants().any(|c| is_fill(c, low)) => false,
            Op::Binary(_) => {
                constants().any(|c| !is_held(c, low)) || constants().next().is_some() && follows()
            }
            Op::Compare(_) | Op::Select => constants().any(|c| !is_held(c, low)),
            Op::Clip(clip) if subject(graph, node.inputs[0]) => {
                clip.min.into_iter().chain(clip.max).any(is_other) || follows()
            }
            _ => false,
        };
        if reads {
            found.insert(id);
        }
    }
    found
}

/// Warns of constants that are less than any number of the dtype to which the results of their nodes are rounded.
pub(super) fn warn_of_lost(
    graph: &Graph,
    low: DType,
    assignment: &Assignment,
    context: &mut PassContext,
) {
    let is_rounded = |id: &NodeId| assignment.get(id) == Some(&Precision::F32ToLow);
    for (_, node) in graph.nodes().filter(|(id, _)| is_rounded(id)) {
        let reads = |v: &ValueId| graph.constant(*v).filter(|_| subject(graph, *v));
        let values = node.inputs.iter().filter_map(reads).flat_map(Tensor::to_f64s);
        let is_divisor = node.op == Op::Binary(BinaryFn::Div);
        let mut lost = values.filter(|x| *x != 0.0 && low.round(*x) == 0.0 && !is_divisor);
        if let Some(x) = lost.next() {
            super::warn_of_lost(x, low, &node.origin, context);
        }
    }
}

/// Whether the low dtype holds every element of a constant.
fn is_held(constant: &Tensor, low: DType) -> bool {
    constant.to_f64s().into_iter().all(|x| low.round(x) == x || x.is_nan())
}

/// Whether a constant is the fill of a mask, which is larger than the low dtype holds: [`limited`] keeps it finite, where a result that is
/// rounded would be infinite.
///
/// [`limited`]: super::limited
pub(super) fn is_fill(constant: &Tensor, low: DType) -> bool {
    let exceeds = |x: f64| x.is_finite() && x.abs() >= FILL && low.round(x).is_infinite();
    constant.to_f64s().into_iter().any(exceeds)
}
