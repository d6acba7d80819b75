//! Operations that rearrange elements without computing.

use super::call::{Call, around, broadcast_places, places};
use crate::ops::{Concat, Pad, Slice, Split, Transpose};
use crate::{Shape, Tensor, TensorData};

/// Strides of a dense tensor, signed.
fn strides(shape: &Shape) -> Vec<isize> {
    shape.strides().into_iter().map(|s| s as isize).collect()
}

pub(super) fn transpose(op: &Transpose, call: &Call<'_>) -> Vec<Tensor> {
    let own = strides(call.inputs[0].shape());
    let permuted: Vec<isize> = op.perm.iter().map(|&p| own[p]).collect();
    let places = places(call.results[0].shape.dims(), &permuted, 0);
    vec![call.pick(0, call.inputs[0], &places)]
}

pub(super) fn expand(call: &Call<'_>) -> Vec<Tensor> {
    let places = broadcast_places(call.inputs[0].shape(), &call.results[0].shape);
    vec![call.pick(0, call.inputs[0], &places)]
}

pub(super) fn slice(op: &Slice, call: &Call<'_>) -> Vec<Tensor> {
    let own = strides(call.inputs[0].shape());
    let start: isize = op.start.iter().zip(&own).map(|(&s, &stride)| s as isize * stride).sum();
    let stepped: Vec<isize> = op.step.iter().zip(&own).map(|(step, s)| step * s).collect();
    vec![call.pick(0, call.inputs[0], &places(&op.size, &stepped, start))]
}

pub(super) fn concat(op: &Concat, call: &Call<'_>) -> Vec<Tensor> {
    let (outer, _, inner) = around(call.results[0].shape.dims(), op.axis);
    let rows = |i: usize| call.dims(i)[op.axis] * inner;
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
    vec![Tensor::exact(call.results[0].clone(), data)]
}

pub(super) fn split(op: &Split, call: &Call<'_>) -> Vec<Tensor> {
    let own = strides(call.inputs[0].shape());
    let mut first = 0;
    let mut results = Vec::new();
    for (i, &size) in op.sizes.iter().enumerate() {
        let start = first as isize * own[op.axis];
        let places = places(call.results[i].shape.dims(), &own, start);
        results.push(call.pick(i, call.inputs[0], &places));
        first += size;
    }
    results
}

pub(super) fn pad(op: &Pad, call: &Call<'_>) -> Vec<Tensor> {
    let ty = call.results[0].clone();
    let outer = strides(&ty.shape);
    let start: isize = op.low.iter().zip(&outer).map(|(&l, &s)| l as isize * s).sum();
    let places = places(call.dims(0), &outer, start);
    let n = ty.shape.numel();
    let data = match call.inputs[0].data() {
        TensorData::Float(v) => {
            let border = if call.exact { op.value } else { ty.dtype.round(op.value) };
            let mut out = vec![border; n];
            places.iter().zip(v).for_each(|(&p, &x)| out[p] = x);
            TensorData::Float(out)
        }
        TensorData::Int(v) => {
            let mut out = vec![ty.dtype.round(op.value) as i64; n];
            places.iter().zip(v).for_each(|(&p, &x)| out[p] = x);
            TensorData::Int(out)
        }
    };
    vec![Tensor::exact(ty, data)]
}
