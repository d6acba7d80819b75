//! `.safetensors`: named tensors, memory-mapped.

use super::super::bytes::Bytes;
use super::super::element::Element;
use super::{Array, Contents};
use crate::DataError;
use safetensors::{Dtype, SafeTensors};
use std::path::Path;

pub(crate) fn read(path: &Path) -> Result<Contents, DataError> {
    let bytes = Bytes::map(path)?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|e| DataError::content(path, format!("not a safetensors file: {e}")))?;
    let mut contents = Contents::default();
    for (name, view) in file.iter() {
        let Some(element) = element(view.dtype()) else {
            contents.others.insert(name.to_string(), format!("{:?}", view.dtype()).to_lowercase());
            continue;
        };
        let begin = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
        let data = bytes.part(begin..begin + view.data().len());
        let bytes = data.expect("invariant: a tensor's bytes are the file's");
        let array = Array::new(element, view.shape().to_vec(), bytes);
        contents.arrays.insert(name.to_string(), array);
    }
    Ok(contents)
}

/// Element types of data as these files name them.
const TYPES: [(Dtype, Element); 13] = [
    (Dtype::F64, Element::F64),
    (Dtype::F32, Element::F32),
    (Dtype::F16, Element::F16),
    (Dtype::BF16, Element::BF16),
    (Dtype::I64, Element::I64),
    (Dtype::I32, Element::I32),
    (Dtype::I16, Element::I16),
    (Dtype::I8, Element::I8),
    (Dtype::U64, Element::U64),
    (Dtype::U32, Element::U32),
    (Dtype::U16, Element::U16),
    (Dtype::U8, Element::U8),
    (Dtype::BOOL, Element::Bool),
];

fn element(dtype: Dtype) -> Option<Element> {
    TYPES.iter().find(|(stored, _)| *stored == dtype).map(|(_, element)| *element)
}

/// The type of these files.
pub(crate) fn stored_dtype(element: Element) -> Dtype {
    let found = TYPES.iter().find(|(_, other)| *other == element);
    found.expect("invariant: every element type is stored").0
}
