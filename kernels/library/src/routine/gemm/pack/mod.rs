//! Packs operands into panels for the micro-kernel.
//!
//! A panel contains `W` rows of A (or columns of B), its *lines*, in 32-bit words of one depth as f32, to which numbers of 16 bits are
//! widened, or of two depths as bf16, the lower depth in the lower half. First come the `U` first words of each line, then the next `U` of
//! each, and so on: whatever the micro-kernel loads at once.
//! Lines and depths beyond the operand are zero, up to the granule of the micro-kernel. Nothing is written outside of the depths of a panel,
//! so that threads may pack parts of one operand.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
#[cfg(target_arch = "x86_64")]
pub(super) mod split;

use crate::dtype::Elem;

/// The part of an operand to pack.
#[derive(Clone, Copy)]
pub(super) struct Source {
    /// Element type.
    pub(super) elem: Elem,
    /// Depths in a word, 1 or 2.
    pub(super) pack: usize,
    /// Depths are filled up with zeros to a multiple of this.
    pub(super) granule: usize,
    /// Depth 0 of line 0.
    pub(super) start: *const u8,
    /// Distance between two lines, in elements.
    pub(super) line: isize,
    /// Distance between two depths, in elements.
    pub(super) depth: isize,
    /// Number of lines.
    pub(super) lines: usize,
    /// Number of depths.
    pub(super) depths: usize,
    /// Words between two packed panels.
    pub(super) panel: usize,
}

impl Source {
    /// Words of a line of the panel.
    fn panel_words(&self) -> usize {
        self.depths.next_multiple_of(self.granule) / self.pack
    }

    /// The element at a line and a depth.
    fn at(&self, line: usize, depth: usize) -> *const u8 {
        let element = line as isize * self.line + depth as isize * self.depth;
        self.elem.at(self.start, element)
    }

    /// The word of a line that begins at a depth.
    unsafe fn word(&self, line: usize, depth: usize) -> u32 {
        if line >= self.lines || depth >= self.depths {
            return 0;
        }
        // SAFETY: the line and the depths are inside the source.
        unsafe {
            match self.pack {
                1 => self.elem.load(self.at(line, depth), 0).to_bits(),
                _ => {
                    let half = |depth: usize| {
                        let inside = depth < self.depths;
                        let at = self.at(line, depth).cast::<u16>();
                        if inside { u32::from(at.read_unaligned()) } else { 0 }
                    };
                    half(depth) | half(depth + 1) << 16
                }
            }
        }
    }
}

/// Packs any strides, one word at a time, as `U` words of each of `W` lines.
///
/// # Safety
/// The source must be readable, `out` writable for all panels.
pub(super) unsafe fn any<const W: usize, const U: usize>(src: &Source, out: *mut u32) {
    for (panel, first) in (0..src.lines).step_by(W).enumerate() {
        for unit in (0..src.panel_words()).step_by(U) {
            for lane in 0..W {
                for word in 0..U {
                    // SAFETY: inside the panel; the source is readable.
                    unsafe {
                        let value = src.word(first + lane, (unit + word) * src.pack);
                        *out.add(panel * src.panel + unit * W + lane * U + word) = value;
                    }
                }
            }
        }
    }
}

/// As [`any`], for bf16 lines whose depths are contiguous.
///
/// # Safety
/// As for [`any`].
pub(super) unsafe fn units<const W: usize, const U: usize>(src: &Source, out: *mut u32) {
    for (panel, first) in (0..src.lines).step_by(W).enumerate() {
        for lane in 0..W {
            let line = first + lane;
            for unit in (0..src.panel_words()).step_by(U) {
                let to = out.wrapping_add(panel * src.panel + unit * W + lane * U);
                // SAFETY: inside the panel; the source is readable.
                unsafe {
                    if line < src.lines && (unit + U) * 2 <= src.depths {
                        let words = src.at(line, unit * 2).cast::<[u32; U]>().read_unaligned();
                        to.cast::<[u32; U]>().write(words);
                    } else {
                        for word in 0..U {
                            *to.add(word) = src.word(line, (unit + word) * 2);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares a packing of all strides with [`any`], and that with the operand.
    fn check<const W: usize, const U: usize>(
        (elem, pack, granule): (Elem, usize, usize),
        run: unsafe fn(&Source, *mut u32),
    ) {
        let data: Vec<u16> = (0..80_000u32).map(|i| (i % 65_521) as u16 + 1).collect();
        for lines in [1, 5, 6, 11, 12, 13, 31, 32, 33, 70] {
            for depths in [1_usize, 2, 3, 7, 8, 9, 30, 31, 32, 33, 64, 77] {
                for (line, depth) in [(101, 1), (1, 103), (211, 3)] {
                    let start = data.as_ptr().cast();
                    let panel = depths.next_multiple_of(granule) / pack * W;
                    let src =
                        Source { elem, pack, granule, start, line, depth, lines, depths, panel };
                    let panels = lines.div_ceil(W);
                    let mut got = vec![7u32; panels * src.panel + 16];
                    let mut want = got.clone();
                    // SAFETY: the largest offset is below 40,000.
                    unsafe {
                        run(&src, got.as_mut_ptr());
                        any::<W, U>(&src, want.as_mut_ptr());
                    }
                    assert!(got == want, "{elem:?} {W} {lines} {depths} {line} {depth}");
                    let last = depths - 1;
                    let word = want[last / pack / U * U * W + last / pack % U];
                    let at = last * depth as usize * elem.size() / size_of::<u16>();
                    match (elem, pack) {
                        (Elem::F32, _) => {
                            assert_eq!(word, u32::from(data[at]) | u32::from(data[at + 1]) << 16);
                        }
                        (Elem::F16, _) => {
                            let number = half::f16::from_bits(data[at]).to_f32();
                            assert_eq!(word, number.to_bits());
                        }
                        (Elem::BF16, 1) => assert_eq!(word, u32::from(data[at]) << 16),
                        (Elem::BF16, _) => {
                            assert_eq!(word >> (last % 2 * 16) & 0xffff, u32::from(data[at]));
                        }
                    }
                }
            }
        }
    }

    const SINGLE: [(Elem, usize, usize); 3] =
        [(Elem::F32, 1, 1), (Elem::BF16, 1, 1), (Elem::F16, 1, 1)];

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn all_stride_cases_pack_alike_with_avx512() {
        if crate::simd::level() >= crate::simd::AVX512 {
            for case in SINGLE.into_iter().chain([(Elem::BF16, 2, 2)]) {
                check::<12, 1>(case, avx512::pack_a);
                check::<32, 1>(case, avx512::pack_b);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn all_stride_cases_pack_alike_for_amx() {
        check::<32, 16>((Elem::BF16, 2, 32), amx::pack_a);
        check::<32, 1>((Elem::BF16, 2, 32), amx::pack_b);
    }

    #[cfg(target_arch = "aarch64")]
    #[test]
    fn all_stride_cases_pack_alike_with_neon() {
        for case in SINGLE {
            check::<12, 1>(case, neon::pack_a);
            check::<8, 1>(case, neon::pack_b);
        }
        check::<12, 2>((Elem::BF16, 2, 4), neon::pack_a_fours);
        check::<8, 2>((Elem::BF16, 2, 4), neon::pack_b_fours);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn all_stride_cases_pack_alike_with_avx2() {
        if crate::simd::level() >= crate::simd::AVX2 {
            for case in SINGLE {
                check::<6, 1>(case, avx2::pack_a);
                check::<16, 1>(case, avx2::pack_b);
            }
        }
    }
}
