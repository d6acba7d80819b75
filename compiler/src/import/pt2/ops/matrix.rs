//! Matrix products.

use super::super::call::{Call, Fault, Outcome, int, text, unsupported};
use super::super::translate::{Int, Tensor};
use super::pointwise::scaled;
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("addbmm", |c| added(c, ["batch1", "batch2"])),
    ("addmm", |c| added(c, ["mat1", "mat2"])),
    ("addmv", |c| added(c, ["mat", "vec"])),
    ("addr", |c| {
        let (x, a, b) = (c.tensor("self")?, c.tensor("vec1")?, c.tensor("vec2")?);
        let column = c.unsqueeze(&a.name, &[1]);
        let y = c.add("Mul", &[&column, &b.name]);
        let y = scaled(c, &y, a.dtype, "alpha")?;
        let x = scaled(c, &x.name, x.dtype, "beta")?;
        one(c.add("Add", &[&y, &x]))
    }),
    ("baddbmm", |c| added(c, ["batch1", "batch2"])),
    ("bilinear", bilinear),
    ("bmm", |c| product(c, ["self", "mat2"])),
    ("chain_matmul", |c| chain(c, "matrices")),
    ("cross", cross),
    ("dot", |c| product(c, ["self", "tensor"])),
    ("einsum", einsum),
    ("inner", inner),
    ("linalg_cross", cross),
    ("linalg_matrix_power", |c| {
        let (x, n) =
            (c.tensor(if c.argument("A").is_some() { "A" } else { "self" })?, c.int("n", 1)?);
        if !(1..=64).contains(&n) {
            return unsupported(format!("the power {n}"));
        }
        one((1..n).fold(x.name.clone(), |y, _| c.add("MatMul", &[&y, &x.name])))
    }),
    ("linalg_multi_dot", |c| chain(c, "tensors")),
    ("linalg_vecdot", |c| {
        let (a, b) = (c.tensor("x")?, c.tensor("y")?);
        let rank = a.dims.len().max(b.dims.len());
        let axis = c.axis(c.int("dim", -1)?, rank)? as i64 - rank as i64;
        let y = c.add("Mul", &[&a.name, &b.name]);
        one(c.reduce("ReduceSum", &y, &[axis], false))
    }),
    ("linear", linear),
    ("matmul", |c| product(c, ["self", "other"])),
    ("mm", |c| product(c, ["self", "mat2"])),
    ("mv", |c| product(c, ["self", "vec"])),
    ("outer", outer),
    ("tensordot", tensordot),
    ("vdot", |c| product(c, ["self", "other"])),
];

fn product(c: &mut Call<'_>, names: [&str; 2]) -> Outcome {
    let (a, b) = (c.tensor(names[0])?, c.tensor(names[1])?);
    one(c.add("MatMul", &[&a.name, &b.name]))
}

/// `beta · self + alpha · (a b)`
fn added(c: &mut Call<'_>, names: [&str; 2]) -> Outcome {
    let (x, a, b) = (c.tensor("self")?, c.tensor(names[0])?, c.tensor(names[1])?);
    let mut y = c.add("MatMul", &[&a.name, &b.name]);
    if c.op == "addbmm" {
        y = c.reduce("ReduceSum", &y, &[0], false);
    }
    let y = scaled(c, &y, a.dtype, "alpha")?;
    if c.float("beta", 1.0)? == 0.0 {
        return one(y);
    }
    let x = scaled(c, &x.name, x.dtype, "beta")?;
    one(c.add("Add", &[&y, &x]))
}

/// `x wᵀ + b`
fn linear(c: &mut Call<'_>) -> Outcome {
    let (x, w, b) = (c.tensor("input")?, c.tensor("weight")?, c.optional("bias")?);
    if x.dims.len() == 2 && w.dims.len() == 2 {
        let mut inputs = vec![x.name.as_str(), &w.name];
        inputs.extend(b.as_ref().map(|b| b.name.as_str()));
        return one(c.with("Gemm", &inputs, vec![int("transB", 1)]));
    }
    let turned = if w.dims.len() == 2 { c.transpose(&w.name, &[1, 0]) } else { w.name };
    let y = c.add("MatMul", &[&x.name, &turned]);
    one(match b {
        Some(b) => c.add("Add", &[&y, &b.name]),
        None => y,
    })
}

fn outer(c: &mut Call<'_>) -> Outcome {
    let (a, b) = (c.tensor("self")?, c.tensor("vec2")?);
    let column = c.unsqueeze(&a.name, &[1]);
    one(c.add("Mul", &[&column, &b.name]))
}

fn einsum(c: &mut Call<'_>) -> Outcome {
    let operands = c.tensors("tensors")?;
    let names: Vec<&str> = operands.iter().map(|t| t.name.as_str()).collect();
    let equation = c.text("equation", "")?;
    one(c.with("Einsum", &names, vec![text("equation", &equation)]))
}

