//! Metrics: one JSON object per step and line, with the run's identity and the time.

use crate::RunError;
use crate::checkpoint::lock::{Run, wall_time};
use crate::files::{self, Place, Sink};
use crate::tensorboard;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read as _, Write};
use std::path::{Path, PathBuf};

/// The metrics of one step.
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
    /// Seconds of this step, without the checkpoint and the validation after it.
    pub step_seconds: f64,
    /// Memory in use after this step, where the system reports it; see [`Device::memory_in_use`].
    ///
    /// [`Device::memory_in_use`]: crate::device::Device::memory_in_use
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Which instructions GEMMs use on a CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gemm: Option<frit_kernels::cpu::Paths>,
}

/// The loss over the validation examples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ValidationMetrics {
    /// The step after which it was measured.
    pub step: usize,
    /// The mean loss.
    pub validation_loss: f64,
    /// Each loss separately, if there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub validation_losses: BTreeMap<String, f64>,
    /// The metrics.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub validation_metrics: BTreeMap<String, f64>,
}

/// What a line says of one step.
pub(crate) trait Scalars: Serialize {
    /// The step.
    fn step(&self) -> usize;
    /// Names and values, for plots.
    fn scalars(&self) -> Vec<(String, f64)>;
}

impl Scalars for StepMetrics {
    fn step(&self) -> usize {
        self.step
    }

    fn scalars(&self) -> Vec<(String, f64)> {
        let all = [
            ("train/loss", self.loss),
            ("train/grad_norm", self.grad_norm),
            ("train/lr", self.lr),
            ("train/loss_scale", self.loss_scale),
            ("train/skipped", f64::from(u8::from(self.skipped))),
            ("train/tokens_or_examples_per_s", self.tokens_or_examples_per_s),
            ("train/step_seconds", self.step_seconds),
        ];
        let memory = self.memory_bytes.map(|bytes| ("train/memory_bytes", bytes as f64));
        all.into_iter().chain(memory).map(|(name, value)| (name.to_string(), value)).collect()
    }
}

impl Scalars for ValidationMetrics {
    fn step(&self) -> usize {
        self.step
    }

    fn scalars(&self) -> Vec<(String, f64)> {
        let all = self.validation_losses.iter().chain(&self.validation_metrics);
        let all = all.map(|(name, value)| (format!("validation/{name}"), *value));
        std::iter::once(("validation/loss".to_string(), self.validation_loss)).chain(all).collect()
    }
}

/// Appends to a file, if there is one, and to event files of TensorBoard, if they are asked for. A line that cannot be written is omitted and the run continues: it is worth more
/// than its metrics.
pub struct Writer {
    file: Option<(PathBuf, Sink)>,
    events: Option<tensorboard::Writer>,
    run: String,
    plan: String,
    lost: usize,
}

/// Digits of a plan's hash in a line.
const PLAN_DIGITS: usize = 16;

/// What lines name a plan of this hash by.
pub fn plan_identity(hash: &str) -> &str {
    hash.get(..PLAN_DIGITS).unwrap_or(hash)
}

/// A line: the metrics, the run, its plan and the time.
#[derive(Serialize)]
struct Line<'a, T> {
    #[serde(flatten)]
    metrics: &'a T,
    /// Identity of the run.
    run: &'a str,
    /// The first digits of the plan's hash.
    plan: &'a str,
    /// Seconds since 1970.
    wall_time: f64,
}

/// Whether a file already has lines.
pub(crate) fn holds_lines(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() > 0)
}

impl Writer {
    /// Opens the file for appending lines of a run of the plan with this hash.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn open(path: Option<&Path>, run: Run, plan: &str) -> Result<Self, RunError> {
        let file = match path {
            Some(path) => Some((path.into(), Sink::append(path).map_err(RunError::io(path))?)),
            None => None,
        };
        let plan = plan_identity(plan).to_string();
        Ok(Writer { file, events: None, run: run.to_string(), plan, lost: 0 })
    }

    /// Writes event files too.
    pub(crate) fn with_events(self, events: Option<tensorboard::Writer>) -> Self {
        Writer { events, ..self }
    }

    /// Opens the file to continue with step `step` what these runs before began: an incomplete last line, and their lines of this step and
    /// later ones, are removed.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub(crate) fn resume(
        path: Option<&Path>,
        (run, before): (Run, &[String]),
        plan: &str,
        step: usize,
    ) -> Result<Self, RunError> {
        if let Some(path) = path.filter(|p| p.is_file()) {
            let bytes = std::fs::read(path).map_err(RunError::io(path))?;
            let kept = kept(&bytes, step, before);
            // Wholly or not at all.
            if bytes.starts_with(&kept) && kept.len() < bytes.len() {
                let file = OpenOptions::new().write(true).open(path).map_err(RunError::io(path))?;
                file.set_len(kept.len() as u64).map_err(RunError::io(path))?;
            } else if kept != bytes {
                let written = files::deliver(path, |out| out.write_all(&kept));
                written.map_err(RunError::io(path))?;
            }
        }
        Writer::open(path, run, plan)
    }

    /// Whether lines appear on a terminal.
    pub(crate) fn shows_lines(&self) -> bool {
        self.file.as_ref().is_some_and(|(_, file)| file.is_terminal())
    }

    /// Another handle of the file.
    pub fn file(&self) -> Option<Sink> {
        self.file.as_ref().and_then(|(_, file)| file.try_clone().ok())
    }

    /// Appends and flushes one line, and its scalars as an event. Returns a warning the first time that this fails.
    pub(crate) fn write(&mut self, metrics: &impl Scalars) -> Option<String> {
        let line = self.write_line(metrics);
        line.or(self.write_event(metrics))
    }

    fn write_event(&mut self, metrics: &impl Scalars) -> Option<String> {
        let events = self.events.as_mut()?;
        let error = events.scalars(metrics.step(), &metrics.scalars()).err()?;
        let path = events.path.display().to_string();
        // What follows an incomplete record cannot be read.
        self.events = None;
        Some(format!("{path} cannot be written: {error}; training continues without it"))
    }

    fn write_line(&mut self, metrics: &impl Serialize) -> Option<String> {
        let (path, file) = self.file.as_mut()?;
        let wall_time = (wall_time() * 1e3).round() / 1e3;
        let line = Line { metrics, run: &self.run, plan: &self.plan, wall_time };
        let mut line = serde_json::to_vec(&line).unwrap_or_default();
        line.push(b'\n');
        let error = append(file, &line).err()?;
        self.lost += 1;
        let warning =
            || format!("{} cannot be written: {error}; training continues", path.display());
        (self.lost == 1).then(warning)
    }

    /// A warning with the number of missing lines, if any.
    pub fn lost(&self) -> Option<String> {
        let (path, _) = self.file.as_ref()?;
        let lost =
            || format!("{} lacks {} lines that could not be written", path.display(), self.lost);
        (self.lost > 0).then(lost)
    }
}

