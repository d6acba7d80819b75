//! How every operation propagates the factor of its operands: one row per operation, without a default.
//!
//! A new operation does not compile before it has its row.

use frit_ir::Op;
use frit_ir::ops::scatter::ScatterFn;
use frit_ir::ops::{BinaryFn, ReduceFn, UnaryFn};

/// How results depend on operands that carry a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Linear {
    /// On the sum of linear terms in these operands; no other may carry a factor.
    In(&'static [usize]),
    /// On the sum of all operands.
    InAll,
    /// On the product: linear in each operand.
    InEach,
    /// Not linearly on any.
    No,
}

use Linear::{In, InAll, InEach, No};

/// The first operand alone: data, or the cotangent of a gradient operation.
const FIRST: Linear = In(&[0]);

/// The row of an operation.
pub(super) fn linear(op: &Op) -> Linear {
    match op {
        Op::Unary(f) => match f {
            UnaryFn::Neg | UnaryFn::Detach => FIRST,
            UnaryFn::Abs
            | UnaryFn::Sign
            | UnaryFn::Sqrt
            | UnaryFn::Rsqrt
            | UnaryFn::Reciprocal
            | UnaryFn::Exp
            | UnaryFn::Expm1
            | UnaryFn::Log
            | UnaryFn::Log1p
            | UnaryFn::Floor
            | UnaryFn::Ceil
            | UnaryFn::Round
            | UnaryFn::Sin
            | UnaryFn::Cos
            | UnaryFn::Tan
            | UnaryFn::Asin
            | UnaryFn::Acos
            | UnaryFn::Atan
            | UnaryFn::Sinh
            | UnaryFn::Cosh
            | UnaryFn::Asinh
            | UnaryFn::Acosh
            | UnaryFn::Atanh
            | UnaryFn::Tanh
            | UnaryFn::Erf
            | UnaryFn::Sigmoid
            | UnaryFn::Softplus
            | UnaryFn::Relu
            | UnaryFn::Silu
            | UnaryFn::Gelu
            | UnaryFn::GeluTanh
            | UnaryFn::Not => No,
        },
        Op::Binary(f) => match f {
            BinaryFn::Add | BinaryFn::Sub => InAll,
            BinaryFn::Mul => InEach,
            BinaryFn::Div
            | BinaryFn::GeluGrad
            | BinaryFn::GeluTanhGrad
            | BinaryFn::SiluGrad
            | BinaryFn::TanhGrad
            | BinaryFn::SigmoidGrad
            | BinaryFn::ReluGrad => FIRST,
            BinaryFn::Pow | BinaryFn::Max | BinaryFn::Min | BinaryFn::Mod | BinaryFn::Fmod => No,
        },
        Op::Cast(op) if op.to.is_float() => FIRST,
        Op::Cast(_) => No,
        Op::Select => In(&[1, 2]),
        Op::Reduce(op) => match op.f {
            ReduceFn::Sum | ReduceFn::Mean => FIRST,
            ReduceFn::Prod | ReduceFn::Max | ReduceFn::Min => No,
        },
        Op::Pad(op) if op.value == 0.0 => FIRST,
        Op::Pad(_) => No,
        Op::ScatterElements(op) => scattered(op.f),
        Op::ScatterNd(op) => scattered(op.f),
        Op::Concat(_) => InAll,
        Op::MatMul(_) | Op::Conv(_) | Op::ConvGradInput(_) | Op::ConvGradWeight(_) => InEach,
        // Rounding keeps the factor: the scale that follows the magnitude is divided out again.
        Op::ScaledCast(_) | Op::Quantize(_) => FIRST,
        Op::Reshape(_)
        | Op::Transpose(_)
        | Op::Expand(_)
        | Op::Slice(_)
        | Op::Split(_)
        | Op::SumTo(_)
        | Op::Embedding(_)
        | Op::EmbeddingGrad(_)
        | Op::Gather(_)
        | Op::GatherElements(_)
        | Op::GatherNd(_)
        | Op::CumSum(_)
        | Op::MaxPoolGrad(_)
        | Op::SumPool(_)
        | Op::SumPoolGrad(_)
        | Op::BatchNormGrad(_)
        | Op::SoftmaxGrad(_)
        | Op::LogSoftmaxGrad(_)
        | Op::LayerNormGradInput(_)
        | Op::LayerNormGradAffine(_)
        | Op::RmsNormGradInput(_)
        | Op::RmsNormGradScale(_)
        | Op::AttentionGrad(_)
        | Op::CrossEntropyGrad(_) => FIRST,
        Op::Predicate(_)
        | Op::Clip(_)
        | Op::Compare(_)
        | Op::Logical(_)
        | Op::TopK(_)
        | Op::ArgReduce(_)
        | Op::Random(_)
        | Op::RandomMask(_)
        | Op::MaxPool(_)
        | Op::BatchNorm(_)
        | Op::Softmax(_)
        | Op::LogSoftmax(_)
        | Op::LayerNorm(_)
        | Op::RmsNorm(_)
        | Op::Attention(_)
        | Op::CrossEntropy(_)
        | Op::LossScale(_)
        | Op::GradStats
        | Op::Unscale(_)
        | Op::OptimizerStep(_)
        | Op::Adafactor(_)
        | Op::EmaStep
        | Op::ByParamGroup(_)
        | Op::UpdateLossScale(_)
        | Op::UpdateStep
        | Op::LearningRate(_) => No,
        // Leaves read nothing; collectives and regions are no part of a body.
        Op::Input(_)
        | Op::Param(_)
        | Op::State(_)
        | Op::Hyper(_)
        | Op::Constant(_)
        | Op::AllGather(_)
        | Op::ReduceScatter(_)
        | Op::AllReduce(_)
        | Op::Fusion(_) => No,
    }
}

