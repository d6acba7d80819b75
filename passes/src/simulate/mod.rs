//! The simulator: executes a plan's tasks and events on a model of a cluster.
//!
//! In: a scheduled plan and a [`Cluster`]. Out: when every task runs, and from that the step time, exposed
//! communication, throughput, utilization, and what bounds the step. Ranks run the same program on equal
//! devices, so one rank's timeline is that of all: the cost does not grow with their number. Nothing is
//! random; the same plan and cluster give the same numbers.
//!
//! [`jobs`] converts tasks to jobs with durations, [`execute`] runs the streams, [`bound`] finds the critical path, [`trace`] writes a
//! timeline for Perfetto, [`roofline`] says what bounds every kernel. [`emulate`] changes the work to that of PyTorch's FSDP2, to compare predictions with published runs.

pub mod bound;
pub mod emulate;
pub mod execute;
pub mod jobs;
pub mod roofline;
#[cfg(test)]
mod tests;
pub mod trace;

use crate::cost::Cluster;
use crate::cost::kernel::is_matrix;
use execute::Timeline;
use frit_ir::plan::{Action, KernelId, PhaseName, Plan, Stream, TaskId, TiVec};
use frit_ir::{Region, TensorType};
use jobs::{Job, Kind};
use serde::Serialize;

/// The share of one kind of work in the critical path.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Share {
    /// The kind of work.
    pub what: &'static str,
    /// Seconds of a step.
    pub seconds: f64,
    /// Fraction of the step.
    pub fraction: f64,
}

/// The predicted time and memory of one step of a plan; the keys of `frit simulate --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Simulation {
    /// Name of the cluster.
    pub cluster: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Seconds of one step.
    pub step_seconds: f64,
    /// Seconds of a step in which kernels run.
    pub compute_seconds: f64,
    /// Seconds of a step in which ranks exchange data.
    pub communication_seconds: f64,
    /// Seconds of a step in which no kernel runs.
    pub exposed_communication_seconds: f64,
    /// Seconds of a step in which data move between host and device.
    pub host_copy_seconds: f64,
    /// Arena bytes of one rank.
    pub peak_bytes: u64,
    /// Bytes of one rank in host memory.
    pub host_bytes: u64,
    /// Bytes outside the arenas: context and libraries.
    pub reserved_bytes: u64,
    /// Bytes of the device.
    pub memory_bytes: u64,
    /// Whether both fit the device.
    pub fits: bool,
    /// Tokens or examples of all ranks per second: [`Plan::counted`].
    pub tokens_or_examples_per_s: f64,
    /// Floating-point operations of matmuls, convolutions and attention of one rank in one step; recomputation is not
    /// counted, half of a causal attention is.
    pub model_flops: u64,
    /// `model_flops` per second over the device's peak in the plan's compute dtype.
    pub mfu: f64,
    /// The critical path by kind of work, the largest first.
    pub bounds: Vec<Share>,
    /// The timeline, by phase.
    #[serde(skip)]
    pub phases: Vec<Phase>,
}

/// The timeline of one phase.
#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    /// Its name.
    pub name: PhaseName,
    /// How often it runs in a step.
    pub runs: usize,
    /// Its work.
    pub jobs: Vec<Job>,
    /// When each of it runs.
    pub timeline: Timeline,
}

/// Simulates one step of a plan.
pub fn simulate(plan: &Plan, cluster: &Cluster) -> Simulation {
    let phases = jobs::of_plan(plan, cluster);
    of_phases(plan, cluster, phases)
}

/// Runs the phases one after the other and sums up. Each is its name, how often it runs, and its work.
pub fn of_phases(
    plan: &Plan,
    cluster: &Cluster,
    phases: Vec<(PhaseName, usize, Vec<Job>)>,
) -> Simulation {
    let run = |(name, runs, jobs): (PhaseName, usize, Vec<Job>)| {
        let timeline = execute::run(&jobs, cluster);
        Phase { name, runs, jobs, timeline }
    };
    let phases: Vec<Phase> = phases.into_iter().map(run).collect();
    let total =
        |f: &dyn Fn(&Phase) -> f64| -> f64 { phases.iter().map(|p| p.runs as f64 * f(p)).sum() };
    let step_seconds = total(&|p| p.timeline.end);
    let compute_seconds = total(&|p| p.timeline.busy(&p.jobs, Kind::is_compute));
    let host_copy_seconds = total(&|p| p.timeline.busy(&p.jobs, |k| k == Kind::HostCopy));
    let communication_seconds = total(&|p| p.timeline.busy(&p.jobs, Kind::is_communication));
    let reserved_bytes = gib(cluster.reserved_gib);
    let memory_bytes = gib(cluster.device.memory_gib);
    let peak_bytes = plan.peak_bytes() as u64;
    let model_flops = model_flops(plan);
    let elements = plan.loss_capacity as f64 * plan.accumulation as f64 * plan.world_size as f64;
    let counted = elements * plan.counted().per_element;
    let peak = cluster.device.peak_flops(plan.compute_dtype);
    Simulation {
        cluster: cluster.name.clone(),
        ranks: plan.world_size,
        step_seconds,
        compute_seconds,
        communication_seconds,
        exposed_communication_seconds: (step_seconds - compute_seconds).max(0.0),
        host_copy_seconds,
        peak_bytes,
        host_bytes: plan.host_bytes as u64,
        reserved_bytes,
        memory_bytes,
        fits: peak_bytes + reserved_bytes <= memory_bytes,
        tokens_or_examples_per_s: counted / step_seconds,
        model_flops,
        mfu: model_flops as f64 / step_seconds / peak,
        bounds: bound::shares(&phases, step_seconds),
        phases,
    }
}

fn gib(x: f64) -> u64 {
    (x * (1_u64 << 30) as f64) as u64
}

/// FLOP of tensor cores in one step, without rematerialization.
fn model_flops(plan: &Plan) -> u64 {
    let kernels: TiVec<KernelId, u64> = plan
        .kernels
        .iter()
        .map(|k| {
            let of = |(_, node): (_, &frit_ir::Node)| {
                let types = |values: &[frit_ir::ValueId]| -> Vec<&TensorType> {
                    values.iter().map(|v| k.body.ty(*v)).collect()
                };
                node.op.flops(&types(&node.inputs), &types(&node.outputs))
            };
            k.body.nodes().filter(|(_, n)| is_matrix(&n.op)).map(of).fold(0, u64::saturating_add)
        })
        .collect();
    let of_task = |(i, task): (TaskId, &frit_ir::plan::Task)| match &task.action {
        Action::Kernel { kernel, .. } if !matches!(task.region, Region::Recompute(_)) => {
            (plan.runs(i) as u64).saturating_mul(kernels[*kernel])
        }
        _ => 0,
    };
    plan.tasks.iter_enumerated().map(of_task).sum()
}

/// Position of a stream in [`Stream::ALL`].
pub(crate) fn lane(stream: Stream) -> usize {
    Stream::ALL.iter().position(|s| *s == stream).expect("invariant: ALL holds every stream")
}
