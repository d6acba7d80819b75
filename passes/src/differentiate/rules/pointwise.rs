//! Gradient rules of elementwise operations. Ties and domains as in PyTorch's `derivatives.yaml`.

use super::super::builder::{Builder, Gradients, Rule};
use super::{Differentiate, unsupported};
use frit_ir::ops::{BinaryFn, Cast, Clip, CompareFn, LogicalFn, Op, Select, UnaryFn};
use frit_ir::{DType, Node, ValueId};

impl Differentiate for UnaryFn {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let f = *self;
        let x = node.inputs[0];
        let y = node.outputs[0];
        use UnaryFn::*;
        let dtype = b.ty(x).dtype;
        let dx = match f {
            Neg => b.neg(dy)?,
            Abs => {
                let sign = b.unary(Sign, x)?;
                b.mul(dy, sign)?
            }
            Exp => b.mul(dy, y)?,
            Expm1 => {
                let one = b.constant(dtype, 1.0)?;
                let factor = b.add(y, one)?;
                b.mul(dy, factor)?
            }
            Log => b.div(dy, x)?,
            Log1p => {
                let one = b.constant(dtype, 1.0)?;
                let divisor = b.add(x, one)?;
                b.div(dy, divisor)?
            }
            Sqrt => {
                let divisor = b.scaled(y, 2.0)?;
                b.div(dy, divisor)?
            }
            Rsqrt => {
                let square = b.mul(y, y)?;
                let cube = b.mul(square, y)?;
                let factor = b.scaled(cube, -0.5)?;
                b.mul(dy, factor)?
            }
            Reciprocal => {
                let square = b.mul(y, y)?;
                let factor = b.neg(square)?;
                b.mul(dy, factor)?
            }
            Sin => {
                let factor = b.unary(Cos, x)?;
                b.mul(dy, factor)?
            }
            Cos => {
                let sin = b.unary(Sin, x)?;
                let factor = b.neg(sin)?;
                b.mul(dy, factor)?
            }
            Tan => {
                let square = b.mul(y, y)?;
                let one = b.constant(dtype, 1.0)?;
                let factor = b.add(square, one)?;
                b.mul(dy, factor)?
            }
            Asin => {
                let factor = inverse_root(b, x, -1.0, 1.0)?;
                b.mul(dy, factor)?
            }
            Acos => {
                let root = inverse_root(b, x, -1.0, 1.0)?;
                let factor = b.neg(root)?;
                b.mul(dy, factor)?
            }
            Asinh => {
                let factor = inverse_root(b, x, 1.0, 1.0)?;
                b.mul(dy, factor)?
            }
            Acosh => {
                let factor = inverse_root(b, x, 1.0, -1.0)?;
                b.mul(dy, factor)?
            }
            Atan => {
                let divisor = square_plus(b, x, 1.0, 1.0)?;
                b.div(dy, divisor)?
            }
            Atanh => {
                let divisor = square_plus(b, x, -1.0, 1.0)?;
                b.div(dy, divisor)?
            }
            Sinh => {
                let factor = b.unary(Cosh, x)?;
                b.mul(dy, factor)?
            }
            Cosh => {
                let factor = b.unary(Sinh, x)?;
                b.mul(dy, factor)?
            }
            Erf => {
                let square = b.mul(x, x)?;
                let exponent = b.neg(square)?;
                let bell = b.unary(Exp, exponent)?;
                let factor = b.scaled(bell, std::f64::consts::FRAC_2_SQRT_PI)?;
                b.mul(dy, factor)?
            }
            Softplus => {
                let factor = b.unary(Sigmoid, x)?;
                b.mul(dy, factor)?
            }
            Tanh => b.binary(BinaryFn::TanhGrad, dy, y)?,
            Sigmoid => b.binary(BinaryFn::SigmoidGrad, dy, y)?,
            Relu => b.binary(BinaryFn::ReluGrad, dy, y)?,
            Silu => b.binary(BinaryFn::SiluGrad, dy, x)?,
            Gelu => b.binary(BinaryFn::GeluGrad, dy, x)?,
            GeluTanh => b.binary(BinaryFn::GeluTanhGrad, dy, x)?,
            // Flat almost everywhere, or said to be.
            Sign | Floor | Ceil | Round | Not | Detach => return Ok(vec![None]),
        };
        Ok(vec![Some(dx)])
    }
}

/// `sign·x² + constant`
fn square_plus(b: &mut Builder<'_>, x: ValueId, sign: f64, constant: f64) -> Rule<ValueId> {
    let square = b.mul(x, x)?;
    let square = if sign < 0.0 { b.neg(square)? } else { square };
    let constant = b.constant(b.ty(x).dtype, constant)?;
    b.add(square, constant)
}

/// `1/√(sign·x² + constant)`
fn inverse_root(b: &mut Builder<'_>, x: ValueId, sign: f64, constant: f64) -> Rule<ValueId> {
    let sum = square_plus(b, x, sign, constant)?;
    b.unary(UnaryFn::Rsqrt, sum)
}

/// The inverse cast; nothing where the cotangent was summed or written wide already.
impl Differentiate for Cast {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = node.inputs[0];
        if b.ty(dy).dtype == DType::F32 && b.is_narrowed(x) {
            // Summed in f32, with what else reads `x`.
            return Ok(vec![Some(dy)]);
        }
        let dtype = b.grad_dtype(x);
        Ok(vec![Some(b.cast(dy, dtype)?)])
    }
}

