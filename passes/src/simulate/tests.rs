//! Tests of the simulator on small programs whose timelines are known.

use super::execute::run;
use super::jobs::{Job, Kind};
use super::{Phase, bound};
use crate::cost::Cluster;
use frit_ir::plan::{PhaseName, Stream};

fn cluster(contention: f64) -> Cluster {
    Cluster { contention, ..Cluster::named("h100").unwrap() }
}

fn job(stream: Stream, kind: Kind, seconds: f64, waits: &[usize]) -> Job {
    let inter = kind.is_communication();
    let waits = waits.to_vec();
    Job { name: String::new(), scope: "".into(), stream, kind, seconds, inter, waits }
}

fn compute(seconds: f64, waits: &[usize]) -> Job {
    job(Stream::Compute, Kind::Gemm, seconds, waits)
}

fn gather(seconds: f64, waits: &[usize]) -> Job {
    job(Stream::Gather, Kind::AllGather, seconds, waits)
}

fn reduce(seconds: f64, waits: &[usize]) -> Job {
    job(Stream::Reduce, Kind::ReduceScatter, seconds, waits)
}

#[test]
fn a_prefetched_gather_is_hidden_and_a_late_one_exposed() {
    let early = [gather(1.0, &[]), gather(1.0, &[]), compute(2.0, &[0]), compute(2.0, &[1])];
    let late = [gather(1.0, &[]), compute(2.0, &[0]), gather(1.0, &[1]), compute(2.0, &[2])];
    assert_eq!(run(&early, &cluster(0.0)).end, 5.0);
    let timeline = run(&late, &cluster(0.0));
    assert_eq!(timeline.end, 6.0);
    assert_eq!(timeline.busy(&late, |k| k.is_compute()), 4.0);
    assert_eq!(timeline.busy(&late, Kind::is_communication), 2.0);
}

#[test]
fn exchanges_on_one_level_share_it() {
    let jobs = [gather(1.0, &[]), reduce(2.0, &[])];
    let timeline = run(&jobs, &cluster(0.0));
    assert_eq!(timeline.spans[0].end, 2.0);
    assert_eq!(timeline.end, 3.0);
    let mut apart = jobs.to_vec();
    apart[0].inter = false;
    assert_eq!(run(&apart, &cluster(0.0)).end, 2.0);
}

#[test]
fn copies_from_and_to_the_host_go_at_once_and_leave_kernels_alone() {
    let jobs = [
        job(Stream::CopyIn, Kind::HostCopy, 2.0, &[]),
        job(Stream::CopyOut, Kind::HostCopy, 2.0, &[]),
        compute(2.0, &[]),
    ];
    let timeline = run(&jobs, &cluster(0.2));
    assert_eq!(timeline.end, 2.0);
    assert_eq!(timeline.busy(&jobs, Kind::is_compute), 2.0);
    assert_eq!(timeline.busy(&jobs, Kind::is_communication), 0.0);
}

#[test]
fn kernels_are_slower_while_ranks_exchange() {
    let jobs = [gather(1.0, &[]), compute(1.8, &[])];
    let timeline = run(&jobs, &cluster(0.2));
    assert!((timeline.end - 2.0).abs() < 1e-9, "{}", timeline.end);
}

#[test]
fn the_critical_path_names_what_bounds_the_step() {
    let jobs = vec![compute(1.0, &[]), gather(5.0, &[]), compute(2.0, &[1]), reduce(0.5, &[2])];
    let timeline = run(&jobs, &cluster(0.0));
    let phase = Phase { name: PhaseName::MicroStep, runs: 2, jobs, timeline };
    assert_eq!(bound::path(&phase), [3, 2, 1]);
    let shares = bound::shares(&[phase], 15.0);
    let found: Vec<(&str, f64)> = shares.iter().map(|s| (s.what, s.seconds)).collect();
    assert_eq!(
        found,
        [("all_gather", 10.0), ("GEMMs and convolutions", 4.0), ("reduce_scatter", 1.0)]
    );
}

#[test]
fn nothing_takes_no_time() {
    assert_eq!(run(&[], &cluster(0.1)).end, 0.0);
    assert_eq!(run(&[compute(0.0, &[]), compute(0.0, &[])], &cluster(0.1)).end, 0.0);
}
