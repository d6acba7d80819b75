//! The regions that torch.compile's Inductor forms where Frit would form others, so that the simulator can predict PyTorch.
//!
//! - A matmul is a kernel of a library, which adds a bias and nothing else: activation functions and their gradients, the residual
//!   stream, and the gradients of biases are kernels of Triton ([`super::gemm`]).
//! - Attention writes the gradients of query, key and value apart; if they are parts of one projection, a kernel joins them
//!   ([`super::attention`]).
//! - The gradient of a cross-entropy reads the logits in the backward pass; the gradient of an embedding is a table of its own.
//! - One kernel may have the gradients of a norm for its input and for scale and bias ("mix-order reduction"), but no other
//!   reduction over the rows, and no rounded copy of a result beside that result: a kernel of its own writes it.
//! - Everything else that is elementwise or a reduction is fused as Frit does it.
//!
//! Source: the kernels that PyTorch 2.15 generates for GPT-2 (forward and backward, bf16 by autocast and throughout, sm_90), printed by
//! lowering its graphs without a GPU; `torch/_inductor/scheduler.py` and `torch/_inductor/config.py`, `mix_order_reduction`. Versions
//! before 2.10 compute the gradients of a norm for scale and bias in kernels of their own.

use super::col_reduce;
use super::facts::Facts;
use frit_ir::ops::FusionKind;
use frit_ir::{Node, Op, TensorType, ValueId};

/// Whether Inductor forms a region with these members and results.
pub(super) fn forms(
    facts: &Facts<'_>,
    kind: FusionKind,
    members: &[usize],
    results: &[ValueId],
) -> bool {
    let nodes = || members.iter().map(|m| facts.node(*m));
    let copies = |node: &Node| match &node.op {
        Op::Cast(op) => {
            op.to.size() < facts.graph.ty(node.inputs[0]).dtype.size()
                && results.contains(&facts.base(node.inputs[0]))
        }
        _ => false,
    };
    match kind {
        FusionKind::RowColReduce => !nodes().any(|n| copies(n) || is_other_sum(facts, n)),
        // It will be part of a norm's kernel, whose gradient it reads.
        FusionKind::Pointwise => !nodes().any(copies) || !nodes().any(|n| follows_norm(facts, n)),
        _ => true,
    }
}

/// Whether the node reduces the rows, and is not the gradient of a norm.
fn is_other_sum(facts: &Facts<'_>, node: &Node) -> bool {
    let operands: Vec<&TensorType> = node.inputs.iter().map(|v| facts.graph.ty(*v)).collect();
    !matches!(node.op, Op::LayerNormGradAffine(_) | Op::RmsNormGradScale(_))
        && col_reduce::space(&node.op, &operands).is_some()
}

/// Whether the node reads the gradient of a norm for its input.
fn follows_norm(facts: &Facts<'_>, node: &Node) -> bool {
    let is_gradient = |v: &ValueId| {
        let op = &facts.graph.def(facts.base(*v)).op;
        matches!(op, Op::LayerNormGradInput(_) | Op::RmsNormGradInput(_))
    };
    node.inputs.iter().any(is_gradient)
}

#[cfg(test)]
mod tests {
    use crate::fuse::Rules;
    use crate::fuse::tests::{fuse_by, outline, parse};

    fn regions(nodes: &str) -> [String; 2] {
        [Rules::Frit, Rules::Inductor].map(|rules| outline(&fuse_by(rules, &parse(nodes))))
    }

