//! Gradients of compositions whose own rules give NaN where PyTorch's operators have a gradient, and those at bounds.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::*;
use frit_ir::interpret::{self, Options};
use frit_ir::ops::{Op, Reduce, ReduceFn, UnaryFn};
use frit_ir::{DType, Origin, OutputKind, Region, Tensor};
use frit_passes::differentiate::Differentiate;
use frit_passes::raise::Raise;
use frit_passes::{Pass, PassContext};

/// The elements of `y`, and the gradient of their sum with respect to the parameter `w`.
fn gradient(w: &[f32], initializers: Vec<TensorProto>, nodes: Vec<NodeProto>) -> [Vec<f64>; 2] {
    let weights = [vec![floats("w", &[w.len() as i64], w)], initializers].concat();
    let m = model(vec![input("x", 1, &[Dim::N(1)])], weights, nodes, &["y"]);
    let mut imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let x = Tensor::floats(DType::F32, [1], vec![0.0]);
    let y = run(&imported, &[("x", x.clone())])[0].to_f64s();
    let graph = &mut imported.graph;
    let value = graph.outputs[0].value;
    let axes = (0..graph.ty(value).shape.rank()).collect();
    let sum = Op::Reduce(Reduce { f: ReduceFn::Sum, axes, keep_dims: false });
    let loss = graph.add(sum, &[value], Origin::none(), Region::Forward);
    let loss = loss.unwrap_or_else(|e| panic!("{e}"))[0];
    graph.add_output("loss", loss, OutputKind::LossSum);
    Differentiate { accumulation: 1, capacity: 1.0 }
        .run(graph, &mut PassContext::default())
        .unwrap_or_else(|e| panic!("{e}"));
    let w = Tensor::floats(DType::F32, [w.len()], w.iter().map(|w| f64::from(*w)).collect());
    let feeds = [("x".to_string(), x), ("w".to_string(), w)].into();
    let results = interpret::run(graph, &feeds, Options::EXACT).unwrap_or_else(|e| panic!("{e}"));
    let of_w = results.iter().rfind(|(name, _)| name == "w").expect("a gradient");
    [y, of_w.1.to_f64s()]
}

fn number(name: &str, value: f32) -> TensorProto {
    floats(name, &[], &[value])
}

#[track_caller]
fn expect(found: Vec<f64>, wanted: &[f64]) {
    let is_near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-5;
    let is_same = found.len() == wanted.len() && found.iter().zip(wanted).all(is_near);
    assert!(is_same, "{found:?} is not {wanted:?}");
}

fn with_input(y: &str) -> Vec<NodeProto> {
    vec![node("Add", &[y, "x"], &["y"])]
}

#[test]
fn a_bounded_logarithm_of_zero_has_no_gradient() {
    for bounded in ["Max", "Clip"] {
        let nodes = vec![node("Log", &["w"], &["l"]), node(bounded, &["l", "c"], &["b"])];
        let nodes = [nodes, with_input("b")].concat();
        let [y, dw] = gradient(&[0.0, 1e-39, 0.5], vec![number("c", -100.0)], nodes);
        expect(y, &[-100.0, f64::from(1e-39_f32).ln(), 0.5_f64.ln()]);
        expect(dw, &[0.0, 0.0, 2.0]);
    }
}

/// Each is one function after `raise`, without an infinite slope.
#[test]
fn bounded_logarithms_of_probabilities_are_recognized() {
    let complements = [
        vec![node("Neg", &["p"], &["m"]), node("Add", &["m", "one"], &["r"])],
        vec![node("Sub", &["one", "p"], &["r"])],
        vec![node("Identity", &["p"], &["r"])],
    ];
    for rest in complements {
        let ends = vec![node("Log", &["r"], &["l"]), node("Max", &["l", "c"], &["b"])];
        let nodes = [vec![node("Sigmoid", &["w"], &["p"])], rest, ends, with_input("b")].concat();
        let constants = vec![number("c", -100.0), number("one", 1.0)];
        let weights = [vec![floats("w", &[2], &[7.0, 90.0])], constants].concat();
        let m = model(vec![input("x", 1, &[Dim::N(1)])], weights, nodes, &["y"]);
        let mut imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        let mut context = PassContext::default();
        Raise::default().run(&mut imported.graph, &mut context).unwrap_or_else(|e| panic!("{e}"));
        let has = |f: UnaryFn| {
            let mut nodes = imported.graph.nodes();
            nodes.any(|(_, n)| matches!(n.op, Op::Unary(of) if of == f))
        };
        assert!(has(UnaryFn::Softplus) && !has(UnaryFn::Log) && !has(UnaryFn::Detach));
    }
}

