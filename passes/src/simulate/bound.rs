//! Finds the critical path of a step, by kind of work.

use super::jobs::Kind;
use super::{Phase, Share};
use std::collections::BTreeMap;

/// The critical path of all phases, by kind of work, the largest share first.
pub(super) fn shares(phases: &[Phase], step_seconds: f64) -> Vec<Share> {
    let mut seconds: BTreeMap<Kind, f64> = BTreeMap::new();
    for phase in phases {
        for job in path(phase) {
            let span = phase.timeline.spans[job];
            *seconds.entry(phase.jobs[job].kind).or_default() +=
                phase.runs as f64 * (span.end - span.start);
        }
    }
    let share = |(kind, seconds): (Kind, f64)| Share {
        what: kind.name(),
        seconds,
        fraction: seconds / step_seconds,
    };
    let mut shares: Vec<Share> = seconds.into_iter().map(share).collect();
    shares.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    shares
}

/// The jobs of a phase of which each started when the one before it ended, the last one first.
pub fn path(phase: &Phase) -> Vec<usize> {
    let spans = &phase.timeline.spans;
    let mut at = (0..spans.len()).max_by(|a, b| spans[*a].end.total_cmp(&spans[*b].end));
    let mut path = Vec::new();
    while let Some(job) = at {
        path.push(job);
        at = spans[job].cause;
    }
    path
}
