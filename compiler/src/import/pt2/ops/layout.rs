//! Operators that rearrange elements: shapes, axes, parts, copies.

use super::super::call::{Call, Fault, Outcome, int, numel, text, unsupported};
use super::super::dtype::BOOL;
use super::super::symbols::{self, Function};
use super::super::translate::{Int, Tensor, result_names};
use super::join::deepened;
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("_reshape_alias", view),
    ("_unsafe_view", view),
    ("adjoint", matrix_transpose),
    ("atleast_1d", |c| at_least(c, &[&[0]])),
    ("atleast_2d", |c| at_least(c, &[&[0, 1], &[0]])),
    ("atleast_3d", |c| at_least(c, &[&[0, 1, 2], &[0, 2], &[2]])),
    ("broadcast_tensors", broadcast_tensors),
    ("broadcast_to", expand),
    ("chunk", chunk),
    ("constant_pad_nd", pad),
    ("copy", copy),
    ("diff", diff),
    ("dsplit", |c| split_at(c, Some(2))),
    ("expand", expand),
    ("expand_as", |c| {
        let other = c.tensor("other")?;
        let sizes = c.shape(&other);
        expanded(c, &sizes)
    }),
    ("expand_copy", expand),
    ("fft_fftshift", |c| shift(c, 1)),
    ("fft_ifftshift", |c| shift(c, -1)),
    ("flatten", flatten),
    ("flip", |c| {
        let x = c.tensor("self")?;
        let axes = c.axes("dims", x.dims.len())?.unwrap_or_default();
        let y = flipped(c, &x.name, &axes);
        one(y)
    }),
    ("fliplr", |c| {
        let x = c.tensor("self")?;
        let y = flipped(c, &x.name, &[1]);
        one(y)
    }),
    ("flipud", |c| {
        let x = c.tensor("self")?;
        let y = flipped(c, &x.name, &[0]);
        one(y)
    }),
    ("hsplit", |c| split_at(c, None)),
    ("mH", matrix_transpose),
    ("mT", matrix_transpose),
    ("matrix_H", matrix_transpose),
    ("moveaxis", movedim),
    ("movedim", movedim),
    ("narrow", narrow),
    ("narrow_copy", narrow),
    ("numpy_T", |c| {
        let x = c.tensor("self")?;
        let perm: Vec<usize> = (0..x.dims.len()).rev().collect();
        one(if perm.len() < 2 { x.name } else { c.transpose(&x.name, &perm) })
    }),
    ("pad", pad),
    ("permute", permute),
    ("permute_copy", permute),
    ("ravel", flatten),
    ("reflection_pad1d", |c| padded(c, "padding", "reflect")),
    ("reflection_pad2d", |c| padded(c, "padding", "reflect")),
    ("reflection_pad3d", |c| padded(c, "padding", "reflect")),
    ("repeat", repeat),
    ("repeat_interleave", repeat_interleave),
    ("replication_pad1d", |c| padded(c, "padding", "edge")),
    ("replication_pad2d", |c| padded(c, "padding", "edge")),
    ("replication_pad3d", |c| padded(c, "padding", "edge")),
    ("reshape", view),
    ("reshape_as", view_as),
    ("roll", roll),
    ("rot90", rot90),
    ("select", select),
    ("select_copy", select),
    ("slice", slice),
    ("slice_copy", slice),
    ("split", split),
    ("split_copy", split),
    ("split_with_sizes", split),
    ("split_with_sizes_copy", split),
    ("squeeze", squeeze),
    ("squeeze_copy", squeeze),
    ("sum_to_size", sum_to_size),
    ("swapaxes", |c| swap(c, "axis0", "axis1")),
    ("swapdims", |c| swap(c, "dim0", "dim1")),
    ("t", t),
    ("t_copy", t),
    ("tensor_split", |c| split_at(c, Some(0))),
    ("tile", |c| {
        let x = c.tensor("self")?;
        let dims = c.sizes("dims")?.unwrap_or_default();
        tiled(c, &x, &dims)
    }),
    ("transpose", |c| swap(c, "dim0", "dim1")),
    ("transpose_copy", |c| swap(c, "dim0", "dim1")),
    ("unbind", unbind),
    ("unbind_copy", unbind),
    ("unflatten", unflatten),
    ("unsafe_chunk", chunk),
    ("unsafe_split", split),
    ("unsafe_split_with_sizes", split),
    ("unsqueeze", unsqueeze),
    ("unsqueeze_copy", unsqueeze),
    ("view", view),
    ("view_as", view_as),
    ("view_copy", view),
    ("vsplit", |c| split_at(c, Some(0))),
];

