//! Parameters that are stored as copies of another because they begin alike.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::*;
use frit_ir::ops::ParamKind;

/// Two layers whose biases begin as zeros, the second a copy of the first under `name`.
fn layers(producer: &str, name: &str) -> ModelProto {
    let eye = [1.0, 0.0, 0.0, 1.0];
    let weights = vec![
        floats("a.weight", &[2, 2], &eye),
        floats("b.weight", &[2, 2], &[2.0, 1.0, 0.0, 2.0]),
        floats("a.bias", &[2], &[0.0, 0.0]),
    ];
    let nodes = vec![
        node("Identity", &["a.bias"], &[name]),
        node("MatMul", &["x", "a.weight"], &["/a/MatMul_output_0"]),
        node("Add", &["/a/MatMul_output_0", "a.bias"], &["h"]),
        node("MatMul", &["h", "b.weight"], &["/b/MatMul_output_0"]),
        node("Add", &["/b/MatMul_output_0", name], &["y"]),
    ];
    let inputs = vec![input("x", 1, &[Dim::N(1), Dim::N(2)])];
    ModelProto { producer_name: producer.into(), ..model(inputs, weights, nodes, &["y"]) }
}

fn trained(model: &ModelProto) -> Vec<String> {
    let imported = import(model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let params = imported.graph.params().filter(|(_, p)| p.kind == ParamKind::Trainable);
    params.map(|(_, p)| p.name.clone()).collect()
}

#[test]
fn a_copy_under_a_name_of_the_module_is_a_parameter() {
    let own = trained(&layers("pytorch", "b.bias"));
    assert_eq!(own, ["a.weight", "b.weight", "a.bias", "b.bias"]);
}

#[test]
fn other_copies_are_the_parameter_itself() {
    let shared = ["a.weight", "b.weight", "a.bias"];
    assert_eq!(trained(&layers("another", "b.bias")), shared);
    assert_eq!(trained(&layers("pytorch", "/b/Identity_output_0")), shared);
    assert_eq!(trained(&layers("pytorch", "onnx::Add_7")), shared);
    let mut listed = layers("pytorch", "detach");
    let graph = listed.graph.as_mut().expect("a graph");
    let value = graph.initializer.iter().map(|t| format!("p: PARAMETER target='{}'\n", t.name));
    graph.metadata_props.push(StringStringEntryProto {
        key: "pkg.torch.export.ExportedProgram.graph_signature".into(),
        value: value.collect(),
    });
    assert_eq!(trained(&listed), shared);
}
