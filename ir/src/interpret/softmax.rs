//! Softmax, its logarithm, and their gradients.

use super::call::{Call, around, max};
use super::{Evaluate, Evaluated};
use crate::ops::{LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad};

/// Gives every lane along the axis, as places of its elements, to `f`.
fn each_lane(dims: &[usize], axis: usize, mut f: impl FnMut(&[usize])) {
    let (outer, size, inner) = around(dims, axis);
    let mut lane = vec![0; size];
    for o in 0..outer {
        for i in 0..inner {
            lane.iter_mut().enumerate().for_each(|(j, at)| *at = (o * size + j) * inner + i);
            f(&lane);
        }
    }
}

/// The logarithm of the sum of exponentials, with its largest term taken out.
pub(super) fn log_sum_exp(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let largest = values.clone().fold(f64::NEG_INFINITY, max);
    if largest.is_infinite() {
        return largest;
    }
    largest + values.map(|x| (x - largest).exp()).sum::<f64>().ln()
}

impl Evaluate for Softmax {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let x = call.floats(0);
        let mut y = vec![0.0; x.len()];
        each_lane(call.dims(0), self.axis, |lane| {
            let largest = lane.iter().map(|&p| x[p]).fold(f64::NEG_INFINITY, max);
            let sum: f64 = lane.iter().map(|&p| (x[p] - largest).exp()).sum();
            lane.iter().for_each(|&p| y[p] = (x[p] - largest).exp() / sum);
        });
        Ok(vec![call.real(0, y)])
    }
}

impl Evaluate for LogSoftmax {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let x = call.floats(0);
        let mut y = vec![0.0; x.len()];
        each_lane(call.dims(0), self.axis, |lane| {
            let lse = log_sum_exp(lane.iter().map(|&p| x[p]));
            lane.iter().for_each(|&p| y[p] = x[p] - lse);
        });
        Ok(vec![call.real(0, y)])
    }
}

impl Evaluate for SoftmaxGrad {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, y) = (call.floats(0), call.floats(1));
        let mut dx = vec![0.0; y.len()];
        each_lane(call.dims(0), self.axis, |lane| {
            let dot: f64 = lane.iter().map(|&p| dy[p] * y[p]).sum();
            lane.iter().for_each(|&p| dx[p] = y[p] * (dy[p] - dot));
        });
        Ok(vec![call.real(0, dx)])
    }
}

impl Evaluate for LogSoftmaxGrad {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dy, y) = (call.floats(0), call.floats(1));
        let mut dx = vec![0.0; y.len()];
        each_lane(call.dims(0), self.axis, |lane| {
            let sum: f64 = lane.iter().map(|&p| dy[p]).sum();
            lane.iter().for_each(|&p| dx[p] = dy[p] - y[p].exp() * sum);
        });
        Ok(vec![call.real(0, dx)])
    }
}