fn view(c: &mut Call<'_>) -> Outcome {
    if c.overload == "dtype" {
        return unsupported("a view as another element type");
    }
    let x = c.tensor("self")?;
    let sizes = match c.sizes("size")? {
        Some(sizes) => sizes,
        None => c.sizes("shape")?.unwrap_or_default(),
    };
    one(c.reshape(&x.name, &sizes))
}

/// In the shape of another.
fn view_as(c: &mut Call<'_>) -> Outcome {
    let (x, other) = (c.tensor("self")?, c.tensor("other")?);
    let sizes = c.shape(&other);
    one(c.reshape(&x.name, &sizes))
}

/// Sums over the axes along which a tensor of these sizes would be repeated.
fn sum_to_size(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let sizes = c.sizes("size")?.unwrap_or_default();
    let Some(front) = x.dims.len().checked_sub(sizes.len()) else {
        return Err(Fault::Damaged(format!("{} sizes of rank {}", sizes.len(), x.dims.len())));
    };
    let mut axes: Vec<i64> = (0..front as i64).collect();
    for (i, size) in sizes.iter().enumerate() {
        if size.known() == Some(1) && x.dims[front + i] != Some(1) {
            axes.push((front + i) as i64);
        }
    }
    if axes.is_empty() {
        return one(x.name);
    }
    let sum = c.reduce("ReduceSum", &x.name, &axes, true);
    one(c.reshape(&sum, &sizes))
}

fn expand(c: &mut Call<'_>) -> Outcome {
    let sizes = c.sizes("size")?.unwrap_or_default();
    expanded(c, &sizes)
}

fn expanded(c: &mut Call<'_>, sizes: &[Int]) -> Outcome {
    let x = c.tensor("self")?;
    if sizes.is_empty() {
        return one(x.name);
    }
    // −1 keeps a size, as 1 does in ONNX.
    let keep = |s: &Int| if s.known() == Some(-1) { Int::Known(1) } else { s.clone() };
    let sizes: Vec<Int> = sizes.iter().map(keep).collect();
    let shape = c.size_list(&sizes);
    one(c.add("Expand", &[&x.name, &shape]))
}

/// Tensors in their common shape.
fn broadcast_tensors(c: &mut Call<'_>) -> Outcome {
    let list = c.tensors("tensors")?;
    let rank = list.iter().map(|t| t.dims.len()).max().unwrap_or(0);
    let mut common = vec![Int::Known(1); rank];
    for t in &list {
        let sizes = c.shape(t);
        let first = rank - sizes.len();
        for (all, own) in common[first..].iter_mut().zip(sizes) {
            // Of two sizes that are not equal one is 1.
            if own.known() != Some(1) {
                *all = own;
            }
        }
    }
    let shape = c.size_list(&common);
    Ok(list.iter().map(|t| c.add("Expand", &[&t.name, &shape])).collect())
}

fn flatten(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let rank = x.dims.len();
    let (first, last) =
        (c.axis(c.int("start_dim", 0)?, rank)?, c.axis(c.int("end_dim", -1)?, rank)?);
    if rank == 0 {
        return one(c.reshape(&x.name, &[Int::Known(1)]));
    }
    if first > last {
        return Err(Fault::Damaged(format!("axes {first} to {last}")));
    }
    let sizes = c.shape(&x);
    let mut wanted = sizes[..first].to_vec();
    wanted.push(Int::Known(-1));
    wanted.extend_from_slice(&sizes[last + 1..]);
    one(c.reshape(&x.name, &wanted))
}

