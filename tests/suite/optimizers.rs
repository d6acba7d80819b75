//! Optimizers, schedules, clipping, parameter groups and averages against PyTorch's numbers
//! (`tests/models/optimizers/make.py`), on one rank and on several that own unequal parts.

use crate::support::{Planned, file, plan, plan_configured};
use frit_ir::ops::StateName;
use frit_ir::plan::GroupId;
use frit_runtime::run::{RunOptions, run};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// `y[batch, 2] = x[batch, 3] · w + b`.
const LINEAR: &str = r#"{ "frit_model": 1, "name": "linear",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 3] } ],
  "params": [ { "name": "w", "shape": [3, 2], "init": { "constant": 0.5 } },
              { "name": "b", "shape": [2], "init": { "constant": 0.25 } } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "w"], "outputs": ["h"] },
             { "op": "add", "inputs": ["h", "b"], "outputs": ["y"] } ],
  "outputs": ["y"] }"#;

const BATCH: usize = 4;
const STEPS: usize = 20;

/// Numbers between −1 and 1, as in `make.py`.
fn number(i: usize, seed: usize) -> f32 {
    ((i * 7919 + seed * 104_729) % 2039) as f32 / 1024.0 - 1.0
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn write_data(path: &Path, x: &[f32], labels: &[f32]) {
    let (x_bytes, label_bytes) = (bytes(x), bytes(labels));
    let view = |bytes, n, width| TensorView::new(Dtype::F32, vec![n, width], bytes).expect("fits");
    let tensors = [
        ("x", view(&x_bytes, x.len() / 3, 3)),
        ("labels", view(&label_bytes, labels.len() / 2, 2)),
    ];
    safetensors::serialize_to_file(tensors, None, path).expect("written");
}

fn examples(n: usize) -> (Vec<f32>, Vec<f32>) {
    let x = (0..n * 3).map(|i| number(i, 1)).collect();
    (x, (0..n * 2).map(|i| number(i, 2)).collect())
}

struct Bench {
    dir: tempfile::TempDir,
}

/// What a run leaves: losses, other metrics by step, parameters, and their averages.
struct Ran {
    losses: Vec<f64>,
    metrics: Vec<Value>,
    params: BTreeMap<String, Vec<f32>>,
    averages: BTreeMap<String, Vec<f32>>,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("model.json"), LINEAR).expect("written");
        Bench { dir }
    }

    fn plan(&self, batch: usize, toml: &str, settings: &[&str]) -> Planned {
        let settings =
            [&["loss.kind=mse", "loss.logits=y", "optimizer.clip_grad_norm=0"], settings].concat();
        plan_configured(&self.dir.path().join("model.json"), batch, toml, &settings)
    }

    fn data(&self, (x, labels): &(Vec<f32>, Vec<f32>)) -> PathBuf {
        let path = self.dir.path().join("data.safetensors");
        write_data(&path, x, labels);
        path
    }
}

fn train(planned: &Planned, options: RunOptions) -> Ran {
    let file = |name| planned.dir.path().join(name);
    let (params, averages, metrics) = (file("params"), file("averages"), file("metrics"));
    let keeps =
        planned.compiled.plan.groups[GroupId(0)].states.iter().any(|s| s.name == StateName::Ema);
    let _ = std::fs::remove_file(&metrics);
    let options = RunOptions {
        metrics: Some(metrics.clone()),
        save: Some(params.clone()),
        save_ema: keeps.then(|| averages.clone()),
        threads: Some(1),
        ..options
    };
    let report = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    let lines = std::fs::read_to_string(metrics).expect("metrics");
    Ran {
        losses: report.losses,
        metrics: lines.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect(),
        params: tensors(&params),
        averages: if keeps { tensors(&averages) } else { BTreeMap::new() },
    }
}

