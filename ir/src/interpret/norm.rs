//! Layer and root-mean-square normalization with their gradients.

use super::call::Call;
use super::{Evaluate, Evaluated};
use crate::ops::{
    LayerNorm, LayerNormGradAffine, LayerNormGradInput, RmsNorm, RmsNormGradInput, RmsNormGradScale,
};

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len() as f64;
    values.sum::<f64>() / n
}

/// The rows of `x`: `width` elements each, one per statistic.
fn rows(width: usize, x: &[f64]) -> impl Iterator<Item = &[f64]> {
    // A width of zero leaves no element to normalize.
    x.chunks_exact(width.max(1))
}

impl Evaluate for LayerNorm {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (x, scale) = (call.floats(0), call.floats(1));
        let bias = (call.inputs.len() > 2).then(|| call.floats(2));
        let n = call.results[1].shape.numel();
        let (mut y, mut means, mut rstds) = (Vec::with_capacity(x.len()), vec![], vec![]);
        for row in rows(scale.len(), &x) {
            let mu = mean(row.iter().copied());
            let rstd = 1.0 / (mean(row.iter().map(|x| (x - mu) * (x - mu))) + self.eps).sqrt();
            for (i, x) in row.iter().enumerate() {
                y.push((x - mu) * rstd * scale[i] + bias.as_ref().map_or(0.0, |b| b[i]));
            }
            means.push(mu);
            rstds.push(rstd);
        }
        means.resize(n, f64::NAN);
        rstds.resize(n, f64::NAN);
        Ok(vec![call.real(0, y), call.real(1, means), call.real(2, rstds)])
    }
}

impl Evaluate for LayerNormGradInput {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, x, scale) = (call.floats(0), call.floats(1), call.floats(2));
        let (means, rstds) = (call.floats(3), call.floats(4));
        let width = scale.len();
        let mut dx = Vec::with_capacity(x.len());
        for (r, (dy, x)) in rows(width, &dy).zip(rows(width, &x)).enumerate() {
            let normal = |i: usize| (x[i] - means[r]) * rstds[r];
            let g = |i: usize| dy[i] * scale[i];
            let mean_g = mean((0..width).map(g));
            let mean_gx = mean((0..width).map(|i| g(i) * normal(i)));
            dx.extend((0..width).map(|i| rstds[r] * (g(i) - mean_g - normal(i) * mean_gx)));
        }
        Ok(vec![call.real(0, dx)])
    }
}

impl Evaluate for LayerNormGradAffine {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, x, means, rstds) =
            (call.floats(0), call.floats(1), call.floats(2), call.floats(3));
        let width = call.results[0].shape.numel();
        let (mut dscale, mut dbias) = (vec![0.0; width], vec![0.0; width]);
        for (r, (dy, x)) in rows(width, &dy).zip(rows(width, &x)).enumerate() {
            for i in 0..width {
                dscale[i] += dy[i] * (x[i] - means[r]) * rstds[r];
                dbias[i] += dy[i];
            }
        }
        Ok(vec![call.real(0, dscale), call.real(1, dbias)])
    }
}

impl Evaluate for RmsNorm {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (x, scale) = (call.floats(0), call.floats(1));
        let (mut y, mut rstds) = (Vec::with_capacity(x.len()), vec![]);
        for row in rows(scale.len(), &x) {
            let rstd = 1.0 / (mean(row.iter().map(|x| x * x)) + self.eps).sqrt();
            y.extend(row.iter().zip(scale.iter()).map(|(x, s)| x * rstd * s));
            rstds.push(rstd);
        }
        rstds.resize(call.results[1].shape.numel(), f64::NAN);
        Ok(vec![call.real(0, y), call.real(1, rstds)])
    }
}

impl Evaluate for RmsNormGradInput {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, x, scale, rstds) =
            (call.floats(0), call.floats(1), call.floats(2), call.floats(3));
        let width = scale.len();
        let mut dx = Vec::with_capacity(x.len());
        for (r, (dy, x)) in rows(width, &dy).zip(rows(width, &x)).enumerate() {
            let g = |i: usize| dy[i] * scale[i];
            let mean_gx = mean((0..width).map(|i| g(i) * x[i] * rstds[r]));
            dx.extend((0..width).map(|i| rstds[r] * (g(i) - x[i] * rstds[r] * mean_gx)));
        }
        Ok(vec![call.real(0, dx)])
    }
}

impl Evaluate for RmsNormGradScale {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, x, rstds) = (call.floats(0), call.floats(1), call.floats(2));
        let width = call.results[0].shape.numel();
        let mut dscale = vec![0.0; width];
        for (r, (dy, x)) in rows(width, &dy).zip(rows(width, &x)).enumerate() {
            for i in 0..width {
                dscale[i] += dy[i] * x[i] * rstds[r];
            }
        }
        Ok(vec![call.real(0, dscale)])
    }
}