fn unflatten(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    let sizes = c.shape(&x);
    let mut wanted = sizes[..axis].to_vec();
    wanted.extend(c.sizes("sizes")?.unwrap_or_default());
    wanted.extend_from_slice(sizes.get(axis + 1..).unwrap_or_default());
    one(c.reshape(&x.name, &wanted))
}

fn permute(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axes = c.axes("dims", x.dims.len())?.unwrap_or_default();
    let perm: Vec<usize> = axes.iter().map(|a| *a as usize).collect();
    one(if perm.is_empty() { x.name } else { c.transpose(&x.name, &perm) })
}

/// The tensor with two axes exchanged.
fn swap(c: &mut Call<'_>, a: &str, b: &str) -> Outcome {
    let x = c.tensor("self")?;
    let rank = x.dims.len();
    let (a, b) = (c.axis(c.int(a, 0)?, rank)?, c.axis(c.int(b, 1)?, rank)?);
    if rank < 2 || a == b {
        return one(x.name);
    }
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(a, b);
    one(c.transpose(&x.name, &perm))
}

/// Each matrix of the two last axes transposed.
fn matrix_transpose(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let rank = x.dims.len();
    if rank < 2 {
        return one(x.name);
    }
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(rank - 2, rank - 1);
    one(c.transpose(&x.name, &perm))
}

/// The tensor, or each of a list; one of `n` axes with the new ones in `axes[n]`.
fn at_least(c: &mut Call<'_>, axes: &[&[i64]]) -> Outcome {
    let list = match c.overload {
        "Sequence" => c.tensors("tensors")?,
        _ => vec![c.tensor("self")?],
    };
    Ok(deepened(c, list, axes).into_iter().map(|t| t.name).collect())
}

fn t(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    one(if x.dims.len() == 2 { c.transpose(&x.name, &[1, 0]) } else { x.name })
}

fn movedim(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let rank = x.dims.len();
    if rank == 0 {
        return one(x.name);
    }
    let from = c.axes("source", rank)?.unwrap_or_default();
    let to = c.axes("destination", rank)?.unwrap_or_default();
    let mut places: Vec<Option<usize>> = vec![None; rank];
    for (f, t) in from.iter().zip(&to) {
        places[*t as usize] = Some(*f as usize);
    }
    let mut rest = (0..rank).filter(|a| !from.contains(&(*a as i64)));
    let perm: Option<Vec<usize>> = places.into_iter().map(|p| p.or_else(|| rest.next())).collect();
    match perm {
        Some(perm) => one(c.transpose(&x.name, &perm)),
        None => Err(Fault::Damaged("axes that do not match".into())),
    }
}

fn unsqueeze(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", 0)?, x.dims.len() + 1)?;
    one(c.unsqueeze(&x.name, &[axis as i64]))
}

fn squeeze(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let all = (0..x.dims.len() as i64).collect();
    let mut axes = c.axes("dim", x.dims.len())?.unwrap_or(all);
    // Only axes of one element go; a dynamic size is none.
    axes.retain(|a| x.dims.get(*a as usize) == Some(&Some(1)));
    one(if axes.is_empty() { x.name } else { c.squeeze(&x.name, &axes) })
}

/// The part of an axis.
fn cut(c: &mut Call<'_>, x: &str, axis: usize, start: &Int, end: &Int, step: i64) -> String {
    let (start, end) =
        (c.size_list(std::slice::from_ref(start)), c.size_list(std::slice::from_ref(end)));
    let axis = c.list(&[axis as i64]);
    if step == 1 {
        return c.add("Slice", &[x, &start, &end, &axis]);
    }
    let step = c.list(&[step]);
    c.add("Slice", &[x, &start, &end, &axis, &step])
}

fn slice(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    let start = c.int_given("start")?.unwrap_or(Int::Known(0));
    let end = c.int_given("end")?.unwrap_or(Int::Known(i64::MAX));
    let y = cut(c, &x.name, axis, &start, &end, c.int("step", 1)?);
    one(y)
}

