//! The examples of one input across all files.

use super::bytes::Bytes;
use super::check;
use super::element::{Element, convert};
use super::formats::{Array, Contents};
use crate::DataError;
use frit_ir::plan::InputSpec;
use std::path::Path;

/// The examples of an input, in the type of its files.
pub(crate) struct Column {
    pub(crate) input: InputSpec,
    pub(crate) element: Element,
    /// Bytes of one example; `None` if the tensor is the same for all.
    pub(crate) example: Option<usize>,
    /// The bytes of each file.
    pub(crate) parts: Vec<Bytes>,
}

impl Column {
    /// The columns of the first file.
    pub(crate) fn of(input: &InputSpec, part: Part) -> Column {
        let size = input.ty.shape.dims().iter().skip(1).product::<usize>() * part.element.size();
        let example = part.examples.map(|_| size);
        Column { input: input.clone(), element: part.element, example, parts: vec![part.bytes] }
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
    /// The tensor of an input in a file's contents: with any number of examples, or exactly as it is declared.
    ///
    /// # Errors
    /// If there is none, or its shape or type does not fit the input.
    pub(crate) fn of(
        path: &Path,
        contents: &Contents,
        input: &InputSpec,
        exact: bool,
    ) -> Result<Part, DataError> {
        let wanted = wanted(input, exact);
        let array = contents.get(&input.name).map_err(|what| {
            let there = contents.list();
            let reason = format!("{what}; the plan expects {wanted}, and found {there}");
            DataError::content(path, reason)
        })?;
        let Array { element, shape, bytes, is_constant } = array;
        let element = *element;
        let refuse = |what: String| {
            let reason = format!("tensor `{}` {what}; the plan expects {wanted}", input.name);
            Err(DataError::content(path, reason))
        };
        let dims = input.ty.shape.dims();
        let per_example = input.per_example && !exact && !is_constant;
        let fits = match per_example {
            true => shape.split_first().zip(dims.split_first()).is_some_and(|(a, b)| a.1 == b.1),
            false => *shape == dims,
        };
        if !fits {
            let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
            return refuse(format!("has shape [{}]", dims.join(", ")));
        }
        if !element.feeds(input.ty.dtype) {
            let known = Element::feeding(input.ty.dtype);
            return refuse(format!("is {element}, and this input takes {known}"));
        }
        let mut part =
            Part { element, bytes: bytes.clone(), examples: per_example.then(|| shape[0]) };
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

/// The type of an input, as expected in files.
fn wanted(input: &InputSpec, exact: bool) -> String {
    let dims = input.ty.shape.dims();
    let mut dims: Vec<String> = dims.iter().map(usize::to_string).collect();
    if let (Some(first), true) = (dims.first_mut(), input.per_example && !exact) {
        *first = "examples".into();
    }
    format!("{}[{}]", input.ty.dtype, dims.join(", "))
}
