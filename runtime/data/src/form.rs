//! How the tensors of files contain the examples of inputs.
//!
//! Inputs with the same first axis, the batch, have an example in each row. Where the first axes differ, as those of a graph's nodes and
//! edges, tensors that are exactly as their inputs are declared are the same for all examples. If the others agree, their rows are the
//! examples; if not, or if there are no others, an example is all of each input.

use super::formats::Contents;
use frit_ir::plan::InputSpec;

/// Where the examples of an input are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// In the rows of a tensor.
    Rows,
    /// Each is as the input is declared, behind an axis of examples or, if there is one, without.
    Whole,
    /// The tensor, as the input is declared, is the same for all examples.
    Shared,
}

impl Form {
    /// The form of each input in files that are read together.
    pub(crate) fn of(inputs: &[InputSpec], files: &[Contents]) -> Vec<Form> {
        let shape_in = |file: &Contents, input: &InputSpec| {
            file.arrays.get(&input.name).map(|array| array.shape.clone())
        };
        let is_declared = |input: &InputSpec| {
            files.iter().all(|f| shape_in(f, input).is_none_or(|s| s == input.ty.shape.dims()))
        };
        let is_constant = |input: &InputSpec| {
            let of = |file: &Contents| file.arrays.get(&input.name).is_some_and(|a| a.is_constant);
            !input.per_example || files.iter().any(of)
        };
        let varying = || inputs.iter().filter(|i| !is_constant(i));
        let others = || varying().filter(|i| !is_declared(i));
        let has_rows = |i: &InputSpec| {
            let rank = i.ty.shape.rank();
            files.iter().all(|f| shape_in(f, i).is_none_or(|shape| shape.len() == rank))
        };
        let agree = first_axis(varying()).is_some();
        let rows = agree || first_axis(others()).is_some() && others().all(has_rows);
        let form = |input: &InputSpec| match is_constant(input) {
            true => Form::Shared,
            false if rows && (agree || !is_declared(input)) => Form::Rows,
            false if is_declared(input) && others().next().is_some() => Form::Shared,
            false => Form::Whole,
        };
        inputs.iter().map(form).collect()
    }

    /// The input as a batch of this form: a whole example is a row of its own.
    pub(crate) fn spec(self, input: &InputSpec) -> InputSpec {
        let mut spec = input.clone();
        if self == Form::Whole {
            spec.ty.shape.0.insert(0, 1);
            for range in spec.ranges.iter_mut().filter(|range| !range.within.is_empty()) {
                range.within.insert(0, (0, 1));
            }
        }
        spec
    }

    /// The examples of a tensor, if its shape fits the input; `None` if it is the same for all.
    pub(crate) fn examples(self, input: &InputSpec, shape: &[usize]) -> Result<Option<usize>, ()> {
        let dims = input.ty.shape.dims();
        let (first, rest) = shape.split_first().map_or((None, shape), |(n, rest)| (Some(*n), rest));
        match self {
            Form::Shared if shape == dims => Ok(None),
            Form::Whole if shape == dims => Ok(Some(1)),
            Form::Whole if rest == dims && first.is_some() => Ok(first),
            Form::Rows if dims.split_first().is_some_and(|(_, row)| row == rest) => Ok(first),
            _ => Err(()),
        }
    }

    /// The type of an input, as expected in files.
    pub(crate) fn wanted(self, input: &InputSpec) -> String {
        let dims = input.ty.shape.dims();
        let mut all: Vec<String> = dims.iter().map(usize::to_string).collect();
        match self {
            Form::Shared => {}
            Form::Whole => all.insert(0, "examples".into()),
            Form::Rows => all[0] = "examples".into(),
        }
        format!("{}[{}]", input.ty.dtype, all.join(", "))
    }
}

