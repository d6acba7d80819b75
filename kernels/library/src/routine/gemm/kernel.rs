//! What the loops over blocks know of a micro-kernel, and which one this processor gets.

use super::pack::Source;
use super::store::Store;
use crate::dtype::Elem;
use std::sync::OnceLock;

/// Rows that are a multiple of those of all kernels, of which so many are packed at a time that with the depths of a block they fill a part
/// of the second-level cache.
pub(super) const PART: usize = 96;
/// The most columns of a block of most kernels: packed, 4 MiB.
pub(super) const COLUMNS: usize = 2048;
/// The most rows of a block of most kernels.
pub(super) const ROWS: usize = 2048;
/// The most bytes of an operand that is packed as a whole.
#[cfg(target_arch = "x86_64")]
pub(super) const WHOLE: usize = 16 << 20;

/// A micro-kernel and the packing of its operands.
///
/// A packed panel contains as many *lines* as a tile has rows (of A) or columns (of B), in 32-bit words. Words hold one depth as f32 or two
/// as bf16, or of one of several bf16 parts of f32 numbers; a panel of `d` depths has [`Kernel::words`] words for each line, whose order is
/// that of the kernel. Depths beyond the operand are zeros.
pub(super) struct Kernel {
    /// The instructions, for reports.
    pub(super) name: &'static str,
    /// Rows of a tile.
    pub(super) rows: usize,
    /// Columns of a tile.
    pub(super) columns: usize,
    /// Depths in a word.
    pub(super) pack: usize,
    /// Words of a line for so many depths: the parts into which each number is split.
    pub(super) parts: usize,
    /// A panel has a multiple of so many depths.
    pub(super) granule: usize,
    /// The most depths of a block.
    pub(super) depths: usize,
    /// The most columns of a block.
    pub(super) block_columns: usize,
    /// The most rows of a block whose sums are kept in scratch memory.
    pub(super) block_rows: usize,
    /// Keeps sums in scratch memory between blocks, even if they could be in C, whose rows collide in caches if they are pages apart.
    pub(super) keeps_sums: bool,
    /// Rows of A packed at a time, a multiple of those of a tile.
    pub(super) part: usize,
    /// The most bytes of an operand that is packed as a whole before the threads share out the other; 0 if none is.
    pub(super) whole: usize,
    /// Panels of B by which each panel of A is multiplied before the next one, which stay in the second-level cache, while that of A stays in
    /// the first; if 0, each panel of B is multiplied by all rows of a part before the next one.
    pub(super) group: usize,
    /// The most rows of A for which columns of B are read in place.
    pub(super) in_place_rows: usize,
    /// Packs rows of A.
    pub(super) pack_a: Pack,
    /// Packs columns of B.
    pub(super) pack_b: Pack,
    /// Multiplies a panel of A by columns of B over some words of each line, and stores the tile.
    pub(super) tile: Tile,
    /// The same for rows of A as they are in memory, and the bytes between two; none if A must be packed.
    pub(super) lines: Option<Lines>,
    /// Rounds results to f16 by itself.
    pub(super) stores_f16: bool,
    /// What a thread does before its first tile and after its last.
    pub(super) around: Option<[fn(); 2]>,
}

/// Columns of B, as many words at each depth as a tile has columns.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub(super) at: *const u32,
    /// Words between two depths: those of the columns in a panel.
    pub(super) step: usize,
    /// Where the words are that are needed when as many depths are done, which the kernel may fetch into the cache: of this panel, or where
    /// columns are read in place of the next one, as processors do not foresee depths that are far apart.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "kernels of x86-64 fetch"))]
    pub(super) next: *const u32,
    /// A panel that stays in the first-level cache while those of A pass by, not the other way round.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "kernels of x86-64 ask"))]
    pub(super) stays: bool,
}

/// Packs lines into panels. The source must be readable, the panels writable, the CPU must have the features.
pub(super) type Pack = unsafe fn(&Source, *mut u32);
/// The panels must hold so many words for each line, the store must be valid, the CPU must have the features.
pub(super) type Tile = unsafe fn(usize, *const u32, &Columns, &Store);
/// As [`Tile`].
pub(super) type Lines = unsafe fn(usize, (*const u8, isize), *const u32, &Store);

impl Kernel {
    /// Words of a line of a panel of so many depths.
    pub(super) fn words(&self, depths: usize) -> usize {
        depths.next_multiple_of(self.granule) / self.pack * self.parts
    }
}

/// The micro-kernel for operands of a type; none where the crate `gemm` multiplies.
#[inline]
pub(super) fn of(elem: Elem) -> Option<&'static Kernel> {
    static CHOSEN: OnceLock<[Option<&'static Kernel>; 2]> = OnceLock::new();
    CHOSEN.get_or_init(|| [single(), pairs().or_else(single)])[usize::from(elem == Elem::BF16)]
}

/// The micro-kernel that multiplies large matrices of f32, or of f16, as sums of bf16 numbers, where that is faster.
#[inline]
pub(super) fn by_parts() -> Option<&'static Kernel> {
    static CHOSEN: OnceLock<Option<&'static Kernel>> = OnceLock::new();
    *CHOSEN.get_or_init(split)
}

/// The micro-kernel for f32, to which other types are widened.
#[cfg(target_arch = "x86_64")]
fn single() -> Option<&'static Kernel> {
    match crate::simd::level() {
        crate::simd::AVX512 => Some(&super::avx512::F32),
        crate::simd::AVX2 => Some(&super::avx2::F32),
        _ => None,
    }
}

/// The micro-kernel for pairs of bf16, if one is faster.
#[cfg(target_arch = "x86_64")]
fn pairs() -> Option<&'static Kernel> {
    use super::{amx, avx512};
    #[cfg(test)]
    if let Some(path) = crate::tests::path() {
        return match path.as_str() {
            "amx-software" => Some(&amx::SOFTWARE),
            "amx-bf16" if amx::is_available() => Some(&amx::HARDWARE),
            _ => crate::simd::prefers_bf16_dots().then_some(&avx512::BF16),
        };
    }
    if crate::simd::is_allowed("amx-bf16") && amx::is_available() {
        return Some(&amx::HARDWARE);
    }
    crate::simd::prefers_bf16_dots().then_some(&avx512::BF16)
}

/// The micro-kernel for parts of f32, if this processor has the instructions.
#[cfg(target_arch = "x86_64")]
fn split() -> Option<&'static Kernel> {
    use super::amx;
    #[cfg(test)]
    if let Some(path) = crate::tests::path() {
        return match path.as_str() {
            "amx-software" => Some(&amx::split::SOFTWARE),
            "amx-bf16" if amx::is_available() => Some(&amx::split::HARDWARE),
            _ => None,
        };
    }
    let is_there = crate::simd::is_allowed("amx-bf16") && amx::is_available();
    (is_there && crate::simd::has_avx512()).then_some(&amx::split::HARDWARE)
}

#[cfg(not(target_arch = "x86_64"))]
fn split() -> Option<&'static Kernel> {
    None
}

/// As for x86-64. NEON is part of every processor of this architecture.
#[cfg(target_arch = "aarch64")]
fn single() -> Option<&'static Kernel> {
    (crate::simd::level() >= crate::simd::NEON).then_some(&super::neon::F32)
}

/// As for x86-64.
#[cfg(target_arch = "aarch64")]
fn pairs() -> Option<&'static Kernel> {
    (crate::simd::level() >= crate::simd::NEON_BF16).then_some(&super::neon_bf16::BF16)
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn single() -> Option<&'static Kernel> {
    None
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn pairs() -> Option<&'static Kernel> {
    None
}
