//! What operations compute when their images lie channels last.

use super::{INFO, Layouts, VECTOR, convolved_bytes};
use frit_ir::ops::{
    Concat, Constant, Expand, Pad, Reduce, Reshape, Slice, Split, SumTo, Transpose,
};
use frit_ir::{Graph, GraphError, Node, Op, Origin, Region, Shape, Tensor, TensorType, ValueId};

/// The operands and results of a node that are images, or kernels that slide over images.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Images {
    pub(crate) operands: Vec<ValueId>,
    pub(crate) results: Vec<ValueId>,
}

impl Images {
    pub(crate) fn contains(&self, value: ValueId) -> bool {
        self.operands.contains(&value) || self.results.contains(&value)
    }
}

/// The images of a node, if its kernels can read and write them channels last.
pub(crate) fn images(graph: &Graph, node: &Node) -> Option<Images> {
    // Images with few channels stay as they are: kernels fold those.
    let has_few =
        |groups: usize, kernels: ValueId| groups == 1 && graph.ty(kernels).shape.0[1] < VECTOR;
    let (operands, results): (&[usize], &[usize]) = match &node.op {
        Op::Conv(op) if has_few(op.groups, node.inputs[1]) => (&[], &[0]),
        Op::ConvGradInput(op) if has_few(op.groups, node.inputs[1]) => (&[0], &[]),
        Op::ConvGradWeight(op) if has_few(op.groups, node.outputs[0]) => (&[0], &[]),
        Op::Conv(_)
        | Op::ConvGradInput(_)
        | Op::ConvGradWeight(_)
        | Op::MaxPoolGrad(_)
        | Op::BatchNormGrad(_) => (&[0, 1], &[0]),
        Op::BatchNorm(_) | Op::MaxPool(_) | Op::SumPool(_) | Op::SumPoolGrad(_) => (&[0], &[0]),
        _ => return None,
    };
    // Without places besides the first axis and the channels, both layouts are one.
    let is_image = |v: &ValueId| {
        let dims = graph.ty(*v).shape.dims();
        dims.len() > 2 && dims[2..].iter().any(|n| *n != 1)
    };
    let of = |values: &[ValueId], at: &[usize]| {
        at.iter().map(|i| values[*i]).filter(is_image).collect::<Vec<_>>()
    };
    let images =
        Images { operands: of(&node.inputs, operands), results: of(&node.outputs, results) };
    let any = !images.operands.is_empty() || !images.results.is_empty();
    any.then_some(images)
}

/// Adds the form of a node that computes channels last, if it is to have one.
pub(super) fn rewrite(
    graph: &mut Graph,
    layouts: &mut Layouts,
    node: &Node,
) -> Result<(), GraphError> {
    let is_last = |v: &ValueId| layouts.last.contains_key(v);
    let images = images(graph, node);
    let takes_part = node.inputs.iter().any(is_last) || convolved_bytes(graph, node) > 0;
    if !takes_part || node.outputs.iter().any(|v| graph.ty(*v).shape.numel() == 0) {
        return Ok(());
    }
    let mut b = Builder { graph, layouts, origin: node.origin.clone(), region: node.region };
    if let Some(images) = images {
        return b.between_transposes(node, &images);
    }
    match &node.op {
        op if op.is_pointwise() => b.pointwise(node),
        Op::Transpose(op) => b.transpose(node, op),
        Op::Reshape(op) => b.reshape(node, &op.shape),
        Op::Reduce(op) => b.reduce(node, op),
        Op::SumTo(op) => b.sum_to(node, op),
        Op::Concat(op) => {
            b.each_last(node, |rank| Op::Concat(Concat { axis: axis_last(op.axis, rank) }))
        }
        Op::Split(op) => b.each_last(node, |rank| {
            Op::Split(Split { axis: axis_last(op.axis, rank), sizes: op.sizes.clone() })
        }),
        Op::Slice(op) => b.each_last(node, |_| {
            let (start, size) = (last_of(&op.start), last_of(&op.size));
            Op::Slice(Slice { start, size, step: last_of(&op.step) })
        }),
        Op::Pad(op) => b.each_last(node, |_| {
            Op::Pad(Pad { low: last_of(&op.low), high: last_of(&op.high), value: op.value })
        }),
        _ => Ok(()),
    }
}

/// The axis of an image when it lies channels last.
fn axis_last(axis: usize, rank: usize) -> usize {
    match axis {
        0 => 0,
        1 => rank - 1,
        _ => axis - 1,
    }
}

/// What belongs to the axes of an image, in their order when it lies channels last.
fn last_of<T: Clone>(list: &[T]) -> Vec<T> {
    Transpose::channels_last(list.len()).perm.iter().map(|axis| list[*axis].clone()).collect()
}

