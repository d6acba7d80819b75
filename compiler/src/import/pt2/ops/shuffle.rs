//! Operators that exchange parts of axes: pixels and channels, windows, Kronecker's product.

use super::super::call::{Call, Fault, MAX_PLACES, Outcome, int, text, unsupported};
use super::super::translate::Int;
use super::{Convert, one};

/// The largest size of an image, or of a window of one.
const MAX_WINDOW: i64 = 1 << 16;

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("channel_shuffle", channel_shuffle),
    ("im2col", im2col),
    ("kron", kron),
    ("native_channel_shuffle", channel_shuffle),
    ("pixel_shuffle", |c| {
        let n = c.int("upscale_factor", 1)?;
        let x = c.tensor("self")?;
        if x.dims.len() != 4 {
            return unsupported(format!("{} axes", x.dims.len()));
        }
        one(c.with("DepthToSpace", &[&x.name], vec![int("blocksize", n), text("mode", "CRD")]))
    }),
    ("pixel_unshuffle", pixel_unshuffle),
    ("unfold", unfold),
    ("unfold_copy", unfold),
];

/// Channels of equal places in their groups side by side.
fn channel_shuffle(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let (sizes, groups) = (c.shape(&x), c.int("groups", 1)?);
    let [batch, _, rest @ ..] = &sizes[..] else {
        return Err(Fault::Damaged("no channels".into()));
    };
    let parted: Vec<Int> = [&[batch.clone(), Int::Known(groups), Int::Known(-1)], rest].concat();
    let y = c.reshape(&x.name, &parted);
    let perm: Vec<usize> = [0, 2, 1].into_iter().chain(3..parted.len()).collect();
    let y = c.transpose(&y, &perm);
    one(c.reshape(&y, &sizes))
}

/// Squares of pixels as channels, in the order in which `pixel_shuffle` reads them.
fn pixel_unshuffle(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let n = c.int("downscale_factor", 1)?;
    let sizes = c.shape(&x);
    let Some(front) = sizes.len().checked_sub(3) else {
        return Err(Fault::Damaged("no channels".into()));
    };
    let (Some(channels), Some(h), Some(w)) =
        (sizes[front].known(), sizes[front + 1].known(), sizes[front + 2].known())
    else {
        return unsupported("images of dynamic size");
    };
    if n < 1 {
        return Err(Fault::Damaged(format!("squares of {n} pixels")));
    }
    let with = |last: &[i64]| -> Vec<Int> {
        sizes[..front].iter().cloned().chain(last.iter().map(|n| Int::Known(*n))).collect()
    };
    let y = c.reshape(&x.name, &with(&[channels, h / n, n, w / n, n]));
    let perm: Vec<usize> = (0..front).chain([0, 2, 4, 1, 3].map(|a| front + a)).collect();
    let y = c.transpose(&y, &perm);
    one(c.reshape(&y, &with(&[channels.saturating_mul(n).saturating_mul(n), h / n, w / n])))
}

/// Windows of an axis, whose elements are a last axis.
fn unfold(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let rank = x.dims.len();
    let axis = c.axis(c.int("dimension", 0)?, rank)?;
    let (size, step) = (c.int("size", 1)?, c.int("step", 1)?);
    let Some(n) = x.dims.get(axis).copied().flatten() else {
        return unsupported("windows of an axis of dynamic size");
    };
    if size < 0 || size > n || step < 1 {
        return Err(Fault::Damaged(format!("windows of {size} of {n} elements, {step} apart")));
    }
    let windows = (n - size) / step + 1;
    if windows.saturating_mul(size) > MAX_PLACES {
        return unsupported(format!("{windows} windows of {size} elements"));
    }
    let places: Vec<i64> =
        (0..windows).flat_map(|i| (0..size).map(move |j| i * step + j)).collect();
    let places = c.list(&places);
    let places = c.reshape(&places, &[Int::Known(windows), Int::Known(size)]);
    let y = c.with("Gather", &[&x.name, &places], vec![int("axis", axis as i64)]);
    let perm: Vec<usize> = (0..=rank).filter(|a| *a != axis + 1).chain([axis + 1]).collect();
    one(if perm.is_sorted() { y } else { c.transpose(&y, &perm) })
}

