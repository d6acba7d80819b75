//! Traces of steps that ran.

use crate::support::{file, plan};
use frit_runtime::run::{RunOptions, run};
use serde_json::Value;

#[test]
fn the_last_step_is_traced_task_by_task_on_every_rank() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let trace = planned.dir.path().join("trace.json");
    let options = RunOptions {
        steps: 2,
        data: file("tests/models/mlp/data.safetensors"),
        trace: Some(trace.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    let traced = run(&planned.path(), &options).unwrap();
    let untraced = run(&planned.path(), &RunOptions { trace: None, ..options }).unwrap();
    assert_eq!(traced.losses, untraced.losses, "a traced step computes the same");

    let text = std::fs::read_to_string(&trace).unwrap();
    let events: Value = serde_json::from_str(&text).unwrap();
    let events = events["traceEvents"].as_array().unwrap();
    let tasks = &planned.compiled.plan.tasks;
    for rank in 0..2 {
        let spans: Vec<&Value> =
            events.iter().filter(|e| e["ph"] == "X" && e["pid"] == rank).collect();
        assert_eq!(spans.len(), tasks.len());
        let mut end = 0.0;
        for (span, task) in spans.iter().zip(tasks) {
            assert_eq!(span["name"], task.name.as_str());
            assert_eq!(span["args"]["predicted_us"], task.cost_us);
            // On the CPU tasks run one after the other.
            let start = span["ts"].as_f64().unwrap();
            assert!(start >= end);
            end = start + span["dur"].as_f64().unwrap();
        }
    }
}
