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

    /// Appends one line and hands it to the system.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<(), RunError> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let mut line = serde_json::to_vec(metrics).unwrap_or_default();
        line.push(b'\n');
        file.write_all(&line).map_err(RunError::io(path))
    }
}
