//! Checkpoints and files that omit parameters that no step changes: a run resumes from them with the base model on
//! which it was trained, and no other.

use crate::frozen::tensors;
use crate::pairs::{Row, rows};
use crate::support::{
    Planned, file, plan_to_evaluate, plan_to_evaluate_at, plan_to_evaluate_configured,
};
use clap::Parser;
use frit::commands::{Cli, execute};
use frit::export::{self, Trained};
use frit_runtime::checkpoint::{Checkpoint, CheckpointOptions};
use frit_runtime::eval::{self, evaluate};
use frit_runtime::run::{RunOptions, RunReport, run};
use frit_runtime::validation::ValidationOptions;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const STEPS: usize = 3;

/// What is crossed. Of a model, the parameters that are frozen; of a base, where it is.
const FACTORS: [&[&str]; 8] = [
    &["mlp fc1.* fc2.weight", "dropout 0.*", "tied table.weight"],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3", "sharding.ranks=4"],
    &["full_shard", "shard_optimizer", "hybrid_shard", "no_shard"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.offload=none", "memory.offload=parameters"],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
    &["plan", "file"],
    &["optimizer.ema=0", "optimizer.ema=0.9", "params.frozen_dtype=fp32"],
];
const MODEL: usize = 0;
const RANKS: usize = 1;
const STRATEGY: usize = 2;
const BASE: usize = 6;
const EMA: usize = 7;

/// A replica is two ranks.
fn is_possible(row: &Row) -> bool {
    let hybrid = row[STRATEGY].is_some_and(|s| FACTORS[STRATEGY][s] == "hybrid_shard");
    !hybrid || row[RANKS].is_none_or(|ranks| ranks % 2 == 1)
}

fn model_of(model: &str) -> String {
    format!("tests/models/{model}/model.onnx")
}

fn data(model: &str) -> PathBuf {
    file(&format!("tests/models/{model}/data.safetensors"))
}

fn planned(row: &[usize]) -> (Planned, &'static str) {
    let (model, frozen) = FACTORS[MODEL][row[MODEL]].split_once(' ').expect("a model and patterns");
    let patterns: Vec<&str> = frozen.split(' ').collect();
    let frozen = format!("params.frozen={patterns:?}");
    let strategy = format!("sharding.strategy={}", FACTORS[STRATEGY][row[STRATEGY]]);
    let mut settings = vec![strategy.as_str(), &frozen, "optimizer.lr=0.01"];
    if strategy.ends_with("hybrid_shard") {
        settings.push("sharding.shard_group=2");
    }
    let others = (RANKS..FACTORS.len()).filter(|f| ![STRATEGY, BASE].contains(f));
    settings.extend(others.map(|f| FACTORS[f][row[f]]));
    (plan_to_evaluate_configured(&model_of(model), 2, "", &settings), model)
}

/// A run with checkpoints and all files in `dir`.
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

fn refused(planned: &Planned, options: &RunOptions) -> String {
    run(&planned.path(), options).expect_err("refused").to_string()
}

/// Parameters of the model that another training ended with.
fn other_base(model: &str, dir: &Path) -> PathBuf {
    let planned = plan_to_evaluate(&model_of(model), 2, &["optimizer.lr=0.1"]);
    let base = dir.join("base.safetensors");
    let options = RunOptions {
        steps: 2,
        data: data(model).into(),
        save: Some(base.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    train(&planned, &options);
    base
}

#[test]
fn it_goes_on_bit_for_bit_whatever_it_is_crossed_with() {
    let rows = rows(&FACTORS, is_possible);
    assert!((14..=32).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let (planned, model) = planned(&row);
        let dir = tempfile::tempdir().expect("a directory");
        let weights = match FACTORS[BASE][row[BASE]] {
            "file" => vec![other_base(model, dir.path())],
            _ => vec![],
        };
        let [whole, parts] = ["whole", "parts"].map(|name| dir.path().join(name));
        [&whole, &parts].iter().for_each(|dir| std::fs::create_dir(dir).expect("created"));
        let ema = FACTORS[EMA][row[EMA]] == "optimizer.ema=0.9";
        let of = |dir: &Path, steps: usize, trained_only: bool| RunOptions {
            weights: weights.clone(),
            trained_only,
            save_ema: ema.then(|| dir.join("average.safetensors")),
            ..options(model, dir, steps)
        };
        let expected = train(&planned, &of(&whole, STEPS, false));
        let first = train(&planned, &of(&parts, STEPS - 1, true));
        let second = train(&planned, &of(&parts, STEPS, true));
        assert_eq!([first.losses, second.losses].concat(), expected.losses, "{words:?}");
        let validation = [first.validation, second.validation].concat();
        assert_eq!(validation, expected.validation, "{words:?}");
        // What is there is the same, and what is not is frozen.
        for name in
            ["saved.safetensors", "average.safetensors"].into_iter().take(1 + usize::from(ema))
        {
            let (all, some) = (tensors(&whole.join(name)), tensors(&parts.join(name)));
            assert!(some.len() < all.len() && !some.is_empty(), "{words:?}");
            assert!(some.iter().all(|(name, value)| all[name] == *value), "{words:?} {name}");
        }
        let checkpoint = Checkpoint::open(&parts.join("checkpoints")).expect("complete");
        let left_out = &checkpoint.index.left_out;
        assert_eq!(
            left_out.len() + checkpoint.parameters().count(),
            planned.compiled.plan.params.len()
        );
        assert!(left_out.values().all(|l| l.of_plan == weights.is_empty()), "{words:?}");
        // Evaluated alone it is what it was beside the training.
        let evaluated = eval::Options {
            plan: planned.path(),
            data: vec![data(model)],
            weights: weights.clone(),
            checkpoint: Some(parts.join("checkpoints")),
            threads: Some(1),
            ..eval::Options::default()
        };
        let report = evaluate(&evaluated).unwrap_or_else(|e| panic!("{words:?}: {e}"));
        let loss = report.expect("rank 0").loss.expect("a loss");
        assert_eq!(validation.last(), Some(&(STEPS, loss)), "{words:?}");
    }
}

/// As a plan of a module outlives the file that the module was exported to, with its weights beside.
#[test]
fn it_is_exported_when_the_model_is_gone() {
    let planned = plan_to_evaluate(&model_of("mlp"), 2, &SETTINGS);
    let dir = tempfile::tempdir().expect("a directory");
    let saved = |planned: &Planned, trained_only: bool| {
        let of = |name: &str| dir.path().join(format!("{name}-{trained_only}.safetensors"));
        let all = RunOptions { trained_only, ..options("mlp", dir.path(), 1) };
        let all = RunOptions { checkpoint: None, save: Some(of("saved")), ..all };
        train(planned, &all);
        of("saved")
    };
    let export = |planned: &Planned, weights: &Path, to: &str, external_data: bool| {
        let trained = Trained::of_plan(&planned.path(), weights).unwrap_or_else(|e| panic!("{e}"));
        let options = export::Options { external_data, ..export::Options::default() };
        let to = dir.path().join(to);
        export::onnx(&trained, &options, &to).unwrap_or_else(|e| panic!("{e}"));
        to
    };
    let model = export(&planned, &saved(&planned, false), "model.onnx", true);
    let planned = plan_to_evaluate_at(&model, 2, &SETTINGS);
    std::fs::remove_file(&model).expect("removed");
    std::fs::remove_file(dir.path().join("model.onnx.data")).expect("removed");
    let [whole, part] = [false, true].map(|trained_only| {
        let weights = saved(&planned, trained_only);
        std::fs::read(export(&planned, &weights, "exported.onnx", false)).expect("written")
    });
    assert!(whole == part);
}

const SETTINGS: [&str; 2] = ["params.frozen=[\"fc1.*\", \"fc2.weight\"]", "sharding.ranks=2"];

#[test]
fn another_base_is_one_error() {
    let planned = plan_to_evaluate(&model_of("mlp"), 2, &SETTINGS);
    let dir = tempfile::tempdir().expect("a directory");
    let base = other_base("mlp", dir.path());
    let of = |steps, weights: &[PathBuf]| RunOptions {
        weights: weights.to_vec(),
        trained_only: true,
        ..options("mlp", dir.path(), steps)
    };
    train(&planned, &of(2, std::slice::from_ref(&base)));
    let error = refused(&planned, &of(3, &[]));
    for part in ["step-00000002", "`fc1.weight` and 2 more", "--weights"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    let saved = dir.path().join("saved.safetensors");
    let adapter = dir.path().join("adapter.safetensors");
    std::fs::copy(&saved, &adapter).expect("copied");
    // The file of what was trained says it too, and goes on top of its base.
    let fresh = |weights: &[PathBuf]| RunOptions {
        steps: 0,
        data: data("mlp").into(),
        weights: weights.to_vec(),
        save: Some(dir.path().join("merged.safetensors")),
        threads: Some(1),
        ..RunOptions::default()
    };
    let error = refused(&planned, &fresh(std::slice::from_ref(&adapter)));
    assert!(error.contains("adapter.safetensors") && error.contains("another base"), "{error}");
    train(&planned, &fresh(&[base.clone(), adapter.clone()]));
    let (merged, trained) = (tensors(&dir.path().join("merged.safetensors")), tensors(&adapter));
    assert!(trained.iter().all(|(name, value)| merged[name] == *value));
    // The other way around the base counts.
    train(&planned, &fresh(&[adapter.clone(), base.clone()]));
    let merged = tensors(&dir.path().join("merged.safetensors"));
    assert!(merged["fc3.weight"] == tensors(&base)["fc3.weight"]);
    // A run that went on with all would not be told.
    assert_eq!(train(&planned, &of(3, std::slice::from_ref(&base))).start, 2);
    let evaluated = |weights: &[PathBuf]| eval::Options {
        plan: planned.path(),
        data: vec![data("mlp")],
        weights: weights.to_vec(),
        checkpoint: Some(dir.path().join("checkpoints")),
        ..eval::Options::default()
    };
    let error = evaluate(&evaluated(&[])).expect_err("refused").to_string();
    assert!(error.contains("another base"), "{error}");
    evaluate(&evaluated(&[base])).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_base_may_lack_what_trains_but_not_a_part_of_it() {
    let planned = plan_to_evaluate(&model_of("mlp"), 2, &SETTINGS);
    let dir = tempfile::tempdir().expect("a directory");
    let all = tensors(&other_base("mlp", dir.path()));
    let start = |names: &[&str]| {
        let path = dir.path().join("some.safetensors");
        let shape = |name: &str| planned.compiled.plan.params.iter().find(|p| p.name == name);
        let tensors: Vec<(&str, Vec<usize>, Vec<f32>)> = names
            .iter()
            .map(|name| {
                let shape = shape(name).expect("a parameter").ty.shape.0.clone();
                let values = all[*name].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
                (*name, shape, values.collect())
            })
            .collect();
        crate::support::write_f32(&path, &tensors);
        RunOptions { weights: vec![path], ..options("mlp", dir.path(), 0) }
    };
    train(&planned, &start(&["fc1.weight", "fc1.bias", "fc2.weight"]));
    let saved = tensors(&dir.path().join("saved.safetensors"));
    assert!(saved["fc3.weight"] != all["fc3.weight"]);
    std::fs::remove_dir_all(dir.path().join("checkpoints")).expect("removed");
    let error = refused(&planned, &start(&["fc1.weight", "fc1.bias", "fc2.weight", "fc3.bias"]));
    assert!(error.contains("2 missing: `fc2.bias`, `fc3.weight`"), "{error}");
    let error = refused(&planned, &start(&["fc1.weight"]));
    assert!(error.contains("2 missing: `fc1.bias`, `fc2.weight`"), "{error}");
}

#[test]
fn a_whole_checkpoint_and_one_without_the_base_follow_one_another() {
    let planned = plan_to_evaluate(&model_of("mlp"), 2, &SETTINGS);
    let other = plan_to_evaluate(&model_of("mlp"), 1, &[SETTINGS[0], "sharding.ranks=4"]);
    let dir = tempfile::tempdir().expect("a directory");
    let of = |steps, trained_only| RunOptions { trained_only, ..options("mlp", dir.path(), steps) };
    let sizes = |step: usize| -> u64 {
        let step = dir.path().join(format!("checkpoints/step-{step:08}"));
        let ranks = (0..2).map(|rank| step.join(format!("rank-{rank:05}.safetensors")));
        ranks.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
    };
    train(&planned, &of(1, false));
    train(&planned, &of(2, true));
    train(&planned, &of(3, false));
    assert!(
        2 * sizes(2) < sizes(1) && sizes(1) == sizes(3),
        "{} {} {}",
        sizes(1),
        sizes(2),
        sizes(3)
    );
    // On other ranks, which hold other parts of the base.
    std::fs::remove_dir_all(dir.path().join("checkpoints/step-00000003")).expect("removed");
    std::fs::write(dir.path().join("checkpoints/latest"), "step-00000002\n").expect("written");
    assert_eq!(train(&other, &of(3, true)).start, 2);
}

fn frit(args: &[&str]) -> Result<String, String> {
    let cli = Cli::try_parse_from([&["frit"], args].concat()).unwrap_or_else(|e| panic!("{e}"));
    execute(&cli).map_err(|e| e.to_string())
}

/// The raw data of the initializers of a model, by name.
fn initializers(path: &Path) -> BTreeMap<String, Vec<u8>> {
    use frit::import::onnx::messages::ModelProto;
    let bytes = std::fs::read(path).expect("a model");
    let model: ModelProto = prost::Message::decode(&bytes[..]).expect("a model");
    let tensors = model.graph.expect("a graph").initializer.into_iter();
    tensors.map(|t| (t.name.clone(), t.raw_data.unwrap_or_default().to_vec())).collect()
}

#[test]
fn an_export_has_the_base_of_the_model_unrounded() {
    let planned = plan_to_evaluate(&model_of("mlp"), 2, &SETTINGS);
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    let of = |weights: Vec<PathBuf>| RunOptions {
        weights,
        trained_only: true,
        ..options("mlp", dir.path(), 1)
    };
    train(&planned, &of(vec![]));
    let (plan, adapter) = (planned.path(), path("saved.safetensors"));
    let plan = plan.to_str().expect("UTF-8");
    let original = initializers(&file(&model_of("mlp")));
    for args in [
        &["export", &path("checkpoints"), "-o", &path("a.onnx")][..],
        &["export", plan, "--weights", &adapter, "-o", &path("a.onnx")],
    ] {
        frit(args).unwrap_or_else(|e| panic!("{e}"));
        let exported = initializers(Path::new(&path("a.onnx")));
        for (name, bytes) in &original {
            let frozen = name.starts_with("fc1.") || name == "fc2.weight";
            assert_eq!(exported[name] == *bytes, frozen, "{name} by {args:?}");
        }
    }
    // What a checkpoint writes as a file is such a file, too.
    frit(&["export", &path("checkpoints"), "--safetensors", &path("b.safetensors")])
        .expect("written");
    let written = [&adapter, &path("b.safetensors")].map(|p| std::fs::read(p).expect("a file"));
    assert!(written[0] == written[1]);
    std::fs::remove_dir_all(dir.path().join("checkpoints")).expect("removed");
    train(&planned, &of(vec![other_base("mlp", dir.path())]));
    let error =
        frit(&["export", &path("checkpoints"), "-o", &path("a.onnx")]).expect_err("refused");
    assert!(error.contains("whose value is not from the plan"), "{error}");
}

#[test]
fn buffers_that_steps_renew_stay() {
    let settings = ["model.batch_norm=train", "params.trainable=[\"head.*\"]"];
    let planned = plan_to_evaluate(&model_of("resnet"), 2, &settings);
    let dir = tempfile::tempdir().expect("a directory");
    let of = |steps| RunOptions { trained_only: true, ..options("resnet", dir.path(), steps) };
    train(&planned, &of(1));
    let checkpoint = Checkpoint::open(&dir.path().join("checkpoints")).expect("complete");
    let names: Vec<&str> = checkpoint.parameters().collect();
    assert!(names.iter().any(|n| n.contains("running_mean")), "{names:?}");
    assert!(names.iter().any(|n| n.starts_with("head.")), "{names:?}");
    assert!(!names.iter().any(|n| n.ends_with("c1.weight")), "{names:?}");
    assert_eq!(train(&planned, &of(2)).start, 1);
}

#[test]
fn it_is_said_of_something_that_is_written() {
    let parse = |more: &[&str]| {
        let base = ["frit", "run", "plan", "--data", "d.npz", "--trained-only"];
        Cli::try_parse_from([&base, more].concat()).map(|_| ()).map_err(|e| e.to_string())
    };
    for written in ["--save", "--save-ema", "--checkpoint"] {
        parse(&[written, "x.safetensors"]).unwrap_or_else(|e| panic!("{written}: {e}"));
    }
    parse(&["--save", "a.safetensors", "--checkpoint", "c"]).unwrap_or_else(|e| panic!("{e}"));
    let refused = parse(&["--metrics", "m.jsonl"]).expect_err("nothing is written");
    assert!(refused.contains("--save") && refused.contains("--checkpoint"), "{refused}");
}
