//! Tables: inputs, parameters, units, groups, state, hyper-parameters, constants, metrics, gradients, and
//! evaluation results.

use super::places::{place, ty};
use super::{CheckError, Result, ensure, name, short, unique};
use crate::ops::{Init, StateName, random};
use crate::plan::{
    Arena, BufferId, EvalSpec, Group, GroupId, IndexRange, InputSpec, ParamHome, Place, Plan,
};
use crate::{DType, TensorType};
use std::collections::HashSet;

pub(super) fn check(plan: &Plan) -> Result {
    unique("parameters", plan.params.iter().map(|p| p.name.as_str()))?;
    unique("inputs", plan.inputs.iter().map(|i| i.name.as_str()))?;
    let states: Vec<String> = plan.states.iter().map(|s| s.name.to_string()).collect();
    unique("states", states.iter().map(String::as_str))?;
    unique("hyper-parameters", plan.hyper.iter().map(|h| h.name.as_str()))?;
    unique("metrics", plan.metrics.iter().map(|m| m.name.word()))?;
    let weights = plan.params.iter().map(|p| p.name.as_str());
    unique("weights", weights.chain(plan.constants.iter().map(|c| c.name.as_str())))?;
    units(plan)?;
    for (i, g) in plan.groups.iter_enumerated() {
        group(plan, i, g).map_err(|e| CheckError(format!("group {i}: {}", e.0)))?;
    }
    params(plan)?;
    inputs(plan)?;
    scalars(plan)?;
    results(plan)?;
    owners(plan)?;
    plan.eval.iter().try_for_each(|eval| evaluation(plan, eval))
}

/// A buffer of the persistent arena, or of that or the host's, with at least so many bytes.
fn kept(plan: &Plan, buffer: BufferId, bytes: usize, on_host: bool, what: &str) -> Result {
    let fits = plan.buffers.get(buffer).is_some_and(|b| {
        let there = b.arena == Arena::Persistent || on_host && b.arena == Arena::Host;
        there && b.bytes >= bytes
    });
    ensure(fits, || format!("{} has no persistent buffer of its size", short(what)))
}

fn finite(value: f64, what: &str) -> Result {
    ensure(value.is_finite(), || format!("`{}` is {value}", short(what)))
}

fn units(plan: &Plan) -> Result {
    plan.units.iter().try_for_each(|u| {
        name(&u.name)?;
        name(&u.reason)?;
        let ranks = u.reshard.is_none_or(|n| (1..=plan.world_size).contains(&n));
        ensure(ranks, || format!("unit `{}` is kept by too many ranks, or none", short(&u.name)))
    })
}

fn group(plan: &Plan, index: GroupId, g: &Group) -> Result {
    ensure(g.unit < plan.units.next_key(), || format!("there is no unit {}", g.unit))?;
    let flat = TensorType::new(DType::F64, [g.numel]);
    ty(&flat)?;
    let parts = g.shards();
    let divides = g.numel > 0
        && g.shard_numel.checked_mul(parts) == Some(g.numel)
        && plan.world_size.is_multiple_of(parts);
    ensure(divides, || "it does not divide".into())?;
    ensure(g.gather_dtypes.iter().all(|d| d.is_float()), || "it is gathered as integers".into())?;
    let held = match g.dtype {
        DType::F32 => true,
        DType::F16 | DType::BF16 => !g.trainable && g.states.is_empty(),
        _ => false,
    };
    ensure(held, || format!("its parameters cannot be held in {}", g.dtype))?;
    kept(plan, g.master, g.shard_numel * g.dtype.size(), true, "it")?;
    let names: Vec<String> = g.states.iter().map(|s| s.name.to_string()).collect();
    unique("states", names.iter().map(String::as_str))?;
    for s in &g.states {
        let word = s.name.word();
        ensure(s.name.is_per_element(), || format!("`{word}` is no state of its elements"))?;
        kept(plan, s.buffer, g.shard_numel * 4, true, word)?;
        finite(s.init, word)?;
    }
    for (i, copy) in g.copies.iter().enumerate() {
        let other = matches!(copy.dtype, DType::F16 | DType::BF16)
            && g.copies[..i].iter().all(|c| c.dtype != copy.dtype);
        ensure(other && g.trainable, || format!("it cannot have a copy in {}", copy.dtype))?;
        kept(plan, copy.buffer, g.shard_numel * copy.dtype.size(), false, "a copy")?;
    }
    let offsets = g.param_groups.iter().map(|p| p.offset);
    let ordered = offsets.clone().is_sorted_by(|a, b| a < b);
    ensure(ordered && offsets.max().is_none_or(|o| o <= g.numel), || {
        "its parameter groups are not in order".into()
    })?;
    let begins = g.param_groups.first().map(|p| p.offset);
    ensure(begins == g.trainable.then_some(0), || {
        "its parameters are not all in parameter groups".into()
    })?;
    for key in g.param_groups.iter().flat_map(|p| [&p.lr, &p.weight_decay]) {
        name(key)?;
        ensure(plan.hyper.iter().any(|h| h.name == *key), || {
            format!("there is no hyper-parameter `{}`", short(key))
        })?;
    }
    let others = g.param_groups.len().saturating_sub(1);
    ensure((others > 0) == g.param_group_offsets.is_some(), || {
        "it has no table of its parameter groups".into()
    })?;
    if let Some(offsets) = g.param_group_offsets {
        kept(plan, offsets, others * 8, false, "a table of parameter groups")?;
    }
    if let Some(offsets) = g.param_offsets {
        kept(plan, offsets, g.segments.len() * 8, false, "a table of parameters")?;
    }
    segments(plan, index, g)
}

