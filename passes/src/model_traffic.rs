//! The traffic of a model's step: the bytes of its weights, activations and gradients, each read and written once.
//!
//! In: the step of one rank before anything is done to make it faster or smaller (chunks, rematerialization, sharding, fusion), so that the
//! numbers are of the model, its precision and its optimizer, and not of how well the step is compiled. Which values count is
//! answered twice:
//!
//! - *All values*: operands and results of every operation that is neither elementwise nor a view: of a matmul, convolution, attention,
//!   norm, softmax, reduction, embedding, loss, optimizer. Elementwise operations and concatenations belong to their neighbors, views to
//!   their operand, and so do casts to a wider dtype. A plan may move less, for a kernel may not write what the next operation reads.
//! - *The least*: only those that are in memory however elementwise operations are fused with others. These are operands of operations
//!   that are neither elementwise nor views, results of the step, and what an elementwise operation reads that must wait for another
//!   operation than the one it reads from: a saved activation, the residual stream beside a block. As long as each of those
//!   operations is a kernel, every plan moves more, for kernels that read the same value read it again.
//!
//! Each value counts twice its bytes, once for writing and once for reading:
//!
//! - an activation, however many operations of the forward and the backward pass read it, and the gradient of one;
//! - a weight in the dtype in which operations read it, and its gradient;
//! - a parameter and the optimizer's state, which are read and written in the update: the part of them that a rank holds.
//!
//! Inputs of the model are read only. Of a table in which rows are looked up, only the rows count.

use frit_ir::ops::precision::Class;
use frit_ir::{Graph, Node, Op, Region, ValueId};
use std::collections::BTreeSet;

/// Bytes of values of a step, each read and written once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Of all values.
    pub model: u64,
    /// Of those that no fusion of elementwise operations keeps out of memory.
    pub least: u64,
}

/// The traffic of a step with so many micro-steps, of each of the ranks that divide parameters and state among them.
pub fn model_traffic(step: &Graph, accumulation: usize, shards: usize) -> Traffic {
    let (mut read, mut written) = (BTreeSet::new(), BTreeSet::new());
    for (_, node) in step.nodes().filter(|(_, node)| !is_free(node)) {
        let skipped = usize::from(looks_up(node));
        read.extend(node.inputs.iter().skip(skipped).map(|v| base(step, *v)));
        written.extend(&node.outputs);
    }
    let uses = step.users();
    let of = |v: &ValueId| {
        let (node, bytes) = (step.def(*v), step.ty(*v).bytes() as u64);
        let is_read = read.contains(v) || !uses[v.0 as usize].is_empty();
        let times = match node.op.is_leaf() {
            true => 1,
            false => 1 + u64::from(is_read),
        };
        let is_held = matches!(node.op, Op::Param(_) | Op::State(_));
        match (node.region, is_held) {
            (Region::Update, _) | (_, true) => times * bytes / shards.max(1) as u64,
            _ => times.saturating_mul(bytes).saturating_mul(accumulation as u64),
        }
    };
    let bytes =
        |values: &mut dyn Iterator<Item = &ValueId>| values.map(of).fold(0, u64::saturating_add);
    let mut least = wait(step);
    least.extend(
        step.outputs.iter().map(|o| base(step, o.value)).filter(|v| !step.def(*v).op.is_leaf()),
    );
    Traffic { model: bytes(&mut read.union(&written)), least: bytes(&mut read.union(&least)) }
}

/// The values that an elementwise operation reads and that wait in memory until another of its operands is there.
///
/// The rank of a value is the longest chain of operations before it that are neither elementwise nor views. An elementwise operation can
/// be part of the kernel of an operand of its own rank; operands of a lower one were computed before that kernel.
fn wait(step: &Graph) -> BTreeSet<ValueId> {
    let mut ranks = vec![0_usize; step.users().len()];
    let mut waiting = BTreeSet::new();
    for (_, node) in step.nodes() {
        let before = node.inputs.iter().map(|v| ranks[v.0 as usize]).max().unwrap_or(0);
        let rank = before + usize::from(!is_free(node));
        for v in &node.outputs {
            ranks[v.0 as usize] = rank;
        }
        if node.op.is_pointwise() {
            let read = node.inputs.iter().map(|v| base(step, *v));
            waiting
                .extend(read.filter(|v| !step.def(*v).op.is_leaf() && ranks[v.0 as usize] < rank));
        }
    }
    waiting
}

/// Whether no operand or result of a node counts on its account.
fn is_free(node: &Node) -> bool {
    let rearranges = node.op.is_layout() || node.op.precision().class == Class::Layout;
    node.op.is_leaf() || node.op.is_pointwise() || (rearranges && !looks_up(node))
}

/// Whether a node reads some rows of its first operand.
fn looks_up(node: &Node) -> bool {
    matches!(node.op, Op::Embedding(_) | Op::Gather(_) | Op::GatherElements(_) | Op::GatherNd(_))
}

