//! Packing for NEON, in loops that the compiler vectorizes: f32 numbers, or four bf16 depths of each line.

use super::{Source, any, units};
use crate::dtype::Elem;
use crate::routine::convert::to_f32;
use crate::routine::gemm::neon::{MR, NR};
use crate::routine::gemm::neon_bf16::WORDS;

/// Depths of a line that are widened at a time.
const DEPTHS: usize = 64;

/// Packs rows of A as f32.
///
/// # Safety
/// The source must be readable, `out` writable for all panels.
pub(in crate::routine::gemm) unsafe fn pack_a(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe { pack::<MR>(src, out) };
}

/// Packs columns of B as f32.
///
/// # Safety
/// As for [`pack_a`].
pub(in crate::routine::gemm) unsafe fn pack_b(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe { pack::<NR>(src, out) };
}

/// Packs rows of A as groups of four bf16 depths.
///
/// # Safety
/// As for [`pack_a`].
pub(in crate::routine::gemm) unsafe fn pack_a_fours(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe { pack_fours::<MR>(src, out) };
}

/// Packs columns of B as groups of four bf16 depths.
///
/// # Safety
/// As for [`pack_a`].
pub(in crate::routine::gemm) unsafe fn pack_b_fours(src: &Source, out: *mut u32) {
    // SAFETY: passed on.
    unsafe { pack_fours::<NR>(src, out) };
}

unsafe fn pack<const W: usize>(src: &Source, out: *mut u32) {
    for (panel, first) in (0..src.lines).step_by(W).enumerate() {
        let out = out.wrapping_add(panel * src.panel).cast::<f32>();
        let lines = W.min(src.lines - first);
        // SAFETY: all elements are inside the source and the panel.
        unsafe {
            if src.line == 1 {
                for depth in 0..src.depths {
                    let mut words = [0f32; W];
                    to_f32(src.at(first, depth), src.elem, &mut words[..lines]);
                    out.add(depth * W).cast::<[f32; W]>().write(words);
                }
            } else if src.depth == 1 {
                for lane in 0..W {
                    along_line::<W>(src, (lane < lines).then_some(first + lane), out.add(lane));
                }
            } else {
                let rest = Source { start: src.at(first, 0), lines, ..*src };
                any::<W, 1>(&rest, out.cast());
            }
        }
    }
}

/// Packs the contiguous depths of a line, or zeros, to every `W`-th word.
unsafe fn along_line<const W: usize>(src: &Source, line: Option<usize>, out: *mut f32) {
    let mut words = [0f32; DEPTHS];
    for first in (0..src.depths).step_by(DEPTHS) {
        let count = DEPTHS.min(src.depths - first);
        // SAFETY: all elements are inside the source and the panel.
        unsafe {
            if let Some(line) = line {
                to_f32(src.at(line, first), src.elem, &mut words[..count]);
            }
            for (i, word) in words[..count].iter().enumerate() {
                *out.add((first + i) * W) = *word;
            }
        }
    }
}

unsafe fn pack_fours<const W: usize>(src: &Source, out: *mut u32) {
    debug_assert!(src.elem == Elem::BF16);
    // SAFETY: passed on.
    unsafe {
        match (src.line, src.depth) {
            (_, 1) => units::<W, WORDS>(src, out),
            (1, _) => across_depth::<W>(src, out),
            _ => any::<W, WORDS>(src, out),
        }
    }
}

/// Lines that are contiguous across a depth: interleaves four depths of `W` lines.
unsafe fn across_depth<const W: usize>(src: &Source, out: *mut u32) {
    for (panel, first) in (0..src.lines).step_by(W).enumerate() {
        let lines = W.min(src.lines - first);
        for depth in (0..src.depths).step_by(2 * WORDS) {
            let mut four = [[0u16; W]; 2 * WORDS];
            for (i, row) in four.iter_mut().enumerate().take(src.depths - depth) {
                // SAFETY: the lines are inside the source.
                let from = unsafe {
                    std::slice::from_raw_parts(src.at(first, depth + i).cast::<u16>(), lines)
                };
                row[..lines].copy_from_slice(from);
            }
            let to = out.wrapping_add(panel * src.panel + depth / 2 * W).cast::<[u16; 2 * WORDS]>();
            for lane in 0..W {
                // SAFETY: inside the panel.
                unsafe { to.add(lane).write(four.map(|row| row[lane])) };
            }
        }
    }
}
