//! Verifies that an evaluation leaves the model unchanged and writes all of its results.
//!
//! P401  an evaluation writes nothing that outlives the phase except its outputs and statistics
//! P402  every output and all statistics are written completely
//! P403  with several ranks, the statistics are summed over ranks exactly once, or never if the plan is reproducible
//! P404  no dropout mask is drawn

use super::{broken, training};
use frit_ir::ops::ReduceKind;
use frit_ir::plan::{Action, EvalSpec, Place, Plan};
use frit_ir::{Code, Diagnostic, Op};
use rangemap::RangeSet;

pub(super) fn verify(plan: &Plan, eval: &EvalSpec, found: &mut Vec<Diagnostic>) {
    training::owners(plan, found);
    let results: Vec<&Place> =
        eval.outputs.iter().map(|o| &o.place).chain(&eval.statistics).collect();
    let mut sums = 0;
    for (i, task) in plan.tasks.iter_enumerated() {
        for place in task.action.writes() {
            let buffer = &plan.buffers[place.buffer];
            let result = results.iter().any(|r| r.buffer == place.buffer);
            if buffer.arena.outlives_step() && !result {
                let message = format!("writes `{}`, which outlives the evaluation", buffer.name);
                found.push(broken(plan, Code::EvaluationWrites, i, message));
            }
        }
        match &task.action {
            Action::AllReduce { group: None, reduce: ReduceKind::Sum, recv, .. } => {
                let statistics = eval.statistics.as_ref();
                sums += usize::from(statistics.is_some_and(|s| s.buffer == recv.buffer));
            }
            Action::Kernel { kernel, .. } => {
                let body = &plan.kernels[*kernel].body;
                if body.nodes().any(|(_, n)| matches!(n.op, Op::RandomMask(_))) {
                    found.push(broken(
                        plan,
                        Code::EvaluationDropout,
                        i,
                        "draws the mask of a dropout".into(),
                    ));
                }
            }
            _ => {}
        }
    }
    for place in results {
        if written(plan, place) < place.ty.bytes() {
            let name = &plan.buffers[place.buffer].name;
            let message = format!("`{name}` is not wholly written");
            found.push(Diagnostic::error(Code::EvaluationIncomplete, message));
        }
    }
    // Those of a reproducible plan are added by who runs it, batch by batch.
    let by_ranks = plan.world_size > 1 && plan.reproducible.is_none();
    let expected = usize::from(eval.statistics.is_some() && by_ranks);
    if sums != expected {
        let message = format!("statistics are summed over ranks {sums} times, not {expected}");
        found.push(Diagnostic::error(Code::EvaluationSums, message));
    }
}

/// Bytes of a place that tasks write.
fn written(plan: &Plan, place: &Place) -> usize {
    let (begin, end) = (place.offset, place.offset + place.ty.bytes());
    let writes = plan.tasks.iter().flat_map(|t| t.action.writes());
    let within = |w: &Place| w.offset.max(begin)..(w.offset + w.ty.bytes()).min(end);
    let ranges = writes.filter(|w| w.buffer == place.buffer).map(within);
    let covered: RangeSet<usize> = ranges.filter(|range| !range.is_empty()).collect();
    covered.iter().map(ExactSizeIterator::len).sum()
}
