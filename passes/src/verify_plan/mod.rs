//! Verifies a plan by replaying its tasks over byte ranges. Shares no code with the passes that make plans.
//!
//! - [`memory`] P1xx: every read sees the value that was written for it, and conflicting accesses on different streams are ordered;
//!   every task reads what lowering recorded (P106).
//! - [`in_place`] P107: no task overwrites an operand that it may still read.
//! - [`collectives`] P2xx: collectives match the groups, and none is missing or duplicated.
//! - [`training`] P3xx: every parameter has one location and one optimizer step.
//! - [`factor`]: the factors of loss scale, accumulation and averaging are tracked through the bodies of all kernels.
//! - [`copies`] P318: copies of parameters in other dtypes are those of the parameters at the end of every step.
//! - [`adafactor`] P315: the parts of an Adafactor step belong to one parameter.
//! - [`muon`] P319: Muon steps along whole matrices of the momentum.
//! - [`magnitudes`] P314: ranks agree on the scales of 8-bit floats.
//! - [`reproducible`] P320: what must not depend on the number of ranks does not.
//! - [`evaluation`] P4xx: an evaluation changes nothing but its results, and these are complete.
//! - [`shared`] P405, P406: an evaluation and its training store parameters alike.
//! - [`host`] P5xx: only copies access host memory.
//! - [`inputs`] P6xx: fed values are checked against the ranges that tasks accept.
//! - [`candidates`] P701: GEMMs and the generated kernels behind them compute the body of the kernel that launches them.

mod adafactor;
mod candidates;
mod collectives;
mod copies;
mod evaluation;
mod factor;
mod host;
mod in_place;
mod inputs;
mod magnitudes;
mod memory;
mod muon;
mod reproducible;
mod shared;
mod terms;
mod training;

use frit_ir::plan::{Addresses, Plan, TaskId, check, provenance};
use frit_ir::{Code, Diagnostic};

/// Proves a plan, or says what is broken.
///
/// # Errors
/// Every broken invariant that was found, by its code.
pub fn verify_plan(plan: &Plan) -> Result<(), Vec<Diagnostic>> {
    if let Err(e) = check(plan) {
        return Err(vec![Diagnostic::error(Code::PlanMalformed, e.to_string())]);
    }
    let mut found = Vec::new();
    memory::verify(plan, &mut found);
    // Bytes must be what they are said to be before their values can be followed.
    if found.is_empty() {
        factor::verify(plan, &mut found);
    }
    in_place::verify(plan, &mut found);
    collectives::verify(plan, &mut found);
    magnitudes::verify(plan, &mut found);
    host::verify(plan, &mut found);
    inputs::verify(plan, &mut found);
    candidates::verify(plan, &mut found);
    match &plan.eval {
        Some(eval) => evaluation::verify(plan, eval, &mut found),
        None => training::verify(plan, &mut found),
    }
    copies::verify(plan, &mut found);
    reproducible::verify(plan, &mut found);
    if found.is_empty() {
        meaning(plan, &mut found);
    }
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// Proves the evaluation of a training plan: that it is sound, and that every rank holds of the parameters what it
/// holds of them in the training.
///
/// # Errors
/// Every broken invariant that was found, by its code.
pub fn verify_evaluation(evaluation: &Plan, training: &Plan) -> Result<(), Vec<Diagnostic>> {
    verify_plan(evaluation)?;
    let mut found = Vec::new();
    shared::verify(evaluation, training, &mut found);
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// P106: conflicting accesses are ordered as the list has them, so that the list is what happens; it must
/// mean what was lowered.
fn meaning(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let (operands, state) = provenance(plan, Addresses::Assigned);
    for (i, task) in plan.tasks.iter_enumerated() {
        if task.operands_digest != operands[i] {
            found.push(broken(
                plan,
                Code::MeaningChanged,
                i,
                "reads other values than lowering recorded".into(),
            ));
        }
    }
    if plan.state_digest != state {
        let message = "the step leaves other values behind than lowering recorded";
        found.push(Diagnostic::error(Code::MeaningChanged, message));
    }
}

fn broken(plan: &Plan, code: Code, task: TaskId, message: String) -> Diagnostic {
    Diagnostic::error(code, format!("task {task} `{}`: {message}", plan.tasks[task].name))
        .at(&plan.tasks[task].origin)
}
