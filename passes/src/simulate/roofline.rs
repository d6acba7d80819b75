//! What every kernel of a plan moves and computes, what bounds it, and how far the plan is from reading and writing the model's weights,
//! activations and gradients once ([`crate::model_traffic`]).
//!
//! A bound is the longest of the kernel's launch, its memory traffic at the device's bandwidth, and its arithmetic at the rate that
//! its shapes allow.

use super::jobs::{Kind, of_plan};
use crate::cost::Cluster;
use crate::cost::kernel::{body_bytes, node_flops};
use frit_ir::plan::{Action, Plan};
use serde::Serialize;
use std::collections::BTreeMap;

/// The resource that bounds a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Arithmetic.
    Compute,
    /// Memory traffic.
    Memory,
    /// The launch.
    Launch,
}

impl Bound {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Bound::Compute => "compute",
            Bound::Memory => "memory",
            Bound::Launch => "launch",
        }
    }
}

/// All uses of one kernel, or of one kind of copy, in one step of one rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The kernel's name, or the kind of work.
    pub name: String,
    /// Times that it runs.
    pub uses: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Floating-point operations; a multiply-add counts two.
    pub flops: u64,
    /// The resource that bounds one execution.
    pub bound: Bound,
    /// Predicted seconds, all uses.
    pub seconds: f64,
}

/// The work of one step of one rank, without exchanges between ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Roofline {
    /// Name of the cluster.
    pub cluster: String,
    /// The kernels that take longest first.
    pub rows: Vec<Row>,
    /// Bytes read and written by all rows.
    pub bytes: u64,
    /// Bytes of the model's weights, activations and gradients, each read and written once.
    pub model_bytes: u64,
    /// Bytes of those that no fusion of elementwise operations keeps out of memory.
    pub least_bytes: u64,
    /// Predicted seconds of all rows, one after the other.
    pub seconds: f64,
    /// Seconds that `model_bytes` take at the device's bandwidth.
    pub model_seconds: f64,
    /// Seconds that `least_bytes` take.
    pub least_seconds: f64,
    /// Seconds of the rows that arithmetic bounds.
    pub compute_seconds: f64,
}

impl Roofline {
    /// Bytes that the plan moves, over those that no fusion keeps out of memory, and over those of all values of the model.
    pub fn ratios(&self) -> [f64; 2] {
        [self.least_bytes, self.model_bytes].map(|bytes| self.bytes as f64 / bytes.max(1) as f64)
    }
}

/// The roofline of a plan on a cluster.
pub fn roofline(plan: &Plan, cluster: &Cluster) -> Roofline {
    let device = &cluster.device;
    let launch = 1e-6 * device.launch_us;
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    let phases = of_plan(plan, cluster);
    let jobs = phases.iter().flat_map(|(_, runs, jobs)| jobs.iter().map(|job| (*runs as u64, job)));
    for (task, (runs, job)) in plan.tasks.iter().zip(jobs) {
        if job.kind.is_communication() || job.kind == Kind::HostCopy {
            continue;
        }
        let (name, bytes, flops) = match &task.action {
            Action::Kernel { kernel, reads, writes } => {
                let kernel = &plan.kernels[*kernel];
                let operands = reads.iter().chain(writes).map(|p| p.ty.bytes() as u64).sum();
                let flops = kernel.body.nodes().map(|(_, n)| node_flops(&kernel.body, n));
                let flops = flops.fold(0, u64::saturating_add);
                (kernel.name.clone(), body_bytes(&kernel.body, operands), flops)
            }
            _ => (job.kind.name().to_string(), task.bytes, 0),
        };
        let traffic = bytes as f64 / device.bytes_per_second();
        let bound = match job.seconds - launch {
            rest if rest < launch => Bound::Launch,
            rest if rest <= traffic * (1.0 + 1e-9) => Bound::Memory,
            _ => Bound::Compute,
        };
        let row = rows.entry(name.clone()).or_insert(Row {
            name,
            uses: 0,
            bytes: 0,
            flops: 0,
            bound,
            seconds: 0.0,
        });
        row.uses += runs;
        row.bytes += runs * bytes;
        row.flops = row.flops.saturating_add(runs.saturating_mul(flops));
        row.seconds += runs as f64 * job.seconds;
    }
    let mut rows: Vec<Row> = rows.into_values().collect();
    rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
    let Plan { model_bytes, least_bytes, .. } = *plan;
    let seconds_of_bytes = |bytes: u64| bytes as f64 / device.bytes_per_second();
    let seconds_of =
        |which: &dyn Fn(&&Row) -> bool| rows.iter().filter(which).map(|r| r.seconds).sum();
    Roofline {
        cluster: cluster.name.clone(),
        bytes: rows.iter().map(|row| row.bytes).sum(),
        model_bytes,
        least_bytes,
        seconds: seconds_of(&|_| true),
        model_seconds: seconds_of_bytes(model_bytes),
        least_seconds: seconds_of_bytes(least_bytes),
        compute_seconds: seconds_of(&|row| row.bound == Bound::Compute),
        rows,
    }
}
