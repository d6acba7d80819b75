//! Plots tasks over predicted time, one row per stream, colored by the part of the step.

use super::{WIDTH, axis, duration, escape, row, total};
use frit_ir::Region;
use frit_ir::plan::{Plan, Stream, TaskId, TiSlice};
use frit_passes::simulate::Simulation;
use std::fmt::Write;

const ROW: f64 = 34.0;
const BAR: f64 = 26.0;

/// Narrower bars are merged with the next ones of their kind.
const NARROW: f64 = 0.4;

/// The drawing with its legend.
pub(super) fn svg(
    plan: &Plan,
    times: &TiSlice<TaskId, (f64, f64)>,
    predicted: &Simulation,
) -> String {
    let total = total(times);
    let streams = plan.streams();
    let height = ROW * streams.len() as f64;
    let mut svg = format!("<svg viewBox='0 -14 {WIDTH:.0} {:.0}' role=img>", height + 32.0);
    svg += &axis(total, height);
    for (i, stream) in streams.iter().enumerate() {
        let y = ROW * i as f64;
        svg += &bars(plan, times, *stream, y, total);
        let name = stream.name();
        let _ = write!(svg, "<text class=label x='2' y='{:.0}'>{name}</text>", y - 2.0 + ROW - BAR);
    }
    for phase in plan.phases.iter().filter(|p| p.begin < p.end) {
        let begin = times[phase.range()].iter().map(|t| t.0).fold(f64::MAX, f64::min);
        let runs = plan.runs(phase.begin);
        let times = if runs > 1 { format!(" × {runs}") } else { String::new() };
        let _ = write!(
            svg,
            "<text class=label x='{:.1}' y='-5'>{}{times}</text>",
            WIDTH * begin.min(total) / total,
            phase.name
        );
    }
    let waiting = predicted.exposed_communication_seconds;
    format!(
        "{svg}</svg><div class=legend><span><i style='background:var(--a)'></i>forward</span>\
         <span><i style='background:var(--b)'></i>backward</span>\
         <span><i style='background:var(--d)'></i>recompute</span>\
         <span><i style='background:var(--c)'></i>update</span>\
         <span>compute waits {} of {} ({:.0} %)</span></div>",
        duration(1e6 * waiting),
        duration(1e6 * predicted.step_seconds),
        100.0 * waiting / predicted.step_seconds.max(f64::MIN_POSITIVE)
    )
}

fn color(region: Region) -> &'static str {
    match region {
        Region::Forward => "fa",
        Region::Backward => "fb",
        Region::Recompute(_) => "fd",
        Region::Update => "fc",
    }
}

fn bars(
    plan: &Plan,
    times: &TiSlice<TaskId, (f64, f64)>,
    stream: Stream,
    y: f64,
    total: f64,
) -> String {
    let mut svg = String::new();
    // Start, end, color, tooltip and number of the tasks drawn together.
    let mut open: Option<(f64, f64, &str, String, usize)> = None;
    let mut close = |bar: Option<(f64, f64, &str, String, usize)>| {
        let Some((start, end, color, text, n)) = bar else { return };
        let text = if n > 1 { format!("{n} tasks, {}", duration(end - start)) } else { text };
        let (x, width) = (WIDTH * start / total, (WIDTH * (end - start) / total).max(0.15));
        let _ = write!(
            svg,
            "<rect class={color} x='{x:.2}' y='{:.1}' width='{width:.2}' height='{BAR}'><title>{text}</title></rect>",
            y + ROW - BAR - 4.0,
        );
    };
    for (task, &(start, end)) in
        plan.tasks.iter().zip(times).filter(|(t, _)| row(t.stream) == row(stream))
    {
        let color = color(task.region);
        let narrow = WIDTH * (end - start) / total < NARROW;
        if let Some((_, last, same, _, n)) = &mut open
            && *same == color
            && narrow
            && WIDTH * (start - *last) / total < NARROW
        {
            (*last, *n) = (end, *n + 1);
            continue;
        }
        close(open.take());
        let text = format!(
            "{} · {} · {}",
            escape(&task.name),
            duration(end - start),
            escape(&task.origin.scope)
        );
        open = Some((start, end, color, text, 1));
    }
    close(open);
    svg
}
