//! Bounds hold for every value the interpreter computes, and are as close as they are said to be.

use super::*;
use frit_ir::interpret::{Options, run};
use frit_ir::{DType, Tensor, text};
use std::collections::HashMap;

/// Numbers in [-1, 1), the same ones every time.
fn numbers(n: usize, seed: u64) -> Vec<f64> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| 2.0 * random.f64() - 1.0).collect()
}

/// The range of each output of a graph whose inputs are within [-2, 2] and whose parameters are drawn,
/// after checking that it holds.
fn ranges(body: &str) -> Vec<Range> {
    let graph = text::parse(&format!("graph @g world=1 {{\n{body}\n}}")).expect("parses");
    let mut feeds = HashMap::new();
    let mut spreads = HashMap::new();
    for (i, (_, node)) in graph.nodes().enumerate() {
        let (name, ty) = match &node.op {
            Op::Input(input) => (&input.name, &input.ty),
            Op::Param(param) => (&param.name, &param.ty),
            _ => continue,
        };
        let factor = if matches!(node.op, Op::Input(_)) { 2.0 } else { 0.5 };
        let values: Vec<f64> =
            numbers(ty.shape.numel(), i as u64).iter().map(|x| factor * x).collect();
        let narrow: Vec<f32> = values.iter().map(|x| *x as f32).collect();
        spreads.insert(name.clone(), Spread::of(&narrow, &ty.shape));
        feeds.insert(name.clone(), Tensor::floats(DType::F32, ty.shape.clone(), values));
    }
    let leaves =
        Leaves { input: &|_| Some((-2.0, 2.0)), param: &|p: &Param| spreads.get(&p.name).copied() };
    let ranges = Ranges::of(&graph, &leaves);
    let results = run(&graph, &feeds, Options::EXACT).expect("runs");
    let mut found = Vec::new();
    for (output, (name, tensor)) in graph.outputs.iter().zip(results) {
        let range = ranges.get(output.value);
        let n = tensor.shape().dims().last().copied().unwrap_or(1);
        for row in tensor.to_f64s().chunks(n) {
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!(norm <= range.norm * (1.0 + 1e-6), "{name}: norm {norm} beyond {range:?}");
            for x in row {
                let slack = 1e-6 * (1.0 + x.abs());
                assert!(
                    *x >= range.lo - slack && *x <= range.hi + slack,
                    "{name}: {x} not in {range:?}"
                );
            }
        }
        found.push(range);
    }
    found
}

const INPUT: &str = r#"%x: f32[4, 16] = input {name = "x", ty = {"dtype": "f32", "shape": [4, 16]}}
%w: f32[16, 8] = param {name = "w", ty = {"dtype": "f32", "shape": [16, 8]}, kind = "trainable", reason = "", init = "weights"}
%s: f32[16] = param {name = "s", ty = {"dtype": "f32", "shape": [16]}, kind = "trainable", reason = "", init = "weights"}
%b: f32[16] = param {name = "b", ty = {"dtype": "f32", "shape": [16]}, kind = "trainable", reason = "", init = "weights"}"#;

#[test]
fn elementwise_functions_are_bounded() {
    let names = [
        "neg",
        "abs",
        "exp",
        "expm1",
        "floor",
        "ceil",
        "round",
        "sin",
        "cos",
        "tanh",
        "erf",
        "sigmoid",
        "softplus",
        "relu",
        "silu",
        "gelu",
        "gelu_tanh",
        "sign",
        "sqrt",
    ];
    let lines: String = names.iter().map(|f| format!("%{f}0: f32[4, 16] = {f} %x\n")).collect();
    // The square root of what is negative is not a number, which no range holds.
    let lines = lines.replace("sqrt %x", "sqrt %abs0");
    let outputs: String = names.iter().map(|f| format!("return %{f}0 as \"{f}\"\n")).collect();
    for range in ranges(&format!("{INPUT}\n{lines}{outputs}")) {
        assert!(range.max_abs() <= 2f64.exp() + 1e-9, "{range:?}");
    }
}

#[test]
fn limits_in_either_order() {
    let all = ranges(&format!(
        "{INPUT}\n%y: f32[4, 16] = clip %x {{max = 1, min = -0.5}}\n\
         %z: f32[4, 16] = clip %x {{max = 1, min = 1.5}}\nreturn %y as \"y\"\nreturn %z as \"z\""
    ));
    assert_eq!((all[0].lo, all[0].hi), (-0.5, 1.0));
    assert_eq!((all[1].lo, all[1].hi), (1.0, 1.0));
}

