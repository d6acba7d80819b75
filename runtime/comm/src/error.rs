//! Why ranks cannot exchange, each one sentence with a remedy.

use frit_ir::DType;

/// Why ranks cannot exchange.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The processes of a job do not come, or stay, together.
    #[error("{reason}")]
    Ranks {
        /// Who, and where.
        reason: String,
    },
    /// A reduction of a type that ranks do not combine.
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
