//! Operators that only rearrange elements.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use crate::import::dims::checked_numel;
use frit_ir::ops::{Concat, Gather, Pad, Slice, Split, Transpose};
use frit_ir::shape::product;
use frit_ir::{DType, Op, Shape, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("Concat", &["axis"], concat),
    op("Expand", &[], expand),
    op("Flatten", &["axis"], flatten),
    op("Pad", &["mode"], pad),
    op("Reshape", &["allowzero"], reshape),
    op("Slice", &[], slice),
    op("Split", &["axis", "num_outputs"], split),
    op("Squeeze", &[], squeeze),
    op("Tile", &[], tile),
    op("Transpose", &["perm"], transpose),
    op("Unsqueeze", &[], unsqueeze),
];

fn required<T>(value: Option<T>, what: &str) -> Result<T, Fault> {
    value.ok_or_else(|| Fault::Misfit(format!("{what} is missing")))
}

fn reshape(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let wanted = cx.known_shape(1)?;
    let from = cx.dims(x);
    let allow_zero = cx.int("allowzero", 0) != 0;
    let mut dims = Vec::with_capacity(wanted.len());
    let mut free = None;
    for (i, &d) in wanted.iter().enumerate() {
        dims.push(match d {
            -1 if free.replace(i).is_none() => 1,
            0 if !allow_zero => match from.get(i) {
                Some(&d) => d,
                None => return misfit(format!("shape {wanted:?} keeps axis {i} of {from:?}")),
            },
            0.. => d as usize,
            _ => return misfit(format!("shape {wanted:?} is not valid")),
        });
    }
    let total = product(&from);
    let Some(known) = checked_numel(&dims) else {
        return misfit(format!("shape {wanted:?} is too large"));
    };
    let fits = match free {
        Some(_) => known != 0 && total.is_multiple_of(known),
        None => known == total,
    };
    if !fits {
        return misfit(format!(
            "{total} elements do not fit shape {wanted:?}, which is fixed in the model; if it holds \
             the batch size of the export, bind that one or export with a dynamic batch"
        ));
    }
    if let Some(i) = free {
        dims[i] = total / known;
    }
    let y = cx.reshape(x, dims)?;
    // The size that depends on data must be the one that the shape leaves open, or computes.
    let sizes = cx.input(1)?;
    let is_open = |axis: usize| {
        free == Some(axis)
            || cx.selections.counts_at(sizes, axis)
            || wanted[axis] == 0 && cx.selections.axis_of(x) == Some(axis)
    };
    match cx.selections.axis_of(y) {
        Some(axis) if !is_open(axis) => {
            Err(Fault::Dynamic(format!("a size of {from:?} as {wanted:?}")))
        }
        _ if y == x => one(y),
        _ => cx.shaped(y, 1),
    }
}

fn transpose(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let rank = cx.dims(x).len();
    let perm = match cx.ints("perm") {
        Some(perm) => perm.iter().map(|p| cx.axis_in(rank, *p)).collect::<Result<Vec<_>, _>>()?,
        None => (0..rank).rev().collect(),
    };
    one(permute(cx, x, perm)?)
}

/// The value with its axes permuted; itself if the permutation changes nothing.
pub(super) fn permute(
    cx: &mut NodeContext<'_>,
    x: ValueId,
    perm: Vec<usize>,
) -> Result<ValueId, Fault> {
    if perm.len() == cx.dims(x).len() && perm.iter().enumerate().all(|(i, p)| i == *p) {
        return Ok(x);
    }
    cx.emit(Op::Transpose(Transpose { perm }), &[x])
}

fn squeeze(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let dims = cx.dims(x);
    let axes = match cx.known_ints(1, "the axes")? {
        Some(axes) => cx.axes_in(dims.len(), &axes)?,
        None => (0..dims.len()).filter(|&i| dims[i] == 1).collect(),
    };
    if let Some(axis) = axes.iter().find(|&&a| dims[a] != 1) {
        return misfit(format!("axis {axis} has size {}, not 1", dims[*axis]));
    }
    let kept = (0..dims.len()).filter(|i| !axes.contains(i)).map(|i| dims[i]).collect();
    one(cx.reshape(x, kept)?)
}

