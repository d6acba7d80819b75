//! A list of diagnostics, returned by a step of the compiler that fails.

use frit_ir::{Code, Diagnostic};
use frit_runtime::RunError;
use std::fmt;

/// One or more diagnostics, in the order in which they were found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The messages.
    pub diagnostics: Vec<Diagnostic>,
}

impl Report {
    /// Adds a message.
    pub fn push(&mut self, diagnostic: Diagnostic) {
        self.diagnostics.push(diagnostic);
    }

    /// Whether there is no message.
    pub fn is_empty(&self) -> bool {
        self.diagnostics.is_empty()
    }

    /// Whether a message indicates a bug in Frit: a violated contract of a pass, a graph or a plan.
    pub fn is_internal(&self) -> bool {
        self.diagnostics.iter().any(|d| Code::find(&d.code).is_some_and(Code::is_internal))
    }

    /// The exit code of a program that ends with these messages: 1 if a run or check failed though nothing was wrong with what
    /// was asked for, else 2.
    pub fn exit_code(&self) -> u8 {
        let runs = [Code::Diverged, Code::NotFinite];
        let checks =
            [Code::GradientsDiffer, Code::AuditFailed, Code::PlanEdited, Code::NotCertified];
        let failures = [&runs[..], &checks].concat();
        let failed = |d: &Diagnostic| failures.iter().any(|c| c.id() == d.code);
        if self.diagnostics.iter().any(failed) { 1 } else { 2 }
    }

    /// `value` if there is no message, else the messages.
    ///
    /// # Errors
    /// The messages, if there are any.
    pub fn or<T>(self, value: T) -> Result<T, Report> {
        if self.is_empty() { Ok(value) } else { Err(self) }
    }
}

/// The error of a run as a diagnostic.
pub fn of_run(error: RunError) -> Diagnostic {
    match error {
        RunError::NotFinite(found) => {
            let message = Diagnostic::error(Code::NotFinite, found.to_string());
            let mut diagnostic = message.help(&found.remedy);
            diagnostic.notes.clone_from(&found.facts);
            diagnostic.note(format!("likely cause: {}", found.cause))
        }
        RunError::Diverged(why) => {
            Diagnostic::error(Code::Diverged, why.to_string()).help(why.help())
        }
        RunError::PlanDir(error) => error.diagnostic(),
        error => Diagnostic::error(Code::RunFailed, error.to_string()),
    }
}

impl From<Diagnostic> for Report {
    fn from(diagnostic: Diagnostic) -> Self {
        Report { diagnostics: vec![diagnostic] }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, diagnostic) in self.diagnostics.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            write!(f, "{diagnostic}")?;
            for note in &diagnostic.notes {
                write!(f, "\n  {note}")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Report {}
