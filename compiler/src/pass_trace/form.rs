//! What is in the file of a trace.
//!
//! Values have numbers, unique within a graph. A node that does not change from one graph to the next keeps the numbers of its
//! operands and results. Nodes are written by column, as those of a repeated layer are then alike.

use frit_ir::TensorType;
use frit_ir::ops::FusionKind;
use serde::{Deserialize, Serialize};

/// The version of this form.
pub(super) const VERSION: u32 = 1;

/// A trace.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Trace {
    /// [`VERSION`].
    pub(super) version: u32,
    /// Digest of the graph that the passes begin on.
    pub(super) imported: String,
    /// Names besides those of the imported graph.
    pub(super) strings: Vec<String>,
    /// Origins besides those of the imported graph: source, scope and pass, each a string by its index.
    pub(super) origins: Vec<[u32; 3]>,
    /// Operations besides those of the imported graph.
    pub(super) operations: Vec<Operation>,
    /// The passes over the model, in order.
    pub(super) passes: Vec<Pass>,
    /// Those of the evaluation beside a training, which begin where the model has its adapters.
    pub(super) evaluation: Vec<Pass>,
}

/// A pass.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pass {
    /// Its name.
    pub(super) pass: String,
    /// The graph after it, if it changed anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) graph: Option<Part>,
}

/// An operation of the tables.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Operation {
    /// Name and attributes.
    Plain(String, serde_json::Map<String, serde_json::Value>),
    /// Type and little-endian elements of a constant, in hexadecimal.
    Constant(TensorType, String),
    /// A fused region, whose operations and names come before it in the tables.
    Fusion(FusionKind, Box<Part>),
}

/// A graph, from the nodes of one before it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    /// Its name, a string by its index.
    pub(super) name: u32,
    /// Its ranks.
    pub(super) world_size: usize,
    /// Its order: a number of new nodes, then of nodes of the graph before that are skipped, then of those that are kept. Skipping
    /// goes back if it is negative.
    pub(super) order: Vec<(usize, i64, usize)>,
    /// The new nodes, in order.
    pub(super) nodes: Nodes,
    /// Its outputs; absent if they are those of the graph before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) outputs: Option<Outputs>,
}

/// Nodes by column.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Nodes {
    /// Index of the operation.
    pub(super) operations: Vec<u32>,
    /// Index of the origin.
    pub(super) origins: Vec<u32>,
    /// 0 for forward, 1 for backward, 2 for update, then each recomputation.
    pub(super) regions: Vec<u32>,
    /// Number of results, and of operands.
    pub(super) sizes: Vec<(usize, usize)>,
    /// Number of the first result less that after the last result of the row before; the others follow it.
    pub(super) results: Vec<i64>,
    /// Of each result, the string that is its name plus 1, or 0.
    pub(super) names: Vec<u32>,
    /// Of each operand, how much less its number is than that of the first result.
    pub(super) operands: Vec<i64>,
}

/// Outputs by column.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Outputs {
    /// Name, a string by its index.
    pub(super) names: Vec<u32>,
    /// What it is for.
    pub(super) kinds: Vec<Kind>,
    /// The value less that of the output before.
    pub(super) values: Vec<i64>,
    /// Of each carry, how much less the number of the leaf is than that of the value.
    pub(super) carried: Vec<i64>,
}

/// What an output is for.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    Result,
    LossSum,
    LossCount,
    Gradient,
    Metric,
    Carry,
}
