//! The classifier's logits: their loss and gradient are one kernel that writes the gradient in place, with every
//! combination of settings.

use crate::memory::{predicted, predicted_with};
use crate::pairs::{Row, rows};
use crate::support::{plan, train};
use frit_ir::plan::{Action, Plan};
use frit_ir::{DType, Op, TensorType};

const FACTORS: [&[&str]; 7] = [
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=4"],
    &["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer"],
    &["padding.tensor_cores=never", "padding.tensor_cores=always"],
];
const PRECISION: usize = 2;

/// The type of the logits, and whether their gradient takes their place; of every kernel that computes a loss.
pub(crate) fn losses(plan: &Plan) -> Vec<(TensorType, bool)> {
    let of = |action: &Action| {
        let Action::Kernel { kernel, reads, writes } = action else { return None };
        let body = &plan.kernels[*kernel].body;
        let is_loss = body.nodes().any(|(_, n)| matches!(n.op, Op::CrossEntropy(_)));
        let logits = reads.iter().max_by_key(|place| place.ty.bytes())?;
        is_loss.then(|| (logits.ty.clone(), writes.contains(logits)))
    };
    plan.tasks.iter().filter_map(|task| of(&task.action)).collect()
}

#[test]
fn the_gradient_of_logits_takes_their_place_whatever_it_is_crossed_with() {
    let rows = rows(&FACTORS, |_: &Row| true);
    assert!((12..=24).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let strategy = format!("sharding.strategy={}", words[1]);
        let mut settings = words.clone();
        settings[1] = &strategy;
        let plan = predicted("gpt2", &settings);
        let [(logits, in_place)] = &losses(&plan)[..] else { panic!("{words:?}") };
        assert!(in_place, "{words:?}");
        let compute = [DType::F32, DType::BF16, DType::F16][row[PRECISION]];
        assert_eq!(logits.dtype, compute, "{words:?}");
        // A gradient kernel of its own would read them once more.
        let gradients = plan.kernels.iter().filter(|kernel| {
            let has = |f: fn(&Op) -> bool| kernel.body.nodes().any(|(_, n)| f(&n.op));
            has(|op| matches!(op, Op::CrossEntropyGrad(_)))
                && !has(|op| matches!(op, Op::CrossEntropy(_)))
        });
        assert_eq!(gradients.count(), 0, "{words:?}");
    }
}

/// Rows of this model's logits end within a vector, so that its last store is masked.
#[test]
fn processors_without_instructions_for_low_precision_train_the_same() {
    let model = "tests/models/gpt2/model.onnx";
    for precision in ["precision.compute=bf16", "precision.compute=fp16"] {
        let losses = |arch: &str| {
            let planned = plan(model, 2, &[precision, arch, "padding.tensor_cores=never"]);
            train(&planned, "tests/models/gpt2/data.safetensors", 3, false).losses
        };
        let [old, native] = ["target.arch=x86-64-v3", "target.arch=native"].map(losses);
        for (x, y) in old.iter().zip(&native) {
            assert!((x - y).abs() < 1e-3 * y.abs(), "{precision}: {old:?}, {native:?}");
        }
    }
}

#[test]
fn padded_logits_are_never_copied() {
    for ranks in ["sharding.ranks=1", "sharding.ranks=2"] {
        let always = "padding.tensor_cores=always";
        let plan = predicted("gpt2", &[ranks, always, "precision.compute=bf16"]);
        let [(logits, true)] = &losses(&plan)[..] else { panic!("{ranks}") };
        let copies = plan.kernels.iter().filter(|kernel| {
            kernel.body.nodes().any(|(_, n)| {
                let moved = n.inputs.iter().chain(&n.outputs).any(|v| kernel.body.ty(*v) == logits);
                matches!(n.op, Op::Slice(_) | Op::Pad(_) | Op::Cast(_)) && moved
            })
        });
        assert_eq!(copies.count(), 0, "{ranks}");
        assert!(logits.shape.0.last().is_some_and(|columns| columns.is_multiple_of(8)));
    }
}

#[test]
fn an_override_decides_in_which_dtype_logits_are_written() {
    for (compute, output, expected) in [
        ("bf16", "", DType::BF16),
        ("bf16", "output = \"fp32\"", DType::F32),
        ("bf16", "output = \"bf16\"", DType::BF16),
        ("fp32", "output = \"bf16\"", DType::BF16),
        ("fp32", "", DType::BF16),
    ] {
        let toml = format!("[[precision.override]]\nop = \"matmul\"\ndtype = \"bf16\"\n{output}\n");
        let compute = format!("precision.compute={compute}");
        let plan = predicted_with("gpt2", &toml, &[&compute]);
        let [(logits, _)] = &losses(&plan)[..] else { panic!("{compute} {output}") };
        assert_eq!(logits.dtype, expected, "{compute} {output}");
    }
}