fn unsqueeze(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let axes = required(cx.known_ints(1, "the axes")?, "the list of axes")?;
    let from = cx.dims(x);
    let rank = from.len() + axes.len();
    let axes = cx.axes_in(rank, &axes)?;
    let mut rest = from.into_iter();
    let dims = (0..rank).map(|i| if axes.contains(&i) { 1 } else { rest.next().unwrap_or(1) });
    let dims = dims.collect();
    one(cx.reshape(x, dims)?)
}

fn flatten(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let dims = cx.dims(x);
    // The axis may be the rank itself, one past the last.
    let axis = match cx.int("axis", 1) {
        axis if axis == dims.len() as i64 => dims.len(),
        axis => cx.axis_in(dims.len(), axis)?,
    };
    let (rows, columns) = (product(&dims[..axis]), product(&dims[axis..]));
    one(cx.reshape(x, vec![rows, columns])?)
}

fn expand(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let shape = cx.known_shape(1)?;
    let shape = Shape(cx.sizes(&shape, "the shape")?);
    let from = cx.ty(x).shape;
    match from.broadcast(&shape) {
        Some(to) if to == from => one(x),
        Some(to) if to.rank() == shape.rank() => {
            let y = cx.expand(x, to.0)?;
            cx.shaped(y, 1)
        }
        Some(to) => one(cx.expand(x, to.0)?),
        None => misfit(format!("{from} does not broadcast with {shape}")),
    }
}

/// Each axis `d` becomes `[1, d]`, is broadcast to `[repeats, d]` and merged.
fn tile(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let repeats = required(cx.known_ints(1, "the repeats")?, "the list of repeats")?;
    let repeats = cx.sizes(&repeats, "the repeats")?;
    let dims = cx.dims(x);
    if repeats.len() != dims.len() {
        return misfit(format!("{} repeats for {} axes", repeats.len(), dims.len()));
    }
    let pairs: Vec<(usize, usize)> = repeats.into_iter().zip(dims).collect();
    let split = pairs.iter().flat_map(|(_, d)| [1, *d]).collect();
    let spread: Vec<usize> = pairs.iter().flat_map(|(r, d)| [*r, *d]).collect();
    if checked_numel(&spread).is_none() {
        return misfit("the result is too large");
    }
    let merged = pairs.iter().map(|(r, d)| r * d).collect();
    let x = cx.reshape(x, split)?;
    let x = cx.expand(x, spread)?;
    one(cx.reshape(x, merged)?)
}

fn concat(cx: &mut NodeContext<'_>) -> Outcome {
    let values = cx.variadic()?;
    let axis = cx.axis(values[0], cx.int("axis", 0))?;
    one(join(cx, &values, axis)?)
}

/// The values one after the other.
pub(super) fn join(
    cx: &mut NodeContext<'_>,
    values: &[ValueId],
    axis: usize,
) -> Result<ValueId, Fault> {
    match values {
        [only] => Ok(*only),
        _ => cx.emit(Op::Concat(Concat { axis }), values),
    }
}

fn split(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let axis = cx.axis(x, cx.int("axis", 0))?;
    let size = cx.dims(x)[axis];
    let n = cx.node.output.len();
    let sizes = match cx.known_ints(1, "the sizes")? {
        Some(sizes) => cx.parts(&sizes, "the list of sizes")?,
        None => {
            let parts = cx.int("num_outputs", n as i64);
            if parts != n as i64 || n == 0 {
                return misfit(format!("num_outputs is {parts}, but there are {n} results"));
            }
            even_parts(size, size.div_ceil(n), n)
        }
    };
    if sizes.len() != n || sum(&sizes) != size {
        return misfit(format!("parts {sizes:?} of axis {axis} with size {size} for {n} results"));
    }
    Ok(parts(cx, x, axis, sizes)?.into_iter().map(Into::into).collect())
}

