//! Packing: places each buffer at the lowest free offset, in several orders, and improves the best order by local search. Stops at the
//! first order that reaches the lower bound.

use super::lifetimes::Lifetime;
use frit_ir::plan::{BufferId, TiSlice};
use std::cmp::Reverse;

/// The search for a better order ends at this multiple of the lower bound.
const GOOD_ENOUGH: f64 = 1.002;
/// Maximum number of orders that are tried.
const MAX_TRIES: usize = 400;
/// Maximum number of placed buffers that the search examines.
const MAX_LOOKS: usize = 1 << 23;
/// The same for the orders before that search: enough for a thousand layers.
const MAX_FIRST_LOOKS: usize = 1 << 28;

/// Offsets of the `buffers`, in their order; `bound` is a lower bound of their peak.
pub(super) fn assign(
    buffers: &[BufferId],
    sizes: &TiSlice<BufferId, usize>,
    lifetimes: &TiSlice<BufferId, Option<Lifetime>>,
    bound: usize,
) -> Vec<usize> {
    let packed: Vec<Packed<'_>> = buffers
        .iter()
        .map(|&b| {
            let life = lifetimes[b].as_ref().expect("invariant: only accessed buffers are packed");
            let range = life.range();
            let blocks = (range.start.0 / BLOCK, range.end.0.div_ceil(BLOCK));
            Packed { life, size: sizes[b], blocks }
        })
        .collect();
    let is_enough = |peak: usize| peak as f64 <= bound as f64 * GOOD_ENOUGH;
    let mut best: Option<(usize, Vec<usize>, Vec<usize>)> = None;
    let mut packing = Packing { buffers: &packed, looks: 0 };
    for heuristic in 0..5 {
        let mut order: Vec<usize> = (0..packed.len()).collect();
        order.sort_by_key(|&i| {
            let Packed { life, size, .. } = packed[i];
            let (first, last) = (life.span.0.0, life.span.1.0);
            let length = last - first;
            match heuristic {
                // Buffers of similar size in order of first use: later ones reuse the space of earlier ones.
                0 => (Reverse(magnitude(size)), Reverse(usize::MAX - first), i),
                1 => (Reverse(size), Reverse(length), i),
                2 => (Reverse(length), Reverse(size), i),
                3 => (Reverse(size * (length + 1)), Reverse(size), i),
                _ => (Reverse(usize::MAX - first), Reverse(size), i),
            }
        });
        let (peak, offsets) = packing.pack(&order);
        if best.as_ref().is_none_or(|(least, ..)| peak < *least) {
            best = Some((peak, offsets, order));
        }
        if is_enough(peak) || packing.looks > MAX_FIRST_LOOKS {
            break;
        }
    }
    let Some((mut peak, mut offsets, mut order)) = best else { return vec![] };
    // The buffer at the peak was placed too late: place it first, as long as that helps.
    let end = packing.looks + MAX_LOOKS;
    for _ in 0..MAX_TRIES {
        if is_enough(peak) || packing.looks > end {
            break;
        }
        let top: Vec<usize> =
            (0..packed.len()).filter(|&i| offsets[i] + packed[i].size == peak).collect();
        order.retain(|i| !top.contains(i));
        order.splice(0..0, top);
        let (new_peak, new_offsets) = packing.pack(&order);
        if new_peak < peak {
            (peak, offsets) = (new_peak, new_offsets);
        } else if let Some(i) =
            (0..packed.len()).find(|&i| new_offsets[i] + packed[i].size == new_peak)
        {
            // The peak moved to another buffer, which is placed first in the next try.
            order.retain(|&j| j != i);
            order.insert(0, i);
        }
    }
    // Then move random buffers forward, as long as the peak does not grow.
    let mut random = Sequence(1);
    for _ in 0..MAX_TRIES {
        if is_enough(peak) || packing.looks > end {
            break;
        }
        let mut trial = order.clone();
        let buffer = trial.remove(random.below(packed.len()));
        let at = order.iter().position(|&i| i == buffer).unwrap_or_default();
        trial.insert(random.below(at + 1), buffer);
        let (new_peak, new_offsets) = packing.pack(&trial);
        if new_peak <= peak {
            (peak, offsets, order) = (new_peak, new_offsets, trial);
        }
    }
    offsets
}

