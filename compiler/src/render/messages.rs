//! Prints diagnostics on standard error.

use frit_ir::{Diagnostic, Severity};
use std::io::Write;

/// Prints diagnostics, one paragraph each. Colors are left out where standard error is no terminal, or
/// `NO_COLOR` is set.
pub fn print<'a>(diagnostics: impl IntoIterator<Item = &'a Diagnostic>) {
    let mut stderr = anstream::stderr();
    for d in diagnostics {
        let (word, color) = match d.severity {
            Severity::Error => ("error", anstyle::AnsiColor::Red),
            Severity::Warning => ("warning", anstyle::AnsiColor::Yellow),
            Severity::Info => ("note", anstyle::AnsiColor::Cyan),
        };
        let style = color.on_default().bold();
        // Nobody reads standard error any more.
        let _ = writeln!(stderr, "{style}{word}[{}]{style:#}: {d}", d.code);
        for note in &d.notes {
            let _ = writeln!(stderr, "   | {note}");
        }
    }
}
