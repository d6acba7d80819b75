//! Resize and Upsample, one axis at a time: nearest gathers elements, linear and cubic multiply by a constant weight matrix.
//! Source: ONNX Resize-19.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use frit_ir::ops::{Gather, MatMul, Transpose};
use frit_ir::shape::MAX_ELEMENTS;
use frit_ir::{DType, Op, Tensor, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op(
        "Resize",
        &[
            "antialias",
            "axes",
            "coordinate_transformation_mode",
            "cubic_coeff_a",
            "exclude_outside",
            "extrapolation_value",
            "keep_aspect_ratio_policy",
            "mode",
            "nearest_mode",
        ],
        resize,
    ),
    op("Upsample", &["mode", "scales"], upsample),
];

/// How an axis of `n` elements becomes one of `m`.
struct Axis<'a> {
    n: usize,
    m: usize,
    scale: f64,
    coordinates: &'a str,
    /// Begin and end of the part that `tf_crop_and_resize` takes, as fractions of the axis.
    part: (f64, f64),
}

impl Axis<'_> {
    /// Where result element `x` lies among the operand's elements.
    fn place(&self, x: usize) -> Result<f64, Fault> {
        let (x, n, m) = (x as f64, self.n as f64, self.m as f64);
        // The result's size before it is rounded down.
        let exact = self.scale * n;
        let half_pixel = (x + 0.5) / self.scale - 0.5;
        Ok(match self.coordinates {
            "half_pixel" => half_pixel,
            "pytorch_half_pixel" if self.m > 1 => half_pixel,
            "pytorch_half_pixel" => 0.0,
            "half_pixel_symmetric" => n / 2.0 * (1.0 - m / exact) + half_pixel,
            "align_corners" if exact != 1.0 => x * (n - 1.0) / (exact - 1.0),
            "align_corners" => 0.0,
            "asymmetric" => x / self.scale,
            "tf_crop_and_resize" if self.m > 1 => {
                let (begin, end) = self.part;
                (begin + x * (end - begin) / (m - 1.0)) * (n - 1.0)
            }
            "tf_crop_and_resize" => 0.5 * (self.part.0 + self.part.1) * (n - 1.0),
            other => {
                return Err(Fault::Attribute(format!("coordinate_transformation_mode = {other}")));
            }
        })
    }

    /// The result elements that lie outside the operand, where cropping may reach.
    fn outside(&self) -> Result<Vec<bool>, Fault> {
        let last = (self.n - 1) as f64;
        let crops = self.coordinates == "tf_crop_and_resize";
        let is_outside = |x: usize| Ok(crops && !(0.0..=last).contains(&self.place(x)?));
        if !crops { Ok(Vec::new()) } else { (0..self.m).map(is_outside).collect() }
    }

    /// The operand's elements that each result element is, by rounding.
    fn nearest(&self, rounding: &str) -> Result<Vec<i64>, Fault> {
        let pick = |x: usize| {
            let place = self.place(x)?;
            let picked = match rounding {
                "round_prefer_floor" => (place - 0.5).ceil(),
                "round_prefer_ceil" => (place + 0.5).floor(),
                "floor" => place.floor(),
                "ceil" => place.ceil(),
                other => return Err(Fault::Attribute(format!("nearest_mode = {other}"))),
            };
            Ok(picked.clamp(0.0, (self.n - 1) as f64) as i64)
        };
        (0..self.m).map(pick).collect()
    }

    /// Counts what [`Axis::weights`] makes and does.
    fn affordable(
        &self,
        cx: &mut NodeContext<'_>,
        reach: f64,
        antialias: bool,
    ) -> Result<(), Fault> {
        cx.room(&[self.m, self.n])?;
        let stretch = if antialias { self.scale.min(1.0) } else { 1.0 };
        let taps = 2.0 * reach / stretch + 1.0;
        if !(1.0..MAX_ELEMENTS as f64).contains(&taps) {
            return misfit(format!("a scale of {}", self.scale));
        }
        cx.work(&[self.m, self.n.max(taps as usize)])
    }

    /// The matrix `[m, n]` of weights: `weight` of the distance, for elements nearer than `reach`. Against
    /// aliasing a smaller result averages over as many more elements. Elements outside count as those at
    /// the border, or not at all.
    fn weights(
        &self,
        (reach, weight): (f64, impl Fn(f64) -> f64),
        (antialias, exclude_outside): (bool, bool),
    ) -> Result<Vec<f64>, Fault> {
        let stretch = if antialias { self.scale.min(1.0) } else { 1.0 };
        let mut matrix = vec![0.0; self.m * self.n];
        for (x, row) in matrix.chunks_exact_mut(self.n.max(1)).enumerate() {
            let place = self.place(x)?;
            let (first, last) = (place - reach / stretch, place + reach / stretch);
            for at in first.ceil() as isize..=last.floor() as isize {
                let inside = at.clamp(0, self.n as isize - 1);
                if !exclude_outside || inside == at {
                    row[inside as usize] += weight((at as f64 - place) * stretch);
                }
            }
            let sum: f64 = row.iter().sum();
            if (exclude_outside || stretch < 1.0) && sum != 0.0 {
                row.iter_mut().for_each(|w| *w /= sum);
            }
        }
        Ok(matrix)
    }
}

