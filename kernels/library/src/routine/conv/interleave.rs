//! Images and kernels in the words of the micro-kernels: an f32 number, or the bf16 numbers of two channels.

use super::direct::{Layout, Reads};
use crate::dtype::Elem;
use std::arch::x86_64::*;

/// Where the elements of a kernel are: those of its taps are side by side.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    /// Element type.
    pub(super) elem: Elem,
    /// Elements between two filters.
    pub(super) filter: usize,
    /// Elements between two channels.
    pub(super) channel: usize,
    /// Channels.
    pub(super) channels: usize,
    /// Taps.
    pub(super) taps: usize,
}

/// Writes the words of a filter at `from`: for each word of channels those of the given taps.
///
/// # Safety
/// The filter must be readable, `to` writable for its words.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn filter(kernel: &Kernel, from: *const u8, taps: &[usize], to: *mut u32) {
    let Kernel { elem, channel, channels, .. } = *kernel;
    let mut to = to;
    if elem == Elem::F32 {
        for c in 0..channels {
            let from = from.cast::<u32>().wrapping_add(c * channel);
            for &tap in taps {
                // SAFETY: taps lie inside the kernel.
                unsafe { *to = *from.add(tap) };
                to = to.wrapping_add(1);
            }
        }
        return;
    }
    let mut index = [0_u16; 32];
    let is_short = kernel.taps <= 32 && taps.len() <= 16;
    for (pair, &tap) in index.chunks_exact_mut(2).zip(taps) {
        pair.copy_from_slice(&[tap as u16, 32 + tap as u16]);
    }
    for c in (0..channels).step_by(2) {
        let low = from.cast::<u16>().wrapping_add(c * channel);
        let high = (c + 1 < channels).then(|| low.wrapping_add(channel));
        // SAFETY: masks and taps keep loads inside the kernel, and stores inside the words.
        unsafe {
            if is_short {
                let index = _mm512_loadu_si512(index.as_ptr().cast());
                let mask = u32::MAX >> (32 - kernel.taps);
                let first = _mm512_maskz_loadu_epi16(mask, low.cast());
                let mask = if high.is_some() { mask } else { 0 };
                let second = _mm512_maskz_loadu_epi16(mask, low.wrapping_add(channel).cast());
                let words = _mm512_permutex2var_epi16(first, index, second);
                let mask = ((1_u32 << taps.len()) - 1) as u16;
                _mm512_mask_storeu_epi32(to.cast(), mask, words);
            } else {
                for (i, &tap) in taps.iter().enumerate() {
                    let second = high.map_or(0, |high| u32::from(*high.add(tap)));
                    *to.add(i) = u32::from(*low.add(tap)) | second << 16;
                }
            }
        }
        to = to.wrapping_add(taps.len());
    }
}

/// Copies a row: rows are so short that calls of the library's function would show.
///
/// # Safety
/// Both must be valid for the bytes, and not overlap.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    for first in (0..bytes).step_by(64) {
        let mask = u64::MAX >> (64 - (bytes - first).min(64));
        // SAFETY: the mask keeps both inside the row.
        unsafe {
            let found = _mm512_maskz_loadu_epi8(mask, from.add(first).cast());
            _mm512_mask_storeu_epi8(to.add(first).cast(), mask, found);
        }
    }
}

/// Writes the planes of a block of rows of positions, from row `first` on, of the image at `from`.
///
/// # Safety
/// All channels of the image must be readable, `to` writable for the planes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn image(
    reads: &Reads,
    layout: &Layout,
    (elem, channels): (Elem, usize),
    from: *const u8,
    first: usize,
    to: *mut u32,
) {
    let [height, width] = reads.input;
    let step = size_of::<u32>() / elem.size();
    for channel in (0..channels).step_by(step) {
        for (number, phase) in layout.phases.iter().enumerate() {
            let plane = (channel / step * layout.phases.len() + number) * layout.phase_words();
            for row in 0..layout.rows {
                let line = Line {
                    width,
                    words: layout.words,
                    stride: reads.strides[1],
                    before: reads.low[1] as isize - phase[1] as isize,
                };
                let at = ((first + row) * reads.strides[0] + phase[0]).wrapping_sub(reads.low[0]);
                let to = to.wrapping_add(plane + row * layout.pitch);
                // SAFETY: rows lie inside the image and the plane.
                unsafe {
                    if at >= height {
                        std::slice::from_raw_parts_mut(to, layout.words).fill(0);
                        continue;
                    }
                    let low = elem.at(from, ((channel * height + at) * width) as isize);
                    let high = elem.at(low, (height * width) as isize);
                    match (elem, channel + 1 < channels) {
                        (Elem::F32, _) => line.copy(low.cast(), to),
                        (_, is_pair) => line.join(low.cast(), high.cast(), is_pair, to),
                    }
                }
            }
        }
    }
}

