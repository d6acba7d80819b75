//! Gradients of a plan beside central differences of the reference.
//!
//! Of every parameter, the slopes of the reference along random directions are compared with the products of these directions and
//! the plan's gradient. The error is the root of the mean square over the directions, relative to the norm of the gradient: for
//! directions of normal numbers this is on average the norm of what is wrong with the gradient. A difference that does not confirm
//! the gradient is taken again with other steps: where they agree with each other, the gradient is wrong; where they do not, the
//! loss has a kink there, and differences say nothing.

use super::reference::{Base, Params, Reference};
use super::{Gradient, Verdict};
use fastrand::Rng;
use frit_ir::interpret::EvalError;
use frit_ir::{Tensor, TensorData, TensorType};
use std::sync::Arc;

/// Steps of the differences, relative to the root mean square of the parameter.
const STEPS: [f64; 4] = [3e-4, 3e-5, 3e-3, 3e-6];
/// The least root mean square of a parameter that a step is relative to.
const LEAST: f64 = 1e-2;
/// By how much a loss may be off in f64, relative to itself, for all that is added up in it.
const ROUNDING: f64 = 2e-14;
/// What a plan's gradient may deviate by, as a multiple of what its rounding errors were found to be.
pub(super) const MARGIN: f64 = 6.0;
/// A gradient of which rounding may change this part is not determined in the plan's precision.
const UNDETERMINED: f64 = 0.5;

/// A parameter and what the plan computes of it.
pub(super) struct Subject<'a> {
    pub(super) name: &'a str,
    pub(super) ty: &'a TensorType,
    /// The plan's gradient; none if it does not train the parameter.
    pub(super) gradient: Option<Vec<f64>>,
    /// The norm of the rounding errors of its gradient.
    pub(super) noise: f64,
    /// The least relative error that is one.
    pub(super) floor: f64,
    /// Whether a function on its way to the loss states a gradient that is not its derivative.
    pub(super) is_stated: bool,
}

/// Compares the gradient of a parameter along as many directions.
///
/// # Errors
/// If the reference cannot be evaluated.
pub(super) fn compare(
    reference: &Reference,
    base: &Base,
    subject: &Subject<'_>,
    (directions, seed): (usize, u64),
) -> Result<Gradient, EvalError> {
    let mut random = Rng::with_seed(seed ^ super::digest(subject.name));
    let n = subject.ty.shape.numel();
    let zero = vec![0.0; n];
    let gradient = subject.gradient.as_ref().unwrap_or(&zero);
    let norm = norm(gradient);
    let directions: Vec<Vec<f64>> =
        (0..directions).map(|_| (0..n).map(|_| super::normal(&mut random)).collect()).collect();
    let by_plan: Vec<f64> =
        directions.iter().map(|d| d.iter().zip(gradient).map(|(d, g)| d * g).sum()).collect();
    let point = base.params[subject.name].to_f64s();
    let size = (point.iter().map(|x| x * x).sum::<f64>() / n.max(1) as f64).sqrt().max(LEAST);
    let mut tried: Vec<Tried> = Vec::new();
    for step in STEPS {
        let step = step * size;
        let mut slopes = Vec::with_capacity(directions.len());
        for direction in &directions {
            let at = |by: f64| -> Result<f64, EvalError> {
                let values = point.iter().zip(direction).map(|(x, d)| x + by * d).collect();
                let tensor = Tensor::exact(subject.ty.clone(), TensorData::Float(values));
                let moved = Params::from([(subject.name.to_string(), Arc::new(tensor))]);
                reference.loss(base, &moved)
            };
            slopes.push((at(step)? - at(-step)?) / (2.0 * step));
        }
        let rounding = ROUNDING * base.loss.abs().max(1e-3) / step;
        let tried_now = Tried::of(slopes, &by_plan, rounding, (norm, subject));
        let is_close = tried_now.is_close();
        tried.push(tried_now);
        if is_close {
            break;
        }
    }
    let verdict = verdict(&tried, subject);
    // The step that was most convincing stands for all.
    let best = tried.iter().min_by(|a, b| a.excess().total_cmp(&b.excess()));
    let best = best.expect("invariant: a step was tried");
    Ok(Gradient {
        parameter: subject.name.into(),
        shape: subject.ty.shape.dims().to_vec(),
        by_differences: best.slopes[0],
        by_plan: by_plan[0],
        norm,
        error: best.error,
        allowed: best.allowed,
        verdict,
    })
}

/// The slopes of one step of the differences.
struct Tried {
    slopes: Vec<f64>,
    error: f64,
    allowed: f64,
    scale: f64,
}

impl Tried {
    fn of(
        slopes: Vec<f64>,
        by_plan: &[f64],
        rounding: f64,
        (norm, subject): (f64, &Subject<'_>),
    ) -> Tried {
        let pairs = slopes.iter().zip(by_plan).map(|(a, b)| a - b);
        let (difference, own) = (mean_square(pairs), mean_square(slopes.iter().copied()));
        let scale = norm.max(own);
        let relative = |x: f64| if x == 0.0 { 0.0 } else { x / scale.max(f64::MIN_POSITIVE) };
        let allowed = subject.floor + relative(MARGIN * subject.noise + rounding);
        let is_finite = difference.is_finite() && norm.is_finite();
        let error = if is_finite { relative(difference) } else { f64::INFINITY };
        Tried { slopes, error, allowed, scale }
    }

    fn is_close(&self) -> bool {
        self.error <= self.allowed
    }

    fn excess(&self) -> f64 {
        self.error / self.allowed
    }

    /// By how much the slopes of another step differ.
    fn apart(&self, other: &Tried) -> f64 {
        let pairs = self.slopes.iter().zip(&other.slopes).map(|(a, b)| a - b);
        mean_square(pairs) / self.scale.max(other.scale).max(f64::MIN_POSITIVE)
    }
}

fn verdict(tried: &[Tried], subject: &Subject<'_>) -> Verdict {
    if let Some(close) = tried.iter().find(|t| t.is_close()) {
        return match close.allowed > UNDETERMINED && subject.noise > 0.0 {
            true => Verdict::Rounded,
            false => Verdict::Right,
        };
    }
    if subject.is_stated {
        return Verdict::Stated;
    }
    // Two steps that agree better with each other than either with the plan.
    let agree = |a: &Tried, b: &Tried| 4.0 * a.apart(b) < a.error.min(b.error);
    let mut pairs =
        tried.iter().enumerate().flat_map(|(i, a)| tried[..i].iter().map(move |b| (a, b)));
    let finite = tried.iter().all(|t| t.slopes.iter().all(|s| s.is_finite()));
    if pairs.any(|(a, b)| agree(a, b)) || !finite { Verdict::Wrong } else { Verdict::Kink }
}

/// The root of the mean square.
fn mean_square(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = values.fold((0.0, 0), |(sum, n), x| (sum + x * x, n + 1));
    (sum / f64::from(n.max(1))).sqrt()
}

pub(super) fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}
