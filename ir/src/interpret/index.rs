//! Reads by index, and running sums.

use super::call::{Call, around};
use super::{EvalError, Evaluate, Evaluated};
use crate::TensorData;
use crate::ops::{CumSum, Embedding, EmbeddingGrad, Gather, GatherElements, GatherNd};

/// The place that an index names among `size` elements; negative ones count from the end.
pub(super) fn resolve(index: i64, size: usize) -> Result<usize, EvalError> {
    let place = if index < 0 { index.checked_add(size as i64) } else { Some(index) };
    place
        .and_then(|p| usize::try_from(p).ok())
        .filter(|&p| p < size)
        .ok_or(EvalError::Index { index, size })
}

impl Evaluate for Embedding {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        gather(0, call)
    }
}

impl Evaluate for Gather {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        gather(self.axis, call)
    }
}

fn gather(axis: usize, call: &Call<'_>) -> Evaluated {
    let (outer, size, inner) = around(call.dims(0), axis);
    let mut places = Vec::with_capacity(call.results[0].shape.numel());
    let rows: Vec<usize> =
        call.ints(1).iter().map(|&i| resolve(i, size)).collect::<Result<_, _>>()?;
    for o in 0..outer {
        for row in &rows {
            let first = (o * size + row) * inner;
            places.extend(first..first + inner);
        }
    }
    Ok(vec![call.pick(0, call.inputs[0], &places)])
}

impl Evaluate for EmbeddingGrad {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let dy = call.floats(0);
        let width = call.results[0].shape.0[1];
        let mut table = vec![0.0; self.rows * width];
        for (i, &id) in call.ints(1).iter().enumerate() {
            let row = resolve(id, self.rows)?;
            for c in 0..width {
                table[row * width + c] += dy[i * width + c];
            }
        }
        if call.inputs.len() > 2 {
            table.iter_mut().zip(call.floats(2).iter()).for_each(|(sum, x)| *sum += x);
        }
        Ok(vec![call.real(0, table)])
    }
}

impl Evaluate for GatherElements {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let data = call.inputs[0].shape();
        let strides: Vec<isize> = data.strides().into_iter().map(|s| s as isize).collect();
        let mut elsewhere = strides.clone();
        elsewhere[self.axis] = 0;
        let mut places = super::call::places(call.dims(1), &elsewhere, 0);
        for (place, &index) in places.iter_mut().zip(call.ints(1)) {
            *place += resolve(index, data.0[self.axis])? * strides[self.axis] as usize;
        }
        Ok(vec![call.pick(0, call.inputs[0], &places)])
    }
}

impl Evaluate for GatherNd {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let places = tuple_places(self.batch_dims, call)?;
        Ok(vec![call.pick(0, call.inputs[0], &places)])
    }
}

/// Places in operand 0 of the elements of the slices that the tuples of operand 1 name.
pub(super) fn tuple_places(b: usize, call: &Call<'_>) -> Result<Vec<usize>, EvalError> {
    let (data, ids) = (call.dims(0), call.dims(1));
    let strides = call.inputs[0].shape().strides();
    let depth = ids[ids.len() - 1];
    let batches: usize = data[..b].iter().product();
    let per_batch: usize = ids[b..ids.len() - 1].iter().product();
    let batch_size: usize = data[b..].iter().product();
    let slice: usize = data[b + depth..].iter().product();
    let mut places = Vec::with_capacity(batches * per_batch * slice);
    for batch in 0..batches {
        for i in 0..per_batch {
            let mut first = batch * batch_size;
            for d in 0..depth {
                let index = call.ints(1)[(batch * per_batch + i) * depth + d];
                first += resolve(index, data[b + d])? * strides[b + d];
            }
            places.extend(first..first + slice);
        }
    }
    Ok(places)
}

impl Evaluate for CumSum {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let dims = call.dims(0);
        Ok(vec![match call.inputs[0].data() {
            TensorData::Float(v) => call.real(0, self.run(dims, v, 0.0, |a, b| a + b)),
            TensorData::Int(v) => call.integer(0, self.run(dims, v, 0, i64::wrapping_add)),
        }])
    }
}

impl CumSum {
    fn run<T: Copy>(&self, dims: &[usize], v: &[T], zero: T, add: fn(T, T) -> T) -> Vec<T> {
        let (outer, size, inner) = around(dims, self.axis);
        let mut out = vec![zero; v.len()];
        for o in 0..outer {
            for i in 0..inner {
                let mut sum = zero;
                for step in 0..size {
                    let j = if self.reverse { size - 1 - step } else { step };
                    let at = (o * size + j) * inner + i;
                    let next = add(sum, v[at]);
                    out[at] = if self.exclusive { sum } else { next };
                    sum = next;
                }
            }
        }
        out
    }
}
