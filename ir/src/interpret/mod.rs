//! The reference interpreter: it defines what every operation computes.
//!
//! It takes a graph and one tensor per leaf, and returns one tensor per output. Every operation computes in f64
//! and rounds its results once to their dtype; with [`Options::exact`] floats are not rounded. There is one file
//! per family of operations, as in [`crate::ops`]. The interpreter is the oracle for passes, kernels and plans,
//! and evaluates constants at compile time.

mod adafactor;
mod attention;
mod batch_norm;
mod binary;
mod call;
mod collective;
mod conv;
mod function;
mod index;
mod layout;
mod leaf;
mod loss;
mod matmul;
mod muon;
mod norm;
mod optimizer;
mod order;
mod quantize;
mod random;
mod reduce;
mod run;
mod scatter;
mod softmax;
mod special;
#[cfg(test)]
mod tests;
mod training;
mod unary;
mod work;

pub(crate) use call::Call;
pub use run::{leaf_key, run, run_ranks};
pub use special::{erf, erfc};
pub use work::operations;

use crate::ops::{Op, OpError};
use crate::{Origin, Tensor, TensorType};

/// How to evaluate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Keep every float in f64, unrounded: a shadow run for finite differences. Casts between floats
    /// are then the identity.
    pub exact: bool,
}

impl Options {
    /// Floats are not rounded.
    pub const EXACT: Options = Options { exact: true };
}

/// Why a graph or an operation has no value.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EvalError {
    /// The operands do not fit the operation.
    #[error(transparent)]
    Operands(#[from] OpError),
    /// A leaf whose value nobody gave.
    #[error("no value for `{0}`")]
    MissingFeed(String),
    /// A leaf was given a tensor of another type.
    #[error("`{name}` is {expected}, but was given {found}")]
    FeedType {
        /// Key of the leaf.
        name: String,
        /// Type of the leaf.
        expected: TensorType,
        /// Type of the tensor.
        found: TensorType,
    },
    /// An index that points outside of what it indexes.
    #[error("index {index} is outside of {size} elements")]
    Index {
        /// The index.
        index: i64,
        /// The number of elements.
        size: usize,
    },
    /// An integer was divided by zero.
    #[error("integer division by zero")]
    DivisionByZero,
    /// [`eval_op`] was asked for a leaf.
    #[error("`{0}` is a leaf: its value comes from outside")]
    Leaf(&'static str),
    /// The error of one node of a graph.
    #[error("{op} at {origin}: {error}")]
    At {
        /// Name of the operation.
        op: &'static str,
        /// Where the node comes from.
        origin: Origin,
        /// What happened there.
        error: Box<EvalError>,
    },
}

/// Results of an operation.
pub(crate) type Evaluated = Result<Vec<Tensor>, EvalError>;

/// The semantics of an operation; implemented by its attributes.
pub(crate) trait Evaluate {
    /// Results of the types in the call, one for each; the operands were inferred to fit.
    fn evaluate(&self, call: &Call<'_>) -> Evaluated;
}

/// Results of an operation for these operands. Collectives run on one rank: they are the identity.
///
/// # Errors
/// If the operands do not fit, an index is out of range, or the operation is a leaf other than a
/// constant.
pub fn eval_op(op: &Op, inputs: &[&Tensor], options: Options) -> Result<Vec<Tensor>, EvalError> {
    let types: Vec<&TensorType> = inputs.iter().map(|t| &t.ty).collect();
    let call = Call { inputs, results: op.infer(&types)?, exact: options.exact };
    op.evaluate(&call)
}
