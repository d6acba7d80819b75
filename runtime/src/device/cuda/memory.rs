//! Device memory of a rank: one allocation for both device arenas, scratch memory, workspace and staging; and pinned host
//! memory for offloaded state.

use frit_cuda::CudaError;
use frit_cuda::driver::{Address, Driver, StreamHandle};
use frit_ir::plan::{ALIGNMENT, Arena, BufferId, Place, Plan, Stream};
use std::ptr::null_mut;

/// Streams of a plan.
pub(super) const STREAMS: usize = Stream::ALL.len();

/// Memory for exchanges outside of the plan's collectives, in bytes, and its minimum per rank.
const EXCHANGE: usize = 8 << 20;
const EXCHANGE_OF_RANK: usize = 4 << 10;
/// `i64` of one task's [`frit_ir::plan::Pointer::Fault`].
pub(super) const FAULT_WORDS: usize = 3;

/// Addresses within the allocation.
#[derive(Debug)]
pub(super) struct Memory {
    /// Its size.
    pub(super) bytes: usize,
    persistent: Address,
    workspace: Address,
    /// The plan's arena in pinned host memory; null if it is empty.
    host: *mut u8,
    /// Scratch memory by stream.
    pub(super) scratch: [Address; STREAMS],
    /// Workspace of the libraries by stream, and its size.
    pub(super) libraries: [(Address, usize); STREAMS],
    /// Two buffers for a micro-step's inputs.
    pub(super) staging: [Address; 2],
    /// The metrics in the plan's order, then the faults.
    pub(super) report: Address,
    /// `u32` 0, 1, 2 …: the values that tasks store when they complete.
    pub(super) marks: Address,
    /// For exchanges outside of the plan, between steps: first byte and size.
    pub(super) exchange: (Address, usize),
}

/// Bytes of the feeds of one micro-step, each buffer aligned.
pub(super) fn input_bytes(plan: &Plan) -> usize {
    plan.fed().map(|(_, ty)| ty.bytes().next_multiple_of(ALIGNMENT)).sum()
}

/// Bytes of the metrics and of so many faults.
pub(super) fn report_bytes(plan: &Plan, n_faults: usize) -> usize {
    (plan.metrics.len() * 4).next_multiple_of(8) + n_faults * FAULT_WORDS * 8
}

impl Memory {
    /// The layout of an allocation at address 0; `engines` is the workspace of the selected cuDNN engines, in bytes, by
    /// stream.
    pub(super) fn layout(plan: &Plan, engines: &[usize; STREAMS], n_faults: usize) -> Memory {
        let needs = plan.needs();
        let mut end = 0;
        let mut place = |bytes: usize| {
            let at = end as Address;
            end += bytes.next_multiple_of(ALIGNMENT);
            at
        };
        let persistent = place(plan.persistent_bytes);
        let workspace = place(plan.workspace_bytes);
        let scratch = needs.map(|n| place(n.scratch_bytes));
        let mut libraries = [(0, 0); STREAMS];
        for ((at, need), engine) in libraries.iter_mut().zip(&needs).zip(engines) {
            let bytes = need.workspace_bytes().max(*engine);
            *at = (place(bytes), bytes);
        }
        let exchange = match plan.world_size {
            1 => 0,
            n => EXCHANGE.max(EXCHANGE_OF_RANK * n),
        };
        let exchange = (place(exchange), exchange);
        let staging = [(); 2].map(|()| place(input_bytes(plan)));
        let report = place(report_bytes(plan, n_faults));
        let marks = place(plan.tasks.len() * 4);
        let bytes = end;
        let host = null_mut();
        Memory {
            bytes,
            persistent,
            workspace,
            host,
            scratch,
            libraries,
            staging,
            report,
            marks,
            exchange,
        }
    }

    /// Bytes outside the plan's arenas.
    pub(super) fn extra_bytes(&self, plan: &Plan) -> usize {
        self.bytes - plan.persistent_bytes - plan.workspace_bytes
    }

    /// The error that too little memory is free.
    pub(super) fn lacking(&self, plan: &Plan, free: usize, total: usize) -> CudaError {
        let detail = format!(
            "{} persistent, {} workspace, {} for kernels and data in transit",
            plan.persistent_bytes,
            plan.workspace_bytes,
            self.extra_bytes(plan)
        );
        CudaError::OutOfMemory { wanted: self.bytes, detail, free, total }
    }

    /// Allocates the memory, and sets it to zero on the stream `on`.
    ///
    /// # Errors
    /// If there is too little.
    pub(super) fn allocate(
        driver: &impl Driver,
        plan: &Plan,
        engines: &[usize; STREAMS],
        n_faults: usize,
        on: StreamHandle,
    ) -> Result<Memory, CudaError> {
        let layout = Memory::layout(plan, engines, n_faults);
        let base = driver.allocate(layout.bytes).map_err(|e| match e {
            CudaError::OutOfMemory { free, total, .. } => layout.lacking(plan, free, total),
            other => other,
        })?;
        driver.zero(base, layout.bytes, on)?;
        Ok(Memory {
            bytes: layout.bytes,
            persistent: base + layout.persistent,
            workspace: base + layout.workspace,
            host: match plan.host_bytes {
                0 => null_mut(),
                bytes => driver.allocate_pinned(bytes)?,
            },
            scratch: layout.scratch.map(|at| base + at),
            libraries: layout.libraries.map(|(at, bytes)| (base + at, bytes)),
            staging: layout.staging.map(|at| base + at),
            report: base + layout.report,
            marks: base + layout.marks,
            exchange: (base + layout.exchange.0, layout.exchange.1),
        })
    }

    /// The address of a byte of a buffer.
    pub(super) fn buffer(&self, plan: &Plan, buffer: BufferId, offset: usize) -> Address {
        let buffer = &plan.buffers[buffer];
        let arena = match buffer.arena {
            Arena::Persistent => self.persistent,
            Arena::Workspace => self.workspace,
            // Pinned memory has the same address on the device.
            Arena::Host => self.host as Address,
        };
        arena + (buffer.offset + offset) as Address
    }

    /// The pointer to a byte of a buffer, if the buffer is in host memory.
    pub(super) fn on_host(&self, plan: &Plan, buffer: BufferId, offset: usize) -> Option<*mut u8> {
        let buffer = &plan.buffers[buffer];
        let on_host = buffer.arena == Arena::Host;
        on_host.then(|| self.host.wrapping_add(buffer.offset + offset))
    }

    /// The address of a place.
    pub(super) fn place(&self, plan: &Plan, place: &Place) -> Address {
        self.buffer(plan, place.buffer, place.offset)
    }
}
