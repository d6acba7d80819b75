//! Tables and lists of the page.

use super::{duration, escape, quantity};
use crate::render::{bytes, launches};
use frit_ir::Severity;
use frit_ir::plan::{Action, KernelId, ParamHome, Plan, TiVec, UnitId};
use frit_passes::simulate::Simulation;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Kernels, and remarks of a pass, that are listed.
const LISTED: usize = 30;

/// The numbers at the head of the page.
pub(super) fn cards(plan: &Plan, predicted: &Simulation) -> String {
    let s = plan.summary();
    let c = &s.collectives;
    let cards = [
        (duration(1e6 * predicted.step_seconds), "step, predicted".to_string()),
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
    ];
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
    let most = sizes.iter().map(|s| s.1).max().unwrap_or(0).max(1);
    let mut html = String::from(
        "<div class=scroll><table><tr><th>unit<th class=n>tensors<th class=n>parameters<th><th class=n>held by a rank<th>why",
    );
    for ((i, unit), (tensors, n)) in plan.units.iter_enumerated().zip(&sizes) {
        let _ = write!(
            html,
            "<tr><td>{}<td class=n>{tensors}<td class=n>{}<td style='width:22%'><span class=bar style='width:{:.1}%'></span><td class=n>{}<td>{}",
            escape(&unit.name),
            quantity(*n as f64, ""),
            100.0 * *n as f64 / most as f64,
            bytes(held(i)),
            escape(&unit.reason)
        );
    }
    html + "</table></div>"
}

/// Kernels by the time they take in a step.
pub(super) fn kernels(plan: &Plan) -> String {
    let mut uses: BTreeMap<KernelId, (usize, f64)> = BTreeMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        if let Action::Kernel { kernel, .. } = task.action {
            let (n, us) = uses.entry(kernel).or_default();
            (*n, *us) = (*n + plan.runs(i), *us + plan.runs(i) as f64 * task.cost_us);
        }
    }
    let mut sorted: Vec<_> = uses.into_iter().collect();
    sorted.sort_by(|(_, a), (_, b)| b.1.total_cmp(&a.1));
    let all: f64 = sorted.iter().map(|(_, (_, us))| us).sum::<f64>().max(f64::MIN_POSITIVE);
    let mut html = String::from(
        "<div class=scroll><table><tr><th>kernel<th>launches<th class=n>times<th class=n>predicted<th>",
    );
    for (k, (n, us)) in sorted.iter().take(LISTED) {
        let kernel = &plan.kernels[*k];
        let share = 100.0 * us / all;
        let _ = write!(
            html,
            "<tr><td>{}<td>{}<td class=n>{n}<td class=n>{}<td style='width:35%'><span class=bar style='width:{share:.1}%'></span> {share:.1} %",
            escape(&kernel.name),
            escape(&launches::words(&kernel.entry).join(", ")),
            duration(*us)
        );
    }
    html += "</table></div>";
    if sorted.len() > LISTED {
        let _ = write!(html, "<p class=sub>and {} more</p>", sorted.len() - LISTED);
    }
    html
}

/// What the passes did.
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
