//! Recognizes bodies that are a batch normalization or its gradient with a ReLU, a sum and transposes around it.

use crate::routine::result;
use frit_ir::ops::{BinaryFn, UnaryFn};
use frit_ir::{Graph, Node, Op, ValueId};

/// A batch normalization or its gradient, with what is around it.
pub(super) struct Region<'a> {
    pub(super) norm: &'a Node,
    /// Whether the images of the body have their channels in the last axis. Transposes make them those of the
    /// normalization, which has channels in axis 1.
    pub(super) channels_last: bool,
    /// Whether a ReLU follows, or what it passes backward is differentiated.
    pub(super) has_relu: bool,
    /// Operands of the normalization and, forward, the other term of the sum, if any; or operands of its gradient, of
    /// which `dy` is that of the ReLU's result, the result of the ReLU, if there is one, and the other term of the sum,
    /// if any.
    pub(super) reads: Vec<ValueId>,
    /// Forward the last image and the statistics; or the results of the gradient and, if it is a result, what passes the
    /// ReLU.
    pub(super) writes: Vec<ValueId>,
}

impl<'a> Region<'a> {
    /// That of a body, if it has more than the normalization.
    pub(super) fn of(body: &Graph, nodes: &[&'a Node]) -> Option<Region<'a>> {
        let is_norm = |node: &Node| matches!(node.op, Op::BatchNorm(_) | Op::BatchNormGrad(_));
        let norm = *nodes.iter().find(|node| is_norm(node))?;
        let others = nodes.iter().copied().filter(|node| !std::ptr::eq(*node, norm));
        let (transposes, around): (Vec<&Node>, Vec<&Node>) =
            others.partition(|node| matches!(node.op, Op::Transpose(_)));
        let images = Images { transposes };
        let (reads, writes) = match &norm.op {
            Op::BatchNorm(_) => forward(norm, &images, &around)?,
            _ => backward(body, norm, &images, &around)?,
        };
        let channels_last = images.channels_last();
        let region = Region { norm, channels_last, has_relu: !around.is_empty(), reads, writes };
        region.is_whole(body, nodes, &around).then_some(region)
    }

    /// Whether the region reads operands only, and computes all results of the body.
    fn is_whole(&self, body: &Graph, nodes: &[&Node], around: &[&Node]) -> bool {
        let image = body.ty(self.writes[0]);
        let mut of_images = around.iter().flat_map(|n| n.inputs.iter().chain(&n.outputs));
        let mut computed = nodes.iter().flat_map(|n| &n.outputs);
        (self.channels_last || self.has_relu)
            && of_images.all(|v| body.ty(*v) == image)
            && !computed.any(|v| self.reads.contains(v))
            && body.outputs.len() == self.writes.len()
            && self.writes.iter().all(|v| result(body, *v).is_some())
    }
}

/// What a region reads and writes.
type Interface = (Vec<ValueId>, Vec<ValueId>);

fn forward(norm: &Node, images: &Images<'_>, around: &[&Node]) -> Option<Interface> {
    let [x, ref vectors @ ..] = norm.inputs[..] else { return None };
    let y = images.behind(norm.outputs[0])?;
    let (sum, added) = match *around {
        [add, _] => (add.outputs[0], Some(other_term(add, y)?)),
        [] | [_] => (y, None),
        _ => return None,
    };
    let last = match around.last() {
        Some(relu) => is_relu(relu, sum).then_some(relu.outputs[0])?,
        None => y,
    };
    let reads = [images.before(x)?].into_iter().chain(vectors.iter().copied()).chain(added);
    Some((reads.collect(), [&[last], &norm.outputs[1..]].concat()))
}

fn backward(body: &Graph, norm: &Node, images: &Images<'_>, around: &[&Node]) -> Option<Interface> {
    let [passed, x, ref vectors @ ..] = norm.inputs[..] else { return None };
    let (passed, x) = (images.before(passed)?, images.before(x)?);
    let (dy, gate) = match around.split_last() {
        Some((gate, sum)) => {
            let [before, y] = gate_of(gate, passed)?;
            match *sum {
                [add] if add.outputs == [before] => {
                    let other = add.inputs[1];
                    (other_term(add, other)?, vec![y, other])
                }
                [] => (before, vec![y]),
                _ => return None,
            }
        }
        None => (passed, vec![]),
    };
    let reads = [dy, x].into_iter().chain(vectors.iter().copied()).chain(gate).collect();
    let kept = (!around.is_empty() && result(body, passed).is_some()).then_some(passed);
    let dx = images.behind(norm.outputs[0])?;
    let writes = [dx].into_iter().chain(norm.outputs[1..].iter().copied()).chain(kept);
    Some((reads, writes.collect()))
}

/// How the images of a body become those of its normalization: as they are, or by transposes.
struct Images<'a> {
    transposes: Vec<&'a Node>,
}

impl Images<'_> {
    fn channels_last(&self) -> bool {
        !self.transposes.is_empty()
    }

    /// The image of the body that becomes one of the normalization.
    fn before(&self, image: ValueId) -> Option<ValueId> {
        if !self.channels_last() {
            return Some(image);
        }
        let is_before = |t: &&&Node| {
            let fits = matches!(&t.op, Op::Transpose(op) if op.puts_channels_first());
            fits && t.outputs == [image]
        };
        Some(self.transposes.iter().find(is_before)?.inputs[0])
    }

    /// The image of the body that one of the normalization becomes.
    fn behind(&self, image: ValueId) -> Option<ValueId> {
        if !self.channels_last() {
            return Some(image);
        }
        let is_behind = |t: &&&Node| {
            let fits = matches!(&t.op, Op::Transpose(op) if op.puts_channels_last());
            fits && t.inputs == [image]
        };
        Some(self.transposes.iter().find(is_behind)?.outputs[0])
    }
}

/// The term of a sum that is not this value.
fn other_term(add: &Node, value: ValueId) -> Option<ValueId> {
    let Op::Binary(BinaryFn::Add) = add.op else { return None };
    match add.inputs[..] {
        [a, b] if a == value && b != value => Some(b),
        [a, b] if b == value && a != value => Some(a),
        _ => None,
    }
}

fn is_relu(node: &Node, of: ValueId) -> bool {
    matches!(node.op, Op::Unary(UnaryFn::Relu)) && node.inputs == [of]
}

/// The gradient that passes a ReLU, and the ReLU's result.
fn gate_of(node: &Node, passed: ValueId) -> Option<[ValueId; 2]> {
    let is_gate = matches!(node.op, Op::Binary(BinaryFn::ReluGrad)) && node.outputs == [passed];
    is_gate.then_some(node.inputs[..].try_into().ok()?)
}
