//! When each task of a step ran, as a Chrome trace: one process per rank, one thread per stream, open it in
//! <https://ui.perfetto.dev>. Each task carries the cost model's prediction beside what was measured.

use crate::RunError;
use crate::device::Span;
use frit_ir::plan::{Plan, Stream, Task};
use serde_json::{Value, json};
use std::path::Path;

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
    std::fs::write(path, text).map_err(RunError::io(path))
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
