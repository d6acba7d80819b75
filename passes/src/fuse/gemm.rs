//! Fuses matmuls with epilogues, and with reductions of their operands.
//!
//! A region of kind `Gemm` contains one `matmul` and one of
//!
//! - an `add` of a vector of n elements, the matmul's only reader, and then `gelu_tanh`; where the
//!   input of the function has other readers, such as its gradient, it is also a result;
//! - such an `add`, or none, and then an `add` of another tensor of the same size, its only reader: the residual stream;
//! - such an `add`, or none, and then a cast to a narrower dtype, its only reader;
//! - if the matmul is the gradient of a weight, an `add` of another f32 matrix that nothing else reads: the sum of the
//!   gradients over chunks of tokens, or over the uses of the weight, is accumulated in place;
//! - `gelu_tanh_grad`, the matmul's only reader, and then a sum over the rows of its result;
//! - a sum over the contracted axis of an operand: the gradient of a bias together with that of its weight.
//!
//! An 8-bit matmul includes the quantization of its operands ([`super::quantized`]).
//!
//! These are the epilogues of cuBLASLt (bias, GELU with auxiliary output, their gradients) and its matrix C. A matmul
//! without an epilogue stays a node.

use super::cluster::{Cluster, ClusterId, Clusters};
use super::{Rules, merge};
use frit_ir::ops::{BinaryFn, FusionKind, MatMul, Op, UnaryFn};
use frit_ir::{DType, Node, ValueId};

/// Forms the regions of all matmuls.
pub(super) fn form(clusters: &mut Clusters<'_, '_>) {
    for position in 0..clusters.facts.order.len() {
        let node = clusters.facts.node(position);
        let Op::MatMul(op) = &node.op else { continue };
        let empty = node.inputs.iter().chain(&node.outputs).any(|v| clusters.facts.numel(*v) == 0);
        if empty || clusters.facts.is_sharded(node) {
            continue;
        }
        // Already a region if it quantizes its operands.
        let id = clusters.owner[position];
        let rounded = id.and_then(|id| clusters.cluster(id));
        let mut members = rounded.map_or_else(|| vec![position], |c| c.members.clone());
        let grows = |members: &mut Vec<usize>, next: Option<usize>| {
            let grown = next.map(|next| [&members[..], &[next]].concat());
            match grown.filter(|grown| is_supported(clusters, grown, id)) {
                Some(grown) => *members = grown,
                None => return false,
            }
            true
        };
        let last = |members: &[usize]| clusters.facts.node(members[members.len() - 1]).outputs[0];
        if clusters.rules == Rules::Inductor {
            grows(&mut members, only_reader(clusters, node.outputs[0], node, is_bias));
        } else if grows(&mut members, gradient_of_gelu(clusters, position)) {
            let gradient = last(&members);
            grows(&mut members, sum_over_rows(clusters, gradient, node));
        } else {
            let follows: Follows = |clusters, node, value| {
                is_accumulation(clusters, node, value) || is_bias(clusters, node, value)
            };
            grows(&mut members, only_reader(clusters, node.outputs[0], node, follows));
            let sum = last(&members);
            if !grows(&mut members, gelu(clusters, sum, node))
                && !grows(&mut members, only_reader(clusters, sum, node, is_sum))
            {
                grows(&mut members, only_reader(clusters, sum, node, is_narrowing));
            }
        }
        if let Some(id) = id {
            clusters.grow(id, members);
        } else if members.len() > 1 {
            clusters.add(Cluster { kind: FusionKind::Gemm, members, copies: vec![] });
        } else if clusters.rules == Rules::Frit {
            join_sum(clusters, position, op);
        }
    }
}

type Follows = fn(&Clusters<'_, '_>, &Node, ValueId) -> bool;

/// Whether a node is still free to be fused with a library kernel.
pub(super) fn is_free(clusters: &Clusters<'_, '_>, at: usize, matmul: &Node) -> bool {
    let node = clusters.facts.node(at);
    clusters.owner[at].is_none() && node.region == matmul.region && !clusters.facts.is_sharded(node)
}

/// The only reader of `value`, if it may be the next node of the region.
pub(super) fn only_reader(
    clusters: &Clusters<'_, '_>,
    value: ValueId,
    matmul: &Node,
    follows: Follows,
) -> Option<usize> {
    let facts = clusters.facts;
    let [user] = *facts.uses(value) else { return None };
    let node = facts.node(user);
    // In the sum of two matmuls of one row, either could be the bias of the other.
    let fits = is_free(clusters, user, matmul)
        && !facts.escapes(value)
        && node.inputs.iter().filter(|v| facts.base(**v) == value).count() == 1
        && follows(clusters, node, value);
    fits.then_some(user)
}