fn tensors(path: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let floats = |data: &[u8]| -> Vec<f32> {
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    file.iter().map(|(name, view)| (name.to_string(), floats(view.data()))).collect()
}

fn close(found: &BTreeMap<String, Vec<f32>>, expected: &Value, what: &str) {
    for (name, values) in expected.as_object().expect("tensors") {
        let values = values.as_array().expect("numbers").iter();
        assert_eq!(values.len(), found[name].len(), "{what}: {name}");
        for (a, b) in found[name].iter().zip(values) {
            let b = b.as_f64().expect("a number");
            assert!((f64::from(*a) - b).abs() < 1e-5, "{what}: {name} is {a}, not {b}");
        }
    }
}

#[test]
fn optimizers_schedules_and_clipping_follow_pytorch() {
    let bench = Bench::new();
    let text = std::fs::read_to_string(file("tests/models/optimizers/reference.json"));
    let reference: Value = serde_json::from_str(&text.expect("a reference")).expect("JSON");
    for (name, case) in reference["cases"].as_object().expect("cases") {
        let n = if name == "remainder" { 35 } else { BATCH * STEPS };
        let data = bench.data(&examples(n));
        let list = case["settings"].as_array().expect("settings").iter();
        let mut settings: Vec<&str> = list.map(|s| s.as_str().expect("a text")).collect();
        settings.extend(["precision.compute=fp32", "optimizer.lr=0.05"]);
        let toml = case["toml"].as_str().expect("a text");
        let expected: Vec<f64> =
            case["losses"].as_array().expect("losses").iter().flat_map(Value::as_f64).collect();
        for (ranks, strategy) in [(1, "full_shard"), (2, "full_shard"), (4, "no_shard")] {
            let what = format!("{name} on {ranks} ranks, {strategy}");
            let keys = [format!("sharding.ranks={ranks}"), format!("sharding.strategy={strategy}")];
            let settings = [&settings[..], &[&keys[0], &keys[1]]].concat();
            let planned = bench.plan(BATCH / ranks, toml, &settings);
            let options =
                RunOptions { steps: STEPS, data: data.clone().into(), ..RunOptions::default() };
            let ran = train(&planned, options);
            for (step, (a, b)) in ran.losses.iter().zip(&expected).enumerate() {
                assert!((a - b).abs() < 1e-5, "{what}: loss {a} at step {step}, not {b}");
            }
            close(&ran.params, &case["params"], &what);
            if let Some(averages) = case.get("ema") {
                close(&ran.averages, averages, &what);
            }
        }
    }
}

/// Every optimizer, with everything that a skipped step must leave alone.
#[test]
fn a_skipped_step_changes_no_bit() {
    let bench = Bench::new();
    let (mut x, mut labels) = examples(BATCH * 12);
    let start = 3 * BATCH * 3;
    // The fourth and fifth batch overflow f16 in the last example, which only the last rank sees.
    x[start + 9] = 1e6;
    x[start + BATCH * 3 + 9] = 1e6;
    let with = (x.clone(), labels.clone());
    x.drain(start..start + 2 * BATCH * 3);
    labels.drain(3 * BATCH * 2..5 * BATCH * 2);
    let without = (x, labels);
    let toml = "[[optimizer.group]]\nscope = \"b\"\nlr = 0.01\n";
    for kind in KINDS {
        for ranks in [1, 2] {
            let keys = [format!("optimizer.kind={kind}"), format!("sharding.ranks={ranks}")];
            let settings = [
                "precision.compute=fp16",
                "optimizer.ema=0.75",
                "optimizer.lr=0.05",
                "schedule.kind=cosine",
                "schedule.total_steps=20",
                // Powers of two up to here change no bit of a gradient that does not underflow.
                "precision.init_scale=1024",
                &keys[0],
                &keys[1],
            ];
            let planned = bench.plan(BATCH / ranks, toml, &settings);
            let train = |examples: &(Vec<f32>, Vec<f32>), steps| {
                let data = bench.data(examples);
                train(&planned, RunOptions { steps, data: data.into(), ..RunOptions::default() })
            };
            let (with, without) = (train(&with, 12), train(&without, 10));
            let skipped = |m: &Value| m["skipped"].as_bool().expect("a flag");
            let steps: Vec<usize> = (0..12).filter(|s| skipped(&with.metrics[*s])).collect();
            assert_eq!(steps, [3, 4], "{kind} on {ranks} ranks");
            assert!(!without.metrics.iter().any(skipped));
            let lr = |m: &Value| m["lr"].as_f64();
            let taken = with.metrics.iter().filter(|m| !skipped(m)).map(lr);
            assert!(taken.eq(without.metrics.iter().map(lr)), "{kind}: the schedule moved");
            assert_eq!(with.params, without.params, "{kind} on {ranks} ranks");
            assert_eq!(with.averages, without.averages, "{kind} on {ranks} ranks");
            assert_ne!(with.params, with.averages, "{kind}");
        }
    }
}

const KINDS: [&str; 7] = ["sgd", "momentum", "nesterov", "adam", "adamw", "lion", "adafactor"];

#[test]
fn norms_and_biases_need_not_decay() {
    let bench = Bench::new();
    let data = bench.data(&examples(BATCH));
    // Without a gradient step only the decay is left.
    let settings = [
        "precision.compute=fp32",
        "optimizer.lr=0.5",
        "optimizer.kind=lion",
        "optimizer.betas=[0.0, 0.0]",
    ];
    let train = |more: &[&str]| {
        let planned = bench.plan(BATCH, "", &[&settings[..], more].concat());
        train(&planned, RunOptions { steps: 1, data: data.clone().into(), ..RunOptions::default() })
            .params
    };
    let (none, all) =
        (train(&["optimizer.weight_decay=0"]), train(&["optimizer.weight_decay=0.5"]));
    let matrices = train(&["optimizer.weight_decay=0.5", "optimizer.decay=matrices"]);
    assert!(all["w"] != none["w"] && all["b"] != none["b"]);
    assert_eq!((&matrices["w"], &matrices["b"]), (&all["w"], &none["b"]));
}

#[test]
fn hyper_parameters_change_without_compiling_again() {
    let bench = Bench::new();
    let data = bench.data(&examples(BATCH * 4));
    let toml = "[[optimizer.group]]\nscope = \"b\"\nlr = 0.25\n";
    let fp32 = "precision.compute=fp32";
    let options = |hyper: &[(&str, f64)]| RunOptions {
        steps: 4,
        data: data.clone().into(),
        hyper: hyper.iter().map(|(name, x)| (name.to_string(), *x)).collect(),
        ..RunOptions::default()
    };
    let first = bench.plan(BATCH, toml, &[fp32, "optimizer.lr=0.5"]);
    let second = bench.plan(
        BATCH,
        "[[optimizer.group]]\nscope = \"b\"\nlr = 0.125\n",
        &[fp32, "optimizer.lr=0.01", "optimizer.clip_grad_value=0.25"],
    );
    let sets = [
        ("optimizer.lr", 0.01),
        ("optimizer.group.0.lr", 0.125),
        ("optimizer.clip_grad_value", 0.25),
    ];
    assert_eq!(train(&first, options(&sets)).params, train(&second, options(&[])).params);
    for (name, x, expected) in [
        (
            "optimizer.learning",
            0.1,
            "the plan has no hyper-parameter `optimizer.learning`; it has ",
        ),
        ("optimizer.lr", f64::NAN, "`optimizer.lr` cannot be NaN"),
        ("optimizer.lr", -1.0, "`optimizer.lr` cannot be -1"),
    ] {
        let error = run(&first.path(), &options(&[(name, x)])).expect_err("refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
    let average = RunOptions { save_ema: Some("nowhere".into()), ..options(&[]) };
    let error = run(&first.path(), &average).expect_err("refused").to_string();
    assert!(error.contains("optimizer.ema"), "{error}");
}

/// Parts of parameters are stepped as the whole parameters are, whoever holds what.
#[test]
fn adafactor_sums_over_parts() {
    let run = |ranks: usize, more: &[&str]| {
        let ranks_key = format!("sharding.ranks={ranks}");
        let micro_steps = if more.contains(&"run.accumulation=2") { 2 } else { 1 };
        let common = ["precision.compute=fp32", "optimizer.kind=adafactor", &ranks_key];
        let settings = [&common[..], more].concat();
        let planned = plan("tests/models/gpt2/model.onnx", 12 / ranks / micro_steps, &settings);
        let data = file("tests/models/gpt2/data.safetensors");
        (
            train(&planned, RunOptions { steps: 10, data: data.into(), ..RunOptions::default() }),
            planned,
        )
    };
    let (expected, whole) = run(1, &["optimizer.decay=matrices"]);
    let all_reduces = |planned: &Planned| planned.compiled.plan.summary().collectives.all_reduce;
    assert_eq!(all_reduces(&whole), 0);
    let groups = "sharding.shard_group=2";
    for (ranks, more, exchanged) in [
        // The statistics of the gradients, then both sums.
        (2, &["sharding.strategy=full_shard"][..], Some(3)),
        (3, &["sharding.strategy=full_shard", "sharding.wrap=none"], Some(3)),
        (4, &["sharding.strategy=full_shard", "sharding.wrap=size=1000"], Some(3)),
        (3, &["sharding.strategy=shard_grad_op"], Some(3)),
        (2, &["sharding.strategy=shard_optimizer", "run.accumulation=2"], Some(3)),
        (4, &["sharding.strategy=hybrid_shard", groups], None),
        (4, &["sharding.strategy=no_shard"], None),
    ] {
        let what = format!("{ranks} ranks, {more:?}");
        let (found, planned) = run(ranks, &[&["optimizer.decay=matrices"], more].concat());
        assert!(exchanged.is_none_or(|n| all_reduces(&planned) == n), "{what}");
        for (a, b) in found.losses.iter().zip(&expected.losses) {
            assert!((a - b).abs() < 1e-5, "{what}: loss {a}, not {b}");
        }
        for (name, values) in &found.params {
            for (a, b) in values.iter().zip(&expected.params[name]) {
                assert!((a - b).abs() < 1e-5, "{what}: {name} is {a}, not {b}");
            }
        }
    }
}
