//! Logits, their loss and their gradient in chunks of tokens: training is that with whole logits, whatever it is crossed with.

use crate::driver::tensors;
use crate::logits;
use crate::memory::predicted;
use crate::pairs::{Row, rows};
use crate::support::{Planned, file, plan_to_evaluate, train};
use frit::compilation::{Request, predict};
use frit::config::Config;
use frit_ir::plan::Plan;
use frit_ir::{Op, Region};
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::run::{RunOptions, run};
use frit_runtime::validation::ValidationOptions;
use std::collections::BTreeMap;

const STEPS: usize = 3;

/// What is crossed.
const FACTORS: [&[&str]; 9] = [
    &["gpt2", "bert", "vit", "t5"],
    &["memory.loss_chunks=2", "memory.loss_chunks=3", "memory.loss_chunks=7"],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3"],
    &["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
    &["padding.tensor_cores=never", "padding.tensor_cores=always"],
];
const PRECISION: usize = 7;

fn gradients(planned: &Planned) -> BTreeMap<String, Vec<f32>> {
    tensors(&planned.dir.path().join("grads.safetensors"))
}

/// Norm of the difference over the norm.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(x, y)| f64::from(x - y)));
    difference / norm(&mut b.iter().map(|x| f64::from(*x))).max(1e-6)
}

/// Tasks that compute losses.
fn losses(plan: &Plan) -> usize {
    logits::losses(plan).len()
}

#[test]
fn chunks_train_as_whole_logits_whatever_they_are_crossed_with() {
    let rows = rows(&FACTORS, |_: &Row| true);
    assert!((12..=24).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let strategy = format!("sharding.strategy={}", words[3]);
        let mut settings = words[1..].to_vec();
        settings[2] = &strategy;
        let [model, data] = ["model.onnx", "data.safetensors"]
            .map(|name| format!("tests/models/{}/{name}", words[0]));
        let mut whole = settings.clone();
        whole[0] = "memory.loss_chunks=1";
        let [chunks, whole] = [settings, whole].map(|s| plan_to_evaluate(&model, 2, &s));
        let chunked = words[1].trim_start_matches("memory.loss_chunks=").parse().expect("n");
        let n = losses(&chunks.compiled.plan);
        assert!(n > 1 && n <= chunked && losses(&whole.compiled.plan) == 1, "{words:?}: {n}");

        let [found, expected] = [&chunks, &whole].map(|p| train(p, &data, STEPS, false).losses);
        let close = if row[PRECISION] == 0 { 1e-5 } else { 2e-3 };
        for (x, y) in found.iter().zip(&expected) {
            assert!((x - y).abs() <= close * y.abs(), "{words:?}: {found:?}, {expected:?}");
        }
        let (found, expected) = (gradients(&chunks), gradients(&whole));
        for (name, gradient) in &expected {
            let far = distance(&found[name], gradient);
            assert!(far <= close, "{words:?}: gradient of {name} is off by {far}");
        }
        resumes(&chunks, &data, &words);
    }
}

/// A run with validation that is interrupted is the run that is not.
fn resumes(planned: &Planned, data: &str, words: &[&str]) {
    let losses = |dir: &str, steps: usize| {
        let options = RunOptions {
            steps,
            data: file(data).into(),
            validation: Some(ValidationOptions { data: file(data).into(), every: Some(1) }),
            checkpoint: Some(CheckpointOptions {
                dir: planned.dir.path().join(dir),
                every: Some(1),
                resume: true,
                keep: None,
            }),
            threads: Some(1),
            ..RunOptions::default()
        };
        let report = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{words:?}: {e}"));
        (report.losses, report.validation)
    };
    let whole = losses("whole", STEPS);
    let first = losses("parts", 1);
    let rest = losses("parts", STEPS);
    assert_eq!(whole.0, [first.0, rest.0].concat(), "{words:?}");
    assert_eq!(whole.1, [first.1, rest.1].concat(), "{words:?}");
}

/// GPT-2 with its vocabulary, at sizes at which logits are most of the memory.
fn predicted_124m(settings: &[&str]) -> Plan {
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let config = Config::parse("", "train.toml", &settings).unwrap_or_else(|e| panic!("{e}"));
    let request = Request {
        model: file("examples/gpu/gpt2_124m.json"),
        binds: [("batch".to_string(), 32)].into(),
        ..Request::default()
    };
    predict(&request, &config).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn large_logits_never_exist_whole() {
    for target in ["target.device=cpu", "target.device=cuda"] {
        let settings = [target, "precision.compute=bf16"];
        let auto = predicted_124m(&settings);
        let whole = predicted_124m(&[&settings[..], &["memory.loss_chunks=1"]].concat());
        assert!(losses(&auto) > 1, "{target}");
        let peak = |plan: &Plan| plan.buffers.iter().map(|b| b.offset + b.bytes).max();
        assert!(peak(&auto) < peak(&whole), "{target}");
        // Parts of results are computed where they belong.
        let copies = |plan: &Plan| {
            let is_copy = |op: &Op| matches!(op, Op::Concat(_) | Op::Slice(_));
            plan.kernels.iter().filter(|k| k.body.nodes().any(|(_, n)| is_copy(&n.op))).count()
        };
        assert_eq!(copies(&auto), copies(&whole), "{target}");
    }
}

#[test]
fn a_budget_asks_for_more_chunks_before_anything_is_recomputed() {
    let settings = ["target.device=cuda", "precision.compute=bf16"];
    let auto = predicted_124m(&settings);
    let most = predicted_124m(&[&settings[..], &["memory.loss_chunks=16"]].concat());
    let peak = |plan: &Plan| plan.summary().peak_bytes;
    assert!(peak(&most) < peak(&auto));
    let budget = format!("memory.budget={}", (peak(&auto) + peak(&most)) / 2);
    let within = predicted_124m(&[&settings[..], &[&budget, "memory.recompute=auto"]].concat());
    assert_eq!(losses(&within), losses(&most));
    assert!(within.tasks.iter().all(|t| !matches!(t.region, Region::Recompute(_))));
    // Chunks alone, where nothing may be recomputed.
    let chunks = predicted_124m(&[&settings[..], &[&budget]].concat());
    assert_eq!(losses(&chunks), losses(&most));
}

#[test]
fn small_logits_stay_whole() {
    assert_eq!(losses(&predicted("gpt2", &[])), 1);
}

#[test]
fn chunks_of_what_has_no_logits_are_refused() {
    let refused = |model: &str, settings: &[&str]| {
        let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
        let config = Config::parse("", "train.toml", &settings).map_err(|e| e.to_string())?;
        let model = file(&format!("tests/models/{model}/model.onnx"));
        let request = Request { model, binds: [("batch".into(), 2)].into(), ..Request::default() };
        predict(&request, &config).map(|_| ()).map_err(|e| e.to_string())
    };
    let error = refused("unet", &["loss.kind=mse", "memory.loss_chunks=2"]).expect_err("no logits");
    assert!(
        error.contains("`memory.loss_chunks` = 2") && error.contains("no cross-entropy"),
        "{error}"
    );
    for n in ["0", "-3"] {
        let error = refused("gpt2", &[&format!("memory.loss_chunks={n}")]).expect_err("no number");
        assert!(error.contains(n), "{error}");
    }
}
