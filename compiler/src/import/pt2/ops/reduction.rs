//! Reductions over axes, running sums, softmax, orders.

use super::super::call::{Call, Fault, Outcome, int, unsupported};
use super::super::dtype::{BOOL, Dtype, F32, I64, is_float};
use super::super::symbols::{self, Function};
use super::super::translate::{Int, Tensor};
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("_log_softmax", |c| softmax(c, "LogSoftmax")),
    ("_safe_softmax", |c| softmax(c, "Softmax")),
    ("_softmax", |c| softmax(c, "Softmax")),
    ("all", |c| logical(c, "ReduceMin")),
    ("amax", |c| extreme(c, "ReduceMax")),
    ("amin", |c| extreme(c, "ReduceMin")),
    ("any", |c| logical(c, "ReduceMax")),
    ("argmax", |c| place(c, "ArgMax")),
    ("argmin", |c| place(c, "ArgMin")),
    ("argsort", |c| {
        let mut sorted = sort(c)?;
        Ok(vec![sorted.remove(1)])
    }),
    ("cosine_similarity", cosine),
    ("count_nonzero", |c| {
        let x = c.tensor("self")?;
        let x = Tensor { name: c.cast(&x.name, x.dtype, BOOL), dtype: BOOL, ..x };
        let y = reduced(c, "ReduceSum", &x, false)?;
        one(y)
    }),
    ("cumprod", |c| running(c, "CumProd")),
    ("cumsum", |c| running(c, "CumSum")),
    ("linalg_vector_norm", |c| norm(c, "ord")),
    ("log_softmax", |c| softmax(c, "LogSoftmax")),
    ("logsumexp", |c| {
        let x = c.tensor("self")?;
        let axes = c.axes("dim", x.dims.len())?.unwrap_or_default();
        let keep = c.bool("keepdim", false)?;
        let (x, _) = c.as_float(&x);
        one(c.reduce("ReduceLogSumExp", &x, &axes, keep))
    }),
    ("max", |c| best(c, ["Max", "ReduceMax", "ArgMax"])),
    ("mean", |c| {
        let x = typed(c, true)?;
        let y = reduced(c, "ReduceMean", &x, false)?;
        one(y)
    }),
    ("min", |c| best(c, ["Min", "ReduceMin", "ArgMin"])),
    ("norm", |c| norm(c, "p")),
    ("prod", |c| {
        let x = typed(c, false)?;
        let y = reduced(c, "ReduceProd", &x, false)?;
        one(y)
    }),
    ("softmax", |c| softmax(c, "Softmax")),
    ("sort", sort),
    ("std", |c| variance(c, true, false)),
    ("std_mean", |c| variance(c, true, true)),
    ("sum", |c| {
        let x = typed(c, false)?;
        let y = reduced(c, "ReduceSum", &x, false)?;
        one(y)
    }),
    ("topk", topk),
    ("var", |c| variance(c, false, false)),
    ("var_mean", |c| variance(c, false, true)),
];

/// The operand in the type that the call computes in: the one that it names, floats if it must be, or 64 bits for integers.
fn typed(c: &mut Call<'_>, floats: bool) -> Result<Tensor, Fault> {
    let x = c.tensor("self")?;
    let default = match is_float(x.dtype) {
        true => x.dtype,
        false if floats => F32,
        false => I64,
    };
    let dtype = c.dtype("dtype")?.unwrap_or(default);
    Ok(Tensor { name: c.cast(&x.name, x.dtype, dtype), dtype, ..x })
}

fn axes(c: &Call<'_>, x: &Tensor) -> Result<Vec<i64>, Fault> {
    Ok(c.axes("dim", x.dims.len())?.unwrap_or_default())
}

/// A reduction over the axes of the call, or over all.
fn reduced(c: &mut Call<'_>, f: &str, x: &Tensor, keep: bool) -> Result<String, Fault> {
    let (axes, keep) = (axes(c, x)?, c.bool("keepdim", keep)?);
    if x.dims.is_empty() {
        return Ok(c.cast(&x.name, x.dtype, x.dtype));
    }
    let name = if x.dtype == BOOL { c.cast(&x.name, BOOL, I64) } else { x.name.clone() };
    Ok(c.reduce(f, &name, &axes, keep))
}

