//! Draws tasks over time, one row per stream, colored by the part of the step: the predicted step, and below it the measured one of each
//! rank.
//!
//! The drawing of the page itself is still; the script replaces it by one that can be zoomed and names tasks, from the data beside it.

use super::axis::Axis;
use super::trace::Trace;
use super::{duration, escape};
use frit_ir::Region;
use frit_ir::plan::{Action, Plan, Stream, TaskId};
use frit_passes::simulate::Simulation;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fmt::Write;

/// Units of the drawing, along; across, a unit is a pixel.
const WIDTH: f64 = 1000.0;
const ROW: f64 = 36.0;
const BAR: f64 = 20.0;

/// Narrower gaps between bars of one color are not drawn.
const NARROW: f64 = 0.3;

/// Spans of tasks in a page; what exceeds them is left out.
const SPANS: usize = 60_000;

/// The color of each part of a step, and its name.
const PARTS: [(&str, &str); 4] =
    [("a", "forward"), ("b", "backward"), ("d", "recompute"), ("c", "update")];

fn part(region: Region) -> usize {
    match region {
        Region::Forward => 0,
        Region::Backward => 1,
        Region::Recompute(_) => 2,
        Region::Update => 3,
    }
}

/// A span of a task, in microseconds.
type Bar = (TaskId, f64, f64);

/// Rows that belong together: a step as it is predicted, or as a rank ran it.
struct Group {
    title: String,
    bars: Vec<Bar>,
}

/// The drawing, its data and its legend.
pub(super) fn section(plan: &Plan, predicted: &Simulation, trace: Option<&Trace>) -> String {
    let runs: usize = predicted.phases.iter().map(|p| p.runs * p.jobs.len()).sum();
    let mut groups = vec![predicted_group(plan, predicted, trace.is_some() && runs <= SPANS)];
    let mut left_out = String::new();
    let mut spans = 0;
    for (n, (rank, measured)) in trace.iter().flat_map(|t| &t.ranks).enumerate() {
        spans += measured.len();
        if n > 0 && spans > SPANS {
            let ranks = trace.map_or(0, |t| t.ranks.len());
            left_out += &format!("<span>{n} of the {ranks} ranks of the trace are drawn</span>");
            break;
        }
        if measured.len() > SPANS {
            left_out = format!("<span>of rank {rank}, the first {SPANS} tasks are drawn</span>");
        }
        let bars =
            measured.iter().take(SPANS).map(|s| (s.task, s.start, s.start + s.duration)).collect();
        groups.push(Group { title: format!("measured, rank {rank}"), bars });
    }
    let legend: String = PARTS
        .iter()
        .enumerate()
        .filter(|(k, _)| plan.tasks.iter().any(|task| part(task.region) == *k))
        .map(|(_, (color, name))| format!("<span><i class=g{color}></i>{name}</span>"))
        .collect();
    let waiting = predicted.exposed_communication_seconds;
    let step = predicted.step_seconds;
    format!(
        "<div class=timeline id=timeline-view>{}</div>\n<div class=legend>{legend}\
         <span>predicted: compute waits {} of {} ({:.0} %)</span>{}{left_out}</div>\n\
         <script type=application/json id=timeline-data>{}</script>",
        drawing(plan, &groups[..groups.len().min(2)]),
        duration(1e6 * waiting),
        duration(1e6 * step),
        100.0 * waiting / step.max(f64::MIN_POSITIVE),
        trace.map_or(String::new(), |t| format!("<span>measured: {}</span>", duration(t.end()))),
        data(plan, predicted, &groups),
    )
}

/// The predicted step: each phase once, or as often as it runs.
fn predicted_group(plan: &Plan, predicted: &Simulation, whole: bool) -> Group {
    let (mut bars, mut begin, mut task) = (vec![], 0.0, 0);
    for phase in &predicted.phases {
        for _ in 0..if whole { phase.runs } else { 1 } {
            let spans = phase.timeline.spans.iter().enumerate();
            bars.extend(spans.map(|(i, s)| {
                (TaskId::from(task + i), 1e6 * (begin + s.start), 1e6 * (begin + s.end))
            }));
            begin += phase.timeline.end;
        }
        task += phase.timeline.spans.len();
    }
    let title = match plan.accumulation {
        1 => "predicted".to_string(),
        _ if whole => "predicted".into(),
        n => format!("predicted, one of {n} micro-steps"),
    };
    Group { title, bars }
}

