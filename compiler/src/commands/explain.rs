//! `frit explain`: the meaning and remedy of a code.

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
            "a bug in Frit, or an edited plan: report the model, or compile it again"
        } else {
            code.remedy()
        };
        let holds = if code.is_internal() { "invariant" } else { "meaning" };
        return Ok(format!(
            "{code}       {}\n{holds:<9}  {}\nremedy     {remedy}\n",
            code.name(),
            code.meaning()
        ));
    }
    if let Some(lint) = LINTS.iter().find(|lint| lint.id.eq_ignore_ascii_case(&args.code)) {
        let (what, remedy) = (lint.what, lint.remedy);
        return Ok(format!(
            "{}        {}\nfinds      {what}\nremedy     {remedy}\n",
            lint.id,
            lint.level.name()
        ));
    }
    let known = Code::ALL.iter().map(|c| c.id()).chain(LINTS.iter().map(|l| l.id));
    let help = nearest::advice(&args.code, known) + "; docs/errors.md lists the codes";
    let message = format!("there is no code `{}`", args.code);
    Err(Diagnostic::error(Code::CommandLine, message).help(help).into())
}
