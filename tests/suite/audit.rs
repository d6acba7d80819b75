//! `frit audit`: no false alarms on any model, precision and strategy, and what cannot be audited.

use crate::pairs::{Row, rows};
use crate::support::{Planned, file, plan, plan_configured, plan_to_evaluate};
use clap::Parser;
use frit::audit::{Audit, Gradient, Options, Verdict, audit};
use frit::commands::{Cli, execute};
use frit_runtime::data::Source;
use serde_json::Value;
use std::path::Path;

/// A model of every kind of layer that rounds, branches or draws, as small as can be.
pub(crate) const MODEL: &str = r#"{ "frit_model": 1, "name": "layers",
  "dims": { "batch": null },
  "inputs": [ { "name": "ids", "dtype": "i64", "shape": ["batch", 3] } ],
  "params": [ { "name": "table", "shape": [7, 4], "init": { "normal": { "std": 0.5 } } },
              { "name": "up", "shape": [4, 6], "init": { "normal": { "std": 0.5 } } },
              { "name": "bias", "shape": [6], "init": { "constant": 0.0 } },
              { "name": "scale", "shape": [6], "init": { "constant": 1.0 } },
              { "name": "down", "shape": [6, 5], "init": { "normal": { "std": 0.5 } } } ],
  "nodes": [ { "op": "embedding", "inputs": ["table", "ids"], "outputs": ["x"] },
             { "op": "matmul", "inputs": ["x", "up"], "outputs": ["m"] },
             { "op": "add", "inputs": ["m", "bias"], "outputs": ["s"] },
             { "op": "tanh", "inputs": ["s"], "outputs": ["a"] },
             { "op": "rms_norm", "inputs": ["a", "scale"], "outputs": ["n", "r"], "attrs": { "axis": 2, "eps": 1e-5 } },
             { "op": "matmul", "inputs": ["n", "down"], "outputs": ["logits"] } ],
  "outputs": ["logits"] }"#;

pub(crate) fn options(plan: &Path) -> Options {
    Options {
        plan: plan.into(),
        data: Source::default(),
        model: None,
        parameters: vec![],
        directions: 3,
        seconds: 600,
        seed: 0,
        threads: Some(1),
        allow_external_data: false,
        progress: false,
    }
}

fn audited(planned: &Planned) -> Audit {
    audit(&options(&planned.path())).unwrap_or_else(|e| panic!("{e}"))
}

/// Requires that everything agrees, and that every gradient was compared.
fn is_right(planned: &Planned, what: &str) -> Audit {
    let found = audited(planned);
    assert!(found.wrong().is_empty(), "{what}: {:#?}\n{}", found.wrong(), found.render(false));
    assert!(!found.gradients.is_empty() && !found.updates.is_empty(), "{what}");
    found
}

/// A written model that goes away with its plan.
pub(crate) fn small(settings: &[&str], toml: &str) -> Planned {
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model.json");
    std::fs::write(&model, MODEL).expect("written");
    plan_configured(&model, 2, toml, settings)
}

