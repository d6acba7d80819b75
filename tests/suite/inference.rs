//! Exported models compute in inference mode: their outputs for an example equal those of `frit eval`, alone and in any
//! batch, in Frit and in onnxruntime.

use crate::support::{Planned, file, plan_at, plan_to_evaluate};
use frit::export::{self, Options, Trained};
use frit::import::onnx::messages::*;
use frit_runtime::eval::{Options as Evaluation, evaluate};
use frit_runtime::run::{RunOptions, run};
use frit_tests::requirements::Requirement;
use prost::Message;
use safetensors::SafeTensors;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Trained models: folder, file, micro-batch, settings.
const MODELS: &[(&str, &str, usize, &[&str])] = &[
    ("inference", "model.onnx", 8, &[]),
    ("inference", "model_dynamo.onnx", 8, &["model.batch_norm=train"]),
    ("resnet", "model.onnx", 8, &[]),
    ("dropout", "model.onnx", 8, &[]),
    ("dropout", "model_dynamo.onnx", 8, &[]),
    ("gpt2", "model.onnx", 4, &[]),
    (
        "gpt2",
        "model.onnx",
        4,
        &["adapter.kind=lora", "adapter.targets=[\"**.c_attn\", \"**.c_proj\"]"],
    ),
    (
        "llama",
        "model.onnx",
        4,
        &["adapter.kind=lora", "adapter.targets=[\"**.q_proj\", \"**.mlp.*\"]"],
    ),
];

struct Exported {
    planned: Planned,
    model: PathBuf,
    weights: PathBuf,
    data: PathBuf,
    batch: usize,
}