fn extreme(c: &mut Call<'_>, f: &str) -> Outcome {
    let x = c.tensor("self")?;
    let y = reduced(c, f, &x, false)?;
    let y = if x.dtype == BOOL && !x.dims.is_empty() { c.cast(&y, I64, BOOL) } else { y };
    one(y)
}

fn logical(c: &mut Call<'_>, f: &str) -> Outcome {
    let x = c.tensor("self")?;
    let name = c.cast(&x.name, x.dtype, BOOL);
    let x = Tensor { name: c.cast(&name, BOOL, I64), dtype: I64, ..x };
    let y = reduced(c, f, &x, false)?;
    let y = c.cast(&y, I64, BOOL);
    one(y)
}

fn softmax(c: &mut Call<'_>, f: &str) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", -1)?, x.dims.len())?;
    let dtype = match c.bool("half_to_float", false) {
        Ok(true) => F32,
        _ => c.dtype("dtype")?.unwrap_or(x.dtype),
    };
    let name = c.cast(&x.name, x.dtype, dtype);
    if c.op != "_safe_softmax" {
        return one(c.with(f, &[&name], vec![int("axis", axis as i64)]));
    }
    // A row that is masked as a whole gives zeros.
    let most = c.reduce("ReduceMax", &name, &[axis as i64], true);
    let least = c.number(dtype, f64::NEG_INFINITY);
    let blind = c.add("Equal", &[&most, &least]);
    let zero = c.number(dtype, 0.0);
    let safe = c.add("Where", &[&blind, &zero, &name]);
    let p = c.with(f, &[&safe], vec![int("axis", axis as i64)]);
    one(c.add("Where", &[&blind, &zero, &p]))
}

/// The place of the largest or smallest element.
fn place(c: &mut Call<'_>, f: &str) -> Outcome {
    let mut x = c.tensor("self")?;
    let keep = c.bool("keepdim", false)?;
    let axis = match c.int_given("dim")? {
        Some(Int::Known(axis)) => c.axis(axis, x.dims.len())?,
        _ => {
            let name = c.reshape(&x.name, &[Int::Known(-1)]);
            x = Tensor { name, dims: vec![None], ..x };
            0
        }
    };
    if x.dtype == BOOL {
        x.name = c.cast(&x.name, BOOL, I64);
    }
    let attributes = vec![int("axis", axis as i64), int("keepdims", keep.into())];
    one(c.with(f, &[&x.name], attributes))
}

/// The larger of two tensors, the largest element, or the largest along an axis with its place.
fn best(c: &mut Call<'_>, [of_two, of_all, which]: [&str; 3]) -> Outcome {
    let x = c.tensor("self")?;
    if c.argument("other").is_some() {
        let (a, b, _) = super::pointwise::operands(c, ["self", "other"])?;
        return one(c.add(of_two, &[&a, &b]));
    }
    let name = if x.dtype == BOOL { c.cast(&x.name, BOOL, I64) } else { x.name.clone() };
    let back =
        |c: &mut Call<'_>, y: String| if x.dtype == BOOL { c.cast(&y, I64, BOOL) } else { y };
    let Some(axis) = c.int_given("dim")? else {
        let y = c.reduce(of_all, &name, &[], false);
        return one(back(c, y));
    };
    let axis = c.axis(axis.known().unwrap_or(0), x.dims.len())? as i64;
    let keep = c.bool("keepdim", false)?;
    let y = c.reduce(of_all, &name, &[axis], keep);
    let y = back(c, y);
    let places = c.with(which, &[&name], vec![int("axis", axis), int("keepdims", keep.into())]);
    Ok(vec![y, places])
}

fn running(c: &mut Call<'_>, f: &str) -> Outcome {
    let x = typed(c, false)?;
    if x.dims.is_empty() {
        return one(x.name);
    }
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    let axis = c.integer(axis as i64);
    one(c.add(f, &[&x.name, &axis]))
}

