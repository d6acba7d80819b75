//! Rematerialization changes memory, not results; a budget is met or refused.

use crate::simulate::predict_llama;
use crate::support::{Planned, file, plan, train};
use frit::commands::{Cli, execute};
use frit_ir::Region;
use frit_ir::plan::Plan;

const LOSSES: usize = 4;

fn planned(model: &str, more: &[&str]) -> Planned {
    let model = format!("tests/models/{model}/model.onnx");
    plan(&model, 2, &[&["sharding.ranks=2"], more].concat())
}

fn losses(model: &str, more: &[&str]) -> Vec<u64> {
    let data = format!("tests/models/{model}/data.safetensors");
    let report = train(&planned(model, more), &data, LOSSES, false);
    report.losses.iter().map(|x| x.to_bits()).collect()
}

fn recomputed(plan: &Plan) -> usize {
    plan.tasks.iter().filter(|t| matches!(t.region, Region::Recompute(_))).count()
}

#[test]
fn losses_are_bit_identical_with_and_without_recomputation() {
    for (model, compute, recompute) in [
        ("gpt2", "fp32", "unit"),
        ("gpt2", "fp32", "selective"),
        ("gpt2", "bf16", "unit"),
        ("llama", "fp32", "unit"),
        ("t5", "fp32", "unit"),
        ("vit", "fp32", "selective"),
    ] {
        let compute = format!("precision.compute={compute}");
        let key = format!("memory.recompute={recompute}");
        let expected = losses(model, &[&compute]);
        assert_eq!(losses(model, &[&compute, &key]), expected, "{model} {compute} {key}");
    }
}

#[test]
fn selective_recomputation_in_low_precision_starts_from_rounded_values() {
    let expected = losses("gpt2", &["precision.compute=bf16"]);
    let found = losses("gpt2", &["precision.compute=bf16", "memory.recompute=selective"]);
    for (a, b) in
        expected.into_iter().map(f64::from_bits).zip(found.into_iter().map(f64::from_bits))
    {
        assert!((a - b).abs() < 1e-3 * a, "{a} and {b}");
    }
}

#[test]
fn recomputation_saves_memory_and_gathers_each_unit_no_more_often() {
    // Long enough that activations outweigh parameters.
    let small = "batch=8 layers=6 width=64 heads=2 kv_heads=1 head=32 ffn=128 vocab=96 seq=64";
    let compiled = |recompute: &str| {
        predict_llama(small, &["sharding.ranks=4", &format!("memory.recompute={recompute}")])
    };
    let [none, selective, unit] = ["none", "selective", "unit"].map(compiled);
    assert_eq!(recomputed(&none), 0);
    assert!(recomputed(&selective) > 0 && recomputed(&unit) > recomputed(&selective) / 2);
    assert!(selective.workspace_bytes < none.workspace_bytes * 9 / 10);
    assert!(unit.workspace_bytes < selective.workspace_bytes);
    for plan in [&selective, &unit] {
        let (with, without) = (plan.summary(), none.summary());
        assert_eq!(with.collectives, without.collectives);
        assert_eq!(with.bytes_communicated_per_step, without.bytes_communicated_per_step);
        let (peak, bound) = (plan.workspace_bytes, plan.workspace_lower_bound);
        assert!(peak as f64 <= bound as f64 * 1.05 + 4096.0, "{peak} for {bound}");
    }
}

/// A sum whose terms would have to be kept for it, such as the gradient of a matrix over the chunks of a loss, is kept itself.
#[test]
fn selective_recomputation_never_needs_more_memory() {
    for model in ["mlp", "gpt2", "llama", "bert", "t5", "vit"] {
        for compute in ["fp32", "bf16"] {
            for chunks in ["1", "2"] {
                if chunks == "2" && !["gpt2", "llama"].contains(&model) {
                    continue;
                }
                let compute = format!("precision.compute={compute}");
                let chunks = format!("memory.loss_chunks={chunks}");
                let workspace = |recompute: &str| {
                    let recompute = format!("memory.recompute={recompute}");
                    planned(model, &[&compute, &chunks, &recompute]).compiled.plan.workspace_bytes
                };
                let (none, selective) = (workspace("none"), workspace("selective"));
                assert!(
                    selective <= none,
                    "{model} {compute} {chunks}: {selective} bytes for {none}"
                );
            }
        }
    }
}

#[test]
fn a_budget_is_kept_or_the_smallest_that_would_do_is_named() {
    use clap::Parser;
    let peak = |more: &[&str]| planned("gpt2", more).compiled.plan.summary().peak_bytes;
    let (most, least) = (peak(&["memory.recompute=none"]), peak(&["memory.recompute=unit"]));
    // By default cheap values are recomputed.
    assert_eq!(peak(&[]), peak(&["memory.recompute=selective"]));
    assert!(peak(&[]) < most);
    assert!(least < most);
    let between = format!("memory.budget={}", (most + least) / 2);
    let auto = planned("gpt2", &[&between]).compiled.plan;
    assert!(auto.summary().peak_bytes <= (most + least) / 2);
    assert!(recomputed(&auto) > 0);
    let roomy = format!("memory.budget={most}");
    assert_eq!(
        planned("gpt2", &[&roomy]).compiled.plan.buffers,
        planned("gpt2", &[]).compiled.plan.buffers
    );

    let out = tempfile::tempdir().unwrap();
    let out = out.path().join("plan");
    let model = file("tests/models/gpt2/model.onnx");
    let refused = |settings: &[&str]| {
        let mut args = vec!["frit", "compile", model.to_str().unwrap(), "--bind", "batch=2"];
        args.extend(["-o", out.to_str().unwrap(), "--set", "sharding.ranks=2"]);
        settings.iter().for_each(|s| args.extend(["--set", s]));
        let error = execute(&Cli::try_parse_from(args).unwrap()).unwrap_err().to_string();
        assert!(!out.exists());
        error
    };
    let error = refused(&["memory.budget=1000", "memory.recompute=auto"]);
    let named =
        error.split("sufficient budget is ").nth(1).and_then(|s| s.split(' ').next()).unwrap();
    let budget = format!("memory.budget={named}");
    let fits = planned("gpt2", &["memory.recompute=auto", &budget]).compiled.plan;
    assert!(fits.summary().peak_bytes <= named.parse().unwrap());
    let other = refused(&["memory.budget=1000", "memory.recompute=none"]);
    assert!(other.contains("with memory.recompute = \"auto\""), "{other}");
}
