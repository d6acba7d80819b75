//! Buffer lifetimes, as ordered by the events.

use crate::schedule::happens_before::{Clock, Clocks, index};
use frit_ir::plan::{BufferId, Plan, Stream, TaskId, TiVec};
use std::ops::Range;

/// The accesses of one buffer.
#[derive(Clone, Debug)]
pub(super) struct Lifetime {
    /// For each stream, one more than the last task that accesses it.
    end: Clock,
    /// Tasks complete before any of its accesses starts: for each stream, the first task that may not be.
    start: Clock,
    /// First and last task, in list order.
    pub(super) span: (TaskId, TaskId),
}

impl Lifetime {
    /// Whether every access of `self` is complete before any of `other` starts.
    pub(super) fn before(&self, other: &Lifetime) -> bool {
        self.end.iter().zip(&other.start).all(|(end, start)| end <= start)
    }

    /// Tasks such that a buffer whose tasks are all before or all after this range cannot be in use at the same time.
    pub(super) fn range(&self) -> Range<TaskId> {
        let begin = self.start.iter().copied().min().unwrap_or(TaskId::FIRST);
        let end = self.end.iter().copied().max().unwrap_or(TaskId::FIRST);
        begin..end.max(begin.next())
    }

    /// Whether both may be in use at the same time.
    pub(super) fn overlaps(&self, other: &Lifetime) -> bool {
        !self.before(other) && !other.before(self)
    }
}

/// Lifetimes by buffer; `None` for those never accessed.
pub(super) fn of(plan: &Plan) -> TiVec<BufferId, Option<Lifetime>> {
    let next = next_of_stream(plan);
    let mut lifetimes: TiVec<BufferId, Option<Lifetime>> = vec![None; plan.buffers.len()].into();
    for phase in &plan.phases {
        let clocks = Clocks::of(&plan.tasks, phase);
        for i in phase.tasks() {
            let task = &plan.tasks[i];
            let stream = index(task.stream);
            let mut start = *clocks.start(i);
            for (s, known) in start.iter_mut().enumerate() {
                *known = next[*known][s];
            }
            for place in task.action.reads().into_iter().chain(task.action.writes()) {
                let life = lifetimes[place.buffer].get_or_insert(Lifetime {
                    end: [TaskId::FIRST; Stream::ALL.len()],
                    start,
                    span: (i, i),
                });
                life.end[stream] = life.end[stream].max(i.next());
                for (known, now) in life.start.iter_mut().zip(&start) {
                    *known = (*known).min(*now);
                }
                life.span.1 = i;
            }
        }
    }
    lifetimes
}

/// For every task and one past the last, the next task of each stream from there on; one past the last if there is
/// none.
fn next_of_stream(plan: &Plan) -> TiVec<TaskId, Clock> {
    let end = plan.tasks.next_key();
    let mut next: TiVec<TaskId, Clock> = vec![[end; Stream::ALL.len()]; end.0 + 1].into();
    for (i, task) in plan.tasks.iter_enumerated().rev() {
        next[i] = next[i.next()];
        next[i][index(task.stream)] = i;
    }
    next
}
