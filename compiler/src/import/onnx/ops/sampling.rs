//! Operators that interpolate between image elements: GridSample, AffineGrid, RoiAlign, DeformConv.
//!
//! All share the same steps: coordinates, one per spatial axis; the surrounding elements with their weights; a gather by flat
//! indices; a weighted sum. Gradients reach the image through the gather and the coordinates through the weights. Sources: ONNX
//! GridSample-22, AffineGrid-20, RoiAlign-22, DeformConv-22.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::composed::{binary, reduced, unary, with_scalar};
use super::convolution::per_axis;
use super::layout::permute;
use super::{Operator, one, op};
use frit_ir::ops::{
    BinaryFn, Clip, CompareFn, Gather, GatherElements, LogicalFn, MatMul, ReduceFn, Slice, UnaryFn,
};
use frit_ir::shape::product;
use frit_ir::{DType, Op, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("AffineGrid", &["align_corners"], affine_grid),
    op(
        "DeformConv",
        &["dilations", "group", "kernel_shape", "offset_group", "pads", "strides"],
        deform_conv,
    ),
    op("GridSample", &["align_corners", "mode", "padding_mode"], grid_sample),
    op(
        "RoiAlign",
        &[
            "coordinate_transformation_mode",
            "mode",
            "output_height",
            "output_width",
            "sampling_ratio",
            "spatial_scale",
        ],
        roi_align,
    ),
];

/// What lies outside the image.
#[derive(Clone, Copy, PartialEq)]
enum Outside {
    Zero,
    Border,
    /// The image mirrored about its first and last element, or about half an element further.
    Mirror {
        align: bool,
    },
}

/// An element near a coordinate: its index along the axis, as a float, and its weight.
type Near = (ValueId, Option<ValueId>);

/// `[.., P, axes]` → the coordinate of each axis, `[.., P]`.
fn components(cx: &mut NodeContext<'_>, x: ValueId) -> Result<Vec<ValueId>, Fault> {
    let mut dims = cx.dims(x);
    let n = dims.pop().unwrap_or(0);
    let mut parts = Vec::with_capacity(n);
    for i in 0..n {
        let mut cut = Slice {
            start: vec![0; dims.len() + 1],
            size: dims.iter().copied().chain([1]).collect(),
            step: vec![1; dims.len() + 1],
        };
        cut.start[dims.len()] = i;
        let part = cx.emit(Op::Slice(cut), &[x])?;
        parts.push(cx.reshape(part, dims.clone())?);
    }
    Ok(parts)
}

/// A coordinate folded back into `[low, high]`.
fn mirrored(cx: &mut NodeContext<'_>, x: ValueId, low: f64, high: f64) -> Result<ValueId, Fault> {
    let span = high - low;
    if span <= 0.0 {
        return with_scalar(cx, BinaryFn::Mul, x, 0.0);
    }
    let t = with_scalar(cx, BinaryFn::Sub, x, low)?;
    let turns = with_scalar(cx, BinaryFn::Div, t, 2.0 * span)?;
    let turns = unary(cx, UnaryFn::Floor, turns)?;
    let turns = with_scalar(cx, BinaryFn::Mul, turns, 2.0 * span)?;
    let t = binary(cx, BinaryFn::Sub, t, turns)?;
    // |t − span| falls to zero and rises again.
    let t = with_scalar(cx, BinaryFn::Sub, t, span)?;
    let t = unary(cx, UnaryFn::Abs, t)?;
    let t = unary(cx, UnaryFn::Neg, t)?;
    with_scalar(cx, BinaryFn::Add, t, high)
}

fn limited(cx: &mut NodeContext<'_>, x: ValueId, max: f64) -> Result<ValueId, Fault> {
    cx.emit(Op::Clip(Clip { min: Some(0.0), max: Some(max) }), &[x])
}