/// Whether the node adds a vector along the last axis.
fn is_bias(clusters: &Clusters<'_, '_>, node: &Node, value: ValueId) -> bool {
    let graph = clusters.facts.graph;
    let Some(&other) = node.inputs.iter().find(|v| **v != value) else { return false };
    let (ty, bias) = (graph.ty(value), graph.ty(other));
    matches!(node.op, Op::Binary(BinaryFn::Add))
        && node.inputs.contains(&value)
        && ty == graph.ty(node.outputs[0])
        && bias.shape.dims().last() == ty.shape.dims().last()
        && bias.shape.0.last() == Some(&bias.shape.numel())
        && !clusters.facts.is_splat(other)
}

/// Whether the node adds the GEMM of a weight's gradient to a matrix that nothing else reads.
fn is_accumulation(clusters: &Clusters<'_, '_>, node: &Node, value: ValueId) -> bool {
    let facts = clusters.facts;
    let ty = facts.graph.ty(value);
    let Some(&other) = node.inputs.iter().find(|v| **v != value) else { return false };
    let matmul = facts.graph.def(value);
    let is_gradient = match &matmul.op {
        // The contracted axis is the first of the operands as they are stored: tokens.
        Op::MatMul(op) => op.trans_a && !op.trans_b,
        _ => false,
    };
    let sum = facts.base(other);
    // The GEMM does not wait for what is computed later.
    let comes_first = facts.source(sum) < facts.source(value);
    is_gradient
        && comes_first
        && matches!(node.op, Op::Binary(BinaryFn::Add))
        && ty.dtype == DType::F32
        && ty == facts.graph.ty(other)
        && !facts.graph.def(sum).op.is_leaf()
        && facts.uses(sum).len() == 1
        && !facts.escapes(sum)
}

/// Whether the node adds another tensor of the same size that is computed before, such as the residual stream.
fn is_sum(clusters: &Clusters<'_, '_>, node: &Node, value: ValueId) -> bool {
    let facts = clusters.facts;
    let like = |v: &ValueId| {
        facts.graph.ty(*v).dtype == facts.graph.ty(value).dtype
            && facts.numel(*v) == facts.numel(value)
            && !facts.is_splat(*v)
    };
    // Not a leaf: a sum over micro-steps is made of flat gradients.
    let comes_first = |v: &ValueId| {
        let base = facts.base(*v);
        base == value
            || facts.source(base) < facts.source(value) && !facts.graph.def(base).op.is_leaf()
    };
    matches!(node.op, Op::Binary(BinaryFn::Add))
        && node.inputs.iter().all(comes_first)
        && node.inputs.iter().chain(&node.outputs).all(like)
}

fn is_narrowing(clusters: &Clusters<'_, '_>, node: &Node, value: ValueId) -> bool {
    let graph = clusters.facts.graph;
    let (from, to) = (graph.ty(value).dtype, graph.ty(node.outputs[0]).dtype);
    node.inputs == [value]
        && matches!(node.op, Op::Cast(_))
        && to.is_float()
        && to.size() < from.size()
}

/// The GELU of a matmul, or of its sum with a bias. Only the tanh form, which cuBLASLt computes.
fn gelu(clusters: &Clusters<'_, '_>, sum: ValueId, matmul: &Node) -> Option<usize> {
    let is_gelu = |at: &usize| {
        matches!(clusters.facts.node(*at).op, Op::Unary(UnaryFn::GeluTanh))
            && is_free(clusters, *at, matmul)
    };
    clusters.facts.uses(sum).iter().copied().find(is_gelu)
}

/// The gradient of GELU, where the matmul is the gradient of its result.
fn gradient_of_gelu(clusters: &Clusters<'_, '_>, position: usize) -> Option<usize> {
    let matmul = clusters.facts.node(position);
    only_reader(clusters, matmul.outputs[0], matmul, |clusters, node, value| {
        let facts = clusters.facts;
        matches!(node.op, Op::Binary(BinaryFn::GeluTanhGrad))
            && facts.base(node.inputs[0]) == value
            && facts.numel(node.inputs[0]) == facts.numel(node.inputs[1])
    })
}

/// The sum over all rows of the result of a matmul's region.
fn sum_over_rows(clusters: &Clusters<'_, '_>, value: ValueId, matmul: &Node) -> Option<usize> {
    let facts = clusters.facts;
    let n = *facts.graph.ty(matmul.outputs[0]).shape.0.last()?;
    let is_sum = |at: &usize| sums_to(clusters, *at, n) && is_free(clusters, *at, matmul);
    facts.uses(value).iter().copied().find(is_sum)
}

/// Whether a node sums everything but a last axis of this size.
fn sums_to(clusters: &Clusters<'_, '_>, at: usize, size: usize) -> bool {
    let (facts, node) = (clusters.facts, clusters.facts.node(at));
    let last = |v: ValueId| facts.graph.ty(v).shape.0.last() == Some(&size);
    matches!(node.op, Op::SumTo(_))
        && last(node.inputs[0])
        && last(node.outputs[0])
        && facts.numel(node.outputs[0]) == size
}

