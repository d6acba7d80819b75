//! Functions that name their gradient, or state a precision.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::*;
use expect_test::expect;
use frit_ir::{DType, Op, Tensor, verify};

const X: [Dim; 2] = [Dim::N(2), Dim::N(3)];

fn function(
    name: &str,
    inputs: &[&str],
    outputs: &[&str],
    node: Vec<NodeProto>,
    stated: &[(&str, &str)],
) -> FunctionProto {
    let names = |list: &[&str]| list.iter().map(|s| s.to_string()).collect();
    let entry = |(key, value): &(&str, &str)| StringStringEntryProto {
        key: (*key).into(),
        value: (*value).into(),
    };
    FunctionProto {
        name: name.into(),
        domain: "mine".into(),
        input: names(inputs),
        output: names(outputs),
        node,
        metadata_props: stated.iter().map(entry).collect(),
        ..Default::default()
    }
}

fn call(name: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto { domain: "mine".into(), ..node(name, inputs, outputs) }
}

/// The identity, whose gradient is −`factor` times the cotangent.
fn reversal() -> Vec<FunctionProto> {
    let mut factor = float("value_float", 0.0);
    factor.ref_attr_name = "factor".into();
    let mut reverse = function(
        "Reverse",
        &["a"],
        &["r"],
        vec![node("Identity", &["a"], &["r"])],
        &[("frit.gradient", "mine::Reversed")],
    );
    reverse.attribute_proto = vec![float("factor", 1.0)];
    let gradient = function(
        "Reversed",
        &["a", "r", "dr"],
        &["da"],
        vec![
            node("Constant", &[], &["f"]).with(&[factor]),
            node("Mul", &["dr", "f"], &["scaled"]),
            node("Neg", &["scaled"], &["da"]),
        ],
        &[],
    );
    vec![reverse, gradient]
}

