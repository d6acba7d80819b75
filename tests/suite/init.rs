//! `frit init` writes a configuration with which every given model compiles and trains.

use crate::support::file;
use clap::Parser;
use frit::commands::{Cli, execute};
use std::path::Path;

fn frit(args: &[&str]) -> Result<String, String> {
    let cli = Cli::try_parse_from([&["frit"], args].concat()).map_err(|e| e.to_string())?;
    execute(&cli).map_err(|report| report.to_string())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path")
}

#[test]
fn every_model_compiles_with_its_first_configuration() {
    let dir = tempfile::tempdir().expect("a directory");
    for (model, kind) in [
        ("tests/models/mlp/model.onnx", "cross_entropy"),
        ("tests/models/mlp/model_dynamo.onnx", "cross_entropy"),
        ("tests/models/gpt2/model.onnx", "cross_entropy"),
        ("tests/models/gpt2/model_torchscript.onnx", "cross_entropy"),
        ("tests/models/llama/model.onnx", "cross_entropy"),
        ("tests/models/bert/model.onnx", "cross_entropy"),
        ("tests/models/t5/model.onnx", "cross_entropy"),
        ("tests/models/vit/model.onnx", "cross_entropy"),
        ("tests/models/resnet/model.onnx", "cross_entropy"),
        ("tests/models/unet/model.onnx", "mse"),
        ("tests/models/vae/model.onnx", "output"),
        ("tests/models/diffusion/model.onnx", "output"),
        ("examples/llama/model.json", "cross_entropy"),
        ("examples/digits_mlp/model.json", "cross_entropy"),
    ] {
        let (config, plan) = (dir.path().join("train.toml"), dir.path().join("plan"));
        let model = file(model);
        let bind: &[&str] =
            if model.ends_with("llama/model.json") { &["--bind", "batch=2"] } else { &[] };
        let init = [&["init", text(&model), "-o", text(&config), "--force"], bind].concat();
        let said = frit(&init).unwrap_or_else(|e| panic!("{}: {e}", model.display()));
        let written = std::fs::read_to_string(&config).expect("it is written");
        assert!(written.contains(&format!("kind = \"{kind}\"")), "{}: {written}", model.display());
        let line = said.lines().find(|line| line.contains("frit compile")).expect("a command");
        let args: Vec<&str> = line.split_whitespace().skip(1).collect();
        let at = args.iter().position(|a| *a == "-o").expect("an output");
        let args = [&args[..=at], &[text(&plan)], &["--weights", "none"]].concat();
        frit(&args).unwrap_or_else(|e| panic!("{line}: {e}"));
        let again = ["init", text(&model), "-o", text(&config)];
        assert!(frit(&again).expect_err("it exists").contains("--force"));
    }
}
