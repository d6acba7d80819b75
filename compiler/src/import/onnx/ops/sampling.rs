//! Operators that interpolate between the elements of images: RoiAlign, DeformConv.
//!
//! Both compute coordinates of rows and columns, and gather the four elements around each with their weights. Gradients reach the
//! image through the gather and the coordinates through the weights. Sources: ONNX RoiAlign-22, DeformConv-22.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::composed::{binary, reduced, unary, with_scalar};
use super::convolution::per_axis;
use super::layout::permute;
use super::{Operator, one, op};
use frit_ir::ops::{
    BinaryFn, Clip, CompareFn, Gather, GatherElements, LogicalFn, MatMul, ReduceFn, Slice, UnaryFn,
};
use frit_ir::{DType, Op, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op(
        "DeformConv",
        &["dilations", "group", "kernel_shape", "offset_group", "pads", "strides"],
        deform_conv,
    ),
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
}

/// An element of an axis near each coordinate, all `[N, P]`.
struct Near {
    /// Its index, within the axis.
    index: ValueId,
    weight: ValueId,
    /// Whether it exists, where zeros lie outside.
    inside: Option<ValueId>,
}

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

fn limited(cx: &mut NodeContext<'_>, x: ValueId, max: f64) -> Result<ValueId, Fault> {
    cx.emit(Op::Clip(Clip { min: Some(0.0), max: Some(max) }), &[x])
}

/// The two elements around each coordinate of an axis of `n` elements.
fn near(
    cx: &mut NodeContext<'_>,
    x: ValueId,
    n: usize,
    outside: Outside,
) -> Result<[Near; 2], Fault> {
    let low = unary(cx, UnaryFn::Floor, x)?;
    let high = with_scalar(cx, BinaryFn::Add, low, 1.0)?;
    let of_high = binary(cx, BinaryFn::Sub, x, low)?;
    let negated = unary(cx, UnaryFn::Neg, of_high)?;
    let of_low = with_scalar(cx, BinaryFn::Add, negated, 1.0)?;
    let mut element = |index: ValueId, weight: ValueId| {
        let inside = match outside {
            Outside::Zero => Some(within(cx, index, n)?),
            Outside::Border => None,
        };
        let index = limited(cx, index, n as f64 - 1.0)?;
        Ok::<_, Fault>(Near { index: cx.cast(index, DType::I64)?, weight, inside })
    };
    Ok([element(low, of_low)?, element(high, of_high)?])
}

/// What is read at every point: of each of the four elements around it the values `[N, C, P]` and their weight `[N, 1, P]`.
/// `image` is `[N, C, H, W]`; coordinates, of rows and columns, are `[N, P]` each.
fn taken(
    cx: &mut NodeContext<'_>,
    image: ValueId,
    coordinates: [ValueId; 2],
    outside: Outside,
) -> Result<Vec<(ValueId, ValueId)>, Fault> {
    let &[n, c, h, w] = cx.dims(image).as_slice() else {
        return misfit(format!("an image {}", cx.ty(image)));
    };
    let points = cx.dims(coordinates[0]).get(1).copied().unwrap_or(0);
    let (dtype, [y, x]) = (cx.ty(image).dtype, coordinates);
    let flat = cx.reshape(image, vec![n, c, h * w])?;
    let (rows, columns) = (near(cx, y, h, outside)?, near(cx, x, w, outside)?);
    let mut found = Vec::new();
    for row in &rows {
        let first = with_scalar(cx, BinaryFn::Mul, row.index, w as f64)?;
        for column in &columns {
            let index = binary(cx, BinaryFn::Add, first, column.index)?;
            let index = cx.reshape(index, vec![n, 1, points])?;
            let index = cx.expand(index, vec![n, c, points])?;
            let mut values =
                cx.emit(Op::GatherElements(GatherElements { axis: 2 }), &[flat, index])?;
            if let (Some(row), Some(column)) = (row.inside, column.inside) {
                let inside = cx.emit(Op::Logical(LogicalFn::And), &[row, column])?;
                let inside = cx.reshape(inside, vec![n, 1, points])?;
                let zero = cx.scalar_like(values, 0.0)?;
                values = cx.emit(Op::Select, &[inside, values, zero])?;
            }
            let weight = binary(cx, BinaryFn::Mul, row.weight, column.weight)?;
            let weight = cx.cast(weight, dtype)?;
            found.push((values, cx.reshape(weight, vec![n, 1, points])?));
        }
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
    let (rows, columns) = (coordinates[0], coordinates[1]);
    let parts = taken(cx, image, [rows, columns], Outside::Border)?;
    let max = match cx.text("mode", "avg").as_str() {
        "avg" => false,
        "max" => true,
        other => return Err(Fault::Attribute(format!("mode = \"{other}\""))),
    };
    let mut y = None;
    for (values, weight) in parts {
        let part = binary(cx, BinaryFn::Mul, values, weight)?;
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
    let offsets = components(cx, offsets)?;
    let mut coordinates = [offsets[0], offsets[1]];
    for (x, fixed) in coordinates.iter_mut().zip(fixed) {
        let dtype = cx.ty(*x).dtype;
        let fixed = cx.floats(dtype, &[1, taps * points], |i| fixed[i])?;
        *x = binary(cx, BinaryFn::Add, *x, fixed)?;
    }
    let image = cx.reshape(x, vec![n * moved, c / moved, h, w])?;
    let mut sum = None;
    for (values, weight) in taken(cx, image, coordinates, Outside::Zero)? {
        let part = binary(cx, BinaryFn::Mul, values, weight)?;
        sum = Some(match sum {
            Some(sum) => binary(cx, BinaryFn::Add, sum, part)?,
            None => part,
        });
    }
    let Some(mut columns) = sum else { return misfit("no element is read") };
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
