//! Random numbers: a variational autoencoder and a step of diffusion train as in PyTorch with the same random numbers,
//! which depend only on the seed, the node and the example.

use crate::support::{Planned, file, plan, plan_to_evaluate, train};
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::eval::{self, evaluate};
use frit_runtime::run::{RunOptions, RunReport, run};
use frit_runtime::validation::ValidationOptions;
use std::path::Path;

const MODELS: [&str; 2] = ["vae", "diffusion"];
const FILES: [&str; 2] = ["model.onnx", "model_torchscript.onnx"];
const OWN_LOSS: [&str; 2] = ["loss.kind=output", "loss.logits=loss"];

fn planned(model: &str, batch: usize, settings: &[&str]) -> Planned {
    let path = format!("tests/models/{model}/model.onnx");
    plan(&path, batch, &[&OWN_LOSS, settings].concat())
}

fn data(model: &str) -> String {
    format!("tests/models/{model}/data.safetensors")
}

fn losses(model: &str, batch: usize, settings: &[&str], steps: usize) -> Vec<f64> {
    train(&planned(model, batch, settings), &data(model), steps, false).losses
}

fn assert_near(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() <= tolerance * b.abs().max(1e-3), "{what}: {a}, not {b}");
    }
}

/// The tensors of a file, in f64.
fn tensors(path: &Path) -> Vec<(String, Vec<f64>)> {
    let bytes = std::fs::read(path).expect("tensors");
    let all = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
    let values = |data: &[u8]| {
        data.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
    };
    all.tensors().into_iter().map(|(name, view)| (name, values(view.data()))).collect()
}

#[test]
fn losses_and_gradients_are_pytorchs_for_the_same_draws() {
    for model in MODELS {
        let reference = tensors(&file(&format!("tests/models/{model}/reference.safetensors")));
        for (name, interpret) in [(FILES[0], false), (FILES[0], true), (FILES[1], false)] {
            let settings = [&OWN_LOSS[..], &["precision.compute=fp32", "optimizer.lr=0"]].concat();
            let planned = plan(&format!("tests/models/{model}/{name}"), 8, &settings);
            let found = train(&planned, &data(model), 3, interpret).losses;
            let grads = tensors(&planned.dir.path().join("grads.safetensors"));
            for (key, expected) in &reference {
                let what = format!("{model} {name} {key}");
                let Some(param) = key.strip_prefix("grad/") else {
                    assert_near(&found, expected, 1e-5, &what);
                    continue;
                };
                let grad = grads.iter().find(|(n, _)| n == param);
                let (_, grad) = grad.unwrap_or_else(|| panic!("{what}: none"));
                let most = expected.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                for (a, b) in grad.iter().zip(expected) {
                    assert!((a - b).abs() <= 1e-5 * most, "{what}: {a}, not {b}");
                }
            }
        }
    }
}

#[test]
fn an_example_has_the_same_draws_however_the_global_batch_is_made() {
    for model in MODELS {
        let settings = |more: &[&'static str]| {
            [&["precision.compute=fp32", "optimizer.lr=0.01", "optimizer.kind=sgd"], more].concat()
        };
        let expected = losses(model, 16, &settings(&[]), 6);
        for (batch, more) in [
            (8, &["sharding.ranks=2"][..]),
            (8, &["run.accumulation=2"]),
            (4, &["sharding.ranks=2", "run.accumulation=2"]),
            (4, &["sharding.ranks=4", "sharding.strategy=shard_optimizer"]),
            (4, &["sharding.ranks=4", "sharding.strategy=hybrid_shard", "sharding.shard_group=2"]),
            (16, &["memory.recompute=selective"]),
        ] {
            let found = losses(model, batch, &settings(more), 6);
            assert_near(&found, &expected, 1e-5, &format!("{model} {more:?}"));
        }
        let other = losses(model, 16, &settings(&["run.seed=5"]), 6);
        assert!(expected.iter().zip(&other).all(|(a, b)| a != b), "{model}: another seed");
    }
}

#[test]
fn models_that_draw_learn_with_every_option() {
    for model in MODELS {
        let steps = if model == "vae" { 60 } else { 200 };
        for more in [
            &["precision.compute=fp32"][..],
            &["precision.compute=bf16", "sharding.ranks=2"],
            &["precision.compute=fp16", "sharding.ranks=2", "sharding.strategy=no_shard"],
            &["precision.compute=bf16", "run.accumulation=2", "memory.recompute=selective"],
            &["precision.compute=fp32", "sharding.ranks=2", "memory.offload=optimizer"],
        ] {
            let settings = [&["optimizer.lr=0.01"], more].concat();
            let losses = losses(model, 8, &settings, steps);
            let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
            let (first, last) = (mean(&losses[..5]), mean(&losses[steps - 20..]));
            assert!(last < 0.8 * first, "{model} {more:?}: {first} to {last}");
        }
    }
}

