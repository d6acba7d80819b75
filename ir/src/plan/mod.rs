//! The plan: one training step of one rank, or one batch of evaluation, ready to be executed.
//!
//! A plan is rank-uniform: every rank runs the same tasks on arenas of the same layout, and ranks differ only in
//! which slice of a flat group they hold. Device memory has two arenas: `persistent` (master weights, optimizer
//! state, scaler, hyper-parameters, inputs) and `workspace` (values that live within a step, at offsets that
//! buffers share over time). Offloaded state is in a third arena, `host`, in host memory; only copies access it.
//!
//! Tasks are listed in an order that respects all dependencies. A device may run the streams concurrently as long
//! as it honors `waits`.

mod action;
mod arena;
mod check;
mod choices;
mod entry;
mod evaluation;
mod file;
mod held;
mod index_range;
mod launch;
pub mod layout;
mod live;
mod needs;
mod operation;
mod provenance;
mod rank_sum;
mod rate;
mod routine;
mod stream;
mod summary;

pub use crate::ids::{BufferId, GroupId, KernelId, ParamId, PhaseId, TaskId, UnitId};
pub use action::Action;
pub use arena::Arena;
pub use check::{CheckError, check, too_large};
pub use choices::{DeviceType, MetricName, PhaseName, Strategy};
pub use entry::{CudaLaunch, Entry};
pub use evaluation::{EvalMetric, EvalSpec, LossSpec, MetricKind, MetricSpec, OutputSpec};
pub use file::{FORMAT_VERSION, PlanError, seal, sha256_hex};
pub use held::Held;
pub use index_range::{IndexKind, IndexRange};
pub use launch::{
    Argument, Candidate, CandidateName, Epilogue, Gemm, GeneratedLaunch, Launch, Launches, Matrix,
    OperationLaunch, Pointer, SourceKernel,
};
pub use live::{Live, Purpose};
pub use needs::{GEMM_WORKSPACE, Needs};
pub use operation::{Direction, Operation, OperationKind, PoolFunction, Strided};
pub use provenance::{Addresses, provenance};
pub use rank_sum::RankSum;
pub use rate::Counted;
pub use routine::{Routine, RoutineCall, Source};
pub use stream::Stream;
pub use summary::{Collectives, Summary, Team};
pub use typed_index_collections::{TiSlice, TiVec};

use crate::ops::{Init, ParamKind, StateName};
use crate::{DType, Diagnostic, Graph, Origin, Region, TensorType};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A compiled training step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Version of this format; see [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Version of the compiler.
    pub frit_version: String,
    /// Name of the model.
    pub name: String,
    /// The resolved configuration, as TOML.
    pub config: String,
    /// The target of the plan.
    pub target: Target,
    /// Number of ranks.
    pub world_size: usize,
    /// Micro-steps per step.
    pub accumulation: usize,
    /// Sharding strategy.
    pub strategy: Strategy,
    /// The autocast dtype.
    pub compute_dtype: DType,
    /// Seed of initialization and shuffling.
    pub seed: u64,
    /// Whether every run computes the same bits; otherwise libraries may add in any order.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub deterministic: bool,
    /// Of how many pieces a step is, if it computes the same bits on any number of ranks that divides it: of one micro-batch
    /// each, in the order of ranks and, within a rank, of micro-steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reproducible: Option<usize>,
    /// Whether examples are shuffled at each epoch.
    #[serde(default)]
    pub shuffle: bool,
    /// Whether an incomplete last step of an epoch is dropped; if not, its full micro-steps form a smaller step.
    #[serde(default = "yes")]
    pub drop_last: bool,
    /// The file of examples that are evaluated between steps, as the configuration names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<String>,
    /// Loss elements of one rank's micro-batch if none is ignored.
    pub loss_capacity: usize,
    /// Tensors fed at every micro-step.
    pub inputs: Vec<InputSpec>,
    /// Parameters and buffers of the model, in the model's order.
    pub params: TiVec<ParamId, ParamSpec>,
    /// FSDP units, the first of them the root.
    pub units: TiVec<UnitId, UnitSpec>,
    /// Flat groups of parameters.
    pub groups: TiVec<GroupId, Group>,
    /// Scalar state.
    pub states: Vec<StateSpec>,
    /// Scalars that may be changed when the plan is run.
    pub hyper: Vec<HyperSpec>,
    /// Constants too large to be part of a kernel.
    pub constants: Vec<ConstantSpec>,
    /// Size of the persistent arena of one rank, in bytes.
    pub persistent_bytes: usize,
    /// Size of the workspace arena of one rank, in bytes.
    pub workspace_bytes: usize,
    /// Size of the arena in host memory of one rank, in bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_bytes: usize,
    /// The largest sum of live workspace buffers over the schedule, in bytes.
    pub workspace_lower_bound: usize,
    /// Byte ranges of the arenas.
    pub buffers: TiVec<BufferId, Buffer>,
    /// The kernels that tasks execute, each body once.
    pub kernels: TiVec<KernelId, Kernel>,
    /// The file that holds the generated kernels.
    pub object: Option<ObjectFile>,
    /// The parts of a step.
    pub phases: TiVec<PhaseId, Phase>,
    /// The step program.
    pub tasks: TiVec<TaskId, Task>,
    /// Scalars reported after the update, by name.
    pub metrics: Vec<Metric>,
    /// Digest of everything persistent after a step; see [`provenance`].
    pub state_digest: String,
    /// Where each trainable parameter's reduced gradient is after the last micro-step.
    pub gradients: Vec<GradientSpec>,
    /// The casts of one micro-step if every operation cast its operands.
    #[serde(default)]
    pub cast_baseline: CastBaseline,
    /// Bytes of the model's weights, activations and gradients in a step of one rank, each read and written once.
    #[serde(default)]
    pub model_bytes: u64,
    /// The part of them that no fusion of elementwise operations keeps out of memory.
    #[serde(default)]
    pub least_bytes: u64,
    /// SHA-256 of the file with the graph after every pass; absent from the evaluation beside a training, whose graphs are there too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_trace: Option<String>,
    /// Results of an evaluation plan, whose only phase is `eval`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval: Option<EvalSpec>,
    /// Remarks of the passes.
    pub reports: Vec<PassReport>,
    /// Advice for the user.
    pub lints: Vec<Diagnostic>,
}

