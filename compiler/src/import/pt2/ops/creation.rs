//! Operators that make tensors: filled ones, ranges.

use super::super::call::{Call, Fault, Outcome, Scalar, int, unsupported};
use super::super::dtype::{BOOL, Dtype, F32, I64, is_float};
use super::super::translate::Int;
use super::{Convert, detached, one};
use frit_ir::shape::MAX_ELEMENTS;

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("arange", arange),
    ("empty", |c| filled(c, Some(0.0))),
    ("empty_like", |c| like(c, Some(0.0))),
    ("eye", eye),
    ("fill", |c| like(c, None)),
    ("full", |c| filled(c, None)),
    ("full_like", |c| like(c, None)),
    ("linspace", linspace),
    ("new_empty", |c| filled(c, Some(0.0))),
    ("new_full", |c| filled(c, None)),
    ("new_ones", |c| filled(c, Some(1.0))),
    ("new_zeros", |c| filled(c, Some(0.0))),
    ("ones", |c| filled(c, Some(1.0))),
    ("ones_like", |c| like(c, Some(1.0))),
    ("scalar_tensor", |c| {
        let n = number(c, "s")?;
        let dtype = c.dtype("dtype")?.unwrap_or(F32);
        let y = c.scalar_as(&n, dtype);
        one(y)
    }),
    ("zero", |c| like(c, Some(0.0))),
    ("zeros", |c| filled(c, Some(0.0))),
    ("zeros_like", |c| like(c, Some(0.0))),
];

fn number(c: &Call<'_>, name: &str) -> Result<Scalar, Fault> {
    c.scalar(name)?.ok_or_else(|| Fault::Damaged(format!("no `{name}`")))
}

/// A tensor of sizes, filled with the value or with the argument of the call.
fn filled(c: &mut Call<'_>, value: Option<f64>) -> Outcome {
    let sizes = c.sizes("size")?.unwrap_or_default();
    let own = match c.argument("self") {
        Some(_) => Some(c.tensor("self")?.dtype),
        None => None,
    };
    spread(c, &sizes, own, value)
}

/// A tensor of the sizes of another.
fn like(c: &mut Call<'_>, value: Option<f64>) -> Outcome {
    let x = c.tensor("self")?;
    let sizes = c.shape(&x);
    spread(c, &sizes, Some(x.dtype), value)
}

fn spread(c: &mut Call<'_>, sizes: &[Int], own: Option<Dtype>, value: Option<f64>) -> Outcome {
    let given = c.dtype("dtype")?;
    if let Some(value) = value {
        return one(c.full(sizes, given.or(own).unwrap_or(F32), value));
    }
    let name = if c.argument("value").is_some() { "value" } else { "fill_value" };
    let value = c.operand(name)?;
    let default = own.unwrap_or_else(|| value.weighted().0);
    let value = c.operand_as(&value, given.unwrap_or(default));
    if sizes.is_empty() {
        return one(value);
    }
    let shape = c.size_list(sizes);
    one(c.add("Expand", &[&value, &shape]))
}

fn arange(c: &mut Call<'_>) -> Outcome {
    let zero = Scalar::Int(0);
    let start = c.scalar("start")?.unwrap_or(zero);
    let (end, step) = (number(c, "end")?, c.scalar("step")?.unwrap_or(Scalar::Int(1)));
    let all = [start, end, step];
    let floats = all.iter().any(|n| is_float(n.dtype()));
    let dtype = c.dtype("dtype")?.unwrap_or(if floats { F32 } else { I64 });
    if let (true, [Some(start), Some(end), Some(step)]) = (floats, all.clone().map(|n| n.value())) {
        // Counted in 64 bits, as PyTorch does.
        let count = ((end - start) / step).ceil();
        if !(count >= 0.0 && count < MAX_ELEMENTS as f64) {
            return Err(Fault::Damaged(format!("{start} to {end} by {step}")));
        }
        let places = [0, count as i64, 1].map(|n| c.integer(n));
        let places = c.add("Range", &[&places[0], &places[1], &places[2]]);
        let counted = if is_float(dtype) { dtype } else { F32 };
        let places = c.cast(&places, I64, counted);
        let (step, start) = (c.number(counted, step), c.number(counted, start));
        let y = c.add("Mul", &[&places, &step]);
        let y = c.add("Add", &[&y, &start]);
        let y = c.cast(&y, counted, dtype);
        return one(y);
    }
    // Counted as the numbers are written, then converted.
    let counted = if floats { F32 } else { I64 };
    let [start, end, step] = all.map(|n| c.scalar_as(&n, counted));
    let y = c.add("Range", &[&start, &end, &step]);
    let y = c.cast(&y, counted, dtype);
    one(y)
}

fn eye(c: &mut Call<'_>) -> Outcome {
    let n = c.int("n", 0)?;
    let m = c.int("m", n)?;
    let dtype = c.dtype("dtype")?.unwrap_or(F32);
    let x = c.full(&[Int::Known(n), Int::Known(m)], F32, 0.0);
    let y = c.with("EyeLike", &[&x], vec![]);
    let y = c.cast(&y, F32, dtype);
    one(y)
}

/// Numbers from `start` to `end`, each a tensor without axes or a number. PyTorch has no gradient of them.
fn linspace(c: &mut Call<'_>) -> Outcome {
    let (start, end, steps) = (c.operand("start")?, c.operand("end")?, c.int("steps", 1)?);
    let dtype = c.dtype("dtype")?.unwrap_or(F32);
    if !is_float(dtype) || dtype == BOOL {
        return unsupported("integers");
    }
    let (start, end) = (c.operand_as(&start, dtype), c.operand_as(&end, dtype));
    let places = [0, steps, 1].map(|n| c.integer(n));
    let places = c.add("Range", &[&places[0], &places[1], &places[2]]);
    let places = c.with("Cast", &[&places], vec![int("to", dtype.into())]);
    let share = c.number(dtype, if steps > 1 { 1.0 / (steps - 1) as f64 } else { 0.0 });
    let way = c.add("Sub", &[&end, &start]);
    let step = c.add("Mul", &[&way, &share]);
    let y = c.add("Mul", &[&places, &step]);
    let y = c.add("Add", &[&y, &start]);
    one(detached(c, &y))
}
