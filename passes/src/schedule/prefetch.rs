//! Where gathers are issued.
//!
//! The gathers of one unit in one region are a set, issued together; sets are issued in the order of their
//! first use, none after it. With fixed prefetching a set is issued when the computation of the set so
//! many places before it begins, and not before the set `limit` places ahead of it is freed; root sets, and
//! those that stay until backward, are not counted. With a lead, a set is issued as late as the predicted durations allow. A kernel that
//! only prepares what is sent (the cast of a shard) moves with the first gather that sends it.

use super::{BackwardPrefetch, Prefetch};
use frit_ir::Region;
use frit_ir::plan::{Action, Place, Plan, Stream, Task};
use std::collections::{HashMap, HashSet};

/// The gathers of one unit in one region.
struct Set {
    tasks: Vec<Task>,
    /// Index into the other tasks before which the first of them is first used.
    first_use: usize,
    /// One past the last use of any.
    freed: usize,
    /// Index into the other tasks after which all that is sent is written.
    sent: usize,
    root: bool,
    backward: bool,
    /// Whether it stays gathered while other units are.
    stays: bool,
}

/// The tasks of a phase with gathers where they are issued, and extra waits (task, waited for), both
/// counted from the start of the phase.
pub(super) fn issue(
    tasks: Vec<Task>,
    plan: &Plan,
    prefetch: &Prefetch,
) -> (Vec<Task>, Vec<(usize, usize)>) {
    let (gathers, rest): (Vec<Task>, Vec<Task>) =
        tasks.into_iter().partition(|t| matches!(t.action, Action::AllGather { .. }));
    if gathers.is_empty() {
        return (rest, vec![]);
    }
    let (mut preparations, rest) = preparations(rest, &gathers);
    let mut sets = sets(gathers, &rest, plan);
    for set in &mut sets {
        let sends = |t: &Task| t.action.reads().first().map(|p| p.buffer);
        let first: Vec<Task> =
            set.tasks.iter().filter_map(|t| preparations.remove(&sends(t)?)).collect();
        set.tasks.splice(0..0, first);
    }
    let mut anchors = match prefetch {
        Prefetch::Fixed { backward, forward, limit } => {
            fixed(&sets, (*backward, 1), *forward, (*limit).max(1))
        }
        Prefetch::Ahead(n) => fixed(&sets, (BackwardPrefetch::Pre, *n), *n, n + 1),
        Prefetch::Lead(lead) => with_lead(&sets, &rest, *lead),
    };
    let mut last = 0;
    for (anchor, set) in anchors.iter_mut().zip(&sets) {
        *anchor = (*anchor).min(set.first_use).max(set.sent).max(last);
        last = *anchor;
    }
    place(sets, rest, &anchors)
}

/// Kernels that write what gathers send and read only what the phase does not write, by the buffer that
/// they write, and the other tasks.
fn preparations(rest: Vec<Task>, gathers: &[Task]) -> (HashMap<usize, Task>, Vec<Task>) {
    let buffers =
        |places: Vec<&Place>| -> HashSet<usize> { places.into_iter().map(|p| p.buffer).collect() };
    let sent: HashSet<usize> = gathers.iter().flat_map(|t| buffers(t.action.reads())).collect();
    let written: HashSet<usize> = rest.iter().flat_map(|t| buffers(t.action.writes())).collect();
    let is_kernel = |task: &Task| matches!(task.action, Action::Kernel { .. });
    let prepares = |task: &Task| match buffers(task.action.writes()).into_iter().next() {
        Some(buffer)
            if is_kernel(task) && task.action.writes().len() == 1 && sent.contains(&buffer) =>
        {
            buffers(task.action.reads()).is_disjoint(&written).then_some(buffer)
        }
        _ => None,
    };
    let (mut preparations, mut others) = (HashMap::new(), Vec::with_capacity(rest.len()));
    for task in rest {
        match prepares(&task) {
            Some(buffer) if !preparations.contains_key(&buffer) => {
                preparations.insert(buffer, task);
            }
            _ => others.push(task),
        }
    }
    (preparations, others)
}

