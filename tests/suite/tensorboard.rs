//! Event files hold what the metrics' lines say, also where a run resumes.

use crate::support::{file, plan_to_evaluate};
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::run::{RunOptions, run};
use frit_runtime::validation::ValidationOptions;
use prost::Message;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, tag = "2")]
    simple_value: f32,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// Where a run resumes.
const START: i32 = 1;

/// The events of a file.
fn read(mut file: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some((length, rest)) = file.split_first_chunk::<8>() {
        let n = u64::from_le_bytes(*length) as usize;
        events.push(Event::decode(&rest[4..4 + n]).expect("an event"));
        file = &rest[4 + n + 4..];
    }
    assert!(file.is_empty());
    events
}

/// The events of all files of a folder, by file.
fn events(folder: &Path) -> Vec<Vec<Event>> {
    let files = std::fs::read_dir(folder).expect("a folder");
    let mut files: Vec<_> = files.map(|f| f.expect("a file").path()).collect();
    files.sort();
    files.iter().map(|f| read(&std::fs::read(f).expect("read"))).collect()
}

#[test]
fn scalars_are_the_metrics_of_the_lines_whatever_the_run() {
    for (settings, every) in [
        (&["sharding.ranks=1"][..], 1),
        (&["sharding.ranks=2", "run.accumulation=2", "precision.compute=fp16"], 2),
        (&["sharding.ranks=2", "sharding.strategy=no_shard", "memory.recompute=unit"], 3),
    ] {
        let planned = plan_to_evaluate("tests/models/mlp/model.onnx", 2, settings);
        let data = file("tests/models/mlp/data.safetensors");
        let dir = planned.dir.path();
        let options = |steps| RunOptions {
            steps,
            data: data.clone().into(),
            metrics: Some(dir.join("metrics.jsonl")),
            tensorboard: Some(dir.join("a/events")),
            validation: Some(ValidationOptions { data: data.clone().into(), every: Some(every) }),
            checkpoint: Some(CheckpointOptions {
                dir: dir.join("ckpt"),
                every: Some(2),
                resume: true,
                keep: None,
            }),
            threads: Some(1),
            ..RunOptions::default()
        };
        for steps in [4, 7] {
            run(&planned.path(), &options(steps)).unwrap_or_else(|e| panic!("{e}"));
        }
        let text = std::fs::read_to_string(dir.join("metrics.jsonl")).expect("lines");
        let mut expected: BTreeMap<(i64, String), f32> = BTreeMap::new();
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).expect("JSON");
            let step = line["step"].as_i64().expect("a step");
            let names = [
                ("loss", "train/loss"),
                ("grad_norm", "train/grad_norm"),
                ("lr", "train/lr"),
                ("loss_scale", "train/loss_scale"),
                ("tokens_or_examples_per_s", "train/tokens_or_examples_per_s"),
                ("step_seconds", "train/step_seconds"),
                ("memory_bytes", "train/memory_bytes"),
                ("validation_loss", "validation/loss"),
            ];
            for (key, tag) in names {
                if let Some(value) = line[key].as_f64() {
                    expected.insert((step, tag.into()), value as f32);
                }
            }
            if let Some(metrics) = line["validation_metrics"].as_object() {
                let of = |(name, v): (&String, &Value)| {
                    ((step, format!("validation/{name}")), v.as_f64().expect("a number") as f32)
                };
                expected.extend(metrics.iter().map(of));
            }
            if let Some(skipped) = line["skipped"].as_bool() {
                expected.insert((step, "train/skipped".into()), f32::from(u8::from(skipped)));
            }
        }
        let files = events(&dir.join("a/events"));
        assert_eq!(files.len(), 2);
        for file in &files {
            assert_eq!(file[0].file_version.as_deref(), Some("brain.Event:2"));
            assert!(file.iter().all(|e| e.wall_time > 1e9));
        }
        let starts: Vec<(i64, i32)> = files
            .iter()
            .flatten()
            .filter_map(|e| Some((e.step, e.session_log.as_ref()?.status)))
            .collect();
        assert_eq!(starts, [(0, START), (4, START)]);
        let mut found = BTreeMap::new();
        for event in files.iter().flatten() {
            for value in event.summary.iter().flat_map(|s| &s.value) {
                found.insert((event.step, value.tag.clone()), value.simple_value);
            }
        }
        assert_eq!(found, expected);
    }
}
