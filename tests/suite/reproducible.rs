//! Reproducible plans compute the same bits on any number of ranks, whatever they are crossed with: losses, norms, metrics,
//! validation and parameters, also of a run that goes on with another number.

use crate::pairs::{Row, rows};
use crate::support::{Planned, file, plan, plan_to_evaluate, train_on};
use frit::compilation::{Request, compile};
use frit::config::Config;
use frit_ir::plan::Plan;
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::run::{RunOptions, RunReport, run};
use frit_runtime::validation::ValidationOptions;
use std::path::Path;

const STEPS: usize = 3;

/// What is crossed, each with a plan for one rank. The loss scale of `skipped` is too large for the first step alone.
const FACTORS: [&[&str]; 9] = [
    &["full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "no_shard"],
    &["fp32", "bf16", "fp16", "skipped", "bf16-pure"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
    &["adamw", "lion", "nesterov", "sgd", "ema", "groups"],
    &[
        "optimizer.clip_grad_norm=0",
        "optimizer.clip_grad_norm=0.05",
        "optimizer.clip_grad_value=0.001",
    ],
    &["gpt2", "dropout", "resnet", "mlp", "lora"],
    &["run.reproducible=4", "run.reproducible=8"],
    &["whole", "reshard", "units", "chunks", "shuffle"],
];
const STRATEGY: usize = 0;
const PRECISION: usize = 1;
const OPTIMIZER: usize = 4;
const MODEL: usize = 6;
const PIECES: usize = 7;
const OTHER: usize = 8;

/// Instead of the option: as many pieces, added as usual.
const USUAL: &str = "usual";

fn word(row: &Row, factor: usize) -> &'static str {
    row[factor].map_or("", |level| FACTORS[factor][level])
}

/// Parameters of these precisions are not stored in f32, or adapters need others.
fn is_possible(row: &Row) -> bool {
    let lora = word(row, MODEL) == "lora";
    !(lora && word(row, PRECISION) == "bf16-pure")
        && (word(row, OTHER) != "reshard" || ["full_shard", ""].contains(&word(row, STRATEGY)))
        && (word(row, OTHER) != "chunks" || ["gpt2", "lora", ""].contains(&word(row, MODEL)))
}

fn model(row: &[&str]) -> (&'static str, &'static str) {
    match row[MODEL] {
        "gpt2" | "lora" => ("tests/models/gpt2/model.onnx", "tests/models/gpt2/data.safetensors"),
        "dropout" => ("tests/models/dropout/model.onnx", "tests/models/dropout/data.safetensors"),
        "resnet" => ("tests/models/resnet/model.onnx", "tests/models/resnet/data.safetensors"),
        _ => ("tests/models/mlp/model.onnx", "tests/models/mlp/data.safetensors"),
    }
}

/// The plan of a row for so many ranks.
fn planned(row: &[&str], ranks: usize) -> Planned {
    let ranks_key = format!("sharding.ranks={ranks}");
    let strategy = match row[STRATEGY] {
        // A replica is two ranks.
        "hybrid_shard" if ranks < 2 => "full_shard",
        other => other,
    };
    let strategy_key = format!("sharding.strategy={strategy}");
    let mut settings = vec![ranks_key.as_str(), &strategy_key, "optimizer.lr=0.01"];
    if strategy == "hybrid_shard" {
        settings.push("sharding.shard_group=2");
    }
    match row[PRECISION] {
        "fp32" => settings.push("precision.compute=fp32"),
        "bf16" => settings.push("precision.compute=bf16"),
        "fp16" => settings.push("precision.compute=fp16"),
        "bf16-pure" => settings.push("precision.compute=bf16-pure"),
        _ => settings.extend([
            "precision.compute=fp16",
            "precision.init_scale=1e30",
            "precision.backoff_factor=1e-26",
        ]),
    }
    match row[OPTIMIZER] {
        "ema" => settings.extend(["optimizer.kind=adamw", "optimizer.ema=0.9"]),
        "groups" => settings.extend(["optimizer.kind=adamw", "optimizer.decay=matrices"]),
        "lion" => settings.push("optimizer.kind=lion"),
        "nesterov" => settings.push("optimizer.kind=nesterov"),
        "sgd" => settings.push("optimizer.kind=sgd"),
        _ => settings.push("optimizer.kind=adamw"),
    }
    if row[MODEL] == "resnet" {
        settings.push("model.batch_norm=train");
    }
    if row[MODEL] == "lora" {
        settings.extend([
            "adapter.kind=lora",
            "adapter.targets=[\"**.c_attn\", \"**.c_fc\"]",
            "adapter.dropout=0.1",
        ]);
    }
    match row[OTHER] {
        "reshard" if ranks >= 4 => settings.push("sharding.reshard_after_forward=2"),
        "units" => settings.push("sharding.wrap=size=500"),
        "chunks" => settings.push("memory.loss_chunks=2"),
        "shuffle" => settings.extend(["data.shuffle=true", "run.seed=7"]),
        _ => {}
    }
    let accumulation = format!("run.accumulation={}", 8 / ranks);
    settings.push(if row[PIECES] == USUAL { &accumulation } else { row[PIECES] });
    settings.extend([2, 3, 5].map(|factor| row[factor]));
    plan_to_evaluate(model(row).0, 2, &settings)
}

/// What a run gives: everything it reports of its steps, and the parameters.
#[derive(Default)]
struct Found {
    losses: Vec<u64>,
    norms: Vec<u64>,
    validation: Vec<(usize, u64)>,
    skipped: usize,
    metrics: Vec<serde_json::Value>,
    saved: Vec<u8>,
    averages: Vec<u8>,
}

impl Found {
    /// What differs from another.
    fn differences(&self, other: &Found) -> Vec<&'static str> {
        let same = [
            ("losses", self.losses == other.losses),
            ("norms", self.norms == other.norms),
            ("validation", self.validation == other.validation),
            ("skipped steps", self.skipped == other.skipped),
            ("metrics", self.metrics == other.metrics),
            ("parameters", self.saved == other.saved),
            ("averages", self.averages == other.averages),
        ];
        same.into_iter().filter(|(_, same)| !same).map(|(name, _)| name).collect()
    }
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn ran(planned: &Planned, row: &[&str], steps: usize, threads: usize, dir: &Path) -> RunReport {
    let data = file(model(row).1);
    let ema = row[OPTIMIZER] == "ema";
    let options = RunOptions {
        steps,
        data: data.clone().into(),
        threads: Some(threads),
        validation: Some(ValidationOptions { data: data.into(), every: Some(1) }),
        metrics: Some(dir.join("metrics.jsonl")),
        save: Some(dir.join("saved.safetensors")),
        save_ema: ema.then(|| dir.join("averages.safetensors")),
        checkpoint: Some(CheckpointOptions {
            dir: dir.join("checkpoints"),
            every: Some(1),
            resume: true,
            keep: None,
        }),
        ..RunOptions::default()
    };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{row:?}: {e}"))
}

/// What plans give that run one after the other, each up to some step.
fn found(plans: &[(&Planned, usize)], row: &[&str], threads: usize) -> Found {
    let dir = tempfile::tempdir().expect("a directory");
    let mut found = Found::default();
    for (planned, steps) in plans {
        let report = ran(planned, row, *steps, threads, dir.path());
        found.losses.extend(bits(&report.losses));
        found.norms.extend(bits(&report.grad_norms));
        found.validation.extend(report.validation.iter().map(|(at, x)| (*at, x.to_bits())));
        found.skipped += report.skipped;
    }
    let text = std::fs::read_to_string(dir.path().join("metrics.jsonl")).expect("metrics");
    for line in text.lines() {
        let mut metrics: serde_json::Value = serde_json::from_str(line).expect("an object");
        let object = metrics.as_object_mut().expect("an object");
        let of_this_run = [
            "step_seconds",
            "tokens_or_examples_per_s",
            "memory_bytes",
            "run",
            "plan",
            "wall_time",
        ];
        object.retain(|key, _| !of_this_run.contains(&key.as_str()));
        found.metrics.push(metrics);
    }
    let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap_or_default();
    (found.saved, found.averages) = (read("saved.safetensors"), read("averages.safetensors"));
    found
}

fn words(row: &[usize]) -> Vec<&'static str> {
    row.iter().zip(FACTORS).map(|(level, factor)| factor[*level]).collect()
}

