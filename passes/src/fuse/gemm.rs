//! Matrix products that take over what follows: a bias along n, then a cast to a narrower type.
//!
//! A region of kind `Gemm` holds one `matmul`; at most one `add` of a vector of n elements, the product's
//! only reader; at most one cast to fewer bytes, the only reader of the result so far. A product that
//! nothing follows stays a node.

use super::cluster::{Cluster, Clusters};
use frit_ir::ops::{BinaryFn, FusionKind, Op};
use frit_ir::{Node, ValueId};

/// Forms the regions of all matrix products.
pub(super) fn form(clusters: &mut Clusters<'_, '_>) {
    for position in 0..clusters.facts.order.len() {
        let node = clusters.facts.node(position);
        let empty = node.inputs.iter().chain(&node.outputs).any(|v| clusters.facts.numel(*v) == 0);
        if !matches!(node.op, Op::MatMul(_)) || empty || clusters.facts.is_sharded(node) {
            continue;
        }
        let mut members = vec![position];
        for follows in [is_bias as Follows, is_narrowing] {
            let last = clusters.facts.node(members[members.len() - 1]).outputs[0];
            if let Some(next) = next(clusters, last, node, follows) {
                let grown = [&members[..], &[next]].concat();
                if is_supported(clusters, &grown) {
                    members = grown;
                }
            }
        }
        if members.len() > 1 {
            clusters.add(Cluster { kind: FusionKind::Gemm, members, copies: vec![] });
        }
    }
}

type Follows = fn(&Clusters<'_, '_>, &Node, ValueId) -> bool;

/// The only reader of `value`, if it may follow.
fn next(
    clusters: &Clusters<'_, '_>,
    value: ValueId,
    product: &Node,
    follows: Follows,
) -> Option<usize> {
    let facts = clusters.facts;
    let [user] = *facts.uses(value) else { return None };
    let node = facts.node(user);
    // The sum of two products of one row could be the bias of either.
    let fits = clusters.owner[user].is_none()
        && !facts.escapes(value)
        && node.region == product.region
        && !facts.is_sharded(node)
        && node.inputs.iter().filter(|v| **v == value).count() == 1
        && follows(clusters, node, value);
    fits.then_some(user)
}

/// Whether the node adds a vector along the last axis.
fn is_bias(clusters: &Clusters<'_, '_>, node: &Node, value: ValueId) -> bool {
    let graph = clusters.facts.graph;
    let Some(&other) = node.inputs.iter().find(|v| **v != value) else { return false };
    let (ty, bias) = (graph.ty(value), graph.ty(other));
    matches!(node.op, Op::Binary(BinaryFn::Add))
        && ty == graph.ty(node.outputs[0])
        && bias.shape.dims().last() == ty.shape.dims().last()
        && bias.shape.0.last() == Some(&bias.shape.numel())
        && !clusters.facts.is_splat(other)
}

fn is_narrowing(clusters: &Clusters<'_, '_>, node: &Node, value: ValueId) -> bool {
    let graph = clusters.facts.graph;
    let (from, to) = (graph.ty(value).dtype, graph.ty(node.outputs[0]).dtype);
    matches!(node.op, Op::Cast(_)) && to.is_float() && to.size() < from.size()
}

fn is_supported(clusters: &Clusters<'_, '_>, members: &[usize]) -> bool {
    let interface = clusters.interface(members, &[]);
    let body = super::emit::body(clusters.facts, FusionKind::Gemm, members, &interface);
    body.is_ok_and(|body| clusters.is_supported(&body, FusionKind::Gemm))
}
