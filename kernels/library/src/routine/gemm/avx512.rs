//! Micro-kernels for AVX-512: a tile of 12 x 32 results in 24 registers, computed from packed panels by `vfmadd` (f32) or `vdpbf16ps` (pairs of bf16),
//! with scale, bias, accumulation into C and rounding fused into the store. Tiles at the edges of C compute only 4 or 8 rows, or 16 columns.

use std::arch::x86_64::*;

use super::kernel::{COLUMNS, Columns, Kernel, PART, ROWS, WHOLE};
use super::pack::avx512::{pack_a, pack_b};
use super::planes::Planes;
use super::store::Store;
use crate::dtype::Elem;

/// Rows of a tile.
pub(super) const MR: usize = 12;
/// Columns of a tile.
pub(super) const NR: usize = 32;

/// f32 numbers.
pub(super) static F32: Kernel = Kernel {
    name: "avx512",
    rows: MR,
    columns: NR,
    pack: 1,
    parts: 1,
    granule: 1,
    depths: 512,
    block_columns: COLUMNS,
    block_rows: ROWS,
    keeps_sums: false,
    part: 2 * PART,
    whole: WHOLE,
    group: 8,
    in_place_rows: 272,
    pack_a,
    pack_b,
    tile: tile_f32,
    lines: Some(lines_f32),
    stores_f16: true,
    around: None,
};

/// Pairs of bf16.
pub(super) static BF16: Kernel = Kernel {
    name: "avx512-bf16",
    pack: 2,
    granule: 2,
    depths: 1024,
    tile: tile_bf16,
    lines: Some(lines_bf16),
    stores_f16: false,
    ..F32
};

/// The columns to store of both halves.
#[inline]
fn masks(store: &Store) -> [u16; 2] {
    let mask = if store.cols >= NR { u32::MAX } else { (1 << store.cols) - 1 };
    [mask as u16, (mask >> 16) as u16]
}

/// What is added to all rows.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn column_bias(store: &Store) -> [__m512; 2] {
    if store.bias.is_null() {
        return [_mm512_setzero_ps(); 2];
    }
    // SAFETY: 32 are readable.
    unsafe { [_mm512_loadu_ps(store.bias), _mm512_loadu_ps(store.bias.add(16))] }
}

/// Calls a micro-kernel for the rows and halves of columns that a tile has.
macro_rules! of_size {
    ($store:ident, $kernel:ident, $arguments:tt) => {
        match ($store.rows.div_ceil(4), $store.cols.div_ceil(16)) {
            (1, 1) => $kernel::<4, 1> $arguments,
            (1, _) => $kernel::<4, 2> $arguments,
            (2, 1) => $kernel::<8, 1> $arguments,
            (2, _) => $kernel::<8, 2> $arguments,
            (_, 1) => $kernel::<MR, 1> $arguments,
            _ => $kernel::<MR, 2> $arguments,
        }
    };
}

/// Stores a tile. That of the most frequent kind is stored here, as the sums stay in registers only if no function gets them and all loops
/// over them are unrolled.
macro_rules! store_tile {
    ($sums:ident, $store:ident, $rows:ident, $halves:ident, $any:ident) => {
        let is_plain = $store.partial.is_null() && $store.row_bias.is_null();
        if is_plain && $store.elem == Elem::F32 {
            let (masks, bias) = (masks($store), column_bias($store));
            let alpha = _mm512_set1_ps($store.alpha);
            for i in 0..$rows {
                if i < $store.rows {
                    for half in 0..$halves {
                        let at = i as isize * $store.c_row + half as isize * 16;
                        let c = $store.c.cast::<f32>().offset(at);
                        let mut value = _mm512_mul_ps($sums[i][half], alpha);
                        if $store.load_c {
                            value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(masks[half], c));
                        }
                        _mm512_mask_storeu_ps(c, masks[half], _mm512_add_ps(value, bias[half]));
                    }
                }
            }
        } else {
            let sums = $sums;
            $any(&sums, $store);
        }
    };
}

