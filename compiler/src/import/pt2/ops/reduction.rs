//! Reductions over axes, running sums, softmax, orders.

use super::super::call::{Call, Fault, Outcome, int, numel, unsupported};
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
    ("aminmax", |c| {
        let x = c.tensor("self")?;
        let least = reduced(c, "ReduceMin", &x, false)?;
        let most = reduced(c, "ReduceMax", &x, false)?;
        Ok(vec![least, most])
    }),
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
    ("cummax", |c| running_extreme(c, "ArgMax", f64::NEG_INFINITY)),
    ("cummin", |c| running_extreme(c, "ArgMin", f64::INFINITY)),
    ("cumprod", |c| running(c, "CumProd")),
    ("cumsum", |c| running(c, "CumSum")),
    ("kthvalue", |c| {
        let x = c.tensor("self")?;
        let (axis, k) = (c.axis(c.int("dim", -1)?, x.dims.len())?, c.int("k", 1)?);
        ordered(c, &x, axis, k)
    }),
    ("linalg_vector_norm", |c| norm(c, "ord")),
    ("log_softmax", |c| softmax(c, "LogSoftmax")),
    ("logsumexp", |c| {
        let x = c.tensor("self")?;
        let (name, dtype) = c.as_float(&x);
        let y = reduced(c, "ReduceLogSumExp", &Tensor { name, dtype, ..x }, false)?;
        one(y)
    }),
    ("max", |c| best(c, ["Max", "ReduceMax", "ArgMax"])),
    ("mean", |c| {
        let x = typed(c, true)?;
        let y = reduced(c, "ReduceMean", &x, false)?;
        one(y)
    }),
    ("median", median),
    ("min", |c| best(c, ["Min", "ReduceMin", "ArgMin"])),
    ("msort", |c| {
        let mut sorted = sort_along(c, 0, false)?;
        Ok(vec![sorted.remove(0)])
    }),
    ("nanmean", |c| without_nan(c, true)),
    ("nansum", |c| without_nan(c, false)),
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

/// A reduction over the axes of the call, or over all. Booleans are counted.
fn reduced(c: &mut Call<'_>, f: &str, x: &Tensor, keep: bool) -> Result<String, Fault> {
    let (axes, keep) = (axes(c, x)?, c.bool("keepdim", keep)?);
    let name = if x.dtype == BOOL { c.cast(&x.name, BOOL, I64) } else { x.name.clone() };
    // A tensor without axes has one to reduce.
    let axes = if x.dims.is_empty() { vec![] } else { axes };
    Ok(c.reduce(f, &name, &axes, keep))
}

fn extreme(c: &mut Call<'_>, f: &str) -> Outcome {
    let x = c.tensor("self")?;
    let y = reduced(c, f, &x, false)?;
    one(if x.dtype == BOOL { c.cast(&y, I64, BOOL) } else { y })
}

