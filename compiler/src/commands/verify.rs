//! `frit verify`: the proof that a plan is sound.

use crate::diagnostics::Report;
use crate::plan_dir;
use std::path::PathBuf;

/// Arguments of `frit verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  frit verify plan")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let plan = plan_dir::read(&args.plan)?;
    frit_passes::verify_plan::verify_plan(&plan).map_err(|diagnostics| Report { diagnostics })?;
    Ok(format!("{}: sound ({} tasks)\n", args.plan.display(), plan.tasks.len()))
}
