//! Gathers table rows by index, and the gradient of that.
//!
//! As in ONNX Gather on axis 0, a negative index counts from the end; an index outside `-rows..rows` is an error, never undefined
//! behavior. In the gradient each row sums its positions in ascending order in f32, for any number of threads.

mod narrow;

use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use crate::routine::convert::{convert_range, from_f32, to_f32};
use serde::{Deserialize, Serialize};

/// Positions per chunk of work.
const CHUNK: usize = 16;
/// Bytes per chunk when the gradient is cleared.
const CLEAR: usize = 1 << 18;

/// The integer type of the indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexElem {
    /// 32-bit signed.
    I32,
    /// 64-bit signed.
    I64,
}

/// Shapes and types: a table `[rows, width]`, `count` indices, an output `[count, width]`, all
/// contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Embedding {
    /// Rows of the table.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Number of indices.
    pub count: usize,
    /// Type of the indices.
    pub index: IndexElem,
    /// Type of the table; in the gradient, of the table's gradient.
    pub table: Elem,
    /// Type of the output; in the gradient, of the output's gradient.
    pub out: Elem,
}

/// Why an embedding could not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexError {
    /// An index is outside the table.
    OutOfRange {
        /// Its position among the indices.
        position: usize,
        /// Its value.
        index: i64,
        /// Rows of the table.
        rows: usize,
    },
    /// The gradient supports at most 2^32 rows and indices.
    TooLarge,
}

impl std::fmt::Display for IndexError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            IndexError::OutOfRange { position, index, rows } => {
                write!(f, "index {index} at position {position} is outside a table of {rows} rows")
            }
            IndexError::TooLarge => f.write_str("more than 2^32 rows or indices"),
        }
    }
}

impl std::error::Error for IndexError {}

impl Embedding {
    /// `out[i] = table[ids[i]]`, cast to the output type. On an error nothing is written.
    ///
    /// # Errors
    /// If an index is outside the table.
    ///
    /// # Safety
    /// `table`, `ids` and `out` must be aligned and valid for the shapes; `out` must not overlap
    /// the others.
    pub unsafe fn forward(
        &self,
        pool: &Pool,
        table: *const u8,
        ids: *const u8,
        out: *mut u8,
    ) -> Result<(), IndexError> {
        for position in 0..self.count {
            // SAFETY: the caller vouches for `count` indices.
            unsafe { self.row_of(ids, position)? };
        }
        let (table, ids, out) = (Shareable::new(table), Shareable::new(ids), Shareable::new(out));
        pool.run(self.count.div_ceil(CHUNK), &|chunk| {
            for position in chunk * CHUNK..self.count.min((chunk + 1) * CHUNK) {
                // SAFETY: each position writes its own row of `out`; the index was checked.
                unsafe {
                    let Ok(row) = self.row_of(ids.get(), position) else { continue };
                    let from = self.table.at(table.get(), (row * self.width) as isize);
                    let to = self.out.at_mut(out.get(), (position * self.width) as isize);
                    convert_range(from, self.table, to, self.out, self.width);
                }
            }
        });
        Ok(())
    }

