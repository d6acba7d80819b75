//! Emulates PyTorch's FSDP2 with the same model, so that the simulator can be compared with published runs.
//!
//! In: a reference plan (`frit::compilation::reference`), which has the model's matmuls, units, gathers and reductions, kernels as
//! torch.compile forms them ([`crate::fuse::Rules::Inductor`]), and none of the ways in which Frit saves time or memory. The work is changed
//! to that of the emulated system:
//!
//! - Kernels: the compiled systems run the plan's; `eager` runs every operation by itself, through
//!   memory, in the compute dtype, with norms and the loss as the several kernels that they are there.
//!   Views are free. Only `compile_all` compiles the loss; in the others it works in f32.
//! - Update: `clip_grad_norm_` reads all gradients for their norm and multiplies them in a second pass; `GradScaler` unscales those of
//!   f16 in one more. Without either nothing reads them before the optimizer, which is fused (one pass).
//! - Weight gradients are rounded by the matmul. On one rank, without FSDP2, a kernel widens each for its f32 parameter.
//! - Activation checkpointing: forward kernels of a unit run again before its backward: all of them
//!   (`full`), those of every other unit (`selective-layer`), or all but attention and every other
//!   matmul (`selective-op`).
//! - Communication: parameters are copied out of the gathered buffer, gradients into the one that is
//!   reduced, on the compute stream. Schedule: the plan's (forward prefetch of one unit, backward `pre`).
//!   On one rank there is none: FSDP2 would copy every parameter twice and every gradient once for nothing.
//! - What older runs had instead, and models that write attention otherwise: [`variant`].
//! - Memory: see [`memory_bytes`].
//!
//! Source: torch/distributed/fsdp/_fully_shard, torch/nn/utils/clip_grad.py, torch/amp/grad_scaler.py, torchtitan's parallelize functions.

mod variant;

pub use self::variant::{AdamW, Attention, Inductor};

use self::variant::{Operands, column_seconds, foreach_seconds};
use super::jobs::{Job, Kind, of_plan};
use super::{Simulation, of_phases};
use crate::cost::kernel::{GemmShape, is_matrix, moved_bytes};
use crate::cost::{Cluster, Device};
use frit_ir::ops::{BinaryFn, UnaryFn};
use frit_ir::plan::{Action, BufferId, KernelId, Plan, Stream, Task, TaskId, TiVec, UnitId};
use frit_ir::{DType, Graph, Node, Op, Region, TensorType};
use std::collections::{HashMap, HashSet};

/// The emulated system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// FSDP2 without compilation.
    Eager,
    /// FSDP2 with blocks compiled by torch.compile.
    Compile,
    /// FSDP2 with blocks and loss compiled by torch.compile.
    CompileAll,
}

/// Which activations the emulated system computes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checkpointing {
    /// None.
    None,
    /// All but attention and every other matmul.
    SelectiveOp,
    /// All of every other unit.
    SelectiveLayer,
    /// All.
    Full,
}

/// A system and how it is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emulation {
    /// The system.
    pub system: System,
    /// The model's attention.
    pub attention: Attention,
    /// Its activation checkpointing.
    pub checkpointing: Checkpointing,
    /// The version that compiles it.
    pub inductor: Inductor,
    /// Its optimizer.
    pub adamw: AdamW,
}

impl Emulation {
    /// A system as it is now, with attention of one kernel and a fused optimizer.
    pub fn of(system: System, checkpointing: Checkpointing) -> Emulation {
        let (attention, inductor, adamw) = (Attention::Fused, Inductor::Current, AdamW::Fused);
        Emulation { system, attention, checkpointing, inductor, adamw }
    }
}

