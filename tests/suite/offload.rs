//! Offload to host memory changes where state is stored, but no bit of it.

use crate::memory::predicted;
use crate::support::{Planned, file, plan, plan_to_evaluate};
use clap::Parser;
use frit::commands::{Cli, execute};
use frit_ir::plan::{ALIGNMENT, Arena, BufferClass, BufferId, GroupId, PhaseName, Plan, Stream};
use frit_runtime::checkpoint::{Checkpoint, CheckpointOptions};
use frit_runtime::eval;
use frit_runtime::run::{RunOptions, run};
use frit_runtime::validation::ValidationOptions;
use std::path::Path;

const STEPS: usize = 4;
const OFFLOADS: [&str; 2] = ["memory.offload=optimizer", "memory.offload=parameters"];

fn planned(model: &str, settings: &[&str]) -> Planned {
    plan(&format!("tests/models/{model}/model.onnx"), 2, settings)
}

/// Every tensor of the checkpoint after so many steps, and the losses, as bits.
fn trained(planned: &Planned, model: &str, dir: &Path, steps: usize) -> (Vec<Vec<u8>>, Vec<u64>) {
    let checkpoint = CheckpointOptions { dir: dir.into(), every: None, resume: true, keep: None };
    let options = RunOptions {
        steps,
        data: file(&format!("tests/models/{model}/data.safetensors")).into(),
        checkpoint: Some(checkpoint),
        threads: Some(1),
        ..RunOptions::default()
    };
    let report = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    let checkpoint = Checkpoint::open(dir).unwrap_or_else(|e| panic!("{e}"));
    let read = |key: &String| checkpoint.tensor(key).unwrap_or_else(|e| panic!("{e}"));
    let tensors = checkpoint.index.tensors.keys().map(read).collect();
    (tensors, report.losses.iter().map(|x| x.to_bits()).collect())
}

/// Trains with and without offload: the same losses, parameters, moments and scaler, bit by bit.
fn compare(model: &str, settings: &[&str]) {
    let result = |more: &[&str]| {
        let planned = planned(model, &[settings, more].concat());
        trained(&planned, model, &planned.dir.path().join("checkpoint"), STEPS)
    };
    let (expected, losses) = result(&[]);
    assert!(expected.len() > 3 && losses.len() == STEPS);
    for offload in OFFLOADS {
        let found = result(&[offload]);
        assert_eq!(found.1, losses, "{model} {settings:?} {offload}");
        assert!(found.0 == expected, "{model} {settings:?} {offload}: other tensors");
    }
}

#[test]
fn training_is_bit_identical_under_every_strategy() {
    for ranks in ["sharding.ranks=2", "sharding.ranks=4"] {
        for strategy in ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"] {
            let strategy = format!("sharding.strategy={strategy}");
            compare("gpt2", &[ranks, &strategy, "precision.compute=fp32"]);
        }
    }
    compare("gpt2", &["sharding.ranks=1", "precision.compute=fp32"]);
    let hybrid = ["sharding.strategy=hybrid_shard", "sharding.shard_group=2"];
    compare("gpt2", &[&["sharding.ranks=4"], &hybrid[..]].concat());
}

