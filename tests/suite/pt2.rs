//! Archives of torch.export train to PyTorch's numbers, under every other option as the ONNX model that they are exported as.

use crate::pairs::rows;
use crate::parity::{Distances, gradient_error, largest, reference, run};
use crate::support::{Planned, file, plan, plan_to_evaluate, plan_to_evaluate_at, resumed_losses};
use clap::Parser;
use frit::commands::{Cli, execute};
use frit::export::{self, Options, Trained};
use frit_runtime::run::{self, RunOptions};
use std::path::{Path, PathBuf};

/// Models with what they are compiled with, and whether their batch is normalized.
const MODELS: [(&str, &[&str], bool); 9] = [
    ("mlp/model.pt2", &[], true),
    ("mlp/model_decomposed.pt2", &[], true),
    ("resnet/model.pt2", &[], true),
    ("resnet/model_decomposed.pt2", &[], true),
    ("gpt/model.pt2", &[], false),
    ("gpt/model_decomposed.pt2", &[], false),
    ("llama/model.pt2", &[], false),
    ("encoder/model.pt2", &["loss.logits=logits"], false),
    ("encoder/model_decomposed.pt2", &["loss.logits=logits"], false),
];

fn folder(path: &str) -> (String, &str) {
    let (name, archive) = path.split_once('/').expect("a file in a folder");
    (format!("pt2/{name}"), archive)
}

#[test]
fn losses_and_gradients_are_pytorchs() {
    for (path, own, normalizes) in MODELS {
        let (model, archive) = folder(path);
        for ranks in [1, 2] {
            let mut settings = vec!["precision.compute=fp32"];
            settings.extend(own);
            if normalizes && ranks > 1 {
                settings.push("model.batch_norm=sync");
            }
            let (planned, losses) = run(&model, archive, 8, ranks, &settings);
            let deviation = largest(&losses, &reference(&model, "fp64"));
            assert!(deviation < 1e-5, "{path} on {ranks} ranks: losses deviate by {deviation}");
            let error = gradient_error(&planned, &model);
            assert!(error < 1e-5, "{path} on {ranks} ranks: gradients deviate by {error}");
        }
    }
}

#[test]
fn low_precision_stays_close() {
    let mut distances = Distances::default();
    for path in ["mlp/model.pt2", "gpt/model.pt2", "llama/model.pt2"] {
        let (model, archive) = folder(path);
        let (_, losses) = run(&model, archive, 8, 1, &["precision.compute=bf16"]);
        distances.add(path, &model, &losses);
    }
    distances.assert_close();
}

fn floats(path: &Path) -> Vec<(String, Vec<f32>)> {
    let bytes = std::fs::read(path).expect("tensors");
    let all = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let read =
        |data: &[u8]| data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    all.iter().map(|(name, view)| (name.to_string(), read(view.data()))).collect()
}

#[test]
fn running_statistics_and_parameters_end_as_pytorchs() {
    for path in ["mlp/model.pt2", "mlp/model_decomposed.pt2", "resnet/model.pt2", "gpt/model.pt2"] {
        let (model, archive) = folder(path);
        let planned =
            plan(&format!("tests/models/{model}/{archive}"), 8, &["precision.compute=fp32"]);
        let saved = planned.dir.path().join("saved.safetensors");
        let data = file(&format!("tests/models/{model}/data.safetensors")).into();
        let options = RunOptions {
            steps: 20,
            data,
            save: Some(saved.clone()),
            threads: Some(1),
            ..RunOptions::default()
        };
        run::run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
        let found = floats(&saved);
        let mut compared = 0;
        for (name, expected) in floats(&file(&format!("tests/models/{model}/state.safetensors"))) {
            // Constants of the module are constants of the plan.
            let Some((_, values)) = found.iter().find(|(n, _)| *n == name) else { continue };
            compared += 1;
            let worst = values
                .iter()
                .zip(&expected)
                .map(|(a, b)| (a - b).abs() / b.abs().max(1.0))
                .fold(0.0, f32::max);
            // Adam moves an element with a gradient near zero by its sign.
            assert!(worst < 2e-3, "{path}: {name} deviates by {worst}");
            if name.contains("running") {
                assert!(worst < 1e-4, "{path}: {name} deviates by {worst}");
            }
        }
        assert!(compared >= 11, "{path}: {compared} tensors");
        assert_eq!(model.ends_with("gpt"), found.iter().all(|(n, _)| !n.contains("running_mean")));
    }
}

