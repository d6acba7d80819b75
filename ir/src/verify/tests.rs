//! A graph that breaks each law, and one that keeps them all.

use super::verify;
use crate::ops::{BinaryFn, Cast, Input, UnaryFn};
use crate::{DType, Graph, Op, Origin, OutputKind, Region, TensorType, ValueId, text};

const F32_2: &str = r#"ty = {"dtype": "f32", "shape": [2]}"#;

/// Text of a graph for two ranks with the leaves `%x`, `%w`, the sharded `%s` (unit 0), scalar `%h`.
fn with_leaves(body: &str) -> String {
    let param = r#"init = "weights", kind = "trainable", reason = """#;
    format!(
        "graph @g world=2 {{
  %x: f32[2] = input {{name = \"x\", {F32_2}}}
  %w: f32[2] = param {{name = \"w\", {F32_2}, {param}, unit = 1}}
  %s: f32[2] = param {{name = \"s\", {F32_2}, {param}, unit = 0, sharded = true}}
  %h: f32[] = hyper {{name = \"h\", default = 1.0}}
{body}
}}"
    )
}

fn graph(body: &str) -> Graph {
    text::parse(&with_leaves(body)).unwrap_or_else(|e| panic!("{e}\n{body}"))
}

fn codes(graph: &Graph) -> Vec<String> {
    verify(graph).err().unwrap_or_default().into_iter().map(|d| d.code).collect()
}

#[track_caller]
fn breaks(body: &str, expected: &[&str]) {
    assert_eq!(codes(&graph(body)), expected, "{body}");
}

fn add(graph: &mut Graph, op: Op, inputs: &[ValueId]) -> ValueId {
    graph.add1(op, inputs, Origin::none(), Region::Forward).expect("operands fit")
}

fn input(graph: &mut Graph, name: &str) -> ValueId {
    let ty = TensorType::new(DType::F32, [2]);
    add(graph, Op::Input(Input { name: name.into(), ty }), &[])
}

const STEP: &str = "{kind = \"sgd\"} @update";

#[test]
fn a_lawful_training_step_passes() {
    let body = format!(
        r#"
  %sc: bf16[2] = cast %s {{to = "bf16"}}
  %sg: bf16[2] = all_gather %sc {{unit = 0}}
  %full: f32[2] = cast %sg {{to = "f32"}}
  %y: f32[2] = mul %x, %full
  %z: f32[2] = add %y, %w
  %loss: f32[] = reduce %z {{f = "sum", axes = [0]}}
  %gs: f32[2] = reduce_scatter %x {{unit = 0}} @backward
  %gw: f32[2] = all_reduce %full {{reduce = "mean", unit = 1}} @backward
  %half: f32[2] = mul %gs, %h @update
  %stats: f32[2] = grad_stats %half, %gw @update
  %total: f32[2] = all_reduce %stats {{reduce = "sum"}} @update
  %s1: f32[2] = optimizer_step %s, %half, %h, %h, %h, %h, %h, %h {STEP}
  %w1: f32[2] = optimizer_step %w, %gw, %h, %h, %h, %h, %h, %h {STEP}
  return %z as "z"
  return %loss as "loss" loss_sum
  return %h as "count" loss_count
  return %gw as "w" gradient
  return %h as "lr" metric
  return %s1 as "s" carry %s
  return %w1 as "w" carry %w"#
    );
    let found = verify(&graph(&body));
    assert!(found.is_ok(), "{found:?}");
}

#[test]
fn v101_operand_of_a_later_or_removed_node() {
    let mut g = Graph::new("g");
    let x = input(&mut g, "x");
    let a = add(&mut g, Op::Unary(UnaryFn::Neg), &[x]);
    let b = add(&mut g, Op::Unary(UnaryFn::Abs), &[a]);
    g.add_output("b", b, OutputKind::Result);
    let mut later = g.clone();
    let late = add(&mut later, Op::Unary(UnaryFn::Exp), &[x]);
    later.replace_uses(a, late);
    assert_eq!(codes(&later), ["V101"]);
    later.sort().expect("no cycle");
    assert!(verify(&later).is_ok());
    g.remove(g.value(a).def);
    assert_eq!(codes(&g), ["V101"]);
}

#[test]
fn v102_output_or_carried_leaf_of_a_removed_node() {
    let mut g = Graph::new("g");
    let (x, y) = (input(&mut g, "x"), input(&mut g, "y"));
    g.add_output("x", x, OutputKind::Result);
    let mut carried = g.clone();
    carried.add_output("y", x, OutputKind::Carry(y));
    carried.remove(carried.value(y).def);
    assert_eq!(codes(&carried), ["V102"]);
    g.remove(g.value(x).def);
    assert_eq!(codes(&g), ["V102"]);
}

#[test]
fn v103_leaves_of_one_key() {
    breaks(&format!("%x2: f32[2] = input {{name = \"x\", {F32_2}}}"), &["V103"]);
    let state = |name: &str| {
        format!(
            "%{name}: f32[2] = state {{name = \"momentum\", of = \"{name}\", {F32_2}, init = 0.0}}\n"
        )
    };
    breaks(&(state("a") + &state("b")), &[]);
}

#[test]
fn v104_to_v106_carries() {
    breaks("%y: f32[2] = neg %x\n return %y as \"x\" carry %x", &["V104"]);
    breaks("%y: f16[2] = cast %w {to = \"f16\"}\n return %y as \"w\" carry %w", &["V105"]);
    breaks("return %x as \"w\" carry %w\n return %x as \"w2\" carry %w", &["V106"]);
}

#[test]
fn v107_to_v109_outputs() {
    breaks("return %x as \"y\"\n return %w as \"y\"", &["V107"]);
    breaks("return %h as \"w\" metric\n return %w as \"w\" gradient", &[]);
    breaks("return %x as \"l\" loss_sum", &["V108"]);
    breaks("return %x as \"l\" metric", &["V108"]);
    breaks("return %x as \"nobody\" gradient", &["V109"]);
    breaks("return %h as \"w\" gradient", &["V109"]);
}

#[test]
fn v110_no_rank() {
    let mut g = Graph::new("g");
    g.world_size = 0;
    assert_eq!(codes(&g), ["V110"]);
}

#[test]
fn v111_body_of_a_fusion() {
    let fusion = |op: &str, kind: &str| {
        format!(
            "%f: f32[2] = fusion %x {{kind = \"pointwise\"}} body graph @b world=1 {{
    %p: f32[2] = input {{name = \"p\", {F32_2}}}
    %q: f32[2] = {op}
    return %q as \"q\" {kind}
  }}"
        )
    };
    breaks(&fusion("neg %p", ""), &[]);
    breaks(&fusion("all_gather %p {unit = 0}", ""), &["V111"]);
    breaks(&fusion("neg %p", "gradient"), &["V111"]);
    breaks(&fusion(&format!("state {{name = \"momentum\", {F32_2}, init = 0.0}}"), ""), &["V111"]);
}

#[test]
fn v201_and_v202_types() {
    let mut g = graph("%y: f32[2] = neg %x\n return %y as \"y\"");
    let id = g.nodes().last().expect("a node").0;
    g.node_mut(id).op = Op::Binary(BinaryFn::Add);
    assert_eq!(codes(&g), ["V201"]);
    g.node_mut(id).op = Op::Cast(Cast { to: DType::F16 });
    assert_eq!(codes(&g), ["V202"]);
}

#[test]
fn v203_eight_bit_floats() {
    breaks("%y: f8e4m3[2] = cast %x {to = \"f8e4m3\"}", &["V203"]);
}

#[test]
fn v401_to_v403_regions() {
    breaks("%a: f32[2] = neg %x @backward\n %b: f32[2] = neg %a", &["V401"]);
    breaks("%a: f32[2] = neg %x @recompute0\n %b: f32[2] = neg %a", &["V401"]);
    breaks("%a: f32[2] = neg %x @update\n %b: f32[2] = neg %a @backward", &["V402"]);
    breaks("%a: f32[2] = neg %x @update\n %b: f32[2] = neg %a @recompute1", &["V402"]);
    breaks("%a: f32[2] = neg %x @recompute0\n %b: f32[2] = neg %a @backward", &[]);
    breaks("%a: f32[] = update_step %h, %h @backward", &["V403"]);
}

#[test]
fn v501_and_v502_functions() {
    let gradient = |call: u32, dx: &str| {
        format!(
            "%b: f32[2] = custom_gradient %y, %x, %{dx} {{call = {call}, function = \"f\", results = 1}}"
        )
    };
    let cotangent = |call: u32| {
        format!("%y: f32[2] = round %x\n%dy: f32[2] = cotangent %y {{call = {call}, result = 0}}")
    };
    breaks(&format!("{}\n{}\nreturn %b as \"b\"", cotangent(3), gradient(3, "dy")), &[]);
    // Of another call, returned, and read as more than a gradient.
    breaks(&format!("{}\n{}\nreturn %b as \"b\"", cotangent(3), gradient(4, "dy")), &["V501"]);
    breaks(&format!("{}\nreturn %dy as \"b\"", cotangent(3)), &["V501"]);
    breaks(
        &format!(
            "{}\n{}\n{}\nreturn %b as \"b\"",
            cotangent(3),
            gradient(3, "dy"),
            gradient(3, "x").replace("%b:", "%c:")
        ),
        &["V501"],
    );
    let inside =
        "%a: f32[2] = enter_precision %x {call = 3, dtype = \"f32\"}\n%e: f32[2] = exp %a\n";
    breaks(
        &format!("{inside}%b: f32[2] = leave_precision %e {{call = 3}}\nreturn %b as \"b\""),
        &[],
    );
    breaks(&format!("{inside}return %e as \"b\""), &["V502"]);
    breaks(
        &format!("{inside}%b: f32[2] = leave_precision %e {{call = 4}}\nreturn %b as \"b\""),
        &["V502"],
    );
}

#[test]
fn v301_to_v303_uses_of_sharded_values() {
    breaks("%a: f32[2] = reshape %s {shape = [2]}", &["V301"]);
    breaks("%a: f32[2] = all_reduce %s {reduce = \"sum\"}", &["V301"]);
    breaks(
        "%a: f32[2] = neg %s\n %b: f32[2] = cum_sum %a {axis = 0, exclusive = false, reverse = false}",
        &["V301"],
    );
    breaks("%a: f32[2] = all_gather %x {unit = 0}", &["V302"]);
    breaks("%a: f32[2] = add %s, %x", &["V303"]);
    breaks("%a: f32[2] = add %s, %h", &[]);
}

#[test]
fn v303_state_that_is_whole() {
    let step = |state: &str| {
        format!(
            "%g: f32[2] = reduce_scatter %x {{unit = 0}} @backward\n \
             %a: f32[2], %b: f32[2] = optimizer_step %s, %g, %{state}, %h, %h, %h, %h, %h, %h, %h, %h, \
             %h {{kind = \"adafactor\"}} @update"
        )
    };
    breaks(&step("x"), &[]);
    breaks(&step("s"), &["V303"]);
}

#[test]
fn v304_and_v305_reductions() {
    let step = |param: &str, grad: &str, before: &str| {
        format!(
            "{before}\n %n: f32[2] = optimizer_step %{param}, %{grad}, %h, %h, %h, %h, %h, %h {STEP}"
        )
    };
    let scatter = "%g: f32[2] = reduce_scatter %x {unit = 0} @backward";
    breaks(&step("s", "g", scatter), &[]);
    breaks(&step("s", "g", "%g: f32[2] = neg %s @backward"), &["V304"]);
    let two = format!(
        "{scatter}\n %g2: f32[2] = reduce_scatter %w {{unit = 0}} @backward\n %sum: f32[2] = add %g, %g2 @backward"
    );
    breaks(&step("s", "sum", &two), &["V304"]);
    let reduce = "%g: f32[2] = all_reduce %x {reduce = \"mean\", unit = 1} @backward";
    breaks(&step("w", "g", reduce), &[]);
    let again =
        format!("{reduce}\n %g2: f32[2] = all_reduce %g {{reduce = \"mean\", unit = 1}} @backward");
    breaks(&step("w", "g2", &again), &["V305"]);
}

#[test]
fn v306_units() {
    breaks("%a: f32[2] = all_gather %s {unit = 3}", &["V306"]);
    breaks(
        &format!(
            "%g: f32[2] = reduce_scatter %x {{unit = 4}} @backward\n %n: f32[2] = optimizer_step %s, %g, %h, %h, %h, %h, %h, %h {STEP}"
        ),
        &["V306"],
    );
}

#[test]
fn v307_and_v308_outputs() {
    breaks("%a: f32[2] = neg %s\n return %a as \"w\" carry %w", &["V307"]);
    breaks("return %x as \"s\" carry %s", &["V307"]);
    breaks("return %s as \"s\"", &["V308"]);
    breaks("return %s as \"s\" gradient", &[]);
}
