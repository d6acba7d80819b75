//! Fuses attention with the layout operations around it.
//!
//! A region of kind `Attention` has one `attention` or `attention_grad`; copies of the reshapes, transposes, splits, slices and random
//! masks that produce its operands (other readers keep the originals); and the transposes and the concat that are the only readers of its
//! results. Layouts that strides cannot express stay outside.

use super::cluster::{Cluster, Clusters};
use super::{INFO, Rules, emit};
use crate::pass::bug;
use frit_ir::ops::{FusionKind, Transpose};
use frit_ir::{Code, Diagnostic, Graph, Node, NodeId, Op, ValueId};

/// Position of attention's result among the operands of its gradient.
const GRADIENTS_Y: usize = 4;

/// Forms the regions of all attentions.
pub(super) fn form(clusters: &mut Clusters<'_, '_>) {
    for position in 0..clusters.facts.order.len() {
        let node = clusters.facts.node(position);
        let empty = node.inputs.iter().chain(&node.outputs).any(|v| clusters.facts.numel(*v) == 0);
        let is_attention = matches!(node.op, Op::Attention(_) | Op::AttentionGrad(_));
        if !is_attention || empty || clusters.facts.is_sharded(node) {
            continue;
        }
        let mut cluster =
            Cluster { kind: FusionKind::Attention, members: vec![position], copies: vec![] };
        for &operand in &node.inputs {
            let before = producers(clusters, operand);
            let grown = with(&cluster, &before, &before);
            if grown.members.len() > cluster.members.len() && is_supported(clusters, &grown) {
                cluster = grown;
            }
        }
        let behind: Vec<Vec<usize>> =
            node.outputs.iter().map(|v| consumers(clusters, node, *v)).collect();
        let all = with(&cluster, &behind.concat(), &[]);
        let joins = clusters.rules == Rules::Frit && all_parts_inside(clusters, &all);
        if joins && is_supported(clusters, &all) {
            cluster = all;
        } else {
            for mut members in behind {
                members.retain(|m| !matches!(clusters.facts.node(*m).op, Op::Concat(_)));
                let grown = with(&cluster, &members, &[]);
                if is_supported(clusters, &grown) {
                    cluster = grown;
                }
            }
        }
        if cluster.members.len() > 1 {
            clusters.add(cluster);
        }
    }
}

/// Makes gradients read attention's result through the transpose that the forward pass reads, so that it is stored in
/// one layout only.
pub(super) fn share_layout(graph: &mut Graph) -> Result<(), Diagnostic> {
    let users = graph.users();
    let mut edits: Vec<(ValueId, Vec<usize>, Vec<NodeId>)> = Vec::new();
    for (_, node) in graph.nodes() {
        let (Op::Attention(_), Some(&y)) = (&node.op, node.outputs.first()) else { continue };
        let (gradients, others): (Vec<NodeId>, Vec<NodeId>) =
            users[y.0 as usize].iter().partition(|id| {
                let user = graph.node(**id);
                let times = user.inputs.iter().filter(|v| **v == y).count();
                matches!(user.op, Op::AttentionGrad(_)) && times == 1
            });
        let [other] = others[..] else { continue };
        let Op::Transpose(op) = &graph.node(other).op else { continue };
        if !gradients.is_empty() && graph.outputs.iter().all(|o| o.value != y) {
            edits.push((graph.node(other).outputs[0], op.perm.clone(), gradients));
        }
    }
    if edits.is_empty() {
        return Ok(());
    }
    for (transposed, perm, gradients) in edits {
        let mut inverse = vec![0; perm.len()];
        perm.iter().enumerate().for_each(|(i, &p)| inverse[p] = i);
        for id in gradients {
            let node = graph.node(id);
            let (origin, region) = (node.origin.by(INFO.name), node.region);
            let mut inputs = node.inputs.clone();
            let op = Op::Transpose(Transpose { perm: inverse.clone() });
            let y = graph.add1(op, &[transposed], origin, region).map_err(bug(INFO.name))?;
            inputs[GRADIENTS_Y] = y;
            graph.set_inputs(id, inputs).map_err(bug(INFO.name))?;
        }
    }
    graph.sort().map_err(|_| {
        Diagnostic::error(
            Code::PassFailed,
            "internal error in pass `fuse`: a cycle through attention",
        )
        .help("this is a bug in frit; please report it with the model")
    })
}

/// The cluster with more members, some of them copies.
fn with(cluster: &Cluster, members: &[usize], copies: &[usize]) -> Cluster {
    let mut grown = cluster.clone();
    grown.members.extend(members);
    grown.members.sort_unstable();
    grown.members.dedup();
    grown.copies.extend(copies);
    grown.copies.sort_unstable();
    grown.copies.dedup();
    grown
}

/// Positions of the layout operations, other than reshapes, between memory and an operand, or of the random mask.
fn producers(clusters: &Clusters<'_, '_>, operand: ValueId) -> Vec<usize> {
    let facts = clusters.facts;
    let (mut found, mut value) = (Vec::new(), operand);
    loop {
        let position = facts.source(value);
        let node = facts.node(position);
        let is_random = matches!(node.op, Op::RandomMask(_));
        let is_layout = matches!(node.op, Op::Transpose(_) | Op::Split(_) | Op::Slice(_));
        if !(is_layout || is_random) || clusters.owner[position].is_some() || facts.is_sharded(node)
        {
            return found;
        }
        found.push(position);
        value = node.inputs[0];
    }
}

/// Positions of the layout operations, other than reshapes, that are the only readers of a result.
fn consumers(clusters: &Clusters<'_, '_>, attention: &Node, result: ValueId) -> Vec<usize> {
    let facts = clusters.facts;
    let (mut found, mut value) = (Vec::new(), result);
    loop {
        let [user] = *facts.uses(value) else { return found };
        let node = facts.node(user);
        let fits = matches!(node.op, Op::Transpose(_) | Op::Concat(_))
            && !facts.escapes(value)
            && clusters.owner[user].is_none()
            && node.region == attention.region
            && !facts.is_sharded(node);
        if !fits {
            return found;
        }
        found.push(user);
        value = node.outputs[0];
    }
}

/// Whether the region computes every operand of its concats: another operand could depend on the region.
fn all_parts_inside(clusters: &Clusters<'_, '_>, cluster: &Cluster) -> bool {
    let facts = clusters.facts;
    cluster.members.iter().map(|m| facts.node(*m)).all(|node| {
        !matches!(node.op, Op::Concat(_))
            || node.inputs.iter().all(|v| cluster.members.contains(&facts.source(*v)))
    })
}

fn is_supported(clusters: &Clusters<'_, '_>, cluster: &Cluster) -> bool {
    let interface =
        clusters.interface(&cluster.members, &[]).without(clusters.facts, &cluster.copies);
    let body = emit::body(clusters.facts, cluster.kind, &cluster.members, &interface);
    body.is_ok_and(|body| clusters.is_supported(&body, cluster.kind))
}