    /// `dtable[r] = sum of dout[i] over ids[i] = r`, zero where no index points, and to that `added`, unless it is null.
    /// On an error nothing is written.
    ///
    /// # Errors
    /// If an index is outside the table, or there are more than 2^32 rows or indices.
    ///
    /// # Safety
    /// `ids`, `dout`, `dtable` and `added`, which has the shape of `dtable`, must be aligned and valid for the shapes;
    /// `dtable` must not overlap the others, but may be `added`.
    pub unsafe fn backward(
        &self,
        pool: &Pool,
        [ids, dout, added]: [*const u8; 3],
        dtable: *mut u8,
    ) -> Result<(), IndexError> {
        let limit = 1 << 32;
        if self.rows as u64 > limit || self.count as u64 > limit {
            return Err(IndexError::TooLarge);
        }
        if added.is_null() && self.is_narrow() {
            // SAFETY: passed on.
            return unsafe { self.backward_narrow(pool, ids, dout, dtable) };
        }
        let [keys] = pool.common([self.count * size_of::<u64>()]);
        for position in 0..self.count {
            // SAFETY: the caller vouches for the indices; `keys` holds `count` numbers.
            unsafe {
                let row = self.row_of(ids, position)?;
                keys.cast::<u64>().add(position).write((row as u64) << 32 | position as u64);
            }
        }
        // SAFETY: all were just written.
        let keys = unsafe { std::slice::from_raw_parts_mut(keys.cast::<u64>(), self.count) };
        keys.sort_unstable();
        let keys = &*keys;
        let (dout, dtable) = (Shareable::new(dout), Shareable::new(dtable));
        let (adds, in_place) = (!added.is_null(), added == dtable.get().cast_const());
        let added = Shareable::new(added);

        let size = self.rows * self.width * self.table.size();
        let chunks = if in_place { 0 } else { size.div_ceil(CLEAR) };
        pool.run(chunks, &|chunk| {
            let first = chunk * CLEAR;
            let len = CLEAR.min(size - first);
            // SAFETY: disjoint parts of `dtable`. All bits zero is zero in each type.
            unsafe {
                let to = dtable.get().add(first);
                match adds {
                    true => to.copy_from_nonoverlapping(added.get().add(first), len),
                    false => to.write_bytes(0, len),
                }
            };
        });
        pool.run_workers(self.count.div_ceil(CHUNK), &|chunk, worker| {
            let row_at = |i: usize| keys[i] >> 32;
            let mut i = chunk * CHUNK;
            let end = self.count.min(i + CHUNK);
            // A row belongs to the chunk in which its first position lies.
            while i > 0 && i < end && row_at(i) == row_at(i - 1) {
                i += 1;
            }
            let bytes = self.width * size_of::<f32>();
            let [sum, wide] = worker.tiles.split([bytes, bytes]);
            // SAFETY: the scratch parts hold a row; each row of `dtable` has one owner.
            unsafe {
                let sum = std::slice::from_raw_parts_mut(sum.cast::<f32>(), self.width);
                let wide = std::slice::from_raw_parts_mut(wide.cast::<f32>(), self.width);
                while i < end {
                    let row = row_at(i);
                    sum.fill(0.0);
                    while i < self.count && row_at(i) == row {
                        let position = (keys[i] & 0xffff_ffff) as usize;
                        let from = self.out.at(dout.get(), (position * self.width) as isize);
                        to_f32(from, self.out, wide);
                        for (total, value) in sum.iter_mut().zip(&*wide) {
                            *total += value;
                        }
                        i += 1;
                    }
                    let to = self.table.at_mut(dtable.get(), row as isize * self.width as isize);
                    if adds {
                        to_f32(to, self.table, wide);
                        for (total, value) in sum.iter_mut().zip(&*wide) {
                            *total += value;
                        }
                    }
                    from_f32(sum, to, self.table);
                }
            }
        });
        Ok(())
    }

