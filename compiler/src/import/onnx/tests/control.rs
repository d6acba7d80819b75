//! Operators that hold graphs, and the model's own functions.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::*;
use frit_ir::{DType, Op, Tensor};

const X: [Dim; 2] = [Dim::N(2), Dim::N(3)];

/// `[[0, 1, 2], [3, 4, 5]]`
fn x() -> Tensor {
    Tensor::floats(DType::F32, [2, 3], (0..6).map(f64::from).collect())
}

pub(super) fn graph(inputs: &[&str], node: Vec<NodeProto>, outputs: &[&str]) -> GraphProto {
    GraphProto {
        name: "g".into(),
        input: inputs.iter().map(|name| input(name, 1, &[])).collect(),
        output: outputs.iter().map(|name| input(name, 1, &[])).collect(),
        node,
        ..Default::default()
    }
}

pub(super) fn inside(name: &str, g: GraphProto) -> AttributeProto {
    AttributeProto { name: name.into(), g: Some(g.into()), r#type: 5, ..Default::default() }
}

pub(super) fn flag(name: &str, value: bool) -> TensorProto {
    let int32_data = vec![i32::from(value)];
    TensorProto { name: name.into(), data_type: 9, int32_data, ..Default::default() }
}

pub(super) fn scalar(name: &str, value: i64) -> TensorProto {
    TensorProto { dims: vec![], ..ints(name, &[value]) }
}

#[test]
fn the_branch_that_is_taken_reads_values_around_it() {
    for (taken, expected) in [(true, -1.0), (false, 1.0)] {
        let branch = node("If", &["c"], &["y"]).with(&[
            inside("then_branch", graph(&[], vec![node("Neg", &["h"], &["a"])], &["a"])),
            inside("else_branch", graph(&[], vec![node("Unknown", &["h"], &["b"])], &["b"])),
        ]);
        let abs = node("Abs", &["x"], &["h"]);
        // What the branch reads is made after it in the file.
        let mut m =
            model(vec![input("x", 1, &X)], vec![flag("c", taken)], vec![branch, abs], &["y"]);
        if taken {
            assert_eq!(eval(&m, &[("x", x())]).to_f64s()[1], expected);
            continue;
        }
        let text = refused(&m, &ImportOptions::default());
        assert!(text.contains("Unknown: this operator is not supported"), "{text}");
        // A place in the file has none but a node of the whole graph.
        assert!(text.contains("(Unknown)") && !text.contains("node #"), "{text}");
        let graph = m.graph.as_mut().expect("a graph");
        let other = graph.node[0].attribute[1].g.as_mut().expect("a branch");
        other.node[0].op_type = "Identity".into();
        assert_eq!(eval(&m, &[("x", x())]).to_f64s()[1], expected);
    }
}

#[test]
fn a_condition_that_depends_on_data_is_named() {
    let branch = node("If", &["c"], &["y"]).with(&[
        inside("then_branch", graph(&[], vec![node("Neg", &["x"], &["a"])], &["a"])),
        inside("else_branch", graph(&[], vec![node("Abs", &["x"], &["b"])], &["b"])),
    ]);
    let m = model(vec![input("x", 1, &X), input("c", 9, &[])], vec![], vec![branch], &["y"]);
    let text = refused(&m, &ImportOptions::default());
    assert!(text.contains("E034") && text.contains("If: the condition depends on data"), "{text}");
}

#[test]
fn a_loop_is_unrolled() {
    // v ← v + x, three times; the partial sums are collected.
    let body = graph(
        &["i", "go", "v"],
        vec![
            node("Add", &["v", "x"], &["w"]),
            node("Identity", &["w"], &["s"]),
            node("Identity", &["go"], &["on"]),
        ],
        &["on", "w", "s"],
    );
    let repeat = node("Loop", &["n", "", "x"], &["v_end", "all"]).with(&[inside("body", body)]);
    let m = model(vec![input("x", 1, &X)], vec![scalar("n", 3)], vec![repeat], &["v_end", "all"]);
    let imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let results = run(&imported, &[("x", x())]);
    assert_eq!(results[0].to_f64s(), [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]);
    assert_eq!(results[1].shape().dims(), [3, 2, 3]);
    assert_eq!(results[1].to_f64s()[6..12], [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]);
    // The condition may end it, if it is known.
    let body = graph(
        &["i", "go", "v"],
        vec![node("Less", &["i", "last"], &["on"]), node("Add", &["v", "v"], &["w"])],
        &["on", "w"],
    );
    let repeat = node("Loop", &["", "yes", "x"], &["y"]).with(&[inside("body", body)]);
    let stored = vec![flag("yes", true), scalar("last", 2)];
    let m = model(vec![input("x", 1, &X)], stored, vec![repeat], &["y"]);
    assert_eq!(eval(&m, &[("x", x())]).to_f64s()[1], 8.0);
}

#[test]
fn a_scan_runs_along_its_axis() {
    // Running sums of the columns, from the last on.
    let body = graph(
        &["s", "column"],
        vec![node("Add", &["s", "column"], &["t"]), node("Identity", &["t"], &["out"])],
        &["t", "out"],
    );
    let scan = node("Scan", &["zero", "x"], &["end", "sums"]).with(&[
        inside("body", body),
        int("num_scan_inputs", 1),
        list("scan_input_axes", &[1]),
        list("scan_input_directions", &[1]),
        list("scan_output_axes", &[-1]),
    ]);
    let zero = floats("zero", &[2], &[0.0, 0.0]);
    let m = model(vec![input("x", 1, &X)], vec![zero], vec![scan], &["sums"]);
    let sums = eval(&m, &[("x", x())]);
    assert_eq!(sums.shape().dims(), [2, 3]);
    assert_eq!(sums.to_f64s(), [2.0, 3.0, 3.0, 5.0, 9.0, 12.0]);
}

#[test]
fn functions_are_replaced_by_their_nodes() {
    let mut slope = float("alpha", 0.0);
    slope.ref_attr_name = "slope".into();
    let leaky = FunctionProto {
        name: "Leaky".into(),
        domain: "mine".into(),
        input: vec!["a".into(), "b".into()],
        output: vec!["r".into()],
        attribute_proto: vec![float("slope", 0.5)],
        node: vec![
            node("Sub", &["a", "b"], &["d"]),
            node("LeakyRelu", &["d"], &["r"]).with(&[slope]),
        ],
        ..Default::default()
    };
    let twice = FunctionProto {
        name: "Twice".into(),
        domain: "mine".into(),
        input: vec!["a".into(), "b".into()],
        output: vec!["r".into()],
        node: vec![
            NodeProto { domain: "mine".into(), ..node("Leaky", &["a", "b"], &["d"]) },
            NodeProto { domain: "mine".into(), ..node("Leaky", &["d", "b"], &["r"]) }
                .with(&[float("slope", 0.25)]),
        ],
        ..Default::default()
    };
    let call = NodeProto { domain: "mine".into(), ..node("Twice", &["x", "two"], &["y"]) };
    let two = floats("two", &[], &[2.0]);
    let mut m = model(vec![input("x", 1, &X)], vec![two], vec![call], &["y"]);
    m.functions = vec![leaky.clone(), twice];
    // 0 → −2·½ − 2 = −3 → −¾; 5 → 3 → 1.
    let y = eval(&m, &[("x", x())]).to_f64s();
    assert_eq!((y[0], y[5]), (-0.75, 1.0));
    let imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let subtractions = |n: &frit_ir::Node| n.op == Op::Binary(frit_ir::ops::BinaryFn::Sub);
    assert_eq!(imported.graph.nodes().filter(|(_, n)| subtractions(n)).count(), 2);
    let mut endless = leaky;
    endless.node[0].op_type = "Leaky".into();
    endless.node[0].domain = "mine".into();
    m.functions[0] = endless;
    let text = refused(&m, &ImportOptions::default());
    assert!(text.contains("E017") && text.contains("does a function call itself?"), "{text}");
}
