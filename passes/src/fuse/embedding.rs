//! Sums of the gradient of an embedding and another gradient of its table, as of a classifier that shares it, become one operation, so
//! that the embedding's is never a table of its own.

use super::INFO;
use crate::pass::bug;
use frit_ir::ops::BinaryFn;
use frit_ir::{Diagnostic, Graph, NodeId, Op, ValueId};

/// Rewrites `add(x, embedding_grad(dy, ids))` to `embedding_grad(dy, ids, x)`.
pub(super) fn add_in_gradients(graph: &mut Graph) -> Result<(), Diagnostic> {
    let users = graph.users();
    for id in graph.order().to_vec() {
        let Some((gradient, other)) = sum(graph, &users, id) else { continue };
        let (from, node) = (graph.def(gradient).clone(), graph.node_mut(id));
        node.op = from.op;
        let inputs = [&from.inputs[..], &[other]].concat();
        graph.set_inputs(id, inputs).map_err(bug(INFO.name))?;
    }
    graph.remove_dead();
    Ok(())
}

/// The gradient and the other term of a node that is such a sum, if nothing else reads the gradient.
fn sum(graph: &Graph, users: &[Vec<NodeId>], id: NodeId) -> Option<(ValueId, ValueId)> {
    let node = graph.node(id);
    let (Op::Binary(BinaryFn::Add), [a, b]) = (&node.op, &node.inputs[..]) else { return None };
    let is_gradient = |v: ValueId| {
        let from = graph.def(v);
        matches!(from.op, Op::EmbeddingGrad(_))
            && from.inputs.len() == 2
            && from.region == node.region
            && users[v.0 as usize].len() == 1
            && graph.outputs.iter().all(|o| o.value != v)
    };
    let (gradient, other) = [(*a, *b), (*b, *a)].into_iter().find(|(v, _)| is_gradient(*v))?;
    // A sum over micro-steps is made of flat gradients.
    let fits = graph.ty(gradient) == graph.ty(other) && !graph.def(other).op.is_leaf();
    fits.then_some((gradient, other))
}

#[cfg(test)]
mod tests {
    use crate::fuse::tests::{fuse, outline, parse};

    fn regions(rest: &str) -> String {
        let leaves = r#"
            %d: f32[3, 4] = input {name = "d", ty = {"dtype":"f32","shape":[3,4]}}
            %i: i64[3] = input {name = "i", ty = {"dtype":"i64","shape":[3]}}
            %h: f32[2, 5] = input {name = "h", ty = {"dtype":"f32","shape":[2,5]}}
            %g: f32[2, 4] = input {name = "g", ty = {"dtype":"f32","shape":[2,4]}}
            %w: f32[5, 4] = matmul %h, %g {trans_a = true}
            %e: f32[5, 4] = embedding_grad %d, %i {dtype = "f32", rows = 5}"#;
        outline(&fuse(&parse(&format!("{leaves}\n{rest}"))))
    }

    #[test]
    fn a_tied_gradient_is_added_to() {
        for sum in ["%w, %e", "%e, %w"] {
            let rest = format!("%s: f32[5, 4] = add {sum}\nreturn %s as \"s\"");
            assert_eq!(regions(&rest), "matmul; embedding_grad");
        }
    }

    #[test]
    fn what_is_read_elsewhere_and_sums_over_micro_steps_are_not() {
        let read_twice = regions(
            r#"%s: f32[5, 4] = add %w, %e
               return %s as "s"
               return %e as "e""#,
        );
        assert_eq!(read_twice, "matmul; embedding_grad; pointwise(add) 2->1");
        let leaf = regions(
            r#"%z: f32[5, 4] = input {name = "z", ty = {"dtype":"f32","shape":[5,4]}}
               %s: f32[5, 4] = add %z, %e
               return %s as "s"
               return %w as "w""#,
        );
        assert_eq!(leaf, "matmul; embedding_grad; pointwise(add) 2->1");
    }
}
