//! `frit explain`: what a code means.

use crate::diagnostics::Report;
use frit_ir::{Code, Diagnostic, nearest};
use frit_passes::lint::catalog::LINTS;

/// Its arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit explain E014
  frit explain L02")]
pub struct Args {
    /// The code of a message, or the id of a lint.
    code: String,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    if let Some(code) = Code::find(&args.code) {
        let remedy = if code.is_internal() {
            "a mistake of Frit, or a plan that was edited: report the model, or compile it again"
        } else {
            code.remedy()
        };
        let holds = if code.is_internal() { "must hold" } else { "means" };
        return Ok(format!(
            "{code}       {}\n{holds:<9}  {}\ndo         {remedy}\n",
            code.name(),
            code.meaning()
        ));
    }
    if let Some(lint) = LINTS.iter().find(|lint| lint.id.eq_ignore_ascii_case(&args.code)) {
        let (what, remedy) = (lint.what, lint.remedy);
        return Ok(format!(
            "{}        {}\nfinds      {what}\ndo         {remedy}\n",
            lint.id,
            lint.level.name()
        ));
    }
    let known = Code::ALL.iter().map(|c| c.id()).chain(LINTS.iter().map(|l| l.id));
    let help = nearest::advice(&args.code, known) + "; docs/errors.md lists the codes";
    let message = format!("there is no code `{}`", args.code);
    Err(Diagnostic::error(Code::CommandLine, message).help(help).into())
}
