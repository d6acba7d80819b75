//! The origin of a node: the node of the model, its module scope, the pass that created it, and its part of the
//! training step.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The history of a node, kept through every pass so that diagnostics and reports can speak of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Origin {
    /// Name of the ONNX node, or the id of the JSON node; empty if there is none.
    pub source: Arc<str>,
    /// Module path such as `transformer.h.3.attn`; empty at the root.
    pub scope: Arc<str>,
    /// The pass that created the node; empty for nodes of the front end.
    pub pass: Arc<str>,
}

impl Origin {
    /// The origin of a node that the front end read from the model.
    pub fn new(source: &str, scope: &str) -> Self {
        Origin { source: source.into(), scope: scope.into(), pass: "".into() }
    }

    /// An origin that names nothing.
    pub fn none() -> Self {
        Origin::new("", "")
    }

    /// The origin of a node that `pass` makes for the node at `self`.
    pub fn by(&self, pass: &str) -> Self {
        Origin { source: self.source.clone(), scope: self.scope.clone(), pass: pass.into() }
    }
}

impl Default for Origin {
    fn default() -> Self {
        Origin::none()
    }
}

impl fmt::Display for Origin {
    /// For people: `node "/fc1/Gemm" in fc1`, or `the graph` if nothing is known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&*self.source, &*self.scope) {
            ("", "") => f.write_str("the graph"),
            ("", scope) => write!(f, "scope `{scope}`"),
            (source, "") => write!(f, "node \"{source}\""),
            (source, scope) => write!(f, "node \"{source}\" in scope `{scope}`"),
        }
    }
}

/// The part of the training step a node belongs to; part of its identity: equal nodes of different
/// regions are never merged.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Region {
    /// The forward computation and the loss.
    #[default]
    Forward,
    /// Gradients and their reduction.
    Backward,
    /// The `k`-th recomputation of forward nodes during backward.
    Recompute(u32),
    /// Finite check, clipping, optimizer and scaler.
    Update,
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Region::Forward => f.write_str("forward"),
            Region::Backward => f.write_str("backward"),
            Region::Recompute(k) => write!(f, "recompute{k}"),
            Region::Update => f.write_str("update"),
        }
    }
}
