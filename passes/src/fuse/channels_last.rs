//! Makes the transposes around operations on images part of their kernels, which read and write images channels last.
//!
//! A region of kind `ChannelsLast`, or `BatchNorm` without a ReLU, has one operation, the transposes that only it reads and that put
//! channels behind the first axis, and those of its results that put them last.

use super::cluster::{Cluster, Clusters};
use super::gemm::{is_free, only_reader};
use super::{emit, merge};
use crate::channels_last::{Images, images};
use frit_ir::ops::FusionKind;
use frit_ir::{Node, Op, ValueId};

/// Forms the regions of all operations on images that lie channels last.
pub(super) fn form(clusters: &mut Clusters<'_, '_>) {
    for position in 0..clusters.facts.order.len() {
        let node = clusters.facts.node(position);
        let Some(images) = images(clusters.facts.graph, node) else { continue };
        if clusters.owner[position].is_some() || clusters.facts.is_sharded(node) {
            continue;
        }
        let Some(mut members) = transposes(clusters, node, &images) else { continue };
        members.push(position);
        members.sort_unstable();
        let kind = match &node.op {
            Op::BatchNorm(_) | Op::BatchNormGrad(_) => FusionKind::BatchNorm,
            _ => FusionKind::ChannelsLast,
        };
        add(clusters, kind, members);
    }
}

/// Adds a region, if it may be one.
pub(super) fn add(clusters: &mut Clusters<'_, '_>, kind: FusionKind, members: Vec<usize>) {
    let interface = clusters.interface(&members, &[]);
    let body = emit::body(clusters.facts, kind, &members, &interface);
    if !body.is_ok_and(|body| clusters.is_supported(&body, kind)) {
        return;
    }
    let id = clusters.add(Cluster { kind, members: members.clone(), copies: vec![] });
    if merge::is_reentrant(clusters, &members, id, id) {
        clusters.remove(id);
    }
}

/// Positions of the transposes before and behind all images of a node.
fn transposes(clusters: &Clusters<'_, '_>, node: &Node, images: &Images) -> Option<Vec<usize>> {
    let before = images.operands.iter().map(|v| transpose_before(clusters, node, *v));
    let behind = images.results.iter().map(|v| transpose_behind(clusters, node, *v));
    before.chain(behind).collect()
}

/// Position of the transpose that puts channels behind the first axis for this node alone.
pub(super) fn transpose_before(
    clusters: &Clusters<'_, '_>,
    node: &Node,
    operand: ValueId,
) -> Option<usize> {
    let facts = clusters.facts;
    let at = facts.def(operand);
    let is_transpose = matches!(&facts.node(at).op, Op::Transpose(op) if op.puts_channels_first());
    let is_read_here = facts.uses(operand).len() == 1 && !facts.escapes(operand);
    (is_transpose && is_read_here && is_free(clusters, at, node)).then_some(at)
}

/// Position of the transpose that puts the channels of a result last, the only reader of it.
pub(super) fn transpose_behind(
    clusters: &Clusters<'_, '_>,
    node: &Node,
    result: ValueId,
) -> Option<usize> {
    only_reader(
        clusters,
        result,
        node,
        |_, reader, _| matches!(&reader.op, Op::Transpose(op) if op.puts_channels_last()),
    )
}