#[test]
fn training_is_bit_identical_with_everything_else_that_a_step_may_do() {
    // What the norm sums up in which order depends on the units.
    let no_clip = "optimizer.clip_grad_norm=0";
    let sharded_once = "sharding.strategy=shard_optimizer";
    for (model, settings) in [
        ("gpt2", &["sharding.ranks=1", "run.accumulation=2", "optimizer.ema=0.9"][..]),
        ("gpt2", &["sharding.ranks=2", "memory.recompute=unit", "optimizer.ema=0.9"]),
        ("gpt2", &["sharding.ranks=2", "run.accumulation=2", sharded_once]),
        ("gpt2", &["sharding.ranks=2", "run.accumulation=2", "sharding.no_sync=true"]),
        ("gpt2", &["sharding.ranks=2", "optimizer.kind=lion", "sharding.prefetch=auto", no_clip]),
        // The first steps overflow and are skipped.
        ("gpt2", &["sharding.ranks=2", "precision.compute=fp16", "precision.init_scale=1e30"]),
        ("gpt2", &["sharding.ranks=2", "precision.compute=fp8"]),
        ("gpt2", &["sharding.ranks=4", "sharding.reshard_after_forward=2"]),
        ("mlp", &["sharding.ranks=2", "optimizer.kind=adafactor"]),
        ("gpt2", &["sharding.ranks=1", "optimizer.kind=adafactor", "optimizer.ema=0.9"]),
        ("gpt2", &["sharding.ranks=2", "optimizer.kind=muon", "optimizer.ema=0.9"]),
        ("gpt2", &["sharding.ranks=1", "optimizer.kind=muon"]),
        ("mlp", &["sharding.ranks=3", "optimizer.kind=sgd", "optimizer.decay=matrices"]),
        ("t5", &["sharding.ranks=2", "sharding.wrap=size=20000"]),
        ("resnet", &["sharding.ranks=1", "model.batch_norm=train"]),
    ] {
        compare(model, settings);
    }
}

#[test]
fn checkpoints_move_between_plans_with_and_without_offload() {
    let fp32 = "precision.compute=fp32";
    let on = |ranks: &str, more: &[&str]| {
        let settings = [&[fp32, ranks], more].concat();
        plan("tests/models/gpt2/model.onnx", 2, &settings)
    };
    let two = "sharding.ranks=2";
    let plain = on(two, &[]);
    let whole = trained(&plain, "gpt2", &plain.dir.path().join("whole"), 6);
    for (ranks, exact) in [(two, true), ("sharding.ranks=4", false)] {
        let offloaded = on(ranks, &["memory.offload=parameters"]);
        let dir = plain.dir.path().join(ranks);
        let first = trained(&plain, "gpt2", &dir, 2).1;
        let second = trained(&offloaded, "gpt2", &dir, 4).1;
        let (tensors, third) = trained(&plain, "gpt2", &dir, 6);
        assert_eq!([first.len(), second.len(), third.len()], [2; 3]);
        if exact {
            assert_eq!([first, second, third].concat(), whole.1);
            assert!(tensors == whole.0);
        }
    }
}

/// Bytes of what would rest on the device without offload.
fn rests(plan: &Plan, classes: &[BufferClass]) -> usize {
    let of = |b: &&frit_ir::plan::Buffer| b.arena.outlives_step() && classes.contains(&b.class);
    plan.buffers.iter().filter(of).map(|b| b.bytes.next_multiple_of(ALIGNMENT)).sum()
}

/// Bytes of parameters in other dtypes.
fn copies(plan: &Plan) -> usize {
    let all = plan.groups.iter().flat_map(|g| &g.copies).map(|c| plan.buffers[c.buffer].bytes);
    all.map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum()
}

#[test]
fn the_device_holds_less_by_what_the_host_holds() {
    for settings in [
        &["sharding.ranks=1"][..],
        &["sharding.ranks=4"],
        &["sharding.ranks=2", "sharding.strategy=no_shard", "optimizer.ema=0.9"],
    ] {
        let plain = predicted("llama", settings);
        let states = rests(&plain, &[BufferClass::OptimizerState]);
        let all = states + rests(&plain, &[BufferClass::Parameter]);
        for (offload, moved) in OFFLOADS.into_iter().zip([states, all]) {
            let plan = predicted("llama", &[settings, &[offload]].concat());
            let what = format!("{settings:?} {offload}");
            assert_eq!(plan.host_bytes, moved, "{what}");
            // Parameters on the host have no copies in other dtypes on the device.
            let [own, other] = [&plan, &plain].map(|p| p.persistent_bytes - copies(p));
            assert_eq!(own + moved, other, "{what}");
            let (peak, before) = (plan.summary().peak_bytes, plain.summary().peak_bytes);
            assert!(peak < before, "{what}: {peak}, {before} without");
            let bound = plan.workspace_lower_bound;
            assert!(plan.workspace_bytes as f64 <= 1.02 * bound as f64 + 4096.0, "{what}");
        }
    }
}

