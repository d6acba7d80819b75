//! `frit report`: writes a plan, and runs of it, as one self-contained HTML page.

use super::verify;
use crate::certificate::Certificate;
use crate::diagnostics::{Report, of_run};
use crate::plan_dir;
use crate::predict;
use crate::render;
use crate::report::{self, Certified, Measured, runs, trace};
use frit_ir::plan::{Plan, layout, sha256_hex};
use frit_ir::{Code, Diagnostic};
use frit_passes::simulate::roofline::roofline;
use frit_passes::simulate::simulate;
use frit_runtime::files;
use frit_runtime::metrics::plan_identity;
use frit_runtime::outputs;
use std::path::{Path, PathBuf};

/// Arguments of `frit report`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit report plan -o report.html
  frit report plan --metrics metrics.jsonl --trace trace.json
  frit report plan --metrics runs/*/metrics.jsonl
  frit report plan --quick")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// Without the certificate of `frit verify`, for which the model is imported again.
    #[arg(long)]
    pub quick: bool,
    /// The model, for the certificate.
    #[command(flatten)]
    pub model: verify::Model,
    /// Draw runs: files of `frit run --metrics`, also of runs of other plans, for comparison.
    #[arg(long, value_name = "FILE.jsonl", num_args = 1..)]
    pub metrics: Vec<PathBuf>,
    /// Draw a measured step beside the predicted one: a file of `frit run --trace`, of a run of this plan.
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// The HTML file to write.
    #[arg(short, long, default_value = "report.html")]
    pub output: PathBuf,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let of_plan = outputs::files_of(&args.plan);
    let read = of_plan.iter().map(|path| ("the plan", path.as_path()));
    let read = read.chain(args.metrics.iter().map(|path| ("--metrics", path.as_path())));
    let read: Vec<_> = read.chain(args.trace.iter().map(|p| ("--trace", p.as_path()))).collect();
    outputs::check(&[("--output", Some(&args.output))], &read).map_err(of_run)?;
    let plan = plan_dir::read(&args.plan)?;
    let found = measured(&args.plan, &plan, &args.metrics, args.trace.as_deref())?;
    let certified = match args.quick {
        true => Certified::left_out(&args.plan),
        false => {
            let certify = || verify::certified_with_progress(&args.plan, &args.model);
            Certified { plan: args.plan.clone(), found: Some(proved_and(&args.plan, certify)) }
        }
    };
    write(&plan, &certified, &found, &args.output)?;
    render::print(&found.warnings());
    Ok(format!("{}\n", args.output.display()))
}

/// Reads runs, and a step of the plan in `dir`, for its page.
///
/// # Errors
/// If a file cannot be read, or the step is that of another plan.
pub fn measured(
    dir: &Path,
    plan: &Plan,
    metrics: &[PathBuf],
    trace: Option<&Path>,
) -> Result<Measured, Report> {
    let text = std::fs::read(dir.join(layout::PLAN)).ok();
    Ok(Measured {
        plan_name: text.map(|text| plan_identity(&sha256_hex(&text)).to_string()),
        runs: runs::read(metrics)?,
        trace: trace.map(|path| trace::read(path, plan)).transpose()?,
    })
}

/// The certificate of the plan in `dir`, for its page; of a plan that is not sound, why.
pub fn certified(dir: &Path) -> Certified {
    let found = proved_and(dir, || verify::certified(dir, None, false));
    Certified { plan: dir.into(), found: Some(found) }
}

/// A certificate says that the tasks are those of the model, so they are proved, too.
fn proved_and(
    dir: &Path,
    certify: impl FnOnce() -> Result<Certificate, Report>,
) -> Result<Certificate, Report> {
    verify::proved(dir)?;
    certify()
}

/// Writes the page of a plan.
///
/// # Errors
/// If the file cannot be written, or the plan's configuration names a cluster that cannot be read any more.
pub fn write(
    plan: &Plan,
    certified: &Certified,
    measured: &Measured,
    output: &Path,
) -> Result<(), Report> {
    let cluster = predict::cluster(plan)?;
    let (predicted, roofline) = (simulate(plan, &cluster), roofline(plan, &cluster));
    let page = report::page(plan, &predicted, &roofline, certified, measured);
    files::deliver(output, |out| out.write_all(page.as_bytes())).map_err(|e| {
        let message = format!("cannot write {}: {e}", output.display());
        Diagnostic::error(Code::FileUnwritable, message).into()
    })
}
