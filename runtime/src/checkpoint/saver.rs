//! One rank's part in saving checkpoints: when they are due, and how failures are handled.
//!
//! A rank copies the elements it owns and writes them on a separate thread while training continues. Between steps the
//! ranks determine together whether all parts are written; then rank 0 completes the checkpoint, also on a thread. If
//! any rank fails, all abandon the checkpoint: rank 0 removes its files, and the run continues with a warning, as long
//! as a later checkpoint can be written.

use super::lock::Run;
use super::snapshot;
use super::write::{ASIDE, Job, Leader};
use super::{CheckpointOptions, Position, Progress, Validated, dir_name, validated};
use crate::RunError;
use crate::device::Device;
use crate::files::{self, Sink};
use crate::left_out::AllLeftOut;
use crate::plan_dir::PlanDir;
use frit_ir::plan::{ParamId, layout};
use std::thread::JoinHandle;

/// A rank's status of its part while it is being written.
const PENDING: u64 = u64::MAX;

/// One rank's part in saving the checkpoints of a run.
pub(crate) struct Saver<'a> {
    plan: &'a PlanDir,
    options: &'a CheckpointOptions,
    run: Run,
    rank: usize,
    set: &'a [(String, f64)],
    /// Parameters omitted from checkpoints, known on rank 0; `None` if none are to be omitted.
    left_out: Option<AllLeftOut>,
    /// The metrics file, synced before `latest` names a checkpoint behind its steps.
    metrics: Option<Sink>,
    /// The checkpoint whose parts are being written, at the same time on every rank.
    parts: Option<Parts>,
    /// On rank 0, the checkpoint that is being completed.
    completing: Option<Completing>,
    /// Steps of the last checkpoint that was begun, or from which the run was resumed.
    begun: Option<usize>,
    /// Steps of the newest complete one; known on rank 0.
    complete: Option<usize>,
    warnings: Vec<String>,
}

struct Parts {
    job: Job,
    leader: Option<Leader>,
    thread: Option<JoinHandle<Result<(), RunError>>>,
    /// The result of this rank's thread.
    ended: Option<Result<(), RunError>>,
}

struct Completing {
    job: Job,
    thread: JoinHandle<Result<Option<RunError>, RunError>>,
}

/// The result of a request for a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Saved {
    /// It is being written, or is complete, as requested.
    Yes,
    /// This parameter is not finite, so the state is not saved.
    NotFinite(String),
    /// The last one could not be written.
    Lost(String),
}

impl<'a> Saver<'a> {
    /// A saver that continues after the checkpoint of `last` steps, if any.
    pub(crate) fn new(
        plan: &'a PlanDir,
        options: &'a CheckpointOptions,
        run: Run,
        rank: usize,
        set: &'a [(String, f64)],
        metrics: Option<Sink>,
        last: Option<usize>,
    ) -> Self {
        Saver {
            plan,
            options,
            run,
            rank,
            set,
            left_out: None,
            metrics,
            parts: None,
            completing: None,
            begun: last,
            complete: last,
            warnings: vec![],
        }
    }

    /// Omits parameters that no step changes from later checkpoints; the list is needed on rank 0 only.
    pub(crate) fn leave_out(&mut self, left_out: AllLeftOut) {
        self.left_out = Some(left_out);
    }

    /// Whether a checkpoint is due after `step` steps.
    pub(crate) fn due(&self, step: usize) -> bool {
        self.options.every.is_some_and(|every| step.is_multiple_of(every))
    }

    /// Returns the warnings since the last call.
    pub(crate) fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Copies what this rank owns after `step` steps, and begins to write it. Waits for the previous checkpoint. All
    /// ranks must call it.
    ///
    /// # Errors
    /// If the device or another rank failed.
    pub(crate) fn save(
        &mut self,
        step: usize,
        position: Position,
        validations: Progress,
        device: &impl Device,
    ) -> Result<Saved, RunError> {
        self.settle(device)?;
        let plan = &self.plan.plan;
        let pieces = snapshot::take(plan, device, self.rank, self.left_out.is_some())?;
        // Numbered from 1, so that the maximum over ranks is a parameter found by some rank.
        let found = snapshot::not_finite(plan, &pieces).map_or(0, |param| param.0 + 1);
        let found = device.largest(found as u64)? as usize;
        if let Some(param) = found.checked_sub(1).and_then(|i| plan.params.get(ParamId(i))) {
            return Ok(Saved::NotFinite(param.name.clone()));
        }
        let aside = format!("{ASIDE}{}-{}", self.run, dir_name(step));
        let (root, aside) = (self.options.dir.clone(), self.options.dir.join(aside));
        let job = Job { root, aside, step, rank: self.rank };
        let left_out = self.left_out.clone().unwrap_or_default();
        let leader = (self.rank == 0).then(|| Leader {
            index: snapshot::index(self.plan, step, position, validations, self.set, &left_out),
            source: self.plan.path.join(layout::SOURCE),
            keep: self.options.keep,
            metrics: self.metrics.as_ref().and_then(|f| f.try_clone().ok()),
        });
        let part = job.clone();
        let thread = Some(std::thread::spawn(move || part.write_part(&pieces)));
        self.parts = Some(Parts { job, leader, thread, ended: None });
        self.begun = Some(step);
        Ok(Saved::Yes)
    }

