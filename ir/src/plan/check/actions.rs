//! Tasks: operands fit their action, and sums of costs do not overflow.

use super::{CheckError, Result, ensure, name, places, short};
use crate::plan::{
    Action, CUDA_OPERAND_ALIGNMENT, Entry, Group, GroupId, KernelId, Place, Plan, Task,
};
use crate::{Op, TensorType};

/// Maximum operations, and bytes, of all tasks of a step in total.
const MAX_WORK: u128 = 1 << 62;
/// The longest task, in microseconds.
const MAX_COST_US: f64 = 1e18;

pub(super) fn check(plan: &Plan) -> Result {
    let (mut flops, mut bytes) = (0_u128, 0_u128);
    for (i, task) in plan.tasks.iter_enumerated() {
        one(plan, task)
            .map_err(|e| CheckError(format!("task {i} `{}`: {}", short(&task.name), e.0)))?;
        let runs = plan.runs(i) as u128;
        flops += runs * u128::from(task.flops);
        bytes += runs * u128::from(task.bytes);
        // Data of a collective crosses a link at most twice.
        let exchanged = task.action.is_collective() || matches!(task.action, Action::Copy { .. });
        let touched = task.action.reads().into_iter().chain(task.action.writes());
        bytes +=
            touched.filter(|_| exchanged).map(|p| runs * 2 * p.ty.bytes() as u128).sum::<u128>();
    }
    let casts = plan.accumulation as u128 * plan.cast_baseline.casts as u128;
    let cast_bytes = plan.accumulation as u128 * u128::from(plan.cast_baseline.bytes);
    ensure([flops, bytes, casts, cast_bytes].iter().all(|n| *n <= MAX_WORK), || {
        "the operations of the tasks overflow their counter".into()
    })
}

fn one(plan: &Plan, task: &Task) -> Result {
    name(&task.name)?;
    ensure((0.0..=MAX_COST_US).contains(&task.cost_us), || {
        format!("it takes {} microseconds", task.cost_us)
    })?;
    for place in task.action.reads().into_iter().chain(task.action.writes()) {
        places::place(plan, place)?;
    }
    action(plan, &task.action)
}

fn action(plan: &Plan, action: &Action) -> Result {
    let group = |g: GroupId| plan.groups.get(g).ok_or_else(|| CheckError(format!("no group {g}")));
    let numel = |p: &Place| p.ty.shape.numel();
    // A whole in parts for so many ranks.
    let parts = |part: &Place, n: usize, whole: &Place, g: &Group| {
        n > 0
            && g.shards().is_multiple_of(n)
            && numel(part).checked_mul(n) == Some(g.numel)
            && numel(whole) == g.numel
            && part.ty.dtype == whole.ty.dtype
    };
    match action {
        Action::Kernel { kernel, reads, writes } => operands(plan, *kernel, reads, writes),
        Action::AllGather { group: g, ranks, send, recv } => {
            let g = group(*g)?;
            let fits = g.sharded && parts(send, ranks.unwrap_or(g.shards()), recv, g);
            ensure(fits, || "gather of the wrong size or dtype".into())
        }
        Action::Reshard { group: g, ranks, from, to } => {
            let fits = parts(to, *ranks, from, group(*g)?);
            ensure(fits, || "a part of the wrong size or dtype is kept".into())
        }
        Action::ReduceScatter { group: g, send, recv, .. } => {
            let g = group(*g)?;
            let fits = g.sharded && parts(recv, g.shards(), send, g);
            ensure(fits, || "reduction of the wrong size or dtype".into())
        }
        Action::AllReduce { group: g, send, recv, .. } => {
            let fits = match g {
                Some(g) => numel(send) == group(*g)?.shard_numel,
                None => true,
            };
            ensure(fits && send.ty == recv.ty, || "reduction of different types".into())
        }
        Action::Copy { from, to } => {
            ensure(from.ty == to.ty, || "copy between different types".into())
        }
        Action::Zero { .. } => Ok(()),
    }
}

fn operands(plan: &Plan, kernel: KernelId, reads: &[Place], writes: &[Place]) -> Result {
    let kernel = plan.kernels.get(kernel).ok_or_else(|| CheckError("no such kernel".into()))?;
    let body = &kernel.body;
    let inputs: Vec<&TensorType> = body
        .nodes()
        .filter(|(_, n)| matches!(n.op, Op::Input(_)))
        .map(|(_, n)| body.ty(n.outputs[0]))
        .collect();
    let outputs: Vec<&TensorType> = body.outputs.iter().map(|o| body.ty(o.value)).collect();
    ensure(inputs.iter().copied().eq(reads.iter().map(|p| &p.ty)), || {
        format!("operands do not fit kernel `{}`", short(&kernel.name))
    })?;
    ensure(outputs.iter().copied().eq(writes.iter().map(|p| &p.ty)), || {
        format!("results do not fit kernel `{}`", short(&kernel.name))
    })?;
    let in_vectors = match &kernel.entry {
        Entry::Cuda { .. } => true,
        Entry::Launches(selected) => selected.launches_generated(),
        _ => false,
    };
    let mut places = reads.iter().chain(writes);
    let fits = |p: &Place| p.offset.is_multiple_of(CUDA_OPERAND_ALIGNMENT);
    ensure(!in_vectors || places.all(fits), || {
        format!("kernel `{}` reads or writes vectors that are not aligned", short(&kernel.name))
    })
}