impl Outside {
    /// A coordinate or index of an axis of `n` elements, moved inside as this says.
    fn inside(self, cx: &mut NodeContext<'_>, x: ValueId, n: usize) -> Result<ValueId, Fault> {
        let last = n as f64 - 1.0;
        match self {
            Outside::Zero => Ok(x),
            Outside::Border => limited(cx, x, last),
            Outside::Mirror { align: true } => mirrored(cx, x, 0.0, last),
            Outside::Mirror { align: false } => mirrored(cx, x, -0.5, last + 0.5),
        }
    }
}

/// The elements near coordinate `x`.
fn near(cx: &mut NodeContext<'_>, x: ValueId, mode: &str) -> Result<Vec<Near>, Fault> {
    if mode == "nearest" {
        return Ok(vec![(unary(cx, UnaryFn::Round, x)?, None)]);
    }
    let floor = unary(cx, UnaryFn::Floor, x)?;
    let t = binary(cx, BinaryFn::Sub, x, floor)?;
    let reach: &[f64] = if mode == "linear" { &[0.0, 1.0] } else { &[-1.0, 0.0, 1.0, 2.0] };
    let mut found = Vec::new();
    for &offset in reach {
        let index = with_scalar(cx, BinaryFn::Add, floor, offset)?;
        // The distance |offset − t|, of which the sign is known.
        let distance = match offset <= 0.0 {
            true => with_scalar(cx, BinaryFn::Sub, t, offset)?,
            false => {
                let negated = unary(cx, UnaryFn::Neg, t)?;
                with_scalar(cx, BinaryFn::Add, negated, offset)?
            }
        };
        let weight = match mode {
            "linear" => {
                let negated = unary(cx, UnaryFn::Neg, distance)?;
                with_scalar(cx, BinaryFn::Add, negated, 1.0)?
            }
            _ => cubic(cx, distance, (0.0..=1.0).contains(&offset))?,
        };
        found.push((index, Some(weight)));
    }
    Ok(found)
}

/// The cubic weight of a distance below 1 (`close`) or between 1 and 2, with a = −0.75 (Keys 1981).
fn cubic(cx: &mut NodeContext<'_>, d: ValueId, close: bool) -> Result<ValueId, Fault> {
    const A: f64 = -0.75;
    let terms = match close {
        true => [A + 2.0, -(A + 3.0), 0.0, 1.0],
        false => [A, -5.0 * A, 8.0 * A, -4.0 * A],
    };
    let mut y = with_scalar(cx, BinaryFn::Mul, d, terms[0])?;
    for &term in &terms[1..3] {
        y = with_scalar(cx, BinaryFn::Add, y, term)?;
        y = binary(cx, BinaryFn::Mul, y, d)?;
    }
    with_scalar(cx, BinaryFn::Add, y, terms[3])
}