    /// The table row of the index at `position`.
    unsafe fn row_of(&self, ids: *const u8, position: usize) -> Result<usize, IndexError> {
        // SAFETY: the caller vouches for the indices.
        let index = unsafe {
            match self.index {
                IndexElem::I32 => i64::from(*ids.cast::<i32>().add(position)),
                IndexElem::I64 => *ids.cast::<i64>().add(position),
            }
        };
        let rows = self.rows as i64;
        let row = if index < 0 { index.checked_add(rows) } else { Some(index) };
        match row {
            Some(row) if (0..rows).contains(&row) => Ok(row as usize),
            _ => Err(IndexError::OutOfRange { position, index, rows: self.rows }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    const SHAPE: Embedding = Embedding {
        rows: 11,
        width: 37,
        count: 53,
        index: IndexElem::I64,
        table: Elem::F32,
        out: Elem::F32,
    };

    fn ids() -> Vec<i64> {
        // Row 4 occurs often, some rows never, some from the end.
        (0..SHAPE.count as i64)
            .map(|i| match i % 3 {
                0 => 4,
                1 => i * 5 % 9,
                _ => -1 - i % 3,
            })
            .collect()
    }

    fn row(id: i64) -> usize {
        if id < 0 { (id + 11) as usize } else { id as usize }
    }

    #[test]
    fn gathers_and_casts() {
        let table: Vec<f32> = (0..11 * 37).map(|i| i as f32 * 0.37).collect();
        let ids32: Vec<i32> = ids().iter().map(|&id| id as i32).collect();
        let mut out = vec![bf16::ZERO; 53 * 37];
        for threads in [1, 2] {
            let shape = Embedding { index: IndexElem::I32, out: Elem::BF16, ..SHAPE };
            out.fill(bf16::ZERO);
            // SAFETY: the vectors have the shapes' sizes.
            unsafe {
                let out = out.as_mut_ptr().cast();
                let pool = Pool::new(threads);
                shape
                    .forward(&pool, table.as_ptr().cast(), ids32.as_ptr().cast(), out)
                    .expect("all in range");
            }
            for (i, &id) in ids32.iter().enumerate() {
                for w in 0..37 {
                    let want = bf16::from_f32(table[row(id.into()) * 37 + w]);
                    assert_eq!(out[i * 37 + w], want);
                }
            }
        }
    }

    #[test]
    fn scatters_in_order_for_any_thread_count() {
        let ids = ids();
        let dout: Vec<f32> = (0..53 * 37).map(|i| (i * 31 % 97) as f32 * 0.01).collect();
        let mut want = vec![0f32; 11 * 37];
        for (i, &id) in ids.iter().enumerate() {
            for w in 0..37 {
                want[row(id) * 37 + w] += dout[i * 37 + w];
            }
        }
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            let mut wide = vec![f32::NAN; 11 * 37];
            let mut narrow = vec![bf16::NAN; 11 * 37];
            let to_narrow = Embedding { table: Elem::BF16, ..SHAPE };
            let at = [ids.as_ptr().cast(), dout.as_ptr().cast(), std::ptr::null()];
            // SAFETY: the vectors have the shapes' sizes.
            unsafe {
                SHAPE.backward(&pool, at, wide.as_mut_ptr().cast()).expect("in range");
                let narrow = narrow.as_mut_ptr().cast();
                to_narrow.backward(&pool, at, narrow).expect("in range");
            }
            assert_eq!(wide, want);
            let base: Vec<f32> = (0..11 * 37).map(|i| (i * 17 % 89) as f32 * 0.03).collect();
            let sum: Vec<f32> = want.iter().zip(&base).map(|(want, base)| want + base).collect();
            let mut in_place = base.clone();
            // SAFETY: the vectors have the shapes' sizes.
            unsafe {
                let add = |base: *const f32, to: *mut f32| {
                    SHAPE
                        .backward(&pool, [at[0], at[1], base.cast()], to.cast())
                        .expect("in range");
                };
                add(base.as_ptr(), wide.as_mut_ptr());
                let to = in_place.as_mut_ptr();
                add(to, to);
            }
            assert_eq!((wide, in_place), (sum.clone(), sum));
            assert!(narrow.iter().zip(&want).all(|(got, &want)| *got == bf16::from_f32(want)));
        }
    }

    /// As many indices as are divided by ranges of rows, some twice and some never.
    #[test]
    fn narrow_tables_are_summed_in_order_for_any_thread_count() {
        for (rows, width, count, index) in [
            (70_000, 1, 100_000, IndexElem::I64),
            (100, 3, 20_000, IndexElem::I64),
            (1, 1, 1 << 14, IndexElem::I64),
        ] {
            for out in [Elem::F32, Elem::BF16] {
                let shape = Embedding { rows, width, count, index, table: Elem::F32, out };
                assert!(shape.is_narrow());
                let id = |i: usize| (i * i * 7919 + i / 3) % rows;
                let ids: Vec<i64> = (0..count)
                    .map(|i| if i % 5 == 0 { id(i) as i64 - rows as i64 } else { id(i) as i64 })
                    .collect();
                let value = |i: usize| bf16::from_f32((i * 31 % 97) as f32 * 0.01);
                let wide: Vec<f32> = (0..count * width).map(|i| value(i).to_f32()).collect();
                let short: Vec<bf16> = (0..count * width).map(value).collect();
                let dout =
                    if out == Elem::F32 { wide.as_ptr().cast() } else { short.as_ptr().cast() };
                let mut want = vec![0_f32; rows * width];
                for i in 0..count {
                    for w in 0..width {
                        want[id(i) * width + w] += wide[i * width + w];
                    }
                }
                for threads in [1, 3] {
                    let mut found = vec![f32::NAN; rows * width];
                    let mut narrow = vec![bf16::NAN; rows * width];
                    let at = [ids.as_ptr().cast(), dout, std::ptr::null()];
                    let pool = Pool::new(threads);
                    let rounded = Embedding { table: Elem::BF16, ..shape };
                    // SAFETY: the vectors have the shapes' sizes.
                    let done = unsafe {
                        shape
                            .backward(&pool, at, found.as_mut_ptr().cast())
                            .and_then(|()| rounded.backward(&pool, at, narrow.as_mut_ptr().cast()))
                    };
                    assert_eq!(done, Ok(()));
                    assert!(found == want, "{shape:?} on {threads} threads");
                    let is_rounded = |(a, b): (&bf16, &f32)| *a == bf16::from_f32(*b);
                    assert!(narrow.iter().zip(&want).all(is_rounded), "{shape:?}");
                }
            }
        }
        let shape = Embedding { rows: 9, width: 1, count: 1 << 16, ..SHAPE };
        let mut ids = vec![3_i64; shape.count];
        (ids[40_000], ids[50_000]) = (9, -10);
        let (dout, mut table) = (vec![1_f32; shape.count], vec![7_f32; 9]);
        let at = [ids.as_ptr().cast(), dout.as_ptr().cast(), std::ptr::null()];
        // SAFETY: the vectors have the shape's sizes.
        let failed = unsafe { shape.backward(&Pool::new(2), at, table.as_mut_ptr().cast()) };
        let error = IndexError::OutOfRange { position: 40_000, index: 9, rows: 9 };
        assert_eq!((failed, table), (Err(error), vec![7.0; 9]));
    }

    #[test]
    fn an_index_out_of_range_is_an_error_and_writes_nothing() {
        let pool = Pool::new(2);
        let table = vec![1f32; 11 * 37];
        for bad in [11, -12, i64::MAX, i64::MIN] {
            let mut ids = ids();
            ids[50] = bad;
            let mut out = vec![7f32; 53 * 37];
            let mut dtable = vec![7f32; 11 * 37];
            // SAFETY: the vectors have the shapes' sizes.
            let (forward, backward) = unsafe {
                let at = ids.as_ptr().cast();
                (
                    SHAPE.forward(&pool, table.as_ptr().cast(), at, out.as_mut_ptr().cast()),
                    SHAPE.backward(
                        &pool,
                        [at, out.as_ptr().cast(), std::ptr::null()],
                        dtable.as_mut_ptr().cast(),
                    ),
                )
            };
            let error = IndexError::OutOfRange { position: 50, index: bad, rows: 11 };
            assert_eq!((forward, backward), (Err(error), Err(error)));
            assert!(out.iter().chain(&dtable).all(|&v| v == 7.0));
        }
    }
}
