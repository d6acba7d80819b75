//! The norm of nothing: its gradient is 0, as PyTorch defines it, not the infinite one of a square root.

use crate::support::{plan_at, train_on, write_f32};
use frit::import::onnx::messages::{
    DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
    TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};
use prost::Message;
use tempfile::TempDir;

/// `y = x · w + ‖x · w‖` for the parameter `w` of zeros.
fn model() -> ModelProto {
    let info = |name: &str| {
        let batch = DimensionProto { dim_param: Some("batch".into()), ..Default::default() };
        let width = DimensionProto { dim_value: Some(3), ..Default::default() };
        let shape = Some(TensorShapeProto { dim: vec![batch, width] });
        let ty = TypeProto { tensor_type: Some(TensorTypeProto { elem_type: 1, shape }) };
        ValueInfoProto { name: name.into(), r#type: Some(ty) }
    };
    let node = |op: &str, inputs: &[&str], output: &str| NodeProto {
        op_type: op.into(),
        name: output.into(),
        input: inputs.iter().map(|i| i.to_string()).collect(),
        output: vec![output.into()],
        ..Default::default()
    };
    let w = TensorProto {
        name: "w".into(),
        dims: vec![3],
        data_type: 1,
        float_data: vec![0.0; 3],
        ..Default::default()
    };
    let axis = TensorProto {
        name: "axis".into(),
        dims: vec![1],
        data_type: 7,
        int64_data: vec![1],
        ..Default::default()
    };
    let graph = GraphProto {
        name: "norm".into(),
        node: vec![
            node("Mul", &["x", "w"], "z"),
            node("ReduceL2", &["z", "axis"], "n"),
            node("Add", &["z", "n"], "y"),
        ],
        initializer: vec![w, axis],
        input: vec![info("x")],
        output: vec![info("y")],
        ..Default::default()
    };
    let opset = OperatorSetIdProto { domain: String::new(), version: 18 };
    ModelProto {
        ir_version: 8,
        graph: Some(graph),
        opset_import: vec![opset],
        ..Default::default()
    }
}

#[test]
fn training_leaves_a_norm_of_zero() {
    let dir = TempDir::new().expect("a directory");
    let file = dir.path().join("model.onnx");
    std::fs::write(&file, model().encode_to_vec()).expect("written");
    let data = dir.path().join("data.safetensors");
    let numbers = |n: usize, by: f32| (0..n).map(|i| (i as f32 * by).sin() + 0.2).collect();
    write_f32(
        &data,
        &[("x", vec![8, 3], numbers(24, 0.7)), ("labels", vec![8, 3], numbers(24, 0.7))],
    );
    for precision in ["fp32", "bf16"] {
        let precision = format!("precision.compute={precision}");
        let settings = [
            "loss.kind=mse",
            "loss.logits=y",
            "optimizer.kind=sgd",
            "optimizer.lr=0.1",
            &precision,
        ];
        let report = train_on(&plan_at(&file, 2, &settings), &data, 4, None);
        assert!(report.losses.iter().all(|l| l.is_finite()), "{:?}", report.losses);
        // Gradients that are no numbers would have been skipped, and the loss the same.
        assert!(report.losses[3] < 0.9 * report.losses[0], "{:?}", report.losses);
    }
}
