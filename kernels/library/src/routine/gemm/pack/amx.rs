//! Packing for the tile registers of AMX: rows of A as 16 pairs of depths of each of 32 lines, columns of B as one pair of each.

use super::avx512;
use super::{Source, any, units};
use crate::routine::gemm::amx::{MR, NR, WORDS};

/// Packs rows of A.
///
/// # Safety
/// The source must be readable, `out` writable for all panels.
pub(in crate::routine::gemm) unsafe fn pack_a(src: &Source, out: *mut u32) {
    // SAFETY: passed on; the level says that the features are present.
    unsafe {
        match (src.depth, src.line) {
            (1, _) => units::<MR, WORDS>(src, out),
            (_, 1) if crate::simd::has_avx512() => across_depth(src, out),
            _ => any::<MR, WORDS>(src, out),
        }
    }
}

/// Packs columns of B.
///
/// # Safety
/// As for [`pack_a`].
pub(in crate::routine::gemm) unsafe fn pack_b(src: &Source, out: *mut u32) {
    // SAFETY: passed on; the level says that the features are present.
    unsafe {
        if !crate::simd::has_avx512() {
            return any::<NR, 1>(src, out);
        }
        avx512::pack_b(src, out);
        let words = src.depths.div_ceil(src.pack);
        for panel in 0..src.lines.div_ceil(NR) {
            let rest = out.add(panel * src.panel + words * NR);
            rest.write_bytes(0, (src.panel_words() - words) * NR);
        }
    }
}

/// Rows that are contiguous across a depth: packs blocks of 32 rows x 32 depths as columns and transposes their words.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn across_depth(src: &Source, out: *mut u32) {
    let mut block = [0u32; WORDS * MR];
    for (panel, first) in (0..src.lines).step_by(MR).enumerate() {
        for depth in (0..src.depths).step_by(2 * WORDS) {
            let part = Source {
                start: src.at(first, depth),
                lines: MR.min(src.lines - first),
                depths: (2 * WORDS).min(src.depths - depth),
                panel: block.len(),
                ..*src
            };
            // SAFETY: a block is one panel of B; its place is inside the panel.
            unsafe {
                pack_b(&part, block.as_mut_ptr());
                let to = out.add(panel * src.panel + depth / 2 * MR);
                for half in 0..MR / 16 {
                    avx512::transpose_words(
                        (block.as_ptr().add(16 * half), MR),
                        (to.add(16 * half * WORDS), WORDS),
                    );
                }
            }
        }
    }
}
