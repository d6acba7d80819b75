//! Explains from the operands why an operation's result is not finite.

use frit_ir::ops::{BinaryFn, ReduceFn, UnaryFn};
use frit_ir::{DType, Op, Tensor};

/// The type of a tensor and the range of its finite elements.
pub(super) fn range(tensor: &Tensor) -> String {
    match ends(tensor) {
        Some((lo, hi)) => format!("{} from {lo:.4e} to {hi:.4e}", tensor.ty),
        None => format!("{}, no finite element", tensor.ty),
    }
}

fn ends(tensor: &Tensor) -> Option<(f64, f64)> {
    let values = tensor.to_f64s();
    let finite = || values.iter().copied().filter(|x| x.is_finite());
    let (lo, hi) = (finite().reduce(f64::min)?, finite().reduce(f64::max)?);
    Some((lo, hi))
}

/// The largest finite number.
fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 65504.0,
        DType::F64 => f64::MAX,
        _ => f64::from(f32::MAX),
    }
}

/// The first label that is neither a class nor ignored.
fn no_class(op: &Op, operands: &[Tensor]) -> Option<(i64, usize)> {
    let shape = |i: usize| operands.get(i).map(Tensor::shape);
    let (classes, labels, ignore) = match op {
        Op::CrossEntropy(op) => (op.classes_of(shape(0)?), operands.get(1)?, op.ignore_index),
        Op::CrossEntropyGrad(op) => (op.classes_of(shape(1)?), operands.get(2)?, op.ignore_index),
        _ => return None,
    };
    let is_bad = |x: &&i64| **x != ignore && !(0..classes as i64).contains(*x);
    Some((*labels.as_ints()?.iter().find(is_bad)?, classes))
}

/// The likely cause, and what to do.
pub(super) fn of(
    op: Option<&Op>,
    dtype: DType,
    operands: &[Tensor],
    scope: &str,
) -> (String, String) {
    let (lo, hi) = operands.first().and_then(ends).unwrap_or((f64::NAN, f64::NAN));
    let limits =
        format!("set a lower limit, such as `max(x, 1e-6)`, in scope `{scope}` of the model");
    let overflow = |what: &str| {
        let cause = format!("{what} exceeds {:.5e}, the largest {dtype}", largest(dtype));
        let remedy = match dtype {
            DType::F16 => format!(
                "set precision.compute = \"bf16\", or compute this part in fp32: [[precision.override]] \
                 scope = \"{scope}\", dtype = \"fp32\""
            ),
            _ => "the run diverges: lower optimizer.lr, warm up, or set optimizer.clip_grad_norm"
                .into(),
        };
        (cause, remedy)
    };
    let Some(op) = op else {
        return (
            "operands are finite, and the result is not: an overflow within the kernel".into(),
            overflow("a result").1,
        );
    };
    if let Some((label, classes)) = no_class(op, operands) {
        let most = classes as i64 - 1;
        return (
            format!("the label {label} is not one of {classes} classes, 0 to {most}"),
            "check the labels, and the inputs from which the model computes them".into(),
        );
    }
    match op {
        Op::Unary(f) => match f {
            UnaryFn::Log if lo <= 0.0 => ("the logarithm of a number that is not above 0".into(), limits),
            UnaryFn::Log1p if lo <= -1.0 => {
                ("the logarithm of one plus a number that is not above -1".into(), limits)
            }
            UnaryFn::Sqrt if lo < 0.0 => ("the square root of a negative number".into(), limits),
            UnaryFn::Rsqrt if lo <= 0.0 => {
                ("the reciprocal root of a number that is not above 0: an epsilon that is 0 or rounded away".into(), limits)
            }
            UnaryFn::Reciprocal if lo <= 0.0 && hi >= 0.0 => ("a division by 0".into(), limits),
            UnaryFn::Exp | UnaryFn::Expm1 => overflow(&format!("exp({hi:.4})")),
            f => overflow(&format!("{} of {lo:.4e} … {hi:.4e}", f.name())),
        },
        Op::Binary(BinaryFn::Div) => match operands.get(1).and_then(ends) {
            Some((a, b)) if a <= 0.0 && b >= 0.0 => ("a division by 0".into(), limits),
            _ => overflow("a quotient"),
        },
        Op::Binary(BinaryFn::Pow) if lo < 0.0 => {
            ("a power of a negative number".into(), limits)
        }
        Op::Binary(f) => overflow(&format!("a result of {}", f.name())),
        Op::Cast(_) => overflow(&format!("the value {:.4e} that is cast", if hi.abs() > lo.abs() { hi } else { lo })),
        Op::Reduce(r) if matches!(r.f, ReduceFn::Sum | ReduceFn::Mean | ReduceFn::Prod) => {
            overflow(&format!("a {}", format!("{:?}", r.f).to_lowercase()))
        }
        Op::SumTo(_) => overflow("a sum"),
        Op::MatMul(_) | Op::Conv(_) | Op::ConvGradInput(_) | Op::ConvGradWeight(_) => {
            overflow("a sum of products")
        }
        op => overflow(&format!("a result of {}", op.name())),
    }
}
