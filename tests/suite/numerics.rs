//! Detection of non-finite values, and histograms of exponents.

use crate::support::{Planned, file, plan, plan_at, write_f32};
use frit_ir::DType;
use frit_runtime::RunError;
use frit_runtime::numerics::{Kind, NotFinite, NumericsFile};
use frit_runtime::run::{RunOptions, run};
use std::path::{Path, PathBuf};

/// `y = f(x · w)` in the scope `head`, as a JSON model of three inputs and two outputs.
fn model(dir: &Path, f: &str, settings: &[&str]) -> Planned {
    let model = format!(
        r#"{{ "frit_model": 1, "name": "head", "dims": {{ "batch": null }},
  "inputs": [ {{ "name": "x", "dtype": "f32", "shape": ["batch", 3] }} ],
  "params": [ {{ "name": "w", "shape": [3, 2], "init": {{ "constant": 0.5 }} }} ],
  "nodes": [ {{ "op": "matmul", "inputs": ["x", "w"], "outputs": ["h"], "scope": "body" }},
             {{ "op": "{f}", "inputs": ["h"], "outputs": ["y"], "scope": "head" }} ],
  "outputs": ["y"] }}"#
    );
    let path = dir.join("model.json");
    std::fs::write(&path, model).expect("written");
    plan_at(&path, 2, &[&["loss.kind=mse", "loss.logits=y"], settings].concat())
}

/// Two examples per step, all elements `x`, but for the steps listed.
fn data(dir: &Path, x: f32, steps: usize, planted: &[(usize, f32)]) -> PathBuf {
    let mut values = vec![x; steps * 6];
    for (step, bad) in planted {
        values[step * 6 + 4] = *bad;
    }
    let path = dir.join("data.safetensors");
    let labels = vec![0.0; steps * 4];
    write_f32(&path, &[("x", vec![steps * 2, 3], values), ("labels", vec![steps * 2, 2], labels)]);
    path
}

fn checked(planned: &Planned, data: &Path, steps: usize) -> Result<Vec<f64>, Box<NotFinite>> {
    let options = RunOptions {
        steps,
        data: data.into(),
        check_numerics: true,
        threads: Some(1),
        ..RunOptions::default()
    };
    match run(&planned.path(), &options) {
        Ok(report) => Ok(report.losses),
        Err(RunError::NotFinite(found)) => Err(found),
        Err(e) => panic!("{e}"),
    }
}

const FP32: &str = "precision.compute=fp32";

#[test]
fn an_overflow_names_operation_scope_and_cause() {
    let dir = tempfile::tempdir().unwrap();
    let planned = model(dir.path(), "exp", &[FP32, "optimizer.lr=0"]);
    let data = data(dir.path(), 0.5, 4, &[(2, 500.0)]);
    let found = checked(&planned, &data, 4).unwrap_err();
    assert_eq!((found.value, found.op.as_str(), found.region.as_str()), ("inf", "exp", "forward"));
    assert!(["body", "head"].contains(&found.scope.as_str()), "{found:?}");
    assert!(found.facts[0].contains("are not finite, the first is element"), "{:?}", found.facts);
    assert!(found.facts[1].contains("to 2.505"), "{:?}", found.facts);
    assert!(found.cause.contains("exp("), "{}", found.cause);
    assert_eq!(checked(&planned, &data, 2).unwrap().len(), 2, "before the planted value");
}

#[test]
fn a_logarithm_of_a_negative_number() {
    let dir = tempfile::tempdir().unwrap();
    let planned = model(dir.path(), "log", &[FP32]);
    let found = checked(&planned, &data(dir.path(), -1.0, 1, &[]), 1).unwrap_err();
    assert_eq!((found.value, found.op.as_str()), ("NaN", "log"));
    assert!(found.cause.contains("logarithm") && found.remedy.contains(&found.scope), "{found:?}");
}

#[test]
fn what_comes_with_the_data_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let planned = model(dir.path(), "tanh", &[FP32]);
    let found = checked(&planned, &data(dir.path(), 0.5, 3, &[(1, f32::NAN)]), 3).unwrap_err();
    assert_eq!((found.value, found.op.as_str()), ("NaN", "input `x`"));
    assert!(found.facts[0].contains("element 4"), "{:?}", found.facts);
}

