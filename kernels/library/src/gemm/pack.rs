//! Packs bf16 operands into panels for the micro-kernel.
//!
//! A panel holds `W` rows of A (or columns of B), its *lines*: for each pair of depths, `W` words
//! of two bf16 numbers, lower depth in the lower half. Lines and depths beyond the operand are
//! zero. Storing is by whole vectors in ascending order, so up to 64 bytes after a panel are
//! overwritten: the next panel follows, or the slack of the scratch memory.

use std::arch::x86_64::*;

use super::microkernel::{MR, NR};

/// Depths are packed in pairs.
pub(super) const PAIR: usize = 2;

/// The part of an operand to pack.
#[derive(Clone, Copy)]
pub(super) struct Source {
    /// Depth 0 of line 0.
    pub(super) start: *const u16,
    /// Distance between two lines.
    pub(super) line: isize,
    /// Distance between two depths.
    pub(super) depth: isize,
    /// Number of lines.
    pub(super) lines: usize,
    /// Number of depths.
    pub(super) depths: usize,
}

impl Source {
    fn line_at(&self, line: usize) -> *const u16 {
        self.start.wrapping_offset(line as isize * self.line)
    }

    fn depth_at(&self, depth: usize) -> *const u16 {
        self.start.wrapping_offset(depth as isize * self.depth)
    }

    /// Words of a packed panel.
    fn panel(&self, width: usize) -> usize {
        self.depths.div_ceil(PAIR) * width
    }
}

/// Packs rows of A into panels of [`MR`].
///
/// # Safety
/// The source must be readable, `out` writable for all panels and 64 bytes more; the CPU must have
/// AVX-512 F, BW, VL.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack_a(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe {
        if src.depth == 1 {
            along_depth::<MR>(src, out);
        } else if src.line == 1 {
            across_depth_a(src, out);
        } else {
            any::<MR>(src, out);
        }
    }
}

/// Packs columns of B into panels of [`NR`].
///
/// # Safety
/// As for [`pack_a`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack_b(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe {
        if src.line == 1 {
            across_depth_b(src, out);
        } else if src.depth == 1 {
            along_depth::<NR>(src, out);
        } else {
            any::<NR>(src, out);
        }
    }
}

/// Lines whose depths are contiguous: transposes 16 lines x 16 pairs at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn along_depth<const W: usize>(src: &Source, out: *mut u32) {
    let pairs = src.depths.div_ceil(PAIR);
    for (panel, first) in (0..src.lines).step_by(W).enumerate() {
        let out = out.wrapping_add(panel * src.panel(W));
        for lane in (0..W).step_by(16) {
            let width = 16.min(W - lane);
            let valid = width.min(src.lines.saturating_sub(first + lane));
            for pair in (0..pairs).step_by(16) {
                let left = src.depths - pair * PAIR;
                let mask = if left >= 32 { u32::MAX } else { (1 << left) - 1 };
                let mut block = [_mm512_setzero_si512(); 16];
                // SAFETY: the mask and `valid` keep the loads inside the source, the stores go to
                // the panel or just behind it.
                unsafe {
                    for (i, row) in block.iter_mut().enumerate() {
                        if i < valid {
                            let from = src.line_at(first + lane + i).add(pair * PAIR);
                            *row = _mm512_maskz_loadu_epi16(mask, from.cast());
                        }
                    }
                    let columns = transpose(block);
                    let to = out.add(pair * W + lane);
                    if pairs - pair >= 16 {
                        for (i, column) in columns.into_iter().enumerate() {
                            _mm512_storeu_si512(to.add(i * W).cast(), column);
                        }
                    } else {
                        for (i, column) in columns.into_iter().enumerate().take(pairs - pair) {
                            _mm512_storeu_si512(to.add(i * W).cast(), column);
                        }
                    }
                }
            }
        }
    }
}

/// Transposes a 16 x 16 matrix of words.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    let mut t = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    let mut u = [_mm512_setzero_si512(); 16];
    for i in 0..4 {
        u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    // u[4 * g + c] holds column 4 * q + c of rows 4 * g .. 4 * g + 4 in its 128-bit quarter q.
    let mut columns = [_mm512_setzero_si512(); 16];
    for c in 0..4 {
        let even_low = _mm512_shuffle_i32x4::<0x88>(u[c], u[4 + c]);
        let odd_low = _mm512_shuffle_i32x4::<0xdd>(u[c], u[4 + c]);
        let even_high = _mm512_shuffle_i32x4::<0x88>(u[8 + c], u[12 + c]);
        let odd_high = _mm512_shuffle_i32x4::<0xdd>(u[8 + c], u[12 + c]);
        columns[c] = _mm512_shuffle_i32x4::<0x88>(even_low, even_high);
        columns[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even_low, even_high);
        columns[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd_low, odd_high);
        columns[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd_low, odd_high);
    }
    columns
}

