//! Packing with AVX-512, 16 lines or depths at a time.

use std::arch::x86_64::*;

use super::{Source, any};
use crate::dtype::Elem;
use crate::routine::gemm::avx512::{MR, NR, widened};

impl Source {
    /// Up to 16 elements as f32.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    pub(super) unsafe fn numbers(&self, from: *const u8, mask: u16) -> __m512i {
        // SAFETY: the caller vouches for the elements of the mask.
        unsafe {
            match self.elem {
                Elem::F32 => _mm512_maskz_loadu_epi32(mask, from.cast()),
                elem => {
                    let found = _mm256_maskz_loadu_epi16(mask, from.cast());
                    _mm512_castps_si512(widened(elem, found))
                }
            }
        }
    }

    /// Up to 16 words of a line, as many as `words`, from a depth on.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn words<const PACK: usize>(&self, line: usize, depth: usize) -> __m512i {
        let left = self.depths - depth;
        let from = self.at(line, depth);
        // SAFETY: the masks keep the loads inside the line, whose depths are contiguous.
        unsafe {
            match PACK {
                1 => self.numbers(from, if left >= 16 { u16::MAX } else { (1 << left) - 1 }),
                _ => {
                    let mask = if left >= 32 { u32::MAX } else { (1 << left) - 1 };
                    _mm512_maskz_loadu_epi16(mask, from.cast())
                }
            }
        }
    }
}

/// Packs rows of A into panels of [`MR`].
///
/// # Safety
/// The source must be readable, `out` writable for all panels; the CPU must have AVX-512 F, BW, VL.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(in crate::routine::gemm) unsafe fn pack_a(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe {
        match (src.depth, src.line, src.pack) {
            (1, _, 1) => along_depth::<1, MR>(src, out),
            (1, ..) => along_depth::<2, MR>(src, out),
            (_, 1, 1) => across_depth::<MR>(src, out),
            (_, 1, _) => across_pairs_a(src, out),
            _ => any::<MR, 1>(src, out),
        }
    }
}

/// Packs columns of B into panels of [`NR`].
///
/// # Safety
/// As for [`pack_a`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(in crate::routine::gemm) unsafe fn pack_b(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe {
        match (src.line, src.depth, src.pack) {
            (1, _, 1) => across_depth::<NR>(src, out),
            (1, ..) => across_pairs_b(src, out),
            (_, 1, 1) => along_depth::<1, NR>(src, out),
            (_, 1, _) => along_depth::<2, NR>(src, out),
            _ => any::<NR, 1>(src, out),
        }
    }
}

/// Lines whose depths are contiguous: transposes 16 lines x 16 words at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn along_depth<const PACK: usize, const W: usize>(src: &Source, out: *mut u32) {
    let words = src.depths.div_ceil(PACK);
    for (panel, first) in (0..src.lines).step_by(W).enumerate() {
        let out = out.wrapping_add(panel * src.panel);
        for lane in (0..W).step_by(16) {
            let width = 16.min(W - lane);
            let valid = width.min(src.lines.saturating_sub(first + lane));
            for word in (0..words).step_by(16) {
                let mut block = [_mm512_setzero_si512(); 16];
                // SAFETY: `valid` keeps the loads inside the source; stores reach into the next word of the panel, which is
                // stored later, but for the last.
                unsafe {
                    for (i, row) in block.iter_mut().enumerate() {
                        if i < valid {
                            *row = src.words::<PACK>(first + lane + i, word * PACK);
                        }
                    }
                    let columns = transpose(block);
                    let to = out.add(word * W + lane);
                    let more = words - word;
                    if more > 16 {
                        for (i, column) in columns.into_iter().enumerate() {
                            _mm512_storeu_si512(to.add(i * W).cast(), column);
                        }
                    } else {
                        for (i, column) in columns.into_iter().enumerate().take(more) {
                            let inside = if i + 1 == more { width } else { 16 };
                            let mask = u16::MAX >> (16 - inside);
                            _mm512_mask_storeu_epi32(to.add(i * W).cast(), mask, column);
                        }
                    }
                }
            }
        }
    }
}

