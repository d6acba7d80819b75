//! Vision models: vit (patch embedding, attention), resnet (training-mode batch norm, max and average
//! pooling) and unet (group norm, strided and transposed convolution, mean squared error) train to
//! PyTorch's numbers, and nothing hot is left to the interpreter.

use crate::language::interpreted;
use crate::parity::{gradient_error, largest, mean, reference, run};
use crate::support::{file, plan, train};

/// Name, global batch, ranks, settings.
const MODELS: [(&str, usize, &[usize], &str); 3] = [
    ("vit", 8, &[1, 2], "loss.kind=cross_entropy"),
    // Batch statistics are those of a rank, so only one rank is PyTorch's.
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
    for (model, global, all_ranks, loss) in MODELS {
        for &ranks in all_ranks {
            let settings = &["precision.compute=bf16", loss];
            let (_, losses) = run(model, "model.onnx", global, ranks, settings);
            let exact = reference(model, "fp64");
            let (ours, theirs) = (mean(&losses, &exact), mean(&reference(model, "bf16"), &exact));
            assert!(ours <= 1.5 * theirs, "{model} on {ranks} ranks: {ours} against {theirs}");
        }
    }
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

#[test]
fn running_statistics_need_single_micro_steps() {
    let mut config = vec!["run.accumulation=2".to_string()];
    config.push("precision.compute=fp32".into());
    let config = frit::config::Config::load(None, &config).expect("settings");
    let request = frit::driver::Request {
        model: file("tests/models/resnet/model.onnx"),
        binds: [("batch".to_string(), 4)].into(),
        ..Default::default()
    };
    let Err(error) = frit::driver::compile(&request, &config, &mut ()) else {
        panic!("it is not refused")
    };
    assert!(error.to_string().contains("renewed by every forward pass"), "{error}");
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