/// What is read at every point: of each combination of near elements the values `[N, C, P]` and, unless
/// it is one, their weight `[N, 1, P]`. `image` is `[N, C, sizes…]`, coordinates are `[N, P]` each.
fn taken(
    cx: &mut NodeContext<'_>,
    image: ValueId,
    coordinates: &[ValueId],
    mode: &str,
    outside: Outside,
) -> Result<Vec<(ValueId, Option<ValueId>)>, Fault> {
    let dims = cx.dims(image);
    if dims.len() != coordinates.len() + 2 {
        return misfit(format!("an image {} for {} coordinates", cx.ty(image), coordinates.len()));
    }
    let (n, c, sizes) = (dims[0], dims[1], dims[2..].to_vec());
    let points = cx.dims(coordinates[0]).get(1).copied().unwrap_or(0);
    let numel = product(&sizes);
    let flat = cx.reshape(image, vec![n, c, numel])?;
    // Index into the flat image, weight and whether it is inside, for all combinations so far.
    type Part = (Option<ValueId>, Option<ValueId>, Option<ValueId>);
    let mut parts: Vec<Part> = vec![(None, None, None)];
    for (axis, &x) in coordinates.iter().enumerate() {
        let size = sizes[axis];
        let mut next = Vec::new();
        for (index, weight) in near(cx, x, mode)? {
            let valid = match outside {
                Outside::Zero => Some(within(cx, index, size)?),
                _ => None,
            };
            let index = outside.inside(cx, index, size)?;
            // Whatever the rule, a gather must stay inside.
            let index = limited(cx, index, size as f64 - 1.0)?;
            let index = cx.cast(index, DType::I64)?;
            for &(flat, all, inside) in &parts {
                let flat = match flat {
                    None => index,
                    Some(flat) => {
                        let row = with_scalar(cx, BinaryFn::Mul, flat, size as f64)?;
                        binary(cx, BinaryFn::Add, row, index)?
                    }
                };
                let both =
                    |cx: &mut NodeContext<'_>, op: Op, a: Option<ValueId>, b: Option<ValueId>| {
                        Ok::<_, Fault>(match (a, b) {
                            (Some(a), Some(b)) => Some(cx.emit(op, &[a, b])?),
                            (a, b) => a.or(b),
                        })
                    };
                let all = both(cx, Op::Binary(BinaryFn::Mul), all, weight)?;
                let inside = both(cx, Op::Logical(LogicalFn::And), inside, valid)?;
                next.push((Some(flat), all, inside));
            }
        }
        parts = next;
    }
    let dtype = cx.ty(image).dtype;
    let mut found = Vec::new();
    for (index, weight, inside) in parts {
        let Some(index) = index else { continue };
        let index = cx.reshape(index, vec![n, 1, points])?;
        let index = cx.expand(index, vec![n, c, points])?;
        let mut values = cx.emit(Op::GatherElements(GatherElements { axis: 2 }), &[flat, index])?;
        if let Some(inside) = inside {
            let inside = cx.reshape(inside, vec![n, 1, points])?;
            let zero = cx.scalar_like(values, 0.0)?;
            values = cx.emit(Op::Select, &[inside, values, zero])?;
        }
        let weight = match weight {
            Some(weight) => {
                let weight = cx.cast(weight, dtype)?;
                Some(cx.reshape(weight, vec![n, 1, points])?)
            }
            None => None,
        };
        found.push((values, weight));
    }
    Ok(found)
}

/// Whether an index is one of the axis.
fn within(cx: &mut NodeContext<'_>, index: ValueId, size: usize) -> Result<ValueId, Fault> {
    let (zero, last) = (cx.scalar_like(index, 0.0)?, cx.scalar_like(index, size as f64 - 1.0)?);
    let low = cx.emit(Op::Compare(CompareFn::Ge), &[index, zero])?;
    let high = cx.emit(Op::Compare(CompareFn::Le), &[index, last])?;
    cx.emit(Op::Logical(LogicalFn::And), &[low, high])
}

/// The image at these coordinates, `[N, C, P]`.
fn sampled(
    cx: &mut NodeContext<'_>,
    image: ValueId,
    coordinates: &[ValueId],
    mode: &str,
    outside: Outside,
) -> Result<ValueId, Fault> {
    let mut sum = None;
    for (values, weight) in taken(cx, image, coordinates, mode, outside)? {
        let part = match weight {
            Some(weight) => binary(cx, BinaryFn::Mul, values, weight)?,
            None => values,
        };
        sum = Some(match sum {
            Some(sum) => binary(cx, BinaryFn::Add, sum, part)?,
            None => part,
        });
    }
    sum.ok_or_else(|| Fault::Misfit("the image has no spatial axes".into()))
}

