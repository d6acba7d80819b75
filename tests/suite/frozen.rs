//! Frozen parameters are stored in the dtype in which they are read, and steps are bit-identical.

use crate::pairs::{Row, rows};
use crate::support::{Planned, file, plan, plan_to_evaluate, plan_to_evaluate_configured};
use frit_ir::DType;
use frit_ir::plan::{Action, Plan};
use frit_passes::verify_plan::{verify_evaluation, verify_plan};
use frit_runtime::checkpoint::{Checkpoint, CheckpointOptions};
use frit_runtime::converted;
use frit_runtime::run::{RunOptions, RunReport, run};
use frit_runtime::validation::ValidationOptions;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: usize = 3;

/// What is crossed: of each, settings, or what is said of it in words. Of a model, the parameters that are frozen.
const FACTORS: [&[&str]; 9] = [
    &[
        "mlp fc1.* fc2.weight",
        "dropout 0.*",
        "tied onnx::MatMul_12 layer.bias",
        "tied table.weight",
    ],
    &["", "optimizer.decay=matrices", "group"],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3", "sharding.ranks=4"],
    &["full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "no_shard"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
    &[
        "precision.compute=fp32",
        "precision.compute=bf16",
        "precision.compute=fp16",
        "precision.compute=fp8",
        "precision.compute=bf16-pure",
        "sharding.param_dtype=bf16",
    ],
    &["optimizer.ema=0", "optimizer.ema=0.9", "optimizer.kind=adafactor", "optimizer.kind=muon"],
];
const MODEL: usize = 0;
const GROUPS: usize = 1;
const RANKS: usize = 2;
const STRATEGY: usize = 3;
const PRECISION: usize = 7;

/// A replica is two ranks.
fn is_possible(row: &Row) -> bool {
    let hybrid = row[STRATEGY].is_some_and(|s| FACTORS[STRATEGY][s] == "hybrid_shard");
    !hybrid || row[RANKS].is_none_or(|ranks| ranks % 2 == 1)
}

/// A row's plan, with its frozen parameters in this dtype, and the name of its model.
fn planned(row: &[usize], frozen_dtype: &str) -> (Planned, &'static str) {
    let words = FACTORS[MODEL][row[MODEL]];
    let (model, frozen) = words.split_once(' ').expect("a model and patterns");
    let patterns: Vec<&str> = frozen.split(' ').collect();
    let strategy = format!("sharding.strategy={}", FACTORS[STRATEGY][row[STRATEGY]]);
    let frozen = format!("params.frozen={patterns:?}");
    let dtype = format!("params.frozen_dtype={frozen_dtype}");
    let mut settings = vec![strategy.as_str(), &frozen, &dtype, "optimizer.lr=0.01"];
    if strategy.ends_with("hybrid_shard") {
        settings.push("sharding.shard_group=2");
    }
    let mut toml = "";
    match FACTORS[GROUPS][row[GROUPS]] {
        "" => {}
        "group" => toml = "[[optimizer.group]]\nscope = \"*.bias\"\nlr = 1e-4\n",
        setting => settings.push(setting),
    }
    settings.extend((RANKS..FACTORS.len()).filter(|f| *f != STRATEGY).map(|f| FACTORS[f][row[f]]));
    (plan_to_evaluate_configured(&model_of(model), 2, toml, &settings), model)
}

fn model_of(model: &str) -> String {
    format!("tests/models/{model}/model.onnx")
}

fn data(model: &str) -> std::path::PathBuf {
    file(&format!("tests/models/{model}/data.safetensors"))
}

fn options(model: &str, dir: &Path, steps: usize) -> RunOptions {
    RunOptions {
        steps,
        data: data(model).into(),
        validation: Some(ValidationOptions { data: data(model).into(), every: Some(1) }),
        checkpoint: Some(CheckpointOptions {
            dir: dir.join("checkpoints"),
            every: Some(1),
            resume: true,
            keep: None,
        }),
        save: Some(dir.join("saved.safetensors")),
        threads: Some(1),
        ..RunOptions::default()
    }
}

fn train(planned: &Planned, options: &RunOptions) -> RunReport {
    run(&planned.path(), options).unwrap_or_else(|e| panic!("{e}"))
}

/// Bytes of every tensor of a file, by name.
pub(crate) fn tensors(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = std::fs::read(path).expect("tensors");
    let file = SafeTensors::deserialize(&bytes).expect("tensors");
    file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect()
}

/// Losses and validation losses as bits, of a run that ends and is continued.
fn losses(planned: &Planned, options: impl Fn(usize) -> RunOptions) -> Vec<u64> {
    let (first, second) = (train(planned, &options(STEPS - 1)), train(planned, &options(STEPS)));
    assert_eq!(second.start, STEPS - 1);
    let all = [&first, &second].map(|r| {
        let validation = r.validation.iter().map(|(_, loss)| loss);
        r.losses.iter().chain(validation).map(|x| x.to_bits()).collect::<Vec<u64>>()
    });
    let all = all.concat();
    assert_eq!(all.len(), 2 * STEPS);
    all
}

/// Parameters that are held in fewer bits than f32.
fn narrow(plan: &Plan) -> Vec<&str> {
    let groups = plan.groups.iter().filter(|g| g.dtype != DType::F32);
    let params = groups.flat_map(|g| &g.segments).map(|s| plan.params[s.param].name.as_str());
    let mut names: Vec<&str> = params.collect();
    names.sort_unstable();
    names
}

#[test]
fn no_bit_changes_whatever_it_is_crossed_with() {
    let rows = rows(&FACTORS, is_possible);
    assert!((24..=48).contains(&rows.len()), "{} rows", rows.len());
    let mut held = 0;
    for row in rows {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let (narrowed, model) = planned(&row, "compute");
        let (wide, _) = planned(&row, "fp32");
        assert!(narrow(&wide.compiled.plan).is_empty());
        let names = narrow(&narrowed.compiled.plan);
        held += names.len();
        let f32 = FACTORS[PRECISION][row[PRECISION]] == "precision.compute=fp32";
        assert!(!f32 || names.is_empty(), "{words:?}: {names:?}");
        let found = losses(&narrowed, |steps| options(model, narrowed.dir.path(), steps));
        let expected = losses(&wide, |steps| options(model, wide.dir.path(), steps));
        assert_eq!(found, expected, "{words:?}");
        // What is saved is the plan's where it did not train, not what it was rounded to.
        let saved = |planned: &Planned| tensors(&planned.dir.path().join("saved.safetensors"));
        assert!(saved(&narrowed) == saved(&wide), "{words:?}: other parameters are saved");
    }
    assert!(held > 30, "only {held} parameters are held in fewer bits");
}

/// The settings that train the last block of gpt2 alone.
const LAST_BLOCK: &str = "params.trainable=[\"**.h.1.**\"]";
const GPT2: &str = "tests/models/gpt2/model.onnx";

#[test]
fn a_frozen_base_takes_half_the_bytes_and_is_gathered_as_it_is_held() {
    for ranks in ["sharding.ranks=1", "sharding.ranks=2"] {
        let of = |dtype: &str| plan(GPT2, 2, &[LAST_BLOCK, ranks, dtype]).compiled.plan;
        let (narrowed, wide) = (of("params.frozen_dtype=compute"), of("params.frozen_dtype=fp32"));
        let names = narrow(&narrowed);
        // Normalizations and what is added to the residual stream are read in f32, and so is the table of tokens, by
        // its rows.
        let expected = [
            "attn.c_attn.bias",
            "attn.c_attn.weight",
            "attn.c_proj.weight",
            "mlp.c_fc.bias",
            "mlp.c_fc.weight",
            "mlp.c_proj.weight",
        ];
        let expected = expected.map(|name| format!("net.transformer.h.0.{name}"));
        assert_eq!(names, expected);
        let elements: usize = narrowed
            .groups
            .iter()
            .filter(|g| g.dtype == DType::BF16)
            .map(|g| {
                assert!(!g.trainable && g.states.is_empty());
                assert_eq!(narrowed.buffers[g.master].bytes, 2 * g.shard_numel);
                g.shard_numel
            })
            .sum();
        let saved = wide.persistent_bytes - narrowed.persistent_bytes;
        assert!(saved.abs_diff(2 * elements) <= 512, "{saved} of {elements} elements");
        assert!(narrowed.summary().cast_bytes < wide.summary().cast_bytes);
        assert!(narrowed.workspace_bytes <= wide.workspace_bytes);
        let gathers = |plan: &Plan| -> Vec<(DType, bool)> {
            let of = |t: &frit_ir::plan::Task| match &t.action {
                Action::AllGather { group, send, .. } if !plan.groups[*group].trainable => {
                    Some((send.ty.dtype, send.buffer == plan.groups[*group].master))
                }
                _ => None,
            };
            plan.tasks.iter().filter_map(of).collect()
        };
        // What is sent is what is held.
        assert!(gathers(&narrowed).iter().all(|(_, as_held)| *as_held));
        assert!(ranks.ends_with('1') || gathers(&wide).contains(&(DType::BF16, false)));
        assert!(ranks.ends_with('1') || gathers(&narrowed).contains(&(DType::BF16, true)));
    }
}

#[test]
fn blocks_units_and_prefetch_change_no_bit() {
    for settings in [
        &["sharding.ranks=2", "run.accumulation=2"][..],
        &["sharding.ranks=2", "precision.compute=fp8", "sharding.prefetch=auto"],
        &["sharding.ranks=4", "sharding.reshard_after_forward=2", "memory.recompute=unit"],
        &["sharding.ranks=3", "sharding.wrap=size=20000", "memory.offload=parameters"],
        &["sharding.ranks=1", "memory.offload=parameters", "precision.compute=fp16"],
        &["sharding.ranks=2", "precision.compute=fp16", "sharding.strategy=no_shard"],
    ] {
        let of = |dtype: &str| {
            let settings = [&[LAST_BLOCK, dtype], settings].concat();
            let planned = plan_to_evaluate_configured(GPT2, 1, "", &settings);
            let found = losses(&planned, |steps| options("gpt2", planned.dir.path(), steps));
            (narrow(&planned.compiled.plan).len(), found)
        };
        let (narrowed, wide) = (of("params.frozen_dtype=compute"), of("params.frozen_dtype=fp32"));
        assert!(narrowed.0 > 4 && wide.0 == 0, "{settings:?}");
        assert_eq!(narrowed.1, wide.1, "{settings:?}");
    }
}

#[test]
fn runs_that_start_from_a_file_hold_its_values() {
    let settings = ["params.frozen=[\"fc1.*\", \"fc2.*\"]", "sharding.ranks=2"];
    let of = |dtype: &str| {
        let dtype = format!("params.frozen_dtype={dtype}");
        let settings = [&settings[..], &[dtype.as_str()]].concat();
        plan_to_evaluate_configured(&model_of("mlp"), 2, "", &settings)
    };
    let other = plan(&model_of("mlp"), 2, &["optimizer.lr=0.1"]);
    let base = other.dir.path().join("base.safetensors");
    let train_base = RunOptions {
        steps: 2,
        data: data("mlp").into(),
        save: Some(base.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    train(&other, &train_base);
    let (narrowed, wide) = (of("compute"), of("fp32"));
    let from = |planned: &Planned, steps| {
        let weights = vec![base.clone()];
        RunOptions { weights, ..options("mlp", planned.dir.path(), steps) }
    };
    let expected = losses(&wide, |steps| from(&wide, steps));
    assert_eq!(losses(&narrowed, |steps| from(&narrowed, steps)), expected);
    // These are not the plan's: what is held is saved, in f32.
    let base = tensors(&base);
    let saved = tensors(&narrowed.dir.path().join("saved.safetensors"));
    let held = converted(&base["fc1.weight"], DType::F32, DType::BF16).expect("known");
    let held = converted(&held, DType::BF16, DType::F32).expect("known");
    assert!(saved["fc1.weight"] == *held && saved["fc1.weight"] != base["fc1.weight"]);
    assert!(saved["fc3.weight"] != base["fc3.weight"]);
}

#[test]
fn checkpoints_go_from_one_dtype_to_another() {
    let of = |dtype: &str, ranks: &str| {
        let settings =
            ["params.frozen=[\"fc1.*\", \"fc2.*\"]", "optimizer.clip_grad_norm=0", dtype, ranks];
        plan_to_evaluate_configured(&model_of("mlp"), 2, "", &settings)
    };
    let compute = of("params.frozen_dtype=compute", "sharding.ranks=2");
    let wide = of("params.frozen_dtype=fp32", "sharding.ranks=2");
    let one = of("params.frozen_dtype=fp32", "sharding.ranks=1");
    let four = of("params.frozen_dtype=compute", "sharding.ranks=4");
    let whole = losses(&wide, |steps| options("mlp", wide.dir.path(), steps));
    for (first, second) in [(&compute, &wide), (&wide, &compute)] {
        let dir = tempfile::tempdir().expect("a directory");
        let begun = train(first, &options("mlp", dir.path(), 2));
        let ended = train(second, &options("mlp", dir.path(), 3));
        let found = [begun.losses, ended.losses].concat();
        let expected = [&whole[..2], &whole[4..5]].concat();
        assert_eq!(found.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), expected);
    }
    // The checkpoint says how it holds them, and is read on other ranks.
    let dir = tempfile::tempdir().expect("a directory");
    train(&compute, &options("mlp", dir.path(), 2));
    let checkpoint = Checkpoint::open(&dir.path().join("checkpoints")).expect("complete");
    let dtype = |key: &str| checkpoint.entry(key).expect("an entry").dtype;
    assert_eq!((dtype("param/fc1.weight"), dtype("param/fc3.weight")), (DType::BF16, DType::F32));
    assert!(checkpoint.entry("adam_m/fc1.weight").is_none());
    for other in [&one, &four] {
        let copy = tempfile::tempdir().expect("a directory");
        train(&compute, &options("mlp", copy.path(), 2));
        assert_eq!(train(other, &options("mlp", copy.path(), 3)).start, 2);
    }
}

/// An output that the loss does not read, and that reads a frozen parameter in f32.
const TWO_OUTPUTS: &str = r#"{ "frit_model": 1, "name": "outputs",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 4] } ],
  "params": [ { "name": "base", "shape": [4, 4], "init": { "normal": { "std": 0.5 } } },
              { "name": "head", "shape": [4, 3], "init": { "normal": { "std": 0.5 } } } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "base"], "outputs": ["h"] },
             { "op": "tanh", "inputs": ["h"], "outputs": ["t"] },
             { "op": "matmul", "inputs": ["t", "head"], "outputs": ["logits"] },
             { "op": "exp", "inputs": ["base"], "outputs": ["other"] } ],
  "outputs": ["logits", "other"] }"#;

