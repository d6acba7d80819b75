//! Verifies that what a reproducible plan computes does not depend on its number of ranks. The order of sums over micro-steps is
//! verified by [`factor`](super::factor), that over ranks is the collectives' own.
//!
//! P320  in a reproducible plan the gradients of every trainable group, and the statistics beside them, are each added over
//!       micro-steps by one tree; ranks exchange gradients and statistics in f32, and nothing in the micro-steps; sums are rounded
//!       to no narrower dtype before those of all ranks are added; the norm is an exact sum

use super::broken;
use frit_ir::ops::StateName;
use frit_ir::plan::{Action, BufferId, PhaseName, Plan, TaskId};
use frit_ir::{Code, DType, Diagnostic, Graph, Node, Op, ValueId};
use std::collections::HashMap;

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    if plan.reproducible.is_none() || plan.eval.is_some() {
        return;
    }
    let micro_step = plan.tasks_of(PhaseName::MicroStep);
    let summed = last_sum(plan);
    let mut trees: HashMap<Vec<BufferId>, usize> = HashMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        let mut refuse = |message: &str| {
            found.push(broken(plan, Code::DependsOnRanks, i, message.into()));
        };
        match &task.action {
            Action::AllReduce { group: None, .. } if micro_step.contains(&i) => {
                refuse("combines values of the pieces that ranks have at the same time");
            }
            Action::ReduceScatter { send, .. } | Action::AllReduce { send, .. }
                if send.ty.dtype != DType::F32 =>
            {
                refuse("rounds what ranks add for its exchange");
            }
            Action::Kernel { kernel, writes, .. } => {
                let body = &plan.kernels[*kernel].body;
                if i >= micro_step.end && summed.is_some_and(|last| i <= last) && rounds(body) {
                    refuse("rounds sums before those of all ranks are added");
                }
                for (_, node) in body.nodes() {
                    match &node.op {
                        Op::TreeSum if micro_step.contains(&i) => {
                            if !keeps_levels(body, node) {
                                refuse("changes sums that wait for others");
                            }
                            let levels = writes.iter().map(|place| place.buffer).collect();
                            *trees.entry(levels).or_default() += 1;
                        }
                        Op::TreeSum => refuse("adds an operand of no micro-step"),
                        Op::GradStats(op) if !op.exact => refuse("sums squares in some order"),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if plan.accumulation == 1 {
        return;
    }
    let levels = plan.accumulation.ilog2() as usize;
    let mut expect = |what: &str, buffers: Option<Vec<BufferId>>| {
        let n = buffers.and_then(|buffers| trees.get(&buffers)).copied().unwrap_or(0);
        if n != 1 {
            let message = format!("{what} are added over micro-steps by {n} trees, not by one");
            found.push(Diagnostic::error(Code::DependsOnRanks, message));
        }
    };
    for group in plan.groups.iter().filter(|g| g.trainable) {
        let state = |level| group.states.iter().find(|s| s.name == StateName::Partial(level));
        let buffers = (0..levels).map(|level| state(level).map(|s| s.buffer)).collect();
        expect(&format!("gradients of unit `{}`", plan.units[group.unit].name), buffers);
    }
    expect("statistics", committed(plan, levels, &trees));
}

/// The last task that adds what ranks have, or makes the norm of it.
fn last_sum(plan: &Plan) -> Option<TaskId> {
    let adds = |action: &Action| match action {
        Action::ReduceScatter { .. } | Action::AllReduce { .. } => true,
        Action::Kernel { kernel, .. } => {
            plan.kernels[*kernel].body.nodes().any(|(_, n)| matches!(n.op, Op::RoundStats))
        }
        _ => false,
    };
    let mut tasks = plan.tasks.iter_enumerated();
    tasks.rfind(|(_, task)| adds(&task.action)).map(|(i, _)| i)
}

/// Whether a value is narrower than f32.
fn rounds(body: &Graph) -> bool {
    let mut values = body.nodes().flat_map(|(_, node)| &node.outputs);
    values.any(|v| body.ty(*v).dtype.is_low_precision())
}

/// Whether a tree reads the sums that wait as they are, and its results are the kernel's.
fn keeps_levels(body: &Graph, tree: &Node) -> bool {
    let waits = |v: &ValueId| matches!(body.def(*v).op, Op::Input(_));
    tree.inputs[2..].iter().all(waits) && body.outputs.iter().map(|o| &o.value).eq(&tree.outputs)
}

/// The tree whose levels are committed to the state of the statistics.
fn committed(
    plan: &Plan,
    levels: usize,
    trees: &HashMap<Vec<BufferId>, usize>,
) -> Option<Vec<BufferId>> {
    let state = |level| plan.states.iter().find(|s| s.name == StateName::Partial(level));
    let states: Vec<BufferId> =
        (0..levels).map(|level| state(level).map(|s| s.buffer)).collect::<Option<_>>()?;
    let source = |to: &BufferId| {
        let copy = |action: &Action| match action {
            Action::Copy { from, to: place } if place.buffer == *to => Some(from.buffer),
            _ => None,
        };
        plan.tasks.iter().find_map(|task| copy(&task.action))
    };
    let sources: Option<Vec<BufferId>> = states.iter().map(source).collect();
    sources.filter(|buffers| trees.contains_key(buffers)).or(Some(states))
}
