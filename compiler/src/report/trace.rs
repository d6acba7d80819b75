//! Reads the file of `frit run --trace`: when the tasks of a step ran on each rank.

use frit_ir::plan::{Plan, TaskId};
use frit_ir::{Code, Diagnostic};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// When a task ran, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Span {
    pub(super) task: TaskId,
    pub(super) start: f64,
    pub(super) duration: f64,
}

/// A measured step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// The spans of each rank, ascending by their starts. The first span of a rank starts at 0.
    pub(super) ranks: BTreeMap<usize, Vec<Span>>,
}

impl Trace {
    /// The end of the last task, in microseconds.
    pub(super) fn end(&self) -> f64 {
        let spans = self.ranks.values().flatten();
        spans.map(|s| s.start + s.duration).fold(0.0, f64::max)
    }

    /// Microseconds of a step in which a task runs, by its number; the mean of the ranks.
    pub(super) fn by_task(&self, plan: &Plan) -> Vec<f64> {
        let mut sums = vec![0.0; plan.tasks.len()];
        for span in self.ranks.values().flatten() {
            sums[usize::from(span.task)] += span.duration / self.ranks.len() as f64;
        }
        sums
    }
}

/// Reads a trace of a run of this plan.
///
/// # Errors
/// If it cannot be read, is none, or is one of another plan.
pub fn read(path: &Path, plan: &Plan) -> Result<Trace, Diagnostic> {
    let refuse = |why: &str, help: &str| {
        let message = format!("{} {why}", path.display());
        Diagnostic::error(Code::ReportInput, message).help(help)
    };
    const WRITE: &str = "give a file that `frit run --trace FILE.json` wrote";
    const AGAIN: &str = "trace a run of this plan: `frit run PLAN --trace FILE.json`";
    let text = std::fs::read(path).map_err(|e| {
        let message = format!("cannot read the trace {}: {e}", path.display());
        Diagnostic::error(Code::ReportInput, message)
    })?;
    let value: Value = serde_json::from_slice(&text)
        .map_err(|e| refuse(&format!("is no trace: it is not complete JSON ({e})"), WRITE))?;
    let Some(events) = value["traceEvents"].as_array() else {
        return Err(refuse("is no trace: it has no list `traceEvents`", WRITE));
    };
    let mut ranks: BTreeMap<usize, Vec<Span>> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let Some((rank, span)) = span(event) else {
            let name = event["name"].as_str().unwrap_or_default();
            let why =
                format!("is no trace of a run: the event `{name}` has no task, start or duration");
            return Err(refuse(&why, WRITE));
        };
        let args = &event["args"];
        let task = plan.tasks.get(span.task).filter(|_| rank < plan.world_size);
        let of_plan = task.is_some_and(|task| {
            event["name"] == *task.name
                && args["flops"] == task.flops
                && args["bytes"] == task.bytes
        });
        if !of_plan {
            let name = event["name"].as_str().unwrap_or_default();
            let why = format!(
                "is a trace of another plan: task {} of rank {rank} is `{name}`, which this plan does not have there",
                usize::from(span.task)
            );
            return Err(refuse(&why, AGAIN));
        }
        ranks.entry(rank).or_default().push(span);
    }
    if ranks.is_empty() {
        return Err(refuse("is a trace without tasks", WRITE));
    }
    for spans in ranks.values_mut() {
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        let first = spans[0].start;
        spans.iter_mut().for_each(|span| span.start -= first);
    }
    Ok(Trace { ranks })
}

/// The rank and the span of an event.
fn span(event: &Value) -> Option<(usize, Span)> {
    let number = |value: &Value| value.as_f64().filter(|x| x.is_finite() && *x >= 0.0);
    let task = usize::try_from(event["args"]["task"].as_u64()?).ok()?;
    let (start, duration) = (number(&event["ts"])?, number(&event["dur"])?);
    let rank = usize::try_from(event["pid"].as_u64()?).ok()?;
    Some((rank, Span { task: TaskId::from(task), start, duration }))
}