#[test]
fn what_the_evaluation_reads_in_f32_is_held_in_f32() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model.json");
    let held = |text: &str| {
        std::fs::write(&model, text).expect("written");
        let settings = ["params.frozen=[\"base\"]"];
        let model = model.to_str().expect("UTF-8");
        let planned = plan_to_evaluate_configured(model, 2, "", &settings);
        let evaluation = planned.compiled.evaluation.expect("an evaluation").plan;
        let names = |plan: &Plan| narrow(plan).iter().map(|n| n.to_string()).collect::<Vec<_>>();
        (names(&planned.compiled.plan), names(&evaluation))
    };
    assert_eq!(held(TWO_OUTPUTS), (vec![], vec![]));
    let without = TWO_OUTPUTS.replace("[\"logits\", \"other\"]", "[\"logits\"]");
    let base = vec!["base".to_string()];
    assert_eq!(held(&without), (base.clone(), base));
}

#[test]
fn what_only_the_evaluation_reads_is_held_in_f32() {
    for compute in ["bf16", "fp16", "fp32"] {
        let precision = format!("precision.compute={compute}");
        let settings = ["loss.logits=logits", "params.frozen=[\"router.*\"]", &precision];
        let planned = plan_to_evaluate("tests/museum/models/router.json", 2, &settings);
        let evaluation = planned.compiled.evaluation.expect("an evaluation").plan;
        let router = evaluation.params.iter().find(|p| p.name == "router.weight");
        assert!(router.is_some_and(|p| p.ty.dtype == DType::F32), "{compute}");
    }
}

