//! Renders a plan as one self-contained HTML page: summary, timeline, memory, precision, units, kernels, lints.
//!
//! The page has no scripts and no external resources: inline SVG, with tooltips that describe each shape. Times are predictions of
//! the cost model.

mod memory;
mod precision;
mod tables;
mod timeline;

use frit_ir::plan::{Plan, Stream, TaskId, TiSlice, TiVec};
use frit_passes::simulate::Simulation;
use frit_passes::simulate::roofline::Roofline;
use std::fmt::Write;

/// The page of a plan with predicted times of a step and of each kernel.
pub fn page(plan: &Plan, predicted: &Simulation, roofline: &Roofline) -> String {
    let more = [
        ("Precision", "arithmetic by dtype, and every cast", precision::section(plan)),
        ("Advice", "findings of the lints", tables::lints(plan)),
        ("Units", "parameters that are gathered and reduced together", tables::units(plan)),
        ("Kernels", "by predicted time of a step", tables::kernels(plan, roofline)),
        ("Passes", "remarks of each pass", tables::passes(plan)),
        ("Configuration", "as resolved", format!("<pre>{}</pre>", escape(&plan.config))),
    ];
    let more: String = more.iter().map(|(title, sub, body)| section(title, sub, body)).collect();
    first_screen(plan, predicted) + &more + "</main></body></html>\n"
}

/// The first screen as a page of its own: the numbers, the timeline and the memory.
pub fn screen(plan: &Plan, predicted: &Simulation) -> String {
    first_screen(plan, predicted) + "</main></body></html>\n"
}

/// The page up to and including the memory.
fn first_screen(plan: &Plan, predicted: &Simulation) -> String {
    let times = times(predicted);
    let drawn = match plan.accumulation {
        1 => "predicted, one step of one rank".to_string(),
        n => format!("predicted, one step of one rank; one of {n} micro-steps is drawn"),
    };
    let name = escape(&plan.name);
    let mut html = format!(
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>\
         <meta name=viewport content=\"width=device-width\"><title>{name} – Frit plan</title>\
         <style>{STYLE}</style></head><body><main>\n<h1>{name}</h1>\n<p class=sub>{}</p>\n",
        escape(&format!(
            "{} · {} on {} ranks · {} {} · frit {}",
            plan.compute_dtype,
            plan.strategy,
            plan.world_size,
            plan.target.device,
            plan.target.arch,
            plan.frit_version
        )),
    );
    html += &tables::cards(plan, predicted);
    html += &section("Timeline", &drawn, &timeline::svg(plan, &times, predicted));
    let above = "workspace over the same time, above persistent memory";
    html + &section("Memory", above, &memory::svg(plan, &times))
}

fn section(title: &str, sub: &str, body: &str) -> String {
    format!("<section><h2>{title} <small>{sub}</small></h2>\n{body}\n</section>\n")
}

const STYLE: &str = include_str!("style.css");

/// Width of drawings, in their own units.
const WIDTH: f64 = 1000.0;

/// The text with what HTML reads as markup written out.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
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

fn row(stream: Stream) -> usize {
    Stream::ALL.iter().position(|s| *s == stream).unwrap_or(0)
}

/// The end of the last task, in microseconds; never 0.
fn total(times: &TiSlice<TaskId, (f64, f64)>) -> f64 {
    times.iter().map(|t| t.1).fold(1e-3, f64::max)
}

/// A duration for people.
fn duration(us: f64) -> String {
    match us {
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

/// Marks of a time axis at round numbers, below a drawing of this height.
fn axis(total: f64, height: f64) -> String {
    let rough = total / 8.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough);
    let step = step.unwrap_or(total);
    let mut svg = String::new();
    let mut t = 0.0;
    while t <= total {
        let x = WIDTH * t / total;
        let _ = write!(
            svg,
            "<line class=grid x1='{x:.1}' y1='0' x2='{x:.1}' y2='{height:.0}'/>\
             <text class=tick x='{:.1}' y='{:.0}'>{}</text>",
            x + 3.0,
            height + 12.0,
            duration(t)
        );
        t += step;
    }
    svg
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

    #[test]
    fn marks_are_round_and_few() {
        for total in [0.5, 7.0, 93.0, 12_345.0] {
            let n = axis(total, 10.0).matches("<line").count();
            assert!((3..=9).contains(&n), "{n} marks for {total}");
        }
    }
}