/// Rows of A that are contiguous across a depth: interleaves two depths of twelve rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn across_depth_a(src: &Source, out: *mut u32) {
    for depth in (0..src.depths).step_by(PAIR) {
        let low = src.depth_at(depth);
        let high = src.depth_at(depth + 1);
        let has_high = depth + 1 < src.depths;
        for (panel, first) in (0..src.lines).step_by(MR).enumerate() {
            let mask = (1u16 << MR.min(src.lines - first)) - 1;
            // SAFETY: the masks keep the loads inside the source.
            unsafe {
                let low = _mm256_maskz_loadu_epi16(mask, low.add(first).cast());
                let mask = if has_high { mask } else { 0 };
                let high = _mm256_maskz_loadu_epi16(mask, high.wrapping_add(first).cast());
                let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(high));
                let word = _mm512_or_si512(_mm512_cvtepu16_epi32(low), high);
                // Panels are written side by side here, so the spare lanes must not be stored.
                let to = out.add(panel * src.panel(MR) + depth / PAIR * MR);
                _mm512_mask_storeu_epi32(to.cast(), (1 << MR) - 1, word);
            }
        }
    }
}

/// Columns of B that are contiguous across a depth: interleaves two depths of 32 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn across_depth_b(src: &Source, out: *mut u32) {
    let mut index = [0u16; 32];
    for (i, pair) in index.chunks_exact_mut(2).enumerate() {
        pair.copy_from_slice(&[i as u16, 32 + i as u16]);
    }
    // SAFETY: 64 bytes are loaded from 64 bytes.
    let to_low = unsafe { _mm512_loadu_si512(index.as_ptr().cast()) };
    let to_high = _mm512_add_epi16(to_low, _mm512_set1_epi16(16));
    for depth in (0..src.depths).step_by(PAIR) {
        let even = src.depth_at(depth);
        let odd = src.depth_at(depth + 1);
        let has_odd = depth + 1 < src.depths;
        for (panel, first) in (0..src.lines).step_by(NR).enumerate() {
            let left = src.lines - first;
            let mask = if left >= NR { u32::MAX } else { (1 << left) - 1 };
            // SAFETY: the masks keep the loads inside the source; the stores fill the panel.
            unsafe {
                let even = _mm512_maskz_loadu_epi16(mask, even.add(first).cast());
                let mask = if has_odd { mask } else { 0 };
                let odd = _mm512_maskz_loadu_epi16(mask, odd.wrapping_add(first).cast());
                let to = out.add(panel * src.panel(NR) + depth / PAIR * NR);
                let low = _mm512_permutex2var_epi16(even, to_low, odd);
                let high = _mm512_permutex2var_epi16(even, to_high, odd);
                _mm512_storeu_si512(to.cast(), low);
                _mm512_storeu_si512(to.add(16).cast(), high);
            }
        }
    }
}

/// Any strides, one element at a time.
unsafe fn any<const W: usize>(src: &Source, out: *mut u32) {
    for (panel, first) in (0..src.lines).step_by(W).enumerate() {
        for pair in 0..src.depths.div_ceil(PAIR) {
            for lane in 0..W {
                let element = |depth: usize| {
                    if first + lane < src.lines && depth < src.depths {
                        // SAFETY: inside the source.
                        u32::from(unsafe {
                            *src.line_at(first + lane).offset(depth as isize * src.depth)
                        })
                    } else {
                        0
                    }
                };
                let word = element(pair * PAIR) | element(pair * PAIR + 1) << 16;
                // SAFETY: inside the panel.
                unsafe { *out.add(panel * src.panel(W) + pair * W + lane) = word };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<const W: usize>(pack: unsafe fn(&Source, *mut u32)) {
        let data: Vec<u16> = (0..40_000u32).map(|i| (i % 65_521) as u16 + 1).collect();
        for lines in [1, 5, 11, 12, 13, 31, 32, 33, 70] {
            for depths in [1, 2, 3, 30, 31, 32, 33, 64, 77] {
                for (line, depth) in [(101, 1), (1, 103), (211, 3)] {
                    let start = data.as_ptr();
                    let src = Source { start, line, depth, lines, depths };
                    let panels = lines.div_ceil(W);
                    let mut got = vec![0u32; panels * src.panel(W) + 16];
                    let mut want = got.clone();
                    // SAFETY: the largest offset is below 40,000; 64 spare bytes follow.
                    unsafe {
                        pack(&src, got.as_mut_ptr());
                        any::<W>(&src, want.as_mut_ptr());
                    }
                    let words = panels * src.panel(W);
                    assert!(got[..words] == want[..words], "{W} {lines} {depths} {line} {depth}");
                    let word = want[(depths - 1) / 2 * W] >> ((depths - 1) % 2 * 16) & 0xffff;
                    assert_eq!(word, u32::from(data[(depths - 1) * depth as usize]));
                }
            }
        }
    }

    #[test]
    fn all_stride_cases_pack_alike() {
        if crate::simd::has_avx512() {
            check::<MR>(|src, out| {
                // SAFETY: the features are present; passed on.
                unsafe { pack_a(src, out) }
            });
            check::<NR>(|src, out| {
                // SAFETY: the features are present; passed on.
                unsafe { pack_b(src, out) }
            });
        }
    }
}
