//! `frit verify`: verifies a plan, that the files beside it are the compiled ones, and that it is what its model compiles to.

use crate::certificate::{COMPILE_AGAIN, Certificate, Checked, Kept, Plans, Verdict, certify};
use crate::diagnostics::Report;
use crate::plan_dir;
use crate::repeat::Repeat;
use frit_ir::plan::{Plan, layout};
use frit_ir::{Code, Diagnostic};
use frit_passes::verify_plan::{verify_evaluation, verify_plan};
use frit_runtime::RunError;
use frit_runtime::plan_dir::{read_pass_trace, verify_files};
use frit_runtime::progress::Heartbeat;
use indicatif::ProgressBar;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
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
which this cannot be shown is listed; that is no error. A plan that is not what these graphs are lowered to is one, with exit code 1.")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// Prove the tasks alone, without the model.
    #[arg(long)]
    pub quick: bool,
    /// Path of the model that the plan was compiled from, if it was moved.
    #[arg(long, value_name = "FILE", conflicts_with = "quick")]
    pub model: Option<PathBuf>,
    /// Read external data of the model also outside of the model's folder.
    #[arg(long, conflicts_with = "quick")]
    pub allow_external_data: bool,
    /// As JSON, with stable keys.
    #[arg(long)]
    pub json: bool,
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
    let certificate = if args.quick { None } else { Some(certificate(args)?) };
    if args.json {
        let found = serde_json::json!({ "plans": plans, "certificate": certificate });
        return Ok(format!("{found:#}\n"));
    }
    let mut text: String = plans.iter().map(line).collect();
    if let Some(certificate) = certificate {
        text += &page(&args.plan, &certificate);
    }
    Ok(text)
}

/// The certificate of the plans of a directory, with progress on a terminal.
fn certificate(args: &Args) -> Result<Certificate, Report> {
    let progress = ProgressBar::new_spinner().with_message("proving every pass");
    progress.enable_steady_tick(Duration::from_millis(100));
    let _heartbeat = Heartbeat::start("proving every pass");
    let found = certified(&args.plan, args.model.as_deref(), args.allow_external_data);
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
    let plans = Plans { plan: &plan, evaluation: evaluation.as_ref() };
    let certificate = certify(&again.request, &again.config, &trace, plans)?;
    if certificate.edited.is_empty() {
        return Ok(certificate);
    }
    let message = format!("{} is not what its model compiles to", dir.display());
    let different = certificate.edited.join(", ");
    Err(Diagnostic::error(Code::PlanEdited, message)
        .note(format!("these parts of plan.json differ: {different}"))
        .help(COMPILE_AGAIN)
        .into())
}

fn page(plan: &Path, certificate: &Certificate) -> String {
    let mut text = by_verdict("", &certificate.passes);
    text += &by_verdict("evaluation: ", &certificate.evaluation);
    text += &outputs(&certificate.outputs);
    let open = certificate.open();
    let names: Vec<&str> = open.iter().map(|p| p.pass.as_str()).collect();
    for Checked { pass, differences, .. } in &open {
        differences.iter().for_each(|what| text += &format!("  {pass}: {what}\n"));
    }
    let plan = plan.display();
    text += &match names.is_empty() {
        true => format!("{plan}: certified: every rank computes the step of the model\n"),
        false => format!("{plan}: not certified: nothing is known of {}\n", names.join(", ")),
    };
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

/// Said wherever bits are: it is a statement about graphs.
const ASSUMED: &str =
    "  assumed: a kernel computes an operation alike wherever it stands, in fused regions too\n";

/// Outputs of the same verdict: how many of each kind, and the passes that do not keep their bits.
#[derive(Default)]
struct Group<'a> {
    kinds: BTreeMap<&'static str, usize>,
    passes: BTreeSet<&'a str>,
}

/// How many outputs are what, and by which passes; and how many are rounded, and by what. `--json` has it of each.
fn outputs(outputs: &[Kept]) -> String {
    let mut groups: BTreeMap<Verdict, Group> = BTreeMap::new();
    for output in outputs {
        let group = groups.entry(output.verdict.max(Verdict::Bits)).or_default();
        *group.kinds.entry(kind(&output.output)).or_default() += 1;
        group.passes.extend(output.passes.iter().map(String::as_str));
    }
    let list = |words: BTreeSet<&str>| words.into_iter().collect::<Vec<_>>().join(", ");
    let mut text = String::new();
    for (verdict, Group { kinds, passes }) in groups {
        let count: usize = kinds.values().sum();
        let kinds: Vec<String> =
            kinds.into_iter().map(|(kind, n)| format!("{kind}: {n}")).collect();
        let by = if passes.is_empty() { String::new() } else { format!(": {}", list(passes)) };
        let (all, words, kinds) = (outputs.len(), verdict.words(), kinds.join(", "));
        text += &format!("  {count} of {all} outputs ({kinds}) {words}{by}\n");
        if verdict == Verdict::Bits {
            text += ASSUMED;
        }
    }
    let rounded = outputs.iter().filter(|output| !output.operations.is_empty());
    let operations: BTreeSet<&str> =
        rounded.clone().flat_map(|output| output.operations.iter().map(String::as_str)).collect();
    if !operations.is_empty() {
        text += &format!("  {} outputs rounded, by {}\n", rounded.count(), list(operations));
    }
    text
}

/// What an output is, from its name.
fn kind(output: &str) -> &'static str {
    match output.split(' ').next() {
        Some("carry") => "parameters and states",
        Some("gradient") => "gradients",
        Some("metric") => "metrics",
        _ => "results",
    }
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
    let refuse = |diagnostics| Report { diagnostics };
    let files = |dir: &Path, plan: &Plan| verify_files(dir, plan).map_err(changed);
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
