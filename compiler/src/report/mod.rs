//! Renders a plan, and runs of it, as one self-contained HTML page: summary, runs, timeline, memory, modules, precision, certificate,
//! lints, kernels, units.
//!
//! The page has no external resources. Its text, tables and drawings need no script; the script zooms the timeline and reads values off
//! drawings. Times are predictions of the cost model unless they are said to be measured.

mod axis;
mod certificate;
mod charts;
mod measured;
mod memory;
mod model;
mod precision;
pub mod runs;
mod tables;
mod timeline;
pub mod trace;

pub use certificate::Certified;
use frit_ir::plan::{Plan, TaskId, TiSlice, TiVec};
use frit_ir::{Code, Diagnostic};
use frit_passes::simulate::Simulation;
use frit_passes::simulate::roofline::Roofline;
use runs::Run;
use trace::Trace;

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// What lines of runs of this plan name it by.
    pub plan_name: Option<String>,
    /// Runs, of this plan or of others.
    pub runs: Vec<Run>,
    /// A step of this plan.
    pub trace: Option<Trace>,
}

impl Measured {
    /// Warnings of files that are used only in part.
    pub fn warnings(&self) -> Vec<Diagnostic> {
        let warning = |run: &Run, note: &String| {
            Diagnostic::warning(Code::RunIncomplete, format!("{}: {note}", run.label))
        };
        self.runs.iter().flat_map(|run| run.notes.iter().map(move |n| warning(run, n))).collect()
    }
}

/// A section: its anchor, title, what it shows, and its content.
struct Section {
    id: &'static str,
    title: &'static str,
    sub: String,
    body: String,
}

fn section(id: &'static str, title: &'static str, sub: &str, body: String) -> Section {
    Section { id, title, sub: sub.into(), body }
}

/// The page of a plan with predicted times of a step and of each kernel, what is certified, and what was measured.
pub fn page(
    plan: &Plan,
    predicted: &Simulation,
    roofline: &Roofline,
    certified: &Certified,
    found: &Measured,
) -> String {
    let mut sections = vec![];
    if !found.runs.is_empty() {
        let name = found.plan_name.as_deref();
        let runs = measured::runs(plan, name, predicted, &found.runs);
        sections.push(section("runs", "Runs", "over their steps", runs));
    }
    sections.extend(first_screen(plan, predicted, found.trace.as_ref()));
    if let Some(trace) = &found.trace {
        let body = measured::kinds(plan, predicted, trace);
        sections.push(section("measured", "Measured", "a step, beside its prediction", body));
    }
    let seconds = seconds(predicted);
    let kernels = tables::kernels(plan, roofline, found.trace.as_ref());
    let of_units = "parameters that are gathered and reduced together";
    sections.extend([
        section(
            "model",
            "Model",
            "its modules, as they are nested",
            model::section(plan, &seconds),
        ),
        section(
            "precision",
            "Precision",
            "arithmetic by dtype, and casts",
            precision::section(plan),
        ),
        section("certificate", "Certificate", "what every pass kept", certified.section()),
        section("advice", "Advice", "findings of the lints", tables::lints(plan)),
        section("kernels", "Kernels", "by predicted time of a step", kernels),
        section("units", "Units", of_units, tables::units(plan)),
        section("passes", "Passes", "remarks of each pass", tables::passes(plan)),
        section("configuration", "Configuration", "as resolved", tables::configuration(plan)),
    ]);
    document(plan, &tables::cards(plan, predicted, found), &sections)
}

/// The first screen as a page of its own: the numbers, the timeline and the memory.
pub fn screen(plan: &Plan, predicted: &Simulation) -> String {
    let cards = tables::cards(plan, predicted, &Measured::default());
    document(plan, &cards, &first_screen(plan, predicted, None))
}

