//! Verifies accesses to host memory.
//!
//! P501  only copies between device and host access host memory
//! P502  copies from the host run on one stream, copies to the host on another, and nothing else
//!       runs on either

use super::broken;
use frit_ir::plan::{Action, Arena, Place, Plan, Stream, TaskId};
use frit_ir::{Code, Diagnostic};

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    for (i, task) in plan.tasks.iter_enumerated() {
        let direction = match &task.action {
            Action::Copy { from, to } if is_on_host(plan, from) != is_on_host(plan, to) => {
                Some(if is_on_host(plan, from) { Stream::CopyIn } else { Stream::CopyOut })
            }
            _ => None,
        };
        let places = task.action.reads().into_iter().chain(task.action.writes());
        let on_host = places.into_iter().find(|p| is_on_host(plan, p));
        if let (None, Some(place)) = (direction, on_host) {
            let name = &plan.buffers[place.buffer].name;
            let message = format!("works on `{name}`, which is in host memory");
            found.push(broken(plan, Code::HostReach, i, message));
        }
        let copies = matches!(task.stream, Stream::CopyIn | Stream::CopyOut);
        if (copies || direction.is_some()) && direction != Some(task.stream) {
            let message = format!("runs on the stream `{}`", task.stream.name());
            found.push(broken(plan, Code::HostStreams, i, message));
        }
    }
}

fn is_on_host(plan: &Plan, place: &Place) -> bool {
    plan.buffers[place.buffer].arena == Arena::Host
}

/// Where what task `i` works on rests: in host memory, if it was copied in before in the same phase.
pub(super) fn home(plan: &Plan, i: TaskId, place: &Place) -> Place {
    let phase = plan.phases.iter().find(|p| p.range().contains(&i));
    let before = &plan.tasks[phase.map_or(TaskId::FIRST, |p| p.begin)..i];
    let copied = before.iter().rev().find_map(|task| match &task.action {
        Action::Copy { from, to } if to.buffer == place.buffer && is_on_host(plan, from) => {
            let offset = (from.offset + place.offset).checked_sub(to.offset)?;
            Some(Place { buffer: from.buffer, offset, ty: place.ty.clone() })
        }
        _ => None,
    });
    copied.unwrap_or_else(|| place.clone())
}
