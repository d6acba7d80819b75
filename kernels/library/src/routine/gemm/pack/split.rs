//! Packing of f32 numbers as three bf16 parts each, for the tile registers of AMX. Of each 32 depths of a panel come all first parts, then
//! all second and all third ones, each as for bf16 operands: of A as 16 pairs of depths of each of 32 lines, of B as one pair of each.

use super::Source;
use crate::routine::gemm::amx::split::{MARK, MARKED, PART_WORDS, PARTS, Parts};
use crate::routine::gemm::amx::{MR, NR, WORDS};

/// Lines of a panel, of A as of B.
const LINES: usize = MR;
const _: () = assert!(MR == NR && PART_WORDS == LINES * WORDS);

/// Packs rows of A.
///
/// # Safety
/// The source must be readable, `out` writable for all panels.
pub(in crate::routine::gemm) unsafe fn pack_a(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe { pack::<true>(src, out) };
}

/// Packs columns of B.
///
/// # Safety
/// As for [`pack_a`].
pub(in crate::routine::gemm) unsafe fn pack_b(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe { pack::<false>(src, out) };
}

/// Packs rows of A, or columns of B.
unsafe fn pack<const LEFT: bool>(src: &Source, out: *mut u32) {
    let has_avx512 = crate::simd::has_avx512();
    let (panels, units) = (src.lines.div_ceil(LINES), src.depths.div_ceil(2 * WORDS));
    // As the source lies in memory.
    let place = |number: usize| match src.depth {
        1 => (number / units, number % units),
        _ => (number % panels, number / panels),
    };
    let start = |(panel, unit): (usize, usize)| src.at(panel * LINES, unit * 2 * WORDS);
    for number in 0..panels * units {
        let (panel, unit) = place(number);
        let part = Source {
            start: start((panel, unit)),
            lines: LINES.min(src.lines - panel * LINES),
            depths: (2 * WORDS).min(src.depths - unit * 2 * WORDS),
            ..*src
        };
        // SAFETY: the unit is inside the panel, and the part inside the source; the features are present.
        unsafe {
            let out = out.add(panel * src.panel + unit * PARTS * PART_WORDS).cast::<Parts>();
            let next = start(place((number + 1).min(panels * units - 1)));
            let is_finite = match (src.depth, src.line) {
                (1, _) if has_avx512 => x86::along_depth::<LEFT>(&part, next, out),
                (_, 1) if has_avx512 => x86::across_depth::<LEFT>(&part, next, out),
                _ => any::<LEFT>(&part, out),
            };
            if !is_finite {
                *out.cast::<u32>().add(MARKED) = MARK;
            }
        }
    }
}

/// Packs any strides, one word at a time, and returns whether all numbers are finite.
unsafe fn any<const LEFT: bool>(src: &Source, out: *mut Parts) -> bool {
    let mut is_finite = true;
    for line in 0..LINES {
        for word in 0..WORDS {
            let mut half = |depth: usize| {
                if line >= src.lines || depth >= src.depths {
                    return [0; PARTS];
                }
                // SAFETY: the element is inside the source.
                let number = unsafe { src.elem.load(src.at(line, depth), 0) };
                is_finite &= number.is_finite();
                split(number)
            };
            let (low, high) = (half(2 * word), half(2 * word + 1));
            let at = if LEFT { line * WORDS + word } else { word * LINES + line };
            for part in 0..PARTS {
                // SAFETY: the caller vouches for the unit.
                unsafe { (*out)[part][at] = u32::from(low[part]) | u32::from(high[part]) << 16 };
            }
        }
    }
    is_finite
}

/// The bits of the three bf16 parts of a number. One that is not finite is its own first part.
fn split(number: f32) -> [u16; PARTS] {
    let mut rest = number;
    std::array::from_fn(|_| {
        let part = nearest(rest);
        rest = if part.is_finite() { rest - part } else { 0.0 };
        (part.to_bits() >> 16) as u16
    })
}

/// The nearest bf16 number, of two the one farther from zero; of a finite one the largest at most.
fn nearest(number: f32) -> f32 {
    if number.is_nan() {
        return f32::NAN;
    }
    if number.is_infinite() {
        return number;
    }
    let rounded = f32::from_bits((number.to_bits() + HALF) & UPPER);
    if rounded.is_finite() { rounded } else { f32::from_bits(LARGEST).copysign(number) }
}

