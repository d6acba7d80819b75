//! Which regions are formed, which are not, and that fusion does not change results.

mod attention;

use super::{Fuse, INFO, Rules};
use crate::pass::{Changed, Pass, PassContext};
use frit_ir::interpret::{Options, leaf_key, run};
use frit_ir::ops::{
    BinaryFn, Cast, CompareFn, Constant, Expand, FusionKind, Input, LayerNorm, MatMul, Op, Reduce,
    ReduceFn, Reshape, Softmax, SoftmaxGrad, SumTo, Transpose, UnaryFn,
};
use frit_ir::strided;
use frit_ir::verify::verify;
use frit_ir::{DType, Graph, Origin, OutputKind, Region, Shape, Tensor, TensorType, ValueId};
use proptest::prelude::*;
use std::collections::HashMap;

/// Values for all inputs and parameters; all elements differ.
pub(crate) fn feeds(graph: &Graph) -> HashMap<String, Tensor> {
    let mut feeds = HashMap::new();
    for (i, (_, node)) in graph.nodes().enumerate() {
        let (Some(key), true) = (leaf_key(&node.op), node.op.is_leaf()) else { continue };
        let ty = graph.ty(node.outputs[0]).clone();
        let n = ty.shape.numel();
        let tensor = if ty.dtype.is_float() {
            let x = |j: usize| ((i * 31 + j * 17) % 23) as f64 / 7.0 - 1.6;
            Tensor::floats(ty.dtype, ty.shape, (0..n).map(x).collect())
        } else {
            Tensor::ints(ty.dtype, ty.shape, (0..n).map(|j| ((i + j) % 3) as i64).collect())
        };
        feeds.insert(key, tensor);
    }
    feeds
}

/// Fuses, and checks the invariants and that every output is bit-identical.
fn fuse_with(pass: Fuse, graph: &Graph) -> Graph {
    let mut fused = graph.clone();
    pass.run(&mut fused, &mut PassContext::default()).expect("the pass succeeds");
    if let Err(broken) = verify(&fused) {
        panic!("{}\n{fused}", broken[0].message);
    }
    let feeds = feeds(graph);
    let evaluate = |g: &Graph| run(g, &feeds, Options::default()).expect("it evaluates");
    assert_eq!(evaluate(graph), evaluate(&fused), "\n{graph}\n{fused}");
    fused
}

pub(crate) fn fuse(graph: &Graph) -> Graph {
    fuse_with(Fuse::default(), graph)
}

pub(super) fn fuse_by(rules: Rules, graph: &Graph) -> Graph {
    fuse_with(Fuse { rules, ..Fuse::default() }, graph)
}

pub(crate) fn parse(nodes: &str) -> Graph {
    frit_ir::text::parse(&format!("graph @g world=1 {{\n{nodes}\n}}")).expect("the text is a graph")
}

/// One line per node other than leaves: its operation, or the kind and the operations of a region, and the number of
/// operands and results.
pub(crate) fn outline(graph: &Graph) -> String {
    let mut lines = Vec::new();
    for (_, node) in graph.nodes() {
        match &node.op {
            Op::Fusion(fusion) => {
                let body = fusion.body.nodes().filter(|(_, n)| !n.op.is_leaf());
                let names: Vec<&str> = body.map(|(_, n)| n.op.name()).collect();
                let (i, o) = (node.inputs.len(), node.outputs.len());
                lines.push(format!("{}({}) {i}->{o}", fusion.kind.name(), names.join(" ")));
            }
            op if op.is_leaf() => {}
            op => lines.push(op.name().into()),
        }
    }
    lines.join("; ")
}

