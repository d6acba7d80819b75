//! Checks the names of a model's inputs and outputs, by which later stages refer to them.

use crate::diagnostics::Report;
use frit_ir::{Code, Diagnostic, Graph, Op, OutputKind};
use std::collections::HashSet;

/// Names that begin so are Frit's own: the losses of an evaluation are among its inputs and outputs.
const RESERVED: &str = "frit.";

/// Errors in the names of an imported graph.
pub(super) fn check(graph: &Graph) -> Report {
    let mut report = Report::default();
    let mut seen = HashSet::new();
    for output in graph.outputs.iter().filter(|o| o.kind == OutputKind::Result) {
        let (name, origin) = (&output.name, &graph.def(output.value).origin);
        if !seen.insert(name) {
            let message = format!("the model returns `{name}` twice");
            let help = "every output needs a name of its own: leave one out, or rename it";
            report.push(Diagnostic::error(Code::OutputNamedTwice, message).at(origin).help(help));
        }
        reserved("output", name, &mut report);
    }
    for (_, node) in graph.nodes() {
        if let Op::Input(input) = &node.op {
            reserved("input", &input.name, &mut report);
        }
    }
    report
}

fn reserved(what: &str, name: &str, report: &mut Report) {
    if name.starts_with(RESERVED) {
        let message = format!("the model's {what} `{name}` has a name that is reserved");
        let help = format!("rename it: names that begin with `{RESERVED}` are Frit's own");
        report.push(Diagnostic::error(Code::ReservedName, message).help(help));
    }
}