#[test]
fn recomputation_and_offload_change_no_bit() {
    for model in MODELS {
        for precision in ["precision.compute=fp32", "precision.compute=bf16"] {
            let ranks = [precision, "sharding.ranks=2", "run.accumulation=2"];
            let expected = losses(model, 4, &ranks, 5);
            for more in ["memory.offload=optimizer", "memory.offload=parameters"] {
                assert_eq!(
                    losses(model, 4, &[&ranks[..], &[more]].concat(), 5),
                    expected,
                    "{more}"
                );
            }
            if precision == "precision.compute=fp32" {
                let more = "memory.recompute=selective";
                assert_eq!(
                    losses(model, 4, &[&ranks[..], &[more]].concat(), 5),
                    expected,
                    "{more}"
                );
            }
        }
    }
}

fn run_to(planned: &Planned, model: &str, steps: usize, dir: &Path) -> RunReport {
    let checkpoint =
        CheckpointOptions { dir: dir.into(), every: Some(1), resume: true, keep: None };
    let options = RunOptions {
        steps,
        data: file(&data(model)).into(),
        checkpoint: Some(checkpoint),
        threads: Some(1),
        ..RunOptions::default()
    };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_resumed_run_goes_on_with_the_same_draws() {
    for model in MODELS {
        let settings = ["precision.compute=fp32", "sharding.ranks=2", "run.accumulation=2"];
        let two = planned(model, 4, &settings);
        let expected = train(&two, &data(model), 6, false).losses;
        let dir = tempfile::tempdir().expect("a directory");
        run_to(&two, model, 3, dir.path());
        let (same, other) = (dir.path().join("same"), dir.path().join("other"));
        for to in [&same, &other] {
            copy(dir.path(), to);
        }
        assert_eq!(run_to(&two, model, 6, &same).losses, expected[3..], "{model}");
        // One rank goes on where two were.
        let one = planned(model, 8, &["precision.compute=fp32", "run.accumulation=2"]);
        let found = run_to(&one, model, 6, &other).losses;
        assert_near(&found, &expected[3..], 1e-5, model);
    }
}

/// Copies a directory of checkpoints.
fn copy(from: &Path, to: &Path) {
    let entries: Vec<_> = std::fs::read_dir(from).expect("a directory").flatten().collect();
    std::fs::create_dir_all(to).expect("a directory");
    for entry in entries {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if entry.file_name() == "same" || entry.file_name() == "other" {
            continue;
        }
        match path.is_dir() {
            true => copy(&path, &to),
            false => drop(std::fs::copy(path, to).expect("copied")),
        }
    }
}

#[test]
fn an_evaluation_draws_the_same_numbers_whenever_it_is_made() {
    for model in MODELS {
        let path = format!("tests/models/{model}/model.onnx");
        let evaluated = |batch, more: &[&str], interpret| {
            let settings = [&OWN_LOSS[..], &["precision.compute=fp32"], more].concat();
            let planned = plan_to_evaluate(&path, batch, &settings);
            let options = eval::Options {
                plan: planned.path(),
                data: vec![file(&data(model))],
                interpret,
                ..eval::Options::default()
            };
            evaluate(&options)
                .unwrap_or_else(|e| panic!("{e}"))
                .expect("rank 0")
                .loss
                .expect("a loss")
        };
        let expected = evaluated(16, &[], false);
        assert_eq!(expected, evaluated(16, &[], false));
        for (batch, more, interpret) in [
            (8, &["sharding.ranks=2"][..], false),
            (8, &["run.accumulation=4"], false),
            (16, &[], true),
        ] {
            let found = evaluated(batch, more, interpret);
            assert_near(&[found], &[expected], 1e-5, &format!("{model} {more:?}"));
        }
        assert_ne!(expected, evaluated(16, &["run.seed=5"], false), "{model}: another seed");
        // Training's draws are others: with parameters that stay, its losses have another mean.
        let settings = ["precision.compute=fp32", "optimizer.lr=0"];
        let losses = losses(model, 16, &settings, 4);
        let mean = losses.iter().sum::<f64>() / 4.0;
        assert!((mean - expected).abs() > 1e-6 * expected, "{model}: {mean} and {expected}");
    }
}

#[test]
fn validation_does_not_disturb_what_training_draws() {
    for model in MODELS {
        let path = format!("tests/models/{model}/model.onnx");
        let ranks = ["precision.compute=fp32", "sharding.ranks=2"];
        let planned = plan_to_evaluate(&path, 8, &[&OWN_LOSS[..], &ranks].concat());
        let expected = train(&planned, &data(model), 4, false).losses;
        let validation = ValidationOptions { data: file(&data(model)).into(), every: Some(1) };
        let options = RunOptions {
            steps: 4,
            data: file(&data(model)).into(),
            validation: Some(validation),
            checkpoint: Some(CheckpointOptions {
                dir: planned.dir.path().join("checkpoints"),
                every: Some(1),
                resume: false,
                keep: None,
            }),
            threads: Some(1),
            ..RunOptions::default()
        };
        let report = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(report.losses, expected, "{model}");
        assert_eq!(report.validation.len(), 4, "{model}");
        assert!(report.validation.iter().all(|(_, loss)| loss.is_finite()));
    }
}
