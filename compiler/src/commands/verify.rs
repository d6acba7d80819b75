//! `frit verify`: the proof that a plan is sound.

use crate::diagnostics::Report;
use crate::plan_dir;
use frit_passes::verify_plan::verify_plan;
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
    let evaluation = args.plan.join(plan_dir::EVALUATION);
    let mut text = String::new();
    for dir in [Some(&args.plan), evaluation.exists().then_some(&evaluation)].into_iter().flatten()
    {
        let plan = plan_dir::read(dir)?;
        verify_plan(&plan).map_err(|diagnostics| Report { diagnostics })?;
        text += &format!("{}: sound ({} tasks)\n", dir.display(), plan.tasks.len());
    }
    Ok(text)
}
