//! Optimizer steps, moving average, learning rate.

use super::call::{Call, broadcast};
use super::muon;
use super::{Evaluate, Evaluated};
use crate::DType;
use crate::ops::{ByParamGroup, EmaStep, LearningRate, OptimizerKind, OptimizerStep, ScheduleKind};
use std::f64::consts::PI;

impl Evaluate for OptimizerStep {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let n_states = self.kind.n_states();
        let n = call.inputs.len();
        let [clip, step, factor, found_inf] = [n - 4, n - 3, n - 2, n - 1].map(|i| call.scalar(i));
        if found_inf != 0.0 {
            let kept = std::iter::once(0).chain(2..2 + n_states);
            return Ok(kept.map(|i| call.inputs[i].clone()).collect());
        }
        let limit = if clip == 0.0 { f64::INFINITY } else { clip };
        let mut p = call.floats(0).into_owned();
        let g: Vec<f64> =
            call.floats(1).iter().map(|g| (g * factor).max(-limit).min(limit)).collect();
        let mut states: Vec<Vec<f64>> =
            (2..2 + n_states).map(|i| call.floats(i).into_owned()).collect();
        let first = 2 + n_states;
        let last = first + self.kind.hypers().len() - 1;
        let shape = call.inputs[0].shape();
        let by_element = |i: usize| {
            let values = call.floats(i);
            broadcast(&values, call.inputs[i].shape(), shape).into_owned()
        };
        let (lr, decay) = (by_element(first), by_element(last));
        let hyper = |i: usize| call.scalar(first + i);
        match self.kind {
            OptimizerKind::Adamw | OptimizerKind::Adam => {
                let [beta1, beta2, eps] = [1, 2, 3].map(hyper);
                let correction1 = 1.0 - beta1.powf(step + 1.0);
                let correction2 = 1.0 - beta2.powf(step + 1.0);
                let [m, v] = &mut states[..] else {
                    unreachable!("invariant: adam has two moments")
                };
                for i in 0..p.len() {
                    let mut g = g[i];
                    if self.kind == OptimizerKind::Adamw {
                        p[i] *= 1.0 - lr[i] * decay[i];
                    } else {
                        g += decay[i] * p[i];
                    }
                    m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                    v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                    p[i] -= lr[i] * (m[i] / correction1) / ((v[i] / correction2).sqrt() + eps);
                }
            }
            OptimizerKind::Sgd => {
                for i in 0..p.len() {
                    p[i] -= lr[i] * (g[i] + decay[i] * p[i]);
                }
            }
            OptimizerKind::Momentum | OptimizerKind::Nesterov => {
                let nesterov = self.kind == OptimizerKind::Nesterov;
                let momentum = hyper(1);
                let dampening = if nesterov { 0.0 } else { hyper(2) };
                let buffer = &mut states[0];
                for i in 0..p.len() {
                    let g = g[i] + decay[i] * p[i];
                    let later = momentum * buffer[i] + (1.0 - dampening) * g;
                    buffer[i] = if step == 0.0 { g } else { later };
                    let along = if nesterov { g + momentum * buffer[i] } else { buffer[i] };
                    p[i] -= lr[i] * along;
                }
            }
            OptimizerKind::Adafactor => {
                let scalars = [hyper(0), hyper(1), hyper(2), hyper(3), hyper(4), step];
                adafactor(call.dims(0), &mut p, &g, &mut states[0], scalars);
            }
            OptimizerKind::Muon => {
                let momentum = &mut states[0];
                let mut direction = muon::mix(&g, momentum, hyper(1), self.muon.nesterov);
                let exact = call.exact;
                let round = |x: f64| if exact { x } else { DType::BF16.round(x) };
                direction.iter_mut().for_each(|x| *x = round(*x));
                let (coefficients, eps) = ([2, 3, 4].map(hyper), hyper(5));
                let dims = [call.dims(0)[0], call.dims(0)[1]];
                let steps = self.muon.ns_steps;
                muon::orthogonalize(&mut direction, dims, (coefficients, eps, steps), round);
                let ratio = self.muon.adjust_lr.ratio(shape);
                for i in 0..p.len() {
                    p[i] = p[i] * (1.0 - lr[i] * decay[i]) - lr[i] * ratio * direction[i];
                }
            }
            OptimizerKind::Lion => {
                let [beta1, beta2] = [1, 2].map(hyper);
                let m = &mut states[0];
                for i in 0..p.len() {
                    let along = beta1 * m[i] + (1.0 - beta1) * g[i];
                    // The sign of zero is zero.
                    let sign = if along == 0.0 { 0.0 } else { along.signum() };
                    p[i] = p[i] * (1.0 - lr[i] * decay[i]) - lr[i] * sign;
                    m[i] = beta2 * m[i] + (1.0 - beta2) * g[i];
                }
            }
        }
        Ok(std::iter::once(p).chain(states).enumerate().map(|(i, x)| call.real(i, x)).collect())
    }
}

