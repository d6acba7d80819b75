//! Gradient rules, one file per operation family.
//!
//! A rule maps the cotangents of a node's results to those of its operands. It adds no node for an
//! operand whose cotangent is not wanted.

mod attention;
mod conv;
mod function;
mod index;
mod layout;
mod loss;
mod matmul;
mod norm;
mod pointwise;
mod reduce;
mod scatter;

use super::builder::{Builder, Gradients, RuleError};
use frit_ir::{Node, ValueId, ops, with_attributes};

/// The gradient rule of an operation; implemented by its attributes.
trait Differentiate {
    /// The cotangents of the operands of `node`, one for each, from those of its results, of which there is at least one. By
    /// default that of the first result alone: the others are statistics, which have no rule.
    fn vjp(&self, b: &mut Builder<'_>, node: &Node, dys: &[Option<ValueId>]) -> Gradients {
        match (dys[0], dys[1..].iter().all(Option::is_none)) {
            (Some(dy), true) => self.vjp_first(b, node, dy),
            _ => Err(unsupported(format!("the statistics of `{}`", node.op.name()))),
        }
    }

    /// The cotangents of the operands from that of the first result. By default there is no rule.
    fn vjp_first(&self, _: &mut Builder<'_>, node: &Node, _: ValueId) -> Gradients {
        Err(unsupported(format!("`{}`", node.op.name())))
    }
}

macro_rules! without_rule {
    ($($operation:ident),* $(,)?) => {$(impl Differentiate for ops::$operation {})*};
}

// Leaves, and discrete or random results.
without_rule!(
    Input,
    Param,
    State,
    Hyper,
    Constant,
    PredicateFn,
    CompareFn,
    LogicalFn,
    ArgReduce,
    Random,
    RandomMask,
    Cotangent,
    // The gradient that a function states is not a rule: `custom` writes it out.
    CustomGradient,
);

// Operations that differentiation and later passes add: there are no second derivatives.
without_rule!(
    EmbeddingGrad,
    ConvGradWeight,
    MaxPoolGrad,
    SumPoolGrad,
    BatchNormGrad,
    SoftmaxGrad,
    LogSoftmaxGrad,
    LayerNormGradInput,
    LayerNormGradAffine,
    RmsNormGradInput,
    RmsNormGradScale,
    AttentionGrad,
    CrossEntropyGrad,
    AllGather,
    ReduceScatter,
    LossScale,
    GradStats,
    Unscale,
    OptimizerStep,
    Adafactor,
    MuonMomentum,
    MuonStep,
    ScaledCast,
    EmaStep,
    Quantize,
    ByParamGroup,
    UpdateLossScale,
    UpdateStep,
    TreeSum,
    RoundStats,
    LearningRate,
    Fusion,
);

/// The cotangents of the operands of `node`, from those of its results.
pub(super) fn vjp(b: &mut Builder<'_>, node: &Node, dys: &[Option<ValueId>]) -> Gradients {
    with_attributes!(&node.op, op => op.vjp(b, node, dys))
}

fn unsupported(what: impl Into<String>) -> RuleError {
    RuleError::Unsupported(what.into())
}