/// The ONNX model of a plan, as it was before training.
fn exported(planned: &Planned) -> PathBuf {
    let path = planned.dir.path().join("exported.onnx");
    let weights = planned.path().join("weights.safetensors");
    let trained = Trained::of_plan(&planned.path(), &weights).unwrap_or_else(|e| panic!("{e}"));
    let options = Options { training: true, ..Options::default() };
    export::onnx(&trained, &options, &path).unwrap_or_else(|e| panic!("{e}"));
    path
}

const FACTORS: [&[&str]; 7] = [
    &[
        "tests/models/pt2/mlp/model.pt2",
        "tests/models/pt2/gpt/model.pt2",
        "tests/models/pt2/encoder/model.pt2",
    ],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3"],
    &[
        "sharding.strategy=full_shard",
        "sharding.strategy=shard_optimizer",
        "sharding.strategy=no_shard",
    ],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer"],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
];

#[test]
fn losses_are_those_of_the_exported_model_whatever_archives_are_crossed_with() {
    let rows = rows(&FACTORS, |_| true);
    assert!((9..=24).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let mut words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let model = words.remove(0);
        if model.contains("encoder") {
            words.push("loss.logits=logits");
        }
        let archive = plan_to_evaluate(model, 2, &words);
        let onnx = plan_to_evaluate_at(&exported(&archive), 2, &words);
        let data = file(model).with_file_name("data.safetensors");
        let options = || RunOptions {
            steps: 3,
            data: data.clone().into(),
            threads: Some(1),
            ..RunOptions::default()
        };
        let (found, expected) =
            (resumed_losses(&archive, options()), resumed_losses(&onnx, options()));
        assert_eq!(found.len(), 6, "{model} {words:?}");
        assert_eq!(found, expected, "{model} {words:?}");
    }
}

fn frit(args: &[&str]) -> Result<String, String> {
    let cli = Cli::try_parse_from([&["frit"], args].concat()).map_err(|e| e.to_string())?;
    execute(&cli).map_err(|report| report.to_string())
}

#[test]
fn commands_take_archives() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name).to_str().expect("text").to_string();
    let model = file("tests/models/pt2/resnet/model.pt2");
    let model = model.to_str().expect("text");
    let (config, plan, weights) = (at("train.toml"), at("plan"), at("plan/weights.safetensors"));
    let said = frit(&["init", model, "-o", &config]).unwrap_or_else(|e| panic!("{e}"));
    assert!(said.contains("--bind batch="), "{said}");
    let compile = ["compile", model, "--config", &config, "--bind", "batch=2", "-o", &plan];
    frit(&compile).unwrap_or_else(|e| panic!("{e}"));
    let units = frit(&["inspect", &plan, "--view", "units"]).unwrap_or_else(|e| panic!("{e}"));
    assert!(units.contains("body.1.c2.weight") && units.contains("stem.1.running_mean"), "{units}");
    let onnx = at("trained.onnx");
    frit(&["export", &plan, "--weights", &weights, "-o", &onnx]).unwrap_or_else(|e| panic!("{e}"));
    assert!(std::fs::metadata(&onnx).expect("a file").len() > 10_000);
    let unbound = frit(&["compile", model, "-o", &at("other")]).expect_err("the batch has no size");
    assert!(unbound.contains("--bind batch=N"), "{unbound}");
}

#[test]
fn a_size_that_the_export_fixed_is_said() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = dir.path().join("plan");
    let model = file("tests/models/pt2/gpt/model.pt2");
    let args = [
        "compile",
        model.to_str().expect("text"),
        "--bind",
        "s17=8",
        "--bind",
        "batch=2",
        "-o",
        plan.to_str().expect("text"),
    ];
    let error = frit(&args).expect_err("an unknown dimension");
    assert!(error.contains("`s17`") && error.contains("`batch`"), "{error}");
}