fn first_screen(plan: &Plan, predicted: &Simulation, trace: Option<&Trace>) -> [Section; 2] {
    let sub = match (trace, plan.accumulation) {
        (Some(_), _) => "a step, predicted and measured".to_string(),
        (None, 1) => "one step of one rank, predicted".into(),
        (None, n) => {
            format!("one step of one rank, predicted; micro_step × {n}, of which one is drawn")
        }
    };
    let above = "workspace over the time of one micro-step and the update, above persistent memory";
    [
        section("timeline", "Timeline", &sub, timeline::section(plan, predicted, trace)),
        section("memory", "Memory", above, memory::drawing(plan, &times(predicted))),
    ]
}

/// Nothing is loaded, whatever the names in a plan contain.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

fn document(plan: &Plan, cards: &str, sections: &[Section]) -> String {
    let name = escape(&plan.name);
    let about = escape(&format!(
        "{} · {} on {} · {} {} · frit {}",
        plan.compute_dtype,
        plan.strategy,
        frit_ir::counted(plan.world_size, "rank"),
        plan.target.device,
        plan.target.arch,
        plan.frit_version
    ));
    let link = |s: &Section| format!("<a href='#{}-section'>{}</a>", s.id, s.title);
    let links: String = sections.iter().map(link).collect();
    let body = |s: &Section| {
        let Section { id, title, sub, body } = s;
        format!(
            "<section id={id}-section><h2>{title} <small>{}</small></h2>\n{body}\n</section>\n",
            escape(sub)
        )
    };
    let body: String = sections.iter().map(body).collect();
    format!(
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>\
         <meta http-equiv=Content-Security-Policy content=\"{POLICY}\">\
         <meta name=viewport content=\"width=device-width,initial-scale=1\"><title>{name} – Frit</title>\
         <style>{STYLE}</style></head><body><main>\n<header><h1>{name}</h1>\n<p class=sub>{about}</p>\
         <nav>{links}</nav></header>\n{cards}{body}</main><script>{SCRIPT}</script></body></html>\n"
    )
}

const SCRIPT: &str = include_str!("script.js");

const STYLE: &str = include_str!("style.css");

/// The text with what HTML reads as markup written out.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('\'', "&#39;")
}

/// When each task starts and ends, in microseconds, if each phase runs once.
fn times(predicted: &Simulation) -> TiVec<TaskId, (f64, f64)> {
    let (mut times, mut begin) = (TiVec::new(), 0.0);
    for phase in &predicted.phases {
        let spans = phase.timeline.spans.iter();
        times.extend(spans.map(|s| (1e6 * (begin + s.start), 1e6 * (begin + s.end))));
        begin += phase.timeline.end;
    }
    times
}

/// Predicted seconds of each task if it ran alone.
fn seconds(predicted: &Simulation) -> Vec<f64> {
    predicted.phases.iter().flat_map(|p| &p.jobs).map(|job| job.seconds).collect()
}

/// The end of the last task, in microseconds; never 0.
fn total(times: &TiSlice<TaskId, (f64, f64)>) -> f64 {
    times.iter().map(|t| t.1).fold(1e-3, f64::max)
}

/// A duration for people.
fn duration(us: f64) -> String {
    match us {
        0.0 => "0".into(),
        us if us >= 1e6 => format!("{:.2} s", us / 1e6),
        us if us >= 1e3 => format!("{:.2} ms", us / 1e3),
        us => format!("{us:.1} µs"),
    }
}

/// A number with a unit of thousands.
fn quantity(x: f64, unit: &str) -> String {
    let prefixes = ["", "k", "M", "G", "T", "P"];
    let mut x = x;
    let mut i = 0;
    while x >= 1000.0 && i + 1 < prefixes.len() {
        x /= 1000.0;
        i += 1;
    }
    let digits = if x >= 100.0 || i == 0 { 0 } else { 2 };
    format!("{x:.digits$} {}{unit}", prefixes[i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_read_these() {
        assert_eq!(duration(12.34), "12.3 µs");
        assert_eq!(duration(2_500.0), "2.50 ms");
        assert_eq!(duration(3_000_000.0), "3.00 s");
        assert_eq!(quantity(950.0, "FLOP"), "950 FLOP");
        assert_eq!(quantity(2_590_000_000.0, "FLOP"), "2.59 GFLOP");
        assert_eq!(escape("a<b & \"c\""), "a&lt;b &amp; &quot;c&quot;");
    }
}
