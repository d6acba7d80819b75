//! Matrix products.

use super::super::call::{Call, Outcome, int, text};
use super::pointwise::scaled;
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("addbmm", |c| added(c, ["batch1", "batch2"])),
    ("addmm", |c| added(c, ["mat1", "mat2"])),
    ("addmv", |c| added(c, ["mat", "vec"])),
    ("baddbmm", |c| added(c, ["batch1", "batch2"])),
    ("bmm", |c| product(c, ["self", "mat2"])),
    ("dot", |c| product(c, ["self", "tensor"])),
    ("einsum", einsum),
    ("linear", linear),
    ("matmul", |c| product(c, ["self", "other"])),
    ("mm", |c| product(c, ["self", "mat2"])),
    ("mv", |c| product(c, ["self", "vec"])),
    ("outer", outer),
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
