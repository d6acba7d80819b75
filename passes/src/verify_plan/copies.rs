//! Verifies that copies of parameters in other dtypes are what casting the parameters would give.
//!
//! P318  every copy of parameters in another dtype is written once per step, whole, by the optimizer step of its group, as the
//!       cast of the new parameters; nothing else writes these parameters
//!
//! The runtime writes a copy whenever it writes parameters, so a copy equals their cast before every step, also after one
//! that was skipped.

use super::broken;
use frit_ir::plan::{Action, BufferId, GroupCopy, GroupId, Place, Plan, Task};
use frit_ir::{Code, Diagnostic, Op};
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    // By each buffer that such a step writes, the group and its copy.
    let mut written_by_step: BTreeMap<BufferId, Vec<(GroupId, GroupCopy)>> = BTreeMap::new();
    let mut stale: BTreeSet<(GroupId, BufferId)> = BTreeSet::new();
    for (g, group) in plan.groups.iter_enumerated() {
        for copy in &group.copies {
            for buffer in [group.master, copy.buffer] {
                written_by_step.entry(buffer).or_default().push((g, *copy));
            }
            stale.insert((g, copy.buffer));
        }
    }
    for (i, task) in plan.tasks.iter_enumerated() {
        let copies =
            task.action.writes().into_iter().filter_map(|p| written_by_step.get(&p.buffer));
        let copies: BTreeSet<_> = copies.flatten().map(|(g, c)| (*g, c.dtype, c.buffer)).collect();
        for (g, dtype, buffer) in copies {
            let copy = GroupCopy { dtype, buffer };
            if !is_cast_of_step(plan, g, copy, task) || !stale.remove(&(g, buffer)) {
                let name = &plan.buffers[buffer].name;
                let message = format!("does not keep `{name}` the cast of its parameters");
                found.push(broken(plan, Code::ParameterCopies, i, message));
            }
        }
    }
    for (_, buffer) in stale {
        let message = format!("no step writes `{}`", plan.buffers[buffer].name);
        found.push(Diagnostic::error(Code::ParameterCopies, message));
    }
}

/// Whether a task steps the whole group and writes the whole copy, as the cast of what it writes to the parameters.
fn is_cast_of_step(plan: &Plan, group: GroupId, copy: GroupCopy, task: &Task) -> bool {
    let Action::Kernel { kernel, writes, .. } = &task.action else { return false };
    let (group, body) = (&plan.groups[group], &plan.kernels[*kernel].body);
    let is_whole = |place: &Place, dtype| {
        let size = place.ty.shape.numel() == group.shard_numel;
        size && place.offset == 0 && place.ty.dtype == dtype
    };
    // What is written to a buffer, if that is the whole of it and written once.
    let whole = |buffer, dtype| {
        let mut to = writes.iter().zip(&body.outputs).filter(|(p, _)| p.buffer == buffer);
        let (place, output) = to.next()?;
        (is_whole(place, dtype) && to.next().is_none()).then_some(output.value)
    };
    let new = whole(group.master, group.dtype);
    let Some((new, cast)) = new.zip(whole(copy.buffer, copy.dtype)) else { return false };
    let (step, cast) = (body.def(new), body.def(cast));
    let steps = matches!(step.op, Op::OptimizerStep(_) | Op::MuonStep(_));
    let is_step = steps && step.outputs[0] == new;
    is_step && matches!(&cast.op, Op::Cast(c) if c.to == copy.dtype) && cast.inputs[0] == new
}
