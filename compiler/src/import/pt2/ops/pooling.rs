//! Pooling.

use super::super::call::{Call, Fault, MAX_PLACES, Outcome, int, ints, numel, unsupported};
use super::super::dtype::F32;
use super::super::translate::{Tensor, result_names};
use super::convolution::{strides, window};
use super::{Convert, one};
use crate::import::onnx::messages::AttributeProto;

/// Elements of a matrix of averages at most.
const MAX_MATRIX: i64 = 1 << 20;

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("_adaptive_avg_pool2d", |c| adaptive_average(c, 2)),
    ("_adaptive_avg_pool3d", |c| adaptive_average(c, 3)),
    ("adaptive_avg_pool1d", |c| adaptive_average(c, 1)),
    ("adaptive_avg_pool2d", |c| adaptive_average(c, 2)),
    ("adaptive_avg_pool3d", |c| adaptive_average(c, 3)),
    ("adaptive_max_pool1d", |c| adaptive_max(c, 1)),
    ("adaptive_max_pool2d", |c| adaptive_max(c, 2)),
    ("avg_pool1d", |c| average(c, 1)),
    ("avg_pool2d", |c| average(c, 2)),
    ("avg_pool3d", |c| average(c, 3)),
    ("max_pool1d", |c| max(c, 1)),
    ("max_pool1d_with_indices", |c| max(c, 1)),
    ("max_pool2d", |c| max(c, 2)),
    ("max_pool2d_with_indices", |c| max(c, 2)),
    ("max_pool3d", |c| max(c, 3)),
    ("max_pool3d_with_indices", |c| max(c, 3)),
];

