//! Depth-to-space and its inverse, normalization over neighboring channels, reversed sequences.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, CompareFn, GatherElements, SumPool, Transpose, Window};
use frit_ir::{DType, Op, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("DepthToSpace", &["blocksize", "mode"], depth_to_space),
    op("LRN", &["alpha", "beta", "bias", "size"], local_response),
    op("ReverseSequence", &["batch_axis", "time_axis"], reverse_sequence),
    op("SpaceToDepth", &["blocksize"], space_to_depth),
];

/// The operand `[N, C, H, W]`, its sizes, and the block size.
fn image(cx: &NodeContext<'_>) -> Result<(ValueId, [usize; 4], usize), Fault> {
    let x = cx.input(0)?;
    let block = cx.count("blocksize", 0);
    match cx.dims(x)[..] {
        [n, c, h, w] if block > 0 => Ok((x, [n, c, h, w], block)),
        _ => misfit(format!("{} in blocks of {block}, but it needs [N, C, H, W]", cx.ty(x))),
    }
}

fn depth_to_space(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, [n, c, h, w], b) = image(cx)?;
    if c % (b * b) != 0 {
        return misfit(format!("{c} channels in blocks of {b} × {b}"));
    }
    let depth = c / (b * b);
    let (shape, perm) = match cx.text("mode", "DCR").as_str() {
        "DCR" => (vec![n, b, b, depth, h, w], vec![0, 3, 4, 1, 5, 2]),
        "CRD" => (vec![n, depth, b, b, h, w], vec![0, 1, 4, 2, 5, 3]),
        other => return Err(Fault::Attribute(format!("mode = {other}"))),
    };
    let x = cx.reshape(x, shape)?;
    let x = cx.emit(Op::Transpose(Transpose { perm }), &[x])?;
    one(cx.reshape(x, vec![n, depth, h * b, w * b])?)
}

fn space_to_depth(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, [n, c, h, w], b) = image(cx)?;
    if h % b != 0 || w % b != 0 {
        return misfit(format!("{h} × {w} in blocks of {b} × {b}"));
    }
    let x = cx.reshape(x, vec![n, c, h / b, b, w / b, b])?;
    let x = cx.emit(Op::Transpose(Transpose { perm: vec![0, 3, 5, 1, 2, 4] }), &[x])?;
    one(cx.reshape(x, vec![n, c * b * b, h / b, w / b])?)
}

/// `x / (bias + alpha/size · Σ x²)^beta`, the sum over `size` channels around each.
fn local_response(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let dims = cx.dims(x);
    let size = cx.steps(&[cx.int("size", 1)], "size")?[0].max(1);
    let (Some(&n), Some(&c)) = (dims.first(), dims.get(1)) else {
        return misfit("the operand has no channel axis");
    };
    let rest = dims[2..].iter().product();
    let squares = cx.emit(Op::Binary(BinaryFn::Mul), &[x, x])?;
    let squares = cx.reshape(squares, vec![n, 1, c, rest])?;
    // Channels from c − (size − 1)/2, rounded down, on.
    let low = vec![(size - 1) / 2, 0];
    let high = vec![size - 1 - low[0], 0];
    let window = Window { strides: vec![1, 1], dilations: vec![1, 1], low, high };
    let sums = cx.emit(Op::SumPool(SumPool { window, taps: vec![size, 1] }), &[squares])?;
    let sums = cx.reshape(sums, dims)?;
    let factor = cx.scalar_like(x, cx.float("alpha", 1e-4) / size as f64)?;
    let bias = cx.scalar_like(x, cx.float("bias", 1.0))?;
    let beta = cx.scalar_like(x, cx.float("beta", 0.75))?;
    let scaled = cx.emit(Op::Binary(BinaryFn::Mul), &[sums, factor])?;
    let shifted = cx.emit(Op::Binary(BinaryFn::Add), &[scaled, bias])?;
    let divisor = cx.emit(Op::Binary(BinaryFn::Pow), &[shifted, beta])?;
    one(cx.emit(Op::Binary(BinaryFn::Div), &[x, divisor])?)
}

/// The first `lengths[b]` elements of every sequence, last one first; the rest stays.
fn reverse_sequence(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, lengths) = (cx.input(0)?, cx.input(1)?);
    let dims = cx.dims(x);
    let (batch, time) = (cx.axis(x, cx.int("batch_axis", 1))?, cx.axis(x, cx.int("time_axis", 0))?);
    if batch == time || cx.dims(lengths) != [dims[batch]] {
        return misfit(format!(
            "lengths {} for batch axis {batch} of {}",
            cx.ty(lengths),
            cx.ty(x)
        ));
    }
    let along = |axis: usize| {
        let mut shape = vec![1; dims.len()];
        shape[axis] = dims[axis];
        shape
    };
    let lengths = cx.cast(lengths, DType::I64)?;
    let lengths = cx.reshape(lengths, along(batch))?;
    let steps = cx.integers(DType::I64, &along(time), |i| i as i64)?;
    let one_less = cx.scalar_like(lengths, -1.0)?;
    let last = cx.emit(Op::Binary(BinaryFn::Add), &[lengths, one_less])?;
    let mirrored = cx.emit(Op::Binary(BinaryFn::Sub), &[last, steps])?;
    let inside = cx.emit(Op::Compare(CompareFn::Lt), &[steps, lengths])?;
    let source = cx.emit(Op::Select, &[inside, mirrored, steps])?;
    let source = cx.expand(source, dims)?;
    one(cx.emit(Op::GatherElements(GatherElements { axis: time }), &[x, source])?)
}