fn narrow(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    let (Some(start), Some(length)) = (c.int_given("start")?, c.int_given("length")?) else {
        return unsupported("a start that is a tensor");
    };
    let end = symbols::of(c, Function::Add, &start, &length)?;
    let y = cut(c, &x.name, axis, &start, &end, 1);
    one(y)
}

fn select(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    let Some(index) = c.int_given("index")? else { return Err(Fault::Damaged("no index".into())) };
    let index = c.size_scalar(&index);
    one(c.with("Gather", &[&x.name, &index], vec![int("axis", axis as i64)]))
}

fn unbind(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    let n = result_names(c.node).count();
    Ok((0..n)
        .map(|i| {
            let index = c.integer(i as i64);
            c.with("Gather", &[&x.name, &index], vec![int("axis", axis as i64)])
        })
        .collect())
}

/// Parts of the sizes in a list, or each of one size and a last, smaller one.
fn split(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    let n = result_names(c.node).count();
    let one_size = c.argument("split_size").is_some() && c.overload != "sizes";
    let given = match c.sizes("split_sizes")? {
        Some(sizes) => Some(sizes),
        None => c.sizes("split_size")?,
    };
    let Some(given) = given else { return Err(Fault::Damaged("no sizes".into())) };
    let sizes = match (one_size, &given[..]) {
        (true, [size]) => even(c, &x, axis, size, n)?,
        _ => given,
    };
    parts(c, &x, axis, &sizes)
}

fn chunk(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    let n = result_names(c.node).count();
    let (chunks, total) = (c.int("chunks", 1)?, c.size_of(&x, axis));
    // Rounded up.
    let more = symbols::of(c, Function::Add, &total, &Int::Known(chunks.saturating_sub(1)))?;
    let size = symbols::of(c, Function::FloorDiv, &more, &Int::Known(chunks))?;
    let sizes = even(c, &x, axis, &size, n)?;
    parts(c, &x, axis, &sizes)
}

/// Parts between indices, or a number of parts of which the first may be longer by one; by default of the axis that `hsplit` takes.
fn split_at(c: &mut Call<'_>, axis: Option<i64>) -> Outcome {
    let x = c.tensor("self")?;
    let rank = x.dims.len();
    let default = axis.unwrap_or(i64::from(rank > 1));
    let axis = c.axis(c.int("dim", default)?, rank)?;
    let Some(n) = x.dims.get(axis).copied().flatten() else {
        return unsupported("parts of an axis of dynamic size");
    };
    let ends: Vec<i64> = match c.ints("indices")? {
        Some(indices) => {
            let place = |i: i64| if i < 0 { i.saturating_add(n).max(0) } else { i.min(n) };
            indices.into_iter().map(place).chain([n]).collect()
        }
        None => {
            let sections = match c.int_given("sections")? {
                Some(Int::Known(k)) => k,
                _ => return unsupported("indices that are a tensor"),
            };
            if usize::try_from(sections) != Ok(result_names(c.node).count()) {
                return Err(Fault::Damaged(format!("{sections} sections")));
            }
            (1..=sections).map(|i| n / sections * i + i.min(n % sections)).collect()
        }
    };
    let mut start = 0;
    let part = |end: &i64| {
        let y = cut(c, &x.name, axis, &Int::Known(start), &Int::Known(*end.max(&start)), 1);
        start = *end;
        y
    };
    Ok(ends.iter().map(part).collect())
}

/// `n` sizes, of which the last is what is left.
fn even(
    c: &mut Call<'_>,
    x: &Tensor,
    axis: usize,
    size: &Int,
    n: usize,
) -> Result<Vec<Int>, Fault> {
    let total = c.size_of(x, axis);
    let before = symbols::of(c, Function::Mul, size, &Int::Known(n.saturating_sub(1) as i64))?;
    let last = symbols::of(c, Function::Sub, &total, &before)?;
    let mut sizes = vec![size.clone(); n.saturating_sub(1)];
    sizes.push(last);
    Ok(sizes)
}

fn parts(c: &mut Call<'_>, x: &Tensor, axis: usize, sizes: &[Int]) -> Outcome {
    let list = c.size_list(sizes);
    Ok(c.all("Split", &[&x.name, &list], vec![int("axis", axis as i64)], sizes.len()))
}

