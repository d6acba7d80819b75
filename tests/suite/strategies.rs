//! What sharding, wrapping and prefetching may change, and what they must not.

use crate::support::{Planned, plan, plan_at, train, train_on, write_f32};
use frit_ir::Region;
use frit_ir::plan::{Action, BufferId, Phase, Place, Plan, Stream, Task, TaskId, UnitId};
use petgraph::algo::tred::{dag_to_toposorted_adjacency_list, dag_transitive_reduction_closure};
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::IntoNeighbors;
use std::collections::BTreeSet;

const GPT2: &str = "tests/models/gpt2/model.onnx";
const DATA: &str = "tests/models/gpt2/data.safetensors";

fn bits(losses: &[f64]) -> Vec<u64> {
    losses.iter().map(|x| x.to_bits()).collect()
}

fn planned(ranks: usize, batch: usize, more: &[&str]) -> Planned {
    let ranks = format!("sharding.ranks={ranks}");
    plan(GPT2, batch, &[&["precision.compute=fp32", &ranks], more].concat())
}

#[test]
fn strategies_and_wrapping_change_no_bit_without_clipping() {
    let off = "optimizer.clip_grad_norm=0";
    for ranks in [2, 4] {
        let losses = |more: &[&str]| {
            let planned = planned(ranks, 8 / ranks, &[&[off], more].concat());
            bits(&train(&planned, DATA, 5, false).losses)
        };
        let expected = losses(&["sharding.strategy=no_shard"]);
        for more in [
            &["sharding.wrap=blocks"][..],
            &["sharding.wrap=size=20000"],
            &["sharding.wrap=none"],
            &["sharding.backward_prefetch=none", "sharding.forward_prefetch=0"],
            &["sharding.backward_prefetch=post", "sharding.limit_all_gathers=1"],
        ] {
            assert_eq!(losses(more), expected, "{more:?} on {ranks} ranks");
        }
    }
}

#[test]
fn three_ranks_agree_with_one() {
    let (one, three) = (planned(1, 6, &[]), planned(3, 2, &[]));
    let (one, three) = (train(&one, DATA, 10, false), train(&three, DATA, 10, false));
    for (a, b) in one.losses.iter().zip(&three.losses) {
        assert!((a - b).abs() < 1e-5, "{a} and {b}");
    }
}

/// A layer whose weight is two parameters, one after the other, which backward reads.
const FUSED: &str = r#"{ "frit_model": 1, "name": "fused",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 4] } ],
  "params": [ { "name": "first", "shape": [4, 4], "init": { "normal": { "std": 0.5 } } },
              { "name": "q", "shape": [4, 3], "init": { "normal": { "std": 0.5 } } },
              { "name": "k", "shape": [4, 5], "init": { "normal": { "std": 0.5 } } } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "first"], "outputs": ["h"] },
             { "op": "concat", "inputs": ["q", "k"], "outputs": ["both"], "attrs": { "axis": 1 } },
             { "op": "matmul", "inputs": ["h", "both"], "outputs": ["y"] } ],
  "outputs": ["y"] }"#;

#[test]
fn parameters_that_are_concatenated_are_sharded() {
    let dir = tempfile::tempdir().expect("a directory");
    let (model, data) = (dir.path().join("model.json"), dir.path().join("data.safetensors"));
    std::fs::write(&model, FUSED).expect("written");
    let numbers = |n: usize, by: f32| (0..n).map(|i| (i as f32 * by).sin()).collect();
    let x = ("x", vec![12, 4], numbers(48, 0.7));
    write_f32(&data, &[x, ("labels", vec![12, 8], numbers(96, 1.3))]);
    let losses = |batch: usize, settings: &[&str]| {
        let settings = [&["loss.kind=mse"], settings].concat();
        let planned = plan_at(&model, batch, &settings);
        train_on(&planned, &data, 3, None).losses
    };
    for (compute, error) in [("precision.compute=fp32", 1e-5), ("precision.compute=bf16", 1e-2)] {
        let one = losses(6, &[compute]);
        for strategy in ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"] {
            for recompute in ["none", "selective", "unit"] {
                let (strategy, recompute) = (
                    format!("sharding.strategy={strategy}"),
                    format!("memory.recompute={recompute}"),
                );
                let more = [compute, "sharding.ranks=3", &strategy, &recompute];
                for (a, b) in one.iter().zip(losses(2, &more)) {
                    assert!((a / b - 1.0).abs() < error, "{more:?}: {a} and {b}");
                }
            }
        }
    }
}

