//! Tables and lists of the page.

use super::runs::{Run, Series};
use super::trace::Trace;
use super::{Measured, duration, escape, quantity};
use crate::render::{bytes, launches};
use frit_ir::plan::{Action, ParamHome, Plan, TiVec, UnitId};
use frit_ir::{DType, Severity};
use frit_passes::simulate::Simulation;
use frit_passes::simulate::roofline::Roofline;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Kernels, and remarks of a pass, that are listed.
const LISTED: usize = 30;

/// The numbers at the head of the page.
pub(super) fn cards(plan: &Plan, predicted: &Simulation, found: &Measured) -> String {
    let s = plan.summary();
    let c = &s.collectives;
    let mut cards = vec![(duration(1e6 * predicted.step_seconds), "step, predicted".to_string())];
    let is_of_plan = |run: &&Run| run.plan.is_some() && run.plan == found.plan_name;
    let run = found.runs.iter().find(is_of_plan);
    if let Some((run, step)) = run.and_then(|run| Some((run, run.median(Series::StepSeconds)?))) {
        cards.push((duration(1e6 * step), format!("step, measured: median of {}", run.label)));
    }
    cards.extend([
        (quantity(s.parameters as f64, ""), format!("parameters in {} units", s.units)),
        (bytes(s.peak_bytes as u64), "peak memory per rank".into()),
        (bytes(s.bytes_communicated_per_step), "sent per rank and step".into()),
        (
            (c.all_gather + c.reduce_scatter + c.all_reduce).to_string(),
            format!("collectives: {} + {} + {}", c.all_gather, c.reduce_scatter, c.all_reduce),
        ),
        (quantity(s.flops_per_step as f64, "FLOP"), "per rank and step".into()),
        (s.casts.to_string(), "casts".into()),
        (s.tasks.to_string(), format!("tasks of {} kernels", s.kernels)),
    ]);
    let card = |(big, small): &(String, String)| {
        format!("<div class=card><b>{}</b><span>{}</span></div>", escape(big), escape(small))
    };
    format!("<div class=cards>{}</div>\n", cards.iter().map(card).collect::<String>())
}

/// Findings, the worst first.
pub(super) fn lints(plan: &Plan) -> String {
    if plan.lints.is_empty() {
        return "<p>none</p>".into();
    }
    let mut sorted: Vec<_> = plan.lints.iter().collect();
    sorted.sort_by_key(|d| std::cmp::Reverse(d.severity));
    let mut html =
        String::from("<div class=scroll><table><tr><th>id<th><th>scope<th>finding and remedy");
    for d in sorted {
        let word = match d.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Info => "info",
        };
        let _ = write!(
            html,
            "<tr><td>{}<td><span class='tag {word}'>{word}</span><td>{}<td>{}",
            escape(&d.code),
            escape(&d.origin.scope),
            escape(&d.message)
        );
        for note in d.notes.iter().chain(&d.help) {
            let _ = write!(html, "<br><small>{}</small>", escape(note));
        }
    }
    html + "</table></div>"
}

/// Units with their parameters.
pub(super) fn units(plan: &Plan) -> String {
    let mut sizes: TiVec<UnitId, (usize, usize)> = vec![(0, 0); plan.units.len()].into();
    for param in &plan.params {
        if let ParamHome::Group { group, .. } = param.home {
            let size = &mut sizes[plan.groups[group].unit];
            (size.0, size.1) = (size.0 + 1, size.1 + param.ty.shape.numel());
        }
    }
    let held = |unit: UnitId| -> u64 {
        let groups = plan.groups.iter().filter(|g| g.unit == unit);
        groups.map(|g| (g.shard_numel * g.dtype.size()) as u64).sum()
    };
    let gathered = |unit: UnitId| -> String {
        let groups = plan.groups.iter().filter(|g| g.unit == unit);
        let dtypes: BTreeSet<DType> = groups.flat_map(|g| g.gather_dtypes.clone()).collect();
        dtypes.iter().map(|d| d.name()).collect::<Vec<_>>().join(", ")
    };
    let mut html = String::from(
        "<div class=scroll><table><tr><th>unit<th class=n>tensors<th class=n>parameters<th>gathered in<th class=n>held by a rank<th>why",
    );
    for ((i, unit), (tensors, n)) in plan.units.iter_enumerated().zip(&sizes) {
        let _ = write!(
            html,
            "<tr><td>{}<td class=n>{tensors}<td class=n>{}<td>{}<td class=n>{}<td>{}",
            escape(&unit.name),
            quantity(*n as f64, ""),
            gathered(i),
            bytes(held(i)),
            escape(&unit.reason)
        );
    }
    html + "</table></div>"
}