fn imported(m: &ModelProto) -> String {
    let imported = import(m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    verify::verify(&imported.graph).unwrap_or_else(|e| panic!("{e:?}\n{}", imported.graph));
    imported.graph.to_string()
}

#[test]
fn calls_with_other_attributes_have_gradients_of_their_own() {
    let nodes = vec![
        call("Reverse", &["x"], &["h"]).with(&[float("factor", 0.25)]),
        call("Reverse", &["h"], &["y"]),
    ];
    let mut m = model(vec![input("x", 1, &X)], vec![], nodes, &["y"]);
    m.functions = reversal();
    expect![[r#"
        graph @t world=1 {
          %x: f32[2, 3] = input {name = "x", ty = {"dtype":"f32","shape":[2,3]}}
          %n_h_0_d0: f32[2, 3] = cotangent %x {call = 0, result = 0} loc("n_h", "", "")
          %n_h_1_f: f32[] = constant {splat = 0.25, ty = {"dtype":"f32","shape":[]}} loc("n_h/n_f", "", "")
          %n_h_1_scaled: f32[2, 3] = mul %n_h_0_d0, %n_h_1_f loc("n_h/n_scaled", "", "")
          %n_h_0_g0: f32[2, 3] = neg %n_h_1_scaled loc("n_h/n_da", "", "")
          %h: f32[2, 3] = custom_gradient %x, %x, %n_h_0_g0 {call = 0, function = "mine::Reverse", results = 1} loc("n_h", "", "")
          %n_y_2_d0: f32[2, 3] = cotangent %h {call = 1, result = 0} loc("n_y", "", "")
          %n_y_3_f: f32[] = constant {splat = 1.0, ty = {"dtype":"f32","shape":[]}} loc("n_y/n_f", "", "")
          %n_y_3_scaled: f32[2, 3] = mul %n_y_2_d0, %n_y_3_f loc("n_y/n_scaled", "", "")
          %n_y_2_g0: f32[2, 3] = neg %n_y_3_scaled loc("n_y/n_da", "", "")
          %y: f32[2, 3] = custom_gradient %h, %h, %n_y_2_g0 {call = 1, function = "mine::Reverse", results = 1} loc("n_y", "", "")
          return %y as "y"
        }
    "#]].assert_eq(&imported(&m));
}

#[test]
fn a_precision_encloses_a_function_and_its_gradient() {
    let mut functions = reversal();
    let entry = StringStringEntryProto { key: "frit.precision".into(), value: "f32".into() };
    functions[0].metadata_props.push(entry);
    let mut m =
        model(vec![input("x", 1, &X)], vec![], vec![call("Reverse", &["x"], &["y"])], &["y"]);
    m.functions = functions;
    expect![[r#"
        graph @t world=1 {
          %x: f32[2, 3] = input {name = "x", ty = {"dtype":"f32","shape":[2,3]}}
          %n_y_0_in0: f32[2, 3] = enter_precision %x {call = 0, dtype = "f32"} loc("n_y", "", "")
          %n_y_0_d0: f32[2, 3] = cotangent %n_y_0_in0 {call = 0, result = 0} loc("n_y", "", "")
          %n_y_1_f: f32[] = constant {splat = 1.0, ty = {"dtype":"f32","shape":[]}} loc("n_y/n_f", "", "")
          %n_y_1_scaled: f32[2, 3] = mul %n_y_0_d0, %n_y_1_f loc("n_y/n_scaled", "", "")
          %n_y_0_g0: f32[2, 3] = neg %n_y_1_scaled loc("n_y/n_da", "", "")
          %n_y_0_y0: f32[2, 3] = custom_gradient %n_y_0_in0, %x, %n_y_0_g0 {call = 0, function = "mine::Reverse", results = 1} loc("n_y", "", "")
          %y: f32[2, 3] = leave_precision %n_y_0_y0 {call = 0} loc("n_y", "", "")
          return %y as "y"
        }
    "#]].assert_eq(&imported(&m));
    let plain = function(
        "Plain",
        &["a"],
        &["r"],
        vec![node("Exp", &["a"], &["r"])],
        &[("frit.precision", "bf16")],
    );
    let mut m = model(vec![input("x", 1, &X)], vec![], vec![call("Plain", &["x"], &["y"])], &["y"]);
    m.functions = vec![plain];
    expect![[r#"
        graph @t world=1 {
          %x: f32[2, 3] = input {name = "x", ty = {"dtype":"f32","shape":[2,3]}}
          %n_y_0_in0: f32[2, 3] = enter_precision %x {call = 0, dtype = "bf16"} loc("n_y", "", "")
          %n_y_0_out0: f32[2, 3] = exp %n_y_0_in0 loc("n_y/n_r", "", "")
          %y: f32[2, 3] = leave_precision %n_y_0_out0 {call = 0} loc("n_y", "", "")
          return %y as "y"
        }
    "#]]
    .assert_eq(&imported(&m));
}

#[test]
fn integers_have_no_gradient_and_results_may_be_left_out() {
    // Rows of a table and, beside them, the indices again.
    let rows = |stated: &[(&str, &str)]| {
        function(
            "Rows",
            &["ids", "table", "unused"],
            &["rows", "again"],
            vec![
                node("Gather", &["table", "ids"], &["rows"]),
                node("Identity", &["ids"], &["again"]),
            ],
            stated,
        )
    };
    let gradient = function(
        "RowsGrad",
        &["ids", "table", "unused", "rows", "again", "drows", "dagain"],
        &["dtable", ""],
        vec![
            node("Sub", &["table", "table"], &["zeros"]),
            node("Shape", &["drows"], &["shape"]),
            node("Expand", &["at", "shape"], &["places"]),
            node("Unsqueeze", &["ids", "one"], &["at"]),
            node("Constant", &[], &["one"]).with(&[list("value_ints", &[1])]),
            node("ScatterElements", &["zeros", "places", "drows"], &["dtable"])
                .with(&[int("axis", 0), text("reduction", "add")]),
        ],
        &[],
    );
    let ids = NodeProto { ..node("Cast", &["x"], &["ids"]) }.with(&[int("to", 7)]);
    let nodes = vec![ids, call("Rows", &["ids", "t", ""], &["y", "i"])];
    let table = floats("t", &[4, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    let mut m = model(vec![input("x", 1, &[Dim::N(3)])], vec![table], nodes, &["y", "i"]);
    m.functions = vec![rows(&[("frit.gradient", "RowsGrad")]), gradient];
    let imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    verify::verify(&imported.graph).unwrap_or_else(|e| panic!("{e:?}"));
    let custom = imported.graph.nodes().find(|(_, n)| matches!(n.op, Op::CustomGradient(_)));
    let (_, custom) = custom.expect("a gradient of its own");
    // One result of floats, one input with a gradient.
    assert_eq!(custom.inputs.len(), 3);
    let x = Tensor::floats(DType::F32, [3], vec![3.0, 0.0, 3.0]);
    assert_eq!(run(&imported, &[("x", x)])[0].to_f64s(), [6.0, 7.0, 0.0, 1.0, 6.0, 7.0]);
}

#[test]
fn functions_inside_of_functions_keep_the_outermost_gradient() {
    let mut functions = reversal();
    functions.push(function(
        "Outer",
        &["a"],
        &["r"],
        vec![call("Reverse", &["a"], &["b"]), node("Exp", &["b"], &["r"])],
        &[("frit.gradient", "OuterGrad")],
    ));
    // A gradient function may call functions too, its own among them.
    functions.push(function(
        "OuterGrad",
        &["a", "r", "dr"],
        &["da"],
        vec![call("Outer", &["a"], &["again"]), node("Mul", &["dr", "again"], &["da"])],
        &[],
    ));
    let mut m = model(vec![input("x", 1, &X)], vec![], vec![call("Outer", &["x"], &["y"])], &["y"]);
    m.functions = functions.clone();
    let count = |m: &ModelProto| imported(m).matches("= custom_gradient").count();
    assert_eq!(count(&m), 1);
    // Without a gradient of its own it has that of what it calls.
    m.functions[2].metadata_props.clear();
    assert_eq!(count(&m), 1);
    assert!(imported(&m).contains("function = \"mine::Reverse\""), "{}", imported(&m));
}

#[test]
fn a_call_in_the_body_of_a_loop_is_another_one_in_every_iteration() {
    let body = super::control::graph(
        &["i", "go", "a"],
        vec![call("Reverse", &["a"], &["r"]), node("Identity", &["go"], &["again"])],
        &["again", "r"],
    );
    let repeat =
        node("Loop", &["n", "", "x"], &["y"]).with(&[super::control::inside("body", body)]);
    let stored = vec![super::control::scalar("n", 3)];
    let mut m = model(vec![input("x", 1, &X)], stored, vec![repeat], &["y"]);
    m.functions = reversal();
    let text = imported(&m);
    for number in 0..3 {
        assert!(
            text.contains(&format!("cotangent {{call = {number}"))
                || text.contains(&format!("{{call = {number}, function")),
            "{text}"
        );
    }
    assert_eq!(text.matches("= custom_gradient").count(), 3, "{text}");
}

#[test]
fn functions_of_equal_names_are_told_apart_by_their_overload() {
    let one = |op: &str, overload: &str| FunctionProto {
        overload: overload.into(),
        ..function("F", &["a"], &["r"], vec![node(op, &["a"], &["r"])], &[])
    };
    let nodes = vec![
        NodeProto { overload: "b".into(), ..call("F", &["x"], &["h"]) },
        call("F", &["h"], &["y"]),
    ];
    let mut m = model(vec![input("x", 1, &X)], vec![], nodes, &["y"]);
    m.functions = vec![one("Neg", ""), one("Abs", "b")];
    let text = imported(&m);
    assert!(text.find("= abs").expect("both") < text.find("= neg").expect("both"), "{text}");
}

#[test]
fn gradient_functions_that_do_not_fit_are_refused() {
    let with = |edit: &dyn Fn(&mut Vec<FunctionProto>)| {
        let node = call("Reverse", &["x"], &["y"]);
        let mut m = model(vec![input("x", 1, &X)], vec![], vec![node], &["y"]);
        m.functions = reversal();
        edit(&mut m.functions);
        refused(&m, &ImportOptions::default())
    };
    let stated = |functions: &mut Vec<FunctionProto>, key: &str, value: &str| {
        let entry = StringStringEntryProto { key: key.into(), value: value.into() };
        functions[0].metadata_props = vec![entry];
    };
    let shape = vec![node("ReduceSum", &["dr"], &["da"])];
    let integers = vec![node("Cast", &["dr"], &["da"]).with(&[int("to", 7)])];
    type Edit<'a> = &'a dyn Fn(&mut Vec<FunctionProto>);
    let cases: [(Edit<'_>, &str, &[&str]); 8] = [
        (
            &|f| stated(f, "frit.gradient", "mine::Reverse_d"),
            "E062",
            &["`mine::Reverse` names the gradient `mine::Reverse_d`", "mine::Reversed"],
        ),
        (
            &|f| stated(f, "frit.gradient", "mine::Reverse"),
            "E062",
            &["`mine::Reverse` has 1 inputs", "it is given 3"],
        ),
        (&|f| drop(f[1].input.pop()), "E062", &["has 2 inputs", "1 inputs, 1 results"]),
        (
            &|f| f[1].output.push("scaled".into()),
            "E062",
            &["gives 2 gradients, but `mine::Reverse` has 1 inputs of floats"],
        ),
        (
            &|f| f[1].node = shape.clone(),
            "E062",
            &["result 0 of `mine::Reversed` is f32[1, 1]", "f32[2, 3]", "n_y"],
        ),
        (&|f| f[1].node = integers.clone(), "E062", &["is i64[2, 3]"]),
        (
            &|f| stated(f, "frit.precision", "f64"),
            "E065",
            &["`mine::Reverse`", "`f64`", "write f32"],
        ),
        (
            &|f| f[0].node[0].domain = "frit.function".into(),
            "E031",
            &["frit.function::Identity", "Frit's own"],
        ),
    ];
    for (edit, code, parts) in cases {
        let text = with(edit);
        for part in [code].iter().chain(parts) {
            assert!(text.contains(part), "`{part}` is not in {text}");
        }
    }
}
