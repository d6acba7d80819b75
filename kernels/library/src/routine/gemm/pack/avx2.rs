//! Packing with AVX2, 8 lines or depths at a time, as f32.

use std::arch::x86_64::*;

use super::{Source, any};
use crate::dtype::Elem;
use crate::routine::gemm::avx2::{MR, NR};

/// Packs rows of A into panels of [`MR`].
///
/// # Safety
/// The source must be readable, `out` writable for all panels; the CPU must have AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(in crate::routine::gemm) unsafe fn pack_a(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe { pack::<MR>(src, out) };
}

/// Packs columns of B into panels of [`NR`].
///
/// # Safety
/// As for [`pack_a`].
#[target_feature(enable = "avx2,f16c")]
pub(in crate::routine::gemm) unsafe fn pack_b(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe { pack::<NR>(src, out) };
}

#[target_feature(enable = "avx2,f16c")]
unsafe fn pack<const W: usize>(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe {
        match (src.line, src.depth) {
            (1, _) => across_depth::<W>(src, out),
            (_, 1) => along_depth::<W>(src, out),
            _ => any::<W, 1>(src, out),
        }
    }
}

/// Up to 8 elements as f32, zeros behind them.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn numbers(elem: Elem, from: *const u8, count: usize) -> __m256i {
    // SAFETY: the caller vouches for so many elements.
    unsafe {
        if elem == Elem::F32 {
            return match count {
                8.. => _mm256_loadu_si256(from.cast()),
                _ => _mm256_maskload_epi32(from.cast(), first(count)),
            };
        }
        let halves = if count >= 8 {
            _mm_loadu_si128(from.cast())
        } else {
            let mut copy = [0u16; 8];
            for (i, half) in copy.iter_mut().enumerate().take(count) {
                *half = from.cast::<u16>().add(i).read_unaligned();
            }
            _mm_loadu_si128(copy.as_ptr().cast())
        };
        match elem {
            Elem::F16 => _mm256_castps_si256(_mm256_cvtph_ps(halves)),
            _ => _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)),
        }
    }
}

/// A mask of the first words.
#[target_feature(enable = "avx2")]
#[inline]
fn first(count: usize) -> __m256i {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes)
}

/// Lines whose depths are contiguous: transposes 8 lines x 8 depths at a time.
#[target_feature(enable = "avx2,f16c")]
unsafe fn along_depth<const W: usize>(src: &Source, out: *mut u32) {
    for (panel, line) in (0..src.lines).step_by(W).enumerate() {
        let out = out.wrapping_add(panel * src.panel);
        for lane in (0..W).step_by(8) {
            let width = 8.min(W - lane);
            let valid = width.min(src.lines.saturating_sub(line + lane));
            for depth in (0..src.depths).step_by(8) {
                let more = src.depths - depth;
                let mut block = [_mm256_setzero_si256(); 8];
                // SAFETY: `valid` and `more` keep the loads inside the source; stores reach into the next depth of the panel, which is
                // stored later, but for the last.
                unsafe {
                    for (i, row) in block.iter_mut().enumerate().take(valid) {
                        *row = numbers(src.elem, src.at(line + lane + i, depth), more);
                    }
                    let columns = transpose(block);
                    let to = out.add(depth * W + lane);
                    if more > 8 {
                        for (i, column) in columns.into_iter().enumerate() {
                            _mm256_storeu_si256(to.add(i * W).cast(), column);
                        }
                    } else {
                        for (i, column) in columns.into_iter().enumerate().take(more) {
                            let inside = if i + 1 == more { width } else { 8 };
                            _mm256_maskstore_epi32(to.add(i * W).cast(), first(inside), column);
                        }
                    }
                }
            }
        }
    }
}

/// Lines that are contiguous across a depth: copies `W` numbers for each depth.
#[target_feature(enable = "avx2,f16c")]
unsafe fn across_depth<const W: usize>(src: &Source, out: *mut u32) {
    for depth in 0..src.depths {
        for (panel, line) in (0..src.lines).step_by(W).enumerate() {
            let from = src.at(line, depth);
            let to = out.wrapping_add(panel * src.panel + depth * W);
            for lane in (0..W).step_by(8) {
                let left = (src.lines - line).saturating_sub(lane);
                // SAFETY: the loads stay inside the source and the stores in the panel, whose neighbors are written side by side here.
                unsafe {
                    let words = numbers(src.elem, src.elem.at(from, lane as isize), left);
                    let to = to.add(lane);
                    match W - lane {
                        8.. => _mm256_storeu_si256(to.cast(), words),
                        width => _mm256_maskstore_epi32(to.cast(), first(width), words),
                    }
                }
            }
        }
    }
}

/// Transposes an 8 x 8 matrix of words.
#[target_feature(enable = "avx2")]
#[inline]
fn transpose(r: [__m256i; 8]) -> [__m256i; 8] {
    let mut t = [_mm256_setzero_si256(); 8];
    for i in 0..4 {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    // u[4 * g + c] holds columns c and 4 + c of rows 4 * g .. 4 * g + 4 in its halves.
    let mut u = [_mm256_setzero_si256(); 8];
    for i in 0..2 {
        u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    let mut columns = [_mm256_setzero_si256(); 8];
    for c in 0..4 {
        columns[c] = _mm256_permute2x128_si256::<0x20>(u[c], u[4 + c]);
        columns[4 + c] = _mm256_permute2x128_si256::<0x31>(u[c], u[4 + c]);
    }
    columns
}
