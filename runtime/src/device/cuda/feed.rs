//! Input transfer: double-buffered pinned host memory is copied on its own stream to double-buffered device memory while the
//! previous micro-step runs. Only the final copy into the plan's buffers waits for that micro-step; it also widens elements
//! that are narrower than the input.

use super::cubins::Cubins;
use super::memory::{Memory, input_bytes};
use super::widen::Widening;
use crate::RunError;
use frit_cuda::CudaError;
use frit_cuda::driver::{Address, Driver, EventHandle, StreamHandle};
use frit_data::Element;
use frit_ir::DType;
use frit_ir::plan::{ALIGNMENT, BufferId, Plan};

/// An input within the pinned memory and the staging memory.
struct Input {
    buffer: BufferId,
    offset: usize,
    dtype: DType,
    numel: usize,
    /// The element type of the last feed.
    element: Element,
    /// Its address in the plan's memory.
    at: Address,
}

/// One of the two buffers for a micro-step's inputs.
struct Slot {
    pinned: *mut u8,
    staging: Address,
    /// Recorded when its inputs are in device memory, so that the pinned memory is free.
    copied: EventHandle,
    /// Recorded when its inputs are in the plan's buffers, so that the device memory is free.
    delivered: EventHandle,
    /// Whether the events were ever recorded.
    used: bool,
}

/// Transfer of inputs.
pub(super) struct Feed {
    inputs: Vec<Input>,
    slots: [Slot; 2],
    current: usize,
    /// Whether an input was fed since the last delivery.
    open: bool,
    stream: StreamHandle,
    widening: Widening,
}

impl Feed {
    /// Prepares the transfer of a plan's inputs.
    ///
    /// # Errors
    /// If memory or events cannot be allocated.
    pub(super) fn new(
        driver: &impl Driver,
        plan: &Plan,
        memory: &Memory,
        cubins: Cubins,
    ) -> Result<Feed, CudaError> {
        let mut offset = 0;
        let mut inputs = Vec::new();
        for (buffer, ty) in plan.fed() {
            let (dtype, numel) = (ty.dtype, ty.shape.numel());
            let (at, element) = (memory.buffer(plan, buffer, 0), Element::from(dtype));
            inputs.push(Input { buffer, offset, dtype, numel, element, at });
            offset += ty.bytes().next_multiple_of(ALIGNMENT);
        }
        let slot = |staging| -> Result<Slot, CudaError> {
            Ok(Slot {
                pinned: driver.allocate_pinned(input_bytes(plan).max(1))?,
                staging,
                copied: driver.create_event(false)?,
                delivered: driver.create_event(false)?,
                used: false,
            })
        };
        let slots = [slot(memory.staging[0])?, slot(memory.staging[1])?];
        let (stream, widening) = (driver.create_stream(false)?, Widening::new(cubins));
        Ok(Feed { inputs, slots, current: 0, open: false, stream, widening })
    }

    /// Feeds one input of the next micro-step. `wait` makes the host wait for an event.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn take(
        &mut self,
        driver: &impl Driver,
        buffer: BufferId,
        (element, bytes): (Element, &[u8]),
        wait: impl Fn(EventHandle) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        let input = self.inputs.iter_mut().find(|i| i.buffer == buffer);
        let input = input.expect("invariant: only what the plan is fed with is fed");
        assert_eq!(bytes.len(), input.numel * element.size(), "an input is fed as a whole");
        assert!(element.size() <= input.dtype.size(), "what is fed is no larger than the input");
        if !element.is(input.dtype) {
            self.widening.prepare(driver, element, input.dtype)?;
        }
        input.element = element;
        let slot = &mut self.slots[self.current];
        if !self.open && slot.used {
            // Recorded two micro-steps ago: normally complete.
            wait(slot.copied)?;
            driver.wait(self.stream, slot.delivered)?;
        }
        self.open = true;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the pinned memory has room for all inputs at their offsets, and no copy reads it now.
        let pinned = unsafe {
            let pinned = slot.pinned.add(input.offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), pinned, bytes.len());
            pinned
        };
        let staging = slot.staging + input.offset as Address;
        // SAFETY: the pinned memory is not touched before `copied` was waited for.
        unsafe { driver.copy_in(staging, pinned, bytes.len(), self.stream)? };
        Ok(())
    }

    /// Copies the feeds into the plan's buffers, on `compute`, ahead of work enqueued later.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn deliver(
        &mut self,
        driver: &impl Driver,
        compute: StreamHandle,
    ) -> Result<(), CudaError> {
        if !std::mem::take(&mut self.open) {
            return Ok(());
        }
        let slot = &mut self.slots[self.current];
        driver.record(slot.copied, self.stream)?;
        driver.wait(compute, slot.copied)?;
        for input in self.inputs.iter().filter(|i| i.numel > 0) {
            let Input { dtype, numel, element, at, .. } = *input;
            let from = slot.staging + input.offset as Address;
            if element.is(dtype) {
                driver.copy(at, from, numel * dtype.size(), compute)?;
            } else {
                // SAFETY: the staging memory has room for all elements, and the plan's buffer is the input's.
                unsafe {
                    self.widening.launch(driver, (from, element), (at, dtype), numel, compute)?;
                }
            }
        }
        driver.record(slot.delivered, compute)?;
        slot.used = true;
        self.current = 1 - self.current;
        Ok(())
    }
}