fn pieces(plan: &Plan) -> usize {
    plan.reproducible.expect("a reproducible plan")
}

#[test]
fn bits_do_not_depend_on_the_number_of_ranks_whatever_it_is_crossed_with() {
    let mut wrong = Vec::new();
    for row in rows(&FACTORS, is_possible) {
        let words = words(&row);
        let one = planned(&words, 1);
        let v = pieces(&one.compiled.plan);
        let expected = found(&[(&one, STEPS)], &words, 2);
        assert_eq!(expected.losses.len(), STEPS, "{words:?}");
        let skipped = if words[PRECISION] == "skipped" { 1 } else { 0 };
        assert_eq!(expected.skipped, skipped, "{words:?}");
        let all: Vec<Planned> =
            [2, 4, 8].into_iter().filter(|n| *n <= v).map(|n| planned(&words, n)).collect();
        let mut compare = |plans: &[(&Planned, usize)], what: String| {
            let differences = found(plans, &words, 1).differences(&expected);
            if !differences.is_empty() {
                wrong.push(format!("{words:?} {what}: {differences:?}"));
            }
        };
        let most = &all[all.len() - 1];
        compare(&[(most, STEPS)], format!("on {} ranks", most.compiled.plan.world_size));
        // It goes on with more ranks, then with one.
        compare(&[(&all[0], 1), (&all[1], 2), (&one, 3)], "resumed".into());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn without_the_option_bits_depend_on_the_number_of_ranks() {
    for model in ["gpt2", "mlp"] {
        let mut row = words(&[0; FACTORS.len()]);
        (row[MODEL], row[PIECES]) = (model, USUAL);
        let [one, many] = [1, 8].map(|ranks| found(&[(&planned(&row, ranks), STEPS)], &row, 1));
        assert!(one.differences(&many).contains(&"parameters"), "{model}");
    }
}

#[test]
fn a_step_is_that_of_all_its_pieces() {
    let data = file("tests/models/gpt2/data.safetensors");
    let settings = ["precision.compute=fp32", "run.reproducible=8"];
    let reproducible = plan("tests/models/gpt2/model.onnx", 2, &settings);
    let usual =
        plan("tests/models/gpt2/model.onnx", 2, &["precision.compute=fp32", "run.accumulation=8"]);
    let [a, b] = [reproducible, usual].map(|planned| train_on(&planned, &data, STEPS, None));
    for (a, b) in a.losses.iter().zip(&b.losses).chain(a.grad_norms.iter().zip(&b.grad_norms)) {
        assert!((a / b - 1.0).abs() < 1e-5, "{a} and {b}");
    }
}

#[test]
fn what_cannot_be_reproducible_is_refused_by_name() {
    for (settings, named) in [
        (&["run.reproducible=6"][..], "power of two up to 64"),
        (&["run.reproducible=128"], "power of two up to 64"),
        (&["run.reproducible=4", "sharding.ranks=3"], "`sharding.ranks` = 3"),
        (&["run.reproducible=4", "sharding.ranks=8"], "`sharding.ranks` = 8"),
        (&["run.reproducible=4", "run.accumulation=2"], "`run.accumulation` = 2"),
        (&["run.reproducible=4", "run.deterministic=false"], "`run.deterministic` = false"),
        (
            &[
                "run.reproducible=4",
                "target.device=cuda",
                "memory.loss_chunks=2",
                "memory.budget=1GiB",
            ],
            "`target.device` = \"cuda\" and a memory.budget",
        ),
        (&["run.reproducible=4", "optimizer.kind=muon"], "`optimizer.kind` = \"muon\""),
        (&["run.reproducible=4", "optimizer.kind=adafactor"], "`optimizer.kind` = \"adafactor\""),
        (&["run.reproducible=4", "model.batch_norm=sync"], "`model.batch_norm` = \"sync\""),
        (&["run.reproducible=4", "precision.compute=fp8"], "`precision.fp8` = true"),
        (
            &["run.reproducible=4", "sharding.reduce_dtype=bf16"],
            "`sharding.reduce_dtype` = \"bf16\"",
        ),
        (&["run.reproducible=4", "data.drop_last=false"], "`data.drop_last` = false"),
        (
            &["run.reproducible=4", "memory.budget=1GiB"],
            "`memory.loss_chunks` = \"auto\" and a memory.budget",
        ),
        (
            &["run.reproducible=4", "memory.budget=1GiB", "memory.loss_chunks=1"],
            "`memory.recompute` = \"auto\" and a memory.budget",
        ),
    ] {
        let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
        let refused = Config::parse("", "", &settings).expect_err("refused");
        let of_code = refused.diagnostics.iter().all(|d| d.code == "E053");
        assert!(of_code && refused.to_string().contains(named), "{settings:?}: {refused}");
    }
    let model = file("tests/models/mlp/model.onnx");
    let request = Request { model, binds: [("batch".to_string(), 2)].into(), ..Request::default() };
    for ranks in [1, 2] {
        let ranks = format!("sharding.ranks={ranks}");
        let weighted = ["run.reproducible=4", "loss.weight=0.5", &ranks].map(String::from);
        let config = Config::parse("", "", &weighted).expect("valid");
        compile(&request, &config, &mut ()).expect("one loss is compiled");
        let also = "loss.also=[\"0.5 * mse(logits, target)\"]";
        let settings = ["run.reproducible=4", also, &ranks];
        let config = Config::parse("", "", &settings.map(String::from)).expect("valid");
        let refused = compile(&request, &config, &mut ()).expect_err("refused");
        assert!(refused.diagnostics[0].code == "E053", "{refused}");
        assert!(refused.to_string().contains("beside other losses"), "{refused}");
    }
}
