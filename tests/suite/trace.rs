//! Traces of executed steps.

use crate::support::{file, plan};
use frit_runtime::run::{RunOptions, run};
use serde_json::Value;

#[test]
fn the_last_step_is_traced_task_by_task_on_every_rank() {
    for (accumulation, dumped) in [(1, false), (3, false), (3, true)] {
        let accumulated = format!("run.accumulation={accumulation}");
        let settings = ["sharding.ranks=2", &accumulated];
        let planned = plan("tests/models/mlp/model.onnx", 4, &settings);
        let trace = planned.dir.path().join("trace.json");
        let options = RunOptions {
            steps: if dumped { 1 } else { 2 },
            data: file("tests/models/mlp/data.safetensors").into(),
            trace: Some(trace.clone()),
            dump_grads: dumped.then(|| planned.dir.path().join("grads.safetensors")),
            threads: Some(1),
            ..RunOptions::default()
        };
        let traced = run(&planned.path(), &options).unwrap();
        let untraced = run(&planned.path(), &RunOptions { trace: None, ..options }).unwrap();
        assert_eq!(traced.losses, untraced.losses, "a traced step computes the same");

        let text = std::fs::read_to_string(&trace).unwrap();
        let events: Value = serde_json::from_str(&text).unwrap();
        let events = events["traceEvents"].as_array().unwrap();
        let plan = &planned.compiled.plan;
        let expected = (0..accumulation).map(|k| plan.micro_step_tasks(k, accumulation));
        let expected = expected.flat_map(|range| range.start.until(range.end));
        let tasks: Vec<_> = expected.map(|i| &plan.tasks[i]).collect();
        let runs: usize = plan.tasks.keys().map(|i| plan.runs(i)).sum();
        assert_eq!(tasks.len(), runs, "as often as the predictions count them");
        for rank in 0..2 {
            let spans: Vec<&Value> =
                events.iter().filter(|e| e["ph"] == "X" && e["pid"] == rank).collect();
            assert_eq!(spans.len(), tasks.len());
            let mut end = 0.0;
            for (span, task) in spans.iter().zip(&tasks) {
                assert_eq!(span["name"], task.name.as_str());
                assert_eq!(span["args"]["predicted_us"], task.cost_us);
                // On the CPU tasks run one after the other.
                let start = span["ts"].as_f64().unwrap();
                assert!(start >= end);
                end = start + span["dur"].as_f64().unwrap();
            }
        }
    }
}
