//! Resolves a task's operands to addresses: in the plan's memory or, before it is allocated, in temporary memory.

use super::memory::{FAULT_WORDS, Memory, report_bytes};
use super::random_data::{Region, Values};
use frit_cuda::driver::Address;
use frit_ir::plan::{ALIGNMENT, GEMM_WORKSPACE, Launch, Launches, Place, Plan, Pointer, Stream};

/// Addresses of one task.
pub(super) struct Operands {
    pub(super) reads: Vec<Address>,
    pub(super) writes: Vec<Address>,
    pub(super) scratch: Address,
    /// Workspace of the libraries, with its size in bytes.
    pub(super) workspace: (Address, usize),
    /// What it reads; unknown in the plan's memory, where tasks write it.
    pub(super) regions: Vec<Region>,
    fault: Address,
}

impl Operands {
    /// Operands in the plan's memory; `fault` is the task's index among those that may report one.
    pub(super) fn of(
        plan: &Plan,
        memory: &Memory,
        (reads, writes): (&[Place], &[Place]),
        stream: Stream,
        fault: usize,
    ) -> Operands {
        let at = |places: &[Place]| places.iter().map(|p| memory.place(plan, p)).collect();
        Operands {
            reads: at(reads),
            writes: at(writes),
            scratch: memory.scratch[stream.index()],
            workspace: memory.libraries[stream.index()],
            regions: vec![],
            fault: memory.report + report_bytes(plan, fault) as Address,
        }
    }

    /// Operands from `base` on, aligned as in the plan's memory, with the largest workspace of any candidate, at most
    /// `engine_bytes` for cuDNN engines; and the end address.
    pub(super) fn apart(
        plan: &Plan,
        selected: &Launches,
        (reads, writes): (&[Place], &[Place]),
        engine_bytes: usize,
        base: Address,
    ) -> (Operands, Address) {
        let mut end = base;
        let mut place = |shift: usize, bytes: usize| {
            let at = end + shift as Address;
            end = (at + bytes as Address).next_multiple_of(ALIGNMENT as Address);
            at
        };
        let mut all = |places: &[Place]| -> Vec<Address> {
            let shift = |p: &Place| (plan.buffers[p.buffer].offset + p.offset) % ALIGNMENT;
            places.iter().map(|p| place(shift(p), p.ty.bytes())).collect()
        };
        let (reads_at, writes) = (all(reads), all(writes));
        let region = |(at, place): (&Address, &Place)| {
            let (bytes, values) = (place.ty.bytes(), Values::of(plan, place));
            Region { at: *at, bytes, values }
        };
        let regions = reads_at.iter().zip(reads).map(region).collect();
        let of_launch = |launch: &Launch| match launch {
            Launch::Gemm(_) => GEMM_WORKSPACE,
            Launch::Operation(launch) => launch.operation.workspace_bytes().min(engine_bytes),
            _ => 0,
        };
        let bytes = selected.every_launch().into_iter().map(of_launch).max().unwrap_or(0);
        let operands = Operands {
            reads: reads_at,
            writes,
            regions,
            scratch: place(0, selected.most_scratch_bytes()),
            workspace: (place(0, bytes), bytes),
            fault: place(0, FAULT_WORDS * 8),
        };
        (operands, end)
    }

    pub(super) fn pointer(&self, pointer: Pointer) -> Address {
        match pointer {
            Pointer::Read(i, at) => self.reads[i] + at as Address,
            Pointer::Write(i, at) => self.writes[i] + at as Address,
            Pointer::Scratch(at) => self.scratch + at as Address,
            Pointer::Fault => self.fault,
        }
    }
}
