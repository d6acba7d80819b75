//! Validation between steps: its loss equals that of `frit eval` on the checkpoint of the same step, training is
//! unchanged, and the best checkpoint is kept.

use crate::support::{file, plan_to_evaluate};
use frit_runtime::checkpoint::{Checkpoint, CheckpointOptions};
use frit_runtime::eval::{self, evaluate};
use frit_runtime::run::{RunOptions, RunReport, run};
use frit_runtime::validation::ValidationOptions;
use std::path::Path;

const STEPS: usize = 4;

fn model_of(name: &str) -> String {
    format!("tests/models/{name}/model.onnx")
}

fn checkpoints(dir: &Path, keep: Option<usize>) -> Option<CheckpointOptions> {
    Some(CheckpointOptions { dir: dir.into(), every: Some(1), resume: true, keep })
}

fn train(plan: &Path, options: RunOptions) -> RunReport {
    run(plan, &RunOptions { threads: Some(1), ..options }).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn validation_is_the_evaluation_of_each_checkpoint() {
    for (model, batch, settings) in [
        ("mlp", 4, &["sharding.ranks=2", "optimizer.lr=5"][..]),
        ("mlp", 4, &["sharding.ranks=3", "sharding.strategy=no_shard", "optimizer.kind=sgd"]),
        ("gpt2", 1, &["sharding.ranks=2", "precision.compute=bf16", "run.accumulation=2"]),
        ("gpt2", 1, &["sharding.ranks=2", "sharding.strategy=shard_optimizer"]),
        (
            "gpt2",
            1,
            &["sharding.ranks=4", "sharding.strategy=hybrid_shard", "sharding.shard_group=2"],
        ),
        ("resnet", 8, &["model.batch_norm=train", "precision.compute=fp32"]),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let planned = plan_to_evaluate(&model_of(model), batch, settings);
        let data = file(&format!("tests/models/{model}/data.safetensors"));
        let options =
            RunOptions { steps: STEPS, data: data.clone().into(), ..RunOptions::default() };
        let without = train(&planned.path(), options.clone());
        let (all, few) = (dir.path().join("all"), dir.path().join("few"));
        let validation = Some(ValidationOptions { data: data.clone().into(), every: None });
        let metrics = dir.path().join("metrics.jsonl");
        let options = RunOptions { validation, ..options };
        let report = train(
            &planned.path(),
            RunOptions {
                checkpoint: checkpoints(&all, None),
                metrics: Some(metrics.clone()),
                ..options.clone()
            },
        );
        assert_eq!(report.losses, without.losses, "{model}: training is not changed");
        let steps: Vec<usize> = report.validation.iter().map(|(step, _)| *step).collect();
        assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>());
        for (step, loss) in &report.validation {
            let checkpoint = Some(all.join(format!("step-{step:08}")));
            let (plan, data) = (planned.path(), vec![data.clone()]);
            let options = eval::Options { plan, data, checkpoint, ..eval::Options::default() };
            let found = evaluate(&options).unwrap_or_else(|e| panic!("{e}")).expect("rank 0").loss;
            assert_eq!(found, Some(*loss), "{model} {settings:?} after {step} steps");
        }
        let (best, _) =
            *report.validation.iter().min_by(|a, b| a.1.total_cmp(&b.1)).expect("steps");
        let of = |dir: &Path| Checkpoint::open(&dir.join("best")).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(of(&all).index.step, best, "{model}");
        let text = std::fs::read_to_string(metrics).expect("metrics");
        assert_eq!(text.lines().filter(|l| l.contains("validation_loss")).count(), STEPS);
        // Only the last and the best are kept, when the run is interrupted too.
        for steps in [2, STEPS] {
            let checkpoint = checkpoints(&few, Some(1));
            train(&planned.path(), RunOptions { steps, checkpoint, ..options.clone() });
        }
        assert_eq!(of(&few).index.step, best, "{model}");
        let names = std::fs::read_dir(&few).expect("checkpoints").flatten().map(|e| e.file_name());
        let kept = names.filter(|n| n.to_string_lossy().starts_with("step-")).count();
        assert_eq!(kept, if best == STEPS { 1 } else { 2 }, "{model}");
    }
}

#[test]
fn the_plan_may_name_the_examples() {
    let data = file("tests/models/mlp/data.safetensors");
    let setting = format!("data.validation=\"{}\"", data.display());
    let planned = plan_to_evaluate(&model_of("mlp"), 4, &[&setting]);
    let options = RunOptions { steps: 3, data: data.clone().into(), ..RunOptions::default() };
    let report = train(&planned.path(), options.clone());
    assert_eq!(report.validation.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3]);
    let every = Some(ValidationOptions { data: data.into(), every: Some(2) });
    let report = train(&planned.path(), RunOptions { validation: every, ..options });
    assert_eq!(report.validation.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn examples_that_do_not_fit_are_refused_before_the_first_step() {
    let data = file("tests/models/mlp/data.safetensors");
    let planned = plan_to_evaluate(&model_of("mlp"), 4, &[]);
    let other = file("tests/models/gpt2/data.safetensors");
    let validation = Some(ValidationOptions { data: other.clone().into(), every: None });
    let options = RunOptions { steps: 1, data: data.into(), validation, ..RunOptions::default() };
    let message = run(&planned.path(), &options).expect_err("refused").to_string();
    assert!(message.contains(other.to_str().expect("UTF-8")), "{message}");
}
