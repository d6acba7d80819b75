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
mod index;
mod layout;
mod loss;
mod matmul;
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

pub use run::{leaf_key, run, run_ranks};
pub use special::{erf, erfc};
pub use work::operations;

use crate::ops::{Op, OpError};
use crate::{Origin, Tensor, TensorType};
use call::Call;

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

/// Results of an operation for these operands. Collectives see one rank: they are the identity.
///
/// # Errors
/// If the operands do not fit, an index is out of range, or the operation is a leaf other than a
/// constant.
pub fn eval_op(op: &Op, inputs: &[&Tensor], options: Options) -> Result<Vec<Tensor>, EvalError> {
    let types: Vec<&TensorType> = inputs.iter().map(|t| &t.ty).collect();
    let call = Call { inputs, results: op.infer(&types)?, exact: options.exact };
    match op {
        Op::Constant(c) => Ok(vec![c.value.clone()]),
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Hyper(_) => {
            Err(EvalError::Leaf(op.name()))
        }
        Op::Unary(f) => Ok(unary::unary(*f, &call)),
        Op::Predicate(f) => Ok(unary::predicate(*f, &call)),
        Op::Cast(_) => Ok(unary::cast(&call)),
        Op::Clip(op) => Ok(unary::clip(op, &call)),
        Op::Binary(f) => binary::binary(*f, &call),
        Op::Compare(f) => Ok(binary::compare(*f, &call)),
        Op::Logical(f) => Ok(binary::logical(*f, &call)),
        Op::Select => Ok(binary::select(&call)),
        Op::Reshape(_) => Ok(vec![inputs[0].reshaped(call.results[0].shape.clone())]),
        Op::Transpose(op) => Ok(layout::transpose(op, &call)),
        Op::Expand(_) => Ok(layout::expand(&call)),
        Op::Slice(op) => Ok(layout::slice(op, &call)),
        Op::Concat(op) => Ok(layout::concat(op, &call)),
        Op::Split(op) => Ok(layout::split(op, &call)),
        Op::Pad(op) => Ok(layout::pad(op, &call)),
        Op::Embedding(_) => index::gather(0, &call),
        Op::EmbeddingGrad(op) => index::embedding_grad(op, &call),
        Op::Gather(op) => index::gather(op.axis, &call),
        Op::GatherElements(op) => index::gather_elements(op, &call),
        Op::GatherNd(op) => index::gather_nd(op, &call),
        Op::ScatterElements(op) => scatter::scatter_elements(op, &call),
        Op::ScatterNd(op) => scatter::scatter_nd(op, &call),
        Op::CumSum(op) => Ok(index::cum_sum(op, &call)),
        Op::TopK(op) => Ok(order::top_k(op, &call)),
        Op::ArgReduce(op) => Ok(order::arg_reduce(op, &call)),
        Op::Random(op) => Ok(random::random(op, &call)),
        Op::RandomMask(op) => Ok(random::random_mask(op, &call)),
        Op::Reduce(op) => reduce::reduce(op, &call),
        Op::SumTo(_) => Ok(reduce::sum_to(&call)),
        Op::MatMul(op) => Ok(matmul::matmul(op, &call)),
        Op::Conv(op) => Ok(conv::conv(op, &call)),
        Op::ConvGradInput(op) => Ok(conv::conv_grad_input(op, &call)),
        Op::ConvGradWeight(op) => Ok(conv::conv_grad_weight(op, &call)),
        Op::MaxPool(op) => Ok(conv::max_pool(op, &call)),
        Op::MaxPoolGrad(op) => Ok(conv::max_pool_grad(op, &call)),
        Op::SumPool(op) => Ok(conv::sum_pool(op, &call)),
        Op::SumPoolGrad(op) => Ok(conv::sum_pool_grad(op, &call)),
        Op::BatchNorm(op) => Ok(batch_norm::batch_norm(op, &call)),
        Op::BatchNormGrad(op) => Ok(batch_norm::batch_norm_grad(op, &call)),
        Op::Softmax(op) => Ok(softmax::softmax(op, &call)),
        Op::LogSoftmax(op) => Ok(softmax::log_softmax(op, &call)),
        Op::SoftmaxGrad(op) => Ok(softmax::softmax_grad(op, &call)),
        Op::LogSoftmaxGrad(op) => Ok(softmax::log_softmax_grad(op, &call)),
        Op::LayerNorm(op) => Ok(norm::layer_norm(op, &call)),
        Op::LayerNormGradInput(_) => Ok(norm::layer_norm_grad_input(&call)),
        Op::LayerNormGradAffine(_) => Ok(norm::layer_norm_grad_affine(&call)),
        Op::RmsNorm(op) => Ok(norm::rms_norm(op, &call)),
        Op::RmsNormGradInput(_) => Ok(norm::rms_norm_grad_input(&call)),
        Op::RmsNormGradScale(_) => Ok(norm::rms_norm_grad_scale(&call)),
        Op::Attention(op) => attention::attention(op, &call),
        Op::AttentionGrad(op) => attention::attention_grad(op, &call),
        Op::CrossEntropy(op) => loss::cross_entropy(op, &call),
        Op::CrossEntropyGrad(op) => loss::cross_entropy_grad(op, &call),
        Op::AllGather(_) | Op::ReduceScatter(_) | Op::AllReduce(_) => Ok(vec![inputs[0].clone()]),
        Op::LossScale(op) => Ok(training::loss_scale(op, &call)),
        Op::GradStats => Ok(training::grad_stats(&call)),
        Op::Unscale(op) => Ok(training::unscale(op, &call)),
        Op::OptimizerStep(op) => Ok(optimizer::optimizer_step(op, &call)),
        Op::Adafactor(op) => Ok(adafactor::adafactor(op, &call)),
        Op::EmaStep => Ok(optimizer::ema_step(&call)),
        Op::Quantize(op) => Ok(quantize::quantize(op, &call)),
        Op::ScaledCast(op) => Ok(unary::scaled_cast(op, &call)),
        Op::ByParamGroup(op) => Ok(optimizer::by_param_group(op, &call)),
        Op::UpdateLossScale(_) => Ok(training::update_loss_scale(&call)),
        Op::UpdateStep => Ok(training::update_step(&call)),
        Op::LearningRate(op) => Ok(optimizer::learning_rate(op, &call)),
        Op::Fusion(fusion) => run::fusion_body(fusion, inputs, options),
    }
}
