//! Fuses batch normalizations with the ReLU around them.
//!
//! A region of kind `BatchNorm` contains
//!
//! - a `batch_norm`, the `add` of another tensor of the same size, or none, and a `relu`, each the only reader of what is before it; or
//! - the `add` of two gradients, or none, the `relu_grad` that is its only reader, and the `batch_norm_grad` of its result, which is also
//!   a result of the region where it has other readers, such as a residual connection.
//!
//! So the normalized values, the sum and the gradient before it have no memory of their own. Images that lie channels last are
//! transposed inside ([`super::channels_last`]).

use super::Rules;
use super::channels_last::{add, transpose_before, transpose_behind};
use super::cluster::Clusters;
use super::gemm::{is_free, only_reader};
use frit_ir::ops::{BinaryFn, FusionKind, UnaryFn};
use frit_ir::{Node, Op, ValueId};

/// Forms the regions of all batch normalizations.
pub(super) fn form(clusters: &mut Clusters<'_, '_>) {
    if clusters.rules != Rules::Frit {
        return;
    }
    for position in 0..clusters.facts.order.len() {
        let node = clusters.facts.node(position);
        let members = match &node.op {
            _ if clusters.facts.is_sharded(node) => None,
            Op::BatchNorm(_) => forward(clusters, position, node),
            Op::BatchNormGrad(_) => backward(clusters, position, node),
            _ => None,
        };
        let Some(mut members) = members else { continue };
        members.sort_unstable();
        add(clusters, FusionKind::BatchNorm, members);
    }
}

/// A batch normalization with what follows.
fn forward(clusters: &Clusters<'_, '_>, position: usize, norm: &Node) -> Option<Vec<usize>> {
    let mut members = vec![position];
    let mut last = norm.outputs[0];
    if let Some(transposed) = transpose_behind(clusters, norm, last) {
        members.extend([transpose_before(clusters, norm, norm.inputs[0])?, transposed]);
        last = clusters.facts.node(transposed).outputs[0];
    }
    if let Some(add) = only_reader(clusters, last, norm, is_residual) {
        members.push(add);
        last = clusters.facts.node(add).outputs[0];
    }
    let relu = only_reader(clusters, last, norm, |_, node, _| {
        matches!(node.op, Op::Unary(UnaryFn::Relu))
    })?;
    members.push(relu);
    Some(members)
}

/// Whether the node adds another tensor of the same size that is computed before.
fn is_residual(clusters: &Clusters<'_, '_>, node: &Node, value: ValueId) -> bool {
    let facts = clusters.facts;
    let fits = |v: &ValueId| {
        let comes_first = *v == value || facts.source(*v) < facts.source(value);
        comes_first && is_alike(clusters, value, *v)
    };
    matches!(node.op, Op::Binary(BinaryFn::Add)) && node.inputs.iter().all(fits)
}

/// Whether two values have one type, and the second is in memory.
fn is_alike(clusters: &Clusters<'_, '_>, value: ValueId, other: ValueId) -> bool {
    let graph = clusters.facts.graph;
    graph.ty(value) == graph.ty(other) && !clusters.facts.is_splat(other)
}

/// The gradient of a batch normalization with what comes before it.
fn backward(clusters: &Clusters<'_, '_>, position: usize, norm: &Node) -> Option<Vec<usize>> {
    let facts = clusters.facts;
    let (mut dy, mut members) = (norm.inputs[0], vec![position]);
    if let Some(transposed) = transpose_before(clusters, norm, dy) {
        members.extend([
            transposed,
            transpose_before(clusters, norm, norm.inputs[1])?,
            transpose_behind(clusters, norm, norm.outputs[0])?,
        ]);
        dy = facts.node(transposed).inputs[0];
    }
    // The operation that computes a value, if it may be the region's first and has operands of this size.
    let before = |value: ValueId, op: BinaryFn| {
        let at = facts.def(value);
        let node = facts.node(at);
        let fits = matches!(&node.op, Op::Binary(found) if *found == op)
            && is_free(clusters, at, norm)
            && node.inputs.iter().all(|v| is_alike(clusters, dy, *v));
        fits.then_some((at, node))
    };
    let (gate, node) = before(dy, BinaryFn::ReluGrad)?;
    let sum = node.inputs[0];
    let is_read_here = *facts.uses(sum) == [gate] && !facts.escapes(sum);
    let add = before(sum, BinaryFn::Add).filter(|_| is_read_here).map(|(at, _)| at);
    members.extend(add.into_iter().chain([gate]));
    Some(members)
}

