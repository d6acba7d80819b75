//! Node tests of ONNX's own suite (`tests/models/operators/make.py`): the imported graph, evaluated by
//! the interpreter, gives the outputs that ONNX states.

use super::build::{import, run};
use crate::import::ImportOptions;
use crate::import::onnx::messages::ModelProto;
use frit_ir::{DType, Tensor, TensorType};
use prost::Message;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;

fn tensor(view: &TensorView<'_>) -> Tensor {
    let dtype = match view.dtype() {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::BOOL => DType::Bool,
        other => panic!("{other:?}"),
    };
    Tensor::from_bytes(TensorType::new(dtype, view.shape()), view.data()).expect("its bytes")
}

/// What is wrong with the outputs of a test; `None` if nothing is.
fn failure(
    model: &ModelProto,
    inputs: &[(String, Tensor)],
    outputs: &[(String, Tensor)],
) -> Option<String> {
    let imported = match import(model, &ImportOptions::default()) {
        Ok(imported) => imported,
        Err(report) => return Some(report.to_string().lines().next().unwrap_or("").to_string()),
    };
    let feeds: Vec<(&str, Tensor)> = inputs.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    let found = run(&imported, &feeds);
    let names: Vec<&str> = imported.graph.outputs.iter().map(|o| o.name.as_str()).collect();
    for (name, expected) in outputs {
        let Some(i) = names.iter().position(|n| n == name) else {
            return Some(format!("there is no output {name}"));
        };
        if found[i].ty.shape != expected.ty.shape {
            return Some(format!("{name} is {}, not {}", found[i].ty, expected.ty));
        }
        let close = |(a, b): (&f64, &f64)| {
            a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1e-5 + 1e-4 * b.abs()
        };
        let (a, b) = (found[i].to_f64s(), expected.to_f64s());
        if !a.iter().zip(&b).all(close) {
            return Some(format!("{name} differs: {a:?} and {b:?}"));
        }
    }
    None
}

/// Runs all tests of a file.
fn check(file: &str, at_least: usize) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/models/operators");
    let bytes = std::fs::read(format!("{folder}/{file}")).expect("the cases");
    let all = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    type Case = (Option<ModelProto>, Vec<(String, Tensor)>, Vec<(String, Tensor)>);
    let mut cases: BTreeMap<String, Case> = BTreeMap::new();
    for (key, view) in all.iter() {
        let parts: Vec<&str> = key.splitn(3, '/').collect();
        let case = cases.entry(parts[0].to_string()).or_default();
        match parts[1..] {
            ["model"] => case.0 = ModelProto::decode(view.data()).ok(),
            ["input", name] => case.1.push((name.to_string(), tensor(&view))),
            ["output", name] => case.2.push((name.to_string(), tensor(&view))),
            _ => panic!("{key}"),
        }
    }
    assert!(cases.len() >= at_least, "only {} cases", cases.len());
    let mut failed = Vec::new();
    for (name, (model, inputs, outputs)) in &cases {
        let model = model.as_ref().expect("a model");
        if let Some(why) = failure(model, inputs, outputs) {
            failed.push(format!("{name}: {why}"));
        }
    }
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), cases.len(), failed.join("\n"));
}

#[test]
fn onnx_node_tests_give_what_they_state() {
    check("cases.safetensors", 200);
}

#[test]
fn onnx_node_tests_of_images_give_what_they_state() {
    check("images.safetensors", 100);
}

#[test]
fn onnx_node_tests_of_sampling_give_what_they_state() {
    check("sampling.safetensors", 30);
}