/// A micro-kernel from how it loads 16 words of B, spreads a word of A, multiplies and accumulates, and
/// stores results of fewer bits.
macro_rules! tile {
    (
        [$panels:ident, $panels_of:ident, $lines:ident, $lines_of:ident, $planes:ident, $planes_of:ident, $step:ident, $store:ident],
        $features:literal, $load:expr, $splat:expr, $multiply:expr, $store_low:expr
    ) => {
        /// Multiplies a panel of A by columns of B over `words` words of depths, and stores the tile.
        ///
        /// # Safety
        /// The panel of A must hold `words` words, B 32 words at each depth, `store` must be valid; the CPU must have the features.
        unsafe fn $panels(words: usize, a: *const u32, b: &Columns, store: &Store) {
            // SAFETY: passed on.
            unsafe { of_size!(store, $panels_of, (words, a, b, store)) };
        }

        /// As for a panel of A, for rows of words that lie `line` bytes apart, and a panel of B.
        ///
        /// # Safety
        /// The rows must hold `words` words; as for panels else.
        unsafe fn $lines(
            words: usize,
            (a, line): (*const u8, isize),
            b: *const u32,
            store: &Store,
        ) {
            // SAFETY: passed on.
            unsafe { of_size!(store, $lines_of, (words, (a, line), b, store)) };
        }

        /// Multiplies a panel of A by columns of B that lie in planes, and stores the tile.
        ///
        /// # Safety
        /// The panel of A must hold the words of all depths, and 32 words of B must be readable at each; as for panels else.
        pub(super) unsafe fn $planes(
            planes: &Planes<'_>,
            a: *const u32,
            b: *const u32,
            store: &Store,
        ) {
            // SAFETY: passed on.
            unsafe { of_size!(store, $planes_of, (planes, a, b, store)) };
        }

        #[target_feature(enable = $features)]
        unsafe fn $panels_of<const ROWS: usize, const HALVES: usize>(
            words: usize,
            a: *const u32,
            b: &Columns,
            store: &Store,
        ) {
            let mut acc = [[_mm512_setzero_ps(); HALVES]; ROWS];
            // SAFETY: the panels hold `words` words; a prefetch may take any address.
            unsafe {
                store.prefetch();
                let Columns { at: mut b, step, mut next, .. } = *b;
                let mut a = a;
                for _ in 0..words {
                    _mm_prefetch::<_MM_HINT_T0>(next.cast());
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(16).cast());
                    $step(&mut acc, a, b);
                    a = a.add(MR);
                    b = b.wrapping_add(step);
                    next = next.wrapping_add(step);
                }
                store_tile!(acc, store, ROWS, HALVES, $store);
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn $lines_of<const ROWS: usize, const HALVES: usize>(
            words: usize,
            (a, line): (*const u8, isize),
            b: *const u32,
            store: &Store,
        ) {
            let mut acc = [[_mm512_setzero_ps(); HALVES]; ROWS];
            // Rows that are not stored are read again in the place of others.
            let last = store.rows - 1;
            let lines: [*const u32; ROWS] =
                std::array::from_fn(|i| a.wrapping_offset(i.min(last) as isize * line).cast());
            let mut b = b;
            // SAFETY: rows and panel hold `words` words.
            unsafe {
                store.prefetch();
                for word in 0..words {
                    let first = $load(b);
                    let second = if HALVES > 1 { $load(b.add(16)) } else { first };
                    for (acc, line) in acc.iter_mut().zip(lines) {
                        let x = $splat(line.add(word).read_unaligned());
                        acc[0] = $multiply(acc[0], x, first);
                        if HALVES > 1 {
                            acc[HALVES - 1] = $multiply(acc[HALVES - 1], x, second);
                        }
                    }
                    b = b.add(NR);
                }
                store_tile!(acc, store, ROWS, HALVES, $store);
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn $planes_of<const ROWS: usize, const HALVES: usize>(
            planes: &Planes<'_>,
            a: *const u32,
            b: *const u32,
            store: &Store,
        ) {
            let mut acc = [[_mm512_setzero_ps(); HALVES]; ROWS];
            // SAFETY: the caller vouches for all depths.
            unsafe {
                store.prefetch();
                let (mut a, mut b) = (a, b);
                for _ in 0..planes.count {
                    for offset in planes.offsets {
                        $step(&mut acc, a, b.add(*offset));
                        a = a.add(MR);
                    }
                    b = b.wrapping_add(planes.words);
                }
                store_tile!(acc, store, ROWS, HALVES, $store);
            }
        }

        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn $step<const ROWS: usize, const HALVES: usize>(
            acc: &mut [[__m512; HALVES]; ROWS],
            a: *const u32,
            b: *const u32,
        ) {
            // SAFETY: the caller vouches for the words of the depth.
            unsafe {
                let first = $load(b);
                let second = if HALVES > 1 { $load(b.add(16)) } else { first };
                for (i, acc) in acc.iter_mut().enumerate() {
                    let x = $splat(*a.add(i));
                    acc[0] = $multiply(acc[0], x, first);
                    if HALVES > 1 {
                        acc[HALVES - 1] = $multiply(acc[HALVES - 1], x, second);
                    }
                }
            }
        }

        /// Stores a tile of any kind.
        #[target_feature(enable = $features)]
        #[inline(never)]
        unsafe fn $store<const ROWS: usize, const HALVES: usize>(
            acc: &[[__m512; HALVES]; ROWS],
            store: &Store,
        ) {
            let masks = masks(store);
            let alpha = _mm512_set1_ps(store.alpha);
            // SAFETY: rows and masks keep all accesses inside the tile.
            unsafe {
                let bias = column_bias(store);
                for (i, acc) in acc.iter().enumerate().take(store.rows) {
                    let mut row_bias = bias;
                    if !store.row_bias.is_null() {
                        let value = _mm512_set1_ps(*store.row_bias.add(i));
                        row_bias = bias.map(|bias| _mm512_add_ps(bias, value));
                    }
                    let i = i as isize;
                    for half in 0..HALVES {
                        let mask = masks[half];
                        let mut value = _mm512_mul_ps(acc[half], alpha);
                        if !store.partial.is_null() {
                            let at = store.partial.offset(i * store.partial_row).add(half * 16);
                            value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, at));
                        }
                        let at = i * store.c_row + half as isize * 16;
                        if store.elem == Elem::F32 {
                            let c = store.c.cast::<f32>().offset(at);
                            if store.load_c {
                                value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, c));
                            }
                            _mm512_mask_storeu_ps(c, mask, _mm512_add_ps(value, row_bias[half]));
                        } else {
                            let c = store.c.cast::<i16>().offset(at);
                            $store_low(store.elem, c, mask, value, row_bias[half], store.load_c);
                        }
                    }
                }
            }
        }
    };
}