/// `x₁ᵀ W x₂ + b` for each of the matrices `W`.
fn bilinear(c: &mut Call<'_>) -> Outcome {
    let (a, b, w) = (c.tensor("input1")?, c.tensor("input2")?, c.tensor("weight")?);
    let y = c.with(
        "Einsum",
        &[&a.name, &w.name, &b.name],
        vec![text("equation", "...i,oij,...j->...o")],
    );
    one(match c.optional("bias")? {
        Some(bias) => c.add("Add", &[&y, &bias.name]),
        None => y,
    })
}

/// Matrices, the first and last of which may be vectors, multiplied in their order.
fn chain(c: &mut Call<'_>, name: &str) -> Outcome {
    let list = c.tensors(name)?;
    let Some((first, rest)) = list.split_first() else {
        return Err(Fault::Damaged("no matrices".into()));
    };
    one(rest.iter().fold(first.name.clone(), |y, m| c.add("MatMul", &[&y, &m.name])))
}

/// Products over the last axis of both.
fn inner(c: &mut Call<'_>) -> Outcome {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    if a.dims.is_empty() || b.dims.is_empty() {
        return one(c.add("Mul", &[&a.name, &b.name]));
    }
    let last = |t: &Tensor| t.dims.len() as i64 - 1;
    let axes = (vec![last(&a)], vec![last(&b)]);
    contracted(c, &a, &b, axes)
}

fn tensordot(c: &mut Call<'_>) -> Outcome {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let own = c.axes("dims_self", a.dims.len())?.unwrap_or_default();
    let other = c.axes("dims_other", b.dims.len())?.unwrap_or_default();
    contracted(c, &a, &b, (own, other))
}

/// Sums of products over pairs of axes; then the other axes of the first, and those of the second.
fn contracted(
    c: &mut Call<'_>,
    a: &Tensor,
    b: &Tensor,
    (own, other): (Vec<i64>, Vec<i64>),
) -> Outcome {
    if own.len() != other.len() {
        return Err(Fault::Damaged(format!("{} axes and {}", own.len(), other.len())));
    }
    let rest = |rank: usize, axes: &[i64]| -> Vec<usize> {
        (0..rank).filter(|i| !axes.contains(&(*i as i64))).collect()
    };
    let (free_a, free_b) = (rest(a.dims.len(), &own), rest(b.dims.len(), &other));
    let axes = |list: &[i64]| -> Vec<usize> { list.iter().map(|i| *i as usize).collect() };
    let (own, other) = (axes(&own), axes(&other));
    let mut sizes: Vec<Int> = free_a.iter().map(|i| c.size_of(a, *i)).collect();
    sizes.extend(free_b.iter().map(|i| c.size_of(b, *i)));
    let mut shared = Some(1);
    for i in &own {
        shared = shared.zip(a.dims[*i]).map(|(n, m): (i64, i64)| n.saturating_mul(m));
    }
    let Some(shared) = shared else { return unsupported("sums over an axis of dynamic size") };
    let left = c.transpose(&a.name, &[&free_a[..], &own].concat());
    let right = c.transpose(&b.name, &[&other[..], &free_b].concat());
    let left = c.reshape(&left, &[Int::Known(-1), Int::Known(shared)]);
    let right = c.reshape(&right, &[Int::Known(shared), Int::Known(-1)]);
    let y = c.add("MatMul", &[&left, &right]);
    one(c.reshape(&y, &sizes))
}

/// The vector product along an axis of three.
fn cross(c: &mut Call<'_>) -> Outcome {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let rank = a.dims.len().max(b.dims.len());
    let axis = match c.int_given("dim")? {
        Some(axis) => c.axis(axis.known().unwrap_or(-1), rank)?,
        None if c.op == "linalg_cross" => c.axis(-1, rank)?,
        None => match a.dims.iter().position(|n| *n == Some(3)) {
            Some(axis) => axis,
            None => return Err(Fault::Damaged("no axis of three".into())),
        },
    };
    let axis = axis as i64 - rank as i64;
    let (next, last) = (c.list(&[1, 2, 0]), c.list(&[2, 0, 1]));
    let turned =
        |c: &mut Call<'_>, x: &str, by: &str| c.with("Gather", &[x, by], vec![int("axis", axis)]);
    let (a1, b2) = (turned(c, &a.name, &next), turned(c, &b.name, &last));
    let (a2, b1) = (turned(c, &a.name, &last), turned(c, &b.name, &next));
    let (left, right) = (c.add("Mul", &[&a1, &b2]), c.add("Mul", &[&a2, &b1]));
    one(c.add("Sub", &[&left, &right]))
}