/// Bytes that are moved per byte of operands and results, in eager mode, by what models write out as a
/// dozen operations, each through memory: RMSNorm in f32, the GELU by tanh. `LayerNorm` is one kernel.
const EAGER_WRITTEN: f64 = 9.0;
/// The same for the loss, which is not compiled.
const EAGER_LOSS: f64 = 3.5;
/// The same for other operations: rotary positions are applied in f32, and copies make operands contiguous.
const EAGER_OTHER: f64 = 1.5;
/// How often decomposed attention moves all scores, forward: the first matmul writes them, scale, mask, softmax and
/// dropout read and write them, dropout keeps a byte for each, the second matmul reads them.
const WRITTEN_FORWARD: f64 = 10.5;
/// The same backward: of dropout, softmax, mask and scale, and the operands and results of four matmuls.
const WRITTEN_BACKWARD: f64 = 13.5;
/// The fraction of the bytes saved by the plan's fused kernels that the compiler's partitioner saves: it recomputes
/// activation functions and copies.
const COMPILE_KEEPS: f64 = 0.8;
/// The same in eager mode, which also saves operands of every step of norms and activation functions.
const EAGER_KEEPS: f64 = 1.5;

/// Simulates a step of the emulated system on the model of a reference plan.
pub fn emulate(plan: &Plan, cluster: &Cluster, emulation: Emulation) -> Simulation {
    let mut phases = of_plan(plan, cluster);
    let mut begin = 0;
    for (_, _, jobs) in &mut phases {
        let tasks = &plan.tasks.raw[begin..begin + jobs.len()];
        begin += jobs.len();
        retime(plan, cluster, emulation, tasks, jobs);
        *jobs = with_extra_work(plan, cluster, emulation, tasks, std::mem::take(jobs));
    }
    let mut simulation = of_phases(plan, cluster, phases);
    simulation.peak_bytes = memory_bytes(plan, emulation);
    simulation.fits = simulation.peak_bytes + simulation.reserved_bytes <= simulation.memory_bytes;
    simulation
}

/// Gives kernels the durations that they have in the emulated system.
fn retime(plan: &Plan, cluster: &Cluster, emulation: Emulation, tasks: &[Task], jobs: &mut [Job]) {
    let mut known: HashMap<KernelId, f64> = HashMap::new();
    let operands = Operands::of(plan);
    for (task, job) in tasks.iter().zip(jobs) {
        let Action::Kernel { kernel, .. } = &task.action else { continue };
        let body = &plan.kernels[*kernel].body;
        let runs_apart = match emulation.system {
            System::Eager => true,
            System::Compile => body.nodes().any(|(_, n)| is_loss(&n.op)),
            System::CompileAll => false,
        };
        if runs_apart {
            job.seconds = *known.entry(*kernel).or_insert_with(|| {
                eager_seconds(&cluster.device, body, plan.compute_dtype, emulation.attention)
            });
        }
        if emulation.system != System::Eager {
            if emulation.attention == Attention::Complex {
                job.seconds += operands.rotation_seconds(plan, &cluster.device, task, body);
            }
            if emulation.inductor == Inductor::Before210 {
                job.seconds += column_seconds(&cluster.device, body);
            }
        }
        if emulation.adamw == AdamW::Foreach {
            job.seconds += foreach_seconds(&cluster.device, body);
        }
        if is_padding(body) {
            job.seconds = 0.0;
        }
        if let Some((_, node)) = body.nodes().find(|(_, n)| matches!(n.op, Op::GradStats(_))) {
            let bytes = node.inputs.iter().map(|v| body.ty(*v).bytes() as u64).sum();
            job.seconds = before_the_optimizer(plan, &cluster.device, bytes);
        }
        if plan.world_size == 1 && task.region == Region::Backward {
            job.seconds += widening_of_gradients(&cluster.device, body);
        }
    }
}

/// Whether a kernel only pads: PyTorch pads the pitch of what it allocates.
fn is_padding(body: &Graph) -> bool {
    let mut inner = body.nodes().map(|(_, n)| &n.op).filter(|op| !op.is_leaf());
    matches!((inner.next(), inner.next()), (Some(Op::Pad(_)), None))
}

