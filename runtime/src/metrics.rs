//! One JSON object per step, one line each.

use crate::RunError;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What is reported of one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Steps before this one.
    pub step: usize,
    /// Mean loss over the global batch, before the update.
    pub loss: f64,
    /// Norm of the unscaled gradient, before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Loss scale of this step.
    pub loss_scale: f64,
    /// Whether the update was skipped because of a non-finite gradient.
    pub skipped: bool,
    /// Loss elements per second over all ranks.
    pub tokens_or_examples_per_s: f64,
}

/// The loss over the validation examples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ValidationMetrics {
    /// The step after which it was taken.
    pub step: usize,
    /// The mean loss.
    pub validation_loss: f64,
}

/// Appends to a file; nothing if there is none.
pub struct Writer {
    file: Option<(PathBuf, File)>,
}

impl Writer {
    /// Opens the file for appending.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn open(path: Option<&Path>) -> Result<Self, RunError> {
        let Some(path) = path else { return Ok(Writer { file: None }) };
        let opened = OpenOptions::new().create(true).append(true).open(path);
        Ok(Writer { file: Some((path.into(), opened.map_err(RunError::io(path))?)) })
    }

    /// Opens the file to go on with step `step`: a torn last line, and lines of this step and later ones,
    /// are cut off.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub fn resume(path: Option<&Path>, step: usize) -> Result<Self, RunError> {
        if let Some(path) = path.filter(|p| p.is_file()) {
            let bytes = std::fs::read(path).map_err(RunError::io(path))?;
            let file = OpenOptions::new().write(true).open(path).map_err(RunError::io(path))?;
            file.set_len(kept(&bytes, step) as u64).map_err(RunError::io(path))?;
        }
        Writer::open(path)
    }

    /// Another handle of the file.
    pub fn file(&self) -> Option<File> {
        self.file.as_ref().and_then(|(_, file)| file.try_clone().ok())
    }

    /// Appends one line and hands it to the system.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&mut self, metrics: &impl Serialize) -> Result<(), RunError> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let mut line = serde_json::to_vec(metrics).unwrap_or_default();
        line.push(b'\n');
        file.write_all(&line).map_err(RunError::io(path))
    }
}

/// Bytes of the lines before the first of those at the end that are torn or not before step `step`.
fn kept(bytes: &[u8], step: usize) -> usize {
    let mut end = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    while end > 0 {
        let begin = bytes[..end - 1].iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        let line: Option<serde_json::Value> = serde_json::from_slice(&bytes[begin..end]).ok();
        let number = line.and_then(|line| line["step"].as_u64());
        if number.is_some_and(|n| n < step as u64) {
            break;
        }
        end = begin;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_from_the_step_on_and_torn_ones_are_cut() {
        let line = |step: usize| format!("{{\"step\":{step},\"loss\":1.5}}\n");
        let whole: String = (0..5).map(line).collect();
        let two: usize = (0..2).map(|s| line(s).len()).sum();
        for torn in ["", "{\"step\":5,\"lo", "{\"st\n", "\n"] {
            let bytes = format!("{whole}{torn}");
            assert_eq!(kept(bytes.as_bytes(), 2), two, "{torn:?}");
            assert_eq!(kept(bytes.as_bytes(), 5), whole.len(), "{torn:?}");
            assert_eq!(kept(bytes.as_bytes(), 0), 0);
        }
        // Lines of a run before this one stay.
        let earlier = format!("{whole}{}{}", line(0), line(1));
        assert_eq!(kept(earlier.as_bytes(), 1), whole.len() + line(0).len());
    }
}
