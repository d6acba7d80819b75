//! Moves the gradient of a cross-entropy into the forward pass, next to its loss, so that one kernel reads the logits
//! for both.
//!
//! Its only other operand, the gradient of the losses, is a factor that depends on the loss scale and the labels but
//! not on the losses, unless the model computes with them. The gradient stays in the backward pass if it reads other
//! logits (rematerialized ones), or if its factor is computed by more than elementwise operations on forward values.

use frit_ir::{Graph, NodeId, Op, Region, ValueId};

/// Moves all gradients that can be moved, with the nodes that compute their factors.
pub(super) fn move_gradients(graph: &mut Graph) {
    let gradients: Vec<NodeId> = graph
        .nodes()
        .filter(|(_, node)| matches!(node.op, Op::CrossEntropyGrad(_)))
        .map(|(id, _)| id)
        .collect();
    for id in gradients {
        let Some(moved) = with_factor(graph, id) else { continue };
        moved.into_iter().for_each(|id| graph.node_mut(id).region = Region::Forward);
    }
}

/// The gradient and the nodes of the backward pass that its factor depends on, if all of them may move.
fn with_factor(graph: &Graph, gradient: NodeId) -> Option<Vec<NodeId>> {
    let node = graph.node(gradient);
    let [factor, logits, labels, lse] = node.inputs[..] else { return None };
    let loss = graph.def(lse);
    let is_pair = matches!(loss.op, Op::CrossEntropy(_)) && loss.inputs == [logits, labels];
    if !is_pair || node.region != Region::Backward || loss.region != Region::Forward {
        return None;
    }
    let mut moved = factor_of(graph, &[factor], graph.ty(labels).shape.numel())?;
    moved.push(gradient);
    Some(moved)
}

/// The nodes of the backward pass that these values depend on, if all of them are elementwise operations on at most as many elements
/// as there are `rows`: they can be computed in the forward pass.
pub(crate) fn factor_of(graph: &Graph, values: &[ValueId], rows: usize) -> Option<Vec<NodeId>> {
    let mut moved = Vec::new();
    let mut stack = values.to_vec();
    while let Some(value) = stack.pop() {
        let (id, node) = (graph.value(value).def, graph.def(value));
        if node.op.is_leaf() || node.region == Region::Forward || moved.contains(&id) {
            continue;
        }
        let is_light = (node.op.is_pointwise()
            || matches!(node.op, Op::LossScale(_) | Op::Expand(_) | Op::Reshape(_)))
            && graph.ty(value).shape.numel() <= rows;
        if node.region != Region::Backward || !is_light {
            return None;
        }
        moved.push(id);
        stack.extend(&node.inputs);
    }
    Some(moved)
}

#[cfg(test)]
mod tests {
    use crate::fuse::tests::{fuse, outline, parse};

    const LEAVES: &str = r#"
        %x: bf16[4, 8] = input {name = "x", ty = {"dtype":"bf16","shape":[4,8]}}
        %y: bf16[4, 8] = input {name = "y", ty = {"dtype":"bf16","shape":[4,8]}}
        %t: i64[4] = input {name = "t", ty = {"dtype":"i64","shape":[4]}}
        %s: f32[] = input {name = "s", ty = {"dtype":"f32","shape":[]}}
        %n: f32[] = input {name = "n", ty = {"dtype":"f32","shape":[]}}
        %l: f32[4], %e: f32[4] = cross_entropy %x, %t {ignore_index = -100, classes = 6}"#;

    fn fused(nodes: &str) -> String {
        outline(&fuse(&parse(&format!("{LEAVES}\n{nodes}"))))
    }

    #[test]
    fn a_loss_and_its_gradient_read_the_logits_once() {
        let nodes = r#"
            %g: f32[] = loss_scale %s {factor = 0.5} @backward
            %d: f32[4] = expand %g {shape = [4]} @backward
            %dx: bf16[4, 8] = cross_entropy_grad %d, %x, %t, %e {ignore_index = -100, classes = 6} @backward
            return %l as "l"
            return %dx as "dx""#;
        assert_eq!(
            fused(nodes),
            "row_reduce(cross_entropy loss_scale expand cross_entropy_grad) 3->2"
        );
        // The gradient of other logits, such as rematerialized ones, stays in the backward pass.
        let other = nodes.replace("cross_entropy_grad %d, %x", "cross_entropy_grad %d, %y");
        assert_eq!(
            fused(&other),
            "row_reduce(cross_entropy) 2->2; row_reduce(loss_scale expand cross_entropy_grad) 4->1"
        );
    }

    #[test]
    fn a_factor_that_depends_on_the_loss_waits_for_it() {
        let nodes = r#"
            %sum: f32[] = reduce %l {f = "sum", axes = [0], keep_dims = false}
            %d: f32[4] = expand %sum {shape = [4]} @backward
            %dx: bf16[4, 8] = cross_entropy_grad %d, %x, %t, %e {ignore_index = -100, classes = 6} @backward
            return %dx as "dx""#;
        assert_eq!(
            fused(nodes),
            "row_reduce(cross_entropy) 2->2; row_reduce(reduce) 1->1; \
             row_reduce(expand cross_entropy_grad) 4->1"
        );
    }

    /// The mean of the losses and the factor of their gradient read one count. In one region, they would make the
    /// gradient wait for the mean and the mean for the loss.
    #[test]
    fn scalars_before_the_gradient_and_behind_the_loss_stay_apart() {
        let nodes = r#"
            %sum: f32[] = reduce %l {f = "sum", axes = [0], keep_dims = false}
            %one: f32[] = constant {splat = 1.0, ty = {"dtype":"f32","shape":[]}}
            %half: f32[] = constant {splat = 0.5, ty = {"dtype":"f32","shape":[]}}
            %count: f32[] = max %n, %one
            %weighted: f32[] = mul %sum, %half
            %mean: f32[] = div %weighted, %count
            %g: f32[] = loss_scale %s {factor = 1.0} @backward
            %a: f32[] = div %g, %count @backward
            %b: f32[] = mul %a, %half @backward
            %d: f32[4] = expand %b {shape = [4]} @backward
            %dx: bf16[4, 8] = cross_entropy_grad %d, %x, %t, %e {ignore_index = -100, classes = 6} @backward
            return %mean as "mean"
            return %dx as "dx""#;
        let outline = fused(nodes);
        let regions: Vec<&str> = outline.split("; ").collect();
        let with = |op: &str| regions.iter().position(|r| r.contains(op)).expect("it is there");
        assert_eq!(with("cross_entropy_grad"), with("(cross_entropy"), "{outline}");
        assert!(with("cross_entropy_grad") < with("reduce(reduce"), "{outline}");
    }
}
