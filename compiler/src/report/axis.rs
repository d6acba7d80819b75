//! Axes of drawings: positions in percent, and marks at round numbers.
//!
//! Drawings are stretched to the width of the page, and their text is HTML placed in percent over them, so that it has the same
//! size on every screen.

use super::escape;
use std::fmt::Write;

/// A linear or logarithmic range of numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Axis {
    pub(super) from: f64,
    pub(super) to: f64,
    pub(super) log: bool,
    /// Whether round numbers are those of bytes: powers of two.
    pub(super) binary: bool,
}

impl Axis {
    /// From `from` to `to`, or a little more if they are equal.
    pub(super) fn linear(from: f64, to: f64) -> Axis {
        let to = if to > from { to } else { from + from.abs().max(1e-12) };
        Axis { from, to, log: false, binary: false }
    }

    /// The same, logarithmic.
    pub(super) fn log(from: f64, to: f64) -> Axis {
        Axis { from, to, log: true, binary: false }
    }

    /// The same, of bytes.
    pub(super) fn of_bytes(self) -> Axis {
        Axis { binary: true, ..self }
    }

    /// Where a number is, from 0 to 1, and beyond if it is outside.
    pub(super) fn at(self, x: f64) -> f64 {
        match self.log {
            true => (x.max(f64::MIN_POSITIVE) / self.from).ln() / (self.to / self.from).ln(),
            false => (x - self.from) / (self.to - self.from),
        }
    }

    /// At most about `n` round numbers within.
    pub(super) fn marks(self, n: usize) -> Vec<f64> {
        if self.log {
            let decades = (self.to / self.from).log10();
            let powers = |by: f64| {
                let first = (self.from.ln() / by.ln() - 1e-9).ceil() as i32;
                let last = (self.to.ln() / by.ln() + 1e-9).floor() as i32;
                (first..=last).map(move |k| by.powi(k)).collect::<Vec<f64>>()
            };
            if decades >= 1.5 {
                let every = (decades / n as f64).ceil().max(1.0);
                return powers(10f64.powf(every));
            }
            return powers(2.0);
        }
        let rough = (self.to - self.from) / n as f64;
        if self.binary {
            let step = rough.max(1.0).log2().ceil().exp2();
            return (0..=(self.to / step) as i64).map(|k| k as f64 * step).collect();
        }
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough);
        let step = step.unwrap_or(rough);
        let first = (self.from / step - 1e-9).ceil() as i64;
        let last = (self.to / step + 1e-9).floor() as i64;
        (first..=last).map(|k| k as f64 * step).collect()
    }

    /// Marks along the lower edge, and their lines.
    pub(super) fn below(self, n: usize, text: impl Fn(f64) -> String) -> String {
        let mut html = String::new();
        for mark in self.marks(n) {
            let left = 100.0 * self.at(mark);
            let edge = if left > 94.0 { " class=end" } else { "" };
            let _ = write!(
                html,
                "<i style='left:{left:.2}%'></i><span{edge} style='left:{left:.2}%'>{}</span>",
                escape(&short(&text(mark)))
            );
        }
        format!("<div class=xs>{html}</div>")
    }

    /// Marks along the left edge, and their lines.
    pub(super) fn beside(self, n: usize, text: impl Fn(f64) -> String) -> String {
        let mut html = String::new();
        for mark in self.marks(n) {
            let top = 100.0 * (1.0 - self.at(mark));
            let _ = write!(
                html,
                "<i style='top:{top:.2}%'></i><span style='top:{top:.2}%'>{}</span>",
                escape(&short(&text(mark)))
            );
        }
        format!("<div class=ys>{html}</div>")
    }
}

/// A number with its unit, without zeros at its end: `30 ms` for `30.00 ms`, `0` for `0 B`.
fn short(text: &str) -> String {
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let number = match number.contains('.') && !number.contains('e') {
        true => number.trim_end_matches('0').trim_end_matches('.'),
        false => number,
    };
    if number == "0" { number.into() } else { format!("{number} {unit}").trim_end().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_few() {
        for total in [0.5, 7.0, 93.0, 12_345.0] {
            let n = Axis::linear(0.0, total).marks(8).len();
            assert!((3..=9).contains(&n), "{n} marks for {total}");
        }
        assert_eq!(Axis::linear(1.9, 4.2).marks(4), [2.0, 3.0, 4.0]);
        let scale = Axis::log(1024.0, 8192.0);
        assert_eq!(scale.marks(4), [1024.0, 2048.0, 4096.0, 8192.0]);
        let wide = Axis::log(1e-3, 1e4);
        assert_eq!(wide.marks(4).len(), 4);
        let mib = f64::from(1 << 20);
        let bytes = Axis::linear(0.0, 5.0 * mib).of_bytes();
        assert_eq!(bytes.marks(4), [0.0, 2.0 * mib, 4.0 * mib]);
        let short = ["30.00 ms", "0 B", "100", "1.50 k/s", "1e-6"].map(short);
        assert_eq!(short, ["30 ms", "0", "100", "1.5 k/s", "1e-6"]);
    }

    #[test]
    fn numbers_have_their_places() {
        let axis = Axis::log(1.0, 100.0);
        assert!((axis.at(10.0) - 0.5).abs() < 1e-12);
        assert!((Axis::linear(2.0, 4.0).at(2.5) - 0.25).abs() < 1e-12);
        let flat = Axis::linear(3.0, 3.0);
        assert!(flat.at(3.0) == 0.0 && flat.to > flat.from);
    }
}
