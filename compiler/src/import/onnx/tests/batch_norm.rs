//! Which statistics BatchNormalization uses, and what becomes of the running ones.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::*;
use frit_ir::{DType, Op, OutputKind, Tensor};

const X: [Dim; 2] = [Dim::N(2), Dim::N(1)];

/// `x[2, 1]` normalized; the running mean is 1, the running variance 4, the scale 2.
fn normalized(attributes: &[AttributeProto]) -> ModelProto {
    let vector = |name: &str, value: f32| floats(name, &[1], &[value]);
    let weights = vec![vector("s", 2.0), vector("b", 0.5), vector("m", 1.0), vector("v", 4.0)];
    let node = node("BatchNormalization", &["x", "s", "b", "m", "v"], &["y"]);
    let eps = float("epsilon", 0.0);
    let attributes = [&[eps], attributes].concat();
    model(vec![input("x", 1, &X)], weights, vec![node.with(&attributes)], &["y"])
}

fn train() -> ImportOptions {
    ImportOptions { batch_norm_trains: true, ..ImportOptions::default() }
}

fn values(model: &ModelProto, options: &ImportOptions) -> (Vec<f64>, usize, usize) {
    let imported = import(model, options).unwrap_or_else(|e| panic!("{e}"));
    let x = Tensor::floats(DType::F32, [2, 1], vec![3.0, 7.0]);
    let found = run(&imported, &[("x", x)]);
    let outputs = &imported.graph.outputs;
    let y = outputs.iter().position(|o| o.kind == OutputKind::Result).expect("y");
    let carries = outputs.iter().filter(|o| matches!(o.kind, OutputKind::Carry(_))).count();
    (found[y].to_f64s(), carries, imported.warnings.len())
}

#[test]
fn as_exported_keeps_running_statistics_with_a_warning() {
    let (y, carries, warnings) = values(&normalized(&[]), &ImportOptions::default());
    assert_eq!(y, [2.5, 6.5]);
    assert_eq!((carries, warnings), (0, 1));
}

#[test]
fn training_uses_the_batch_and_renews_the_running_statistics() {
    for (model, options) in [
        (normalized(&[int("training_mode", 1)]), ImportOptions::default()),
        (normalized(&[]), train()),
    ] {
        let imported = import(&model, &options).unwrap_or_else(|e| panic!("{e}"));
        let trains = imported.graph.nodes().any(|(_, n)| matches!(n.op, Op::BatchNorm(_)));
        assert!(trains);
        let carried = imported.graph.outputs.iter().filter_map(|o| match o.kind {
            OutputKind::Carry(leaf) => Some((o.name.as_str(), leaf)),
            _ => None,
        });
        let names: Vec<&str> = carried.map(|(name, _)| name).collect();
        assert_eq!(names, ["m", "v"]);
        assert!(imported.warnings.is_empty());
    }
}

#[test]
fn there_must_be_something_to_train() {
    let relu = model(vec![input("x", 1, &X)], vec![], vec![node("Relu", &["x"], &["y"])], &["y"]);
    let message = refused(&relu, &train());
    assert!(message.contains("no BatchNormalization"), "{message}");
}

#[test]
fn running_variances_of_pytorchs_models_are_unbiased() {
    for (producer, expected) in [("", 4.0 * 0.9 + 4.0 * 0.1), ("pytorch", 4.0 * 0.9 + 8.0 * 0.1)] {
        let mut model = normalized(&[int("training_mode", 1), float("momentum", 0.9)]);
        model.producer_name = producer.into();
        let imported = import(&model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        let x = Tensor::floats(DType::F32, [2, 1], vec![3.0, 7.0]);
        let found = run(&imported, &[("x", x)]);
        let at = imported.graph.outputs.iter().position(|o| o.name == "v").expect("the variance");
        let found = found[at].to_f64s()[0];
        assert!((found - expected).abs() < 1e-6, "{producer}: {found} is not {expected}");
    }
}
