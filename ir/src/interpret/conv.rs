//! Convolutions and pooling, tap by tap.

use super::call::Call;
use super::{Evaluate, Evaluated};
use crate::ops::conv::Window;
use crate::ops::{Conv, ConvGradInput, ConvGradWeight, MaxPool, MaxPoolGrad, SumPool, SumPoolGrad};

/// Every index below `sizes`, in row-major order.
fn indices(sizes: &[usize]) -> Vec<Vec<usize>> {
    sizes.iter().fold(vec![Vec::new()], |all, &size| {
        let extend = |index: Vec<usize>| (0..size).map(move |i| [&index[..], &[i]].concat());
        all.into_iter().flat_map(extend).collect()
    })
}

fn flat(index: &[usize], sizes: &[usize]) -> usize {
    index.iter().zip(sizes).fold(0, |at, (i, n)| at * n + i)
}

/// Calls `each(position, tap, element)` with flat spatial indices, for every element under a tap.
fn slide(
    window: &Window,
    sizes: &[usize],
    taps: &[usize],
    mut each: impl FnMut(usize, usize, usize),
) {
    let positions = window.positions(sizes, taps).expect("invariant: inference checked the window");
    let all_taps = indices(taps);
    for (p, position) in indices(&positions).iter().enumerate() {
        for (t, tap) in all_taps.iter().enumerate() {
            let element: Option<Vec<usize>> = (0..sizes.len())
                .map(|i| {
                    let at = position[i] * window.strides[i] + tap[i] * window.dilations[i];
                    at.checked_sub(window.low[i]).filter(|at| *at < sizes[i])
                })
                .collect();
            if let Some(element) = element {
                each(p, t, flat(&element, sizes));
            }
        }
    }
}

/// Calls `each(x, w, y)` with the flat indices of every multiply-add of a convolution.
fn products(
    (window, groups): (&Window, usize),
    (x, w, y): (&[usize], &[usize], &[usize]),
    mut each: impl FnMut(usize, usize, usize),
) {
    let [x_size, w_size, y_size] = [x, w, y].map(|dims| dims[2..].iter().product::<usize>());
    let (filters, channels) = (w[0] / groups, w[1]);
    let mut pairs = Vec::new();
    slide(window, &x[2..], &w[2..], |p, t, e| pairs.push((p, t, e)));
    for n in 0..x[0] {
        for m in 0..w[0] {
            for c in 0..channels {
                let x_at = (n * x[1] + m / filters * channels + c) * x_size;
                let (w_at, y_at) = ((m * channels + c) * w_size, (n * w[0] + m) * y_size);
                for &(p, t, e) in &pairs {
                    each(x_at + e, w_at + t, y_at + p);
                }
            }
        }
    }
}

impl Evaluate for Conv {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (x, w, dims) = (call.floats(0), call.floats(1), call.results[0].shape.dims());
        let mut y = vec![0.0; call.results[0].shape.numel()];
        let shapes = (call.dims(0), call.dims(1), dims);
        products((&self.window, self.groups), shapes, |i, j, k| y[k] += x[i] * w[j]);
        Ok(vec![call.real(0, y)])
    }
}

impl Evaluate for ConvGradInput {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, w, dims) = (call.floats(0), call.floats(1), call.results[0].shape.dims());
        let mut dx = vec![0.0; call.results[0].shape.numel()];
        let shapes = (dims, call.dims(1), call.dims(0));
        products((&self.window, self.groups), shapes, |i, j, k| dx[i] += dy[k] * w[j]);
        Ok(vec![call.real(0, dx)])
    }
}

impl Evaluate for ConvGradWeight {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, x, dims) = (call.floats(0), call.floats(1), call.results[0].shape.dims());
        let mut dw = vec![0.0; call.results[0].shape.numel()];
        let shapes = (call.dims(1), dims, call.dims(0));
        products((&self.window, self.groups), shapes, |i, j, k| dw[j] += dy[k] * x[i]);
        Ok(vec![call.real(0, dw)])
    }
}

/// Calls `each(x, y)` with the flat indices of every element of every window, image by image.
fn windows(
    window: &Window,
    taps: &[usize],
    (x, y): (&[usize], &[usize]),
    mut each: impl FnMut(usize, usize),
) {
    let [x_size, y_size] = [x, y].map(|dims| dims[2..].iter().product::<usize>());
    for image in 0..x[0] * x[1] {
        slide(window, &x[2..], taps, |p, _, e| each(image * x_size + e, image * y_size + p));
    }
}

/// For each window the place of its first largest element; NaN is larger than any number.
fn largest(window: &Window, taps: &[usize], x: &[f64], dims: (&[usize], &[usize])) -> Vec<usize> {
    let mut best: Vec<Option<usize>> = vec![None; dims.1.iter().product()];
    windows(window, taps, dims, |i, k| {
        if best[k].is_none_or(|b| x[i] > x[b] || (x[i].is_nan() && !x[b].is_nan())) {
            best[k] = Some(i);
        }
    });
    best.into_iter().map(|b| b.expect("invariant: every window holds an element")).collect()
}

impl Evaluate for MaxPool {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let dims = (call.dims(0), call.results[0].shape.dims());
        let places = largest(&self.window, &self.taps, &call.floats(0), dims);
        Ok(vec![call.pick(0, call.inputs[0], &places)])
    }
}

impl Evaluate for MaxPoolGrad {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, x) = (call.floats(0), call.floats(1));
        let mut dx = vec![0.0; x.len()];
        let places = largest(&self.window, &self.taps, &x, (call.dims(1), call.dims(0)));
        places.into_iter().zip(dy.iter()).for_each(|(i, dy)| dx[i] += dy);
        Ok(vec![call.real(0, dx)])
    }
}

impl Evaluate for SumPool {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (x, dims) = (call.floats(0), call.results[0].shape.dims());
        let mut y = vec![0.0; call.results[0].shape.numel()];
        windows(&self.window, &self.taps, (call.dims(0), dims), |i, k| y[k] += x[i]);
        Ok(vec![call.real(0, y)])
    }
}

impl Evaluate for SumPoolGrad {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, dims) = (call.floats(0), call.results[0].shape.dims());
        let mut dx = vec![0.0; call.results[0].shape.numel()];
        windows(&self.window, &self.taps, (dims, call.dims(0)), |i, k| dx[i] += dy[k]);
        Ok(vec![call.real(0, dx)])
    }
}
