//! The cheapest set of vertices that separates a source from a sink: by the theorem of Ford and Fulkerson the capacities that a maximum
//! flow fills, here found by Dinic's algorithm (1970).

use std::collections::VecDeque;

/// A capacity that no cut contains.
pub(super) const UNLIMITED: u64 = u64::MAX / 4;

/// A network of directed edges with capacities.
pub(super) struct Network {
    /// Edges by vertex; edge `e ^ 1` is the opposite of edge `e`.
    of: Vec<Vec<usize>>,
    to: Vec<usize>,
    /// What may still flow.
    residual: Vec<u64>,
}

impl Network {
    pub(super) fn new(vertices: usize) -> Network {
        Network { of: vec![Vec::new(); vertices], to: Vec::new(), residual: Vec::new() }
    }

    pub(super) fn add(&mut self, from: usize, to: usize, capacity: u64) {
        for (from, to, capacity) in [(from, to, capacity), (to, from, 0)] {
            self.of[from].push(self.to.len());
            self.to.push(to);
            self.residual.push(capacity);
        }
    }

    /// The vertices on the sink's side of the minimum cut that is the closest to it.
    pub(super) fn cut(mut self, source: usize, sink: usize) -> Vec<bool> {
        loop {
            let level = self.levels(source);
            if level[sink] == usize::MAX {
                return self.reaching(sink);
            }
            self.fill(&level, source, sink);
        }
    }

    /// Edges from the source to each vertex, along edges on which something may still flow.
    fn levels(&self, source: usize) -> Vec<usize> {
        let mut level = vec![usize::MAX; self.of.len()];
        level[source] = 0;
        let mut queue = VecDeque::from([source]);
        while let Some(vertex) = queue.pop_front() {
            for &edge in &self.of[vertex] {
                let to = self.to[edge];
                if self.residual[edge] > 0 && level[to] == usize::MAX {
                    level[to] = level[vertex] + 1;
                    queue.push_back(to);
                }
            }
        }
        level
    }

    /// Lets flow what may along shortest paths.
    fn fill(&mut self, level: &[usize], source: usize, sink: usize) {
        let mut next = vec![0; self.of.len()];
        let mut path: Vec<usize> = Vec::new();
        loop {
            let vertex = path.last().map_or(source, |edge| self.to[*edge]);
            if vertex == sink {
                let flow = path.iter().map(|edge| self.residual[*edge]).min().unwrap_or(0);
                for &edge in &path {
                    self.residual[edge] -= flow;
                    self.residual[edge ^ 1] += flow;
                }
                let full = path.iter().position(|edge| self.residual[*edge] == 0);
                path.truncate(full.unwrap_or(0));
                continue;
            }
            let edges = &self.of[vertex];
            let found = edges[next[vertex]..].iter().position(|&edge| {
                self.residual[edge] > 0 && level[self.to[edge]] == level[vertex] + 1
            });
            match found {
                Some(skipped) => {
                    next[vertex] += skipped;
                    path.push(edges[next[vertex]]);
                }
                None => {
                    // A dead end: the edge that led here is passed over from now on.
                    let Some(edge) = path.pop() else { return };
                    next[self.to[edge ^ 1]] += 1;
                }
            }
        }
    }

    /// The vertices from which something may still flow to the sink.
    fn reaching(&self, sink: usize) -> Vec<bool> {
        let mut reaches = vec![false; self.of.len()];
        reaches[sink] = true;
        let mut stack = vec![sink];
        while let Some(vertex) = stack.pop() {
            for &edge in &self.of[vertex] {
                let from = self.to[edge];
                if self.residual[edge ^ 1] > 0 && !reaches[from] {
                    reaches[from] = true;
                    stack.push(from);
                }
            }
        }
        reaches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_cut_is_the_cheapest_and_of_equal_ones_the_closest_to_the_sink() {
        // 0 -3-> 1 -2-> 2 -2-> 3: the last of both edges of 2.
        let mut network = Network::new(4);
        network.add(0, 1, 3);
        network.add(1, 2, 2);
        network.add(2, 3, 2);
        assert_eq!(network.cut(0, 3), [false, false, false, true]);
    }

    proptest! {
        /// Of all cuts of small networks none is cheaper, and none of equal cost is closer to the sink.
        #[test]
        fn no_cut_is_cheaper(edges in prop::collection::vec((0..6_usize, 0..6_usize, 0..9_u64), 0..18)) {
            let mut network = Network::new(6);
            for &(from, to, capacity) in &edges {
                network.add(from, to, capacity);
            }
            let found = network.cut(0, 5);
            prop_assert!(found[5] && !found[0]);
            let cost = |side: &[bool]| -> u64 {
                edges.iter().filter(|(from, to, _)| !side[*from] && side[*to]).map(|(.., c)| c).sum()
            };
            let least = cost(&found);
            for bits in 0..16_u32 {
                let side: Vec<bool> = (0..6).map(|i| i == 5 || i > 0 && bits >> (i - 1) & 1 == 1).collect();
                prop_assert!(cost(&side) >= least);
                let inside = (0..6).all(|i| !side[i] || found[i]);
                prop_assert!(!inside || side == found || cost(&side) > least);
            }
        }
    }
}
