//! Every strategy trains to the same numbers, with the expected communication and memory.
//!
//! `FRIT_ALL_STRATEGIES=1` runs the whole table of models, strategies and ranks instead of a part of it.

use crate::parity::{gradient_error, largest, reference, run};
use crate::support::{Planned, plan, train};
use frit_ir::Region;
use frit_ir::plan::{Action, Arena, BufferClass, DeviceType, Plan, Target, UnitId};
use frit_passes::cost::{Cluster, Exchange, Members};
use frit_runtime::run::RunOptions;

const GPT2: &str = "tests/models/gpt2/model.onnx";
const DATA: &str = "tests/models/gpt2/data.safetensors";
const FP32: &str = "precision.compute=fp32";

/// The settings of every strategy on so many ranks.
fn strategies(ranks: usize) -> Vec<Vec<String>> {
    let of = |name: &str| vec![format!("sharding.strategy={name}")];
    let mut all: Vec<Vec<String>> =
        ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"].map(of).into();
    let groups = [2, 4].into_iter().filter(|group| ranks.is_multiple_of(*group) && *group < ranks);
    let hybrid = |group| {
        vec!["sharding.strategy=hybrid_shard".into(), format!("sharding.shard_group={group}")]
    };
    all.extend(groups.map(hybrid));
    all
}

fn planned(ranks: usize, batch: usize, more: &[&str]) -> Planned {
    let ranks = format!("sharding.ranks={ranks}");
    plan(GPT2, batch, &[&[FP32, &ranks], more].concat())
}

fn strs(settings: &[String]) -> Vec<&str> {
    settings.iter().map(String::as_str).collect()
}

#[test]
fn every_strategy_trains_to_pytorchs_numbers() {
    let all = std::env::var_os("FRIT_ALL_STRATEGIES").is_some();
    for model in ["gpt2", "t5", "llama"] {
        for ranks in [1, 2, 4, 8] {
            for (i, settings) in strategies(ranks).iter().enumerate() {
                let part = match model {
                    "gpt2" => ranks == 4 || (ranks == 8 && i > 3),
                    _ => ranks == 4 && i > 2,
                };
                if !all && !part {
                    continue;
                }
                let settings = [&[FP32], &strs(settings)[..]].concat();
                let (planned, losses) = run(model, "model.onnx", 8, ranks, &settings);
                let deviation = largest(&losses, &reference(model, "fp64"));
                assert!(deviation < 1e-5, "{model}, {ranks} ranks, {settings:?}: {deviation}");
                let error = gradient_error(&planned, model);
                assert!(error < 1e-5, "{model}, {ranks} ranks, {settings:?}: gradients {error}");
            }
        }
    }
}

#[test]
fn accumulation_gives_the_same_losses_with_and_without_synchronization() {
    let exact = reference("gpt2", "fp64");
    for settings in strategies(4) {
        for no_sync in ["false", "true"] {
            let no_sync = format!("sharding.no_sync={no_sync}");
            let more = [&[FP32, "run.accumulation=2", &no_sync], &strs(&settings)[..]].concat();
            let (planned, losses) = run("gpt2", "model.onnx", 4, 4, &more);
            let deviation = largest(&losses, &exact);
            assert!(deviation < 1e-5, "{more:?}: {deviation}");
            let error = gradient_error(&planned, "gpt2");
            assert!(error < 1e-5, "{more:?}: gradients {error}");
        }
    }
}

