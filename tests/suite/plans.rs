//! Properties of plans: byte-identical compilation, bit-identical runs, equal semantics, a quarter of the state on four
//! ranks.

use crate::support::{plan, train};
use frit_ir::plan::{Action, KernelKind};

const GPT2: &str = "tests/models/gpt2/model.onnx";
const DATA: &str = "tests/models/gpt2/data.safetensors";

#[test]
fn two_compilations_are_byte_identical_and_two_runs_bit_identical() {
    let settings = ["sharding.ranks=4", "precision.compute=bf16"];
    let (a, b) = (plan(GPT2, 2, &settings), plan(GPT2, 2, &settings));
    for file in ["plan.json", "kernels/kernels.so", "weights.safetensors"] {
        let read = |p: &crate::support::Planned| std::fs::read(p.path().join(file)).unwrap();
        assert!(read(&a) == read(&b), "{file} differs");
    }
    let (first, second) = (train(&a, DATA, 5, false), train(&a, DATA, 5, false));
    let bits = |losses: &[f64]| losses.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&first.losses), bits(&second.losses));
}

#[test]
fn compiled_and_interpreted_plans_agree() {
    let planned = plan(GPT2, 4, &["sharding.ranks=2", "precision.compute=fp32"]);
    let (compiled, interpreted) = (train(&planned, DATA, 2, false), train(&planned, DATA, 2, true));
    for (a, b) in compiled.losses.iter().zip(&interpreted.losses) {
        assert!((a - b).abs() < 1e-6, "{a} and {b}");
    }
    for (a, b) in compiled.grad_norms.iter().zip(&interpreted.grad_norms) {
        assert!((a - b).abs() < 1e-5, "{a} and {b}");
    }
}

#[test]
fn four_ranks_hold_a_quarter_of_the_state_each() {
    let state = |ranks: usize| {
        let ranks = format!("sharding.ranks={ranks}");
        let planned = plan(GPT2, 2, &[&ranks, "precision.compute=fp32"]);
        let groups = planned.compiled.plan.groups.clone();
        groups.iter().map(|g| g.shard_numel).sum::<usize>()
    };
    let (one, four) = (state(1), state(4));
    assert!(four * 4 >= one && four * 4 < one + 4 * 4 * 128, "{one} and 4 × {four}");
}

#[test]
fn every_kernel_of_gpt2_but_the_scalars_is_machine_code() {
    let planned = plan(GPT2, 2, &["sharding.ranks=4", "precision.compute=bf16"]);
    let plan = &planned.compiled.plan;
    for task in &plan.tasks {
        let Action::Kernel { kernel, writes, .. } = &task.action else { continue };
        let small = writes.iter().all(|p| p.ty.shape.numel() <= 4);
        let interpreted = plan.kernels[*kernel].kind() == KernelKind::Interpreted;
        assert!(small || !interpreted, "{} is interpreted", task.name);
    }
}
