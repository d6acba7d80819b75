//! Lists arithmetic by dtype, and casts by scope.

use super::{escape, quantity};
use frit_ir::plan::{Action, Plan};
use frit_ir::{DType, Op};
use frit_passes::cost::kernel::is_matrix;
use frit_passes::cost::node_flops;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Scopes of casts that are listed.
const LISTED: usize = 25;

/// The section.
pub(super) fn section(plan: &Plan) -> String {
    let (mut matmuls, mut rest) = (BTreeMap::new(), BTreeMap::new());
    let mut casts: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
    for (i, task) in plan.tasks.iter_enumerated() {
        let Action::Kernel { kernel, .. } = &task.action else { continue };
        let body = &plan.kernels[*kernel].body;
        let runs = plan.runs(i) as u64;
        for (_, node) in body.nodes() {
            let Some(first) = node.inputs.first() else { continue };
            let dtype = body.ty(*first).dtype;
            let flops = runs * node_flops(body, node);
            let of = if is_matrix(&node.op) { &mut matmuls } else { &mut rest };
            if dtype.is_float() {
                *of.entry(dtype).or_insert(0) += flops;
            }
            if let Op::Cast(cast) = &node.op
                && dtype.is_float()
                && cast.to.is_float()
            {
                let key = (task.origin.scope.to_string(), format!("{dtype} → {}", cast.to));
                let entry = casts.entry(key).or_default();
                entry.0 += runs;
                entry.1 += runs * body.ty(*first).shape.numel() as u64;
            }
        }
    }
    let mut html =
        String::from("<div class=scroll><table><tr><th>arithmetic<th>dtype<th class=n>FLOP<th>");
    let all: u64 = matmuls.values().chain(rest.values()).sum();
    let sets: [(&str, &BTreeMap<DType, u64>); 2] =
        [("contractions", &matmuls), ("everything else", &rest)];
    for (what, set) in sets {
        for (dtype, flops) in set {
            let share = 100.0 * *flops as f64 / all.max(1) as f64;
            let _ = write!(
                html,
                "<tr><td>{what}<td>{dtype}<td class=n>{}<td class=share><span class=bar style='width:{share:.1}%'></span> {share:.1} %",
                quantity(*flops as f64, "FLOP")
            );
        }
    }
    html += "</table></div>";
    let mut casts: Vec<_> = casts.into_iter().collect();
    casts.sort_by(|(ka, a), (kb, b)| b.1.cmp(&a.1).then_with(|| ka.cmp(kb)));
    let n: u64 = casts.iter().map(|(_, (n, _))| n).sum();
    let _ = write!(html, "<p>{n} casts in a step</p>");
    if !casts.is_empty() {
        html += "<details><summary>casts by scope</summary><div class=scroll><table><tr><th>scope<th>cast<th class=n>times<th class=n>elements";
        for ((scope, cast), (n, elements)) in casts.iter().take(LISTED) {
            let scope = if scope.is_empty() { "(root)" } else { scope };
            let _ = write!(
                html,
                "<tr><td>{}<td>{cast}<td class=n>{n}<td class=n>{}",
                escape(scope),
                quantity(*elements as f64, "")
            );
        }
        html += "</table></div></details>";
        if casts.len() > LISTED {
            let _ = write!(html, "<p class=sub>and {} more scopes</p>", casts.len() - LISTED);
        }
    }
    html
}
