//! `GridSample`, which samples an image at given coordinates, and `AffineGrid`, which computes coordinates.
//!
//! A sample is a weighted sum of neighboring elements: every neighbor is gathered and multiplied by one weight per axis, and
//! omitted where it lies in zero padding. Source: ONNX GridSample-20 and AffineGrid-20.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use frit_ir::ops::UnaryFn;
use frit_ir::ops::{BinaryFn, Clip, CompareFn, GatherNd, LogicalFn, MatMul, Slice, Transpose};
use frit_ir::shape::product;
use frit_ir::{DType, Op, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("AffineGrid", &["align_corners"], affine_grid),
    op("GridSample", &["align_corners", "mode", "padding_mode"], grid_sample),
];

/// Where the centers of `n` elements lie between −1 and 1.
fn centers(n: usize, align_corners: bool) -> Vec<f64> {
    let (count, last) = (n as f64, n.saturating_sub(1) as f64);
    let center = |i: f64| match align_corners {
        true if n == 1 => 0.0,
        true => 2.0 * i / last - 1.0,
        false => (2.0 * i + 1.0) / count - 1.0,
    };
    (0..n).map(|i| center(i as f64)).collect()
}

/// `theta[N, d, d + 1]` applied to the centers of all elements → `[N, sizes…, d]`, the last axis in the
/// order x, y, z.
fn affine_grid(cx: &mut NodeContext<'_>) -> Outcome {
    let theta = cx.input(0)?;
    let size = cx.known_ints(1, "the size")?.unwrap_or_default();
    let size = cx.sizes(&size, "the size")?;
    let spatial = size.get(2..).unwrap_or_default();
    let d = spatial.len();
    if d == 0 || cx.dims(theta) != [size[0], d, d + 1] {
        return misfit(format!("theta {} for a grid of size {size:?}", cx.ty(theta)));
    }
    let align_corners = cx.int("align_corners", 0) != 0;
    cx.room(&[product(spatial), d + 1])?;
    let along: Vec<Vec<f64>> = spatial.iter().map(|n| centers(*n, align_corners)).collect();
    let count: usize = spatial.iter().product();
    let mut places = Vec::with_capacity(count * (d + 1));
    for at in 0..count {
        let (mut rest, mut place) = (at, vec![1.0; d + 1]);
        for axis in (0..d).rev() {
            place[d - 1 - axis] = along[axis][rest % spatial[axis]];
            rest /= spatial[axis];
        }
        places.extend(place);
    }
    let dtype = cx.ty(theta).dtype;
    let places = cx.floats(dtype, &[count, d + 1], |i| places[i])?;
    let matmul = Op::MatMul(MatMul { trans_b: true, ..MatMul::default() });
    let grid = cx.emit(matmul, &[places, theta])?;
    one(cx.reshape(grid, [&[size[0]], spatial, &[d]].concat())?)
}

/// What lies beyond the border.
#[derive(Clone, Copy, PartialEq)]
enum Beyond {
    Zeros,
    Border,
    Reflection,
}

/// Neighbors along one axis: their indices, weights and whether they exist, each `[N, P]`.
struct Neighbor {
    index: ValueId,
    weight: Option<ValueId>,
    inside: Option<ValueId>,
}

fn grid_sample(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, grid) = (cx.input(0)?, cx.input(1)?);
    let (dims, grid_dims) = (cx.dims(x), cx.dims(grid));
    let d = dims.len().saturating_sub(2);
    if d == 0
        || grid_dims.len() != d + 2
        || grid_dims[0] != dims[0]
        || grid_dims[d + 1] != d
        || dims.contains(&0)
    {
        return misfit(format!("the grid {} for the operand {}", cx.ty(grid), cx.ty(x)));
    }
    let align_corners = cx.int("align_corners", 0) != 0;
    let beyond = match cx.text("padding_mode", "zeros").as_str() {
        "zeros" => Beyond::Zeros,
        "border" => Beyond::Border,
        "reflection" => Beyond::Reflection,
        other => return Err(Fault::Attribute(format!("padding_mode = \"{other}\""))),
    };
    let (n, c, spatial) = (dims[0], dims[1], &dims[2..]);
    let outer = &grid_dims[1..=d];
    let points: usize = outer.iter().product();
    let grid = cx.reshape(grid, vec![n, points, d])?;
    let mode = cx.text("mode", "linear");
    let mut axes = Vec::new();
    for (axis, &size) in spatial.iter().enumerate() {
        // The grid names the last axis first.
        let start = vec![0, 0, d - 1 - axis];
        let part = Slice { start, size: vec![n, points, 1], step: vec![1; 3] };
        let place = cx.emit(Op::Slice(part), &[grid])?;
        let place = cx.reshape(place, vec![n, points])?;
        let place = unnormalized(cx, place, size, align_corners)?;
        let fold = Fold { size, align_corners, beyond };
        axes.push(match mode.as_str() {
            "nearest" => nearest(cx, place, &fold)?,
            "linear" | "bilinear" => linear(cx, place, &fold)?,
            "cubic" | "bicubic" => cubic(cx, place, &fold)?,
            other => return Err(Fault::Attribute(format!("mode = \"{other}\""))),
        });
    }
    let flat = cx.reshape(x, vec![n, c, spatial.iter().product()])?;
    let rows = cx.emit(Op::Transpose(Transpose { perm: vec![0, 2, 1] }), &[flat])?;
    let y = sum_of_neighbors(cx, rows, &axes, spatial)?;
    let y = cx.emit(Op::Transpose(Transpose { perm: vec![0, 2, 1] }), &[y])?;
    one(cx.reshape(y, [&[n, c], outer].concat())?)
}