fn copy(c: &mut Call<'_>) -> Outcome {
    let (x, source) = (c.tensor("self")?, c.tensor("src")?);
    let y = c.cast(&source.name, source.dtype, x.dtype);
    let sizes = c.shape(&x);
    if source.dims == x.dims && x.dims.iter().all(Option::is_some) {
        return one(y);
    }
    let shape = c.size_list(&sizes);
    one(c.add("Expand", &[&y, &shape]))
}

/// Differences of neighbors.
fn diff(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let axis = c.axis(c.int("dim", -1)?, x.dims.len())?;
    let mut y = x.name.clone();
    let (before, after) = (c.optional("prepend")?, c.optional("append")?);
    if before.is_some() || after.is_some() {
        let all = before.into_iter().chain([x.clone()]).chain(after);
        let names: Vec<String> = all.map(|t| t.name).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        y = c.with("Concat", &names, vec![int("axis", axis as i64)]);
    }
    for _ in 0..c.int("n", 1)?.clamp(0, 16) {
        let next = cut(c, &y, axis, &Int::Known(1), &Int::Known(i64::MAX), 1);
        let last = cut(c, &y, axis, &Int::Known(0), &Int::Known(-1), 1);
        let f = if x.dtype == BOOL { "Xor" } else { "Sub" };
        y = c.add(f, &[&next, &last]);
    }
    one(y)
}

fn flipped(c: &mut Call<'_>, x: &str, axes: &[i64]) -> String {
    let turn = |y: String, axis: &i64| {
        cut(c, &y, *axis as usize, &Int::Known(-1), &Int::Known(i64::MIN), -1)
    };
    axes.iter().fold(x.into(), turn)
}

/// Turned in a plane of two axes, from the first to the second, by `k` right angles.
fn rot90(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let rank = x.dims.len();
    let [a, b] = c.axes("dims", rank)?.unwrap_or_else(|| vec![0, 1])[..] else {
        return Err(Fault::Damaged("a plane has two axes".into()));
    };
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(a as usize, b as usize);
    let y = match c.int("k", 1)?.rem_euclid(4) {
        1 => {
            let y = flipped(c, &x.name, &[b]);
            c.transpose(&y, &perm)
        }
        2 => flipped(c, &x.name, &[a, b]),
        3 => {
            let y = c.transpose(&x.name, &perm);
            flipped(c, &y, &[b])
        }
        _ => x.name,
    };
    one(y)
}

fn roll(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let shifts = c.ints("shifts")?.unwrap_or_default();
    let axes = c.axes("dims", x.dims.len())?.unwrap_or_default();
    if axes.is_empty() && shifts.len() == 1 {
        // All elements as one axis.
        let size = numel(&x.dims);
        let flat =
            Tensor { name: c.reshape(&x.name, &[Int::Known(-1)]), dims: vec![size], ..x.clone() };
        let y = rolled(c, &flat, &[0], &shifts)?;
        let sizes = c.shape(&x);
        return one(c.reshape(&y, &sizes));
    }
    if axes.len() != shifts.len() {
        return Err(Fault::Damaged(format!("{} shifts of {} axes", shifts.len(), axes.len())));
    }
    let y = rolled(c, &x, &axes, &shifts)?;
    one(y)
}

/// The middle of each axis at its beginning, or back.
fn shift(c: &mut Call<'_>, sign: i64) -> Outcome {
    let x = c.tensor("self")?;
    let all = (0..x.dims.len() as i64).collect();
    let axes = c.axes("dim", x.dims.len())?.unwrap_or(all);
    let half = |a: &i64| x.dims.get(*a as usize).copied().flatten().map(|n| sign * (n / 2));
    let Some(shifts) = axes.iter().map(half).collect::<Option<Vec<_>>>() else {
        return unsupported("rolling an axis of dynamic size");
    };
    let y = rolled(c, &x, &axes, &shifts)?;
    one(y)
}