/// Its parameters lie one after the other, and say that they lie there.
fn segments(plan: &Plan, index: GroupId, g: &Group) -> Result {
    let mut end = 0;
    for s in &g.segments {
        let param = plan.params.get(s.param);
        let param = param.ok_or_else(|| CheckError(format!("no parameter {}", s.param)))?;
        ty(&param.ty)?;
        let ok = s.offset >= end && s.numel == param.ty.shape.numel() && s.numel <= g.numel;
        ensure(ok && s.offset <= g.numel, || {
            format!("parameter `{}` overlaps another", short(&param.name))
        })?;
        end = s.offset + s.numel;
        let home = ParamHome::Group { group: index, offset: s.offset };
        ensure(param.home == home && param.ty.dtype == DType::F32, || {
            format!("parameter `{}` is not where its segment is", short(&param.name))
        })?;
    }
    ensure(end <= g.numel, || "it is too small".into())
}

fn params(plan: &Plan) -> Result {
    plan.params.iter().try_for_each(|p| {
        ty(&p.ty)?;
        name(&p.reason)?;
        match p.init {
            Init::Weights => {}
            Init::Constant(x) | Init::Normal { std: x } | Init::Uniform { bound: x } => {
                finite(x, &p.name)?;
                ensure(p.ty.dtype == DType::F32, || {
                    format!("`{}` is made as f32", short(&p.name))
                })?;
            }
        }
        match p.home {
            ParamHome::Buffer(b) => kept(plan, b, p.ty.bytes(), false, &p.name),
            ParamHome::Group { group, offset } => {
                let end = offset.checked_add(p.ty.shape.numel());
                let fits = plan.groups.get(group).zip(end).is_some_and(|(g, end)| end <= g.numel);
                ensure(fits, || format!("`{}` has no group", short(&p.name)))
            }
            ParamHome::Unused => Ok(()),
        }
    })
}

fn inputs(plan: &Plan) -> Result {
    plan.inputs.iter().try_for_each(|i| {
        ty(&i.ty)?;
        kept(plan, i.buffer, i.ty.bytes(), false, &i.name)?;
        ensure(!i.per_example || i.ty.shape.rank() > 0, || {
            format!("input `{}` has no axis for examples", short(&i.name))
        })?;
        ranges(i)
    })
}

fn ranges(input: &InputSpec) -> Result {
    let axes = input.ty.shape.dims();
    let fits = |r: &IndexRange| {
        let inside = r.within.iter().zip(axes).all(|((a, b), size)| a <= b && b <= size);
        inside && (r.within.is_empty() || r.within.len() == axes.len())
    };
    let integers = !input.ty.dtype.is_float() || input.ranges.is_empty();
    ensure(integers && input.ranges.iter().all(fits), || {
        format!("input `{}` has a range that is not of its type", short(&input.name))
    })
}

