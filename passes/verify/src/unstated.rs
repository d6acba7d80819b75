//! What the certificate has no statement of.

use frit_ir::{GraphError, Origin};
use std::fmt;

/// Names what has no statement; it is reported as not proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unstated {
    /// The operation, or the part of the step such as `loss`.
    pub what: &'static str,
    /// Where it comes from.
    pub origin: Origin,
    /// Why.
    pub reason: String,
}

impl Unstated {
    /// That there is no statement of this.
    pub fn new(what: &'static str, origin: &Origin, reason: impl Into<String>) -> Self {
        Unstated { what, origin: origin.clone(), reason: reason.into() }
    }
}

impl fmt::Display for Unstated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no statement of `{}` at {}: {}", self.what, self.origin, self.reason)
    }
}

impl std::error::Error for Unstated {}

impl From<GraphError> for Unstated {
    fn from(GraphError { op, origin, error, operands }: GraphError) -> Self {
        Unstated::new(op, &origin, format!("{error} (operands: {operands})"))
    }
}
