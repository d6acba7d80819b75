//! The arenas of a rank: aligned, zero at first. What rests on the host has an allocation of its own, too.

use frit_ir::plan::{ALIGNMENT, Arena, Buffer, Plan};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

/// All arenas.
pub(super) struct Arenas {
    persistent: Memory,
    workspace: Memory,
    host: Memory,
}

impl Arenas {
    /// The arenas of a plan.
    pub(super) fn new(plan: &Plan) -> Self {
        let memory = |arena| Memory::new(plan.arena_bytes(arena));
        Arenas {
            persistent: memory(Arena::Persistent),
            workspace: memory(Arena::Workspace),
            host: memory(Arena::Host),
        }
    }

    /// The address of a byte of a buffer.
    pub(super) fn pointer(&self, buffer: &Buffer, offset: usize) -> *mut u8 {
        let arena = match buffer.arena {
            Arena::Persistent => &self.persistent,
            Arena::Workspace => &self.workspace,
            Arena::Host => &self.host,
        };
        assert!(buffer.offset + offset <= arena.layout.size());
        // SAFETY: within the allocation, as just checked.
        unsafe { arena.pointer.add(buffer.offset + offset) }
    }
}

struct Memory {
    pointer: *mut u8,
    layout: Layout,
}

impl Memory {
    fn new(bytes: usize) -> Self {
        let size = bytes.max(ALIGNMENT);
        let layout = Layout::from_size_align(size, ALIGNMENT)
            .expect("invariant: a plan's arenas fit the address space");
        // SAFETY: the size is not zero.
        let pointer = unsafe { alloc_zeroed(layout) };
        if pointer.is_null() {
            handle_alloc_error(layout);
        }
        Memory { pointer, layout }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.pointer, self.layout) };
    }
}
