//! Runs that start from the parameters of a file.

use crate::support::{Planned, file, plan, write_f32};
use frit_ir::{DType, Tensor, TensorType};
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::run::{RunOptions, RunReport, run};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

const DATA: &str = "tests/models/mlp/data.safetensors";

fn planned(settings: &[&str]) -> Planned {
    plan("tests/models/mlp/model.onnx", 4, settings)
}

fn options(steps: usize, weights: Option<PathBuf>, save: &Path) -> RunOptions {
    RunOptions {
        steps,
        data: file(DATA).into(),
        weights: weights.into_iter().collect(),
        save: Some(save.into()),
        threads: Some(1),
        ..RunOptions::default()
    }
}

fn train(planned: &Planned, options: &RunOptions) -> RunReport {
    run(&planned.path(), options).unwrap_or_else(|e| panic!("{e}"))
}

/// Name, shape and elements of every tensor of a file of f32.
fn tensors(path: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(path).expect("tensors");
    let file = SafeTensors::deserialize(&bytes).expect("tensors");
    let values = |data: &[u8]| {
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>()
    };
    let mut all: Vec<_> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.shape().to_vec(), values(view.data())))
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// The same tensors in another float type.
fn narrowed(path: &Path, to: &Path, dtype: DType, stored: Dtype) {
    let all = tensors(path);
    let bytes = all.iter().map(|(_, shape, values)| {
        let values = values.iter().map(|x| f64::from(*x)).collect();
        Tensor::floats(dtype, shape.clone(), values).to_bytes()
    });
    let bytes: Vec<Vec<u8>> = bytes.collect();
    let view =
        |shape: &Vec<usize>, bytes| TensorView::new(stored, shape.clone(), bytes).expect("fits");
    let views = all.iter().zip(&bytes).map(|((name, shape, _), b)| (name, view(shape, b)));
    safetensors::serialize_to_file(views, None, to).expect("written");
}

#[test]
fn every_strategy_starts_from_the_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    train(&planned(&["optimizer.lr=0.1"]), &options(2, None, &at("trained")));
    let expected = tensors(&at("trained"));
    for settings in [
        &[][..],
        &["sharding.ranks=2", "precision.compute=bf16"],
        &["sharding.ranks=3", "sharding.strategy=no_shard", "run.accumulation=2"],
        &["sharding.ranks=4", "sharding.strategy=hybrid_shard", "sharding.shard_group=2"],
        &["sharding.ranks=2", "memory.offload=parameters", "optimizer.ema=0.9"],
    ] {
        let plan = planned(settings);
        train(&plan, &options(0, None, &at("plan")));
        assert!(tensors(&at("plan")) != expected, "{settings:?}");
        train(&plan, &options(0, Some(at("trained")), &at("started")));
        assert!(tensors(&at("started")) == expected, "{settings:?}");
    }
    for (name, dtype, stored) in
        [("f16", DType::F16, Dtype::F16), ("bf16", DType::BF16, Dtype::BF16)]
    {
        narrowed(&at("trained"), &at(name), dtype, stored);
        train(&planned(&["sharding.ranks=2"]), &options(0, Some(at(name)), &at("started")));
        for ((name, shape, wide), (_, _, found)) in expected.iter().zip(tensors(&at("started"))) {
            let ty = TensorType::new(dtype, shape.clone());
            let wide = wide.iter().map(|x| f64::from(*x)).collect();
            let rounded = Tensor::floats(ty.dtype, ty.shape, wide).to_f64s();
            assert!(rounded.iter().zip(&found).all(|(a, b)| *a == f64::from(*b)), "{name}");
        }
    }
}

#[test]
fn a_file_that_does_not_fit_is_one_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let plan = planned(&[]);
    train(&plan, &options(0, None, &at("plan")));
    let mut all = tensors(&at("plan"));
    let (missing, other) = (all.remove(0).0, all[0].0.clone());
    all[0].1.push(1);
    all.push(("stray".into(), vec![1], vec![0.0]));
    let borrowed: Vec<_> = all.iter().map(|(n, s, v)| (n.as_str(), s.clone(), v.clone())).collect();
    write_f32(&at("wrong"), &borrowed);
    let error = run(&plan.path(), &options(1, Some(at("wrong")), &at("saved")));
    let text = error.expect_err("it does not fit").to_string();
    for part in [
        format!("1 missing: `{missing}`"),
        format!("1 of another type: `{other}`, F32"),
        "1 unknown to the plan: `stray`".into(),
    ] {
        assert!(text.contains(&part), "{part} in {text}");
    }
    assert!(!at("saved").exists());
}

#[test]
fn a_checkpoint_comes_before_the_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let plan = planned(&["sharding.ranks=2"]);
    train(&planned(&["optimizer.lr=0.1"]), &options(2, None, &at("trained")));
    let go = |steps, weights| {
        let checkpoint =
            CheckpointOptions { dir: at("checkpoints"), every: None, resume: true, keep: None };
        let checkpoint = Some(checkpoint);
        train(&plan, &RunOptions { checkpoint, ..options(steps, weights, &at("saved")) })
    };
    let expected = train(&plan, &options(4, Some(at("trained")), &at("whole")));
    go(2, Some(at("trained")));
    let losses = go(4, Some(at("nothing is there"))).losses;
    assert_eq!(losses, expected.losses[2..]);
    assert!(tensors(&at("saved")) == tensors(&at("whole")));
}
