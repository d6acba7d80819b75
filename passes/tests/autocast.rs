//! Warnings of autocast.

use frit_ir::{DType, text};
use frit_passes::autocast::{Autocast, Override};
use frit_passes::{Pass, PassContext};

const GRAPH: &str = r#"graph @g world=1 {
  %x: f32[3, 4] = input {name = "x", ty = {"dtype": "f32", "shape": [3, 4]}}
  %w: f32[4, 4] = input {name = "w", ty = {"dtype": "f32", "shape": [4, 4]}}
  %eps: f32[] = constant {ty = {"dtype": "f32", "shape": []}, splat = 1e-12}
  %a: f32[3, 4] = matmul %x, %w
  %b: f32[3, 4] = add %a, %eps
  %c: f32[3, 4] = relu %b
  %d: f32[3, 4] = exp %c loc("exp", "head", "")
  return %c as "c"
  return %d as "y"
}"#;

fn warnings(compute: DType, exception: Option<Override>) -> Vec<String> {
    let mut graph = text::parse(GRAPH).expect("parses");
    let mut context = PassContext::default();
    let overrides = exception.into_iter().collect();
    let pass = Autocast { overrides, ..Autocast::new(compute) };
    pass.run(&mut graph, &mut context).expect("runs");
    context.warnings.iter().map(|w| w.code.clone()).collect()
}

fn exception(scope: Option<&str>, op: Option<&str>, dtype: DType) -> Option<Override> {
    let (scope, op) = (scope.map(String::from), op.map(String::from));
    Some(Override { scope, op, dtype, output: None })
}

#[test]
fn a_constant_that_vanishes() {
    assert_eq!(warnings(DType::F16, None), ["L18"]);
    assert!(warnings(DType::BF16, None).is_empty());
    let add = exception(None, Some("add"), DType::F32);
    assert!(warnings(DType::F16, add).is_empty());
}

#[test]
fn positions_that_become_equal() {
    let positions = |last: usize| {
        let values: Vec<String> = (0..=last).map(|i| i.to_string()).collect();
        let n = last + 1;
        format!(
            "graph @g world=1 {{
  %x: f32[{n}, 4] = input {{name = \"x\", ty = {{\"dtype\": \"f32\", \"shape\": [{n}, 4]}}}}
  %p: f32[4, {n}] = constant {{ty = {{\"dtype\": \"f32\", \"shape\": [4, {n}]}}, values = [{}]}}
  %y: f32[{n}, {n}] = matmul %x, %p
  return %y as \"y\"
}}",
            [values.join(", "), values.join(", "), values.join(", "), values.join(", ")].join(", ")
        )
    };
    let codes = |last: usize, compute: DType| {
        let mut graph = text::parse(&positions(last)).expect("parses");
        let mut context = PassContext::default();
        Autocast::new(compute).run(&mut graph, &mut context).expect("runs");
        context.warnings.iter().map(|w| w.code.clone()).collect::<Vec<_>>()
    };
    assert_eq!(codes(257, DType::BF16), ["L21"]);
    assert!(codes(256, DType::BF16).is_empty());
    assert!(codes(257, DType::F16).is_empty());
    assert!(codes(257, DType::F32).is_empty());
}

#[test]
fn an_unsafe_operation_forced_to_low_precision() {
    assert_eq!(warnings(DType::BF16, exception(None, Some("exp"), DType::BF16)), ["L17"]);
    assert_eq!(warnings(DType::BF16, exception(Some("head"), None, DType::BF16)), ["L17"]);
}

#[test]
fn an_override_that_applies_to_nothing() {
    assert_eq!(warnings(DType::BF16, exception(Some("tail.**"), None, DType::F32)), ["W221"]);
}

#[test]
fn only_f32_f16_and_bf16_compute() {
    let mut graph = text::parse(GRAPH).expect("parses");
    let pass = Autocast::new(DType::F64);
    let error = pass.run(&mut graph, &mut PassContext::default()).expect_err("refused");
    assert_eq!(error.code, "E221");
}
