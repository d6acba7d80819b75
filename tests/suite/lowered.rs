//! Values that share memory, and parameters that share a group, are what the model says: audited on small models.

use crate::audit::options;
use crate::support::plan_at;
use frit::audit::audit;
use serde_json::{Value, json};

/// Compiles a model of an input `x [batch, 4]`, these parameters `[4, 4]` and nodes, and requires that every gradient, update and comparison
/// of its audit is right.
fn is_right(params: &[&str], nodes: &[Value], frozen: &[&str], settings: &[&str]) {
    let param = |name: &&str| {
        let trainable = !frozen.contains(name);
        json!({"name": name, "shape": [4, 4], "init": {"normal": {"std": 1.5}}, "trainable": trainable})
    };
    let model = json!({
        "frit_model": 1,
        "name": "m",
        "dims": {"batch": null},
        "inputs": [{"name": "x", "dtype": "f32", "shape": ["batch", 4]}],
        "params": params.iter().map(param).collect::<Vec<_>>(),
        "nodes": nodes,
        "outputs": ["y"],
    });
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("model.json");
    std::fs::write(&path, model.to_string()).expect("written");
    let always = ["loss.kind=mse", "loss.labels=target", "precision.compute=fp32"];
    let planned = plan_at(&path, 4, &[&always, settings].concat());
    let found = audit(&options(&planned.path())).unwrap_or_else(|e| panic!("{settings:?}: {e}"));
    assert!(found.wrong().is_empty(), "{settings:?}: {}", found.render(false));
    assert!(!found.gradients.is_empty(), "{settings:?}");
}

fn node(op: &str, inputs: &[&str], output: &str, attrs: Value) -> Value {
    json!({"op": op, "inputs": inputs, "outputs": [output], "attrs": attrs})
}

#[test]
fn a_sum_is_not_put_where_parts_of_a_concatenation_are_still_read() {
    let part = |at: usize| json!({"start": [at, 0], "size": [4, 4], "step": [1, 1]});
    let nodes = [
        node("matmul", &["x", "W"], "a", json!({})),
        node("sigmoid", &["a"], "p", json!({})),
        node("matmul", &["x", "U"], "b", json!({})),
        node("tanh", &["a"], "q", json!({})),
        node("concat", &["p", "q"], "c", json!({"axis": 0})),
        node("concat", &["a", "b"], "e", json!({"axis": 1})),
        node("matmul", &["e", "a"], "m", json!({"trans_a": true})),
        node("add", &["m", "c"], "z", json!({})),
        node("concat", &["q", "p"], "d", json!({"axis": 0})),
        node("mul", &["z", "d"], "o", json!({})),
        node("slice", &["o"], "o1", part(0)),
        node("slice", &["o"], "o2", part(4)),
        node("add", &["o1", "o2"], "y", json!({})),
    ];
    for more in [&["memory.recompute=none"][..], &["sharding.ranks=2"], &["run.accumulation=2"]] {
        is_right(&["W", "U"], &nodes, &[], more);
    }
}

#[test]
fn casts_of_shards_keep_what_they_round() {
    for chain in [&["i64", "f32"][..], &["i32", "f32"], &["bool", "f32"], &["bf16", "f32"]] {
        let mut nodes = vec![];
        let mut value = "F".to_string();
        for to in chain {
            let next = format!("{value}_{to}");
            nodes.push(node("cast", &[&value], &next, json!({"to": to})));
            value = next;
        }
        nodes.extend([
            node("matmul", &["x", "W"], "h", json!({})),
            node("matmul", &["h", &value], "t", json!({})),
            node("matmul", &["t", "V"], "y", json!({})),
        ]);
        for ranks in ["sharding.ranks=1", "sharding.ranks=2"] {
            is_right(&["W", "F", "V"], &nodes, &["F"], &[ranks]);
            is_right(&["W", "F", "V"], &nodes, &["F"], &[ranks, "precision.compute=bf16"]);
        }
    }
}

#[test]
fn a_gradient_that_others_read_is_not_reduced_in_place() {
    let nodes = [
        node("matmul", &["x", "W"], "h", json!({})),
        node("tanh", &["h"], "h1", json!({})),
        node("add", &["h1", "P"], "t", json!({})),
        node("matmul", &["t", "V"], "y", json!({})),
    ];
    let ranks = "sharding.ranks=2";
    for more in [
        &["sharding.strategy=no_shard"][..],
        &["sharding.strategy=no_shard", "run.accumulation=2"],
        &["sharding.strategy=no_shard", "sharding.reduce_dtype=bf16"],
        &["sharding.strategy=hybrid_shard", "sharding.shard_group=1"],
        &["sharding.strategy=full_shard"],
    ] {
        is_right(&["W", "P", "V"], &nodes, &[], &[&[ranks], more].concat());
    }
}

#[test]
fn what_parameters_of_two_groups_give_waits_for_both_copies_from_the_host() {
    let nodes = [
        node("add", &["F", "V"], "s", json!({})),
        node("reduce", &["s"], "r", json!({"f": "mean", "axes": [0, 1], "keep_dims": true})),
        node("add", &["r", "W"], "t", json!({})),
        node("add", &["t", "x"], "y", json!({})),
    ];
    for offload in ["memory.offload=none", "memory.offload=parameters"] {
        for precision in ["precision.compute=fp32", "precision.compute=bf16"] {
            is_right(&["W", "V", "F"], &nodes, &["F"], &[offload, precision]);
        }
    }
}
