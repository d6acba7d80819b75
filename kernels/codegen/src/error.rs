//! Errors of compiling a region.

use std::path::PathBuf;

/// A region, or a part of one, that this crate does not compile; the pipeline keeps it unfused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{op}` is not compiled in a fused region: {why}")]
#[non_exhaustive]
pub struct Unsupported {
    /// Name of the operation.
    pub op: String,
    /// The reason, in words.
    pub why: String,
}

impl Unsupported {
    pub(crate) fn new(op: impl Into<String>, why: impl Into<String>) -> Self {
        Unsupported { op: op.into(), why: why.into() }
    }
}

/// Why no object or PTX was produced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodegenError {
    /// The region contains something that is not compiled.
    #[error("kernel `{symbol}`: {reason}")]
    Unsupported {
        /// The kernel's symbol.
        symbol: String,
        /// What and why.
        reason: Unsupported,
    },
    /// The target cannot be compiled for.
    #[error("target `{target}`: {why}")]
    Target {
        /// CPU or chip name.
        target: String,
        /// What is missing.
        why: String,
    },
    /// The linker that makes the shared object is not installed.
    #[error(
        "the linker `{}` was not found; install a C compiler (Debian: `apt install gcc`) or set CC",
        .linker.display()
    )]
    LinkerMissing {
        /// The program that was searched for.
        linker: PathBuf,
    },
    /// The linker failed.
    #[error("the linker `{}` failed: {message}", .linker.display())]
    Link {
        /// The program that was run.
        linker: PathBuf,
        /// Its output.
        message: String,
    },
    /// A temporary file for linking, or a thread, could not be created.
    #[error("compiling kernels: {0}")]
    Io(#[from] std::io::Error),
    /// MLIR rejected the code this crate wrote: a defect of this crate.
    #[error("internal error, MLIR rejected a kernel while {stage}: {diagnostics}")]
    Mlir {
        /// What was being done.
        stage: &'static str,
        /// MLIR's diagnostics, one per line.
        diagnostics: String,
    },
    /// LLVM rejected the module: a defect of this crate or a wrong target.
    #[error("internal error, LLVM failed while {stage}: {message}")]
    Llvm {
        /// What was being done.
        stage: &'static str,
        /// LLVM's message.
        message: String,
    },
}
