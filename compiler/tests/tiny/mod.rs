//! A model of two layers and its data, for tests that run often.

use std::path::{Path, PathBuf};
use std::process::Command;

const MODEL: &str = r#"{ "frit_model": 1, "name": "two_layers",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 3] } ],
  "params": [ { "name": "up", "shape": [3, 5], "init": { "normal": { "std": 0.5 } } },
              { "name": "down", "shape": [5, 2], "init": { "normal": { "std": 0.5 } } } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "up"], "outputs": ["h"] },
             { "op": "relu", "inputs": ["h"], "outputs": ["a"] },
             { "op": "matmul", "inputs": ["a", "down"], "outputs": ["y"] } ],
  "outputs": ["y"] }"#;

/// Writes 64 examples for the model; `change` is given every number and its index.
pub(crate) fn write_data(path: &Path, change: impl Fn(f32, usize) -> f32) {
    let (n, width) = (64, [3, 2]);
    let number = |i: usize| (i * 7919 % 2039) as f32 / 1024.0 - 1.0;
    let mut header = String::from("{");
    let (mut body, mut comma) = (Vec::new(), "");
    for (name, width) in ["x", "labels"].into_iter().zip(width) {
        let (begin, end) = (body.len(), body.len() + n * width * 4);
        header += &format!(
            r#"{comma}"{name}":{{"dtype":"F32","shape":[{n},{width}],"data_offsets":[{begin},{end}]}}"#
        );
        comma = ",";
        body.extend((0..n * width).flat_map(|i| change(number(i + begin), i).to_le_bytes()));
    }
    header += "}";
    let len = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&len, header.as_bytes(), &body].concat()).expect("written");
}

/// Compiles the model in a directory into its `plan`, for batches of 4 on each of so many ranks.
pub(crate) fn compile(dir: &Path, ranks: usize, settings: &[&str]) -> Command {
    let mut compile = Command::new(env!("CARGO_BIN_EXE_frit"));
    compile.arg("compile").arg(dir.join("model.json"));
    compile.args(["--bind", "batch=4", "-o"]).arg(dir.join("plan"));
    let ranks = format!("sharding.ranks={ranks}");
    let usual = ["loss.kind=mse", "loss.logits=y", "precision.compute=fp32", &ranks];
    for setting in usual.iter().chain(settings) {
        compile.args(["--set", setting]);
    }
    compile
}

/// Writes model, data and a plan for batches of 4 on each of so many ranks into a directory.
pub(crate) fn compiled(dir: &Path, ranks: usize, settings: &[&str]) -> PathBuf {
    let (model, plan) = (dir.join("model.json"), dir.join("plan"));
    std::fs::write(&model, MODEL).expect("written");
    write_data(&dir.join("data.safetensors"), |x, _| x);
    let output = compile(dir, ranks, settings).output().expect("starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    plan
}
