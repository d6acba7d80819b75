//! The operations of the graph, one file per family.
//!
//! Each family file defines the attributes of its operations, and what `Operation` asks of each: shape and dtype inference, cost, precision,
//! linearity. What an operation computes is defined by the evaluator of the same name in [`crate::interpret`].

pub mod adafactor;
pub mod attention;
pub mod batch_norm;
pub mod binary;
pub mod collective;
pub mod conv;
pub mod function;
pub mod fusion;
pub mod index;
pub mod layout;
pub mod leaf;
pub mod linear;
pub mod loss;
pub mod matmul;
pub mod muon;
pub mod norm;
pub(crate) mod number;
mod operation;
pub mod optimizer;
pub mod order;
pub mod pool;
pub mod precision;
pub mod quantize;
pub mod random;
pub mod reduce;
pub mod reproducible;
pub mod scatter;
pub mod schedule;
pub mod softmax;
pub mod state;
#[cfg(test)]
mod tests;
pub mod training;
pub mod unary;

pub use adafactor::{Adafactor, AdafactorPart};
pub use attention::{Attention, AttentionGrad};
pub use batch_norm::{BatchNorm, BatchNormGrad};
pub use binary::{BinaryFn, CompareFn, LogicalFn, Select};
pub use collective::{AllGather, AllReduce, ReduceKind, ReduceScatter, reduction_factors};
pub use conv::{Conv, ConvGradInput, ConvGradWeight, Window};
pub use function::{Cotangent, CustomGradient, EnterPrecision, LeavePrecision};
pub use fusion::{Fusion, FusionKind};
pub use index::{CumSum, Embedding, EmbeddingGrad, Gather, GatherElements, GatherNd};
pub use layout::{Concat, Expand, Pad, Reshape, Slice, Split, Transpose};
pub use leaf::{Constant, Hyper, Init, Input, Param, ParamKind, State};
pub use linear::Linear;
pub use loss::{CrossEntropy, CrossEntropyGrad};
pub use matmul::MatMul;
pub use muon::{AdjustLr, MuonMomentum, MuonRule, MuonStep};
pub use norm::{LayerNorm, LayerNormGradAffine, LayerNormGradInput};
pub use norm::{RmsNorm, RmsNormGradInput, RmsNormGradScale};
pub(crate) use operation::{Operation, elements};
pub use optimizer::{ByParamGroup, EmaStep, OptimizerKind, OptimizerStep};
pub use order::{ArgReduce, TopK};
pub use pool::{MaxPool, MaxPoolGrad, SumPool, SumPoolGrad};
pub use precision::Precision;
pub use quantize::Quantize;
pub use random::{Random, RandomFn, RandomMask};
pub use reduce::{Reduce, ReduceFn, SumTo};
pub use reproducible::{RoundStats, TreeSum};
pub use scatter::{ScatterElements, ScatterFn, ScatterNd};
pub use schedule::{LearningRate, ScheduleKind};
pub use softmax::{LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad};
pub use state::StateName;
pub use training::{GradStats, LossScale, Unscale, UpdateLossScale, UpdateStep};
pub use unary::{Cast, Clip, PredicateFn, ScaledCast, UnaryFn};

use crate::interpret::{Call, Evaluate, Evaluated};
use crate::shape::{MAX_ELEMENTS, MAX_RANK};
use crate::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};

/// Operands that do not fit an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct OpError {
    message: String,
}

impl OpError {
    /// An error with this message.
    pub fn new(message: impl Into<String>) -> Self {
        OpError { message: message.into() }
    }
}

/// Inference returns the types of all results.
pub type Inferred = Result<Vec<TensorType>, OpError>;