/// The size of the first axis, if there are inputs and all have the same.
fn first_axis<'a>(mut inputs: impl Iterator<Item = &'a InputSpec>) -> Option<usize> {
    let size = |input: &InputSpec| input.ty.shape.dims().first().copied();
    let first = size(inputs.next()?)?;
    inputs.all(|input| size(input) == Some(first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Bytes;
    use crate::element::Element;
    use crate::formats::Array;
    use frit_ir::plan::BufferId;
    use frit_ir::{DType, TensorType};

    fn input(name: &str, dims: &[usize]) -> InputSpec {
        InputSpec {
            name: name.into(),
            ty: TensorType::new(DType::U8, dims),
            buffer: BufferId(0),
            per_example: !dims.is_empty(),
            ranges: vec![],
        }
    }

    /// The forms of inputs in files of tensors with these shapes.
    fn forms(inputs: &[&[usize]], files: &[&[&[usize]]]) -> Vec<Form> {
        let name = |i: usize| format!("x{i}");
        let inputs: Vec<InputSpec> =
            inputs.iter().enumerate().map(|(i, dims)| input(&name(i), dims)).collect();
        let contents = |shapes: &&[&[usize]]| {
            let mut contents = Contents::default();
            for (i, shape) in shapes.iter().enumerate() {
                let array = Array::new(Element::U8, shape.to_vec(), Bytes::from(vec![]));
                contents.arrays.insert(name(i), array);
            }
            contents
        };
        Form::of(&inputs, &files.iter().map(contents).collect::<Vec<_>>())
    }

    #[test]
    fn inputs_that_agree_have_examples_in_rows() {
        use Form::{Rows, Shared};
        assert_eq!(forms(&[&[8, 3], &[8]], &[&[&[20, 3], &[20]]]), [Rows, Rows]);
        // One batch is not the same for all steps.
        assert_eq!(forms(&[&[8, 3], &[8]], &[&[&[8, 3], &[8]]]), [Rows, Rows]);
        assert_eq!(forms(&[&[8, 3], &[]], &[&[&[20, 3], &[]]]), [Rows, Shared]);
    }

    #[test]
    fn inputs_that_differ_are_whole_or_shared() {
        use Form::{Rows, Shared, Whole};
        let graph: &[&[usize]] = &[&[9, 4], &[2, 14], &[9]];
        assert_eq!(forms(graph, &[&[&[5, 9, 4], &[5, 2, 14], &[5, 9]]]), [Whole; 3]);
        assert_eq!(forms(graph, &[&[&[9, 4], &[2, 14], &[9]]]), [Whole; 3]);
        // A graph whose nodes alone change.
        assert_eq!(forms(graph, &[&[&[5, 9, 4], &[2, 14], &[5, 9]]]), [Whole, Shared, Whole]);
        // A file with one graph beside a file with several.
        let one: &[&[usize]] = &[&[9, 4], &[2, 14], &[9]];
        assert_eq!(forms(graph, &[one, &[&[2, 9, 4], &[2, 2, 14], &[2, 9]]]), [Whole; 3]);
        // Positions that are no batch; of one batch, nobody can tell.
        let text: &[&[usize]] = &[&[8, 16], &[16], &[8, 16]];
        assert_eq!(forms(text, &[&[&[20, 16], &[16], &[20, 16]]]), [Rows, Shared, Rows]);
        assert_eq!(forms(text, &[one_batch(), one_batch()]), [Whole; 3]);
        assert_eq!(forms(text, &[one_batch(), &[&[9, 16], &[16], &[9, 16]]]), [Rows, Shared, Rows]);
    }

    fn one_batch() -> &'static [&'static [usize]] {
        &[&[8, 16], &[16], &[8, 16]]
    }

    #[test]
    fn examples_are_counted_by_form() {
        let graph = input("edges", &[2, 14]);
        let count = |form: Form, shape: &[usize]| form.examples(&graph, shape);
        assert_eq!(count(Form::Rows, &[7, 14]), Ok(Some(7)));
        assert_eq!(count(Form::Rows, &[7, 2, 14]), Err(()));
        assert_eq!(count(Form::Whole, &[7, 2, 14]), Ok(Some(7)));
        assert_eq!(count(Form::Whole, &[2, 14]), Ok(Some(1)));
        assert_eq!(count(Form::Whole, &[4, 14]), Err(()));
        assert_eq!(count(Form::Shared, &[2, 14]), Ok(None));
        assert_eq!(count(Form::Shared, &[1, 2, 14]), Err(()));
        assert_eq!(Form::Whole.wanted(&graph), "u8[examples, 2, 14]");
        assert_eq!(Form::Rows.wanted(&graph), "u8[examples, 14]");
    }
}
