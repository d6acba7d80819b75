//! Launches for a stable sort of 31-bit numbers with their original positions.

use crate::assembler::Assembler;
use crate::source::SourceKernel;
use frit_ir::plan::Pointer;
/// Numbers per block, threads per block, and values of a digit, as in `sort.cu`.
const CHUNK: usize = 1024;
const DIGITS: usize = 256;
const DIGIT_BITS: u32 = 8;

/// Numbers in ascending order and their original positions, u32 each.
pub(super) struct Sorted {
    pub(super) keys: Pointer,
    pub(super) places: Pointer,
}

/// Sorts `n` numbers of at most `largest`; `keys` is overwritten.
pub(super) fn sort(
    a: &mut Assembler<'_>,
    keys: Pointer,
    n: usize,
    largest: usize,
) -> Option<Sorted> {
    i32::try_from(n.max(largest)).ok()?;
    let chunks = n.div_ceil(CHUNK);
    let mut now = (keys, a.scratch(n * 4));
    let mut next = (a.scratch(n * 4), a.scratch(n * 4));
    let counts = a.scratch(DIGITS * chunks * 4);
    let kernel = |entry| {
        let mut kernel = SourceKernel::new("sort", entry);
        kernel.block = CHUNK as u32;
        kernel
    };
    let bits = (usize::BITS - largest.leading_zeros()).max(1);
    for pass in 0..bits.div_ceil(DIGIT_BITS) {
        let shift = (pass * DIGIT_BITS) as usize;
        let count = kernel("sort_count").grid(chunks)?.pointer(counts).pointer(now.0);
        a.run(count.i64(n).i64(chunks).i64(shift));
        a.run(kernel("sort_scan").pointer(counts).i64(DIGITS * chunks));
        let first = u8::from(pass == 0);
        let moved = kernel("sort_move").grid(chunks)?.pointer(next.0).pointer(next.1);
        let moved = moved.pointer(now.0).pointer(now.1).pointer(counts);
        a.run(moved.i64(n).i64(chunks).i64(shift).i64(first.into()));
        std::mem::swap(&mut now, &mut next);
    }
    Some(Sorted { keys: now.0, places: now.1 })
}