/// `n` parts of `part` elements each; the last ones are smaller if elements run out.
pub(super) fn even_parts(size: usize, part: usize, n: usize) -> Vec<usize> {
    (0..n).map(|i| part.min(size.saturating_sub(i.saturating_mul(part)))).collect()
}

/// Consecutive parts of the value.
pub(super) fn parts(
    cx: &mut NodeContext<'_>,
    x: ValueId,
    axis: usize,
    sizes: Vec<usize>,
) -> Result<Vec<ValueId>, Fault> {
    match sizes.len() {
        1 => Ok(vec![x]),
        _ => cx.emit_all(Op::Split(Split { axis, sizes }), &[x]),
    }
}

fn slice(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let starts = required(cx.known_ints(1, "starts")?, "starts")?;
    let ends = required(cx.known_ints(2, "ends")?, "ends")?;
    let dims = cx.dims(x);
    let axes = match cx.known_ints(3, "axes")? {
        Some(axes) => axes,
        None => (0..starts.len() as i64).collect(),
    };
    let steps = cx.known_ints(4, "steps")?.unwrap_or_else(|| vec![1; starts.len()]);
    if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
        return misfit("starts, ends, axes and steps differ in length");
    }
    cx.axes_in(dims.len(), &axes)?;
    let mut cut =
        Slice { start: vec![0; dims.len()], size: dims.clone(), step: vec![1; dims.len()] };
    for (i, axis) in axes.iter().enumerate() {
        let axis = cx.axis_in(dims.len(), *axis)?;
        let Some((start, size, step)) = range(starts[i], ends[i], steps[i], dims[axis]) else {
            return misfit(format!("the step of axis {axis} is 0"));
        };
        (cut.start[axis], cut.size[axis], cut.step[axis]) = (start, size, step);
    }
    one(take(cx, x, cut)?)
}

/// The box; the value itself if that is all of it.
fn take(cx: &mut NodeContext<'_>, x: ValueId, cut: Slice) -> Result<ValueId, Fault> {
    let whole =
        cut.size == cx.dims(x) && cut.start.iter().zip(&cut.step).all(|(a, b)| *a == 0 && *b == 1);
    if whole {
        return Ok(x);
    }
    cx.emit(Op::Slice(cut), &[x])
}

/// First index, number of elements and step of an ONNX slice of an axis of size `dim`; `None` if the
/// step is zero. Source: ONNX Slice-13 (negative indices count from the end; both are clamped).
fn range(start: i64, end: i64, step: i64, dim: usize) -> Option<(usize, usize, isize)> {
    if step == 0 {
        return None;
    }
    let dim = dim as i64;
    let from_end = |i: i64| if i < 0 { i.saturating_add(dim) } else { i };
    let (low, high) = if step > 0 { (0, dim) } else { (-1, dim - 1) };
    let start = from_end(start).clamp(0, high.max(0));
    let end = from_end(end).clamp(low, high.max(low));
    let distance = if step > 0 { end - start } else { start - end };
    if distance <= 0 || dim == 0 {
        return Some((0, 0, 1));
    }
    let size = (distance as u64).div_ceil(step.unsigned_abs()) as usize;
    // A step that is never taken may be huge; it must not overflow later.
    let step = if size == 1 { 1 } else { step as isize };
    Some((start as usize, size, step))
}