/// Seconds of what reads gradients of this many bytes before the optimizer does.
fn before_the_optimizer(plan: &Plan, device: &Device, bytes: u64) -> f64 {
    let clips = plan.hyper.iter().any(|h| h.name == "optimizer.clip_grad_norm" && h.value > 0.0);
    let norm_and_multiply = device.copy_seconds(bytes) + device.copy_seconds(2 * bytes);
    let unscale = device.copy_seconds(2 * bytes);
    let of_clipping = if clips { norm_and_multiply } else { 0.0 };
    of_clipping + if plan.compute_dtype == DType::F16 { unscale } else { 0.0 }
}

/// Seconds in which the gradients of weights that a matmul of low-precision operands computes are widened: the plan's writes f32.
fn widening_of_gradients(device: &Device, body: &Graph) -> f64 {
    let of = |(_, node): (frit_ir::NodeId, &Node)| {
        let (from, to) = (body.ty(node.inputs[0]), body.ty(node.outputs[0]));
        let elements = to.shape.numel() as u64;
        device.copy_seconds(elements * (from.dtype.size() + to.dtype.size()) as u64)
    };
    let widens = |(_, node): &(frit_ir::NodeId, &Node)| {
        matches!(node.op, Op::MatMul(_))
            && body.ty(node.inputs[0]).dtype.is_low_precision()
            && body.ty(node.outputs[0]).dtype == DType::F32
    };
    body.nodes().filter(widens).map(of).sum()
}

fn is_loss(op: &Op) -> bool {
    matches!(op, Op::CrossEntropy(_) | Op::CrossEntropyGrad(_))
}

/// Elements of the logits that a loss or its gradient reads, without padding; 0 for other operations.
fn logits_of(body: &Graph, node: &Node) -> u64 {
    let (classes, labels) = match &node.op {
        Op::CrossEntropy(op) => (op.classes_of(&body.ty(node.inputs[0]).shape), node.inputs[1]),
        Op::CrossEntropyGrad(op) => (op.classes_of(&body.ty(node.inputs[1]).shape), node.inputs[2]),
        _ => return 0,
    };
    (classes * body.ty(labels).shape.numel()) as u64
}

/// Bytes that one operation moves in the emulated system: a loss reads logits in f32, and its gradient writes as many.
fn eager_bytes(body: &Graph, node: &Node) -> u64 {
    match node.op {
        Op::CrossEntropy(_) => 4 * logits_of(body, node),
        Op::CrossEntropyGrad(_) => 8 * logits_of(body, node),
        _ => moved_bytes(body, node),
    }
}

/// Seconds of the cast of a loss's gradient from f32 to the compute dtype.
fn rounding_of_gradient(device: &Device, body: &Graph, node: &Node, compute: DType) -> f64 {
    match node.op {
        Op::CrossEntropyGrad(_) if compute.size() < 4 => {
            device.copy_seconds((4 + compute.size() as u64) * logits_of(body, node))
        }
        _ => 0.0,
    }
}

/// Seconds of a kernel's operations one by one.
fn eager_seconds(device: &Device, body: &Graph, compute: DType, attention: Attention) -> f64 {
    let of = |node: &Node| {
        if node.op.is_leaf() || is_view(&node.op) {
            return 0.0;
        }
        let types = |first: usize| [0, 1, 2].map(|i| body.ty(node.inputs[first + i]));
        match (&node.op, attention) {
            (Op::Attention(_), Attention::Written) => {
                return written_attention(device, types(0), 2, WRITTEN_FORWARD);
            }
            (Op::AttentionGrad(_), Attention::Written) => {
                return written_attention(device, types(1), 4, WRITTEN_BACKWARD);
            }
            _ => {}
        }
        let factor = match &node.op {
            Op::RmsNorm(_)
            | Op::RmsNormGradInput(_)
            | Op::Unary(UnaryFn::GeluTanh)
            | Op::Binary(BinaryFn::GeluTanhGrad) => EAGER_WRITTEN,
            Op::LayerNorm(_) => 1.0,
            op if is_loss(op) => EAGER_LOSS,
            op if is_matrix(op) => 1.0,
            _ => EAGER_OTHER,
        };
        // The stream between blocks is in the compute dtype there.
        let widest = body.ty(node.outputs[0]).dtype.size().max(1);
        let narrow = if widest > compute.size() && !is_loss(&node.op) {
            compute.size() as f64 / widest as f64
        } else {
            1.0
        };
        let bytes = eager_bytes(body, node) as f64 * factor * narrow;
        let arithmetic = device.arithmetic_seconds(body, node, false);
        let seconds = 1e-6 * device.launch_us + arithmetic.max(bytes / device.bytes_per_second());
        seconds + rounding_of_gradient(device, body, node, compute)
    };
    body.nodes().map(|(_, n)| of(n)).sum()
}

