//! Muon's step: momentum, orthogonalization, and the step along it.

use super::call::{Call, broadcast};
use super::{Evaluate, Evaluated};
use crate::ops::{MuonMomentum, MuonStep};

/// Replaces the momentum by its mean with the gradient; returns what is to be orthogonalized.
pub(super) fn mix(grad: &[f64], momentum: &mut [f64], keep: f64, nesterov: bool) -> Vec<f64> {
    let mixed = |(m, g): (&mut f64, &f64)| {
        *m += (1.0 - keep) * (g - *m);
        if nesterov { *m - (1.0 - keep) * (*m - g) } else { *m }
    };
    momentum.iter_mut().zip(grad).map(mixed).collect()
}

/// Newton-Schulz iterations of a matrix with these `dims`, as PyTorch rounds them: a polynomial of its singular values.
pub(super) fn orthogonalize(
    x: &mut [f64],
    [rows, cols]: [usize; 2],
    ([a, b, c], eps, steps): ([f64; 3], f64, usize),
    round: impl Fn(f64) -> f64,
) {
    let norm = round(x.iter().map(|x| x * x).sum::<f64>().sqrt()).max(eps);
    x.iter_mut().for_each(|x| *x = round(*x / norm));
    // The smaller of X·Xᵀ and Xᵀ·X; line i of the lines of which it has the products.
    let wide = rows <= cols;
    let (n, k) = if wide { (rows, cols) } else { (cols, rows) };
    let at = |i: usize, j: usize| if wide { i * cols + j } else { j * cols + i };
    for _ in 0..steps {
        let sum = |terms: &mut dyn Iterator<Item = f64>| terms.sum::<f64>();
        let mut gram = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..n {
                gram[i * n + j] = round(sum(&mut (0..k).map(|l| x[at(i, l)] * x[at(j, l)])));
            }
        }
        let mut factor = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..n {
                let square = sum(&mut (0..n).map(|l| gram[i * n + l] * gram[l * n + j]));
                factor[i * n + j] = round(b * gram[i * n + j] + c * square);
            }
        }
        let before = x.to_vec();
        for i in 0..n {
            for j in 0..k {
                let product = sum(&mut (0..n).map(|l| factor[i * n + l] * before[at(l, j)]));
                x[at(i, j)] = round(a * before[at(i, j)] + product);
            }
        }
    }
}

impl Evaluate for MuonMomentum {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let [keep, clip, factor, found_inf] = [2, 3, 4, 5].map(|i| call.scalar(i));
        if found_inf != 0.0 {
            let n = call.inputs[1].numel();
            return Ok(vec![call.inputs[1].clone(), call.real(1, vec![0.0; n])]);
        }
        let limit = if clip == 0.0 { f64::INFINITY } else { clip };
        let grad: Vec<f64> =
            call.floats(0).iter().map(|g| (g * factor).max(-limit).min(limit)).collect();
        let mut momentum = call.floats(1).into_owned();
        let mixed = mix(&grad, &mut momentum, keep, self.nesterov);
        Ok(vec![call.real(0, momentum), call.real(1, mixed)])
    }
}

impl Evaluate for MuonStep {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        if call.scalar(5) != 0.0 {
            return Ok(vec![call.inputs[0].clone()]);
        }
        let shape = call.inputs[0].shape();
        let by_element = |i: usize| {
            let values = call.floats(i);
            broadcast(&values, call.inputs[i].shape(), shape).into_owned()
        };
        let [lr, ratio, decay] = [2, 3, 4].map(by_element);
        let (param, along) = (call.floats(0), call.floats(1));
        let step = |i: usize| param[i] * (1.0 - lr[i] * decay[i]) - lr[i] * ratio[i] * along[i];
        Ok(vec![call.real(0, (0..param.len()).map(step).collect())])
    }
}
