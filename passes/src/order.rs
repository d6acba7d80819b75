//! Topological order by rank.

use petgraph::Direction::{Incoming, Outgoing};
use petgraph::graphmap::{DiGraphMap, NodeTrait};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// The nodes of a graph, each after those to which its edges lead; of those that may come next, the one of the
/// lowest rank does. `None` if there is a cycle.
pub(crate) fn by_rank<N: NodeTrait, K: Ord>(
    reads: &DiGraphMap<N, ()>,
    rank: impl Fn(N) -> K,
) -> Option<Vec<N>> {
    let waits = |n: N| reads.neighbors_directed(n, Outgoing).count();
    let mut waits: HashMap<N, usize> = reads.nodes().map(|n| (n, waits(n))).collect();
    let ready = reads.nodes().filter(|n| waits[n] == 0);
    let mut ready: BinaryHeap<_> = ready.map(|n| Reverse((rank(n), n))).collect();
    let mut order = Vec::with_capacity(waits.len());
    while let Some(Reverse((_, n))) = ready.pop() {
        order.push(n);
        for reader in reads.neighbors_directed(n, Incoming) {
            let left = waits.entry(reader).or_default();
            *left -= 1;
            if *left == 0 {
                ready.push(Reverse((rank(reader), reader)));
            }
        }
    }
    (order.len() == waits.len()).then_some(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_rank_that_may_come_next_does() {
        let reads = DiGraphMap::from_edges([(1, 4), (2, 4), (3, 2), (5, 1), (5, 1)]);
        assert_eq!(by_rank(&reads, |n| n), Some(vec![4, 1, 2, 3, 5]));
        assert_eq!(by_rank(&reads, Reverse), Some(vec![4, 2, 3, 1, 5]));
    }

    #[test]
    fn a_cycle_has_no_order() {
        assert_eq!(by_rank(&DiGraphMap::from_edges([(1, 2), (2, 1), (3, 3)]), |n| n), None);
        assert_eq!(by_rank(&DiGraphMap::from_edges([(1, 1)]), |n| n), None);
    }
}
