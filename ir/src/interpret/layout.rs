//! Operations that rearrange elements without computing.

use super::call::{Call, around, broadcast_places, places};
use super::{Evaluate, Evaluated};
use crate::ops::{Concat, Expand, Pad, Reshape, Slice, Split, Transpose};
use crate::{Shape, Tensor, TensorData};

/// Strides of a dense tensor, signed.
fn strides(shape: &Shape) -> Vec<isize> {
    shape.strides().into_iter().map(|s| s as isize).collect()
}

impl Evaluate for Reshape {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        Ok(vec![call.inputs[0].reshaped(call.results[0].shape.clone())])
    }
}

impl Evaluate for Transpose {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let own = strides(call.inputs[0].shape());
        let permuted: Vec<isize> = self.perm.iter().map(|&p| own[p]).collect();
        let places = places(call.results[0].shape.dims(), &permuted, 0);
        Ok(vec![call.pick(0, call.inputs[0], &places)])
    }
}

impl Evaluate for Expand {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let places = broadcast_places(call.inputs[0].shape(), &call.results[0].shape);
        Ok(vec![call.pick(0, call.inputs[0], &places)])
    }
}

impl Evaluate for Slice {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let own = strides(call.inputs[0].shape());
        let start: isize =
            self.start.iter().zip(&own).map(|(&s, &stride)| s as isize * stride).sum();
        let stepped: Vec<isize> = self.step.iter().zip(&own).map(|(step, s)| step * s).collect();
        Ok(vec![call.pick(0, call.inputs[0], &places(&self.size, &stepped, start))])
    }
}

impl Evaluate for Concat {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (outer, _, inner) = around(call.results[0].shape.dims(), self.axis);
        let rows = |i: usize| call.dims(i)[self.axis] * inner;
        let data = match call.inputs[0].data() {
            TensorData::Float(_) => {
                let mut out = Vec::new();
                for o in 0..outer {
                    for i in 0..call.inputs.len() {
                        out.extend_from_slice(&call.floats(i)[o * rows(i)..(o + 1) * rows(i)]);
                    }
                }
                TensorData::Float(out)
            }
            TensorData::Int(_) => {
                let mut out = Vec::new();
                for o in 0..outer {
                    for i in 0..call.inputs.len() {
                        out.extend_from_slice(&call.ints(i)[o * rows(i)..(o + 1) * rows(i)]);
                    }
                }
                TensorData::Int(out)
            }
        };
        Ok(vec![Tensor::exact(call.results[0].clone(), data)])
    }
}

impl Evaluate for Split {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let own = strides(call.inputs[0].shape());
        let mut first = 0;
        let mut results = Vec::new();
        for (i, &size) in self.sizes.iter().enumerate() {
            let start = first as isize * own[self.axis];
            let places = places(call.results[i].shape.dims(), &own, start);
            results.push(call.pick(i, call.inputs[0], &places));
            first += size;
        }
        Ok(results)
    }
}

impl Evaluate for Pad {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let ty = call.results[0].clone();
        let outer = strides(&ty.shape);
        let start: isize = self.low.iter().zip(&outer).map(|(&l, &s)| l as isize * s).sum();
        let places = places(call.dims(0), &outer, start);
        let n = ty.shape.numel();
        let data = match call.inputs[0].data() {
            TensorData::Float(v) => {
                let border = if call.exact { self.value } else { ty.dtype.round(self.value) };
                let mut out = vec![border; n];
                places.iter().zip(v).for_each(|(&p, &x)| out[p] = x);
                TensorData::Float(out)
            }
            TensorData::Int(v) => {
                let mut out = vec![ty.dtype.round(self.value) as i64; n];
                places.iter().zip(v).for_each(|(&p, &x)| out[p] = x);
                TensorData::Int(out)
            }
        };
        Ok(vec![Tensor::exact(ty, data)])
    }
}
