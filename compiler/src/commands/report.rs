//! `frit report`: writes a plan as one self-contained HTML page with its timeline, memory and precision.

use crate::diagnostics::Report;
use crate::plan_dir;
use crate::predict;
use crate::report;
use frit_ir::{Code, Diagnostic};
use frit_passes::simulate::roofline::roofline;
use frit_passes::simulate::simulate;
use frit_runtime::files;
use std::path::PathBuf;

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
    let plan = plan_dir::read(&args.plan)?;
    let cluster = predict::cluster(&plan)?;
    let page = report::page(&plan, &simulate(&plan, &cluster), &roofline(&plan, &cluster));
    files::deliver(&args.output, |out| out.write_all(page.as_bytes())).map_err(|e| {
        Diagnostic::error(
            Code::FileUnwritable,
            format!("cannot write {}: {e}", args.output.display()),
        )
    })?;
    Ok(format!("{}\n", args.output.display()))
}