/// A pooling of a batch; one without a batch gets its axis for it.
fn batched(
    c: &mut Call<'_>,
    n: usize,
    pool: impl FnOnce(&mut Call<'_>, &str) -> Outcome,
) -> Outcome {
    let x = c.tensor("self")?;
    match x.dims.len() {
        rank if rank == n + 2 => pool(c, &x.name),
        rank if rank == n + 1 => {
            let wide = c.unsqueeze(&x.name, &[0]);
            let all = pool(c, &wide)?;
            Ok(all.iter().map(|y| c.squeeze(y, &[0])).collect())
        }
        rank => Err(Fault::Damaged(format!("an operand of rank {rank} and {n} spatial axes"))),
    }
}

fn max(c: &mut Call<'_>, n: usize) -> Outcome {
    let attributes = window(c, n, true)?;
    largest(c, n, attributes)
}

/// The largest elements of windows, and where they are if that is a result.
fn largest(c: &mut Call<'_>, n: usize, attributes: Vec<AttributeProto>) -> Outcome {
    if result_names(c.node).count() < 2 {
        return batched(c, n, |c, x| one(c.with("MaxPool", &[x], attributes)));
    }
    let x = c.tensor("self")?;
    let image = numel(&x.dims[x.dims.len().saturating_sub(n)..]);
    let Some(image) = image else { return unsupported("indices into an image of dynamic size") };
    batched(c, n, |c, x| {
        let all = c.all("MaxPool", &[x], attributes, 2);
        // ONNX counts in all images, PyTorch in each.
        let image = c.integer(image);
        let places = c.add("Mod", &[&all[1], &image]);
        Ok(vec![all[0].clone(), places])
    })
}

fn average(c: &mut Call<'_>, n: usize) -> Outcome {
    if let Some(divisor) = c.int_given("divisor_override")? {
        let Some(divisor) = divisor.known() else { return unsupported("a dynamic divisor") };
        return divided(c, n, divisor);
    }
    let mut attributes = window(c, n, false)?;
    attributes.push(int("count_include_pad", c.bool("count_include_pad", true)?.into()));
    batched(c, n, |c, x| one(c.with("AveragePool", &[x], attributes)))
}

/// Sums of windows over a divisor, which is not their size. Zeros around the image make all windows whole.
fn divided(c: &mut Call<'_>, n: usize, divisor: i64) -> Outcome {
    let x = c.tensor("self")?;
    let kernel = c.per_axis("kernel_size", n, 1)?;
    let strides = strides(c, n, &kernel)?;
    let (pads, ceil) = (c.per_axis("padding", n, 0)?, c.bool("ceil_mode", false)?);
    if kernel.iter().chain(&strides).chain(&pads).any(|n| !(0..=MAX_PLACES).contains(n)) {
        return Err(Fault::Damaged(format!("windows of {kernel:?}, {strides:?} apart")));
    }
    let mut after = pads.clone();
    if ceil {
        for i in 0..n {
            let size = x.dims.get((x.dims.len() + i).wrapping_sub(n)).copied().flatten();
            let Some(size) = size else { return unsupported("ceil_mode of a dynamic image") };
            if strides[i] < 1 || !(0..i64::from(u32::MAX)).contains(&size) {
                return Err(Fault::Damaged(format!("a stride of {} over {size}", strides[i])));
            }
            let room = size + 2 * pads[i] - kernel[i];
            let mut windows = (room + strides[i] - 1).div_euclid(strides[i]) + 1;
            // The last window begins in the image or before it.
            windows -= i64::from((windows - 1) * strides[i] >= size + pads[i]);
            after[i] = ((windows - 1) * strides[i] + kernel[i] - size - pads[i]).max(0);
        }
    }
    let factor = kernel.iter().map(|n| *n as f64).product::<f64>() / divisor as f64;
    let borders = c.list(&[&[0, 0], &pads[..], &[0, 0], &after].concat());
    let (zero, factor) = (c.number(x.dtype, 0.0), c.number(x.dtype, factor));
    batched(c, n, |c, x| {
        let wide = c.add("Pad", &[x, &borders, &zero]);
        let attributes = vec![ints("kernel_shape", &kernel), ints("strides", &strides)];
        let mean = c.with("AveragePool", &[&wide], attributes);
        one(c.add("Mul", &[&mean, &factor]))
    })
}

/// Sizes of the last `n` axes of the operand, and those of the result.
fn spatial(c: &Call<'_>, x: &Tensor, n: usize) -> Result<(Vec<i64>, Vec<i64>), Fault> {
    let from: Option<Vec<i64>> = x.dims[x.dims.len().saturating_sub(n)..].iter().copied().collect();
    let Some(from) = from else { return unsupported("a dynamic image size") };
    let to = c.per_axis("output_size", n, 1)?;
    if to.iter().any(|t| *t < 1) || from.iter().any(|f| *f < 1) || from.len() != n {
        return Err(Fault::Damaged(format!("sizes {from:?} to {to:?}")));
    }
    Ok((from, to))
}

fn adaptive_average(c: &mut Call<'_>, n: usize) -> Outcome {
    let x = c.tensor("self")?;
    let axes: Vec<i64> = (1..=n as i64).rev().map(|i| x.dims.len() as i64 - i).collect();
    if c.per_axis("output_size", n, 1)?.iter().all(|t| *t == 1) {
        return one(c.reduce("ReduceMean", &x.name, &axes, true));
    }
    let (from, to) = spatial(c, &x, n)?;
    if from.iter().zip(&to).all(|(f, t)| f % t == 0) {
        let kernel: Vec<i64> = from.iter().zip(&to).map(|(f, t)| f / t).collect();
        let attributes = vec![ints("kernel_shape", &kernel), ints("strides", &kernel)];
        return batched(c, n, |c, x| one(c.with("AveragePool", &[x], attributes)));
    }
    // Windows of several sizes: a matrix of averages along each axis.
    let mut y = x.name.clone();
    for (i, (f, t)) in from.iter().zip(&to).enumerate() {
        if f.saturating_mul(*t) > MAX_MATRIX {
            return unsupported(format!("averaging {f} elements into {t}"));
        }
        let averages = averages(*f, *t);
        let averages = c.matrix([*f, *t], averages);
        let averages = c.cast(&averages, F32, x.dtype);
        let mut perm: Vec<usize> = (0..x.dims.len()).collect();
        perm.swap(axes[i] as usize, x.dims.len() - 1);
        let last = axes[i] as usize + 1 == x.dims.len();
        let turned = if last { y } else { c.transpose(&y, &perm) };
        let product = c.add("MatMul", &[&turned, &averages]);
        y = if last { product } else { c.transpose(&product, &perm) };
    }
    one(y)
}

/// `[from, to]`: column i averages the elements from ⌊i·from/to⌋ to ⌈(i+1)·from/to⌉.
fn averages(from: i64, to: i64) -> Vec<f32> {
    let mut matrix = vec![0.0; (from * to) as usize];
    for i in 0..to {
        let (start, end) = (i * from / to, ((i + 1) * from + to - 1) / to);
        for row in start..end {
            matrix[(row * to + i) as usize] = 1.0 / (end - start) as f32;
        }
    }
    matrix
}

fn adaptive_max(c: &mut Call<'_>, n: usize) -> Outcome {
    let x = c.tensor("self")?;
    let (from, to) = spatial(c, &x, n)?;
    if from.iter().zip(&to).any(|(f, t)| f % t != 0) {
        return unsupported(format!("pooling {from:?} to {to:?} in windows of several sizes"));
    }
    let kernel: Vec<i64> = from.iter().zip(&to).map(|(f, t)| f / t).collect();
    let attributes = vec![ints("kernel_shape", &kernel), ints("strides", &kernel)];
    largest(c, n, attributes)
}

#[cfg(test)]
mod tests {
    #[test]
    fn windows_of_several_sizes_overlap() {
        let half = 0.5;
        assert_eq!(super::averages(3, 2), [half, 0.0, half, half, 0.0, half]);
    }
}
