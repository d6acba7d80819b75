//! The timeline of a step in Chrome's trace event format, which Perfetto reads.
//!
//! One process; one thread per stream. Every phase is written as often as it runs, one after the other.
//! Source: "Trace Event Format" (Chromium project).

use super::{Simulation, lane};
use frit_ir::plan::Stream;
use serde_json::{Value, json};

/// The trace as JSON; times in microseconds.
pub fn to_json(simulation: &Simulation) -> Value {
    let mut events = vec![json!({
        "ph": "M", "pid": 0, "name": "process_name",
        "args": {"name": format!("rank of {} on {}", simulation.ranks, simulation.cluster)},
    })];
    for stream in Stream::ALL {
        let name = stream.name();
        events.push(json!({
            "ph": "M", "pid": 0, "tid": lane(stream), "name": "thread_name", "args": {"name": name},
        }));
    }
    let mut begin = 0.0;
    for phase in &simulation.phases {
        for run in 0..phase.runs {
            for (job, span) in phase.jobs.iter().zip(&phase.timeline.spans) {
                events.push(json!({
                    "ph": "X", "pid": 0, "tid": lane(job.stream), "name": job.name,
                    "cat": job.kind.name(),
                    "ts": microseconds(begin + span.start),
                    "dur": microseconds(span.end - span.start),
                    "args": {"scope": &*job.scope, "phase": phase.name, "run": run},
                }));
            }
            begin += phase.timeline.end;
        }
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

/// To the nanosecond, so that the file does not hold digits without meaning.
fn microseconds(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}
