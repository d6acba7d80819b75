//! The test models train to PyTorch's numbers (`tests/models/*/reference.json`).

use crate::support::{Planned, file, plan, train};
use serde_json::Value;

/// PyTorch's losses of a model in a mode: fp64, fp32 or bf16.
pub(crate) fn reference(model: &str, mode: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(file(&format!("tests/models/{model}/reference.json")));
    let json: Value = serde_json::from_str(&text.expect("the reference")).expect("JSON");
    let losses = json[mode]["loss"].as_array().expect("losses");
    losses.iter().map(|x| x.as_f64().expect("a number")).collect()
}

/// Compiles and trains a model for 20 steps of this global batch.
pub(crate) fn run(
    model: &str,
    onnx: &str,
    global: usize,
    ranks: usize,
    more: &[&str],
) -> (Planned, Vec<f64>) {
    let ranks_key = format!("sharding.ranks={ranks}");
    let settings: Vec<&str> = [&[ranks_key.as_str()], more].concat();
    let planned = plan(&format!("tests/models/{model}/{onnx}"), global / ranks, &settings);
    let report = train(&planned, &format!("tests/models/{model}/data.safetensors"), 20, false);
    assert_eq!(report.losses.len(), 20);
    (planned, report.losses)
}

/// The largest difference.
pub(crate) fn largest(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
}

/// The mean difference.
pub(crate) fn mean(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).sum::<f64>() / a.len() as f64
}

/// How many times as far from fp64 as PyTorch's bf16 autocast runs are, by the mean difference of their losses.
///
/// The losses of one run deviate by roundings that mostly cancel, and another order of sums (ranks, micro-batches, vectors of
/// another length) draws them anew: runs of the small GPT-2 in PyTorch are 4.2e-5 to 6.2e-5 away. So runs are judged together,
/// and one alone by a loose bound.
#[derive(Default)]
pub(crate) struct Distances(Vec<(String, f64)>);

impl Distances {
    /// Adds the losses of a run of a model.
    pub(crate) fn add(&mut self, run: &str, model: &str, losses: &[f64]) {
        let exact = reference(model, "fp64");
        let times = mean(losses, &exact) / mean(&reference(model, "bf16"), &exact);
        self.0.push((run.into(), times));
    }

    /// Runs are on average at most 1.3 times, and each less than twice, as far as PyTorch's one.
    pub(crate) fn assert_close(&self) {
        let together =
            self.0.iter().map(|(_, times)| times.ln()).sum::<f64>() / self.0.len() as f64;
        assert!(together.exp() < 1.3, "{} times as far as PyTorch: {:?}", together.exp(), self.0);
        for (run, times) in &self.0 {
            assert!(*times < 2.0, "{run}: {times} times as far as PyTorch: {:?}", self.0);
        }
    }
}

/// Largest norm of a gradient's difference over the norm of PyTorch's. Some gradients are zero but for
/// rounding (a bias of the keys moves no attention weight); they are compared absolutely.
pub(crate) fn gradient_error(planned: &Planned, model: &str) -> f64 {
    let read = |path: &std::path::Path| std::fs::read(path).expect("gradients");
    let (ours, theirs) = (
        read(&planned.dir.path().join("grads.safetensors")),
        read(&file(&format!("tests/models/{model}/grads.safetensors"))),
    );
    let ours = safetensors::SafeTensors::deserialize(&ours).expect("safetensors");
    let theirs = safetensors::SafeTensors::deserialize(&theirs).expect("safetensors");
    let floats = |bytes: &[u8]| -> Vec<f64> {
        let (chunks, _) = bytes.as_chunks::<4>();
        chunks.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
    };
    let mut worst: f64 = 0.0;
    for (name, view) in theirs.iter() {
        let expected = floats(view.data());
        let found = floats(ours.tensor(name).expect("a gradient of every parameter").data());
        assert_eq!(expected.len(), found.len(), "{name}");
        let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|x| x * x).sum::<f64>().sqrt();
        let difference = norm(&mut expected.iter().zip(&found).map(|(a, b)| a - b));
        worst = worst.max(difference / norm(&mut expected.iter().copied()).max(1e-6));
    }
    worst
}

#[test]
fn fp32_losses_and_gradients_are_pytorchs_on_1_2_and_4_ranks() {
    for (model, global) in [("mlp", 16), ("gpt2", 8)] {
        for ranks in [1, 2, 4] {
            let fp32 = &["precision.compute=fp32"];
            let (planned, losses) = run(model, "model.onnx", global, ranks, fp32);
            let deviation = largest(&losses, &reference(model, "fp64"));
            assert!(deviation < 1e-5, "{model} on {ranks} ranks: losses deviate by {deviation}");
            let error = gradient_error(&planned, model);
            assert!(error < 1e-5, "{model} on {ranks} ranks: gradients deviate by {error}");
        }
    }
}

#[test]
fn every_export_of_gpt2_trains_to_the_same_losses() {
    let exact = reference("gpt2", "fp64");
    for onnx in
        ["model_opset21.onnx", "model_torchscript.onnx", "model_sdpa.onnx", "model_optimized.onnx"]
    {
        let (_, losses) = run("gpt2", onnx, 8, 2, &["precision.compute=fp32"]);
        let deviation = largest(&losses, &exact);
        assert!(deviation < 1e-5, "{onnx}: losses deviate by {deviation}");
    }
    let (_, losses) = run("mlp", "model_dynamo.onnx", 16, 2, &["precision.compute=fp32"]);
    assert!(largest(&losses, &reference("mlp", "fp64")) < 1e-5);
}

#[test]
fn other_strategies_and_accumulation_give_the_same_losses() {
    let exact = reference("gpt2", "fp64");
    for settings in [
        &["precision.compute=fp32", "sharding.strategy=no_shard"][..],
        &["precision.compute=fp32", "sharding.wrap=none"],
        &["precision.compute=fp32", "sharding.wrap=size=20000"],
        &[
            "precision.compute=fp32",
            "sharding.backward_prefetch=none",
            "sharding.forward_prefetch=0",
        ],
        &["precision.compute=fp32", "sharding.backward_prefetch=post"],
    ] {
        let (_, losses) = run("gpt2", "model.onnx", 8, 2, settings);
        let deviation = largest(&losses, &exact);
        assert!(deviation < 1e-5, "{settings:?}: losses deviate by {deviation}");
    }
    for ranks in [1, 2] {
        let settings = ["precision.compute=fp32", "run.accumulation=2"];
        let (_, losses) = run("gpt2", "model.onnx", 4, ranks, &settings);
        assert!(largest(&losses, &exact) < 1e-5, "accumulation on {ranks} ranks");
    }
}

#[test]
fn low_precision_stays_close_to_fp64() {
    let mut distances = Distances::default();
    for (model, global) in [("mlp", 16), ("gpt2", 8)] {
        for ranks in [1, 2, 4] {
            let (_, losses) = run(model, "model.onnx", global, ranks, &["precision.compute=bf16"]);
            distances.add(&format!("{model} on {ranks} ranks"), model, &losses);
        }
    }
    distances.assert_close();
    // f16 with dynamic loss scaling is closer than bf16: it has three more bits.
    let (_, losses) = run("gpt2", "model.onnx", 8, 2, &["precision.compute=fp16"]);
    let exact = reference("gpt2", "fp64");
    assert!(mean(&losses, &exact) < mean(&reference("gpt2", "bf16"), &exact));
}
