//! Puts images channels last where tensor cores convolve them.
//!
//! In: the final graph, whose images are `[N, C, …]`. Out: for a GPU, convolutions of 2-byte elements, and the operations on images
//! between them, compute on `[N, …, C]`: a convolution, pooling or batch normalization stands between transposes, which fusion makes
//! part of its kernel ([`crate::fuse`]); all others are rewritten for the other order of axes ([`rules`]). Where an operation has no
//! such form, its operands are transposed back.
//!
//! Done if the transposes that stay kernels of their own move fewer bytes than the images of the convolutions have: for other
//! layouts, the engines of the library transpose those themselves, as their tensor core instructions contract neighboring channels.

mod rules;
#[cfg(test)]
mod tests;

use crate::canonicalize;
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::plan::{DeviceType, Target};
use frit_ir::{Diagnostic, Graph, GraphError, Node, Op, Origin, ValueId};
pub(crate) use rules::{Images, images};
use std::collections::HashMap;

/// The contract of [`ChannelsLast`].
pub const INFO: PassInfo = PassInfo {
    name: "channels_last",
    summary: "put images channels last for tensor cores",
    requires: &[Property::Sharded],
    ensures: &[],
    breaks: &[],
    numerics: Numerics::Reassociates,
};

/// Channels are read in vectors of so many elements.
const VECTOR: usize = 8;

/// Puts images channels last.
#[derive(Clone, Debug, PartialEq)]
pub struct ChannelsLast {
    /// Target of the plan.
    pub target: Target,
}

impl Pass for ChannelsLast {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        let convolved: usize = graph.nodes().map(|(_, n)| convolved_bytes(graph, n)).sum();
        if self.target.device != DeviceType::Cuda || convolved == 0 {
            return Ok(Changed::No);
        }
        let mut changed = graph.clone();
        rewrite(&mut changed).map_err(bug(INFO.name))?;
        canonicalize::sort(&mut changed)?;
        let added = transposed_bytes(&changed).saturating_sub(transposed_bytes(graph));
        let taken = added < convolved;
        let decision = if taken { "are" } else { "would be" };
        let message = format!(
            "images {decision} channels last: transposes move {added} bytes, images of convolutions have {convolved}"
        );
        context.remark(&Origin::none(), message);
        if taken {
            *graph = changed;
        }
        Ok(Changed::when(taken))
    }
}

/// Rewrites every operation that computes on images channels last.
fn rewrite(graph: &mut Graph) -> Result<(), GraphError> {
    let mut layouts = Layouts::default();
    for id in graph.order().to_vec() {
        let node = graph.node(id).clone();
        rules::rewrite(graph, &mut layouts, &node)?;
    }
    graph.substitute(&layouts.first);
    graph.remove_dead();
    Ok(())
}

/// The layouts in which values exist.
#[derive(Debug, Default)]
struct Layouts {
    /// Values channels last, by the value that they are.
    last: HashMap<ValueId, ValueId>,
    /// What other operations read in place of a value that is now computed channels last.
    first: HashMap<ValueId, ValueId>,
}

/// Bytes of the images of a convolution that is to compute channels last; 0 if the node is none.
fn convolved_bytes(graph: &Graph, node: &Node) -> usize {
    let (Some(_), [a, b]) = (images(graph, node), &node.inputs[..]) else { return 0 };
    let y = node.outputs[0];
    let (groups, kernel, both) = match &node.op {
        Op::Conv(op) => (op.groups, *b, [*a, y]),
        Op::ConvGradInput(op) => (op.groups, *b, [*a, y]),
        Op::ConvGradWeight(op) => (op.groups, y, [*a, *b]),
        _ => return 0,
    };
    let [filters, channels, ..] = graph.ty(kernel).shape.dims() else { return 0 };
    let is_wide = filters.is_multiple_of(VECTOR) || channels.is_multiple_of(VECTOR);
    let low = graph.ty(*a).dtype.is_low_precision();
    if groups > 1 || !is_wide || !low {
        return 0;
    }
    both.iter().map(|v| graph.ty(*v).bytes()).sum()
}

/// Bytes of the results of transposes that are no part of the kernel of an operation on images.
fn transposed_bytes(graph: &Graph) -> usize {
    let users = graph.users();
    let bytes = graph.nodes().map(|(_, node)| {
        let Op::Transpose(op) = &node.op else { return 0 };
        let y = node.outputs[0];
        let readers = &users[y.0 as usize];
        let is_operand = op.puts_channels_first()
            && !readers.is_empty()
            && graph.outputs.iter().all(|output| output.value != y)
            && readers.iter().all(|r| images(graph, graph.node(*r)).is_some_and(|i| i.contains(y)));
        let before = graph.def(node.inputs[0]);
        let is_result = op.puts_channels_last()
            && images(graph, before).is_some_and(|i| i.contains(node.inputs[0]));
        if is_operand || is_result { 0 } else { graph.ty(y).bytes() }
    });
    bytes.sum()
}
