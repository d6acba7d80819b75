//! Packing: each buffer at the lowest free offset, in several orders, of which the best is kept and then
//! changed as long as that helps. The search ends with the first order that reaches the lower bound.

use super::lifetimes::Lifetime;
use std::cmp::Reverse;

/// The search for a better order ends at this multiple of the lower bound.
const GOOD_ENOUGH: f64 = 1.002;
/// At most so many orders are tried.
const MAX_TRIES: usize = 64;
/// At most so many orders with one buffer moved are tried.
const MAX_MOVED: usize = 400;
/// At most so many buffers are placed in that search.
const MAX_MOVES: usize = 1 << 17;

/// Offsets of the `buffers`, in their order; `bound` is a lower bound of their peak.
pub(super) fn assign(
    buffers: &[usize],
    sizes: &[usize],
    lifetimes: &[Option<Lifetime>],
    bound: usize,
) -> Vec<usize> {
    let packed: Vec<Packed<'_>> = buffers
        .iter()
        .map(|&b| {
            let life = lifetimes[b].as_ref().expect("invariant: only accessed buffers are packed");
            Packed { life, size: sizes[b] }
        })
        .collect();
    let mut best: Option<(usize, Vec<usize>, Vec<usize>)> = None;
    for heuristic in 0..4 {
        let mut order: Vec<usize> = (0..packed.len()).collect();
        order.sort_by_key(|&i| {
            let Packed { life, size } = packed[i];
            let length = life.span.1 - life.span.0;
            match heuristic {
                0 => (Reverse(size), Reverse(length), i),
                1 => (Reverse(length), Reverse(size), i),
                2 => (Reverse(size * (length + 1)), Reverse(size), i),
                _ => (Reverse(usize::MAX - life.span.0), Reverse(size), i),
            }
        });
        let (peak, offsets) = pack(&order, &packed);
        if best.as_ref().is_none_or(|(least, ..)| peak < *least) {
            best = Some((peak, offsets, order));
        }
        if peak <= bound {
            break;
        }
    }
    let Some((mut peak, mut offsets, mut order)) = best else { return vec![] };
    // What reaches the peak was placed too late: place it first, as long as it helps.
    let tries = MAX_MOVES / packed.len().max(1);
    for _ in 0..tries.min(MAX_TRIES) {
        if peak as f64 <= bound as f64 * GOOD_ENOUGH {
            break;
        }
        let top: Vec<usize> =
            (0..packed.len()).filter(|&i| offsets[i] + packed[i].size == peak).collect();
        order.retain(|i| !top.contains(i));
        order.splice(0..0, top);
        let (new_peak, new_offsets) = pack(&order, &packed);
        if new_peak < peak {
            (peak, offsets) = (new_peak, new_offsets);
        } else if let Some(i) =
            (0..packed.len()).find(|&i| new_offsets[i] + packed[i].size == new_peak)
        {
            // The peak moved to another buffer; that one goes first in the next try.
            order.retain(|&j| j != i);
            order.insert(0, i);
        }
    }
    // Then any buffer earlier, as long as the peak does not grow.
    let mut random = Sequence(1);
    for _ in 0..tries.min(MAX_MOVED) {
        if peak as f64 <= bound as f64 * GOOD_ENOUGH {
            break;
        }
        let mut trial = order.clone();
        let buffer = trial.remove(random.below(packed.len()));
        let at = order.iter().position(|&i| i == buffer).unwrap_or_default();
        trial.insert(random.below(at + 1), buffer);
        let (new_peak, new_offsets) = pack(&trial, &packed);
        if new_peak <= peak {
            (peak, offsets, order) = (new_peak, new_offsets, trial);
        }
    }
    offsets
}

/// Numbers that look random and are the same every time.
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
}

/// Places the buffers in this order. Returns the peak and the offsets.
fn pack(order: &[usize], buffers: &[Packed<'_>]) -> (usize, Vec<usize>) {
    let mut offsets = vec![0; buffers.len()];
    let mut peak = 0;
    // Offset, end and lifetime of what is placed, by offset.
    let mut placed: Vec<(usize, usize, &Lifetime)> = Vec::with_capacity(buffers.len());
    for &i in order {
        let Packed { life, size } = buffers[i];
        let mut offset = 0;
        for (begin, end, other) in &placed {
            if offset + size <= *begin {
                break;
            }
            // Most of what is placed lies below: the cheap test comes first.
            if *end > offset && life.overlaps(other) {
                offset = *end;
            }
        }
        let end = offset + size;
        let at = placed.partition_point(|(begin, ..)| *begin <= offset);
        placed.insert(at, (offset, end, life));
        offsets[i] = offset;
        peak = peak.max(end);
    }
    (peak, offsets)
}