fn pad(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let mode = cx.text("mode", "constant");
    if !matches!(mode.as_str(), "constant" | "reflect" | "edge" | "wrap") {
        return Err(Fault::Attribute(format!("mode = \"{mode}\"")));
    }
    let pads = required(cx.known_ints(1, "pads")?, "the list of pads")?;
    let value = cx.known_scalar(2, "the constant value")?.unwrap_or(0.0);
    let dims = cx.dims(x);
    let axes: Vec<usize> = match cx.known_ints(3, "axes")? {
        Some(axes) => {
            cx.axes_in(dims.len(), &axes)?;
            axes.iter().map(|a| cx.axis_in(dims.len(), *a)).collect::<Result<_, _>>()?
        }
        None => (0..dims.len()).collect(),
    };
    if pads.len() != 2 * axes.len() {
        return misfit(format!("{} pads for {} axes", pads.len(), axes.len()));
    }
    let mut cut =
        Slice { start: vec![0; dims.len()], size: dims.clone(), step: vec![1; dims.len()] };
    let mut border = Pad { low: vec![0; dims.len()], high: vec![0; dims.len()], value };
    for (i, &axis) in axes.iter().enumerate() {
        let (low, high) = (pads[i], pads[axes.len() + i]);
        // Negative pads take elements away.
        let away = |pad: i64| usize::try_from(-i128::from(pad.min(0))).unwrap_or(usize::MAX);
        let taken = away(low).saturating_add(away(high));
        if taken > dims[axis] {
            return misfit(format!("pads {pads:?} remove more than axis {axis} has"));
        }
        (cut.start[axis], cut.size[axis]) = (away(low), dims[axis] - taken);
        let added = cx.sizes(&[low.max(0), high.max(0)], "the list of pads")?;
        (border.low[axis], border.high[axis]) = (added[0], added[1]);
    }
    for (axis, start) in cut.start.iter_mut().enumerate() {
        *start = if cut.size[axis] == 0 { 0 } else { *start };
    }
    let x = take(cx, x, cut)?;
    if border.low.iter().chain(&border.high).all(|p| *p == 0) {
        return one(x);
    }
    if mode == "constant" {
        return one(cx.emit(Op::Pad(border), &[x])?);
    }
    let mut y = x;
    for axis in 0..dims.len() {
        let (low, high) = (border.low[axis], border.high[axis]);
        if low + high > 0 {
            let n = cx.dims(y)[axis];
            if n == 0 {
                return misfit(format!("{low} and {high} elements around an axis of size 0"));
            }
            let place = |i: usize| place(&mode, n as i64, i as i64 - low as i64);
            let ids = cx.integers(DType::I64, &[n.saturating_add(low + high)], place)?;
            y = cx.emit(Op::Gather(Gather { axis }), &[y, ids])?;
        }
    }
    one(y)
}

/// The element of an axis of `n` that stands at a place around it.
fn place(mode: &str, n: i64, i: i64) -> i64 {
    match mode {
        "edge" => i.clamp(0, n - 1),
        "wrap" => i.rem_euclid(n),
        _ if n == 1 => 0,
        _ => {
            // Back and forth, without repeating the ends.
            let i = i.rem_euclid(2 * n - 2);
            if i < n { i } else { 2 * n - 2 - i }
        }
    }
}

/// The sum of sizes, which may be many.
pub(super) fn sum(sizes: &[usize]) -> usize {
    sizes.iter().fold(0, |n, &size| n.saturating_add(size))
}

#[cfg(test)]
mod tests {
    use super::range;

    #[test]
    fn slices_are_clamped_as_onnx_says() {
        for (start, end, step, dim, expected) in [
            (0, 5, 1, 5, (0, 5, 1)),
            (1, 1000, 2, 6, (1, 3, 2)),
            (-3, -1, 1, 5, (2, 2, 1)),
            (-1, i64::MIN, -1, 4, (3, 4, -1)),
            (3, 0, -2, 5, (3, 2, -2)),
            (20, -20, -3, 7, (6, 3, -3)),
            (-20, 3, 1, 5, (0, 3, 1)),
            (4, 2, 1, 5, (0, 0, 1)),
            (0, i64::MAX, i64::MAX, 5, (0, 1, 1)),
            (0, 1, 1, 0, (0, 0, 1)),
            (0, i64::MIN, -1, 0, (0, 0, 1)),
            (i64::MIN, i64::MIN, i64::MIN, 3, (0, 1, 1)),
        ] {
            assert_eq!(
                range(start, end, step, dim),
                Some(expected),
                "{start}:{end}:{step} of {dim}"
            );
        }
        assert_eq!(range(0, 1, 0, 3), None);
    }
}