fn norm(c: &mut Call<'_>, order: &str) -> Outcome {
    let order = c.float(order, 2.0)?;
    let x = c.tensor("self")?;
    let dtype = c.dtype("dtype")?.unwrap_or(x.dtype);
    let x = Tensor { name: c.cast(&x.name, x.dtype, dtype), dtype, ..x };
    let f = match order {
        1.0 => "ReduceL1",
        2.0 => "ReduceL2",
        f64::INFINITY => "ReduceMax",
        _ => return unsupported(format!("the norm of order {order}")),
    };
    let name = if order.is_infinite() { c.add("Abs", &[&x.name]) } else { x.name.clone() };
    let y = reduced(c, f, &Tensor { name, ..x }, false)?;
    one(y)
}

/// The product of two directions, each at least as long as `eps`.
fn cosine(c: &mut Call<'_>) -> Outcome {
    let (x, y) = (c.tensor("x1")?, c.tensor("x2")?);
    let axis = c.axis(c.int("dim", 1)?, x.dims.len())? as i64;
    let eps = c.number(x.dtype, c.float("eps", 1e-8)?);
    let mut direction = |x: &Tensor| {
        let length = c.reduce("ReduceL2", &x.name, &[axis], true);
        let length = c.add("Max", &[&length, &eps]);
        c.add("Div", &[&x.name, &length])
    };
    let (x, y) = (direction(&x), direction(&y));
    let products = c.add("Mul", &[&x, &y]);
    one(c.reduce("ReduceSum", &products, &[axis], false))
}

/// Elements of the axes that are reduced, as a number of the graph.
fn count(c: &mut Call<'_>, x: &Tensor, axes: &[i64], dtype: Dtype) -> Result<String, Fault> {
    let sizes = c.shape(x);
    let mut n = Int::Known(1);
    for (i, size) in sizes.iter().enumerate() {
        if axes.is_empty() || axes.contains(&(i as i64)) {
            n = symbols::of(c, Function::Mul, &n, size)?;
        }
    }
    let n = c.size_scalar(&n);
    Ok(c.cast(&n, I64, dtype))
}

/// The variance, or its root; with the mean if it is asked for.
fn variance(c: &mut Call<'_>, root: bool, with_mean: bool) -> Outcome {
    let x = c.tensor("self")?;
    let (axes, keep) = (axes(c, &x)?, c.bool("keepdim", false)?);
    let correction = match c.argument("unbiased") {
        Some(_) => f64::from(u8::from(c.bool("unbiased", true)?)),
        None => c.float("correction", 1.0)?,
    };
    let (name, dtype) = c.as_float(&x);
    let mean = c.reduce("ReduceMean", &name, &axes, true);
    let d = c.add("Sub", &[&name, &mean]);
    let d = c.add("Mul", &[&d, &d]);
    let mut y = if correction == 0.0 {
        c.reduce("ReduceMean", &d, &axes, keep)
    } else {
        let sum = c.reduce("ReduceSum", &d, &axes, keep);
        let n = count(c, &x, &axes, dtype)?;
        let correction = c.number(dtype, correction);
        let n = c.add("Sub", &[&n, &correction]);
        c.add("Div", &[&sum, &n])
    };
    if root {
        y = c.add("Sqrt", &[&y]);
    }
    if !with_mean {
        return one(y);
    }
    let mean = if keep { mean } else { c.reduce("ReduceMean", &name, &axes, false) };
    Ok(vec![y, mean])
}

fn topk(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", -1)?, x.dims.len())?;
    let k = c.int_given("k")?.unwrap_or(Int::Known(1));
    let k = c.size_list(&[k]);
    let flag = |b: bool| i64::from(b);
    let attributes = vec![
        int("axis", axis as i64),
        int("largest", flag(c.bool("largest", true)?)),
        int("sorted", flag(c.bool("sorted", true)?)),
    ];
    Ok(c.all("TopK", &[&x.name, &k], attributes, 2))
}

fn sort(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", -1)?, x.dims.len())?;
    let descending = c.bool("descending", false)?;
    let k = c.size_of(&x, axis);
    let k = c.size_list(&[k]);
    let attributes =
        vec![int("axis", axis as i64), int("largest", descending.into()), int("sorted", 1)];
    Ok(c.all("TopK", &[&x.name, &k], attributes, 2))
}
