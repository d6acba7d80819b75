//! `frit verify`: verifies a plan, and that the files beside it are the compiled ones.

use crate::diagnostics::Report;
use crate::plan_dir;
use frit_ir::plan::{Plan, layout};
use frit_ir::{Code, Diagnostic};
use frit_passes::verify_plan::{verify_evaluation, verify_plan};
use frit_runtime::plan_dir::verify_files;
use std::path::{Path, PathBuf};

/// Arguments of `frit verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  frit verify plan")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let refuse = |diagnostics| Report { diagnostics };
    let files = |dir: &Path, plan: &Plan| {
        verify_files(dir, plan).map_err(|e| Diagnostic::error(Code::PlanChanged, e.to_string()))
    };
    let sound = |dir: &Path, plan: &Plan| {
        format!("{}: sound ({} tasks)\n", dir.display(), plan.tasks.len())
    };
    let plan = plan_dir::read(&args.plan)?;
    verify_plan(&plan).map_err(refuse)?;
    files(&args.plan, &plan)?;
    let mut text = sound(&args.plan, &plan);
    let dir = args.plan.join(layout::EVALUATION);
    if dir.exists() {
        let evaluation = plan_dir::read(&dir)?;
        verify_evaluation(&evaluation, &plan).map_err(refuse)?;
        files(&dir, &evaluation)?;
        text += &sound(&dir, &evaluation);
    }
    Ok(text)
}
