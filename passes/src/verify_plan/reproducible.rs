//! Verifies that what a reproducible plan computes does not depend on its number of ranks. The order of sums over micro-steps is
//! verified by [`factor`](super::factor), that over ranks is the collectives' own.
//!
//! P320  in a reproducible plan the gradients of every trainable group, and the statistics beside them, are each added over
//!       micro-steps by one tree; ranks exchange gradients in f32, and nothing in the micro-steps; the norm is an exact sum

use super::broken;
use frit_ir::ops::StateName;
use frit_ir::plan::{Action, BufferId, PhaseName, Plan};
use frit_ir::{Code, DType, Diagnostic, Op};
use std::collections::HashMap;

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    if plan.reproducible.is_none() || plan.eval.is_some() {
        return;
    }
    let micro_step = plan.tasks_of(PhaseName::MicroStep);
    let mut trees: HashMap<Vec<BufferId>, usize> = HashMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        let mut refuse = |message: &str| {
            found.push(broken(plan, Code::DependsOnRanks, i, message.into()));
        };
        match &task.action {
            Action::AllReduce { group: None, .. } if micro_step.contains(&i) => {
                refuse("combines values of the pieces that ranks have at the same time");
            }
            Action::ReduceScatter { send, .. } | Action::AllReduce { group: Some(_), send, .. }
                if send.ty.dtype != DType::F32 =>
            {
                refuse("rounds gradients for their exchange");
            }
            Action::Kernel { kernel, writes, .. } => {
                for (_, node) in plan.kernels[*kernel].body.nodes() {
                    match &node.op {
                        Op::TreeSum if micro_step.contains(&i) => {
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
