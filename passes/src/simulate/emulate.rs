//! Emulates PyTorch's FSDP2 with the same model, so that the simulator can be compared with published runs.
//!
//! In: a Frit plan without rematerialization, which has the model's matmuls, units, gathers and reductions. The work is changed to that of
//! the emulated system:
//!
//! - Kernels: `compile` runs the plan's fused kernels; `eager` runs every operation by itself, through
//!   memory, in the compute dtype, with norms and the loss as the several kernels that they are there.
//!   Views are free. In both, the loss is not compiled and works in f32. With `compile` a reduction over the rows
//!   is no part of a kernel that reduces rows, a matmul adds no other tensor than a bias (the kernel that reads
//!   the sum does that), and the gradient of an embedding is added to another by a kernel of its own.
//! - Activation checkpointing: forward kernels of a unit run again before its backward: all of them
//!   (`full`), those of every other unit (`selective-layer`), or all but attention and every other
//!   matmul (`selective-op`).
//! - Communication: parameters are copied out of the gathered buffer, gradients into the one that is
//!   reduced, on the compute stream. Schedule: the plan's (forward prefetch of one unit, backward `pre`).
//! - Memory: see [`memory_bytes`].
//!
//! Source: torch/distributed/fsdp/_fully_shard, torchtitan's parallelize functions.

use super::jobs::{Job, Kind, of_plan};
use super::{Simulation, of_phases};
use crate::cost::kernel::{GemmShape, is_matrix, moved_bytes};
use crate::cost::{Cluster, Device};
use crate::fuse::columns_beside_rows;
use frit_ir::ops::{BinaryFn, UnaryFn};
use frit_ir::plan::{Action, BufferId, KernelId, Plan, Stream, Task, TaskId, TiVec, UnitId};
use frit_ir::{DType, Graph, Node, Op, Region, TensorType, ValueId};
use std::collections::{HashMap, HashSet};

/// The emulated system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// FSDP2 without compilation.
    Eager,
    /// FSDP2 with blocks compiled by torch.compile.
    Compile,
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

/// How the emulated model computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// By one kernel, with scores that never are in memory.
    Fused,
    /// By operations on all scores, in memory: matmul, scale, mask, softmax, dropout, matmul.
    Written,
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

/// Simulates a step of the emulated system on the plan's model.
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
    let mut readers: HashMap<BufferId, usize> = HashMap::new();
    for place in plan.tasks.iter().flat_map(|t| t.action.reads()) {
        *readers.entry(place.buffer).or_default() += 1;
    }
    for (task, job) in tasks.iter().zip(jobs) {
        let Action::Kernel { kernel, writes, .. } = &task.action else { continue };
        let body = &plan.kernels[*kernel].body;
        let loss = body.nodes().any(|(_, n)| is_loss(&n.op));
        if emulation.system == System::Eager || loss {
            job.seconds = *known.entry(*kernel).or_insert_with(|| {
                eager_seconds(&cluster.device, body, plan.compute_dtype, emulation.attention)
            });
        } else {
            let kept = writes.iter().any(|p| readers.get(&p.buffer).is_some_and(|n| *n > 1));
            let sum = sum_bytes(body, kept) as f64 / cluster.device.bytes_per_second();
            job.seconds += separate_seconds(&cluster.device, body) + sum;
        }
    }
}

/// Seconds of the kernels that a compiled kernel needs beside it: reductions over the rows read their operands again.
fn separate_seconds(device: &Device, body: &Graph) -> f64 {
    let in_memory = |value: &ValueId| {
        let mut value = *value;
        while let Op::Cast(_) | Op::Reshape(_) = body.def(value).op {
            value = body.def(value).inputs[0];
        }
        body.ty(value).bytes() as u64
    };
    let of = |node: &Node| {
        let results = node.outputs.iter().map(|v| body.ty(*v).bytes() as u64);
        device.copy_seconds(node.inputs.iter().map(in_memory).chain(results).sum())
    };
    let columns: f64 = columns_beside_rows(body).into_iter().map(of).sum();
    // The gradient of an embedding is written, and read by a sum that also writes what the plan's kernel writes.
    let tables = body.nodes().filter(|(_, n)| matches!(n.op, Op::EmbeddingGrad(_)));
    let added = tables.filter(|(_, n)| n.inputs.len() > 2);
    let sums = added.map(|(_, n)| device.copy_seconds(2 * body.ty(n.outputs[0]).bytes() as u64));
    columns + sums.sum::<f64>()
}

