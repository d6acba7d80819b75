//! Metrics transfer: one copy per step to pinned memory, read while the next step runs.

use super::memory::{FAULT_WORDS, Memory, report_bytes};
use crate::RunError;
use frit_cuda::CudaError;
use frit_cuda::driver::{Address, Driver, EventHandle, StreamHandle};
use frit_ir::plan::Plan;
use std::collections::VecDeque;

struct Slot {
    pinned: *mut u8,
    copied: EventHandle,
}

/// Transfer of reports.
pub(super) struct Reports {
    at: Address,
    bytes: usize,
    /// One more than the maximum number of pending steps.
    slots: Vec<Slot>,
    next: usize,
    noted: VecDeque<usize>,
}

/// The report of a step.
pub(super) struct Report {
    /// The metrics, in the plan's order.
    pub(super) metrics: Vec<f32>,
    /// The first fault: the index of its task among those that may report one, the index out of range, and the size of
    /// its axis.
    pub(super) fault: Option<(usize, i64, i64)>,
}

impl Reports {
    /// Prepares the transfer of metrics for this many pending steps, and of the faults of this many tasks.
    ///
    /// # Errors
    /// If memory or events cannot be allocated.
    pub(super) fn new(
        driver: &impl Driver,
        plan: &Plan,
        memory: &Memory,
        n_faults: usize,
        steps: usize,
    ) -> Result<Reports, CudaError> {
        let bytes = report_bytes(plan, n_faults);
        let slot = || -> Result<Slot, CudaError> {
            let pinned = driver.allocate_pinned(bytes.max(1))?;
            Ok(Slot { pinned, copied: driver.create_event(false)? })
        };
        let slots = (0..steps).map(|_| slot()).collect::<Result<_, _>>()?;
        Ok(Reports { at: memory.report, bytes, slots, next: 0, noted: VecDeque::new() })
    }

    /// Enqueues the copy of the metrics, after the work enqueued on `compute`.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn note(
        &mut self,
        driver: &impl Driver,
        compute: StreamHandle,
    ) -> Result<(), CudaError> {
        assert!(self.noted.len() < self.slots.len(), "metrics are taken before more are noted");
        let slot = &self.slots[self.next];
        if self.bytes > 0 {
            // SAFETY: the pinned memory has this size, and is not read before `copied` was waited for.
            unsafe { driver.copy_out(slot.pinned, self.at, self.bytes, compute)? };
        }
        driver.record(slot.copied, compute)?;
        self.noted.push_back(self.next);
        self.next = (self.next + 1) % self.slots.len();
        Ok(())
    }

    /// The report of the oldest pending step. `wait` makes the host wait for an event.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn take(
        &mut self,
        n_metrics: usize,
        wait: impl Fn(EventHandle) -> Result<(), RunError>,
    ) -> Result<Report, RunError> {
        let slot =
            self.noted.pop_front().expect("invariant: metrics are noted before they are taken");
        let slot = &self.slots[slot];
        wait(slot.copied)?;
        // SAFETY: the memory has this size, and the copy was made.
        let bytes = unsafe { std::slice::from_raw_parts(slot.pinned, self.bytes) };
        let (metrics, faults) = bytes.split_at((n_metrics * 4).next_multiple_of(8));
        let metrics = metrics.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        let words: Vec<i64> =
            faults.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
        let mut faults = words.chunks(FAULT_WORDS).enumerate();
        Ok(Report {
            metrics: metrics.take(n_metrics).collect(),
            fault: faults.find(|(_, w)| w[0] != 0).map(|(i, w)| (i, w[1], w[2])),
        })
    }
}
