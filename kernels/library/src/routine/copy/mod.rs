//! Strided copies between arrays of one element type: permutations, slices, broadcasts.
//!
//! [`StridedCopy::new`] normalizes the dimensions once: it drops those of size one, orders the others by destination stride, and
//! merges contiguous neighbors. The rest is a run of bytes, a blocked transpose of two dimensions, or a strided loop, below outer
//! dimensions over which chunks are distributed.

mod transpose;

use crate::pool::{Pool, Shareable};
use serde::{Deserialize, Serialize};
use transpose::{SQUARE, transpose};

/// Bytes that a chunk of work copies, about.
const CHUNK: usize = 1 << 17;

/// One dimension; strides count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dim {
    pub(crate) size: usize,
    pub(crate) src: isize,
    pub(crate) dst: isize,
}

const UNIT: Dim = Dim { size: 1, src: 0, dst: 0 };

/// How the innermost dimensions are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Inner {
    /// Contiguous on both sides.
    Run,
    /// The first dimension is contiguous in the source, the second in the destination.
    Transpose,
    /// Any strides.
    Walk,
}

/// A copy of an N-dimensional array into another layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Dims", try_from = "Dims")]
pub struct StridedCopy {
    /// Dimensions outside `rows` and `cols`, slowest first.
    outer: Vec<Dim>,
    /// The second innermost dimension.
    rows: Dim,
    /// The innermost dimension.
    cols: Dim,
    inner: Inner,
    /// Bytes of an element.
    size: usize,
    empty: bool,
}

/// A copy as it is written down: what its normal form is made of.
#[derive(Serialize, Deserialize)]
struct Dims {
    /// Size, stride in the source and stride in the destination of each dimension, in elements.
    dims: Vec<(usize, isize, isize)>,
    /// Bytes of an element.
    bytes: usize,
}

impl From<StridedCopy> for Dims {
    fn from(copy: StridedCopy) -> Dims {
        let all = copy.outer.iter().chain([&copy.rows, &copy.cols]);
        let dims = all.filter(|d| d.size != 1).map(|d| (d.size, d.src, d.dst)).collect();
        Dims { dims, bytes: copy.size }
    }
}

impl TryFrom<Dims> for StridedCopy {
    type Error = String;

    fn try_from(Dims { dims, bytes }: Dims) -> Result<StridedCopy, String> {
        if !matches!(bytes, 1 | 2 | 4 | 8) {
            return Err(format!("no elements of {bytes} bytes"));
        }
        let list = |f: fn(&(usize, isize, isize)) -> isize| dims.iter().map(f).collect::<Vec<_>>();
        let sizes: Vec<usize> = dims.iter().map(|d| d.0).collect();
        Ok(StridedCopy::new(&sizes, &list(|d| d.1), &list(|d| d.2), bytes))
    }
}

impl StridedCopy {
    /// A copy of `shape`; strides count elements and may be negative, those of the source also zero
    /// (broadcast). The elements of the destination must be distinct.
    ///
    /// # Panics
    /// If the lists differ in length, or an element has not 1, 2, 4 or 8 bytes.
    pub fn new(shape: &[usize], src: &[isize], dst: &[isize], elem_bytes: usize) -> StridedCopy {
        assert!(shape.len() == src.len() && shape.len() == dst.len(), "one stride per dimension");
        assert!(matches!(elem_bytes, 1 | 2 | 4 | 8), "no elements of {elem_bytes} bytes");
        let mut dims: Vec<Dim> = shape
            .iter()
            .zip(src.iter().zip(dst))
            .map(|(&size, (&src, &dst))| Dim { size, src, dst })
            .filter(|dim| dim.size != 1)
            .collect();
        dims.sort_by_key(|dim| {
            (std::cmp::Reverse(dim.dst.abs()), std::cmp::Reverse(dim.src.abs()))
        });
        let mut merged: Vec<Dim> = Vec::with_capacity(dims.len());
        for dim in dims {
            match merged.last_mut() {
                Some(last)
                    if last.src == dim.src * dim.size as isize
                        && last.dst == dim.dst * dim.size as isize =>
                {
                    *last = Dim { size: last.size * dim.size, ..dim };
                }
                _ => merged.push(dim),
            }
        }
        let cols = merged.pop().unwrap_or(UNIT);
        let run = cols.size == 1 || (cols.src == 1 && cols.dst == 1);
        let contiguous = merged.iter().position(|dim| dim.src == 1 && dim.size > 1);
        let (inner, rows) = match contiguous {
            Some(index) if !run && cols.dst == 1 => (Inner::Transpose, merged.remove(index)),
            _ => (if run { Inner::Run } else { Inner::Walk }, merged.pop().unwrap_or(UNIT)),
        };
        let empty = shape.contains(&0);
        StridedCopy { outer: merged, rows, cols, inner, size: elem_bytes, empty }
    }