/// The gathers by unit and region, in the order of their first use.
fn sets(gathers: Vec<Task>, rest: &[Task], plan: &Plan) -> Vec<Set> {
    let mut uses: HashMap<usize, (usize, usize)> = HashMap::new();
    let mut writers: HashMap<usize, usize> = HashMap::new();
    for (i, task) in rest.iter().enumerate() {
        for place in task.action.reads() {
            uses.entry(place.buffer).or_insert((i, i)).1 = i;
        }
        for place in task.action.writes() {
            writers.insert(place.buffer, i);
        }
    }
    let mut sets: Vec<Set> = Vec::new();
    let mut of_unit: HashMap<(usize, Region), usize> = HashMap::new();
    for task in gathers {
        let Action::AllGather { group, send, recv, .. } = &task.action else {
            unreachable!("partitioned above")
        };
        let (first, last) = uses.get(&recv.buffer).copied().unwrap_or((rest.len(), rest.len()));
        let sent = writers.get(&send.buffer).map_or(0, |w| w + 1);
        let unit = plan.groups[*group].unit;
        // What the root holds is used far apart: each of its gathers is a set.
        let known = if unit == 0 { None } else { of_unit.get(&(unit, task.region)).copied() };
        match known {
            Some(at) => {
                let set = &mut sets[at];
                set.first_use = set.first_use.min(first);
                set.freed = set.freed.max(last + 1);
                set.sent = set.sent.max(sent);
                set.tasks.push(task);
            }
            None => {
                of_unit.insert((unit, task.region), sets.len());
                let backward = task.region != Region::Forward;
                let (first_use, freed) = (first, last + 1);
                let root = unit == 0;
                let stays = false;
                sets.push(Set { tasks: vec![task], first_use, freed, sent, root, backward, stays });
            }
        }
    }
    sets.sort_by_key(|s| s.first_use);
    for set in &mut sets {
        let last = rest.get(set.freed.saturating_sub(1)).map(|t| t.region);
        set.stays = !set.backward && last.is_some_and(|region| region != Region::Forward);
    }
    // Backward begins with the last unit: nothing is used between its two uses.
    if let Some(last) = sets.iter_mut().rfind(|s| !s.backward && !s.root) {
        last.stays = false;
    }
    sets
}

/// For every set, the index into the other tasks before which fixed prefetching issues it.
fn fixed(
    sets: &[Set],
    (backward, back): (BackwardPrefetch, usize),
    forward: usize,
    limit: usize,
) -> Vec<usize> {
    let mut counted: Vec<&Set> = Vec::new();
    let mut freed: Vec<usize> = Vec::new();
    let mut anchors = Vec::new();
    for set in sets {
        let ahead = match (set.backward, backward) {
            (false, _) => forward,
            (true, BackwardPrefetch::None) => 0,
            (true, _) => back,
        };
        let mut anchor = match (ahead, counted.len().checked_sub(ahead.max(1))) {
            (0, _) => set.first_use,
            (_, None) => 0,
            (_, Some(k)) if set.backward && backward == BackwardPrefetch::Post => counted[k].freed,
            (_, Some(k)) => counted[k].first_use,
        };
        if !set.root {
            if let Some(k) = freed.len().checked_sub(limit) {
                anchor = anchor.max(freed[k]);
            }
            freed.extend((!set.stays).then_some(set.freed));
            counted.push(set);
        }
        anchors.push(anchor);
    }
    anchors
}

/// For every set, the last task before which it must be issued to arrive in time, if every gather takes
/// `lead` times its predicted duration and kernels take theirs.
fn with_lead(sets: &[Set], rest: &[Task], lead: f64) -> Vec<usize> {
    // When each task of the compute stream starts if nothing is waited for.
    let mut starts = Vec::with_capacity(rest.len() + 1);
    let mut now = 0.0;
    for task in rest {
        starts.push(now);
        if task.stream == Stream::Compute {
            now += task.cost_us;
        }
    }
    starts.push(now);
    let mut anchors = vec![0; sets.len()];
    let mut next = f64::INFINITY;
    for (anchor, set) in anchors.iter_mut().zip(sets).rev() {
        let gathers = set.tasks.iter().filter(|t| t.stream != Stream::Compute);
        let duration: f64 = gathers.map(|t| t.cost_us).sum();
        next = next.min(starts[set.first_use.min(rest.len())]) - lead * duration;
        *anchor = starts.partition_point(|start| *start <= next).saturating_sub(1);
    }
    anchors
}

fn place(sets: Vec<Set>, rest: Vec<Task>, anchors: &[usize]) -> (Vec<Task>, Vec<(usize, usize)>) {
    let mut tasks = Vec::with_capacity(rest.len() + 2 * sets.len());
    let mut waits = Vec::new();
    let mut last_compute = None;
    let mut sets = sets.into_iter().zip(anchors).peekable();
    for (i, task) in rest.into_iter().enumerate() {
        while let Some((set, _)) = sets.next_if(|(_, anchor)| **anchor <= i) {
            for task in set.tasks {
                // A gather, not before the computation that frees the memory of an earlier one.
                if task.stream != Stream::Compute {
                    waits.extend(last_compute.map(|compute| (tasks.len(), compute)));
                } else {
                    last_compute = Some(tasks.len());
                }
                tasks.push(task);
            }
        }
        if task.stream == Stream::Compute {
            last_compute = Some(tasks.len());
        }
        tasks.push(task);
    }
    tasks.extend(sets.flat_map(|(set, _)| set.tasks));
    (tasks, waits)
}
