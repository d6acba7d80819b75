//! The parts of an Adafactor step, for a parameter of which a rank holds a range of elements.

use super::call::Call;
use super::{Evaluate, Evaluated};
use crate::ops::{Adafactor, AdafactorPart};
use std::ops::Range;

/// Lower bound of squares and their means, PyTorch's for f32.
const LEAST: f64 = f32::EPSILON as f64;

/// A part of a step as its operands have it.
struct Step<'a> {
    op: &'a Adafactor,
    gradients: Vec<f64>,
    /// Where element 0 of the parameter would be in this rank's part.
    begin: i64,
}

impl Evaluate for Adafactor {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (factor, clip) = match self.part {
            AdafactorPart::Sums => (4, 3),
            AdafactorPart::Moments => (7, 5),
            AdafactorPart::Step => (12, 10),
        };
        let (factor, clip) = (call.scalar(factor), call.scalar(clip));
        let limit = if clip == 0.0 { f64::INFINITY } else { clip };
        let scaled = |g: &f64| (g * factor).max(-limit).min(limit);
        let gradients = call.floats(1).iter().map(scaled).collect();
        let step = Step { op: self, gradients, begin: call.ints(0)[0] };
        Ok(match self.part {
            AdafactorPart::Sums => vec![call.real(0, step.sums(&call.floats(2)))],
            AdafactorPart::Moments if call.scalar(8) != 0.0 => {
                vec![call.inputs[3].clone(), call.real(1, vec![0.0])]
            }
            AdafactorPart::Moments => {
                let weight = (call.scalar(6) + 1.0).powf(-call.scalar(4));
                let state = step.moments(&call.floats(2), &call.floats(3), weight);
                let squares: f64 = step.updates(&state).iter().map(|(_, u)| u * u).sum();
                vec![call.real(0, state), call.real(1, vec![squares * self.share])]
            }
            AdafactorPart::Step if call.scalar(13) != 0.0 => vec![call.inputs[2].clone()],
            AdafactorPart::Step => {
                let mut params = call.floats(2).into_owned();
                let [of_param, of_update, lr, eps, threshold, decay] =
                    [4, 5, 6, 7, 8, 9].map(|i| call.scalar(i));
                let rms = |squares: f64| (squares / self.shape.numel() as f64).sqrt();
                let alpha = rms(of_param).max(eps) * lr.min(1.0 / (call.scalar(11) + 1.0).sqrt());
                let rate = alpha / (rms(of_update) / threshold).max(1.0);
                for (at, update) in step.updates(&call.floats(3)) {
                    params[at] = params[at] * (1.0 - lr * decay) - rate * update;
                }
                vec![call.real(0, params)]
            }
        })
    }
}

impl Step<'_> {
    /// The elements of the parameter that are here.
    fn owned(&self) -> Range<usize> {
        let last = self.op.shape.numel() as i64;
        let [from, to] = [0, self.gradients.len() as i64].map(|x| (x - self.begin).clamp(0, last));
        from as usize..to as usize
    }

    /// Where an element of the parameter is in this rank's part.
    fn at(&self, element: usize) -> usize {
        (self.begin + element as i64) as usize
    }

    /// The entries of the state for an element: of its row, or else itself, and of its column.
    fn entries(&self, element: usize) -> (usize, Option<usize>) {
        let (matrices, rows, cols) = self.op.matrices();
        if rows == 0 {
            return (element, None);
        }
        let (line, col) = (element / cols, element % cols);
        (line, Some(matrices * rows + line / rows * cols + col))
    }

    fn sums(&self, params: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.op.state_len() + 1];
        for element in self.owned() {
            let square = self.gradients[self.at(element)].powi(2);
            let (row, col) = self.entries(element);
            for entry in std::iter::once(row).chain(col) {
                sums[entry] += square;
            }
            sums[self.op.state_len()] += params[self.at(element)].powi(2);
        }
        sums.iter().map(|x| x * self.op.share).collect()
    }

    fn moments(&self, sums: &[f64], state: &[f64], weight: f64) -> Vec<f64> {
        let (matrices, rows, cols) = self.op.matrices();
        if self.op.shape.numel() == 0 {
            return state.to_vec();
        }
        let terms = |i: usize| match rows {
            0 => 1,
            _ if i < matrices * rows => cols,
            _ => rows,
        };
        let next = |(i, v): (usize, &f64)| v + (sums[i] / terms(i) as f64 - v) * weight;
        state.iter().enumerate().map(next).collect()
    }

    /// Where the elements are that are here, and the gradient over the root of its second moment.
    fn updates(&self, state: &[f64]) -> Vec<(usize, f64)> {
        let (_, rows, _) = self.op.matrices();
        let mean = |matrix: usize| {
            let of_rows = &state[matrix * rows..(matrix + 1) * rows];
            (of_rows.iter().sum::<f64>() / rows as f64).max(LEAST)
        };
        let update = |element: usize| {
            let variance = match self.entries(element) {
                (entry, None) => state[entry],
                (row, Some(col)) => state[row] * state[col] / mean(row / rows),
            };
            let at = self.at(element);
            (at, self.gradients[at] / variance.max(LEAST * LEAST).sqrt())
        };
        self.owned().map(update).collect()
    }
}
