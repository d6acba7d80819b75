//! Low-rank adapters: PEFT's numbers and files, merged models, and every other option beside them.

use crate::frozen::tensors;
use crate::pairs::{Row, rows};
use crate::parity;
use crate::support::{Planned, compile_at, file, plan, plan_at, plan_to_evaluate, resumed_losses};
use frit::export::{self, Trained};
use frit_ir::plan::{ParamHome, Plan};
use frit_runtime::checkpoint::Checkpoint;
use frit_runtime::run::{RunOptions, RunReport, run};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const LLAMA: [&str; 4] = [
    "adapter.kind=lora",
    "adapter.rank=4",
    "adapter.alpha=8",
    "adapter.targets=[\"**.q_proj\", \"**.v_proj\", \"**.down_proj\"]",
];
const GPT2: [&str; 4] = [
    "adapter.kind=lora",
    "adapter.rank=3",
    "adapter.alpha=5",
    "adapter.targets=[\"**.c_attn\", \"**.c_fc\"]",
];

fn data(model: &str) -> PathBuf {
    file(&format!("tests/models/{model}/data.safetensors"))
}

/// What PEFT wrote before the first step.
fn adapter(model: &str) -> PathBuf {
    file(&format!("tests/models/lora/{model}"))
}

fn options(model: &str, steps: usize) -> RunOptions {
    RunOptions { steps, data: data(model).into(), threads: Some(1), ..RunOptions::default() }
}

fn train(planned: &Planned, options: &RunOptions) -> RunReport {
    run(&planned.path(), options).unwrap_or_else(|e| panic!("{e}"))
}

fn trained(plan: &Plan) -> Vec<&str> {
    let indices = plan.params.iter_enumerated().filter(|(i, _)| plan.is_changed(*i));
    indices.map(|(_, p)| p.name.as_str()).collect()
}

#[test]
fn losses_are_those_of_peft() {
    let text =
        std::fs::read_to_string(file("tests/models/lora/reference.json")).expect("it is there");
    let reference: BTreeMap<String, Vec<f64>> = serde_json::from_str(&text).expect("losses");
    for (model, settings) in [("llama", LLAMA), ("gpt2", GPT2)] {
        for ranks in [1, 2] {
            let more = ["precision.compute=fp32", "optimizer.lr=0.01"];
            let ranks_key = format!("sharding.ranks={ranks}");
            let settings = [&settings[..], &more, &[&ranks_key]].concat();
            let planned = plan(&format!("tests/models/{model}/model.onnx"), 8 / ranks, &settings);
            let options = RunOptions { weights: vec![adapter(model)], ..options(model, 20) };
            let losses = train(&planned, &options).losses;
            let deviation = parity::largest(&losses, &reference[model]);
            assert!(deviation < 1e-5, "{model} on {ranks} ranks: {deviation}");
        }
    }
}

#[test]
fn an_adapter_goes_to_peft_and_back() {
    for (model, settings) in [("llama", LLAMA), ("gpt2", GPT2)] {
        let settings = [&settings[..], &["precision.compute=fp32"]].concat();
        let planned = plan(&format!("tests/models/{model}/model.onnx"), 4, &settings);
        let (saved, folder) =
            (planned.dir.path().join("saved.safetensors"), planned.dir.path().join("adapter"));
        let all = train(&planned, &options(model, 4)).losses;
        let first =
            RunOptions { save: Some(saved.clone()), trained_only: true, ..options(model, 2) };
        train(&planned, &first);
        let read = Trained::of_plan(&planned.path(), &saved).unwrap_or_else(|e| panic!("{e}"));
        export::peft(&read, &folder).unwrap_or_else(|e| panic!("{e}"));
        // Names, shapes and description are those of the adapter that PEFT wrote.
        let [own, theirs] = [&folder, &adapter(model)].map(|f| f.join("adapter_model.safetensors"));
        let sizes = |path: &Path| -> BTreeMap<String, usize> {
            tensors(path).into_iter().map(|(name, bytes)| (name, bytes.len())).collect()
        };
        assert_eq!(sizes(&own), sizes(&theirs));
        let [own, theirs] = [&folder, &adapter(model)].map(|f| {
            let text = std::fs::read_to_string(f.join("adapter_config.json")).expect("it is there");
            serde_json::from_str::<serde_json::Value>(&text).expect("JSON")
        });
        for key in ["peft_type", "r", "fan_in_fan_out", "bias"] {
            assert_eq!(own[key], theirs[key], "{key}");
        }
        assert_eq!(own["lora_alpha"].as_f64(), theirs["lora_alpha"].as_f64());
        // Neither the optimizer's state nor the step are in it: the first loss alone is the same.
        let again = RunOptions { weights: vec![folder], ..options(model, 1) };
        let resumed = RunOptions { weights: vec![saved], ..options(model, 1) };
        let losses = [again, resumed].map(|o| train(&planned, &o).losses);
        assert_eq!(losses[0], losses[1], "{model}");
        assert_ne!(losses[0][0], all[0]);
    }
}

