//! The program `frit`.

use clap::Parser;
use frit::commands::{Cli, execute};
use frit_ir::Severity;
use std::io::Write;
use std::process::ExitCode;

/// 0 if all went well, 2 if something must be changed.
fn main() -> ExitCode {
    let cli = Cli::parse();
    match execute(&cli) {
        Ok(text) => {
            // A reader that closed the pipe has seen what it wanted.
            let _ = anstream::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(report) => {
            let red = anstyle::AnsiColor::Red.on_default().bold();
            let mut stderr = anstream::stderr();
            for d in &report.diagnostics {
                let word = if d.severity == Severity::Error { "error" } else { "warning" };
                let _ = writeln!(stderr, "{red}{word}[{}]{red:#}: {d}", d.code);
                for note in &d.notes {
                    let _ = writeln!(stderr, "   | {note}");
                }
            }
            ExitCode::from(2)
        }
    }
}
