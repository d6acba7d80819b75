//! The examples of one input across all files.

use super::bytes::Bytes;
use super::check;
use super::element::{Element, convert};
use super::form::Form;
use super::formats::{Array, Contents};
use crate::DataError;
use frit_ir::plan::{IndexKind, InputSpec};
use std::path::Path;

/// The examples of an input, in the type of its files.
pub(crate) struct Column {
    /// The input, whose first axis is that of examples if they differ.
    pub(crate) input: InputSpec,
    pub(crate) element: Element,
    /// Bytes of one example; `None` if the tensor is the same for all.
    pub(crate) example: Option<usize>,
    /// The bytes of each file.
    pub(crate) parts: Vec<Bytes>,
}

impl Column {
    /// The column of the first file.
    pub(crate) fn of(input: InputSpec, part: Part) -> Column {
        let size = input.ty.shape.dims().iter().skip(1).product::<usize>() * part.element.size();
        let example = part.examples.map(|_| size);
        Column { input, element: part.element, example, parts: vec![part.bytes] }
    }

    /// Adds another file.
    ///
    /// # Errors
    /// If it has another type, or a tensor that is shared by all examples differs.
    pub(crate) fn add(&mut self, path: &Path, part: Part) -> Result<(), DataError> {
        let name = &self.input.name;
        if part.element != self.element {
            let (here, before) = (part.element, self.element);
            let reason = format!("tensor `{name}` is {here}, and {before} in the files before");
            return Err(DataError::content(path, reason));
        }
        if self.example.is_none() && *part.bytes != *self.parts[0] {
            let reason = format!(
                "tensor `{name}` is the same for all examples, and another than in the files before"
            );
            return Err(DataError::content(path, reason));
        }
        self.parts.push(part.bytes);
        Ok(())
    }

    /// Whether its elements are checked.
    pub(crate) fn is_checked(&self) -> bool {
        self.element == Element::Bool || !self.input.ranges.is_empty()
    }
}

/// The tensor of an input in one file.
pub(crate) struct Part {
    pub(crate) element: Element,
    pub(crate) bytes: Bytes,
    /// Examples; `None` if the tensor is the same for all.
    pub(crate) examples: Option<usize>,
}

impl Part {
    /// The tensor of an input in a file's contents.
    ///
    /// # Errors
    /// If there is none, or its shape or type does not fit the input.
    pub(crate) fn of(
        path: &Path,
        contents: &Contents,
        input: &InputSpec,
        form: Form,
    ) -> Result<Part, DataError> {
        let wanted = form.wanted(input);
        let array = contents.get(&input.name).map_err(|what| {
            let there = contents.list();
            let is_one = path.is_file() && path.extension().is_some_and(|e| e == "npy");
            let remedy = match is_one {
                true => "; a .npy file is the input that it is named after: put all inputs into one file with \
                         numpy.savez(\"data.npz\", INPUT=array, …), or give a folder of .npy files",
                false => "",
            };
            let reason =
                format!("{what}; the plan expects {wanted}, and found {there}{remedy}");
            DataError::content(path, reason)
        })?;
        let Array { element, shape, bytes, .. } = array;
        let element = *element;
        let refuse = |what: String, remedy: &str| {
            let name = &input.name;
            let reason = format!("tensor `{name}` {what}; the plan expects {wanted}{remedy}");
            Err(DataError::content(path, reason))
        };
        let Ok(examples) = form.examples(input, shape) else {
            let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
            return refuse(format!("has shape [{}]", dims.join(", ")), class_axis(input, shape));
        };
        if !element.feeds(input.ty.dtype) {
            let known = Element::feeding(input.ty.dtype);
            return refuse(format!("is {element}, and this input takes {known}"), "");
        }
        let mut part = Part { element, bytes: bytes.clone(), examples };
        if element.size() > input.ty.dtype.size() {
            part.narrow(path, input)?;
        }
        Ok(part)
    }

    /// Converts the elements to the input's type, which is smaller; every one must fit.
    fn narrow(&mut self, path: &Path, input: &InputSpec) -> Result<(), DataError> {
        let to = input.ty.dtype;
        check::fits(path, input, self.element, &self.bytes)?;
        let n = self.bytes.len() / self.element.size();
        let mut narrow = Vec::with_capacity(n * to.size());
        convert(self.element, &self.bytes, to, &mut narrow);
        (self.element, self.bytes) = (Element::from(to), Bytes::from(narrow));
        Ok(())
    }
}

/// What to do if labels have as many axes as expected, and others are their sizes: the classes may be on another axis of the logits.
fn class_axis(input: &InputSpec, shape: &[usize]) -> &'static str {
    let dims = input.ty.shape.dims();
    let is_class = input.ranges.iter().any(|range| range.kind == IndexKind::Class);
    match is_class && dims.len() > 1 && dims.len() == shape.len() {
        true => {
            "; where the classes are on the second axis of the logits, as in torch, set loss.class_axis = 1"
        }
        false => "",
    }
}
