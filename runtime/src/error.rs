//! Errors of running a plan, each one sentence with a remedy.

use crate::numerics::NotFinite;
use frit_ir::plan::DeviceType;
use std::path::PathBuf;

/// Why a run cannot start, or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// A file cannot be read or written.
    #[error("cannot access {path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: std::io::Error,
    },
    /// Signal handlers cannot be installed.
    #[error("cannot install signal handlers: {0}")]
    Signals(std::io::Error),
    /// A plan directory cannot be read.
    #[error(transparent)]
    PlanDir(#[from] crate::plan_dir::PlanDirError),
    /// A file of a plan was changed after compilation, or is not for this program.
    #[error("{path}: {reason}")]
    Plan {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The plan is for another processor.
    #[error(
        "the plan is for {arch} with {feature}, which this processor lacks; compile it again here, or with target.arch = \"x86-64-v3\""
    )]
    Target {
        /// What it was compiled for.
        arch: String,
        /// The feature that is missing.
        feature: String,
    },
    /// The plan is for a device that this program does not run plans on.
    #[error("the plan is for the device `{device}`; compile it again with target.device = \"cpu\"")]
    Device {
        /// The device.
        device: DeviceType,
    },
    /// The data does not fit the plan.
    #[error("{path}: {reason}")]
    Data {
        /// The file.
        path: PathBuf,
        /// The reason, and what to do.
        reason: String,
    },
    /// A checkpoint cannot be written or read.
    #[error("checkpoint {path}: {reason}")]
    Checkpoint {
        /// The checkpoint, or the directory of checkpoints.
        path: PathBuf,
        /// The reason, and what to do.
        reason: String,
    },
    /// An output file cannot be written.
    #[error("{option} {path}: {reason}")]
    Output {
        /// The option that names it.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason, and what to do.
        reason: String,
    },
    /// The machine has too little memory.
    #[error(
        "{} of memory are needed for {}, and {} are {of}; compile with a smaller batch, more run.accumulation, \
         memory.recompute or memory.offload, or run on a larger machine",
        crate::memory::size(*.needed), frit_ir::counted(*.ranks, "rank"), crate::memory::size(*.available)
    )]
    Memory {
        /// Bytes of the arenas of all ranks.
        needed: u64,
        /// Ranks that run on this machine.
        ranks: usize,
        /// Available bytes.
        available: u64,
        /// What limits them.
        of: &'static str,
    },
    /// The result of training could not be saved.
    #[error("{reason}")]
    Lost {
        /// What is lost, and why.
        reason: String,
    },
    /// The GPU cannot be used, or failed.
    #[error(transparent)]
    Cuda(#[from] frit_cuda::CudaError),
    /// The interpreter runs on the CPU only.
    #[error("--interpret runs plans for the CPU; compile with target.device = \"cpu\"")]
    Interpret,
    /// The ranks of a run cannot connect, lost their connection, or another rank failed.
    #[error(transparent)]
    Comm(#[from] frit_comm::CommError),
    /// A hyper-parameter that the plan does not have.
    #[error("the plan has no hyper-parameter `{name}`; it has {known}; {remedy}")]
    Hyper {
        /// The name given.
        name: String,
        /// What to do.
        remedy: String,
        /// The hyper-parameters of the plan.
        known: String,
    },
    /// An invalid value of a hyper-parameter.
    #[error("`{name}` cannot be {value}; it must be {expected}")]
    HyperValue {
        /// The name given.
        name: String,
        /// The value given.
        value: f64,
        /// What it must be.
        expected: &'static str,
    },
    /// The moving average is requested, but the plan has none.
    #[error(
        "the plan keeps no moving average of its parameters; compile it with --set optimizer.ema=0.999"
    )]
    NoEma,
    /// The plan has no loss.
    #[error(
        "the plan only evaluates: it has no loss that trains; compile it with a loss.kind other than \"none\", or evaluate it with `frit eval`"
    )]
    OnlyEvaluates,
    /// All labels of the data are ignored.
    #[error("--data: {0}; give labels, or compile with another loss.ignore_index")]
    NothingCounts(String),
    /// Validations without examples.
    #[error(
        "--validate-every needs examples: give --validation FILE, or compile the plan with data.validation"
    )]
    NoValidation,
    /// Early stopping without validations.
    #[error(
        "--patience counts validations: give --validation FILE, or compile the plan with data.validation, and --validate-every STEPS or \
         --checkpoint-every STEPS"
    )]
    Patience,
    /// The evaluation plan stores a parameter differently from the training plan.
    #[error(
        "the plan's evaluation stores `{parameter}` differently from its training; compile the model again"
    )]
    Validation {
        /// The parameter.
        parameter: String,
    },
    /// A task failed.
    #[error("task `{task}` on rank {rank} failed: {reason}")]
    Task {
        /// The task's name.
        task: String,
        /// The rank.
        rank: usize,
        /// The reason.
        reason: String,
    },
    /// A run has failed to train.
    #[error("{0}; {help}", help = .0.help())]
    Diverged(crate::divergence::Divergence),
    /// A trainer is used after it has ended.
    #[error("the trainer has ended: {reason}; make another one")]
    Ended {
        /// Why it has ended.
        reason: String,
    },
    /// A bug.
    #[error("this is a bug in frit: {reason}")]
    Internal {
        /// The panic.
        reason: String,
    },
    /// A task produced a non-finite value.
    #[error("{0}; {cause}; {remedy}", cause = .0.cause, remedy = .0.remedy)]
    NotFinite(Box<NotFinite>),
}

impl RunError {
    pub(crate) fn io(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> RunError + '_ {
        move |error| RunError::Io { path: path.into(), error }
    }

    pub(crate) fn output<'a>(
        option: &'static str,
        path: &'a std::path::Path,
    ) -> impl FnOnce(std::io::Error) -> RunError + 'a {
        move |error| {
            let reason = crate::outputs::reason(path, &error);
            RunError::Output { option, path: path.into(), reason }
        }
    }

    pub(crate) fn checkpoint(path: &std::path::Path, reason: impl Into<String>) -> RunError {
        RunError::Checkpoint { path: path.into(), reason: reason.into() }
    }

    pub(crate) fn data(path: &std::path::Path, reason: impl Into<String>) -> RunError {
        RunError::Data { path: path.into(), reason: reason.into() }
    }
}

impl From<frit_data::DataError> for RunError {
    fn from(error: frit_data::DataError) -> RunError {
        match error {
            frit_data::DataError::Io { path, error } => RunError::Io { path, error },
            frit_data::DataError::Content { path, reason } => RunError::Data { path, reason },
        }
    }
}