/// name | nodes | regions after
const CASES: &[(&str, &str, &str)] = &[
    (
        "a chain is one kernel",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %b: f32[6] = input {name = "b", ty = {"dtype":"f32","shape":[6]}}
           %s: f32[4, 6] = add %x, %b
           %y: f32[4, 6] = gelu %s
           return %y as "y""#,
        "pointwise(add gelu) 2->1",
    ),
    (
        "what is read outside becomes a result",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %s: f32[4, 6] = exp %x
           %y: f32[4, 6] = neg %s
           return %s as "s"
           return %y as "y""#,
        "pointwise(exp neg) 1->2",
    ),
    (
        "regions of different parts of the step stay apart",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %s: f32[4, 6] = exp %x
           %y: f32[4, 6] = neg %s @backward
           return %y as "y""#,
        "pointwise(exp) 1->1; pointwise(neg) 1->1",
    ),
    (
        "recomputations stay apart",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %s: f32[4, 6] = exp %x @recompute0
           %y: f32[4, 6] = neg %s @recompute1
           return %y as "y""#,
        "pointwise(exp) 1->1; pointwise(neg) 1->1",
    ),
    (
        "a path that leaves and comes back",
        r#"%x: f32[4, 4] = input {name = "x", ty = {"dtype":"f32","shape":[4,4]}}
           %a: f32[4, 4] = exp %x
           %m: f32[4, 4] = matmul %a, %x
           %y: f32[4, 4] = mul %a, %m
           return %y as "y""#,
        "pointwise(exp) 1->1; matmul; pointwise(mul) 2->1",
    ),
    (
        "a value that would be recomputed in every row stays",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %b: f32[6] = input {name = "b", ty = {"dtype":"f32","shape":[6]}}
           %e: f32[6] = exp %b
           %y: f32[4, 6] = mul %x, %e
           return %y as "y""#,
        "pointwise(exp) 1->1; pointwise(mul) 2->1",
    ),
    (
        "a value per column stays outside of a row reduction, even in a square",
        r#"%x: f32[6, 6] = input {name = "x", ty = {"dtype":"f32","shape":[6,6]}}
           %b: f32[6] = input {name = "b", ty = {"dtype":"f32","shape":[6]}}
           %e: f32[6] = neg %b
           %y: f32[6, 6] = mul %x, %e
           %r: f32[6] = reduce %y {axes = [1], f = "sum"}
           return %r as "r""#,
        "pointwise(neg) 1->1; row_reduce(mul reduce) 2->1",
    ),
    (
        "a value per row goes into a row reduction",
        r#"%x: f32[6, 6] = input {name = "x", ty = {"dtype":"f32","shape":[6,6]}}
           %r: f32[6, 1] = reduce %x {axes = [1], f = "max", keep_dims = true}
           %n: f32[6, 1] = neg %r
           %y: f32[6, 6] = add %x, %n
           return %y as "y""#,
        "row_reduce(reduce neg add) 1->1",
    ),
    (
        "residual, normalization and cast",
        r#"%x: f32[2, 3, 8] = input {name = "x", ty = {"dtype":"f32","shape":[2,3,8]}}
           %d: bf16[6, 8] = input {name = "d", ty = {"dtype":"bf16","shape":[6,8]}}
           %s: f32[8] = input {name = "s", ty = {"dtype":"f32","shape":[8]}}
           %r: bf16[2, 3, 8] = reshape %d {shape = [2,3,8]}
           %w: f32[2, 3, 8] = cast %r {to = "f32"}
           %h: f32[2, 3, 8] = add %x, %w
           %y: f32[2, 3, 8], %m: f32[2, 3], %q: f32[2, 3] = layer_norm %h, %s {axis = 2, eps = 0.1}
           %l: bf16[2, 3, 8] = cast %y {to = "bf16"}
           %f: bf16[6, 8] = reshape %l {shape = [6,8]}
           return %h as "h"
           return %f as "f""#,
        "reshape; row_reduce(cast add layer_norm cast) 3->2; reshape",
    ),
    (
        "no transcendental before an operation that reads its rows often",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %g: f32[4, 6] = gelu %x
           %y: f32[4, 6] = softmax %g {axis = 1}
           return %y as "y""#,
        "pointwise(gelu) 1->1; row_reduce(softmax) 1->1",
    ),
    (
        "a transcendental before one sum",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %g: f32[4, 6] = gelu %x
           %y: f32[4] = reduce %g {axes = [1], f = "sum"}
           return %y as "y""#,
        "row_reduce(gelu reduce) 1->1",
    ),
    (
        "logits stay an operand",
        r#"%x: bf16[4, 6] = input {name = "x", ty = {"dtype":"bf16","shape":[4,6]}}
           %t: i64[4] = input {name = "t", ty = {"dtype":"i64","shape":[4]}}
           %w: f32[4, 6] = cast %x {to = "f32"}
           %l: f32[4], %e: f32[4] = cross_entropy %w, %t {ignore_index = -100}
           %n: f32[4] = neg %l
           return %n as "n""#,
        "pointwise(cast) 1->1; row_reduce(cross_entropy neg) 2->1",
    ),
    (
        "sums over columns take their prologue and join",
        r#"%x: bf16[4, 6] = input {name = "x", ty = {"dtype":"bf16","shape":[4,6]}}
           %z: bf16[4, 6] = input {name = "z", ty = {"dtype":"bf16","shape":[4,6]}}
           %g: bf16[4, 6] = gelu_grad %x, %z
           %a: f32[6] = sum_to %g {dtype = "f32", shape = [6]}
           %b: f32[6] = sum_to %x {dtype = "f32", shape = [6]}
           return %a as "a"
           return %b as "b""#,
        "col_reduce(gelu_grad sum_to sum_to) 2->2",
    ),
    (
        "a prologue with another reader stays outside of a column reduction",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %g: f32[4, 6] = gelu %x
           %a: f32[6] = sum_to %g {shape = [6]}
           %m: f32[6, 6] = matmul %g, %x {trans_a = true}
           return %a as "a"
           return %m as "m""#,
        "pointwise(gelu) 1->1; gemm(sum_to matmul) 2->2",
    ),
    (
        "rows and columns of one grid are reduced in one kernel",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %a: f32[6] = sum_to %x {shape = [6]}
           %b: f32[4] = reduce %x {axes = [1], f = "sum"}
           return %a as "a"
           return %b as "b""#,
        "row_col_reduce(sum_to reduce) 1->2",
    ),
    (
        "a cheap cast is repeated in both readers",
        r#"%x: bf16[2, 4, 6] = input {name = "x", ty = {"dtype":"bf16","shape":[2,4,6]}}
           %c: f32[2, 4, 6] = cast %x {to = "f32"}
           %a: f32[6] = sum_to %c {shape = [6]}
           %b: f32[2] = reduce %c {axes = [1,2], f = "sum"}
           return %a as "a"
           return %b as "b""#,
        "col_reduce(cast sum_to) 1->1; row_reduce(cast reduce) 1->1",
    ),
    (
        "expensive work is not repeated",
        r#"%x: bf16[2, 4, 6] = input {name = "x", ty = {"dtype":"bf16","shape":[2,4,6]}}
           %c: bf16[2, 4, 6] = tanh %x
           %a: bf16[6] = sum_to %c {shape = [6]}
           %b: bf16[2] = reduce %c {axes = [1,2], f = "sum"}
           return %a as "a"
           return %b as "b""#,
        "row_reduce(tanh reduce) 1->2; col_reduce(sum_to) 1->1",
    ),
    (
        "a sum of two is not repeated where it is read less often than its operands",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %z: f32[4, 6] = input {name = "z", ty = {"dtype":"f32","shape":[4,6]}}
           %c: f32[4, 6] = add %x, %z
           %a: f32[6] = sum_to %c {shape = [6]}
           %b: f32[6] = sum_to %c {shape = [6]} @backward
           return %a as "a"
           return %b as "b""#,
        "pointwise(add) 2->1; col_reduce(sum_to) 1->1; col_reduce(sum_to) 1->1",
    ),
    (
        "bias and narrowing cast go into the matmul",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %w: f32[6, 5] = input {name = "w", ty = {"dtype":"f32","shape":[6,5]}}
           %b: f32[5] = input {name = "b", ty = {"dtype":"f32","shape":[5]}}
           %m: f32[4, 5] = matmul %x, %w
           %a: f32[4, 5] = add %b, %m
           %c: bf16[4, 5] = cast %a {to = "bf16"}
           %y: bf16[4, 5] = gelu %c
           return %y as "y""#,
        "gemm(matmul add cast) 3->1; pointwise(gelu) 1->1",
    ),
    (
        "a matmul with two readers keeps its bias outside",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %w: f32[6, 5] = input {name = "w", ty = {"dtype":"f32","shape":[6,5]}}
           %b: f32[5] = input {name = "b", ty = {"dtype":"f32","shape":[5]}}
           %m: f32[4, 5] = matmul %x, %w
           %a: f32[4, 5] = add %m, %b
           return %a as "a"
           return %m as "m""#,
        "matmul; pointwise(add) 2->1",
    ),
    (
        "a widening cast is no epilogue",
        r#"%x: bf16[4, 4] = input {name = "x", ty = {"dtype":"bf16","shape":[4,4]}}
           %n: bf16[4, 4] = matmul %x, %x
           %c: f32[4, 4] = cast %n {to = "f32"}
           return %c as "c""#,
        "matmul; pointwise(cast) 1->1",
    ),
    (
        "sharded values stay as they are",
        r#"%w: f32[4, 6] = param {init = {"constant":0.5}, kind = "trainable", name = "w", reason = "", sharded = true, ty = {"dtype":"f32","shape":[4,6]}, unit = 0}
           %c: bf16[4, 6] = cast %w {to = "bf16"}
           %g: bf16[4, 6] = all_gather %c {unit = 0}
           %y: bf16[4, 6] = neg %g
           return %y as "y""#,
        "cast; all_gather; pointwise(neg) 1->1",
    ),
    (
        "layout and embeddings stay nodes",
        r#"%t: f32[5, 6] = input {name = "t", ty = {"dtype":"f32","shape":[5,6]}}
           %i: i64[4] = input {name = "i", ty = {"dtype":"i64","shape":[4]}}
           %e: f32[4, 6] = embedding %t, %i
           %p: f32[6, 4] = transpose %e {perm = [1,0]}
           %y: f32[6, 4] = exp %p
           return %y as "y""#,
        "embedding; transpose; pointwise(exp) 1->1",
    ),
    (
        "a sum over the middle is no region",
        r#"%x: f32[2, 3, 4] = input {name = "x", ty = {"dtype":"f32","shape":[2,3,4]}}
           %y: f32[2, 4] = reduce %x {axes = [1], f = "sum"}
           return %y as "y""#,
        "reduce",
    ),
    (
        "a matmul takes over its bias and GELU, and stores what its gradient reads",
        r#"%x: f32[2, 4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[2,4,6]}}
           %w: f32[6, 8] = input {name = "w", ty = {"dtype":"f32","shape":[6,8]}}
           %b: f32[8] = input {name = "b", ty = {"dtype":"f32","shape":[8]}}
           %m: f32[2, 4, 8] = matmul %x, %w
           %s: f32[2, 4, 8] = add %m, %b
           %r: f32[8, 8] = reshape %s {shape = [8,8]}
           %y: f32[8, 8] = gelu_tanh %r
           %d: f32[8, 8] = gelu_tanh_grad %y, %r @backward
           return %y as "y"
           return %d as "d""#,
        "gemm(matmul add reshape gelu_tanh) 3->2; reshape; pointwise(gelu_tanh_grad) 2->1",
    ),
    (
        "GELU by the error function is not an epilogue of a matmul",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %w: f32[6, 8] = input {name = "w", ty = {"dtype":"f32","shape":[6,8]}}
           %m: f32[4, 8] = matmul %x, %w
           %y: f32[4, 8] = gelu %m
           return %y as "y""#,
        "matmul; pointwise(gelu) 1->1",
    ),
    (
        "a matmul takes over the gradient of GELU and the sum of its rows",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %w: f32[6, 8] = input {name = "w", ty = {"dtype":"f32","shape":[6,8]}}
           %h: f32[2, 2, 8] = input {name = "h", ty = {"dtype":"f32","shape":[2,2,8]}}
           %m: f32[4, 8] = matmul %x, %w
           %r: f32[2, 2, 8] = reshape %m {shape = [2,2,8]}
           %d: f32[2, 2, 8] = gelu_tanh_grad %r, %h
           %b: f32[8] = sum_to %d {shape = [8]}
           return %d as "d"
           return %b as "b""#,
        "gemm(matmul reshape gelu_tanh_grad sum_to) 3->2",
    ),
    (
        "a matmul with another reader does not take over its gradient of GELU",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %w: f32[6, 8] = input {name = "w", ty = {"dtype":"f32","shape":[6,8]}}
           %h: f32[4, 8] = input {name = "h", ty = {"dtype":"f32","shape":[4,8]}}
           %m: f32[4, 8] = matmul %x, %w
           %d: f32[4, 8] = gelu_tanh_grad %m, %h
           return %m as "m"
           return %d as "d""#,
        "matmul; pointwise(gelu_tanh_grad) 2->1",
    ),
    (
        "the gradient of a bias comes with that of its weight, on either side",
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
           %g: f32[4, 8] = input {name = "g", ty = {"dtype":"f32","shape":[4,8]}}
           %h: f32[2, 2, 8] = input {name = "h", ty = {"dtype":"f32","shape":[2,2,8]}}
           %w: f32[6, 8] = matmul %x, %g {trans_a = true}
           %b: f32[8] = sum_to %g {shape = [8]}
           %c: f32[8] = sum_to %h {shape = [8]}
           %r: f32[4, 8] = reshape %h {shape = [4,8]}
           %v: f32[8, 6] = matmul %r, %x {trans_a = true}
           return %w as "w"
           return %b as "b"
           return %c as "c"
           return %v as "v""#,
        "gemm(matmul sum_to) 2->2; gemm(sum_to reshape matmul) 2->2",
    ),
    (
        "a sum over an axis that the matmul keeps stays separate",
        r#"%x: f32[6, 6] = input {name = "x", ty = {"dtype":"f32","shape":[6,6]}}
           %w: f32[6, 6] = matmul %x, %x {trans_b = true}
           %b: f32[6] = sum_to %x {shape = [6]}
           return %w as "w"
           return %b as "b""#,
        "matmul; col_reduce(sum_to) 1->1",
    ),
    (
        "a sum on which the matmul depends stays before it",
        r#"%g: f32[4, 4] = input {name = "g", ty = {"dtype":"f32","shape":[4,4]}}
           %b: f32[4] = sum_to %g {shape = [4]}
           %s: f32[4, 4] = expand %b {shape = [4,4]}
           %t: f32[4, 4] = transpose %s {perm = [1,0]}
           %w: f32[4, 4] = matmul %t, %g
           return %b as "b"
           return %w as "w""#,
        "col_reduce(sum_to) 1->1; pointwise(expand) 1->1; transpose; matmul",
    ),
    (
        "8-bit matmuls quantize their operands, and the first computes the amax",
        r#"%x: bf16[16, 32] = input {name = "x", ty = {"dtype":"bf16","shape":[16,32]}}
           %w: bf16[32, 16] = input {name = "w", ty = {"dtype":"bf16","shape":[32,16]}}
           %g: bf16[16, 16] = input {name = "g", ty = {"dtype":"bf16","shape":[16,16]}}
           %b: bf16[16] = input {name = "b", ty = {"dtype":"bf16","shape":[16]}}
           %qx: bf16[16, 32], %ax: f32[] = quantize %x {index = 0, to = "f8e4m3"}
           %qw: bf16[32, 16], %aw: f32[] = quantize %w {index = 1, to = "f8e4m3"}
           %y: bf16[16, 16] = matmul %qx, %qw
           %z: bf16[16, 16] = add %y, %b
           %qg: bf16[16, 16], %ag: f32[] = quantize %g {index = 2, to = "f8e5m2"} @backward
           %dw: f32[32, 16] = matmul %qx, %qg {out = "f32", trans_a = true} @backward
           %dx: bf16[16, 32] = matmul %qg, %qw {trans_b = true} @backward
           return %z as "z"
           return %dw as "dw"
           return %dx as "dx"
           return %ax as "ax"
           return %aw as "aw"
           return %ag as "ag""#,
        "gemm(quantize quantize matmul add) 3->3; gemm(quantize quantize matmul) 2->2; \
         gemm(quantize quantize matmul) 2->1",
    ),
    (
        "a quantized tensor with another reader is quantized once, separately, for all",
        r#"%x: bf16[16, 32] = input {name = "x", ty = {"dtype":"bf16","shape":[16,32]}}
           %w: bf16[32, 16] = input {name = "w", ty = {"dtype":"bf16","shape":[32,16]}}
           %v: bf16[32, 16] = input {name = "v", ty = {"dtype":"bf16","shape":[32,16]}}
           %qx: bf16[16, 32], %ax: f32[] = quantize %x {index = 0, to = "f8e4m3"}
           %qw: bf16[32, 16], %aw: f32[] = quantize %w {index = 1, to = "f8e4m3"}
           %y: bf16[16, 16] = matmul %qx, %qw
           %z: bf16[16, 16] = matmul %qx, %v
           return %y as "y"
           return %z as "z""#,
        "quantize; quantize; matmul; matmul",
    ),
    (
        "a scalar is broadcast inside",
        r#"%s: f32[] = input {name = "s", ty = {"dtype":"f32","shape":[]}}
           %l: f32[] = loss_scale %s {factor = 0.5}
           %e: f32[4] = expand %l {shape = [4]}
           return %e as "e""#,
        "pointwise(loss_scale expand) 1->1",
    ),
];

