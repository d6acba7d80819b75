//! `frit verify`: verifies a plan, and that the files beside it are the compiled ones.

use crate::diagnostics::Report;
use crate::plan_dir;
use frit_ir::plan::{Plan, layout};
use frit_ir::{Code, Diagnostic};
use frit_passes::verify_plan::{verify_evaluation, verify_plan};
use frit_runtime::plan_dir::verify_files;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Arguments of `frit verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  frit verify plan")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
}

/// A plan that is sound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Sound {
    /// The plan directory.
    pub plan: PathBuf,
    /// Its tasks.
    pub tasks: usize,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let line = |s: &Sound| format!("{}: sound ({} tasks)\n", s.plan.display(), s.tasks);
    Ok(verify(&args.plan)?.iter().map(line).collect())
}

/// Verifies the plan of a plan directory and its evaluation, and the files beside them.
///
/// # Errors
/// The invariants that do not hold, or the file that was changed.
pub fn verify(dir: &Path) -> Result<Vec<Sound>, Report> {
    let refuse = |diagnostics| Report { diagnostics };
    let files = |dir: &Path, plan: &Plan| {
        verify_files(dir, plan).map_err(|e| Diagnostic::error(Code::PlanChanged, e.to_string()))
    };
    let sound = |dir: &Path, plan: &Plan| Sound { plan: dir.into(), tasks: plan.tasks.len() };
    let plan = plan_dir::read(dir)?;
    verify_plan(&plan).map_err(refuse)?;
    files(dir, &plan)?;
    let mut all = vec![sound(dir, &plan)];
    let dir = dir.join(layout::EVALUATION);
    if dir.exists() {
        let evaluation = plan_dir::read(&dir)?;
        verify_evaluation(&evaluation, &plan).map_err(refuse)?;
        files(&dir, &evaluation)?;
        all.push(sound(&dir, &evaluation));
    }
    Ok(all)
}
