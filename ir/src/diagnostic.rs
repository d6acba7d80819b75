//! User-facing messages: errors, warnings and notes, with their place in the model and a remedy.

use crate::{Code, Origin};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing.
    Info,
    /// Works, but probably not as meant.
    Warning,
    /// Cannot go on.
    Error,
}

/// A number of things: `1 rank`, `2 ranks`.
pub fn counted(n: usize, thing: &str) -> String {
    if n == 1 { format!("1 {thing}") } else { format!("{n} {thing}s") }
}

/// One message: what, where, what to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub struct Diagnostic {
    /// Short stable code such as `E014`.
    pub code: String,
    /// How bad it is.
    pub severity: Severity,
    /// What is wrong, in one sentence.
    pub message: String,
    /// Where: the node and its scope; nothing if it concerns the whole.
    pub origin: Origin,
    /// Facts that help to understand it.
    #[serde(default)]
    pub notes: Vec<String>,
    /// What to do.
    #[serde(default)]
    pub help: Option<String>,
}

impl Diagnostic {
    /// A message of this code, or of a lint by its id.
    pub fn new(code: &str, severity: Severity, message: impl Into<String>) -> Self {
        Diagnostic {
            code: code.into(),
            severity,
            message: message.into(),
            origin: Origin::none(),
            notes: Vec::new(),
            help: None,
        }
    }

    /// An error.
    pub fn error(code: Code, message: impl Into<String>) -> Self {
        Diagnostic::new(code.id(), Severity::Error, message)
    }

    /// A warning.
    pub fn warning(code: Code, message: impl Into<String>) -> Self {
        Diagnostic::new(code.id(), Severity::Warning, message)
    }

    /// The same, at this place.
    pub fn at(mut self, origin: &Origin) -> Self {
        self.origin = origin.clone();
        self
    }

    /// The same, with one more fact.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// The same, with a remedy.
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

impl fmt::Display for Diagnostic {
    /// On one line: `message (at node "x" in scope `y`; help)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if self.origin != Origin::none() {
            write!(f, " (at {})", self.origin)?;
        }
        if let Some(help) = &self.help {
            write!(f, "; {help}")?;
        }
        Ok(())
    }
}
