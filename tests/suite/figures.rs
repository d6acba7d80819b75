//! The figures of the documentation, drawn from what tests compute. `UPDATE_EXPECT=1` writes them to `docs/figures`;
//! otherwise they must be equal to the files there.

use crate::support::file;
use expect_test::expect_file;
use frit_ir::Region;
use frit_ir::plan::{Live, Plan, Purpose, Stream, TaskId, TiVec};
use frit_passes::simulate::Simulation;
use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 40.0;
const COLORS: [&str; 6] = ["#c44e52", "#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860"];

/// Points joined by a line.
#[derive(Clone)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Writes the figure, or compares it with the one that is there.
pub(crate) fn keep(name: &str, svg: &str) {
    expect_file![file("docs/figures").join(name)].assert_eq(svg);
}

/// Values over numbers of GPUs, which double from one to the next.
pub(crate) fn lines(label: &str, lines: &[Line]) -> String {
    let all = || lines.iter().flat_map(|l| &l.points);
    let first = all().map(|p| p.0).fold(f64::MAX, f64::min).log2();
    let last = all().map(|p| p.0).fold(1.0, f64::max).log2();
    let top = round_up(all().map(|p| p.1).fold(0.0, f64::max));
    let x = |n: f64| LEFT + (WIDTH - LEFT - 180.0) * (n.log2() - first) / (last - first).max(1.0);
    let mut svg = head(label, top);
    for n in lines.first().into_iter().flat_map(|l| &l.points).map(|p| p.0) {
        text(&mut svg, x(n), HEIGHT - BOTTOM + 16.0, "middle", &format!("{n}"));
    }
    text(&mut svg, x(2_f64.powf((first + last) / 2.0)), HEIGHT - 6.0, "middle", "GPUs");
    for (i, (line, color)) in lines.iter().zip(COLORS).enumerate() {
        let mut points = String::new();
        for &(n, value) in &line.points {
            // Writing to a string does not fail.
            let _ = write!(points, "{:.1},{:.1} ", x(n), y(value, top));
            let _ = writeln!(
                svg,
                "<circle cx='{:.1}' cy='{:.1}' r='3' fill='{color}'><title>{} on {n} GPUs: {value:.1}</title></circle>",
                x(n),
                y(value, top),
                line.name
            );
        }
        let _ = writeln!(
            svg,
            "<polyline fill='none' stroke='{color}' stroke-width='2' points='{}'/>",
            points.trim_end()
        );
        legend(&mut svg, i, color, &line.name);
    }
    svg + "</svg>\n"
}

/// Published values and predictions of them, in percent of the published ones.
pub(crate) fn predictions(label: &str, all: &[(String, f64)]) -> String {
    let most = all.iter().map(|(_, percent)| percent.abs()).fold(5.0, f64::max);
    let top = 5.0 * (most / 5.0).ceil();
    let middle = (HEIGHT - BOTTOM) / 2.0;
    let y = |percent: f64| middle - percent / top * (middle - 14.0);
    let step = (WIDTH - LEFT) / all.len() as f64;
    let mut svg = start(label);
    for percent in [-top, -top / 2.0, 0.0, top / 2.0, top] {
        rule(&mut svg, y(percent), &format!("{percent:+.0} %"));
    }
    for (i, (name, percent)) in all.iter().enumerate() {
        let x = LEFT + step * (i as f64 + 0.2);
        let (from, to) = (y(percent.max(0.0)), y(percent.min(0.0)));
        let color = COLORS[usize::from(*percent >= 0.0)];
        let _ = writeln!(
            svg,
            "<rect x='{x:.1}' y='{from:.1}' width='{:.1}' height='{:.1}' fill='{color}'><title>{name}: {percent:+.1} %</title></rect>",
            step * 0.6,
            (to - from).max(0.5)
        );
    }
    text(
        &mut svg,
        WIDTH / 2.0,
        HEIGHT - 6.0,
        "middle",
        "rows of the table, from the first to the last",
    );
    svg + "</svg>\n"
}

