//! Comparisons along an axis: TopK and ArgMax.

use super::call::{Call, around};
use super::{Evaluate, Evaluated};
use crate::TensorData;
use crate::ops::{ArgReduce, TopK};
use std::cmp::Ordering;

/// The elements of operand 0, as something that can be ordered.
fn compare(call: &Call<'_>, a: usize, b: usize) -> Ordering {
    match call.inputs[0].data() {
        TensorData::Int(v) => v[a].cmp(&v[b]),
        // NaN is the largest.
        TensorData::Float(v) => {
            v[a].partial_cmp(&v[b]).unwrap_or(v[a].is_nan().cmp(&v[b].is_nan()))
        }
    }
}

impl Evaluate for TopK {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (outer, size, inner) = around(call.dims(0), self.axis);
        let mut places = vec![0; outer * self.k * inner];
        let mut indices = vec![0; places.len()];
        for o in 0..outer {
            for i in 0..inner {
                let at = |j: usize| (o * size + j) * inner + i;
                let mut order: Vec<usize> = (0..size).collect();
                order.sort_by(|&a, &b| {
                    let order = compare(call, at(a), at(b));
                    if self.largest { order.reverse() } else { order }
                });
                for (rank, &j) in order.iter().take(self.k).enumerate() {
                    let to = (o * self.k + rank) * inner + i;
                    (places[to], indices[to]) = (at(j), j as i64);
                }
            }
        }
        Ok(vec![call.pick(0, call.inputs[0], &places), call.integer(1, indices)])
    }
}

impl Evaluate for ArgReduce {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (outer, size, inner) = around(call.dims(0), self.axis);
        let mut indices = Vec::with_capacity(outer * inner);
        for o in 0..outer {
            for i in 0..inner {
                let at = |j: usize| (o * size + j) * inner + i;
                let better = |j: usize, best: usize| {
                    let order = compare(call, at(j), at(best));
                    let order = if self.largest { order } else { order.reverse() };
                    order == Ordering::Greater || (self.last && order == Ordering::Equal)
                };
                let best = (1..size).fold(0, |best, j| if better(j, best) { j } else { best });
                indices.push(best as i64);
            }
        }
        Ok(vec![call.integer(0, indices)])
    }
}
