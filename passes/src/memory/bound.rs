//! Lower bound of the workspace: the largest total size of buffers that may all be in use at the same time.
//!
//! A buffer is in use from the start of its first access to the completion of its last, as far as the events order them; two may be in
//! use together unless all accesses of one complete before any of the other starts. No layout can let such buffers overlap. Shares no
//! code with the packing.
//!
//! For the tasks with the largest totals of buffers that may be in use while they run, it selects from these buffers,
//! in order of decreasing size, each that may be in use together with all selected before.

use frit_ir::plan::{BufferId, Plan, Stream, TaskId, TiSlice, TiVec};
use std::cmp::Reverse;
use std::collections::HashMap;

const STREAMS: usize = Stream::ALL.len();

/// Tasks at which the bound is evaluated.
const POINTS: usize = 16;

/// One more than the last task known to be complete, by stream.
type Known = [TaskId; STREAMS];

/// When a buffer is in use.
struct Use {
    size: usize,
    /// Tasks complete before any access starts.
    start: Known,
    /// One more than the last access.
    end: Known,
}

impl Use {
    fn before(&self, other: &Use) -> bool {
        (0..STREAMS).all(|s| self.end[s] <= other.start[s])
    }

    fn with(&self, other: &Use) -> bool {
        !self.before(other) && !other.before(self)
    }
}

/// The bound in bytes for the workspace `buffers`, with `sizes` by buffer.
pub(super) fn live_peak(
    plan: &Plan,
    buffers: &[BufferId],
    sizes: &TiSlice<BufferId, usize>,
) -> usize {
    let reach = complete_before(plan);
    let uses = uses(plan, buffers, sizes, &reach);
    let mut tasks: [Vec<TaskId>; STREAMS] = [const { Vec::new() }; STREAMS];
    for (i, task) in plan.tasks.iter_enumerated() {
        tasks[position(task.stream)].push(i);
    }
    // Along a stream the set of complete tasks only grows, so a buffer may be in use over one range of the stream's
    // tasks.
    let span = |u: &Use, s: usize| {
        let begin = tasks[s].partition_point(|&t| t < u.start[s]);
        let complete = |t: TaskId| (0..STREAMS).all(|k| u.end[k] <= reach[t][k]);
        let end = tasks[s].partition_point(|&t| !complete(t));
        (begin, end.max(begin))
    };
    let mut sums: Vec<(usize, TaskId)> = Vec::with_capacity(plan.tasks.len());
    for s in 0..STREAMS {
        let mut changes = vec![0_isize; tasks[s].len() + 1];
        for u in &uses {
            let (begin, end) = span(u, s);
            changes[begin] += u.size as isize;
            changes[end] -= u.size as isize;
        }
        let mut sum = 0;
        for (at, change) in changes[..tasks[s].len()].iter().enumerate() {
            sum += change;
            sums.push((sum.unsigned_abs(), tasks[s][at]));
        }
    }
    sums.sort_unstable_by_key(|(sum, task)| (Reverse(*sum), *task));
    let mut bound = 0;
    for &(sum, task) in sums.iter().take(POINTS) {
        if sum <= bound {
            break;
        }
        let s = position(plan.tasks[task].stream);
        let at = tasks[s].partition_point(|&t| t < task);
        let here = |u: &&Use| {
            let (begin, end) = span(u, s);
            begin <= at && at < end
        };
        bound = bound.max(live_at_once(uses.iter().filter(here).collect()));
    }
    bound
}

/// The total size of a subset whose buffers may all be in use at the same time.
fn live_at_once(mut uses: Vec<&Use>) -> usize {
    uses.sort_by_key(|u| Reverse(u.size));
    let mut chosen: Vec<&Use> = Vec::new();
    for u in uses {
        if chosen.iter().all(|c| c.with(u)) {
            chosen.push(u);
        }
    }
    chosen.iter().map(|u| u.size).sum()
}

fn position(stream: Stream) -> usize {
    Stream::ALL.iter().position(|s| *s == stream).unwrap_or(0)
}

fn uses(
    plan: &Plan,
    buffers: &[BufferId],
    sizes: &TiSlice<BufferId, usize>,
    reach: &TiSlice<TaskId, Known>,
) -> Vec<Use> {
    let mut uses: HashMap<BufferId, Use> = HashMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        for place in task.action.reads().into_iter().chain(task.action.writes()) {
            let u = uses.entry(place.buffer).or_insert(Use {
                size: sizes[place.buffer],
                start: reach[i],
                end: [TaskId::FIRST; STREAMS],
            });
            let s = position(task.stream);
            u.end[s] = u.end[s].max(i.next());
            for (start, known) in u.start.iter_mut().zip(reach[i]) {
                *start = (*start).min(known);
            }
        }
    }
    buffers.iter().filter_map(|b| uses.remove(b)).collect()
}

/// For every task and stream, one more than the last task known to be complete when it starts.
fn complete_before(plan: &Plan) -> TiVec<TaskId, Known> {
    let mut reach: TiVec<TaskId, Known> = TiVec::with_capacity(plan.tasks.len());
    for phase in &plan.phases {
        let mut previous: [Option<TaskId>; STREAMS] = [None; STREAMS];
        for i in phase.tasks() {
            let s = position(plan.tasks[i].stream);
            let mut known = [phase.begin; STREAMS];
            for j in previous[s].into_iter().chain(plan.tasks[i].waits.iter().copied()) {
                for (k, r) in known.iter_mut().zip(reach[j]) {
                    *k = (*k).max(r);
                }
                let t = position(plan.tasks[j].stream);
                known[t] = known[t].max(j.next());
            }
            previous[s] = Some(i);
            reach.push(known);
        }
    }
    reach
}
