//! The policy table: the precision class of every operation.
//!
//! Source: the operator lists `lower_precision_fp`, `fp32` and `promote` of PyTorch for CUDA (`aten/src/ATen/autocast_mode.h`);
//! operations in none of them run in the dtype of their operands. Rows that differ from PyTorch say so. `frit inspect --view casts` and
//! docs/precision.md print the table.

use frit_ir::Op;
use frit_ir::ops::{BinaryFn, CompareFn, LogicalFn, PredicateFn, Reduce, ReduceFn, UnaryFn};

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

/// Where the class of an operation comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// PyTorch's list of this name for CUDA.
    Torch(&'static str),
    /// PyTorch does not list it: it runs in the dtype that it is given.
    Unlisted,
    /// Frit's own rule, and the reason.
    Own(&'static str),
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Torch(list) => write!(f, "PyTorch `{list}`"),
            Source::Unlisted => write!(f, "not in PyTorch's lists"),
            Source::Own(why) => write!(f, "{why}"),
        }
    }
}

const LOWER: (Class, Source) = (Class::Lower, Source::Torch("lower_precision_fp"));
const F32: (Class, Source) = (Class::F32, Source::Torch("fp32"));
const PROMOTE: (Class, Source) = (Class::Promote, Source::Torch("promote"));
const UNLISTED: (Class, Source) = (Class::Promote, Source::Unlisted);
const LAYOUT: (Class, Source) = (Class::Layout, Source::Unlisted);
const INTEGER: (Class, Source) = (Class::Fixed, Source::Own("truth values or random bits"));
const GIVEN: (Class, Source) = (Class::Fixed, Source::Own("says itself which dtype it has"));
const AFTER: (Class, Source) =
    (Class::Fixed, Source::Own("comes after autocast, in the dtypes of what it is made from"));

/// The class of an operation.
pub fn class(op: &Op) -> Class {
    row(op).0
}

/// One row of the op-safety table: operations of one name that have one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The operation, for a reduction with its function.
    pub op: String,
    /// Its class.
    pub class: Class,
    /// Where that comes from.
    pub source: Source,
}

/// The op-safety table: every operation that a model can have, by name.
pub fn table() -> Vec<Row> {
    let mut ops = frit_ir::ops::examples::examples();
    ops.extend(UnaryFn::ALL.iter().map(|f| Op::Unary(*f)));
    ops.extend(PredicateFn::ALL.iter().map(|f| Op::Predicate(*f)));
    ops.extend(BinaryFn::ALL.iter().map(|f| Op::Binary(*f)));
    ops.extend(CompareFn::ALL.iter().map(|f| Op::Compare(*f)));
    ops.extend(LogicalFn::ALL.iter().map(|f| Op::Logical(*f)));
    ops.retain(|op| !matches!(op, Op::Reduce(_)));
    let reduce = |f| Op::Reduce(Reduce { f, axes: vec![], keep_dims: true });
    let functions = [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Max, ReduceFn::Min, ReduceFn::Prod];
    ops.extend(functions.map(reduce));
    let to_row = |op: &Op| {
        let (class, source) = row(op);
        let name = match op {
            Op::Reduce(r) => format!("reduce {:?}", r.f).to_lowercase(),
            op => op.name().into(),
        };
        Row { op: name, class, source }
    };
    let mut rows: Vec<Row> = ops.iter().filter(|op| row(op) != AFTER).map(to_row).collect();
    rows.sort_by(|a, b| a.op.cmp(&b.op));
    rows
}

