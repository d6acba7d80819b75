//! `frit doctor`: shows which GPU libraries this machine has, and which of a plan's requirements are missing.

use crate::diagnostics::Report;
use crate::plan_dir;
use frit_ir::{Code, Diagnostic};
use frit_runtime::device::cuda::doctor::{Finding, Findings, examine};
use std::fmt::Write;
use std::path::PathBuf;

/// Arguments of `frit doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit doctor          # what there is; always exit code 0
  frit doctor plan     # and what the plan needs; exit code 2 if that is missing

Libraries are searched on the path of the dynamic linker (LD_LIBRARY_PATH), in the directories that
FRIT_CUDA_PATH names, and in the Python wheels that PyTorch installs.")]
pub struct Args {
    /// The plan directory.
    pub plan: Option<PathBuf>,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let plan = args.plan.as_deref().map(plan_dir::read).transpose()?;
    let findings =
        examine(plan.as_ref()).map_err(|e| Diagnostic::error(Code::RunFailed, e.to_string()))?;
    if !findings.lacking() {
        return Ok(table(&findings));
    }
    let lacking: Vec<&str> = findings
        .findings
        .iter()
        .filter(|f| f.needed == Some(true) && f.found.is_none())
        .map(|f| f.what.as_str())
        .collect();
    let message = format!("this machine lacks what the plan needs: {}", lacking.join(", "));
    let mut diagnostic = Diagnostic::error(Code::MachineLacks, message);
    diagnostic.notes = table(&findings).lines().map(str::to_string).collect();
    Err(diagnostic.into())
}

fn table(findings: &Findings) -> String {
    let mut text = String::new();
    for Finding { what, found, problem, needed } in &findings.findings {
        let state = match (found, needed) {
            (Some(_), _) => "found",
            (None, Some(false)) => "not needed",
            (None, _) => "missing",
        };
        let detail = found.as_ref().or(problem.as_ref()).map_or("", String::as_str);
        let _ = writeln!(text, "{what:<10} {state:<10} {detail}");
    }
    if let Some(bytes) = findings.memory_bytes {
        let gib = bytes as f64 / f64::from(1 << 30);
        let _ = writeln!(text, "{:<10} {:<10} {gib:.2} GiB on each rank's GPU", "memory", "needed");
    }
    text
}