/// Adds nodes for one node of the graph.
struct Builder<'a> {
    graph: &'a mut Graph,
    layouts: &'a mut Layouts,
    origin: Origin,
    region: Region,
}

impl Builder<'_> {
    fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, GraphError> {
        self.graph.add1(op, inputs, self.origin.by(INFO.name), self.region)
    }

    fn dims(&self, v: ValueId) -> Vec<usize> {
        self.graph.ty(v).shape.0.to_vec()
    }

    fn rank(&self, v: ValueId) -> usize {
        self.graph.ty(v).shape.rank()
    }

    /// The node itself, with its images transposed before and behind it.
    fn between_transposes(&mut self, node: &Node, images: &Images) -> Result<(), GraphError> {
        let mut inputs = node.inputs.clone();
        for v in inputs.iter_mut().filter(|v| images.operands.contains(v)) {
            let last = self.last(*v)?;
            let rank = self.rank(*v);
            *v = self.add(Op::Transpose(Transpose::channels_first(rank)), &[last])?;
        }
        let results = self.graph.add(node.op.clone(), &inputs, node.origin.clone(), node.region)?;
        for (&old, &new) in node.outputs.iter().zip(&results) {
            if images.results.contains(&old) {
                let last =
                    self.add(Op::Transpose(Transpose::channels_last(self.rank(new))), &[new])?;
                self.is_now(old, last)?;
            } else {
                self.layouts.first.insert(old, new);
            }
        }
        Ok(())
    }

    /// Elementwise, with the operands that lie so and those that can.
    fn pointwise(&mut self, node: &Node) -> Result<(), GraphError> {
        let shape = self.dims(node.outputs[0]);
        let is_image =
            |b: &Self, v: &ValueId| b.layouts.last.contains_key(v) && b.dims(*v) == shape;
        if !node.inputs.iter().any(|v| is_image(self, v)) {
            return Ok(());
        }
        let mut inputs = node.inputs.clone();
        for v in &mut inputs {
            *v = match self.graph.ty(*v).shape.numel() {
                _ if self.dims(*v) == shape => self.last(*v)?,
                1 => *v,
                _ => self.broadcast_last(*v, shape.len())?,
            };
        }
        self.replace(node, node.op.clone(), &inputs)
    }

    /// Another order of the axes, or that in which the value lies.
    fn transpose(&mut self, node: &Node, op: &Transpose) -> Result<(), GraphError> {
        let last = self.last(node.inputs[0])?;
        let of_last = Transpose::channels_first(op.perm.len()).perm;
        let perm = op.perm.iter().map(|axis| of_last[*axis]).collect();
        let new = self.reordered(last, perm)?;
        self.layouts.first.insert(node.outputs[0], new);
        Ok(())
    }

    /// The places of an image along other axes.
    fn reshape(&mut self, node: &Node, shape: &Shape) -> Result<(), GraphError> {
        let x = node.inputs[0];
        if !keeps_channels(&self.graph.ty(x).shape, shape) {
            return Ok(());
        }
        let new = self.reshaped(self.layouts.last[&x], &last_of(shape.dims()))?;
        self.is_now(node.outputs[0], new)
    }

    fn reduce(&mut self, node: &Node, op: &Reduce) -> Result<(), GraphError> {
        let (x, rank) = (node.inputs[0], self.rank(node.inputs[0]));
        let mut axes: Vec<usize> = op.axes.iter().map(|a| axis_last(*a, rank)).collect();
        axes.sort_unstable();
        let reduce = Op::Reduce(Reduce { axes, ..op.clone() });
        if op.keep_dims {
            return self.replace(node, reduce, &[self.layouts.last[&x]]);
        }
        let y =
            self.graph.add1(reduce, &[self.layouts.last[&x]], node.origin.clone(), node.region)?;
        // The axes that are left, in the order in which they lie.
        let left: Vec<usize> = (0..rank).filter(|axis| !op.axes.contains(axis)).collect();
        let mut lie = left.clone();
        lie.sort_unstable_by_key(|axis| axis_last(*axis, rank));
        let perm = left.iter().filter_map(|axis| lie.iter().position(|a| a == axis)).collect();
        let new = self.reordered(y, perm)?;
        self.layouts.first.insert(node.outputs[0], new);
        Ok(())
    }

    fn sum_to(&mut self, node: &Node, op: &SumTo) -> Result<(), GraphError> {
        let (x, rank) = (node.inputs[0], self.rank(node.inputs[0]));
        let shape = padded(op.shape.dims(), rank);
        let sum = Op::SumTo(SumTo { shape: Shape::from(&last_of(&shape)[..]), ..op.clone() });
        let last = self.layouts.last[&x];
        let y = self.graph.add1(sum, &[last], node.origin.clone(), node.region)?;
        let first = self.reordered(y, Transpose::channels_first(rank).perm)?;
        let new = self.reshaped(first, op.shape.dims())?;
        self.layouts.first.insert(node.outputs[0], new);
        Ok(())
    }

    /// An operation on images of one rank, with the attributes for images channels last.
    fn each_last(&mut self, node: &Node, op: impl Fn(usize) -> Op) -> Result<(), GraphError> {
        let rank = self.rank(node.inputs[0]);
        let inputs = node.inputs.iter().map(|v| self.last(*v)).collect::<Result<Vec<_>, _>>()?;
        self.replace(node, op(rank), &inputs)
    }

    /// An operation whose results, all images, lie channels last.
    fn replace(&mut self, node: &Node, op: Op, inputs: &[ValueId]) -> Result<(), GraphError> {
        let results = self.graph.add(op, inputs, node.origin.clone(), node.region)?;
        for (&old, &new) in node.outputs.iter().zip(&results) {
            self.is_now(old, new)?;
        }
        Ok(())
    }

    /// Records that a value lies channels last; what cannot read it so reads it transposed.
    fn is_now(&mut self, old: ValueId, last: ValueId) -> Result<(), GraphError> {
        let first = self.reordered(last, Transpose::channels_first(self.rank(last)).perm)?;
        self.layouts.last.insert(old, last);
        self.layouts.first.insert(old, first);
        Ok(())
    }

    /// A value channels last.
    fn last(&mut self, v: ValueId) -> Result<ValueId, GraphError> {
        if let Some(last) = self.layouts.last.get(&v) {
            return Ok(*last);
        }
        let (ty, rank) = (self.graph.ty(v).clone(), self.rank(v));
        let shape = last_of(ty.shape.dims());
        let def = self.graph.def(v).clone();
        let last = match &def.op {
            Op::Expand(_) => {
                let small = self.broadcast_last(def.inputs[0], rank)?;
                self.add(Op::Expand(Expand { shape: Shape::from(&shape[..]) }), &[small])?
            }
            Op::Reshape(op) if keeps_channels(&self.graph.ty(def.inputs[0]).shape, &op.shape) => {
                let last = self.last(def.inputs[0])?;
                self.reshaped(last, &shape)?
            }
            Op::Transpose(op) => {
                let order = Transpose::channels_last(rank).perm;
                let perm = order.iter().map(|axis| op.perm[*axis]).collect();
                self.reordered(def.inputs[0], perm)?
            }
            Op::Constant(constant) if constant.value.as_splat().is_some() => {
                let element = constant.value.as_splat().unwrap_or_default();
                let value = Tensor::splat(TensorType::new(ty.dtype, shape), element);
                self.add(Op::Constant(Constant { value }), &[])?
            }
            // Where it is computed, so that what reads it in several parts of a step shares it.
            op => {
                let region = if op.is_leaf() { self.region } else { def.region };
                let transpose = Op::Transpose(Transpose::channels_last(rank));
                self.graph.add1(transpose, &[v], def.origin.by(INFO.name), region)?
            }
        };
        self.layouts.last.insert(v, last);
        Ok(last)
    }

    /// An operand that is broadcast to images of this rank, for images channels last.
    fn broadcast_last(&mut self, v: ValueId, rank: usize) -> Result<ValueId, GraphError> {
        let shape = padded(&self.dims(v), rank);
        let wide = self.reshaped(v, &shape)?;
        self.reordered(wide, Transpose::channels_last(rank).perm)
    }

    fn reshaped(&mut self, v: ValueId, shape: &[usize]) -> Result<ValueId, GraphError> {
        if self.dims(v) == shape {
            return Ok(v);
        }
        self.add(Op::Reshape(Reshape { shape: Shape::from(shape) }), &[v])
    }

    /// The axes in another order: a reshape where no element moves.
    fn reordered(&mut self, v: ValueId, perm: Vec<usize>) -> Result<ValueId, GraphError> {
        let dims = self.dims(v);
        let moving: Vec<usize> = perm.iter().copied().filter(|axis| dims[*axis] != 1).collect();
        if moving.is_sorted() {
            let shape: Vec<usize> = perm.iter().map(|axis| dims[*axis]).collect();
            return self.reshaped(v, &shape);
        }
        self.add(Op::Transpose(Transpose { perm }), &[v])
    }
}

/// Whether a reshape only divides the places of an image into other axes.
fn keeps_channels(from: &Shape, to: &Shape) -> bool {
    from.rank() > 2 && to.rank() > 2 && from.0[..2] == to.0[..2]
}

/// A shape with axes of one element before it.
fn padded(shape: &[usize], rank: usize) -> Vec<usize> {
    let ones = rank.saturating_sub(shape.len());
    std::iter::repeat_n(1, ones).chain(shape.iter().copied()).collect()
}
