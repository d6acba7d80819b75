//! Numbers are equal in all commands that show them, patterns that match nothing are reported, and the printed result
//! of a search reproduces its plan.

use crate::support::{Planned, file, plan};
use clap::Parser;
use frit::commands::{Cli, execute};
use frit::compilation::{Request, compile};
use frit::config::Config;
use frit::predict;
use frit_ir::plan::{Action, TaskId};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

fn frit(args: &[&str]) -> String {
    let cli = Cli::try_parse_from([&["frit"], args].concat()).unwrap_or_else(|e| panic!("{e}"));
    execute(&cli).unwrap_or_else(|e| panic!("{e}"))
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&frit(args)).expect("JSON")
}

fn path(planned: &Planned) -> String {
    planned.path().to_str().expect("a path").to_string()
}

#[test]
fn every_command_predicts_the_same_step() {
    for (accumulation, ranks) in [(1, 1), (4, 1), (3, 2)] {
        let accumulated = format!("run.accumulation={accumulation}");
        let ranks = format!("sharding.ranks={ranks}");
        let settings = [accumulated.as_str(), &ranks, "target.cluster=a100-80g"];
        let planned = plan("tests/models/mlp/model.onnx", 4, &settings);
        let path = path(&planned);
        let compiled = &planned.compiled.plan;
        let step = predict::step(compiled).unwrap_or_else(|e| panic!("{e}")).step_seconds;
        let simulated = json(&["simulate", &path, "--cluster", "a100-80g", "--json"]);
        assert_eq!(simulated["step_seconds"], step);
        let inspected = json(&["inspect", &path, "--json"]);
        assert_eq!(inspected["predicted_step_seconds"], step);
        let differ = json(&["diff", &path, &path, "--json"]);
        assert_eq!(differ["a"]["predicted_step_seconds"], step);
        for key in
            ["predicted_compute_seconds", "flops_per_step", "bytes_communicated_per_step", "casts"]
        {
            assert_eq!(differ["a"][key].as_f64(), inspected[key].as_f64(), "{key}");
        }
        assert_eq!(simulated["compute_seconds"], inspected["predicted_compute_seconds"]);
        let page = planned.dir.path().join("report.html");
        let trace = planned.dir.path().join("trace.json");
        frit(&["report", &path, "-o", page.to_str().expect("a path")]);
        let page = std::fs::read_to_string(page).expect("the page");
        let card = page.split("<span>step, predicted").next().expect("a card");
        let card = card.rsplit("<b>").next().expect("a number").trim_end_matches("</b>");
        let (number, unit) = card.split_once(' ').expect("a number with its unit");
        let scale = if unit == "ms" { 1e3 } else { 1e6 };
        let shown: f64 = number.parse().expect("a number");
        assert!((shown / (scale * step) - 1.0).abs() < 0.01, "{card} is not {step} s");
        frit(&[
            "simulate",
            &path,
            "--cluster",
            "a100-80g",
            "--trace",
            trace.to_str().expect("a path"),
        ]);
        let trace: Value =
            serde_json::from_str(&std::fs::read_to_string(trace).expect("a trace")).expect("JSON");
        let events: Vec<&Value> = trace["traceEvents"]
            .as_array()
            .expect("events")
            .iter()
            .filter(|e| e["ph"] == "X")
            .collect();
        let runs: usize = compiled.tasks.keys().map(|i| compiled.runs(i)).sum();
        assert_eq!(events.len(), runs);
        let end = |e: &&Value| e["ts"].as_f64().expect("ts") + e["dur"].as_f64().expect("dur");
        let last = events.iter().map(end).fold(0.0, f64::max);
        assert!((last / (1e6 * step) - 1.0).abs() < 1e-3, "{last} µs is not {step} s");
        let uses = json(&["inspect", &path, "--view", "kernels", "--json"]);
        let uses: u64 =
            uses.as_array().expect("rows").iter().filter_map(|k| k["uses"].as_u64()).sum();
        let kernel = |i: &TaskId| matches!(compiled.tasks[*i].action, Action::Kernel { .. });
        let expected: usize = compiled.tasks.keys().filter(kernel).map(|i| compiled.runs(i)).sum();
        assert_eq!(uses, expected as u64);
    }
}

