//! The rules of optimizers in f64, from the papers and from PyTorch's documentation, for the audit of updates.

use frit_ir::ops::{AdjustLr, OptimizerKind};
use half::bf16;

/// The numbers of a rule for one parameter, as f32 holds them.
#[derive(Clone, Debug)]
pub(super) struct Numbers {
    pub(super) lr: f64,
    pub(super) weight_decay: f64,
    pub(super) betas: [f64; 2],
    pub(super) eps: f64,
    pub(super) momentum: f64,
    pub(super) dampening: f64,
    pub(super) decay_exponent: f64,
    pub(super) relative_eps: f64,
    pub(super) update_threshold: f64,
    pub(super) muon: Muon,
}

/// The numbers of Muon.
#[derive(Clone, Debug)]
pub(super) struct Muon {
    pub(super) momentum: f64,
    pub(super) nesterov: bool,
    pub(super) steps: usize,
    pub(super) coefficients: [f64; 3],
    pub(super) eps: f64,
    pub(super) adjust_lr: AdjustLr,
}

/// A parameter, or state, after a step.
#[derive(Clone, Debug, Default)]
pub(super) struct Stepped {
    pub(super) values: Vec<f64>,
    /// Of each element, the sum of the magnitudes of what was added up.
    pub(super) sizes: Vec<f64>,
}

impl Stepped {
    /// Of each element, terms that are added.
    fn of<const N: usize>(terms: impl Iterator<Item = [f64; N]>) -> Stepped {
        let pairs = terms.map(|t| (t.iter().sum::<f64>(), t.iter().map(|x| x.abs()).sum::<f64>()));
        let (values, sizes) = pairs.unzip();
        Stepped { values, sizes }
    }
}

/// What a step does.
pub(super) struct Outcome {
    /// By what the parameter changes beside weight decay of its own.
    pub(super) change: Stepped,
    /// The factor of the parameter in its change; 0 where weight decay is added to the gradient.
    pub(super) shrinks: f64,
    /// The states, in the order of [`OptimizerKind::states`].
    pub(super) states: Vec<Stepped>,
}

/// The step number `t`, from 1, of a parameter with these `dims`, along a gradient that was unscaled and clipped.
pub(super) fn step(
    kind: OptimizerKind,
    n: &Numbers,
    (dims, t): (&[usize], f64),
    (p, g): (&[f64], &[f64]),
    states: &[Vec<f64>],
) -> Outcome {
    let decoupled = -n.lr * n.weight_decay;
    let each = || p.iter().zip(g).enumerate().map(|(i, (p, g))| (i, *p, *g));
    let scaled = |x: &Stepped, factor: &dyn Fn(usize) -> f64| {
        let by = |values: &[f64], f: &dyn Fn(usize, f64) -> f64| {
            values.iter().enumerate().map(|(i, x)| f(i, *x)).collect::<Vec<f64>>()
        };
        Stepped {
            values: by(&x.values, &|i, x| factor(i) * x),
            sizes: by(&x.sizes, &|i, x| (factor(i) * x).abs()),
        }
    };
    match kind {
        OptimizerKind::Adamw | OptimizerKind::Adam => {
            let l2 = if kind == OptimizerKind::Adam { n.weight_decay } else { 0.0 };
            let [b1, b2] = n.betas;
            let m = Stepped::of(
                each().map(|(i, p, g)| [b1 * states[0][i], (1.0 - b1) * g, (1.0 - b1) * l2 * p]),
            );
            // (g + l2·p)², of which g and l2·p may cancel.
            let v = Stepped::of(each().map(|(i, p, g)| {
                let own = 1.0 - b2;
                [b2 * states[1][i], own * g * g, own * 2.0 * g * l2 * p, own * (l2 * p).powi(2)]
            }));
            let (c1, c2) = (1.0 - b1.powf(t), 1.0 - b2.powf(t));
            let along = |i: usize| -n.lr / c1 / ((v.values[i] / c2).sqrt() + n.eps);
            let change = scaled(&m, &along);
            let shrinks = if kind == OptimizerKind::Adam { 0.0 } else { decoupled };
            Outcome { change, shrinks, states: vec![m, v] }
        }
        OptimizerKind::Sgd => {
            let change =
                Stepped::of(each().map(|(_, p, g)| [-n.lr * g, -n.lr * n.weight_decay * p]));
            Outcome { change, shrinks: 0.0, states: vec![] }
        }
        OptimizerKind::Momentum | OptimizerKind::Nesterov => {
            let nesterov = kind == OptimizerKind::Nesterov;
            let dampening = if nesterov { 0.0 } else { n.dampening };
            let buffer = Stepped::of(each().map(|(i, p, g)| match t == 1.0 {
                true => [g, n.weight_decay * p, 0.0],
                false => {
                    let new = 1.0 - dampening;
                    [new * g, new * n.weight_decay * p, n.momentum * states[0][i]]
                }
            }));
            let change = match nesterov {
                false => scaled(&buffer, &|_| -n.lr),
                true => Stepped::of(each().map(|(i, p, g)| {
                    let along = [g, n.weight_decay * p, n.momentum * buffer.values[i]];
                    along.map(|x| -n.lr * x)
                })),
            };
            Outcome { change, shrinks: 0.0, states: vec![buffer] }
        }
        OptimizerKind::Lion => {
            let [b1, b2] = n.betas;
            let along = each().map(|(i, _, g)| {
                let (old, new) = (b1 * states[0][i], (1.0 - b1) * g);
                // The sign of what cancels is any.
                let is_any = (old + new).abs() < 1e-6 * (old.abs() + new.abs());
                let sign = if old + new == 0.0 { 0.0 } else { (old + new).signum() };
                (-n.lr * sign, if is_any { f64::INFINITY } else { n.lr })
            });
            let (values, sizes) = along.unzip();
            let m = Stepped::of(each().map(|(i, _, g)| [b2 * states[0][i], (1.0 - b2) * g]));
            Outcome { change: Stepped { values, sizes }, shrinks: decoupled, states: vec![m] }
        }
        OptimizerKind::Adafactor => {
            let (change, state) = adafactor(n, dims, t, (p, g), &states[0]);
            Outcome { change, shrinks: decoupled, states: vec![state] }
        }
        OptimizerKind::Muon => {
            let keep = n.muon.momentum;
            let m = Stepped::of(each().map(|(i, _, g)| [keep * states[0][i], (1.0 - keep) * g]));
            let mixed = |(i, _, g): (usize, f64, f64)| match n.muon.nesterov {
                true => keep * m.values[i] + (1.0 - keep) * g,
                false => m.values[i],
            };
            let direction: Vec<f64> = each().map(mixed).collect();
            let direction = orthogonal(&n.muon, direction, [dims[0], dims[1]]);
            let (rows, cols) = (dims[0] as f64, dims[1] as f64);
            let ratio = match n.muon.adjust_lr {
                AdjustLr::Original => (rows / cols).max(1.0).sqrt(),
                AdjustLr::MatchRmsAdamw => 0.2 * rows.max(cols).sqrt(),
                AdjustLr::SpectralUnclamped => (rows / cols).sqrt(),
            };
            let change = Stepped::of(direction.iter().map(|x| [-n.lr * ratio * x]));
            Outcome { change, shrinks: decoupled, states: vec![m] }
        }
    }
}

