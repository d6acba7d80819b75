//! Scheduling: when gathers are issued, and what each stream waits for.
//!
//! In: a plan in graph order. Out: gathers and host-to-device copies of parameters moved to where prefetching issues them, reductions and
//! copies limited in flight, and on every task the waits that order it after its dependences in other streams: at most one per stream, and
//! none that others imply.
//!
//! Source: FSDP's backward prefetch and rate limiter (Zhao et al. 2023, §3.3, §3.4).

pub mod auto;
pub mod happens_before;
mod prefetch;
mod unshard;

use frit_ir::plan::{
    Action, BufferId, Phase, Place, Plan, Stream, Task, TaskId, TiSlice, TiVec, UnitId,
};
use happens_before::Clocks;
use std::collections::{BTreeSet, HashMap};

frit_ir::choices! {
    /// When the gather for the backward pass of the next unit is issued.
    BackwardPrefetch {
        /// Before the current unit's backward computation.
        Pre = "pre",
        /// After the current unit's backward computation, before its reduction.
        Post = "post",
        /// When it is needed.
        None = "none",
    }
}

/// When gathers are issued.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Prefetch {
    /// By counting units, as FSDP does.
    Fixed {
        /// For gathers in backward.
        backward: BackwardPrefetch,
        /// Units gathered ahead in forward; 0 gathers when needed.
        forward: usize,
        /// Units gathered and not yet freed at any time, the root and those that stay gathered until
        /// backward left out; at least 1.
        limit: usize,
    },
    /// In both passes when the computation of the unit so many places before begins, one more than so many
    /// units being gathered and not yet freed.
    Ahead(usize),
    /// As late as the predicted durations allow, if a gather takes this many times its own.
    Lead(f64),
}

/// Flat gradients alive at any time: the one that is reduced and the one that is written.
const GRADIENTS_IN_FLIGHT: usize = 2;

/// Offloaded units that are on the device at any time: the one in use and the next.
const STAGED: usize = 2;

/// Schedules a lowered plan.
pub fn schedule(plan: &mut Plan, prefetch: &Prefetch) {
    let tasks = std::mem::take(&mut plan.tasks);
    let mut phases = TiVec::new();
    for phase in &plan.phases {
        let part = tasks[phase.range()].raw.to_vec();
        let (part, extra) = prefetch::issue(part, plan, prefetch);
        let begin = plan.tasks.next_key();
        let id = |position: usize| TaskId(begin.0 + position);
        let extra: Vec<(TaskId, TaskId)> =
            extra.into_iter().map(|(task, wait)| (id(task), id(wait))).collect();
        plan.tasks.extend(part);
        let end = plan.tasks.next_key();
        phases.push(Phase { name: phase.name, begin, end });
        let limits = staging_limit(plan, begin);
        add_waits(&mut plan.tasks, begin, &[extra, limits].concat());
    }
    plan.phases = phases;
}

/// Sets the waits of the tasks from `begin` on, which are the last phase so far, in list order.
fn add_waits(tasks: &mut TiSlice<TaskId, Task>, begin: TaskId, extra: &[(TaskId, TaskId)]) {
    let mut needed = dependencies(tasks, begin);
    for &(task, wait) in extra.iter().chain(&gradient_limit(tasks, begin)) {
        needed[task].insert(wait);
    }
    let mut clocks = Clocks::new(begin);
    for i in begin.until(tasks.next_key()) {
        let mut waits = Vec::new();
        // The latest first: it may imply the others.
        for &wait in needed[i].iter().rev() {
            if tasks[wait].stream != tasks[i].stream && !clocks.implied(tasks, i, &waits, wait) {
                waits.push(wait);
            }
        }
        waits.sort_unstable();
        tasks[i].waits = waits;
        clocks.push(tasks, i);
    }
}

