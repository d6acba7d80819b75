//! Writes task times of a step, in all of its micro-steps, as a Chrome trace: one process per rank, one thread per
//! stream; open it in <https://ui.perfetto.dev>. Each task has its predicted and measured duration.

use crate::RunError;
use crate::device::{Device, Span};
use crate::files;
use frit_ir::plan::{Plan, Stream, Task, TaskId};
use serde_json::{Value, json};
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

/// Runs tasks and adds their spans, with times since `origin`.
///
/// # Errors
/// The task that failed.
pub(crate) fn run<D: Device>(
    device: &mut D,
    tasks: Range<TaskId>,
    origin: &Instant,
    spans: &mut Vec<Span>,
) -> Result<(), RunError> {
    let before = origin.elapsed().as_secs_f64() * 1e6;
    let found = device.trace(tasks)?;
    spans.extend(found.into_iter().map(|s| Span { start_us: before + s.start_us, ..s }));
    Ok(())
}

/// Writes the spans of ranks.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write(
    path: &Path,
    plan: &Plan,
    ranks: &[(usize, Vec<Span>)],
) -> Result<(), RunError> {
    let mut text = serde_json::to_vec(&events(plan, ranks)).unwrap_or_default();
    text.push(b'\n');
    files::deliver(path, |out| out.write_all(&text)).map_err(RunError::io(path))
}

fn events(plan: &Plan, ranks: &[(usize, Vec<Span>)]) -> Value {
    let mut events = Vec::new();
    for (rank, spans) in ranks {
        let name = |what: &str, tid: Option<usize>, name: String| json!({"ph": "M", "pid": rank, "tid": tid, "name": what, "args": {"name": name}});
        events.push(name("process_name", None, format!("rank {rank}")));
        for (tid, stream) in Stream::ALL.iter().enumerate() {
            events.push(name("thread_name", Some(tid), stream.name().into()));
        }
        for span in spans {
            events.push(event(&plan.tasks[span.task], *rank, span));
        }
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

fn event(task: &Task, rank: usize, span: &Span) -> Value {
    let tid = Stream::ALL.iter().position(|s| *s == task.stream);
    json!({
        "ph": "X",
        "pid": rank,
        "tid": tid,
        "ts": span.start_us,
        "dur": span.duration_us,
        "name": task.name,
        "cat": task.region.to_string(),
        "args": {
            "task": span.task,
            "origin": task.origin.to_string(),
            "predicted_us": task.cost_us,
            "measured_us": span.duration_us,
            "flops": task.flops,
            "bytes": task.bytes,
        },
    })
}
