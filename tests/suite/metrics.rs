//! Metrics over a data set, against those computed from the outputs of `frit eval`.

use crate::support::{Planned, file, plan_to_evaluate};
use frit_runtime::eval::{Options, Report, evaluate};
use frit_runtime::run::{RunOptions, run};
use frit_runtime::validation::ValidationOptions;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::path::{Path, PathBuf};

const MODEL: &str = "tests/models/losses/model.onnx";
const DATA: &str = "tests/models/losses/data.safetensors";

/// A tensor as numbers, and its shape.
fn numbers(path: &Path, name: &str) -> (Vec<usize>, Vec<f64>) {
    let bytes = std::fs::read(path).expect("the file");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let view = tensors.tensor(name).expect("the tensor");
    let data = view.data();
    let values = match view.dtype() {
        safetensors::Dtype::F32 => {
            data.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
        }
        safetensors::Dtype::I64 => {
            data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect()
        }
        other => panic!("{name} is {other:?}"),
    };
    (view.shape().to_vec(), values)
}

/// The first `n` examples of a file.
fn first(data: &Path, n: usize, to: PathBuf) -> PathBuf {
    let bytes = std::fs::read(data).expect("data");
    let all = SafeTensors::deserialize(&bytes).expect("safetensors");
    let cut: Vec<_> = all
        .iter()
        .map(|(key, view)| {
            let mut shape = view.shape().to_vec();
            let len = view.data().len() / shape[0] * n;
            shape[0] = n;
            (key.to_string(), view.dtype(), shape, view.data()[..len].to_vec())
        })
        .collect();
    let views = cut.iter().map(|(key, dtype, shape, bytes)| {
        (key.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("a view"))
    });
    safetensors::serialize_to_file(views, None, &to).expect("written");
    to
}

/// Evaluates with the outputs of all examples in a file.
fn dumped(planned: &Planned, data: &Path) -> (Report, PathBuf) {
    let path = planned.dir.path().join("outputs.safetensors");
    let options = Options {
        plan: planned.path(),
        data: vec![data.into()],
        dump_outputs: Some(path.clone()),
        threads: Some(1),
        ..Options::default()
    };
    (evaluate(&options).unwrap_or_else(|e| panic!("{e}")).expect("rank 0"), path)
}

/// Of every row whose label counts, how many classes come before the label's.
fn places(logits: &[f64], classes: usize, labels: &[f64]) -> Vec<usize> {
    let rows = logits.chunks(classes).zip(labels).filter(|(_, label)| **label != -100.0);
    rows.map(|(row, label)| {
        let label = *label as usize;
        let before = |(j, x): (usize, &f64)| *x > row[label] || (*x == row[label] && j < label);
        row.iter().enumerate().filter(|(j, x)| before((*j, x))).count()
    })
    .collect()
}

fn part(places: &[usize], k: usize) -> f64 {
    places.iter().filter(|place| **place < k).count() as f64 / places.len() as f64
}

/// The mean cross-entropy of rows whose label counts.
fn cross_entropy(logits: &[f64], classes: usize, labels: &[f64]) -> f64 {
    let rows = logits.chunks(classes).zip(labels).filter(|(_, label)| **label != -100.0);
    let losses: Vec<f64> = rows
        .map(|(row, label)| row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[*label as usize])
        .collect();
    losses.iter().sum::<f64>() / losses.len() as f64
}

fn is_close(report: &Report, name: &str, expected: f64, case: &str) {
    let found =
        *report.metrics.get(name).unwrap_or_else(|| panic!("{case}: no {name} in {report:?}"));
    let error = (found - expected).abs() / expected.abs().max(1.0);
    assert!(error < 1e-5, "{case}: {name} is {found}, not {expected}");
}

