//! Trained weights are exported under the model's own names, and as an ONNX model.

use crate::parity;
use crate::support::{Planned, file, plan, plan_at};
use frit::bench::Bench;
use frit::diagnostics::Report;
use frit::export::{self, Options, Trained};
use frit::import::onnx::messages::*;
use frit::plan_dir::{Stored, write};
use frit_runtime::run::{RunOptions, run};
use prost::Message;
use safetensors::{Dtype, tensor::TensorView};
use std::path::{Path, PathBuf};

/// The model of a plan with these weights, as it trains.
fn onnx(plan: &Path, weights: &Path) -> Result<Vec<u8>, Report> {
    let options = Options { training: true, ..Options::default() };
    exported(plan, weights, &options)
}

fn exported(plan: &Path, weights: &Path, options: &Options) -> Result<Vec<u8>, Report> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("exported.onnx");
    export::onnx(&Trained::of_plan(plan, weights)?, options, &path)?;
    Ok(std::fs::read(path).expect("the model"))
}

fn train(plan: &Path, data: &Path, steps: usize, save: Option<PathBuf>) -> Vec<f64> {
    let options =
        RunOptions { steps, data: data.into(), save, threads: Some(1), ..RunOptions::default() };
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

/// Two batches of eight numbers with labels, in a file of this folder.
fn numbers(folder: &Path) -> PathBuf {
    let data = folder.join("data.safetensors");
    let x: Vec<u8> =
        (0..64).flat_map(|i| ((i * 37 % 64) as f32 / 32.0 - 1.0).to_le_bytes()).collect();
    let labels: Vec<u8> = (0..8_i64).flat_map(|i| (i % 5).to_le_bytes()).collect();
    let views = [
        ("x", TensorView::new(Dtype::F32, vec![8, 8], &x).expect("a tensor")),
        ("labels", TensorView::new(Dtype::I64, vec![8], &labels).expect("a tensor")),
    ];
    safetensors::serialize_to_file(views, None, &data).expect("written");
    data
}

#[test]
fn buffers_that_an_exporter_merged_with_parameters_stay_what_they_are() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = numbers(dir.path());
    let settings = ["precision.compute=fp32", "optimizer.lr=0.05", "sharding.ranks=2"];
    let planned = plan_at(&file("tests/models/lost/alike.onnx"), 2, &settings);
    let weights = dir.path().join("trained.safetensors");
    let losses = train(&planned.path(), &data, 3, None);
    train(&planned.path(), &data, 2, Some(weights.clone()));
    for training in [true, false] {
        let options = Options { training, ..Options::default() };
        let bytes = exported(&planned.path(), &weights, &options).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(initializer(&bytes, "std"), [1.0; 8]);
        assert_eq!(initializer(&bytes, "mean"), [0.0; 8]);
        let alike = ["norm.weight", "low", "high", "scale", "std"];
        let values = alike.map(|name| initializer(&bytes, name));
        for (k, value) in values.iter().enumerate() {
            assert!(!values[..k].contains(value), "{} is another", alike[k]);
        }
        assert_ne!(initializer(&bytes, "gain"), initializer(&bytes, "gate"));
        let trained = dir.path().join("trained.onnx");
        std::fs::write(&trained, bytes).expect("written");
        let again = plan_at(&trained, 2, &settings);
        let first = train(&again.path(), &data, 1, None)[0];
        assert!((first - losses[2]).abs() < 1e-6, "{first} for {}", losses[2]);
    }
}

