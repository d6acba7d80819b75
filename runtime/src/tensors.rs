//! Writes `.safetensors` files with one tensor in memory at a time. The writer of the crate `safetensors` bypasses
//! [`crate::files`], so the crate is used only for reading.

use crate::RunError;
use crate::files::deliver;
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, View};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;

/// One tensor: element type, shape, little-endian bytes.
pub struct Tensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Little-endian elements.
    pub bytes: Cow<'a, [u8]>,
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes a file of named tensors atomically.
///
/// # Errors
/// If the file system refuses.
pub fn write<V: View>(
    path: &Path,
    tensors: Vec<(String, V)>,
    metadata: Option<(String, String)>,
) -> Result<(), RunError> {
    deliver(path, |out| put(out, tensors, metadata)).map_err(RunError::io(path))
}

/// Writes named tensors, with one entry of metadata: larger elements first, so that all are aligned, and by name.
///
/// # Errors
/// If writing fails, or a tensor's bytes do not fit its shape.
pub fn put<V: View>(
    out: &mut dyn Write,
    mut tensors: Vec<(String, V)>,
    metadata: Option<(String, String)>,
) -> io::Result<()> {
    tensors.sort_by(|(a, x), (b, y)| (Reverse(x.dtype()), a).cmp(&(Reverse(y.dtype()), b)));
    let mut end = 0;
    let info = |(name, tensor): &(String, V)| {
        let begin = end;
        end += tensor.data_len();
        let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
        (name.clone(), TensorInfo { dtype, shape, data_offsets: (begin, end) })
    };
    let infos = tensors.iter().map(info).collect();
    let metadata = Metadata::new(metadata.map(|entry| HashMap::from([entry])), infos)
        .map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for (_, tensor) in &tensors {
        out.write_all(&tensor.data())?;
    }
    Ok(())
}