#[test]
fn a_large_model_needs_little_more_than_two_units_on_the_device() {
    let shape = "batch=1 layers=12 width=64 heads=2 kv_heads=1 head=32 ffn=256 vocab=96 seq=16";
    let settings = ["sharding.ranks=1", "precision.compute=bf16"];
    let plain = crate::simulate::predict_llama(shape, &settings);
    let offload = [&settings[..], &["memory.offload=parameters"]].concat();
    let plan = crate::simulate::predict_llama(shape, &offload);
    let [peak, before] = [&plan, &plain].map(|p| p.summary().peak_bytes as f64);
    assert!(peak < 0.6 * before, "{peak} of {before}");
    // Every state is copied in and out once; parameters that are read twice are copied in three times.
    let summary = plan.summary();
    assert_eq!(summary.bytes_copied_out_per_step as usize, copied(&plan, Stream::CopyOut));
    let ratio = summary.bytes_copied_in_per_step as f64 / summary.bytes_copied_out_per_step as f64;
    assert!((1.3..=5.0 / 3.0).contains(&ratio), "{ratio}");
    // The copies of a unit overlap the work on another one.
    let cluster = frit_passes::cost::Cluster::named("h100").expect("built in");
    let simulation = frit_passes::simulate::simulate(&plan, &cluster);
    let work = simulation.compute_seconds + simulation.host_copy_seconds;
    assert!(simulation.step_seconds < 0.95 * work, "{simulation:?}");
}

/// Bytes of what is on the host and not a table: what a step changes.
fn copied(plan: &Plan, direction: Stream) -> usize {
    let copies = plan.tasks.iter().filter(|t| t.stream == direction);
    copies.map(|t| t.action.reads()[0].ty.bytes()).sum()
}

#[test]
fn what_kernels_read_is_never_on_the_host() {
    let plan = predicted("gpt2", &["sharding.ranks=2", "memory.offload=parameters"]);
    let on_host = |b: BufferId| plan.buffers[b].arena == Arena::Host;
    let mut copies = 0;
    for task in &plan.tasks {
        let places = task.action.reads().into_iter().chain(task.action.writes());
        match plan.host_copy(&task.action) {
            Some(direction) => {
                assert_eq!(task.stream, direction);
                copies += 1;
            }
            None => assert!(places.into_iter().all(|p| !on_host(p.buffer)), "{}", task.name),
        }
    }
    assert!(copies > 10);
}

#[test]
fn the_update_of_a_unit_overlaps_the_copies_of_its_neighbors() {
    let plan = predicted("gpt2", &["sharding.ranks=2", "memory.offload=optimizer"]);
    let update = plan.phase(PhaseName::Update).expect("an update");
    let tasks = &plan.tasks.raw[update.begin.0..update.end.0];
    let is = |t: &frit_ir::plan::Task, s: Stream| t.stream == s;
    let first_out = tasks.iter().position(|t| is(t, Stream::CopyOut)).expect("a copy out");
    let early = tasks[..first_out].iter().filter(|t| is(t, Stream::CopyIn)).count();
    // Two moments of the groups of two units; nothing else before one of these is done.
    assert!((4..=8).contains(&early), "{early} copies before the first one back");
    let waits = tasks.iter().filter(|t| is(t, Stream::CopyIn) && !t.waits.is_empty()).count();
    assert!(waits > 0, "the third unit waits for room");
}

fn refused(settings: &[&str]) -> String {
    let out = tempfile::tempdir().expect("a directory");
    let out = out.path().join("plan");
    let model = file("tests/models/gpt2/model.onnx");
    let mut args = vec!["frit", "compile", model.to_str().expect("UTF-8"), "--bind", "batch=2"];
    args.extend(["-o", out.to_str().expect("UTF-8"), "--set", "sharding.ranks=2"]);
    settings.iter().for_each(|s| args.extend(["--set", s]));
    let cli = Cli::try_parse_from(args).expect("arguments");
    execute(&cli).expect_err("refused").to_string()
}

