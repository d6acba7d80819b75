//! Writes the parameters of a checkpoint as one `.safetensors` file under the model's own names.

use super::Checkpoint;
use crate::RunError;
use crate::files::deliver;
use crate::left_out::to_metadata;
use crate::save::safetensors_dtype;
use crate::tensors::put;
use safetensors::{Dtype, View};
use std::borrow::Cow;
use std::cell::RefCell;
use std::path::Path;

impl Checkpoint {
    /// Names of the parameters, in order.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.index.tensors.keys().filter_map(|key| key.strip_prefix("param/"))
    }

    /// Writes the parameters to a `.safetensors` file, one tensor in memory at a time.
    ///
    /// # Errors
    /// If a part of the checkpoint was damaged, or the file system refuses.
    pub fn write_parameters(&self, path: &Path) -> Result<(), RunError> {
        let failed = RefCell::new(None);
        let tensor = |name: &str| {
            let key = format!("param/{name}");
            self.entry(&key).map(|entry| {
                let dtype = safetensors_dtype(entry.dtype);
                let size = entry.dtype.size();
                (
                    name.to_string(),
                    Tensor {
                        checkpoint: self,
                        key,
                        dtype,
                        shape: &entry.shape,
                        size,
                        failed: &failed,
                    },
                )
            })
        };
        let tensors: Vec<_> = self.parameters().filter_map(tensor).collect();
        let written = deliver(path, |out| {
            put(out, tensors, to_metadata(&self.index.left_out))?;
            // Tensors that could not be read were written as zeros.
            if failed.borrow().is_some() {
                Err(std::io::ErrorKind::InvalidData.into())
            } else {
                Ok(())
            }
        });
        failed.take().map_or(written.map_err(RunError::io(path)), Err)
    }
}

/// One parameter; its bytes are read when they are written.
struct Tensor<'a> {
    checkpoint: &'a Checkpoint,
    key: String,
    dtype: Dtype,
    shape: &'a [usize],
    size: usize,
    /// The first read error.
    failed: &'a RefCell<Option<RunError>>,
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.checkpoint.tensor(&self.key);
        Cow::Owned(bytes.unwrap_or_else(|error| {
            self.failed.borrow_mut().get_or_insert(error);
            vec![0; self.data_len()]
        }))
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.size
    }
}
