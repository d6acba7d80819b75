//! `frit verify`: verifies a plan, that the files beside it are the compiled ones, and that it is what its model compiles to.

use crate::certificate::{
    self, COMPILE_AGAIN, Certificate, Checked, KERNELS, Plans, Verdict, certify,
};
use crate::diagnostics::Report;
use crate::plan_dir;
use crate::repeat::Repeat;
use crate::source::Source;
use frit_ir::plan::{Plan, layout};
use frit_ir::{Code, Diagnostic};
use frit_passes::verify_plan::{verify_evaluation, verify_plan};
use frit_runtime::RunError;
use frit_runtime::plan_dir::{read_pass_trace, verify_files};
use frit_runtime::progress::Heartbeat;
use indicatif::ProgressBar;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Arguments of `frit verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit verify plan
  frit verify plan --quick
  frit verify plan --json | jq '.certificate.passes[] | select(.verdict == \"not_shown\")'

The tasks of the plan are proved to compute the step that it declares. Then its model is imported, and of every pass it is proved, from
the graphs that the plan has kept, that loss, gradients, update and statistics are those of the model (docs/verification.md). A pass of
which this cannot be shown is listed, and the exit code is 1, as it is for a plan that is not what these graphs are lowered to.")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// Prove the tasks alone, without the model.
    #[arg(long)]
    pub quick: bool,
    /// The model, for the certificate.
    #[command(flatten)]
    pub model: Model,
    /// As JSON, with stable keys.
    #[arg(long)]
    pub json: bool,
}

/// Where the model of a certificate is, of a command that needs none with `--quick`.
#[derive(Debug, clap::Args)]
pub struct Model {
    /// Path of the model that the plan was compiled from, if it was moved.
    #[arg(long, value_name = "FILE", conflicts_with = "quick")]
    pub model: Option<PathBuf>,
    /// Read external data of the model also outside of the model's folder.
    #[arg(long, conflicts_with = "quick")]
    pub allow_external_data: bool,
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
    let plans = verify(&args.plan)?;
    let certify = || certified_with_progress(&args.plan, &args.model);
    let certificate = if args.quick { None } else { Some(certify()?) };
    let text = if args.json {
        let found = serde_json::json!({ "plans": plans, "certificate": certificate });
        format!("{found:#}\n")
    } else {
        let page = certificate.as_ref().map(|found| page(&args.plan, found));
        plans.iter().map(line).chain(page).collect()
    };
    match certificate.and_then(|found| open(&args.plan, &found)) {
        None => Ok(text),
        Some(error) => {
            super::print(&text)?;
            Err(error.into())
        }
    }
}

/// That passes are not proved, if some are not.
pub fn open(dir: &Path, certificate: &Certificate) -> Option<Diagnostic> {
    let open = certificate.open();
    let mut names: Vec<&str> = open.iter().map(|p| p.pass.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let differences = open.iter().flat_map(|p| p.differences.iter().map(move |d| (&p.pass, d)));
    let message = format!("{}: not certified: not shown of {}", dir.display(), names.join(", "));
    let error = Diagnostic::error(Code::NotCertified, message).help(
        "if the plan was edited, or compiled by another version of frit, compile the model again; otherwise it needs a \
         law that the checker does not know: please report the model",
    );
    let error = differences.fold(error, |e, (pass, what)| e.note(format!("{pass}: {what}")));
    (!open.is_empty()).then_some(error)
}

/// [`certified`], with progress on a terminal.
pub(super) fn certified_with_progress(dir: &Path, model: &Model) -> Result<Certificate, Report> {
    let progress = ProgressBar::new_spinner().with_message("proving every pass");
    progress.enable_steady_tick(Duration::from_millis(100));
    let _heartbeat = Heartbeat::start("proving every pass");
    let found = certified(dir, model.model.as_deref(), model.allow_external_data);
    progress.finish_and_clear();
    found
}

/// The certificate of the plans of a directory that were not edited. Their model is where it was, or here, or as good as a copy of it is
/// in the directory.
///
/// # Errors
/// If there is no such plan or model, or the plan is not what the model compiles to.
pub fn certified(
    dir: &Path,
    model: Option<&Path>,
    allow_external_data: bool,
) -> Result<Certificate, Report> {
    let plan = plan_dir::read(dir)?;
    let trace = read_pass_trace(dir, &plan).map_err(changed)?.ok_or_else(|| {
        let message = format!("{} has no trace of the passes that made it", dir.display());
        let training = dir.parent().filter(|_| dir.ends_with(layout::EVALUATION));
        let training = training.filter(|training| training.join(layout::PLAN).exists());
        let help = training.map(|t| format!("`frit verify {}` certifies both", t.display()));
        Diagnostic::error(Code::PlanEdited, message)
            .help(help.unwrap_or_else(|| COMPILE_AGAIN.into()))
    })?;
    let evaluation = dir.join(layout::EVALUATION);
    let evaluation = if evaluation.exists() { Some(plan_dir::read(&evaluation)?) } else { None };
    let scratch = tempfile::tempdir().map_err(|e| {
        Diagnostic::error(Code::FileUnwritable, format!("no temporary folder: {e}"))
    })?;
    let to = scratch.path().join("model");
    let again = Repeat::of(dir, &plan, model, &to, allow_external_data)?;
    let folder = dir.join(layout::SOURCE);
    let source = again.digest.as_ref().map(|_| Source::read(&folder)).transpose()?;
    let plans = Plans { plan: &plan, evaluation: evaluation.as_ref(), source: source.as_ref() };
    let mut certificate = certify(&again.request, &again.config, &trace, plans)?;
    let configuration = folder.join(layout::CONFIGURATION);
    if std::fs::read(&configuration).is_ok_and(|text| text != plan.config.as_bytes()) {
        certificate.edited.push(format!("{}/{}", layout::SOURCE, layout::CONFIGURATION));
    }
    let path = again.request.model;
    certificate.model = again.digest.map(|sha256| certificate::Model { path, sha256 });
    if certificate.edited.is_empty() {
        return Ok(certificate);
    }
    let message = format!("{} is not what its model compiles to", dir.display());
    let different = certificate.edited.join(", ");
    Err(Diagnostic::error(Code::PlanEdited, message)
        .note(format!("these parts of it differ: {different}"))
        .help(COMPILE_AGAIN)
        .into())
}

fn page(plan: &Path, certificate: &Certificate) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    let mut text = match &certificate.model {
        Some(certificate::Model { path, sha256 }) => {
            let path = path.strip_prefix(here).unwrap_or(path);
            format!("  model: {} (sha256 {sha256})\n", path.display())
        }
        None => "  model: what the plan has kept of it, as its file is gone\n".into(),
    };
    text += &by_verdict("", &certificate.passes);
    text += &by_verdict("evaluation: ", &certificate.evaluation);
    text += &outputs(certificate);
    if certificate.open().is_empty() {
        let plan = plan.display();
        text += &format!("{plan}: certified: every rank computes the step of the model\n");
    }
    text
}

/// The names of passes on a line for each verdict.
fn by_verdict(title: &str, passes: &[Checked]) -> String {
    let mut names: BTreeMap<Verdict, Vec<&str>> = BTreeMap::new();
    for checked in passes {
        let names = names.entry(checked.verdict).or_default();
        if !names.contains(&checked.pass.as_str()) {
            names.push(&checked.pass);
        }
    }
    let line = |(verdict, names): (Verdict, Vec<&str>)| match verdict {
        Verdict::Unchanged => format!("  {title}{} passes {}\n", names.len(), verdict.words()),
        _ => format!("  {title}{}: {}\n", verdict.words(), names.join(", ")),
    };
    names.into_iter().map(line).collect()
}

/// How many outputs are what, and by which passes; and how many are rounded, and by what. `--json` has it of each.
fn outputs(certificate: &Certificate) -> String {
    let mut text = String::new();
    let all = certificate.outputs.len();
    for (verdict, group) in certificate.groups() {
        let by =
            if group.passes.is_empty() { String::new() } else { format!(": {}", group.passes()) };
        let (count, words, kinds) = (group.count(), verdict.words(), group.kinds());
        text += &format!("  {count} of {all} outputs ({kinds}) {words}{by}\n");
        if verdict == Verdict::Bits {
            text += &format!("  assumed: {KERNELS}\n");
        }
    }
    text + &certificate.rounded().map_or(String::new(), |rounded| format!("  {rounded}\n"))
}

/// That a file of a plan is not what it was.
fn changed(error: RunError) -> Diagnostic {
    Diagnostic::error(Code::PlanChanged, error.to_string())
}

/// Verifies the plan of a plan directory and its evaluation, and the files beside them.
///
/// # Errors
/// The invariants that do not hold, or the file that was changed.
pub fn verify(dir: &Path) -> Result<Vec<Sound>, Report> {
    let sound = |(dir, plan): (PathBuf, Plan)| {
        verify_files(&dir, &plan).map_err(changed)?;
        Ok(Sound { plan: dir, tasks: plan.tasks.len() })
    };
    proved(dir)?.into_iter().map(sound).collect()
}

/// The plan of a plan directory and its evaluation, the tasks of both proved; the files beside them are not read.
///
/// # Errors
/// The invariants that do not hold.
pub fn proved(dir: &Path) -> Result<Vec<(PathBuf, Plan)>, Report> {
    let refuse = |diagnostics| Report { diagnostics };
    let plan = plan_dir::read(dir)?;
    verify_plan(&plan).map_err(refuse)?;
    let mut all = vec![(dir.to_path_buf(), plan)];
    let dir = dir.join(layout::EVALUATION);
    if dir.exists() {
        let evaluation = plan_dir::read(&dir)?;
        verify_evaluation(&evaluation, &all[0].1).map_err(refuse)?;
        all.push((dir, evaluation));
    }
    Ok(all)
}
