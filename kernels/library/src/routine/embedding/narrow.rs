//! Gradients of tables of few columns at many indices, such as those of elements that are gathered one by one: indices are divided by ranges
//! of rows, and each range of the table is summed by one thread, in the order of the positions.

use super::{Embedding, IndexError};
use crate::pool::{Pool, Shareable};
use crate::routine::convert::from_f32;

/// The most columns, and the fewest indices.
const COLUMNS: usize = 8;
const INDICES: usize = 1 << 14;
/// Ranges of rows.
const RANGES: usize = 256;
/// Indices that a thread divides at a time.
const CHUNK: usize = 1 << 15;

impl Embedding {
    /// Whether the gradient is summed range by range.
    pub(super) fn is_narrow(&self) -> bool {
        self.width <= COLUMNS && self.count >= INDICES
    }

    /// Writes the sums of `dout` into `dtable`.
    pub(super) unsafe fn backward_narrow(
        &self,
        pool: &Pool,
        ids: *const u8,
        dout: *const u8,
        dtable: *mut u8,
    ) -> Result<(), IndexError> {
        let chunks = self.count.div_ceil(CHUNK);
        let rows = self.rows.div_ceil(RANGES).max(1);
        let range_of = |row: usize| row / rows;
        let counts_bytes = chunks * RANGES * size_of::<u32>();
        let pairs_bytes = self.count * size_of::<[u32; 2]>();
        let [counts, pairs] = pool.common([counts_bytes, pairs_bytes]);
        let at = Shareable::new((ids, counts.cast::<[u32; RANGES]>(), pairs.cast::<[u32; 2]>()));
        let positions = |chunk: usize| chunk * CHUNK..self.count.min((chunk + 1) * CHUNK);
        let failed = std::sync::Mutex::new(None);
        pool.run(chunks, &|chunk| {
            let (ids, counts, _) = at.get();
            let mut count = [0; RANGES];
            for position in positions(chunk) {
                // SAFETY: the caller vouches for the indices.
                match unsafe { self.row_of(ids, position) } {
                    Ok(row) => count[range_of(row)] += 1,
                    Err(error) => {
                        let mut first = failed.lock().unwrap_or_else(|e| e.into_inner());
                        if first.as_ref().is_none_or(|(at, _)| *at > position) {
                            *first = Some((position, error));
                        }
                        return;
                    }
                }
            }
            // SAFETY: each chunk has its own counts.
            unsafe { counts.add(chunk).write(count) };
        });
        if let Some((_, error)) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
            return Err(error);
        }
        // Where the pairs of each range and chunk begin: those of a range lie side by side, in the order of their positions.
        // SAFETY: all counts were just written.
        let firsts = unsafe { std::slice::from_raw_parts_mut(at.get().1, chunks) };
        let mut begins = [0; RANGES + 1];
        let mut next = 0;
        for range in 0..RANGES {
            begins[range] = next as usize;
            for first in &mut *firsts {
                next += std::mem::replace(&mut first[range], next);
            }
        }
        begins[RANGES] = next as usize;
        let firsts = &*firsts;
        pool.run(chunks, &|chunk| {
            let (ids, _, pairs) = at.get();
            let mut next = firsts[chunk];
            for position in positions(chunk) {
                // SAFETY: the indices have been checked; each pair has a place of its own.
                unsafe {
                    let Ok(row) = self.row_of(ids, position) else { continue };
                    let next = &mut next[range_of(row)];
                    pairs.add(*next as usize).write([row as u32, position as u32]);
                    *next += 1;
                }
            }
        });
        let to = Shareable::new((dout, dtable));
        pool.run_workers(RANGES, &|range, worker| {
            let (_, _, pairs) = at.get();
            let (dout, dtable) = to.get();
            let of_range = (range * rows).min(self.rows)..((range + 1) * rows).min(self.rows);
            let len = of_range.len() * self.width;
            let [sums] = worker.tiles.split([len * size_of::<f32>()]);
            // SAFETY: ranges of the table are disjoint; the caller vouches for both tensors.
            unsafe {
                let sums = std::slice::from_raw_parts_mut(sums.cast::<f32>(), len);
                sums.fill(0.0);
                for i in begins[range]..begins[range + 1] {
                    let [row, position] = *pairs.add(i);
                    let to = (row as usize - of_range.start) * self.width;
                    for column in 0..self.width {
                        let from = position as usize * self.width + column;
                        sums[to + column] += self.out.load(dout, from as isize);
                    }
                }
                let first = (of_range.start * self.width) as isize;
                from_f32(sums, self.table.at_mut(dtable, first), self.table);
            }
        });
        Ok(())
    }
}
