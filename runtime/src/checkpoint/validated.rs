//! Adds the validation loss to the completed checkpoint of the same step, and updates `best`.

use super::read::named_by;
use super::write::{forget, replace};
use super::{BEST, VALIDATED, dir_name, step_of};
use crate::RunError;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// The progress of validations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The lowest loss.
    pub best: Option<f64>,
    /// Validations since then.
    pub without_improvement: usize,
}

impl Progress {
    /// The progress after one more validation.
    pub fn after(self, loss: f64) -> Progress {
        if !loss.is_nan() && self.best.is_none_or(|best| loss < best) {
            return Progress { best: Some(loss), without_improvement: 0 };
        }
        Progress { without_improvement: self.without_improvement + 1, ..self }
    }
}

/// The content of `validation.json`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validated {
    /// The loss; absent if it was not a number.
    pub loss: Option<f64>,
    /// The progress, including this validation.
    pub progress: Progress,
}

impl Validated {
    /// Reads the validation of the checkpoint in this directory, if any.
    pub(super) fn of(checkpoint: &Path) -> Option<Validated> {
        serde_json::from_slice(&fs::read(checkpoint.join(VALIDATED)).ok()?).ok()
    }
}

/// Records the validation of the checkpoint after `step` steps, and updates `best` if its loss is the lowest.
///
/// # Errors
/// If the file system refuses.
pub(super) fn record(
    root: &Path,
    step: usize,
    validated: &Validated,
    keep: Option<usize>,
) -> Result<(), RunError> {
    let name = dir_name(step);
    let file = root.join(&name).join(VALIDATED);
    let text = serde_json::to_vec(validated)
        .map_err(|e| RunError::checkpoint(&file, format!("cannot be written: {e}")))?;
    replace(&file, &text)?;
    if validated.loss.is_some_and(|loss| best(root, step).is_none_or(|best| loss < best)) {
        replace(&root.join(BEST), format!("{name}\n").as_bytes())?;
    }
    keep.map_or(Ok(()), |keep| forget(root, step, keep))
}

/// The loss of the best checkpoint up to `step`; a later one belongs to a run that was resumed before it.
fn best(root: &Path, step: usize) -> Option<f64> {
    let path = named_by(&root.join(BEST)).ok()?;
    let is_before = step_of(&path.file_name()?.to_string_lossy())? < step;
    Validated::of(&path)?.loss.filter(|_| is_before)
}
