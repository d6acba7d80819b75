//! Early stopping: tracks validation losses, including those recorded in checkpoints, against the patience.

use crate::RunError;
use crate::checkpoint::{Checkpoint, Progress, Validated};
use crate::device::Device;

/// The validations of a run, equal on every rank.
pub(crate) struct Course {
    /// Consecutive validations without improvement after which the run stops.
    patience: Option<usize>,
    /// The progress before the last validation, and including it.
    before: Progress,
    progress: Progress,
    /// Steps before the last validation, and its loss.
    last: Option<(usize, f64)>,
    over: bool,
}

impl Course {
    /// The state at the start of a new or resumed run.
    pub(crate) fn new(patience: Option<usize>, resumed: Option<&Checkpoint>) -> Course {
        let known = |c: &Checkpoint| c.validated.map_or(c.index.validations, |v| v.progress);
        let progress = resumed.map(known).unwrap_or_default();
        let mut course = Course { patience, before: progress, progress, last: None, over: false };
        course.over = course.has_stalled();
        course
    }

    /// Records the loss after `step` steps. A validation at the end of a run that is not regular does not count, so
    /// that a resumed run equals an uninterrupted one. All ranks must call it.
    ///
    /// # Errors
    /// If another rank failed.
    pub(crate) fn take(
        &mut self,
        step: usize,
        loss: f64,
        counts: bool,
        device: &impl Device,
    ) -> Result<(), RunError> {
        self.before = self.progress;
        self.last = Some((step, loss));
        if counts {
            self.progress = self.progress.after(loss);
        }
        if self.patience.is_some() {
            self.over = device.largest(u64::from(self.has_stalled()))? > 0;
        }
        Ok(())
    }

    fn has_stalled(&self) -> bool {
        self.patience.is_some_and(|patience| self.progress.without_improvement >= patience)
    }

    /// Whether the run stops here.
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    /// Why it stopped before its last step, if it did.
    pub(crate) fn reason(&self) -> Option<String> {
        let n = self.progress.without_improvement;
        let s = if n == 1 { "" } else { "s" };
        let why = match self.progress.best {
            Some(best) => format!("did not fall below {best:.4} in {n} validation{s}"),
            None => format!("was not a number in {n} validation{s}"),
        };
        self.over.then(|| format!("the validation loss {why}"))
    }

    /// The progress before a validation of the state after `step` steps.
    pub(crate) fn before(&self, step: usize) -> Progress {
        if self.found(step).is_some() { self.before } else { self.progress }
    }

    /// The result of the validation after `step` steps, if any.
    pub(crate) fn found(&self, step: usize) -> Option<Validated> {
        let (_, loss) = self.last.filter(|(at, _)| *at == step)?;
        Some(Validated { loss: (!loss.is_nan()).then_some(loss), progress: self.progress })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_counts_validations_since_the_best() {
        let all = [3.0, 2.0, 2.0, f64::NAN, 2.5, 1.0];
        let mut counts = Vec::new();
        all.iter().fold(Progress::default(), |progress, loss| {
            let progress = progress.after(*loss);
            counts.push(progress.without_improvement);
            progress
        });
        assert_eq!(counts, [0, 0, 1, 2, 3, 0]);
    }
}
