//! Cross-entropy of class indices.

use super::call::Call;
use super::softmax::log_sum_exp;
use super::{EvalError, Evaluate, Evaluated};
use crate::ops::{CrossEntropy, CrossEntropyGrad};

/// The class of a label: none if the row is left out, an error if it is no class.
fn class(label: i64, ignore: i64, classes: usize) -> Result<Option<usize>, EvalError> {
    if label == ignore {
        return Ok(None);
    }
    match usize::try_from(label) {
        Ok(class) if class < classes => Ok(Some(class)),
        _ => Err(EvalError::Index { index: label, size: classes }),
    }
}

/// Columns of a row of logits, and how many of them are classes.
fn columns(call: &Call<'_>, logits: usize, classes: Option<usize>) -> (usize, usize) {
    let width = *call.dims(logits).last().expect("invariant: inference found a class axis");
    (width, classes.unwrap_or(width))
}

impl Evaluate for CrossEntropy {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (logits, (width, n)) = (call.floats(0), columns(call, 0, self.classes));
        let (mut losses, mut lses) = (vec![], vec![]);
        for (r, &label) in call.ints(1).iter().enumerate() {
            let row = &logits[r * width..][..n];
            let lse = log_sum_exp(row.iter().copied());
            losses.push(class(label, self.ignore_index, n)?.map_or(0.0, |c| lse - row[c]));
            lses.push(lse);
        }
        Ok(vec![call.real(0, losses), call.real(1, lses)])
    }
}

impl Evaluate for CrossEntropyGrad {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (dlosses, logits, lse) = (call.floats(0), call.floats(1), call.floats(3));
        let (width, n) = columns(call, 1, self.classes);
        let mut dlogits = vec![0.0; logits.len()];
        for (r, &label) in call.ints(2).iter().enumerate() {
            let Some(class) = class(label, self.ignore_index, n)? else { continue };
            for c in 0..n {
                let target = if c == class { 1.0 } else { 0.0 };
                let at = r * width + c;
                dlogits[at] = dlosses[r] * ((logits[at] - lse[r]).exp() - target);
            }
        }
        Ok(vec![call.real(0, dlogits)])
    }
}