#[test]
fn metrics_are_those_of_the_outputs_of_all_examples() {
    let asked = "metrics.report=[\"accuracy\", \"top_3\", \"perplexity\", \
                 \"mean_absolute_error(values, target)\", \"accuracy(turned, grid_labels)\"]";
    let also = "loss.also=[\"0.5 * mse(values, target)\"]";
    for (ranks, batch, precision) in
        [(1, 8, "fp32"), (1, 40, "fp16"), (2, 4, "bf16"), (3, 4, "fp32")]
    {
        let case = format!("{ranks} ranks, batch {batch}, {precision}");
        let (ranks, compute) =
            (format!("sharding.ranks={ranks}"), format!("precision.compute={precision}"));
        let settings = [ranks.as_str(), &compute, also, asked, "loss.label_smoothing=0.1"];
        let planned = plan_to_evaluate(MODEL, batch, &settings);
        let data = first(&file(DATA), 37, planned.dir.path().join("data.safetensors"));
        let (report, path) = dumped(&planned, &data);
        let of = |name| numbers(&path, name);
        let (shape, logits) = of("logits");
        assert_eq!(shape, [37, 5], "{case}");
        let labels = numbers(&data, "labels").1;
        let found = places(&logits, 5, &labels);
        assert!(found.len() < 37, "labels are ignored");
        is_close(&report, "accuracy(logits, labels)", part(&found, 1), &case);
        is_close(&report, "top_3", part(&found, 3), &case);
        is_close(&report, "perplexity", cross_entropy(&logits, 5, &labels).exp(), &case);
        let (shape, turned) = of("turned");
        assert_eq!(shape, [37, 3, 5], "{case}");
        let grid = places(&turned, 5, &numbers(&data, "grid_labels").1);
        is_close(&report, "accuracy(turned, grid_labels)", part(&grid, 1), &case);
        let (values, target) = (of("values").1, numbers(&data, "target").1);
        let errors = values.iter().zip(&target).map(|(x, t)| (x - t).abs());
        is_close(&report, "mean_absolute_error", errors.sum::<f64>() / 111.0, &case);
        assert_eq!(report.metrics.len(), 5, "{case}: {report:?}");
        assert_eq!(report.losses.len(), 2, "{case}");
    }
}

#[test]
fn soft_targets_and_sides_have_an_accuracy() {
    let soft = ["loss.labels=soft", "loss.targets=probabilities"];
    let kl = ["loss.kind=kl", "loss.labels=soft"];
    let bce = ["loss.kind=bce_with_logits", "loss.logits=values", "loss.labels=chance"];
    for (settings, bce) in [(&soft[..], false), (&kl[..], false), (&bce[..], true)] {
        let settings = [settings, &["precision.compute=fp32"]].concat();
        let planned = plan_to_evaluate(MODEL, 16, &settings);
        let (report, path) = dumped(&planned, &file(DATA));
        let expected = if bce {
            let (x, t) = (numbers(&path, "values").1, numbers(&file(DATA), "chance").1);
            let same = x.iter().zip(&t).filter(|(x, t)| (**x > 0.0) == (**t > 0.5)).count();
            same as f64 / x.len() as f64
        } else {
            let (x, t) = (numbers(&path, "logits").1, numbers(&file(DATA), "soft").1);
            let largest = |row: &[f64]| {
                let best = row.iter().copied().fold(f64::MIN, f64::max);
                row.iter().position(|x| *x == best).expect("a class") as f64
            };
            let labels: Vec<f64> = t.chunks(5).map(largest).collect();
            part(&places(&x, 5, &labels), 1)
        };
        is_close(&report, "accuracy", expected, &format!("{settings:?}"));
    }
}

#[test]
fn what_is_usual_is_reported_unless_asked_otherwise() {
    let names = |model: &str, batch, settings: &[&str]| -> Vec<String> {
        let path = format!("tests/models/{model}/model.onnx");
        let compiled = plan_to_evaluate(&path, batch, settings).compiled;
        let eval = compiled.evaluation.expect("an evaluation").plan.eval.expect("results");
        eval.metrics.into_iter().map(|m| m.name.to_string()).collect()
    };
    assert_eq!(names("mlp", 8, &[]), ["accuracy", "top_5"]);
    assert_eq!(names("mlp", 8, &["metrics.report=[]"]), [""; 0]);
    assert_eq!(
        names("mlp", 8, &["metrics.report=[\"top_2\", \"auto\"]"]),
        ["top_2", "accuracy", "top_5"]
    );
    assert_eq!(names("losses", 8, &[]), ["accuracy"]);
    let mse = ["loss.kind=mse", "loss.logits=values", "loss.labels=target"];
    assert_eq!(names("losses", 8, &mse), ["mean_absolute_error"]);
    assert_eq!(names("gpt2", 1, &[]), ["accuracy", "top_5", "perplexity"]);
}

