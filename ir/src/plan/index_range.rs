//! Allowed values of integer inputs that are used as indices or labels.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The use of an input as indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexKind {
    /// Classes of a cross-entropy.
    Class,
    /// Rows of an embedding.
    Row,
    /// Places along an axis, of ONNX's Gather and its kin.
    Place,
}

/// The values that elements of an integer input may have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct IndexRange {
    /// The smallest.
    pub lo: i64,
    /// The largest.
    pub hi: i64,
    /// A value outside of these that is also allowed: the ignored label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ignore: Option<i64>,
    /// Which elements it is about: where they begin and end along each axis; all, if empty. If rows are examples, it is about all rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub within: Vec<(usize, usize)>,
    /// How the input is used.
    pub kind: IndexKind,
    /// The module that reads it, or the name of its operand.
    pub of: String,
    /// Of classes: inputs of tokens, with as many places, of which the logits of a place see its own token and none behind it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causal: Vec<String>,
}

impl IndexRange {
    /// Whether an element may have this value.
    pub fn allows(&self, value: i64) -> bool {
        (self.lo..=self.hi).contains(&value) || self.ignore == Some(value)
    }

    /// Whether `other` allows every value that this one does.
    pub fn is_within(&self, other: &IndexRange) -> bool {
        let empty = self.lo > self.hi;
        (empty || (other.lo <= self.lo && self.hi <= other.hi))
            && self.ignore.is_none_or(|value| other.allows(value))
    }
}

impl fmt::Display for IndexRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..={}", self.lo, self.hi)?;
        self.ignore.map_or(Ok(()), |value| write!(f, " or {value}"))
    }
}