#[test]
fn accumulation_multiplies_the_predicted_step() {
    let step = |accumulation: usize| {
        let setting = format!("run.accumulation={accumulation}");
        let planned = plan("tests/models/mlp/model.onnx", 4, &[&setting]);
        predict::step(&planned.compiled.plan).unwrap_or_else(|e| panic!("{e}")).step_seconds
    };
    assert!(step(8) > 3.0 * step(1));
}

/// Codes and texts of what a compilation warns of.
fn warnings(model: &str, toml: &str, settings: &[&str]) -> Result<Vec<(String, String)>, String> {
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let config = Config::parse(toml, "train.toml", &settings).unwrap_or_else(|e| panic!("{e}"));
    let binds = [("batch".to_string(), 4)].into();
    let request = Request { model: file(model), binds, ..Request::default() };
    let compiled = compile(&request, &config, &mut ()).map_err(|report| {
        let notes = report.diagnostics.iter().flat_map(|d| d.notes.clone());
        format!("{report} {}", notes.collect::<Vec<_>>().join(" "))
    })?;
    let lints = compiled.expect("a plan").plan.lints;
    Ok(lints
        .into_iter()
        .map(|d| (d.code.clone(), format!("{d} {}", d.help.clone().unwrap_or_default())))
        .collect())
}

#[test]
fn patterns_that_cover_nothing_are_said_with_the_nearest_names() {
    let (onnx, json) = ("tests/models/mlp/model.onnx", "examples/digits_mlp/model.json");
    for (model, name) in [(onnx, "fc1.weight"), (json, "fc1.weight")] {
        for key in ["trainable", "frozen", "ignored"] {
            let more = if key == "trainable" { "\"**\", " } else { "" };
            let setting = |pattern: &str| format!("params.{key}=[{more}\"{pattern}\"]");
            let found =
                warnings(model, "", &[&setting("fc9.weight")]).unwrap_or_else(|e| panic!("{e}"));
            let found: Vec<&String> =
                found.iter().filter(|w| w.0 == "W067").map(|w| &w.1).collect();
            assert_eq!(found.len(), 1, "{model} {key}");
            let parts = [format!("params.{key}"), "`fc9.weight`".into(), format!("`{name}`")];
            assert!(parts.iter().all(|part| found[0].contains(part)), "{found:?}");
            let found = warnings(model, "", &[&setting("fc1.*")]).unwrap_or_else(|e| panic!("{e}"));
            assert!(found.iter().all(|w| w.0 != "W067"), "{model} {key}: {found:?}");
        }
    }
    let group = "[[optimizer.group]]\nscope = \"fc9\"\nlr = 0.1\n";
    let of_scope = "[[precision.override]]\nscope = \"fc9\"\ndtype = \"fp32\"\n";
    let of_op = "[[precision.override]]\nop = \"matmull\"\ndtype = \"fp32\"\n";
    for compute in ["precision.compute=fp32", "precision.compute=bf16"] {
        for (toml, code, near) in
            [(group, "W066", "fc1."), (of_scope, "W221", "`fc"), (of_op, "W221", "`matmul`")]
        {
            let found = warnings(onnx, toml, &[compute]).unwrap_or_else(|e| panic!("{e}"));
            let found = found.iter().find(|w| w.0 == code);
            let found = found.unwrap_or_else(|| panic!("{compute} {toml}"));
            assert!(found.1.contains(near), "{found:?}");
        }
    }
    for setting in ["sharding.wrap=fc9", "sharding.reshard_after_forward=[\"fc9\"]"] {
        let refused = warnings(onnx, "", &["sharding.ranks=2", setting]).expect_err("no unit");
        assert!(refused.contains("fc9") && refused.contains("nearest"), "{refused}");
    }
    let refused = warnings(onnx, "", &["lints.allow=[\"L99\"]"]).expect_err("no lint");
    assert!(refused.contains("L99"), "{refused}");
    let refused = warnings(onnx, "", &["data.ranges=[\"y=0..1\"]"]).expect_err("no input");
    assert!(refused.contains("`y`"), "{refused}");
}

/// What is warned of under this code, once at most.
fn warned(code: &str, toml: &str, settings: &[&str]) -> Option<String> {
    let model = "tests/museum/models/lm.json";
    let found = warnings(model, toml, settings).unwrap_or_else(|e| panic!("{e}"));
    let mut found = found.into_iter().filter(|w| w.0 == code).map(|w| w.1);
    let first = found.next();
    assert_eq!(found.next(), None, "{toml} {settings:?}");
    first
}

