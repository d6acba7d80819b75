//! Collectives, as pure functions of one operand.
//!
//! The graph has one per parameter; lowering to the plan merges those of one unit, region and dtype.
//! Types are logical: a sharded value has its full shape, of which a rank holds a part. The bodies of kernels contain none, so that no
//! factor passes through them.

use super::{Inferred, Linear, Operation, Precision, arity};
use crate::ids::UnitId;
use crate::{DType, TensorType};
use serde::{Deserialize, Serialize};

/// The full value of a sharded parameter.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllGather {
    /// The unit whose gather this is part of.
    pub unit: UnitId,
}

impl Operation for AllGather {
    fn examples() -> Vec<Self> {
        vec![AllGather { unit: UnitId(1) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        Ok(vec![inputs[0].clone()])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// The mean or sum over ranks of a full gradient, of which each rank keeps its shard.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReduceScatter {
    /// How ranks are combined.
    #[serde(default = "mean", skip_serializing_if = "is_mean")]
    pub reduce: ReduceKind,
    /// The unit whose reduction this is part of.
    pub unit: UnitId,
    /// The dtype in which ranks exchange it, if it is not its own; see [`reduction_factors`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DType>,
}

fn mean() -> ReduceKind {
    ReduceKind::Mean
}

fn is_mean(reduce: &ReduceKind) -> bool {
    *reduce == ReduceKind::Mean
}

impl Operation for ReduceScatter {
    fn examples() -> Vec<Self> {
        let (reduce, unit) = (ReduceKind::Mean, UnitId(1));
        vec![ReduceScatter { reduce, unit, dtype: Some(DType::BF16) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        Ok(vec![inputs[0].clone()])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// Factors of a gradient of `world_size` ranks before and after its sum, if it is exchanged in `dtype`; `None` if the
/// collective computes the mean.
///
/// A sum of f16 could overflow and a quotient underflow, so the division is split: a power of two near
/// √N before, the rest after. Source: `torch.distributed.fsdp`, `_get_gradient_predivide_factor`.
pub fn reduction_factors(dtype: DType, world_size: usize) -> Option<(f64, f64)> {
    if dtype != DType::F16 {
        return None;
    }
    let mut before = 1;
    while world_size.is_multiple_of(before) && world_size / before > before {
        before *= 2;
    }
    Some((1.0 / before as f64, before as f64 / world_size as f64))
}

/// How an `all_reduce` combines ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceKind {
    /// The sum.
    Sum,
    /// The arithmetic mean.
    Mean,
    /// The largest; NaN if any is.
    Max,
}

/// The sum, mean or largest over ranks, on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllReduce {
    /// How ranks are combined.
    pub reduce: ReduceKind,
    /// The unit whose reduction this is part of, for gradients of replicated parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<UnitId>,
    /// The dtype in which ranks exchange it, if it is not its own; see [`reduction_factors`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DType>,
}

impl Operation for AllReduce {
    fn examples() -> Vec<Self> {
        vec![AllReduce { reduce: ReduceKind::Mean, unit: Some(UnitId(2)), dtype: None }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        Ok(vec![inputs[0].clone()])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}
