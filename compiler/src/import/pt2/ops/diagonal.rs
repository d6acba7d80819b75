//! Diagonals and triangles of matrices.

use super::super::call::{Call, Fault, MAX_PLACES, Outcome, int, numel, unsupported};
use super::super::dtype::{BOOL, F32, I64};
use super::super::translate::{Int, Tensor};
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("diag", |c| {
        let x = c.tensor("self")?;
        let offset = c.int("diagonal", 0)?;
        if x.dims.len() == 1 {
            embedded(c, &x, offset, [-2, -1])
        } else {
            taken(c, &x, offset, [0, 1])
        }
    }),
    ("diag_embed", |c| {
        let x = c.tensor("self")?;
        let axes = [c.int("dim1", -2)?, c.int("dim2", -1)?];
        embedded(c, &x, c.int("offset", 0)?, axes)
    }),
    ("diagflat", |c| {
        let x = c.tensor("self")?;
        let size = numel(&x.dims);
        let x = Tensor { name: c.reshape(&x.name, &[Int::Known(-1)]), dims: vec![size], ..x };
        embedded(c, &x, c.int("offset", 0)?, [-2, -1])
    }),
    ("diagonal", |c| diagonal(c, ["dim1", "dim2"], [0, 1])),
    ("diagonal_copy", |c| diagonal(c, ["dim1", "dim2"], [0, 1])),
    ("diagonal_scatter", replaced),
    ("linalg_diagonal", |c| diagonal(c, ["dim1", "dim2"], [-2, -1])),
    ("trace", |c| {
        let x = c.tensor("self")?;
        let y = taken(c, &x, 0, [0, 1])?;
        one(c.reduce("ReduceSum", &y[0], &[], false))
    }),
    ("tril", |c| triangle(c, 0)),
    ("triu", |c| triangle(c, 1)),
];

fn diagonal(c: &mut Call<'_>, names: [&str; 2], default: [i64; 2]) -> Outcome {
    let x = c.tensor(if c.op == "linalg_diagonal" { "A" } else { "self" })?;
    let axes = [c.int(names[0], default[0])?, c.int(names[1], default[1])?];
    taken(c, &x, c.int("offset", 0)?, axes)
}

/// A diagonal of a tensor, whose second coordinate is `offset` more than the first.
struct Diagonal {
    /// The tensor with the two axes in front.
    front: String,
    /// The axes in the order in which it has them.
    perm: Vec<usize>,
    /// Coordinates of its elements, `[length, 2]`.
    places: String,
}

fn diagonal_of(
    c: &mut Call<'_>,
    x: &Tensor,
    offset: i64,
    axes: [i64; 2],
) -> Result<Diagonal, Fault> {
    let rank = x.dims.len();
    let [rows, columns] = [c.axis(axes[0], rank)?, c.axis(axes[1], rank)?];
    if rows == columns {
        return Err(Fault::Damaged("the diagonal of one axis".into()));
    }
    let (Some(n), Some(m)) = (x.dims[rows], x.dims[columns]) else {
        return unsupported("the diagonal of an axis of dynamic size");
    };
    let (down, right) = (offset.saturating_neg().max(0), offset.max(0));
    let length = (n.saturating_sub(down)).min(m.saturating_sub(right)).max(0);
    if length > MAX_PLACES {
        return unsupported(format!("a diagonal of {length} elements"));
    }
    let places: Vec<i64> = (0..length).flat_map(|i| [i + down, i + right]).collect();
    let places = c.list(&places);
    let places = c.reshape(&places, &[Int::Known(length), Int::Known(2)]);
    let rest = (0..rank).filter(|a| *a != rows && *a != columns);
    let perm: Vec<usize> = [rows, columns].into_iter().chain(rest).collect();
    Ok(Diagonal { front: c.transpose(&x.name, &perm), perm, places })
}

/// The elements of a diagonal as a last axis.
fn taken(c: &mut Call<'_>, x: &Tensor, offset: i64, axes: [i64; 2]) -> Outcome {
    let diagonal = diagonal_of(c, x, offset, axes)?;
    let y = c.add("GatherND", &[&diagonal.front, &diagonal.places]);
    let last = diagonal.perm.len() - 2;
    one(if last == 0 { y } else { c.transpose(&y, &(1..=last).chain([0]).collect::<Vec<_>>()) })
}

/// The tensor with another diagonal.
fn replaced(c: &mut Call<'_>) -> Outcome {
    let (x, source) = (c.tensor("self")?, c.tensor("src")?);
    let axes = [c.int("dim1", 0)?, c.int("dim2", 1)?];
    let diagonal = diagonal_of(c, &x, c.int("offset", 0)?, axes)?;
    let mut new = c.cast(&source.name, source.dtype, x.dtype);
    let last = source.dims.len().saturating_sub(1);
    if last > 0 {
        new = c.transpose(&new, &[last].into_iter().chain(0..last).collect::<Vec<_>>());
    }
    let y = c.add("ScatterND", &[&diagonal.front, &diagonal.places, &new]);
    let mut back = vec![0; diagonal.perm.len()];
    for (to, from) in diagonal.perm.iter().enumerate() {
        back[*from] = to;
    }
    one(c.transpose(&y, &back))
}

/// Matrices of zeros with the last axis as their diagonal.
fn embedded(c: &mut Call<'_>, x: &Tensor, offset: i64, axes: [i64; 2]) -> Outcome {
    let rank = x.dims.len() + 1;
    let [rows, columns] = [c.axis(axes[0], rank)?, c.axis(axes[1], rank)?];
    let Some(Some(n)) = x.dims.last().copied() else {
        return unsupported("a diagonal of dynamic size");
    };
    let square = c.full(&[Int::Known(n), Int::Known(n)], F32, 0.0);
    let mask = c.with("EyeLike", &[&square], vec![]);
    let mask = c.cast(&mask, F32, BOOL);
    let wide = c.unsqueeze(&x.name, &[-1]);
    let zero = c.number(x.dtype, 0.0);
    let mut y = c.add("Where", &[&mask, &wide, &zero]);
    if offset != 0 {
        let (down, right) = (offset.saturating_neg().max(0), offset.max(0));
        let pads = c.list(&[down, right, right, down]);
        let last = c.list(&[-2, -1]);
        y = c.add("Pad", &[&y, &pads, &zero, &last]);
    }
    // The two last axes go to their places, the others keep their order.
    let mut rest = 0..rank - 2;
    let perm: Vec<usize> = (0..rank)
        .filter_map(|a| match a {
            a if a == rows => Some(rank - 2),
            a if a == columns => Some(rank - 1),
            _ => rest.next(),
        })
        .collect();
    one(if perm.is_sorted() { y } else { c.transpose(&y, &perm) })
}

fn triangle(c: &mut Call<'_>, upper: i64) -> Outcome {
    let x = c.tensor("self")?;
    let diagonal = c.int("diagonal", 0)?;
    let k = c.integer(diagonal);
    // ONNX has no triangle of booleans everywhere.
    let from = x.dtype;
    let x = c.cast(&x.name, from, if from == BOOL { I64 } else { from });
    let y = c.with("Trilu", &[&x, &k], vec![int("upper", upper)]);
    one(if from == BOOL { c.cast(&y, I64, from) } else { y })
}
