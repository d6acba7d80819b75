//! Parameter values: read from the model file, or generated from the seed.
//!
//! Import reads nothing: a stored weight is a slice of a mapped file (or the few bytes that ONNX's typed fields decode to).
//! [`frit_runtime::init`] generates the others.

use frit_ir::ops::{Init, Param};
use frit_ir::{DType, TensorType};
use frit_runtime::init;
use half::{bf16, f16};
use prost::bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// One tensor of the model's file, little-endian and row-major.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Element type and shape.
    pub ty: TensorType,
    /// Element type in the model's file.
    pub stored: DType,
    bytes: Bytes,
}

/// Why a weight cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// The bytes do not fit the type.
    #[error("the tensor `{name}` of type {ty} needs {expected} bytes, but has {found}")]
    Size {
        /// The tensor.
        name: String,
        /// Its type.
        ty: TensorType,
        /// Bytes of the type.
        expected: usize,
        /// Bytes there are.
        found: usize,
    },
    /// The parameter's value should be in the model's file and is not.
    #[error("the model has no value for the parameter `{0}`")]
    Missing(String),
    /// Elements outside the tensor were asked for.
    #[error("elements {start}..{end} of `{name}`, which has {len}")]
    Range {
        /// The tensor.
        name: String,
        /// First element.
        start: usize,
        /// One past the last.
        end: usize,
        /// Number of elements.
        len: usize,
    },
}

/// The stored tensors of a model, by parameter name.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    tensors: BTreeMap<String, Weight>,
    /// The files that are mapped.
    files: Vec<(PathBuf, Bytes)>,
}

impl Weights {
    /// Adds a stored tensor.
    ///
    /// # Errors
    /// If the number of bytes is not that of the type.
    pub fn insert(&mut self, name: &str, ty: TensorType, bytes: Bytes) -> Result<(), WeightError> {
        let expected = ty.bytes();
        if bytes.len() != expected {
            let found = bytes.len();
            return Err(WeightError::Size { name: name.into(), ty, expected, found });
        }
        let stored = ty.dtype;
        self.tensors.insert(name.into(), Weight { ty, stored, bytes });
        Ok(())
    }

    /// Adds a stored tensor as f32, whatever float it is stored as: the master copy of a parameter.
    ///
    /// # Errors
    /// As [`Weights::insert`].
    pub fn insert_as_f32(
        &mut self,
        name: &str,
        ty: &TensorType,
        bytes: Bytes,
    ) -> Result<(), WeightError> {
        self.insert(name, ty.clone(), bytes)?;
        if let Some(weight) = self.tensors.get_mut(name).filter(|w| w.ty.dtype != DType::F32) {
            let values = weight.floats(0..ty.shape.numel());
            weight.bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>().into();
            weight.ty = ty.with_dtype(DType::F32);
        }
        Ok(())
    }

    /// Notes where a mapped file came from, so that [`Weights::place`] knows its slices.
    pub fn mapped(&mut self, path: PathBuf, bytes: Bytes) {
        self.files.push((path, bytes));
    }

    /// The mapped files, with their contents.
    pub fn files(&self) -> impl Iterator<Item = (&Path, &[u8])> {
        self.files.iter().map(|(path, bytes)| (path.as_path(), bytes.as_ref()))
    }

    /// The number of the file that a weight is a slice of, and its first byte there.
    pub fn place(&self, weight: &Weight) -> Option<(usize, usize)> {
        let at = weight.bytes.as_ptr().addr();
        self.files.iter().enumerate().find_map(|(i, (_, file))| {
            let offset = at.checked_sub(file.as_ptr().addr())?;
            (offset + weight.bytes.len() <= file.len()).then_some((i, offset))
        })
    }

