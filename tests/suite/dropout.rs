//! Dropout in training mode: masks are determined by the seed, differ by step and rank, and are equal in the backward
//! pass.

use crate::support::{plan, train};

const DATA: &str = "tests/models/dropout/data.safetensors";

/// Losses with a learning rate of zero: every step sees the same examples and parameters.
fn losses(model: &str, ranks: usize, seed: usize, interpret: bool) -> Vec<f64> {
    let (ranks_key, seed_key) = (format!("sharding.ranks={ranks}"), format!("run.seed={seed}"));
    let settings = ["precision.compute=fp32", "optimizer.lr=0", &ranks_key, &seed_key];
    let planned = plan(&format!("tests/models/dropout/{model}"), 8, &settings);
    train(&planned, DATA, 4, interpret).losses
}

#[test]
fn masks_follow_the_seed_and_change_with_every_step() {
    for model in ["model.onnx", "model_dynamo.onnx"] {
        let first = losses(model, 1, 1, false);
        assert_eq!(first, losses(model, 1, 1, false), "{model}");
        assert!(first.windows(2).all(|w| w[0] != w[1]), "{model}: {first:?}");
        assert!(first.iter().zip(losses(model, 1, 2, false)).all(|(a, b)| *a != b), "{model}");
        // The interpreter draws the same masks as the kernel.
        for (a, b) in first.iter().zip(losses(model, 1, 1, true)) {
            assert!((a - b).abs() < 1e-6, "{model}: {a} and {b}");
        }
    }
}

#[test]
fn ranks_draw_different_masks() {
    // Each rank has the same examples: with the same masks two ranks would have the loss of one.
    let (one, two) = (losses("model.onnx", 1, 1, false), losses("model.onnx", 2, 1, false));
    assert!(one.iter().zip(&two).all(|(a, b)| a != b), "{one:?} and {two:?}");
    for (a, b) in two.iter().zip(losses("model.onnx", 2, 1, true)) {
        assert!((a - b).abs() < 1e-6, "{a} and {b}");
    }
}

#[test]
fn training_with_dropout_learns() {
    let settings = ["precision.compute=fp32", "optimizer.lr=0.02", "run.accumulation=2"];
    let planned = plan("tests/models/dropout/model.onnx", 8, &settings);
    let losses = train(&planned, DATA, 60, false).losses;
    assert!(losses[59] < 0.5 * losses[0], "{} to {}", losses[0], losses[59]);
}
