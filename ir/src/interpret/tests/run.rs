//! Whole graphs, on one rank and on several.

use super::super::{EvalError, Options, leaf_key, run, run_ranks};
use super::f32s;
use crate::{DType, Graph, Op, Tensor, TensorData, TensorType, text};
use std::collections::HashMap;

fn graph(text: &str) -> Graph {
    text::parse(text).expect("a graph")
}

fn feeds(list: &[(&str, Tensor)]) -> HashMap<String, Tensor> {
    list.iter().map(|(name, t)| (name.to_string(), t.clone())).collect()
}

const SMALL: &str = r#"
graph @small world=1 {
  %x: f32[2] = input {name = "x", ty = {"dtype": "f32", "shape": [2]}}
  %w: f32[2] = param {init = {"constant": 3.0}, kind = "trainable", name = "w", reason = "", ty = {"dtype": "f32", "shape": [2]}}
  %m: f32[2] = state {init = 0.5, name = "adam_m", of = "w", ty = {"dtype": "f32", "shape": [2]}}
  %lr: f32[] = hyper {default = 0.5, name = "optimizer.lr"}
  %a: f32[2] = mul %x, %w
  %b: f32[2] = add %a, %m
  %c: f32[2] = mul %b, %lr
  return %c as "y"
  return %b as "w" carry %w
}
"#;

#[test]
fn leaves_take_what_is_fed_or_what_they_start_with() {
    let graph = graph(SMALL);
    let x = f32s(&[2], &[1.0, 2.0]);
    let outputs = run(&graph, &feeds(&[("x", x.clone())]), Options::default()).expect("runs");
    assert_eq!(outputs[0], ("y".into(), f32s(&[2], &[1.75, 3.25])));
    assert_eq!(outputs[1], ("w".into(), f32s(&[2], &[3.5, 6.5])));
    let fed = feeds(&[
        ("x", x),
        ("w", f32s(&[2], &[1.0, 1.0])),
        ("adam_m.w", f32s(&[2], &[0.0, 0.0])),
        ("optimizer.lr", Tensor::scalar(2.0)),
    ]);
    let outputs = run(&graph, &fed, Options::default()).expect("runs");
    assert_eq!(outputs[0].1, f32s(&[2], &[2.0, 4.0]));
    let keys: Vec<String> = graph.nodes().filter_map(|(_, n)| leaf_key(&n.op)).collect();
    assert_eq!(keys, ["x", "w", "adam_m.w", "optimizer.lr"]);
}

#[test]
fn missing_and_wrong_feeds_are_named() {
    let graph = graph(SMALL);
    let missing = run(&graph, &feeds(&[]), Options::default()).expect_err("x is missing");
    assert_eq!(missing.to_string(), "no value for `x`");
    let wrong = run(&graph, &feeds(&[("x", f32s(&[1], &[0.0]))]), Options::default());
    let wrong = wrong.expect_err("x has another shape");
    assert_eq!(wrong.to_string(), "`x` is f32[2], but was given f32[1]");
}

#[test]
fn a_failing_node_is_named() {
    let graph = graph(
        r#"graph @g world=1 {
  %x: i64[] = input {name = "x", ty = {"dtype": "i64", "shape": []}}
  %y: i64[] = div %x, %x loc("/div", "net", "")
  return %y as "y"
}"#,
    );
    let zero = Tensor::ints(DType::I64, vec![], vec![0]);
    let error = run(&graph, &feeds(&[("x", zero)]), Options::default()).expect_err("0/0");
    assert!(matches!(&error, EvalError::At { .. }));
    let expected = "div at node \"/div\" in scope `net`: integer division by zero";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn an_exact_run_rounds_nothing() {
    let graph = graph(
        r#"graph @g world=1 {
  %x: f32[] = input {name = "x", ty = {"dtype": "f32", "shape": []}}
  %h: bf16[] = cast %x {to = "bf16"}
  %y: bf16[] = mul %h, %h
  return %y as "y"
}"#,
    );
    let x = 1.0 + 1e-13;
    let fed = Tensor::exact(TensorType::scalar(DType::F32), TensorData::Float(vec![x]));
    let exact = run(&graph, &feeds(&[("x", fed.clone())]), Options::EXACT).expect("runs");
    assert_eq!(exact[0].1.to_f64s(), [x * x]);
    let rounded = run(&graph, &feeds(&[("x", fed)]), Options::default()).expect("runs");
    assert_eq!(rounded[0].1.to_f64s(), [1.0]);
}

const RANKS: &str = r#"
graph @ranks world=3 {
  %x: f32[2] = input {name = "x", ty = {"dtype": "f32", "shape": [2]}}
  %w: f32[2] = param {init = "weights", kind = "trainable", name = "w", reason = "", sharded = true, ty = {"dtype": "f32", "shape": [2]}, unit = 0}
  %full: f32[2] = all_gather %w {unit = 0}
  %y: f32[2] = add %x, %full
  %mean: f32[2] = reduce_scatter %y {unit = 0}
  %sum: f32[2] = all_reduce %x {reduce = "sum"}
  %half: f32[2] = all_reduce %x {reduce = "mean"}
  return %mean as "mean"
  return %sum as "sum"
  return %half as "half"
}
"#;

#[test]
fn collectives_combine_ranks() {
    let graph = graph(RANKS);
    let w = f32s(&[2], &[10.0, 20.0]);
    let fed: Vec<_> =
        [1.0, 2.0, 6.0].map(|x| feeds(&[("x", f32s(&[2], &[x, -x])), ("w", w.clone())])).into();
    let ranks = run_ranks(&graph, &fed, Options::default()).expect("runs");
    assert_eq!(ranks.len(), 3);
    for outputs in &ranks {
        assert_eq!(outputs[0], ("mean".into(), f32s(&[2], &[13.0, 17.0])));
        assert_eq!(outputs[1], ("sum".into(), f32s(&[2], &[9.0, -9.0])));
        assert_eq!(outputs[2], ("half".into(), f32s(&[2], &[3.0, -3.0])));
    }
    let one = run(&graph, &fed[0], Options::default()).expect("runs");
    assert_eq!(one[0].1, f32s(&[2], &[11.0, 19.0]));
    assert_eq!(one[1].1, f32s(&[2], &[1.0, -1.0]));
}

#[test]
fn a_fusion_runs_its_body() {
    let graph = graph(
        r#"graph @g world=1 {
  %x: f32[2] = input {name = "x", ty = {"dtype": "f32", "shape": [2]}}
  %y: f32[2], %z: bool[2] = fusion %x, %x {kind = "pointwise"} body graph @b world=1 {
    %p: f32[2] = input {name = "p", ty = {"dtype": "f32", "shape": [2]}}
    %q: f32[2] = input {name = "q", ty = {"dtype": "f32", "shape": [2]}}
    %one: f32[] = constant {ty = {"dtype": "f32", "shape": []}, splat = 1.0}
    %s: f32[2] = add %p, %one
    %t: f32[2] = mul %s, %q
    %u: bool[2] = gt %t, %q
    return %t as "t"
    return %u as "u"
  }
  return %y as "y"
  return %z as "z"
}"#,
    );
    let fed = feeds(&[("x", f32s(&[2], &[2.0, -3.0]))]);
    let outputs = run(&graph, &fed, Options::default()).expect("runs");
    assert_eq!(outputs[0].1, f32s(&[2], &[6.0, 6.0]));
    assert_eq!(outputs[1].1.to_i64s(), [1, 1]);
    let leaf = super::try_eval(Op::UpdateStep, &[]).expect_err("operands are missing");
    assert!(matches!(leaf, EvalError::Operands(_)));
}
