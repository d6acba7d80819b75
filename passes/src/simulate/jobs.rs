//! Converts the tasks of a plan to jobs with durations.

use crate::cost::collective::exchange_of;
use crate::cost::kernel::{body_bytes, is_matrix};
use crate::cost::{Cluster, Exchange, Members};
use frit_ir::Op;
use frit_ir::plan::{Action, KernelId, PhaseName, Plan, Stream, Task, TaskId, TiVec};

/// The kind of a job, as named in reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A GEMM or convolution.
    Gemm,
    /// Attention.
    Attention,
    /// A kernel that is bound by memory.
    Memory,
    /// A copy or fill.
    Copy,
    /// A copy from or to the host.
    HostCopy,
    /// An exchange that every rank receives whole.
    AllGather,
    /// An exchange of which every rank receives its part.
    ReduceScatter,
    /// A sum over ranks.
    AllReduce,
}

impl Kind {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Gemm => "GEMMs and convolutions",
            Kind::Attention => "attention",
            Kind::Memory => "memory-bound kernels",
            Kind::Copy => "copies",
            Kind::HostCopy => "copies from and to the host",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllReduce => "all_reduce",
        }
    }

    /// Whether ranks exchange data in it.
    pub fn is_communication(self) -> bool {
        matches!(self, Kind::AllGather | Kind::ReduceScatter | Kind::AllReduce)
    }

    /// Whether it occupies multiprocessors.
    pub fn is_compute(self) -> bool {
        !self.is_communication() && self != Kind::HostCopy
    }
}

/// A piece of work on one stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// For reports.
    pub name: String,
    /// Module path.
    pub scope: std::sync::Arc<str>,
    /// Where it runs; jobs of one stream run in list order.
    pub stream: Stream,
    /// Its kind.
    pub kind: Kind,
    /// Seconds if nothing else runs.
    pub seconds: f64,
    /// Whether it crosses nodes.
    pub inter: bool,
    /// Jobs that must be complete before, by index in the list.
    pub waits: Vec<usize>,
}

/// The work of every phase of a plan, with the phase's name and how often it runs.
pub fn of_plan(plan: &Plan, cluster: &Cluster) -> Vec<(PhaseName, usize, Vec<Job>)> {
    let kernels = Kernels::of(plan, cluster);
    let phase = |phase: &frit_ir::plan::Phase| {
        let jobs = plan.tasks[phase.range()]
            .iter()
            .map(|task| of_task(plan, cluster, &kernels, task, phase.begin))
            .collect();
        (phase.name, plan.runs(phase.begin), jobs)
    };
    plan.phases.iter().filter(|p| p.begin < p.end).map(phase).collect()
}

/// Durations and kinds of a plan's kernels: tasks that share a kernel have equal operands.
struct Kernels(TiVec<KernelId, (Kind, f64)>);

impl Kernels {
    fn of(plan: &Plan, cluster: &Cluster) -> Kernels {
        let mut operands: TiVec<KernelId, u64> = vec![0; plan.kernels.len()].into();
        for task in &plan.tasks {
            if let Action::Kernel { kernel, reads, writes } = &task.action {
                operands[*kernel] = reads.iter().chain(writes).map(|p| p.ty.bytes() as u64).sum();
            }
        }
        let kernel = |(k, operands): (&frit_ir::plan::Kernel, u64)| {
            let bytes = body_bytes(&k.body, operands);
            let matrix = k.body.nodes().map(|(_, n)| &n.op).find(|op| is_matrix(op));
            let kind = match matrix {
                Some(Op::Attention(_) | Op::AttentionGrad(_)) => Kind::Attention,
                Some(_) => Kind::Gemm,
                None => Kind::Memory,
            };
            (kind, cluster.device.kernel_seconds(&k.body, bytes))
        };
        Kernels(plan.kernels.iter().zip(operands).map(kernel).collect())
    }
}

fn of_task(plan: &Plan, cluster: &Cluster, kernels: &Kernels, task: &Task, begin: TaskId) -> Job {
    let (kind, seconds, inter) = match (&task.action, exchange_of(&task.action)) {
        (_, Some((exchange, bytes))) => {
            let kind = match exchange {
                Exchange::AllGather => Kind::AllGather,
                Exchange::ReduceScatter => Kind::ReduceScatter,
                Exchange::AllReduce => Kind::AllReduce,
            };
            let members = Members::of(plan, &task.action);
            let time = cluster.exchange(exchange, bytes, members);
            (kind, time.seconds, time.inter)
        }
        (Action::Kernel { kernel, .. }, None) => {
            let (kind, seconds) = kernels.0[*kernel];
            (kind, seconds, false)
        }
        (Action::Copy { from, .. }, None) if plan.host_copy(&task.action).is_some() => {
            (Kind::HostCopy, cluster.host_copy_seconds(from.ty.bytes() as u64), false)
        }
        (_, None) => (Kind::Copy, cluster.device.copy_seconds(task.bytes), false),
    };
    Job {
        name: task.name.clone(),
        scope: task.origin.scope.clone(),
        stream: task.stream,
        kind,
        seconds,
        inter,
        waits: task.waits.iter().map(|w| w.0 - begin.0).collect(),
    }
}
