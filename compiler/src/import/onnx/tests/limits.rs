//! Small files that ask for any amount of memory or time.

use super::build::*;
use super::control::{flag, graph, inside, scalar};
use crate::import::ImportOptions;
use crate::import::limits::Limits;
use crate::import::onnx::messages::*;

const HUGE: i64 = 1 << 40;

fn x() -> Vec<ValueInfoProto> {
    vec![input("x", 1, &[Dim::N(1), Dim::N(1), Dim::N(4), Dim::N(4)])]
}

fn real(name: &str, value: f32) -> TensorProto {
    floats(name, &[], &[value])
}

/// The messages of a model of one node, which must be refused.
fn one(node: NodeProto, stored: Vec<TensorProto>) -> String {
    let outputs: Vec<String> = node.output.clone();
    let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
    refused(&model(x(), stored, vec![node], &outputs), &ImportOptions::default())
}

#[track_caller]
fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn constants_that_would_fill_the_memory_are_refused_before_they_are_made() {
    let huge = || scalar("n", HUGE);
    let zero = scalar("zero", 0);
    let cases = [
        (
            node("Range", &["zero", "n", "one"], &["y"]),
            vec![zero.clone(), huge(), scalar("one", 1)],
        ),
        (
            node("Range", &["a", "b", "c"], &["y"]),
            vec![real("a", 0.0), real("b", 1.0), real("c", 1e-30)],
        ),
        (node("HannWindow", &["n"], &["y"]), vec![huge()]),
        (node("BlackmanWindow", &["n"], &["y"]), vec![scalar("n", 1 << 31)]),
        (
            node("OneHot", &["zero", "n", "v"], &["y"]),
            vec![zero.clone(), huge(), floats("v", &[2], &[0.0, 1.0])],
        ),
        (
            node("MelWeightMatrix", &["bins", "n", "rate", "low", "high"], &["y"]),
            vec![
                scalar("bins", 1 << 16),
                scalar("n", 1 << 16),
                scalar("rate", 2),
                real("low", 0.0),
                real("high", 9.0),
            ],
        ),
        (
            node("DFT", &["z", "n"], &["y"]).with(&[int("axis", 1)]),
            vec![floats("z", &[1, 4, 1], &[0.0; 4]), scalar("n", 1 << 20)],
        ),
        (
            node("Pad", &["x", "p"], &["y"]).with(&[text("mode", "wrap")]),
            vec![ints("p", &[0, 0, 0, 0, 0, 0, 0, HUGE])],
        ),
        (
            node("Resize", &["x", "", "s"], &["y"]).with(&[text("mode", "linear")]),
            vec![floats("s", &[4], &[1.0, 1.0, 1e9, 1.0])],
        ),
        (
            node("Col2Im", &["x3", "image", "block"], &["y"]),
            vec![
                floats("x3", &[1, 1, 1], &[0.0]),
                ints("image", &[1 << 20, 1 << 20]),
                ints("block", &[1 << 20, 1 << 20]),
            ],
        ),
    ];
    for (node, stored) in cases {
        let op = node.op_type.clone();
        let text = one(node, stored);
        says(&text, &["E01", &format!("{op}: ")]);
        if op != "Col2Im" {
            says(
                &text,
                &["E017", "import.max_elements = 67108864", "--set import.max_elements=N", "n_y"],
            );
        }
    }
}