/// Appends a line completely or not at all.
fn append(file: &mut Sink, line: &[u8]) -> std::io::Result<()> {
    let mut written = 0;
    while written < line.len() {
        match file.write(&line[written..]) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(n) => written += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => {
                if written > 0 {
                    // A file that is not regular keeps an incomplete line.
                    let _ = file.cut(written as u64);
                }
                return Err(e);
            }
        }
    }
    Ok(())
}

/// What a line names.
#[derive(Deserialize)]
struct Read {
    step: u64,
    #[serde(default)]
    run: String,
}

/// The lines of a file without incomplete ones at its end, and without those of these runs of step `step` and later ones.
fn kept(bytes: &[u8], step: usize, runs: &[String]) -> Vec<u8> {
    let read = |line: &[u8]| serde_json::from_slice::<Read>(line).ok();
    let mut lines: Vec<&[u8]> = bytes.split_inclusive(|b| *b == b'\n').collect();
    while lines.last().is_some_and(|line| !line.ends_with(b"\n") || read(line).is_none()) {
        lines.pop();
    }
    // If nothing is known of runs before, the last one is continued.
    let last = lines.last().and_then(|line| read(line)).filter(|_| runs.is_empty());
    let is_own = |run: &String| {
        run.is_empty() || runs.contains(run) || last.as_ref().is_some_and(|l| l.run == *run)
    };
    let is_again = |line: Read| line.step >= step as u64 && is_own(&line.run);
    lines.retain(|line| !read(line).is_some_and(is_again));
    lines.concat()
}

/// Checks that a file that has lines has those of metrics.
///
/// # Errors
/// If the first is none.
pub(crate) fn check(path: &Path) -> Result<(), RunError> {
    // Standard output may be a file that others write too.
    if !holds_lines(path) || !matches!(Place::of(path), Ok(Place::File(_))) {
        return Ok(());
    }
    let mut first = Vec::new();
    let read = File::open(path)
        .and_then(|file| BufReader::new(file).take(LONGEST).read_until(b'\n', &mut first));
    read.map_err(RunError::io(path))?;
    // The line of a run that was killed may be incomplete.
    let is_torn = !first.ends_with(b"\n") && first.starts_with(b"{\"step\":");
    if is_torn || serde_json::from_slice::<Read>(&first).is_ok() {
        return Ok(());
    }
    let reason = "has lines that are no metrics; give another name".into();
    Err(RunError::Output { option: "--metrics", path: path.into(), reason })
}

/// No line is longer.
const LONGEST: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_from_the_step_on_and_torn_ones_are_cut() {
        let line = |step: usize, run: &str| format!("{{\"step\":{step},\"run\":\"{run}\"}}\n");
        let lines = |steps: std::ops::Range<usize>, run: &str| -> String {
            steps.map(|step| line(step, run)).collect()
        };
        let runs = ["a".to_string(), "b".to_string()];
        let after = |text: &str, step: usize| {
            String::from_utf8(kept(text.as_bytes(), step, &runs)).expect("text")
        };
        let whole = lines(0..5, "a");
        for torn in ["", "{\"step\":5,\"lo", "{\"st\n", "\n"] {
            let text = format!("{whole}{torn}");
            assert_eq!(after(&text, 2), lines(0..2, "a"), "{torn:?}");
            assert_eq!(after(&text, 5), whole, "{torn:?}");
            assert_eq!(after(&text, 0), "");
        }
        // Another run may have written before, in between and behind.
        let other = lines(0..7, "c");
        let text = format!("{other}{whole}{other}{}{other}", lines(3..6, "b"));
        assert_eq!(after(&text, 3), format!("{other}{}{other}{other}", lines(0..3, "a")));
    }

    #[test]
    fn a_file_of_something_else_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("m.jsonl");
        assert!(check(&path).is_ok());
        for (text, is_one) in [
            ("", true),
            ("{\"step\":0,\"loss\":1.5}\n", true),
            ("{\"step\":0,\"lo", true),
            ("{\"text\":\"a\"}\n", false),
            ("notes\n", false),
            ("\u{1}\0\0{", false),
        ] {
            std::fs::write(&path, text).expect("written");
            assert_eq!(check(&path).is_ok(), is_one, "{text:?}");
        }
    }
}
