//! The headline numbers of a plan.

use super::{Action, GroupId, KernelId, Phase, PhaseName, Plan, Strategy, Stream, TaskId};
use crate::Op;
use serde::Serialize;

/// How often each collective runs in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Collectives {
    /// All-gathers.
    pub all_gather: usize,
    /// Reduce-scatters.
    pub reduce_scatter: usize,
    /// All-reduces.
    pub all_reduce: usize,
}

/// Ranks that take part in a collective: `count` of them, every `stride`-th from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Team {
    /// The lowest rank.
    pub first: usize,
    /// Distance of neighbors.
    pub stride: usize,
    /// Number of ranks.
    pub count: usize,
}

impl Team {
    /// The ranks, ascending.
    pub fn ranks(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |i| self.first + i * self.stride)
    }

    /// How many of its ranks are before `rank`, which is one of them.
    pub fn position(self, rank: usize) -> usize {
        (rank - self.first) / self.stride
    }
}

/// The numbers of a plan; the keys of `frit inspect --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of ranks.
    pub ranks: usize,
    /// Sharding strategy.
    pub strategy: Strategy,
    /// The autocast dtype.
    pub compute_dtype: String,
    /// Elements of all trainable and frozen parameters.
    pub parameters: usize,
    /// FSDP units.
    pub units: usize,
    /// Casts between float types that run in one step, those inside kernels included.
    pub casts: usize,
    /// Kernels of one step that do nothing but cast.
    pub cast_kernels: usize,
    /// Bytes that those read and write.
    pub cast_bytes: u64,
    /// Casts of one step if every operation cast its operands, as PyTorch's autocast does at run time.
    pub baseline_casts: usize,
    /// Bytes that those read and write.
    pub baseline_cast_bytes: u64,
    /// Collectives of one step.
    pub collectives: Collectives,
    /// Bytes one rank sends in one step, by the ring algorithms.
    pub bytes_communicated_per_step: u64,
    /// Bytes of one rank: both arenas, and scratch memory of kernels.
    pub peak_bytes: usize,
    /// The least that this schedule could do with.
    pub peak_lower_bound_bytes: usize,
    /// Bytes of one rank outside its arenas: scratch memory of kernels, and workspace of GEMMs.
    pub scratch_bytes: usize,
    /// Maximum additional bytes of cuDNN engines, if they are selected when the plan is loaded.
    pub engine_bytes: usize,
    /// Peak of live bytes if all tasks ran in sequence, in list order, without overlapping streams.
    pub single_stream_live_bytes: usize,
    /// Bytes of one rank that live as long as the run.
    pub persistent_bytes: usize,
    /// Bytes of one rank in host memory.
    pub host_bytes: usize,
    /// Bytes that one rank copies from host memory in one step.
    pub bytes_copied_in_per_step: u64,
    /// Bytes that one rank copies to host memory in one step.
    pub bytes_copied_out_per_step: u64,
    /// Floating-point operations of one rank in one step.
    pub flops_per_step: u64,
    /// Tasks of one micro-step and of the update.
    pub tasks: usize,
    /// Distinct kernels.
    pub kernels: usize,
}

impl Plan {
    /// How often a task runs in one step.
    pub fn runs(&self, task: TaskId) -> usize {
        let micro = |p: &Phase| p.name == PhaseName::MicroStep && p.range().contains(&task);
        if self.phases.iter().any(micro) { self.accumulation } else { 1 }
    }

    /// Bytes that one rank sends in a collective, by the ring algorithms.
    pub fn wire_bytes(&self, action: &Action) -> u64 {
        let n = self.team(action, 0).map_or(1, |team| team.count) as u64;
        let ring = |bytes: usize| bytes as u64 * (n - 1) / n;
        match action {
            Action::AllGather { recv, .. } => ring(recv.ty.bytes()),
            Action::ReduceScatter { send, .. } => ring(send.ty.bytes()),
            Action::AllReduce { send, .. } => 2 * ring(send.ty.bytes()),
            _ => 0,
        }
    }

