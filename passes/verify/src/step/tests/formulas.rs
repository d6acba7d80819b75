//! The rules of optimizers and schedules in f64, element by element.

use super::super::Update;
use frit_ir::ops::{AdjustLr, OptimizerKind, ScheduleKind};
use std::f64::consts::PI;

/// The learning rate of the step after `t` steps.
pub(super) fn learning_rate(u: &Update, base: f64, t: f64) -> f64 {
    let h = |key: &str| u.hypers[&format!("schedule.{key}")];
    let cosine = |from: f64, to: f64, at: f64| from + (to - from) * (1.0 - (PI * at).cos()) / 2.0;
    if u.schedule == ScheduleKind::OneCycle {
        let (first, n) = (base / h("div_factor"), h("total_steps"));
        let top = h("pct_start") * n - 1.0;
        return match t <= top {
            true => cosine(first, base, t / top),
            false => cosine(base, first / h("final_div_factor"), (t - top) / (n - 1.0 - top)),
        };
    }
    let warmup = h("warmup_steps");
    if t < warmup {
        return base * (t + 1.0) / warmup;
    }
    let t = t - warmup;
    let at = || (t / (h("total_steps") - warmup)).min(1.0);
    match u.schedule {
        ScheduleKind::Linear => base + (h("min_lr") - base) * at(),
        ScheduleKind::Cosine => cosine(base, h("min_lr"), at()),
        ScheduleKind::Step => base * h("gamma").powi((t / h("step_size")) as i32),
        _ => base,
    }
}

/// A parameter with its state.
#[derive(Clone, Debug)]
pub(super) struct Trained {
    pub(super) dims: Vec<usize>,
    pub(super) kind: OptimizerKind,
    pub(super) lr: f64,
    pub(super) decay: f64,
    pub(super) p: Vec<f64>,
    pub(super) states: Vec<Vec<f64>>,
    pub(super) average: Vec<f64>,
}

impl Trained {
    /// The step after `t` steps, along a gradient that was unscaled and clipped.
    pub(super) fn step(&mut self, u: &Update, g: &[f64], t: f64) {
        let h = |key: &str| u.hypers[&format!("optimizer.{key}")];
        let lr = learning_rate(u, self.lr, t);
        match self.kind {
            OptimizerKind::Adafactor => self.adafactor(h, g, (lr, t)),
            OptimizerKind::Muon => self.muon(u, g, lr),
            _ => {
                for element in g.iter().copied().enumerate() {
                    self.element(h, element, (lr, t));
                }
            }
        }
        for (a, p) in self.average.iter_mut().zip(&self.p) {
            *a = if t == 0.0 { *p } else { h("ema") * *a + (1.0 - h("ema")) * p };
        }
    }

    fn element(&mut self, h: impl Fn(&str) -> f64, (i, g): (usize, f64), (lr, t): (f64, f64)) {
        let (p, decay) = (self.p[i], self.decay);
        let l2 = g + decay * p;
        let shrunk = p - lr * decay * p;
        self.p[i] = match self.kind {
            OptimizerKind::Adam | OptimizerKind::Adamw => {
                let coupled = self.kind == OptimizerKind::Adam;
                let (g, p) = if coupled { (l2, p) } else { (g, shrunk) };
                let (b1, b2) = (h("beta1"), h("beta2"));
                self.states[0][i] = b1 * self.states[0][i] + (1.0 - b1) * g;
                self.states[1][i] = b2 * self.states[1][i] + (1.0 - b2) * g * g;
                let m = self.states[0][i] / (1.0 - b1.powf(t + 1.0));
                let v = self.states[1][i] / (1.0 - b2.powf(t + 1.0));
                p - lr * m / (v.sqrt() + h("eps"))
            }
            OptimizerKind::Momentum | OptimizerKind::Nesterov => {
                let nesterov = self.kind == OptimizerKind::Nesterov;
                let dampening = if nesterov { 0.0 } else { h("dampening") };
                let buffer = &mut self.states[0][i];
                *buffer = match t == 0.0 {
                    true => l2,
                    false => h("momentum") * *buffer + (1.0 - dampening) * l2,
                };
                p - lr * if nesterov { l2 + h("momentum") * *buffer } else { *buffer }
            }
            OptimizerKind::Lion => {
                let m = &mut self.states[0][i];
                let along = h("beta1") * *m + (1.0 - h("beta1")) * g;
                *m = h("beta2") * *m + (1.0 - h("beta2")) * g;
                shrunk - lr * along.signum()
            }
            _ => p - lr * l2,
        };
    }

