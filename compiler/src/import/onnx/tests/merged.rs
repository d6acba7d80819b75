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

/// Two layers, as the dynamo exporter describes them. The packed bias of the second is split by a node that the exporter's optimization
/// wrote, and was merged with that of the first. `reader` is the module that also reads it.
fn packed(reader: &str, targets: &[&str]) -> ModelProto {
    let entry = |key: &str, value: &str| StringStringEntryProto {
        key: format!("pkg.torch.{key}"),
        value: value.into(),
    };
    let of = |module: &str, arguments: &str, node: NodeProto| {
        let call = format!(
            "%l = call_function[target=torch.ops.aten.linear.default](args = ({arguments}))"
        );
        let scopes = format!("['', '{module}', 'linear']");
        let metadata_props = vec![entry("onnx.fx_node", &call), entry("onnx.name_scopes", &scopes)];
        NodeProto { metadata_props, ..node }
    };
    let first = "%x, %p_a_weight, %p_a_bias";
    let nodes = vec![
        of("a", first, node("MatMul", &["x", "a.weight"], &["h"])),
        of("a", first, node("Add", &["h", "a.bias"], &["h1"])),
        node("Split", &["a.bias", "sizes"], &["b1", "b2"]),
        of("b", "%h1, %w, %b1", node("Add", &["h1", "b1"], &["h2"])),
        of(reader, "%h2, %w, %b2", node("Mul", &["h2", "b2"], &["y"])),
    ];
    let weights = vec![
        floats("a.weight", &[2, 2], &[1.0, 0.0, 0.0, 1.0]),
        floats("a.bias", &[2], &[0.0, 0.0]),
        ints("sizes", &[1, 1]),
    ];
    let inputs = vec![input("x", 1, &[Dim::N(1), Dim::N(2)])];
    let mut model = model(inputs, weights, nodes, &["y"]);
    model.producer_name = "pytorch".into();
    let line = |t: &&str| format!("p_{}: PARAMETER target='{t}'\n", t.replace('.', "_"));
    let lines: String = ["a.weight", "a.bias"].iter().chain(targets).map(line).collect();
    let graph = model.graph.as_mut().expect("a graph");
    graph.metadata_props = vec![entry("export.ExportedProgram.graph_signature", &lines)];
    model
}

#[test]
fn what_the_optimization_splits_is_a_parameter_of_the_module_that_reads_the_parts() {
    let own = trained(&packed("b", &["b.in_proj_bias"]));
    assert_eq!(own, ["a.weight", "a.bias", "b.in_proj_bias"]);
    // Two may be meant, or none is missing.
    let shared = ["a.weight", "a.bias"];
    assert_eq!(trained(&packed("b", &["b.in_proj_bias", "b.bias_k"])), shared);
    assert_eq!(trained(&packed("b", &[])), shared);
    // A name before the one that is stored is a second name of it.
    let mut tied = packed("b", &["b.in_proj_bias"]);
    let signature = &mut tied.graph.as_mut().expect("a graph").metadata_props[0].value;
    *signature = signature.lines().rev().map(|line| format!("{line}\n")).collect();
    assert_eq!(trained(&tied), shared);
    // A module may read the parameter of another one that does not read it itself.
    let mut borrowed = packed("b", &["b.in_proj_bias"]);
    let graph = borrowed.graph.as_mut().expect("a graph");
    graph.node.remove(1);
    graph.node[2].input[0] = "h".into();
    assert_eq!(trained(&borrowed), shared);
    // Nodes that did the same were merged, too.
    let both = trained(&packed("c", &["b.in_proj_bias", "c.in_proj_bias"]));
    assert_eq!(both, ["a.weight", "a.bias", "b.in_proj_bias", "c.in_proj_bias"]);
    assert_eq!(trained(&packed("c", &["b.in_proj_bias"])), own);
}

/// A group norm of two groups of `x[1, 4, 2, 2]`, as the dynamo exporter optimizes it.
fn grouped() -> ModelProto {
    let entry = |key: &str, value: &str| StringStringEntryProto {
        key: format!("pkg.torch.{key}"),
        value: value.into(),
    };
    let call = "%n = call_function[target=torch.ops.aten.group_norm.default](args = (%x, 2, %p_w, %p_b, 1e-05))";
    let of =
        |node: NodeProto| NodeProto { metadata_props: vec![entry("onnx.fx_node", call)], ..node };
    let nodes = vec![
        of(node("Reshape", &["x", "rows"], &["r"])),
        of(node("InstanceNormalization", &["r", "ones", "zeros"], &["n"])),
        of(node("Reshape", &["n", "planes"], &["s"])),
        of(node("Mul", &["s", "val_8"], &["m"])),
        of(node("Add", &["m", "val_9"], &["y"])),
    ];
    let weights = vec![
        floats("ones", &[2], &[1.0; 2]),
        floats("zeros", &[2], &[0.0; 2]),
        floats("val_8", &[4, 1, 1], &[1.0, 2.0, 3.0, 4.0]),
        floats("val_9", &[4, 1, 1], &[0.0, 0.5, 0.0, 0.0]),
        ints("rows", &[1, 2, -1]),
        ints("planes", &[1, 4, 2, 2]),
    ];
    let dims = [1, 4, 2, 2].map(Dim::N);
    let mut model = model(vec![input("x", 1, &dims)], weights, nodes, &["y"]);
    model.producer_name = "pytorch".into();
    let lines = "p_w: PARAMETER target='norm.weight'\np_b: PARAMETER target='norm.bias'\n";
    let graph = model.graph.as_mut().expect("a graph");
    graph.metadata_props = vec![entry("export.ExportedProgram.graph_signature", lines)];
    model
}