#[test]
fn a_plan_that_holds_parameters_otherwise_than_it_reads_them_is_refused() {
    let settings = ["params.frozen=[\"fc1.*\"]", "sharding.ranks=2", "memory.offload=parameters"];
    let planned = plan_to_evaluate_configured(&model_of("mlp"), 2, "", &settings);
    let evaluation = planned.compiled.evaluation.as_ref().expect("an evaluation").plan.clone();
    let of = |dtype: DType, trainable: bool| {
        let mut plan = planned.compiled.plan.clone();
        let group = plan
            .groups
            .iter_mut()
            .find(|g| g.trainable == trainable && (trainable || g.dtype == DType::BF16));
        group.expect("such a group").dtype = dtype;
        plan
    };
    let code = |plan: &Plan| verify_plan(plan).expect_err("refused")[0].code.clone();
    assert_eq!(code(&of(DType::F16, false)), "P105");
    // It has not that many bytes; what trains is f32; no parameter is held as integers.
    for plan in [of(DType::F32, false), of(DType::BF16, true), of(DType::I32, false)] {
        assert_eq!(code(&plan), "P001");
    }
    let mut other = evaluation;
    other.groups.iter_mut().find(|g| g.dtype == DType::BF16).expect("held in bf16").dtype =
        DType::F16;
    let found = verify_evaluation(&other, &planned.compiled.plan).expect_err("refused");
    assert!(["P105", "P406"].contains(&found[0].code.as_str()), "{found:?}");
}