/// The windows of images as columns: `[batch, channels · window, windows]`.
fn im2col(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let [batch, Some(channels), Some(h), Some(w)] = x.dims[..] else {
        return unsupported("images without a batch, or of dynamic size");
    };
    let kernel = c.per_axis("kernel_size", 2, 1)?;
    let [dilation, padding, stride] = [("dilation", 1), ("padding", 0), ("stride", 1)]
        .map(|(name, default)| c.per_axis(name, 2, default));
    let (dilation, padding, stride) = (dilation?, padding?, stride?);
    let given = [&kernel[..], &dilation, &padding, &stride, &[channels, h, w]].concat();
    if given.iter().any(|n| !(0..=MAX_WINDOW).contains(n)) {
        return unsupported(format!("windows of {kernel:?} of an image of {h} by {w}"));
    }
    let (p, q) = (padding[0], padding[1]);
    let borders = c.list(&[0, 0, p, q, 0, 0, p, q]);
    let zero = c.number(x.dtype, 0.0);
    let mut y = c.add("Pad", &[&x.name, &borders, &zero]);
    let mut windows = Vec::new();
    for (i, size) in [h, w].into_iter().enumerate() {
        let room = size + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1;
        if room < 0 || stride[i] < 1 || kernel[i] < 1 {
            return Err(Fault::Damaged(format!("windows of {} of {size}", kernel[i])));
        }
        let count = room / stride[i] + 1;
        if count.saturating_mul(kernel[i]) > MAX_PLACES {
            return unsupported(format!("{count} windows of {} elements", kernel[i]));
        }
        let places: Vec<i64> = (0..kernel[i])
            .flat_map(|k| (0..count).map(move |n| (k, n)))
            .map(|(k, n)| k * dilation[i] + n * stride[i])
            .collect();
        let places = c.list(&places);
        let places = c.reshape(&places, &[Int::Known(kernel[i]), Int::Known(count)]);
        y = c.with("Gather", &[&y, &places], vec![int("axis", 2 + 2 * i as i64)]);
        windows.push(count);
    }
    let y = c.transpose(&y, &[0, 1, 2, 4, 3, 5]);
    let rows = channels * kernel[0] * kernel[1];
    let batch = match batch {
        Some(n) => Int::Known(n),
        None => c.size_of(&x, 0),
    };
    one(c.reshape(&y, &[batch, Int::Known(rows), Int::Known(windows[0] * windows[1])]))
}

/// Each element of the first times the whole second, in blocks.
fn kron(c: &mut Call<'_>) -> Outcome {
    let (a, b, _) = super::pointwise::operands(c, ["self", "other"])?;
    let (own, other) = (c.tensor("self")?, c.tensor("other")?);
    let rank = own.dims.len().max(other.dims.len());
    let known = |dims: &[Option<i64>]| -> Option<Vec<i64>> {
        let front = vec![Some(1); rank - dims.len()];
        front.into_iter().chain(dims.iter().copied()).collect()
    };
    let (Some(n), Some(m)) = (known(&own.dims), known(&other.dims)) else {
        return unsupported("factors of dynamic size");
    };
    let between = |first: &[i64], second: &[i64]| -> Vec<Int> {
        first.iter().zip(second).flat_map(|(x, y)| [Int::Known(*x), Int::Known(*y)]).collect()
    };
    let ones = vec![1; rank];
    let (a, b) = (c.reshape(&a, &between(&n, &ones)), c.reshape(&b, &between(&ones, &m)));
    let y = c.add("Mul", &[&a, &b]);
    let sizes: Vec<Int> = n.iter().zip(&m).map(|(x, y)| Int::Known(x.saturating_mul(*y))).collect();
    one(c.reshape(&y, &sizes))
}