/// Transposes a 16 x 16 matrix of words in memory, whose rows are some words apart.
///
/// # Safety
/// The one must be readable, the other writable; the CPU must have AVX-512 F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose_words(
    (from, from_row): (*const u32, usize),
    (to, to_row): (*mut u32, usize),
) {
    // SAFETY: passed on.
    unsafe {
        let rows = std::array::from_fn(|i| _mm512_loadu_si512(from.add(i * from_row).cast()));
        for (i, column) in transpose(rows).into_iter().enumerate() {
            _mm512_storeu_si512(to.add(i * to_row).cast(), column);
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

/// Lines that are contiguous across a depth: copies `W` numbers for each depth.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn across_depth<const W: usize>(src: &Source, out: *mut u32) {
    for depth in 0..src.depths {
        for (panel, first) in (0..src.lines).step_by(W).enumerate() {
            let from = src.at(first, depth);
            let to = out.wrapping_add(panel * src.panel + depth * W);
            for lane in (0..W).step_by(16) {
                let left = (src.lines - first).saturating_sub(lane);
                let mask = |n: usize| if n >= 16 { u16::MAX } else { (1 << n) - 1 };
                // SAFETY: the masks keep the loads inside the source and the stores in the panel,
                // whose neighbors are written side by side here.
                unsafe {
                    let from = src.elem.at(from, lane as isize);
                    let words = src.numbers(from, mask(left));
                    _mm512_mask_storeu_epi32(to.add(lane).cast(), mask(W - lane), words);
                }
            }
        }
    }
}

/// bf16 rows of A that are contiguous across a depth: interleaves two depths of twelve rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn across_pairs_a(src: &Source, out: *mut u32) {
    for depth in (0..src.depths).step_by(2) {
        let low = src.at(0, depth).cast::<u16>();
        let high = src.at(0, depth + 1).cast::<u16>();
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
                let to = out.add(panel * src.panel + depth / 2 * MR);
                _mm512_mask_storeu_epi32(to.cast(), (1 << MR) - 1, word);
            }
        }
    }
}

/// bf16 columns of B that are contiguous across a depth: interleaves two depths of 32 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn across_pairs_b(src: &Source, out: *mut u32) {
    let mut index = [0u16; 32];
    for (i, pair) in index.chunks_exact_mut(2).enumerate() {
        pair.copy_from_slice(&[i as u16, 32 + i as u16]);
    }
    // SAFETY: 64 bytes are loaded from 64 bytes.
    let to_low = unsafe { _mm512_loadu_si512(index.as_ptr().cast()) };
    let to_high = _mm512_add_epi16(to_low, _mm512_set1_epi16(16));
    for depth in (0..src.depths).step_by(2) {
        let even = src.at(0, depth).cast::<u16>();
        let odd = src.at(0, depth + 1).cast::<u16>();
        let has_odd = depth + 1 < src.depths;
        for (panel, first) in (0..src.lines).step_by(NR).enumerate() {
            let left = src.lines - first;
            let mask = if left >= NR { u32::MAX } else { (1 << left) - 1 };
            // SAFETY: the masks keep the loads inside the source; the stores fill the panel.
            unsafe {
                let even = _mm512_maskz_loadu_epi16(mask, even.add(first).cast());
                let mask = if has_odd { mask } else { 0 };
                let odd = _mm512_maskz_loadu_epi16(mask, odd.wrapping_add(first).cast());
                let to = out.add(panel * src.panel + depth / 2 * NR);
                let low = _mm512_permutex2var_epi16(even, to_low, odd);
                let high = _mm512_permutex2var_epi16(even, to_high, odd);
                _mm512_storeu_si512(to.cast(), low);
                _mm512_storeu_si512(to.add(16).cast(), high);
            }
        }
    }
}