fn bits(losses: &[f64]) -> Vec<u64> {
    losses.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn strategies_that_reduce_over_all_ranks_at_once_change_no_bit() {
    let clip = "optimizer.clip_grad_norm=0";
    for (ranks, accumulation) in [(3, 1), (2, 2)] {
        let steps = format!("run.accumulation={accumulation}");
        let losses = |more: &[&str]| {
            let planned = planned(ranks, 1, &[&[clip, &steps], more].concat());
            bits(&train(&planned, DATA, 5, false).losses)
        };
        let synchronized = losses(&["sharding.strategy=no_shard"]);
        for strategy in ["full_shard", "shard_grad_op"] {
            let key = format!("sharding.strategy={strategy}");
            assert_eq!(losses(&[&key]), synchronized, "{strategy} on {ranks} ranks");
        }
        let no_sync = losses(&["sharding.strategy=no_shard", "sharding.no_sync=true"]);
        let optimizer = losses(&["sharding.strategy=shard_optimizer"]);
        assert_eq!(optimizer, no_sync, "shard_optimizer on {ranks} ranks");
        let full = losses(&["sharding.strategy=full_shard", "sharding.no_sync=true"]);
        assert_eq!(full, no_sync, "full_shard on {ranks} ranks");
        if accumulation == 1 {
            // One micro-step has nothing to leave unsynchronized.
            assert_eq!(no_sync, synchronized);
        }
    }
}

/// All-gathers, reduce-scatters, and all-reduces of gradients in one step.
fn counts(plan: &Plan) -> [usize; 3] {
    let mut counts = [0; 3];
    for (i, task) in plan.tasks.iter_enumerated() {
        match &task.action {
            Action::AllGather { .. } => counts[0] += plan.runs(i),
            Action::ReduceScatter { .. } => counts[1] += plan.runs(i),
            Action::AllReduce { group: Some(_), .. } => counts[2] += plan.runs(i),
            _ => {}
        }
    }
    counts
}

fn bytes_of(plan: &Plan, class: BufferClass) -> usize {
    let held = |b: &&frit_ir::plan::Buffer| b.class == class && b.arena == Arena::Persistent;
    plan.buffers.iter().filter(held).map(|b| b.bytes).sum()
}

#[test]
fn strategies_exchange_and_hold_what_they_promise() {
    let of = |more: &[&str]| {
        let planned = planned(4, 1, more);
        let report = train(&planned, DATA, 2, false);
        let plan = planned.compiled.plan;
        // The communicator counted the collectives and bytes that the plan says.
        assert_eq!(report.collective_bytes, 2 * 4 * plan.summary().bytes_communicated_per_step);
        plan
    };
    let a = "run.accumulation=3";
    let full = of(&[a]);
    let grad_op = of(&[a, "sharding.strategy=shard_grad_op"]);
    let optimizer = of(&[a, "sharding.strategy=shard_optimizer"]);
    let none = of(&[a, "sharding.strategy=no_shard"]);
    let none_once = of(&[a, "sharding.strategy=no_shard", "sharding.no_sync=true"]);
    let hybrid = of(&[a, "sharding.strategy=hybrid_shard", "sharding.shard_group=2"]);
    let units = full.groups.len();
    let is_kept = |unit: UnitId| unit == UnitId::ROOT || Some(unit) == full.units.last_key();
    let kept = full.groups.iter().filter(|g| is_kept(g.unit)).count();
    let gathers = 3 * (2 * units - kept);
    assert_eq!(counts(&full), [gathers, 3 * units, 0]);
    assert_eq!(counts(&grad_op), [3 * units, 3 * units, 0]);
    assert_eq!(counts(&optimizer), [units, units, 0]);
    assert_eq!(counts(&none), [0, 0, 3 * units]);
    assert_eq!(counts(&none_once), [0, 0, units]);
    // Replicas are averaged once, over the sums.
    assert_eq!(counts(&hybrid), [gathers, 3 * units, units]);
    let state = |plan| bytes_of(plan, BufferClass::OptimizerState);
    for plan in [&full, &grad_op, &optimizer] {
        assert!(state(plan) * 4 <= state(&none) + units * 4 * 512, "{}", plan.strategy);
    }
    assert!(state(&hybrid) * 2 <= state(&none) + units * 2 * 512);
    let gathered = |plan| bytes_of(plan, BufferClass::Gathered);
    assert_eq!((gathered(&full), gathered(&grad_op)), (0, 0));
    assert!(gathered(&optimizer) >= bytes_of(&none, BufferClass::Parameter));
}

#[test]
fn units_are_freed_after_forward_as_asked() {
    let backward_gathers = |more: &[&str]| -> Vec<String> {
        let plan = planned(2, 1, more).compiled.plan;
        let gathers = plan.tasks.iter().filter(|t| {
            t.region == Region::Backward && matches!(t.action, Action::AllGather { .. })
        });
        gathers.map(|t| t.name.clone()).collect()
    };
    let all = backward_gathers(&[]);
    assert!(all.iter().any(|name| name.ends_with("h.0")), "{all:?}");
    assert!(backward_gathers(&["sharding.reshard_after_forward=[]"]).is_empty());
    let size = ["sharding.wrap=size=20000", "sharding.reshard_after_forward=[\"part.2\"]"];
    let some = backward_gathers(&size);
    assert!(!some.is_empty() && some.iter().all(|name| name.ends_with("part.2")), "{some:?}");
}

/// The gathers of backward among `n` ranks, and all others in backward.
fn gathers_in_backward(plan: &Plan, n: usize) -> [usize; 2] {
    let mut counts = [0; 2];
    for task in plan.tasks.iter().filter(|t| t.region != Region::Forward) {
        if let Action::AllGather { ranks, .. } = &task.action {
            counts[usize::from(*ranks != Some(n))] += 1;
        }
    }
    counts
}

#[test]
fn what_few_ranks_keep_together_changes_no_bit() {
    let hybrid = ["sharding.strategy=hybrid_shard", "sharding.shard_group=4"];
    let recompute = ["memory.recompute=unit", "precision.compute=bf16"];
    for (ranks, n, more) in [
        (4, 2, &["run.accumulation=2"][..]),
        (4, 2, &recompute),
        (8, 2, &[]),
        (8, 4, &["precision.compute=bf16"]),
        (8, 2, &hybrid),
    ] {
        let of = |reshard: &str| {
            let keys = ["sharding.wrap=size=8000", reshard];
            let planned = planned(ranks, 1, &[&keys, more].concat());
            let file = |name| planned.dir.path().join(name);
            let options = RunOptions {
                steps: 4,
                data: crate::support::file(DATA).into(),
                save: Some(file("params")),
                threads: Some(1),
                ..RunOptions::default()
            };
            let report =
                frit_runtime::run::run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
            let plan = planned.compiled.plan.clone();
            let sent = plan.summary().bytes_communicated_per_step;
            assert_eq!(report.collective_bytes, 4 * ranks as u64 * sent, "{reshard} {more:?}");
            let losses: Vec<u64> = report.losses.iter().map(|x| x.to_bits()).collect();
            (plan, losses, std::fs::read(file("params")).expect("parameters"))
        };
        let what = format!("{ranks} ranks, {n} together, {more:?}");
        let (full, losses, params) = of("sharding.reshard_after_forward=[\"**\"]");
        let (part, found, saved) = of(&format!("sharding.reshard_after_forward={n}"));
        assert!(found == losses && saved == params, "{what}");
        let [0, gathers] = gathers_in_backward(&full, n) else { panic!("{what}") };
        assert!(gathers > 3 && gathers_in_backward(&part, n) == [gathers, 0], "{what}");
        let sent = |plan: &Plan| plan.summary().bytes_communicated_per_step;
        assert!(sent(&part) < sent(&full), "{what}");
        // On nodes of n devices, no gather of backward leaves its node.
        let target =
            Target { device: DeviceType::Cuda, arch: "sm_90".into(), features: String::new() };
        let cluster = Cluster { devices_per_node: n, ..Cluster::of(&target) };
        let gathered = |plan: &Plan| -> f64 {
            let backward = |t: &&frit_ir::plan::Task| {
                t.region != Region::Forward && matches!(t.action, Action::AllGather { .. })
            };
            let members = |t: &frit_ir::plan::Task| Members::of(plan, &t.action);
            let tasks = plan.tasks.iter().filter(backward);
            let times = tasks.map(|t| {
                let bytes = t.action.writes()[0].ty.bytes() as u64;
                cluster.exchange(Exchange::AllGather, bytes, members(t))
            });
            let times: Vec<_> = times.collect();
            assert_eq!(times.iter().any(|t| t.inter), *plan == full, "{what}");
            times.iter().map(|t| t.seconds).sum()
        };
        assert!(gathered(&part) < gathered(&full), "{what}");
    }
}

#[test]
fn who_keeps_a_unit_is_said_by_pattern() {
    let of = |list: &str, more: &[&str]| {
        let list = format!("sharding.reshard_after_forward={list}");
        let keys = ["sharding.wrap=size=8000", &list];
        planned(4, 1, &[&keys, more].concat()).compiled.plan
    };
    let [0, all] = gathers_in_backward(&of("[\"**\"]", &[]), 2) else { panic!("in parts") };
    // The last pattern that covers a unit counts.
    assert_eq!(gathers_in_backward(&of("[\"**\", \"part.2=2\"]", &[]), 2), [1, all - 1]);
    assert_eq!(gathers_in_backward(&of("[\"**=2\", \"part.2\"]", &[]), 2), [all - 1, 1]);
    // As many as share it are all; one alone keeps it whole.
    assert_eq!(of("4", &[]).tasks, of("[\"**\"]", &[]).tasks);
    assert_eq!(of("1", &[]).tasks, of("[]", &[]).tasks);
    // What stays gathered is not kept in parts.
    let grad_op = ["sharding.strategy=shard_grad_op"];
    assert_eq!(of("2", &grad_op).tasks, of("[]", &grad_op).tasks);
}

#[test]
fn ranks_that_cannot_keep_a_unit_are_refused() {
    for (value, message) in [
        ("3", "3 does not divide the 4 ranks"),
        ("[\"**=0\"]", "0 does not divide the 4 ranks"),
        ("[\"**=two\"]", "not a number of ranks"),
    ] {
        let sets = ["sharding.ranks=4", &format!("sharding.reshard_after_forward={value}")]
            .map(String::from);
        let config = frit::config::Config::parse("", "train.toml", &sets).expect("valid keys");
        let request = frit::compilation::Request {
            model: crate::support::file(GPT2),
            binds: [("batch".to_string(), 1)].into(),
            ..frit::compilation::Request::default()
        };
        let error = frit::compilation::compile(&request, &config, &mut ()).expect_err("refused");
        assert!(error.to_string().contains(message), "{value}: {error}");
    }
}

#[test]
fn frozen_and_ignored_parameters_are_neither_reduced_nor_stepped() {
    let exact = |more: &[&str], ranks: usize| {
        let planned = planned(ranks, 4 / ranks, more);
        let losses = train(&planned, DATA, 6, false).losses;
        (planned, losses)
    };
    let frozen = "params.frozen=[\"**.wte.**\", \"**.lm_head.**\", \"**.h.0.attn.**\"]";
    let ignored = "params.ignored=[\"**.wpe.**\", \"**.h.1.mlp.c_fc.bias\"]";
    let (_, one) = exact(&[frozen, ignored], 1);
    for settings in strategies(4) {
        let (planned, losses) = exact(&[&[frozen, ignored], &strs(&settings)[..]].concat(), 4);
        for (a, b) in losses.iter().zip(&one) {
            assert!((a - b).abs() < 1e-5, "{settings:?}: {a} for {b}");
        }
        let plan = planned.compiled.plan;
        assert!(plan.groups.iter().any(|g| !g.trainable), "{settings:?}");
        for task in &plan.tasks {
            let reduced = match &task.action {
                Action::ReduceScatter { group, .. } => Some(*group),
                Action::AllReduce { group, .. } => *group,
                _ => None,
            };
            assert!(reduced.is_none_or(|g| plan.groups[g].trainable), "{}", task.name);
        }
        assert!(plan.groups.iter().all(|g| g.trainable || g.states.is_empty()));
    }
}
