//! Operands that the exporter stored under another name, because they begin like something else: each is what the call names.

use super::build::*;
use crate::import::onnx::messages::*;
use crate::import::{ImportOptions, Imported};
use frit_ir::Tensor;
use frit_ir::ops::ParamKind;
use frit_ir::{DType, Op};
use std::collections::HashMap;

const SIGNATURE: &str = "pkg.torch.export.ExportedProgram.graph_signature";

fn entry(key: &str, value: &str) -> StringStringEntryProto {
    StringStringEntryProto { key: key.into(), value: value.into() }
}

/// A node of the call `op(arguments)`.
fn of(op: &str, arguments: &str, node: NodeProto) -> NodeProto {
    with_keywords(op, arguments, "", node)
}

fn with_keywords(op: &str, arguments: &str, keywords: &str, node: NodeProto) -> NodeProto {
    let target = format!("call_function[target=torch.ops.aten.{op}]");
    let call =
        format!("%r : [num_users=1] = {target}(args = ({arguments}), kwargs = {{{keywords}}})");
    NodeProto { metadata_props: vec![entry("pkg.torch.onnx.fx_node", &call)], ..node }
}

/// A traced model of `x[1, 2]` with parameters and buffers of these names, of which only `stored` are stored.
fn traced(
    parameters: &[&str],
    buffers: &[&str],
    stored: Vec<TensorProto>,
    nodes: Vec<NodeProto>,
) -> ModelProto {
    let mut model = model(vec![input("x", 1, &[Dim::N(1), Dim::N(2)])], stored, nodes, &["y"]);
    model.producer_name = "pytorch".into();
    let line = |kind: &str, prefix: &str, t: &&str| format!("{prefix}_{t}: {kind} target='{t}'\n");
    let mut lines: String = parameters.iter().map(|t| line("PARAMETER", "p", t)).collect();
    lines.extend(buffers.iter().map(|t| line("BUFFER", "b", t)));
    model.graph.as_mut().expect("a graph").metadata_props = vec![entry(SIGNATURE, &lines)];
    model
}