    /// A copy of a row-major array of `shape` with its dimensions in the order `axes`, as ONNX
    /// Transpose: dimension `i` of the result is dimension `axes[i]` of the source.
    ///
    /// # Panics
    /// If `axes` is not as long as `shape` or not a permutation.
    pub fn permute(shape: &[usize], axes: &[usize], elem_bytes: usize) -> StridedCopy {
        let src = row_major(shape);
        let mut seen = vec![false; shape.len()];
        for &axis in axes {
            assert!(!std::mem::replace(&mut seen[axis], true), "axis {axis} occurs twice");
        }
        let out: Vec<usize> = axes.iter().map(|&axis| shape[axis]).collect();
        let src: Vec<isize> = axes.iter().map(|&axis| src[axis]).collect();
        StridedCopy::new(&out, &src, &row_major(&out), elem_bytes)
    }

    /// Runs several copies. Those that cut the same rows into parts, as of a concatenation along a later axis, pass over the rows together,
    /// so that what lies side by side is copied at one time.
    ///
    /// # Safety
    /// As for [`StridedCopy::run`], of each; no copy writes what another reads or writes.
    pub unsafe fn run_all(pool: &Pool, copies: &[(&StridedCopy, *const u8, *mut u8)]) {
        let rows = copies.first().map_or(0, |(copy, ..)| copy.rows.size);
        let shares = |copy: &StridedCopy| {
            let is_plain = copy.outer.is_empty() && copy.inner == Inner::Run && !copy.empty;
            is_plain && copy.rows.size == rows
        };
        if rows <= 1 || copies.len() <= 1 || !copies.iter().all(|(copy, ..)| shares(copy)) {
            for (copy, src, dst) in copies {
                // SAFETY: passed on.
                unsafe { copy.run(pool, *src, *dst) };
            }
            return;
        }
        let row_bytes: usize = copies.iter().map(|(copy, ..)| copy.cols.size * copy.size).sum();
        let step = (CHUNK / row_bytes.max(1)).max(1);
        let copies = Shareable::new(copies);
        pool.run(rows.div_ceil(step), &|chunk| {
            let first = chunk * step;
            for (copy, src, dst) in copies.get() {
                let (rows, size) = (copy.rows, copy.size as isize);
                let src = src.wrapping_offset(first as isize * rows.src * size);
                let dst = dst.wrapping_offset(first as isize * rows.dst * size);
                let rows = Dim { size: step.min(rows.size - first), ..rows };
                // SAFETY: rows are disjoint parts of the caller's arrays.
                unsafe { copy.plane(rows, copy.cols, src, dst) };
            }
        });
    }

    /// Copies.
    ///
    /// # Safety
    /// `src` and `dst` must be aligned to the element and valid for every element that the shape
    /// and strides reach, and must not overlap.
    pub unsafe fn run(&self, pool: &Pool, src: *const u8, dst: *mut u8) {
        if self.empty {
            return;
        }
        let outer: usize = self.outer.iter().map(|dim| dim.size).product();
        let line = self.cols.size * self.size;
        let row_step = match self.inner {
            Inner::Transpose => SQUARE,
            _ => (CHUNK / line.max(1)).max(1).min(self.rows.size),
        };
        let col_step = (CHUNK / self.size / row_step).next_multiple_of(SQUARE);
        let (row_parts, col_parts) =
            (self.rows.size.div_ceil(row_step), self.cols.size.div_ceil(col_step));
        let units = outer * row_parts * col_parts;
        let unit_bytes = row_step.min(self.rows.size) * col_step.min(self.cols.size) * self.size;
        let per_chunk = (CHUNK / unit_bytes.max(1)).max(1);
        let (src, dst) = (Shareable::new(src), Shareable::new(dst));
        pool.run(units.div_ceil(per_chunk), &|chunk| {
            for unit in chunk * per_chunk..units.min((chunk + 1) * per_chunk) {
                let (mut index, part) =
                    (unit / (row_parts * col_parts), unit % (row_parts * col_parts));
                let (row, col) = (part / col_parts * row_step, part % col_parts * col_step);
                let mut from = row as isize * self.rows.src + col as isize * self.cols.src;
                let mut to = row as isize * self.rows.dst + col as isize * self.cols.dst;
                for dim in self.outer.iter().rev() {
                    let i = (index % dim.size) as isize;
                    index /= dim.size;
                    from += i * dim.src;
                    to += i * dim.dst;
                }
                let rows = Dim { size: row_step.min(self.rows.size - row), ..self.rows };
                let cols = Dim { size: col_step.min(self.cols.size - col), ..self.cols };
                let from = src.get().wrapping_offset(from * self.size as isize);
                let to = dst.get().wrapping_offset(to * self.size as isize);
                // SAFETY: units are disjoint parts of the caller's arrays.
                unsafe { self.plane(rows, cols, from, to) };
            }
        });
    }

