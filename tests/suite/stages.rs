//! Golden text of one small model through the pipeline: the graph after every pass that changes it, and the plan.
//! `UPDATE_EXPECT=1 cargo test` rewrites `tests/golden/stages`.

use crate::support::file;
use clap::Parser;
use expect_test::expect_file;
use frit::commands::{Cli, execute};

/// Two layers, of which the first is tied to nothing and the second has a bias.
const MODEL: &str = r#"{ "frit_model": 1, "name": "stages",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 4] } ],
  "params": [ { "name": "a", "shape": [4, 6], "init": { "normal": { "std": 0.5 } } },
              { "name": "w", "shape": [6, 3], "init": { "normal": { "std": 0.5 } } },
              { "name": "b", "shape": [3] } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "a"], "outputs": ["h"], "scope": "first" },
             { "op": "tanh", "inputs": ["h"], "outputs": ["t"], "scope": "first" },
             { "op": "matmul", "inputs": ["t", "w"], "outputs": ["p"], "scope": "second" },
             { "op": "add", "inputs": ["p", "b"], "outputs": ["logits"], "scope": "second" } ],
  "outputs": ["logits"] }"#;

fn frit(args: &[&str]) -> String {
    let cli = Cli::try_parse_from([&["frit"], args].concat()).unwrap_or_else(|e| panic!("{e}"));
    execute(&cli).unwrap_or_else(|e| panic!("{e}"))
}

fn expect(name: &str, found: &str) {
    expect_file![file(&format!("tests/golden/stages/{name}"))].assert_eq(found);
}

/// The tasks of a plan that keeps parts from forward to backward, and of steps that add sums over ranks.
#[test]
fn schedules() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    let model = path("model.json");
    std::fs::write(&model, MODEL).expect("written");
    let common = ["precision.compute=fp32", "target.arch=x86-64-v3", "sharding.wrap=size=1"];
    for (name, settings) in [
        ("reshard", ["sharding.ranks=4", "sharding.reshard_after_forward=2"]),
        ("adafactor", ["sharding.ranks=2", "optimizer.kind=adafactor"]),
        ("muon", ["sharding.ranks=2", "optimizer.kind=muon"]),
        ("reproducible", ["sharding.ranks=2", "run.reproducible=8"]),
    ] {
        let plan = path(name);
        let mut args = vec!["compile", &model, "--bind", "batch=2", "-o", &plan];
        common.iter().chain(&settings).for_each(|s| args.extend(["--set", s]));
        frit(&args);
        expect(&format!("{name}.txt"), &frit(&["inspect", &plan, "--view", "schedule"]));
    }
}

#[test]
fn a_model_on_its_way_to_a_plan() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    let (model, plan, graphs) = (path("model.json"), path("plan"), path("graphs"));
    std::fs::write(&model, MODEL).expect("written");
    let settings = [
        "precision.compute=fp16",
        "sharding.ranks=2",
        "run.accumulation=2",
        "target.arch=x86-64-v3",
        "optimizer.kind=sgd",
    ];
    let mut args = vec!["compile", &model, "--bind", "batch=2", "-o", &plan, "--dump-ir", &graphs];
    settings.iter().for_each(|s| args.extend(["--set", s]));
    frit(&args);
    for entry in std::fs::read_dir(&graphs).expect("graphs") {
        let entry = entry.expect("a graph");
        let name = entry.file_name().into_string().expect("UTF-8");
        let (_, pass) = name.split_once('-').expect("number and pass");
        let stages = ["differentiate", "loss_scale", "update", "shard", "simplify", "fuse"];
        if stages.contains(&pass.trim_end_matches(".frit")) {
            let text = std::fs::read_to_string(entry.path()).expect("a graph");
            frit_ir::text::parse(&text).unwrap_or_else(|e| panic!("{pass}: {e}"));
            expect(pass, &text);
        }
    }
    for view in ["schedule", "memory", "units"] {
        expect(&format!("{view}.txt"), &frit(&["inspect", &plan, "--view", view]));
    }
    let plan = path("offloaded");
    let mut args = vec!["compile", &model, "--bind", "batch=2", "-o", &plan];
    let offload =
        ["memory.offload=parameters", "sharding.wrap=first, second", "optimizer.kind=momentum"];
    settings[..4].iter().chain(&offload).for_each(|s| args.extend(["--set", s]));
    frit(&args);
    for view in ["schedule", "memory"] {
        expect(&format!("offloaded_{view}.txt"), &frit(&["inspect", &plan, "--view", view]));
    }
}
