//! Distances between points, and losses of distances.

use super::super::call::{Call, Fault, Outcome, unsupported};
use super::super::schema::Argument;
use super::super::translate::Tensor;
use super::loss::reduced;
use super::reduction::norm_of;
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("_cdist_forward", cdist),
    ("cdist", cdist),
    ("cosine_embedding_loss", cosine_embedding),
    ("dist", |c| {
        let (a, b) = (c.tensor("self")?, c.tensor("other")?);
        let y = c.add("Sub", &[&a.name, &b.name]);
        let order = c.float("p", 2.0)?;
        let y = norm_of(c, &Tensor { name: y, ..a }, order, &[], false);
        one(y)
    }),
    ("hinge_embedding_loss", |c| {
        let (x, y) = (c.tensor("self")?, c.tensor("target")?);
        let margin = c.float("margin", 1.0)?;
        let [zero, more, margin] = [0.0, 1.0, margin].map(|n| c.number(x.dtype, n));
        let away = c.add("Sub", &[&margin, &x.name]);
        let away = c.add("Clip", &[&away, &zero]);
        // A target of 1 or −1.
        let target = c.cast(&y.name, y.dtype, x.dtype);
        let is_near = c.add("Equal", &[&target, &more]);
        let losses = c.add("Where", &[&is_near, &x.name, &away]);
        reduced(c, losses)
    }),
    ("linalg_matrix_norm", matrix_norm),
    ("linalg_norm", |c| {
        let x = c.tensor("self")?;
        let axes = c.axes("dim", x.dims.len())?;
        let keep = c.bool("keepdim", false)?;
        let is_vector = axes.as_ref().map_or(x.dims.len() == 1, |axes| axes.len() == 1);
        if c.argument("ord").is_some() && !is_vector {
            return matrix_norm(c);
        }
        let order = c.float("ord", 2.0)?;
        let y = norm_of(c, &x, order, &axes.unwrap_or_default(), keep);
        one(y)
    }),
    ("margin_ranking_loss", |c| {
        let (a, b, y) = (c.tensor("input1")?, c.tensor("input2")?, c.tensor("target")?);
        let margin = c.float("margin", 0.0)?;
        let (zero, margin) = (c.number(a.dtype, 0.0), c.number(a.dtype, margin));
        let target = c.cast(&y.name, y.dtype, a.dtype);
        let away = c.add("Sub", &[&b.name, &a.name]);
        let losses = c.add("Mul", &[&target, &away]);
        let losses = c.add("Add", &[&losses, &margin]);
        let losses = c.add("Clip", &[&losses, &zero]);
        reduced(c, losses)
    }),
    ("pairwise_distance", |c| {
        let (a, b) = (c.tensor("x1")?, c.tensor("x2")?);
        let (order, eps) = (c.float("p", 2.0)?, c.float("eps", 1e-6)?);
        let keep = c.bool("keepdim", false)?;
        let y = pairwise(c, &a, &b.name, order, eps, keep);
        one(y)
    }),
    ("triplet_margin_loss", triplet),
];

/// The distance, over the last axis, of each point of the first set to each of the second.
fn cdist(c: &mut Call<'_>) -> Outcome {
    let (a, b) = (c.tensor("x1")?, c.tensor("x2")?);
    let order = c.float("p", 2.0)?;
    let (rows, columns) = (c.unsqueeze(&a.name, &[-2]), c.unsqueeze(&b.name, &[-3]));
    let y = c.add("Sub", &[&rows, &columns]);
    let y = norm_of(c, &Tensor { name: y, ..a }, order, &[-1], false);
    one(y)
}

