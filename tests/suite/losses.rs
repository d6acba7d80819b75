//! Every kind of loss against PyTorch in fp64 (`tests/models/losses/make.py`), on one rank and on two, and in one micro-step and in two,
//! that ignore different numbers of labels.

use crate::support::{file, plan, train};
use frit_runtime::run::RunReport;
use serde_json::Value;

#[test]
fn losses_and_gradient_norms_are_pytorchs() {
    let text = std::fs::read_to_string(file("tests/models/losses/reference.json"));
    let cases: Value = serde_json::from_str(&text.expect("the reference")).expect("JSON");
    let cases = cases.as_object().expect("cases");
    assert!(cases.len() >= 10);
    for (name, case) in cases {
        let numbers = |key: &str| -> Vec<f64> {
            let list = case[key].as_array().expect("a list");
            list.iter().map(|x| x.as_f64().expect("a number")).collect()
        };
        let settings = case["settings"].as_array().expect("settings");
        let settings: Vec<&str> = settings.iter().map(|s| s.as_str().expect("a setting")).collect();
        // Losses of other elements are a mean of micro-steps.
        let micro_steps = if name == "several" { 1 } else { 2 };
        for (ranks, micro) in [(1, 1), (2, 1), (1, 2), (2, 2)].iter().filter(|x| x.1 <= micro_steps)
        {
            let report = trained(&settings, *ranks, *micro);
            for (found, expected) in
                [(&report.losses, numbers("loss")), (&report.grad_norms, numbers("grad_norm"))]
            {
                for (step, (a, b)) in found.iter().zip(&expected).enumerate() {
                    let error = (a - b).abs();
                    assert!(
                        error < 1e-5,
                        "{name}, {ranks} ranks, {micro} micro-steps, step {step}: {a} and {b}"
                    );
                }
            }
        }
    }
}

/// Five steps of eight examples each.
fn trained(settings: &[&str], ranks: usize, micro_steps: usize) -> RunReport {
    let (ranks_key, accumulation) =
        (format!("sharding.ranks={ranks}"), format!("run.accumulation={micro_steps}"));
    let mut all = vec!["precision.compute=fp32", ranks_key.as_str(), accumulation.as_str()];
    all.extend(["optimizer.kind=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0"]);
    all.extend(settings);
    let planned = plan("tests/models/losses/model.onnx", 8 / (ranks * micro_steps), &all);
    train(&planned, "tests/models/losses/data.safetensors", 5, false)
}

#[test]
fn losses_of_the_same_labels_are_one_loss() {
    let also = "loss.also=[\"0.25 * cross_entropy(logits, labels)\"]";
    let whole = trained(&["loss.weight=1.25"], 1, 1);
    for (ranks, micro) in [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)] {
        let parts = trained(&[also], ranks, micro);
        for (a, b) in whole.losses.iter().zip(&parts.losses) {
            assert!((a - b).abs() < 1e-5, "{ranks} ranks, {micro} micro-steps: {a} and {b}");
        }
    }
}
