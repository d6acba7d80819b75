//! The PTX of plans for CUDA assembles for the supported GPUs, and spills no registers.

use crate::support::{compile_at, file};
use frit_tests::requirements::Requirement;
use std::process::Command;

/// Compiles a model for every architecture in bf16 and assembles its kernels.
fn assembles(model: &str, batch: usize, settings: &[&str]) {
    for arch in ["sm_80", "sm_90", "sm_100"] {
        assembles_for(arch, model, batch, &[&["precision.compute=bf16"], settings].concat());
    }
}

fn assembles_for(arch: &str, model: &str, batch: usize, settings: &[&str]) {
    let target = format!("target.arch={arch}");
    let cuda = ["target.device=cuda", target.as_str()];
    let compiled = compile_at(&file(model), batch, &[&cuda, settings].concat());
    let ptx = String::from_utf8(compiled.object).expect("PTX is text");
    assert!(ptx.contains(&format!(".target {arch}")), "{model}");
    // Kernels compute everything themselves.
    assert!(!ptx.contains(".extern .func"), "{model}");
    let Some(assembler) = Requirement::Ptxas.find() else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let (source, cubin) = (dir.path().join("k.ptx"), dir.path().join("k.cubin"));
    std::fs::write(&source, &ptx).expect("written");
    let mut command = Command::new(assembler);
    command.args(["-v", "-arch", arch, "-o"]).arg(&cubin).arg(&source);
    let output = command.output().expect("ptxas runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{model} for {arch}: {said}");
    for line in said.lines().filter(|l| l.contains("spill")) {
        assert!(line.contains("0 bytes spill stores"), "{model} for {arch}: {line}");
    }
}

#[test]
fn language_models() {
    for model in ["mlp", "gpt2", "llama", "bert", "t5"] {
        assembles(&format!("tests/models/{model}/model.onnx"), 4, &[]);
    }
    for model in ["gpt2", "llama"] {
        let model = format!("tests/models/{model}/model.onnx");
        assembles_for("sm_90", &model, 4, &["precision.compute=fp8", "sharding.ranks=2"]);
    }
}

#[test]
fn vision_models() {
    assembles("tests/models/vit/model.onnx", 4, &[]);
    assembles("tests/models/resnet/model.onnx", 4, &[]);
    let sync = ["sharding.ranks=2", "model.batch_norm=sync"];
    assembles("tests/models/resnet/model.onnx", 4, &sync);
    assembles("tests/models/unet/model.onnx", 4, &["loss.kind=mse"]);
}

#[test]
fn gpt2_of_the_published_size() {
    assembles("examples/gpu/gpt2_124m.json", 32, &[]);
}
