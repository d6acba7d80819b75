//! Well-formedness of a plan: what every loader checks before it trusts one.
//!
//! Bounds, alignment, operand types against kernel bodies, kernel hashes, phase and wait structure.
//! The proof that the schedule is right is `passes::verify_plan`.

use super::file::sha256_hex;
use super::{
    ALIGNMENT, Action, Arena, CUDA_OPERAND_ALIGNMENT, EVAL, Entry, EvalSpec, KernelKind, ParamHome,
    Place, Plan,
};
use crate::{DType, Op, TensorType};

/// A malformed plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed plan: {0}")]
pub struct CheckError(String);

/// Every phase, in order; all but the micro-step and the update may be absent.
const PHASES: [&str; 4] = ["unshard", "micro_step", "reduce", "update"];

type Result<T = ()> = std::result::Result<T, CheckError>;

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result {
    if condition { Ok(()) } else { Err(CheckError(message())) }
}

/// Checks a plan.
///
/// # Errors
/// The first thing that is not as it must be.
pub fn check(plan: &Plan) -> Result {
    ensure(plan.world_size > 0 && plan.accumulation > 0, || "no ranks or no micro-steps".into())?;
    buffers(plan)?;
    kernels(plan)?;
    phases(plan)?;
    for (i, task) in plan.tasks.iter().enumerate() {
        for place in task.action.reads().into_iter().chain(task.action.writes()) {
            check_place(plan, place).map_err(|e| CheckError(format!("task {i}: {}", e.0)))?;
        }
        check_action(plan, &task.action)
            .map_err(|e| CheckError(format!("task {i} `{}`: {}", task.name, e.0)))?;
    }
    tables(plan)
}

fn buffers(plan: &Plan) -> Result {
    for b in &plan.buffers {
        let arena = plan.arena_bytes(b.arena);
        let end = b.offset.checked_add(b.bytes);
        ensure(end.is_some_and(|end| end <= arena), || {
            format!("buffer `{}` leaves its arena", b.name)
        })?;
        ensure(b.offset.is_multiple_of(ALIGNMENT), || {
            format!("buffer `{}` is not aligned", b.name)
        })?;
    }
    Ok(())
}

fn kernels(plan: &Plan) -> Result {
    for k in &plan.kernels {
        ensure(sha256_hex(k.body.to_string().as_bytes()) == k.hash, || {
            format!("kernel `{}` does not match its hash", k.name)
        })?;
        let generated = k.kind == KernelKind::Generated;
        let has_code = match &k.entry {
            Some(Entry::Host { .. }) => plan.target.device == "cpu",
            Some(Entry::Cuda { launches, .. }) => {
                plan.target.device == "cuda" && !launches.is_empty()
            }
            None => false,
        };
        ensure(!generated || (has_code && plan.object.is_some()), || {
            format!("kernel `{}` has no code for this device", k.name)
        })?;
    }
    Ok(())
}

fn phases(plan: &Plan) -> Result {
    let mut next = 0;
    for phase in &plan.phases {
        ensure(phase.begin == next && phase.end >= next, || "phases do not follow".into())?;
        next = phase.end;
        for i in phase.begin..phase.end.min(plan.tasks.len()) {
            let ok = plan.tasks[i].waits.iter().all(|w| (phase.begin..i).contains(w));
            ensure(ok, || format!("task {i} waits for a task that is not before it"))?;
        }
    }
    ensure(next == plan.tasks.len(), || "tasks outside every phase".into())?;
    let names: Vec<&str> = plan.phases.iter().map(|p| p.name.as_str()).collect();
    if plan.eval.is_some() {
        return ensure(names == [EVAL], || format!("unknown phases {names:?}"));
    }
    let required = |name: &&&str| matches!(**name, "micro_step" | "update");
    let ordered = PHASES.iter().filter(|name| names.contains(name)).eq(&names);
    ensure(ordered && names.iter().filter(required).count() == 2, || {
        format!("unknown phases {names:?}")
    })
}

