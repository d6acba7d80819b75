//! `.bin`: a sequence of token ids, uint16 or uint32.
//!
//! A file may begin with the header of 256 int32 of GPT-2 and Llama shards (magic, version, number of tokens), which
//! determines the type. Otherwise the type is the requested one, else uint16 unless the vocabulary or the file contradicts it.

use super::super::bytes::Bytes;
use super::super::element::{Element, convert};
use super::{Array, Contents};
use crate::DataError;
use frit_ir::DType;
use frit_ir::plan::{InputSpec, Plan};
use std::path::Path;

/// The type of the tokens of a file without a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TokenDType {
    /// uint16.
    U16,
    /// uint32.
    U32,
}

impl TokenDType {
    fn element(self) -> Element {
        match self {
            TokenDType::U16 => Element::U16,
            TokenDType::U32 => Element::U32,
        }
    }
}

/// Bytes of a header.
const HEADER: usize = 256 * 4;
/// Magic, version and type of the known headers.
const HEADERS: [(u32, u32, TokenDType); 2] =
    [(20_240_520, 1, TokenDType::U16), (20_240_801, 7, TokenDType::U32)];
/// Tokens that are examined to determine the type of a file.
const LOOK: usize = 4096;

/// Windows of T + 1 tokens, each beginning at the last token of the previous one: the first T are the input, the last T
/// the labels. The plan must have one integer input and labels of the same shape; see [`Inputs`] for others.
pub(crate) fn read(
    path: &Path,
    plan: &Plan,
    asked: Option<TokenDType>,
) -> Result<Contents, DataError> {
    let refuse = |reason: String| DataError::content(path, reason);
    let inputs = Inputs::of(plan).map_err(refuse)?;
    let file = Bytes::map(path)?;
    let (dtype, begin, end) = match header(&file).map_err(refuse)? {
        Some((dtype, _)) if asked.is_some_and(|asked| asked != dtype) => {
            let found = dtype.element();
            return Err(refuse(format!("its header says {found}; remove --token-dtype")));
        }
        Some((dtype, n)) => (dtype, HEADER, HEADER + n * dtype.element().size()),
        None => (headerless(&file, asked, inputs.input).map_err(refuse)?, 0, file.len()),
    };
    let tokens = file.part(begin..end).expect("invariant: the header's tokens are there");
    Ok(inputs.windows(dtype.element(), &tokens))
}

/// The inputs that windows of tokens are for.
pub(crate) struct Inputs<'a> {
    input: &'a InputSpec,
    labels: &'a InputSpec,
    /// Inputs that are the same for every window, with their values by position.
    constants: Vec<(&'a InputSpec, ByPosition)>,
}

/// A value by its position in the window.
type ByPosition = fn(usize) -> u32;

/// Names, within their module, of inputs that follow from there being no padding, with their values by position.
const CONSTANTS: [(&str, ByPosition); 3] =
    [("attention_mask", |_| 1), ("position_ids", |t| t as u32), ("token_type_ids", |_| 0)];

impl Inputs<'_> {
    /// The integer input `[batch, T]` and the labels of the same shape, and what follows from them.
    ///
    /// # Errors
    /// If the plan has other inputs.
    pub(crate) fn of(plan: &Plan) -> Result<Inputs<'_>, String> {
        let (mut of_data, mut constants) = (vec![], vec![]);
        for input in &plan.inputs {
            let name = input.name.rsplit(['.', '/']).next().unwrap_or_default();
            match CONSTANTS.iter().find(|(known, _)| *known == name) {
                Some((_, value)) if input.ty.shape.rank() == 2 => constants.push((input, *value)),
                _ => of_data.push(input),
            }
        }
        let [input, labels] = of_data[..] else {
            let names: Vec<String> = of_data.iter().map(|i| format!("`{}`", i.name)).collect();
            let names = if names.is_empty() { "none".into() } else { names.join(", ") };
            return Err(format!(
                "token files have values for one input and labels, and this plan has {names}; use a file with a \
                 tensor for each: .safetensors, .parquet or .npz"
            ));
        };
        let integer = matches!(input.ty.dtype, DType::I64 | DType::I32);
        if input.ty.shape.rank() != 2 || labels.ty.shape != input.ty.shape || !integer {
            let (a, b) = (&input.ty, &labels.ty);
            return Err(format!(
                "token files need integer inputs [batch, T] and labels of the same shape, not {a} and {b}; use a file \
                 with a tensor for each: .safetensors, .parquet or .npz"
            ));
        }
        Ok(Inputs { input, labels, constants })
    }

    /// Tokens of a window's input.
    fn length(&self) -> usize {
        self.input.ty.shape.0[1]
    }

    /// The windows of a sequence of tokens of one type.
    pub(crate) fn windows(&self, element: Element, tokens: &Bytes) -> Contents {
        let (size, t) = (element.size(), self.length());
        let n = (tokens.len() / size).saturating_sub(1).checked_div(t).unwrap_or(0);
        let window = |offset: usize| {
            let first = (offset * size).min(tokens.len());
            let bytes = tokens.part(first..first + n * t * size);
            let bytes = bytes.expect("invariant: there is one token more than the windows have");
            Array::new(element, vec![n, t], bytes)
        };
        let mut contents = Contents::default();
        contents.arrays.insert(self.input.name.clone(), window(0));
        contents.arrays.insert(self.labels.name.clone(), window(1));
        for (input, value) in &self.constants {
            contents.arrays.insert(input.name.clone(), constant(input, *value));
        }
        contents
    }
}