fn grid_sample(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, grid) = (cx.input(0)?, cx.input(1)?);
    let (dims, shape) = (cx.dims(x), cx.dims(grid));
    let axes = dims.len().saturating_sub(2);
    if axes == 0 || shape.len() != axes + 2 || shape[axes + 1] != axes || shape[0] != dims[0] {
        return misfit(format!("a grid {} for {}", cx.ty(grid), cx.ty(x)));
    }
    if dims.contains(&0) {
        return misfit(format!("an image without elements: {}", cx.ty(x)));
    }
    let mode = match cx.text("mode", "linear").as_str() {
        "linear" | "bilinear" => "linear",
        "cubic" | "bicubic" => "cubic",
        "nearest" => "nearest",
        other => return Err(Fault::Attribute(format!("mode = \"{other}\""))),
    };
    let align = cx.int("align_corners", 0) != 0;
    let outside = match cx.text("padding_mode", "zeros").as_str() {
        "zeros" => Outside::Zero,
        "border" => Outside::Border,
        "reflection" => Outside::Mirror { align },
        other => return Err(Fault::Attribute(format!("padding_mode = \"{other}\""))),
    };
    let points: usize = shape[1..=axes].iter().product();
    let flat = cx.reshape(grid, vec![dims[0], points, axes])?;
    let mut coordinates = components(cx, flat)?;
    // The grid names the last axis first.
    coordinates.reverse();
    for (axis, x) in coordinates.iter_mut().enumerate() {
        let n = dims[2 + axis];
        let (scale, shift) = match align {
            true => ((n as f64 - 1.0) / 2.0, (n as f64 - 1.0) / 2.0),
            false => (n as f64 / 2.0, (n as f64 - 1.0) / 2.0),
        };
        let scaled = with_scalar(cx, BinaryFn::Mul, *x, scale)?;
        *x = with_scalar(cx, BinaryFn::Add, scaled, shift)?;
        if mode == "nearest" {
            *x = unary(cx, UnaryFn::Round, *x)?;
        }
        if mode != "cubic" {
            *x = outside.inside(cx, *x, n)?;
        }
    }
    let y = sampled(cx, x, &coordinates, mode, outside)?;
    let mut result = vec![dims[0], dims[1]];
    result.extend(&shape[1..=axes]);
    one(cx.reshape(y, result)?)
}

/// The grid `[N, sizes…, axes]` of an affine map `theta[N, axes, axes + 1]` of normalized coordinates.
fn affine_grid(cx: &mut NodeContext<'_>) -> Outcome {
    let theta = cx.input(0)?;
    let Some(size) = cx.known_ints(1, "the size")? else { return misfit("the size is missing") };
    let size = cx.sizes(&size, "the size")?;
    let axes = size.len().saturating_sub(2);
    if axes == 0 || cx.dims(theta) != [size[0], axes, axes + 1] {
        return misfit(format!("a map {} for an image {size:?}", cx.ty(theta)));
    }
    let align = cx.int("align_corners", 0) != 0;
    let sizes = &size[2..];
    let points: usize = sizes.iter().product();
    let place = |i: usize, n: usize| match (align, n) {
        (true, 1) => 0.0,
        (true, _) => 2.0 * i as f64 / (n as f64 - 1.0) - 1.0,
        (false, _) => (2.0 * i as f64 + 1.0) / n as f64 - 1.0,
    };
    cx.room(&[points, axes + 1])?;
    let mut base = Vec::with_capacity(points * (axes + 1));
    for point in 0..points {
        let mut rest = point;
        let mut row = Vec::with_capacity(axes);
        for &n in sizes.iter().rev() {
            row.push(place(rest % n, n));
            rest /= n;
        }
        base.extend(row);
        base.push(1.0);
    }
    let dtype = cx.ty(theta).dtype;
    let base = cx.floats(dtype, &[1, points, axes + 1], |i| base[i])?;
    let base = cx.expand(base, vec![size[0], points, axes + 1])?;
    let matmul = Op::MatMul(MatMul { trans_b: true, ..MatMul::default() });
    let grid = cx.emit(matmul, &[base, theta])?;
    let mut dims = vec![size[0]];
    dims.extend(sizes);
    dims.push(axes);
    one(cx.reshape(grid, dims)?)
}