/// Index of the task that first reads what each gather delivers, by gather, and the gathers themselves.
fn gathers(plan: &Plan) -> Vec<(TaskId, TaskId)> {
    let gather = |(i, t): (TaskId, &frit_ir::plan::Task)| match &t.action {
        Action::AllGather { recv, .. } => Some((i, recv.buffer)),
        _ => None,
    };
    let first_read = |(i, buffer): (TaskId, BufferId)| {
        let reads = |t: &frit_ir::plan::Task| t.action.reads().iter().any(|p| p.buffer == buffer);
        (i, i.until(plan.tasks.next_key()).find(|&j| reads(&plan.tasks[j])).expect("it is read"))
    };
    plan.tasks.iter_enumerated().filter_map(gather).map(first_read).collect()
}

#[test]
fn prefetching_moves_gathers_before_the_work_that_precedes_their_use() {
    let backward = |prefetch: &str| -> Vec<(TaskId, TaskId)> {
        let plan = planned(2, 4, &[prefetch]).compiled.plan;
        let all = gathers(&plan).into_iter();
        all.filter(|(i, _)| plan.tasks[*i].region == Region::Backward).collect()
    };
    let none = backward("sharding.backward_prefetch=none");
    let post = backward("sharding.backward_prefetch=post");
    let pre = backward("sharding.backward_prefetch=pre");
    assert!(!none.is_empty());
    assert_eq!(none.len(), pre.len());
    assert_eq!(none.len(), post.len());
    // How many tasks lie between the gather and its first reader.
    let distance =
        |all: &[(TaskId, TaskId)]| all.iter().map(|(i, read)| read.0 - i.0).sum::<usize>();
    assert!(distance(&none) <= distance(&post), "{none:?} {post:?}");
    assert!(distance(&post) < distance(&pre), "{post:?} {pre:?}");
}

#[test]
fn no_more_units_are_gathered_ahead_than_the_limit_allows() {
    for limit in [1, 2] {
        let key = format!("sharding.limit_all_gathers={limit}");
        let plan = planned(2, 4, &[&key]).compiled.plan;
        // A unit is held from its gather to the last task of the same phase and region that reads it.
        let mut held: Vec<(TaskId, TaskId)> = Vec::new();
        for (i, t) in plan.tasks.iter_enumerated() {
            let Action::AllGather { recv, group, .. } = &t.action else { continue };
            // The root unit is kept from the forward to the backward pass.
            if plan.groups[*group].unit == UnitId::ROOT {
                continue;
            }
            let reads =
                |j: &TaskId| plan.tasks[*j].action.reads().iter().any(|p| p.buffer == recv.buffer);
            let next = i
                .next()
                .until(plan.tasks.next_key())
                .find(|&j| plan.tasks[j].action.writes().iter().any(|p| p.buffer == recv.buffer));
            let end = next.unwrap_or(plan.tasks.next_key());
            held.push((i, i.until(end).filter(reads).max().unwrap_or(i)));
        }
        assert!(held.len() > 2);
        for (i, _) in &held {
            let ahead = held.iter().filter(|(begin, end)| begin <= i && i <= end).count();
            // One unit in use, and those gathered ahead of their use.
            let groups_per_unit = 1;
            assert!(ahead <= (limit + 1) * groups_per_unit, "limit {limit}: {ahead} at task {i}");
        }
    }
}

#[test]
fn more_groups_than_a_kernel_takes_operands_have_one_gradient_norm() {
    let run = |wrap: &str| {
        let settings =
            ["precision.compute=fp32", "optimizer.clip_grad_norm=0.1", "sharding.ranks=2", wrap];
        let planned = plan("tests/models/bert/model.onnx", 4, &settings);
        let losses = train(&planned, "tests/models/bert/data.safetensors", 3, false).losses;
        (planned.compiled.plan.groups.len(), losses)
    };
    let (few, expected) = run("sharding.wrap=none");
    let (many, found) = run("sharding.wrap=size=1");
    assert!(few < 4 && many > 31, "{few} and {many} groups");
    for (a, b) in found.iter().zip(&expected) {
        assert!((a - b).abs() < 1e-6 * b, "{found:?} and {expected:?}");
    }
}