fn yes() -> bool {
    true
}

fn is_true(flag: &bool) -> bool {
    *flag
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// The target of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The device.
    pub device: DeviceType,
    /// CPU name as LLVM knows it (`znver5`), or GPU architecture (`sm_90`).
    pub arch: String,
    /// CPU features as LLVM writes them (`+avx512f,…`); empty for a GPU.
    pub features: String,
}

/// A tensor fed at every micro-step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InputSpec {
    /// Name in the model and in the data.
    pub name: String,
    /// Type of one rank's micro-batch.
    pub ty: TensorType,
    /// Where it is fed to.
    pub buffer: BufferId,
    /// Whether its first axis is that of examples; if not, it is the same for all examples.
    pub per_example: bool,
    /// Ranges of its elements if they are used as indices or labels; all apply.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<IndexRange>,
}

/// A parameter or buffer of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParamSpec {
    /// The model's own name.
    pub name: String,
    /// Logical type.
    pub ty: TensorType,
    /// Whether it trains.
    pub kind: ParamKind,
    /// Why it trains or does not.
    pub reason: String,
    /// Its initial value.
    pub init: Init,
    /// Where it lives.
    pub home: ParamHome,
    /// Digest of the elements that are stored with the plan, as the runtime computes it; absent if none are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// Where a parameter lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParamHome {
    /// In a flat group, from this element on.
    Group {
        /// Index of the group.
        group: GroupId,
        /// First element within the group.
        offset: usize,
    },
    /// In a buffer of its own, whole on every rank.
    Buffer(BufferId),
    /// Not used by the step.
    Unused,
}

/// An FSDP unit: parameters that are gathered and reduced together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitSpec {
    /// The scope it wraps; `root` for parameters of no other unit.
    pub name: String,
    /// Why these parameters form a unit.
    pub reason: String,
    /// Number of consecutive ranks that share the gathered parameters between forward and backward, if set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reshard: Option<usize>,
}

/// Parameters of one unit back to back in one flat tensor, of which rank `r` owns the `r`-th slice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// The unit.
    pub unit: UnitId,
    /// Whether its parameters train.
    pub trainable: bool,
    /// The dtypes in which it is gathered; empty if it is not sharded.
    pub gather_dtypes: Vec<DType>,
    /// Elements of the whole flat tensor, padding included; a multiple of the number of shards.
    pub numel: usize,
    /// Elements of one rank's part; `numel` if it is not sharded.
    pub shard_numel: usize,
    /// Whether each rank stores only its part.
    pub sharded: bool,
    /// The dtype in which its parameters are stored: f32 if they train, else f32, f16 or bf16.
    pub dtype: DType,
    /// The parameters of this rank's part; where they train, the master weights.
    pub master: BufferId,
    /// Optimizer state and accumulated gradients of this rank's part: name and buffer, f32.
    pub states: Vec<GroupState>,
    /// This rank's part in other dtypes, each written with the parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<GroupCopy>,
    /// The parameters, ascending by offset.
    pub segments: Vec<Segment>,
    /// Which elements have which learning rate and weight decay, ascending by offset; empty unless it trains.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub param_groups: Vec<ParamGroup>,
    /// With several parameter groups, the buffer of their offsets but the first, i64, relative to this
    /// rank's part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param_group_offsets: Option<BufferId>,
    /// Where an optimizer steps one parameter after the other, the buffer of their offsets, i64, relative to
    /// this rank's part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param_offsets: Option<BufferId>,
}

