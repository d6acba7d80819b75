//! The evaluation of one operation: operands, result types, rounding, and iteration over elements.

use crate::{Shape, Tensor, TensorData, TensorType};
use std::borrow::Cow;

/// Operands and result types of an operation that was inferred to fit.
pub(crate) struct Call<'a> {
    pub(super) inputs: &'a [&'a Tensor],
    pub(super) results: Vec<TensorType>,
    pub(super) exact: bool,
}

impl<'a> Call<'a> {
    /// Elements of operand `i` as floats; integers are converted.
    pub(super) fn floats(&self, i: usize) -> Cow<'a, [f64]> {
        match self.inputs[i].data() {
            TensorData::Float(v) => Cow::Borrowed(v),
            TensorData::Int(v) => Cow::Owned(v.iter().map(|&x| x as f64).collect()),
        }
    }

    /// Elements of the integer operand `i`.
    pub(super) fn ints(&self, i: usize) -> &'a [i64] {
        self.inputs[i].as_ints().expect("invariant: inference asked for integers")
    }

    /// The only element of operand `i`.
    pub(super) fn scalar(&self, i: usize) -> f64 {
        self.floats(i)[0]
    }

    /// Dimensions of operand `i`.
    pub(super) fn dims(&self, i: usize) -> &'a [usize] {
        self.inputs[i].shape().dims()
    }

    /// Result `i` from reals: rounded once, or truncated if it is an integer.
    pub(super) fn real(&self, i: usize, data: Vec<f64>) -> Tensor {
        let ty = self.results[i].clone();
        match (ty.dtype.is_float(), self.exact) {
            (true, true) => Tensor::exact(ty, TensorData::Float(data)),
            (true, false) => Tensor::floats(ty.dtype, ty.shape, data),
            (false, _) => {
                let ints = data.into_iter().map(|x| ty.dtype.round(x) as i64).collect();
                Tensor::ints(ty.dtype, ty.shape, ints)
            }
        }
    }

    /// Result `i` from integers, wrapped to its width.
    pub(super) fn integer(&self, i: usize, data: Vec<i64>) -> Tensor {
        let ty = self.results[i].clone();
        Tensor::ints(ty.dtype, ty.shape, data)
    }

    /// Result `i` with the elements of `source` at these places, unchanged.
    pub(super) fn pick(&self, i: usize, source: &Tensor, places: &[usize]) -> Tensor {
        let data = match source.data() {
            TensorData::Float(v) => TensorData::Float(places.iter().map(|&p| v[p]).collect()),
            TensorData::Int(v) => TensorData::Int(places.iter().map(|&p| v[p]).collect()),
        };
        Tensor::exact(self.results[i].clone(), data)
    }
}

/// Place of each element of a strided box, in row-major order of its dimensions.
pub(super) fn places(dims: &[usize], strides: &[isize], start: isize) -> Vec<usize> {
    let n: usize = dims.iter().product();
    let mut out = Vec::with_capacity(n);
    if n == 0 {
        return out;
    }
    let (outer, inner, step) = match dims.split_last() {
        Some((&inner, outer)) => (outer, inner, strides[outer.len()]),
        None => (dims, 1, 0),
    };
    let mut index = vec![0; outer.len()];
    let mut base = start;
    loop {
        out.extend((0..inner as isize).map(|j| (base + j * step) as usize));
        let mut axis = outer.len();
        loop {
            if axis == 0 {
                return out;
            }
            axis -= 1;
            index[axis] += 1;
            base += strides[axis];
            if index[axis] < outer[axis] {
                break;
            }
            base -= strides[axis] * outer[axis] as isize;
            index[axis] = 0;
        }
    }
}

/// Place in a tensor of shape `from` of each element of its broadcast to shape `to`.
pub(super) fn broadcast_places(from: &Shape, to: &Shape) -> Vec<usize> {
    let strides = from.broadcast_strides(to).expect("invariant: inference checked the broadcast");
    let strides: Vec<isize> = strides.into_iter().map(|s| s as isize).collect();
    places(to.dims(), &strides, 0)
}

/// The elements broadcast from one shape to another; borrowed where nothing changes.
pub(super) fn broadcast<'a, T: Copy>(data: &'a [T], from: &Shape, to: &Shape) -> Cow<'a, [T]> {
    if from == to {
        return Cow::Borrowed(data);
    }
    if let [only] = data {
        return Cow::Owned(vec![*only; to.numel()]);
    }
    Cow::Owned(broadcast_places(from, to).into_iter().map(|p| data[p]).collect())
}

/// Sizes before, along and after an axis.
pub(super) fn around(dims: &[usize], axis: usize) -> (usize, usize, usize) {
    (dims[..axis].iter().product(), dims[axis], dims[axis + 1..].iter().product())
}

/// The larger; NaN if either is.
pub(super) fn max(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// The smaller; NaN if either is.
pub(super) fn min(a: f64, b: f64) -> f64 {
    if a < b || a.is_nan() { a } else { b }
}
