//! Discrete Fourier transforms, as sums with precomputed cosines and sines. Those of DFT are reductions rather than matmuls, so that
//! autocast keeps them in f32, as in PyTorch; the many frames of STFT would need too much memory for their products. Sources: ONNX DFT-20,
//! STFT-17.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::composed::binary;
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, Concat, Gather, MatMul, Pad, Reduce, ReduceFn, Slice, Transpose};
use frit_ir::{DType, Op, ValueId};
use std::f64::consts::TAU;

pub(super) const OPERATORS: &[Operator] =
    &[op("DFT", &["axis", "inverse", "onesided"], dft), op("STFT", &["onesided"], stft)];

/// `rows[…, n]` times `table[k, n]`, summed → `[…, k]`.
type Sums = fn(&mut NodeContext<'_>, ValueId, ValueId) -> Result<ValueId, Fault>;

/// A transform to or from `n` elements.
#[derive(Clone, Copy)]
struct Transform {
    n: usize,
    inverse: bool,
    /// The spectrum is that of a real signal: the conjugates are left out.
    one_sided: bool,
}

impl Transform {
    /// Elements before and after.
    fn sizes(self) -> (usize, usize) {
        let half = self.n / 2 + 1;
        match (self.one_sided, self.inverse) {
            (false, _) => (self.n, self.n),
            (true, false) => (self.n, half),
            (true, true) => (half, self.n),
        }
    }

    /// Transforms the last axis of the real part and, if there is one, the imaginary part, by this function of rows and table.
    fn apply(
        self,
        cx: &mut NodeContext<'_>,
        parts: &[ValueId],
        sums: Sums,
    ) -> Result<[ValueId; 2], Fault> {
        let Transform { n, inverse, one_sided } = self;
        let (from, to) = self.sizes();
        let weight = |j: usize| match one_sided && inverse && j != 0 && 2 * j != n {
            true => 2.0,
            false => 1.0,
        };
        // e^(∓2πi·jk/n): the product of indices modulo n keeps the angle exact.
        let table = |at: usize, f: fn(f64) -> f64| {
            let (row, j) = (at / from, at % from);
            weight(j) * f(TAU * ((row * j) % n) as f64 / n as f64)
        };
        let scale = if inverse { 1.0 / n as f64 } else { 1.0 };
        let sign = if inverse { 1.0 } else { -1.0 };
        let dtype = cx.ty(parts[0]).dtype;
        let cosines = cx.floats(dtype, &[to, from], |at| table(at, f64::cos) * scale)?;
        let sines = cx.floats(dtype, &[to, from], |at| table(at, f64::sin) * scale * sign)?;
        let mut real = sums(cx, parts[0], cosines)?;
        let mut imaginary = sums(cx, parts[0], sines)?;
        if let Some(&i) = parts.get(1) {
            let (of_sines, of_cosines) = (sums(cx, i, sines)?, sums(cx, i, cosines)?);
            real = binary(cx, BinaryFn::Sub, real, of_sines)?;
            imaginary = binary(cx, BinaryFn::Add, imaginary, of_cosines)?;
        }
        Ok([real, imaginary])
    }
}

/// `x[…, n, …, 1 or 2]` → `y[…, k, …, 2]`, the last axis real and imaginary parts; a one-sided inverse is
/// real.
fn dft(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let dims = cx.dims(x);
    let rank = dims.len();
    let axis = match cx.opset {
        ..=19 => cx.int("axis", 1),
        _ => cx.known_scalar(2, "the axis")?.unwrap_or(-2.0) as i64,
    };
    let axis = cx.axis(x, axis)?;
    if rank < 2 || axis + 1 == rank || !matches!(dims[rank - 1], 1 | 2) || dims[axis] == 0 {
        return misfit(format!("a transform along axis {axis} of {}", cx.ty(x)));
    }
    let (inverse, one_sided) = (cx.int("inverse", 0) != 0, cx.int("onesided", 0) != 0);
    let n = match cx.known_ints(1, "the length")?.as_deref() {
        Some(&[n]) if n > 0 => cx.sizes(&[n], "the length")?[0],
        Some(other) => return misfit(format!("length {other:?}")),
        None if inverse && one_sided => (2 * (dims[axis] - 1)).max(1),
        None => dims[axis],
    };
    let transform = Transform { n, inverse, one_sided };
    let mut parts = Vec::new();
    for part in 0..dims[rank - 1] {
        parts.push(rows(cx, x, (axis, transform.sizes().0), part)?);
    }
    let transformed = transform.apply(cx, &parts, reduced)?;
    let mut results = Vec::new();
    let kept = if inverse && one_sided { 1 } else { 2 };
    for part in transformed.into_iter().take(kept) {
        let mut perm: Vec<usize> = (0..rank - 2).collect();
        perm.insert(axis, rank - 2);
        let part = cx.emit(Op::Transpose(Transpose { perm }), &[part])?;
        let shape = [&cx.dims(part)[..], &[1]].concat();
        results.push(cx.reshape(part, shape)?);
    }
    match results[..] {
        [real] => one(real),
        _ => one(cx.emit(Op::Concat(Concat { axis: rank - 1 }), &results)?),
    }
}

/// Frames of the signal, each times the window, transformed.
fn stft(cx: &mut NodeContext<'_>) -> Outcome {
    let signal = cx.input(0)?;
    let Some(step) = cx.known_scalar(1, "the step")? else { return misfit("the step is missing") };
    let weights = cx.optional(2)?;
    let length = match (cx.known_scalar(3, "the length of a frame")?, weights) {
        (Some(length), _) => length as i64,
        (None, Some(weights)) => cx.dims(weights).first().copied().unwrap_or(0) as i64,
        (None, None) => return misfit("neither a window nor the length of a frame is given"),
    };
    let sizes = cx.sizes(&[step as i64, length], "step and length")?;
    let (step, length) = (sizes[0], sizes[1]);
    let mut dims = cx.dims(signal);
    if dims.len() == 2 {
        dims.push(1);
    }
    let &[b, n, parts @ 1..=2] = dims.as_slice() else {
        return misfit(format!("a signal {}", cx.ty(signal)));
    };
    if step == 0 || length == 0 || length > n {
        return misfit(format!("frames of {length} every {step} of {n} elements"));
    }
    let frames = (n - length) / step + 1;
    let place = |i: usize| (i / length * step + i % length) as i64;
    let places = cx.integers(DType::I64, &[frames.saturating_mul(length)], place)?;
    let signal = cx.reshape(signal, dims)?;
    let mut framed = Vec::new();
    for part in 0..parts {
        let slice = Slice { start: vec![0, 0, part], size: vec![b, n, 1], step: vec![1; 3] };
        let part = cx.emit(Op::Slice(slice), &[signal])?;
        let part = cx.emit(Op::Gather(Gather { axis: 1 }), &[part, places])?;
        let part = cx.reshape(part, vec![b, frames, length])?;
        framed.push(match weights {
            Some(weights) => binary(cx, BinaryFn::Mul, part, weights)?,
            None => part,
        });
    }
    let one_sided = cx.int("onesided", 1) != 0;
    let transform = Transform { n: length, inverse: false, one_sided };
    let mut results = Vec::new();
    for part in transform.apply(cx, &framed, multiplied)? {
        results.push(cx.reshape(part, vec![b, frames, transform.sizes().1, 1])?);
    }
    one(cx.emit(Op::Concat(Concat { axis: 3 }), &results)?)
}

/// One part of the operand, the transformed axis last, cut or filled with zeros to `n` elements.
fn rows(
    cx: &mut NodeContext<'_>,
    x: ValueId,
    (axis, n): (usize, usize),
    part: usize,
) -> Result<ValueId, Fault> {
    let dims = cx.dims(x);
    let rank = dims.len();
    let mut start = vec![0; rank];
    start[rank - 1] = part;
    let mut size = dims.clone();
    size[rank - 1] = 1;
    size[axis] = size[axis].min(n);
    let slice = Slice { start, size: size.clone(), step: vec![1; rank] };
    let rows = cx.emit(Op::Slice(slice), &[x])?;
    size.pop();
    let rows = cx.reshape(rows, size.clone())?;
    let mut perm: Vec<usize> = (0..rank - 1).filter(|a| *a != axis).collect();
    perm.push(axis);
    let rows = cx.emit(Op::Transpose(Transpose { perm }), &[rows])?;
    if size[axis] == n {
        return Ok(rows);
    }
    let mut high = vec![0; rank - 1];
    high[rank - 2] = n - size[axis];
    cx.emit(Op::Pad(Pad { low: vec![0; rank - 1], high, value: 0.0 }), &[rows])
}

/// [`Sums`] by a matmul.
fn multiplied(cx: &mut NodeContext<'_>, rows: ValueId, table: ValueId) -> Result<ValueId, Fault> {
    let mut shape = cx.dims(rows);
    let n = shape.pop().unwrap_or(1);
    let rows = cx.reshape(rows, vec![shape.iter().product(), n])?;
    let matmul = Op::MatMul(MatMul { trans_b: true, ..MatMul::default() });
    let sums = cx.emit(matmul, &[rows, table])?;
    shape.push(cx.dims(sums)[1]);
    cx.reshape(sums, shape)
}

/// [`Sums`] by a reduction.
fn reduced(cx: &mut NodeContext<'_>, rows: ValueId, table: ValueId) -> Result<ValueId, Fault> {
    let mut shape = cx.dims(rows);
    let last = shape.len();
    shape.insert(last - 1, 1);
    let rows = cx.reshape(rows, shape)?;
    let product = cx.emit(Op::Binary(BinaryFn::Mul), &[rows, table])?;
    let sum = Reduce { f: ReduceFn::Sum, axes: vec![last], keep_dims: false };
    cx.emit(Op::Reduce(sum), &[product])
}