#[test]
fn tied_weights_are_in_the_root_unit_and_blocks_in_their_own() {
    let plan = planned(2, 4, &["sharding.wrap=blocks"]).compiled.plan;
    let unit_of = |name: &str| {
        let param = plan.params.position(|p| p.name == name).expect("the parameter");
        let holds = |g: &&frit_ir::plan::Group| g.segments.iter().any(|s| s.param == param);
        plan.units[plan.groups.iter().find(holds).expect("a group").unit].name.clone()
    };
    assert_eq!(unit_of("net.lm_head.weight"), "root");
    assert_eq!(unit_of("net.transformer.wpe.weight"), "root");
    assert!(unit_of("net.transformer.h.1.mlp.c_fc.weight").contains("h.1"));
    assert_eq!(
        unit_of("net.transformer.h.0.ln_1.weight"),
        unit_of("net.transformer.h.0.attn.c_proj.bias")
    );
    let none = planned(2, 4, &["sharding.wrap=none"]).compiled.plan;
    assert_eq!(none.units.len(), 1);
}

/// The unit of every parameter, by the parameter's name.
fn units(planned: &Planned) -> std::collections::BTreeMap<String, String> {
    let plan = &planned.compiled.plan;
    let of = |g: &frit_ir::plan::Group| {
        let unit = plan.units[g.unit].name.clone();
        let params: Vec<_> = g.segments.iter().map(|s| plan.params[s.param].name.clone()).collect();
        params.into_iter().map(move |name| (name, unit.clone()))
    };
    plan.groups.iter().flat_map(of).collect()
}

#[test]
fn modules_that_patterns_cover_are_units_the_innermost_first() {
    let found =
        units(&planned(2, 1, &["sharding.wrap=net.transformer.h.*, net.transformer.h.1.mlp"]));
    assert_eq!(found["net.transformer.h.1.mlp.c_fc.weight"], "net.transformer.h.1.mlp");
    assert_eq!(found["net.transformer.h.1.ln_1.weight"], "net.transformer.h.1");
    assert_eq!(found["net.transformer.h.0.mlp.c_fc.weight"], "net.transformer.h.0");
    assert_eq!(found["net.transformer.wpe.weight"], "root");
    // Tied weights are used in two places, whatever covers one of them.
    let found = units(&planned(2, 1, &["sharding.wrap=net.lm_head, net.transformer.h.0"]));
    assert_eq!(found["net.lm_head.weight"], "root");
    let bits = |more: &[&str]| {
        let clip = "optimizer.clip_grad_norm=0";
        bits(&train(&planned(2, 4, &[&[clip], more].concat()), DATA, 3, false).losses)
    };
    assert_eq!(bits(&["sharding.wrap=net.transformer.h.1.mlp, net.transformer.h.*"]), bits(&[]));
}

#[test]
fn the_embedding_that_encoder_and_decoder_share_is_in_the_root_unit() {
    let t5 =
        |wrap: &str| units(&plan("tests/models/t5/model.onnx", 2, &["sharding.ranks=2", wrap]));
    let blocks = t5("sharding.wrap=blocks");
    let shared = |units: &std::collections::BTreeMap<String, String>| -> Vec<String> {
        let is = |(name, _): &(&String, &String)| {
            name.contains("shared") || name.contains("embed_tokens")
        };
        units.iter().filter(is).map(|(_, unit)| unit.clone()).collect()
    };
    let found = shared(&blocks);
    assert!(!found.is_empty() && found.iter().all(|unit| unit == "root"), "{blocks:?}");
    let in_blocks = |part: &str| blocks.values().any(|unit| unit.contains(part));
    assert!(in_blocks("encoder.block.1") && in_blocks("decoder.block.1"), "{blocks:?}");
    let found = shared(&t5("sharding.wrap=**.encoder, **.decoder"));
    assert!(!found.is_empty() && found.iter().all(|unit| unit == "root"), "{found:?}");
}