/// The sum over all combinations of one neighbor per axis, of `rows[N, …, C]` → `[N, P, C]`.
fn sum_of_neighbors(
    cx: &mut NodeContext<'_>,
    rows: ValueId,
    axes: &[Vec<Neighbor>],
    spatial: &[usize],
) -> Result<ValueId, Fault> {
    let combinations: usize = axes.iter().map(Vec::len).product();
    let mut sum = None;
    for mut combination in 0..combinations {
        let (mut index, mut weight, mut inside) = (None, None, None);
        for (neighbors, &size) in axes.iter().zip(spatial) {
            let neighbor = &neighbors[combination % neighbors.len()];
            combination /= neighbors.len();
            index = Some(match index {
                None => neighbor.index,
                Some(outer) => {
                    let size = cx.scalar_like(outer, size as f64)?;
                    let outer = cx.emit(Op::Binary(BinaryFn::Mul), &[outer, size])?;
                    cx.emit(Op::Binary(BinaryFn::Add), &[outer, neighbor.index])?
                }
            });
            let both = |cx: &mut NodeContext<'_>,
                        op: Op,
                        a: Option<ValueId>,
                        b: Option<ValueId>| match (a, b) {
                (Some(a), Some(b)) => cx.emit(op, &[a, b]).map(Some),
                (a, b) => Ok(a.or(b)),
            };
            weight = both(cx, Op::Binary(BinaryFn::Mul), weight, neighbor.weight)?;
            inside = both(cx, Op::Logical(LogicalFn::And), inside, neighbor.inside)?;
        }
        let index = index.ok_or_else(|| Fault::Misfit("there is no axis".into()))?;
        let column = [cx.dims(index), vec![1]].concat();
        let index = cx.reshape(index, column.clone())?;
        let mut term = cx.emit(Op::GatherNd(GatherNd { batch_dims: 1 }), &[rows, index])?;
        if let Some(weight) = weight {
            let weight = cx.reshape(weight, column.clone())?;
            term = cx.emit(Op::Binary(BinaryFn::Mul), &[term, weight])?;
        }
        if let Some(inside) = inside {
            let (inside, zero) = (cx.reshape(inside, column)?, cx.scalar_like(term, 0.0)?);
            term = cx.emit(Op::Select, &[inside, term, zero])?;
        }
        sum = Some(match sum {
            None => term,
            Some(sum) => cx.emit(Op::Binary(BinaryFn::Add), &[sum, term])?,
        });
    }
    sum.ok_or_else(|| Fault::Misfit("there is no neighbor".into()))
}

fn scaled(cx: &mut NodeContext<'_>, x: ValueId, by: f64, plus: f64) -> Result<ValueId, Fault> {
    let (by, plus) = (cx.scalar_like(x, by)?, cx.scalar_like(x, plus)?);
    let x = cx.emit(Op::Binary(BinaryFn::Mul), &[x, by])?;
    cx.emit(Op::Binary(BinaryFn::Add), &[x, plus])
}

/// From −1 … 1 to element numbers.
fn unnormalized(
    cx: &mut NodeContext<'_>,
    x: ValueId,
    size: usize,
    align_corners: bool,
) -> Result<ValueId, Fault> {
    let (n, last) = (size as f64, size as f64 - 1.0);
    match align_corners {
        true => scaled(cx, x, last / 2.0, last / 2.0),
        false => scaled(cx, x, n / 2.0, last / 2.0),
    }
}

/// How places along an axis of `size` elements are brought inside.
struct Fold {
    size: usize,
    align_corners: bool,
    beyond: Beyond,
}