/// Data and updates, which are put in place or added.
fn scattered(f: ScatterFn) -> Linear {
    match f {
        ScatterFn::Replace | ScatterFn::Add => In(&[0, 2]),
        ScatterFn::Mul | ScatterFn::Max | ScatterFn::Min => No,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::interpret::{Options, eval_op};
    use frit_ir::ops::{Cast, Clip, Pad, Reduce, SumTo};
    use frit_ir::{DType, Shape, Tensor};

    /// What operands of 2×2 become, those at `scaled` times −2: a maximum of doubled operands is doubled.
    fn results(op: &Op, arity: usize, scaled: &[usize]) -> Vec<f64> {
        let tensors: Vec<Tensor> = (0..arity)
            .map(|i| {
                let times = if scaled.contains(&i) { -2.0 } else { 1.0 };
                let x = [0.5, -1.25, 2.0, -0.75].map(|x| times * (x + 0.125 * i as f64));
                Tensor::floats(DType::F64, [2, 2], x.to_vec())
            })
            .collect();
        let exact = Options { exact: true };
        let found = eval_op(op, &tensors.iter().collect::<Vec<_>>(), exact).expect("evaluates");
        found.iter().flat_map(|t| t.to_f64s()).collect()
    }

    fn scales(op: &Op, arity: usize, scaled: &[usize]) -> bool {
        let (once, then) = (results(op, arity, &[]), results(op, arity, scaled));
        once.iter().zip(&then).all(|(a, b)| (-2.0 * a - b).abs() < 1e-9 * a.abs().max(1.0))
    }

    #[test]
    fn the_table_says_what_operations_do() {
        let axes = vec![0];
        let reduce = |f| Op::Reduce(Reduce { f, axes: axes.clone(), keep_dims: false });
        let mut ops: Vec<(Op, usize)> = UnaryFn::ALL
            .iter()
            .filter(|f| **f != UnaryFn::Not)
            .map(|f| (Op::Unary(*f), 1))
            .collect();
        ops.extend(BinaryFn::ALL.iter().map(|f| (Op::Binary(*f), 2)));
        ops.extend(
            [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Max, ReduceFn::Prod].map(|f| (reduce(f), 1)),
        );
        ops.push((Op::SumTo(SumTo { shape: Shape::from([2]), dtype: None }), 1));
        ops.push((Op::Cast(Cast { to: DType::F64 }), 1));
        ops.push((Op::Clip(Clip { min: Some(-1.0), max: Some(1.0) }), 1));
        let pad = |value| Op::Pad(Pad { low: vec![1, 0], high: vec![0, 0], value });
        ops.extend([(pad(0.0), 1), (pad(1.0), 1)]);
        for (op, arity) in ops {
            let name = op.name();
            match linear(&op) {
                In(terms) => assert!(scales(&op, arity, terms), "{name}"),
                InAll => {
                    assert!(scales(&op, arity, &[0, 1]) && !scales(&op, arity, &[0]), "{name}")
                }
                InEach => assert!(scales(&op, arity, &[0]) && scales(&op, arity, &[1]), "{name}"),
                No => assert!(!scales(&op, arity, &[0]), "{name}"),
            }
        }
    }
}