#[test]
fn sizes_that_no_tensor_has_are_refused() {
    for (node, stored) in [
        (node("Resize", &["x", "", "s"], &["y"]), vec![floats("s", &[4], &[1.0, 1.0, 1e18, 1.0])]),
        (
            node("Resize", &["x", "", "s"], &["y"]),
            vec![floats("s", &[4], &[1.0, 1.0, f32::INFINITY, 1.0])],
        ),
        (
            node("Resize", &["x", "", "s"], &["y"]),
            vec![floats("s", &[4], &[1.0, 1.0, f32::NAN, 1.0])],
        ),
        (node("AveragePool", &["x"], &["y"]).with(&[list("kernel_shape", &[HUGE, 1])]), vec![]),
        (
            node("MaxPool", &["x"], &["y"])
                .with(&[list("kernel_shape", &[2, 2]), list("dilations", &[i64::MAX, 1])]),
            vec![],
        ),
        (
            node("Conv", &["x", "w"], &["y"]).with(&[list("strides", &[i64::MAX, i64::MAX])]),
            vec![floats("w", &[1, 1, 1, 1], &[1.0])],
        ),
        (
            node("ConvTranspose", &["x", "w"], &["y"]).with(&[list("strides", &[HUGE, HUGE])]),
            vec![floats("w", &[1, 1, 1, 1], &[1.0])],
        ),
        (node("Tile", &["x", "r"], &["y"]), vec![ints("r", &[HUGE, HUGE, HUGE, HUGE])]),
        (node("Expand", &["x", "r"], &["y"]), vec![ints("r", &[HUGE, 4, 4, 4])]),
        (node("ConstantOfShape", &["r"], &["y"]), vec![ints("r", &[HUGE, HUGE])]),
        (node("Pad", &["x", "p"], &["y"]), vec![ints("p", &[0, 0, HUGE, HUGE, 0, 0, HUGE, HUGE])]),
        (node("DepthToSpace", &["x"], &["y"]).with(&[int("blocksize", 1 << 33)]), vec![]),
        (node("Unsqueeze", &["x", "a"], &["y"]), vec![ints("a", &(0..80).collect::<Vec<_>>())]),
    ] {
        let op = node.op_type.clone();
        let text = one(node, stored);
        says(&text, &["E0", &format!("{op}: "), "n_y"]);
    }
}

#[test]
fn what_is_broadcast_is_left_to_the_plan() {
    let nodes =
        vec![node("ConstantOfShape", &["r"], &["big"]), node("Add", &["big", "one"], &["y"])];
    let stored = vec![ints("r", &[1 << 20, 1 << 10]), floats("one", &[1], &[1.0])];
    let m = model(x(), stored, nodes, &["y"]);
    let graph = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}")).graph;
    assert!(graph.nodes().count() < 10);
}

#[test]
fn constants_count_together() {
    // Each would do alone.
    let names: Vec<String> = (0..40).map(|i| format!("y{i}")).collect();
    let nodes = names.iter().map(|y| node("Range", &["zero", "n", "one"], &[y])).collect();
    let stored = vec![scalar("zero", 0), scalar("n", 1 << 12), scalar("one", 1)];
    let outputs: Vec<&str> = names.iter().map(String::as_str).collect();
    let m = model(x(), stored, nodes, &outputs);
    assert!(import(&m, &ImportOptions::default()).is_ok());
    let limits = Limits { elements: 1 << 16, ..Limits::default() };
    let text = refused(&m, &ImportOptions { limits, ..ImportOptions::default() });
    says(&text, &["E017", "Range", "import.max_elements = 65536"]);
    assert_eq!(text.matches("E017").count(), 1, "{text}");
}

/// Functions that each call the one before `n` times, `levels` deep.
fn laughs(levels: usize, n: usize, first: Vec<NodeProto>, wrap: bool) -> ModelProto {
    let function = |name: String, node: Vec<NodeProto>| FunctionProto {
        name,
        domain: "mine".into(),
        input: vec!["a".into()],
        output: vec!["r".into()],
        node,
        ..Default::default()
    };
    let call = |i: usize, input: &str, output: &str| NodeProto {
        domain: "mine".into(),
        ..node(&format!("f{i}"), &[input], &[output])
    };
    let mut functions = vec![function("f0".into(), first)];
    for level in 1..levels {
        let at = |i: usize| if i == 0 { "a".into() } else { format!("v{i}") };
        let to = |i: usize| if i + 1 == n { "r".into() } else { format!("v{}", i + 1) };
        let mut body: Vec<NodeProto> = (0..n).map(|i| call(level - 1, &at(i), &to(i))).collect();
        if wrap {
            let branch = |nodes: &[NodeProto]| graph(&[], nodes.to_vec(), &["r"]);
            let branches =
                [inside("then_branch", branch(&body)), inside("else_branch", branch(&body))];
            body = vec![node("If", &["yes"], &["r"]).with(&branches)];
        }
        functions.push(function(format!("f{level}"), body));
    }
    let mut m = model(x(), vec![flag("yes", true)], vec![call(levels - 1, "x", "y")], &["y"]);
    m.functions = functions;
    m
}

#[test]
fn functions_that_multiply_are_refused() {
    let relu = || vec![node("Relu", &["a"], &["r"])];
    for m in [
        laughs(20, 10, relu(), false),
        laughs(20, 10, vec![], false),
        laughs(12, 10, relu(), true),
        laughs(12, 10, vec![], true),
    ] {
        let text = refused(&m, &ImportOptions::default());
        says(&text, &["E017", "import.max_"]);
    }
    assert!(import(&laughs(4, 5, relu(), false), &ImportOptions::default()).is_ok());
    assert!(import(&laughs(60, 1, relu(), false), &ImportOptions::default()).is_ok());
    says(
        &refused(&laughs(70, 1, relu(), false), &ImportOptions::default()),
        &["E017", "import.max_depth = 64"],
    );
}

