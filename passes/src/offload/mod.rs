//! Offload: moves parameters and optimizer state to host memory.
//!
//! In: a lowered plan, not scheduled. Out: the same work on the same values, with buffers of flat groups in the host arena and tasks that
//! work on copies in the workspace: [`update`] copies the state of the update in and out, [`parameters`] copies in what a forward or
//! backward pass reads. Copies preserve values, so results are bit-identical; the provenance that lowering recorded
//! (`ir/src/plan/provenance.rs`) is unchanged, and verify_plan checks it. `schedule` decides when copies are issued.
//!
//! Source: ZeRO-Offload (Ren et al. 2021, §4.2), with the update on the device; PyTorch's `CPUOffloadPolicy`.

mod parameters;
mod update;

use crate::cost::Cluster;
use frit_ir::plan::{
    Action, Addresses, Arena, Buffer, BufferClass, BufferId, Phase, PhaseId, PhaseName, Place,
    Plan, Stream, Task, TaskId, TiSlice, UnitId, provenance,
};
use frit_ir::{DType, TensorType};
use std::collections::{HashMap, HashSet};

frit_ir::choices! {
    /// The buffers stored in host memory.
    #[derive(Default)]
    Offload {
        /// Nothing.
        #[default]
        None = "none",
        /// Optimizer state: moments and moving averages.
        Optimizer = "optimizer",
        /// That, and the parameters.
        Parameters = "parameters",
    }
}

/// Moves offloaded buffers to the host and adds the copies.
pub fn offload(plan: &mut Plan, what: Offload, cluster: &Cluster) {
    let hosted = to_host(plan, what);
    if hosted.is_empty() {
        return;
    }
    let tasks = std::mem::take(&mut plan.tasks);
    let phases = std::mem::take(&mut plan.phases);
    let next_lowered = tasks.iter().map(|t| t.lowered + 1).max().unwrap_or(0);
    let across = across(&tasks, &phases);
    let mut copies = Copies { plan, cluster, hosted, across, next_lowered };
    for mut phase in phases {
        let part = tasks[phase.range()].raw.to_vec();
        let part = match phase.name == PhaseName::Update {
            true => update::with_copies(part, &mut copies),
            false => parameters::with_copies(part, &mut copies),
        };
        phase.begin = copies.plan.tasks.next_key();
        copies.plan.tasks.extend(part);
        phase.end = copies.plan.tasks.next_key();
        copies.plan.phases.push(phase);
    }
    let (digests, _) = provenance(plan, Addresses::Apart);
    for (task, digest) in plan.tasks.iter_mut().zip(digests) {
        if task.operands_digest.is_empty() {
            task.operands_digest = digest;
        }
    }
}

/// Moves buffers to the host; the units and dtypes of those, by buffer.
fn to_host(plan: &mut Plan, what: Offload) -> HashMap<BufferId, (UnitId, DType)> {
    let mut hosted = HashMap::new();
    for group in &plan.groups {
        let states = group.states.iter().filter(|s| !s.name.is_within_step());
        let states = states.filter(|_| what >= Offload::Optimizer).map(|s| (s.buffer, DType::F32));
        let master = (what >= Offload::Parameters).then_some((group.master, group.dtype));
        for (buffer, dtype) in master.into_iter().chain(states) {
            plan.buffers[buffer].arena = Arena::Host;
            hosted.insert(buffer, (group.unit, dtype));
        }
    }
    hosted
}

/// Buffers that several phases use.
fn across(tasks: &TiSlice<TaskId, Task>, phases: &TiSlice<PhaseId, Phase>) -> HashSet<BufferId> {
    let mut first: HashMap<BufferId, PhaseId> = HashMap::new();
    let mut across = HashSet::new();
    for (p, phase) in phases.iter_enumerated() {
        for task in &tasks[phase.range()] {
            for place in task.action.reads().into_iter().chain(task.action.writes()) {
                if *first.entry(place.buffer).or_insert(p) != p {
                    across.insert(place.buffer);
                }
            }
        }
    }
    across
}

/// Copies in the making.
struct Copies<'a> {
    plan: &'a mut Plan,
    cluster: &'a Cluster,
    /// The unit and dtype of each buffer that is on the host.
    hosted: HashMap<BufferId, (UnitId, DType)>,
    /// Buffers that several phases use.
    across: HashSet<BufferId>,
    next_lowered: usize,
}

impl Copies<'_> {
    fn is_on_host(&self, place: &Place) -> bool {
        self.hosted.contains_key(&place.buffer)
    }

    /// A new workspace buffer for the contents of the host's `buffer`.
    fn staging(&mut self, buffer: BufferId, class: BufferClass) -> BufferId {
        let Buffer { name, bytes, .. } = self.plan.buffers[buffer].clone();
        let name = format!("{name} on the device");
        let arena = Arena::Workspace;
        self.plan.buffers.push_and_get_key(Buffer { name, arena, class, offset: 0, bytes })
    }

    /// The copy of a whole buffer from the host, for a task.
    fn copy_in(&mut self, host: BufferId, device: BufferId, task: &Task) -> Task {
        self.copy(Stream::CopyIn, host, (host, device), task)
    }

    /// The copy of a whole buffer to the host, after a task.
    fn copy_out(&mut self, host: BufferId, device: BufferId, task: &Task) -> Task {
        self.copy(Stream::CopyOut, host, (device, host), task)
    }

    fn copy(
        &mut self,
        stream: Stream,
        host: BufferId,
        (from, to): (BufferId, BufferId),
        task: &Task,
    ) -> Task {
        let bytes = self.plan.buffers[host].bytes;
        let dtype = self.hosted[&host].1;
        let ty = TensorType::new(dtype, [bytes / dtype.size()]);
        let place = |buffer| Place { buffer, offset: 0, ty: ty.clone() };
        self.next_lowered += 1;
        Task {
            lowered: self.next_lowered - 1,
            operands_digest: String::new(),
            name: format!("{} {}", stream.name(), self.plan.buffers[host].name),
            stream,
            region: task.region,
            origin: task.origin.clone(),
            action: Action::Copy { from: place(from), to: place(to) },
            waits: vec![],
            flops: 0,
            bytes: bytes as u64,
            cost_us: 1e6 * self.cluster.host_copy_seconds(bytes as u64),
        }
    }
}

/// Lets a task work on other buffers.
fn redirect(task: &mut Task, to: &HashMap<BufferId, BufferId>) {
    let move_place = |place: &mut Place| {
        place.buffer = to.get(&place.buffer).copied().unwrap_or(place.buffer);
    };
    task.action.reads_mut().into_iter().for_each(move_place);
    task.action.writes_mut().into_iter().for_each(move_place);
}