#[cfg(test)]
mod tests {
    use crate::fuse::tests::{fuse, outline, parse};

    /// The regions of a batch normalization of `%x`, and what follows: `%r` is a residual stream, `%z` the result of a ReLU, `%g` and
    /// `%h` its gradients.
    fn regions(rest: &str) -> String {
        let image = |name: &str| {
            let ty = r#"{"dtype":"f32","shape":[2,3,4,4]}"#;
            format!("%{name}: f32[2, 3, 4, 4] = input {{name = \"{name}\", ty = {ty}}}\n")
        };
        let vector = |name: &str| {
            let ty = r#"{"dtype":"f32","shape":[3]}"#;
            format!("%{name}: f32[3] = input {{name = \"{name}\", ty = {ty}}}\n")
        };
        let images: String = ["x", "r", "z", "g", "h"].map(image).concat();
        let vectors: String = ["s", "b", "m", "v"].map(vector).concat();
        outline(&fuse(&parse(&format!("{images}{vectors}{rest}"))))
    }

    const NORM: &str =
        "%y: f32[2, 3, 4, 4], %mean: f32[3], %var: f32[3] = batch_norm %x, %s, %b {eps = 0.00001}";
    const GRADIENT: &str = "%dx: f32[2, 3, 4, 4], %ds: f32[3], %db: f32[3] = batch_norm_grad %d, %x, %s, %m, %v {eps = 0.00001}
        return %dx as \"dx\"
        return %ds as \"ds\"
        return %db as \"db\"";

    #[test]
    fn relu_follows() {
        let found = regions(&format!(
            "{NORM}\n%o: f32[2, 3, 4, 4] = relu %y\nreturn %o as \"o\"\nreturn %mean as \"mean\""
        ));
        assert_eq!(found, "batch_norm(batch_norm relu) 3->2");
    }

    #[test]
    fn a_residual_is_added_from_either_side() {
        for sum in ["%y, %r", "%r, %y"] {
            let rest = format!(
                "{NORM}\n%t: f32[2, 3, 4, 4] = add {sum}\n%o: f32[2, 3, 4, 4] = relu %t\nreturn %o as \"o\""
            );
            assert_eq!(regions(&rest), "batch_norm(batch_norm add relu) 4->1");
        }
    }

    #[test]
    fn what_is_read_elsewhere_is_in_memory() {
        let found = regions(&format!(
            "{NORM}\n%o: f32[2, 3, 4, 4] = relu %y\nreturn %o as \"o\"\nreturn %y as \"y\""
        ));
        assert_eq!(found, "batch_norm; pointwise(relu) 1->1");
    }

    #[test]
    fn gradients_pass_the_gate() {
        let gate = format!("%d: f32[2, 3, 4, 4] = relu_grad %g, %z\n{GRADIENT}");
        assert_eq!(regions(&gate), "batch_norm(relu_grad batch_norm_grad) 6->3");
        let sum = format!(
            "%t: f32[2, 3, 4, 4] = add %g, %h\n%d: f32[2, 3, 4, 4] = relu_grad %t, %z\n{GRADIENT}"
        );
        assert_eq!(regions(&sum), "batch_norm(add relu_grad batch_norm_grad) 7->3");
        let residual = format!("{sum}\nreturn %d as \"d\"");
        assert_eq!(regions(&residual), "batch_norm(add relu_grad batch_norm_grad) 7->4");
    }

    #[test]
    fn one_of_two_normalizations_has_the_gate() {
        let rest = format!(
            "%d: f32[2, 3, 4, 4] = relu_grad %g, %z
             %du: f32[2, 3, 4, 4], %dt: f32[3], %dc: f32[3] = batch_norm_grad %d, %r, %s, %m, %v {{eps = 0.00001}}
             return %du as \"du\"
             {GRADIENT}"
        );
        assert_eq!(regions(&rest), "batch_norm(relu_grad batch_norm_grad) 6->2; batch_norm_grad");
    }
}