/// Fuses a matmul with the sum of one of its operands over the contracted axis.
fn join_sum(clusters: &mut Clusters<'_, '_>, position: usize, op: &MatMul) {
    let facts = clusters.facts;
    let matmul = facts.node(position);
    let [a, b] = [0, 1].map(|i| facts.graph.ty(matmul.inputs[i]));
    let dims = op.dims(a, b);
    if dims.batch != 1 {
        return;
    }
    // The contracted axis comes first.
    let sides = [(op.trans_a, dims.m), (!op.trans_b, dims.n)];
    for (&operand, (first, size)) in matmul.inputs.iter().zip(sides) {
        let sums = |at: &usize| {
            facts.base(facts.node(*at).inputs[0]) == facts.base(operand)
                && sums_to(clusters, *at, size)
                && is_free(clusters, *at, matmul)
        };
        let Some(sum) = facts.uses(facts.base(operand)).iter().copied().find(sums) else {
            continue;
        };
        let mut members = vec![sum, position];
        members.sort_unstable();
        if !first || !is_supported(clusters, &members, None) {
            continue;
        }
        let one = |at| Cluster { kind: FusionKind::Gemm, members: vec![at], copies: vec![] };
        let parts = [sum, position].map(|at| clusters.add(one(at)));
        let comes_back = merge::is_reentrant(clusters, &members, parts[0], parts[1]);
        parts.iter().for_each(|part| clusters.remove(*part));
        if !comes_back {
            clusters.add(Cluster { kind: FusionKind::Gemm, members, copies: vec![] });
            return;
        }
    }
}

fn is_supported(clusters: &Clusters<'_, '_>, members: &[usize], id: Option<ClusterId>) -> bool {
    let replaced: Vec<ClusterId> = id.into_iter().collect();
    let interface = clusters.interface(members, &replaced).of_library(clusters.facts);
    let body = super::emit::body(clusters.facts, FusionKind::Gemm, members, &interface);
    body.is_ok_and(|body| clusters.is_supported(&body, FusionKind::Gemm))
}

#[cfg(test)]
mod tests {
    use crate::fuse::tests::{fuse, outline, parse};

    /// The regions of a matmul of `%x` and `%w` of shape [2, 3, 4], and what follows: `%b` is a bias, `%r` a stream.
    fn regions(rest: &str) -> String {
        let leaves = r#"
            %x: bf16[2, 3, 6] = input {name = "x", ty = {"dtype":"bf16","shape":[2,3,6]}}
            %w: bf16[6, 4] = input {name = "w", ty = {"dtype":"bf16","shape":[6,4]}}
            %b: f32[4] = input {name = "b", ty = {"dtype":"f32","shape":[4]}}
            %t: f32[2, 3, 4] = input {name = "t", ty = {"dtype":"f32","shape":[2,3,4]}}
            %r: f32[2, 3, 4] = exp %t
            %m: f32[2, 3, 4] = matmul %x, %w {out = "f32"}"#;
        outline(&fuse(&parse(&format!("{leaves}\n{rest}"))))
    }

    #[test]
    fn the_residual_stream_is_added_by_the_gemm() {
        let biased = regions(
            r#"%a: f32[2, 3, 4] = add %m, %b
               %s: f32[2, 3, 4] = add %r, %a
               %y: f32[2, 3, 4] = neg %s
               return %s as "s"
               return %y as "y""#,
        );
        assert_eq!(biased, "pointwise(exp) 1->1; gemm(matmul add add) 4->1; pointwise(neg) 1->1");
        let reshaped = regions(
            r#"%f: f32[6, 4] = reshape %m {shape = [6,4]}
               %g: f32[6, 4] = reshape %r {shape = [6,4]}
               %s: f32[6, 4] = add %f, %g
               return %s as "s""#,
        );
        assert_eq!(reshaped, "pointwise(exp) 1->1; reshape; gemm(matmul reshape add) 3->1");
    }

    #[test]
    fn what_is_read_elsewhere_a_leaf_or_a_broadcast_is_not_added() {
        let read_twice = regions(
            r#"%s: f32[2, 3, 4] = add %m, %r
               return %s as "s"
               return %m as "m""#,
        );
        assert_eq!(read_twice, "matmul; pointwise(exp add) 2->1");
        let leaf = regions(
            r#"%s: f32[2, 3, 4] = add %m, %t
               return %s as "s""#,
        );
        assert_eq!(leaf, "matmul; pointwise(add) 2->1");
        let one_row = regions(
            r#"%c: f32[1, 3, 4] = input {name = "c", ty = {"dtype":"f32","shape":[1,3,4]}}
               %s: f32[2, 3, 4] = add %m, %c
               return %s as "s""#,
        );
        assert_eq!(one_row, "matmul; pointwise(add) 2->1");
    }
}