#[test]
fn an_overflow_of_f16_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let planned = model(dir.path(), "relu", &["precision.compute=fp16"]);
    let found = checked(&planned, &data(dir.path(), 1e5, 1, &[]), 1).unwrap_err();
    assert_eq!((found.value, found.dtype, found.op.as_str()), ("inf", DType::F16, "cast"));
    assert!(found.cause.contains("6.55040e4"), "{found:?}");
    assert!(found.remedy.contains("bf16"), "{found:?}");
}

/// A dynamic scale that is too large at first only skips steps; an overflow of forward stops the run.
#[test]
fn overflows_of_scaled_gradients_are_no_mistake() {
    let dir = tempfile::tempdir().unwrap();
    let settings = ["precision.compute=fp16", "precision.init_scale=1e9"];
    let planned = model(dir.path(), "relu", &settings);
    let data = data(dir.path(), 1.0, 8, &[]);
    let metrics = dir.path().join("metrics.jsonl");
    let options = RunOptions {
        steps: 8,
        data: data.into(),
        check_numerics: true,
        metrics: Some(metrics.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    let text = std::fs::read_to_string(metrics).unwrap();
    assert!(text.contains("\"skipped\":true"), "{text}");
}

/// Masks are infinite and statistics of empty rows too: none of that is a finding.
#[test]
fn healthy_models_pass() {
    for (model, batch, compute) in
        [("gpt2", 2, "precision.compute=bf16"), ("bert", 2, "precision.compute=fp32")]
    {
        let planned = plan(&format!("tests/models/{model}/model.onnx"), batch, &[compute]);
        let data = file(&format!("tests/models/{model}/data.safetensors"));
        let losses = checked(&planned, &data, 2).unwrap_or_else(|e| panic!("{model}: {e:?}"));
        let options =
            RunOptions { steps: 2, data: data.into(), threads: Some(1), ..RunOptions::default() };
        let plain = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(losses, plain.losses, "{model}: watching changes nothing");
    }
}

fn histograms(planned: &Planned, data: &Path, steps: usize) -> NumericsFile {
    let path = planned.dir.path().join("numerics.json");
    let options = RunOptions {
        steps,
        data: data.into(),
        numerics: Some(path.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    frit::policy::read(&path).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn histograms_count_by_scope_and_leave_the_loss_scale_out() {
    let dir = tempfile::tempdir().unwrap();
    let of = |scale: &str| {
        let settings = ["precision.compute=fp16", scale, "optimizer.lr=0"];
        let planned = model(dir.path(), "relu", &settings);
        histograms(&planned, &data(dir.path(), 0.5, 3, &[]), 3)
    };
    let (plain, scaled) = (of("precision.loss_scale=1"), of("precision.loss_scale=1024"));
    assert_eq!((plain.steps, plain.ranks), (3, 1));
    let gradients = |file: &NumericsFile| -> Vec<(String, f64, u64)> {
        let rows = file.scopes.iter().filter(|r| r.kind == Kind::Gradient);
        rows.map(|r| (r.scope.clone(), r.histogram.max_abs, r.histogram.elements)).collect()
    };
    assert!(!gradients(&plain).is_empty());
    assert_eq!(gradients(&plain), gradients(&scaled));
    let forward = plain.scopes.iter().filter(|r| r.kind == Kind::Activation);
    let largest = forward.map(|r| r.histogram.max_abs).fold(0.0, f64::max);
    // 3 · 0.5 · 0.5, and the loss of its square, summed over four elements.
    assert!((0.75..=2.5).contains(&largest), "{largest}");
}

#[test]
fn ranks_are_counted_together() {
    let dir = tempfile::tempdir().unwrap();
    let elements = |ranks: &str| {
        let planned = model(dir.path(), "relu", &[FP32, ranks, "sharding.strategy=no_shard"]);
        let file = histograms(&planned, &data(dir.path(), 0.5, 4, &[]), 1);
        let rows = file.scopes.iter().filter(|r| r.kind == Kind::Activation);
        rows.map(|r| r.histogram.elements).sum::<u64>()
    };
    assert_eq!(elements("sharding.ranks=2"), 2 * elements("sharding.ranks=1"));
}

#[test]
fn a_file_of_something_else_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("numerics.json");
    assert!(frit::policy::read(&path).is_err());
    std::fs::write(&path, "{\"frit_numerics\": 9}").unwrap();
    assert!(frit::policy::read(&path).is_err());
}