/// Class and source of an operation.
fn row(op: &Op) -> (Class, Source) {
    match op {
        // Contractions. Attention keeps scores and softmax statistics in f32 inside.
        Op::MatMul(_)
        | Op::Attention(_)
        | Op::Conv(_)
        | Op::ConvGradInput(_)
        | Op::ConvGradWeight(_) => LOWER,

        Op::Unary(f) => unary(*f),
        Op::Binary(f) => binary(*f),
        Op::Concat(_) => PROMOTE,
        Op::Compare(_) | Op::Select | Op::Predicate(_) | Op::Clip(_) => UNLISTED,
        Op::Logical(_) | Op::Random(_) | Op::RandomMask(_) => INTEGER,
        // As `index_put` and `scatter_add`.
        Op::ScatterElements(_) | Op::ScatterNd(_) => PROMOTE,
        Op::TopK(_) | Op::ArgReduce(_) => UNLISTED,

        // The result too: where a norm is followed by a residual sum, as in BERT, the stream stays f32
        // even if it began in low precision.
        Op::LayerNorm(_) | Op::RmsNorm(_) => F32,
        Op::BatchNorm(_) => (
            Class::F32Inside,
            Source::Own("PyTorch keeps the dtype of its operand, with statistics in f32"),
        ),
        // Selection, and sums that are kept in f32 inside.
        Op::MaxPool(_) | Op::SumPool(_) => UNLISTED,
        // So too for probabilities: a router picks its experts by them, and rounded ones tie.
        Op::Softmax(_) => F32,
        // Its results are losses: always f32.
        Op::CrossEntropy(_) => (
            Class::F32Inside,
            Source::Own("PyTorch casts its logits to f32; here the kernel does, as it reads them"),
        ),
        Op::LogSoftmax(_) | Op::CumSum(_) | Op::SumTo(_) => F32,
        Op::Reduce(op) => match op.f {
            ReduceFn::Sum | ReduceFn::Prod => F32,
            // A mean accumulates in f32 inside.
            ReduceFn::Mean | ReduceFn::Max | ReduceFn::Min => UNLISTED,
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
        | Op::GatherNd(_) => LAYOUT,

        Op::Cast(_)
        | Op::Input(_)
        | Op::Param(_)
        | Op::State(_)
        | Op::Hyper(_)
        | Op::Constant(_) => GIVEN,

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
        | Op::Adafactor(_)
        | Op::EmaStep
        | Op::ScaledCast(_)
        | Op::Quantize(_)
        | Op::ByParamGroup(_)
        | Op::UpdateLossScale(_)
        | Op::UpdateStep
        | Op::LearningRate(_)
        | Op::Fusion(_) => AFTER,
    }
}

fn unary(f: UnaryFn) -> (Class, Source) {
    match f {
        UnaryFn::Exp
        | UnaryFn::Expm1
        | UnaryFn::Log
        | UnaryFn::Log1p
        | UnaryFn::Rsqrt
        | UnaryFn::Reciprocal
        | UnaryFn::Tan
        | UnaryFn::Asin
        | UnaryFn::Acos
        | UnaryFn::Sinh
        | UnaryFn::Cosh
        | UnaryFn::Softplus => F32,
        // Not in PyTorch's lists, and exact or bounded: they keep the dtype of their operand.
        UnaryFn::Neg
        | UnaryFn::Detach
        | UnaryFn::Abs
        | UnaryFn::Sign
        | UnaryFn::Sqrt
        | UnaryFn::Floor
        | UnaryFn::Ceil
        | UnaryFn::Round
        | UnaryFn::Sin
        | UnaryFn::Cos
        | UnaryFn::Tanh
        | UnaryFn::Atan
        | UnaryFn::Asinh
        | UnaryFn::Acosh
        | UnaryFn::Atanh
        | UnaryFn::Erf
        | UnaryFn::Sigmoid
        | UnaryFn::Relu
        | UnaryFn::Silu
        | UnaryFn::Gelu
        | UnaryFn::GeluTanh => UNLISTED,
        UnaryFn::Not => INTEGER,
    }
}

fn binary(f: BinaryFn) -> (Class, Source) {
    match f {
        BinaryFn::Pow => F32,
        BinaryFn::Add
        | BinaryFn::Sub
        | BinaryFn::Mul
        | BinaryFn::Div
        | BinaryFn::Max
        | BinaryFn::Min
        | BinaryFn::Mod
        | BinaryFn::Fmod => UNLISTED,
        BinaryFn::GeluGrad
        | BinaryFn::GeluTanhGrad
        | BinaryFn::SiluGrad
        | BinaryFn::TanhGrad
        | BinaryFn::SigmoidGrad
        | BinaryFn::ReluGrad => AFTER,
    }
}