    unsafe fn plane(&self, rows: Dim, cols: Dim, src: *const u8, dst: *mut u8) {
        // SAFETY: passed on.
        unsafe {
            match (self.inner, self.size) {
                (Inner::Run, size) => {
                    let steps = [rows.src, rows.dst].map(|stride| stride * size as isize);
                    // Short runs take less time without a call.
                    match cols.size * size {
                        4 => runs::<4>(rows.size, steps, src, dst),
                        8 => runs::<8>(rows.size, steps, src, dst),
                        16 => runs::<16>(rows.size, steps, src, dst),
                        32 => runs::<32>(rows.size, steps, src, dst),
                        64 => runs::<64>(rows.size, steps, src, dst),
                        bytes => {
                            for row in 0..rows.size as isize {
                                let (from, to) =
                                    (src.offset(row * steps[0]), dst.offset(row * steps[1]));
                                std::ptr::copy_nonoverlapping(from, to, bytes);
                            }
                        }
                    }
                }
                (Inner::Transpose, 1) => transpose::<u8>(rows, cols, src.cast(), dst.cast()),
                (Inner::Transpose, 2) => transpose::<u16>(rows, cols, src.cast(), dst.cast()),
                (Inner::Transpose, 4) => transpose::<u32>(rows, cols, src.cast(), dst.cast()),
                (Inner::Transpose, _) => transpose::<u64>(rows, cols, src.cast(), dst.cast()),
                (Inner::Walk, 1) => walk::<u8>(rows, cols, src.cast(), dst.cast()),
                (Inner::Walk, 2) => walk::<u16>(rows, cols, src.cast(), dst.cast()),
                (Inner::Walk, 4) => walk::<u32>(rows, cols, src.cast(), dst.cast()),
                (Inner::Walk, _) => walk::<u64>(rows, cols, src.cast(), dst.cast()),
            }
        }
    }
}

/// Strides of a contiguous array, the last dimension fastest.
fn row_major(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i] as isize;
    }
    strides
}

/// Copies runs of so many bytes.
unsafe fn runs<const BYTES: usize>(
    count: usize,
    [from, to]: [isize; 2],
    src: *const u8,
    dst: *mut u8,
) {
    for run in 0..count as isize {
        // SAFETY: the caller vouches for the elements.
        unsafe {
            let from = src.offset(run * from).cast::<[u8; BYTES]>();
            dst.offset(run * to).cast::<[u8; BYTES]>().write(from.read());
        }
    }
}

/// Copies two dimensions.
pub(crate) unsafe fn copy_plane<T: Copy>(rows: Dim, cols: Dim, src: *const T, dst: *mut T) {
    // SAFETY: the caller vouches for the elements.
    unsafe {
        match rows.src == 1 && cols.dst == 1 {
            true => transpose(rows, cols, src, dst),
            false => walk(rows, cols, src, dst),
        }
    }
}