#[test]
fn parameters_that_an_exporter_merged_are_exported_apart() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = numbers(dir.path());
    let settings = ["precision.compute=fp32", "optimizer.lr=0.05", "sharding.ranks=2"];
    let planned = plan_at(&file("tests/models/lost/optimized.onnx"), 2, &settings);
    let weights = dir.path().join("trained.safetensors");
    // The data has two batches: step 2 reads the first again.
    let losses = train(&planned.path(), &data, 3, None);
    train(&planned.path(), &data, 2, Some(weights.clone()));
    for training in [true, false] {
        let options = Options { training, ..Options::default() };
        let bytes = exported(&planned.path(), &weights, &options).unwrap_or_else(|e| panic!("{e}"));
        // Two norms that began alike, biases that were dropped, and a matrix that was transposed.
        assert_ne!(initializer(&bytes, "a.weight"), initializer(&bytes, "b.weight"));
        for bias in ["up.bias", "down.bias", "conv.bias"] {
            assert!(initializer(&bytes, bias).iter().any(|x| *x != 0.0), "{bias}");
        }
        assert_eq!(initializer(&bytes, "mix.weight.transposed").len(), 16);
        let model = ModelProto::decode(&bytes[..]).expect("a model");
        let graph = model.graph.expect("a graph");
        assert!(!graph.initializer.iter().any(|t| t.name == "val_22"));
        let trained = dir.path().join("trained.onnx");
        std::fs::write(&trained, bytes).expect("written");
        let again = plan_at(&trained, 2, &settings);
        let first = train(&again.path(), &data, 1, None)[0];
        assert!((first - losses[2]).abs() < 1e-6, "{first} for {}", losses[2]);
    }
}

#[test]
fn nodes_that_an_exporter_merged_are_exported_apart() {
    let settings = ["precision.compute=fp32", "sharding.ranks=2"];
    let (planned, losses) = parity::run("decoder", "model.onnx", 4, 2, &settings[..1]);
    let deviation = parity::largest(&losses, &parity::reference("decoder", "fp64"));
    assert!(deviation < 1e-5, "losses deviate by {deviation}");
    // One Split serves the biases of both layers, which all begin as zeros.
    let biases = ["self_attn", "multihead_attn"]
        .iter()
        .flat_map(|of| [0, 1].map(|layer| format!("layers.{layer}.{of}.in_proj_bias")));
    let weights = planned.dir.path().join("trained.safetensors");
    let data = file("tests/models/decoder/data.safetensors");
    train(&planned.path(), &data, 20, Some(weights.clone()));
    let next = train(&planned.path(), &data, 21, None)[20];
    for training in [true, false] {
        let options = Options { training, ..Options::default() };
        let bytes = exported(&planned.path(), &weights, &options).unwrap_or_else(|e| panic!("{e}"));
        let trained: Vec<Vec<f32>> =
            biases.clone().map(|name| initializer(&bytes, &name)).collect();
        for (k, bias) in trained.iter().enumerate() {
            assert!(!trained[..k].contains(bias), "bias {k} is that of another attention");
        }
        let trained = planned.dir.path().join("trained.onnx");
        std::fs::write(&trained, bytes).expect("written");
        let again = plan_at(&trained, 2, &settings);
        let first = train(&again.path(), &data, 1, None)[0];
        assert!((first - next).abs() < 1e-6, "{first} for {next}");
    }
}

