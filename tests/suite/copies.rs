//! Copies of parameters in a lower dtype: written by the optimizer step for the next step, they equal the cast of the parameters
//! before every step, whatever they are crossed with, and nothing but the plan knows of them.

use crate::machine::Machine;
use crate::pairs::{Row, rows};
use crate::support::{Planned, file, plan, plan_to_evaluate, train_on};
use expect_test::expect_file;
use frit_ir::plan::{Action, Plan};
use frit_ir::{DType, Op};
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::converted;
use frit_runtime::run::{RunOptions, RunReport, run};
use frit_runtime::validation::ValidationOptions;
use std::path::Path;

const STEPS: usize = 2;

/// What is crossed. The loss scale of the last precision is too large for the first steps, which are skipped.
const FACTORS: [&[&str]; 8] = [
    &[
        "optimizer.kind=adamw",
        "optimizer.kind=lion",
        "optimizer.decay=matrices",
        "optimizer.ema=0.9",
    ],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3", "sharding.ranks=4"],
    &["full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "no_shard"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer"],
    &["bf16", "fp16", "skipped"],
    &["gpt2", "mlp"],
];
const RANKS: usize = 1;
const STRATEGY: usize = 2;
const PRECISION: usize = 6;
const MODEL: usize = 7;

/// A replica is two ranks.
fn is_possible(row: &Row) -> bool {
    let hybrid = row[STRATEGY].is_some_and(|s| FACTORS[STRATEGY][s] == "hybrid_shard");
    !hybrid || row[RANKS].is_none_or(|ranks| ranks % 2 == 1)
}

fn planned(words: &[&str]) -> Planned {
    let strategy = format!("sharding.strategy={}", words[STRATEGY]);
    let mut settings = vec![strategy.as_str(), "optimizer.lr=0.01"];
    if words[STRATEGY] == "hybrid_shard" {
        settings.push("sharding.shard_group=2");
    }
    match words[PRECISION] {
        "bf16" => settings.push("precision.compute=bf16"),
        "fp16" => settings.push("precision.compute=fp16"),
        _ => settings.extend(["precision.compute=fp16", "precision.init_scale=1e30"]),
    }
    let rest = (0..MODEL).filter(|f| ![STRATEGY, PRECISION].contains(f));
    settings.extend(rest.map(|f| words[f]));
    plan_to_evaluate(&format!("tests/models/{}/model.onnx", words[MODEL]), 4, &settings)
}

fn n_copies(plan: &Plan) -> usize {
    plan.groups.iter().map(|g| g.copies.len()).sum()
}

/// The parameters of every group and rank, after checking that every copy is their cast.
fn parameters(plan: &Plan, machine: &Machine<'_>, words: &[&str]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for rank in 0..plan.world_size {
        for group in &plan.groups {
            let master = machine.contents(rank, group.master);
            for copy in &group.copies {
                let cast = converted(&master, DType::F32, copy.dtype).expect("a dtype of copies");
                let equal = machine.contents(rank, copy.buffer) == *cast;
                assert!(equal, "{words:?}: `{}` on rank {rank}", plan.buffers[copy.buffer].name);
            }
            all.push(master);
        }
    }
    all
}

