//! Operators that draw random numbers.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use crate::import::dims::checked_numel;
use frit_ir::ops::random;
use frit_ir::ops::{ArgReduce, BinaryFn, Clip, CompareFn, Random, RandomFn, RandomMask, UnaryFn};
use frit_ir::{DType, Op, Shape, Tensor, TensorType, ValueId};

const NORMAL: &[&str] = &["dtype", "mean", "scale", "seed", "shape"];
const UNIFORM: &[&str] = &["dtype", "low", "high", "seed", "shape"];

pub(super) const OPERATORS: &[Operator] = &[
    op("Bernoulli", &["dtype", "seed"], bernoulli),
    op("Dropout", &["seed"], dropout),
    op("Multinomial", &["dtype", "sample_size", "seed"], multinomial),
    op("RandomNormal", NORMAL, |cx| numbers(cx, RandomFn::Normal, false)),
    op("RandomNormalLike", NORMAL, |cx| numbers(cx, RandomFn::Normal, true)),
    op("RandomUniform", UNIFORM, |cx| numbers(cx, RandomFn::Uniform, false)),
    op("RandomUniformLike", UNIFORM, |cx| numbers(cx, RandomFn::Uniform, true)),
];

/// The first number of draws that a `seed` names; those without one count from 0.
const SEEDED: u32 = 1 << 31;

/// Numbers in the given shape, or in that of the operand.
fn numbers(cx: &mut NodeContext<'_>, f: RandomFn, like: bool) -> Outcome {
    let (dims, default) = match like {
        true => {
            let like = cx.ty(cx.input(0)?);
            (like.shape.0, like.dtype)
        }
        false => {
            let Some(dims) = cx.ints("shape") else { return misfit("the shape is missing") };
            (cx.sizes(&dims, "the shape")?, DType::F32)
        }
    };
    let dtype = dtype(cx, default)?;
    if !dtype.is_float() {
        return misfit(format!("random numbers are floats, not {dtype}"));
    }
    let (offset, scale) = match f {
        RandomFn::Normal => (cx.float("mean", 0.0), cx.float("scale", 1.0)),
        RandomFn::Uniform => (cx.float("low", 0.0), cx.float("high", 1.0) - cx.float("low", 0.0)),
    };
    if scale.is_nan() || scale < 0.0 {
        return misfit(match f {
            RandomFn::Normal => format!("scale = {scale} is negative"),
            RandomFn::Uniform => "high is below low".into(),
        });
    }
    let mut x = draw(cx, f, dims, offset, scale)?;
    if f == RandomFn::Uniform && dtype.size() < 4 {
        // Rounded to fewer bits, a number could reach the bound.
        let max = Some(below(offset + scale, dtype));
        x = cx.emit(Op::Clip(Clip { min: None, max }), &[x])?;
    }
    one(cx.cast(x, dtype)?)
}

/// The largest value of a 16-bit float below a number.
fn below(high: f64, dtype: DType) -> f64 {
    let step = |k: i32| dtype.round(high - high.abs().max(2f64.powi(-14)) * 2f64.powi(-k));
    (7..13).rev().map(step).find(|x| *x < high).unwrap_or(high)
}

/// `(p)` → ones with probability `p`, else zeros.
fn bernoulli(cx: &mut NodeContext<'_>) -> Outcome {
    let p = cx.input(0)?;
    let ty = cx.ty(p);
    let dtype = dtype(cx, ty.dtype)?;
    let p = cx.cast(p, DType::F32)?;
    let u = draw(cx, RandomFn::Uniform, ty.shape.0, 0.0, 1.0)?;
    let drawn = cx.emit(Op::Compare(CompareFn::Lt), &[u, p])?;
    one(cx.cast(drawn, dtype)?)
}

