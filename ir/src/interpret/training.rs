//! Loss scale, statistics of gradients, optimizer, schedule.

use super::call::Call;
use crate::ops::training::Unscale;
use crate::ops::{LearningRate, LossScale, OptimizerKind, OptimizerStep, ScheduleKind};
use crate::{DType, Tensor};

pub(super) fn loss_scale(op: &LossScale, call: &Call<'_>) -> Vec<Tensor> {
    vec![call.real(0, vec![call.scalar(0) * op.factor])]
}

pub(super) fn grad_stats(call: &Call<'_>) -> Vec<Tensor> {
    let (mut bad, mut squares) = (0u64, 0.0);
    for i in 0..call.inputs.len() {
        for g in call.floats(i).iter() {
            bad += u64::from(!g.is_finite());
            squares += g * g;
        }
    }
    vec![call.real(0, vec![bad as f64, squares])]
}

pub(super) fn unscale(op: &Unscale, call: &Call<'_>) -> Vec<Tensor> {
    let stats = call.floats(0);
    let [bad, squares, count, loss_sum] = [stats[0], stats[1], stats[2], stats[3]];
    let (scale, clip) = (call.scalar(1), call.scalar(2));
    let count = count.max(1.0);
    let unscale = op.capacity / count / scale;
    let norm = squares.sqrt() * unscale;
    let limit = if clip == 0.0 { 1.0 } else { (clip / (norm + 1e-6)).min(1.0) };
    let found_inf = if bad == 0.0 { 0.0 } else { 1.0 };
    [unscale * limit, found_inf, norm, loss_sum / count]
        .into_iter()
        .enumerate()
        .map(|(i, x)| call.real(i, vec![x]))
        .collect()
}

pub(super) fn optimizer_step(op: &OptimizerStep, call: &Call<'_>) -> Vec<Tensor> {
    let n_states = op.kind.n_states();
    let scalars: Vec<f64> = (2 + n_states..call.inputs.len()).map(|i| call.scalar(i)).collect();
    let [.., step, factor, found_inf] = scalars[..] else {
        unreachable!("invariant: every optimizer has these operands")
    };
    if found_inf != 0.0 {
        let kept = std::iter::once(0).chain(2..2 + n_states);
        return kept.map(|i| call.inputs[i].clone()).collect();
    }
    let mut p = call.floats(0).into_owned();
    let g: Vec<f64> = call.floats(1).iter().map(|g| g * factor).collect();
    match op.kind {
        OptimizerKind::Adamw => {
            let [lr, beta1, beta2, eps, decay] = [0, 1, 2, 3, 4].map(|i| scalars[i]);
            let (mut m, mut v) = (call.floats(2).into_owned(), call.floats(3).into_owned());
            let correction1 = 1.0 - beta1.powf(step + 1.0);
            let correction2 = 1.0 - beta2.powf(step + 1.0);
            for i in 0..p.len() {
                p[i] *= 1.0 - lr * decay;
                m[i] = beta1 * m[i] + (1.0 - beta1) * g[i];
                v[i] = beta2 * v[i] + (1.0 - beta2) * g[i] * g[i];
                p[i] -= lr * (m[i] / correction1) / ((v[i] / correction2).sqrt() + eps);
            }
            vec![call.real(0, p), call.real(1, m), call.real(2, v)]
        }
        OptimizerKind::Sgd => {
            let [lr, decay] = [0, 1].map(|i| scalars[i]);
            for (p, g) in p.iter_mut().zip(&g) {
                *p -= lr * (g + decay * *p);
            }
            vec![call.real(0, p)]
        }
        OptimizerKind::Momentum => {
            let [lr, momentum, decay] = [0, 1, 2].map(|i| scalars[i]);
            let mut buffer = call.floats(2).into_owned();
            for i in 0..p.len() {
                let g = g[i] + decay * p[i];
                buffer[i] = if step == 0.0 { g } else { momentum * buffer[i] + g };
                p[i] -= lr * buffer[i];
            }
            vec![call.real(0, p), call.real(1, buffer)]
        }
    }
}

pub(super) fn update_loss_scale(call: &Call<'_>) -> Vec<Tensor> {
    let [scale, tracker, found_inf, growth, backoff, interval] =
        [0, 1, 2, 3, 4, 5].map(|i| call.scalar(i));
    let (scale, tracker) = if found_inf != 0.0 {
        (scale * backoff, 0.0)
    } else if tracker + 1.0 >= interval {
        let grown = scale * growth;
        (if DType::F32.round(grown).is_finite() { grown } else { scale }, 0.0)
    } else {
        (scale, tracker + 1.0)
    };
    vec![call.real(0, vec![scale]), call.real(1, vec![tracker])]
}

pub(super) fn update_step(call: &Call<'_>) -> Vec<Tensor> {
    let (step, found_inf) = (call.scalar(0), call.scalar(1));
    vec![call.real(0, vec![if found_inf != 0.0 { step } else { step + 1.0 }])]
}

pub(super) fn learning_rate(op: &LearningRate, call: &Call<'_>) -> Vec<Tensor> {
    let [base, warmup, total, least, step] = [0, 1, 2, 3, 4].map(|i| call.scalar(i));
    let rate = if step < warmup {
        base * (step + 1.0) / warmup
    } else if total == 0.0 {
        base
    } else {
        let span = total - warmup;
        let done = if span > 0.0 { ((step - warmup) / span).min(1.0) } else { 1.0 };
        match op.kind {
            ScheduleKind::Constant => base,
            ScheduleKind::Linear => base + (least - base) * done,
            ScheduleKind::Cosine => {
                least + (base - least) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos())
            }
        }
    };
    vec![call.real(0, vec![rate])]
}