/// A deterministic pseudorandom sequence.
struct Sequence(u64);

impl Sequence {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as usize % n.max(1)
    }
}

/// A buffer to place.
#[derive(Clone, Copy)]
struct Packed<'a> {
    life: &'a Lifetime,
    size: usize,
    /// The blocks of tasks in which it may be in use: the first, and one past the last.
    blocks: (usize, usize),
}

/// Tasks per block.
const BLOCK: usize = 64;
/// Buffers that may be in use in more blocks are long.
const LONG: usize = 4;

/// A logarithmic size class, equal for sizes within about six percent.
fn magnitude(size: usize) -> usize {
    let bits = size.checked_ilog2().unwrap_or(0);
    32 * bits as usize + (size >> bits.saturating_sub(4))
}

/// Offset, end and index of a placed buffer.
type Spot = (usize, usize, usize);

/// Buffers that are placed in several orders.
struct Packing<'p, 'a> {
    buffers: &'p [Packed<'a>],
    /// Placed buffers that were examined so far.
    looks: usize,
}

impl Packing<'_, '_> {
    /// Places the buffers in this order. Returns the peak and the offsets.
    fn pack(&mut self, order: &[usize]) -> (usize, Vec<usize>) {
        let n_blocks = self.buffers.iter().map(|b| b.blocks.1).max().unwrap_or(0);
        // Sorted by offset: all buffers, those in use in many blocks, and the others by block. A buffer in use in few
        // blocks can only overlap those in use in many, and those of its blocks.
        let (mut all, mut long): (Vec<Spot>, Vec<Spot>) = (vec![], vec![]);
        let mut blocks: Vec<Vec<Spot>> = vec![vec![]; n_blocks];
        let mut offsets = vec![0; self.buffers.len()];
        let mut peak = 0;
        for &i in order {
            let Packed { life, size, blocks: (first, last) } = self.buffers[i];
            let meets = |spot: &Spot| life.overlaps(self.buffers[spot.2].life);
            let (offset, looks) = match last - first > LONG {
                true => lowest(size, &mut [&all], meets),
                false => {
                    let mut lists: [&[Spot]; LONG + 1] = [&long, &[], &[], &[], &[]];
                    for (list, block) in lists[1..].iter_mut().zip(&blocks[first..last]) {
                        *list = block;
                    }
                    lowest(size, &mut lists, meets)
                }
            };
            self.looks += looks;
            let spot = (offset, offset + size, i);
            let insert = |spots: &mut Vec<Spot>| {
                let at = spots.partition_point(|(begin, ..)| *begin <= offset);
                spots.insert(at, spot);
            };
            insert(&mut all);
            match last - first > LONG {
                true => insert(&mut long),
                false => blocks[first..last].iter_mut().for_each(insert),
            }
            offsets[i] = offset;
            peak = peak.max(offset + size);
        }
        (peak, offsets)
    }
}

/// The lowest offset of `size` bytes that avoids the spots for which `meets` holds, and the number of spots examined.
/// Each list is sorted.
fn lowest(size: usize, lists: &mut [&[Spot]], meets: impl Fn(&Spot) -> bool) -> (usize, usize) {
    let (mut offset, mut looks) = (0, 0);
    loop {
        let heads = lists.iter_mut().filter(|list| !list.is_empty());
        let Some(list) = heads.min_by_key(|list| list[0].0) else { return (offset, looks) };
        let spot = list[0];
        *list = &list[1..];
        looks += 1;
        if offset + size <= spot.0 {
            return (offset, looks);
        }
        // Most spots lie below: the cheap test comes first.
        if spot.1 > offset && meets(&spot) {
            offset = spot.1;
        }
    }
}