tile!(
    [
        tile_f32,
        tile_f32_of,
        lines_f32,
        lines_f32_of,
        planes_f32,
        planes_f32_of,
        step_f32,
        store_f32
    ],
    "avx512f,avx512bw,avx512vl",
    |b: *const u32| _mm512_loadu_ps(b.cast()),
    |a: u32| _mm512_set1_ps(f32::from_bits(a)),
    |acc, x, y| _mm512_fmadd_ps(x, y, acc),
    |elem: Elem, c: *mut i16, mask: u16, mut value: __m512, bias: __m512, load_c: bool| {
        if load_c {
            value = _mm512_add_ps(value, widened(elem, _mm256_maskz_loadu_epi16(mask, c)));
        }
        let value = _mm512_add_ps(value, bias);
        _mm256_mask_storeu_epi16(c, mask, narrowed(elem, value));
    }
);

tile!(
    [
        tile_bf16,
        tile_bf16_of,
        lines_bf16,
        lines_bf16_of,
        planes_bf16,
        planes_bf16_of,
        step_bf16,
        store_bf16
    ],
    "avx512f,avx512bw,avx512vl,avx512bf16",
    |b: *const u32| as_bf16(_mm512_loadu_si512(b.cast())),
    |a: u32| as_bf16(_mm512_set1_epi32(a as i32)),
    |acc, x, y| _mm512_dpbf16_ps(acc, x, y),
    |_: Elem, c: *mut i16, mask: u16, mut value: __m512, bias: __m512, load_c: bool| {
        if load_c {
            let old = _mm256_maskz_loadu_epi16(mask, c);
            value = _mm512_add_ps(value, widened(Elem::BF16, old));
        }
        let value = _mm512_cvtneps_pbh(_mm512_add_ps(value, bias));
        _mm256_mask_storeu_epi16(c, mask, std::mem::transmute::<__m256bh, __m256i>(value));
    }
);

/// Stores a tile of any rows whose sums are in memory.
///
/// # Safety
/// The store must be valid; the CPU must have AVX-512 with BF16.
pub(super) unsafe fn store_sums<const ROWS: usize>(sums: &[[f32; NR]; ROWS], store: &Store) {
    const { assert!(size_of::<[f32; NR]>() == size_of::<[__m512; 2]>()) };
    // SAFETY: both are the same plain numbers; vectors are read where they are aligned.
    unsafe {
        let sums = &*sums.as_ptr().cast::<[[__m512; 2]; ROWS]>();
        store_bf16::<ROWS, 2>(sums, store);
    }
}

/// Numbers of 16 bits as f32.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn widened(elem: Elem, numbers: __m256i) -> __m512 {
    match elem {
        Elem::F16 => _mm512_cvtph_ps(numbers),
        _ => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(numbers))),
    }
}

/// f32 numbers, rounded to nearest even, of 16 bits; a NaN stays one.
#[target_feature(enable = "avx512f")]
#[inline]
fn narrowed(elem: Elem, numbers: __m512) -> __m256i {
    if elem == Elem::F16 {
        return _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(numbers);
    }
    let bits = _mm512_castps_si512(numbers);
    let upper = _mm512_srli_epi32::<16>(bits);
    let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(numbers, numbers);
    let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
    _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, quiet))
}

#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn as_bf16(words: __m512i) -> __m512bh {
    // SAFETY: both are 64 plain bytes.
    unsafe { std::mem::transmute(words) }
}

/// Runs chains of products of pairs in registers and returns their operations.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn products(rounds: usize) -> usize {
    let x = std::hint::black_box(as_bf16(_mm512_set1_epi32(0x3f00_3f00)));
    let mut chains = [std::hint::black_box(_mm512_set1_ps(1.0)); MR];
    for _ in 0..rounds {
        for chain in &mut chains {
            *chain = _mm512_dpbf16_ps(*chain, x, x);
        }
    }
    std::hint::black_box(chains);
    4 * 16 * chains.len() * rounds
}
