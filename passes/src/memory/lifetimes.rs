//! When buffers are in use, as far as the events tell.

use crate::schedule::happens_before::{Clock, Clocks, index};
use frit_ir::plan::{Plan, Stream};

/// The accesses of one buffer.
#[derive(Clone, Debug)]
pub(super) struct Lifetime {
    /// For each stream, one more than the last task that accesses it.
    end: Clock,
    /// What is complete before any of its accesses starts.
    start: Clock,
    /// First and last task, in list order.
    pub(super) span: (usize, usize),
}

impl Lifetime {
    /// Whether every access of `self` is complete before any of `other` starts.
    pub(super) fn before(&self, other: &Lifetime) -> bool {
        self.end.iter().zip(&other.start).all(|(end, start)| end <= start)
    }

    /// Whether the two may be in use at once.
    pub(super) fn overlaps(&self, other: &Lifetime) -> bool {
        !self.before(other) && !other.before(self)
    }
}

/// Lifetimes by buffer; `None` for those never accessed.
pub(super) fn of(plan: &Plan) -> Vec<Option<Lifetime>> {
    let mut lifetimes: Vec<Option<Lifetime>> = vec![None; plan.buffers.len()];
    for phase in &plan.phases {
        let clocks = Clocks::of(&plan.tasks, phase.begin, phase.end);
        for i in phase.begin..phase.end {
            let task = &plan.tasks[i];
            let stream = index(task.stream);
            for place in task.action.reads().into_iter().chain(task.action.writes()) {
                let life = lifetimes[place.buffer].get_or_insert(Lifetime {
                    end: [0; Stream::ALL.len()],
                    start: *clocks.start(i),
                    span: (i, i),
                });
                life.end[stream] = life.end[stream].max(i + 1);
                for (known, now) in life.start.iter_mut().zip(clocks.start(i)) {
                    *known = (*known).min(*now);
                }
                life.span.1 = i;
            }
        }
    }
    lifetimes
}
