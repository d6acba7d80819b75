//! Devices that execute tasks.

pub mod cpu;
pub mod cuda;

use crate::RunError;
use crate::data::Element;
use crate::usage::Usage;
use frit_ir::plan::{BufferId, Plan, TaskId};
use std::collections::BTreeMap;
use std::ops::Range;

/// When a task ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The task.
    pub task: TaskId,
    /// Microseconds from the start of what was asked for.
    pub start_us: f64,
    /// Microseconds that it took.
    pub duration_us: f64,
}

/// One rank's device: its arenas, and the tasks of a plan made ready to run on it.
///
/// What is asked of a device takes effect in the order in which it is asked; a device may return before
/// it has done it, and report a failure of it later.
pub trait Device {
    /// Steps whose metrics may be noted before the first is taken, without the device going idle.
    const METRICS_DELAY: usize;

    /// Writes an input of the next micro-step: its buffer and all of its elements, in a type that the input
    /// takes and that is no larger than its own.
    ///
    /// # Errors
    /// If the device failed.
    fn feed(&mut self, buffer: BufferId, element: Element, bytes: &[u8]) -> Result<(), RunError>;

    /// Runs tasks of the plan, in an order that respects their waits; a range may span phases.
    ///
    /// # Errors
    /// The task that failed.
    fn run(&mut self, tasks: Range<TaskId>) -> Result<(), RunError>;

    /// Runs tasks one by one and takes the time of each, which costs more than running them.
    ///
    /// # Errors
    /// The task that failed.
    fn trace(&mut self, tasks: Range<TaskId>) -> Result<Vec<Span>, RunError>;

    /// Notes the metrics of the step that was run.
    ///
    /// # Errors
    /// If the device failed.
    fn note_metrics(&mut self) -> Result<(), RunError>;

    /// The metrics of the step noted first, in the plan's order. They are not kept.
    ///
    /// # Errors
    /// If the device failed.
    fn take_metrics(&mut self) -> Result<Vec<f32>, RunError>;

    /// Writes bytes into a buffer.
    ///
    /// # Errors
    /// If the device failed.
    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<(), RunError>;

    /// Reads bytes of a buffer.
    ///
    /// # Errors
    /// If the device failed.
    fn read(&self, buffer: BufferId, offset: usize, bytes: usize) -> Result<Vec<u8>, RunError>;

    /// Reads the same bytes of every rank, in rank order, on rank 0; nothing on others. Every rank must ask.
    ///
    /// # Errors
    /// If the device or another rank failed.
    fn gather(&self, buffer: BufferId, offset: usize, bytes: usize) -> Result<Vec<u8>, RunError>;

    /// The largest of every rank's `value`. Every rank must ask.
    ///
    /// # Errors
    /// If another rank failed.
    fn largest(&self, value: u64) -> Result<u64, RunError>;

    /// What this rank uses of its device.
    ///
    /// # Errors
    /// If the device failed.
    fn usage(&self) -> Result<Usage, RunError>;
}

/// Counts what one step of a plan is made of, from what each task is made of.
fn launches_of_step(
    plan: &Plan,
    mut of_task: impl FnMut(TaskId) -> Vec<&'static str>,
) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for k in 0..plan.accumulation {
        let tasks = plan.micro_step_tasks(k, plan.accumulation);
        for kind in tasks.start.until(tasks.end).flat_map(&mut of_task) {
            *counts.entry(kind).or_default() += 1;
        }
    }
    counts
}
