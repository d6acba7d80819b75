//! Turns a training graph into an evaluation graph.
//!
//! In: the imported graph. Out: a graph without dropout, with batch normalization by running statistics, without carries, and with
//! the losses, if any, in one output of statistics (see [`crate::loss::evaluation`]). It is pure: the same inputs and generator state
//! give the same outputs.

mod batch_norm;
mod dropout;

use crate::loss::metrics::Metric;
use crate::loss::{Term, evaluation};
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property};
use frit_ir::{Code, Diagnostic, Graph, OutputKind};

/// The contract of [`Evaluate`].
pub const INFO: PassInfo = PassInfo {
    name: "evaluate",
    summary: "convert the graph to evaluation: dropout off, running statistics, losses",
    requires: &[],
    // There is nothing to update.
    ensures: &[Property::HasLoss, Property::Updated],
    breaks: &[Property::Canonical],
    numerics: Numerics::Bitwise,
};

/// Makes a graph one that is only evaluated.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluate {
    /// The losses to evaluate.
    pub terms: Vec<Term>,
    /// Additional metrics.
    pub metrics: Vec<Metric>,
}

impl Pass for Evaluate {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        dropout::remove(graph, context)?;
        batch_norm::use_running_statistics(graph, context)?;
        graph.outputs.retain(|o| o.kind == OutputKind::Result);
        context.metrics = evaluation::attach(graph, &self.terms, &self.metrics)?;
        graph.remove_dead();
        graph
            .sort()
            .map_err(|_| Diagnostic::error(Code::PassFailed, "cycle after pass `evaluate`"))?;
        Ok(Changed::Yes)
    }
}