unsafe fn walk<T: Copy>(rows: Dim, cols: Dim, src: *const T, dst: *mut T) {
    for row in 0..rows.size as isize {
        for col in 0..cols.size as isize {
            // SAFETY: the caller vouches for the elements.
            unsafe {
                let value = *src.offset(row * rows.src + col * cols.src);
                *dst.offset(row * rows.dst + col * cols.dst) = value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(shape: &[usize], src: &[isize], dst: &[isize], src_at: usize, len: (usize, usize)) {
        fn typed<T: Copy + PartialEq + std::fmt::Debug>(
            from: impl Fn(usize) -> T,
            blank: T,
            (shape, src, dst): (&[usize], &[isize], &[isize]),
            src_at: usize,
            len: (usize, usize),
        ) {
            let input: Vec<T> = (0..len.0).map(from).collect();
            let mut want = vec![blank; len.1];
            let total: usize = shape.iter().product();
            for flat in 0..total {
                let (mut rest, mut i, mut o) = (flat, src_at as isize, 0);
                for d in (0..shape.len()).rev() {
                    i += (rest % shape[d]) as isize * src[d];
                    o += (rest % shape[d]) as isize * dst[d];
                    rest /= shape[d];
                }
                want[o as usize] = input[i as usize];
            }
            for threads in [1, 3] {
                let mut got = vec![blank; len.1];
                let copy = StridedCopy::new(shape, src, dst, size_of::<T>());
                // SAFETY: the reference above stayed within the same bounds.
                unsafe {
                    let from = input.as_ptr().add(src_at).cast();
                    copy.run(&Pool::new(threads), from, got.as_mut_ptr().cast());
                }
                assert!(got == want, "{shape:?} {src:?} {dst:?} {} bytes", size_of::<T>());
            }
        }
        let layout = (shape, src, dst);
        typed(|i| (i % 251) as u8, 255, layout, src_at, len);
        typed(|i| (i % 65_521) as u16, u16::MAX, layout, src_at, len);
        typed(|i| i as u32, u32::MAX, layout, src_at, len);
        typed(|i| i as u64, u64::MAX, layout, src_at, len);
    }

    #[test]
    fn equals_the_naive_copy() {
        check(&[], &[], &[], 0, (1, 1));
        check(&[7, 0, 3], &[0, 3, 1], &[0, 3, 1], 0, (1, 1));
        check(&[100_003], &[1], &[1], 0, (100_003, 100_003));
        check(&[3, 5, 7], &[35, 7, 1], &[35, 7, 1], 0, (105, 105));
        // Transposes, also inside a batch, with tails.
        check(&[67, 129], &[1, 67], &[129, 1], 0, (67 * 129, 67 * 129));
        check(&[300, 1001], &[1, 300], &[1001, 1], 0, (300_300, 300_300));
        check(&[2, 33, 3, 65], &[6435, 1, 33 * 65, 33], &[6435, 195, 65, 1], 0, (12_870, 12_870));
        // [batch, head, time, dim] from [batch, time, head, dim].
        check(&[2, 4, 9, 16], &[576, 16, 64, 1], &[576, 144, 16, 1], 0, (1152, 1152));
        // A slice into a wider destination, strided on both sides.
        check(&[9, 11], &[40, 3], &[64, 2], 5, (400, 600));
        // Broadcast and reversal of the source.
        check(&[6, 10], &[0, 1], &[10, 1], 0, (10, 60));
        check(&[6, 10], &[1, 0], &[10, 1], 0, (6, 60));
        check(&[6, 10], &[10, -1], &[10, 1], 9, (60, 60));
        check(&[6, 10], &[-10, 1], &[10, 1], 50, (60, 60));
    }

    /// Parts of rows of 40 elements, in both directions, and parts that are whole rows.
    #[test]
    fn parts_of_rows_are_copied_together() {
        for (rows, sizes) in [(1000, [1, 2, 4, 8, 16, 9]), (1, [3, 1, 20, 2, 4, 10])] {
            let whole: Vec<u32> = (0..rows * 40).collect();
            let empty = |size: &usize| vec![0; rows as usize * size];
            let mut parts: Vec<Vec<u32>> = sizes.iter().map(empty).collect();
            let copy = |size: usize, from: usize, to: usize| {
                let strides = [from as isize, 1];
                StridedCopy::new(&[rows as usize, size], &strides, &[to as isize, 1], 4)
            };
            let starts = sizes.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n)));
            let starts: Vec<usize> = starts.collect();
            let out: Vec<StridedCopy> = sizes.iter().map(|&n| copy(n, 40, n)).collect();
            let back: Vec<StridedCopy> = sizes.iter().map(|&n| copy(n, n, 40)).collect();
            let mut again = vec![0_u32; whole.len()];
            // SAFETY: the parts and the whole have these shapes.
            unsafe {
                let pool = Pool::new(3);
                let from = |i: usize| whole.as_ptr().add(starts[i]).cast::<u8>();
                let all: Vec<_> = (0..6)
                    .map(|i| (&out[i], from(i), parts[i].as_mut_ptr().cast::<u8>()))
                    .collect();
                StridedCopy::run_all(&pool, &all);
                let to = again.as_mut_ptr();
                let all: Vec<_> = (0..6)
                    .map(|i| (&back[i], parts[i].as_ptr().cast(), to.add(starts[i]).cast()))
                    .collect();
                StridedCopy::run_all(&pool, &all);
            }
            assert_eq!(again, whole);
            for (part, (&start, &size)) in parts.iter().zip(starts.iter().zip(&sizes)) {
                let row = |r: usize| &whole[r * 40 + start..][..size];
                assert!((0..rows as usize).all(|r| part[r * size..][..size] == *row(r)));
            }
        }
    }

    #[test]
    fn permutes_as_onnx() {
        let input: Vec<u32> = (0..24).collect();
        let mut out = vec![0u32; 24];
        // SAFETY: both vectors have 24 elements.
        unsafe {
            StridedCopy::permute(&[2, 3, 4], &[2, 0, 1], 4).run(
                &Pool::new(1),
                input.as_ptr().cast(),
                out.as_mut_ptr().cast(),
            );
        }
        for (i, value) in out.iter().enumerate() {
            let (a, b, c) = (i / 6, i / 3 % 2, i % 3);
            assert_eq!(*value as usize, b * 12 + c * 4 + a);
        }
    }
}