/// Bytes in use over the tasks of a step: stacked by purpose for the first plan, and all of the second as a
/// line. With each plan come its persistent bytes.
pub(crate) fn memory(plans: &[(TiVec<TaskId, Live>, usize)]) -> String {
    const COLUMNS: usize = 200;
    let gib = |bytes: usize| bytes as f64 / (1_u64 << 30) as f64;
    let columns = |live: &[Live]| -> Vec<Live> {
        let most =
            |part: &[Live]| *part.iter().max_by_key(|l| l.iter().sum::<usize>()).expect("tasks");
        live.chunks(live.len().div_ceil(COLUMNS)).map(most).collect()
    };
    let peak = |(live, stays): &(TiVec<TaskId, Live>, usize)| {
        gib(stays + live.iter().map(|l| l.iter().sum()).max().unwrap_or(0))
    };
    let top = round_up(plans.iter().map(peak).fold(0.0, f64::max));
    let mut svg = head("GiB of a rank in use over a step", top);
    let (live, stays) = &plans[0];
    let drawn = columns(&live.raw);
    let x = |i: usize, n: usize| LEFT + (WIDTH - LEFT - 180.0) * i as f64 / n as f64;
    let mut base = vec![gib(*stays); drawn.len()];
    let names = std::iter::once("persistent").chain(Purpose::ALL.iter().map(|p| p.name()));
    for (k, (name, color)) in
        names.zip(["#b0b0b0", "#4c72b0", "#55a868", "#dd8452", "#8172b3"]).enumerate()
    {
        let lower: Vec<f64> = if k == 0 { vec![0.0; drawn.len()] } else { base.clone() };
        if k > 0 {
            base.iter_mut().zip(&drawn).for_each(|(b, live)| *b += gib(live[k - 1]));
        }
        let mut points = String::new();
        for (i, value) in base.iter().enumerate() {
            let _ = write!(points, "{:.1},{:.1} ", x(i, drawn.len()), y(*value, top));
        }
        for (i, value) in lower.iter().enumerate().rev() {
            let _ = write!(points, "{:.1},{:.1} ", x(i, drawn.len()), y(*value, top));
        }
        let _ = writeln!(svg, "<polygon fill='{color}' points='{}'/>", points.trim_end());
        legend(&mut svg, k, color, name);
    }
    for (live, stays) in &plans[1..] {
        let drawn = columns(&live.raw);
        let mut points = String::new();
        for (i, live) in drawn.iter().enumerate() {
            let all = gib(stays + live.iter().sum::<usize>());
            let _ = write!(points, "{:.1},{:.1} ", x(i, drawn.len()), y(all, top));
        }
        let _ = writeln!(
            svg,
            "<polyline fill='none' stroke='#000' stroke-width='1.5' points='{}'/>",
            points.trim_end()
        );
        legend(&mut svg, 5, "#000", "all, with auto");
    }
    text(
        &mut svg,
        (WIDTH - 180.0 + LEFT) / 2.0,
        HEIGHT - 6.0,
        "middle",
        "tasks, from the first to the last",
    );
    svg + "</svg>\n"
}

/// The tasks of a step over predicted time, a row for each stream, and below them the bytes in use.
pub(crate) fn schedule(plan: &Plan, predicted: &Simulation) -> String {
    const ROW: f64 = 34.0;
    const CURVE: f64 = 90.0;
    let mut spans: Vec<(f64, f64)> = Vec::new();
    let mut begin = 0.0;
    for phase in &predicted.phases {
        spans.extend(phase.timeline.spans.iter().map(|s| (begin + s.start, begin + s.end)));
        begin += phase.timeline.end;
    }
    let x = |seconds: f64| LEFT + (WIDTH - LEFT) * seconds / begin;
    let streams = plan.streams();
    let bottom = 24.0 + ROW * streams.len() as f64 + CURVE;
    let mut svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {:.0}' font-family='sans-serif' font-size='11'>\n\
         <rect width='{WIDTH}' height='{:.0}' fill='#fff'/>\n",
        bottom + 20.0,
        bottom + 20.0
    );
    for (i, stream) in streams.iter().enumerate() {
        let y = 24.0 + ROW * i as f64;
        text(&mut svg, LEFT - 6.0, y + 15.0, "end", stream.name());
        for bar in bars(plan, &spans, *stream) {
            let _ = writeln!(
                svg,
                "<rect x='{:.2}' y='{y:.0}' width='{:.2}' height='22' fill='{}'/>",
                x(bar.0),
                (x(bar.1) - x(bar.0)).max(0.2),
                COLORS[bar.2]
            );
        }
    }
    let drawn =
        |color: usize| streams.iter().any(|s| bars(plan, &spans, *s).iter().any(|b| b.2 == color));
    for (i, (name, color)) in REGIONS.iter().filter(|(_, color)| drawn(*color)).enumerate() {
        let x = LEFT + 90.0 * i as f64;
        let _ =
            writeln!(svg, "<rect x='{x}' y='6' width='12' height='8' fill='{}'/>", COLORS[*color]);
        text(&mut svg, x + 18.0, 14.0, "start", name);
    }
    let live: Vec<f64> = plan.live().iter().map(|l| l.iter().sum::<usize>() as f64).collect();
    let stays = plan.persistent_bytes as f64;
    let top = stays + live.iter().copied().fold(0.0, f64::max);
    let y = |bytes: f64| bottom - (CURVE - 16.0) * bytes / top;
    let mut points = format!("{LEFT},{bottom} {LEFT},{:.1} ", y(stays));
    // A task's bytes are in use while it runs; streams that run beside one another are drawn as the latest task has it.
    let mut at: Vec<(f64, f64)> = spans.iter().map(|s| s.1).zip(live).collect();
    at.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (end, bytes) in at {
        let _ = write!(points, "{:.1},{:.1} ", x(end), y(stays + bytes));
    }
    let _ = writeln!(svg, "<polygon fill='#c9d3e3' points='{points}{WIDTH},{bottom}'/>");
    text(&mut svg, LEFT - 6.0, bottom, "end", "0");
    text(
        &mut svg,
        LEFT - 6.0,
        y(top) + 8.0,
        "end",
        &format!("{:.1} GiB", top / (1_u64 << 30) as f64),
    );
    text(&mut svg, LEFT, bottom + 14.0, "start", "0 ms");
    text(&mut svg, WIDTH - 2.0, bottom + 14.0, "end", &format!("{:.0} ms", 1e3 * begin));
    svg + "</svg>\n"
}