#[test]
fn the_scales_of_groups_are_no_parameters() {
    let imported = import(&grouped(), &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let params = imported.graph.params().map(|(_, p)| format!("{} {}", p.name, p.ty));
    assert_eq!(params.collect::<Vec<_>>(), ["norm.weight f32[4]", "norm.bias f32[4]"]);
    let x = (0..16).map(f64::from).collect();
    let x = frit_ir::Tensor::floats(frit_ir::DType::F32, [1, 4, 2, 2], x);
    let y = run(&imported, &[("x", x)])[0].to_f64s();
    // Eight consecutive numbers are normalized together.
    let normal = |i: usize| ((i % 8) as f64 - 3.5) / (5.25_f64 + 1e-5).sqrt();
    for (i, y) in y.iter().enumerate() {
        let expected = normal(i) * (i / 4 + 1) as f64 + if i / 4 == 1 { 0.5 } else { 0.0 };
        assert!((y - expected).abs() < 1e-5, "{i}: {y} for {expected}");
    }
}

#[test]
fn the_scales_of_groups_stay_what_they_are_where_a_parameter_begins_like_them() {
    let alone = import(&grouped(), &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let mut merged = grouped();
    let graph = merged.graph.as_mut().expect("a graph");
    graph.metadata_props[0].value += "p_o: PARAMETER target='other.weight'\n";
    graph.initializer[0].name = "other.weight".into();
    graph.node[1].input[1] = "other.weight".into();
    let merged = import(&merged, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let names: Vec<&str> = merged.graph.params().map(|(_, p)| p.name.as_str()).collect();
    assert_eq!(names, ["norm.weight", "norm.bias"]);
    let x = (0..16).map(f64::from).collect();
    let x = frit_ir::Tensor::floats(frit_ir::DType::F32, [1, 4, 2, 2], x);
    assert_eq!(run(&alone, &[("x", x.clone())])[0], run(&merged, &[("x", x)])[0]);
}

#[test]
fn a_batch_norm_with_fresh_statistics_trains() {
    let entry = |key: &str, value: &str| StringStringEntryProto {
        key: format!("pkg.torch.{key}"),
        value: value.into(),
    };
    let call = "%n = call_function[target=torch.ops.aten._native_batch_norm_legit_functional.default](args = \
                (%x, %p_w, %p_b, %b_m, %b_v, True, 0.1, 1e-05))";
    let mut norm =
        node("BatchNormalization", &["x", "n.weight", "n.bias", "n.bias", "n.weight"], &["y"]);
    norm.metadata_props = vec![entry("onnx.fx_node", call)];
    let weights = vec![floats("n.weight", &[2], &[1.0; 2]), floats("n.bias", &[2], &[0.0; 2])];
    let inputs = vec![input("x", 1, &[Dim::N(3), Dim::N(2)])];
    let mut model = model(inputs, weights, vec![norm], &["y"]);
    model.producer_name = "pytorch".into();
    let lines = "p_w: PARAMETER target='n.weight'\np_b: PARAMETER target='n.bias'\n\
                 b_m: BUFFER target='n.running_mean' persistent=True\n\
                 b_v: BUFFER target='n.running_var' persistent=True\n";
    let graph = model.graph.as_mut().expect("a graph");
    graph.metadata_props = vec![entry("export.ExportedProgram.graph_signature", lines)];
    assert_eq!(trained(&model), ["n.weight", "n.bias"]);
}

#[test]
fn constants_that_are_computed_from_a_parameter_are_warned_of() {
    let mut model = packed("b", &[]);
    let graph = model.graph.as_mut().expect("a graph");
    graph.initializer[1] = floats("a.bias", &[2], &[0.5, 0.25]);
    graph.initializer.push(floats("linear", &[3, 2], &[0.5, 0.25, 0.5, 0.25, 0.5, 0.25]));
    graph.initializer.push(floats("other", &[2, 2], &[0.5, 0.25, 0.5, 1.0]));
    graph.node.push(node("MatMul", &["y", "other"], &["z"]));
    graph.node.push(node("Add", &["z", "linear"], &["w"]));
    graph.output[0].name = "w".into();
    let imported = import(&model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let said: Vec<String> = imported.warnings.iter().map(|w| w.message.clone()).collect();
    let [said] = &said[..] else { panic!("{said:?}") };
    assert!(said.contains("the constant `linear` from `a.bias`"), "{said}");
}
