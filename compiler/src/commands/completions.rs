//! `frit completions`: prints shell completion scripts.

use super::Cli;
use crate::diagnostics::Report;
use clap::CommandFactory;

/// Arguments of `frit completions`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  frit completions bash > /etc/bash_completion.d/frit")]
pub struct Args {
    /// The shell.
    pub shell: clap_complete::Shell,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "frit", &mut script);
    Ok(String::from_utf8_lossy(&script).into_owned())
}
