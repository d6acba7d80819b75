//! Verifies the scales of 8-bit floats.
//!
//! P314  every tensor that is quantized to an 8-bit float has a row of the amax history, in one
//!       format; the history is updated once per micro-step, with several ranks by the maximum
//!       over all of them

use super::broken;
use frit_ir::ops::{ReduceKind, StateName};
use frit_ir::plan::{Action, BufferId, PhaseName, Plan, TaskId};
use frit_ir::{Code, DType, Diagnostic, Op};
use std::collections::BTreeMap;

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let mut formats: BTreeMap<usize, DType> = BTreeMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        let Action::Kernel { kernel, .. } = &task.action else { continue };
        for (_, node) in plan.kernels[*kernel].body.nodes() {
            let Op::Quantize(op) = &node.op else { continue };
            if *formats.entry(op.index).or_insert(op.to) != op.to {
                let message = format!("rounds tensor {} to another format", op.index);
                found.push(broken(plan, Code::AmaxHistory, i, message));
            }
            if (node.inputs.len() > 1) == plan.eval.is_some() {
                let message =
                    "does not scale by the history in training, and by its operand after it";
                found.push(broken(plan, Code::AmaxHistory, i, message.into()));
            }
        }
    }
    let history = plan.states.iter().find(|s| s.name == StateName::AmaxHistory);
    let rows = history.map_or(0, |h| h.ty.shape.dims()[0]);
    let tensors = formats.keys().copied().eq(0..formats.len());
    if plan.eval.is_none() && (rows != formats.len() || !tensors) {
        let n = formats.len();
        let message = format!("{n} tensors in 8-bit floats have {rows} rows of amax history");
        found.push(Diagnostic::error(Code::AmaxHistory, message));
    }
    let Some(history) = history else { return };
    let writers: Vec<TaskId> = plan
        .tasks
        .keys()
        .filter(|&i| plan.tasks[i].action.writes().iter().any(|p| p.buffer == history.buffer))
        .collect();
    let micro_step = plan.tasks_of(PhaseName::MicroStep);
    match writers[..] {
        [i] if micro_step.contains(&i) => {
            if plan.world_size > 1 && !agreed(plan, micro_step.start, i) {
                let message = "updates an amax history that ranks do not agree on";
                found.push(broken(plan, Code::AmaxHistory, i, message.into()));
            }
        }
        _ => {
            let message = format!("the amax history is updated {} times, not once", writers.len());
            found.push(Diagnostic::error(Code::AmaxHistory, message));
        }
    }
}

/// Whether what a task reads comes from the largest over all ranks.
fn agreed(plan: &Plan, begin: TaskId, task: TaskId) -> bool {
    let mut wanted: Vec<BufferId> =
        plan.tasks[task].action.reads().iter().map(|p| p.buffer).collect();
    for task in plan.tasks[begin..task].iter().rev() {
        if task.action.writes().iter().any(|p| wanted.contains(&p.buffer)) {
            if let Action::AllReduce { group: None, reduce: ReduceKind::Max, .. } = task.action {
                return true;
            }
            wanted.extend(task.action.reads().iter().map(|p| p.buffer));
        }
    }
    false
}
