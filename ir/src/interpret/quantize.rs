//! Rounding to 8-bit floats.

use super::call::Call;
use super::{Evaluate, Evaluated};
use crate::DType;
use crate::ops::Quantize;

impl Evaluate for Quantize {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let x = call.floats(0);
        let finite = x.iter().filter(|x| x.is_finite());
        let amax = finite.fold(0.0, |m: f64, x| m.max(x.abs()));
        let recent = if call.inputs.len() > 1 { call.floats(1)[self.index] } else { 0.0 };
        // Significand bits, least normal exponent, largest number.
        let (bits, least, largest) = match self.to {
            DType::F8E4M3 => (3, -6, 448.0),
            _ => (2, -14, 57344.0),
        };
        let known = if recent > 0.0 { recent } else { amax };
        let scale = if known > 0.0 && known.is_finite() {
            // Such that scale and inverse are normal numbers of f32.
            f64::from(exponent(largest / known).clamp(-126, 100)).exp2()
        } else {
            1.0
        };
        let round = |x: &f64| match *x {
            x if x.is_infinite() && self.to == DType::F8E4M3 => f64::NAN,
            x if x == 0.0 || !x.is_finite() => x,
            x => {
                let x = x * scale;
                let unit = f64::from(exponent(x).max(least) - bits).exp2();
                ((x / unit).round_ties_even() * unit).clamp(-largest, largest) / scale
            }
        };
        Ok(vec![call.real(0, x.iter().map(round).collect()), call.real(1, vec![amax])])
    }
}

/// The power of two just below a normal number.
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
}
