//! Invariants of graphs, checked after every pass in debug builds and tests.
//!
//! Each file opens with its invariants and their codes: structure V1xx, types V2xx, sharding V3xx, regions V4xx, functions V5xx.

mod functions;
mod regions;
mod sharding;
mod structure;
#[cfg(test)]
mod tests;
mod types;

use crate::{Code, Diagnostic, Graph, Origin};

/// The laws broken so far.
#[derive(Default)]
struct Report {
    broken: Vec<Diagnostic>,
}

impl Report {
    fn add(&mut self, code: Code, origin: &Origin, message: impl Into<String>) {
        self.broken.push(Diagnostic::error(code, message).at(origin));
    }

    fn result(self) -> Result<(), Vec<Diagnostic>> {
        if self.broken.is_empty() { Ok(()) } else { Err(self.broken) }
    }
}

/// Checks every law.
///
/// # Errors
/// The laws that the graph breaks, in the order of its nodes. When its structure is broken the other
/// laws have no meaning and are not looked at.
pub fn verify(graph: &Graph) -> Result<(), Vec<Diagnostic>> {
    let mut report = Report::default();
    structure::check(graph, &mut report);
    if report.broken.is_empty() {
        types::check(graph, &mut report);
        regions::check(graph, &mut report);
        sharding::check(graph, &mut report);
        functions::check(graph, &mut report);
    }
    report.result()
}

/// Checks the laws of structure and types, which the body of a kernel obeys too.
///
/// # Errors
/// As [`verify`].
pub fn verify_body(body: &Graph) -> Result<(), Vec<Diagnostic>> {
    let mut report = Report::default();
    structure::check(body, &mut report);
    if report.broken.is_empty() {
        types::check(body, &mut report);
    }
    report.result()
}
