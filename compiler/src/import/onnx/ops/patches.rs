//! Col2Im, and center cropping or padding.

use super::super::context::{NodeContext, Outcome, misfit};
use super::convolution::per_axis;
use super::{Operator, one, op};
use crate::import::dims::checked_numel;
use frit_ir::ops::{Pad, ScatterElements, ScatterFn, Slice};
use frit_ir::shape::product;
use frit_ir::{Op, Tensor, TensorType};

pub(super) const OPERATORS: &[Operator] = &[
    op("CenterCropPad", &["axes"], center_crop_pad),
    op("Col2Im", &["dilations", "pads", "strides"], col2im),
];

/// Axes are cut about their middle where they are too long, and padded with zeros where too short.
/// Source: ONNX CenterCropPad-18.
fn center_crop_pad(cx: &mut NodeContext<'_>) -> Outcome {
    let mut x = cx.input(0)?;
    let Some(wanted) = cx.known_ints(1, "the shape")? else {
        return misfit("the shape is missing");
    };
    let wanted = cx.sizes(&wanted, "the shape")?;
    let dims = cx.dims(x);
    let axes = match cx.ints("axes") {
        Some(axes) => {
            axes.iter().map(|a| cx.axis_in(dims.len(), *a)).collect::<Result<Vec<_>, _>>()?
        }
        None => (0..dims.len()).collect(),
    };
    if axes.len() != wanted.len() {
        return misfit(format!("{} sizes for {} axes", wanted.len(), axes.len()));
    }
    let rank = dims.len();
    let mut cut = Slice { start: vec![0; rank], size: dims.clone(), step: vec![1; rank] };
    let mut border = Pad { low: vec![0; rank], high: vec![0; rank], value: 0.0 };
    for (&axis, &size) in axes.iter().zip(&wanted) {
        if size < dims[axis] {
            (cut.start[axis], cut.size[axis]) = ((dims[axis] - size) / 2, size);
        } else {
            let more = size - dims[axis];
            (border.low[axis], border.high[axis]) = (more / 2, more - more / 2);
        }
    }
    if cut.size != dims {
        x = cx.emit(Op::Slice(cut), &[x])?;
    }
    if border.low.iter().chain(&border.high).any(|p| *p > 0) {
        x = cx.emit(Op::Pad(border), &[x])?;
    }
    one(x)
}

/// Columns `[N, C · taps, blocks]` added up to an image `[N, C, sizes…]`, each at its place. Source:
/// ONNX Col2Im-18.
fn col2im(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let (Some(image), Some(block)) =
        (cx.known_ints(1, "the image's shape")?, cx.known_ints(2, "the block's shape")?)
    else {
        return misfit("the shape of the image or of the block is missing");
    };
    let image = cx.sizes(&image, "the image's shape")?;
    let block = cx.sizes(&block, "the block's shape")?;
    let rank = image.len();
    let (strides, dilations) =
        (per_axis(cx, "strides", rank, 1)?, per_axis(cx, "dilations", rank, 1)?);
    let pads = cx.ints("pads").unwrap_or_else(|| vec![0; 2 * rank]);
    let pads = cx.steps(&pads, "pads")?;
    if block.len() != rank || pads.len() != 2 * rank || block.contains(&0) {
        return misfit(format!("blocks {block:?} and pads {pads:?} for an image {image:?}"));
    }
    let padded: Vec<usize> = (0..rank).map(|i| image[i] + pads[i] + pads[rank + i]).collect();
    let mut blocks = Vec::with_capacity(rank);
    for i in 0..rank {
        let extent = dilations[i].saturating_mul(block[i] - 1).saturating_add(1);
        if strides[i] == 0 || padded[i] < extent {
            return misfit(format!("blocks {block:?} do not fit an image {image:?}"));
        }
        blocks.push((padded[i] - extent) / strides[i] + 1);
    }
    let (taps, places): (usize, usize) = (product(&block), product(&blocks));
    let &[n, columns, found] = cx.dims(x).as_slice() else {
        return misfit(format!("the columns are {}", cx.ty(x)));
    };
    let numel = checked_numel(&padded).unwrap_or(usize::MAX);
    if found != places || !columns.is_multiple_of(taps) || numel == usize::MAX {
        return misfit(format!("columns {} for {places} blocks of {taps}", cx.ty(x)));
    }
    let c = columns / taps;
    cx.room(&[taps, places])?;
    cx.work(&[taps, places, rank])?;
    let mut index = Vec::with_capacity(taps * places);
    for tap in 0..taps {
        for place in 0..places {
            let (mut tap, mut place, mut flat, mut step) = (tap, place, 0, 1);
            for i in (0..rank).rev() {
                flat += step * (place % blocks[i] * strides[i] + tap % block[i] * dilations[i]);
                step *= padded[i];
                (tap, place) = (tap / block[i], place / blocks[i]);
            }
            index.push(flat as i64);
        }
    }
    let index = cx.constant(Tensor::vector_i64(index))?;
    let index = cx.reshape(index, vec![1, 1, taps * places])?;
    let index = cx.expand(index, vec![n, c, taps * places])?;
    let zero = cx.constant(Tensor::splat(TensorType::scalar(cx.ty(x).dtype), 0.0))?;
    let zeros = cx.expand(zero, vec![n, c, numel])?;
    let x = cx.reshape(x, vec![n, c, taps * places])?;
    let scatter = ScatterElements { axis: 2, f: ScatterFn::Add };
    let y = cx.emit(Op::ScatterElements(scatter), &[zeros, index, x])?;
    let mut dims = vec![n, c];
    dims.extend(&padded);
    let y = cx.reshape(y, dims)?;
    if padded == image {
        return one(y);
    }
    let mut cut = Slice { start: vec![0, 0], size: vec![n, c], step: vec![1; rank + 2] };
    cut.start.extend(&pads[..rank]);
    cut.size.extend(&image);
    one(cx.emit(Op::Slice(cut), &[y])?)
}
