//! Trained weights leave under the model's own names, and as the model itself.

use crate::parity;
use crate::support::{file, plan, plan_at};
use frit::diagnostics::Report;
use frit::export::{self, Trained};
use frit::import::onnx::messages::*;
use frit::plan_dir::{Stored, write};
use frit_runtime::run::{RunOptions, run};
use prost::Message;
use safetensors::{Dtype, tensor::TensorView};
use std::path::{Path, PathBuf};

fn onnx(plan: &Path, weights: &Path) -> Result<Vec<u8>, Report> {
    export::onnx(&Trained::of_plan(plan, weights)?)
}

fn train(plan: &Path, data: &Path, steps: usize, save: Option<PathBuf>) -> Vec<f64> {
    let data = data.into();
    let options = RunOptions { steps, data, save, threads: Some(1), ..RunOptions::default() };
    run(plan, &options).unwrap_or_else(|e| panic!("{e}")).losses
}

#[test]
fn an_exported_model_goes_on_where_training_ended() {
    let dir = tempfile::tempdir().expect("a directory");
    for (model, batch, ranks) in [("mlp", 4, 4), ("gpt2", 4, 2), ("bert", 8, 1)] {
        let settings = [format!("sharding.ranks={ranks}"), "precision.compute=fp32".into()];
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let planned = plan(&format!("tests/models/{model}/model.onnx"), batch, &settings);
        let data = file(&format!("tests/models/{model}/data.safetensors"));
        let weights = dir.path().join("trained.safetensors");
        // The data has 20 batches: step 20 reads the first again.
        let losses = train(&planned.path(), &data, 21, None);
        train(&planned.path(), &data, 20, Some(weights.clone()));
        let trained = dir.path().join(format!("{model}.onnx"));
        let bytes = onnx(&planned.path(), &weights).unwrap_or_else(|e| panic!("{e}"));
        std::fs::write(&trained, bytes).expect("written");
        let again = plan_at(&trained, batch, &settings);
        let first = train(&again.path(), &data, 1, None)[0];
        assert_eq!(first.to_bits(), losses[20].to_bits(), "{model}");
    }
}

/// The elements of an initializer of an ONNX file, by name.
fn initializer(bytes: &[u8], name: &str) -> Vec<f32> {
    let model = ModelProto::decode(bytes).expect("a model");
    let graph = model.graph.expect("a graph");
    let tensor = graph.initializer.iter().find(|t| t.name == name).expect("the initializer");
    let raw = tensor.raw_data.as_ref().expect("raw data");
    raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn a_tied_table_trains_as_one_parameter_and_is_written_twice() {
    let tie = ["precision.compute=fp32", "model.tie_weights=true", "sharding.ranks=2"];
    let (planned, losses) = parity::run("tied", "model.onnx", 4, 2, &tie);
    let deviation = parity::largest(&losses, &parity::reference("tied", "fp64"));
    assert!(deviation < 1e-5, "losses deviate by {deviation}");
    let (_, apart) = parity::run("tied", "model.onnx", 4, 2, &tie[..1]);
    assert!(parity::largest(&losses, &apart) > 1e-4, "two parameters train otherwise");
    let weights = planned.dir.path().join("trained.safetensors");
    let data = file("tests/models/tied/data.safetensors");
    train(&planned.path(), &data, 3, Some(weights.clone()));
    let trained = onnx(&planned.path(), &weights).unwrap_or_else(|e| panic!("{e}"));
    let table = initializer(&trained, "table.weight");
    let copy = initializer(&trained, "onnx::MatMul_13");
    let before = std::fs::read(file("tests/models/tied/model.onnx")).expect("the model");
    assert_ne!(table, initializer(&before, "table.weight"));
    let (rows, width) = (29, 8);
    for at in 0..table.len() {
        assert_eq!(copy[at % width * rows + at / width], table[at]);
    }
}

/// A model of the TorchScript exporter with two layers, whose biases and a buffer begin alike and are stored once.
fn merged() -> ModelProto {
    let stored = |name: &str, dims: &[i64], values: &[f32]| TensorProto {
        name: name.into(),
        dims: dims.into(),
        data_type: 1,
        raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into()),
        ..TensorProto::default()
    };
    let node = |op: &str, inputs: &[&str], output: &str| NodeProto {
        op_type: op.into(),
        name: format!("/{output}/{op}"),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    };
    let dims = [
        DimensionProto { dim_value: None, dim_param: Some("batch".into()) },
        DimensionProto { dim_value: Some(3), dim_param: None },
    ];
    let shape = Some(TensorShapeProto { dim: dims.into() });
    let tensor_type = Some(TensorTypeProto { elem_type: 1, shape });
    let value = |name: &str| ValueInfoProto {
        name: name.into(),
        r#type: Some(TypeProto { tensor_type: tensor_type.clone() }),
    };
    let weight = [0.5, -0.25, 0.125, 1.0, 0.75, -0.5, 0.25, 0.5, -1.0];
    let graph = GraphProto {
        input: vec![value("x")],
        output: vec![value("logits")],
        initializer: vec![
            stored("a.weight", &[3, 3], &weight),
            stored("b.weight", &[3, 3], &weight.map(|w| -w)),
            stored("a.bias", &[3], &[0.0; 3]),
        ],
        node: vec![
            node("Identity", &["a.bias"], "b.bias"),
            node("Identity", &["a.bias"], "running_mean"),
            node("MatMul", &["x", "a.weight"], "p"),
            node("Add", &["p", "a.bias"], "q"),
            node("Sub", &["q", "running_mean"], "r"),
            node("Tanh", &["r"], "s"),
            node("MatMul", &["s", "b.weight"], "t"),
            node("Add", &["t", "b.bias"], "logits"),
        ],
        ..GraphProto::default()
    };
    ModelProto {
        ir_version: 8,
        producer_name: "pytorch".into(),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
        graph: Some(graph),
        ..ModelProto::default()
    }
}

