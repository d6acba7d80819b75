//! Vision models: vit (patch embedding, attention), resnet (training-mode batch norm, max and average pooling) and unet
//! (group norm, strided and transposed convolution, mean squared error) train to PyTorch's numbers, and no expensive
//! kernel is interpreted.

use crate::language::interpreted;
use crate::parity::{Distances, gradient_error, largest, reference, run};
use crate::support::{file, plan, train};
use frit_runtime::run::{RunOptions, run as run_plan};
use std::path::Path;

/// Name, global batch, ranks, settings.
const MODELS: [(&str, usize, &[usize], &str); 3] = [
    ("vit", 8, &[1, 2], "loss.kind=cross_entropy"),
    // Batch statistics are those of a rank, so only one rank is PyTorch's; see below for all of them.
    ("resnet", 8, &[1], "loss.kind=cross_entropy"),
    ("unet", 4, &[1, 2], "loss.kind=mse"),
];

#[test]
fn fp32_losses_and_gradients_are_pytorchs() {
    for (model, global, all_ranks, loss) in MODELS {
        for &ranks in all_ranks {
            let settings = &["precision.compute=fp32", loss];
            let (planned, losses) = run(model, "model.onnx", global, ranks, settings);
            let deviation = largest(&losses, &reference(model, "fp64"));
            assert!(deviation < 1e-5, "{model} on {ranks} ranks: losses deviate by {deviation}");
            let error = gradient_error(&planned, model);
            assert!(error < 1e-5, "{model} on {ranks} ranks: gradients deviate by {error}");
        }
    }
}

#[test]
fn bf16_stays_close_to_fp64() {
    let mut distances = Distances::default();
    for (model, global, all_ranks, loss) in MODELS {
        for &ranks in all_ranks {
            let settings = &["precision.compute=bf16", loss];
            let (_, losses) = run(model, "model.onnx", global, ranks, settings);
            distances.add(&format!("{model} on {ranks} ranks"), model, &losses);
        }
    }
    let settings = ["precision.compute=bf16", "loss.kind=cross_entropy", "model.batch_norm=sync"];
    let (_, losses) = run("resnet", "model.onnx", 8, 2, &settings);
    distances.add("resnet with synchronized statistics", "resnet", &losses);
    distances.assert_close();
}

#[test]
fn no_kernel_of_size_is_interpreted() {
    for (model, _, _, loss) in MODELS {
        for compute in ["precision.compute=fp32", "precision.compute=bf16"] {
            let planned = plan(&format!("tests/models/{model}/model.onnx"), 4, &[compute, loss]);
            assert_eq!(interpreted(&planned.compiled.plan), Vec::<String>::new(), "{model}");
        }
    }
}

/// The running statistics among some tensors whose names begin with `prefix`, one after the other by name.
fn running_statistics(path: &Path, prefix: &str) -> Vec<f64> {
    let bytes = std::fs::read(path).expect("the tensors");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut names = tensors.names();
    names.retain(|name| name.starts_with(prefix) && name.contains("running_"));
    names.sort_unstable();
    let views = names.into_iter().map(|name| tensors.tensor(name).expect("a statistic"));
    let bytes: Vec<u8> = views.flat_map(|view| view.data().to_vec()).collect();
    let (elements, _) = bytes.as_chunks::<4>();
    elements.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
}

#[test]
fn running_statistics_are_pytorchs() {
    let sync = "model.batch_norm=sync";
    for (reference, batch, settings) in [
        ("whole.", 8, &[][..]),
        ("whole.", 4, &["sharding.ranks=2", sync]),
        ("whole.", 2, &["sharding.ranks=4", "sharding.strategy=no_shard", sync]),
        ("accumulated.", 4, &["run.accumulation=2"]),
        ("by_rank.", 2, &["run.accumulation=2", "sharding.ranks=2", sync]),
    ] {
        let settings = [&["precision.compute=fp32"], settings].concat();
        let planned = plan("tests/models/resnet/model.onnx", batch, &settings);
        let weights = planned.dir.path().join("trained.safetensors");
        let options = RunOptions {
            steps: 3,
            data: file("tests/models/resnet/data.safetensors").into(),
            save: Some(weights.clone()),
            threads: Some(1),
            ..RunOptions::default()
        };
        run_plan(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
        let expected = file("tests/models/resnet/statistics.safetensors");
        let expected = running_statistics(&expected, reference);
        let deviation = largest(&running_statistics(&weights, ""), &expected);
        assert!(deviation < 1e-5, "{settings:?}: running statistics deviate by {deviation}");
    }
}

#[test]
fn synchronized_batch_norms_are_those_of_one_rank() {
    let sync = ["loss.kind=cross_entropy", "model.batch_norm=sync"];
    for (ranks, strategy) in [(2, "full_shard"), (2, "no_shard"), (4, "full_shard")] {
        let strategy = format!("sharding.strategy={strategy}");
        let settings = [&sync[..], &["precision.compute=fp32", &strategy]].concat();
        let (planned, losses) = run("resnet", "model.onnx", 8, ranks, &settings);
        // Where a mean over ranks rounds the other way, a unit of ReLU goes on or off some steps later, in PyTorch's fp32 as
        // well, and moves losses by 1e-6 and then by up to 1e-3. Statistics of a part of the batch would move the first.
        let exact = reference("resnet", "fp64");
        for (steps, bound) in [(6, 1e-5), (20, 1e-2)] {
            let deviation = largest(&losses[..steps], &exact);
            assert!(deviation < bound, "{ranks} ranks, {strategy}: {deviation} in {steps} steps");
        }
        let error = gradient_error(&planned, "resnet");
        assert!(error < 1e-5, "{ranks} ranks, {strategy}: gradients deviate by {error}");
        assert_eq!(interpreted(&planned.compiled.plan), Vec::<String>::new());
    }
}

#[test]
fn ranks_normalize_by_their_own_batches() {
    let settings = ["precision.compute=fp32", "sharding.ranks=2"];
    let planned = plan("tests/models/resnet/model.onnx", 4, &settings);
    let losses = train(&planned, "tests/models/resnet/data.safetensors", 3, false).losses;
    let exact = reference("resnet", "fp64");
    assert!(losses.iter().all(|x| x.is_finite()));
    assert!((losses[0] - exact[0]).abs() > 1e-4, "the statistics of half a batch differ");
}
