//! Writes by index.

use super::call::{self, Call};
use super::index::resolve;
use super::{Evaluate, Evaluated};
use crate::ops::{ScatterElements, ScatterFn, ScatterNd};
use crate::{Tensor, TensorData};

impl Evaluate for ScatterElements {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let data = call.inputs[0].shape();
        let strides: Vec<isize> = data.strides().into_iter().map(|s| s as isize).collect();
        let mut elsewhere = strides.clone();
        elsewhere[self.axis] = 0;
        let mut places = call::places(call.dims(1), &elsewhere, 0);
        for (place, &index) in places.iter_mut().zip(call.ints(1)) {
            *place += resolve(index, data.0[self.axis])? * strides[self.axis] as usize;
        }
        Ok(vec![write(self.f, call, &places)])
    }
}

impl Evaluate for ScatterNd {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let places = super::index::tuple_places(self.batch_dims, call)?;
        Ok(vec![write(self.f, call, &places)])
    }
}

/// The data with update `i` at place `i` of the list.
fn write(f: ScatterFn, call: &Call<'_>, places: &[usize]) -> Tensor {
    match (call.inputs[0].data(), call.inputs[2].data()) {
        (TensorData::Float(data), TensorData::Float(updates)) => {
            let mut data = data.clone();
            for (&place, &new) in places.iter().zip(updates) {
                let old = data[place];
                data[place] = match f {
                    ScatterFn::Replace => new,
                    ScatterFn::Add => old + new,
                    ScatterFn::Mul => old * new,
                    ScatterFn::Max => call::max(old, new),
                    ScatterFn::Min => call::min(old, new),
                };
            }
            call.real(0, data)
        }
        (data, _) => {
            let mut data = match data {
                TensorData::Int(v) => v.clone(),
                TensorData::Float(v) => v.iter().map(|x| *x as i64).collect(),
            };
            for (&place, &new) in places.iter().zip(call.ints(2)) {
                let old = data[place];
                data[place] = match f {
                    ScatterFn::Replace => new,
                    ScatterFn::Add => old.wrapping_add(new),
                    ScatterFn::Mul => old.wrapping_mul(new),
                    ScatterFn::Max => old.max(new),
                    ScatterFn::Min => old.min(new),
                };
            }
            call.integer(0, data)
        }
    }
}
