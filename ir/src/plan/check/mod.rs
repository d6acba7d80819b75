//! Well-formedness of a plan, checked by every loader.
//!
//! After this check every index lies within its table, every range within its buffer and arena, and every launch
//! pointer within its operand or scratch memory; all numbers are finite, and sums of sizes and costs do not
//! overflow. Readers of a plan need no further checks. [`places`] covers byte ranges, [`kernels`] bodies and
//! entries, [`actions`] tasks, and [`tables`] everything else that is named or indexed. `passes::verify_plan`
//! proves that the schedule is correct.

mod actions;
mod kernels;
mod launches;
mod places;
mod tables;

use super::{PhaseName, Plan, TaskId};
pub use places::too_large;
use std::collections::HashSet;

/// A malformed plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed plan: {0}")]
pub struct CheckError(String);

/// Most ranks, and most micro-steps of a step.
const MAX_RANKS: usize = 1 << 20;
const MAX_ACCUMULATION: usize = 1 << 20;
/// Pieces of a reproducible step.
const MAX_PIECES: usize = crate::ops::reproducible::MAX_PIECES;
/// Products of ranks, micro-steps and loss elements are exact as f64.
const MAX_LOSS_ELEMENTS: usize = 1 << 53;
/// Longest name, in bytes.
const MAX_NAME: usize = 1 << 16;

type Result<T = ()> = std::result::Result<T, CheckError>;

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result {
    if condition { Ok(()) } else { Err(CheckError(message())) }
}

/// The beginning of a name, for messages.
fn short(name: &str) -> &str {
    match name.char_indices().nth(60) {
        Some((end, _)) => &name[..end],
        None => name,
    }
}

/// Checks a plan.
///
/// # Errors
/// The first thing that is not as it must be.
pub fn check(plan: &Plan) -> Result {
    header(plan)?;
    places::check(plan)?;
    kernels::check(plan)?;
    phases(plan)?;
    tables::check(plan)?;
    actions::check(plan)
}

fn header(plan: &Plan) -> Result {
    let within = |n: usize, most: usize| (1..=most).contains(&n);
    ensure(
        within(plan.world_size, MAX_RANKS) && within(plan.accumulation, MAX_ACCUMULATION),
        || {
            let (ranks, micro_steps) = (plan.world_size, plan.accumulation);
            format!("{ranks} ranks or {micro_steps} micro-steps are out of range")
        },
    )?;
    let pieces = plan.world_size * plan.accumulation;
    let divides =
        |v: usize| (plan.eval.is_some() && v.is_multiple_of(plan.world_size)) || v == pieces;
    let fits = |v: usize| v.is_power_of_two() && v <= MAX_PIECES && divides(v);
    ensure(plan.reproducible.is_none_or(fits), || {
        format!("{pieces} micro-batches of a step are not those that are reproducible")
    })?;
    let elements = plan.loss_capacity.checked_mul(plan.world_size * plan.accumulation);
    ensure(elements.is_some_and(|n| n <= MAX_LOSS_ELEMENTS), || {
        format!("{} loss elements are too many", plan.loss_capacity)
    })?;
    ensure(plan.eval.is_some() || plan.loss_capacity > 0, || "no loss elements".into())?;
    ensure(plan.compute_dtype.is_float(), || {
        format!("{} is not a compute dtype", plan.compute_dtype)
    })?;
    let texts = [&plan.name, &plan.frit_version, &plan.target.arch];
    texts.into_iter().try_for_each(|text| name(text))
}

/// Names are of bounded length.
fn name(text: &str) -> Result {
    ensure(text.len() <= MAX_NAME, || format!("the name `{}…` is too long", short(text)))
}

/// Names that are looked up are unique.
fn unique<'a>(what: &str, mut names: impl Iterator<Item = &'a str>) -> Result {
    let mut seen = HashSet::new();
    names.try_for_each(|text| {
        name(text)?;
        ensure(seen.insert(text), || format!("two {what} are named `{}`", short(text)))
    })
}

fn phases(plan: &Plan) -> Result {
    let mut next = TaskId::FIRST;
    for phase in &plan.phases {
        let follows =
            phase.begin == next && phase.end >= next && phase.end <= plan.tasks.next_key();
        ensure(follows, || "phases do not follow".into())?;
        next = phase.end;
        for i in phase.tasks() {
            let ok = plan.tasks[i].waits.iter().all(|w| (phase.begin..i).contains(w));
            ensure(ok, || format!("task {i} waits for a task that is not before it"))?;
        }
    }
    ensure(next == plan.tasks.next_key(), || "tasks outside every phase".into())?;
    let names: Vec<PhaseName> = plan.phases.iter().map(|p| p.name).collect();
    let known = match &plan.eval {
        Some(_) => names == [PhaseName::Eval],
        None => {
            names.is_sorted_by(|a, b| a < b)
                && !names.contains(&PhaseName::Eval)
                && [PhaseName::MicroStep, PhaseName::Update].iter().all(|name| names.contains(name))
        }
    };
    ensure(known, || "its phases are not those of a step or an evaluation".into())
}
