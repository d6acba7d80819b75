//! `frit completions`: prints shell completion scripts.

use super::Cli;
use crate::diagnostics::Report;
use clap::CommandFactory;

/// Arguments of `frit completions`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit completions bash > ~/.local/share/bash-completion/completions/frit
  frit completions bash frit-run > ~/.local/share/bash-completion/completions/frit-run")]
pub struct Args {
    /// The shell.
    pub shell: clap_complete::Shell,
    /// The program whose arguments are completed.
    #[arg(default_value = "frit")]
    pub program: Program,
}

/// A program of this package.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Program {
    /// The compiler and everything else.
    Frit,
    /// The runtime alone.
    FritRun,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let (mut command, name) = match args.program {
        Program::Frit => (Cli::command(), "frit"),
        Program::FritRun => (frit_runtime::program::command(), "frit-run"),
    };
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    Ok(String::from_utf8_lossy(&script).into_owned())
}