/// Seconds of attention of `[query, key, value]` by operations on all scores: this many matmuls, half of which
/// contract over the head size and half over the keys or queries, and moves of the scores.
fn written_attention(device: &Device, [q, k, _]: [&TensorType; 3], gemms: u32, moves: f64) -> f64 {
    let (q_dims, k_dims) = (q.shape.dims(), k.shape.dims());
    let (batch, rows, keys, head) = (q_dims[0] * q_dims[1], q_dims[2], k_dims[2], q_dims[3]);
    let gemm = |n, k| {
        let trans = [false, false];
        device.gemm_seconds(&GemmShape {
            dtype: q.dtype,
            out: q.dtype,
            batch,
            m: rows,
            n,
            k,
            trans,
        })
    };
    let scores = batch * rows * keys * q.dtype.size();
    f64::from(gemms / 2) * (gemm(keys, head) + gemm(head, keys))
        + moves * scores as f64 / device.bytes_per_second()
}

/// Whether the operation makes a view of its operand.
fn is_view(op: &Op) -> bool {
    matches!(op, Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_) | Op::Split(_) | Op::Expand(_))
}

/// Adds the copies around communication and the recomputation.
fn with_extra_work(
    plan: &Plan,
    cluster: &Cluster,
    emulation: Emulation,
    tasks: &[Task],
    jobs: Vec<Job>,
) -> Vec<Job> {
    let units: Vec<Option<UnitId>> = tasks.iter().map(|t| unit_of(plan, t)).collect();
    let recomputation = recomputed(plan, emulation.checkpointing, tasks, &units);
    let mut made: Vec<Job> = Vec::with_capacity(2 * jobs.len());
    let mut new_index: Vec<usize> = Vec::with_capacity(jobs.len());
    let mut entered: TiVec<UnitId, bool> = vec![false; plan.units.len()].into();
    for (i, job) in jobs.iter().enumerate() {
        let waits: Vec<usize> = job.waits.iter().map(|w| new_index[*w]).collect();
        // The first kernel that waits for a gather copies it out first.
        for &wait in &job.waits {
            if let (Action::AllGather { recv, .. }, Stream::Compute) =
                (&tasks[wait].action, tasks[i].stream)
            {
                let bytes = 2 * recv.ty.bytes() as u64;
                let seconds = cluster.device.copy_seconds(bytes);
                made.push(extra("copy out", job, Kind::Copy, seconds, vec![new_index[wait]]));
            }
        }
        if let (Some(unit), Region::Backward, Stream::Compute) =
            (units[i], tasks[i].region, tasks[i].stream)
            && !std::mem::replace(&mut entered[unit], true)
        {
            for &forward in recomputation.get(&unit).into_iter().flatten() {
                let old = &jobs[forward];
                made.push(extra(&old.name, old, old.kind, old.seconds, waits.clone()));
            }
        }
        if let Action::ReduceScatter { send, .. } = &tasks[i].action {
            // Read in the compute dtype, written in that of the reduction.
            let elements = send.ty.shape.numel() as u64;
            let bytes = elements * (plan.compute_dtype.size() + send.ty.dtype.size()) as u64;
            let seconds = cluster.device.copy_seconds(bytes);
            let mut copy = extra("copy in", job, Kind::Copy, seconds, waits.clone());
            copy.stream = Stream::Compute;
            made.push(copy);
            new_index.push(made.len());
            made.push(Job { waits: [waits, vec![made.len() - 1]].concat(), ..job.clone() });
            continue;
        }
        new_index.push(made.len());
        made.push(Job { waits, ..job.clone() });
    }
    made
}