#[test]
fn regions_are_those_expected() {
    for (name, nodes, after) in CASES {
        assert_eq!(outline(&fuse(&parse(nodes))), *after, "{name}");
    }
}

#[test]
fn a_region_that_is_not_compiled_is_split() {
    let nodes = CASES[0].1;
    let short =
        |body: &Graph, _: FusionKind| body.nodes().filter(|(_, n)| !n.op.is_leaf()).count() == 1;
    let fused = fuse_with(Fuse { supported: short, ..Fuse::default() }, &parse(nodes));
    assert_eq!(outline(&fused), "pointwise(add) 2->1; pointwise(gelu) 1->1");
    let never = fuse_with(Fuse { supported: |_, _| false, ..Fuse::default() }, &parse(nodes));
    assert_eq!(outline(&never), "add; gelu");
}

#[test]
fn equal_regions_have_equal_bodies_and_keep_their_origin() {
    let graph = parse(
        r#"%x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}} loc("x", "", "")
           %a: f32[4, 6] = exp %x loc("e0", "h.0", "")
           %b: f32[4, 6] = neg %a loc("n0", "h.0", "")
           %t: f32[6, 4] = transpose %b {perm = [1,0]} loc("t", "", "")
           %u: f32[4, 6] = transpose %t {perm = [1,0]} loc("u", "", "")
           %c: f32[4, 6] = exp %u loc("e1", "h.1", "")
           %d: f32[4, 6] = neg %c loc("n1", "h.1", "")
           return %d as "d""#,
    );
    let mut fused = graph.clone();
    let mut context = PassContext::default();
    Fuse::default().run(&mut fused, &mut context).expect("the pass succeeds");
    let regions: Vec<_> = fused
        .nodes()
        .filter_map(|(_, n)| match &n.op {
            Op::Fusion(f) => {
                Some((f.body.to_string(), n.origin.to_string(), n.origin.pass.clone()))
            }
            _ => None,
        })
        .collect();
    assert_eq!(regions.len(), 2);
    assert_eq!(regions[0].0, regions[1].0);
    assert_eq!(regions[0].1, "node \"e0\" in scope `h.0`");
    assert_eq!(&*regions[0].2, INFO.name);
    let messages: Vec<&str> = context.remarks.iter().map(|r| r.message.as_str()).collect();
    assert_eq!(messages[0], "one pointwise kernel: exp, neg");
    assert_eq!(messages[2], "4 nodes in 2 regions; they read and write 384 bytes, one by one 768");
    // Fusions are not fused again.
    let again = Fuse::default().run(&mut fused, &mut PassContext::default()).expect("it succeeds");
    assert_eq!(again, Changed::No);
}