/// A row of an image, and of a plane: every `stride`-th element, after some zeros or elements that are left out.
struct Line {
    width: usize,
    words: usize,
    stride: usize,
    /// Zeros before the first element, were the stride 1.
    before: isize,
}

impl Line {
    /// The elements that `lanes` lanes read from a word on, as a mask, and where the first lane reads.
    fn lanes(&self, word: usize, lanes: usize) -> (u32, isize) {
        let at = (word * self.stride) as isize - self.before;
        let below = |n: isize| ((1_u64 << n.clamp(0, lanes as isize)) - 1) as u32;
        (below(self.width as isize - at) & !below(-at), at)
    }

    /// The element of a word, if it is no padding.
    fn element(&self, word: usize) -> Option<usize> {
        let at = (word * self.stride) as isize - self.before;
        (0..self.width as isize).contains(&at).then_some(at as usize)
    }

    /// The lanes of a vector of words that lie inside the row.
    fn inside(&self, word: usize) -> u16 {
        u16::MAX >> (16 - (self.words - word).min(16))
    }

    /// f32 elements.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn copy(&self, from: *const u32, to: *mut u32) {
        for word in (0..self.words).step_by(16) {
            let inside = self.inside(word);
            // SAFETY: masks and checks keep all accesses inside the rows.
            unsafe {
                if self.stride == 1 {
                    let (mask, at) = self.lanes(word, 16);
                    let found = from.wrapping_offset(at).cast();
                    let found = _mm512_maskz_loadu_epi32(mask as u16, found);
                    _mm512_mask_storeu_epi32(to.add(word).cast(), inside, found);
                    continue;
                }
                for word in word..self.words.min(word + 16) {
                    *to.add(word) = self.element(word).map_or(0, |at| *from.add(at));
                }
            }
        }
    }

    /// bf16 elements of two rows, of which the second may be missing.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn join(&self, low: *const u16, high: *const u16, is_pair: bool, to: *mut u32) {
        let keep = |mask: u32| if is_pair { mask } else { 0 };
        for word in (0..self.words).step_by(16) {
            let inside = self.inside(word);
            // SAFETY: masks and checks keep all accesses inside the rows.
            unsafe {
                let words = match self.stride {
                    1 => {
                        let (mask, at) = self.lanes(word, 16);
                        let load = |row: *const u16, mask: u32| {
                            let row = row.wrapping_offset(at).cast();
                            _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask as u16, row))
                        };
                        let second = _mm512_slli_epi32::<16>(load(high, keep(mask)));
                        _mm512_or_si512(load(low, mask), second)
                    }
                    2 => {
                        let (mask, at) = self.lanes(word, 32);
                        let load = |row: *const u16, mask: u32| {
                            _mm512_maskz_loadu_epi16(mask, row.wrapping_offset(at).cast())
                        };
                        let first = _mm512_and_si512(load(low, mask), _mm512_set1_epi32(0xffff));
                        let second = _mm512_slli_epi32::<16>(load(high, keep(mask)));
                        _mm512_or_si512(first, second)
                    }
                    _ => {
                        let mut words = [0_u32; 16];
                        for (i, value) in words.iter_mut().enumerate() {
                            if let Some(at) = self.element(word + i) {
                                let second = if is_pair { u32::from(*high.add(at)) } else { 0 };
                                *value = u32::from(*low.add(at)) | second << 16;
                            }
                        }
                        _mm512_loadu_si512(words.as_ptr().cast())
                    }
                };
                _mm512_mask_storeu_epi32(to.add(word).cast(), inside, words);
            }
        }
    }
}
