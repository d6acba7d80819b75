//! What each rule does and where it must not apply, and that no rule changes results.

use super::extract::Extractor;
use super::saturate::Filled;
use super::{Simplify, rules, window};
use crate::pass::{Changed, Numerics, Pass, PassContext};
use crate::rule::Claim;
use frit_ir::interpret::{Options, leaf_key, run};
use frit_ir::ops::{
    BinaryFn, Cast, Concat, Embedding, Expand, Gather, Input, MatMul, Op, Reshape, Slice,
    Transpose, UnaryFn,
};
use frit_ir::verify::verify;
use frit_ir::{DType, Graph, Origin, OutputKind, Region, Tensor, TensorType, ValueId};
use proptest::prelude::*;
use std::collections::HashMap;

fn feeds(graph: &Graph) -> HashMap<String, Tensor> {
    let mut feeds = HashMap::new();
    for (i, (_, node)) in graph.nodes().enumerate() {
        let (Some(key), true) = (leaf_key(&node.op), node.op.is_leaf()) else { continue };
        let ty = graph.ty(node.outputs[0]).clone();
        let n = ty.shape.numel();
        let tensor = if ty.dtype.is_float() {
            // Not representable in fewer bits, so that every lost rounding shows.
            let x = |j: usize| ((i * 31 + j * 17) % 29) as f64 / 7.0 - 1.9;
            Tensor::floats(ty.dtype, ty.shape, (0..n).map(x).collect())
        } else {
            // The first row or the last: there are always two names for some row.
            Tensor::ints(ty.dtype, ty.shape, (0..n).map(|j| -((j % 2) as i64)).collect())
        };
        feeds.insert(key, tensor);
    }
    feeds
}

fn simplify_with(pass: Simplify, graph: &Graph) -> Graph {
    let mut after = graph.clone();
    pass.run(&mut after, &mut PassContext::default()).expect("the pass succeeds");
    if let Err(broken) = verify(&after) {
        panic!("{}\n{after}", broken[0].message);
    }
    after
}

/// Simplifies, checks the laws and that every output has the same bits.
fn simplify(graph: &Graph) -> Graph {
    let after = simplify_with(Simplify::default(), graph);
    let feeds = feeds(graph);
    let evaluate = |g: &Graph| run(g, &feeds, Options::default()).expect("it evaluates");
    assert_eq!(evaluate(graph), evaluate(&after), "\n{graph}\n{after}");
    after
}