/// Bytes by which a kernel moves more that adds another tensor to a GEMM than one that reads the sum: both terms, and the
/// sum that it writes if others read it too, instead of the sum.
fn sum_bytes(body: &Graph, kept: bool) -> u64 {
    // The gradient of a weight is accumulated over chunks of a loss that is whole in the emulated system.
    let multiplies = |op: &Op| matches!(op, Op::MatMul(m) if !m.trans_a || m.trans_b);
    if !body.nodes().any(|(_, n)| multiplies(&n.op)) {
        return 0;
    }
    let of = |(_, node): (frit_ir::NodeId, &Node)| {
        let sum = body.ty(node.outputs[0]);
        let is_whole = |v: &ValueId| body.ty(*v).shape.numel() == sum.shape.numel();
        let is_sum = matches!(node.op, Op::Binary(BinaryFn::Add));
        match is_sum && node.inputs.iter().all(is_whole) {
            true => (1 + u64::from(kept)) * sum.bytes() as u64,
            false => 0,
        }
    };
    body.nodes().map(of).sum()
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
        if node.op.is_leaf() || is_view(&node.op) || is_sum_of_chunks(body, node) {
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

/// Whether the node adds the gradient of a weight to a matrix of its size, as the plan does with gradients of chunks of tokens: the
/// emulated system has one matmul.
fn is_sum_of_chunks(body: &Graph, node: &Node) -> bool {
    let is_gradient =
        |v: &ValueId| matches!(&body.def(*v).op, Op::MatMul(m) if m.trans_a && !m.trans_b);
    matches!(node.op, Op::Binary(BinaryFn::Add))
        && node.inputs.iter().any(is_gradient)
        && node.inputs.iter().all(|v| body.ty(*v).shape == body.ty(node.outputs[0]).shape)
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
    let forward: Vec<bool> = {
        let gradients = gradients_of_logits(plan);
        tasks.iter().map(|task| is_forward(plan, &gradients, task)).collect()
    };
    let recomputation = recomputed(plan, emulation.checkpointing, (tasks, &forward), &units);
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
    (tasks, forward): (&[Task], &[bool]),
    units: &[Option<UnitId>],
) -> HashMap<UnitId, Vec<usize>> {
    let mut kernels: HashMap<UnitId, Vec<usize>> = HashMap::new();
    let mut gemms: HashMap<UnitId, usize> = HashMap::new();
    for (i, (task, unit)) in tasks.iter().zip(units).enumerate() {
        let (Action::Kernel { kernel, .. }, Some(unit), true) = (&task.action, unit, forward[i])
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
    let loss = LOSS_BYTES * logits(plan);
    let backward = block + 10 * largest;
    let peak =
        state + compute * numel(UnitId::ROOT) + saved + backward.max(loss + compute * 2 * largest);
    (peak as f64 * RESERVE + RESERVE_BYTES) as u64
}

/// Elements of the operand of the loss, whole, also if the plan computes it in chunks.
fn logits(plan: &Plan) -> u64 {
    let of = |task: &Task| -> u64 {
        let Action::Kernel { kernel, .. } = &task.action else { return 0 };
        let body = &plan.kernels[*kernel].body;
        let losses = body.nodes().filter(|(_, n)| matches!(n.op, Op::CrossEntropy(_)));
        losses.map(|(_, n)| logits_of(body, n)).sum()
    };
    plan.tasks.iter().map(of).sum()
}

/// Whether a task is of the forward pass of the emulated system. Where a plan computes the gradient of logits beside their
/// loss, matmuls that read it are of the backward pass nevertheless.
fn is_forward(plan: &Plan, gradients: &HashSet<BufferId>, task: &Task) -> bool {
    let reads_gradient = match &task.action {
        Action::Kernel { kernel, reads, .. } => {
            plan.kernels[*kernel].body.nodes().any(|(_, n)| matches!(n.op, Op::MatMul(_)))
                && reads.iter().any(|place| gradients.contains(&place.buffer))
        }
        _ => false,
    };
    task.region == Region::Forward && !reads_gradient
}

/// Buffers with the gradient of logits.
fn gradients_of_logits(plan: &Plan) -> HashSet<BufferId> {
    let mut buffers = HashSet::new();
    for task in &plan.tasks {
        let Action::Kernel { kernel, writes, .. } = &task.action else { continue };
        let body = &plan.kernels[*kernel].body;
        for (place, output) in writes.iter().zip(&body.outputs) {
            if matches!(body.def(output.value).op, Op::CrossEntropyGrad(_)) {
                buffers.insert(place.buffer);
            }
        }
    }
    buffers
}

/// Bytes that all units keep for backward, and those that one unit's recomputation makes.
fn activations(plan: &Plan, emulation: Emulation) -> (u64, u64) {
    let compute = plan.compute_dtype.size() as u64;
    let bytes = |ty: &TensorType| ty.shape.numel() as u64 * compute.min(ty.dtype.size() as u64);
    let units: TiVec<TaskId, Option<UnitId>> =
        plan.tasks.iter().map(|t| unit_of(plan, t)).collect();
    let gradients = gradients_of_logits(plan);
    let forward = |i: TaskId| is_forward(plan, &gradients, &plan.tasks[i]);
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
        System::Compile => COMPILE_KEEPS,
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