fn trained(
    planned: &Planned,
    model: &str,
    steps: usize,
    name: &str,
    checkpoints: &Path,
) -> RunReport {
    let data = file(&format!("tests/models/{model}/data.safetensors"));
    let options = RunOptions {
        steps,
        data: data.clone().into(),
        threads: Some(1),
        validation: Some(ValidationOptions { data: data.into(), every: Some(1) }),
        save: Some(planned.dir.path().join(name)),
        checkpoint: Some(CheckpointOptions {
            dir: checkpoints.into(),
            every: Some(1),
            resume: true,
            keep: None,
        }),
        ..RunOptions::default()
    };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_copy_is_the_cast_of_its_parameters_whatever_it_is_crossed_with() {
    let rows = rows(&FACTORS, is_possible);
    let mut with_copies = 0;
    for row in &rows {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let (planned, model) = (planned(&words), words[MODEL]);
        let plan = &planned.compiled.plan;
        with_copies += usize::from(n_copies(plan) > 0);
        // In any order that the plan allows, one step after the other.
        let mut machine = Machine::new(plan, &planned.compiled.constants);
        let mut before = parameters(plan, &machine, &words);
        for step in 1..=STEPS {
            machine.run(step, step as u64).unwrap_or_else(|e| panic!("{words:?}: {e:?}"));
            let after = parameters(plan, &machine, &words);
            match words[PRECISION] {
                "skipped" => assert!(before == after, "{words:?}"),
                "bf16" => assert!(before != after, "{words:?}"),
                // The first scales may be too large for a model.
                _ => {}
            }
            before = after;
        }
        // A run that ends and is continued makes copies again.
        let [whole, parts] = ["whole", "parts"].map(|dir| planned.dir.path().join(dir));
        let at_once = trained(&planned, model, STEPS, "whole.safetensors", &whole).validation;
        let mut continued = trained(&planned, model, 1, "parts.safetensors", &parts).validation;
        continued.extend(trained(&planned, model, STEPS, "parts.safetensors", &parts).validation);
        assert_eq!(at_once, continued, "{words:?}");
        let [a, b] = ["whole.safetensors", "parts.safetensors"]
            .map(|name| std::fs::read(planned.dir.path().join(name)).expect("saved"));
        assert!(a == b, "{words:?}");
    }
    assert!(4 * with_copies > rows.len(), "{with_copies} of {} rows have copies", rows.len());
}

#[test]
fn a_step_with_copies_trains_as_one_that_casts() {
    // With few examples there is no room for copies of all parameters below the peak; the examples of a step are the same.
    let few = ["precision.compute=bf16", "memory.recompute=none", "run.accumulation=4"];
    let [few, many] = [(1, &few[..]), (4, &few[..2])]
        .map(|(batch, settings)| plan("tests/models/gpt2/model.onnx", batch, settings));
    let [n_few, n_many] = [&few, &many].map(|planned| n_copies(&planned.compiled.plan));
    assert!(n_few < n_many, "{n_few} and {n_many} copies");
    let data = file("tests/models/gpt2/data.safetensors");
    let [a, b] = [few, many].map(|planned| train_on(&planned, &data, 5, None).losses);
    for (a, b) in a.iter().zip(&b) {
        assert!((a / b - 1.0).abs() < 1e-4, "{a} and {b}");
    }
}

#[test]
fn copies_cost_no_memory_and_replace_casts() {
    let settings = ["precision.compute=bf16", "sharding.ranks=1"];
    let plan = plan("tests/models/gpt2/model.onnx", 8, &settings).compiled.plan;
    let is_step = |k: &frit_ir::plan::Kernel| {
        k.body.nodes().any(|(_, n)| matches!(n.op, Op::OptimizerStep(_)))
    };
    let mut text = String::new();
    for group in &plan.groups {
        let unit = &plan.units[group.unit].name;
        let copies: Vec<_> = group.copies.iter().map(|c| c.dtype.name()).collect();
        text += &format!("{unit}: {} elements, copies in {copies:?}\n", group.numel);
    }
    let copies = plan.groups.iter().flat_map(|g| &g.copies).map(|c| c.buffer).collect::<Vec<_>>();
    for task in &plan.tasks {
        let Action::Kernel { kernel, reads, writes } = &task.action else { continue };
        let of = |places: &[frit_ir::plan::Place]| {
            places.iter().filter(|p| copies.contains(&p.buffer)).count()
        };
        let kernel = &plan.kernels[*kernel];
        let (read, written) = (of(reads), of(writes));
        if read + written > 0 {
            text += &format!("{:?} {}: reads {read}, writes {written}\n", task.region, kernel.name);
        }
    }
    let steps = plan.kernels.iter().filter(|k| is_step(k)).map(|k| k.body.to_string());
    text += &steps.collect::<Vec<_>>().join("\n");
    expect_file![file("tests/golden/stages/copies.txt")].assert_eq(&text);
}

#[test]
fn a_padded_parameter_is_a_view_of_its_group() {
    let settings = ["target.device=cuda", "precision.compute=bf16", "padding.tensor_cores=always"];
    let plan = plan("tests/models/gpt2/model.onnx", 8, &settings).compiled.plan;
    let reads_parameters = |action: &Action| {
        let owned = |buffer| {
            plan.groups
                .iter()
                .any(|g| g.master == buffer || g.copies.iter().any(|c| c.buffer == buffer))
        };
        action.reads().iter().any(|p| owned(p.buffer))
    };
    for task in plan.tasks.iter().filter(|t| reads_parameters(&t.action)) {
        let Action::Kernel { kernel, .. } = &task.action else { continue };
        let pads = plan.kernels[*kernel].body.nodes().any(|(_, n)| matches!(n.op, Op::Pad(_)));
        assert!(!pads, "{} pads a parameter", task.name);
    }
    let has_room = |g: &frit_ir::plan::Group| {
        let gap = |pair: &[frit_ir::plan::Segment]| pair[1].offset - pair[0].offset - pair[0].numel;
        let end = g.segments.last().map_or(0, |s| g.numel - s.offset - s.numel);
        g.segments.windows(2).map(gap).max().unwrap_or(0).max(end) >= 16
    };
    assert!(plan.groups.iter().any(has_room));
}