/// The weight of an element at a distance.
fn linear(d: f64) -> f64 {
    (1.0 - d.abs()).max(0.0)
}

/// The weight of an element at a distance (Keys 1981).
fn cubic(a: f64) -> impl Fn(f64) -> f64 {
    move |d| match d.abs() {
        d if d <= 1.0 => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
        d if d < 2.0 => ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a,
        _ => 0.0,
    }
}

fn resize(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let dims = cx.dims(x);
    // Before opset 11 the scales are the second operand.
    let (scales_at, sizes_at) = if cx.opset < 11 { (1, 3) } else { (2, 3) };
    let scales = match cx.known(scales_at, "the scales")? {
        Some(scales) if scales.numel() > 0 => Some(scales.to_f64s()),
        _ => None,
    };
    let sizes = cx.known_ints(sizes_at, "the sizes")?.filter(|s| !s.is_empty());
    let axes: Vec<usize> = match cx.ints("axes") {
        Some(axes) => {
            let axes = axes.into_iter().map(|a| cx.axis_in(dims.len(), a));
            axes.collect::<Result<_, _>>()?
        }
        None => (0..dims.len()).collect(),
    };
    let mode = cx.text("coordinate_transformation_mode", default_coordinates(cx.opset));
    let region = match mode == "tf_crop_and_resize" {
        true => cx.known(1, "the region")?.map(|r| r.to_f64s()).unwrap_or_default(),
        false => [vec![0.0; axes.len()], vec![1.0; axes.len()]].concat(),
    };
    if region.len() != 2 * axes.len() {
        return misfit(format!("a region of {} numbers for {} axes", region.len(), axes.len()));
    }
    let mut y = x;
    let given = scales.as_ref().map(Vec::len).or(sizes.as_ref().map(Vec::len));
    if given != Some(axes.len()) {
        return misfit(format!("{} scales or sizes for {} axes", given.unwrap_or(0), axes.len()));
    }
    for (i, &axis) in axes.iter().enumerate() {
        let n = dims[axis];
        let part = (region[i], region[axes.len() + i]);
        let taken = part.1 - part.0;
        if !taken.is_finite() {
            return misfit(format!("a region {region:?}"));
        }
        let (scale, m) = match (&scales, &sizes) {
            (Some(scales), _) => (scales[i], (n as f64 * taken * scales[i]).floor() as usize),
            (None, Some(sizes)) => scale_of(cx, &cx.sizes(sizes, "sizes")?, &axes, i)?,
            (None, None) => return misfit("neither scales nor sizes are given"),
        };
        if !(scale.is_finite() && scale > 0.0) || m > MAX_ELEMENTS {
            return misfit(format!("axis {axis} of {n} elements by a scale of {scale}"));
        }
        if m != n || scale != 1.0 || part != (0.0, 1.0) {
            y = along(cx, y, axis, &Axis { n, m, scale, coordinates: &mode, part })?;
        }
    }
    one(y)
}

/// Scale and size of the `i`-th axis for these sizes of the axes.
fn scale_of(
    cx: &NodeContext<'_>,
    sizes: &[usize],
    axes: &[usize],
    i: usize,
) -> Result<(f64, usize), Fault> {
    let dims = cx.dims(cx.input(0)?);
    let scale = |i: usize| sizes[i] as f64 / dims[axes[i]].max(1) as f64;
    let all = (0..axes.len()).map(scale);
    let common = match cx.text("keep_aspect_ratio_policy", "stretch").as_str() {
        "stretch" => return Ok((scale(i), sizes[i])),
        "not_larger" => all.fold(f64::INFINITY, f64::min),
        "not_smaller" => all.fold(0.0, f64::max),
        other => return Err(Fault::Attribute(format!("keep_aspect_ratio_policy = {other}"))),
    };
    Ok((common, (common * dims[axes[i]] as f64 + 0.5).floor() as usize))
}

