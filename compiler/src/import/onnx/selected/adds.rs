//! Operations that are added in the place of others, or beside them.

use super::Selected;
use crate::import::limits::Budget;
use crate::import::onnx::context::{self, Fault};
use frit_ir::ops::{BinaryFn, Cast, CompareFn, Constant, Reduce, ReduceFn, Reshape, Slice};
use frit_ir::{DType, Graph, Op, Origin, Shape, Tensor, TensorType, ValueId};

/// The graph to which operations are added.
pub(super) struct Adds<'a> {
    pub(super) graph: &'a mut Graph,
    pub(super) budget: &'a mut Budget,
    pub(super) origin: &'a Origin,
}

impl Adds<'_> {
    pub(super) fn op(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, Fault> {
        let made = context::add(self.graph, self.budget, self.origin, op, inputs)?;
        made.first().copied().ok_or_else(|| Fault::Misfit("there is no result".into()))
    }

    pub(super) fn constant(&mut self, value: Tensor) -> Result<ValueId, Fault> {
        self.op(Op::Constant(Constant { value }), &[])
    }

    /// A number of this type.
    pub(super) fn number(&mut self, dtype: DType, x: f64) -> Result<ValueId, Fault> {
        self.constant(Tensor::splat(TensorType::scalar(dtype), x))
    }

    pub(super) fn reshape(&mut self, x: ValueId, dims: &[usize]) -> Result<ValueId, Fault> {
        self.op(Op::Reshape(Reshape { shape: Shape::from(dims) }), &[x])
    }

    pub(super) fn dims(&self, x: ValueId) -> Vec<usize> {
        self.graph.ty(x).shape.dims().to_vec()
    }

    /// Which places of `x` count, of its rank.
    pub(super) fn mask_over(&mut self, x: ValueId, at: Selected) -> Result<ValueId, Fault> {
        let dims = self.dims(x);
        let mut shape = vec![1; dims.len()];
        shape[at.axis] = dims[at.axis];
        self.reshape(at.counts, &shape)
    }

    /// `x` with its first element along the axis at the places that do not count.
    pub(super) fn repeated(&mut self, x: ValueId, at: Selected) -> Result<ValueId, Fault> {
        let mut size = self.dims(x);
        size[at.axis] = 1;
        let rank = size.len();
        let part = Slice { start: vec![0; rank], size, step: vec![1; rank] };
        let first = self.op(Op::Slice(part), &[x])?;
        let counts = self.mask_over(x, at)?;
        self.op(Op::Select, &[counts, x, first])
    }

    /// How many places count, `[1]`.
    pub(super) fn number_of(&mut self, counts: ValueId, dtype: DType) -> Result<ValueId, Fault> {
        let ones = self.op(Op::Cast(Cast { to: dtype }), &[counts])?;
        let all = Reduce { f: ReduceFn::Sum, axes: vec![0], keep_dims: true };
        self.op(Op::Reduce(all), &[ones])
    }

    /// Indices into such an axis, of which those below zero are counted from the end of what counts. A row of `depth` indices has
    /// that of the axis at `place`.
    pub(super) fn counted_from_start(
        &mut self,
        ids: ValueId,
        counts: ValueId,
        row: Option<(usize, usize)>,
    ) -> Result<ValueId, Fault> {
        let dtype = self.graph.ty(ids).dtype;
        let known = self.graph.constant(ids).and_then(|t| t.as_ints());
        if known.is_some_and(|ids| ids.iter().all(|i| *i >= 0)) {
            return Ok(ids);
        }
        let mut end = self.number_of(counts, dtype)?;
        if let Some((place, depth)) = row {
            let own = (0..depth).map(|i| i64::from(i == place)).collect();
            let own = self.constant(Tensor::ints(dtype, [depth], own))?;
            end = self.op(Op::Binary(BinaryFn::Mul), &[end, own])?;
        } else {
            end = self.reshape(end, &[])?;
        }
        self.made_positive(ids, end)
    }

    /// Indices, of which those below zero are counted from `end`.
    pub(super) fn made_positive(&mut self, ids: ValueId, end: ValueId) -> Result<ValueId, Fault> {
        let zero = self.number(self.graph.ty(ids).dtype, 0.0)?;
        let negative = self.op(Op::Compare(CompareFn::Lt), &[ids, zero])?;
        let from_end = self.op(Op::Binary(BinaryFn::Add), &[ids, end])?;
        self.op(Op::Select, &[negative, from_end, ids])
    }

    /// What is read at the places that a mask selects, or a number of which most functions are finite if it selects nothing.
    pub(super) fn read(
        &mut self,
        op: &Op,
        inputs: &[ValueId],
        at: Selected,
    ) -> Result<ValueId, Fault> {
        let read = self.op(op.clone(), inputs)?;
        let ty = self.graph.ty(read).clone();
        if !ty.dtype.is_float() {
            return Ok(read);
        }
        let first = Slice { start: vec![0], size: vec![1], step: vec![1] };
        let any = self.op(Op::Slice(first), &[at.counts])?;
        let any = self.reshape(any, &[])?;
        let half = self.number(ty.dtype, 0.5)?;
        self.op(Op::Select, &[any, read, half])
    }

    /// `x` with a number at the places that do not count.
    pub(super) fn filled(&mut self, x: ValueId, at: Selected, with: f64) -> Result<ValueId, Fault> {
        let counts = self.mask_over(x, at)?;
        let number = self.number(self.graph.ty(x).dtype, with)?;
        self.op(Op::Select, &[counts, x, number])
    }
}