/// Elements of a flat group from here to the next parameter group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamGroup {
    /// First element within the flat group.
    pub offset: usize,
    /// Key of the base learning rate.
    pub lr: String,
    /// Key of the weight decay.
    pub weight_decay: String,
}

/// A state tensor parallel to a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupState {
    /// Its name; the state has an element per parameter element.
    pub name: StateName,
    /// The buffer.
    pub buffer: BufferId,
    /// Every element's first value.
    pub init: f64,
}

/// A group's part cast to another dtype. It equals the cast of the parameters before every step: the runtime writes it
/// when it writes parameters, and the optimizer step when it steps them. It is in no checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupCopy {
    /// The dtype: f16 or bf16.
    pub dtype: DType,
    /// The buffer.
    pub buffer: BufferId,
}

/// One parameter within a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Index of the parameter.
    pub param: ParamId,
    /// First element within the group.
    pub offset: usize,
    /// Number of elements.
    pub numel: usize,
}

impl Group {
    /// Number of parts; ranks that are equal modulo this have the same part.
    pub fn shards(&self) -> usize {
        if self.sharded { self.numel.checked_div(self.shard_numel).unwrap_or(1) } else { 1 }
    }

    /// The part of `segment` that rank `rank` holds, as (first element within the parameter, first
    /// element within the rank's part, number of elements); `None` if it holds nothing of it.
    pub fn owned(&self, segment: &Segment, rank: usize) -> Option<(usize, usize, usize)> {
        let first = rank % self.shards() * self.shard_numel;
        let begin = segment.offset.max(first);
        let end = (segment.offset + segment.numel).min(first + self.shard_numel);
        (begin < end).then(|| (begin - segment.offset, begin - first, end - begin))
    }

    /// The offsets of all parameter groups but the first, relative to the part of rank `rank`.
    pub fn param_group_offsets_of(&self, rank: usize) -> Vec<i64> {
        let first = rank % self.shards() * self.shard_numel;
        self.param_groups.iter().skip(1).map(|g| g.offset as i64 - first as i64).collect()
    }

    /// The offsets of all segments, relative to the part of rank `rank`.
    pub fn param_offsets_of(&self, rank: usize) -> Vec<i64> {
        let first = rank % self.shards() * self.shard_numel;
        self.segments.iter().map(|s| s.offset as i64 - first as i64).collect()
    }
}

/// Scalar state in checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StateSpec {
    /// What it is.
    pub name: StateName,
    /// Its type.
    pub ty: TensorType,
    /// Every element's first value.
    pub init: f64,
    /// Where it lives.
    pub buffer: BufferId,
}

/// A scalar f32 that may be changed when the plan is run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HyperSpec {
    /// Its key in the configuration.
    pub name: String,
    /// The value it was compiled with.
    pub value: f64,
    /// Where it lives.
    pub buffer: BufferId,
}

/// A constant tensor; its elements are in `weights.safetensors` under `name`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConstantSpec {
    /// Name in the weights file.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
    /// Where it lives.
    pub buffer: BufferId,
    /// As [`ParamSpec::digest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// The purpose of a buffer, for memory reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BufferClass {
    /// Master weights, or replicated parameters and buffers.
    Parameter,
    /// Optimizer state.
    OptimizerState,
    /// Scaler, counters, hyper-parameters, constants.
    State,
    /// Fed data.
    Input,
    /// Unsharded parameters.
    Gathered,
    /// Gradients of parameters.
    Gradient,
    /// Values of the forward pass that the backward pass reads, and everything else in between.
    Activation,
}

/// A byte range of an arena.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    /// For reports.
    pub name: String,
    /// Which arena.
    pub arena: Arena,
    /// What for.
    pub class: BufferClass,
    /// First byte within the arena; a multiple of [`ALIGNMENT`].
    pub offset: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// Alignment of every buffer, in bytes.
pub const ALIGNMENT: usize = 256;

/// Bytes at whose multiples operands and results of generated CUDA kernels begin: these are read and written so
/// many at a time.
pub const CUDA_OPERAND_ALIGNMENT: usize = 16;

/// A typed byte range of a buffer: what a task reads or writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The buffer.
    pub buffer: BufferId,
    /// First byte within the buffer.
    pub offset: usize,
    /// Type; dense and row-major.
    pub ty: TensorType,
}

/// How a kernel is executed; see [`Entry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelKind {
    /// Machine code in the plan's object file.
    Generated,
    /// Hand-written kernels, or libraries.
    Library,
    /// The IR interpreter, for bodies without a kernel.
    Interpreted,
}