#[test]
fn validations_report_metrics_and_every_loss() {
    let also = "loss.also=[\"0.5 * mse(values, target)\"]";
    let planned = plan_to_evaluate(MODEL, 4, &["sharding.ranks=2", also, "loss.weight=0.5"]);
    let metrics = planned.dir.path().join("metrics.jsonl");
    let validation = Some(ValidationOptions { data: file(DATA).into(), every: None });
    let options = RunOptions {
        steps: 3,
        data: file(DATA).into(),
        validation,
        metrics: Some(metrics.clone()),
        save: Some(planned.dir.path().join("trained.safetensors")),
        threads: Some(1),
        ..RunOptions::default()
    };
    let report = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    let evaluated = Options {
        plan: planned.path(),
        data: vec![file(DATA)],
        weights: options.save.into_iter().collect(),
        ..Options::default()
    };
    let evaluated = evaluate(&evaluated).unwrap_or_else(|e| panic!("{e}")).expect("rank 0");
    assert_eq!(report.validation_metrics, evaluated.metrics);
    let text = std::fs::read_to_string(metrics).expect("metrics");
    let line = text.lines().find(|l| l.contains("validation_loss")).expect("a validation");
    let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(line["validation_metrics"]["accuracy"], evaluated.metrics["accuracy"]);
    for loss in &evaluated.losses {
        assert_eq!(line["validation_losses"][&loss.name], loss.loss, "{}", loss.name);
    }
    assert_eq!(evaluated.losses.len(), 2);
}

#[test]
fn metrics_that_fit_nothing_are_refused() {
    let refused = |setting: &str| {
        let settings = [setting.to_string()];
        let config = frit::config::Config::parse("", "train.toml", &settings).expect("a list");
        let request = frit::compilation::Request {
            model: file(MODEL),
            binds: [("batch".to_string(), 4)].into(),
            evaluation: true,
            ..Default::default()
        };
        let report = frit::compilation::compile(&request, &config, &mut ()).expect_err("refused");
        report.diagnostics[0].code.clone()
    };
    assert_eq!(refused("metrics.report=[\"precision\"]"), "E051");
    assert_eq!(refused("metrics.report=[\"top_0\"]"), "E051");
    assert_eq!(refused("metrics.report=[\"mean_absolute_error\"]"), "E218");
    assert_eq!(refused("metrics.report=[\"top_6\"]"), "E217");
    assert_eq!(refused("metrics.report=[\"accuracy(nothing, labels)\"]"), "E211");
    // Of one class the probability is 1.
    for loss in ["loss.kind=\"cross_entropy\"", "loss.kind=\"kl\""] {
        let settings = [loss.to_string(), "loss.class_axis=1".into()];
        let config = frit::config::Config::parse("", "train.toml", &settings).expect("a loss");
        let dir = tempfile::tempdir().expect("a folder");
        let model = dir.path().join("model.json");
        let text = r#"{"frit_model": 1, "name": "m", "dims": {}, "inputs": [{"name": "x", "dtype": "f32", "shape": [4, 3]}],
            "params": [{"name": "w", "shape": [3, 1]}],
            "nodes": [{"op": "matmul", "inputs": ["x", "w"], "outputs": ["logits"]}], "outputs": ["logits"]}"#;
        std::fs::write(&model, text).expect("written");
        let request = frit::compilation::Request { model, ..Default::default() };
        let report = frit::compilation::compile(&request, &config, &mut ()).expect_err("refused");
        assert_eq!(report.diagnostics[0].code, "E217");
        assert!(report.to_string().contains("`logits` [4, 1] has one class"), "{report}");
    }
}

#[test]
fn no_examples_are_no_evaluation() {
    let planned = plan_to_evaluate(MODEL, 4, &["sharding.ranks=2"]);
    let data = first(&file(DATA), 0, planned.dir.path().join("empty.safetensors"));
    let outputs = planned.dir.path().join("outputs.safetensors");
    let options = Options {
        plan: planned.path(),
        data: vec![data.clone()],
        dump_outputs: Some(outputs.clone()),
        ..Options::default()
    };
    let error = evaluate(&options).expect_err("refused").to_string();
    assert!(error.contains("there are no examples"), "{error}");
    assert!(!outputs.exists());
    let validation = Some(ValidationOptions { data: data.into(), every: Some(1) });
    let options =
        RunOptions { steps: 1, data: file(DATA).into(), validation, ..RunOptions::default() };
    let error = run(&planned.path(), &options).expect_err("refused").to_string();
    assert!(error.contains("there are no examples"), "{error}");
}
