//! Diagnostics as Python's exception `frit.FritError`.

use frit::diagnostics::{Report, of_run};
use frit_ir::{Code, Diagnostic};
use frit_runtime::RunError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// The exception of a report.
pub(crate) fn of_report(py: Python<'_>, report: &Report) -> PyErr {
    raise(py, &report.to_string(), &report.diagnostics).unwrap_or_else(|error| error)
}

/// The exception of a failed run.
pub(crate) fn of_run_error(py: Python<'_>, error: RunError) -> PyErr {
    of_report(py, &of_run(error).into())
}

/// The exception of a bug, such as a panic.
pub(crate) fn of_bug(py: Python<'_>, reason: String) -> PyErr {
    of_run_error(py, RunError::Internal { reason })
}

fn raise(py: Python<'_>, message: &str, diagnostics: &[Diagnostic]) -> PyResult<PyErr> {
    let class = py.import("frit._errors")?.getattr("FritError")?;
    let all = PyList::empty(py);
    for diagnostic in diagnostics {
        all.append(of_diagnostic(py, diagnostic)?)?;
    }
    Ok(PyErr::from_value(class.call1((message, all))?))
}

/// A diagnostic as a dict: code, message, node, scope, remedy, notes.
pub(crate) fn of_diagnostic<'py>(
    py: Python<'py>,
    diagnostic: &Diagnostic,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let known = |text: &str| (!text.is_empty()).then(|| text.to_string());
    let general = Code::find(&diagnostic.code).map(Code::remedy).and_then(known);
    dict.set_item("code", &diagnostic.code)?;
    dict.set_item("message", &diagnostic.message)?;
    dict.set_item("node", known(&diagnostic.origin.source))?;
    dict.set_item("scope", known(&diagnostic.origin.scope))?;
    dict.set_item("remedy", diagnostic.help.clone().or(general))?;
    dict.set_item("notes", &diagnostic.notes)?;
    Ok(dict)
}