fn check_place(plan: &Plan, place: &Place) -> Result {
    let buffer = plan
        .buffers
        .get(place.buffer)
        .ok_or_else(|| CheckError(format!("no buffer {}", place.buffer)))?;
    let end = place.offset.checked_add(place.ty.bytes());
    ensure(end.is_some_and(|end| end <= buffer.bytes), || {
        format!("{} at byte {} leaves buffer `{}`", place.ty, place.offset, buffer.name)
    })?;
    ensure(place.offset.is_multiple_of(place.ty.dtype.size()), || {
        format!("{} at byte {} of `{}` is not aligned", place.ty, place.offset, buffer.name)
    })
}

fn check_action(plan: &Plan, action: &Action) -> Result {
    let group = |g: usize| plan.groups.get(g).ok_or_else(|| CheckError(format!("no group {g}")));
    let numel = |p: &Place| p.ty.shape.numel();
    match action {
        Action::Kernel { kernel, reads, writes } => {
            let kernel =
                plan.kernels.get(*kernel).ok_or_else(|| CheckError("no such kernel".into()))?;
            let body = &kernel.body;
            let inputs: Vec<&TensorType> = body
                .nodes()
                .filter(|(_, n)| matches!(n.op, Op::Input(_)))
                .map(|(_, n)| body.ty(n.outputs[0]))
                .collect();
            let outputs: Vec<&TensorType> = body.outputs.iter().map(|o| body.ty(o.value)).collect();
            ensure(inputs.iter().copied().eq(reads.iter().map(|p| &p.ty)), || {
                format!("operands do not fit kernel `{}`", kernel.name)
            })?;
            ensure(outputs.iter().copied().eq(writes.iter().map(|p| &p.ty)), || {
                format!("results do not fit kernel `{}`", kernel.name)
            })?;
            let in_vectors = matches!(kernel.entry, Some(Entry::Cuda { .. }));
            let mut places = reads.iter().chain(writes);
            let fits = |p: &Place| p.offset.is_multiple_of(CUDA_OPERAND_ALIGNMENT);
            ensure(!in_vectors || places.all(fits), || {
                format!("kernel `{}` reads or writes vectors that are not aligned", kernel.name)
            })
        }
        Action::AllGather { group: g, ranks, send, recv } => {
            let g = group(*g)?;
            let parts = ranks.unwrap_or(g.shards());
            ensure(
                g.sharded
                    && parts > 0
                    && g.shards().is_multiple_of(parts)
                    && numel(send) * parts == g.numel
                    && numel(recv) == g.numel
                    && send.ty.dtype == recv.ty.dtype,
                || "gather of the wrong size or dtype".into(),
            )
        }
        Action::Reshard { group: g, ranks, from, to } => {
            let g = group(*g)?;
            ensure(
                *ranks > 0
                    && g.shards().is_multiple_of(*ranks)
                    && numel(from) == g.numel
                    && numel(to) * ranks == g.numel
                    && from.ty.dtype == to.ty.dtype,
                || "a part of the wrong size or dtype is kept".into(),
            )
        }
        Action::ReduceScatter { group: g, send, recv, .. } => {
            let g = group(*g)?;
            ensure(
                g.sharded
                    && numel(send) == g.numel
                    && numel(recv) == g.shard_numel
                    && send.ty.dtype == recv.ty.dtype,
                || "reduction of the wrong size or dtype".into(),
            )
        }
        Action::AllReduce { send, recv, .. } => {
            ensure(send.ty == recv.ty, || "reduction of different types".into())
        }
        Action::Copy { from, to } => {
            ensure(from.ty == to.ty, || "copy between different types".into())
        }
        Action::Zero { .. } => Ok(()),
    }
}

