//! Collectives, as pure functions of one operand.
//!
//! The graph has one per parameter; lowering to the plan merges those of one unit, region and dtype.
//! Types are logical: a sharded value has its full shape, of which a rank holds a part.

use serde::{Deserialize, Serialize};

/// The full value of a sharded parameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllGather {
    /// The unit whose gather this is part of.
    pub unit: usize,
}

/// The mean over ranks of a full gradient, of which each rank keeps its shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReduceScatter {
    /// The unit whose reduction this is part of.
    pub unit: usize,
}

/// How an `all_reduce` combines ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceKind {
    /// The sum.
    Sum,
    /// The arithmetic mean.
    Mean,
}

/// The sum or mean over ranks, on every rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllReduce {
    /// How ranks are combined.
    pub reduce: ReduceKind,
    /// The unit whose reduction this is part of, for gradients of replicated parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<usize>,
}
