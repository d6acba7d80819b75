//! Fourier transforms by constant matrices, windows, and the mel scale.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::composed::{binary, with_scalar};
use super::layout::permute;
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, Concat, Gather, MatMul, Pad, Slice};
use frit_ir::{DType, Op, Tensor, ValueId};
use std::f64::consts::TAU;

pub(super) const OPERATORS: &[Operator] = &[
    op("BlackmanWindow", &["output_datatype", "periodic"], |cx| window(cx, &[0.42, -0.5, 0.08])),
    op("DFT", &["axis", "inverse", "onesided"], dft),
    op("HammingWindow", &["output_datatype", "periodic"], |cx| {
        window(cx, &[25.0 / 46.0, -21.0 / 46.0])
    }),
    op("HannWindow", &["output_datatype", "periodic"], |cx| window(cx, &[0.5, -0.5])),
    op("MelWeightMatrix", &["output_datatype"], mel_weights),
    op("STFT", &["onesided"], stft),
];

/// `Σ terms[k] · cos(2πki / period)`.
fn window(cx: &mut NodeContext<'_>, terms: &[f64]) -> Outcome {
    let Some(size) = cx.known_scalar(0, "the size")? else { return misfit("the size is missing") };
    let n = cx.sizes(&[size as i64], "the size")?[0];
    let period = if cx.int("periodic", 1) != 0 { n as f64 } else { n as f64 - 1.0 };
    let value = |i: usize| {
        let angle = |k: usize| TAU * (k * i) as f64 / period.max(1.0);
        terms.iter().enumerate().map(|(k, a)| a * angle(k).cos()).sum()
    };
    let dtype = cx.dtype_attribute("output_datatype", cx.int("output_datatype", 1))?;
    if !dtype.is_float() {
        return Err(Fault::Attribute(format!("output_datatype = {dtype}")));
    }
    one(cx.floats(dtype, &[n], value)?)
}

/// The kind of a transform.
#[derive(Clone, Copy)]
struct Transform {
    /// Elements before.
    n: usize,
    inverse: bool,
    onesided: bool,
}

impl Transform {
    /// The matrices `[n, m]` of cosines and sines.
    fn matrices(
        &self,
        cx: &mut NodeContext<'_>,
        dtype: DType,
    ) -> Result<(ValueId, ValueId), Fault> {
        let (n, m) = (self.n, if self.onesided { self.n / 2 + 1 } else { self.n });
        // The angle of a product of indices repeats after n: small angles are exact.
        let angle = |at: usize| TAU * ((at / m) * (at % m) % n) as f64 / n as f64;
        let cos = cx.floats(dtype, &[n, m], |at| angle(at).cos())?;
        let sin = cx.floats(dtype, &[n, m], |at| angle(at).sin())?;
        Ok((cos, sin))
    }

    /// Transforms the last axis but one of `x[.., n, 1 or 2]`, the last being real and imaginary part.
    fn apply(self, cx: &mut NodeContext<'_>, x: ValueId) -> Result<ValueId, Fault> {
        let mut dims = cx.dims(x);
        let parts = dims.pop().unwrap_or(0);
        let rank = dims.len();
        if !(1..=2).contains(&parts) || dims[rank - 1] != self.n || self.n == 0 {
            return misfit(format!("a signal {}", cx.ty(x)));
        }
        let rows = dims[..rank - 1].iter().product::<usize>();
        let part = |cx: &mut NodeContext<'_>, i: usize| {
            let mut cut = Slice {
                start: vec![0; rank + 1],
                size: dims.iter().copied().chain([1]).collect(),
                step: vec![1; rank + 1],
            };
            cut.start[rank] = i;
            let part = if parts == 1 { x } else { cx.emit(Op::Slice(cut), &[x])? };
            cx.reshape(part, vec![rows, self.n])
        };
        let dtype = cx.ty(x).dtype;
        let (cos, sin) = self.matrices(cx, dtype)?;
        let product = |cx: &mut NodeContext<'_>, x: ValueId, by: ValueId| {
            cx.emit(Op::MatMul(MatMul::default()), &[x, by])
        };
        let re = part(cx, 0)?;
        let (mut real, mut imaginary) = (product(cx, re, cos)?, product(cx, re, sin)?);
        // e^(∓iθ): the sine counts negative forward, positive backward.
        let sign = if self.inverse { 1.0 } else { -1.0 };
        imaginary = with_scalar(cx, BinaryFn::Mul, imaginary, sign)?;
        if parts == 2 {
            let im = part(cx, 1)?;
            let (crossed, straight) = (product(cx, im, sin)?, product(cx, im, cos)?);
            let crossed = with_scalar(cx, BinaryFn::Mul, crossed, -sign)?;
            real = binary(cx, BinaryFn::Add, real, crossed)?;
            imaginary = binary(cx, BinaryFn::Add, imaginary, straight)?;
        }
        let m = cx.dims(real)[1];
        let mut wide = vec![rows, m, 1];
        let (real, imaginary) =
            (cx.reshape(real, wide.clone())?, cx.reshape(imaginary, wide.clone())?);
        let mut y = cx.emit(Op::Concat(Concat { axis: 2 }), &[real, imaginary])?;
        if self.inverse {
            y = with_scalar(cx, BinaryFn::Div, y, self.n as f64)?;
        }
        wide = dims[..rank - 1].to_vec();
        wide.extend([m, 2]);
        cx.reshape(y, wide)
    }
}

