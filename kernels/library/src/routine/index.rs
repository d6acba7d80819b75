//! Indexed reads and writes: ONNX Gather, GatherElements, GatherND and their gradients and scatters.
//!
//! Elements are moved as blocks of `block` bytes. A negative index counts from the end; an index outside its axis is an error, never
//! undefined behavior. Writes run on one thread in ascending order of the indices, so the last write to an element wins, and sums have
//! one order.

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
pub use crate::routine::embedding::IndexElem;
use serde::{Deserialize, Serialize};

/// Blocks per chunk of work are at least this many bytes.
const CHUNK_BYTES: usize = 1 << 15;

/// One axis of the data that an index runs along.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Axis {
    /// Its size.
    pub size: usize,
    /// Blocks between two of its elements.
    pub stride: usize,
}

/// Where the blocks of an indexed operation lie.
///
/// Block `i` of the indexed side is at `Σ index_d(i)·stride_d + base(i)` blocks of the data, where `i`
/// counts the places of the grid `dims`; `tuple(i)`, the first of the `axes.len()` consecutive indices
/// of the place, is `Σ coordinate_j·index_strides_j`, and the base `Σ coordinate_j·base_strides_j`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Indexed {
    /// The grid of places.
    pub dims: Vec<usize>,
    /// Indices between neighbors along each axis of the grid.
    pub index_strides: Vec<usize>,
    /// Blocks of the data between neighbors along each axis of the grid.
    pub base_strides: Vec<usize>,
    /// The axes of the data that one tuple of indices runs along.
    pub axes: Vec<Axis>,
    /// Bytes of a block.
    pub block: usize,
    /// Type of the indices.
    pub index: IndexElem,
}

/// An index outside of its axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange {
    /// The index.
    pub index: i64,
    /// Size of the axis.
    pub size: usize,
}

impl std::fmt::Display for OutOfRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "index {} is outside of {} elements", self.index, self.size)
    }
}

impl std::error::Error for OutOfRange {}

/// What a write does with the element that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Combine {
    /// The new element takes its place.
    Replace,
    /// Their sum.
    Add,
    /// Their product.
    Mul,
    /// The larger; NaN if either is.
    Max,
    /// The smaller; NaN if either is.
    Min,
}