impl Fold {
    /// The place that stands for `place`; one far outside stays so where zeros lie beyond.
    fn place(&self, cx: &mut NodeContext<'_>, mut place: ValueId) -> Result<ValueId, Fault> {
        let last = self.size as f64 - 1.0;
        if self.beyond == Beyond::Zeros {
            return Ok(place);
        }
        if self.beyond == Beyond::Reflection {
            // Between the outermost centers, or the edges of the outermost elements.
            let (low, high) = if self.align_corners { (0.0, last) } else { (-0.5, last + 0.5) };
            place = reflected(cx, place, low, high - low)?;
        }
        cx.emit(Op::Clip(Clip { min: Some(0.0), max: Some(last) }), &[place])
    }

    /// The element at a whole-numbered place, with this weight.
    fn element(
        &self,
        cx: &mut NodeContext<'_>,
        place: ValueId,
        weight: Option<ValueId>,
    ) -> Result<Neighbor, Fault> {
        let last = self.size as f64 - 1.0;
        let clip = Op::Clip(Clip { min: Some(0.0), max: Some(last) });
        let bounded = cx.emit(clip, &[place])?;
        let inside = match self.beyond {
            Beyond::Zeros => Some(cx.emit(Op::Compare(CompareFn::Eq), &[place, bounded])?),
            _ => None,
        };
        Ok(Neighbor { index: cx.cast(bounded, DType::I64)?, weight, inside })
    }
}

/// Reflected at `low` and `low + width` until it lies between.
fn reflected(cx: &mut NodeContext<'_>, x: ValueId, low: f64, width: f64) -> Result<ValueId, Fault> {
    if width <= 0.0 {
        return cx.scalar_like(x, 0.0).and_then(|zero| cx.expand(zero, cx.dims(x)));
    }
    // The distance to the nearest multiple of 2·width is a triangle wave.
    let moved = scaled(cx, x, 1.0, -low)?;
    let turns = scaled(cx, moved, 0.5 / width, 0.5)?;
    let turns = cx.emit(Op::Unary(UnaryFn::Floor), &[turns])?;
    let whole = scaled(cx, turns, 2.0 * width, 0.0)?;
    let rest = cx.emit(Op::Binary(BinaryFn::Sub), &[moved, whole])?;
    let rest = cx.emit(Op::Unary(UnaryFn::Abs), &[rest])?;
    scaled(cx, rest, 1.0, low)
}

fn nearest(cx: &mut NodeContext<'_>, place: ValueId, fold: &Fold) -> Result<Vec<Neighbor>, Fault> {
    let place = fold.place(cx, place)?;
    let place = cx.emit(Op::Unary(UnaryFn::Round), &[place])?;
    Ok(vec![fold.element(cx, place, None)?])
}

fn linear(cx: &mut NodeContext<'_>, place: ValueId, fold: &Fold) -> Result<Vec<Neighbor>, Fault> {
    let place = fold.place(cx, place)?;
    let low = cx.emit(Op::Unary(UnaryFn::Floor), &[place])?;
    let upper = cx.emit(Op::Binary(BinaryFn::Sub), &[place, low])?;
    let lower = scaled(cx, upper, -1.0, 1.0)?;
    let high = scaled(cx, low, 1.0, 1.0)?;
    Ok(vec![fold.element(cx, low, Some(lower))?, fold.element(cx, high, Some(upper))?])
}

/// Four elements, with the weights of Keys 1981 for a = −0.75; each is brought inside for itself.
fn cubic(cx: &mut NodeContext<'_>, place: ValueId, fold: &Fold) -> Result<Vec<Neighbor>, Fault> {
    let low = cx.emit(Op::Unary(UnaryFn::Floor), &[place])?;
    let t = cx.emit(Op::Binary(BinaryFn::Sub), &[place, low])?;
    let a = -0.75;
    // Coefficients of t³, t², t, 1.
    let weights = [
        [a, -2.0 * a, a, 0.0],
        [a + 2.0, -(a + 3.0), 0.0, 1.0],
        [-(a + 2.0), 2.0 * a + 3.0, -a, 0.0],
        [-a, a, 0.0, 0.0],
    ];
    let mut neighbors = Vec::new();
    for (i, [c3, c2, c1, c0]) in weights.into_iter().enumerate() {
        let mut weight = scaled(cx, t, c3, c2)?;
        for c in [c1, c0] {
            weight = cx.emit(Op::Binary(BinaryFn::Mul), &[weight, t])?;
            weight = scaled(cx, weight, 1.0, c)?;
        }
        let at = scaled(cx, low, 1.0, i as f64 - 1.0)?;
        let at = fold.place(cx, at)?;
        // A reflection of a whole number is whole, but for rounding.
        let at = cx.emit(Op::Unary(UnaryFn::Round), &[at])?;
        neighbors.push(fold.element(cx, at, Some(weight))?);
    }
    Ok(neighbors)
}