/// Trains a model for two steps and exports it.
fn exported(folder: &str, model: &str, batch: usize, settings: &[&str]) -> Exported {
    let settings = [&["precision.compute=fp32"], settings].concat();
    let planned = plan_to_evaluate(&format!("tests/models/{folder}/{model}"), batch, &settings);
    let data = file(&format!("tests/models/{folder}/data.safetensors"));
    let weights = planned.dir.path().join("trained.safetensors");
    let options = RunOptions {
        steps: 2,
        data: data.clone().into(),
        save: Some(weights.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    let path = planned.dir.path().join("exported.onnx");
    export(&planned, &weights, &Options::default(), &path);
    Exported { planned, model: path, weights, data, batch }
}

/// Exports the weights of a plan; the warnings' codes.
fn export(planned: &Planned, weights: &Path, options: &Options, to: &Path) -> Vec<String> {
    let trained = Trained::of_plan(&planned.path(), weights).unwrap_or_else(|e| panic!("{e}"));
    let written = export::onnx(&trained, options, to).unwrap_or_else(|e| panic!("{e}"));
    written.warnings.into_iter().map(|w| w.code).collect()
}

fn decoded(path: &Path) -> ModelProto {
    ModelProto::decode(&std::fs::read(path).expect("the model")[..]).expect("an ONNX model")
}

/// Checks that every operand is defined before it is read, that no value is defined twice, and that nothing trains; returns
/// how many nodes there are.
fn structure(model: &ModelProto) -> usize {
    let graph = model.graph.as_ref().expect("a graph");
    let opset = model.opset_import.iter().find(|o| o.domain.is_empty()).expect("an opset");
    let mut nodes = of_graph(graph, &HashSet::new(), opset.version);
    for function in &model.functions {
        let own = function.opset_import.iter().find(|o| o.domain.is_empty());
        let known = function.input.iter().cloned().collect();
        let version = own.map_or(opset.version, |o| o.version);
        nodes += of_nodes(&function.node, known, &function.output, version);
    }
    nodes
}

fn of_graph(graph: &GraphProto, around: &HashSet<String>, opset: i64) -> usize {
    let mut known = around.clone();
    known.extend(graph.input.iter().map(|i| i.name.clone()));
    known.extend(graph.initializer.iter().map(|t| t.name.clone()));
    let outputs: Vec<String> = graph.output.iter().map(|o| o.name.clone()).collect();
    of_nodes(&graph.node, known, &outputs, opset)
}

fn of_nodes(
    nodes: &[NodeProto],
    mut known: HashSet<String>,
    outputs: &[String],
    opset: i64,
) -> usize {
    let mut count = nodes.len();
    for node in nodes {
        for input in node.input.iter().filter(|i| !i.is_empty()) {
            assert!(known.contains(input), "{} reads {input}", node.op_type);
        }
        let set = |name: &str| node.attribute.iter().any(|a| a.name == name && a.i != 0);
        match (node.op_type.as_str(), opset) {
            ("BatchNormalization", ..7) | ("Dropout", ..7) => assert!(set("is_test")),
            ("BatchNormalization", _) => {
                assert_eq!((node.output.len(), set("training_mode")), (1, false));
                let refers = |a: &AttributeProto| !a.ref_attr_name.is_empty();
                assert!(!node.attribute.iter().any(|a| a.name == "training_mode" && refers(a)));
            }
            ("Dropout", 12..) => assert!(node.input.len() <= 2),
            (op, _) => assert!(!op.starts_with("Random"), "{op} is left"),
        }
        for graph in node.attribute.iter().filter_map(|a| a.g.as_deref()) {
            count += of_graph(graph, &known, opset);
        }
        for output in node.output.iter().filter(|o| !o.is_empty()) {
            assert!(known.insert(output.clone()), "{output} is defined twice");
        }
    }
    for output in outputs {
        assert!(known.contains(output), "{output} is never made");
    }
    count
}

/// The outputs of the first examples of the data, by a plan and weights.
fn outputs(planned: &Planned, data: &Path, weights: Option<&Path>) -> Vec<f32> {
    let path = planned.dir.path().join("outputs.safetensors");
    let options = Evaluation {
        plan: planned.path(),
        data: vec![data.into()],
        weights: weights.map(Path::to_path_buf).into_iter().collect(),
        dump_outputs: Some(path.clone()),
        threads: Some(1),
        ..Evaluation::default()
    };
    evaluate(&options).unwrap_or_else(|e| panic!("{e}"));
    floats(&path, "logits")
}

fn floats(path: &Path, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(path).expect("a file");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let view = tensors.tensor(name).expect("the tensor");
    view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// The largest difference, relative to the largest element.
fn deviation(found: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(1.0_f32, |m, x| m.max(x.abs()));
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f32::max) / largest
}

#[test]
fn exported_models_agree_with_the_evaluation_alone_and_in_a_batch() {
    for &(folder, model, batch, settings) in MODELS {
        let what = format!("{folder}/{model}");
        let e = exported(folder, model, batch, settings);
        structure(&decoded(&e.model));
        let expected = outputs(&e.planned, &e.data, Some(&e.weights));
        let forward = ["precision.compute=fp32", "loss.kind=none"];
        for size in [1, batch] {
            let again = plan_at(&e.model, size, &forward);
            let found = outputs(&again, &e.data, None);
            assert_eq!(found.len(), expected.len(), "{what}");
            let deviation = deviation(&found, &expected);
            assert!(deviation < 1e-5, "{what}: {deviation} in a batch of {size}");
        }
        // What is exported in training mode is what was compiled.
        let training = Options { training: true, ..Options::default() };
        let path = e.planned.dir.path().join("training.onnx");
        export(&e.planned, &e.planned.path().join("weights.safetensors"), &training, &path);
        let original = file(&format!("tests/models/{folder}/{model}"));
        assert_eq!(decoded(&path), decoded(&original), "{what}");
    }
}

#[test]
fn exported_models_agree_with_pytorch_in_evaluation_mode() {
    let data = file("tests/models/inference/data.safetensors");
    for model in ["model", "model_dynamo"] {
        let settings = ["precision.compute=fp32", "model.batch_norm=train"];
        let planned =
            plan_to_evaluate(&format!("tests/models/inference/{model}.onnx"), 16, &settings);
        let path = planned.dir.path().join("exported.onnx");
        let weights = planned.path().join("weights.safetensors");
        export(&planned, &weights, &Options::default(), &path);
        let again = plan_at(&path, 16, &["precision.compute=fp32", "loss.kind=none"]);
        let deviation = deviation(&outputs(&again, &data, None), &floats(&data, model));
        assert!(deviation < 1e-5, "{model}: {deviation}");
    }
}

fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        op_type: op.into(),
        name: format!("/{}", outputs.join("/")),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: outputs.iter().map(|s| s.to_string()).collect(),
        ..NodeProto::default()
    }
}