/// Declares the operations, each by its variant, its attributes and its name in texts, those that have no attributes, and the
/// families of functions, of which every function has its own name. `($)` is a dollar sign for the macro that it declares.
macro_rules! operations {
    (
        ($d:tt)
        $(#[$meta:meta])*
        operations { $($(#[$doc:meta])* $variant:ident($attributes:ty) = $name:literal,)* }
        plain { $($(#[$plain_doc:meta])* $plain:ident = $plain_name:literal,)* }
        families { $($(#[$family_doc:meta])* $family:ident($function:ty) = $word:literal,)* }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Op {
            $($(#[$doc])* #[serde(rename = $name)] $variant($attributes),)*
            $($(#[$plain_doc])* #[serde(rename = $plain_name)] $plain,)*
            $($(#[$family_doc])* #[serde(rename = $word)] $family($function),)*
        }

        impl Op {
            const FAMILIES: &'static [&'static str] = &[$($word,)*];

            /// Name in the text form, in JSON models and in reports.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Op::$variant(_) => $name,)*
                    $(Op::$plain => $plain_name,)*
                    $(Op::$family(function) => function.name(),)*
                }
            }

            /// Names of all operations except `fusion`, sorted.
            pub fn names() -> Vec<&'static str> {
                let mut names = vec![$($name,)* $($plain_name,)*];
                $(names.extend(<$function>::ALL.iter().map(|f| f.name()));)*
                names.retain(|name| *name != "fusion");
                names.sort_unstable();
                names
            }

            /// Examples of every operation except `fusion`, for tests that cover all of them.
            pub fn examples() -> Vec<Op> {
                let mut all = Vec::new();
                $(all.extend(<$attributes>::examples().into_iter().map(Op::$variant));)*
                $(all.extend($plain::examples().into_iter().map(|_| Op::$plain));)*
                $(all.extend(<$function>::examples().into_iter().map(Op::$family));)*
                all
            }
        }

        /// Evaluates an expression on the attributes of an operation, `&Attributes` by a type for each variant: so every
        /// operation implements a trait whose method it calls, or the call does not compile.
        ///
        /// `with_attributes!(op, attributes => attributes.method())`
        #[macro_export]
        macro_rules! with_attributes {
            ($d op:expr, $d attributes:ident => $d result:expr) => {
                match $d op {
                    $($d crate::Op::$variant($d attributes) => $d result,)*
                    $($d crate::Op::$plain => {
                        let $d attributes = &$d crate::ops::$plain;
                        $d result
                    })*
                    $($d crate::Op::$family($d attributes) => $d result,)*
                }
            };
        }
    };
}

operations! {
    ($)
    /// An operation with its attributes. Equality and hashing compare floats by their bits.
    operations {
        /// A tensor fed from data at every micro-step.
        Input(Input) = "input",
        /// A parameter or buffer of the model.
        Param(Param) = "param",
        /// State that Frit itself keeps from step to step.
        State(State) = "state",
        /// A scalar of the plan's `hyper` buffer.
        Hyper(Hyper) = "hyper",
        /// A tensor known at compile time.
        Constant(Constant) = "constant",

        /// Conversion of the element type, rounding to nearest even.
        Cast(Cast) = "cast",
        /// Limits each element to a range.
        Clip(Clip) = "clip",

        /// The same elements in another shape; free.
        Reshape(Reshape) = "reshape",
        /// Permutation of the axes.
        Transpose(Transpose) = "transpose",
        /// Broadcast to a larger shape.
        Expand(Expand) = "expand",
        /// A strided box of the operand.
        Slice(Slice) = "slice",
        /// Operands one after the other along an axis.
        Concat(Concat) = "concat",
        /// The inverse of `concat`.
        Split(Split) = "split",
        /// The operand with a constant border.
        Pad(Pad) = "pad",

        /// Rows of a table: `embedding(table[V, C], ids[..])` → `[.., C]`.
        Embedding(Embedding) = "embedding",
        /// The gradient of `embedding` for its table.
        EmbeddingGrad(EmbeddingGrad) = "embedding_grad",
        /// ONNX Gather: slices of the operand along one axis.
        Gather(Gather) = "gather",
        /// ONNX GatherElements.
        GatherElements(GatherElements) = "gather_elements",
        /// ONNX GatherND.
        GatherNd(GatherNd) = "gather_nd",
        /// ONNX ScatterElements.
        ScatterElements(ScatterElements) = "scatter_elements",
        /// ONNX ScatterND.
        ScatterNd(ScatterNd) = "scatter_nd",
        /// Running sums along an axis.
        CumSum(CumSum) = "cum_sum",
        /// The first elements along an axis in sorted order, and their indices.
        TopK(TopK) = "top_k",
        /// The index of the largest or smallest element along an axis.
        ArgReduce(ArgReduce) = "arg_reduce",

        /// Random numbers from a counter-based generator.
        Random(Random) = "random",
        /// A random mask from the same generator.
        RandomMask(RandomMask) = "random_mask",

        /// Reduction over axes.
        Reduce(Reduce) = "reduce",
        /// Sum over the axes along which a shape was broadcast: the gradient of broadcasting.
        SumTo(SumTo) = "sum_to",

        /// Matmul, batched, with optional transposition of either operand.
        MatMul(MatMul) = "matmul",

        /// Convolution: `(x, w)` → `y`.
        Conv(Conv) = "conv",
        /// Gradient of `conv` for its operand, or transposed convolution: `(dy, w)` → `dx`.
        ConvGradInput(ConvGradInput) = "conv_grad_input",
        /// Gradient of `conv` for its kernel: `(dy, x)` → `dw`.
        ConvGradWeight(ConvGradWeight) = "conv_grad_weight",

        /// The largest element of each window.
        MaxPool(MaxPool) = "max_pool",
        /// Gradient of `max_pool`: `(dy, x)` → `dx`.
        MaxPoolGrad(MaxPoolGrad) = "max_pool_grad",
        /// The sum of each window.
        SumPool(SumPool) = "sum_pool",
        /// Gradient of `sum_pool`: `(dy)` → `dx`.
        SumPoolGrad(SumPoolGrad) = "sum_pool_grad",

        /// Batch normalization: `(x, scale, bias)` → `(y, mean, var)`.
        BatchNorm(BatchNorm) = "batch_norm",
        /// Gradient of `batch_norm`: `(dy, x, scale, mean, var)` → `(dx, dscale, dbias)`.
        BatchNormGrad(BatchNormGrad) = "batch_norm_grad",

        /// Softmax along an axis.
        Softmax(Softmax) = "softmax",
        /// Logarithm of the softmax along an axis.
        LogSoftmax(LogSoftmax) = "log_softmax",
        /// Gradient of `softmax`: `(dy, y)` → `dx`.
        SoftmaxGrad(SoftmaxGrad) = "softmax_grad",
        /// Gradient of `log_softmax`: `(dy, y)` → `dx`.
        LogSoftmaxGrad(LogSoftmaxGrad) = "log_softmax_grad",

        /// Layer normalization: `(x, scale[, bias])` → `(y, mean, rstd)`.
        LayerNorm(LayerNorm) = "layer_norm",
        /// Gradient of `layer_norm` for its input: `(dy, x, scale, mean, rstd)` → `dx`.
        LayerNormGradInput(LayerNormGradInput) = "layer_norm_grad_input",
        /// Gradient of `layer_norm` for scale and bias: `(dy, x, mean, rstd)` → `(dscale, dbias)`.
        LayerNormGradAffine(LayerNormGradAffine) = "layer_norm_grad_affine",
        /// Root-mean-square normalization: `(x, scale)` → `(y, rstd)`.
        RmsNorm(RmsNorm) = "rms_norm",
        /// Gradient of `rms_norm` for its input: `(dy, x, scale, rstd)` → `dx`.
        RmsNormGradInput(RmsNormGradInput) = "rms_norm_grad_input",
        /// Gradient of `rms_norm` for its scale: `(dy, x, rstd)` → `dscale`.
        RmsNormGradScale(RmsNormGradScale) = "rms_norm_grad_scale",

        /// Scaled dot-product attention: `(q, k, v[, mask])` → `(y, lse)`.
        Attention(Attention) = "attention",
        /// Gradient of `attention`: `(dy, q, k, v, y, lse[, mask])` → `(dq, dk, dv)`.
        AttentionGrad(AttentionGrad) = "attention_grad",

        /// Cross-entropy of class indices, per row: `(logits, labels)` → `(losses, lse)`.
        CrossEntropy(CrossEntropy) = "cross_entropy",
        /// Gradient of `cross_entropy`: `(dlosses, logits, labels, lse)` → `dlogits`.
        CrossEntropyGrad(CrossEntropyGrad) = "cross_entropy_grad",

        /// Results of a function with gradients of its own: `(y…, x…, dx…)` → `y…`; see [`function`].
        CustomGradient(CustomGradient) = "custom_gradient",
        /// The cotangent of such a result: `(y)` → `dy`.
        Cotangent(Cotangent) = "cotangent",
        /// An operand of a function that runs in a dtype of its own.
        EnterPrecision(EnterPrecision) = "enter_precision",
        /// A result of such a function.
        LeavePrecision(LeavePrecision) = "leave_precision",

        /// The full value of a sharded one.
        AllGather(AllGather) = "all_gather",
        /// The mean over ranks, of which each rank keeps its shard.
        ReduceScatter(ReduceScatter) = "reduce_scatter",
        /// The sum or mean over ranks.
        AllReduce(AllReduce) = "all_reduce",

        /// The seed of the backward pass: `loss_scale(scale)` = scale × factor.
        LossScale(LossScale) = "loss_scale",
        /// Computes the update's scalars from reduced statistics; see [`training`].
        Unscale(Unscale) = "unscale",
        /// One optimizer step for one parameter; see [`optimizer`].
        OptimizerStep(OptimizerStep) = "optimizer_step",
        /// A part of Adafactor's step for the elements that a rank holds; see [`adafactor`].
        Adafactor(Adafactor) = "adafactor",
        /// The momentum of gradients that Muon orthogonalizes; see [`muon`].
        MuonMomentum(MuonMomentum) = "muon_momentum",
        /// The step along orthogonalized momentum; see [`muon`].
        MuonStep(MuonStep) = "muon_step",
        /// A product with a constant in another element type: a gradient for and after its exchange.
        ScaledCast(ScaledCast) = "scaled_cast",
        /// A value quantized to an 8-bit float; see [`quantize`].
        Quantize(Quantize) = "quantize",
        /// A value that differs by parameter group of a flat tensor.
        ByParamGroup(ByParamGroup) = "by_param_group",
        /// The dynamic loss scale after this step: `(scale, tracker, found_inf)` → `(scale, tracker)`.
        UpdateLossScale(UpdateLossScale) = "update_loss_scale",
        /// `grad_stats(g…)` → `f32[2]` = [number of non-finite elements, sum of squares], or with an exact sum.
        GradStats(GradStats) = "grad_stats",
        /// The learning rate at this step: `(base_lr, step)` → `lr`.
        LearningRate(LearningRate) = "learning_rate",

        /// A region compiled as one kernel.
        Fusion(Box<Fusion>) = "fusion",
    }
    plain {
        /// `select(c, a, b)`: `a` where `c`, else `b`, elementwise with broadcasting.
        Select = "select",
        /// The moving average of a parameter after a step; see [`optimizer`].
        EmaStep = "ema_step",
        /// The number of steps taken: `(step, found_inf)` → `step`.
        UpdateStep = "update_step",
        /// Adds one more operand to a sum in a binary tree; see [`reproducible`].
        TreeSum = "tree_sum",
        /// Statistics with an exact sum of squares, rounded; see [`reproducible`].
        RoundStats = "round_stats",
    }
    families {
        /// One real function of one operand, elementwise.
        Unary(UnaryFn) = "unary",
        /// A test of each element, to `bool`.
        Predicate(PredicateFn) = "predicate",
        /// One real function of two operands, elementwise with numpy broadcasting.
        Binary(BinaryFn) = "binary",
        /// Comparison of two operands, elementwise with broadcasting, to `bool`.
        Compare(CompareFn) = "compare",
        /// Logic on two `bool` operands, elementwise with broadcasting.
        Logical(LogicalFn) = "logical",
    }
}

impl Op {
    /// Name and attributes, as JSON. The inverse of [`Op::from_parts`]; a fusion's body is left out.
    pub fn to_parts(&self) -> (&'static str, serde_json::Map<String, serde_json::Value>) {
        use serde_json::Value;
        if let Op::Fusion(fusion) = self {
            let kind = Value::String(fusion.kind.name().into());
            return (self.name(), [("kind".to_string(), kind)].into_iter().collect());
        }
        let value = serde_json::to_value(self).expect("invariant: operations serialize");
        // Operations without attributes are serialized as a string, like the functions of a family.
        let attributes = match value {
            Value::Object(object) => object.into_iter().next().map(|(_, attributes)| attributes),
            _ => None,
        };
        let Some(Value::Object(attributes)) = attributes else {
            return (self.name(), Default::default());
        };
        (self.name(), attributes.into_iter().filter(|(_, v)| !v.is_null()).collect())
    }

    /// The operation with this name and these attributes.
    ///
    /// # Errors
    /// If there is none, or an attribute is missing, unknown or of the wrong type.
    pub fn from_parts(
        name: &str,
        attributes: serde_json::Map<String, serde_json::Value>,
    ) -> Result<Op, OpError> {
        use serde_json::{Value, json};
        if attributes.is_empty() {
            for family in Op::FAMILIES {
                if let Ok(op) = serde_json::from_value(json!({ *family: name })) {
                    return Ok(op);
                }
            }
            if let Ok(op) = serde_json::from_value(Value::String(name.into())) {
                return Ok(op);
            }
        }
        if !Op::names().contains(&name) {
            return Err(OpError::new(format!("unknown operation `{name}`")));
        }
        serde_json::from_value(json!({ name: attributes }))
            .map_err(|e| OpError::new(format!("`{name}`: {e}")))
    }

    /// Types of the results for operands of these types.
    ///
    /// # Errors
    /// A description of the mismatch.
    pub fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        let results = with_attributes!(self, op => op.infer(inputs))?;
        let too_large = results.iter().find(|ty| ty.shape.checked_numel().is_none());
        match too_large {
            None => Ok(results),
            Some(ty) if ty.shape.rank() > MAX_RANK => {
                let rank = ty.shape.rank();
                Err(OpError::new(format!("a result of {rank} axes; {MAX_RANK} are the most")))
            }
            Some(ty) => Err(OpError::new(format!(
                "a result of type {ty}; a tensor has at most {MAX_ELEMENTS} elements"
            ))),
        }
    }

    /// Floating-point operations for operands and results of these types; a multiply-add counts two.
    pub fn flops(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> u64 {
        with_attributes!(self, op => op.flops(inputs, outputs))
    }

    /// In which precision autocast runs it, and why.
    pub fn precision(&self) -> Precision {
        with_attributes!(self, op => op.precision())
    }

    /// How its results scale with its operands.
    pub fn linear(&self) -> Linear {
        with_attributes!(self, op => op.linear())
    }

    /// Results for operands that were inferred to fit.
    pub(crate) fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        with_attributes!(self, op => op.evaluate(call))
    }

    /// Whether this is a leaf: no operands, its value comes from outside the program.
    pub fn is_leaf(&self) -> bool {
        matches!(self, Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Hyper(_) | Op::Constant(_))
    }

    /// Whether each result element depends only on the operand elements at its own (broadcast) place.
    pub fn is_pointwise(&self) -> bool {
        matches!(
            self,
            Op::Unary(_)
                | Op::Predicate(_)
                | Op::Cast(_)
                | Op::Clip(_)
                | Op::Binary(_)
                | Op::Compare(_)
                | Op::Logical(_)
                | Op::Select
        )
    }

    /// Whether this only rearranges elements.
    pub fn is_layout(&self) -> bool {
        matches!(
            self,
            Op::Reshape(_)
                | Op::Transpose(_)
                | Op::Expand(_)
                | Op::Slice(_)
                | Op::Concat(_)
                | Op::Split(_)
                | Op::Pad(_)
        )
    }
}

/// Fails unless there are exactly `n` operands.
pub(crate) fn arity(inputs: &[&TensorType], n: usize) -> Result<(), OpError> {
    arity_in(inputs, n, n)
}

/// Fails unless there are between `min` and `max` operands.
pub(crate) fn arity_in(inputs: &[&TensorType], min: usize, max: usize) -> Result<(), OpError> {
    if (min..=max).contains(&inputs.len()) {
        return Ok(());
    }
    let expected = if min == max { min.to_string() } else { format!("{min} to {max}") };
    Err(OpError::new(format!("expected {expected} operands, found {}", inputs.len())))
}

/// Fails unless the type is a float.
pub(crate) fn float(ty: &TensorType, what: &str) -> Result<(), OpError> {
    if ty.dtype.is_float() {
        return Ok(());
    }
    Err(OpError::new(format!("{what} must be a float, not {}", ty.dtype)))
}

/// The element type that a result is asked for in, which must be a float; `own` if it is not asked for.
pub(crate) fn float_result(asked: Option<DType>, own: DType) -> Result<DType, OpError> {
    match asked {
        None => Ok(own),
        Some(dtype) if dtype.is_float() => Ok(dtype),
        Some(dtype) => Err(OpError::new(format!("the result must be a float, not {dtype}"))),
    }
}

/// Fails unless the type is i64 or i32.
pub(crate) fn index_type(ty: &TensorType, what: &str) -> Result<(), OpError> {
    if matches!(ty.dtype, DType::I64 | DType::I32) {
        return Ok(());
    }
    Err(OpError::new(format!("{what} must be i64 or i32, not {}", ty.dtype)))
}

/// Fails unless both shapes are equal.
pub(crate) fn same_shape(a: &TensorType, b: &TensorType, what: &str) -> Result<(), OpError> {
    if a.shape == b.shape {
        return Ok(());
    }
    Err(OpError::new(format!("{what}: shapes {} and {} differ", a.shape, b.shape)))
}

/// Fails unless the shape is `expected`.
pub(crate) fn shape_is(ty: &TensorType, expected: &[usize], what: &str) -> Result<(), OpError> {
    if ty.shape.dims() == expected {
        return Ok(());
    }
    let expected = Shape::from(expected);
    Err(OpError::new(format!("{what} must have shape {expected}, not {}", ty.shape)))
}

/// Fails unless `axis` is one of the operand's.
pub(crate) fn axis_of(ty: &TensorType, axis: usize) -> Result<(), OpError> {
    if axis < ty.shape.rank() {
        return Ok(());
    }
    Err(OpError::new(format!("axis {axis} of a tensor of rank {}", ty.shape.rank())))
}

/// The dtype in which statistics of `dtype` are kept: f32, or f64 for f64.
pub fn statistics_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}