fn logical(c: &mut Call<'_>, f: &str) -> Outcome {
    let x = c.tensor("self")?;
    let name = c.cast(&x.name, x.dtype, BOOL);
    let y = reduced(c, f, &Tensor { name, dtype: BOOL, ..x }, false)?;
    one(c.cast(&y, I64, BOOL))
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
    if x.dims.is_empty() {
        return one(c.integer(0));
    }
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
    if x.dims.is_empty() {
        let first = c.integer(0);
        return Ok(if c.argument("dim").is_some() { vec![x.name, first] } else { vec![x.name] });
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
    let (axes, keep) = (axes(c, &x)?, c.bool("keepdim", false)?);
    let axes = if x.dims.is_empty() { vec![] } else { axes };
    let y = norm_of(c, &x, order, &axes, keep);
    one(y)
}

/// The norm over axes, or over all; of all orders, 0 and infinity among them.
pub(super) fn norm_of(
    c: &mut Call<'_>,
    x: &Tensor,
    order: f64,
    axes: &[i64],
    keep: bool,
) -> String {
    if order == 1.0 || order == 2.0 {
        return c.reduce(if order == 1.0 { "ReduceL1" } else { "ReduceL2" }, &x.name, axes, keep);
    }
    let size = c.add("Abs", &[&x.name]);
    if order.is_infinite() {
        let f = if order > 0.0 { "ReduceMax" } else { "ReduceMin" };
        return c.reduce(f, &size, axes, keep);
    }
    let (zero, more) = (c.number(x.dtype, 0.0), c.number(x.dtype, 1.0));
    let is_zero = c.add("Equal", &[&size, &zero]);
    if order == 0.0 {
        let counted = c.add("Where", &[&is_zero, &zero, &more]);
        return c.reduce("ReduceSum", &counted, axes, keep);
    }
    // Powers of zero have no gradient that is finite.
    let is_negative = order < 0.0;
    let [order, root] = [order, 1.0 / order].map(|n| c.number(x.dtype, n));
    let safe = c.add("Where", &[&is_zero, &more, &size]);
    let power = c.add("Pow", &[&safe, &order]);
    let power = c.add("Where", &[&is_zero, &zero, &power]);
    let sum = c.reduce("ReduceSum", &power, axes, keep);
    let is_zero = c.add("Equal", &[&sum, &zero]);
    let safe = c.add("Where", &[&is_zero, &more, &sum]);
    let y = c.add("Pow", &[&safe, &root]);
    let y = c.add("Where", &[&is_zero, &zero, &y]);
    if !is_negative {
        return y;
    }
    // A zero among them is an infinite power.
    let least = c.reduce("ReduceMin", &size, axes, keep);
    let some = c.add("Greater", &[&least, &zero]);
    c.add("Where", &[&some, &y, &zero])
}

/// The sum, or mean, of what is a number.
fn without_nan(c: &mut Call<'_>, is_mean: bool) -> Outcome {
    let x = typed(c, is_mean)?;
    if !is_float(x.dtype) {
        let y = reduced(c, "ReduceSum", &x, false)?;
        return one(y);
    }
    let (none, zero) = (c.add("IsNaN", &[&x.name]), c.number(x.dtype, 0.0));
    let name = c.add("Where", &[&none, &zero, &x.name]);
    let sum = reduced(c, "ReduceSum", &Tensor { name, ..x.clone() }, false)?;
    if !is_mean {
        return one(sum);
    }
    let kept = c.add("Not", &[&none]);
    let name = c.cast(&kept, BOOL, x.dtype);
    let count = reduced(c, "ReduceSum", &Tensor { name, ..x }, false)?;
    one(c.add("Div", &[&sum, &count]))
}

/// The largest, or smallest, element up to each place of an axis, and where the last of them is.
fn running_extreme(c: &mut Call<'_>, f: &str, excluded: f64) -> Outcome {
    let x = c.tensor("self")?;
    let rank = x.dims.len();
    if rank == 0 {
        let first = c.integer(0);
        return Ok(vec![x.name, first]);
    }
    let axis = c.axis(c.int("dim", 0)?, rank)?;
    let size = c.size_of(&x, axis);
    let (zero, end, step) = (c.integer(0), c.size_scalar(&size), c.integer(1));
    let places = c.add("Range", &[&zero, &end, &step]);
    // Lines as `[…, place, element]`, without the elements behind each place.
    let (columns, rows) = (c.unsqueeze(&places, &[0]), c.unsqueeze(&places, &[1]));
    let seen = c.add("LessOrEqual", &[&columns, &rows]);
    let last: Vec<usize> = (0..rank).filter(|a| *a != axis).chain([axis]).collect();
    let lines = c.transpose(&x.name, &last);
    let lines = c.unsqueeze(&lines, &[rank as i64 - 1]);
    let excluded = c.number(x.dtype, excluded);
    let lines = c.add("Where", &[&seen, &lines, &excluded]);
    let attributes = vec![int("axis", -1), int("keepdims", 0), int("select_last_index", 1)];
    let index = c.with(f, &[&lines], attributes);
    let back: Vec<usize> =
        (0..rank).map(|a| last.iter().position(|l| *l == a).unwrap_or(a)).collect();
    let index = c.transpose(&index, &back);
    let y = c.with("GatherElements", &[&x.name, &index], vec![int("axis", axis as i64)]);
    Ok(vec![y, index])
}

/// The product of two directions, each at least as long as `eps`.
fn cosine(c: &mut Call<'_>) -> Outcome {
    let (x, y) = (c.tensor("x1")?, c.tensor("x2")?);
    let rank = x.dims.len().max(y.dims.len());
    let axis = c.axis(c.int("dim", 1)?, rank)? as i64 - rank as i64;
    let eps = c.float("eps", 1e-8)?;
    let y = cosine_of(c, &x, &y, eps, if rank == 0 { &[] } else { std::slice::from_ref(&axis) });
    one(y)
}

/// The product, over axes, of two directions.
fn cosine_of(c: &mut Call<'_>, x: &Tensor, y: &Tensor, eps: f64, axes: &[i64]) -> String {
    let eps = c.number(x.dtype, eps);
    let (mut x_name, mut y_name) = (x.name.clone(), y.name.clone());
    if x.dims != y.dims {
        // Lengths are those in the common shape.
        let shape = c.add("Shape", &[&y_name]);
        x_name = c.add("Expand", &[&x_name, &shape]);
        let shape = c.add("Shape", &[&x_name]);
        y_name = c.add("Expand", &[&y_name, &shape]);
    }
    let mut direction = |x: &str| {
        let length = c.reduce("ReduceL2", x, axes, true);
        let length = c.add("Max", &[&length, &eps]);
        c.add("Div", &[x, &length])
    };
    let (x, y) = (direction(&x_name), direction(&y_name));
    let products = c.add("Mul", &[&x, &y]);
    c.reduce("ReduceSum", &products, axes, false)
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
        // Its gradient is 0 where it is, as PyTorch defines it.
        let (zero, more) = (c.number(dtype, 0.0), c.number(dtype, 1.0));
        let is_zero = c.add("Equal", &[&y, &zero]);
        let safe = c.add("Where", &[&is_zero, &more, &y]);
        let deviation = c.add("Sqrt", &[&safe]);
        y = c.add("Where", &[&is_zero, &zero, &deviation]);
    }
    if !with_mean {
        return one(y);
    }
    let mean = if keep { mean } else { c.reduce("ReduceMean", &name, &axes, false) };
    Ok(vec![y, mean])
}

