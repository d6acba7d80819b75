//! Tensors of the suite's files, from protobuf.

use frit::import::onnx::messages::TensorProto;
use frit_ir::{DType, Tensor, TensorType};
use prost::Message;
use prost::bytes::Bytes;
use std::path::Path;

/// Reads a tensor from a file.
pub(super) fn read(path: &Path) -> Result<TensorProto, String> {
    let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    TensorProto::decode(Bytes::from(bytes)).map_err(|e| e.to_string())
}

/// The element type with this ONNX number.
fn dtype(code: i32) -> Result<DType, String> {
    Ok(match code {
        1 => DType::F32,
        2 => DType::U8,
        6 => DType::I32,
        7 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        16 => DType::BF16,
        _ => return Err(format!("element type number {code}")),
    })
}

/// The tensor that a message holds.
pub(super) fn tensor(proto: &TensorProto) -> Result<Tensor, String> {
    let dtype = dtype(proto.data_type)?;
    let dims: Vec<usize> = proto.dims.iter().map(|d| *d as usize).collect();
    let ints = &proto.int32_data;
    let bytes: Vec<u8> = match (&proto.raw_data, dtype) {
        (Some(raw), _) => raw.to_vec(),
        (None, DType::F32) => proto.float_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (None, DType::F64) => proto.double_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (None, DType::I64) => proto.int64_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (None, DType::I32) => ints.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (None, DType::F16 | DType::BF16) => {
            ints.iter().flat_map(|x| (*x as u16).to_le_bytes()).collect()
        }
        (None, _) => ints.iter().map(|x| *x as u8).collect(),
    };
    Tensor::from_bytes(TensorType::new(dtype, dims), &bytes).map_err(|e| e.to_string())
}
