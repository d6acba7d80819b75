//! The page of an audit.

use super::{Agreement, Audit, Gradient, Verdict, digits};
use crate::render::table;
use frit_ir::counted;
use frit_runtime::compare::Compared;

/// The page, or JSON.
pub(super) fn render(audit: &Audit, json: bool) -> String {
    if json {
        let mut value = serde_json::to_value(audit).expect("invariant: an audit serializes");
        value["right"] = audit.wrong().is_empty().into();
        return format!("{value:#}\n");
    }
    let mut text = format!(
        "{}: {}, {}, {}, {} of each parameter\n\n",
        audit.plan.display(),
        counted(audit.ranks, "rank"),
        counted(audit.accumulation, "micro-step"),
        audit.dtype,
        counted(audit.directions, "direction"),
    );
    let mut head =
        vec!["parameter", "shape", "by differences", "by the plan", "digits", "expected"];
    head.push("update");
    let others = [("1 rank", &audit.one_rank), ("interpreter", &audit.interpreted)];
    let others: Vec<_> =
        others.iter().filter_map(|(name, all)| Some((*name, all.as_ref()?))).collect();
    head.extend(others.iter().map(|(name, _)| *name));
    head.push("");
    let rows = audit.gradients.iter().map(|g| {
        let mut row = vec![
            g.parameter.clone(),
            format!("{:?}", g.shape),
            number(g.by_differences),
            number(g.by_plan),
            shown(digits(g.error)),
            shown(digits(g.allowed)),
            least(&audit.updates, &g.parameter),
        ];
        row.extend(others.iter().map(|(_, all)| least(all, &g.parameter)));
        row.push(word(g.verdict).into());
        row
    });
    text += &table(&head, &rows.collect::<Vec<_>>());
    text.push('\n');
    for line in summary(audit) {
        text += &format!("{line}\n");
    }
    text
}

/// All that does not agree.
pub(super) fn wrong(audit: &Audit) -> Vec<String> {
    let gradient = |g: &Gradient| {
        format!(
            "the gradient of `{}` {:?} has an error of {:.1e}, where {:.1e} is explained: its slope is {:e} by differences and \
             {:e} by the plan",
            g.parameter, g.shape, g.error, g.allowed, g.by_differences, g.by_plan
        )
    };
    let agreement = |a: &Agreement| {
        let of = a.parameter.as_ref().map_or(String::new(), |name| format!(" of `{name}`"));
        match a.error.is_finite() {
            true => format!("{}{of}: error {:.1e}, allowed {:.1e}", a.what, a.error, a.allowed),
            false => format!("{}{of}: is not what it must be", a.what),
        }
    };
    let gradients = audit.gradients.iter().filter(|g| g.verdict == Verdict::Wrong).map(gradient);
    let all = [Some(&audit.step), Some(&audit.updates), audit.one_rank.as_ref()];
    let all = all.into_iter().chain([audit.interpreted.as_ref()]).flatten().flatten();
    let others = all.filter(|a| a.verdict == Verdict::Wrong).map(agreement);
    let kernels = audit.kernels.iter().flat_map(|k| &k.kernels).filter(|k| !k.is_close());
    let kernel = |k: &Compared| {
        format!(
            "the kernel {} ({}): error {:.1e}, allowed {:.1e}",
            k.kernel, k.ops, k.error, k.tolerance
        )
    };
    gradients.chain(others).chain(kernels.map(kernel)).collect()
}

/// One line for each thing that was compared.
fn summary(audit: &Audit) -> Vec<String> {
    let [plan, reference] = audit.loss;
    let agree = digits((plan - reference).abs() / reference.abs().max(f64::MIN_POSITIVE));
    let mut lines = vec![format!(
        "loss         {plan:.6} by the plan, {reference:.6} by the graph in f64: {} digits",
        shown(agree)
    )];
    let n = |verdict| audit.gradients.iter().filter(|g| g.verdict == verdict).count();
    let right = n(Verdict::Right) + n(Verdict::Rounded);
    let mut line =
        format!("gradients    {right} of {} agree with differences", audit.gradients.len());
    for (verdict, what) in [
        (Verdict::Rounded, format!("without a digit that rounding to {} leaves", audit.dtype)),
        (Verdict::Stated, "through functions whose stated gradient is not their derivative".into()),
        (Verdict::Kink, "at a kink, not determined".into()),
        (Verdict::Wrong, "wrong".into()),
    ] {
        if n(verdict) > 0 {
            line += &format!("; {} {what}", n(verdict));
        }
    }
    lines.push(line);
    lines.push(format!("update       {}: {}", audit.optimizer, of(&audit.updates)));
    if let Some(all) = &audit.one_rank {
        lines.push(format!("{:<12} {}", format!("1 rank"), of(all)));
    }
    if let Some(all) = &audit.interpreted {
        lines.push(format!("interpreter  {}", of(all)));
    }
    if let Some(kernels) = &audit.kernels {
        let close = kernels.kernels.iter().filter(|k| k.is_close()).count();
        let all = kernels.kernels.len();
        let mut line = format!("kernels      {close} of {all} agree with their bodies");
        if !kernels.left_out.is_empty() {
            line += &format!(", {} too large to interpret", kernels.left_out.len());
        }
        lines.push(line);
    }
    lines.extend(audit.notes.iter().map(|note| format!("note         {note}")));
    lines
}

fn of(all: &[Agreement]) -> String {
    let right = all.iter().filter(|a| a.verdict != Verdict::Wrong).count();
    let finest = all.iter().filter(|a| a.parameter.is_some()).map(|a| a.digits);
    let least = finest.fold(f64::INFINITY, f64::min);
    let digits = if least.is_finite() {
        format!(", at least {} digits", shown(least))
    } else {
        String::new()
    };
    format!("{right} of {} comparisons agree{digits}", all.len())
}

/// The least digits of what was compared of a parameter.
fn least(all: &[Agreement], name: &str) -> String {
    let own = || all.iter().filter(|a| a.parameter.as_deref() == Some(name));
    let least = own().map(|a| a.digits).fold(f64::INFINITY, f64::min);
    let wrong = if own().any(|a| a.verdict == Verdict::Wrong) { " wrong" } else { "" };
    if least.is_finite() { format!("{}{wrong}", shown(least)) } else { String::new() }
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Right => "right",
        Verdict::Rounded => "rounding",
        Verdict::Stated => "stated",
        Verdict::Kink => "kink",
        Verdict::Wrong => "WRONG",
    }
}

fn shown(digits: f64) -> String {
    format!("{digits:.1}")
}

fn number(x: f64) -> String {
    format!("{x:.6e}")
}