/// Source: ONNX DFT-20.
fn dft(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let rank = cx.dims(x).len();
    let axis = match (cx.opset < 20, cx.known_scalar(2, "the axis")?) {
        (true, _) => cx.int("axis", 1),
        (false, axis) => axis.map_or(-2, |a| a as i64),
    };
    let axis = cx.axis(x, axis)?;
    let (inverse, onesided) = (cx.int("inverse", 0) != 0, cx.int("onesided", 0) != 0);
    if rank < 2 || axis + 1 == rank {
        return misfit(format!("axis {axis} of a signal {}", cx.ty(x)));
    }
    let found = cx.dims(x)[axis];
    let parts = cx.dims(x)[rank - 1];
    // A one-sided spectrum contains half of the elements.
    let halved = inverse && onesided;
    let usual = if halved { 2 * found.max(1) - 2 } else { found };
    let n = match cx.known_scalar(1, "the length")? {
        Some(n) => cx.sizes(&[n as i64], "the length")?[0],
        None => usual,
    };
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(axis, rank - 2);
    let mut x = permute(cx, x, perm.clone())?;
    let given = if halved { n / 2 + 1 } else { n };
    x = resized(cx, x, rank - 2, given)?;
    if halved {
        if parts != 2 {
            return misfit("a one-sided spectrum must be complex");
        }
        x = mirrored_spectrum(cx, x, n)?;
    }
    let transform = Transform { n, inverse, onesided: onesided && !inverse };
    let mut y = transform.apply(cx, x)?;
    if halved {
        let mut cut = Slice { start: vec![0; rank], size: cx.dims(y), step: vec![1; rank] };
        cut.size[rank - 1] = 1;
        y = cx.emit(Op::Slice(cut), &[y])?;
    }
    one(permute(cx, y, perm)?)
}

/// The axis cut, or filled up with zeros, to `n` elements.
fn resized(cx: &mut NodeContext<'_>, x: ValueId, axis: usize, n: usize) -> Result<ValueId, Fault> {
    let dims = cx.dims(x);
    let rank = dims.len();
    if n < dims[axis] {
        let mut cut = Slice { start: vec![0; rank], size: dims, step: vec![1; rank] };
        cut.size[axis] = n;
        return cx.emit(Op::Slice(cut), &[x]);
    }
    if n == dims[axis] {
        return Ok(x);
    }
    let mut border = Pad { low: vec![0; rank], high: vec![0; rank], value: 0.0 };
    border.high[axis] = n - dims[axis];
    cx.emit(Op::Pad(border), &[x])
}

/// All `n` elements of the spectrum of a real signal, from the first `n / 2 + 1`.
fn mirrored_spectrum(cx: &mut NodeContext<'_>, x: ValueId, n: usize) -> Result<ValueId, Fault> {
    let rank = cx.dims(x).len();
    let places = cx.integers(DType::I64, &[n], |i| i.min(n - i) as i64)?;
    let all = cx.emit(Op::Gather(Gather { axis: rank - 2 }), &[x, places])?;
    // The second half is conjugate.
    let dtype = cx.ty(x).dtype;
    let sign = |i: usize| if i % 2 == 1 && i / 2 > n / 2 { -1.0 } else { 1.0 };
    let signs = cx.floats(dtype, &[n, 2], sign)?;
    binary(cx, BinaryFn::Mul, all, signs)
}