    /// Ensures that the state after `step` steps is saved and on disk. All ranks must call it, and all get the same
    /// result.
    ///
    /// # Errors
    /// If the device or another rank failed.
    pub(crate) fn finish(
        &mut self,
        step: usize,
        position: Position,
        validations: Progress,
        device: &impl Device,
    ) -> Result<Saved, RunError> {
        if self.begun != Some(step) {
            let saved = self.save(step, position, validations, device)?;
            if saved != Saved::Yes {
                return Ok(saved);
            }
        }
        self.settle(device)?;
        let lost = self.rank == 0 && self.complete != Some(step);
        if device.largest(u64::from(lost))? == 0 {
            return Ok(Saved::Yes);
        }
        let what = format!(
            "the state after {step} steps is lost: its checkpoint could not be written; {}",
            self.newest()
        );
        Ok(Saved::Lost(what))
    }

    /// Records the result of a validation after `step` steps, if that state was saved.
    pub(crate) fn validated(&mut self, step: usize, found: &Validated) {
        if self.rank > 0 || self.complete != Some(step) {
            return;
        }
        let CheckpointOptions { dir, keep, .. } = self.options;
        if let Err(e) = validated::record(dir, step, found, *keep) {
            self.warnings
                .push(format!("the validation of {} was not recorded: {e}", dir_name(step)));
        }
    }

    /// Advances the checkpoint that is being written, without waiting for it. All ranks must call it.
    ///
    /// # Errors
    /// If another rank failed.
    pub(crate) fn advance(&mut self, device: &impl Device) -> Result<(), RunError> {
        self.meet(device, false)?;
        if self.completing.as_ref().is_some_and(|c| c.thread.is_finished()) {
            self.completed();
        }
        Ok(())
    }

    /// Waits for the checkpoint that is being written. All ranks must call it.
    ///
    /// # Errors
    /// If another rank failed.
    pub(crate) fn settle(&mut self, device: &impl Device) -> Result<(), RunError> {
        self.meet(device, true)?;
        self.completed();
        Ok(())
    }

    /// If all ranks have written their parts, rank 0 begins to complete the checkpoint.
    fn meet(&mut self, device: &impl Device, wait: bool) -> Result<(), RunError> {
        let Some(mut parts) = self.parts.take() else { return Ok(()) };
        if let Some(thread) = parts.thread.take_if(|t| wait || t.is_finished()) {
            parts.ended = Some(joined(thread));
        }
        match device.largest(parts.said())? {
            PENDING => self.parts = Some(parts),
            0 => {
                if let Some(leader) = parts.leader {
                    // One at a time.
                    self.completed();
                    let job = parts.job.clone();
                    let thread = std::thread::spawn(move || job.complete(leader));
                    self.completing = Some(Completing { job: parts.job, thread });
                }
            }
            code => {
                let reason = match parts.ended {
                    Some(Err(own)) => own.to_string(),
                    _ => reason(code),
                };
                self.give_up(&parts.job, &reason);
            }
        }
        Ok(())
    }

    /// Waits for the checkpoint that rank 0 completes.
    fn completed(&mut self) {
        let Some(Completing { job, thread }) = self.completing.take() else { return };
        match joined(thread) {
            Ok(untidy) => {
                self.complete = Some(job.step);
                self.warnings.extend(untidy.map(|e| {
                    format!("the checkpoint after {} steps is complete, but {e}", job.step)
                }));
            }
            Err(e) => self.give_up(&job, &e.to_string()),
        }
    }

    fn give_up(&mut self, job: &Job, reason: &str) {
        if self.rank > 0 {
            return;
        }
        // It may not exist, and what cannot be removed now is removed when the directory is next locked.
        let _ = files::remove_folder(&job.aside);
        self.warnings.push(format!(
            "the checkpoint after {} steps could not be written: {reason}; training continues, {}",
            job.step,
            self.newest()
        ));
    }

    fn newest(&self) -> String {
        match self.complete {
            Some(step) => format!("the newest complete checkpoint is {}", dir_name(step)),
            None => "there is no complete checkpoint yet".into(),
        }
    }
}

impl Parts {
    /// The status of this rank's part: pending, done, or the system's error code.
    fn said(&self) -> u64 {
        match &self.ended {
            None => PENDING,
            Some(Ok(())) => 0,
            Some(Err(RunError::Io { error, .. })) => {
                1 + error.raw_os_error().map_or(0, |code| code.unsigned_abs().into())
            }
            Some(Err(_)) => 1,
        }
    }
}

/// Why another rank could not write its part.
fn reason(code: u64) -> String {
    match i32::try_from(code - 1) {
        Ok(code) if code > 0 => {
            format!("on another rank: {}", std::io::Error::from_raw_os_error(code))
        }
        _ => "another rank could not write its part".into(),
    }
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Drop for Saver<'_> {
    /// After an error threads may still write; a checkpoint that only rank 0 has to complete is still completed.
    fn drop(&mut self) {
        if let Some(thread) = self.parts.as_mut().and_then(|p| p.thread.take()) {
            // Its error has already been reported.
            let _ = thread.join();
        }
        if let Some(Completing { thread, .. }) = self.completing.take() {
            // As above.
            let _ = thread.join();
        }
    }
}