fn rolled(c: &mut Call<'_>, x: &Tensor, axes: &[i64], shifts: &[i64]) -> Result<String, Fault> {
    let mut y = x.name.clone();
    for (axis, shift) in axes.iter().zip(shifts) {
        let Some(Some(n)) = x.dims.get(*axis as usize).copied() else {
            return unsupported("rolling an axis of dynamic size");
        };
        let by = if n == 0 { 0 } else { shift.rem_euclid(n) };
        if by == 0 {
            continue;
        }
        let end = cut(c, &y, *axis as usize, &Int::Known(n - by), &Int::Known(i64::MAX), 1);
        let start = cut(c, &y, *axis as usize, &Int::Known(0), &Int::Known(n - by), 1);
        y = c.with("Concat", &[&end, &start], vec![int("axis", *axis)]);
    }
    Ok(y)
}

fn tiled(c: &mut Call<'_>, x: &Tensor, repeats: &[Int]) -> Outcome {
    // Axes that either has more of are in front.
    let rank = x.dims.len().max(repeats.len());
    let mut y = x.name.clone();
    if rank > x.dims.len() {
        let new: Vec<i64> = (0..(rank - x.dims.len()) as i64).collect();
        y = c.unsqueeze(&y, &new);
    }
    let mut all = vec![Int::Known(1); rank - repeats.len()];
    all.extend_from_slice(repeats);
    if rank == 0 {
        return one(y);
    }
    let all = c.size_list(&all);
    one(c.add("Tile", &[&y, &all]))
}

fn repeat(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let repeats = c.sizes("repeats")?.unwrap_or_default();
    tiled(c, &x, &repeats)
}

/// Each element of an axis `repeats` times.
fn repeat_interleave(c: &mut Call<'_>) -> Outcome {
    if c.overload != "self_int" {
        return unsupported("a number of repeats for each element");
    }
    let mut x = c.tensor("self")?;
    let repeats = c.int("repeats", 1)?;
    let axis = match c.int_given("dim")? {
        Some(Int::Known(axis)) if !x.dims.is_empty() => c.axis(axis, x.dims.len())?,
        _ => {
            x = Tensor { name: c.reshape(&x.name, &[Int::Known(-1)]), dims: vec![None], ..x };
            0
        }
    };
    let sizes = c.shape(&x);
    let spread = c.unsqueeze(&x.name, &[axis as i64 + 1]);
    let mut wide = vec![1; x.dims.len() + 1];
    wide[axis + 1] = repeats;
    let wide = c.list(&wide);
    let spread = c.add("Expand", &[&spread, &wide]);
    let mut merged = sizes;
    merged[axis] = Int::Known(-1);
    one(c.reshape(&spread, &merged))
}

fn pad(c: &mut Call<'_>) -> Outcome {
    let mode = match c.text("mode", "constant")?.as_str() {
        "constant" => "constant",
        "reflect" => "reflect",
        "replicate" => "edge",
        "circular" => "wrap",
        other => return unsupported(format!("mode \"{other}\"")),
    };
    padded(c, "pad", mode)
}

/// Pads from the last axis on, each at its beginning and its end.
fn padded(c: &mut Call<'_>, name: &str, mode: &str) -> Outcome {
    let x = c.tensor("self")?;
    let pads = c.sizes(name)?.unwrap_or_default();
    if pads.len() % 2 != 0 || pads.len() / 2 > x.dims.len() {
        return Err(Fault::Damaged(format!("{} pads for {} axes", pads.len(), x.dims.len())));
    }
    let n = pads.len() / 2;
    let low = (0..n).map(|i| pads[2 * i].clone());
    let all: Vec<Int> = low.chain((0..n).map(|i| pads[2 * i + 1].clone())).collect();
    let axes: Vec<i64> = (0..n).map(|i| (x.dims.len() - 1 - i) as i64).collect();
    let (all, axes) = (c.size_list(&all), c.list(&axes));
    let value = c.float("value", 0.0)?;
    let value = c.number(x.dtype, value);
    one(c.with("Pad", &[&x.name, &all, &value, &axes], vec![text("mode", mode)]))
}
