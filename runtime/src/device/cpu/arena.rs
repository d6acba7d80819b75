//! Arenas of a rank: aligned and zero-initialized. The host arena is a separate allocation.

use crate::RunError;
use crate::memory::{available, needed};
use frit_ir::plan::{ALIGNMENT, Arena, Buffer, Plan};
use frit_kernels::memory::Memory;

/// All arenas.
pub(super) struct Arenas {
    persistent: Memory,
    workspace: Memory,
    host: Memory,
}

impl Arenas {
    /// The arenas of a plan.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub(super) fn new(plan: &Plan) -> Result<Self, RunError> {
        let memory = |arena| {
            Memory::zeroed(plan.arena_bytes(arena), ALIGNMENT)
                .ok_or_else(|| lacking(needed(plan, 1)))
        };
        Ok(Arenas {
            persistent: memory(Arena::Persistent)?,
            workspace: memory(Arena::Workspace)?,
            host: memory(Arena::Host)?,
        })
    }

    /// The address of a byte of a buffer.
    pub(super) fn pointer(&self, buffer: &Buffer, offset: usize) -> *mut u8 {
        let arena = match buffer.arena {
            Arena::Persistent => &self.persistent,
            Arena::Workspace => &self.workspace,
            Arena::Host => &self.host,
        };
        assert!(buffer.offset + offset <= arena.len());
        // SAFETY: within the allocation, as just checked.
        unsafe { arena.start().add(buffer.offset + offset) }
    }
}

/// The error that a rank's memory cannot be allocated.
pub(super) fn lacking(needed: u64) -> RunError {
    let available = available().map_or(0, |limit| limit.bytes);
    RunError::Memory { needed, ranks: 1, available, of: "what the system allocates" }
}
