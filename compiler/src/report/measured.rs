//! What runs measured, beside what the plan predicts.

use super::charts::{self, COLORS, Predicted, number};
use super::runs::{Run, Series, VALIDATION_LOSS};
use super::trace::Trace;
use super::{duration, escape, quantity};
use crate::render::bytes;
use frit_ir::counted;
use frit_ir::plan::{DeviceType, Plan};
use frit_passes::simulate::Simulation;
use frit_passes::simulate::jobs::Kind;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Charts of the runs, and a table of them. `plan_name` is what lines of runs of this plan name it by.
pub(super) fn runs(
    plan: &Plan,
    plan_name: Option<&str>,
    predicted: &Simulation,
    runs: &[Run],
) -> String {
    let in_process = match plan.target.device {
        DeviceType::Cuda => 1,
        DeviceType::Cpu => plan.world_size,
    };
    let planned = predicted.peak_bytes as f64 * in_process as f64;
    let across = Predicted {
        step_seconds: predicted.step_seconds,
        rate: predicted.tokens_or_examples_per_s,
        memory: planned,
    };
    let legend: String = runs
        .iter()
        .enumerate()
        .map(|(i, run)| {
            let label = escape(&run.label);
            format!("<label class='c{}' data-run={i}><i></i>{label}</label>", i % COLORS)
        })
        .collect();
    let mut html = format!("<div class='legend runs'>{legend}</div>");
    html += &charts::charts(runs, &across);
    html += "<div class=scroll><table><tr><th>run<th class=n>steps<th class=n>loss<th class=n>lowest validation loss\
             <th class=n>skipped<th class=n>per second<th class=n>step, median<th class=n>of the predicted time<th class=n>memory<th>notes";
    for run in runs {
        html += &row(run, plan_name, predicted);
    }
    html + "</table></div>"
}

fn row(run: &Run, plan_name: Option<&str>, predicted: &Simulation) -> String {
    let loss = run.curve(Series::Loss);
    let ends = loss.first().zip(loss.last());
    let ends = ends.map(|((_, a), (_, b))| format!("{} → {}", number(*a), number(*b)));
    let validation = run.validation(VALIDATION_LOSS);
    let best = validation.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let best = best.map(|(step, loss)| format!("{} (step {step})", number(*loss)));
    let step = run.median(Series::StepSeconds);
    let mut notes = run.notes.clone();
    let other = run.plan.as_deref().zip(plan_name).is_some_and(|(of, this)| of != this);
    if other {
        notes.insert(0, "of another plan".into());
    }
    let ratio = step.filter(|_| !other).map(|s| format!("{:.2} ×", s / predicted.step_seconds));
    let memory = run.curve(Series::Memory).into_iter().map(|(_, b)| b).fold(0.0, f64::max);
    let steps: Vec<String> = run.resumed.iter().map(usize::to_string).collect();
    if !steps.is_empty() {
        notes.push(format!("resumed at step {}", steps.join(", ")));
    }
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "–".into());
    let cells = [
        quantity(run.len() as f64, ""),
        or_none(ends),
        or_none(best),
        run.skipped().count().to_string(),
        or_none(run.median(Series::Rate).map(|r| quantity(r, ""))),
        or_none(step.map(|s| duration(1e6 * s))),
        or_none(ratio),
        or_none((memory > 0.0).then(|| bytes(memory as u64))),
    ];
    let cells: String = cells.iter().map(|text| format!("<td class=n>{}", text.trim())).collect();
    let notes = escape(&notes.join("; "));
    format!("<tr><td>{}{cells}<td>{notes}", escape(&run.label))
}

/// The measured step beside the predicted one, by kind of work.
pub(super) fn kinds(plan: &Plan, predicted: &Simulation, trace: &Trace) -> String {
    let measured = trace.by_task(plan);
    let jobs = predicted.phases.iter().flat_map(|p| p.jobs.iter().map(move |job| (p.runs, job)));
    let mut kinds: BTreeMap<Kind, (f64, f64)> = BTreeMap::new();
    for ((runs, job), us) in jobs.zip(&measured) {
        let kind = kinds.entry(job.kind).or_default();
        (kind.0, kind.1) = (kind.0 + runs as f64 * job.seconds * 1e6, kind.1 + us);
    }
    let most = kinds.values().map(|(a, b)| a.max(*b)).fold(f64::MIN_POSITIVE, f64::max);
    let mut html = format!(
        "<div class=scroll><table><tr><th>work, {}<th><th class=n>predicted<th class=n>measured<th class=n>ratio",
        counted(trace.ranks.len(), "rank")
    );
    let mut add = |name: &str, predicted: f64, measured: f64, drawn: bool| {
        let bar = |us: f64, class: &str| match drawn {
            true => {
                format!("<span class='bar {class}' style='width:{:.1}%'></span>", 100.0 * us / most)
            }
            false => String::new(),
        };
        let _ = write!(
            html,
            "<tr><td>{name}<td class=pair>{}{}<td class=n>{}<td class=n>{}<td class=n>{:.2} ×",
            bar(predicted, "hollow"),
            bar(measured, ""),
            duration(predicted),
            duration(measured),
            measured / predicted.max(1e-6)
        );
    };
    let mut all: Vec<_> = kinds.iter().collect();
    all.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    for (kind, (predicted, measured)) in all {
        add(kind.name(), *predicted, *measured, true);
    }
    add("<b>the step</b>", 1e6 * predicted.step_seconds, trace.end(), false);
    html + "</table></div><p class=sub>Sums of the durations of tasks, the mean of the ranks; a collective's includes its wait for \
            other ranks. A traced step runs task by task and is slower than others.</p>"
}