#[test]
fn parameters_that_were_stored_once_are_written_apart() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("model.onnx");
    std::fs::write(&path, merged().encode_to_vec()).expect("written");
    let values: Vec<f32> = (0..12).map(|i| (i * 7 % 12) as f32 / 6.0 - 1.0).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = |shape| TensorView::new(Dtype::F32, shape, &bytes).expect("a tensor");
    let (x, labels) = (view(vec![4, 3]), view(vec![4, 3]));
    let data = dir.path().join("data.safetensors");
    safetensors::serialize_to_file([("x", x), ("labels", labels)], None, &data).expect("written");
    let settings = ["precision.compute=fp32", "loss.kind=mse"];
    let planned = plan_at(&path, 4, &settings);
    let weights = dir.path().join("trained.safetensors");
    let losses = train(&planned.path(), &data, 6, None);
    train(&planned.path(), &data, 5, Some(weights.clone()));
    let trained = onnx(&planned.path(), &weights).unwrap_or_else(|e| panic!("{e}"));
    let [a, b] = ["a.bias", "b.bias"].map(|name| initializer(&trained, name));
    assert!(a != b && a != [0.0; 3] && b != [0.0; 3], "{a:?} {b:?}");
    assert_eq!(initializer(&trained, "running_mean"), [0.0; 3]);
    std::fs::write(&path, trained).expect("written");
    let again = train(&plan_at(&path, 4, &settings).path(), &data, 1, None);
    assert_ne!(losses[0], losses[5]);
    // The moments of the optimizer begin anew, the loss of the first step does not know them.
    assert_eq!(again[0].to_bits(), losses[5].to_bits());
}

#[test]
fn running_statistics_are_saved_too() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = plan("tests/models/resnet/model.onnx", 8, &["precision.compute=fp32"]);
    let data = file("tests/models/resnet/data.safetensors");
    let mean = |steps: usize| -> Vec<u8> {
        let path = dir.path().join("trained.safetensors");
        train(&planned.path(), &data, steps, Some(path.clone()));
        let bytes = std::fs::read(path).expect("the weights");
        let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
        tensors.tensor("stem.1.running_mean").expect("a statistic").data().to_vec()
    };
    let (none, one, two) = (mean(0), mean(1), mean(2));
    assert!(one != none && two != one);
}

#[test]
fn what_cannot_be_exported_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = plan("tests/models/mlp/model.onnx", 4, &["precision.compute=fp32"]);
    let refused =
        |weights: &Path, plan: &Path| onnx(plan, weights).expect_err("refused").to_string();
    let missing = dir.path().join("none.safetensors");
    assert!(refused(&missing, &planned.path()).contains("none.safetensors"));
    let gpt2 = plan("tests/models/gpt2/model.onnx", 4, &["precision.compute=fp32"]);
    let weights = gpt2.path().join("weights.safetensors");
    assert!(refused(&weights, &planned.path()).contains("holds no `fc1."));
    let weights = planned.path().join("weights.safetensors");
    let origin = planned.path().join("source/origin.json");
    let text = std::fs::read_to_string(&origin).expect("the origin");
    let changed = text.replacen("\"sha256\": \"", "\"sha256\": \"0", 1);
    assert_ne!(changed, text);
    std::fs::write(&origin, changed).expect("written");
    assert!(refused(&weights, &planned.path()).contains("was changed"));
}

#[test]
fn weights_are_copied_referenced_or_left_out() {
    let planned = plan("tests/models/gpt2/model.onnx", 4, &["precision.compute=fp32"]);
    let data = file("tests/models/gpt2/data.safetensors");
    let losses = train(&planned.path(), &data, 2, None);
    let path = planned.dir.path().join("other");
    write(&path, &planned.compiled, Stored::Reference).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(train(&path, &data, 2, None), losses);
    let size = |path: &Path| path.join("weights.safetensors").metadata().expect("weights").len();
    assert!(size(&path) < size(&planned.path()) / 10);
    let text = std::fs::read_to_string(path.join("weights.json")).expect("references");
    let changed = text.replacen("\"sha256\": \"", "\"sha256\": \"0", 1);
    assert_ne!(changed, text);
    std::fs::write(path.join("weights.json"), changed).expect("written");
    let options = RunOptions { steps: 1, data: data.clone(), ..RunOptions::default() };
    let error = run(&path, &options).expect_err("refused").to_string();
    assert!(error.contains("was changed"), "{error}");
    write(&path, &planned.compiled, Stored::None).unwrap_or_else(|e| panic!("{e}"));
    let error = run(&path, &options).expect_err("refused").to_string();
    assert!(error.contains("weights.safetensors") && error.contains("no value"), "{error}");
}

#[test]
fn weights_that_are_made_from_the_seed_need_not_be_stored() {
    let model = "examples/digits_mlp/model.json";
    let planned = plan(model, 4, &["loss.labels=labels"]);
    let data = file("examples/digits_mlp/data.safetensors");
    let losses = train(&planned.path(), &data, 3, None);
    let path = planned.dir.path().join("other");
    write(&path, &planned.compiled, Stored::None).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(train(&path, &data, 3, None), losses);
}