fn tables(plan: &Plan) -> Result {
    let persistent = |b: usize, bytes: usize, what: &str| {
        let ok =
            plan.buffers.get(b).is_some_and(|b| b.arena == Arena::Persistent && b.bytes >= bytes);
        ensure(ok, || format!("{what} has no persistent buffer of its size"))
    };
    let kept = |b: usize, bytes: usize, what: &str| {
        let ok = plan.buffers.get(b).is_some_and(|b| b.arena.outlives_step() && b.bytes >= bytes);
        ensure(ok, || format!("{what} has no persistent buffer of its size"))
    };
    for (i, g) in plan.groups.iter().enumerate() {
        let parts = g.shards();
        let divides = g.shard_numel * parts == g.numel && plan.world_size.is_multiple_of(parts);
        ensure(divides, || format!("group {i} does not divide"))?;
        kept(g.master, g.shard_numel * 4, "a group")?;
        for s in &g.states {
            kept(s.buffer, g.shard_numel * 4, &s.name)?;
        }
        let offsets = g.param_groups.iter().map(|p| p.offset);
        ensure(offsets.clone().is_sorted() && offsets.max().is_none_or(|o| o <= g.numel), || {
            format!("the parameter groups of group {i} are not in order")
        })?;
        let others = g.param_groups.len().saturating_sub(1);
        ensure((others > 0) == g.begins.is_some(), || {
            format!("group {i} has no table of its parameter groups")
        })?;
        if let Some(begins) = g.begins {
            persistent(begins, others * 8, "a table of parameter groups")?;
        }
        if let Some(starts) = g.starts {
            persistent(starts, g.segments.len() * 8, "a table of parameters")?;
        }
        let mut end = 0;
        for s in &g.segments {
            let param = plan
                .params
                .get(s.param)
                .ok_or_else(|| CheckError(format!("group {i} holds no such parameter")))?;
            let ok = s.offset >= end && s.numel == param.ty.shape.numel();
            ensure(ok, || format!("parameter `{}` overlaps another", param.name))?;
            end = s.offset + s.numel;
        }
        ensure(end <= g.numel, || format!("group {i} is too small"))?;
    }
    for p in &plan.params {
        match p.home {
            ParamHome::Buffer(b) => persistent(b, p.ty.bytes(), &p.name)?,
            ParamHome::Group { group, .. } => {
                ensure(group < plan.groups.len(), || format!("`{}` has no group", p.name))?;
            }
            ParamHome::Unused => {}
        }
    }
    for i in &plan.inputs {
        persistent(i.buffer, i.ty.bytes(), &i.name)?;
    }
    for s in &plan.states {
        persistent(s.buffer, s.ty.bytes(), &s.name)?;
    }
    for h in &plan.hyper {
        persistent(h.buffer, 4, &h.name)?;
    }
    for c in &plan.constants {
        persistent(c.buffer, c.ty.bytes(), &c.name)?;
    }
    for m in &plan.metrics {
        check_place(plan, &m.place)?;
    }
    plan.gradients.iter().try_for_each(|g| check_place(plan, &g.place))?;
    plan.eval.iter().try_for_each(|eval| evaluation(plan, eval))
}

fn evaluation(plan: &Plan, eval: &EvalSpec) -> Result {
    let places = eval.outputs.iter().map(|o| &o.place);
    for place in places.chain(&eval.statistics).chain(&eval.weights) {
        check_place(plan, place)?;
        ensure(plan.buffers[place.buffer].arena == Arena::Persistent, || {
            "a result of the evaluation does not outlive it".into()
        })?;
    }
    let n = eval.statistics.as_ref().map_or(0, |p| p.ty.shape.numel());
    ensure(n == 2 * eval.losses.len(), || "losses without statistics".into())?;
    let float = |p: &Place| p.ty.dtype == DType::F32;
    ensure(eval.statistics.iter().chain(&eval.weights).all(float), || {
        "statistics or weights of examples that are not f32".into()
    })
}