/// State, hyper-parameters and constants.
fn scalars(plan: &Plan) -> Result {
    for s in &plan.states {
        ty(&s.ty)?;
        let name = s.name.to_string();
        kept(plan, s.buffer, s.ty.bytes(), false, &name)?;
        finite(s.init, &name)?;
        let fits = match s.name {
            StateName::Rng => s.ty == random::state_type(),
            StateName::AmaxHistory => s.ty.dtype == DType::F32 && s.ty.shape.rank() == 2,
            _ => !matches!(s.ty.dtype, DType::F8E4M3 | DType::F8E5M2),
        };
        ensure(fits, || format!("state `{}` cannot be {}", short(&name), s.ty))?;
    }
    for h in &plan.hyper {
        kept(plan, h.buffer, 4, false, &h.name)?;
        finite(h.value, &h.name)?;
    }
    plan.constants.iter().try_for_each(|c| {
        ty(&c.ty)?;
        kept(plan, c.buffer, c.ty.bytes(), false, &c.name)
    })
}

/// Values read after a step or a phase.
fn results(plan: &Plan) -> Result {
    for m in &plan.metrics {
        place(plan, &m.place)?;
        let fits = m.place.ty == TensorType::scalar(DType::F32);
        ensure(fits && plan.buffers[m.place.buffer].arena == Arena::Persistent, || {
            format!("metric `{}` is no scalar that outlives the step", m.name)
        })?;
    }
    let mut seen = HashSet::new();
    plan.gradients.iter().try_for_each(|g| {
        place(plan, &g.place)?;
        let group = plan.groups.get(g.group);
        let fits = group.is_some_and(|group| {
            g.place.ty.dtype == DType::F32 && g.place.ty.shape.numel() == group.shard_numel
        });
        ensure(fits && seen.insert(g.group), || {
            format!("there is no gradient of group {}, or another", g.group)
        })
    })
}

/// No buffer has two first values.
fn owners(plan: &Plan) -> Result {
    let groups = plan.groups.iter().flat_map(|g| {
        let states = g.states.iter().map(|s| s.buffer);
        let own = states.chain([g.master]).chain(g.copies.iter().map(|c| c.buffer));
        own.chain(g.param_group_offsets).chain(g.param_offsets)
    });
    let own = |home: &ParamHome| if let ParamHome::Buffer(b) = home { Some(*b) } else { None };
    let mut all = groups
        .chain(plan.params.iter().filter_map(|p| own(&p.home)))
        .chain(plan.inputs.iter().map(|i| i.buffer))
        .chain(plan.states.iter().map(|s| s.buffer))
        .chain(plan.hyper.iter().map(|h| h.buffer))
        .chain(plan.constants.iter().map(|c| c.buffer));
    let mut seen = HashSet::new();
    match all.find(|b| !seen.insert(*b)) {
        None => Ok(()),
        Some(b) => {
            let name = short(&plan.buffers[b].name);
            Err(CheckError(format!("buffer `{name}` has two first values")))
        }
    }
}

fn evaluation(plan: &Plan, eval: &EvalSpec) -> Result {
    unique("outputs", eval.outputs.iter().map(|o| o.name.as_str()))?;
    unique("labels", eval.labels.iter().map(String::as_str))?;
    let known = |label: &&String| plan.inputs.iter().any(|i| i.name == **label);
    ensure(eval.labels.iter().all(|label| known(&label)), || "labels that are no inputs".into())?;
    for loss in &eval.losses {
        name(&loss.name)?;
        finite(loss.weight, &loss.name)?;
    }
    eval.metrics.iter().try_for_each(|m| name(&m.name.to_string()))?;
    let places = eval.outputs.iter().map(|o| &o.place);
    for result in places.chain(&eval.statistics).chain(&eval.weights) {
        place(plan, result)?;
        ensure(plan.buffers[result.buffer].arena == Arena::Persistent, || {
            "a result of the evaluation does not outlive it".into()
        })?;
    }
    let n = eval.statistics.as_ref().map_or(0, |p| p.ty.shape.numel());
    let parts = eval.metrics.iter().map(|m| m.part.saturating_add(1));
    let parts = parts.max().unwrap_or(0).max(eval.losses.len());
    ensure(
        n.is_multiple_of(2) && n / 2 >= parts && eval.statistics.is_some() == (parts > 0),
        || "losses or metrics without statistics".into(),
    )?;
    let float = |p: &Place| p.ty.dtype == DType::F32;
    ensure(eval.statistics.iter().chain(&eval.weights).all(float), || {
        "statistics or weights of examples that are not f32".into()
    })
}