/// The value that a view, or a cast to a wider dtype, shows.
fn base(graph: &Graph, mut value: ValueId) -> ValueId {
    loop {
        let node = graph.def(value);
        value = match &node.op {
            Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_) | Op::Split(_) | Op::Expand(_) => {
                node.inputs[0]
            }
            Op::Cast(op) if op.to.size() > graph.ty(node.inputs[0]).dtype.size() => node.inputs[0],
            _ => return value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(nodes: &str) -> Graph {
        frit_ir::text::parse(&format!("graph @g world=1 {{\n{nodes}\n}}"))
            .expect("the text is a graph")
    }

    fn all(step: &Graph, accumulation: usize, shards: usize) -> u64 {
        model_traffic(step, accumulation, shards).model
    }

    fn least(nodes: &str) -> u64 {
        model_traffic(&parse(nodes), 1, 1).least
    }

    /// A linear layer with its gradients: 4 rows, 8 inputs, 2 outputs.
    const LINEAR: &str = r#"
        %x: f32[4, 8] = input {name = "x", ty = {"dtype":"f32","shape":[4,8]}}
        %w: f32[8, 2] = param {init = "weights", kind = "trainable", name = "w", reason = "", ty = {"dtype":"f32","shape":[8,2]}}
        %xc: bf16[4, 8] = cast %x {to = "bf16"}
        %wc: bf16[8, 2] = cast %w {to = "bf16"}
        %y: bf16[4, 2] = matmul %xc, %wc"#;

    /// The weight of a second one.
    const VALUE: &str = r#"
        %v: bf16[2, 8] = input {name = "v", ty = {"dtype":"bf16","shape":[2,8]}}"#;

    #[test]
    fn a_matmul_reads_and_writes_its_operands_and_its_result() {
        // Both operands are written in bf16 and read, the result is written and not read.
        let graph = parse(&format!("{LINEAR}\nreturn %y as \"y\""));
        assert_eq!(all(&graph, 1, 1), 2 * 64 + 2 * 32 + 16);
        // What is elementwise moves nothing of its own: its operand is read, its result a result of the step.
        let gelu = format!("{LINEAR}\n%g: bf16[4, 2] = gelu_tanh %y\nreturn %g as \"g\"");
        assert_eq!(all(&parse(&gelu), 1, 1), 2 * 64 + 2 * 32 + 2 * 16);
    }

    #[test]
    fn what_forward_and_backward_read_counts_once() {
        let graph = parse(&format!(
            r#"{LINEAR}
            %g: bf16[4, 2] = gelu_tanh %y
            %v: bf16[2, 8] = input {{name = "v", ty = {{"dtype":"bf16","shape":[2,8]}}}}
            %z: bf16[4, 8] = matmul %g, %v
            %dz: bf16[4, 8] = input {{name = "dz", ty = {{"dtype":"bf16","shape":[4,8]}}}}
            %dv: f32[2, 8] = matmul %g, %dz {{out = "f32", trans_a = true}} @backward
            return %z as "z"
            return %dv as "dv""#
        ));
        // x, w, y and g twice; v and dz are read; z and dv are written.
        let expected = 2 * (64 + 32 + 16 + 16) + 32 + 64 + 64 + 64;
        assert_eq!(all(&graph, 1, 1), expected);
        // Every micro-step has its own.
        assert_eq!(all(&graph, 3, 1), 3 * expected);
    }

    #[test]
    fn views_and_wider_copies_are_their_operand_and_tables_their_rows() {
        let graph = parse(
            r#"
            %t: f32[100, 8] = param {init = "weights", kind = "trainable", name = "t", reason = "", ty = {"dtype":"f32","shape":[100,8]}}
            %i: i64[4] = input {name = "i", ty = {"dtype":"i64","shape":[4]}}
            %w: f32[8] = param {init = "weights", kind = "trainable", name = "w", reason = "", ty = {"dtype":"f32","shape":[8]}}
            %e: f32[4, 8] = embedding %t, %i
            %n: bf16[4, 8] = cast %e {to = "bf16"}
            %c: f32[4, 8] = cast %n {to = "f32"}
            %y: f32[4, 8], %r: f32[4] = rms_norm %c, %w {axis = 1, eps = 1e-5}
            %p: f32[8, 4] = transpose %y {perm = [1,0]}
            %s: f32[8, 4] = softmax %p {axis = 1}
            return %s as "s""#,
        );
        // The indices and the scale are read; the rows are written and read, rounded, too; the norm's result is read through its view, its
        // statistic is not; the softmax is written.
        assert_eq!(all(&graph, 1, 1), 32 + 32 + 2 * 128 + 2 * 64 + 2 * 128 + 16 + 128);
    }

    #[test]
    fn the_least_is_what_no_kernel_can_keep() {
        // The result of the first matmul is an operand of the second, if there is no GELU between them.
        let plain =
            format!("{LINEAR}\n{VALUE}\n%z: bf16[4, 8] = matmul %y, %v\nreturn %z as \"z\"");
        let weights = 2 * 64 + 2 * 32 + 32;
        assert_eq!(least(&plain), weights + 2 * 16 + 64);
        let gelu = format!(
            "{LINEAR}\n{VALUE}\n%g: bf16[4, 2] = gelu_tanh %y\n%z: bf16[4, 8] = matmul %g, %v\nreturn %z as \"z\""
        );
        // Then it is that of the GELU.
        assert_eq!(least(&gelu), weights + 2 * 16 + 64);
        assert_eq!(all(&parse(&gelu), 1, 1), weights + 2 * 16 + 2 * 16 + 64);
        // Saved for the gradient of the GELU it counts, too; the gradient that is multiplied with it does not, nor does a sum before the
        // residual stream that it is added to.
        let saved = gelu.replace(
            "return %z as \"z\"",
            r#"%dg: bf16[4, 2] = matmul %z, %v {trans_b = true} @backward
            %da: bf16[4, 2] = gelu_tanh_grad %dg, %y @backward
            %dx: bf16[4, 8] = matmul %da, %wc {trans_b = true} @backward
            %sum: bf16[4, 8] = add %dx, %z @backward
            return %sum as "dx""#,
        );
        assert_eq!(least(&saved), weights + 2 * (16 + 16 + 64 + 16) + 64);
    }
}
