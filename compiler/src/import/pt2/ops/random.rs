//! Operators that draw random numbers.

use super::super::call::{Call, Fault, Operand, Outcome, Scalar, float, int, unsupported};
use super::super::dtype::{BOOL, F32, I64};
use super::super::translate::Int;
use super::{Convert, detached, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("alpha_dropout", |c| alpha_dropout(c, false)),
    ("bernoulli", bernoulli),
    ("dropout", |c| dropout(c, "train")),
    ("feature_alpha_dropout", |c| alpha_dropout(c, true)),
    ("feature_dropout", feature_dropout),
    ("native_dropout", |c| dropout(c, "train")),
    ("normal", normal),
    ("rand", |c| {
        let sizes = c.sizes("size")?.unwrap_or_default();
        draw(c, &sizes, F32, "RandomUniformLike")
    }),
    ("rand_like", |c| like(c, "RandomUniformLike")),
    ("randint", |c| {
        let sizes = c.sizes("size")?.unwrap_or_default();
        whole(c, &sizes, I64)
    }),
    ("randint_like", |c| {
        let x = c.tensor("self")?;
        let sizes = c.shape(&x);
        whole(c, &sizes, x.dtype)
    }),
    ("randn", |c| {
        let sizes = c.sizes("size")?.unwrap_or_default();
        draw(c, &sizes, F32, "RandomNormalLike")
    }),
    ("randn_like", |c| like(c, "RandomNormalLike")),
];

/// The value with elements dropped, and which are kept.
pub(super) fn dropped(c: &mut Call<'_>, x: &str, ratio: f64) -> Vec<String> {
    let (ratio, train) = (c.number(F32, ratio), c.number(BOOL, 1.0));
    c.all("Dropout", &[x, &ratio, &train], vec![], 2)
}

fn dropout(c: &mut Call<'_>, train: &str) -> Outcome {
    let x = c.tensor("input")?;
    let ratio = c.float("p", 0.5)?;
    if !c.bool(train, true)? || ratio == 0.0 {
        return one(x.name);
    }
    Ok(dropped(c, &x.name, ratio))
}

/// Drops whole channels.
fn feature_dropout(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("input")?;
    let ratio = c.float("p", 0.5)?;
    if !c.bool("train", true)? || ratio == 0.0 {
        return one(x.name);
    }
    if x.dims.len() < 2 {
        return Err(Fault::Damaged(format!("an operand of rank {}", x.dims.len())));
    }
    let mut sizes = vec![c.size_of(&x, 0), c.size_of(&x, 1)];
    sizes.resize(x.dims.len(), Int::Known(1));
    let ones = c.full(&sizes, x.dtype, 1.0);
    let mask = dropped(c, &ones, ratio).remove(0);
    one(c.add("Mul", &[&x.name, &mask]))
}

/// Puts SELU's limit in the place of elements, or of whole channels, and keeps mean and variance.
fn alpha_dropout(c: &mut Call<'_>, channels: bool) -> Outcome {
    let x = c.tensor("input")?;
    let p = c.float("p", 0.5)?;
    if !c.bool("train", true)? || p == 0.0 {
        return one(x.name);
    }
    if !(0.0..1.0).contains(&p) {
        return unsupported(format!("the probability {p}"));
    }
    let mut sizes = c.shape(&x);
    if channels {
        sizes.iter_mut().skip(2).for_each(|size| *size = Int::Known(1));
    }
    // The negative limit of SELU. Source: Klambauer et al., 2017.
    const LIMIT: f64 = 1.758_099_340_847_376_6;
    let scale = 1.0 / ((LIMIT * LIMIT * p + 1.0) * (1.0 - p)).sqrt();
    let kept = c.full(&sizes, F32, 1.0 - p);
    let mask = c.with("Bernoulli", &[&kept], vec![int("dtype", BOOL.into())]);
    let (limit, scale, shift) =
        (c.number(x.dtype, -LIMIT), c.number(x.dtype, scale), c.number(x.dtype, LIMIT * scale * p));
    let y = c.add("Where", &[&mask, &x.name, &limit]);
    let y = c.add("Mul", &[&y, &scale]);
    one(c.add("Add", &[&y, &shift]))
}

fn draw(c: &mut Call<'_>, sizes: &[Int], default: i32, f: &str) -> Outcome {
    let dtype = c.dtype("dtype")?.unwrap_or(default);
    let shape = c.full(sizes, dtype, 0.0);
    one(c.with(f, &[&shape], vec![int("dtype", dtype.into())]))
}

fn like(c: &mut Call<'_>, f: &str) -> Outcome {
    let x = c.tensor("self")?;
    let sizes = c.shape(&x);
    draw(c, &sizes, x.dtype, f)
}

/// Whole numbers from `low`, below `high`.
fn whole(c: &mut Call<'_>, sizes: &[Int], default: i32) -> Outcome {
    let (low, high) = (c.int("low", 0)?, c.int("high", 1)?);
    let dtype = c.dtype("dtype")?.unwrap_or(default);
    let shape = c.full(sizes, F32, 0.0);
    let range = vec![float("low", low as f64), float("high", high as f64)];
    let y = c.with("RandomUniformLike", &[&shape], range);
    let y = c.add("Floor", &[&y]);
    one(c.cast(&y, F32, dtype))
}

/// Normal numbers with means and deviations, each a tensor or one number.
fn normal(c: &mut Call<'_>) -> Outcome {
    let (mean, std) = match c.overload {
        "float_float" => (c.scalar("mean")?, c.scalar("std")?),
        _ => (None, None),
    };
    if let (Some(mean), Some(std)) = (mean, std) {
        let sizes = c.sizes("size")?.unwrap_or_default();
        let (mean, std) = (mean.value().unwrap_or(0.0), std.value().unwrap_or(1.0));
        let dtype = c.dtype("dtype")?.unwrap_or(F32);
        let shape = c.full(&sizes, dtype, 0.0);
        return one(c.with(
            "RandomNormalLike",
            &[&shape],
            vec![float("mean", mean), float("scale", std)],
        ));
    }
    let of = |c: &mut Call<'_>, name: &str, default: f64| match c.argument(name) {
        Some(_) => c.operand(name),
        None => Ok(Operand::Number(Scalar::Float(default))),
    };
    let (mean, std) = (of(c, "mean", 0.0)?, of(c, "std", 1.0)?);
    let (mean, std) = (c.operand_as(&mean, F32), c.operand_as(&std, F32));
    let shape = c.add("Add", &[&mean, &std]);
    let y = c.with("RandomNormalLike", &[&shape], vec![]);
    let y = c.add("Mul", &[&y, &std]);
    let y = c.add("Add", &[&y, &mean]);
    // PyTorch has no gradient of what is drawn.
    one(detached(c, &y))
}

/// Ones with the probabilities of the operand, or with one probability.
fn bernoulli(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let Some(p) = c.float_given("p")? else {
        return one(c.with("Bernoulli", &[&x.name], vec![]));
    };
    if !(0.0..=1.0).contains(&p) {
        return unsupported(format!("the probability {p}"));
    }
    let sizes = c.shape(&x);
    let p = c.full(&sizes, F32, p);
    let attributes = vec![int("dtype", x.dtype.into())];
    one(c.with("Bernoulli", &[&p], attributes))
}