    fn adafactor(&mut self, h: impl Fn(&str) -> f64, g: &[f64], (lr, t): (f64, f64)) {
        let weight = (t + 1.0).powf(-h("decay_exponent"));
        let least = f64::from(f32::EPSILON);
        let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        let v = &mut self.states[0];
        let mix = |old: &mut f64, new: f64| *old = (1.0 - weight) * *old + weight * new;
        let mut along = g.to_vec();
        match self.dims[..] {
            [rows, cols] => {
                for r in 0..rows {
                    mix(&mut v[r], rms(&g[r * cols..][..cols]).powi(2));
                }
                for c in 0..cols {
                    let column: Vec<f64> = (0..rows).map(|r| g[r * cols + c]).collect();
                    mix(&mut v[rows + c], rms(&column).powi(2));
                }
                let mean = v[..rows].iter().sum::<f64>() / rows as f64;
                for (i, u) in along.iter_mut().enumerate() {
                    let variance = v[i / cols] * v[rows + i % cols] / mean.max(least);
                    *u /= variance.max(least * least).sqrt();
                }
            }
            _ => {
                for (v, u) in v.iter_mut().zip(&mut along) {
                    mix(v, *u * *u);
                    *u /= v.max(least * least).sqrt();
                }
            }
        }
        let rate = lr.min(1.0 / (t + 1.0).sqrt()) * rms(&self.p).max(h("relative_eps"));
        let rate = rate / (rms(&along) / h("update_threshold")).max(1.0);
        for (p, u) in self.p.iter_mut().zip(along) {
            *p -= lr * self.decay * *p + rate * u;
        }
    }

    fn muon(&mut self, u: &Update, g: &[f64], lr: f64) {
        let h = |key: &str| u.hypers[&format!("optimizer.muon_{key}")];
        let keep = h("momentum");
        let [rows, cols] = [self.dims[0], self.dims[1]];
        let mut x = vec![0.0; g.len()];
        for i in 0..g.len() {
            let m = &mut self.states[0][i];
            *m = keep * *m + (1.0 - keep) * g[i];
            x[i] = if u.muon.nesterov { keep * *m + (1.0 - keep) * g[i] } else { *m };
        }
        let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt().max(h("ns_eps"));
        x.iter_mut().for_each(|x| *x /= norm);
        // a·X + b·(X·Xᵀ)·X + c·(X·Xᵀ)²·X
        for _ in 0..u.muon.ns_steps {
            let gram = product(&x, &transposed(&x, [rows, cols]), [rows, cols, rows]);
            let cubic = product(&gram, &x, [rows, rows, cols]);
            let quintic = product(&gram, &cubic, [rows, rows, cols]);
            for i in 0..x.len() {
                x[i] = h("ns_a") * x[i] + h("ns_b") * cubic[i] + h("ns_c") * quintic[i];
            }
        }
        let (r, c) = (rows as f64, cols as f64);
        let ratio = match u.muon.adjust_lr {
            AdjustLr::Original => (r / c).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamw => 0.2 * r.max(c).sqrt(),
            AdjustLr::SpectralUnclamped => (r / c).sqrt(),
        };
        for (p, x) in self.p.iter_mut().zip(x) {
            *p -= lr * self.decay * *p + lr * ratio * x;
        }
    }
}

/// `a[m, k] · b[k, n]`.
fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let at = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
    (0..m * n).map(|e| at(e / n, e % n)).collect()
}

fn transposed(x: &[f64], [rows, cols]: [usize; 2]) -> Vec<f64> {
    (0..x.len()).map(|e| x[e % rows * cols + e / rows]).collect()
}