fn default_coordinates(opset: i64) -> &'static str {
    if opset < 11 { "asymmetric" } else { "half_pixel" }
}

fn upsample(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let dims = cx.dims(x);
    let Some(scales) = cx.known(1, "the scales")?.map(|t| t.to_f64s()) else {
        return misfit("the scales are missing");
    };
    if scales.len() != dims.len() {
        return misfit(format!("{} scales for {} axes", scales.len(), dims.len()));
    }
    let mut y = x;
    for (axis, (&n, &scale)) in dims.iter().zip(&scales).enumerate() {
        let m = (n as f64 * scale).floor() as usize;
        let part = (0.0, 1.0);
        if !(scale.is_finite() && scale > 0.0) || m > MAX_ELEMENTS {
            return misfit(format!("axis {axis} of {n} elements by a scale of {scale}"));
        }
        if m != n {
            y = along(cx, y, axis, &Axis { n, m, scale, coordinates: "asymmetric", part })?;
        }
    }
    one(y)
}

/// Resizes one axis; what lies outside the operand becomes `extrapolation_value`.
fn along(
    cx: &mut NodeContext<'_>,
    x: ValueId,
    axis: usize,
    resized: &Axis<'_>,
) -> Result<ValueId, Fault> {
    let y = inside(cx, x, axis, resized)?;
    let outside = resized.outside()?;
    if !outside.contains(&true) {
        return Ok(y);
    }
    let mut shape = vec![1; cx.dims(y).len()];
    shape[axis] = resized.m;
    let outside = outside.into_iter().map(i64::from).collect();
    let outside = cx.constant(Tensor::ints(DType::Bool, shape, outside))?;
    let value = cx.scalar_like(y, cx.float("extrapolation_value", 0.0))?;
    cx.emit(Op::Select, &[outside, value, y])
}

/// Resizes one axis, as if its border went on.
fn inside(
    cx: &mut NodeContext<'_>,
    x: ValueId,
    axis: usize,
    resized: &Axis<'_>,
) -> Result<ValueId, Fault> {
    if resized.n == 0 || resized.m == 0 {
        return misfit(format!("axis {axis} of {} elements to {}", resized.n, resized.m));
    }
    cx.room(&[resized.m])?;
    let borders = (cx.int("antialias", 0) != 0, cx.int("exclude_outside", 0) != 0);
    let weights = match cx.text("mode", "nearest").as_str() {
        "nearest" => {
            let before = if cx.opset < 11 { "floor" } else { "round_prefer_floor" };
            let picked = resized.nearest(&cx.text("nearest_mode", before))?;
            let ids = cx.constant(Tensor::ints(DType::I64, [resized.m], picked))?;
            return cx.emit(Op::Gather(Gather { axis }), &[x, ids]);
        }
        "linear" | "bilinear" => {
            resized.affordable(cx, 1.0, borders.0)?;
            resized.weights((1.0, linear), borders)?
        }
        "cubic" => {
            let a = cx.float("cubic_coeff_a", -0.75);
            resized.affordable(cx, 2.0, borders.0)?;
            resized.weights((2.0, cubic(a)), borders)?
        }
        other => return Err(Fault::Attribute(format!("mode = {other}"))),
    };
    let (dtype, rank) = (cx.ty(x).dtype, cx.dims(x).len());
    let matrix = cx.floats(dtype, &[resized.m, resized.n], |i| weights[i])?;
    let right = Op::MatMul(MatMul { trans_b: true, ..MatMul::default() });
    if axis + 1 == rank && rank >= 2 {
        return cx.emit(right, &[x, matrix]);
    }
    if axis + 2 == rank {
        return cx.emit(Op::MatMul(MatMul::default()), &[matrix, x]);
    }
    if rank < 2 {
        let row = cx.reshape(x, vec![1, resized.n])?;
        let row = cx.emit(right, &[row, matrix])?;
        return cx.reshape(row, vec![resized.m]);
    }
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(axis, rank - 1);
    let swap = Op::Transpose(Transpose { perm });
    let x = cx.emit(swap.clone(), &[x])?;
    let x = cx.emit(right, &[x, matrix])?;
    cx.emit(swap, &[x])
}