/// Replaces `W[…]`, `X[…]` and `I[…]` lines by the leaves they stand for.
fn parse(nodes: &str) -> Graph {
    let mut text = String::from("graph @g world=2 {\n");
    for line in nodes.lines().map(str::trim) {
        let mut words = line.splitn(3, ' ');
        match (words.next(), words.next(), words.next()) {
            (Some(name), Some(ty), Some(kind @ ("input" | "weight"))) => {
                let name = name.trim_start_matches('%');
                let (dtype, dims) = ty.split_once('[').expect("a type");
                let json = format!(r#"{{"dtype":"{dtype}","shape":[{dims}}}"#);
                text += &match kind {
                    "input" => {
                        format!("%{name}: {ty} = input {{name = \"{name}\", ty = {json}}}\n")
                    }
                    _ => format!(
                        "%{name}: {ty} = param {{init = {{\"constant\":0.5}}, kind = \"trainable\", \
                         name = \"{name}\", reason = \"\", sharded = true, ty = {json}, unit = 3}}\n"
                    ),
                };
            }
            _ => text = text + line + "\n",
        }
    }
    frit_ir::text::parse(&(text + "}")).expect("the text is a graph")
}

/// The nodes that are no leaves, with dtypes.
fn outline(graph: &Graph) -> String {
    let nodes = graph.nodes().filter(|(_, n)| !n.op.is_leaf());
    let names = nodes.map(|(_, n)| {
        let flags = match &n.op {
            Op::MatMul(m) => {
                ["", "_ta", "_tb", "_ta_tb"][usize::from(m.trans_a) + 2 * usize::from(m.trans_b)]
            }
            _ => "",
        };
        let region = if n.region == Region::Forward { "" } else { "@b" };
        format!("{}{flags}:{}{region}", n.op.name(), graph.ty(n.outputs[0]).dtype)
    });
    names.collect::<Vec<_>>().join(" ")
}

/// name | before | after
const CASES: &[(&str, &str, &str)] = &[
    (
        "softmax: every axis moves to the end, and transposes in between are one",
        "%x f32[2,4,3] input
         %y: f32[2, 4, 3] = softmax %x {axis = 1}
         %z: f32[2, 4, 3] = log_softmax %y {axis = 0}
         %d: f32[2, 4, 3] = softmax_grad %z, %y {axis = 1} @backward
         return %d as \"d\"",
        "transpose:f32 softmax:f32 transpose:f32 log_softmax:f32 transpose:f32@b \
         softmax_grad:f32@b transpose:f32@b",
    ),
    (
        "softmax: the transpose goes where there is another",
        "%x f32[2,3,4] input
         %t: f32[2, 4, 3] = transpose %x {perm = [0,2,1]}
         %y: f32[2, 4, 3] = softmax %t {axis = 1}
         %u: f32[2, 3, 4] = transpose %y {perm = [0,2,1]}
         return %u as \"u\"",
        "softmax:f32",
    ),
    (
        "softmax: the last axis stays, and one followed by single elements",
        "%x f32[2,4,1,1] input
         %y: f32[2, 4, 1, 1] = softmax %x {axis = 1}
         %z: f32[2, 4, 1, 1] = softmax %y {axis = 3}
         return %z as \"z\"",
        "softmax:f32 softmax:f32",
    ),
    (
        "cast-before-gather: all uses are low precision",
        "%w f32[64,64] weight
         %x bf16[64,64] input
         %g: f32[64, 64] = all_gather %w {unit = 3}
         %c: bf16[64, 64] = cast %g {to = \"bf16\"}
         %d: bf16[64, 64] = cast %g {to = \"bf16\"}
         %y: bf16[64, 64] = matmul %x, %c
         %z: bf16[64, 64] = matmul %d, %x
         return %y as \"y\"
         return %z as \"z\"",
        "cast:bf16 all_gather:bf16 matmul:bf16 matmul:bf16",
    ),
    (
        "cast-before-gather: one use needs f32",
        "%w f32[64,64] weight
         %g: f32[64, 64] = all_gather %w {unit = 3}
         %c: bf16[64, 64] = cast %g {to = \"bf16\"}
         %y: bf16[64, 64] = tanh %c
         %z: f32[64, 64] = tanh %g
         return %y as \"y\"
         return %z as \"z\"",
        "all_gather:f32 cast:bf16 tanh:bf16 tanh:f32",
    ),
    (
        "cast-before-gather: forward and backward gathers stay two",
        "%w f32[64,64] weight
         %g: f32[64, 64] = all_gather %w {unit = 3}
         %c: bf16[64, 64] = cast %g {to = \"bf16\"}
         %h: f32[64, 64] = all_gather %w {unit = 3} @backward
         %d: bf16[64, 64] = cast %h {to = \"bf16\"} @backward
         %y: bf16[64, 64] = tanh %c
         %z: bf16[64, 64] = tanh %d @backward
         return %y as \"y\"
         return %z as \"z\"",
        "cast:bf16 all_gather:bf16 cast:bf16@b all_gather:bf16@b tanh:bf16 tanh:bf16@b",
    ),
    (
        "cast-before-gather: through a transpose into the matmul",
        "%w f32[64,32] weight
         %x bf16[8,32] input
         %g: f32[64, 32] = all_gather %w {unit = 3}
         %t: f32[32, 64] = transpose %g {perm = [1,0]}
         %c: bf16[32, 64] = cast %t {to = \"bf16\"}
         %y: bf16[8, 64] = matmul %x, %c
         return %y as \"y\"",
        "cast:bf16 all_gather:bf16 matmul_tb:bf16",
    ),
    (
        "cast-after-gather: one gather serves both",
        "%w f32[64,64] weight
         %c: bf16[64, 64] = cast %w {to = \"bf16\"}
         %g: bf16[64, 64] = all_gather %c {unit = 3}
         %h: f32[64, 64] = all_gather %w {unit = 3}
         %y: bf16[64, 64] = tanh %g
         %z: f32[64, 64] = tanh %h
         return %y as \"y\"
         return %z as \"z\"",
        "all_gather:f32 cast:bf16 tanh:bf16 tanh:f32",
    ),
    (
        "a widening cast stays behind the gather",
        "%w bf16[64,64] weight
         %g: bf16[64, 64] = all_gather %w {unit = 3}
         %c: f32[64, 64] = cast %g {to = \"f32\"}
         return %c as \"c\"",
        "all_gather:bf16 cast:f32",
    ),
    (
        "cast-same",
        "%x f32[8] input
         %c: f32[8] = cast %x {to = \"f32\"}
         %y: f32[8] = exp %c
         return %y as \"y\"",
        "exp:f32",
    ),
    (
        "cast-widen-twice: there and back",
        "%x bf16[8] input
         %c: f32[8] = cast %x {to = \"f32\"}
         %d: bf16[8] = cast %c {to = \"bf16\"}
         %y: bf16[8] = exp %d
         return %y as \"y\"",
        "exp:bf16",
    ),
    (
        "cast-widen-twice: further",
        "%x bf16[8] input
         %c: f32[8] = cast %x {to = \"f32\"}
         %d: f64[8] = cast %c {to = \"f64\"}
         return %d as \"d\"",
        "cast:f64",
    ),
    (
        "cast-widen-twice: rounding is kept",
        "%x f32[8] input
         %c: bf16[8] = cast %x {to = \"bf16\"}
         %d: f32[8] = cast %c {to = \"f32\"}
         return %d as \"d\"",
        "cast:bf16 cast:f32",
    ),
    (
        "cast-widen-twice: neither of f16 and bf16 holds the other",
        "%x f16[8] input
         %c: bf16[8] = cast %x {to = \"bf16\"}
         %d: f32[8] = cast %c {to = \"f32\"}
         return %d as \"d\"",
        "cast:bf16 cast:f32",
    ),
    (
        "cast-into-layout: transpose fewer bytes",
        "%x f32[8,16] input
         %t: f32[16, 8] = transpose %x {perm = [1,0]}
         %c: bf16[16, 8] = cast %t {to = \"bf16\"}
         return %c as \"c\"",
        "cast:bf16 transpose:bf16",
    ),
    (
        "cast-into-layout: not before a slice that leaves little",
        "%x f32[64,16] input
         %t: f32[1, 16] = slice %x {size = [1,16], start = [0,0], step = [1,1]}
         %c: bf16[1, 16] = cast %t {to = \"bf16\"}
         return %c as \"c\"",
        "slice:f32 cast:bf16",
    ),
    (
        "cast-out-of-layout: widen late",
        "%x bf16[8,16] input
         %c: f32[8, 16] = cast %x {to = \"f32\"}
         %t: f32[16, 8] = transpose %c {perm = [1,0]}
         return %t as \"t\"",
        "transpose:bf16 cast:f32",
    ),
    (
        "cast-into-layout: expand what is narrow",
        "%x f32[16] input
         %e: f32[8, 16] = expand %x {shape = [8,16]}
         %c: bf16[8, 16] = cast %e {to = \"bf16\"}
         return %c as \"c\"",
        "cast:bf16 expand:bf16",
    ),
    (
        "cast-into-concat",
        "%x bf16[8] input
         %z f32[8] input
         %a: f32[8] = cast %x {to = \"f32\"}
         %b: f32[16] = concat %a, %z {axis = 0}
         %c: bf16[16] = cast %b {to = \"bf16\"}
         return %c as \"c\"",
        "cast:bf16 concat:bf16",
    ),
    (
        "cast-out-of-concat",
        "%x bf16[8] input
         %z bf16[8] input
         %a: f32[8] = cast %x {to = \"f32\"}
         %b: f32[8] = cast %z {to = \"f32\"}
         %c: f32[16] = concat %a, %b {axis = 0}
         return %c as \"c\"",
        "concat:bf16 cast:f32",
    ),
    (
        "cast-out-of-concat: not where operands are of two types",
        "%x bf16[8] input
         %z f16[8] input
         %a: f32[8] = cast %x {to = \"f32\"}
         %b: f32[8] = cast %z {to = \"f32\"}
         %c: f32[16] = concat %a, %b {axis = 0}
         return %c as \"c\"",
        "cast:f32 cast:f32 concat:f32",
    ),
    (
        "cast-out-of-rows: cast what is read, not the table",
        "%t f32[100,8] input
         %i i64[4] input
         %c: bf16[100, 8] = cast %t {to = \"bf16\"}
         %e: bf16[4, 8] = embedding %c, %i
         return %e as \"e\"",
        "embedding:f32 cast:bf16",
    ),
    (
        "cast-into-rows: through the gather of a table",
        "%t f32[100,8] weight
         %i i64[4] input
         %g: f32[100, 8] = all_gather %t {unit = 3}
         %e: f32[4, 8] = embedding %g, %i
         %c: bf16[4, 8] = cast %e {to = \"bf16\"}
         return %c as \"c\"",
        "cast:bf16 all_gather:bf16 embedding:bf16",
    ),
    (
        "transpose-compose and transpose-identity",
        "%x f32[2,3,4] input
         %a: f32[3, 4, 2] = transpose %x {perm = [1,2,0]}
         %b: f32[2, 3, 4] = transpose %a {perm = [2,0,1]}
         %y: f32[2, 3, 4] = exp %b
         return %y as \"y\"",
        "exp:f32",
    ),
    (
        "transpose-compose: to one that stays",
        "%x f32[2,3,4] input
         %a: f32[3, 4, 2] = transpose %x {perm = [1,2,0]}
         %b: f32[4, 2, 3] = transpose %a {perm = [1,2,0]}
         return %b as \"b\"",
        "transpose:f32",
    ),
    (
        "transpose-is-reshape",
        "%x f32[1,3,4] input
         %a: f32[3, 1, 4] = transpose %x {perm = [1,0,2]}
         return %a as \"a\"",
        "reshape:f32",
    ),
    (
        "transpose-is-reshape: not if an axis moves past another",
        "%x f32[1,3,4] input
         %a: f32[4, 1, 3] = transpose %x {perm = [2,0,1]}
         return %a as \"a\"",
        "transpose:f32",
    ),
    (
        "reshape-compose and reshape-same",
        "%x f32[2,12] input
         %a: f32[4, 6] = reshape %x {shape = [4,6]}
         %b: f32[24] = reshape %a {shape = [24]}
         %c: f32[2, 12] = reshape %b {shape = [2,12]}
         %y: f32[2, 12] = exp %c
         return %b as \"b\"
         return %y as \"y\"",
        "reshape:f32 exp:f32",
    ),
    (
        "matmul-trans-a and matmul-trans-b",
        "%x f32[6,4] input
         %w f32[5,6] input
         %a: f32[4, 6] = transpose %x {perm = [1,0]}
         %b: f32[6, 5] = transpose %w {perm = [1,0]}
         %y: f32[4, 5] = matmul %a, %b
         return %y as \"y\"",
        "matmul_ta_tb:f32",
    ),
    (
        "matmul-trans-b: a flag goes off again",
        "%x f32[4,6] input
         %w f32[6,5] input
         %b: f32[5, 6] = transpose %w {perm = [1,0]}
         %y: f32[4, 5] = matmul %x, %b {trans_b = true}
         return %y as \"y\"",
        "matmul:f32",
    ),
    (
        "matmul-trans-b: not for another permutation",
        "%x f32[2,4,6] input
         %w f32[6,2,5] input
         %b: f32[2, 6, 5] = transpose %w {perm = [1,0,2]}
         %y: f32[2, 4, 5] = matmul %x, %b
         return %y as \"y\"",
        "transpose:f32 matmul:f32",
    ),
    (
        "matmul-transposed",
        "%x f32[4,6] input
         %w f32[6,5] input
         %y: f32[4, 5] = matmul %x, %w
         %t: f32[5, 4] = transpose %y {perm = [1,0]}
         return %t as \"t\"",
        "matmul_ta_tb:f32",
    ),
    (
        "matmul-transposed: not if the matmul itself is read",
        "%x f32[4,6] input
         %w f32[6,5] input
         %y: f32[4, 5] = matmul %x, %w
         %t: f32[5, 4] = transpose %y {perm = [1,0]}
         return %y as \"y\"
         return %t as \"t\"",
        "matmul:f32 transpose:f32",
    ),
    (
        "matmul-transposed: not in batches, whose rows would no longer be one matrix",
        "%x f32[2,4,6] input
         %w f32[6,5] input
         %y: f32[2, 4, 5] = matmul %x, %w
         %t: f32[2, 5, 4] = transpose %y {perm = [0,2,1]}
         return %t as \"t\"",
        "matmul:f32 transpose:f32",
    ),
    (
        "pointwise-of-transposes",
        "%x f32[4,6] input
         %z f32[4,6] input
         %a: f32[6, 4] = transpose %x {perm = [1,0]}
         %b: f32[6, 4] = transpose %z {perm = [1,0]}
         %s: f32[6, 4] = add %a, %b
         %c: f32[4, 6] = transpose %s {perm = [1,0]}
         return %c as \"c\"",
        "add:f32",
    ),
    (
        "pointwise-of-transposes: not where the permutations differ",
        "%x f32[2,2,2] input
         %z f32[2,2,2] input
         %a: f32[2, 2, 2] = transpose %x {perm = [1,2,0]}
         %b: f32[2, 2, 2] = transpose %z {perm = [2,0,1]}
         %s: f32[2, 2, 2] = add %a, %b
         %c: f32[2, 2, 2] = transpose %s {perm = [2,0,1]}
         return %c as \"c\"",
        "transpose:f32 add:f32",
    ),
    (
        "pointwise-of-transposes: not where an operand is broadcast",
        "%x f32[4,6] input
         %z f32[6] input
         %a: f32[6, 4] = transpose %x {perm = [1,0]}
         %d: f32[6, 1] = reshape %z {shape = [6,1]}
         %s: f32[6, 4] = add %a, %d
         return %s as \"s\"",
        "transpose:f32 reshape:f32 add:f32",
    ),
    (
        "transpose-of-pointwise",
        "%x f32[4,6] input
         %a: f32[6, 4] = transpose %x {perm = [1,0]}
         %s: f32[6, 4] = exp %a
         %n: f32[6, 4] = neg %s
         %c: f32[4, 6] = transpose %n {perm = [1,0]}
         return %c as \"c\"",
        "exp:f32 neg:f32",
    ),
    (
        "operations of different regions are not moved",
        "%x f32[8,16] input
         %t: f32[16, 8] = transpose %x {perm = [1,0]}
         %c: bf16[16, 8] = cast %t {to = \"bf16\"} @backward
         return %c as \"c\"",
        "transpose:f32 cast:bf16@b",
    ),
];

#[test]
fn rules_do_what_their_names_say() {
    let mut wrong = Vec::new();
    for (name, before, after) in CASES {
        let found = outline(&simplify(&parse(before)));
        if found != *after {
            wrong.push(format!("{name}\n  {found}\n  {after}"));
        }
    }
    assert!(wrong.is_empty(), "found, expected:\n{}", wrong.join("\n"));
}

#[test]
fn every_rule_is_in_the_table() {
    for rule in rules::all() {
        let name = rule.statement.name;
        let has_case = CASES.iter().any(|(case, ..)| case.contains(name));
        assert!(has_case || matches!(rule.statement.claim, Claim::Approximate), "{name}");
    }
}

#[test]
fn approximate_rules_ask_first() {
    let graph = parse(
        "%x f32[8] input
         %c: bf16[8] = cast %x {to = \"bf16\"}
         %d: f32[8] = cast %c {to = \"f32\"}
         %y: f32[8] = exp %d
         return %y as \"y\"",
    );
    assert_eq!(outline(&simplify(&graph)), "cast:bf16 cast:f32 exp:f32");
    let approximate = Simplify { approximate: true, ..Simplify::default() };
    assert_eq!(outline(&simplify_with(approximate, &graph)), "exp:f32");
    assert_eq!(Simplify::default().info().numerics, Numerics::Bitwise);
    assert_eq!(approximate.info().numerics, Numerics::LowersPrecision);
}

/// A stack of blocks as `shard` leaves them.
fn stack(layers: usize, casts: bool) -> Graph {
    let mut text = String::from("%x bf16[4,64] input\n");
    let mut last = "x".to_string();
    for i in 0..layers {
        let dtype = if casts { "f32" } else { "bf16" };
        text += &format!("%w{i} {dtype}[64,64] weight\n");
        text += &format!("%g{i}: {dtype}[64, 64] = all_gather %w{i} {{unit = 3}}\n");
        if casts {
            text += &format!("%c{i}: bf16[64, 64] = cast %g{i} {{to = \"bf16\"}}\n");
        }
        let c = if casts { "c" } else { "g" };
        text += &format!("%t{i}: bf16[64, 64] = transpose %{c}{i} {{perm = [1,0]}}\n");
        text += &format!("%m{i}: bf16[4, 64] = matmul %{last}, %t{i}\n");
        text += &format!("%a{i}: bf16[4, 64] = gelu %m{i}\n");
        text += &format!("%h{i}: bf16[4, 64] = add %a{i}, %{last}\n");
        last = format!("h{i}");
    }
    parse(&(text + &format!("return %{last} as \"y\"")))
}

fn gathered_bytes(graph: &Graph) -> usize {
    let gathers = graph.nodes().filter(|(_, n)| matches!(n.op, Op::AllGather(_)));
    gathers.map(|(_, n)| graph.ty(n.outputs[0]).bytes()).sum()
}

#[test]
fn communicated_bytes_change_only_where_there_are_casts() {
    let plain = stack(3, false);
    assert_eq!(gathered_bytes(&simplify(&plain)), gathered_bytes(&plain));
    let mixed = stack(3, true);
    assert_eq!(gathered_bytes(&simplify(&mixed)) * 2, gathered_bytes(&mixed));
}

#[test]
fn equal_windows_are_solved_once_and_reported() {
    let mut graph = stack(96, true);
    let mut context = PassContext::default();
    let changed = Simplify::default().run(&mut graph, &mut context).expect("the pass succeeds");
    assert_eq!(changed, Changed::Yes);
    assert_eq!(gathered_bytes(&graph), 96 * 64 * 64 * 2);
    let messages: Vec<&str> = context.remarks.iter().map(|r| r.message.as_str()).collect();
    assert!(messages[0].ends_with("; 96 times"), "{messages:?}");
    assert_eq!(messages[1], "96 windows: saturated");
    // Names and origins go on, and nothing is left to do.
    let again = Simplify::default().run(&mut graph, &mut context).expect("the pass succeeds");
    assert_eq!(again, Changed::No);
}

#[test]
fn origins_say_for_which_node_a_new_one_is_made() {
    let graph = parse(
        "%w f32[64,64] weight
         %g: f32[64, 64] = all_gather %w {unit = 3} loc(\"g\", \"h.0\", \"shard\")
         %c: bf16[64, 64] = cast %g {to = \"bf16\"} loc(\"c\", \"h.0\", \"autocast\")
         return %c as \"c\"",
    );
    let after = simplify(&graph);
    let made: Vec<String> = after
        .nodes()
        .filter(|(_, n)| !n.op.is_leaf())
        .map(|(_, n)| format!("{} {} {}", n.op.name(), n.origin.source, n.origin.pass))
        .collect();
    assert_eq!(made, ["cast c simplify", "all_gather g simplify"]);
    assert!(after.to_string().contains("unit = 3"), "the gather keeps its unit");
}

/// Chooses one node of a random graph; operands are chosen among the values so far.
#[derive(Clone, Debug)]
struct Step {
    op: usize,
    operands: [usize; 2],
    region: usize,
    is_output: bool,
}

fn step() -> impl Strategy<Value = Step> {
    (0..16usize, any::<[usize; 2]>(), 0..8usize, prop::bool::weighted(0.25))
        .prop_map(|(op, operands, region, is_output)| Step { op, operands, region, is_output })
}

fn op_of(step: &Step, a: &TensorType) -> Op {
    let (dims, pick) = (a.shape.dims(), step.operands[1]);
    let rank = dims.len();
    match step.op {
        0..=3 => Op::Cast(Cast { to: [DType::BF16, DType::F32, DType::F16, DType::F64][pick % 4] }),
        4..=6 => {
            let mut perm: Vec<usize> = (0..rank).collect();
            perm.rotate_left(if rank == 0 { 0 } else { pick % rank });
            if pick % 3 == 0 {
                perm.reverse();
            }
            Op::Transpose(Transpose { perm })
        }
        7 => {
            let shapes = [vec![16], vec![4, 4], vec![2, 2, 4], vec![1, 16]];
            Op::Reshape(Reshape { shape: shapes[pick % 4].clone().into() })
        }
        8 => Op::Expand(Expand { shape: [&[2], dims].concat().into() }),
        9 => Op::Slice(Slice {
            start: vec![0; rank],
            size: dims.iter().map(|d| d.div_ceil(2)).collect(),
            step: vec![1; rank],
        }),
        10 => Op::Concat(Concat { axis: 0 }),
        11 => Op::Gather(Gather { axis: 0 }),
        12 => Op::MatMul(MatMul { trans_a: pick % 2 == 0, trans_b: pick % 3 == 0, out: None }),
        13 => Op::Unary(UnaryFn::Tanh),
        14 => Op::Binary([BinaryFn::Add, BinaryFn::Mul][pick % 2]),
        _ => Op::Embedding(Embedding::default()),
    }
}

fn grow(steps: &[Step]) -> Graph {
    let mut graph = Graph::new("random");
    let add = |graph: &mut Graph, op: Op, inputs: &[ValueId], region| {
        graph.add1(op, inputs, Origin::none(), region)
    };
    let mut values: Vec<ValueId> = Vec::new();
    let leaves = [(DType::F32, vec![4, 4]), (DType::BF16, vec![4, 4]), (DType::F32, vec![16])];
    for (i, (dtype, dims)) in leaves.into_iter().enumerate() {
        let leaf = Op::Input(Input { name: format!("x{i}"), ty: TensorType::new(dtype, dims) });
        values.push(add(&mut graph, leaf, &[], Region::Forward).expect("a leaf"));
    }
    let ty = TensorType::new(DType::I64, [2]);
    let ids = Op::Input(Input { name: "ids".into(), ty });
    let ids = add(&mut graph, ids, &[], Region::Forward).expect("a leaf");
    let mut steps: Vec<&Step> = steps.iter().collect();
    steps.sort_by_key(|s| s.region >= 6);
    for (i, step) in steps.into_iter().enumerate() {
        let region = if step.region >= 6 { Region::Backward } else { Region::Forward };
        let choose = |r: usize| {
            let n = values.len();
            if r.is_multiple_of(3) { values[r / 3 % n] } else { values[n - 1 - r / 3 % n.min(3)] }
        };
        let (a, b) = (choose(step.operands[0]), choose(step.operands[1]));
        let op = op_of(step, graph.ty(a));
        let small = graph.ty(a).shape.numel() <= 64;
        let tries = [vec![a, ids], vec![a], vec![a, b], vec![a, a]];
        let fits = |inputs: &Vec<ValueId>| small && (inputs.contains(&ids) == is_rows(&op));
        let added = tries
            .into_iter()
            .filter(fits)
            .find_map(|inputs| add(&mut graph, op.clone(), &inputs, region).ok());
        let Some(added) = added else { continue };
        if step.is_output {
            graph.add_output(&format!("y{i}"), added, OutputKind::Result);
        }
        values.push(added);
    }
    if let Some(last) = values.last() {
        graph.add_output("last", *last, OutputKind::Result);
    }
    graph.remove_dead();
    graph
}

fn is_rows(op: &Op) -> bool {
    matches!(op, Op::Gather(_) | Op::Embedding(_))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_graphs_compute_the_same(steps in prop::collection::vec(step(), 1..14)) {
        let graph = grow(&steps);
        let after = simplify(&graph);
        prop_assert_eq!(after.to_string(), simplify(&graph).to_string());
    }

    #[test]
    fn extraction_is_close_to_the_optimum(steps in prop::collection::vec(step(), 1..5)) {
        let graph = grow(&steps);
        for window in window::windows(&graph) {
            let mut filled = Filled::new(&window);
            filled.saturate(&rules::all());
            let roots = filled.roots(&window);
            let extractor = Extractor::new(&filled.egraph, 1);
            let Some(best) = extractor.exact(&roots, 20_000) else { continue };
            let original = filled.original().0;
            let (_, found) = extractor.extract(&roots, &original).expect("there is a choice");
            prop_assert!(found as f64 <= best as f64 * 1.05, "{found} instead of {best}\n{graph}");
        }
    }
}

#[test]
fn a_sharded_linear_layer_forward_and_backward() {
    let nodes = include_str!("../../../tests/golden/simplify/linear.before.txt");
    let graph = frit_ir::text::parse(&format!("graph @linear world=2 {{\n{nodes}\n}}"))
        .expect("the text is a graph");
    expect_test::expect_file!["../../../tests/golden/simplify/linear.after.txt"]
        .assert_eq(&simplify(&graph).to_string());
}
