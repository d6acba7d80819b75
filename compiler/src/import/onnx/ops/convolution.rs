//! Convolution, and the windows of pooling.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, Conv, ConvGradInput, Window};
use frit_ir::{Op, Tensor, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("Conv", &["auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"], conv),
    op(
        "ConvTranspose",
        &[
            "auto_pad",
            "dilations",
            "group",
            "kernel_shape",
            "output_padding",
            "output_shape",
            "pads",
            "strides",
        ],
        transposed,
    ),
];

/// One size per spatial axis, `default` where the attribute is absent.
pub(super) fn per_axis(
    cx: &NodeContext<'_>,
    name: &str,
    rank: usize,
    default: usize,
) -> Result<Vec<usize>, Fault> {
    let Some(values) = cx.ints(name) else { return Ok(vec![default; rank]) };
    if values.len() != rank {
        return misfit(format!("{name} has {} entries for {rank} spatial axes", values.len()));
    }
    cx.steps(&values, name)
}

/// Number of spatial axes of an operand.
pub(super) fn spatial(cx: &NodeContext<'_>, x: ValueId) -> Result<usize, Fault> {
    match cx.dims(x).len() {
        rank @ 3.. => Ok(rank - 2),
        rank => misfit(format!("an operand of rank {rank}, but it needs [N, C, spatial axes …]")),
    }
}

/// How a window of these taps slides over operands of these sizes, by strides, dilations, pads and
/// auto_pad.
pub(super) fn window(
    cx: &NodeContext<'_>,
    sizes: &[usize],
    taps: &[usize],
) -> Result<Window, Fault> {
    let rank = sizes.len();
    let strides = per_axis(cx, "strides", rank, 1)?;
    let dilations = per_axis(cx, "dilations", rank, 1)?;
    let (low, high) = match cx.text("auto_pad", "NOTSET").as_str() {
        "NOTSET" => pads(cx, rank)?,
        "VALID" => (vec![0; rank], vec![0; rank]),
        same @ ("SAME_UPPER" | "SAME_LOWER") => (0..rank)
            .map(|i| {
                let stride = strides[i].max(1);
                let extent = dilations[i] * (taps[i].max(1) - 1) + 1;
                let needed = (sizes[i].div_ceil(stride).max(1) - 1) * stride + extent;
                halves(needed.saturating_sub(sizes[i]), same == "SAME_UPPER")
            })
            .unzip(),
        other => return Err(Fault::Attribute(format!("auto_pad = {other}"))),
    };
    Ok(Window { strides, dilations, low, high })
}

/// The attribute `pads`: all begins, then all ends.
fn pads(cx: &NodeContext<'_>, rank: usize) -> Result<(Vec<usize>, Vec<usize>), Fault> {
    let Some(pads) = cx.ints("pads") else { return Ok((vec![0; rank], vec![0; rank])) };
    if pads.len() != 2 * rank {
        return misfit(format!("pads has {} entries for {rank} spatial axes", pads.len()));
    }
    if pads.iter().any(|p| *p < 0) {
        return Err(Fault::Attribute(format!("negative pads {pads:?}")));
    }
    let pads = cx.steps(&pads, "pads")?;
    Ok((pads[..rank].to_vec(), pads[rank..].to_vec()))
}

/// A total border as begin and end; the larger half at the end, or at the begin.
fn halves(total: usize, larger_at_end: bool) -> (usize, usize) {
    let (small, large) = (total / 2, total - total / 2);
    if larger_at_end { (small, large) } else { (large, small) }
}

/// The spatial sizes of the kernel, which `kernel_shape` repeats.
fn taps(cx: &NodeContext<'_>, w: ValueId, rank: usize) -> Result<Vec<usize>, Fault> {
    let dims = cx.dims(w);
    if dims.len() != rank + 2 {
        return misfit(format!("a kernel of rank {} for {rank} spatial axes", dims.len()));
    }
    let taps = dims[2..].to_vec();
    if per_axis(cx, "kernel_shape", rank, 0)?.iter().zip(&taps).any(|(k, t)| *k != 0 && k != t) {
        return misfit(format!("kernel_shape differs from that of the kernel, {taps:?}"));
    }
    Ok(taps)
}

