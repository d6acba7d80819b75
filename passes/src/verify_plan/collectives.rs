//! What ranks exchange. A plan is the same on every rank, so the order is too; what remains:
//!
//! P201  one rank exchanges nothing
//! P202  every gathered group is read before it is overwritten or the phase ends
//! P203  every trainable group is reduced exactly once per micro-step, a sharded one by a
//!       reduce-scatter and a replicated one by an all-reduce, and as a mean
//! P204  groups that are frozen are not reduced
//! P205  collectives of one kind run on one stream

use super::broken;
use frit_ir::Diagnostic;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::{Action, Plan, Stream};

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let mut reductions = vec![0; plan.groups.len()];
    for (i, task) in plan.tasks.iter().enumerate() {
        let action = &task.action;
        if action.is_collective() && plan.world_size == 1 {
            found.push(broken(plan, "P201", i, "a collective of one rank".into()));
        }
        let (reduced, as_mean, scatter) = match action {
            Action::AllGather { recv, .. } => {
                if task.stream != Stream::Gather {
                    found.push(broken(plan, "P205", i, "a gather on another stream".into()));
                }
                if !read_later(plan, i, recv.buffer) {
                    found.push(broken(plan, "P202", i, "what is gathered is never read".into()));
                }
                continue;
            }
            Action::ReduceScatter { group, reduce, .. } => {
                (Some(*group), *reduce == ReduceKind::Mean, true)
            }
            Action::AllReduce { group, reduce, .. } => (*group, *reduce == ReduceKind::Mean, false),
            _ => continue,
        };
        if task.stream != Stream::Reduce {
            found.push(broken(plan, "P205", i, "a reduction on another stream".into()));
        }
        let Some(group) = reduced else { continue };
        reductions[group] += 1;
        let g = &plan.groups[group];
        if !g.trainable {
            found.push(broken(plan, "P204", i, "a frozen group is reduced".into()));
        }
        if !as_mean || g.sharded != scatter {
            found.push(broken(plan, "P203", i, "gradients are not averaged as sharded".into()));
        }
    }
    for (group, n) in plan.groups.iter().zip(reductions) {
        let expected = usize::from(group.trainable && plan.world_size > 1);
        if n != expected && group.trainable {
            let unit = &plan.units[group.unit].name;
            let message = format!("unit `{unit}`: gradients are reduced {n} times, not {expected}");
            found.push(Diagnostic::error("P203", message));
        }
    }
}

/// Whether a later task of the same phase reads the buffer before another gather writes it.
fn read_later(plan: &Plan, gather: usize, buffer: usize) -> bool {
    let end = plan.phases.iter().find(|p| (p.begin..p.end).contains(&gather)).map_or(0, |p| p.end);
    for task in &plan.tasks[gather + 1..end] {
        if task.action.reads().iter().any(|p| p.buffer == buffer) {
            return true;
        }
        if task.action.writes().iter().any(|p| p.buffer == buffer) {
            return false;
        }
    }
    false
}