impl Indexed {
    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.dims.iter().product()
    }

    /// The first index of the tuple of a place, and the base of its block.
    fn offsets(&self, mut place: usize) -> (usize, usize) {
        let (mut first, mut base) = (0, 0);
        for axis in (0..self.dims.len()).rev() {
            let coordinate = place % self.dims[axis];
            place /= self.dims[axis];
            first += coordinate * self.index_strides[axis];
            base += coordinate * self.base_strides[axis];
        }
        (first, base)
    }

    /// Blocks of the data between its base and the block that the tuple from index `first` on names.
    ///
    /// # Safety
    /// `ids` must be valid for the tuple.
    #[inline]
    unsafe fn named(&self, ids: *const u8, first: usize) -> Result<usize, OutOfRange> {
        let mut block = 0;
        for (d, axis) in self.axes.iter().enumerate() {
            // SAFETY: the caller vouches for the tuple.
            let index = unsafe {
                match self.index {
                    IndexElem::I64 => ids.cast::<i64>().add(first + d).read(),
                    IndexElem::I32 => i64::from(ids.cast::<i32>().add(first + d).read()),
                }
            };
            let size = axis.size as i64;
            let wrapped = if index < 0 { index.saturating_add(size) } else { index };
            if !(0..size).contains(&wrapped) {
                return Err(OutOfRange { index, size: axis.size });
            }
            block += wrapped as usize * axis.stride;
        }
        Ok(block)
    }

    /// Calls `visit` with places of a range and their blocks, in order; the coordinates of neighbors along the last axis are found once.
    ///
    /// # Safety
    /// `ids` must be valid for the tuples of these places.
    #[inline]
    unsafe fn walk(
        &self,
        ids: *const u8,
        places: std::ops::Range<usize>,
        mut visit: impl FnMut(usize, usize),
    ) -> Result<(), OutOfRange> {
        let last = |strides: &[usize]| strides.last().copied().unwrap_or(0);
        let (id_step, base_step) = (last(&self.index_strides), last(&self.base_strides));
        let inner = self.dims.last().copied().unwrap_or(1);
        let mut begin = places.start;
        while begin < places.end {
            let end = places.end.min((begin / inner + 1) * inner);
            let (first, base) = self.offsets(begin);
            for (i, place) in (begin..end).enumerate() {
                // SAFETY: passed on.
                let named = unsafe { self.named(ids, first + i * id_step)? };
                visit(place, base + i * base_step + named);
            }
            begin = end;
        }
        Ok(())
    }

    /// `out[i] = data[block(i)]`.
    ///
    /// # Errors
    /// If an index is outside of its axis; what `out` then holds is unspecified.
    ///
    /// # Safety
    /// The pointers must be valid for the shapes; `out` must not overlap the others.
    pub unsafe fn gather(
        &self,
        pool: &Pool,
        data: *const u8,
        ids: *const u8,
        out: *mut u8,
    ) -> Result<(), OutOfRange> {
        let blocks = self.blocks();
        if blocks == 0 {
            return Ok(());
        }
        let per_chunk = (CHUNK_BYTES / self.block.max(1)).clamp(1, blocks);
        let failure = std::sync::Mutex::new(None);
        let at = Shareable::new((data, ids, out));
        pool.run(blocks.div_ceil(per_chunk), &|chunk| {
            let (data, ids, out) = at.get();
            let places = chunk * per_chunk..blocks.min((chunk + 1) * per_chunk);
            // SAFETY: each place writes its own block of `out`; the read block was checked.
            let done = unsafe {
                match self.block {
                    1 => self.walk(ids, places, |to, from| copy::<1>(data, from, out, to)),
                    2 => self.walk(ids, places, |to, from| copy::<2>(data, from, out, to)),
                    4 => self.walk(ids, places, |to, from| copy::<4>(data, from, out, to)),
                    size => self.walk(ids, places, |to, from| {
                        let (from, to) = (data.add(from * size), out.add(to * size));
                        std::ptr::copy_nonoverlapping(from, to, size);
                    }),
                }
            };
            if let Err(error) = done {
                *failure.lock().unwrap_or_else(|e| e.into_inner()) = Some(error);
            }
        });
        failure.into_inner().unwrap_or_else(|e| e.into_inner()).map_or(Ok(()), Err)
    }

    /// Combines `updates[i]` into `data[block(i)]`, blocks of elements `elem` (any type of the block's
    /// size with [`Combine::Replace`]).
    ///
    /// # Errors
    /// If an index is outside of its axis; what `data` then holds is unspecified.
    ///
    /// # Safety
    /// The pointers must be valid for the shapes; `data` must not overlap the others.
    pub unsafe fn scatter(
        &self,
        updates: *const u8,
        ids: *const u8,
        data: *mut u8,
        combine: Combine,
        elem: Elem,
    ) -> Result<(), OutOfRange> {
        // SAFETY: the caller vouches for the pointers; the written block was checked.
        unsafe {
            self.walk(ids, 0..self.blocks(), |place, block| {
                let to = data.add(block * self.block);
                let from = updates.add(place * self.block);
                if combine == Combine::Replace {
                    std::ptr::copy_nonoverlapping(from, to, self.block);
                    return;
                }
                for i in 0..(self.block / elem.size()) as isize {
                    elem.store(to, i, combine.apply(elem.load(to, i), elem.load(from, i)));
                }
            })
        }
    }
}

/// Copies a block of `N` bytes.
///
/// # Safety
/// Both blocks must be valid, and must not overlap.
#[inline(always)]
unsafe fn copy<const N: usize>(data: *const u8, from: usize, out: *mut u8, to: usize) {
    // SAFETY: the caller vouches for both.
    unsafe { std::ptr::copy_nonoverlapping(data.add(from * N), out.add(to * N), N) };
}

impl Combine {
    fn apply(self, old: f32, new: f32) -> f32 {
        match self {
            Combine::Replace => new,
            Combine::Add => old + new,
            Combine::Mul => old * new,
            Combine::Max if old.is_nan() || new.is_nan() => f32::NAN,
            Combine::Min if old.is_nan() || new.is_nan() => f32::NAN,
            Combine::Max => old.max(new),
            Combine::Min => old.min(new),
        }
    }
}