#[test]
fn what_trains_beside_an_adapter_goes_to_peft_and_back() {
    let also = "params.trainable=[\"**.norm.weight\", \"**.layers.1.mlp.up_proj.weight\"]";
    let settings = [&LLAMA[..], &["precision.compute=fp32", also]].concat();
    let planned = plan("tests/models/llama/model.onnx", 4, &settings);
    let folder = planned.dir.path().join("adapter");
    for trained_only in [true, false] {
        let saved = planned.dir.path().join(format!("saved-{trained_only}.safetensors"));
        let some = RunOptions { save: Some(saved.clone()), trained_only, ..options("llama", 2) };
        train(&planned, &some);
        let read = Trained::of_plan(&planned.path(), &saved).unwrap_or_else(|e| panic!("{e}"));
        let files = export::peft(&read, &folder).unwrap_or_else(|e| panic!("{e}"));
        let text = std::fs::read_to_string(&files[1]).expect("the configuration");
        let config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let modules = ["net.model.layers.1.mlp.up_proj", "net.model.norm"];
        assert_eq!(config["modules_to_save"], serde_json::json!(modules));
        let stored = tensors(&files[0]);
        assert_eq!(stored.len(), 2 * 2 * 3 + 2);
        for module in modules {
            assert!(stored.contains_key(&format!("base_model.model.{module}.weight")));
        }
        let from = |path: &Path| RunOptions { weights: vec![path.into()], ..options("llama", 1) };
        let [a, b] = [&folder, &saved].map(|path| train(&planned, &from(path)).losses);
        assert_eq!(a, b);
        // A folder stands for the one file in it.
        let named = planned.dir.path().join("model.safetensors");
        std::fs::copy(&saved, &named).expect("a copy");
        Trained::of_plan(&planned.path(), planned.dir.path()).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn a_merged_model_goes_on_where_training_ended_wherever_its_weights_are() {
    let dir = tempfile::tempdir().expect("a directory");
    let fp32 = ["precision.compute=fp32"];
    for (model, settings) in [("llama", LLAMA), ("gpt2", GPT2)] {
        // The model with its weights in a file beside it, as the dynamo exporter writes it.
        let inside = plan(&format!("tests/models/{model}/model.onnx"), 8, &fp32);
        let own = Trained::of_plan(&inside.path(), &inside.path().join("weights.safetensors"));
        let beside = dir.path().join(format!("{model}.onnx"));
        let options_of = |external_data| export::Options {
            training: true,
            external_data,
            ..export::Options::default()
        };
        let own = own.unwrap_or_else(|e| panic!("{e}"));
        export::onnx(&own, &options_of(true), &beside).unwrap_or_else(|e| panic!("{e}"));
        let planned = plan_at(&beside, 8, &[&settings[..], &fp32].concat());
        let losses = train(&planned, &options(model, 21)).losses;
        for trained_only in [true, false] {
            let saved = planned.dir.path().join("saved.safetensors");
            let more = RunOptions { save: Some(saved.clone()), trained_only, ..options(model, 20) };
            train(&planned, &more);
            let read = Trained::of_plan(&planned.path(), &saved).unwrap_or_else(|e| panic!("{e}"));
            let merged = planned.dir.path().join("merged.onnx");
            export::onnx(&read, &options_of(false), &merged).unwrap_or_else(|e| panic!("{e}"));
            let first = train(&plan_at(&merged, 8, &fp32), &options(model, 1)).losses[0];
            // The data has 20 batches: step 20 reads the first again.
            assert!((first - losses[20]).abs() < 1e-5, "{model}: {first} is not {}", losses[20]);
        }
    }
}

#[test]
fn what_belongs_to_no_parameter_is_refused() {
    let settings = [&LLAMA[..], &["precision.compute=fp32"]].concat();
    let planned = plan_to_evaluate("tests/models/llama/model.onnx", 4, &settings);
    // An adapter of another model.
    let other = RunOptions { weights: vec![adapter("gpt2")], ..options("llama", 1) };
    let message = run(&planned.path(), &other).expect_err("another model").to_string();
    assert!(message.contains("adapter.alpha"), "{message}");
    let bare = planned.dir.path().join("bare");
    std::fs::create_dir(&bare).expect("made");
    let weights = bare.join("adapter_model.safetensors");
    std::fs::copy(adapter("gpt2").join("adapter_model.safetensors"), &weights).expect("copied");
    let message =
        run(&planned.path(), &RunOptions { weights: vec![bare.clone()], ..options("llama", 1) });
    assert!(message.expect_err("another model").to_string().contains("unknown to the plan"));
    let evaluation = frit_runtime::eval::Options {
        plan: planned.path(),
        data: vec![data("llama")],
        weights: vec![bare],
        ..Default::default()
    };
    let message = frit_runtime::eval::evaluate(&evaluation).expect_err("another model").to_string();
    assert!(message.contains("unknown to the plan"), "{message}");
}

#[test]
fn everything_but_the_adapter_is_frozen_unless_it_is_named() {
    let with = |more: &str| {
        compile_at(&file("tests/models/llama/model.onnx"), 2, &[&LLAMA[..], &[more]].concat())
    };
    let plan = with("run.seed=1").plan;
    let names = trained(&plan);
    assert_eq!(names.len(), 2 * 2 * 3);
    assert!(names.iter().all(|name| name.contains(".lora_")), "{names:?}");
    assert!(plan.groups.iter().filter(|g| !g.trainable).all(|g| g.states.is_empty()));
    let plan = with("params.trainable=[\"**.norm.weight\"]").plan;
    let names = trained(&plan);
    assert_eq!(names.len(), 2 * 2 * 3 + 1);
    assert!(names.contains(&"net.model.norm.weight"));
    // Both matrices are in the unit of the weight.
    let unit = |name: &str| {
        let param = plan.params.iter().find(|p| p.name.ends_with(name)).expect("a parameter");
        match param.home {
            ParamHome::Group { group, .. } => plan.groups[group].unit,
            _ => panic!("{name} is in no group"),
        }
    };
    for matrix in ["A", "B"] {
        let of_matrix = unit(&format!("layers.1.self_attn.q_proj.lora_{matrix}.weight"));
        assert_eq!(of_matrix, unit("layers.1.self_attn.q_proj.weight"));
    }
}

#[test]
fn targets_that_have_no_weight_are_refused() {
    let refused = |settings: &[&str]| {
        let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
        let config = frit::config::Config::load(None, &settings).unwrap_or_else(|e| panic!("{e}"));
        let request = frit::compilation::Request {
            model: file("tests/models/gpt2/model.onnx"),
            binds: [("batch".to_string(), 2)].into(),
            ..Default::default()
        };
        let refused = frit::compilation::compile(&request, &config, &mut ());
        refused.err().map_or_else(
            || "nothing is wrong".into(),
            |report| format!("{} {report}", report.diagnostics[0].code),
        )
    };
    let lora = "adapter.kind=lora";
    for (settings, expected) in [
        (&[lora, "adapter.targets=[\"**.atn.c_attn\"]"][..], "E231"),
        (&[lora, "adapter.targets=[\"**.atn.c_attn\"]"], "net.transformer.h.0.attn.c_attn"),
        (&[lora, "adapter.targets=[\"**.wpe\"]"], "not only the right operand of matmuls"),
        (&[lora, "adapter.targets=[\"**.wte\"]"], "E231"),
        (&[lora], "without adapter.targets"),
        (&["adapter.targets=[\"**\"]"], "set adapter.kind"),
    ] {
        let found = refused(settings);
        assert!(found.contains(expected), "{settings:?}: {found}");
    }
    // Among what `**` matches there are weights of matmuls; the tables are left alone.
    let plan =
        compile_at(&file("tests/models/gpt2/model.onnx"), 2, &[lora, "adapter.targets=[\"**\"]"])
            .plan;
    assert!(trained(&plan).iter().all(|n| !n.contains("wpe") && n.contains(".lora_")));
}

/// A frozen matrix of an adapter is drawn, so no other file has it.
#[test]
fn frozen_matrices_are_saved_with_what_trains() {
    let frozen = "params.frozen=[\"**.lora_A.*\"]";
    let settings = [&LLAMA[..], &["precision.compute=fp32", frozen]].concat();
    let planned = plan("tests/models/llama/model.onnx", 4, &settings);
    let exported = [true, false].map(|trained_only| {
        let saved = planned.dir.path().join(format!("saved-{trained_only}.safetensors"));
        let some = RunOptions { save: Some(saved.clone()), trained_only, ..options("llama", 2) };
        train(&planned, &some);
        let read = Trained::of_plan(&planned.path(), &saved).unwrap_or_else(|e| panic!("{e}"));
        let folder = planned.dir.path().join("adapter");
        let files = export::peft(&read, &folder).unwrap_or_else(|e| panic!("{e}"));
        let model = planned.dir.path().join("merged.onnx");
        let options = export::Options::default();
        export::onnx(&read, &options, &model).unwrap_or_else(|e| panic!("{e}"));
        (tensors(&files[0]), std::fs::read(&model).expect("the model"))
    });
    assert!(exported[0] == exported[1]);
    assert!(exported[0].0.keys().any(|name| name.contains("lora_A")));
}

#[test]
fn a_matrix_of_adapters_may_be_frozen() {
    let settings = ["adapter.kind=lora", "adapter.targets=[\"**.c_attn\"]"];
    let frozen = "params.frozen=[\"**.lora_A.*\"]";
    let planned =
        compile_at(&file("tests/models/gpt2/model.onnx"), 2, &[settings[0], settings[1], frozen]);
    let trained = trained(&planned.plan);
    assert!(!trained.is_empty() && trained.iter().all(|n| n.ends_with(".lora_B.weight")));
    assert!(planned.plan.lints.iter().all(|lint| lint.code != "W067"), "{:?}", planned.plan.lints);
}

/// What is crossed: of each, settings. Of a model, its targets.
const FACTORS: [&[&str]; 9] = [
    &["llama **.q_proj **.down_proj", "gpt2 **.c_attn", "dropout 0", "bert **.query **.dense"],
    &["adapter.dropout=0", "adapter.dropout=0.2"],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3"],
    &["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
    &["params.trainable=[\"**\"]", "params.trainable=[\"**.bias\", \"**.norm.weight\"]"],
];
const MODEL: usize = 0;
const RANKS: usize = 2;
const STRATEGY: usize = 3;
const ACCUMULATION: usize = 4;
const PRECISION: usize = 7;
const STEPS: usize = 3;

/// A row's settings but for ranks, strategy and what saves memory.
fn settings(row: &[usize]) -> (String, Vec<String>) {
    let words = FACTORS[MODEL][row[MODEL]];
    let (model, targets) = words.split_once(' ').expect("a model and targets");
    let targets: Vec<&str> = targets.split(' ').collect();
    let mut settings = vec![
        "adapter.kind=lora".to_string(),
        "adapter.rank=2".into(),
        format!("adapter.targets={targets:?}"),
        "optimizer.lr=0.01".into(),
    ];
    let more = [1, ACCUMULATION, PRECISION, 8];
    settings.extend(more.iter().map(|f| FACTORS[*f][row[*f]].to_string()));
    (model.to_string(), settings)
}

fn planned(model: &str, batch: usize, settings: &[String]) -> Planned {
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    plan_to_evaluate(&format!("tests/models/{model}/model.onnx"), batch, &settings)
}

/// Losses and validation losses of a run that is resumed.
fn losses(planned: &Planned, model: &str) -> Vec<f64> {
    let save = Some(planned.dir.path().join("saved.safetensors"));
    let options = RunOptions { trained_only: true, save, ..options(model, STEPS) };
    resumed_losses(planned, options)
}

#[test]
fn losses_are_those_of_one_rank_whatever_an_adapter_is_crossed_with() {
    let rows = rows(&FACTORS, |_: &Row| true);
    assert!((12..=40).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let (model, own) = settings(&row);
        let ranks = row[RANKS] + 1;
        let mut all = own.clone();
        all.push(format!("sharding.strategy={}", FACTORS[STRATEGY][row[STRATEGY]]));
        all.extend([RANKS, 5, 6].map(|f| FACTORS[f][row[f]].to_string()));
        let spread = planned(&model, 2, &all);
        let alone = planned(&model, 2 * ranks, &own);
        let (found, expected) = (losses(&spread, &model), losses(&alone, &model));
        assert_eq!(found.len(), 2 * STEPS, "{words:?}");
        let tolerance =
            if FACTORS[PRECISION][row[PRECISION]].ends_with("fp32") { 1e-5 } else { 1e-2 };
        let deviation = parity::largest(&found, &expected);
        assert!(deviation < tolerance, "{words:?}: {deviation}: {found:?} {expected:?}");
        // The adapter has changed, and only what trains is saved.
        let saved = tensors(&spread.dir.path().join("saved.safetensors"));
        let mut names = trained(&spread.compiled.plan);
        names.sort_unstable();
        assert_eq!(saved.keys().map(String::as_str).collect::<Vec<_>>(), names, "{words:?}");
        let zero = |(name, bytes): (&String, &Vec<u8>)| {
            name.contains(".lora_B.") && bytes.iter().all(|b| *b == 0)
        };
        assert!(!saved.iter().any(zero), "{words:?}");
        let checkpoint = Checkpoint::open(&spread.dir.path().join("checkpoints"));
        let checkpoint = checkpoint.unwrap_or_else(|e| panic!("{e}"));
        let read = Trained::of_checkpoint(checkpoint).unwrap_or_else(|e| panic!("{e}"));
        let folder = spread.dir.path().join("adapter");
        export::peft(&read, &folder).unwrap_or_else(|e| panic!("{e}"));
        let merged = spread.dir.path().join("merged.onnx");
        let written = export::onnx(&read, &export::Options::default(), &merged);
        written.unwrap_or_else(|e| panic!("{words:?}: {e}"));
    }
}
