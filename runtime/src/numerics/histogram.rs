//! Histograms of float exponents per scope, and the fraction of values that each format would lose.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of [`NumericsFile`].
pub const FORMAT: u32 = 1;

/// The kind of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Written by the forward pass.
    Activation,
    /// Written by the backward pass; divided by the loss scale.
    Gradient,
}

/// Counts of `floor(log2 |x|)`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    /// Elements.
    pub elements: u64,
    /// Elements that are 0.
    pub zeros: u64,
    /// Elements that are infinite or NaN.
    pub not_finite: u64,
    /// The largest finite magnitude.
    pub max_abs: f64,
    /// The smallest magnitude above 0; 0 if there is none.
    pub min_abs: f64,
    /// Number of elements by exponent.
    pub exponents: BTreeMap<i32, u64>,
}

/// A number format, by its exponents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Name in reports.
    pub name: &'static str,
    /// Exponent of the largest number.
    pub top: i32,
    /// Exponent of the smallest normal number.
    pub normal: i32,
    /// Exponent of the smallest number.
    pub bottom: i32,
}

impl Format {
    /// The formats that are reported. Source: IEEE 754, OCP FP8.
    pub const ALL: [Format; 4] = [
        Format { name: "f16", top: 15, normal: -14, bottom: -24 },
        Format { name: "bf16", top: 127, normal: -126, bottom: -133 },
        Format { name: "e4m3", top: 8, normal: -6, bottom: -9 },
        Format { name: "e5m2", top: 15, normal: -14, bottom: -16 },
    ];
}

impl Histogram {
    /// Counts one element.
    pub fn add(&mut self, x: f64) {
        self.elements += 1;
        let size = x.abs();
        if !size.is_finite() {
            self.not_finite += 1;
        } else if size == 0.0 {
            self.zeros += 1;
        } else {
            // Floats of at most 32 bits, times a scale, are normal in 64 bits.
            let exponent = ((size.to_bits() >> 52) & 0x7ff) as i32 - 1023;
            *self.exponents.entry(exponent).or_default() += 1;
            self.max_abs = self.max_abs.max(size);
            self.min_abs = if self.min_abs == 0.0 { size } else { self.min_abs.min(size) };
        }
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Histogram) {
        self.elements += other.elements;
        self.zeros += other.zeros;
        self.not_finite += other.not_finite;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.min_abs = match (self.min_abs, other.min_abs) {
            (0.0, b) => b,
            (a, 0.0) => a,
            (a, b) => a.min(b),
        };
        for (exponent, n) in &other.exponents {
            *self.exponents.entry(*exponent).or_default() += n;
        }
    }

    /// The fraction of nonzero values whose exponent satisfies `passes`.
    fn part(&self, passes: impl Fn(i32) -> bool) -> f64 {
        let all: u64 = self.exponents.values().sum();
        let some: u64 = self.exponents.iter().filter(|(e, _)| passes(**e)).map(|(_, n)| n).sum();
        some as f64 / all.max(1) as f64
    }

    /// The fraction that becomes 0 in a format after multiplication by 2^`shift`. Half of the smallest number and less
    /// rounds to 0.
    pub fn underflow(&self, format: &Format, shift: i32) -> f64 {
        self.part(|e| e + shift < format.bottom - 1)
    }

    /// The fraction that is subnormal in a format.
    pub fn subnormal(&self, format: &Format, shift: i32) -> f64 {
        self.part(|e| (format.bottom - 1..format.normal).contains(&(e + shift)))
    }

    /// The fraction that exceeds the largest number of a format.
    pub fn overflow(&self, format: &Format, shift: i32) -> f64 {
        self.part(|e| e + shift > format.top)
    }
}

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Module path.
    pub scope: String,
    /// The kind of values.
    pub kind: Kind,
    /// Their dtype.
    pub dtype: String,
    /// The counts.
    pub histogram: Histogram,
}

/// The file that `--numerics` writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NumericsFile {
    /// [`FORMAT`].
    pub frit_numerics: u32,
    /// The autocast dtype of the plan.
    pub compute_dtype: String,
    /// Steps that were counted.
    pub steps: usize,
    /// Ranks that were counted.
    pub ranks: usize,
    /// Scopes, sorted.
    pub scopes: Vec<Row>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f64]) -> Histogram {
        let mut histogram = Histogram::default();
        values.iter().for_each(|x| histogram.add(*x));
        histogram
    }

    #[test]
    fn exponents_zeros_and_ends() {
        let h = of(&[1.0, -1.5, 0.25, 0.0, f64::INFINITY, f64::NAN, 3.0]);
        assert_eq!((h.elements, h.zeros, h.not_finite), (7, 1, 2));
        assert_eq!((h.min_abs, h.max_abs), (0.25, 3.0));
        assert_eq!(h.exponents, BTreeMap::from([(-2, 1), (0, 2), (1, 1)]));
    }

    /// The counted losses are those of rounding to the format.
    #[test]
    fn losses_are_those_of_the_format() {
        let values: Vec<f64> = (-40..40).map(|e| 1.25 * 2f64.powi(e)).collect();
        let h = of(&values);
        let n = values.len() as f64;
        let rounded = |f: fn(f64) -> bool| {
            values.iter().filter(|x| f(half::f16::from_f64(**x).to_f64())).count() as f64 / n
        };
        let f16 = &Format::ALL[0];
        assert_eq!(h.underflow(f16, 0), rounded(|x| x == 0.0));
        assert_eq!(h.overflow(f16, 0), rounded(f64::is_infinite));
        assert_eq!(h.subnormal(f16, 0), rounded(|x| x > 0.0 && x < 2f64.powi(-14)));
        assert!(h.underflow(f16, 10) < h.underflow(f16, 0));
    }

    #[test]
    fn merging_is_counting_together() {
        let (a, b) = ([1.0, 0.0, 5.0], [0.125, f64::NAN]);
        let mut merged = of(&a);
        merged.merge(&of(&b));
        let both = of(&[1.0, 0.0, 5.0, 0.125, f64::NAN]);
        assert_eq!(merged, both);
        let mut empty = Histogram::default();
        empty.merge(&both);
        assert_eq!(empty, both);
    }
}