fn extra(name: &str, at: &Job, kind: Kind, seconds: f64, waits: Vec<usize>) -> Job {
    let scope = at.scope.clone();
    let stream = Stream::Compute;
    Job { name: name.into(), scope, stream, kind, seconds, inter: false, waits }
}

/// The unit whose scope holds the task; `None` outside of blocks.
fn unit_of(plan: &Plan, task: &Task) -> Option<UnitId> {
    let scope = &*task.origin.scope;
    plan.units.keys().skip(1).find(|&u| {
        let rest = scope.strip_prefix(plan.units[u].name.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

/// Forward kernels that are rerun, by unit.
fn recomputed(
    plan: &Plan,
    checkpointing: Checkpointing,
    tasks: &[Task],
    units: &[Option<UnitId>],
) -> HashMap<UnitId, Vec<usize>> {
    let mut kernels: HashMap<UnitId, Vec<usize>> = HashMap::new();
    let mut gemms: HashMap<UnitId, usize> = HashMap::new();
    for (i, (task, unit)) in tasks.iter().zip(units).enumerate() {
        let (Action::Kernel { kernel, .. }, Some(unit), Region::Forward) =
            (&task.action, unit, task.region)
        else {
            continue;
        };
        let matrix =
            plan.kernels[*kernel].body.nodes().map(|(_, n)| &n.op).find(|op| is_matrix(op));
        let runs = match (checkpointing, matrix) {
            (Checkpointing::None, _) => false,
            (Checkpointing::Full, _) => true,
            (Checkpointing::SelectiveLayer, _) => unit.0 % 2 == 0,
            (Checkpointing::SelectiveOp, Some(Op::Attention(_))) => false,
            (Checkpointing::SelectiveOp, Some(_)) => {
                let nth = gemms.entry(*unit).or_default();
                *nth += 1;
                nth.is_multiple_of(2)
            }
            (Checkpointing::SelectiveOp, None) => true,
        };
        if runs {
            kernels.entry(*unit).or_default().push(i);
        }
    }
    kernels
}

/// Bytes per logit that are alive at once: the low-precision logits, their f32 copy, the saved
/// log-softmax, and two f32 gradients.
const LOSS_BYTES: u64 = 14;
/// The same if the loss is compiled: the low-precision logits and their gradient.
const COMPILED_LOSS_BYTES: u64 = 4;

/// Memory that the caching allocator reserves beyond allocations: a fraction, and a constant.
const RESERVE: f64 = 1.1;
const RESERVE_BYTES: f64 = 1.5 * (1 << 30) as f64;

/// Bytes that the caching allocator of the emulated system reserves at its peak.
///
/// Sharded f32 state (parameters, gradients, two moments: 16 bytes a parameter); the root's parameters
/// gathered; of one unit, parameters, two flat gathers, its gradient and the f32 input of its reduction
/// (10 bytes); what backward reads of every unit in the compute dtype, or what checkpointing keeps of it,
/// and then one unit's own activations; or, instead of the last two, the loss. To that the reserve.
fn memory_bytes(plan: &Plan, emulation: Emulation) -> u64 {
    let shards = plan.world_size as u64;
    let compute = plan.compute_dtype.size() as u64;
    let numel = |unit: UnitId| -> u64 {
        plan.groups.iter().filter(|g| g.unit == unit).map(|g| g.numel as u64).sum()
    };
    let all: u64 = plan.units.keys().map(numel).sum();
    let largest = plan.units.keys().skip(1).map(numel).max().unwrap_or(0);
    let state = 16 * all / shards;
    let (saved, block) = activations(plan, emulation);
    let of_a_logit = match emulation.system {
        System::CompileAll => COMPILED_LOSS_BYTES,
        System::Eager | System::Compile => LOSS_BYTES,
    };
    let loss = of_a_logit * logits(plan);
    let backward = block + 10 * largest;
    let peak =
        state + compute * numel(UnitId::ROOT) + saved + backward.max(loss + compute * 2 * largest);
    (peak as f64 * RESERVE + RESERVE_BYTES) as u64
}

/// Elements of the operand of the loss.
fn logits(plan: &Plan) -> u64 {
    let of = |task: &Task| -> u64 {
        let Action::Kernel { kernel, .. } = &task.action else { return 0 };
        let body = &plan.kernels[*kernel].body;
        let losses = body.nodes().filter(|(_, n)| matches!(n.op, Op::CrossEntropy(_)));
        losses.map(|(_, n)| logits_of(body, n)).sum()
    };
    plan.tasks.iter().map(of).sum()
}

/// Bytes that all units keep for backward, and those that one unit's recomputation makes.
fn activations(plan: &Plan, emulation: Emulation) -> (u64, u64) {
    let compute = plan.compute_dtype.size() as u64;
    let bytes = |ty: &TensorType| ty.shape.numel() as u64 * compute.min(ty.dtype.size() as u64);
    let units: TiVec<TaskId, Option<UnitId>> =
        plan.tasks.iter().map(|t| unit_of(plan, t)).collect();
    let forward = |i: TaskId| plan.tasks[i].region == Region::Forward;
    // Buffers that backward reads, by the unit that wrote them.
    let mut writer: HashMap<BufferId, (UnitId, u64)> = HashMap::new();
    // The largest value that each unit hands to another: its result.
    let mut handed_on: HashMap<UnitId, u64> = HashMap::new();
    let mut used_inside: HashSet<BufferId> = HashSet::new();
    let mut read: HashMap<BufferId, u64> = HashMap::new();
    let mut kept: HashMap<BufferId, u64> = HashMap::new();
    let mut gemms: HashMap<UnitId, usize> = HashMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        let Action::Kernel { kernel, reads, writes } = &task.action else { continue };
        let body = &plan.kernels[*kernel].body;
        for place in reads {
            let Some(&(unit, size)) = writer.get(&place.buffer) else { continue };
            match (forward(i), units[i]) {
                (true, Some(reader)) if reader != unit => {
                    let largest = handed_on.entry(unit).or_default();
                    *largest = size.max(*largest);
                }
                (true, _) => {
                    used_inside.insert(place.buffer);
                }
                (false, _) => {
                    read.insert(place.buffer, size);
                }
            }
        }
        let (true, Some(unit)) = (forward(i), units[i]) else { continue };
        for place in writes {
            writer.insert(place.buffer, (unit, bytes(&place.ty)));
        }
        let matrix = body.nodes().map(|(_, n)| &n.op).find(|op| is_matrix(op));
        let keep = match matrix {
            Some(Op::Attention(_)) => true,
            Some(_) => {
                let nth = gemms.entry(unit).or_default();
                *nth += 1;
                !nth.is_multiple_of(2)
            }
            None => false,
        };
        if keep {
            kept.extend(writes.iter().map(|p| (p.buffer, bytes(&p.ty))));
        }
    }
    let n_units = (plan.units.len() as u64 - 1).max(1);
    let boundaries: u64 = handed_on.values().sum();
    let everything: u64 = read.values().sum();
    let keeps = match emulation.system {
        System::Eager => EAGER_KEEPS,
        System::Compile | System::CompileAll => COMPILE_KEEPS,
    };
    let everything = (everything as f64 * keeps) as u64;
    let block = everything / n_units;
    match emulation.checkpointing {
        Checkpointing::None => (everything, 0),
        Checkpointing::Full => (boundaries, block),
        Checkpointing::SelectiveLayer => ((boundaries + everything) / 2, block),
        Checkpointing::SelectiveOp => {
            // Compiled blocks do not keep what only the next block reads.
            let needed =
                |b: &BufferId| emulation.system == System::Eager || used_inside.contains(b);
            let kept: u64 = kept.iter().filter(|(b, _)| needed(b)).map(|(_, size)| size).sum();
            (boundaries + kept, block)
        }
    }
}