fn with(mut node: NodeProto, attributes: &[AttributeProto]) -> NodeProto {
    node.attribute.extend_from_slice(attributes);
    node
}

fn int(name: &str, i: i64) -> AttributeProto {
    AttributeProto { name: name.into(), i, r#type: 2, ..AttributeProto::default() }
}

fn float(name: &str, f: f32) -> AttributeProto {
    AttributeProto { name: name.into(), f, r#type: 1, ..AttributeProto::default() }
}

fn floats_of(name: &str, dims: &[i64], values: &[f32]) -> TensorProto {
    TensorProto {
        name: name.into(),
        dims: dims.into(),
        data_type: 1,
        float_data: values.into(),
        ..TensorProto::default()
    }
}

fn flag(name: &str) -> TensorProto {
    let (dims, int32_data) = (vec![], vec![1]);
    TensorProto { name: name.into(), dims, data_type: 9, int32_data, ..TensorProto::default() }
}

fn value(name: &str, dims: &[Option<i64>]) -> ValueInfoProto {
    let dim = |n: &Option<i64>| DimensionProto {
        dim_value: *n,
        dim_param: n.is_none().then(|| "batch".into()),
    };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let tensor_type = Some(TensorTypeProto { elem_type: 1, shape });
    ValueInfoProto { name: name.into(), r#type: Some(TypeProto { tensor_type }) }
}

/// `logits[batch, 3]` of `x[batch, 3]` by these nodes, with what they are given: statistics `m` and `v`, weights `w`, and
/// the scalars `p` and `yes`.
fn model(opset: i64, nodes: Vec<NodeProto>) -> ModelProto {
    let graph = GraphProto {
        input: vec![value("x", &[None, Some(3)])],
        output: vec![value("logits", &[None, Some(3)])],
        initializer: vec![
            floats_of("w", &[3], &[1.0, 2.0, -1.0]),
            floats_of("b", &[3], &[0.5, 0.0, 0.25]),
            floats_of("m", &[3], &[0.5, -0.5, 0.125]),
            floats_of("v", &[3], &[4.0, 1.0, 0.25]),
            floats_of("p", &[], &[0.25]),
            floats_of("ones", &[3], &[1.0; 3]),
            flag("yes"),
        ],
        node: nodes,
        ..GraphProto::default()
    };
    let set = |domain: &str| OperatorSetIdProto { domain: domain.into(), version: opset };
    ModelProto {
        ir_version: 8,
        opset_import: vec![set(""), set("own")],
        graph: Some(graph),
        ..ModelProto::default()
    }
}

const NORM: [&str; 5] = ["x", "w", "b", "m", "v"];

/// Models that train in ways that exporters have: name, model, codes of warnings.
fn trained_in_many_ways() -> Vec<(&'static str, ModelProto, &'static [&'static str])> {
    let norm = |outputs: &[&str]| node("BatchNormalization", &NORM, outputs);
    let trains = int("training_mode", 1);
    let graph = |name: &str, nodes: Vec<NodeProto>, output: &str| AttributeProto {
        name: name.into(),
        g: Some(Box::new(GraphProto {
            name: name.into(),
            node: nodes,
            output: vec![value(output, &[None, Some(3)])],
            ..GraphProto::default()
        })),
        r#type: 5,
        ..AttributeProto::default()
    };
    let branch = |n: &str| {
        let nodes = vec![
            with(
                norm(&[&format!("{n}n"), &format!("{n}m"), &format!("{n}v")]),
                std::slice::from_ref(&trains),
            ),
            node("Dropout", &[&format!("{n}n"), "p", "yes"], &[n]),
        ];
        graph(if n == "t" { "then_branch" } else { "else_branch" }, nodes, n)
    };
    let mut calls = model(
        17,
        vec![NodeProto {
            domain: "own".into(),
            ..with(node("Layer", &NORM, &["logits", "mean"]), &[int("trains", 1)])
        }],
    );
    calls.functions = vec![FunctionProto {
        name: "Layer".into(),
        domain: "own".into(),
        input: NORM.iter().map(|s| s.to_string()).collect(),
        output: vec!["y".into(), "rm".into()],
        attribute: vec!["trains".into()],
        node: vec![
            with(
                norm(&["n", "rm", "rv"]),
                &[AttributeProto {
                    name: "training_mode".into(),
                    ref_attr_name: "trains".into(),
                    r#type: 2,
                    ..AttributeProto::default()
                }],
            ),
            with(node("Constant", &[], &["half"]), &[float("value_float", 0.5)]),
            node("CastLike", &["half", "x"], &["ratio"]),
            node("Greater", &["ratio", "ratio"], &["never"]),
            node("Not", &["never"], &["training"]),
            node("Dropout", &["n", "ratio", "training"], &["y"]),
        ],
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
        ..FunctionProto::default()
    }];
    let noise = |nodes: Vec<NodeProto>| {
        let uniform = with(node("RandomUniformLike", &["x"], &["u"]), &[int("dtype", 1)]);
        [vec![uniform], nodes, vec![node("Mul", &["logits0", "w"], &["logits"])]].concat()
    };
    let float_type = int("to", 1);
    vec![
        (
            "statistics are read",
            model(
                17,
                vec![
                    with(norm(&["n", "rm", "rv"]), std::slice::from_ref(&trains)),
                    node("Add", &["n", "rm"], &["s"]),
                    node("Sub", &["s", "rv"], &["logits"]),
                ],
            ),
            &[],
        ),
        (
            "outputs say so",
            model(
                13,
                vec![
                    norm(&["n", "rm", "rv", "sm", "sv"]),
                    node("Dropout", &["n", "p", "yes"], &["logits", "kept"]),
                ],
            ),
            &[],
        ),
        (
            "a mask is made",
            model(
                17,
                vec![
                    node("Dropout", &["x", "p", "yes"], &["d", "kept"]),
                    node("Mul", &["d", "w"], &["logits"]),
                ],
            ),
            &[],
        ),
        (
            "inside a branch",
            model(17, vec![with(node("If", &["yes"], &["logits"]), &[branch("t"), branch("e")])]),
            &[],
        ),
        ("inside a function", calls, &[]),
        (
            "stochastic depth",
            model(
                17,
                noise(vec![
                    node("Less", &["u", "p"], &["kept"]),
                    with(node("Cast", &["kept"], &["number"]), std::slice::from_ref(&float_type)),
                    node("Div", &["number", "p"], &["scaled"]),
                    node("Mul", &["x", "scaled"], &["logits0"]),
                ]),
            ),
            &[],
        ),
        (
            "drop path",
            model(
                17,
                noise(vec![
                    node("Add", &["p", "u"], &["sum"]),
                    node("Floor", &["sum"], &["number"]),
                    node("Div", &["x", "p"], &["scaled"]),
                    node("Mul", &["scaled", "number"], &["logits0"]),
                ]),
            ),
            &[],
        ),
        (
            "by hand",
            model(
                17,
                noise(vec![
                    node("Less", &["u", "p"], &["kept"]),
                    node("Div", &["x", "p"], &["scaled"]),
                    node("Where", &["kept", "scaled", "b"], &["logits0"]),
                ]),
            ),
            &[],
        ),
        (
            "drawn",
            model(
                17,
                vec![
                    node("RandomNormalLike", &["x"], &["noise"]),
                    node("Mul", &["x", "w"], &["scaled"]),
                    node("Add", &["scaled", "noise"], &["logits"]),
                ],
            ),
            &["W110"],
        ),
        (
            "no running statistics",
            model(
                17,
                vec![
                    with(
                        node("Constant", &[], &["zero"]),
                        &[AttributeProto {
                            name: "value".into(),
                            t: Some(floats_of("", &[3], &[0.0; 3]).into()),
                            r#type: 4,
                            ..AttributeProto::default()
                        }],
                    ),
                    with(
                        node(
                            "BatchNormalization",
                            &["x", "w", "b", "zero", "ones"],
                            &["logits", "a", "c"],
                        ),
                        std::slice::from_ref(&trains),
                    ),
                ],
            ),
            &["W111"],
        ),
        (
            "written out",
            model(
                17,
                vec![
                    with(
                        node("ReduceMean", &["x"], &["mean"]),
                        &[AttributeProto {
                            name: "axes".into(),
                            ints: vec![0],
                            r#type: 7,
                            ..AttributeProto::default()
                        }],
                    ),
                    node("Sub", &["x", "mean"], &["c"]),
                    node("Mul", &["c", "w"], &["logits"]),
                ],
            ),
            &["W111"],
        ),
    ]
}

#[test]
fn whatever_trains_is_exported_in_inference_mode() {
    for (what, model, expected) in trained_in_many_ways() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("model.onnx");
        std::fs::write(&path, model.encode_to_vec()).expect("written");
        let settings = ["precision.compute=fp32", "loss.kind=none"];
        let planned = plan_at(&path, 4, &settings);
        let weights = planned.path().join("weights.safetensors");
        let to = dir.path().join("exported.onnx");
        let warnings = export(&planned, &weights, &Options::default(), &to);
        assert_eq!(warnings, expected, "{what}");
        if expected.is_empty() {
            structure(&decoded(&to));
        }
        if what == "statistics are read" {
            // Training's new statistics are the running ones, which are not renewed in inference.
            continue;
        }
        let data = dir.path().join("data.safetensors");
        let x: Vec<f32> = (0..12).map(|i| (i * 5 % 12) as f32 / 4.0 - 1.0).collect();
        crate::support::write_f32(&data, &[("x", vec![4, 3], x)]);
        let before = outputs(&planned, &data, None);
        let after = outputs(&plan_at(&to, 4, &settings), &data, None);
        let deviation = deviation(&after, &before);
        assert!(deviation < 1e-5, "{what}: {deviation}");
    }
}

#[test]
fn onnxruntime_computes_the_same() {
    let Some(packages) = Requirement::Onnxruntime.find() else { return };
    for &(folder, model, batch, settings) in MODELS {
        let e = exported(folder, model, batch, settings);
        outputs(&e.planned, &e.data, Some(&e.weights));
        let expected = e.planned.dir.path().join("outputs.safetensors");
        let beside = e.planned.dir.path().join("beside.onnx");
        let external = Options { external_data: true, ..Options::default() };
        export(&e.planned, &e.weights, &external, &beside);
        for exported in [&e.model, &beside] {
            let checked = Command::new("python3")
                .arg(file("tests/models/inference/check.py"))
                .args([exported, &e.data, &expected])
                .arg(e.batch.to_string())
                .env("PYTHONPATH", &packages)
                .output()
                .expect("Python runs");
            let text = String::from_utf8_lossy(&checked.stderr);
            assert!(checked.status.success(), "{folder}/{model}: {text}");
        }
    }
}
