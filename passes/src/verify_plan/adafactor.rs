//! P315  the Adafactor step of a parameter has each of its parts once, and each reads the
//!       parameter, its gradient, and the results of the earlier parts
//!
//! P311 checks that sums are over all ranks when they are read.

use super::broken;
use super::host::home;
use frit_ir::ops::{Adafactor, AdafactorPart, StateName};
use frit_ir::plan::{Action, GroupId, Place, Plan, TaskId};
use frit_ir::{Code, Op};

/// A task that is a part of a step.
#[derive(Clone, Copy)]
struct Part<'a> {
    op: &'a Adafactor,
    reads: &'a [Place],
    writes: &'a [Place],
}

/// The part of a step that task `i` is.
fn part_of(plan: &Plan, i: TaskId) -> Option<Part<'_>> {
    let Action::Kernel { kernel, reads, writes } = &plan.tasks[i].action else { return None };
    let mut ops = plan.kernels[*kernel].body.nodes().map(|(_, n)| &n.op);
    let op = ops.find_map(|op| if let Op::Adafactor(op) = op { Some(op) } else { None })?;
    Some(Part { op, reads, writes })
}

/// Checks task `i`, which is a part of a step; the group that it steps a parameter of, if it does.
pub(super) fn verify(
    plan: &Plan,
    i: TaskId,
    unscaled: Option<&[Place]>,
    found: &mut Vec<frit_ir::Diagnostic>,
) -> Option<GroupId> {
    match problem(plan, i, unscaled) {
        Ok(stepped) => stepped,
        Err(message) => {
            found.push(broken(plan, Code::AdafactorParts, i, message.into()));
            None
        }
    }
}

fn problem(
    plan: &Plan,
    i: TaskId,
    unscaled: Option<&[Place]>,
) -> Result<Option<GroupId>, &'static str> {
    let Some(part) = part_of(plan, i) else { return Ok(None) };
    let begin = &part.reads[0];
    let group = plan.groups.position(|g| g.param_offsets == Some(begin.buffer));
    let group = group.ok_or("does not read where a parameter begins")?;
    let g = &plan.groups[group];
    let segment = g.segments.get(begin.offset / 8).ok_or("steps no parameter")?;
    let param = &plan.params[segment.param];
    if param.ty.shape != part.op.shape {
        return Err("takes a parameter to have another shape");
    }
    let gradient = plan.gradients.iter().find(|s| s.group == group).map(|s| &s.place);
    if gradient != part.reads.get(1) {
        return Err("does not read its parameter's gradient");
    }
    let results = unscaled.ok_or("comes before the gradients are checked")?;
    let [factor, found_inf, ..] = results else { return Err("has no finite flag") };
    let checks = part.op.part != AdafactorPart::Sums;
    if !part.reads.contains(factor) || checks && !part.reads.contains(found_inf) {
        return Err("does not read the factor and finite flag that were checked");
    }
    let same = |other: &Part| other.op.part == part.op.part && other.reads[0] == *begin;
    if TaskId::FIRST.until(i).filter_map(|j| part_of(plan, j)).any(|other| same(&other)) {
        return Err("is done twice");
    }
    let made = |place: &Place, by: AdafactorPart, result: usize| {
        maker(plan, i, place).filter(|m| m.op.part == by && m.reads[0] == *begin).is_some_and(|m| {
            let whole = &m.writes[result];
            let (end, last) = (whole.offset + whole.ty.bytes(), place.offset + place.ty.bytes());
            // The last of the sums is that of the parameter.
            whole.buffer == place.buffer && last == end
        })
    };
    let master = |place: &Place| {
        let place = home(plan, i, place);
        place.buffer == g.master && place.offset == 0 && place.ty.shape.numel() == g.shard_numel
    };
    let state = |place: &Place| {
        let name = StateName::AdafactorV(param.name.clone());
        plan.states.iter().any(|s| s.name == name && s.buffer == place.buffer)
    };
    let fits = match part.op.part {
        AdafactorPart::Sums => master(&part.reads[2]),
        AdafactorPart::Moments => {
            made(&part.reads[2], AdafactorPart::Sums, 0)
                && state(&part.reads[3])
                && part.writes[0] == part.reads[3]
        }
        AdafactorPart::Step => {
            master(&part.reads[2])
                && part.writes[0] == part.reads[2]
                && made(&part.reads[3], AdafactorPart::Moments, 0)
                && made(&part.reads[4], AdafactorPart::Sums, 0)
                && made(&part.reads[5], AdafactorPart::Moments, 1)
        }
    };
    match (fits, part.op.part) {
        (false, _) => Err("does not read what was made of its parameter"),
        (true, AdafactorPart::Step) => Ok(Some(group)),
        (true, _) => Ok(None),
    }
}

/// The last part of a step before task `i` that writes what `place` is of; reductions over ranks are P311's.
fn maker<'a>(plan: &'a Plan, i: TaskId, place: &Place) -> Option<Part<'a>> {
    let end = place.offset + place.ty.bytes();
    let overlaps = |w: &&Place| {
        w.buffer == place.buffer && w.offset < end && place.offset < w.offset + w.ty.bytes()
    };
    let writes = |j: &TaskId| {
        let action = &plan.tasks[*j].action;
        !action.is_collective() && action.writes().iter().any(overlaps)
    };
    TaskId::FIRST.until(i).rev().find(writes).and_then(|j| part_of(plan, j))
}