    /// The stored tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Weight> {
        self.tensors.get(name)
    }

    /// Names and tensors, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Weight)> {
        self.tensors.iter().map(|(name, weight)| (name.as_str(), weight))
    }

    /// Keeps only the tensors whose name passes.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| keep(name));
    }

    /// First values of elements `range` (in row-major order) of a parameter, as f32.
    ///
    /// # Errors
    /// If the parameter should be stored and is not, or the range leaves it.
    pub fn first_values(
        &self,
        param: &Param,
        seed: u64,
        range: Range<usize>,
    ) -> Result<Vec<f32>, WeightError> {
        let len = param.ty.shape.numel();
        if range.start > range.end || range.end > len {
            let (start, end) = (range.start, range.end);
            return Err(WeightError::Range { name: param.name.clone(), start, end, len });
        }
        match &param.init {
            Init::Weights => {
                let weight = self.get(&param.name);
                let weight = weight.ok_or_else(|| WeightError::Missing(param.name.clone()))?;
                Ok(weight.floats(range))
            }
            init => Ok(init::values(init, seed, &param.name, range).unwrap_or_default()),
        }
    }
}

impl Weight {
    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes of elements `range`, which must lie inside the tensor.
    pub fn bytes_of(&self, range: Range<usize>) -> &[u8] {
        let size = self.ty.dtype.size();
        &self.bytes[range.start * size..range.end * size]
    }

    /// Elements `range` as f32, converted from whatever they are stored as; the range must lie inside
    /// the tensor.
    pub fn floats(&self, range: Range<usize>) -> Vec<f32> {
        fn read<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f32) -> Vec<f32> {
            bytes.as_chunks::<N>().0.iter().map(|c| f(*c)).collect()
        }
        let bytes = self.bytes_of(range);
        match self.ty.dtype {
            DType::F32 => read(bytes, f32::from_le_bytes),
            DType::F64 => read(bytes, |b| f64::from_le_bytes(b) as f32),
            DType::F16 => read(bytes, |b| f16::from_le_bytes(b).to_f32()),
            DType::BF16 => read(bytes, |b| bf16::from_le_bytes(b).to_f32()),
            DType::I64 => read(bytes, |b| i64::from_le_bytes(b) as f32),
            DType::I32 => read(bytes, |b| i32::from_le_bytes(b) as f32),
            DType::U8 | DType::Bool => read(bytes, |[b]: [u8; 1]| f32::from(b)),
            // ONNX tensors of these types are refused at import.
            DType::F8E4M3 | DType::F8E5M2 => read(bytes, |_: [u8; 1]| f32::NAN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::ops::ParamKind;

    fn param(name: &str, init: Init, n: usize) -> Param {
        let ty = TensorType::new(DType::F32, [n]);
        let reason = String::new();
        let (held, unit, sharded) = (None, None, false);
        let kind = ParamKind::Trainable;
        Param { name: name.into(), ty, kind, reason, init, held, unit, sharded }
    }

    #[test]
    fn stored_values_are_converted() {
        let mut weights = Weights::default();
        let ty = TensorType::new(DType::BF16, [2]);
        let bytes: Vec<u8> =
            [1.5f32, -2.0].iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        weights.insert("w", ty.clone(), Bytes::from(bytes)).unwrap();
        assert_eq!(weights.get("w").unwrap().floats(1..2), [-2.0]);
        let bytes = Bytes::copy_from_slice(weights.get("w").unwrap().bytes());
        weights.insert_as_f32("m", &ty, bytes).unwrap();
        let master = weights.get("m").unwrap();
        assert_eq!((master.ty.dtype, master.stored), (DType::F32, DType::BF16));
        assert_eq!(master.bytes(), [1.5f32.to_le_bytes(), (-2f32).to_le_bytes()].concat());
        let short = weights.insert("v", ty, Bytes::new());
        assert!(matches!(short, Err(WeightError::Size { expected: 4, found: 0, .. })));
        let missing = weights.first_values(&param("x", Init::Weights, 1), 0, 0..1);
        assert_eq!(missing, Err(WeightError::Missing("x".into())));
        let outside = weights.first_values(&param("x", Init::Constant(0.0), 1), 0, 0..2);
        assert!(matches!(outside, Err(WeightError::Range { .. })));
    }
}