/// `torch.optim.Adafactor`: the change without weight decay, and the state, of the rows and then of the columns.
fn adafactor(
    n: &Numbers,
    dims: &[usize],
    t: f64,
    (p, g): (&[f64], &[f64]),
    state: &[f64],
) -> (Stepped, Stepped) {
    let new = t.powf(-n.decay_exponent);
    let eps = f64::from(f32::EPSILON);
    let lerp = |old: f64, mean: f64| [old * (1.0 - new), new * mean];
    let (state, variance): (Stepped, Vec<f64>) = match *dims {
        [.., rows, cols] => {
            let batch = p.len() / (rows * cols).max(1);
            let square = |b: usize, r: usize, c: usize| g[(b * rows + r) * cols + c].powi(2);
            let row = (0..batch * rows).map(|at| {
                let sum: f64 = (0..cols).map(|c| square(at / rows, at % rows, c)).sum();
                lerp(state[at], sum / cols as f64)
            });
            let col = (0..batch * cols).map(|at| {
                let sum: f64 = (0..rows).map(|r| square(at / cols, r, at % cols)).sum();
                lerp(state[batch * rows + at], sum / rows as f64)
            });
            let state = Stepped::of(row.chain(col));
            let (by_row, by_col) = state.values.split_at(batch * rows);
            let variance = (0..p.len()).map(|at| {
                let (b, r, c) = (at / (rows * cols), at / cols % rows, at % cols);
                let own = &by_row[b * rows..(b + 1) * rows];
                let mean = own.iter().sum::<f64>() / rows as f64;
                own[r] * by_col[b * cols + c] / mean.max(eps)
            });
            let variance = variance.collect();
            (state, variance)
        }
        _ => {
            let state = Stepped::of(g.iter().zip(state).map(|(g, old)| lerp(*old, g * g)));
            let variance = state.values.clone();
            (state, variance)
        }
    };
    let update: Vec<f64> =
        g.iter().zip(&variance).map(|(g, v)| g / v.max(eps * eps).sqrt()).collect();
    let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
    let rate = rms(p).max(n.relative_eps) * n.lr.min(1.0 / t.sqrt());
    let rate = rate / (rms(&update) / n.update_threshold).max(1.0);
    (Stepped::of(update.iter().map(|u| [-rate * u])), state)
}

/// Newton-Schulz iterations in bf16, as `torch.optim.Muon`.
fn orthogonal(muon: &Muon, mut x: Vec<f64>, [rows, cols]: [usize; 2]) -> Vec<f64> {
    let round = |x: f64| bf16::from_f64(x).to_f64();
    x.iter_mut().for_each(|x| *x = round(*x));
    let norm = round(super::gradients::norm(&x)).max(muon.eps);
    x.iter_mut().for_each(|x| *x = round(*x / norm));
    let is_tall = rows > cols;
    let (n, k) = (rows.min(cols), rows.max(cols));
    if is_tall {
        x = transposed(&x, [rows, cols]);
    }
    let [a, b, c] = muon.coefficients;
    for _ in 0..muon.steps {
        let gram: Vec<f64> =
            product(&x, &transposed(&x, [n, k]), [n, k, n]).into_iter().map(round).collect();
        let square = product(&gram, &gram, [n, n, n]);
        let factor: Vec<f64> = gram.iter().zip(square).map(|(g, s)| round(b * g + c * s)).collect();
        let added = product(&factor, &x, [n, n, k]);
        x = x.iter().zip(added).map(|(x, y)| round(a * x + y)).collect();
    }
    if is_tall { transposed(&x, [n, k]) } else { x }
}

fn transposed(x: &[f64], [rows, cols]: [usize; 2]) -> Vec<f64> {
    (0..rows * cols).map(|at| x[at % rows * cols + at / rows]).collect()
}

/// `[m, k]` times `[k, n]`.
fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let mut all = vec![0.0; m * n];
    for (i, row) in all.chunks_mut(n.max(1)).enumerate() {
        for l in 0..k {
            let factor = a[i * k + l];
            row.iter_mut().zip(&b[l * n..]).for_each(|(sum, b)| *sum += factor * b);
        }
    }
    all
}
