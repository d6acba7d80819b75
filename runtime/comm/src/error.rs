//! Errors of communication, each one sentence with a remedy.

use frit_ir::DType;

/// Why ranks cannot communicate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The processes of a job cannot connect, or lost their connection.
    #[error("{reason}")]
    Ranks {
        /// Which ranks, and where.
        reason: String,
    },
    /// A reduction of an unsupported type.
    #[error("ranks cannot combine {dtype}; a plan reduces f32, f16 or bf16")]
    Exchange {
        /// The type.
        dtype: DType,
    },
    /// Another rank failed first.
    #[error("rank {rank} stopped because another rank failed")]
    Aborted {
        /// The rank that stopped.
        rank: usize,
    },
}

impl From<String> for CommError {
    fn from(reason: String) -> CommError {
        CommError::Ranks { reason }
    }
}