#[test]
fn a_transformer_block_forward_and_backward() {
    let graph = parse(include_str!("../../../tests/golden/fuse/block.before.txt"));
    let fused = fuse(&graph);
    expect_test::expect_file!["../../../tests/golden/fuse/block.after.txt"]
        .assert_eq(&fused.to_string());
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
    (0..22usize, any::<[usize; 2]>(), 0..8usize, prop::bool::weighted(0.25))
        .prop_map(|(op, operands, region, is_output)| Step { op, operands, region, is_output })
}

fn op_of(step: &Step, a: &TensorType) -> Op {
    let (rank, pick) = (a.shape.rank(), step.operands[1]);
    let axis = if rank == 0 { 0 } else { pick % rank };
    match step.op {
        0 | 1 => Op::Binary([BinaryFn::Add, BinaryFn::Mul, BinaryFn::Max][pick % 3]),
        2 => Op::Unary(UnaryFn::Neg),
        3 => Op::Unary(UnaryFn::Tanh),
        4 | 5 => Op::Cast(Cast { to: [DType::BF16, DType::F32][pick % 2] }),
        6 => Op::Reshape(Reshape {
            shape: [vec![24], vec![4, 6], vec![2, 2, 6], vec![6, 4]][pick % 4].clone().into(),
        }),
        7 => Op::Expand(Expand {
            shape: [vec![4, 6], vec![2, 2, 6], vec![6, 4]][pick % 3].clone().into(),
        }),
        8 | 9 => Op::Reduce(Reduce {
            f: [ReduceFn::Sum, ReduceFn::Max][pick % 2],
            axes: (axis..rank).collect(),
            keep_dims: pick % 4 < 2,
        }),
        10 | 11 => Op::SumTo(SumTo { shape: Shape(a.shape.0[axis..].to_vec()), dtype: None }),
        12 => Op::Softmax(Softmax { axis: rank.saturating_sub(1) }),
        13 => Op::LayerNorm(LayerNorm { axis: rank.saturating_sub(1), eps: 0.1 }),
        14 => Op::MatMul(MatMul::default()),
        15 => Op::MatMul(MatMul { trans_a: true, ..MatMul::default() }),
        16 => Op::Transpose(Transpose { perm: (0..rank).rev().collect() }),
        17 => Op::SoftmaxGrad(SoftmaxGrad { axis: rank.saturating_sub(1) }),
        18 => Op::Compare(CompareFn::Lt),
        19 => Op::Select,
        20 => Op::Reduce(Reduce { f: ReduceFn::Sum, axes: vec![axis], keep_dims: true }),
        _ => Op::Constant(Constant { value: Tensor::splat(TensorType::scalar(a.dtype), 0.5) }),
    }
}