fn roi_align(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, rois, batch) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let (&[_, c, h, w], &[r, 4]) = (cx.dims(x).as_slice(), cx.dims(rois).as_slice()) else {
        return misfit(format!("an image {} with regions {}", cx.ty(x), cx.ty(rois)));
    };
    let (oh, ow) = (cx.count("output_height", 1), cx.count("output_width", 1));
    let samples = cx.count("sampling_ratio", 0);
    if samples == 0 {
        return Err(Fault::Dynamic("the number of samples (sampling_ratio = 0)".into()));
    }
    let default = if cx.opset < 16 { "output_half_pixel" } else { "half_pixel" };
    let mode = cx.text("coordinate_transformation_mode", default);
    let half = mode == "half_pixel";
    let scale = cx.float("spatial_scale", 1.0);
    let corners = components(cx, rois)?;
    let mut corner = Vec::new();
    for x in corners {
        let x = with_scalar(cx, BinaryFn::Mul, x, scale)?;
        corner.push(if half { with_scalar(cx, BinaryFn::Sub, x, 0.5)? } else { x });
    }
    // Per axis (y, x): start and size of a region, size and bins of the result.
    let mut coordinates = Vec::new();
    let mut valid = None;
    for (axis, (low, high, n, bins)) in
        [(corner[1], corner[3], h, oh), (corner[0], corner[2], w, ow)].into_iter().enumerate()
    {
        let mut extent = binary(cx, BinaryFn::Sub, high, low)?;
        if !half {
            extent = cx.emit(Op::Clip(Clip { min: Some(1.0), max: None }), &[extent])?;
        }
        let dtype = cx.ty(low).dtype;
        let n_places = bins * samples;
        let place = |i: usize| (i as f64 + 0.5) / n_places as f64;
        let places = cx.floats(dtype, &[1, n_places], place)?;
        let (low, extent) = (cx.reshape(low, vec![r, 1])?, cx.reshape(extent, vec![r, 1])?);
        let x = binary(cx, BinaryFn::Mul, extent, places)?;
        let x = binary(cx, BinaryFn::Add, x, low)?;
        // More than one element outside counts as zero, less as the border.
        let (least, most) = (cx.scalar_like(x, -1.0)?, cx.scalar_like(x, n as f64)?);
        let above = cx.emit(Op::Compare(CompareFn::Ge), &[x, least])?;
        let below = cx.emit(Op::Compare(CompareFn::Le), &[x, most])?;
        let inside = cx.emit(Op::Logical(LogicalFn::And), &[above, below])?;
        let x = limited(cx, x, n as f64 - 1.0)?;
        // All pairs of rows and columns.
        let (rows, columns) = (oh * samples, ow * samples);
        let shape = if axis == 0 { vec![r, rows, 1] } else { vec![r, 1, columns] };
        let spread = |cx: &mut NodeContext<'_>, v: ValueId| {
            let v = cx.reshape(v, shape.clone())?;
            let v = cx.expand(v, vec![r, rows, columns])?;
            cx.reshape(v, vec![r, rows * columns])
        };
        coordinates.push(spread(cx, x)?);
        let inside = spread(cx, inside)?;
        valid = Some(match valid {
            Some(valid) => cx.emit(Op::Logical(LogicalFn::And), &[valid, inside])?,
            None => inside,
        });
    }
    let image = cx.emit(Op::Gather(Gather { axis: 0 }), &[x, batch])?;
    let parts = taken(cx, image, &coordinates, "linear", Outside::Border)?;
    let max = match cx.text("mode", "avg").as_str() {
        "avg" => false,
        "max" => true,
        other => return Err(Fault::Attribute(format!("mode = \"{other}\""))),
    };
    let mut y = None;
    for (values, weight) in parts {
        let part = match weight {
            Some(weight) => binary(cx, BinaryFn::Mul, values, weight)?,
            None => values,
        };
        let join = if max { BinaryFn::Max } else { BinaryFn::Add };
        y = Some(match y {
            Some(y) => binary(cx, join, y, part)?,
            None => part,
        });
    }
    let (Some(mut y), Some(valid)) = (y, valid) else { return misfit("no samples") };
    let valid = cx.reshape(valid, vec![r, 1, oh * samples * ow * samples])?;
    let zero = cx.scalar_like(y, 0.0)?;
    y = cx.emit(Op::Select, &[valid, y, zero])?;
    y = cx.reshape(y, vec![r, c, oh, samples, ow, samples])?;
    let f = if max { ReduceFn::Max } else { ReduceFn::Mean };
    y = reduced(cx, f, y, vec![3, 5])?;
    one(cx.reshape(y, vec![r, c, oh, ow])?)
}

