//! Devices that execute tasks.

pub mod cpu;
pub mod cuda;

use crate::RunError;
use crate::usage::Usage;
use frit_data::Element;
use frit_ir::plan::{BufferId, Plan, TaskId};
use std::collections::BTreeMap;
use std::ops::Range;

/// When a task ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The task.
    pub task: TaskId,
    /// Microseconds from the start of the traced range.
    pub start_us: f64,
    /// Duration in microseconds.
    pub duration_us: f64,
}

/// One rank's device: its arenas, and a plan prepared to run on it.
///
/// Calls take effect in order; a device may return before the work of a call is complete, and report its failure later.
pub trait Device {
    /// Number of steps whose metrics may be pending, so that the device does not become idle.
    const METRICS_DELAY: usize;

    /// Writes an input of the next micro-step: its buffer and all of its elements, in a type that the input accepts and
    /// that is no larger than its own.
    ///
    /// # Errors
    /// If the device failed.
    fn feed(&mut self, buffer: BufferId, element: Element, bytes: &[u8]) -> Result<(), RunError>;

    /// Runs tasks of the plan, in an order that respects their waits; a range may span phases.
    ///
    /// # Errors
    /// The task that failed.
    fn run(&mut self, tasks: Range<TaskId>) -> Result<(), RunError>;

    /// Runs tasks one by one and measures each, which is slower than running them.
    ///
    /// # Errors
    /// The task that failed.
    fn trace(&mut self, tasks: Range<TaskId>) -> Result<Vec<Span>, RunError>;

    /// Requests the metrics of the last step.
    ///
    /// # Errors
    /// If the device failed.
    fn note_metrics(&mut self) -> Result<(), RunError>;

    /// Takes the metrics of the oldest pending step, in the plan's order.
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

    /// Gathers the same bytes of every rank, in rank order, on rank 0; empty on others. Every rank must call it.
    ///
    /// # Errors
    /// If the device or another rank failed.
    fn gather(&self, buffer: BufferId, offset: usize, bytes: usize) -> Result<Vec<u8>, RunError>;

    /// The maximum of `value` over ranks. Every rank must call it.
    ///
    /// # Errors
    /// If another rank failed.
    fn largest(&self, value: u64) -> Result<u64, RunError>;

    /// What people should know of how the plan was made ready.
    fn note(&self) -> Option<&str> {
        None
    }

    /// Bytes of memory in use: of the device by all programs, or resident bytes of this process, with those of all ranks in it,
    /// where ranks run on the CPU. `None` where the system does not report them.
    fn memory_in_use(&self) -> Option<u64>;

    /// What this rank uses of its device.
    ///
    /// # Errors
    /// If the device failed.
    fn usage(&self) -> Result<Usage, RunError>;
}

/// Counts the launches of one step of a plan, from those of each task.
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
