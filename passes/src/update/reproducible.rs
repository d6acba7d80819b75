//! Sums over the V = A·N pieces of a step that are the same for every number N of ranks.
//!
//! A piece is one micro-batch. A rank adds its A pieces in a binary tree ([`TreeSum`](frit_ir::ops::TreeSum)), whose levels are state
//! and whose operand is the number of the micro-step; collectives add the sums of ranks in the upper part of the same tree. Loss,
//! count and the buffers that the forward pass updates are one vector. Every piece updates a buffer from its value before the step,
//! as every rank of V would, and the step commits the mean.

use super::buffers::{Buffer, is_rank_uniform};
use super::{Emit, Update};
use frit_ir::ops::{
    AllReduce, BinaryFn, Concat, Constant, Op, ReduceKind, Reshape, Split, StateName,
};
use frit_ir::{Code, DType, Diagnostic, Region, Shape, Tensor, TensorType, ValueId};

impl Update {
    /// The number of the current micro-step, if a reproducible step has several.
    pub(super) fn micro_step(&self, b: &mut Emit<'_>) -> Result<Option<ValueId>, Diagnostic> {
        if !self.reproducible || self.accumulation == 1 {
            return Ok(None);
        }
        let (name, ty) = (StateName::MicroStep, TensorType::scalar(DType::I64));
        let k = b.state(&name, None, ty, 0.0, Region::Backward)?;
        let value = Tensor::ints(DType::I64, Shape::scalar(), vec![1]);
        let one = b.add(Op::Constant(Constant { value }), &[], Region::Backward)?[0];
        let next = b.add(Op::Binary(BinaryFn::Add), &[k, one], Region::Backward)?[0];
        b.carry(&name, None, next, k);
        Ok(Some(k))
    }

    /// The sum over micro-steps in a binary tree, complete with the last one.
    pub(super) fn tree_sum(
        &self,
        b: &mut Emit<'_>,
        k: ValueId,
        of: Option<&str>,
        value: ValueId,
    ) -> Result<ValueId, Diagnostic> {
        let ty = b.graph.ty(value).clone();
        let mut operands = vec![value, k];
        let names: Vec<StateName> =
            (0..self.accumulation.ilog2() as usize).map(StateName::Partial).collect();
        for name in &names {
            operands.push(b.state(name, of, ty.clone(), 0.0, Region::Backward)?);
        }
        let sums = b.add(Op::TreeSum, &operands, Region::Backward)?;
        for ((name, sum), state) in names.iter().zip(&sums).zip(&operands[2..]) {
            b.carry(name, of, *sum, *state);
        }
        Ok(sums[0])
    }

    /// Loss and count of this rank's pieces, and the mean of each buffer over all pieces.
    pub(super) fn piecewise(
        &self,
        b: &mut Emit<'_>,
        micro_step: Option<ValueId>,
        scalars: [ValueId; 2],
        buffers: &[Buffer],
    ) -> Result<([ValueId; 2], Vec<ValueId>), Diagnostic> {
        let mut parts = Vec::new();
        for scalar in scalars {
            let shape = Shape::from([1]);
            parts.push(b.add(Op::Reshape(Reshape { shape }), &[scalar], Region::Backward)?[0]);
        }
        let varies = |b: &Emit<'_>, buffer: &Buffer| !is_rank_uniform(b.graph, buffer.new);
        let averaged: Vec<&Buffer> = buffers.iter().filter(|buffer| varies(b, buffer)).collect();
        let mut sizes = Vec::new();
        for buffer in &averaged {
            let ty = b.graph.ty(buffer.new).clone();
            if ty.dtype != DType::F32 {
                let what =
                    format!("run.reproducible with the buffer `{}` of {}", buffer.name, ty.dtype);
                return Err(Diagnostic::error(Code::ConfigContradiction, what)
                    .help("only f32 is averaged in a fixed order; export the model with this buffer as f32"));
            }
            let n = ty.shape.numel();
            let flat = Op::Reshape(Reshape { shape: Shape::from([n]) });
            parts.push(b.add(flat, &[buffer.new], Region::Backward)?[0]);
            sizes.push(n);
        }
        let mut all = b.add(Op::Concat(Concat { axis: 0 }), &parts, Region::Backward)?[0];
        if let Some(k) = micro_step {
            all = self.tree_sum(b, k, None, all)?;
        }
        let mut lengths = vec![1, 1];
        lengths.extend((!sizes.is_empty()).then(|| sizes.iter().sum::<usize>()));
        let pieces = b.update(Op::Split(Split { axis: 0, sizes: lengths }), &[all])?;
        let scalar = Op::Reshape(Reshape { shape: Shape::scalar() });
        let loss = b.update(scalar.clone(), &pieces[..1])?[0];
        let count = b.update(scalar, &pieces[1..2])?[0];
        let mut means = Vec::new();
        if let Some(&sum) = pieces.get(2) {
            means = self.means(b, sum, sizes)?;
        }
        let mut means = means.into_iter();
        let mut staged = Vec::with_capacity(buffers.len());
        for buffer in buffers {
            let is_averaged = averaged.iter().any(|other| std::ptr::eq(*other, buffer));
            staged.push(match if is_averaged { means.next() } else { None } {
                Some(mean) => {
                    let shape = b.graph.ty(buffer.new).shape.clone();
                    b.update(Op::Reshape(Reshape { shape }), &[mean])?[0]
                }
                None => buffer.new,
            });
        }
        Ok(([loss, count], staged))
    }

    /// The means over all pieces of vectors whose sums over this rank's follow each other.
    fn means(
        &self,
        b: &mut Emit<'_>,
        mut sum: ValueId,
        sizes: Vec<usize>,
    ) -> Result<Vec<ValueId>, Diagnostic> {
        if self.world_size > 1 {
            let all = AllReduce { reduce: ReduceKind::Sum, unit: None, dtype: None };
            sum = b.update(Op::AllReduce(all), &[sum])?[0];
        }
        // A power of two.
        let value = Tensor::scalar(1.0 / (self.accumulation * self.world_size) as f64);
        let share = b.update(Op::Constant(Constant { value }), &[])?[0];
        let mean = b.update(Op::Binary(BinaryFn::Mul), &[sum, share])?[0];
        b.update(Op::Split(Split { axis: 0, sizes }), &[mean])
    }
}
