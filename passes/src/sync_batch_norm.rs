//! Batch normalization with statistics over the batches of all ranks.
//!
//! In: a forward graph with final dtypes. Out: the same without `batch_norm`, if there is more than one
//! rank: means and variances of the ranks are averaged, the variances around the common mean, so that
//! both are those of the global batch, since every rank has as many elements. Statistics are at least
//! f32 whatever the operand. Source: `torch.nn.SyncBatchNorm`.

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{
    AllReduce, BatchNorm, BinaryFn, Cast, Constant, Reduce, ReduceFn, ReduceKind, Reshape, UnaryFn,
    statistics_dtype,
};
use frit_ir::{
    Code, DType, Diagnostic, Graph, GraphError, Op, Origin, Region, Shape, Tensor, TensorType,
    ValueId,
};
use std::collections::HashMap;

/// The contract of [`SyncBatchNorm`].
pub const INFO: PassInfo = PassInfo {
    name: "sync_batch_norm",
    summary: "average the statistics of batch norms over ranks",
    requires: &[Property::Autocast],
    ensures: &[],
    breaks: &[Property::Canonical],
    numerics: Numerics::Reassociates,
};

/// Averages the statistics of batch norms over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncBatchNorm {
    /// Over how many ranks; 1 leaves the graph alone.
    pub ranks: usize,
}

impl Pass for SyncBatchNorm {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        if self.ranks == 1 {
            return Ok(Changed::No);
        }
        let mut map = HashMap::new();
        for id in graph.order().to_vec() {
            let node = graph.node(id).clone();
            let Op::BatchNorm(op) = node.op else { continue };
            let origin = node.origin.by(INFO.name);
            context.remark(&origin, format!("statistics are averaged over {} ranks", self.ranks));
            let mut b = Builder { graph, origin, region: node.region };
            let results = b.batch_norm(op, &node.inputs).map_err(bug(INFO.name))?;
            map.extend(node.outputs.iter().copied().zip(results));
        }
        graph.substitute(&map);
        graph.remove_dead();
        graph.sort().map_err(|_| {
            Diagnostic::error(Code::PassFailed, "cycle after pass `sync_batch_norm`")
        })?;
        Ok(Changed::when(!map.is_empty()))
    }
}

struct Builder<'a> {
    graph: &'a mut Graph,
    origin: Origin,
    region: Region,
}

impl Builder<'_> {
    fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, GraphError> {
        self.graph.add1(op, inputs, self.origin.clone(), self.region)
    }

    fn cast(&mut self, x: ValueId, to: DType) -> Result<ValueId, GraphError> {
        if self.graph.ty(x).dtype == to { Ok(x) } else { self.add(Op::Cast(Cast { to }), &[x]) }
    }

    fn binary(&mut self, f: BinaryFn, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.add(Op::Binary(f), &[a, b])
    }

    /// The mean of every channel of `x[N, C, …]` over all ranks: first of each image, so that rows and
    /// then columns are reduced.
    fn mean(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        let mean = |axes| Op::Reduce(Reduce { f: ReduceFn::Mean, axes, keep_dims: false });
        let rank = self.graph.ty(x).shape.rank();
        let of_images = if rank == 2 { x } else { self.add(mean((2..rank).collect()), &[x])? };
        let own = self.add(mean(vec![0]), &[of_images])?;
        let average = AllReduce { reduce: ReduceKind::Mean, unit: None, dtype: None };
        self.add(Op::AllReduce(average), &[own])
    }

    /// One value per channel, to broadcast over the operand's `rank` axes.
    fn per_channel(&mut self, x: ValueId, rank: usize) -> Result<ValueId, GraphError> {
        let mut shape = vec![1; rank - 1];
        shape[0] = self.graph.ty(x).shape.0[0];
        self.add(Op::Reshape(Reshape { shape: Shape(shape) }), &[x])
    }

    /// `(x, scale, bias)` → `(y, mean, var)`
    fn batch_norm(&mut self, op: BatchNorm, x: &[ValueId]) -> Result<[ValueId; 3], GraphError> {
        let ty = self.graph.ty(x[0]).clone();
        let rank = ty.shape.rank();
        let dtype = statistics_dtype(ty.dtype);
        let wide = self.cast(x[0], dtype)?;
        let mean = self.mean(wide)?;
        let center = self.per_channel(mean, rank)?;
        let centered = self.binary(BinaryFn::Sub, wide, center)?;
        let squares = self.binary(BinaryFn::Mul, centered, centered)?;
        let var = self.mean(squares)?;
        let eps = Tensor::splat(TensorType::scalar(dtype), op.eps);
        let eps = self.add(Op::Constant(Constant { value: eps }), &[])?;
        let sum = self.binary(BinaryFn::Add, var, eps)?;
        let rstd = self.add(Op::Unary(UnaryFn::Rsqrt), &[sum])?;
        let scale = self.cast(x[1], dtype)?;
        let factor = self.binary(BinaryFn::Mul, rstd, scale)?;
        let factor = self.per_channel(factor, rank)?;
        let bias = self.cast(x[2], dtype)?;
        let bias = self.per_channel(bias, rank)?;
        let scaled = self.binary(BinaryFn::Mul, centered, factor)?;
        let y = self.binary(BinaryFn::Add, scaled, bias)?;
        Ok([self.cast(y, ty.dtype)?, mean, var])
    }
}