fn topk(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    if x.dims.is_empty() {
        let first = c.integer(0);
        return Ok(vec![x.name, first]);
    }
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
    let rank = c.tensor("self")?.dims.len();
    let axis = c.axis(c.int("dim", -1)?, rank)?;
    let descending = c.bool("descending", false)?;
    sort_along(c, axis, descending)
}

fn sort_along(c: &mut Call<'_>, axis: usize, descending: bool) -> Outcome {
    let x = c.tensor("self")?;
    if x.dims.is_empty() {
        let first = c.integer(0);
        return Ok(vec![x.name, first]);
    }
    let k = c.size_of(&x, axis);
    let k = c.size_list(&[k]);
    let attributes =
        vec![int("axis", axis as i64), int("largest", descending.into()), int("sorted", 1)];
    Ok(c.all("TopK", &[&x.name, &k], attributes, 2))
}

/// The `k`-th smallest element of an axis, counted from 1, and where it is.
fn ordered(c: &mut Call<'_>, x: &Tensor, axis: usize, k: i64) -> Outcome {
    if x.dims.is_empty() {
        let first = c.integer(0);
        return Ok(vec![x.name.clone(), first]);
    }
    let smallest = c.list(&[k]);
    let order = vec![int("axis", axis as i64), int("largest", 0), int("sorted", 1)];
    let all = c.all("TopK", &[&x.name, &smallest], order, 2);
    let keep = c.bool("keepdim", false)?;
    let place = k.saturating_sub(1);
    let last = if keep { c.list(&[place]) } else { c.integer(place) };
    let pick = |y: &String| c.with("Gather", &[y, &last], vec![int("axis", axis as i64)]);
    Ok(all.iter().map(pick).collect())
}

/// The middle element, the lower of two; of an axis with its place.
fn median(c: &mut Call<'_>) -> Outcome {
    let mut x = c.tensor("self")?;
    let axis = match c.int_given("dim")? {
        Some(axis) => c.axis(axis.known().unwrap_or(0), x.dims.len())?,
        None => {
            let size = numel(&x.dims);
            x = Tensor { name: c.reshape(&x.name, &[Int::Known(-1)]), dims: vec![size], ..x };
            0
        }
    };
    let Some(size) = x.dims.get(axis).copied().unwrap_or(Some(1)) else {
        return unsupported("the median of a dynamic size");
    };
    let mut all = ordered(c, &x, axis, size / 2 + size % 2)?;
    if c.argument("dim").is_none() {
        all.truncate(1);
    }
    Ok(all)
}
