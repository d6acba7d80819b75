//! The error function, to f64 precision.
//!
//! Source: Abramowitz & Stegun, 7.1.6 (series of positive terms) and 7.1.14 (continued fraction).

use std::f64::consts::PI;

/// From here on the continued fraction is used.
const SPLIT: f64 = 2.5;

/// Gauss's error function.
pub fn erf(x: f64) -> f64 {
    if x.is_nan() {
        x
    } else if x.abs() < SPLIT {
        series(x)
    } else {
        (1.0 - tail(x.abs())).copysign(x)
    }
}

/// 1 − erf(x), accurate where it is small.
pub fn erfc(x: f64) -> f64 {
    if x >= SPLIT { tail(x) } else { 1.0 - erf(x) }
}

/// erf(x) = 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (2n+1)!!
fn series(x: f64) -> f64 {
    let mut term = x;
    let mut sum = x;
    let mut odd = 1.0;
    while term.abs() > sum.abs() * 1e-18 {
        odd += 2.0;
        term *= 2.0 * x * x / odd;
        sum += term;
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}

/// erfc(x) = e^(−x²) / √π · 1/(x + (1/2)/(x + (2/2)/(x + …))), for x ≥ [`SPLIT`].
fn tail(x: f64) -> f64 {
    let fraction = (1..=80).rev().fold(x, |rest, n| x + f64::from(n) / 2.0 / rest);
    (-x * x).exp() / (PI.sqrt() * fraction)
}

/// Φ(x), the distribution function of the standard normal.
pub(super) fn normal_cdf(x: f64) -> f64 {
    0.5 * erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

/// φ(x), its density.
pub(super) fn normal_density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

/// 1/(1 + e⁻ˣ), without overflow.
pub(super) fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}

/// The argument of tanh in `gelu_tanh`, and its derivative.
pub(super) fn gelu_tanh_inner(x: f64) -> (f64, f64) {
    let c = (2.0 / PI).sqrt();
    (c * (x + 0.044715 * x * x * x), c * (1.0 + 3.0 * 0.044715 * x * x))
}