fn read(model: &ModelProto) -> Imported {
    import(model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"))
}

fn trained(imported: &Imported) -> Vec<String> {
    let params = imported.graph.params().filter(|(_, p)| p.kind == ParamKind::Trainable);
    params.map(|(_, p)| p.name.clone()).collect()
}

fn messages(imported: &Imported) -> Vec<String> {
    imported.warnings.iter().map(|w| w.to_string()).collect()
}

/// The result for `x` once training has made all elements of the parameters these numbers.
fn after(model: &ModelProto, x: [f64; 2], trained: &[(&str, f64)]) -> Vec<f64> {
    let imported = read(model);
    let mut values = HashMap::new();
    values.insert("x".to_string(), Tensor::floats(DType::F32, [1, 2], x.to_vec()));
    for (_, node) in imported.graph.nodes() {
        let Op::Param(p) = &node.op else { continue };
        let (_, value) = trained.iter().find(|(name, _)| *name == p.name).expect(&p.name);
        let n = p.ty.shape.numel();
        let value = Tensor::floats(DType::F32, p.ty.shape.clone(), vec![*value; n]);
        values.insert(p.name.clone(), value);
    }
    let options = frit_ir::interpret::Options::default();
    let outputs = frit_ir::interpret::run(&imported.graph, &values, options).expect("a value");
    assert_eq!(imported.graph.params().count(), trained.len());
    outputs[0].1.to_f64s()
}

fn ones(name: &str) -> TensorProto {
    floats(name, &[2], &[1.0; 2])
}

fn zeros(name: &str) -> TensorProto {
    floats(name, &[2], &[0.0; 2])
}

#[test]
fn a_buffer_or_constant_in_a_parameter_does_not_train() {
    let nodes = vec![
        of("mul.Tensor", "%x, %p_g", node("Mul", &["x", "g"], &["mul"])),
        of("mul.Tensor", "%mul, %b_m", node("Mul", &["mul", "g"], &["mul_1"])),
        of("sub.Tensor", "%mul_1, %zeros", node("Sub", &["mul_1", "b"], &["sub"])),
        of("add.Tensor", "%sub, %p_b", node("Add", &["sub", "b"], &["y"])),
    ];
    let model = traced(&["g", "b"], &["m"], vec![ones("g"), zeros("b")], nodes);
    assert_eq!(trained(&read(&model)), ["g", "b"]);
    assert_eq!(after(&model, [1.0, 2.0], &[("g", 3.0), ("b", 5.0)]), [8.0, 11.0]);
}

#[test]
fn a_parameter_in_a_buffer_trains() {
    let nodes = vec![
        of("mul.Tensor", "%x, %b_m", node("Mul", &["x", "m"], &["mul"])),
        of("mul.Tensor", "%mul, %p_g", node("Mul", &["mul", "m"], &["y"])),
    ];
    let model = traced(&["g"], &["m"], vec![ones("m")], nodes);
    assert_eq!(after(&model, [1.0, 2.0], &[("g", 3.0)]), [3.0, 6.0]);
}

#[test]
fn two_parameters_of_one_call_are_told_apart() {
    let alike = |names: &[&str], nodes: Vec<NodeProto>| traced(names, &[], vec![ones("a")], nodes);
    let two = [("a", 3.0), ("b", 5.0)];
    let compared = of("gt.Scalar", "%x, 0", node("Greater", &["x", "zero"], &["gt"]));
    let call = "%gt, %p_a, %p_b";
    let nodes = vec![compared, of("where.self", call, node("Where", &["gt", "a", "a"], &["y"]))];
    let mut chosen = alike(&["a", "b"], nodes);
    chosen.graph.as_mut().expect("a graph").initializer.push(floats("zero", &[], &[0.0]));
    assert_eq!(after(&chosen, [1.0, -1.0], &two), [3.0, 5.0]);
    let call = "%p_a, %x, %p_b";
    let nodes = vec![
        of("addcmul.default", call, node("Mul", &["x", "a"], &["tmp"])),
        of("addcmul.default", call, node("Add", &["a", "tmp"], &["y"])),
    ];
    assert_eq!(after(&alike(&["a", "b"], nodes), [1.0, 2.0], &two), [8.0, 13.0]);
    let call = "%p_a, %p_b, %x";
    let nodes = vec![
        of("addcdiv.default", call, node("Div", &["a", "x"], &["tmp"])),
        of("addcdiv.default", call, node("Add", &["a", "tmp"], &["y"])),
    ];
    assert_eq!(after(&alike(&["a", "b"], nodes), [1.0, 2.0], &two), [8.0, 5.5]);
    let nodes = vec![
        of("mul.Tensor", "%x, %p_a", node("Mul", &["x", "a"], &["mul"])),
        of("rsub.Tensor", "%p_b, %mul", node("Sub", &["mul", "a"], &["y"])),
    ];
    assert_eq!(after(&alike(&["a", "b"], nodes), [1.0, 2.0], &two), [-2.0, 1.0]);
    let nodes = vec![
        of("einsum.default", "i,i->, [%p_a, %p_b]", node("Einsum", &["a", "a"], &["einsum"]))
            .with(&[text("equation", "i,i->")]),
        of("mul.Tensor", "%x, %einsum", node("Mul", &["x", "einsum"], &["y"])),
    ];
    assert_eq!(after(&alike(&["a", "b"], nodes), [1.0, 2.0], &two), [30.0, 60.0]);
}

#[test]
fn an_interpolation_reads_its_own_ends_and_weight() {
    let call = "%p_a, %x, %p_b";
    let nodes = vec![
        of("lerp.Tensor", call, node("Sub", &["x", "a"], &["diff"])),
        of("lerp.Tensor", call, node("Less", &["a", "half"], &["tmp"])),
        of("lerp.Tensor", call, node("Mul", &["a", "diff"], &["tmp_1"])),
        of("lerp.Tensor", call, node("Add", &["a", "tmp_1"], &["tmp_2"])),
        of("lerp.Tensor", call, node("Sub", &["one", "a"], &["tmp_4"])),
        of("lerp.Tensor", call, node("Mul", &["diff", "tmp_4"], &["tmp_5"])),
        of("lerp.Tensor", call, node("Sub", &["x", "tmp_5"], &["tmp_6"])),
        of("lerp.Tensor", call, node("Where", &["tmp", "tmp_2", "tmp_6"], &["y"])),
    ];
    let stored = vec![ones("a"), floats("half", &[], &[0.5]), floats("one", &[], &[1.0])];
    let model = traced(&["a", "b"], &[], stored, nodes);
    for weight in [0.25, 0.75] {
        let expected = [3.0, 4.0].map(|x| 2.0 + weight * (x - 2.0));
        assert_eq!(after(&model, [3.0, 4.0], &[("a", 2.0), ("b", weight)]), expected);
    }
}

#[test]
fn numbers_that_begin_alike_are_parameters_of_their_own() {
    let nodes = vec![
        of("mul.Tensor", "%p_a, %x", node("Mul", &["a", "x"], &["mul"])),
        of("mul.Tensor", "%p_b, %mul", node("Mul", &["a", "mul"], &["mul_1"])),
        of("add.Tensor", "%mul_1, 0.5", node("Add", &["mul_1", "a"], &["y"])),
    ];
    let model = traced(&["a", "b"], &[], vec![floats("a", &[], &[0.5])], nodes);
    assert_eq!(after(&model, [1.0, 2.0], &[("a", 3.0), ("b", 5.0)]), [15.5, 30.5]);
}

#[test]
fn the_default_weights_of_a_norm_are_constants() {
    let norm = |call: &str, from: &str, to: &str| {
        of("layer_norm.default", call, node("LayerNormalization", &[from, "n"], &[to]))
    };
    let nodes =
        |call: &str| vec![norm(call, "x", "n1"), norm("%n1, [2], %p_n, None, 1e-05", "n1", "y")];
    let model = traced(&["n"], &[], vec![ones("n")], nodes("%x, [2], None, None, 1e-05"));
    let normal = |y: Vec<f64>| y.iter().map(|y| y.round()).collect::<Vec<_>>();
    assert_eq!(normal(after(&model, [1.0, 3.0], &[("n", 8.0)])), [-8.0, 8.0]);
    let shared = traced(&["n"], &[], vec![ones("n")], nodes("%x, [2], %p_n, None, 1e-05"));
    assert_eq!(normal(after(&shared, [1.0, 3.0], &[("n", 8.0)])), [-8.0, 8.0]);
    let readers = |model: &ModelProto| {
        let graph = read(model).graph;
        let users = graph.users();
        graph.params().map(|(value, _)| users[value.0 as usize].len()).sum::<usize>()
    };
    assert_eq!([&model, &shared].map(readers), [1, 2]);
}

#[test]
fn slopes_keep_the_shape_that_the_module_gives_them() {
    let nodes = vec![
        of("prelu.default", "%x, %p_a", node("PRelu", &["x", "val_1"], &["prelu"])),
        of("prelu.default", "%prelu, %p_b", node("PRelu", &["prelu", "val_1"], &["y"])),
    ];
    let stored = vec![floats("val_1", &[1, 2], &[0.25; 2])];
    let model = traced(&["a", "b"], &[], stored, nodes);
    let imported = read(&model);
    let params = imported.graph.params().map(|(_, p)| format!("{} {}", p.name, p.ty));
    assert_eq!(params.collect::<Vec<_>>(), ["a f32[2]", "b f32[2]"]);
    assert_eq!(after(&model, [1.0, -1.0], &[("a", 3.0), ("b", 5.0)]), [1.0, -15.0]);
}

#[test]
fn a_symmetric_weight_is_read_transposed() {
    let eye = [1.0, 0.0, 0.0, 1.0];
    let nodes = vec![of("linear.default", "%x, %p_w, None", node("MatMul", &["x", "w"], &["y"]))];
    let model = traced(&["w"], &[], vec![floats("w", &[2, 2], &eye)], nodes);
    let imported = read(&model);
    let ops = imported.graph.nodes().map(|(_, n)| n.op.clone());
    assert_eq!(ops.filter(|op| matches!(op, Op::Transpose(_))).count(), 1);
    assert_eq!(trained(&imported), ["w"]);
}

#[test]
fn what_a_keyword_scales_is_not_the_parameter() {
    let add = node("Add", &["x", "val_2"], &["y"]);
    let nodes = vec![with_keywords("add.Tensor", "%x, %p_a", "alpha: 2.0", add)];
    let model = traced(&["a"], &[], vec![floats("val_2", &[2], &[2.0; 2])], nodes);
    let imported = read(&model);
    assert!(trained(&imported).is_empty());
    let [said] = &messages(&imported)[..] else { panic!("no warning") };
    assert!(said.contains("not in the graph"), "{said}");
}

#[test]
fn a_parameter_that_a_removed_node_read_is_missing() {
    let nodes = |constant: bool| {
        let mut nodes = vec![
            of("tanh.default", "%mul", node("Tanh", &["x"], &["tanh"])),
            of("mul.Tensor", "%tanh, %p_b", node("Mul", &["tanh", "b"], &["y"])),
        ];
        if constant {
            nodes.push(node("Constant", &[], &["c"]).with(&[float("value_float", 1.0)]));
        }
        nodes
    };
    let said = |constant| {
        let stored = vec![floats("b", &[2], &[1.0, 2.0])];
        messages(&read(&traced(&["a", "b"], &[], stored, nodes(constant))))
    };
    assert!(said(false)[0].contains("not in the graph"), "{:?}", said(false));
    // Without optimization it is unused, or a second name.
    assert!(said(true).is_empty(), "{:?}", said(true));
}

#[test]
fn a_computed_value_that_begins_like_a_parameter_is_warned_of() {
    let nodes = |first: &str| {
        vec![
            of("mul.Tensor", first, node("Mul", &["x", "a"], &["m"])),
            of("mul.Tensor", "%m, %exp", node("Mul", &["m", "a"], &["y"])),
        ]
    };
    let model = traced(&["a"], &[], vec![ones("a")], nodes("%x, %p_a"));
    assert_eq!(after(&model, [1.0, 2.0], &[("a", 3.0)]), [3.0, 6.0]);
    let said = messages(&read(&model));
    assert!(said[0].contains("constant `exp`") && said[0].contains("`a`"), "{said:?}");
    // Nothing says that the parameter is another one, if no call names it.
    let only = traced(&["a"], &[], vec![ones("a")], nodes("%x, %mul_7"));
    assert_eq!(after(&only, [1.0, 2.0], &[("a", 3.0)]), [9.0, 18.0]);
}

/// A chain of sums of `x` with constants, beside the parameters that they may come from.
fn summed(parameters: &[(&str, [f32; 8])], constants: &[(&str, &str, Vec<f32>)]) -> Vec<String> {
    let mut stored: Vec<TensorProto> =
        parameters.iter().map(|(name, values)| floats(name, &[8], values)).collect();
    let mut nodes = Vec::new();
    let mut last = "x".to_string();
    let mut add = |call: &str, name: &str| {
        let next = format!("s{}", nodes.len());
        nodes.push(of(
            "add.Tensor",
            &format!("%{last}, %{call}"),
            node("Add", &[&last, name], &[&next]),
        ));
        last = next;
    };
    for (name, _) in parameters {
        add(&format!("p_{name}"), name);
    }
    for (name, call, values) in constants {
        add(call, name);
        stored.push(floats(name, &[values.len() as i64], values));
    }
    nodes.push(node("Identity", &[&last], &["y"]));
    let names: Vec<&str> = parameters.iter().map(|(name, _)| *name).collect();
    let mut model = traced(&names, &[], stored, nodes);
    let graph = model.graph.as_mut().expect("a graph");
    graph.input = vec![input("x", 1, &[Dim::N(1), Dim::N(8)])];
    let imported = read(&model);
    assert_eq!(trained(&imported), names);
    messages(&imported)
}

#[test]
fn constants_that_are_functions_of_parameters_are_warned_of() {
    let a = [0.3, -1.2, 0.7, 2.5, -0.4, 1.1, -2.0, 0.05];
    let b = [1.3, 0.2, -0.9, 0.6, -1.4, 0.8, 0.15, -0.35];
    let both = [("a", a), ("b", b)];
    let of = |call: &str, values: Vec<f32>| summed(&both, &[(call, call, values)]);
    let cases = [
        ("exp", a.iter().map(|x| x.exp()).collect(), "from `a`"),
        ("mul", b.iter().map(|x| 1.0 - 3.0 * x).collect(), "from `b`"),
        ("flip", b.iter().rev().copied().collect(), "from `b`"),
        ("add_1", a.iter().zip(b).map(|(a, b)| a + b).collect(), "from `a` and `b`"),
        ("div", a.iter().zip(b).map(|(a, b)| b / a).collect(), "from `a` and `b`"),
    ];
    for (call, values, from) in cases {
        let said = of(call, values);
        let [said] = &said[..] else { panic!("{call}: {said:?}") };
        assert!(said.contains(&format!("the constant `{call}` {from}")), "{said}");
    }
    // Tables of positions, masks and what has few values come from no parameter.
    let rising: Vec<f32> = (0..8).map(|i| i as f32 / 8.0).collect();
    assert!(of("arange", rising.clone()).is_empty());
    assert!(of("cos", rising.iter().map(|x| x.cos()).collect()).is_empty());
    assert!(of("mul", vec![0.5; 8]).is_empty());
    let sorted = [0.1, 0.2, 0.4, 0.5, 0.8, 0.9, 1.5, 7.0];
    assert!(summed(&[("a", sorted)], &[("exp", "exp", rising)]).is_empty());
}

#[test]
fn a_transposition_that_the_exporter_stored_is_the_parameter() {
    let nodes = vec![
        of("matmul.default", "%x, %p_w", node("MatMul", &["x", "w"], &["matmul"])),
        of("matmul.default", "%matmul, %permute", node("MatMul", &["matmul", "permute"], &["y"])),
    ];
    let stored = vec![
        floats("w", &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        floats("permute", &[3, 2], &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]),
    ];
    let model = traced(&["w"], &[], stored, nodes);
    let imported = read(&model);
    assert!(imported.ties["permute"].transposed && messages(&imported).is_empty());
    assert_eq!(after(&model, [1.0, 2.0], &[("w", 2.0)]), [36.0, 36.0]);
}
