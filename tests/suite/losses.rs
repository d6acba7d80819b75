//! Every kind of loss against PyTorch in fp64 (`tests/models/losses/make.py`), on one rank and on two that ignore
//! different numbers of labels.

use crate::support::{file, plan, train};
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
        for ranks in [1, 2] {
            let ranks_key = format!("sharding.ranks={ranks}");
            let mut all = vec!["precision.compute=fp32", ranks_key.as_str()];
            all.extend(["optimizer.kind=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0"]);
            all.extend(settings.iter().map(|s| s.as_str().expect("a setting")));
            let planned = plan("tests/models/losses/model.onnx", 8 / ranks, &all);
            let report = train(&planned, "tests/models/losses/data.safetensors", 5, false);
            for (found, expected) in
                [(&report.losses, numbers("loss")), (&report.grad_norms, numbers("grad_norm"))]
            {
                for (step, (a, b)) in found.iter().zip(&expected).enumerate() {
                    let error = (a - b).abs();
                    assert!(error < 1e-5, "{name}, {ranks} ranks, step {step}: {a} and {b}");
                }
            }
        }
    }
}