fn grow(steps: &[Step]) -> Graph {
    let mut graph = Graph::new("random");
    let mut values: Vec<ValueId> = Vec::new();
    let add = |graph: &mut Graph, op, inputs: &[ValueId], region| {
        graph.add(op, inputs, Origin::none(), region)
    };
    for (i, dims) in
        [vec![4, 6], vec![6], vec![4, 1], vec![2, 2, 6], vec![]].into_iter().enumerate()
    {
        let ty = TensorType::new(DType::F32, dims);
        let leaf = Op::Input(Input { name: format!("x{i}"), ty });
        values.extend(add(&mut graph, leaf, &[], Region::Forward).expect("a leaf"));
    }
    // Sorted by part of the step, so that no forward node reads a backward value.
    let mut steps: Vec<&Step> = steps.iter().collect();
    steps.sort_by_key(|s| s.region >= 5);
    for (i, step) in steps.into_iter().enumerate() {
        let region = if step.region >= 5 { Region::Backward } else { Region::Forward };
        // Later values are chosen more often, so that chains are long.
        let choose = |r: usize| {
            let n = values.len();
            if r.is_multiple_of(3) { values[r / 3 % n] } else { values[n - 1 - r / 3 % n.min(4)] }
        };
        let (a, b) = (choose(step.operands[0]), choose(step.operands[1]));
        let op = op_of(step, graph.ty(a));
        let added = [vec![], vec![a], vec![a, b], vec![b, a, a]].into_iter().find_map(|inputs| {
            if inputs.is_empty() != op.is_leaf() {
                return None;
            }
            add(&mut graph, op.clone(), &inputs, region).ok()
        });
        let Some(added) = added else { continue };
        if step.is_output {
            graph.add_output(&format!("y{i}"), added[0], OutputKind::Result);
        }
        values.extend(added);
    }
    if let Some(last) = values.last() {
        graph.add_output("last", *last, OutputKind::Result);
    }
    // A graph whose nodes are all dead is left as it is.
    graph.remove_dead();
    graph
}

