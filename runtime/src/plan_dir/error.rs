//! Why a plan directory cannot be read or written.

use frit_ir::plan::PlanError;
use frit_ir::{Code, Diagnostic};
use std::io;
use std::path::PathBuf;

/// Why a plan directory cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanDirError {
    /// The plan does not exist or cannot be read.
    #[error("cannot read {path}: {error}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// The file is not a plan, or was changed.
    #[error("{path}: {error}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: PlanError,
    },
    /// The path of the directory exists and is not a plan.
    #[error("{0} exists and is not a plan")]
    Occupied(PathBuf),
    /// The plan there would be replaced, and the directory holds other files.
    #[error("{path} holds a plan and other files: {}", .names.join(", "))]
    Others {
        /// The directory.
        path: PathBuf,
        /// Names of the others.
        names: Vec<String>,
    },
    /// The path is a symbolic link that leads nowhere.
    #[error("{path} is a symbolic link to {to}, where nothing can be written: {error}")]
    Astray {
        /// The link.
        path: PathBuf,
        /// What it names.
        to: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A file or folder cannot be written.
    #[error("cannot write {path}: {error}")]
    Unwritable {
        /// Which.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
}

impl PlanDirError {
    /// The error with its code, and what to do.
    pub fn diagnostic(&self) -> Diagnostic {
        use PlanError::{Changed, Malformed};
        let (code, help) = match self {
            PlanDirError::Unreadable { .. } => {
                (Code::PlanUnreadable, "give a directory that `frit compile` wrote")
            }
            PlanDirError::Refused { error: Malformed(_) | Changed, .. } => (
                Code::PlanChanged,
                "the file was changed after it was compiled; compile the model again",
            ),
            PlanDirError::Refused { .. } => {
                (Code::PlanInvalid, "compile the model again with this version of frit")
            }
            PlanDirError::Occupied(_) => {
                (Code::NotAPlanDirectory, "choose another directory with -o")
            }
            PlanDirError::Others { .. } => (
                Code::NotAPlanDirectory,
                "a plan replaces the whole directory: move them elsewhere, or choose another directory with -o",
            ),
            PlanDirError::Astray { .. } => (
                Code::FileUnwritable,
                "create the folder that it leads into, remove it, or choose another directory with -o",
            ),
            PlanDirError::Unwritable { .. } => {
                return Diagnostic::error(Code::FileUnwritable, self.to_string());
            }
        };
        Diagnostic::error(code, self.to_string()).help(help)
    }
}
