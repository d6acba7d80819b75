//! Verifies that tasks do not overwrite operands that they may still read.
//!
//! P107  a task's results overlap neither its operands nor each other, unless a result covers
//!       exactly one operand and the kernel reads each element only to write the same one (an
//!       optimizer step, a sum or another elementwise operation of equal shapes, a matrix to which a
//!       GEMM is added, a table to which the gradient of an embedding is added, a level of a
//!       sum in a tree), or the result is the
//!       gradient of a cross-entropy over its logits, or the task is an in-place collective
//!
//! A kernel may process elements in any order, on any number of threads. Generated code that computes the loss of a row of logits
//! reads the row before it writes any of it; the interpreter reads all operands first.

use super::broken;
use frit_ir::ops::{AdafactorPart, BinaryFn};
use frit_ir::plan::{Action, Arena, Kernel, KernelKind, Place, Plan};
use frit_ir::{Code, Diagnostic, Graph, Node, Op, ValueId};
use std::collections::HashSet;

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    for (i, task) in plan.tasks.iter_enumerated() {
        if let Some(message) = problem(plan, &task.action) {
            found.push(broken(plan, Code::OperandOverwritten, i, message.into()));
        }
    }
}

fn problem(plan: &Plan, action: &Action) -> Option<&'static str> {
    let (reads, writes) = (action.reads(), action.writes());
    let may_repeat = matches!(action, Action::Zero { .. });
    for (j, write) in writes.iter().enumerate() {
        if !may_repeat && writes[..j].iter().any(|other| overlap(plan, other, write)) {
            return Some("writes two results over one another");
        }
        for (i, read) in reads.iter().enumerate().filter(|(_, read)| overlap(plan, read, write)) {
            let same = range(plan, read) == range(plan, write) && read.ty == write.ty;
            let allowed = match action {
                Action::Kernel { kernel, .. } => updates(&plan.kernels[*kernel], i, j),
                Action::AllReduce { .. } => true,
                _ => false,
            };
            if !(same && allowed) {
                return Some("writes over an operand that it may still read");
            }
        }
    }
    None
}

fn range(plan: &Plan, place: &Place) -> (Arena, usize, usize) {
    let buffer = &plan.buffers[place.buffer];
    let begin = buffer.offset + place.offset;
    (buffer.arena, begin, begin + place.ty.bytes())
}

fn overlap(plan: &Plan, a: &Place, b: &Place) -> bool {
    let ((arena, begin, end), (other, from, to)) = (range(plan, a), range(plan, b));
    arena == other && begin < to && from < end
}

/// Whether a kernel's result `j` may be in the place of its operand `i`.
fn updates(kernel: &Kernel, i: usize, j: usize) -> bool {
    let body = &kernel.body;
    let part = body.nodes().find_map(|(_, n)| match &n.op {
        Op::Adafactor(op) => Some(op.part),
        _ => None,
    });
    match part {
        Some(AdafactorPart::Moments) => (i, j) == (3, 0),
        Some(AdafactorPart::Step) => (i, j) == (2, 0),
        Some(AdafactorPart::Sums) => false,
        None if adds_rows(body) => j == 0 && are_rows_added_to(body, i),
        None if is_tree_sum(body) => i == j + 2,
        None => {
            (kernel.kind() != KernelKind::Library || is_sum_with_matmul(body))
                && (only_same_element(body, i) || is_gradient_of_logits(body, i, j))
        }
    }
}

/// Whether a body is a matmul and an addition to its result: the matrix C of a GEMM, which may be where the result is.
/// Source: cuBLASLt, `cublasLtMatmul`.
fn is_sum_with_matmul(body: &Graph) -> bool {
    let nodes: Vec<&Op> =
        body.nodes().map(|(_, n)| &n.op).filter(|op| !matches!(op, Op::Input(_))).collect();
    matches!(nodes[..], [Op::MatMul(_), Op::Binary(BinaryFn::Add)])
}

/// Whether a body adds a gradient of an embedding to an operand.
fn adds_rows(body: &Graph) -> bool {
    let mut nodes = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf());
    let is_one = |n: &Node| matches!(n.op, Op::EmbeddingGrad(_)) && n.inputs.len() == 3;
    nodes.next().is_some_and(is_one) && nodes.next().is_none()
}

/// Whether operand `i` is what a gradient of an embedding is added to. Indices may be constants of the body, not operands.
fn are_rows_added_to(body: &Graph, i: usize) -> bool {
    let mut inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
    inputs.nth(i).is_some_and(|(_, operand)| {
        let readers = body.nodes().filter(|(_, n)| n.inputs.contains(&operand.outputs[0]));
        readers
            .into_iter()
            .all(|(_, n)| n.inputs.iter().position(|v| *v == operand.outputs[0]) == Some(2))
    })
}

/// Whether a body adds an operand to a sum in a binary tree: levels are read and written by element.
fn is_tree_sum(body: &Graph) -> bool {
    let mut nodes = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf());
    nodes.next().is_some_and(|n| matches!(n.op, Op::TreeSum)) && nodes.next().is_none()
}

/// Whether operand `i` is read as logits of cross-entropies alone, by rows, and result `j` is their gradient.
fn is_gradient_of_logits(body: &Graph, i: usize, j: usize) -> bool {
    let mut inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
    let (Some((_, operand)), Some(result)) = (inputs.nth(i), body.outputs.get(j)) else {
        return false;
    };
    let logits = operand.outputs[0];
    let reads_rows = |node: &Node| {
        node.inputs.iter().enumerate().filter(|(_, v)| **v == logits).all(|(k, _)| match node.op {
            Op::CrossEntropy(_) => k == 0,
            Op::CrossEntropyGrad(_) => k == 1,
            _ => false,
        })
    };
    let gradient = body.def(result.value);
    matches!(gradient.op, Op::CrossEntropyGrad(_))
        && gradient.inputs[1] == logits
        && body.nodes().all(|(_, node)| reads_rows(node))
}

/// Whether element `k` of operand `i` is read for nothing but elements `k` of results of its shape.
pub(super) fn only_same_element(body: &Graph, i: usize) -> bool {
    let mut inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
    let Some((_, operand)) = inputs.nth(i) else { return false };
    let shape = &body.ty(operand.outputs[0]).shape;
    let mut reached: HashSet<ValueId> = operand.outputs.iter().copied().collect();
    for (_, node) in body.nodes() {
        if node.inputs.iter().all(|v| !reached.contains(v)) {
            continue;
        }
        if !is_elementwise(node) || node.outputs.iter().any(|v| body.ty(*v).shape != *shape) {
            return false;
        }
        reached.extend(&node.outputs);
    }
    true
}

fn is_elementwise(node: &Node) -> bool {
    node.op.is_pointwise()
        || matches!(
            node.op,
            Op::ScaledCast(_)
                | Op::OptimizerStep(_)
                | Op::MuonMomentum(_)
                | Op::MuonStep(_)
                | Op::EmaStep
        )
}
