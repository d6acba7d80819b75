//! Tensors in memory by name, as a data file has them: a batch of examples, or parameters.

use super::bytes::Bytes;
use super::element::Element;
use super::formats::{Array, Contents, stored_dtype};
use crate::DataError;
use safetensors::Dtype;
use std::path::Path;

/// Tensors by name, each little-endian in row-major order.
#[derive(Default)]
pub struct Batch(Contents);

impl Batch {
    /// Adds a tensor. The bytes are read where they are, until the batch and everything made of it is gone.
    ///
    /// # Errors
    /// If their number does not fit the shape.
    pub fn add(
        &mut self,
        name: &str,
        element: Element,
        shape: Vec<usize>,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Result<(), DataError> {
        let bytes = Bytes::of(bytes);
        let wanted = shape.iter().try_fold(element.size(), |n, dim| n.checked_mul(*dim));
        if wanted != Some(bytes.len()) {
            let reason = format!(
                "tensor `{name}` of {element}{shape:?} has {} bytes; give a contiguous tensor",
                bytes.len()
            );
            return Err(DataError::content(Path::new("batch"), reason));
        }
        self.0.arrays.insert(name.into(), Array::new(element, shape, bytes));
        Ok(())
    }

    /// Adds a tensor of a type that no input has; it is refused if an input of this name is read.
    pub fn add_unusable(&mut self, name: &str, kind: String) {
        self.0.others.insert(name.into(), kind);
    }

    /// The names of its tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.arrays.keys().map(String::as_str)
    }

    /// A tensor, as files have it: type, shape and elements.
    pub fn tensor(&self, name: &str) -> Option<(Dtype, Vec<usize>, &[u8])> {
        let Array { element, shape, bytes, .. } = self.0.arrays.get(name)?;
        Some((stored_dtype(*element), shape.clone(), bytes))
    }

    pub(crate) fn contents(&self) -> &Contents {
        &self.0
    }
}
