//! Packing: each buffer at the lowest free offset, in several orders, of which the best is kept.

use super::lifetimes::Lifetime;
use std::cmp::Reverse;

/// Offsets of the `buffers`, in their order.
pub(super) fn assign(
    buffers: &[usize],
    sizes: &[usize],
    lifetimes: &[Option<Lifetime>],
) -> Vec<usize> {
    let life =
        |b: usize| lifetimes[b].as_ref().expect("invariant: only accessed buffers are packed");
    let conflicts: Vec<Vec<usize>> = buffers
        .iter()
        .map(|&a| (0..buffers.len()).filter(|&j| life(a).overlaps(life(buffers[j]))).collect())
        .collect();
    let length = |b: usize| life(b).span.1 - life(b).span.0;
    let mut best: Option<(usize, Vec<usize>)> = None;
    for heuristic in 0..4 {
        let mut order: Vec<usize> = (0..buffers.len()).collect();
        order.sort_by_key(|&i| {
            let b = buffers[i];
            match heuristic {
                0 => (Reverse(sizes[b]), Reverse(length(b)), i),
                1 => (Reverse(length(b)), Reverse(sizes[b]), i),
                2 => (Reverse(sizes[b] * (length(b) + 1)), Reverse(sizes[b]), i),
                _ => (Reverse(usize::MAX - life(b).span.0), Reverse(sizes[b]), i),
            }
        });
        let (peak, offsets) = pack(&order, buffers, sizes, &conflicts);
        if best.as_ref().is_none_or(|(least, _)| peak < *least) {
            best = Some((peak, offsets));
        }
    }
    best.map(|(_, offsets)| offsets).unwrap_or_default()
}

fn pack(
    order: &[usize],
    buffers: &[usize],
    sizes: &[usize],
    conflicts: &[Vec<usize>],
) -> (usize, Vec<usize>) {
    let mut offsets: Vec<Option<usize>> = vec![None; buffers.len()];
    let mut peak = 0;
    let mut taken: Vec<(usize, usize)> = Vec::new();
    for &i in order {
        let size = sizes[buffers[i]];
        taken.clear();
        taken.extend(
            conflicts[i]
                .iter()
                .filter_map(|&j| offsets[j].map(|offset| (offset, offset + sizes[buffers[j]]))),
        );
        taken.sort_unstable();
        let mut offset = 0;
        for &(begin, end) in &taken {
            if offset + size <= begin {
                break;
            }
            offset = offset.max(end);
        }
        offsets[i] = Some(offset);
        peak = peak.max(offset + size);
    }
    (peak, offsets.into_iter().map(|o| o.expect("invariant: every buffer is packed")).collect())
}
