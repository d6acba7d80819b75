//! Converts ONNX tensors to typed bytes: raw data, typed fields, and external files.

use super::messages::TensorProto;
use crate::import::dims::checked_numel;
use crate::import::mapped::Folder;
use frit_ir::{DType, Tensor, TensorType};
use prost::bytes::Bytes;
use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

/// Why a tensor of the model cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum TensorError {
    #[error("its element type {0} is not supported")]
    DType(String),
    #[error("its shape {0:?} is not valid")]
    Shape(Vec<i64>),
    #[error("a tensor of type {ty} has {expected} bytes, but {found} are stored")]
    Size { ty: TensorType, expected: usize, found: usize },
    #[error("its data is in the external file {file}, which cannot be read: {cause}")]
    External { file: String, cause: String },
    #[error("its data is in an external file, but {0}")]
    Location(String),
}

/// A tensor with its bytes: a slice of a mapped file, or decoded from typed fields.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) ty: TensorType,
    pub(super) bytes: Bytes,
}

impl Stored {
    /// The matrix with its axes exchanged; anything else as it is.
    pub(super) fn transposed(self) -> Stored {
        let &[rows, columns] = self.ty.shape.dims() else { return self };
        let size = self.ty.dtype.size();
        let mut bytes = Vec::with_capacity(self.bytes.len());
        for column in 0..columns {
            for row in 0..rows {
                let at = (row * columns + column) * size;
                bytes.extend_from_slice(&self.bytes[at..at + size]);
            }
        }
        Stored { ty: self.ty.with_shape([columns, rows]), bytes: Bytes::from(bytes) }
    }

    /// The elements, widened in memory.
    pub(super) fn tensor(&self) -> Result<Tensor, TensorError> {
        Tensor::from_bytes(self.ty.clone(), &self.bytes)
            .map_err(|_| TensorError::DType(self.ty.dtype.to_string()))
    }
}

/// The files beside the model that hold tensors, each mapped once.
#[derive(Debug)]
pub(super) struct ExternalFiles {
    folder: Folder,
    open: HashMap<String, Bytes>,
}

impl ExternalFiles {
    pub(super) fn new(folder: Folder) -> Self {
        ExternalFiles { folder, open: HashMap::new() }
    }

    /// Adds a file that is mapped already.
    pub(super) fn insert(&mut self, location: String, bytes: Bytes) {
        self.open.insert(location, bytes);
    }

    /// The files that were mapped.
    pub(super) fn into_open(self) -> impl Iterator<Item = (PathBuf, Bytes)> {
        let folder = self.folder;
        self.open.into_iter().map(move |(location, bytes)| (folder.join(&location), bytes))
    }

    fn slice(&mut self, tensor: &TensorProto, expected: usize) -> Result<Bytes, TensorError> {
        let field =
            |key: &str| tensor.external_data.iter().find(|e| e.key == key).map(|e| &e.value);
        let location = field("location")
            .ok_or_else(|| TensorError::Location("`location` is missing".into()))?;
        let inside = Path::new(location).components().all(|c| matches!(c, Component::Normal(_)));
        if !inside || location.is_empty() {
            return Err(TensorError::Location(format!("`{location}` is not beside the model")));
        }
        let number = |key: &str, default: usize| match field(key) {
            None => Ok(default),
            Some(text) => text.trim().parse::<usize>().map_err(|_| {
                TensorError::Location(format!("its `{key}` is `{text}`, which is not a number"))
            }),
        };
        let (offset, length) = (number("offset", 0)?, number("length", expected)?);
        if !self.open.contains_key(location) {
            let bytes = self.folder.map(location).map_err(|e| TensorError::External {
                file: self.folder.join(location).display().to_string(),
                cause: e.to_string(),
            })?;
            self.open.insert(location.clone(), bytes);
        }
        let bytes = &self.open[location];
        match offset.checked_add(length) {
            Some(end) if end <= bytes.len() => Ok(bytes.slice(offset..end)),
            _ => Err(TensorError::Location(format!(
                "`{location}` has {} bytes, and the tensor lies at {offset} with {length} bytes",
                bytes.len()
            ))),
        }
    }
}

/// The element type with this ONNX number.
pub(super) fn dtype(code: i64) -> Result<DType, TensorError> {
    const UNSUPPORTED: [(i64, &str); 10] = [
        (3, "int8"),
        (4, "uint16"),
        (5, "int16"),
        (8, "string"),
        (12, "uint32"),
        (13, "uint64"),
        (14, "complex64"),
        (15, "complex128"),
        (17, "float8e4m3fn"),
        (19, "float8e5m2"),
    ];
    Ok(match code {
        1 => DType::F32,
        2 => DType::U8,
        6 => DType::I32,
        7 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        16 => DType::BF16,
        _ => {
            let name = UNSUPPORTED.iter().find(|(c, _)| *c == code);
            let name = name.map_or_else(|| format!("number {code}"), |(_, n)| (*n).to_string());
            return Err(TensorError::DType(name));
        }
    })
}

/// An integer type of ONNX that Frit computes with in a wider one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Narrow {
    /// Size of an element in the file, in bytes.
    pub(super) bytes: usize,
    pub(super) signed: bool,
    /// The type that takes its place.
    pub(super) wide: DType,
}

