//! `frit eval`: computes losses and metrics over a data set, and writes outputs.

use crate::diagnostics::Report;
use frit_ir::{Code, Diagnostic};
use frit_runtime::eval::{Options, evaluate};
use frit_runtime::plan_dir::limit_kernels_to;

/// Runs it.
pub(super) fn execute(options: &Options) -> Result<String, Report> {
    limit_kernels_to(&options.plan);
    let report =
        evaluate(options).map_err(|e| Diagnostic::error(Code::RunFailed, e.to_string()))?;
    Ok(report.map(|r| r.render(options.json)).unwrap_or_default())
}
