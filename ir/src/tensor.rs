//! Tensors in memory: constants of a graph, and values of the interpreter.

use crate::ops::number::Bits;
use crate::{DType, Shape, TensorType};
use half::{bf16, f16};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Elements of a [`Tensor`], widened to the largest type of their kind.
///
/// Floats are always already rounded to the tensor's dtype, integers within its range. Equality is of
/// bits: 0 and −0 differ, and a NaN equals every NaN.
#[derive(Clone, Debug)]
pub enum TensorData {
    /// Elements of a float tensor.
    Float(Vec<f64>),
    /// Elements of an integer or boolean tensor.
    Int(Vec<i64>),
}

impl PartialEq for TensorData {
    fn eq(&self, other: &Self) -> bool {
        let same = |a: &f64, b: &f64| a.bits() == b.bits();
        match (self, other) {
            (TensorData::Float(a), TensorData::Float(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
            }
            (TensorData::Int(a), TensorData::Int(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for TensorData {}

impl Hash for TensorData {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            TensorData::Float(elements) => elements.iter().for_each(|x| x.bits().hash(state)),
            TensorData::Int(elements) => elements.hash(state),
        }
    }
}

/// A dense row-major tensor. Cloning is cheap: the elements are shared.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tensor {
    /// Element type and shape.
    pub ty: TensorType,
    data: Arc<TensorData>,
}

/// Why bytes do not make a tensor.
#[derive(Debug, thiserror::Error)]
#[error("a tensor of type {ty} has {expected} bytes, not {found}")]
pub struct SizeError {
    ty: TensorType,
    expected: usize,
    found: usize,
}

impl Tensor {
    /// A float tensor; elements are rounded to `dtype`.
    ///
    /// # Panics
    /// If `dtype` is not a float or the number of elements differs from the shape's.
    pub fn floats(dtype: DType, shape: impl Into<Shape>, mut data: Vec<f64>) -> Self {
        assert!(dtype.is_float(), "{dtype} is not a float type");
        if dtype != DType::F64 {
            data.iter_mut().for_each(|x| *x = dtype.round(*x));
        }
        Tensor::exact(TensorType::new(dtype, shape), TensorData::Float(data))
    }

    /// An integer or boolean tensor.
    ///
    /// # Panics
    /// If `dtype` is a float or the number of elements differs from the shape's.
    pub fn ints(dtype: DType, shape: impl Into<Shape>, mut data: Vec<i64>) -> Self {
        assert!(!dtype.is_float(), "{dtype} is not an integer type");
        match dtype {
            DType::I32 => data.iter_mut().for_each(|x| *x = i64::from(*x as i32)),
            DType::U8 => data.iter_mut().for_each(|x| *x = i64::from(*x as u8)),
            DType::Bool => data.iter_mut().for_each(|x| *x = i64::from(*x != 0)),
            _ => {}
        }
        Tensor::exact(TensorType::new(dtype, shape), TensorData::Int(data))
    }

    /// A tensor whose elements are taken as they are, not rounded (for f64 shadow computations).
    ///
    /// # Panics
    /// If the number of elements differs from the shape's.
    pub fn exact(ty: TensorType, data: TensorData) -> Self {
        let len = match &data {
            TensorData::Float(v) => v.len(),
            TensorData::Int(v) => v.len(),
        };
        assert_eq!(len, ty.shape.numel(), "{len} elements for {ty}");
        Tensor { ty, data: Arc::new(data) }
    }

    /// A tensor with every element equal to `value`.
    pub fn splat(ty: TensorType, value: f64) -> Self {
        let n = ty.shape.numel();
        if ty.dtype.is_float() {
            Tensor::floats(ty.dtype, ty.shape, vec![value; n])
        } else {
            Tensor::ints(ty.dtype, ty.shape, vec![value as i64; n])
        }
    }

    /// An f32 scalar.
    pub fn scalar(value: f64) -> Self {
        Tensor::floats(DType::F32, Shape::scalar(), vec![value])
    }

    /// An i64 vector.
    pub fn vector_i64(values: Vec<i64>) -> Self {
        Tensor::ints(DType::I64, [values.len()], values)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }

    /// Shape.
    pub fn shape(&self) -> &Shape {
        &self.ty.shape
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.ty.shape.numel()
    }

    /// The elements.
    pub fn data(&self) -> &TensorData {
        &self.data
    }

    /// The elements of a float tensor; `None` for integers.
    pub fn as_floats(&self) -> Option<&[f64]> {
        match &*self.data {
            TensorData::Float(v) => Some(v),
            TensorData::Int(_) => None,
        }
    }

    /// The elements of an integer tensor; `None` for floats.
    pub fn as_ints(&self) -> Option<&[i64]> {
        match &*self.data {
            TensorData::Int(v) => Some(v),
            TensorData::Float(_) => None,
        }
    }

    /// All elements as f64 (integers converted).
    pub fn to_f64s(&self) -> Vec<f64> {
        match &*self.data {
            TensorData::Float(v) => v.clone(),
            TensorData::Int(v) => v.iter().map(|&x| x as f64).collect(),
        }
    }

    /// All elements as i64 (floats truncated).
    pub fn to_i64s(&self) -> Vec<i64> {
        match &*self.data {
            TensorData::Float(v) => v.iter().map(|&x| x as i64).collect(),
            TensorData::Int(v) => v.clone(),
        }
    }

    /// The common value if all elements are bitwise equal, as f64; `None` otherwise, or if empty.
    pub fn as_splat(&self) -> Option<f64> {
        match &*self.data {
            TensorData::Float(v) => {
                let first = *v.first()?;
                v.iter().all(|x| x.to_bits() == first.to_bits()).then_some(first)
            }
            TensorData::Int(v) => {
                let first = *v.first()?;
                v.iter().all(|&x| x == first).then_some(first as f64)
            }
        }
    }

    /// The same elements in another shape.
    ///
    /// # Panics
    /// If the number of elements differs.
    pub fn reshaped(&self, shape: impl Into<Shape>) -> Self {
        let ty = self.ty.with_shape(shape);
        assert_eq!(ty.shape.numel(), self.numel(), "reshape of {} to {ty}", self.ty);
        Tensor { ty, data: self.data.clone() }
    }

    /// The elements converted to `dtype`, as the `cast` op does: floats round to nearest even, or
    /// truncate and saturate to an integer type; integers wrap.
    pub fn cast(&self, dtype: DType) -> Self {
        if dtype == self.dtype() {
            return self.clone();
        }
        let shape = self.ty.shape.clone();
        match (&*self.data, dtype.is_float()) {
            (_, true) => Tensor::floats(dtype, shape, self.to_f64s()),
            (TensorData::Float(v), false) => {
                let truncated = |&x: &f64| match dtype {
                    DType::I64 => x as i64,
                    _ => dtype.round(x) as i64,
                };
                Tensor::ints(dtype, shape, v.iter().map(truncated).collect())
            }
            (TensorData::Int(v), false) => Tensor::ints(dtype, shape, v.clone()),
        }
    }

    /// Reads little-endian elements.
    ///
    /// # Errors
    /// If the number of bytes is not that of `ty`.
    pub fn from_bytes(ty: TensorType, bytes: &[u8]) -> Result<Self, SizeError> {
        if bytes.len() != ty.bytes() {
            return Err(SizeError { expected: ty.bytes(), found: bytes.len(), ty });
        }
        fn read<const N: usize, T>(bytes: &[u8], f: impl Fn([u8; N]) -> T) -> Vec<T> {
            bytes.as_chunks::<N>().0.iter().map(|c| f(*c)).collect()
        }
        let data = match ty.dtype {
            DType::F64 => TensorData::Float(read(bytes, f64::from_le_bytes)),
            DType::F32 => TensorData::Float(read(bytes, |b| f64::from(f32::from_le_bytes(b)))),
            DType::F16 => TensorData::Float(read(bytes, |b| f16::from_le_bytes(b).to_f64())),
            DType::BF16 => TensorData::Float(read(bytes, |b| bf16::from_le_bytes(b).to_f64())),
            DType::I64 => TensorData::Int(read(bytes, i64::from_le_bytes)),
            DType::I32 => TensorData::Int(read(bytes, |b| i64::from(i32::from_le_bytes(b)))),
            DType::U8 | DType::Bool => TensorData::Int(read(bytes, |[b]: [u8; 1]| i64::from(b))),
            DType::F8E4M3 | DType::F8E5M2 => {
                return Err(SizeError { expected: 0, found: bytes.len(), ty });
            }
        };
        Ok(Tensor::exact(ty, data))
    }

    /// The elements in little-endian bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.ty.bytes());
        match &*self.data {
            TensorData::Float(v) => match self.dtype() {
                DType::F64 => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
                DType::F16 => v.iter().for_each(|&x| out.extend(f16::from_f64(x).to_le_bytes())),
                DType::BF16 => v.iter().for_each(|&x| out.extend(bf16::from_f64(x).to_le_bytes())),
                _ => v.iter().for_each(|&x| out.extend((x as f32).to_le_bytes())),
            },
            TensorData::Int(v) => match self.dtype() {
                DType::I64 => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
                DType::I32 => v.iter().for_each(|&x| out.extend((x as i32).to_le_bytes())),
                _ => v.iter().for_each(|&x| out.push(x as u8)),
            },
        }
        out
    }
}
