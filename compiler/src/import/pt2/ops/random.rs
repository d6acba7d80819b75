//! Operators that draw random numbers.

use super::super::call::{Call, Fault, Outcome, int, unsupported};
use super::super::dtype::{BOOL, F32};
use super::super::translate::Int;
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("bernoulli", bernoulli),
    ("dropout", |c| dropout(c, "train")),
    ("feature_dropout", feature_dropout),
    ("native_dropout", |c| dropout(c, "train")),
    ("rand", |c| {
        let sizes = c.sizes("size")?.unwrap_or_default();
        draw(c, &sizes, F32, "RandomUniformLike")
    }),
    ("rand_like", |c| like(c, "RandomUniformLike")),
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
