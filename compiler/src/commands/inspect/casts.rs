//! `frit inspect --view casts`: lists the casts of a plan, the operations that require them, and the cost without placement.

use crate::render::{bytes, table};
use frit_ir::plan::{Action, Plan};
use frit_ir::{Op, Origin};
use frit_passes::autocast::policy;

/// The whole view as text.
pub(super) fn text(plan: &Plan) -> String {
    let s = plan.summary();
    let mut text = format!(
        "{} casts per step and rank, {} of them separate kernels, which move {}\n\
         {} such kernels and {} if every operation cast its operands, as PyTorch does at run time\n\n",
        s.casts,
        s.cast_kernels,
        bytes(s.cast_bytes),
        s.baseline_casts,
        bytes(s.baseline_cast_bytes),
    );
    let (head, all) = rows(plan);
    text += &table(&head, &all);
    let (head, rows) = inserted(plan);
    if !rows.is_empty() {
        text += "\ninserted by autocast, before simplify moved and merged them:\n";
        text += &table(&head, &rows);
    }
    let row = |r: policy::Row| vec![r.op, r.class.name().into(), r.source.to_string()];
    text += "\nprecision class of each operation:\n";
    text += &table(
        &["operation", "class", "source"],
        &policy::table().into_iter().map(row).collect::<Vec<_>>(),
    );
    text
}

/// Every cast that autocast inserted, for whom and why.
fn inserted(plan: &Plan) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let autocast = plan.reports.iter().filter(|r| r.pass == "autocast");
    let casts = autocast.flat_map(|r| &r.remarks).filter(|(text, _)| text.starts_with("cast "));
    let row = |(text, origin): &(String, Origin)| {
        vec![text.clone(), origin.source.to_string(), origin.scope.to_string()]
    };
    (vec!["cast", "node", "scope"], casts.map(row).collect())
}

/// Every conversion between float types in the plan.
pub(super) fn rows(plan: &Plan) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let mut rows = Vec::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        let Action::Kernel { kernel, .. } = &task.action else { continue };
        let body = &plan.kernels[*kernel].body;
        for (_, node) in body.nodes() {
            let Some(from) = node.inputs.first().map(|v| body.ty(*v)) else { continue };
            let what = match &node.op {
                Op::Cast(cast) if from.dtype.is_float() && cast.to.is_float() => {
                    Some(format!("{from} to {}", cast.to))
                }
                Op::Quantize(op) => {
                    Some(format!("{from} rounded to {}, tensor {}", op.to, op.index))
                }
                _ => None,
            };
            if let Some(what) = what {
                let pass = task.origin.pass.to_string();
                rows.push(vec![
                    i.to_string(),
                    task.name.clone(),
                    what,
                    task.origin.scope.to_string(),
                    pass,
                ]);
            }
        }
    }
    (vec!["task", "kernel", "cast", "scope", "by"], rows)
}
