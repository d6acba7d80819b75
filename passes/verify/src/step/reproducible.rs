//! Sums over the pieces of a step that are the same on every number of ranks.
//!
//! A step has V = A·N pieces, of which each of N ranks adds A in a binary tree, [`TreeSum`](Op::TreeSum), whose operand is the number of the
//! micro-step and whose levels are states. Gradients have a tree each; the loss, its count, and every buffer that differs
//! between ranks, in this order, are one vector. The forward pass of every piece reads the buffers of the last step; the mean of
//! what they become replaces them.

use super::buffers::{Buffer, is_same_on_all_ranks};
use super::update::{Update, unstated};
use super::writer::{Stated, Writer};
use crate::unstated::Unstated;
use frit_ir::ops::{AllReduce, BinaryFn, Concat, ReduceKind, Split, StateName};
use frit_ir::{DType, Op, Region, Shape, Tensor, TensorType, ValueId};

impl Update {
    /// The number of the micro-step, where a rank has several.
    pub(super) fn micro_step(&self, w: &mut Writer) -> Result<Option<ValueId>, Unstated> {
        if !self.reproducible || self.accumulation == 1 {
            return Ok(None);
        }
        let before = w.state(&StateName::MicroStep, None, TensorType::scalar(DType::I64))?;
        let one = w.constant(Tensor::ints(DType::I64, Shape::scalar(), vec![1]))?;
        let next = w.one(Op::Binary(BinaryFn::Add), &[before, one])?;
        w.carry(&StateName::MicroStep, None, next, before);
        Ok(Some(before))
    }

    /// The sum over the micro-steps so far, complete with the last.
    pub(super) fn tree_sum(
        &self,
        w: &mut Writer,
        micro_step: ValueId,
        of: Option<&str>,
        value: ValueId,
    ) -> Stated {
        let levels = (0..).take_while(|level| (1 << level) < self.accumulation);
        let levels: Vec<StateName> = levels.map(StateName::Partial).collect();
        let ty = w.graph.ty(value).clone();
        let mut operands = vec![value, micro_step];
        for level in &levels {
            operands.push(w.state(level, of, ty.clone())?);
        }
        let sums = w.all(Op::TreeSum, &operands)?;
        for (k, level) in levels.iter().enumerate() {
            w.carry(level, of, sums[k], operands[2 + k]);
        }
        Ok(sums[0])
    }

    /// Loss and count of the pieces of this rank; and the buffers that differ between ranks become their means over all pieces.
    pub(super) fn pieces(
        &self,
        w: &mut Writer,
        micro_step: Option<ValueId>,
        [loss, count]: [ValueId; 2],
        buffers: &mut [Buffer],
    ) -> Result<[ValueId; 2], Unstated> {
        let mut parts = vec![w.reshape(loss, [1].into())?, w.reshape(count, [1].into())?];
        let mut sizes = vec![1, 1];
        let mut differing = vec![];
        for buffer in buffers {
            if is_same_on_all_ranks(&w.graph, buffer.new) {
                continue;
            }
            let size = w.shape(buffer.new).numel();
            parts.push(w.reshape(buffer.new, [size].into())?);
            sizes.push(size);
            differing.push(buffer);
        }
        let mut all = w.one(Op::Concat(Concat { axis: 0 }), &parts)?;
        if let Some(micro_step) = micro_step {
            all = self.tree_sum(w, micro_step, None, all)?;
        }
        w.region = Region::Update;
        let sums = w.all(Op::Split(Split { axis: 0, sizes }), &[all])?;
        let [loss, count, of_buffers @ ..] = &sums[..] else {
            return Err(unstated("the sums have no loss and count"));
        };
        for (buffer, sum) in differing.into_iter().zip(of_buffers) {
            let over_ranks = AllReduce { reduce: ReduceKind::Sum, unit: None, dtype: None };
            let sum = match self.ranks {
                1 => *sum,
                _ => w.one(Op::AllReduce(over_ranks), &[*sum])?,
            };
            let pieces = (self.accumulation * self.ranks) as f64;
            let mean = w.with(BinaryFn::Div, sum, pieces)?;
            let shape = w.shape(buffer.old).clone();
            buffer.new = w.reshape(mean, shape)?;
        }
        Ok([w.reshape(*loss, Shape::scalar())?, w.reshape(*count, Shape::scalar())?])
    }
}