/// One batch of an input whose rows are all alike.
fn constant(input: &InputSpec, value: ByPosition) -> Array {
    let shape = input.ty.shape.0.clone();
    let row: Vec<u8> = (0..shape[1]).flat_map(|t| value(t).to_le_bytes()).collect();
    let mut bytes = Vec::new();
    convert(Element::U32, &row.repeat(shape[0]), input.ty.dtype, &mut bytes);
    let element = Element::from(input.ty.dtype);
    Array { is_constant: true, ..Array::new(element, shape, Bytes::from(bytes)) }
}

/// The type and the number of tokens of a header; `None` if there is no header.
fn header(file: &[u8]) -> Result<Option<(TokenDType, usize)>, String> {
    let word = |i: usize| {
        let bytes = file.get(4 * i..4 * i + 4).and_then(|b| b.try_into().ok());
        bytes.map(u32::from_le_bytes)
    };
    let known = HEADERS.iter().find(|(magic, ..)| word(0) == Some(*magic));
    let Some((_, version, dtype)) = known else { return Ok(None) };
    if file.len() < HEADER {
        let bytes = file.len();
        return Err(format!(
            "its {bytes} bytes are the beginning of a header of {HEADER}: it is truncated"
        ));
    }
    if word(1) != Some(*version) {
        let found = word(1).unwrap_or(0);
        return Err(format!("its header is of version {found}; version {version} is read"));
    }
    let n = word(2).unwrap_or(0) as usize;
    let there = (file.len() - HEADER) / dtype.element().size();
    if n != there {
        let what = if n > there {
            "it is truncated"
        } else {
            "it may be several files in one; give each by itself"
        };
        return Err(format!("its header says {n} tokens, and the file has {there}: {what}"));
    }
    Ok(Some((*dtype, n)))
}

/// The type of a file without a header.
fn headerless(
    file: &[u8],
    asked: Option<TokenDType>,
    input: &InputSpec,
) -> Result<TokenDType, String> {
    let dtype = asked.unwrap_or(TokenDType::U16);
    let size = dtype.element().size();
    if !file.len().is_multiple_of(size) {
        let (found, bytes) = (dtype.element(), file.len());
        return Err(format!(
            "its {bytes} bytes are not a whole number of {found} tokens; set their type with --token-dtype"
        ));
    }
    if asked.is_some() {
        return Ok(dtype);
    }
    let vocabulary = input.ranges.iter().map(|r| r.hi).min().unwrap_or(0);
    if vocabulary > i64::from(u16::MAX) {
        return Err(format!(
            "the model has {} tokens, more than uint16 can name: say the file's type with --token-dtype u16 \
             or u32",
            vocabulary + 1
        ));
    }
    let (words, _) = file[..file.len().min(4 * LOOK)].as_chunks::<4>();
    let is_wide = |w: &[u8; 4]| w[2..] == [0, 0];
    if words.len() > 1 && words.iter().all(is_wide) && words.iter().any(|w| w[..2] != [0, 0]) {
        return Err(
            "every second uint16 of it is 0, as if its tokens were uint32: say their type with \
                    --token-dtype u32, or u16"
                .into(),
        );
    }
    Ok(dtype)
}