/// The bits of an f32 number that are those of a bf16 number, and half of the last of these.
const UPPER: u32 = 0xffff_0000;
const HALF: u32 = 0x8000;
/// Those of the largest bf16 number.
const LARGEST: u32 = 0x7f7f_0000;

/// Packing with AVX-512.
mod x86 {
    use std::arch::x86_64::*;

    use super::{HALF, LARGEST, LINES, PARTS, Parts, Source, UPPER, WORDS};
    use crate::routine::gemm::pack::avx512::transpose_words;

    /// NaN as classes of numbers of `vfpclassps`, and with it infinities.
    const NAN: i32 = 0x81;
    const NOT_FINITE: i32 = NAN | 0x18;

    /// The parts of 16 pairs of numbers, and whether all are finite.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    fn split_pairs(low: __m512, high: __m512) -> ([__m512i; PARTS], bool) {
        let pairs =
            |low: __m512i, high: __m512i| _mm512_or_si512(_mm512_srli_epi32::<16>(low), high);
        let rest = |x: __m512, part: __m512i| _mm512_sub_ps(x, _mm512_castsi512_ps(part));
        let first = [nearest(low), nearest(high)];
        let left = [rest(low, first[0]), rest(high, first[1])];
        let second = [nearest(left[0]), nearest(left[1])];
        let left = [rest(left[0], second[0]), rest(left[1], second[1])];
        let third = [nearest(left[0]), nearest(left[1])];
        // The rests of numbers that are not finite, or rounded to infinity, are no numbers.
        if _mm512_fpclass_ps_mask::<NOT_FINITE>(_mm512_add_ps(left[0], left[1])) != 0 {
            return split_each(low, high);
        }
        ([first, second, third].map(|[low, high]| pairs(low, high)), true)
    }

    /// As [`split_pairs`], for numbers that are not finite or too large to be rounded.
    #[cold]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn split_each(low: __m512, high: __m512) -> ([__m512i; PARTS], bool) {
        let mut is_finite = true;
        let mut parts = [_mm512_setzero_si512(); PARTS];
        for (number, is_high) in [(low, false), (high, true)] {
            let bits = _mm512_castps_si512(number);
            let sign = _mm512_and_si512(bits, _mm512_set1_epi32(i32::MIN));
            let special = _mm512_fpclass_ps_mask::<NOT_FINITE>(number);
            let nan = _mm512_fpclass_ps_mask::<NAN>(number);
            is_finite &= special == 0;
            let mut first = nearest(number);
            let overflows = _mm512_fpclass_ps_mask::<NOT_FINITE>(_mm512_castsi512_ps(first));
            let largest = _mm512_or_si512(sign, _mm512_set1_epi32(LARGEST as i32));
            first = _mm512_mask_mov_epi32(first, overflows & !special, largest);
            first = _mm512_mask_mov_epi32(first, special, bits);
            first = _mm512_mask_mov_epi32(first, nan, _mm512_set1_epi32(f32::NAN.to_bits() as i32));
            let rest = |x: __m512, part: __m512i| {
                _mm512_maskz_sub_ps(!special, x, _mm512_castsi512_ps(part))
            };
            let left = rest(number, first);
            let second = nearest(left);
            let third = nearest(rest(left, second));
            for (part, bits) in parts.iter_mut().zip([first, second, third]) {
                let half = if is_high { bits } else { _mm512_srli_epi32::<16>(bits) };
                *part = _mm512_or_si512(*part, half);
            }
        }
        (parts, is_finite)
    }

    /// The bits of the nearest bf16 numbers.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn nearest(numbers: __m512) -> __m512i {
        let half = _mm512_set1_epi32(HALF as i32);
        let sum = _mm512_add_epi32(_mm512_castps_si512(numbers), half);
        _mm512_and_si512(sum, _mm512_set1_epi32(UPPER as i32))
    }

    /// The lowest bits, as many as a count, of two registers of 16.
    fn masks(count: usize) -> [u16; 2] {
        let mask = if count >= 32 { u32::MAX } else { (1 << count) - 1 };
        [mask as u16, (mask >> 16) as u16]
    }

    /// Two registers of a line, or of a depth, of as many numbers as a mask says.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn pair(src: &Source, from: *const u8, masks: [u16; 2]) -> [__m512; 2] {
        // SAFETY: the masks keep the loads inside the source.
        unsafe {
            let second = src.elem.at(from, 16);
            [(from, masks[0]), (second, masks[1])]
                .map(|(from, mask)| _mm512_castsi512_ps(src.numbers(from, mask)))
        }
    }

    /// Fetches 32 f32 numbers into the cache; they may be anywhere.
    #[inline]
    fn prefetch(numbers: *const u8) {
        // SAFETY: every x86-64 processor has the instruction, which may take any address.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(numbers.cast());
            _mm_prefetch::<_MM_HINT_T0>(numbers.wrapping_add(64).cast());
        }
    }

    /// Lines whose depths are contiguous; returns whether all numbers are finite.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn along_depth<const LEFT: bool>(
        src: &Source,
        next: *const u8,
        out: *mut Parts,
    ) -> bool {
        let (mut own, mut is_finite) = (std::mem::MaybeUninit::<Parts>::uninit(), true);
        let to = if LEFT { out } else { own.as_mut_ptr() }.cast::<u32>();
        let masks = masks(src.depths);
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        for line in 0..LINES {
            // SAFETY: the masks keep the loads inside the source; the unit has all lines.
            unsafe {
                prefetch(src.elem.at(next, line as isize * src.line));
                let (parts, are_finite) = if line < src.lines {
                    let [first, second] = pair(src, src.at(line, 0), masks);
                    let low = _mm512_permutex2var_ps(first, even, second);
                    split_pairs(low, _mm512_permutex2var_ps(first, odd, second))
                } else {
                    ([_mm512_setzero_si512(); PARTS], true)
                };
                is_finite &= are_finite;
                for (part, words) in parts.into_iter().enumerate() {
                    let at = to.add((part * LINES + line) * WORDS);
                    _mm512_storeu_si512(at.cast(), words);
                }
            }
        }
        if !LEFT {
            // SAFETY: both are whole units.
            unsafe { turn::<WORDS, LINES>(to, out.cast()) };
        }
        is_finite
    }

    /// Lines that are contiguous across a depth; returns whether all numbers are finite.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn across_depth<const LEFT: bool>(
        src: &Source,
        next: *const u8,
        out: *mut Parts,
    ) -> bool {
        let (mut own, mut is_finite) = (std::mem::MaybeUninit::<Parts>::uninit(), true);
        let to = if LEFT { own.as_mut_ptr() } else { out }.cast::<u32>();
        let masks = masks(src.lines);
        for word in 0..WORDS {
            // SAFETY: the masks keep the loads inside the source; the unit has all depths.
            unsafe {
                let depth = |depth: usize| match depth < src.depths {
                    true => pair(src, src.at(0, depth), masks),
                    false => [_mm512_setzero_ps(); 2],
                };
                let (even, odd) = (depth(2 * word), depth(2 * word + 1));
                for depth in [2 * word, 2 * word + 1] {
                    prefetch(src.elem.at(next, depth as isize * src.depth));
                }
                for half in 0..2 {
                    let (parts, are_finite) = split_pairs(even[half], odd[half]);
                    is_finite &= are_finite;
                    for (part, words) in parts.into_iter().enumerate() {
                        let at = to.add((part * WORDS + word) * LINES + 16 * half);
                        _mm512_storeu_si512(at.cast(), words);
                    }
                }
            }
        }
        if LEFT {
            // SAFETY: both are whole units.
            unsafe { turn::<LINES, WORDS>(to, out.cast()) };
        }
        is_finite
    }

    /// Transposes each part of a unit of rows of `FROM` words to rows of `TO` words.
    #[target_feature(enable = "avx512f")]
    unsafe fn turn<const FROM: usize, const TO: usize>(from: *const u32, to: *mut u32) {
        for part in 0..PARTS {
            let (from, to) =
                (from.wrapping_add(part * FROM * TO), to.wrapping_add(part * FROM * TO));
            for half in [0, 16] {
                let begin = |row: usize| if row == LINES { half } else { half * WORDS };
                // SAFETY: 16 x 16 words of each are inside the part.
                unsafe {
                    transpose_words((from.add(begin(FROM)), FROM), (to.add(begin(TO)), TO));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Elem;

    fn sum(parts: [u16; PARTS]) -> f64 {
        parts.iter().map(|part| f64::from(f32::from_bits(u32::from(*part) << 16))).sum()
    }

    #[test]
    fn parts_add_up_to_the_number() {
        let bits = (0..200_000u32).map(|i| i.wrapping_mul(2_654_435_761));
        for number in bits.map(f32::from_bits).filter(|x| x.is_finite()) {
            let parts = split(number);
            // The third part is rounded to the unit of the number, unless it is subnormal.
            let least = f64::from(f32::MIN_POSITIVE.max(number.abs() * 2f32.powi(-24)));
            assert!((sum(parts) - f64::from(number)).abs() <= least, "{number:e} {parts:x?}");
        }
        for number in [0.0, 1.0, -0.5, 255.0, 1e-30, 3.0 * 2f32.powi(-100)] {
            assert_eq!(sum(split(number)), f64::from(number));
        }
    }

    #[test]
    fn parts_of_the_largest_numbers_are_finite() {
        for number in [f32::MAX, f32::MIN, f32::from_bits(0x7f7f_8000)] {
            let parts = split(number);
            assert!(parts.iter().all(|part| part & 0x7f80 != 0x7f80), "{parts:x?}");
            assert_eq!(sum(parts), f64::from(number));
        }
        for number in [f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(split(number), [(number.to_bits() >> 16) as u16, 0, 0]);
        }
        assert!(f32::from_bits(u32::from(split(f32::NAN)[0]) << 16).is_nan());
    }

    /// Packs a source with numbers of all kinds by each of both ways, and compares the words.
    #[test]
    fn vectors_pack_as_single_numbers_do() {
        let mut data: Vec<f32> =
            (0..20_000).map(|i| ((i * 7919) % 20_011) as f32 / 1001.0 - 10.0).collect();
        data[4000..4100].iter_mut().for_each(|x| *x *= 1e-38);
        data[5000] = f32::MAX;
        data[7000] = f32::MIN;
        for special in [None, Some(f32::INFINITY), Some(f32::NAN)] {
            if let Some(special) = special {
                data[2525] = special;
            }
            for lines in [1, 16, 31, 32, 33, 70] {
                for depths in [1, 2, 31, 32, 33, 77] {
                    for (line, depth) in [(101, 1), (1, 103)] {
                        compare::<true>(&data, (lines, depths), (line, depth));
                        compare::<false>(&data, (lines, depths), (line, depth));
                    }
                }
            }
        }
    }

    fn compare<const LEFT: bool>(
        data: &[f32],
        (lines, depths): (usize, usize),
        (line, depth): (isize, isize),
    ) {
        let units = depths.div_ceil(2 * WORDS);
        let panel = units * PARTS * PART_WORDS;
        let panels = lines.div_ceil(LINES);
        let start = data.as_ptr().cast();
        let (elem, pack, granule) = (Elem::F32, 2, 2 * WORDS);
        let src = Source { elem, pack, granule, start, line, depth, lines, depths, panel };
        let (mut got, mut want) = (vec![7u32; panels * panel], vec![7u32; panels * panel]);
        // SAFETY: the largest offset is below 20,000.
        unsafe {
            super::pack::<LEFT>(&src, got.as_mut_ptr());
            for (index, unit) in want.chunks_exact_mut(PARTS * PART_WORDS).enumerate() {
                let (first, from) = (index / units * LINES, index % units * 2 * WORDS);
                let part = Source {
                    start: src.at(first, from),
                    lines: LINES.min(lines - first),
                    depths: (2 * WORDS).min(depths - from),
                    ..src
                };
                if !any::<LEFT>(&part, unit.as_mut_ptr().cast()) {
                    unit[MARKED] = MARK;
                }
            }
        }
        // A NaN may have other bits.
        let is_same = |(got, want): (&u32, &u32)| {
            [0, 16].iter().all(|half| {
                let [got, want] = [got, want].map(|word| f32::from_bits(word >> half << 16));
                got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan())
            })
        };
        assert!(got.iter().zip(&want).all(is_same), "{LEFT} {lines} x {depths}, {line} {depth}");
    }
}
