//! `frit doctor`: shows which GPU libraries this machine has, and which of a plan's requirements are missing.

use crate::diagnostics::Report;
use crate::plan_dir;
use frit_ir::{Code, Diagnostic};
use frit_runtime::device::cuda::doctor::examine;
use std::path::PathBuf;

/// Arguments of `frit doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit doctor          # what there is; always exit code 0
  frit doctor plan     # and what the plan needs; exit code 2 if that is missing

`frit-run doctor` does the same on machines without the compiler, and measures what a GPU reaches.
Libraries are searched in the directories that FRIT_CUDA_PATH names, on the path of the dynamic linker
(LD_LIBRARY_PATH), and in the Python wheels that PyTorch installs, in this order.")]
pub struct Args {
    /// The plan directory.
    pub plan: Option<PathBuf>,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let plan = args.plan.as_deref().map(plan_dir::read).transpose()?;
    let findings =
        examine(plan.as_ref()).map_err(|e| Diagnostic::error(Code::RunFailed, e.to_string()))?;
    let Some(message) = findings.complaint() else { return Ok(findings.table()) };
    let mut diagnostic = Diagnostic::error(Code::MachineLacks, message);
    diagnostic.notes = findings.table().lines().map(str::to_string).collect();
    Err(diagnostic.into())
}