/// Between the bounds; at a bound nothing, as of `hardtanh` and of the `clamp` of PyTorch 2.15.
impl Differentiate for Clip {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = node.inputs[0];
        let dtype = b.ty(x).dtype;
        let mut inside = None;
        for (f, bound) in [(CompareFn::Gt, self.min), (CompareFn::Lt, self.max)] {
            let Some(bound) = bound else { continue };
            let (x, bound) = b.beside(x, bound)?;
            let test = b.compare(f, x, bound)?;
            inside = Some(match inside {
                None => test,
                Some(other) => b.emit(Op::Logical(LogicalFn::And), &[other, test])?,
            });
        }
        let Some(inside) = inside else { return Ok(vec![Some(dy)]) };
        let zero = b.constant(dtype, 0.0)?;
        Ok(vec![Some(b.select(inside, dy, zero)?)])
    }
}

impl Differentiate for Select {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        let zero = b.constant(b.ty(dy).dtype, 0.0)?;
        let mut gradients = vec![None; 3];
        if b.needs(1) {
            let taken = b.select(x[0], dy, zero)?;
            gradients[1] = Some(b.sum_to(taken, x[1])?);
        }
        if b.needs(2) {
            let taken = b.select(x[0], zero, dy)?;
            gradients[2] = Some(b.sum_to(taken, x[2])?);
        }
        Ok(gradients)
    }
}

impl Differentiate for BinaryFn {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let f = *self;
        let x = &node.inputs;
        let y = node.outputs[0];
        let mut gradients = vec![None; 2];
        for i in 0..2 {
            if b.needs(i) {
                let full = partial(b, f, i, x, y, dy)?;
                gradients[i] = Some(b.sum_to(full, x[i])?);
            }
        }
        Ok(gradients)
    }
}

/// The cotangent of operand `i`, in the shape of the result.
fn partial(
    b: &mut Builder<'_>,
    f: BinaryFn,
    i: usize,
    x: &[ValueId],
    y: ValueId,
    dy: ValueId,
) -> Rule<ValueId> {
    use BinaryFn::*;
    let first = i == 0;
    match f {
        Add => Ok(dy),
        Sub if first => Ok(dy),
        Sub => b.neg(dy),
        Mul => b.mul(dy, x[1 - i]),
        Div if first => b.div(dy, x[1]),
        Div => {
            let slope = b.div(y, x[1])?;
            let negative = b.neg(slope)?;
            b.mul(dy, negative)
        }
        Pow if first => pow_base(b, x, dy),
        Pow => pow_exponent(b, x, y, dy),
        Max => extreme(b, x, dy, if first { CompareFn::Lt } else { CompareFn::Gt }),
        Min => extreme(b, x, dy, if first { CompareFn::Gt } else { CompareFn::Lt }),
        Mod | Fmod if first => Ok(dy),
        Mod => {
            let quotient = b.div(x[0], x[1])?;
            let floor = b.unary(UnaryFn::Floor, quotient)?;
            let slope = b.neg(floor)?;
            b.mul(dy, slope)
        }
        Fmod => {
            let quotient = b.div(x[0], x[1])?;
            let (sign, size) =
                (b.unary(UnaryFn::Sign, quotient)?, b.unary(UnaryFn::Abs, quotient)?);
            let floor = b.unary(UnaryFn::Floor, size)?;
            let truncated = b.mul(sign, floor)?;
            let slope = b.neg(truncated)?;
            b.mul(dy, slope)
        }
        GeluGrad | GeluTanhGrad | SiluGrad | TanhGrad | SigmoidGrad | ReluGrad => {
            Err(unsupported(format!("`{}` (a second derivative)", f.name())))
        }
    }
}

/// dy·b·aᵇ⁻¹, and 0 where b is 0.
fn pow_base(b: &mut Builder<'_>, x: &[ValueId], dy: ValueId) -> Rule<ValueId> {
    let dtype = b.ty(x[0]).dtype;
    let known = b.graph.constant(x[1]).and_then(|c| c.as_splat());
    if known == Some(2.0) {
        let slope = b.scaled(x[0], 2.0)?;
        return b.mul(dy, slope);
    }
    let one = b.constant(dtype, 1.0)?;
    let reduced = b.binary(BinaryFn::Sub, x[1], one)?;
    let power = b.binary(BinaryFn::Pow, x[0], reduced)?;
    let slope = b.mul(x[1], power)?;
    let gradient = b.mul(dy, slope)?;
    if known.is_some_and(|e| e != 0.0) {
        return Ok(gradient);
    }
    let zero = b.constant(dtype, 0.0)?;
    let flat = b.compare(CompareFn::Eq, x[1], zero)?;
    b.select(flat, zero, gradient)
}

/// dy·y·ln a, and 0 where a is 0 and b is not negative.
fn pow_exponent(b: &mut Builder<'_>, x: &[ValueId], y: ValueId, dy: ValueId) -> Rule<ValueId> {
    let zero = b.constant(b.ty(y).dtype, 0.0)?;
    let base_zero = b.compare(CompareFn::Eq, x[0], zero)?;
    let not_negative = b.compare(CompareFn::Ge, x[1], zero)?;
    let flat = b.emit(Op::Logical(LogicalFn::And), &[base_zero, not_negative])?;
    let log = b.unary(UnaryFn::Log, x[0])?;
    let slope = b.mul(y, log)?;
    let gradient = b.mul(dy, slope)?;
    b.select(flat, zero, gradient)
}

/// dy, half of it where both operands are equal, and 0 where `loses(a, b)`.
fn extreme(b: &mut Builder<'_>, x: &[ValueId], dy: ValueId, loses: CompareFn) -> Rule<ValueId> {
    let zero = b.constant(b.ty(dy).dtype, 0.0)?;
    let (tie, lost) = (b.compare(CompareFn::Eq, x[0], x[1])?, b.compare(loses, x[0], x[1])?);
    let half = b.scaled(dy, 0.5)?;
    let won = b.select(lost, zero, dy)?;
    b.select(tie, half, won)
}
