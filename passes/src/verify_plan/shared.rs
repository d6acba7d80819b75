//! Verifies that an evaluation and its training store parameters alike, so that between steps every rank can copy what it owns.
//!
//! P405  the evaluation has the same ranks as the training
//! P406  of every parameter that both plans use, each rank holds the same elements, in the same
//!       dtype, in both

use frit_ir::plan::{ParamId, Plan};
use frit_ir::{Code, Diagnostic};
use std::collections::HashMap;

pub(super) fn verify(evaluation: &Plan, training: &Plan, found: &mut Vec<Diagnostic>) {
    let (ranks, all) = (evaluation.world_size, training.world_size);
    if ranks != all {
        let message = format!("the evaluation is of {ranks} ranks, the training of {all}");
        found.push(Diagnostic::error(Code::EvaluationRanks, message));
        return;
    }
    let trained: HashMap<&str, ParamId> =
        training.params.iter_enumerated().map(|(i, p)| (p.name.as_str(), i)).collect();
    for (index, param) in evaluation.params.iter_enumerated() {
        let Some(&other) = trained.get(param.name.as_str()) else { continue };
        let (name, here, there) = (&param.name, &param.ty, &training.params[other].ty);
        if here != there {
            let message = format!("`{name}` is {here} in the evaluation, {there} in the training");
            found.push(Diagnostic::error(Code::EvaluationElements, message));
            continue;
        }
        let apart = |rank: &usize| {
            let (here, there) = (evaluation.held(index, *rank), training.held(other, *rank));
            let both = here.zip(there);
            both.is_some_and(|(a, b)| (a.elements, a.dtype) != (b.elements, b.dtype))
        };
        if let Some(rank) = (0..all).find(apart) {
            let message = format!(
                "rank {rank} holds `{name}` differently in the evaluation and in the training"
            );
            found.push(Diagnostic::error(Code::EvaluationElements, message));
        }
    }
}