/// What bars stand for, and their colors.
const REGIONS: [(&str, usize); 4] =
    [("forward", 1), ("backward", 2), ("recompute", 4), ("update", 3)];

/// Start, end and color of the tasks of a stream; those with less than a thousandth of the step between them are one.
fn bars(plan: &Plan, spans: &[(f64, f64)], stream: Stream) -> Vec<(f64, f64, usize)> {
    let step = spans.iter().map(|s| s.1).fold(0.0, f64::max);
    let mut bars: Vec<(f64, f64, usize)> = Vec::new();
    for (task, &(start, end)) in plan.tasks.iter().zip(spans) {
        if task.stream != stream {
            continue;
        }
        let color = match task.region {
            Region::Forward => 1,
            Region::Backward => 2,
            Region::Recompute(_) => 4,
            Region::Update => 3,
        };
        match bars.last_mut() {
            Some(last) if last.2 == color && start - last.1 < 0.001 * step => last.1 = end,
            _ => bars.push((start, end, color)),
        }
    }
    bars
}

fn start(label: &str) -> String {
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' font-family='sans-serif' font-size='11'>\n\
         <rect width='{WIDTH}' height='{HEIGHT}' fill='#fff'/>\n<text x='{LEFT}' y='10'>{label}</text>\n"
    )
}

/// The beginning of a drawing whose values go from 0 to `top`.
fn head(label: &str, top: f64) -> String {
    let mut svg = start(label);
    for i in 0..=4 {
        let value = top * f64::from(i) / 4.0;
        rule(&mut svg, y(value, top), &format!("{value}"));
    }
    svg
}

fn y(value: f64, top: f64) -> f64 {
    18.0 + (HEIGHT - BOTTOM - 18.0) * (1.0 - value / top)
}

fn rule(svg: &mut String, y: f64, label: &str) {
    let _ = writeln!(svg, "<line x1='{LEFT}' x2='{WIDTH}' y1='{y:.1}' y2='{y:.1}' stroke='#ddd'/>");
    text(svg, LEFT - 6.0, y + 4.0, "end", label);
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let _ = writeln!(svg, "<text x='{x:.1}' y='{y:.1}' text-anchor='{anchor}'>{words}</text>");
}

fn legend(svg: &mut String, i: usize, color: &str, name: &str) {
    let (x, y) = (WIDTH - 160.0, 30.0 + 18.0 * i as f64);
    let _ =
        writeln!(svg, "<rect x='{x}' y='{:.0}' width='12' height='8' fill='{color}'/>", y - 8.0);
    text(svg, x + 18.0, y, "start", name);
}

/// A round number that is at least this one.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.max(1e-9).log10().floor());
    let round = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0].into_iter().map(|m| m * power);
    round.into_iter().find(|r| *r >= value).unwrap_or(value)
}
