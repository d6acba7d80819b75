//! Checks the names of a model's inputs, outputs and parameters, by which files and later stages refer to them.

use crate::diagnostics::Report;
use frit_ir::{Code, Diagnostic, Graph, Op, OutputKind};
use std::collections::HashSet;

/// Names that begin so are Frit's own: the losses of an evaluation are among its inputs and outputs.
const RESERVED: &str = "frit.";

/// The key of the header of .safetensors files that is no tensor.
const HEADER: &str = "__metadata__";

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
        match &node.op {
            Op::Input(input) => reserved("input", &input.name, &mut report),
            Op::Param(param) if param.name == HEADER => {
                refuse("parameter", HEADER, IN_FILES, &mut report);
            }
            _ => {}
        }
    }
    report
}

fn reserved(what: &str, name: &str, report: &mut Report) {
    if name.starts_with(RESERVED) {
        refuse(what, name, "names that begin with `frit.` are Frit's own", report);
    } else if name == HEADER {
        refuse(what, name, IN_FILES, report);
    }
}

const IN_FILES: &str = "a .safetensors file can have no tensor of this name";

fn refuse(what: &str, name: &str, why: &str, report: &mut Report) {
    let message = format!("the model's {what} `{name}` has a name that is reserved");
    report.push(Diagnostic::error(Code::ReservedName, message).help(format!("rename it: {why}")));
}