    /// The ranks with which rank `rank` exchanges data in a collective.
    pub fn team(&self, action: &Action, rank: usize) -> Option<Team> {
        let shards = |group: GroupId| self.groups.get(group).map_or(1, |g| g.shards());
        match action {
            Action::AllGather { ranks: Some(count), .. } => {
                Some(Team { first: rank / count * count, stride: 1, count: *count })
            }
            Action::AllGather { group, .. } | Action::ReduceScatter { group, .. } => {
                let count = shards(*group);
                Some(Team { first: rank / count * count, stride: 1, count })
            }
            Action::AllReduce { group: Some(group), .. } => {
                let stride = shards(*group);
                Some(Team { first: rank % stride, stride, count: self.world_size / stride })
            }
            Action::AllReduce { group: None, .. } => {
                Some(Team { first: 0, stride: 1, count: self.world_size })
            }
            _ => None,
        }
    }

    /// The largest sum of workspace buffers, each from its first to its last task in list order.
    fn live_in_list_order(&self) -> usize {
        self.live().iter().map(|live| live.iter().sum()).max().unwrap_or(0)
    }

    /// Bytes of one rank: both arenas, and scratch memory of kernels.
    pub fn peak_bytes(&self) -> usize {
        self.persistent_bytes + self.workspace_bytes + self.kernel_bytes()
    }

    /// Sizes, counts and memory.
    pub fn summary(&self) -> Summary {
        let mut collectives = Collectives::default();
        let (mut casts, mut wire, mut flops) = (0, 0, 0);
        let (mut cast_kernels, mut cast_bytes) = (0, 0);
        let mut copied = [0; 2];
        for (i, task) in self.tasks.iter_enumerated() {
            let runs = self.runs(i);
            match &task.action {
                Action::AllGather { .. } => collectives.all_gather += runs,
                Action::ReduceScatter { .. } => collectives.reduce_scatter += runs,
                Action::AllReduce { .. } => collectives.all_reduce += runs,
                Action::Kernel { kernel, .. } => {
                    casts += runs * self.casts_of(*kernel);
                    if self.only_casts(*kernel) {
                        cast_kernels += runs;
                        cast_bytes += runs as u64 * task.bytes;
                    }
                }
                Action::Copy { from, .. } => {
                    if let Some(stream) = self.host_copy(&task.action) {
                        let direction = usize::from(stream == Stream::CopyOut);
                        copied[direction] += (runs * from.ty.bytes()) as u64;
                    }
                }
                _ => {}
            }
            wire += runs as u64 * self.wire_bytes(&task.action);
            flops += runs as u64 * task.flops;
        }
        Summary {
            ranks: self.world_size,
            strategy: self.strategy,
            compute_dtype: self.compute_dtype.name().into(),
            parameters: self
                .params
                .iter()
                .filter(|p| p.kind != crate::ops::ParamKind::Buffer)
                .map(|p| p.ty.shape.numel())
                .sum(),
            units: self.units.len(),
            casts,
            cast_kernels,
            cast_bytes,
            baseline_casts: self.accumulation * self.cast_baseline.casts,
            baseline_cast_bytes: self.accumulation as u64 * self.cast_baseline.bytes,
            collectives,
            bytes_communicated_per_step: wire,
            peak_bytes: self.peak_bytes(),
            peak_lower_bound_bytes: self.persistent_bytes
                + self.workspace_lower_bound
                + self.kernel_bytes(),
            scratch_bytes: self.kernel_bytes(),
            engine_bytes: self.engine_bytes(),
            single_stream_live_bytes: self.persistent_bytes + self.live_in_list_order(),
            persistent_bytes: self.persistent_bytes,
            host_bytes: self.host_bytes,
            bytes_copied_in_per_step: copied[0],
            bytes_copied_out_per_step: copied[1],
            flops_per_step: flops,
            tasks: self.tasks.len(),
            kernels: self.kernels.len(),
        }
    }

    /// Whether a kernel casts between float types and does nothing else but move elements.
    pub fn only_casts(&self, kernel: KernelId) -> bool {
        let body = &self.kernels[kernel].body;
        let mut inner = body.nodes().filter(|(_, n)| !n.op.is_leaf());
        self.casts_of(kernel) > 0
            && inner.all(|(_, n)| matches!(n.op, Op::Cast(_)) || n.op.is_layout())
    }

    fn casts_of(&self, kernel: KernelId) -> usize {
        let body = &self.kernels[kernel].body;
        body.nodes()
            .filter(|(_, n)| match &n.op {
                Op::Cast(c) => c.to.is_float() && body.ty(n.inputs[0]).dtype.is_float(),
                _ => false,
            })
            .count()
    }
}
