//! Executes the streams: each runs its jobs in order, every job after those it waits for.
//!
//! Work progresses as a fluid model. Concurrent collectives over the same level of the network share it equally; kernels lose the cluster's
//! `contention` while any collective runs, since that occupies multiprocessors and memory. Host copies have their own engines and a link in
//! each direction.

use super::jobs::{Job, Kind};
use super::lane;
use crate::cost::Cluster;
use frit_ir::plan::Stream;

const STREAMS: usize = Stream::ALL.len();

/// When a job runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    /// Second of its start.
    pub start: f64,
    /// Second of its end.
    pub end: f64,
    /// The job whose end it started at, if it did not start at once.
    pub cause: Option<usize>,
}

/// When the jobs of a phase run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// By job.
    pub spans: Vec<Span>,
    /// Second of the last end.
    pub end: f64,
}

impl Timeline {
    /// Seconds in which at least one job of such a kind runs.
    pub fn busy(&self, jobs: &[Job], of: impl Fn(Kind) -> bool) -> f64 {
        let chosen = self.spans.iter().zip(jobs).filter(|(_, job)| of(job.kind));
        let mut spans: Vec<(f64, f64)> = chosen.map(|(s, _)| (s.start, s.end)).collect();
        spans.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut busy, mut until) = (0.0, 0.0_f64);
        for (start, end) in spans {
            busy += (end - start.max(until)).max(0.0);
            until = until.max(end);
        }
        busy
    }
}

/// Runs the jobs from second zero. Waits must name earlier jobs.
pub fn run(jobs: &[Job], cluster: &Cluster) -> Timeline {
    let mut queues: [Vec<usize>; STREAMS] = [const { Vec::new() }; STREAMS];
    for (i, job) in jobs.iter().enumerate().rev() {
        queues[lane(job.stream)].push(i);
    }
    let mut spans: Vec<Span> = vec![Span::default(); jobs.len()];
    let mut done = vec![false; jobs.len()];
    let mut running: [Option<(usize, f64)>; STREAMS] = [None; STREAMS];
    let mut previous: [Option<usize>; STREAMS] = [None; STREAMS];
    let mut now = 0.0;
    loop {
        for s in 0..STREAMS {
            if running[s].is_some() {
                continue;
            }
            let Some(&next) = queues[s].last() else { continue };
            if jobs[next].waits.iter().all(|w| done[*w]) {
                queues[s].pop();
                let before = jobs[next].waits.iter().copied().chain(previous[s]);
                let cause = before.max_by(|a, b| spans[*a].end.total_cmp(&spans[*b].end));
                spans[next] = Span { start: now, end: now, cause };
                running[s] = Some((next, jobs[next].seconds));
            }
        }
        let rates = rates(jobs, &running, cluster);
        let ends = running.iter().zip(rates).filter_map(|(r, rate)| r.map(|(_, left)| left / rate));
        let Some(step) = ends.min_by(f64::total_cmp) else { break };
        now += step;
        for s in 0..STREAMS {
            let Some((job, left)) = &mut running[s] else { continue };
            // Relative to the step, what is left of one that ends now is rounding.
            if *left / rates[s] <= step * (1.0 + 1e-12) {
                spans[*job].end = now;
                done[*job] = true;
                previous[s] = Some(*job);
                running[s] = None;
            } else {
                *left -= step * rates[s];
            }
        }
    }
    Timeline { spans, end: now }
}

/// How fast each stream's job progresses, 1 if alone.
fn rates(
    jobs: &[Job],
    running: &[Option<(usize, f64)>; STREAMS],
    cluster: &Cluster,
) -> [f64; STREAMS] {
    let exchanges = |inter: bool| {
        let active = running.iter().flatten().map(|(i, _)| &jobs[*i]);
        active.filter(|j| j.kind.is_communication() && j.inter == inter).count()
    };
    let (inter, intra) = (exchanges(true), exchanges(false));
    running.map(|r| match r.map(|(i, _)| &jobs[i]) {
        Some(job) if job.kind.is_communication() => {
            1.0 / if job.inter { inter } else { intra } as f64
        }
        Some(job) if job.kind.is_compute() && inter + intra > 0 => 1.0 - cluster.contention,
        _ => 1.0,
    })
}