/// For every task from `begin` on, the earlier ones from there on whose writes it reads or overwrites, or whose reads
/// it overwrites.
fn dependencies(tasks: &TiSlice<TaskId, Task>, begin: TaskId) -> TiVec<TaskId, BTreeSet<TaskId>> {
    struct Access {
        task: TaskId,
        range: (usize, usize),
        write: bool,
    }
    let range = |p: &Place| (p.offset, p.offset + p.ty.bytes());
    let mut of_buffer: HashMap<BufferId, Vec<Access>> = HashMap::new();
    let mut needed: TiVec<TaskId, BTreeSet<TaskId>> = vec![BTreeSet::new(); tasks.len()].into();
    for (i, task) in tasks.iter_enumerated().skip(begin.0) {
        let reads = task.action.reads().into_iter().map(|p| (p, false));
        let all: Vec<(&Place, bool)> =
            reads.chain(task.action.writes().into_iter().map(|p| (p, true))).collect();
        for (place, write) in &all {
            let (first, last) = range(place);
            for a in of_buffer.get(&place.buffer).into_iter().flatten() {
                if (*write || a.write) && a.range.0 < last && first < a.range.1 {
                    needed[i].insert(a.task);
                }
            }
        }
        for (place, write) in all {
            let access = Access { task: i, range: range(place), write };
            of_buffer.entry(place.buffer).or_default().push(access);
        }
    }
    needed
}

/// A copy from the host waits until the work on the unit that was copied two before is complete, copies back
/// included, so that its memory can be reused; unless that work comes later.
fn staging_limit(plan: &Plan, begin: TaskId) -> Vec<(TaskId, TaskId)> {
    let mut unit_of: HashMap<BufferId, UnitId> = HashMap::new();
    for group in &plan.groups {
        let buffers = group.states.iter().map(|s| s.buffer).chain([group.master]);
        unit_of.extend(buffers.map(|buffer| (buffer, group.unit)));
    }
    let mut copies: Vec<TaskId> = Vec::new();
    let mut last_unit = None;
    // The last use of what each window copied in; the window of each buffer of the device.
    let mut ends: Vec<TaskId> = Vec::new();
    let mut staged: HashMap<BufferId, usize> = HashMap::new();
    for (i, task) in plan.tasks.iter_enumerated().skip(begin.0) {
        let Some(Stream::CopyIn) = plan.host_copy(&task.action) else { continue };
        let unit = unit_of.get(&task.action.reads()[0].buffer);
        if last_unit != Some(unit) {
            ends.push(TaskId::FIRST);
            last_unit = Some(unit);
        }
        staged.insert(task.action.writes()[0].buffer, ends.len() - 1);
        copies.push(i);
    }
    for (i, task) in plan.tasks.iter_enumerated().skip(begin.0) {
        for place in task.action.reads().into_iter().chain(task.action.writes()) {
            if let Some(window) = staged.get(&place.buffer) {
                ends[*window] = i;
            }
        }
    }
    let wait = |copy: TaskId| {
        let window = staged[&plan.tasks[copy].action.writes()[0].buffer];
        let end = ends[window.checked_sub(STAGED)?];
        (end < copy).then_some((copy, end))
    };
    copies.into_iter().filter_map(wait).collect()
}

/// The first write of a flat gradient waits until the reduction two before its own is complete, so that its memory
/// can be reused.
fn gradient_limit(tasks: &TiSlice<TaskId, Task>, begin: TaskId) -> Vec<(TaskId, TaskId)> {
    let mut first_write: HashMap<BufferId, TaskId> = HashMap::new();
    let mut reductions: Vec<(TaskId, BufferId)> = Vec::new();
    for (i, task) in tasks.iter_enumerated().skip(begin.0) {
        for place in task.action.writes() {
            first_write.entry(place.buffer).or_insert(i);
        }
        if let Action::ReduceScatter { send, .. } = &task.action {
            reductions.push((i, send.buffer));
        }
    }
    let mut waits = Vec::new();
    for j in GRADIENTS_IN_FLIGHT..reductions.len() {
        let wait = reductions[j - GRADIENTS_IN_FLIGHT].0;
        // Sums over micro-steps are written in an earlier phase.
        if let Some(&writer) = first_write.get(&reductions[j].1).filter(|writer| wait < **writer) {
            waits.push((writer, wait));
        }
    }
    waits
}