#[test]
fn every_parameter_says_why_it_is_in_its_unit() {
    let planned = planned(2, 1, &[]);
    let plan = &planned.compiled.plan;
    let report = plan.reports.iter().find(|r| r.pass == "shard").expect("the report");
    for group in &plan.groups {
        let unit = &plan.units[group.unit].name;
        for segment in &group.segments {
            let name = &plan.params[segment.param].name;
            let says = |(message, origin): &&(String, frit_ir::Origin)| {
                *origin.source == **name && message.contains(&format!("in unit `{unit}`: "))
            };
            assert!(report.remarks.iter().any(|r| says(&r)), "{name}");
        }
    }
}

#[test]
fn the_planned_peak_is_at_its_lower_bound() {
    for (model, settings) in [
        (GPT2, &["sharding.ranks=4"][..]),
        (GPT2, &["sharding.ranks=1", "run.accumulation=2"]),
        (GPT2, &["sharding.ranks=2", "sharding.strategy=no_shard", "precision.compute=bf16"]),
        ("tests/models/mlp/model.onnx", &["sharding.ranks=4"]),
        ("tests/models/t5/model.onnx", &["sharding.ranks=2"]),
        ("tests/models/resnet/model.onnx", &[]),
    ] {
        let plan = plan(model, 2, settings).compiled.plan;
        let (peak, bound) = (plan.workspace_bytes, plan.workspace_lower_bound);
        assert!(peak as f64 <= bound as f64 * 1.02 + 4096.0, "{model}: {peak} for {bound}");
        // The list is one of the orders that the events allow, and the arena has room for each.
        let summary = plan.summary();
        let single = summary.single_stream_live_bytes;
        assert!(single > plan.persistent_bytes && single <= summary.peak_bytes);
    }
}

#[test]
fn ranks_exchange_the_bytes_that_the_plan_says() {
    for settings in [&["sharding.strategy=full_shard"][..], &["sharding.strategy=no_shard"]] {
        let planned = planned(4, 2, settings);
        let report = train(&planned, DATA, 3, false);
        let plan = &planned.compiled.plan;
        let collectives = plan.tasks.iter().filter(|t| t.action.is_collective()).count() as u64;
        assert_eq!(report.collective_calls, 3 * 4 * collectives, "{settings:?}");
        let bytes = plan.summary().bytes_communicated_per_step;
        assert_eq!(report.collective_bytes, 3 * 4 * bytes, "{settings:?}");
    }
}

#[test]
fn streams_hold_what_they_are_for() {
    let plan = planned(4, 2, &["precision.compute=bf16"]).compiled.plan;
    for task in &plan.tasks {
        let expected = match task.action {
            Action::AllGather { .. } => Stream::Gather,
            Action::ReduceScatter { .. } | Action::AllReduce { .. } => Stream::Reduce,
            _ => Stream::Compute,
        };
        assert_eq!(task.stream, expected, "{}", task.name);
        assert!(task.waits.iter().all(|w| plan.tasks[*w].stream != task.stream));
    }
}

/// Whether the order of two tasks matters: one writes bytes of a buffer that the other accesses.
fn conflict(a: &Task, b: &Task) -> bool {
    let meets = |x: &Place, y: &Place| {
        let end = |p: &Place| p.offset + p.ty.bytes();
        x.buffer == y.buffer && x.offset < end(y) && y.offset < end(x)
    };
    let writes_of = |a: &Task, b: &Task| {
        let accessed = [b.action.reads(), b.action.writes()].concat();
        a.action.writes().iter().any(|x| accessed.iter().any(|y| meets(x, y)))
    };
    writes_of(a, b) || writes_of(b, a)
}

/// What tasks of a phase wait for on other streams, by petgraph's transitive reduction of all that they depend on.
fn reduced(plan: &Plan, phase: &Phase) -> BTreeSet<(TaskId, TaskId)> {
    let node = |i: TaskId| NodeIndex::<u32>::new(i.0 - phase.begin.0);
    let mut graph: DiGraph<(), ()> = DiGraph::new();
    phase.tasks().for_each(|_| _ = graph.add_node(()));
    for i in phase.tasks() {
        let task = &plan.tasks[i];
        let before = phase.begin.until(i);
        let same_stream = before.clone().rfind(|j| plan.tasks[*j].stream == task.stream);
        let conflicts = before.filter(|j| conflict(&plan.tasks[*j], task));
        let needed: BTreeSet<TaskId> =
            conflicts.chain(same_stream).chain(task.waits.iter().copied()).collect();
        needed.into_iter().for_each(|j| _ = graph.add_edge(node(j), node(i), ()));
    }
    let order: Vec<NodeIndex> = graph.node_indices().collect();
    let (list, _) = dag_to_toposorted_adjacency_list::<_, u32>(&graph, &order);
    let (reduction, _) = dag_transitive_reduction_closure(&list);
    let id = |n: u32| TaskId(phase.begin.0 + n as usize);
    let edge = |(from, to): (u32, u32)| (id(to), id(from));
    let all = (0..graph.node_count() as u32)
        .flat_map(|from| reduction.neighbors(from).map(move |to| (from, to)).collect::<Vec<_>>());
    all.map(edge).filter(|(to, from)| plan.tasks[*to].stream != plan.tasks[*from].stream).collect()
}