#[test]
fn norms_that_decay_beside_excluded_ones_are_warned_of() {
    let group = |scope: &str, decay: f64| {
        format!("[[optimizer.group]]\nscope = \"{scope}\"\nweight_decay = {decay:?}\n")
    };
    let found = warned("W069", &group("norm.weight", 0.0), &[]).expect("a warning");
    for part in ["norm.weight", "2 of them", "`norm.bias`", "`gain`", "optimizer.decay"] {
        assert!(found.contains(part), "{found}");
    }
    let vectors = group("norm.*", 0.0) + &group("gain", 0.0);
    for (toml, settings) in [
        (vectors.as_str(), &[][..]),
        (&group("norm.weight", 0.0), &["optimizer.weight_decay=0"]),
        (&group("norm.weight", 0.0), &["optimizer.decay=matrices"]),
        (&group("norm.weight", 0.0), &["params.frozen=[\"norm.bias\", \"gain\"]"]),
        // Another decay excludes nothing, and a group that covers matrices excludes no norms as such.
        (&group("norm.weight", 0.1), &[]),
        (&group("**.weight", 0.0), &[]),
        ("", &["optimizer.weight_decay=0.1"]),
    ] {
        assert_eq!(warned("W069", toml, settings), None, "{toml} {settings:?}");
    }
}

#[test]
fn a_model_of_which_only_norms_train_is_warned_of() {
    let found = warned("W070", "", &["params.trainable=[\"norm.*\", \"gain\"]"]);
    let found = found.expect("a warning");
    for part in ["17 elements in 3 parameters", "all 5 matrices", "params.trainable"] {
        assert!(found.contains(part), "{found}");
    }
    let lora = ["adapter.kind=lora", "adapter.rank=2", "adapter.targets=[\"h.*.fc\"]"];
    for settings in [
        &[][..],
        &["params.frozen=[\"norm.*\", \"gain\"]"],
        &["params.trainable=[\"norm.*\", \"h.1.fc.weight\"]"],
        &lora,
    ] {
        assert_eq!(warned("W070", "", settings), None, "{settings:?}");
    }
}

/// The words of a line, as a shell reads it.
fn words(line: &str) -> Vec<String> {
    let script = format!("set -- {line}; for word; do printf '%s\\0' \"$word\"; done");
    let run = Command::new("sh").arg("-c").arg(script).output().expect("a shell");
    let text = String::from_utf8(run.stdout).expect("text");
    text.split_terminator('\0').map(str::to_string).collect()
}

#[test]
fn the_command_of_a_search_makes_the_plan_that_was_found() {
    let dir = tempfile::tempdir().expect("a directory");
    let folder = dir.path().join("it's a model");
    std::fs::create_dir(&folder).expect("a folder");
    let model = folder.join("digits.json");
    std::fs::copy(file("examples/digits_mlp/model.json"), &model).expect("copied");
    let config = folder.join("train.toml");
    std::fs::write(&config, "[optimizer]\nlr = 0.25\n").expect("written");
    let text = |path: &Path| path.to_str().expect("a path").to_string();
    let (model, config) = (text(&model), text(&config));
    let args = [
        "plan-search",
        &model,
        "--config",
        &config,
        "--cluster",
        "h100",
        "--ranks",
        "2",
        "--set",
        "optimizer.kind=sgd",
        "--set",
        "params.frozen=[\"fc1.*\"]",
        "--micro-batch",
        "8",
        "--strategy",
        "full_shard",
        "--best",
        "1",
    ];
    let printed = frit(&args);
    let line = printed.lines().last().expect("a line");
    let found = json(&[&args[..], &["--json"]].concat());
    assert_eq!(found[0]["command"], line);
    let mut words = words(line);
    assert_eq!(words[..2], ["frit", "compile"]);
    let plan = text(&dir.path().join("plan"));
    assert_eq!(words.pop().as_deref(), Some("plan"));
    words.push(plan.clone());
    frit(&words[1..].iter().map(String::as_str).collect::<Vec<_>>());
    let made = json(&["simulate", &plan, "--cluster", "h100", "--json"]);
    assert_eq!(made["step_seconds"], found[0]["step_seconds"]);
    assert_eq!(made["peak_bytes"], found[0]["peak_bytes"]);
    let config = std::fs::read_to_string(dir.path().join("plan/source/train.toml")).expect("toml");
    for part in ["lr = 0.25", "kind = \"sgd\"", "fc1.*", "ranks = 2"] {
        assert!(config.contains(part), "no {part} in {config}");
    }
}