/// A function from the places a task reads to those it writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// For reports: the main operation and a number.
    pub name: String,
    /// What it computes: `input` leaves are the reads, outputs the writes, in order.
    #[serde(with = "body")]
    pub body: Graph,
    /// SHA-256 of the body's text, in hexadecimal.
    pub hash: String,
    /// SHA-256 of the hash and of the entry but for the digests of its symbols, in hexadecimal.
    pub entry_hash: String,
    /// How it is executed.
    pub entry: Entry,
}

mod body {
    use crate::Graph;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(graph: &Graph, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&graph.to_string())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Graph, D::Error> {
        crate::text::parse(&String::deserialize(d)?).map_err(serde::de::Error::custom)
    }
}

/// A file of the plan directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectFile {
    /// Path within the plan directory.
    pub file: String,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
}

/// A part of the step: a range of tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// Which part. A step has `micro_step` and `update`, with `unshard` if parameters are gathered once per step
    /// and `reduce` if gradients are reduced after the last micro-step; an evaluation has `eval` alone.
    pub name: PhaseName,
    /// First task.
    pub begin: TaskId,
    /// One past the last task.
    pub end: TaskId,
}

impl Phase {
    /// Its tasks, in list order.
    pub fn tasks(
        &self,
    ) -> impl DoubleEndedIterator<Item = TaskId> + ExactSizeIterator + Clone + use<> {
        self.begin.until(self.end)
    }

    /// Its tasks as a range.
    pub fn range(&self) -> Range<TaskId> {
        self.begin..self.end
    }
}

/// One step of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Its number in the order of lowering, before it was scheduled.
    #[serde(rename = "id")]
    pub lowered: usize,
    /// Digest of its action and operands; see [`provenance`].
    pub operands_digest: String,
    /// For reports.
    pub name: String,
    /// Where it runs.
    pub stream: Stream,
    /// The part of the step.
    pub region: Region,
    /// The node it comes from.
    pub origin: Origin,
    /// What it does.
    pub action: Action,
    /// Tasks of other streams, of the same phase, that must be complete before; at most one each.
    pub waits: Vec<TaskId>,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Predicted duration in microseconds.
    pub cost_us: f64,
}

impl Plan {
    /// The phase of this name.
    pub fn phase(&self, name: PhaseName) -> Option<&Phase> {
        self.phases.iter().find(|p| p.name == name)
    }

    /// The tasks of the phase of this name; none if the plan has no such phase.
    pub fn tasks_of(&self, name: PhaseName) -> Range<TaskId> {
        self.phase(name).map_or(TaskId::FIRST..TaskId::FIRST, Phase::range)
    }

    /// Examples of one rank's micro-batch: the size of the first axis of the inputs; `None` if there are none with axes, or they differ, as
    /// those of a graph's nodes and edges.
    pub fn batch(&self) -> Option<usize> {
        let mut inputs = self.inputs.iter().filter(|input| input.per_example);
        let size = |input: &InputSpec| input.ty.shape.dims().first().copied();
        let first = size(inputs.next()?)?;
        inputs.all(|input| size(input) == Some(first)).then_some(first)
    }

    /// Buffers that are fed before a micro-step, and their types: the inputs, and the weights of the examples of an
    /// evaluation.
    pub fn fed(&self) -> impl Iterator<Item = (BufferId, &TensorType)> {
        let inputs = self.inputs.iter().map(|i| (i.buffer, &i.ty));
        let weights = self.eval.as_ref().and_then(|e| e.weights.as_ref());
        inputs.chain(weights.map(|w| (w.buffer, &w.ty)))
    }

    /// The tasks that run with micro-step `k` of a step's `n`: those of other phases run once, with the first
    /// micro-step if they come before, with the last if they come after.
    pub fn micro_step_tasks(&self, k: usize, n: usize) -> Range<TaskId> {
        let micro = self.tasks_of(PhaseName::MicroStep);
        let begin = if k == 0 { TaskId::FIRST } else { micro.start };
        begin..if k + 1 == n { self.tasks.next_key() } else { micro.end }
    }
}

/// A scalar reported after the update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// What it is.
    pub name: MetricName,
    /// Where it is.
    pub place: Place,
}

/// Where a parameter's reduced gradient is after the last micro-step, before the update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradientSpec {
    /// Index of the group.
    pub group: GroupId,
    /// This rank's part of the group's gradient, f32.
    pub place: Place,
}

/// The casts that PyTorch's autocast makes at run time in one forward and backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CastBaseline {
    /// Their number.
    pub casts: usize,
    /// Bytes that they read and write.
    pub bytes: u64,
}

/// A remark of a pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PassReport {
    /// Name of the pass.
    pub pass: String,
    /// Nodes before.
    pub nodes_before: usize,
    /// Nodes after.
    pub nodes_after: usize,
    /// Its message and location.
    pub remarks: Vec<(String, Origin)>,
}