/// Frobenius' norm of matrices, or the largest or smallest sum of a row or a column.
fn matrix_norm(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor(if c.argument("A").is_some() { "A" } else { "self" })?;
    let rank = x.dims.len();
    let axes = c.axes("dim", rank)?.unwrap_or_else(|| vec![rank as i64 - 2, rank as i64 - 1]);
    let [rows, columns] = axes[..] else {
        return Err(Fault::Damaged(format!("matrices of {} axes", axes.len())));
    };
    let keep = c.bool("keepdim", false)?;
    let (summed, is_largest) = match c.argument("ord") {
        None => return one(c.reduce("ReduceL2", &x.name, &axes, keep)),
        Some(Argument::AsString(word)) if word == "fro" => {
            return one(c.reduce("ReduceL2", &x.name, &axes, keep));
        }
        Some(Argument::AsString(word)) => return unsupported(format!("the norm \"{word}\"")),
        Some(_) => match c.float("ord", 1.0)? {
            order if order.abs() == 1.0 => (rows, order > 0.0),
            order if order.is_infinite() => (columns, order > 0.0),
            order => return unsupported(format!("the matrix norm of order {order}")),
        },
    };
    let sums = c.reduce("ReduceL1", &x.name, &[summed], true);
    let f = if is_largest { "ReduceMax" } else { "ReduceMin" };
    one(c.reduce(f, &sums, &axes, keep))
}

fn pairwise(c: &mut Call<'_>, a: &Tensor, b: &str, order: f64, eps: f64, keep: bool) -> String {
    let away = c.add("Sub", &[&a.name, b]);
    let eps = c.number(a.dtype, eps);
    let name = c.add("Add", &[&away, &eps]);
    norm_of(c, &Tensor { name, ..a.clone() }, order, &[-1], keep)
}

/// One minus the cosine of like pairs, and that above the margin of others.
fn cosine_embedding(c: &mut Call<'_>) -> Outcome {
    let (a, b, y) = (c.tensor("input1")?, c.tensor("input2")?, c.tensor("target")?);
    if a.dims.is_empty() {
        return Err(Fault::Damaged("vectors without an axis".into()));
    }
    let margin = c.float("margin", 0.0)?;
    let [zero, more, margin] = [0.0, 1.0, margin].map(|n| c.number(a.dtype, n));
    // x·y / √((|x|² + ε) (|y|² + ε))
    let eps = c.number(a.dtype, 1e-12);
    let squares = |c: &mut Call<'_>, x: &str, y: &str| {
        let products = c.add("Mul", &[x, y]);
        c.reduce("ReduceSum", &products, &[-1], false)
    };
    let product = squares(c, &a.name, &b.name);
    let (own, other) = (squares(c, &a.name, &a.name), squares(c, &b.name, &b.name));
    let (own, other) = (c.add("Add", &[&own, &eps]), c.add("Add", &[&other, &eps]));
    let size = c.add("Mul", &[&own, &other]);
    let size = c.add("Sqrt", &[&size]);
    let cosine = c.add("Div", &[&product, &size]);
    let target = c.cast(&y.name, y.dtype, a.dtype);
    let is_like = c.add("Equal", &[&target, &more]);
    let like = c.add("Sub", &[&more, &cosine]);
    let other = c.add("Sub", &[&cosine, &margin]);
    let other = c.add("Clip", &[&other, &zero]);
    let losses = c.add("Where", &[&is_like, &like, &other]);
    reduced(c, losses)
}

/// How much nearer than the margin the negative is than the positive.
fn triplet(c: &mut Call<'_>) -> Outcome {
    let (a, p, n) = (c.tensor("anchor")?, c.tensor("positive")?, c.tensor("negative")?);
    let (margin, order, eps) = (c.float("margin", 1.0)?, c.float("p", 2.0)?, c.float("eps", 1e-6)?);
    let near = pairwise(c, &a, &p.name, order, eps, false);
    let mut far = pairwise(c, &a, &n.name, order, eps, false);
    if c.bool("swap", false)? {
        let other = pairwise(c, &p, &n.name, order, eps, false);
        far = c.add("Min", &[&far, &other]);
    }
    let (zero, margin) = (c.number(a.dtype, 0.0), c.number(a.dtype, margin));
    let losses = c.add("Sub", &[&near, &far]);
    let losses = c.add("Add", &[&losses, &margin]);
    let losses = c.add("Clip", &[&losses, &zero]);
    reduced(c, losses)
}