impl Narrow {
    /// The integer in the first [`Narrow::bytes`] of these little-endian bytes.
    fn value(self, bytes: &[u8]) -> i64 {
        let negative = self.signed && bytes[self.bytes - 1] >= 0x80;
        let mut all = [if negative { 0xff } else { 0 }; 8];
        all[..self.bytes].copy_from_slice(&bytes[..self.bytes]);
        i64::from_le_bytes(all)
    }
}

/// The integer type with this ONNX number, if it is one that is widened.
pub(super) fn narrow(code: i64) -> Option<Narrow> {
    let (bytes, signed, wide) = match code {
        3 => (1, true, DType::I32),
        4 => (2, false, DType::I32),
        5 => (2, true, DType::I32),
        12 => (4, false, DType::I64),
        13 => (8, false, DType::I64),
        _ => return None,
    };
    Some(Narrow { bytes, signed, wide })
}

/// Whether this is ONNX's number of f32, f16, f64 or bf16.
pub(super) fn is_float(code: i32) -> bool {
    matches!(code, 1 | 10 | 11 | 16)
}

/// The element type that tensors of this ONNX number are computed with.
pub(super) fn computed(code: i64) -> Result<DType, TensorError> {
    narrow(code).map_or_else(|| dtype(code), |n| Ok(n.wide))
}

/// The type of a tensor, with all sizes checked.
pub(super) fn type_of(tensor: &TensorProto) -> Result<TensorType, TensorError> {
    let dims: Result<Vec<usize>, _> = tensor.dims.iter().map(|&d| usize::try_from(d)).collect();
    let dims = dims.map_err(|_| TensorError::Shape(tensor.dims.clone()))?;
    if checked_numel(&dims).is_none() {
        return Err(TensorError::Shape(tensor.dims.clone()));
    }
    Ok(TensorType::new(computed(tensor.data_type.into())?, dims))
}

/// The tensor's type and bytes.
pub(super) fn read(tensor: &TensorProto, files: &mut ExternalFiles) -> Result<Stored, TensorError> {
    let ty = type_of(tensor)?;
    if let Some(narrow) = narrow(tensor.data_type.into()) {
        return read_narrow(tensor, files, ty, narrow);
    }
    let bytes = if tensor.data_location == 1 {
        files.slice(tensor, ty.bytes())?
    } else if let Some(raw) = &tensor.raw_data {
        raw.clone()
    } else {
        typed_fields(tensor, ty.dtype)
    };
    if bytes.len() != ty.bytes() {
        return Err(TensorError::Size { expected: ty.bytes(), found: bytes.len(), ty });
    }
    Ok(Stored { ty, bytes })
}

/// The data of a tensor that lie in a file beside the model, as they stand there.
pub(super) fn external(tensor: &TensorProto, folder: Folder) -> Result<Bytes, TensorError> {
    let stored = match narrow(tensor.data_type.into()) {
        Some(narrow) => narrow.bytes,
        None => dtype(tensor.data_type.into())?.size(),
    };
    let ty = type_of(tensor)?;
    ExternalFiles::new(folder).slice(tensor, ty.shape.numel() * stored)
}

/// Integers of a type that is widened.
fn read_narrow(
    tensor: &TensorProto,
    files: &mut ExternalFiles,
    ty: TensorType,
    narrow: Narrow,
) -> Result<Stored, TensorError> {
    let expected = ty.shape.numel() * narrow.bytes;
    let raw = match &tensor.raw_data {
        _ if tensor.data_location == 1 => Some(files.slice(tensor, expected)?),
        raw => raw.clone(),
    };
    let values: Vec<i64> = match &raw {
        Some(raw) if raw.len() == expected => {
            raw.chunks_exact(narrow.bytes).map(|element| narrow.value(element)).collect()
        }
        Some(raw) => return Err(TensorError::Size { expected, found: raw.len(), ty }),
        None if narrow.wide == DType::I64 => {
            tensor.uint64_data.iter().map(|x| narrow.value(&x.to_le_bytes())).collect()
        }
        None => tensor.int32_data.iter().map(|x| narrow.value(&x.to_le_bytes())).collect(),
    };
    let bytes: Vec<u8> = match narrow.wide {
        DType::I32 => values.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    if bytes.len() != ty.bytes() {
        return Err(TensorError::Size { expected: ty.bytes(), found: bytes.len(), ty });
    }
    Ok(Stored { ty, bytes: Bytes::from(bytes) })
}

/// Little-endian bytes of the field that ONNX prescribes for the element type.
fn typed_fields(tensor: &TensorProto, dtype: DType) -> Bytes {
    let ints = &tensor.int32_data;
    let bytes: Vec<u8> = match dtype {
        DType::F32 => tensor.float_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F64 => tensor.double_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::I64 => tensor.int64_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::I32 => ints.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F16 | DType::BF16 => ints.iter().flat_map(|x| (*x as u16).to_le_bytes()).collect(),
        DType::Bool => ints.iter().map(|x| u8::from(*x != 0)).collect(),
        DType::U8 | DType::F8E4M3 | DType::F8E5M2 => ints.iter().map(|x| *x as u8).collect(),
    };
    Bytes::from(bytes)
}
