//! Decides where gathers, and copies of parameters from the host, are issued.
//!
//! The gathers of one unit in one region are a set, issued together; sets are issued in the order of their first use, at the latest
//! there. With fixed prefetching a set is issued when the computation of an earlier set begins, by the configured number of sets, and not
//! before the set `limit` positions earlier is freed; root sets, and those that stay until backward, are not counted. With a lead, a set
//! is issued as late as the predicted durations allow.
//!
//! A kernel that only prepares what is sent (the cast of a shard) moves with the first gather that sends it. Offloaded parameters that
//! kernels read directly are sets too, with the kernels that only cast them; a copy that a gather or a cast waits for is issued with an
//! earlier set, so that the computation does not wait for it.

use super::{BackwardPrefetch, Prefetch};
use frit_ir::Region;
use frit_ir::plan::{Action, BufferId, Place, Plan, Stream, Task, UnitId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The gathers of one unit in one region, or the copies of it from the host.
struct Set {
    /// Copies from the host that the other tasks wait for.
    ahead: Vec<Task>,
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
    let copies_in =
        |t: &Task| t.region != Region::Update && plan.host_copy(&t.action) == Some(Stream::CopyIn);
    let (copies, rest): (Vec<Task>, Vec<Task>) = rest.into_iter().partition(copies_in);
    if gathers.is_empty() && copies.is_empty() {
        return (rest, vec![]);
    }
    let (preparations, rest) = preparations(rest, &gathers, &copies);
    let mut moving = Moving::new(copies, preparations);
    let arrivals = moving.arrivals(gathers, plan);
    let mut sets = sets(arrivals, &rest);
    sets.iter_mut().for_each(|set| moving.complete(set));
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

fn buffers(places: Vec<&Place>) -> BTreeSet<BufferId> {
    places.into_iter().map(|p| p.buffer).collect()
}

/// Kernels that write what gathers send, or read only one buffer, which is copied from the host, and read nothing that
/// others write, by the buffer that they write; and the other tasks.
fn preparations(
    rest: Vec<Task>,
    gathers: &[Task],
    copies: &[Task],
) -> (BTreeMap<BufferId, Task>, Vec<Task>) {
    let sent: BTreeSet<BufferId> = gathers.iter().flat_map(|t| buffers(t.action.reads())).collect();
    let staged: BTreeSet<BufferId> =
        copies.iter().flat_map(|t| buffers(t.action.writes())).collect();
    let written: BTreeSet<BufferId> =
        rest.iter().flat_map(|t| buffers(t.action.writes())).collect();
    let prepares = |task: &Task| {
        let (reads, writes) = (buffers(task.action.reads()), task.action.writes());
        let ([place], true) = (&writes[..], reads.is_disjoint(&written)) else { return None };
        if !matches!(task.action, Action::Kernel { .. }) {
            return None;
        }
        let casts = reads.len() == 1 && reads.is_subset(&staged);
        (sent.contains(&place.buffer) || casts).then_some(place.buffer)
    };
    let (mut preparations, mut others) = (BTreeMap::new(), Vec::with_capacity(rest.len()));
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

/// Something that kernels read once it is there.
struct Arrival {
    /// The gather, or the copy from the host.
    task: Task,
    unit: UnitId,
    /// Buffers that kernels read.
    delivers: Vec<BufferId>,
}

/// Tasks that move with arrivals.
struct Moving {
    /// Copies from the host by the buffer of the device.
    copies: BTreeMap<BufferId, Task>,
    /// Kernels by the buffer that they write.
    preparations: BTreeMap<BufferId, Task>,
}

impl Moving {
    fn new(copies: Vec<Task>, preparations: BTreeMap<BufferId, Task>) -> Self {
        let by_result = |t: Task| (t.action.writes()[0].buffer, t);
        Moving { copies: copies.into_iter().map(by_result).collect(), preparations }
    }

    /// The gathers, and the copies from the host that are for none of them.
    fn arrivals(&mut self, gathers: Vec<Task>, plan: &Plan) -> Vec<Arrival> {
        let mut arrivals = Vec::with_capacity(gathers.len());
        let mut sent = BTreeSet::new();
        for task in gathers {
            let Action::AllGather { group, send, recv, .. } = &task.action else {
                unreachable!("partitioned before")
            };
            sent.insert(send.buffer);
            let prepared = self.preparations.get(&send.buffer);
            sent.extend(prepared.into_iter().flat_map(|t| buffers(t.action.reads())));
            let (unit, delivers) = (plan.groups[*group].unit, vec![recv.buffer]);
            arrivals.push(Arrival { task, unit, delivers });
        }
        let is_alone = |buffer: &BufferId| !sent.contains(buffer);
        let alone: Vec<BufferId> = self.copies.keys().copied().filter(is_alone).collect();
        for staged in alone {
            let Some(task) = self.copies.remove(&staged) else { continue };
            let from = task.action.reads()[0].buffer;
            let group = plan.groups.iter().find(|g| g.master == from);
            let unit = group.map_or(UnitId::ROOT, |g| g.unit);
            let made = self.made_of(staged);
            arrivals.push(Arrival { task, unit, delivers: [vec![staged], made].concat() });
        }
        arrivals
    }

    /// The buffers prepared from a buffer.
    fn made_of(&self, buffer: BufferId) -> Vec<BufferId> {
        let reads = |t: &Task| t.action.reads().iter().any(|p| p.buffer == buffer);
        self.preparations.iter().filter(|(_, t)| reads(t)).map(|(made, _)| *made).collect()
    }

    /// Adds to a set the sources of its gathers, and the values computed from its copies.
    fn complete(&mut self, set: &mut Set) {
        let mut preparations = Vec::new();
        let mut arrivals = Vec::new();
        for task in std::mem::take(&mut set.tasks) {
            if let Action::AllGather { send, .. } = &task.action {
                let prepared = self.preparations.remove(&send.buffer);
                let staged = prepared.as_ref().map_or(send.buffer, |t| t.action.reads()[0].buffer);
                set.ahead.extend(self.copies.remove(&staged));
                preparations.extend(prepared);
                arrivals.push(task);
                continue;
            }
            let made = self.made_of(task.action.writes()[0].buffer);
            match made.is_empty() {
                true => arrivals.push(task),
                false => set.ahead.push(task),
            }
            preparations.extend(made.iter().filter_map(|buffer| self.preparations.remove(buffer)));
        }
        set.tasks = [preparations, arrivals].concat();
    }
}

/// The arrivals by unit and region, in the order of their first use.
fn sets(arrivals: Vec<Arrival>, rest: &[Task]) -> Vec<Set> {
    let mut uses: HashMap<BufferId, (usize, usize)> = HashMap::new();
    let mut writers: HashMap<BufferId, usize> = HashMap::new();
    for (i, task) in rest.iter().enumerate() {
        for place in task.action.reads() {
            uses.entry(place.buffer).or_insert((i, i)).1 = i;
        }
        for place in task.action.writes() {
            writers.insert(place.buffer, i);
        }
    }
    let mut sets: Vec<Set> = Vec::new();
    let mut of_unit: HashMap<(UnitId, Region), usize> = HashMap::new();
    for Arrival { task, unit, delivers } in arrivals {
        let used: Vec<(usize, usize)> =
            delivers.iter().filter_map(|b| uses.get(b)).copied().collect();
        let first = used.iter().map(|u| u.0).min().unwrap_or(rest.len());
        let last = used.iter().map(|u| u.1).max().unwrap_or(rest.len());
        let sent = writers.get(&task.action.reads()[0].buffer).map_or(0, |w| w + 1);
        // Parameters of the root are used far apart, so each of its gathers is a separate set.
        let known =
            if unit == UnitId::ROOT { None } else { of_unit.get(&(unit, task.region)).copied() };
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
                let root = unit == UnitId::ROOT;
                let stays = false;
                let (ahead, tasks) = (vec![], vec![task]);
                sets.push(Set { ahead, tasks, first_use, freed, sent, root, backward, stays });
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
        let all = set.ahead.iter().chain(&set.tasks);
        let gathers = all.filter(|t| t.stream != Stream::Compute);
        let duration: f64 = gathers.map(|t| t.cost_us).sum();
        next = next.min(starts[set.first_use.min(rest.len())]) - lead * duration;
        *anchor = starts.partition_point(|start| *start <= next).saturating_sub(1);
    }
    anchors
}

fn place(
    mut sets: Vec<Set>,
    rest: Vec<Task>,
    anchors: &[usize],
) -> (Vec<Task>, Vec<(usize, usize)>) {
    // Sources of a set are issued with the previous set.
    let mut first = Vec::new();
    for k in 0..sets.len() {
        let ahead = std::mem::take(&mut sets[k].ahead);
        match (0..k).rev().find(|j| anchors[*j] < anchors[k]) {
            Some(before) => sets[before].tasks.extend(ahead),
            None => first.extend(ahead),
        }
    }
    if let Some(set) = sets.first_mut() {
        set.tasks.splice(0..0, first);
    }
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
