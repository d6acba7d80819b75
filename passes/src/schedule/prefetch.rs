//! Where gathers are issued.
//!
//! Gathers keep their order. One is issued as early as prefetching allows (relative to the use of the
//! gather before it), not before the gather `limit` places ahead of it is freed, and not after its own
//! first use. The root's gathers are not counted: they stay through the step.

use super::{BackwardPrefetch, ScheduleOptions};
use frit_ir::Region;
use frit_ir::plan::{Action, Plan, Task};
use std::collections::HashMap;

struct Gather {
    task: Task,
    /// Index into the other tasks before which it is first used.
    first_use: usize,
    /// One past the last use.
    freed: usize,
    root: bool,
}

/// The tasks of a phase with gathers where they are issued, and extra waits (task, waited for), both
/// counted from the start of the phase.
pub(super) fn issue(
    tasks: Vec<Task>,
    plan: &Plan,
    options: &ScheduleOptions,
) -> (Vec<Task>, Vec<(usize, usize)>) {
    let (gathers, rest): (Vec<Task>, Vec<Task>) =
        tasks.into_iter().partition(|t| matches!(t.action, Action::AllGather { .. }));
    if gathers.is_empty() {
        return (rest, vec![]);
    }
    let mut uses: HashMap<usize, (usize, usize)> = HashMap::new();
    let mut writers: HashMap<usize, usize> = HashMap::new();
    for (i, task) in rest.iter().enumerate() {
        for place in task.action.reads() {
            let (_, last) = uses.entry(place.buffer).or_insert((i, i));
            *last = i;
        }
        for place in task.action.writes() {
            writers.insert(place.buffer, i);
        }
    }
    let gathers: Vec<Gather> = gathers
        .into_iter()
        .map(|task| {
            let Action::AllGather { group, recv, .. } = &task.action else {
                unreachable!("partitioned above")
            };
            let (first, last) = uses.get(&recv.buffer).copied().unwrap_or((rest.len(), rest.len()));
            let root = plan.groups[*group].unit == 0;
            Gather { task, first_use: first, freed: last + 1, root }
        })
        .collect();
    let anchors = anchors(&gathers, &writers, options);
    place(gathers, rest, &anchors)
}

/// For every gather, the index into the other tasks before which it is issued.
fn anchors(
    gathers: &[Gather],
    writers: &HashMap<usize, usize>,
    options: &ScheduleOptions,
) -> Vec<usize> {
    let mut anchors: Vec<usize> = Vec::new();
    let mut counted: Vec<&Gather> = Vec::new();
    for gather in gathers {
        let backward = gather.task.region != Region::Forward;
        let ahead = match (backward, options.backward_prefetch) {
            (false, _) => options.forward_prefetch,
            (true, BackwardPrefetch::None) => 0,
            (true, _) => 1,
        };
        let mut anchor = match (ahead, counted.len().checked_sub(ahead.max(1))) {
            (0, _) => gather.first_use,
            (_, None) => 0,
            (_, Some(k)) if backward && options.backward_prefetch == BackwardPrefetch::Post => {
                counted[k].freed
            }
            (_, Some(k)) => counted[k].first_use,
        };
        if !gather.root {
            let limit = options.limit_all_gathers.max(1);
            if let Some(k) = counted.len().checked_sub(limit) {
                anchor = anchor.max(counted[k].freed);
            }
            counted.push(gather);
        } else if ahead > 0 {
            anchor = 0;
        }
        let sent = gather.task.action.reads().iter().filter_map(|p| writers.get(&p.buffer)).max();
        anchor = anchor.min(gather.first_use).max(sent.map_or(0, |w| w + 1));
        anchor = anchor.max(anchors.last().copied().unwrap_or(0));
        anchors.push(anchor);
    }
    anchors
}

fn place(
    gathers: Vec<Gather>,
    rest: Vec<Task>,
    anchors: &[usize],
) -> (Vec<Task>, Vec<(usize, usize)>) {
    let mut tasks = Vec::with_capacity(rest.len() + gathers.len());
    let mut waits = Vec::new();
    let mut last_compute = None;
    let mut gathers = gathers.into_iter().zip(anchors).peekable();
    for (i, task) in rest.into_iter().enumerate() {
        while let Some((gather, _)) = gathers.next_if(|(_, anchor)| **anchor <= i) {
            // Not before the computation that frees the memory of an earlier one.
            waits.extend(last_compute.map(|compute| (tasks.len(), compute)));
            tasks.push(gather.task);
        }
        if task.stream == frit_ir::plan::Stream::Compute {
            last_compute = Some(tasks.len());
        }
        tasks.push(task);
    }
    for (gather, _) in gathers {
        tasks.push(gather.task);
    }
    (tasks, waits)
}
