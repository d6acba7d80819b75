//! Blocks of memory for tensors and scratch space. Large ones are mapped in huge pages where the system has them: operands of GEMMs are read
//! with strides of many pages, whose addresses the processor would otherwise look up again and again.

use memmap2::{MmapMut, MmapOptions};
use std::alloc::{Layout, alloc_zeroed, dealloc};

/// Least bytes that are mapped: two huge pages of the usual size.
const MAPPED: usize = 4 << 20;

/// A block of bytes that were zero when it was allocated.
#[derive(Debug)]
pub struct Memory {
    start: *mut u8,
    bytes: usize,
    from: Source,
}

#[derive(Debug)]
enum Source {
    Allocator(Layout),
    Map { _map: MmapMut },
}

// SAFETY: the block is owned.
unsafe impl Send for Memory {}

impl Memory {
    /// A block whose address is a multiple of `align`, a power of two of at most a page. `None` if there is not enough memory.
    pub fn zeroed(bytes: usize, align: usize) -> Option<Memory> {
        if bytes >= MAPPED {
            let mut map = MmapOptions::new().len(bytes).map_anon().ok()?;
            #[cfg(target_os = "linux")]
            // Only slower where the system declines.
            let _ = map.advise(memmap2::Advice::HugePage);
            return Some(Memory {
                start: map.as_mut_ptr(),
                bytes,
                from: Source::Map { _map: map },
            });
        }
        let layout = Layout::from_size_align(bytes.max(align), align).ok()?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        (!start.is_null()).then_some(Memory { start, bytes, from: Source::Allocator(layout) })
    }

    /// The first byte.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Source::Allocator(layout) = self.from {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.start, layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zero_aligned_and_writable() {
        for bytes in [0, 1, 1000, MAPPED - 1, MAPPED, MAPPED + 1, 5 * MAPPED] {
            for align in [64, 256, 4096] {
                let memory = Memory::zeroed(bytes, align).expect("a few megabytes");
                assert_eq!(memory.start() as usize % align, 0);
                assert_eq!(memory.len(), bytes);
                // SAFETY: the block has so many bytes, and no other reference.
                let all = unsafe { std::slice::from_raw_parts_mut(memory.start(), bytes) };
                assert!(all.iter().all(|byte| *byte == 0));
                all.fill(1);
            }
        }
    }

    #[test]
    fn what_the_system_does_not_have_is_none() {
        assert!(Memory::zeroed(isize::MAX as usize, 64).is_none());
    }
}
