//! Batch normalization.

use super::call::Call;
use super::{Evaluate, Evaluated};
use crate::ops::{BatchNorm, BatchNormGrad};

/// The elements of each channel (axis 1), as flat indices.
fn channels(dims: &[usize]) -> Vec<Vec<usize>> {
    let (n, c, size) = (dims[0], dims[1], dims[2..].iter().product::<usize>());
    let of = |j: usize| (0..n).flat_map(move |i| (0..size).map(move |k| (i * c + j) * size + k));
    (0..c).map(|j| of(j).collect()).collect()
}

impl Evaluate for BatchNorm {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (x, scale, bias) = (call.floats(0), call.floats(1), call.floats(2));
        let mut y = vec![0.0; x.len()];
        let (mut means, mut variances) = (Vec::new(), Vec::new());
        for (c, places) in channels(call.dims(0)).into_iter().enumerate() {
            let n = places.len() as f64;
            let mean = places.iter().map(|&i| x[i]).sum::<f64>() / n;
            let var = places.iter().map(|&i| (x[i] - mean).powi(2)).sum::<f64>() / n;
            let factor = scale[c] / (var + self.eps).sqrt();
            places.iter().for_each(|&i| y[i] = (x[i] - mean) * factor + bias[c]);
            means.push(mean);
            variances.push(var);
        }
        Ok(vec![call.real(0, y), call.real(1, means), call.real(2, variances)])
    }
}

impl Evaluate for BatchNormGrad {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, x, scale) = (call.floats(0), call.floats(1), call.floats(2));
        let (mean, var) = (call.floats(3), call.floats(4));
        let mut dx = vec![0.0; x.len()];
        let (mut dscale, mut dbias) = (Vec::new(), Vec::new());
        for (c, places) in channels(call.dims(1)).into_iter().enumerate() {
            let n = places.len() as f64;
            let rstd = 1.0 / (var[c] + self.eps).sqrt();
            let normal = |i: usize| (x[i] - mean[c]) * rstd;
            let sum = places.iter().map(|&i| dy[i]).sum::<f64>();
            let product = places.iter().map(|&i| dy[i] * normal(i)).sum::<f64>();
            for &i in &places {
                dx[i] = scale[c] * rstd * (dy[i] - sum / n - normal(i) * product / n);
            }
            dscale.push(product);
            dbias.push(sum);
        }
        Ok(vec![call.real(0, dx), call.real(1, dscale), call.real(2, dbias)])
    }
}