/// The still drawing.
fn drawing(plan: &Plan, groups: &[Group]) -> String {
    let end = groups.iter().flat_map(|g| &g.bars).map(|b| b.2).fold(1e-3, f64::max);
    let x = Axis::linear(0.0, end);
    let streams = plan.streams();
    let height = ROW * (streams.len() * groups.len()) as f64;
    let (mut svg, mut labels) = (String::new(), String::new());
    for (g, group) in groups.iter().enumerate() {
        for (i, stream) in streams.iter().enumerate() {
            let top = ROW * (g * streams.len() + i) as f64;
            svg += &row(plan, &group.bars, *stream, top + ROW - BAR - 1.0, x);
            let name = stream.name();
            let title = if i == 0 { format!("{}: {name}", group.title) } else { name.into() };
            let _ = write!(labels, "<span style='top:{top:.0}px'>{}</span>", escape(&title));
        }
    }
    format!(
        "<div class='plot rows' style='height:{height:.0}px'>{}<svg viewBox='0 0 {WIDTH:.0} {height:.0}' \
         preserveAspectRatio=none role=img aria-label='tasks over time'>{svg}</svg>{labels}</div>",
        x.below(6, duration)
    )
}

/// The bars of a stream, one path per color.
fn row(plan: &Plan, bars: &[Bar], stream: Stream, top: f64, x: Axis) -> String {
    let mut paths = [const { String::new() }; PARTS.len()];
    let mut open: Option<(usize, f64, f64)> = None;
    let mut close = |bar: Option<(usize, f64, f64)>| {
        if let Some((k, from, to)) = bar {
            let width = (to - from).max(0.2);
            let _ = write!(paths[k], "M{from:.1} {top:.0}h{width:.1}v{BAR}h-{width:.1}z");
        }
    };
    for (task, start, end) in bars.iter().filter(|(t, ..)| plan.tasks[*t].stream == stream) {
        let k = part(plan.tasks[*task].region);
        let (from, to) = (WIDTH * x.at(*start), WIDTH * x.at(*end));
        if let Some((same, _, last)) = &mut open
            && *same == k
            && from - *last < NARROW
        {
            *last = last.max(to);
            continue;
        }
        close(open.replace((k, from, to)));
    }
    close(open);
    let path = |((color, _), d): (&(&str, &str), &String)| match d.is_empty() {
        true => String::new(),
        false => format!("<path class=f{color} d='{d}'/>"),
    };
    PARTS.iter().zip(&paths).map(path).collect()
}

/// Numbers of strings, in the order in which they first appear.
#[derive(Default)]
struct Names {
    numbers: HashMap<String, usize>,
    names: Vec<String>,
}

impl Names {
    fn number(&mut self, name: &str) -> usize {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        self.names.push(name.into());
        self.numbers.insert(name.into(), self.names.len() - 1);
        self.names.len() - 1
    }
}

/// What the script draws. Times are nanoseconds; a start is relative to the one before it.
fn data(plan: &Plan, predicted: &Simulation, groups: &[Group]) -> String {
    let mut words = Names::default();
    let kinds = predicted.phases.iter().flat_map(|p| &p.jobs).map(|job| job.kind.name());
    let mut tasks: Vec<u64> = Vec::with_capacity(8 * plan.tasks.len());
    for (task, kind) in plan.tasks.iter().zip(kinds) {
        let unit = match &task.action {
            Action::AllGather { group, .. }
            | Action::ReduceScatter { group, .. }
            | Action::Reshard { group, .. }
            | Action::AllReduce { group: Some(group), .. } => {
                words.number(&plan.units[plan.groups[*group].unit].name)
            }
            _ => words.number(""),
        };
        let kernel = match &task.action {
            Action::Kernel { kernel, .. } => words.number(&plan.kernels[*kernel].name),
            _ => words.number(""),
        };
        let name = words.number(&task.name);
        let (scope, kind) = (words.number(&task.origin.scope), words.number(kind));
        let place = task.stream.index() * PARTS.len() + part(task.region);
        let numbers = [name, scope, kind, unit, kernel, place].map(|n| n as u64);
        tasks.extend(numbers);
        tasks.extend([task.flops, task.bytes]);
    }
    let group = |group: &Group| -> Value {
        let (mut before, mut spans) = (0, Vec::with_capacity(3 * group.bars.len()));
        let mut bars = group.bars.clone();
        bars.sort_by(|a, b| a.1.total_cmp(&b.1));
        for (task, start, end) in &bars {
            let at = (1e3 * start).round() as i64;
            let long = (1e3 * (end - start)).round() as i64;
            spans.extend([usize::from(*task) as i64, at - before, long]);
            before = at;
        }
        json!({"title": group.title, "spans": spans})
    };
    let streams: Vec<(usize, &str)> =
        plan.streams().into_iter().map(|s| (s.index(), s.name())).collect();
    let data = json!({
        "words": words.names,
        "streams": streams,
        "parts": PARTS.map(|(color, name)| [color, name]),
        "tasks": tasks,
        "groups": groups.iter().map(group).collect::<Vec<_>>(),
    });
    // Within a script element, `<` could end it.
    data.to_string().replace('<', "\\u003c")
}
