//! `frit report`: writes a plan as one self-contained HTML page with its timeline, memory and precision.

use crate::diagnostics::Report;
use crate::plan_dir;
use crate::predict;
use crate::report;
use frit_ir::plan::Plan;
use frit_ir::{Code, Diagnostic};
use frit_passes::simulate::roofline::roofline;
use frit_passes::simulate::simulate;
use frit_runtime::files;
use std::path::{Path, PathBuf};

/// Arguments of `frit report`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  frit report plan -o report.html")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// The HTML file to write.
    #[arg(short, long, default_value = "report.html")]
    pub output: PathBuf,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    write(&plan_dir::read(&args.plan)?, &args.output)?;
    Ok(format!("{}\n", args.output.display()))
}

/// Writes the page of a plan.
///
/// # Errors
/// If the file cannot be written, or the plan's configuration names a cluster that cannot be read any more.
pub fn write(plan: &Plan, output: &Path) -> Result<(), Report> {
    let cluster = predict::cluster(plan)?;
    let page = report::page(plan, &simulate(plan, &cluster), &roofline(plan, &cluster));
    files::deliver(output, |out| out.write_all(page.as_bytes())).map_err(|e| {
        let message = format!("cannot write {}: {e}", output.display());
        Diagnostic::error(Code::FileUnwritable, message).into()
    })
}