#[test]
fn two_operands() {
    let functions = ["add", "sub", "mul", "max", "min"];
    let mut text = format!("{INPUT}\n%y: f32[4, 16] = tanh %x\n");
    for f in functions {
        text += &format!("%{f}0: f32[4, 16] = {f} %x, %y\n%{f}1: f32[4, 16] = {f} %x, %s\n");
    }
    text += "%q: f32[4, 16] = mul %x, %x\n";
    text += "%e: f32[4, 16] = exp %x\n%d: f32[4, 16] = div %x, %e\nreturn %d as \"d\"\nreturn %q as \"q\"\n";
    for f in functions {
        text += &format!("return %{f}0 as \"{f}0\"\nreturn %{f}1 as \"{f}1\"\n");
    }
    let all = ranges(&text);
    assert_eq!((all[1].lo, all[1].hi), (0.0, 4.0), "a square");
}

#[test]
fn norms_bound_gemms_more_closely_than_intervals() {
    let text = format!(
        "{INPUT}\n%n: f32[4, 16], %m: f32[4], %r: f32[4] = layer_norm %x, %s, %b {{axis = 1, eps = 1e-5}}\n\
         %y: f32[4, 8] = matmul %n, %w\n%z: f32[4, 8] = matmul %x, %w\n%p: f32[4, 8] = softmax %y {{axis = 1}}\n\
         return %n as \"n\"\nreturn %m as \"m\"\nreturn %r as \"r\"\nreturn %y as \"y\"\nreturn %z as \"z\"\n\
         return %p as \"p\""
    );
    let all = ranges(&text);
    let (normalized, matmul) = (all[0], all[3]);
    // √16 · 0.5 and a bias; the interval alone would allow √16 times as much after the matmul.
    assert!(normalized.max_abs() <= 2.5);
    let column = numbers(128, 1).iter().map(|x| 0.5 * x.abs()).sum::<f64>() / 8.0;
    assert!(matmul.max_abs() < normalized.max_abs() * column * 1.5, "{matmul:?} {column}");
    assert_eq!(all[5].norm, 1.0);
}

#[test]
fn layouts_keep_what_they_can() {
    let text = format!(
        "{INPUT}\n%t: f32[16, 4] = transpose %x {{perm = [1, 0]}}\n%h: f32[4, 4, 4] = reshape %x {{shape = [4, 4, 4]}}\n\
         %j: f32[2, 32] = reshape %x {{shape = [2, 32]}}\n%c: f32[4, 32] = concat %x, %x {{axis = 1}}\n\
         %u: f32[4] = reduce %x {{f = \"sum\", axes = [1], keep_dims = false}}\n\
         return %t as \"t\"\nreturn %h as \"h\"\nreturn %j as \"j\"\nreturn %c as \"c\"\nreturn %u as \"u\""
    );
    let all = ranges(&text);
    assert_eq!(all[4].max_abs(), 32.0);
}

#[test]
fn nothing_is_concluded_from_nothing() {
    let graph = text::parse(&format!(
        "graph @g world=1 {{\n{INPUT}\n%y: f32[4, 16] = add %x, %s\nreturn %y as \"y\"\n}}"
    ));
    let graph = graph.expect("parses");
    let ranges = Ranges::of(&graph, &Leaves { input: &|_| None, param: &|_| None });
    assert_eq!(ranges.get(graph.outputs[0].value), Range::UNKNOWN);
}

#[test]
fn drawn_values_stay_within_their_spread() {
    let shape = Shape::from([64, 32].as_slice());
    let uniform: Vec<f32> = numbers(64 * 32, 9).iter().map(|x| 0.3 * *x as f32).collect();
    let drawn = Spread::drawn(&Init::Uniform { bound: 0.3 }, &shape).expect("drawn");
    let found = Spread::of(&uniform, &shape);
    for (a, b) in
        [(found.last, drawn.last), (found.before, drawn.before), (found.inner, drawn.inner)]
    {
        assert!(a.sum <= b.sum && a.norm <= b.norm, "{a:?} {b:?}");
        assert!(b.sum <= 3.0 * a.sum && b.norm <= 3.0 * a.norm, "{a:?} {b:?}");
    }
    assert!(found.hi <= drawn.hi && found.matrix <= drawn.matrix);
    assert_eq!(Spread::drawn(&Init::Weights, &shape), None);
}