#[test]
fn a_task_waits_for_what_it_depends_on_and_for_nothing_that_is_implied() {
    for more in [
        &["sharding.backward_prefetch=pre"][..],
        &["sharding.backward_prefetch=none", "sharding.forward_prefetch=0"],
        &["sharding.prefetch=auto", "run.accumulation=2"],
        &["memory.offload=parameters", "memory.recompute=unit"],
    ] {
        let plan = planned(4, 2, more).compiled.plan;
        for phase in &plan.phases {
            let waits: BTreeSet<(TaskId, TaskId)> = phase
                .tasks()
                .flat_map(|i| plan.tasks[i].waits.iter().map(move |w| (i, *w)))
                .collect();
            assert_eq!(waits, reduced(&plan, phase), "{} with {more:?}", phase.name);
        }
        assert!(plan.tasks.iter().any(|t| !t.waits.is_empty()));
    }
}

#[test]
fn every_export_raises_to_the_same_operations() {
    let counts = |model: &str, ops: &[&str]| -> Vec<usize> {
        let settings = ["precision.compute=fp32", "memory.recompute=none"];
        let plan = plan(model, 2, &settings).compiled.plan;
        let count = |op: &&str| {
            let of = |t: &frit_ir::plan::Task| match &t.action {
                Action::Kernel { kernel, .. } => {
                    let nodes = plan.kernels[*kernel].body.nodes();
                    nodes.filter(|(_, n)| n.op.name() == *op).count()
                }
                _ => 0,
            };
            plan.tasks.iter().map(of).sum()
        };
        ops.iter().map(count).collect()
    };
    let ops =
        ["attention", "layer_norm", "gelu_tanh", "cross_entropy", "softmax", "select", "is_nan"];
    for file in ["model", "model_opset21", "model_torchscript", "model_sdpa"] {
        let found = counts(&format!("tests/models/gpt2/{file}.onnx"), &ops);
        assert_eq!(found, [2, 5, 2, 1, 0, 0, 0], "{file}");
    }
    let files: Vec<String> = std::fs::read_dir(crate::support::file("tests/models/mlp"))
        .expect("the models")
        .map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8"))
        .filter(|name| name.ends_with(".onnx"))
        .collect();
    assert!(files.len() > 1, "{files:?}");
    for file in files {
        let found = counts(&format!("tests/models/mlp/{file}"), &["relu", "cross_entropy"]);
        assert_eq!(found, [2, 1], "{file}");
    }
}

#[test]
fn interpreted_plans_agree_with_compiled_ones_for_every_model() {
    for (model, batch, more) in [
        ("mlp", 4, ""),
        ("llama", 2, ""),
        ("bert", 2, ""),
        ("t5", 2, ""),
        ("vit", 2, ""),
        ("resnet", 2, ""),
        ("unet", 2, "loss.kind=mse"),
    ] {
        let mut settings = vec!["sharding.ranks=2", "precision.compute=fp32"];
        settings.extend(Some(more).filter(|m| !m.is_empty()));
        let planned = plan(&format!("tests/models/{model}/model.onnx"), batch, &settings);
        let data = format!("tests/models/{model}/data.safetensors");
        let compiled = train(&planned, &data, 2, false);
        let interpreted = train(&planned, &data, 2, true);
        for (a, b) in compiled.losses.iter().zip(&interpreted.losses) {
            assert!((a - b).abs() < 2e-6 * b.abs().max(1.0), "{model}: {a} and {b}");
        }
    }
}