#[test]
fn the_norm_of_zeros_has_no_gradient() {
    for (p, w, slope) in [(3.0, 2.0, 1.0), (1.5, 2.0, 1.0), (0.5, 2.0, 1.0)] {
        for w in [[0.0, 0.0], [0.0, w]] {
            let nodes = vec![
                node("Abs", &["w"], &["a"]),
                node("Pow", &["a", "p"], &["q"]),
                node("ReduceSum", &["q", "axes"], &["s"]).with(&[int("keepdims", 1)]),
                node("Pow", &["s", "r"], &["n"]),
            ];
            let constants = vec![number("p", p), number("r", 1.0 / p), ints("axes", &[0])];
            let [y, dw] = gradient(&w, constants, [nodes, with_input("n")].concat());
            expect(y, &[f64::from(w[1])]);
            expect(dw, &[0.0, if w[1] == 0.0 { 0.0 } else { slope }]);
        }
    }
}

#[test]
fn sinc_is_flat_at_zero() {
    let nodes = vec![
        node("Mul", &["w", "pi"], &["a"]),
        node("Equal", &["w", "zero"], &["z"]),
        node("Sin", &["a"], &["s"]),
        node("Div", &["s", "a"], &["q"]),
        node("Where", &["z", "one", "q"], &["c"]),
    ];
    let constants =
        vec![number("pi", std::f32::consts::PI), number("zero", 0.0), number("one", 1.0)];
    let [y, dw] = gradient(&[0.0, 0.5], constants, [nodes, with_input("c")].concat());
    let top = std::f64::consts::FRAC_2_PI;
    expect(y, &[1.0, top]);
    // (cos πw − sinc w) / w
    expect(dw, &[0.0, -top / 0.5]);
}

#[test]
fn a_clamp_has_no_gradient_at_its_bounds() {
    let clamp = |nodes: Vec<NodeProto>| {
        let constants = vec![number("low", 0.0), number("high", 1.0)];
        gradient(&[-1.0, 0.0, 0.5, 1.0, 2.0], constants, [nodes, with_input("c")].concat())[1]
            .clone()
    };
    expect(clamp(vec![node("Clip", &["w", "low", "high"], &["c"])]), &[0.0, 0.0, 1.0, 0.0, 0.0]);
    let pair = |call: Option<&str>, of: &str| {
        let mut nodes =
            vec![node("Max", &["w", "low"], &["m"]), node("Min", &["m", "high"], &["c"])];
        for node in &mut nodes {
            let value = call.map(|call| {
                format!(
                    "%c : [num_users=1] = call_function[target=torch.ops.aten.{call}](args = (%w, \
                     %{of}, %{of}_1), kwargs = {{}})"
                )
            });
            let key = "pkg.torch.onnx.fx_node".to_string();
            node.metadata_props.extend(value.map(|value| StringStringEntryProto { key, value }));
        }
        nodes
    };
    let of_numbers = clamp(pair(Some("clamp.Tensor"), "scalar_tensor_default"));
    expect(of_numbers, &[0.0, 0.0, 1.0, 0.0, 0.0]);
    let half = [0.0, 0.5, 1.0, 0.5, 0.0];
    expect(clamp(pair(Some("clamp.Tensor"), "lifted_tensor")), &half);
    expect(clamp(pair(None, "")), &half);
}