/// Frames of the signal, each times the window, transformed. Source: ONNX STFT-17.
fn stft(cx: &mut NodeContext<'_>) -> Outcome {
    let signal = cx.input(0)?;
    let Some(step) = cx.known_scalar(1, "the step")? else { return misfit("the step is missing") };
    let weights = cx.optional(2)?;
    let length = match (cx.known_scalar(3, "the length of a frame")?, weights) {
        (Some(length), _) => length as i64,
        (None, Some(weights)) => cx.dims(weights).first().copied().unwrap_or(0) as i64,
        (None, None) => return misfit("neither a window nor the length of a frame is given"),
    };
    let (step, length) = {
        let sizes = cx.sizes(&[step as i64, length], "step and length")?;
        (sizes[0], sizes[1])
    };
    let mut dims = cx.dims(signal);
    if dims.len() == 2 {
        dims.push(1);
    }
    let &[b, n, parts] = dims.as_slice() else {
        return misfit(format!("a signal {}", cx.ty(signal)));
    };
    if step == 0 || length == 0 || length > n {
        return misfit(format!("frames of {length} every {step} of {n} elements"));
    }
    let frames = (n - length) / step + 1;
    let place = |i: usize| (i / length * step + i % length) as i64;
    let places = cx.integers(DType::I64, &[frames.saturating_mul(length)], place)?;
    let signal = cx.reshape(signal, dims)?;
    let x = cx.emit(Op::Gather(Gather { axis: 1 }), &[signal, places])?;
    let mut x = cx.reshape(x, vec![b, frames, length, parts])?;
    if let Some(weights) = weights {
        let weights = cx.reshape(weights, vec![length, 1])?;
        x = binary(cx, BinaryFn::Mul, x, weights)?;
    }
    let onesided = cx.int("onesided", 1) != 0;
    one(Transform { n: length, inverse: false, onesided }.apply(cx, x)?)
}

/// Triangles on the mel scale, `[bins of the spectrum, mel bins]`. Source: ONNX MelWeightMatrix-17.
fn mel_weights(cx: &mut NodeContext<'_>) -> Outcome {
    let mut numbers = [0.0; 5];
    for (i, number) in numbers.iter_mut().enumerate() {
        let Some(value) = cx.known_scalar(i, "a setting of the mel scale")? else {
            return misfit(format!("input {i} is missing"));
        };
        *number = value;
    }
    let [mel_bins, dft_length, rate, lower, upper] = numbers;
    let sizes = cx.sizes(&[mel_bins as i64, dft_length as i64], "the sizes")?;
    let (mel_bins, bins) = (sizes[0], sizes[1] / 2 + 1);
    cx.room(&[bins, mel_bins])?;
    cx.room(&[mel_bins])?;
    let mel = |hertz: f64| 2595.0 * (1.0 + hertz / 700.0).log10();
    let hertz = |mel: f64| 700.0 * (10f64.powf(mel / 2595.0) - 1.0);
    let (low, high) = (mel(lower), mel(upper));
    let width = (high - low) / (mel_bins + 2) as f64;
    let place = |i: usize| {
        let frequency = hertz(low + i as f64 * width);
        ((sizes[1] as f64 + 1.0) * frequency / rate).floor() as i64
    };
    let distance = |to: i64, from: i64| to as f64 - from as f64;
    let edges: Vec<i64> = (0..mel_bins + 2).map(place).collect();
    let mut matrix = vec![0.0; bins * mel_bins];
    for i in 0..mel_bins {
        let (first, center, last) = (edges[i], edges[i + 1], edges[i + 2]);
        for (row, weights) in matrix.chunks_exact_mut(mel_bins.max(1)).enumerate() {
            let row = row as i64;
            if row == center && first == center {
                weights[i] = 1.0;
            } else if (first..=center).contains(&row) {
                weights[i] = distance(row, first) / distance(center, first);
            } else if (center..last).contains(&row) {
                weights[i] = distance(last, row) / distance(last, center);
            }
        }
    }
    let dtype = cx.dtype_attribute("output_datatype", cx.int("output_datatype", 1))?;
    if !dtype.is_float() {
        return Err(Fault::Attribute(format!("output_datatype = {dtype}")));
    }
    one(cx.constant(Tensor::floats(dtype, [bins, mel_bins], matrix))?)
}
