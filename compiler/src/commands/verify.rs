//! `frit verify`: verifies a plan, that the files beside it are the compiled ones, and that it is what its model compiles to.

use crate::certificate::{Certificate, Rounded, Verdict, certify};
use crate::diagnostics::Report;
use crate::plan_dir;
use crate::repeat::Repeat;
use frit_ir::plan::{Plan, layout};
use frit_ir::{Code, Diagnostic};
use frit_passes::verify_plan::{verify_evaluation, verify_plan};
use frit_runtime::plan_dir::verify_files;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Arguments of `frit verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit verify plan
  frit verify plan --certify
  frit verify plan --certify --json | jq '.certificate.passes[] | select(.verdict == \"not_shown\")'

The tasks of the plan are proved to compute the step that it declares. With --certify its model is compiled again, and of every pass it
is proved, over the real numbers, that loss, gradients, update and statistics are those of the model (docs/verification.md). A pass of
which this cannot be shown is listed; that is no error. A plan that differs from what its model compiles to is one, with exit code 1.")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// Compile the model again, and prove of every pass what it must keep.
    #[arg(long)]
    pub certify: bool,
    /// Path of the model that the plan was compiled from, if it was moved.
    #[arg(long, value_name = "FILE", requires = "certify")]
    pub model: Option<PathBuf>,
    /// Read external data of the model also outside of the model's folder.
    #[arg(long, requires = "certify")]
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
    let certificate = if args.certify { Some(certified(args)?) } else { None };
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

/// The certificate of a plan that was not edited.
fn certified(args: &Args) -> Result<Certificate, Report> {
    let plan = plan_dir::read(&args.plan)?;
    let scratch = tempfile::tempdir().map_err(|e| {
        Diagnostic::error(Code::FileUnwritable, format!("no temporary folder: {e}"))
    })?;
    let (model, to) = (args.model.as_deref(), scratch.path().join("model"));
    let again = Repeat::of(&args.plan, &plan, model, &to, args.allow_external_data)?;
    let certificate = certify(&again.request, &again.config, Some(&plan))?;
    if certificate.edited.is_empty() {
        return Ok(certificate);
    }
    let message = format!("{} is not what its model compiles to", args.plan.display());
    let different = certificate.edited.join(", ");
    Err(Diagnostic::error(Code::PlanEdited, message)
        .note(format!("these parts of plan.json differ: {different}"))
        .help("it was edited, or compiled by another version of frit: compile the model again")
        .into())
}

fn page(plan: &Path, certificate: &Certificate) -> String {
    let mut text = String::new();
    for checked in &certificate.passes {
        text += &format!("  {:<20} {}\n", checked.pass, checked.verdict.words());
        for difference in
            checked.differences.iter().filter(|_| checked.verdict == Verdict::NotShown)
        {
            text += &format!("      {difference}\n");
        }
    }
    text += &roundings(&certificate.outputs);
    let open: Vec<&str> = certificate
        .passes
        .iter()
        .filter(|p| p.verdict == Verdict::NotShown)
        .map(|p| p.pass.as_str())
        .collect();
    let plan = plan.display();
    text += &match open.is_empty() {
        true => format!("{plan}: certified: every rank computes the step of the model\n"),
        false => format!("{plan}: not certified: nothing is known of {}\n", open.join(", ")),
    };
    text
}

/// Where outputs are rounded; those that are rounded alike on one line.
fn roundings(outputs: &[Rounded]) -> String {
    let mut alike: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for output in outputs {
        let operations = output.operations.iter().cloned().collect::<Vec<_>>().join(", ");
        alike.entry(operations).or_default().push(&output.output);
    }
    let line = |(operations, names): (String, Vec<&str>)| {
        let names = match names[..] {
            [first, _, ..] => format!("{first} and {} more", names.len() - 1),
            _ => names.concat(),
        };
        match operations.is_empty() {
            true => format!("  {names}: equal but for the order of sums\n"),
            false => format!("  {names}: rounded by {operations}\n"),
        }
    };
    alike.into_iter().map(line).collect()
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