#[test]
fn a_budget_offloads_no_more_than_it_must() {
    let gpt2 = |more: &[&str]| planned("gpt2", &[&["sharding.ranks=2"], more].concat());
    let peak = |more: &[&str]| gpt2(more).compiled.plan.summary().peak_bytes;
    let none = peak(&[]);
    let [optimizer, parameters] = OFFLOADS.map(|offload| peak(&[offload]));
    assert!(parameters < optimizer && optimizer < none);
    for (budget, n_states) in [(none, 0), (optimizer, 2), (parameters, 3)] {
        let key = format!("memory.budget={budget}");
        let plan = gpt2(&["memory.offload=auto", &key]).compiled.plan;
        assert!(plan.summary().peak_bytes <= budget);
        let on_host = |b: BufferId| plan.buffers[b].arena == Arena::Host;
        let g = &plan.groups[GroupId(0)];
        let states = g.states.iter().map(|s| s.buffer).chain([g.master]);
        assert_eq!(states.filter(|b| on_host(*b)).count(), n_states, "{budget}");
        let report = plan.reports.iter().find(|r| r.pass == "offload").expect("a report");
        assert!(report.remarks[0].0.contains("the fastest within"), "{report:?}");
    }
    let auto = "memory.offload=auto";
    let error = refused(&["memory.budget=1000", "memory.recompute=auto", auto]);
    let named = error.rsplit("; or ").find_map(|s| s.split_once(" bytes, with "));
    let (named, settings) = named.expect("the smallest budget");
    assert!(settings.contains("memory.offload = \"auto\""), "{error}");
    let fits = gpt2(&["memory.recompute=auto", auto, &format!("memory.budget={named}")]);
    assert!(fits.compiled.plan.summary().peak_bytes <= named.parse().expect("bytes"));
    let less = named.parse::<u64>().expect("bytes") - 1;
    refused(&["memory.recompute=auto", auto, &format!("memory.budget={less}")]);
    assert!(refused(&[auto]).contains("memory.budget"));
}

#[test]
fn the_name_that_fsdp_users_know_is_another_word_for_it() {
    let ranks = "sharding.ranks=2";
    let [a, b] = ["sharding.cpu_offload=true", "memory.offload=parameters"]
        .map(|key| predicted("mlp", &[ranks, key]));
    assert_eq!((a.host_bytes, a.tasks), (b.host_bytes, b.tasks));
    let error = refused(&["sharding.cpu_offload=true", "memory.offload=optimizer"]);
    assert!(error.contains("set one of the two"), "{error}");
}

#[test]
fn evaluation_reads_parameters_from_the_host_too() {
    let data = "tests/models/gpt2/data.safetensors";
    let evaluated = |more: &[&str]| {
        let settings = [&["sharding.ranks=2"], more].concat();
        let planned = plan_to_evaluate("tests/models/gpt2/model.onnx", 2, &settings);
        let eval = &planned.compiled.evaluation.as_ref().expect("an evaluation").plan;
        let on_host = eval.host_bytes > 0;
        // While it trains, and after.
        let options = RunOptions {
            steps: 2,
            data: file(data).into(),
            validation: Some(ValidationOptions { data: file(data).into(), every: None }),
            threads: Some(1),
            ..RunOptions::default()
        };
        let trained = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
        let data = vec![file(data)];
        let options =
            eval::Options { plan: planned.path(), data, threads: Some(1), ..Default::default() };
        let report = eval::evaluate(&options).unwrap_or_else(|e| panic!("{e}"));
        let report = report.expect("rank 0 reports");
        let (steps, training) = *trained.validation.last().expect("a loss");
        assert_eq!(steps, 2);
        (on_host, [training, report.loss.expect("a loss")].map(f64::to_bits))
    };
    let (plain, offloaded) = (evaluated(&[]), evaluated(&["memory.offload=parameters"]));
    assert!(!plain.0 && offloaded.0);
    assert_eq!(plain.1, offloaded.1);
}