#[test]
fn the_given_models_are_right_in_fp32_and_on_two_ranks_in_bf16() {
    let mut failures = Vec::new();
    let models = [
        ("mlp", 2, "cross_entropy"),
        ("gpt2", 1, "cross_entropy"),
        ("llama", 1, "cross_entropy"),
        ("bert", 1, "cross_entropy"),
        ("t5", 1, "cross_entropy"),
        ("vit", 1, "cross_entropy"),
        ("resnet", 2, "cross_entropy"),
        ("unet", 1, "mse"),
    ];
    for (k, (model, batch, loss)) in models.into_iter().enumerate() {
        let strategy = ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"][k % 4];
        let sharded = format!("sharding.strategy={strategy}");
        for precision in ["fp32", "bf16"] {
            let settings = [format!("loss.kind={loss}"), format!("precision.compute={precision}")];
            let mut settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            if precision == "bf16" {
                settings.extend(["sharding.ranks=2", sharded.as_str()]);
            }
            let planned = plan(&format!("tests/models/{model}/model.onnx"), batch, &settings);
            let options = Options { directions: 1, ..options(&planned.path()) };
            let found = audit(&options).unwrap_or_else(|e| panic!("{model}: {e}"));
            let n = found.gradients.len();
            let count =
                |is: &dyn Fn(&Gradient) -> bool| found.gradients.iter().filter(|g| is(g)).count();
            let kinks = count(&|g| g.verdict == Verdict::Kink);
            let fine = count(&|g| g.error < 1e-3);
            let is_fine = precision != "fp32" || fine * 10 >= n * 9;
            if !found.wrong().is_empty() || kinks * 10 > n || !is_fine {
                let page = found.render(false);
                failures.push(format!("{model} in {precision}: {:#?}\n{page}", found.wrong()));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn optimizers_schedules_and_scales_follow_their_rules() {
    let adafactor = ["optimizer.kind=adafactor", "optimizer.weight_decay=0.1"];
    for more in [
        &["optimizer.kind=sgd", "optimizer.weight_decay=0.1", "optimizer.clip_grad_norm=0.1"][..],
        &["optimizer.kind=momentum", "optimizer.dampening=0.2", "optimizer.clip_grad_value=0.01"],
        &["optimizer.kind=nesterov", "schedule.warmup_steps=3"],
        &["optimizer.kind=adam", "optimizer.weight_decay=0.1", "optimizer.ema=0.9"],
        &["optimizer.kind=adamw", "optimizer.decay=matrices", "optimizer.weight_decay=0.5"],
        &["optimizer.kind=lion", "schedule.kind=cosine", "schedule.total_steps=5"],
        &adafactor,
        &["optimizer.kind=muon", "optimizer.adamw_lr=0.02", "optimizer.weight_decay=0.1"],
        &["schedule.kind=one_cycle", "schedule.total_steps=10"],
        &["schedule.kind=step", "schedule.step_size=1", "schedule.warmup_steps=1"],
        &["precision.compute=fp16", "precision.init_scale=1e9", "precision.growth_interval=1"],
        &["precision.compute=fp16", "precision.loss_scale=128"],
    ] {
        for ranks in ["sharding.ranks=1", "sharding.ranks=2"] {
            let settings = [&["precision.compute=fp32", "optimizer.lr=0.01", ranks], more].concat();
            is_right(&small(&settings, ""), &format!("{settings:?}"));
        }
    }
    let toml = "[[optimizer.group]]\nscope = \"up\"\nlr = 1e-4\nweight_decay = 0.3\n";
    is_right(&small(&["sharding.ranks=2"], toml), "a group");
}

/// What is crossed: of each, settings.
const FACTORS: [&[&str]; 8] = [
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3", "sharding.ranks=4"],
    &["full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "no_shard"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
    &["", "adapter", "frozen", "loss.label_smoothing=0.1"],
    &["layers", "dropout", "tied", "moe_einsum"],
];
const RANKS: usize = 1;
const STRATEGY: usize = 2;
const MORE: usize = 6;
const MODELS: usize = 7;

/// A replica is two ranks, and the adapter is of the written model.
fn is_possible(row: &Row) -> bool {
    let hybrid = row[STRATEGY].is_some_and(|s| FACTORS[STRATEGY][s] == "hybrid_shard");
    let named = row[MORE].is_some_and(|m| matches!(FACTORS[MORE][m], "adapter" | "frozen"));
    (!hybrid || row[RANKS].is_none_or(|ranks| ranks % 2 == 1))
        && (!named || row[MODELS].is_none_or(|m| m == 0))
}

#[test]
fn no_false_alarm_whatever_is_crossed() {
    let rows = rows(&FACTORS, is_possible);
    assert!((20..=40).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let word = |f: usize| FACTORS[f][row[f]];
        let strategy = format!("sharding.strategy={}", word(STRATEGY));
        let mut settings = vec![strategy.as_str()];
        settings.extend((0..MORE).filter(|f| *f != STRATEGY).map(word));
        if word(STRATEGY) == "hybrid_shard" {
            settings.push("sharding.shard_group=2");
        }
        match word(MORE) {
            "adapter" => settings.extend([
                "adapter.kind=lora",
                "adapter.rank=2",
                "adapter.dropout=0.25",
                "adapter.targets=[\"up\", \"down\"]",
            ]),
            "frozen" => settings.push("params.frozen=[\"up\"]"),
            "" => {}
            other => settings.push(other),
        }
        let planned = match word(MODELS) {
            "layers" => small(&settings, ""),
            model => plan_to_evaluate(&format!("tests/models/{model}/model.onnx"), 2, &settings),
        };
        let found = is_right(&planned, &format!("{settings:?} {}", word(MODELS)));
        let several = !word(RANKS).ends_with("=1");
        assert_eq!(found.one_rank.is_some(), several, "{settings:?}");
        // The first step overflows in fp16.
        if !word(0).ends_with("fp16") {
            assert_eq!(found.kernels.is_some(), !several, "{settings:?}");
        }
    }
}

#[test]
fn every_loss_is_its_definition() {
    let text =
        std::fs::read_to_string(file("tests/models/losses/reference.json")).expect("it is there");
    let cases: Value = serde_json::from_str(&text).expect("JSON");
    for (name, case) in cases.as_object().expect("cases") {
        for ranks in ["sharding.ranks=1", "sharding.ranks=2"] {
            let mut settings = vec!["precision.compute=fp32", ranks, "run.accumulation=2"];
            let own = case["settings"].as_array().expect("settings");
            settings.extend(own.iter().map(|s| s.as_str().expect("a setting")));
            let planned = plan("tests/models/losses/model.onnx", 2, &settings);
            let data = Source::new(vec![file("tests/models/losses/data.safetensors")], None);
            let options = Options { data, ..options(&planned.path()) };
            let found = audit(&options).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(found.wrong().is_empty(), "{name}, {ranks}: {:#?}", found.wrong());
        }
    }
}

#[test]
fn documents_dropout_and_8_bit_floats_are_the_same_on_both_sides() {
    for (model, settings) in [
        ("gpt2", &["data.document_separator=1", "precision.compute=fp32", "sharding.ranks=2"][..]),
        ("dropout", &["precision.compute=fp32", "sharding.ranks=2", "run.accumulation=2"]),
        ("mlp", &["precision.compute=fp8", "sharding.ranks=2"]),
        ("mlp", &["precision.compute=bf16-pure", "sharding.reduce_dtype=bf16", "sharding.ranks=2"]),
        ("lstm", &["precision.compute=fp32"]),
        ("moe_dispatch", &["precision.compute=fp32"]),
    ] {
        let planned = plan(&format!("tests/models/{model}/model.onnx"), 1, settings);
        is_right(&planned, &format!("{model} {settings:?}"));
    }
}

#[test]
fn statistics_of_all_ranks_are_evaluated_so() {
    let sync = ["model.batch_norm=sync", "precision.compute=fp32", "sharding.ranks=2"];
    let found = is_right(&plan("tests/models/resnet/model.onnx", 1, &sync), "sync");
    assert!(found.one_rank.is_none() && found.notes.len() == 1, "{:?}", found.notes);
}

#[test]
fn a_stated_gradient_is_said_to_be_one() {
    let planned = plan("tests/models/custom_gradients/model.json", 4, &["precision.compute=fp32"]);
    let found = is_right(&planned, "stated");
    let stated = found.gradients.iter().filter(|g| g.verdict == Verdict::Stated).count();
    assert!(stated > 0, "{}", found.render(false));
    assert!(found.render(false).contains("stated gradient is not their derivative"));
}

#[test]
fn data_that_are_given_are_used_and_parameters_are_chosen() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["precision.compute=fp32"]);
    let data = file("tests/models/mlp/data.safetensors");
    let (path, data) = (planned.path(), data.to_str().expect("text"));
    let path = path.to_str().expect("text");
    let run = |more: &[&str]| {
        let cli = Cli::try_parse_from([&["frit", "audit", path, "--json"], more].concat());
        let text = execute(&cli.expect("a command")).unwrap_or_else(|e| panic!("{e}"));
        serde_json::from_str::<Value>(&text).expect("JSON")
    };
    let chosen = ["--data", data, "--parameters", "*.bias", "--directions", "2"];
    let found = run(&chosen);
    assert_eq!(found["right"], true);
    let names: Vec<&str> = found["gradients"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|g| g["parameter"].as_str())
        .collect();
    assert!(!names.is_empty() && names.iter().all(|n| n.ends_with(".bias")), "{names:?}");
    let other = run(&["--parameters", "*.bias"]);
    assert_ne!(found["loss"], other["loss"], "random numbers are other data");
}

#[test]
fn what_cannot_be_audited_is_refused() {
    let refused = |options: &Options, code: &str, word: &str| {
        let error = audit(options).expect_err(word);
        assert_eq!((error.diagnostics[0].code.as_str(), error.exit_code()), (code, 2), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    let planned = plan_to_evaluate("tests/models/mlp/model.onnx", 4, &[]);
    refused(&options(&planned.path().join("eval")), "E117", "only evaluates");
    refused(&Options { seconds: 0, ..options(&planned.path()) }, "E117", "--seconds");
    let unknown = Options { parameters: vec!["nothing".into()], ..options(&planned.path()) };
    refused(&unknown, "E097", "matches no parameter");
    let moved = Options { model: Some("gone.onnx".into()), ..options(&planned.path()) };
    refused(&moved, "E112", "gone.onnx");
    let data = Source::new(vec!["gone.safetensors".into()], None);
    refused(&Options { data, ..options(&planned.path()) }, "E100", "gone.safetensors");
    let gpus = ["target.device=cuda", "target.arch=sm_90", "sharding.ranks=2"];
    let gpus = plan("tests/models/mlp/model.onnx", 4, &gpus);
    refused(&options(&gpus.path()), "E117", "GPUs");
}
