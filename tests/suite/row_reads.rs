//! Rows of a parameter that are read one by one, at indices which are constants: their gradients are added to one table in place.

use crate::support::{Planned, compile_at, plan_at, write_f32};
use frit_ir::plan::Action;
use frit_runtime::compare::{Options, compare};
use serde_json::json;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// `x + Σ (k + 1) · x · w[row k]`; one row is read twice, which is one read.
fn model(dir: &Path) -> PathBuf {
    let rows = [2, 0, 3, 2, 1];
    let mut nodes = vec![];
    for (k, row) in rows.iter().enumerate() {
        let index = json!({"ty": {"dtype": "i64", "shape": []}, "splat": row});
        let factor = json!({"ty": {"dtype": "f32", "shape": []}, "splat": k + 1});
        nodes.extend([
            json!({"op": "constant", "inputs": [], "outputs": [format!("i{k}")], "attrs": index}),
            json!({"op": "constant", "inputs": [], "outputs": [format!("f{k}")], "attrs": factor}),
            json!({"op": "embedding", "inputs": ["w", format!("i{k}")], "outputs": [format!("r{k}")]}),
            json!({"op": "mul", "inputs": [format!("r{k}"), format!("f{k}")], "outputs": [format!("s{k}")]}),
            json!({"op": "mul", "inputs": ["x", format!("s{k}")], "outputs": [format!("p{k}")]}),
        ]);
        let sum = if k == 0 { "x".into() } else { format!("y{}", k - 1) };
        let inputs = json!([sum, format!("p{k}")]);
        nodes.push(json!({"op": "add", "inputs": inputs, "outputs": [format!("y{k}")]}));
    }
    let model = json!({
        "frit_model": 1,
        "name": "rows",
        "dims": {"batch": null},
        "inputs": [{"name": "x", "dtype": "f32", "shape": ["batch", 6]}],
        "params": [{"name": "w", "shape": [4, 6], "init": {"normal": {"std": 1.0}}}],
        "nodes": nodes,
        "outputs": [format!("y{}", rows.len() - 1)],
    });
    let file = dir.join("model.json");
    std::fs::write(&file, model.to_string()).expect("a file");
    file
}

fn settings(more: &[&'static str]) -> Vec<&'static str> {
    [&["loss.kind=mse"], more].concat()
}

#[test]
fn gradients_of_single_rows_are_added_in_place() {
    let dir = TempDir::new().expect("a directory");
    let model = model(dir.path());
    for more in [
        &[][..],
        &["precision.compute=bf16"],
        &["run.accumulation=2"],
        &["sharding.ranks=2"],
        &["sharding.ranks=2", "sharding.strategy=no_shard", "run.accumulation=2"],
        &["target.device=cuda"],
    ] {
        let compiled = compile_at(&model, 2, &settings(more));
        let writes_over_operand = |action: &Action| {
            let (reads, writes) = (action.reads(), action.writes());
            matches!(action, Action::Kernel { .. })
                && writes
                    .iter()
                    .any(|w| reads.iter().any(|r| r.buffer == w.buffer && r.offset == w.offset))
        };
        let plan = &compiled.plan;
        let added = plan
            .tasks
            .iter()
            .filter(|t| t.name.starts_with("embedding_grad") && writes_over_operand(&t.action));
        assert_eq!(added.count(), 3, "{more:?}");
    }
}

#[test]
fn gradients_of_single_rows_are_those_of_the_interpreter() {
    let dir = TempDir::new().expect("a directory");
    let planned: Planned = plan_at(&model(dir.path()), 2, &settings(&["precision.compute=fp32"]));
    let data = dir.path().join("data.safetensors");
    let numbers = |n: usize| (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
    write_f32(&data, &[("x", vec![8, 6], numbers(48)), ("labels", vec![8, 6], numbers(48))]);
    let options = Options {
        plan: planned.path(),
        data: vec![data],
        token_dtype: None,
        steps: 2,
        budget: 500,
        json: false,
        threads: Some(1),
        tuning_seconds: None,
    };
    let report = compare(&options).unwrap_or_else(|e| panic!("{e}"));
    assert!(report.is_close(), "{}", report.render(false));
}