/// `(log p)` → for each row, the places of `sample_size` draws. The place of the largest `log p + g`, with
/// `g` from Gumbel's distribution, has probability `p` over the sum of all. Source: Maddison et al. 2014.
fn multinomial(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let dtype = match cx.has("dtype") {
        true => dtype(cx, DType::I32)?,
        false => DType::I32,
    };
    if dtype.is_float() || dtype == DType::Bool {
        return misfit(format!("places are integers, not {dtype}"));
    }
    let samples = cx.sizes(&[cx.int("sample_size", 1)], "sample_size")?[0];
    let &[rows, classes] = cx.ty(x).shape.dims() else {
        return misfit(format!("the operand must have two axes, not the type {}", cx.ty(x)));
    };
    if rows * samples == 0 || classes == 0 {
        return misfit(format!("{samples} draws from {classes} classes in {rows} rows"));
    }
    if checked_numel(&[rows, samples, classes]).is_none() {
        return misfit(format!("{samples} draws from {} are too many", cx.ty(x)));
    }
    let x = cx.cast(x, DType::F32)?;
    let x = cx.reshape(x, vec![rows, 1, classes])?;
    let mut g = draw(cx, RandomFn::Uniform, vec![rows, samples, classes], 0.0, 1.0)?;
    for f in [UnaryFn::Log, UnaryFn::Neg, UnaryFn::Log, UnaryFn::Neg] {
        g = cx.emit(Op::Unary(f), &[g])?;
    }
    let scores = cx.emit(Op::Binary(BinaryFn::Add), &[x, g])?;
    let largest = Op::ArgReduce(ArgReduce { axis: 2, largest: true, last: false });
    let places = cx.emit(largest, &[scores])?;
    let places = cx.reshape(places, vec![rows, samples])?;
    one(cx.cast(places, dtype)?)
}

/// The attribute `dtype`.
fn dtype(cx: &NodeContext<'_>, default: DType) -> Result<DType, Fault> {
    match cx.has("dtype") {
        true => cx.dtype_attribute("dtype", cx.int("dtype", 0)),
        false => Ok(default),
    }
}

fn draw(
    cx: &mut NodeContext<'_>,
    f: RandomFn,
    dims: Vec<usize>,
    offset: f64,
    scale: f64,
) -> Result<ValueId, Fault> {
    let state = generator(cx)?;
    let id = match cx.has("seed") {
        // Nodes of one seed draw the same numbers.
        true => SEEDED | (cx.float("seed", 0.0) as f32).to_bits(),
        false => unseeded(cx),
    };
    let random = Random { f, shape: Shape(dims), offset, scale, id };
    cx.add(Op::Random(random), &[state]).map(|v| v[0])
}

/// How many draws the model has so far.
fn unseeded(cx: &NodeContext<'_>) -> u32 {
    let draws = cx.graph.nodes().filter(|(_, n)| match &n.op {
        Op::RandomMask(_) => true,
        Op::Random(random) => random.id < SEEDED,
        _ => false,
    });
    draws.count() as u32
}

/// `(x, ratio, training_mode)` → `(y, mask)`: in training, elements are kept with probability 1 − ratio
/// and divided by it. The attribute `seed` is the exporter's; the plan's own seed decides. Without `training_mode` nothing is dropped,
/// but by PyTorch's exporters, which write the dropout of attention weights so, and only where the module drops.
fn dropout(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let ratio = cx.known_scalar(1, "the ratio")?.unwrap_or(0.5);
    let training = cx.known_scalar(2, "training_mode")?.map(|mode| mode != 0.0);
    let training = training.unwrap_or(cx.from_pytorch);
    if !(0.0..=1.0).contains(&ratio) {
        return misfit(format!("ratio {ratio} is not a probability"));
    }
    let dims = cx.dims(x);
    if !training || ratio == 0.0 {
        let mut results = vec![x.into()];
        if cx.node.output.len() > 1 {
            let kept = cx.constant(Tensor::splat(TensorType::scalar(DType::Bool), 1.0))?;
            results.push(cx.expand(kept, dims)?.into());
        }
        return Ok(results);
    }
    let keep = 1.0 - ratio;
    let state = generator(cx)?;
    let mask = RandomMask { shape: Shape(dims), keep, id: unseeded(cx) };
    let mask = cx.emit(Op::RandomMask(mask), &[state])?;
    let zero = cx.scalar_like(x, 0.0)?;
    let mut y = x;
    if keep > 0.0 {
        let factor = cx.scalar_like(x, 1.0 / keep)?;
        y = cx.emit(Op::Binary(BinaryFn::Mul), &[x, factor])?;
    }
    let y = cx.emit(Op::Select, &[mask, y, zero])?;
    Ok(vec![y.into(), mask.into()])
}

fn generator(cx: &mut NodeContext<'_>) -> Result<ValueId, Fault> {
    random::generator(cx.graph, &cx.origin).map_err(|e| Fault::Misfit(e.error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_lies_between_a_number_and_the_largest_below_it() {
        for dtype in [DType::F16, DType::BF16] {
            for high in [1.0, 10.0, 3.5, 1000.0, -2.0, 0.125] {
                let most = below(high, dtype);
                let between = dtype.round((most + high) / 2.0);
                assert!(
                    most < high && (between == most || between == high),
                    "{dtype} {high} {most}"
                );
            }
            assert!((-1e-6..0.0).contains(&below(0.0, dtype)), "{dtype}");
        }
    }
}
