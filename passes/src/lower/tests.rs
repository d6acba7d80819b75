//! What lowering reads from a graph beside what its outputs depend on.

use super::flat::only_cast;
use super::in_place::is_read_once;
use super::optimizer::check_carried;
use super::without_dead_work;
use frit_ir::{Graph, Op, text};

fn graph(nodes: &str) -> Graph {
    let leaf =
        |name: &str, op: &str| format!("  %{name}: f32[4] = {op} @forward loc(\"\", \"\", \"\")\n");
    let ty = r#"ty = {"dtype":"f32","shape":[4]}"#;
    let leaves = [
        leaf("x", &format!(r#"input {{name = "x", {ty}}}"#)),
        leaf("v", &format!(r#"input {{name = "v", {ty}}}"#)),
    ];
    let text = format!("graph @g world=1 {{\n{}{nodes}}}\n", leaves.concat());
    text::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn at(node: &str) -> String {
    format!("  {node} @forward loc(\"\", \"\", \"\")\n")
}

#[test]
fn a_region_is_a_cast_only_of_its_operand() {
    let region = |body: &str, outputs: usize| {
        let types = ["bf16[4]"; 2][..outputs].join(", %z: ");
        let body = format!(
            "fusion %x {{kind = \"pointwise\"}} body graph @b world=1 {{\n    %0: f32[4] = input {{name = \"0\", ty = {{\"dtype\":\"f32\",\"shape\":[4]}}}}\n{body}  }}"
        );
        let g = graph(&format!("{}  return %y as \"y\"\n", at(&format!("%y: {types} = {body}"))));
        let node = g.nodes().map(|(_, n)| n).find(|n| matches!(n.op, Op::Fusion(_))).expect("it");
        only_cast(node).is_some()
    };
    let constant =
        "    %1: f32[4] = constant {splat = 2.0, ty = {\"dtype\":\"f32\",\"shape\":[4]}}\n";
    assert!(region("    %1: bf16[4] = cast %0 {to = \"bf16\"}\n    return %1 as \"0\"\n", 1));
    let of_constant = "    %2: bf16[4] = cast %1 {to = \"bf16\"}\n    return %2 as \"0\"\n";
    assert!(!region(&format!("{constant}{of_constant}"), 1));
    let twice = "    %1: bf16[4] = cast %0 {to = \"bf16\"}\n    return %1 as \"0\"\n    return %1 as \"1\"\n";
    assert!(!region(twice, 2));
}

#[test]
fn a_concatenation_is_read_once_only_if_its_parts_are() {
    let nodes = |more: &str| {
        let nodes = [
            "%p: f32[4] = relu %x",
            "%q: f32[4] = relu %v",
            "%c: f32[8] = concat %p, %q {axis = 0}",
            "%y: f32[8] = neg %c",
        ];
        let nodes: String = nodes.into_iter().map(at).collect();
        graph(&format!("{nodes}{more}  return %y as \"y\"\n"))
    };
    let is_once = |g: &Graph| {
        let node = g.nodes().map(|(_, n)| n).find(|n| matches!(n.op, Op::Concat(_))).expect("it");
        is_read_once(g, &g.users(), node.outputs[0])
    };
    assert!(is_once(&nodes("")));
    let also = format!("{}  return %z as \"z\"\n", at("%z: f32[4] = neg %p"));
    assert!(!is_once(&nodes(&also)));
}

#[test]
fn steps_that_are_not_carried_are_left_out_or_refused() {
    let model = |carried: &str, more: &str| {
        let ty = r#"ty = {"dtype":"f32","shape":[4]}"#;
        let scalar = r#"ty = {"dtype":"f32","shape":[]}"#;
        let ema = format!(r#"%ema: f32[4] = state {{init = 0.0, name = "ema", of = "w", {ty}}}"#);
        let one = format!("%one: f32[] = constant {{splat = 1.0, {scalar}}}");
        let nodes: String = [
            ema.as_str(),
            &one,
            "%next: f32[4] = ema_step %ema, %x, %one, %one, %one",
            "%other: f32[4] = ema_step %ema, %v, %one, %one, %one",
        ]
        .into_iter()
        .map(at)
        .collect();
        graph(&format!("{nodes}  return %{carried} as \"ema\" carry %ema\n{more}"))
    };
    let refused = |g: &Graph| check_carried(&without_dead_work(g)).is_err();
    assert!(!refused(&model("next", "")));
    assert!(!refused(&model("other", "")));
    assert!(refused(&model("next", "  return %other as \"metric\" metric\n")));
    assert!(refused(&model("next", "  return %other as \"ema\" carry %ema\n")));
}