    #[test]
    fn a_matmul_adds_its_bias_and_nothing_else() {
        let nodes = r#"
            %x: bf16[6, 8] = input {name = "x", ty = {"dtype":"bf16","shape":[6,8]}}
            %w: bf16[8, 4] = input {name = "w", ty = {"dtype":"bf16","shape":[8,4]}}
            %v: bf16[4, 8] = input {name = "v", ty = {"dtype":"bf16","shape":[4,8]}}
            %b: bf16[4] = input {name = "b", ty = {"dtype":"bf16","shape":[4]}}
            %dy: bf16[6, 8] = input {name = "dy", ty = {"dtype":"bf16","shape":[6,8]}}
            %t: bf16[6, 8] = exp %x
            %m: bf16[6, 4] = matmul %x, %w
            %a: bf16[6, 4] = add %m, %b
            %g: bf16[6, 4] = gelu_tanh %a
            %s: bf16[6, 8] = matmul %g, %v
            %r: bf16[6, 8] = add %s, %t
            %dg: bf16[6, 4] = matmul %dy, %v {trans_b = true} @backward
            %da: bf16[6, 4] = gelu_tanh_grad %dg, %a @backward
            %dw: f32[8, 4] = matmul %x, %da {out = "f32", trans_a = true} @backward
            %db: bf16[4] = sum_to %da {shape = [4]} @backward
            return %r as "r"
            return %dw as "dw"
            return %db as "db""#;
        let [frit, inductor] = regions(nodes);
        assert_eq!(
            frit,
            "pointwise(exp) 1->1; gemm(matmul add gelu_tanh) 3->2; gemm(matmul add) 3->1; \
             gemm(matmul gelu_tanh_grad sum_to) 3->2; matmul"
        );
        assert_eq!(
            inductor,
            "gemm(matmul add) 3->1; pointwise(gelu_tanh) 1->1; matmul; pointwise(exp add) 2->1; matmul; \
             pointwise(gelu_tanh_grad) 2->1; matmul; col_reduce(sum_to) 1->1"
        );
    }

    #[test]
    fn a_norm_has_its_gradients_in_one_kernel_but_no_bias_and_no_rounded_copy() {
        let nodes = r#"
            %dy: bf16[4, 6] = input {name = "dy", ty = {"dtype":"bf16","shape":[4,6]}}
            %x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
            %w: f32[6] = input {name = "w", ty = {"dtype":"f32","shape":[6]}}
            %m: f32[4] = input {name = "m", ty = {"dtype":"f32","shape":[4]}}
            %r: f32[4] = input {name = "r", ty = {"dtype":"f32","shape":[4]}}
            %skip: f32[4, 6] = input {name = "skip", ty = {"dtype":"f32","shape":[4,6]}}
            %c: f32[4, 6] = cast %dy {to = "f32"} @backward
            %dw: f32[6], %db: f32[6] = layer_norm_grad_affine %c, %x, %m, %r {axis = 1} @backward
            %g: f32[4, 6] = layer_norm_grad_input %c, %x, %w, %m, %r {axis = 1} @backward
            %dx: f32[4, 6] = add %g, %skip @backward
            %h: bf16[4, 6] = cast %dx {to = "bf16"} @backward
            %dbias: bf16[6] = sum_to %h {shape = [6]} @backward
            return %dw as "dw"
            return %db as "db"
            return %dx as "dx"
            return %h as "h"
            return %dbias as "dbias""#;
        let [frit, inductor] = regions(nodes);
        assert_eq!(
            frit,
            "row_col_reduce(cast layer_norm_grad_affine layer_norm_grad_input add cast sum_to) 6->5"
        );
        assert_eq!(
            inductor,
            "row_col_reduce(cast layer_norm_grad_affine layer_norm_grad_input add) 6->3; pointwise(cast) 1->1; \
             col_reduce(sum_to) 1->1"
        );
        // A stream that is kept rounded is written by the kernel that computes it.
        let narrow = nodes.replace("return %dx as \"dx\"", "");
        let [_, inductor] = regions(&narrow);
        assert_eq!(
            inductor,
            "row_col_reduce(cast layer_norm_grad_affine layer_norm_grad_input add cast) 6->3; col_reduce(sum_to) 1->1"
        );
    }

    #[test]
    fn a_loss_and_its_gradient_read_the_logits_each() {
        let nodes = r#"
            %x: bf16[4, 8] = input {name = "x", ty = {"dtype":"bf16","shape":[4,8]}}
            %t: i64[4] = input {name = "t", ty = {"dtype":"i64","shape":[4]}}
            %s: f32[] = input {name = "s", ty = {"dtype":"f32","shape":[]}}
            %l: f32[4], %e: f32[4] = cross_entropy %x, %t {ignore_index = -100, classes = 6}
            %g: f32[] = loss_scale %s {factor = 0.5} @backward
            %d: f32[4] = expand %g {shape = [4]} @backward
            %dx: bf16[4, 8] = cross_entropy_grad %d, %x, %t, %e {ignore_index = -100, classes = 6} @backward
            return %l as "l"
            return %dx as "dx""#;
        let [frit, inductor] = regions(nodes);
        assert_eq!(frit, "row_reduce(cross_entropy loss_scale expand cross_entropy_grad) 3->2");
        assert_eq!(
            inductor,
            "row_reduce(cross_entropy) 2->2; row_reduce(loss_scale expand cross_entropy_grad) 4->1"
        );
    }
}
