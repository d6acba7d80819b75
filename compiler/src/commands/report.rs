//! `frit report`: a plan as one self-contained HTML page with its timeline and memory.

use super::bytes;
use super::inspect::{View, summary, to_json};
use crate::diagnostics::Report;
use crate::plan_dir;
use frit_ir::Diagnostic;
use frit_ir::plan::{Plan, Stream};
use std::fmt::Write;
use std::path::PathBuf;

/// Arguments of `frit report`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  frit report plan -o report.html")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// The page to write.
    #[arg(short, long, default_value = "report.html")]
    pub output: PathBuf,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let plan = plan_dir::read(&args.plan)?;
    std::fs::write(&args.output, page(&plan)).map_err(|e| {
        Diagnostic::error("E091", format!("cannot write {}: {e}", args.output.display()))
    })?;
    Ok(format!("{}\n", args.output.display()))
}

const STYLE: &str = "body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;\
padding:0 1rem;color:#222}pre{background:#f4f4f4;padding:1rem;overflow-x:auto}table{border-collapse:\
collapse;font-size:13px}td,th{padding:2px 10px;text-align:left;border-bottom:1px solid #ddd}svg{width:\
100%;height:auto;background:#fafafa}";

fn page(plan: &Plan) -> String {
    let mut html = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>{0}</title><style>{STYLE}</style>\
         <h1>{0}</h1><pre>{1}</pre><h2>Timeline (predicted)</h2>{2}<h2>Workspace over the step</h2>{3}",
        escape(&plan.name),
        escape(&summary(plan)),
        timeline(plan),
        memory(plan),
    );
    for (title, view) in
        [("Units", View::Units), ("Kernels", View::Kernels), ("Lints", View::Lints)]
    {
        // Writing to a string does not fail.
        let _ = write!(html, "<h2>{title}</h2>{}", list(&to_json(plan, view)));
    }
    html + "</html>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// When each task starts and ends, by the predicted durations, in microseconds.
fn times(plan: &Plan) -> Vec<(f64, f64)> {
    let mut times: Vec<(f64, f64)> = Vec::new();
    let mut free = [0.0_f64; Stream::ALL.len()];
    for phase in &plan.phases {
        let begin = free.iter().copied().fold(0.0, f64::max);
        free = [begin; Stream::ALL.len()];
        for task in &plan.tasks[phase.begin..phase.end] {
            let s = Stream::ALL.iter().position(|s| *s == task.stream).unwrap_or(0);
            let start = task.waits.iter().map(|w| times[*w].1).fold(free[s], f64::max);
            free[s] = start + task.cost_us;
            times.push((start, free[s]));
        }
    }
    times
}

fn timeline(plan: &Plan) -> String {
    let times = times(plan);
    let total = times.iter().map(|t| t.1).fold(1.0, f64::max);
    let mut svg = String::from("<svg viewBox='0 0 1000 120' role=img>");
    for (task, (start, end)) in plan.tasks.iter().zip(&times) {
        let row = Stream::ALL.iter().position(|s| *s == task.stream).unwrap_or(0);
        let color = ["#3b7dd8", "#e0903a", "#4aa564"][row];
        let (x, width) = (1000.0 * start / total, (1000.0 * (end - start) / total).max(0.2));
        let _ = write!(
            svg,
            "<rect x='{x:.2}' y='{}' width='{width:.2}' height='30' fill='{color}'><title>{} {:.1} µs \
             {}</title></rect>",
            5 + 38 * row,
            escape(&task.name),
            end - start,
            escape(&task.origin.scope),
        );
    }
    svg + &format!("</svg><p>rows: compute, gather, reduce; {:.1} ms in all</p>", total / 1000.0)
}

/// Bytes between the first and the last access of each workspace buffer, task by task.
fn memory(plan: &Plan) -> String {
    let mut span: Vec<Option<(usize, usize)>> = vec![None; plan.buffers.len()];
    for (i, task) in plan.tasks.iter().enumerate() {
        for place in task.action.reads().into_iter().chain(task.action.writes()) {
            span[place.buffer].get_or_insert((i, i)).1 = i;
        }
    }
    let mut live = vec![0_usize; plan.tasks.len()];
    for (buffer, span) in plan.buffers.iter().zip(&span) {
        if let (frit_ir::plan::Arena::Workspace, Some((first, last))) = (buffer.arena, span) {
            live[*first..=*last].iter_mut().for_each(|b| *b += buffer.bytes);
        }
    }
    let peak = live.iter().copied().max().unwrap_or(0).max(1);
    let n = live.len().max(2) as f64 - 1.0;
    let mut points = String::from("0,150 ");
    for (i, b) in live.iter().enumerate() {
        let (x, y) = (1000.0 * i as f64 / n, 150.0 - 140.0 * *b as f64 / peak as f64);
        let _ = write!(points, "{x:.1},{y:.1} ");
    }
    format!(
        "<svg viewBox='0 0 1000 150' role=img><polygon points='{points}1000,150' fill='#b9cfee' \
         stroke='#3b7dd8'/></svg><p>peak {} of live buffers, beside {} that stay</p>",
        bytes(peak as u64),
        bytes(plan.persistent_bytes as u64)
    )
}

/// A list of objects as a table.
fn list(value: &serde_json::Value) -> String {
    let Some(rows) = value.as_array().filter(|rows| !rows.is_empty()) else {
        return "<p>none</p>".into();
    };
    let mut html = String::from("<table>");
    let keys: Vec<&String> = rows[0].as_object().map(|o| o.keys().collect()).unwrap_or_default();
    for key in &keys {
        let _ = write!(html, "<th>{}</th>", escape(key));
    }
    for row in rows {
        html += "<tr>";
        for key in &keys {
            let cell = row.get(*key).and_then(|v| v.as_str()).unwrap_or_default();
            let _ = write!(html, "<td>{}</td>", escape(cell));
        }
        html += "</tr>";
    }
    html + "</table>"
}