/// Convolution whose taps lie where `offset` moves them, each times its `mask`.
fn deform_conv(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, weight, offset) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let (&[n, c, h, w], &[m, per_group, kh, kw]) =
        (cx.dims(x).as_slice(), cx.dims(weight).as_slice())
    else {
        return misfit("only images with two spatial axes are read");
    };
    let (groups, moved) = (cx.count("group", 1), cx.count("offset_group", 1));
    let &[_, _, oh, ow] = cx.dims(offset).as_slice() else {
        return misfit("the offset needs 4 axes");
    };
    let fits = groups > 0 && moved > 0 && c == per_group * groups && c.is_multiple_of(moved);
    if !fits || !m.is_multiple_of(groups) {
        return misfit(format!("{groups} groups and {moved} of offsets for {c} channels"));
    }
    let (strides, dilations) = (per_axis(cx, "strides", 2, 1)?, per_axis(cx, "dilations", 2, 1)?);
    let pads = cx.ints("pads").unwrap_or_else(|| vec![0; 4]);
    if pads.len() != 4 {
        return misfit(format!("pads has {} entries for 2 spatial axes", pads.len()));
    }
    let (taps, points) = (kh * kw, oh * ow);
    cx.room(&[2, taps, points])?;
    // Where the taps lie without offsets, `[taps · points]` per axis.
    let mut fixed = [Vec::with_capacity(taps * points), Vec::with_capacity(taps * points)];
    for tap in 0..taps {
        for point in 0..points {
            for (axis, (i, k)) in
                [(point / ow, tap / kw), (point % ow, tap % kw)].into_iter().enumerate()
            {
                let place = (i * strides[axis] + k * dilations[axis]) as f64 - pads[axis] as f64;
                fixed[axis].push(place);
            }
        }
    }
    // `[N · moved, taps, 2, points]`
    let offsets = cx.reshape(offset, vec![n * moved, taps, 2, points])?;
    let offsets = permute(cx, offsets, vec![0, 1, 3, 2])?;
    let offsets = cx.reshape(offsets, vec![n * moved, taps * points, 2])?;
    let mut coordinates = components(cx, offsets)?;
    for (x, fixed) in coordinates.iter_mut().zip(fixed) {
        let dtype = cx.ty(*x).dtype;
        let fixed = cx.floats(dtype, &[1, taps * points], |i| fixed[i])?;
        *x = binary(cx, BinaryFn::Add, *x, fixed)?;
    }
    let image = cx.reshape(x, vec![n * moved, c / moved, h, w])?;
    let mut columns = sampled(cx, image, &coordinates, "linear", Outside::Zero)?;
    if let Some(mask) = cx.optional(4)? {
        let mask = cx.reshape(mask, vec![n * moved, 1, taps * points])?;
        columns = binary(cx, BinaryFn::Mul, columns, mask)?;
    }
    let columns = cx.reshape(columns, vec![n, groups, per_group * taps, points])?;
    let kernel = cx.reshape(weight, vec![1, groups, m / groups, per_group * taps])?;
    let kernel = cx.expand(kernel, vec![n, groups, m / groups, per_group * taps])?;
    let y = cx.emit(Op::MatMul(MatMul::default()), &[kernel, columns])?;
    let mut y = cx.reshape(y, vec![n, m, oh, ow])?;
    if let Some(bias) = cx.optional(3)? {
        let bias = cx.reshape(bias, vec![m, 1, 1])?;
        y = binary(cx, BinaryFn::Add, y, bias)?;
    }
    one(y)
}
