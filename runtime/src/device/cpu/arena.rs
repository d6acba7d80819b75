//! The two arenas of a rank: aligned, zero at first.

use frit_ir::plan::{ALIGNMENT, Arena, Buffer};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

/// Both arenas.
pub(super) struct Arenas {
    persistent: Memory,
    workspace: Memory,
}

impl Arenas {
    /// Arenas of these sizes in bytes.
    pub(super) fn new(persistent: usize, workspace: usize) -> Self {
        Arenas { persistent: Memory::new(persistent), workspace: Memory::new(workspace) }
    }

    /// The address of a byte of a buffer.
    pub(super) fn pointer(&self, buffer: &Buffer, offset: usize) -> *mut u8 {
        let arena = match buffer.arena {
            Arena::Persistent => &self.persistent,
            Arena::Workspace => &self.workspace,
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