/// One step with the scalars `[lr, decay_exponent, relative_eps, update_threshold, weight_decay, step]`.
fn adafactor(dims: &[usize], p: &mut [f64], g: &[f64], v: &mut [f64], scalars: [f64; 6]) {
    let [lr, exponent, eps, threshold, decay, step] = scalars;
    if p.is_empty() {
        return;
    }
    // Lower bound of squares and their means, PyTorch's for f32.
    let least = f64::from(f32::EPSILON);
    let weight = (step + 1.0).powf(-exponent);
    let mut update = g.to_vec();
    if let [.., rows, cols] = *dims {
        let batch = p.len() / (rows * cols);
        let (by_row, by_col) = v.split_at_mut(batch * rows);
        for b in 0..batch {
            let at = |r: usize, c: usize| (b * rows + r) * cols + c;
            for r in 0..rows {
                let mean = (0..cols).map(|c| g[at(r, c)].powi(2)).sum::<f64>() / cols as f64;
                by_row[b * rows + r] += (mean - by_row[b * rows + r]) * weight;
            }
            for c in 0..cols {
                let mean = (0..rows).map(|r| g[at(r, c)].powi(2)).sum::<f64>() / rows as f64;
                by_col[b * cols + c] += (mean - by_col[b * cols + c]) * weight;
            }
            let own = &by_row[b * rows..(b + 1) * rows];
            let mean = (own.iter().sum::<f64>() / rows as f64).max(least);
            for r in 0..rows {
                for c in 0..cols {
                    let variance = (own[r] * by_col[b * cols + c] / mean).max(least * least);
                    update[at(r, c)] /= variance.sqrt();
                }
            }
        }
    } else {
        for i in 0..p.len() {
            v[i] += (g[i] * g[i] - v[i]) * weight;
            update[i] /= v[i].max(least * least).sqrt();
        }
    }
    let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
    let alpha = rms(p).max(eps) * lr.min(1.0 / (step + 1.0).sqrt());
    let rate = alpha / (rms(&update) / threshold).max(1.0);
    for (p, u) in p.iter_mut().zip(&update) {
        *p = *p * (1.0 - lr * decay) - rate * u;
    }
}

impl Evaluate for EmaStep {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let [decay, step, found_inf] = [2, 3, 4].map(|i| call.scalar(i));
        if found_inf != 0.0 {
            return Ok(vec![call.inputs[0].clone()]);
        }
        let (average, param) = (call.floats(0), call.floats(1));
        let mix =
            |(a, p): (&f64, &f64)| if step == 0.0 { *p } else { decay * a + (1.0 - decay) * p };
        Ok(vec![call.real(0, average.iter().zip(param.iter()).map(mix).collect())])
    }
}

impl Evaluate for ByParamGroup {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let n = call.inputs.len() / 2;
        let value_at = |i: usize| {
            let group = (1..=n).rev().find(|k| call.ints(2 * k - 1)[0] <= i as i64).unwrap_or(0);
            call.scalar(2 * group)
        };
        Ok(vec![call.real(0, (0..self.len).map(value_at).collect())])
    }
}

impl Evaluate for LearningRate {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let base = call.scalar(0);
        let hyper = |i: usize| call.scalar(1 + i);
        let step = call.scalar(call.inputs.len() - 1);
        // From `from` at 0 to `to` at 1.
        let half_cosine =
            |from: f64, to: f64, at: f64| to + (from - to) * 0.5 * (1.0 + (PI * at).cos());
        let rate = match self.kind {
            ScheduleKind::OneCycle => {
                let [total, pct_start, div, final_div] = [0, 1, 2, 3].map(hyper);
                let (first, last) = (base / div, base / div / final_div);
                let (top, end) = (pct_start * total - 1.0, total - 1.0);
                if step <= top {
                    half_cosine(first, base, step / top)
                } else {
                    half_cosine(base, last, ((step - top) / (end - top)).min(1.0))
                }
            }
            _ if step < hyper(0) => base * (step + 1.0) / hyper(0),
            ScheduleKind::Step => base * hyper(2).powf(((step - hyper(0)) / hyper(1)).floor()),
            ScheduleKind::Constant | ScheduleKind::Linear | ScheduleKind::Cosine => {
                let [warmup, total, least] = [0, 1, 2].map(hyper);
                let span = total - warmup;
                let done = if span > 0.0 { ((step - warmup) / span).min(1.0) } else { 1.0 };
                match self.kind {
                    ScheduleKind::Linear if total > 0.0 => base + (least - base) * done,
                    ScheduleKind::Cosine if total > 0.0 => half_cosine(base, least, done),
                    _ => base,
                }
            }
        };
        Ok(vec![call.real(0, vec![rate])])
    }
}