/// Kernels by the time they take in a step, with what bounds them, and the time that a trace measured.
pub(super) fn kernels(plan: &Plan, roofline: &Roofline, trace: Option<&Trace>) -> String {
    let measured = trace.map(|trace| {
        let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
        for (task, us) in plan.tasks.iter().zip(trace.by_task(plan)) {
            if let Action::Kernel { kernel, .. } = task.action {
                *sums.entry(&plan.kernels[kernel].name).or_default() += us;
            }
        }
        sums
    });
    let head = if trace.is_some() { "<th class=n>measured" } else { "" };
    let entry = |name: &str| plan.kernels.iter().find(|k| k.name == name).map(|k| &k.entry);
    let [least, all] = roofline.ratios();
    let mut html = format!(
        "<p class=sub>{} moved: {least:.2} times the weights, gradients and activations that must be in memory, each written and read \
         once, and {all:.2} times all operands and results of operations that are neither elementwise nor views</p>\
         <div class=scroll><table><tr><th>kernel<th>launches<th class=n>times<th class=n>moved<th class=n>FLOP<th>bound by\
         <th class=n>predicted{head}<th>",
        bytes(roofline.bytes),
    );
    for row in roofline.rows.iter().take(LISTED) {
        let share = 100.0 * row.seconds / roofline.seconds.max(f64::MIN_POSITIVE);
        let words = entry(&row.name).map(|entry| launches::words(plan, entry).join(", "));
        let _ = write!(
            html,
            "<tr><td>{}<td>{}<td class=n>{}<td class=n>{}<td class=n>{}<td>{}<td class=n>{}\
             {}<td class=share><span class=bar style='width:{share:.1}%'></span> {share:.1} %",
            escape(&row.name),
            escape(&words.unwrap_or_default()),
            row.uses,
            bytes(row.bytes),
            quantity(row.flops as f64, ""),
            row.bound.name(),
            duration(1e6 * row.seconds),
            measured.as_ref().map_or(String::new(), |sums| {
                let sum = sums.get(row.name.as_str()).map_or("–".into(), |us| duration(*us));
                format!("<td class=n>{sum}")
            })
        );
    }
    html += "</table></div>";
    if roofline.rows.len() > LISTED {
        let _ = write!(html, "<p class=sub>and {} more</p>", roofline.rows.len() - LISTED);
    }
    html
}

/// Remarks of the passes.
pub(super) fn passes(plan: &Plan) -> String {
    let mut html = String::new();
    for report in &plan.reports {
        let change = if report.nodes_before == report.nodes_after {
            format!("{} nodes", report.nodes_after)
        } else {
            format!("{} → {} nodes", report.nodes_before, report.nodes_after)
        };
        let _ = write!(
            html,
            "<details><summary>{} <small>{change}</small></summary><ul>",
            escape(&report.pass)
        );
        for (message, origin) in report.remarks.iter().take(LISTED) {
            let _ =
                write!(html, "<li>{} <small>{}</small>", escape(message), escape(&origin.scope));
        }
        if report.remarks.len() > LISTED {
            let _ = write!(html, "<li>and {} more", report.remarks.len() - LISTED);
        }
        html += "</ul></details>";
    }
    html
}

/// The configuration.
pub(super) fn configuration(plan: &Plan) -> String {
    format!("<details><summary>train.toml</summary><pre>{}</pre></details>", escape(&plan.config))
}
