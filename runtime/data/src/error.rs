//! Errors of data, each one sentence with a remedy.

use std::path::{Path, PathBuf};

/// Why data cannot be read, or does not fit the plan.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file cannot be read.
    #[error("cannot access {path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: std::io::Error,
    },
    /// The content of a file does not fit the plan.
    #[error("{path}: {reason}")]
    Content {
        /// The file.
        path: PathBuf,
        /// The reason, and what to do.
        reason: String,
    },
}

impl DataError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> DataError + '_ {
        move |error| DataError::Io { path: path.into(), error }
    }

    pub(crate) fn content(path: &Path, reason: impl Into<String>) -> DataError {
        DataError::Content { path: path.into(), reason: reason.into() }
    }
}