fn group(cx: &NodeContext<'_>) -> Result<usize, Fault> {
    Ok(cx.steps(&[cx.int("group", 1)], "group")?[0])
}

/// Adds the bias `[M]`, if there is one. The dynamo exporter gives a convolution that has none constant zeros, and
/// with three spatial axes not `M` of them.
fn biased(cx: &mut NodeContext<'_>, y: ValueId) -> Outcome {
    let Some(bias) = cx.optional(2)? else { return one(y) };
    if cx.graph.constant(bias).and_then(Tensor::as_splat) == Some(0.0) {
        return one(y);
    }
    let mut shape = vec![1; cx.dims(y).len() - 1];
    shape[0] = cx.dims(y)[1];
    let bias = cx.reshape(bias, shape)?;
    one(cx.emit(Op::Binary(BinaryFn::Add), &[y, bias])?)
}

fn conv(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, w) = (cx.input(0)?, cx.input(1)?);
    let rank = spatial(cx, x)?;
    let taps = taps(cx, w, rank)?;
    let window = window(cx, &cx.dims(x)[2..], &taps)?;
    let groups = group(cx)?;
    let y = cx.emit(Op::Conv(Conv { window, groups, out: None }), &[x, w])?;
    biased(cx, y)
}

/// Source of the sizes: ONNX ConvTranspose-11.
fn transposed(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, w) = (cx.input(0)?, cx.input(1)?);
    let rank = spatial(cx, x)?;
    let (taps, groups) = (taps(cx, w, rank)?, group(cx)?);
    let sizes = cx.dims(x)[2..].to_vec();
    let strides = per_axis(cx, "strides", rank, 1)?;
    let dilations = per_axis(cx, "dilations", rank, 1)?;
    let extra = per_axis(cx, "output_padding", rank, 0)?;
    let auto_pad = cx.text("auto_pad", "NOTSET");
    let (mut low, mut high) = pads(cx, rank)?;
    let full: Vec<usize> = (0..rank)
        .map(|i| {
            strides[i] * (sizes[i].max(1) - 1) + extra[i] + dilations[i] * (taps[i].max(1) - 1) + 1
        })
        .collect();
    let wanted = match (cx.ints("output_shape"), auto_pad.as_str()) {
        // Some exporters write the whole shape, others the spatial sizes.
        (Some(shape), _) if shape.len() >= rank => {
            Some(cx.sizes(&shape[shape.len() - rank..], "output_shape")?)
        }
        (Some(shape), _) => return misfit(format!("output_shape {shape:?}")),
        (None, "SAME_UPPER" | "SAME_LOWER") => {
            Some(sizes.iter().zip(&strides).map(|(n, s)| n * s).collect())
        }
        (None, "NOTSET" | "VALID") => None,
        (None, other) => return Err(Fault::Attribute(format!("auto_pad = {other}"))),
    };
    let size = match wanted {
        Some(size) => {
            for i in 0..rank {
                // A larger result has elements at the end that no window reaches.
                let total = full[i].saturating_sub(size[i]);
                (low[i], high[i]) = halves(total, auto_pad == "SAME_UPPER");
            }
            size
        }
        None => {
            let mut size = Vec::with_capacity(rank);
            for i in 0..rank {
                match full[i].checked_sub(low[i] + high[i]) {
                    Some(n) if n > 0 => size.push(n),
                    _ => return misfit(format!("pads leave nothing of spatial axis {i}")),
                }
            }
            size
        }
    };
    if extra.iter().zip(&strides).any(|(e, s)| e >= s) {
        return Err(Fault::Attribute(format!("output_padding {extra:?} of strides {strides:?}")));
    }
    let window = Window { strides, dilations, low, high };
    let y =
        cx.emit(Op::ConvGradInput(ConvGradInput { window, groups, size, out: None }), &[x, w])?;
    biased(cx, y)
}
