//! Tensors of Python: NumPy arrays, read where they are.

use frit_ir::DType;
use frit_runtime::data::{Batch, Element};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};

/// The memory of an array, which lives as long as this.
struct Held {
    _owner: Py<PyAny>,
    begin: *const u8,
    bytes: usize,
}

// SAFETY: the memory is only read, by however many threads. Nobody may write to an array while a step reads it, which
// the package's documentation says.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the owner says that this many bytes are there, and keeps them while it lives.
        unsafe { std::slice::from_raw_parts(self.begin, self.bytes) }
    }
}

/// An array of the package: element type, shape and memory.
struct Array {
    element: Element,
    shape: Vec<usize>,
    held: Held,
}

impl Array {
    /// The array of a pair: a C-contiguous, little-endian array with NumPy's array interface, and the name of its
    /// element type.
    fn of(pair: &Bound<'_, PyAny>) -> PyResult<Array> {
        let (array, name): (Bound<'_, PyAny>, String) = pair.extract()?;
        let element = Element::ALL.into_iter().find(|e| e.name() == name);
        let element = element.ok_or_else(|| PyValueError::new_err(format!("no type {name}")))?;
        let interface = array.getattr("__array_interface__")?;
        let (address, _): (usize, bool) = interface.get_item("data")?.extract()?;
        let shape: Vec<usize> = interface.get_item("shape")?.extract()?;
        if !interface.get_item("strides")?.is_none() {
            return Err(PyValueError::new_err("the array is not contiguous"));
        }
        let bytes: usize = array.getattr("nbytes")?.extract()?;
        let held = Held { _owner: array.unbind(), begin: address as *const u8, bytes };
        Ok(Array { element, shape, held })
    }
}

/// The tensors of a dict: names with arrays, or with words on what cannot be read.
pub(crate) fn batch(given: &Bound<'_, PyDict>) -> PyResult<Result<Batch, frit_runtime::RunError>> {
    let mut batch = Batch::default();
    for (name, value) in given.iter() {
        let name: String = name.extract()?;
        if let Ok(kind) = value.extract::<String>() {
            batch.add_unusable(&name, kind);
            continue;
        }
        let Array { element, shape, held } = Array::of(&value)?;
        if let Err(error) = batch.add(&name, element, shape, held) {
            return Ok(Err(error.into()));
        }
    }
    Ok(Ok(batch))
}

/// A tensor as a triple: name of the element type, shape, and its bytes.
pub(crate) type Triple<'py> = (&'static str, Vec<usize>, Bound<'py, PyByteArray>);

/// A stored tensor as a triple.
pub(crate) fn triple<'py>(
    py: Python<'py>,
    dtype: DType,
    shape: &[usize],
    bytes: &[u8],
) -> Triple<'py> {
    (dtype.name(), shape.to_vec(), PyByteArray::new(py, bytes))
}