#[test]
fn weights_of_recurrent_layers_that_an_exporter_packed_train_apart() {
    let settings = ["precision.compute=fp32"];
    // The biases of the LSTM are zero, those of both directions and of input and hidden state.
    let (planned, losses) = parity::run("recurrent", "model.onnx", 4, 1, &settings);
    let deviation = parity::largest(&losses, &parity::reference("recurrent", "fp64"));
    assert!(deviation < 1e-5, "losses deviate by {deviation}");
    let weights = planned.dir.path().join("trained.safetensors");
    let data = file("tests/models/recurrent/data.safetensors");
    train(&planned.path(), &data, 20, Some(weights.clone()));
    let saved = std::fs::read(&weights).expect("the weights");
    let saved = safetensors::SafeTensors::deserialize(&saved).expect("weights");
    let mut names = saved.names();
    names.sort_unstable();
    let of_both = ["bias_hh", "bias_ih", "weight_hh", "weight_ih"]
        .iter()
        .flat_map(|of| ["", "_reverse"].map(|direction| format!("both.{of}_l0{direction}")));
    let of_deep = ["weight_hh", "weight_ih"]
        .iter()
        .flat_map(|of| [0, 1].map(|layer| format!("deep.{of}_l{layer}")));
    let others = ["head.bias", "head.weight", "table.weight"].map(str::to_string);
    let expected: Vec<String> = of_both.chain(of_deep).chain(others).collect();
    assert_eq!(names, expected);
    let next = train(&planned.path(), &data, 21, None)[20];
    for training in [true, false] {
        let options = Options { training, ..Options::default() };
        let bytes = exported(&planned.path(), &weights, &options).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(initializer(&bytes, "both.bias_ih_l0.packed").len(), 2 * 32);
        let trained = planned.dir.path().join("trained.onnx");
        std::fs::write(&trained, bytes).expect("written");
        let again = plan_at(&trained, 4, &settings);
        let first = train(&again.path(), &data, 1, None)[0];
        assert!((first - next).abs() < 1e-6, "{first} for {next}");
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
    assert!(refused(&weights, &planned.path()).contains("holds no parameter of the plan"));
    let json = plan("examples/digits_mlp/model.json", 4, &["loss.labels=labels"]);
    let weights = json.path().join("weights.safetensors");
    assert!(refused(&weights, &json.path()).contains("JSON model"));
    let bytes = std::fs::read(gpt2.path().join("weights.safetensors")).expect("weights");
    let torn = dir.path().join("torn.safetensors");
    std::fs::write(&torn, &bytes[..bytes.len() - 4]).expect("written");
    assert!(refused(&torn, &gpt2.path()).contains("torn.safetensors"));
}

/// The plan of a model with a table of `side` by `side` integers, beside or in the model.
fn with_table(dir: &Path, side: usize, external: bool) -> Planned {
    let folder = dir.join("compiled");
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join("model.onnx");
    let bytes: Vec<u8> = (0..side * side).flat_map(|i| (i as i64).to_le_bytes()).collect();
    let mut model = merged();
    let graph = model.graph.as_mut().expect("a graph");
    let mut table = TensorProto {
        name: "table".into(),
        dims: vec![side as i64; 2],
        data_type: 7,
        ..TensorProto::default()
    };
    if external {
        std::fs::write(folder.join("beside.bin"), &bytes).expect("written");
        let entry = StringStringEntryProto { key: "location".into(), value: "beside.bin".into() };
        (table.external_data, table.data_location) = (vec![entry], 1);
    } else {
        table.raw_data = Some(bytes.into());
    }
    graph.initializer.push(table);
    let node = |op: &str, inputs: &[&str], output: &str| NodeProto {
        op_type: op.into(),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    };
    let to_float =
        AttributeProto { name: "to".into(), i: 1, r#type: 2, ..AttributeProto::default() };
    graph.node.last_mut().expect("a node").output = vec!["sum".into()];
    graph.node.extend([
        NodeProto { attribute: vec![to_float], ..node("Cast", &["table"], "floats") },
        node("ReduceMean", &["floats"], "mean"),
        node("Floor", &["mean"], "floor"),
        node("Mul", &["sum", "floor"], "logits"),
    ]);
    std::fs::write(&path, model.encode_to_vec()).expect("written");
    plan_at(&path, 4, &["precision.compute=bf16", "loss.kind=mse"])
}

#[test]
fn a_plan_is_exported_wherever_its_model_is_now() {
    for (side, external, needed) in
        [(8, false, false), (8, true, false), (600, false, true), (600, true, true)]
    {
        let dir = tempfile::tempdir().expect("a directory");
        let planned = with_table(dir.path(), side, external);
        let plan = dir.path().join("moved");
        std::fs::rename(planned.path(), &plan).expect("moved");
        let weights = plan.join("weights.safetensors");
        let there = exported(&plan, &weights, &Options::default());
        let there = there.unwrap_or_else(|e| panic!("{e}"));
        let (compiled, renamed) = (dir.path().join("compiled"), dir.path().join("renamed"));
        std::fs::rename(&compiled, &renamed).expect("moved");
        let gone = exported(&plan, &weights, &Options::default());
        let what = format!("{side} {external}");
        match (needed, gone) {
            (false, Ok(bytes)) => assert_eq!(bytes, there, "{what}"),
            (true, Err(e)) => {
                let text = format!("{e} {:?}", e.diagnostics[0].notes);
                assert!(text.contains("--model") && text.contains("`table`"), "{text}");
            }
            (_, other) => panic!("{what}: {:?}", other.map(|b| b.len())),
        }
        let mut given = Options { model: Some(renamed.join("model.onnx")), ..Options::default() };
        let found = exported(&plan, &weights, &given).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(initializer(&found, "table"), initializer(&there, "table"), "{what}");
        let bench = |model: Option<&Path>| Bench::run(&plan, model, None, 1, Some(1), false);
        if !needed {
            bench(None).unwrap_or_else(|e| panic!("{e}"));
        }
        bench(given.model.as_deref()).unwrap_or_else(|e| panic!("{e}"));
        if external && needed {
            let beside = renamed.join("beside.bin");
            let mut bytes = std::fs::read(&beside).expect("the table");
            bytes[0] ^= 1;
            std::fs::write(beside, bytes).expect("written");
            let error = exported(&plan, &weights, &given).expect_err("changed").to_string();
            assert!(error.contains("`table` were changed"), "{error}");
        }
        given.model = Some(file("tests/models/mlp/model.onnx"));
        let error = exported(&plan, &weights, &given).expect_err("another").to_string();
        assert!(error.contains("is not the model"), "{error}");
    }
}

#[test]
fn large_weights_are_beside_the_model() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = plan("tests/models/mlp/model.onnx", 4, &["precision.compute=fp32"]);
    let weights = planned.path().join("weights.safetensors");
    let trained = Trained::of_plan(&planned.path(), &weights).unwrap_or_else(|e| panic!("{e}"));
    let inside = exported(&planned.path(), &weights, &Options::default());
    let inside = inside.unwrap_or_else(|e| panic!("{e}"));
    let asked = Options { external_data: true, ..Options::default() };
    // As if a message could hold no more than this.
    let forced = Options { largest: inside.len() as u64 - 1, ..Options::default() };
    for options in [&asked, &forced] {
        let path = dir.path().join("apart.onnx");
        let written = export::onnx(&trained, options, &path).unwrap_or_else(|e| panic!("{e}"));
        let data = dir.path().join("apart.onnx.data");
        assert_eq!(written.files, [data.clone(), path.clone()]);
        let small = std::fs::metadata(&path).expect("the model").len();
        assert!(small < inside.len() as u64, "{small} bytes");
        let again = plan_at(&path, 4, &["precision.compute=fp32"]);
        let values = |plan: &Planned| std::fs::read(plan.path().join("weights.safetensors"));
        assert_eq!(values(&again).expect("weights"), values(&planned).expect("weights"));
        let left: Vec<_> = std::fs::read_dir(dir.path()).expect("a folder").collect();
        assert_eq!(left.len(), 2, "{left:?}");
        std::fs::remove_file(data).expect("removed");
        std::fs::remove_file(path).expect("removed");
    }
    let impossible = Options { largest: 100, ..Options::default() };
    let path = dir.path().join("none.onnx");
    let error = export::onnx(&trained, &impossible, &path).expect_err("too large").to_string();
    assert!(error.contains("2 GiB"), "{error}");
    let nowhere = dir.path().join("missing/none.onnx");
    assert!(export::onnx(&trained, &asked, &nowhere).is_err());
    assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 0);
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
    let changed = text.replacen("\"bytes\": ", "\"bytes\": 1", 1);
    assert_ne!(changed, text);
    std::fs::write(path.join("weights.json"), changed).expect("written");
    let options = RunOptions { steps: 1, data: data.clone().into(), ..RunOptions::default() };
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
