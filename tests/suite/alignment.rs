//! Operands that CUDA kernels access 16 bytes at a time are aligned to 16 bytes: parameters and their gradients in flat
//! groups, whatever the sizes of preceding ones.

use crate::support::plan;
use frit_ir::plan::{
    Action, Arena, BufferId, CUDA_OPERAND_ALIGNMENT, Entry, KernelId, KernelKind, Plan, TiVec,
    check,
};

/// Reads and writes of every task that generated code computes, and of every GEMM: how many, and how many of them are
/// parts of buffers.
fn operands(plan: &Plan) -> [usize; 2] {
    let (mut n, mut n_inner) = (0, 0);
    for task in &plan.tasks {
        let Action::Kernel { kernel, reads, writes } = &task.action else { continue };
        let kernel = &plan.kernels[*kernel];
        let multiplies = kernel.body.nodes().any(|(_, n)| n.op.name() == "matmul");
        if !multiplies && kernel.kind() != KernelKind::Generated {
            continue;
        }
        for place in reads.iter().chain(writes) {
            assert_eq!(place.offset % CUDA_OPERAND_ALIGNMENT, 0, "{} of `{}`", place.ty, task.name);
            n += 1;
            n_inner += usize::from(place.offset > 0);
        }
    }
    [n, n_inner]
}

#[test]
fn parameters_begin_where_16_bytes_are_read_at_once() {
    for settings in [
        &["precision.compute=fp32"][..],
        &["precision.compute=bf16"],
        &["precision.compute=fp32", "sharding.param_dtype=bf16"],
        &["precision.compute=fp32", "sharding.reduce_dtype=bf16"],
        &["precision.compute=bf16", "sharding.strategy=no_shard", "optimizer.kind=adafactor"],
        &["precision.compute=fp32", "optimizer.kind=muon"],
    ] {
        let settings =
            [&["target.device=cuda", "target.arch=sm_80", "sharding.ranks=2"], settings].concat();
        // Biases of 10 classes, of 3 channels, of gates.
        for model in ["mlp", "lstm", "resnet"] {
            let planned = plan(&format!("tests/models/{model}/model.onnx"), 3, &settings);
            let [n, n_inner] = operands(&planned.compiled.plan);
            assert!(n_inner > 4 && n > n_inner, "{model} {settings:?}: {n_inner} of {n}");
        }
    }
}

#[test]
fn a_plan_whose_vectors_are_not_aligned_is_refused() {
    let settings = ["target.device=cuda", "target.arch=sm_80"];
    let mut plan = plan("tests/models/mlp/model.onnx", 4, &settings).compiled.plan;
    check(&plan).expect("the plan is well-formed");
    let is_generated: TiVec<KernelId, bool> =
        plan.kernels.iter().map(|k| matches!(k.entry, Entry::Cuda { .. })).collect();
    // Buffers of the workspace may share bytes.
    let is_shared: TiVec<BufferId, bool> =
        plan.buffers.iter().map(|b| b.arena == Arena::Workspace).collect();
    let place = plan.tasks.iter_mut().find_map(|task| match &mut task.action {
        Action::Kernel { kernel, reads, .. } if is_generated[*kernel] => {
            reads.iter_mut().find(|p| p.ty.bytes() > 64 && is_shared[p.buffer])
        }
        _ => None,
    });
    let place = place.expect("a generated kernel with a large operand");
    let buffer = place.buffer;
    place.offset += place.ty.dtype.size();
    plan.buffers[buffer].bytes += 64;
    plan.workspace_bytes += 64;
    let error = check(&plan).expect_err("the plan is broken").to_string();
    assert!(error.contains("vectors that are not aligned"), "{error}");
}
