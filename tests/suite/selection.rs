//! Plans for CUDA: every body has code, generated or selected.

use crate::support::{compile_at, file};
use frit_ir::plan::{Entry, KernelKind, Launch};
use std::collections::BTreeSet;

fn has_launches(model: &str, batch: usize, settings: &[&str]) {
    launches_of(&format!("tests/models/{model}/model.onnx"), batch, settings);
}

/// Compiles a model for CUDA and returns the files of CUDA C++ that its kernels use, and the operations that they do.
fn launches_of(model: &str, batch: usize, settings: &[&str]) -> [BTreeSet<String>; 2] {
    let settings = [&["target.device=cuda"], settings].concat();
    let compiled = compile_at(&file(model), batch, &settings);
    let (mut n_kernels, mut files, mut operations) = (0, BTreeSet::new(), BTreeSet::new());
    for kernel in &compiled.plan.kernels {
        assert_ne!(kernel.kind(), KernelKind::Interpreted, "{model}:\n{}", kernel.body);
        operations.extend(kernel.body.nodes().map(|(_, n)| n.op.name()));
        if let Entry::Launches(selected) = &kernel.entry {
            n_kernels += 1;
            files.extend(selected.every_launch().into_iter().filter_map(|l| match l {
                Launch::Source(kernel) => Some(kernel.file.to_string()),
                _ => None,
            }));
        }
    }
    assert!(n_kernels > 0, "{model}");
    [files, operations]
}

#[test]
fn language_models_have_launches_for_every_library_kernel() {
    for model in ["mlp", "gpt2", "llama", "bert", "t5", "bloom", "opt", "moe_dispatch", "lstm"] {
        has_launches(model, 4, &["precision.compute=bf16"]);
    }
}

#[test]
fn vision_models_have_launches_for_every_library_kernel() {
    for model in ["vit", "resnet"] {
        has_launches(model, 4, &["precision.compute=fp16"]);
    }
    has_launches("unet", 4, &["precision.compute=fp32", "loss.kind=mse"]);
}

#[test]
fn models_that_draw_have_launches_for_every_library_kernel() {
    for model in ["vae", "diffusion"] {
        let settings = ["precision.compute=bf16", "loss.kind=output", "loss.logits=loss"];
        has_launches(model, 4, &settings);
    }
}

#[test]
fn the_models_that_are_timed_have_launches_for_every_library_kernel() {
    for (model, batch) in [
        ("gpt2_124m", 32),
        ("gpt2_774m", 16),
        ("gpt2_1558m", 8),
        ("bert_large", 32),
        ("resnet50", 256),
    ] {
        launches_of(&format!("examples/gpu/{model}.json"), batch, &["precision.compute=bf16"]);
    }
}

#[test]
fn the_plans_that_are_checked_on_a_gpu_use_every_source_and_operation() {
    let (mut used, mut operations) = (BTreeSet::new(), BTreeSet::new());
    let mut add = |[files, done]: [BTreeSet<String>; 2]| {
        used.extend(files);
        operations.extend(done);
    };
    let given = [
        "mlp",
        "gpt2",
        "llama",
        "bert",
        "t5",
        "bloom",
        "moe_dispatch",
        "lstm",
        "vit",
        "resnet",
        "dropout",
    ];
    for model in given.map(|m| format!("tests/models/{m}/model.onnx")) {
        add(launches_of(&model, 4, &["precision.compute=bf16"]));
    }
    let unet = ["precision.compute=bf16", "loss.kind=mse"];
    add(launches_of("tests/models/unet/model.onnx", 4, &unet));
    let own_loss = ["precision.compute=bf16", "loss.kind=output", "loss.logits=loss"];
    add(launches_of("tests/models/diffusion/model.onnx", 4, &own_loss));
    let wide = ["precision.compute=fp32"];
    add(launches_of("tests/models/resnet/model.onnx", 4, &wide));
    let adafactor = ["optimizer.kind=adafactor"];
    add(launches_of("tests/models/gpt2/model.onnx", 4, &adafactor));
    let fp8 = ["precision.compute=fp8", "target.arch=sm_90"];
    add(launches_of("tests/models/gpt2/model.onnx", 4, &fp8));
    for model in ["attention_heads", "operations"] {
        add(launches_of(&format!("examples/gpu/{model}.json"), 2, &wide));
    }
    let folder = std::fs::read_dir(file("kernels/library/cuda")).expect("the sources");
    let sources = folder
        .map(|f| f.expect("a file").path())
        .filter(|p| p.extension().is_some_and(|e| e == "cu"));
    let names = sources.filter_map(|p| Some(p.file_stem()?.to_str()?.to_owned()));
    let unused: Vec<String> = names.filter(|name| !used.contains(name.as_str())).collect();
    // Converts only what cuBLASLt cannot write, such as a sum in f64 of f32; the emulation runs it.
    assert_eq!(unused, ["convert"]);
    let known = crate::coverage::operations();
    let missing: Vec<&String> = known.iter().filter(|name| !operations.contains(*name)).collect();
    assert!(
        missing.is_empty(),
        "in none of them, so add it to examples/gpu/make_models.py: {missing:?}"
    );
}
