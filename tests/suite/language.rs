//! Language models of the transformers library: llama (rotary positions, grouped-query attention, gated MLP), bert
//! (padding masks, a padding row) and t5 (encoder and decoder, relative positions with a trained bias) train to
//! PyTorch's numbers, and no expensive kernel is interpreted.

use crate::parity::{Distances, gradient_error, largest, reference, run};
use crate::support::plan;
use frit_ir::plan::{Action, KernelKind, Plan};

const MODELS: [&str; 3] = ["llama", "bert", "t5"];

#[test]
fn fp32_losses_and_gradients_are_pytorchs() {
    for model in MODELS {
        for ranks in [1, 2, 4] {
            let fp32 = &["precision.compute=fp32"];
            let (planned, losses) = run(model, "model.onnx", 8, ranks, fp32);
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
    for model in MODELS {
        for ranks in [1, 2] {
            let (_, losses) = run(model, "model.onnx", 8, ranks, &["precision.compute=bf16"]);
            distances.add(&format!("{model} on {ranks} ranks"), model, &losses);
        }
    }
    distances.assert_close();
}

/// Of `examples/export/export_transformers.py`: alibi positions, LSTM and GRU, mixture of experts by
/// einsum and by sending tokens to slots and back.
const OTHERS: [&str; 5] = ["bloom", "lstm", "gru", "moe_einsum", "moe_dispatch"];

#[test]
fn other_architectures_train_to_pytorchs_numbers() {
    for model in OTHERS {
        for ranks in [1, 2] {
            let fp32 = &["precision.compute=fp32"];
            let (planned, losses) = run(model, "model.onnx", 8, ranks, fp32);
            let deviation = largest(&losses, &reference(model, "fp64"));
            assert!(deviation < 1e-5, "{model} on {ranks} ranks: losses deviate by {deviation}");
            let error = gradient_error(&planned, model);
            assert!(error < 1e-5, "{model} on {ranks} ranks: gradients deviate by {error}");
            assert_eq!(interpreted(&planned.compiled.plan), Vec::<String>::new(), "{model}");
        }
    }
}

#[test]
fn an_optimized_export_trains_its_own_parameters() {
    // Biases that are zero are merged or left out, weights transposed and renamed.
    let (planned, losses) = run("opt", "model.onnx", 8, 2, &["precision.compute=fp32"]);
    let deviation = largest(&losses, &reference("opt", "fp64"));
    assert!(deviation < 1e-5, "losses deviate by {deviation}");
    let names: Vec<&str> = planned.compiled.plan.params.iter().map(|p| p.name.as_str()).collect();
    for part in ["self_attn.q_proj.weight", "self_attn.q_proj.bias", "fc1.weight", "fc1.bias"] {
        for layer in 0..2 {
            let name = format!("net.model.decoder.layers.{layer}.{part}");
            assert!(names.contains(&name.as_str()), "{name}");
        }
    }
}

#[test]
fn parameters_that_an_exporter_computed_with_are_warned_of() {
    let warned = |onnx: &str| {
        let planned = plan(&format!("tests/models/gpt2/{onnx}"), 4, &[]);
        planned.compiled.plan.lints.iter().any(|w| w.code == "W030" && w.message.contains("not in"))
    };
    assert!(warned("model_optimized.onnx"));
    assert!(!warned("model.onnx"));
}

/// Kernels that the interpreter runs and that write more than a few scalars.
pub(crate) fn interpreted(plan: &Plan) -> Vec<String> {
    let slow = |task: &&frit_ir::plan::Task| match &task.action {
        Action::Kernel { kernel, writes, .. } => {
            plan.kernels[*kernel].kind() == KernelKind::Interpreted
                && writes.iter().any(|w| w.ty.shape.numel() > 4)
        }
        _ => false,
    };
    plan.tasks.iter().filter(slow).map(|t| t.name.clone()).collect()
}

#[test]
fn no_kernel_of_size_is_interpreted() {
    for model in MODELS {
        for compute in ["precision.compute=fp32", "precision.compute=bf16"] {
            let planned = plan(&format!("tests/models/{model}/model.onnx"), 4, &[compute]);
            assert_eq!(interpreted(&planned.compiled.plan), Vec::<String>::new(), "{model}");
        }
    }
}

#[test]
fn they_raise_to_the_operations_they_were_written_with() {
    // Nodes of the forward pass that each of these operations has.
    for (model, expected) in [
        ("llama", [("attention", 2), ("rms_norm", 5), ("silu", 2), ("layer_norm", 0)]),
        ("bert", [("attention", 2), ("layer_norm", 5), ("gelu", 2), ("rms_norm", 0)]),
        ("t5", [("attention", 6), ("rms_norm", 12), ("softmax", 0), ("layer_norm", 0)]),
    ] {
        let planned = plan(&format!("tests/models/{model}/model.onnx"), 4, &[]);
        let plan = &planned.compiled.plan;
        let count = |name: &str| -> usize {
            let of = |task: &frit_ir::plan::Task| match &task.action {
                Action::Kernel { kernel, .. } if task.region == frit_ir::Region::Forward => {
                    let body = &plan.kernels[*kernel].body;
                    body.nodes().filter(|(_, n)| n.op.name() == name).count()
                }
                _ => 0,
            };
            plan.tasks.iter().map(of).sum()
        };
        for (name, n) in expected {
            assert_eq!(count(name), n, "{name} of {model}");
        }
        for left in ["softmax", "gather_nd", "is_nan", "pow"] {
            assert_eq!(count(left), 0, "{left} of {model}");
        }
    }
}
