//! Operators that join tensors, or spread them over a grid.

use super::super::call::{Call, Fault, Outcome, int, unsupported};
use super::super::dtype::{Dtype, Weight, promoted};
use super::super::translate::{Int, Tensor};
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("block_diag", block_diag),
    ("cartesian_prod", cartesian_prod),
    ("cat", cat),
    ("column_stack", |c| {
        let list = c.tensors("tensors")?;
        let list = deepened(c, list, &[&[0, 1], &[1]]);
        join(c, &list, 1)
    }),
    ("concat", cat),
    ("concatenate", cat),
    ("dstack", |c| {
        let list = c.tensors("tensors")?;
        let list = deepened(c, list, &[&[0, 1, 2], &[0, 2], &[2]]);
        join(c, &list, 2)
    }),
    ("hstack", |c| {
        let list = c.tensors("tensors")?;
        let list = deepened(c, list, &[&[0]]);
        let axis = i64::from(list.first().is_some_and(|t| t.dims.len() > 1));
        join(c, &list, axis)
    }),
    ("meshgrid", meshgrid),
    ("row_stack", vstack),
    ("stack", stack),
    ("vstack", vstack),
];

/// The element type of all tensors together.
fn common(list: &[Tensor]) -> Dtype {
    promoted(&list.iter().map(|t| (t.dtype, Weight::Tensor)).collect::<Vec<_>>())
}

/// Tensors, one of `n` axes with the new ones in `axes[n]`.
pub(super) fn deepened(c: &mut Call<'_>, mut list: Vec<Tensor>, axes: &[&[i64]]) -> Vec<Tensor> {
    for t in &mut list {
        if let Some(new) = axes.get(t.dims.len()) {
            t.name = c.unsqueeze(&t.name, new);
            for axis in *new {
                t.dims.insert(*axis as usize, Some(1));
            }
        }
    }
    list
}

fn vstack(c: &mut Call<'_>) -> Outcome {
    let list = c.tensors("tensors")?;
    let list = deepened(c, list, &[&[0, 1], &[0]]);
    join(c, &list, 0)
}

/// Tensors one after the other, in their promoted type.
fn join(c: &mut Call<'_>, list: &[Tensor], axis: i64) -> Outcome {
    // An empty vector fits to everything.
    let list: Vec<Tensor> =
        list.iter().filter(|t| list.len() == 1 || t.dims != [Some(0)]).cloned().collect();
    let Some(first) = list.first() else { return Err(Fault::Damaged("no tensors".into())) };
    let axis = c.axis(axis, first.dims.len())? as i64;
    let dtype = common(&list);
    let names: Vec<String> = list.iter().map(|t| c.cast(&t.name, t.dtype, dtype)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    one(c.with("Concat", &names, vec![int("axis", axis)]))
}

fn cat(c: &mut Call<'_>) -> Outcome {
    let list = c.tensors("tensors")?;
    join(c, &list, c.int("dim", 0)?)
}

fn stack(c: &mut Call<'_>) -> Outcome {
    let list = c.tensors("tensors")?;
    let Some(first) = list.first() else { return Err(Fault::Damaged("no tensors".into())) };
    let axis = c.axis(c.int("dim", 0)?, first.dims.len() + 1)? as i64;
    let dtype = common(&list);
    let mut names = Vec::new();
    for t in &list {
        let name = c.cast(&t.name, t.dtype, dtype);
        names.push(c.unsqueeze(&name, &[axis]));
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    one(c.with("Concat", &names, vec![int("axis", axis)]))
}

/// Each matrix right of and below the one before, among zeros.
fn block_diag(c: &mut Call<'_>) -> Outcome {
    let list = c.tensors("tensors")?;
    let list = deepened(c, list, &[&[0, 1], &[0]]);
    let dtype = common(&list);
    let widths: Option<Vec<i64>> = list.iter().map(|t| t.dims.get(1).copied().flatten()).collect();
    let Some(widths) = widths else { return unsupported("blocks of dynamic size") };
    let total = widths.iter().fold(0i64, |n, width| n.saturating_add(*width));
    let (zero, axis) = (c.number(dtype, 0.0), c.list(&[1]));
    let (mut left, mut rows) = (0, Vec::new());
    for (t, width) in list.iter().zip(widths) {
        let block = c.cast(&t.name, t.dtype, dtype);
        let pads = c.list(&[left, total - left - width]);
        rows.push(c.add("Pad", &[&block, &pads, &zero, &axis]));
        left += width;
    }
    let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
    one(c.with("Concat", &rows, vec![int("axis", 0)]))
}

fn meshgrid(c: &mut Call<'_>) -> Outcome {
    let list = c.tensors("tensors")?;
    let swapped = c.text("indexing", "ij")? == "xy" && list.len() > 1;
    let place = |i: usize| match i {
        0 | 1 if swapped => 1 - i,
        i => i,
    };
    Ok(grids(c, &list, place))
}

/// Each vector along its axis of one grid.
fn grids(c: &mut Call<'_>, list: &[Tensor], place: impl Fn(usize) -> usize) -> Vec<String> {
    let n = list.len();
    let mut sizes = vec![Int::Known(1); n];
    for (i, t) in list.iter().enumerate() {
        sizes[place(i)] = if t.dims.is_empty() { Int::Known(1) } else { c.size_of(t, 0) };
    }
    let shape = c.size_list(&sizes);
    let mut grids = Vec::new();
    for (i, t) in list.iter().enumerate() {
        let mut own = vec![Int::Known(1); n];
        own[place(i)] = Int::Known(-1);
        let x = c.reshape(&t.name, &own);
        grids.push(c.add("Expand", &[&x, &shape]));
    }
    grids
}

/// Every combination of elements, a row for each.
fn cartesian_prod(c: &mut Call<'_>) -> Outcome {
    let list = c.tensors("tensors")?;
    if let [t] = &list[..] {
        return one(t.name.clone());
    }
    let columns: Vec<String> = grids(c, &list, |i| i)
        .iter()
        .map(|grid| c.reshape(grid, &[Int::Known(-1), Int::Known(1)]))
        .collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    one(c.with("Concat", &columns, vec![int("axis", 1)]))
}
