//! `frit man`: writes man pages.

use super::Cli;
use crate::diagnostics::Report;
use clap::CommandFactory;
use frit_ir::{Code, Diagnostic};
use std::fmt::Display;
use std::path::PathBuf;

/// Arguments of `frit man`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  frit man -o ~/.local/share/man/man1")]
pub struct Args {
    /// The folder for the pages: one for each program, and one for each of its commands. It is made if it does not exist.
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let unwritable = |error: &dyn Display| {
        let what = format!("cannot write {}: {error}", args.output.display());
        Report::from(Diagnostic::error(Code::FileUnwritable, what).help("give another folder"))
    };
    std::fs::create_dir_all(&args.output).map_err(|error| unwritable(&error))?;
    // `frit run` and `frit-run` take the same arguments, and have one page: the last.
    for program in [Cli::command(), frit_runtime::program::command()] {
        // Pages of `frit help COMMAND` would repeat those of the commands.
        let program = program.disable_help_subcommand(true);
        clap_mangen::generate_to(program, &args.output).map_err(|error| unwritable(&error))?;
    }
    Ok(String::new())
}