#[test]
fn the_sum_of_two_gemms_of_one_row_is_the_bias_of_one_of_them() {
    let graph = frit_ir::text::parse(
        r#"graph @g world=1 {
  %x: f32[1, 3] = input {name = "x", ty = {"dtype": "f32", "shape": [1, 3]}}
  %w: f32[3, 4] = input {name = "w", ty = {"dtype": "f32", "shape": [3, 4]}}
  %v: f32[3, 4] = input {name = "v", ty = {"dtype": "f32", "shape": [3, 4]}}
  %a: f32[1, 4] = matmul %x, %w
  %b: f32[1, 4] = matmul %x, %v
  %y: f32[1, 4] = add %a, %b
  return %y as "y"
}"#,
    )
    .expect("parses");
    let fused = fuse_with(Fuse::default(), &graph);
    assert_eq!(fused.nodes().filter(|(_, n)| matches!(n.op, Op::Fusion(_))).count(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_graphs_compute_the_same(steps in prop::collection::vec(step(), 1..40)) {
        let graph = grow(&steps);
        let fused = fuse(&graph);
        for (_, node) in fused.nodes() {
            prop_assert!(!node.op.is_pointwise(), "{} is in no region", node.op.name());
        }
        // The order is deterministic.
        prop_assert_eq!(fused.to_string(), fuse(&graph).to_string());
    }
}
