//! The op-safety table: what each operation may do in low precision.
//!
//! One row per operation. Source: the operator lists `lower_precision_fp`, `fp32` and `promote` of
//! PyTorch (`aten/src/ATen/autocast_mode.h`); an operation that they do not name runs in the dtype it is
//! given. Where Frit differs, the row says so.

use frit_ir::Op;
use frit_ir::ops::{BinaryFn, ReduceFn, UnaryFn};

/// What an operation may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Operands in low precision, accumulation in f32, result in low precision.
    Lower,
    /// Operands and results in f32.
    F32,
    /// The dtype of the first operand, with statistics in f32 inside; scale, bias and statistics stay
    /// f32, and so does the result of an f32 operand.
    F32Inside,
    /// The widest float among the operands.
    Promote,
    /// The dtype of its operand. Nothing is computed, so a cast may as well come before as after.
    Layout,
    /// The operation itself says which dtype it has: explicit casts, leaves, training operations.
    Fixed,
}

impl Class {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Class::Lower => "lower_precision",
            Class::F32 => "fp32",
            Class::F32Inside => "fp32_inside",
            Class::Promote => "promote",
            Class::Layout => "layout",
            Class::Fixed => "fixed",
        }
    }
}

/// The class of an operation.
pub fn class(op: &Op) -> Class {
    match op {
        // Contractions. Attention keeps scores and softmax statistics in f32 inside.
        Op::MatMul(_)
        | Op::Attention(_)
        | Op::Conv(_)
        | Op::ConvGradInput(_)
        | Op::ConvGradWeight(_) => Class::Lower,

        Op::Unary(f) => unary(*f),
        Op::Binary(f) => binary(*f),
        Op::Compare(_) | Op::Select | Op::Concat(_) => Class::Promote,
        Op::Logical(_) | Op::RandomMask(_) => Class::Fixed,
        Op::Predicate(_) | Op::Clip(_) => Class::Promote,
        // As `index_put` and `scatter_add`.
        Op::ScatterElements(_) | Op::ScatterNd(_) => Class::Promote,
        Op::TopK(_) | Op::ArgReduce(_) => Class::Promote,

        // The result too: where a norm is followed by a residual sum, as in BERT, the stream stays f32
        // even if it began in low precision.
        Op::LayerNorm(_) | Op::RmsNorm(_) => Class::F32,
        // PyTorch keeps the dtype of its operand, with statistics in f32.
        Op::BatchNorm(_) => Class::F32Inside,
        // Selection, and sums that are kept in f32 inside.
        Op::MaxPool(_) | Op::SumPool(_) => Class::Promote,
        // So too for probabilities: a router picks its experts by them, and rounded ones tie.
        Op::Softmax(_) => Class::F32,
        // Its results are losses: always f32.
        Op::CrossEntropy(_) => Class::F32Inside,
        Op::LogSoftmax(_) | Op::CumSum(_) | Op::SumTo(_) => Class::F32,
        Op::Reduce(op) => match op.f {
            ReduceFn::Sum | ReduceFn::Prod => Class::F32,
            // Accumulates in f32 inside.
            ReduceFn::Mean => Class::Promote,
            ReduceFn::Max | ReduceFn::Min => Class::Promote,
        },

        Op::Reshape(_)
        | Op::Transpose(_)
        | Op::Expand(_)
        | Op::Slice(_)
        | Op::Split(_)
        | Op::Pad(_)
        | Op::Embedding(_)
        | Op::Gather(_)
        | Op::GatherElements(_)
        | Op::GatherNd(_) => Class::Layout,

        Op::Cast(_)
        | Op::Input(_)
        | Op::Param(_)
        | Op::State(_)
        | Op::Hyper(_)
        | Op::Constant(_) => Class::Fixed,

        // What comes after differentiation has its dtypes from there.
        Op::EmbeddingGrad(_)
        | Op::SoftmaxGrad(_)
        | Op::LogSoftmaxGrad(_)
        | Op::LayerNormGradInput(_)
        | Op::BatchNormGrad(_)
        | Op::MaxPoolGrad(_)
        | Op::SumPoolGrad(_)
        | Op::LayerNormGradAffine(_)
        | Op::RmsNormGradInput(_)
        | Op::RmsNormGradScale(_)
        | Op::AttentionGrad(_)
        | Op::CrossEntropyGrad(_)
        | Op::AllGather(_)
        | Op::ReduceScatter(_)
        | Op::AllReduce(_)
        | Op::LossScale(_)
        | Op::GradStats
        | Op::Unscale(_)
        | Op::OptimizerStep(_)
        | Op::UpdateLossScale(_)
        | Op::UpdateStep
        | Op::LearningRate(_)
        | Op::Fusion(_) => Class::Fixed,
    }
}

fn unary(f: UnaryFn) -> Class {
    match f {
        UnaryFn::Exp
        | UnaryFn::Expm1
        | UnaryFn::Log
        | UnaryFn::Log1p
        | UnaryFn::Rsqrt
        | UnaryFn::Reciprocal
        | UnaryFn::Tan
        | UnaryFn::Softplus => Class::F32,
        // Not in PyTorch's lists, and exact or bounded: they keep the dtype of their operand.
        UnaryFn::Neg
        | UnaryFn::Abs
        | UnaryFn::Sign
        | UnaryFn::Sqrt
        | UnaryFn::Floor
        | UnaryFn::Ceil
        | UnaryFn::Round
        | UnaryFn::Sin
        | UnaryFn::Cos
        | UnaryFn::Tanh
        | UnaryFn::Erf
        | UnaryFn::Sigmoid
        | UnaryFn::Relu
        | UnaryFn::Silu
        | UnaryFn::Gelu
        | UnaryFn::GeluTanh => Class::Promote,
        UnaryFn::Not => Class::Fixed,
    }
}

fn binary(f: BinaryFn) -> Class {
    match f {
        BinaryFn::Pow => Class::F32,
        BinaryFn::Add
        | BinaryFn::Sub
        | BinaryFn::Mul
        | BinaryFn::Div
        | BinaryFn::Max
        | BinaryFn::Min
        | BinaryFn::Mod
        | BinaryFn::Fmod => Class::Promote,
        BinaryFn::GeluGrad
        | BinaryFn::GeluTanhGrad
        | BinaryFn::SiluGrad
        | BinaryFn::TanhGrad
        | BinaryFn::SigmoidGrad
        | BinaryFn::ReluGrad => Class::Fixed,
    }
}