#[test]
fn names_and_attributes_that_multiply_are_refused() {
    let relu = NodeProto { name: "n".repeat(1 << 16), ..node("Relu", &["a"], &["r"]) };
    let text = refused(&laughs(5, 10, vec![relu], false), &ImportOptions::default());
    says(&text, &["E017", "import.max_bytes"]);
    let mut m = laughs(5, 10, vec![node("Relu", &["a"], &["r"])], false);
    m.graph.as_mut().expect("a graph").node[0].name = "n".repeat(1 << 16);
    says(&refused(&m, &ImportOptions::default()), &["E017", "import.max_bytes"]);
    let values = list("value_ints", &vec![1; 1 << 14]);
    let constant = node("Constant", &[], &["unused"]).with(&[values]);
    let first = vec![constant, node("Relu", &["a"], &["r"])];
    says(&refused(&laughs(6, 10, first, false), &ImportOptions::default()), &["E017"]);
}

/// A loop over `body`, which carries `v`.
fn repeated(trips: &str, condition: &str, body: Vec<NodeProto>) -> NodeProto {
    let body = graph(&["i", "go", "v"], body, &["go", "w"]);
    node("Loop", &[trips, condition, "x"], &["y"]).with(&[inside("body", body)])
}

#[test]
fn loops_without_an_end_are_refused() {
    // With the usual limits it takes longer to say so.
    let limits = Limits { nodes: 1 << 12, ..Limits::default() };
    let few = ImportOptions { limits, ..ImportOptions::default() };
    let one = |node: NodeProto, stored: Vec<TensorProto>| {
        refused(&model(x(), stored, vec![node], &["y"]), &few)
    };
    let keep = || vec![node("Identity", &["v"], &["w"])];
    let add = || vec![node("Add", &["v", "x"], &["w"])];
    let stored = || vec![flag("yes", true), scalar("n", i64::MAX)];
    for (trips, condition) in [("", ""), ("", "yes"), ("n", ""), ("n", "yes")] {
        for body in [keep(), add()] {
            let text = one(repeated(trips, condition, body), stored());
            says(&text, &["E017", "import.max_nodes = 4096"]);
        }
    }
    // Loops inside one another.
    let mut body = keep();
    for _ in 0..5 {
        let inner = graph(&["i", "go", "v"], body, &["go", "w"]);
        body = vec![node("Loop", &["n", "", "v"], &["w"]).with(&[inside("body", inner)])];
    }
    let stored = vec![scalar("n", 1000)];
    says(&one(repeated("n", "", body), stored), &["E017", "import.max_nodes"]);
}

#[test]
fn long_sequences_over_time_are_refused() {
    let t = 1 << 20;
    let inputs = vec![input("s", 1, &[Dim::N(t), Dim::N(1), Dim::N(1)])];
    let stored = vec![floats("w", &[1, 4, 1], &[0.0; 4]), floats("r", &[1, 4, 1], &[0.0; 4])];
    let lstm = node("LSTM", &["s", "w", "r"], &["y"]);
    let m = model(inputs, stored, vec![lstm], &["y"]);
    says(&refused(&m, &ImportOptions::default()), &["E017", "LSTM", "import.max_nodes"]);
    let split = node("SplitToSequence", &["s"], &["q"]);
    let at = node("SequenceAt", &["q", "zero"], &["y"]);
    let inputs = vec![input("s", 1, &[Dim::N(1 << 39)])];
    let m = model(inputs, vec![scalar("zero", 0)], vec![split, at], &["y"]);
    says(&refused(&m, &ImportOptions::default()), &["SplitToSequence"]);
}

#[test]
fn a_limit_may_be_raised() {
    let limits = Limits { nodes: 100, ..Limits::default() };
    let few = ImportOptions { limits, ..ImportOptions::default() };
    let body = vec![node("Add", &["v", "x"], &["w"])];
    let m = model(x(), vec![scalar("n", 200)], vec![repeated("n", "", body)], &["y"]);
    says(&refused(&m, &few), &["E017", "import.max_nodes = 100"]);
    assert!(import(&m, &ImportOptions::default()).is_ok());
}
