//! Fuses the quantization of operands into 8-bit matmuls.
//!
//! A region has a `matmul` and the quantization of its two operands. A tensor that several matmuls read is quantized by each, in the
//! layout it needs; the first also returns its amax. A tensor with other readers is quantized once, separately, for all.

use super::cluster::{Cluster, Clusters, Interface};
use super::emit;
use frit_ir::ops::{FusionKind, Op};
use std::collections::BTreeMap;

/// Forms the regions of all such matmuls.
pub(super) fn form(clusters: &mut Clusters<'_, '_>) {
    let facts = clusters.facts;
    // The `quantize` nodes of the operands of each matmul.
    let mut matmuls: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for at in 0..facts.order.len() {
        let node = facts.node(at);
        if !matches!(node.op, Op::MatMul(_)) || facts.is_sharded(node) {
            continue;
        }
        let mut rounded: Vec<usize> = node.inputs.iter().map(|v| facts.source(*v)).collect();
        rounded.sort_unstable();
        rounded.dedup();
        let all = rounded.iter().all(|at| matches!(facts.node(*at).op, Op::Quantize(_)));
        if all && is_supported(clusters, &rounded, at) {
            matmuls.insert(at, rounded);
        }
    }
    loop {
        let apart = |at: &usize| {
            let value = facts.node(*at).outputs[0];
            facts.escapes(value) || facts.uses(value).iter().any(|user| !matmuls.contains_key(user))
        };
        let left = |rounded: &Vec<usize>| rounded.iter().any(apart);
        let gone: Vec<usize> = matmuls.iter().filter(|(_, r)| left(r)).map(|(at, _)| *at).collect();
        if gone.is_empty() {
            break;
        }
        gone.iter().for_each(|at| drop(matmuls.remove(at)));
    }
    for (at, rounded) in matmuls {
        let is_copy = |at: &usize| clusters.owner[*at].is_some();
        let copies: Vec<usize> = rounded.iter().copied().filter(is_copy).collect();
        let members = [&rounded[..], &[at]].concat();
        let id = clusters.add(Cluster { kind: FusionKind::Gemm, members, copies: copies.clone() });
        copies.into_iter().for_each(|copy| clusters.computed_by[copy].push(id));
    }
}

/// Whether there is a kernel for the matmul alone.
fn is_supported(clusters: &Clusters<'_, '_>, rounded: &[usize], matmul: usize) -> bool {
    let members = [rounded, &[matmul]].concat();
    let results = vec![clusters.facts.node(matmul).outputs[0]];
    let interface = Interface { results, ..clusters.interface(&members, &[]) };
    let body = emit::body(clusters.facts, FusionKind::Gemm, &members, &interface);
    body.is_ok_and(|body| clusters.is_supported(&body, FusionKind::Gemm))
}
