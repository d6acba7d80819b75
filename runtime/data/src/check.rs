//! Checks that indices and labels are within the ranges that the plan states.
//!
//! Files are checked once when loaded, before the first step; very large ones are checked batch by batch.

use super::element::Element;
use crate::DataError;
use frit_ir::DType;
use frit_ir::plan::{IndexKind, IndexRange, InputSpec};
use std::path::Path;

/// An element that may be out of range.
struct Found {
    element: usize,
    value: i128,
}

/// Checks examples of an input against its ranges. `bytes` are those of whole examples, of which the first is
/// number `first` of its file.
///
/// # Errors
/// The first element that is out of range.
pub(crate) fn ranges(
    path: &Path,
    input: &InputSpec,
    element: Element,
    bytes: &[u8],
    first: usize,
) -> Result<(), DataError> {
    // A boolean is in range for every reader.
    if element == Element::Bool
        && let Some(at) = bytes.iter().position(|b| *b > 1)
    {
        let place = place(input, first, at);
        let value = bytes[at];
        let reason = format!("tensor `{}`, {place}: {value} is not 0 or 1", input.name);
        return Err(DataError::content(path, reason));
    }
    for range in &input.ranges {
        if let Some(found) = outside(input, range, element, bytes) {
            let place = place(input, first, found.element);
            let Found { value, .. } = found;
            let mut advice = advice(range, value, smallest(element, bytes, range.ignore));
            if path.extension().is_some_and(|e| e == "bin") {
                advice += " Or are its tokens of another type? See --token-dtype";
            }
            let reads = match range.kind {
                IndexKind::Class => format!("the classes of {}", range.of),
                IndexKind::Row => format!("the rows of `{}`", range.of),
                IndexKind::Place => format!("what {} reads", range.of),
            };
            let reason = format!(
                "tensor `{}`, {place}: {value} is outside of {range}, {reads}; {advice}",
                input.name
            );
            return Err(DataError::content(path, reason));
        }
    }
    Ok(())
}

/// Checks that every element fits the smaller type of its input.
///
/// # Errors
/// The first element that does not fit.
pub(crate) fn fits(
    path: &Path,
    input: &InputSpec,
    element: Element,
    bytes: &[u8],
) -> Result<(), DataError> {
    let dtype = input.ty.dtype;
    let found = match Element::from(dtype).bounds() {
        _ if dtype == DType::Bool => None,
        Some((lo, hi)) => find(element, bytes, |x| x < lo || x > hi),
        // The largest f32 that does not round to infinity.
        None if dtype == DType::F16 => bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .position(|x| x.is_finite() && x.abs() >= 65520.0)
            .map(|element| Found { element, value: 65520 }),
        None => None,
    };
    let Some(Found { element: at, value }) = found else { return Ok(()) };
    let place = place(input, 0, at);
    let what =
        if dtype == DType::F16 { format!("a value of {value} or more") } else { value.to_string() };
    let reason = format!("tensor `{}`, {place}: {what} does not fit {dtype}", input.name);
    Err(DataError::content(path, reason))
}

/// The first element that the range covers and does not allow.
fn outside(input: &InputSpec, range: &IndexRange, element: Element, bytes: &[u8]) -> Option<Found> {
    let (lo, hi, ignore) =
        (i128::from(range.lo), i128::from(range.hi), range.ignore.map(i128::from));
    let bad = |x: i128| (x < lo || x > hi) && Some(x) != ignore;
    if range.within.is_empty() {
        return if element.bounds().is_some_and(|(a, b)| lo <= a && b <= hi) {
            None
        } else {
            find(element, bytes, bad)
        };
    }
    let axes = &input.ty.shape.dims()[1..];
    let per_example: usize = axes.iter().product();
    let meant = |at: usize| {
        let mut rest = at % per_example.max(1);
        let mut inside = true;
        for (size, (begin, end)) in axes.iter().zip(&range.within[1..]).rev() {
            inside &= (*begin..*end).contains(&(rest % size));
            rest /= size;
        }
        inside
    };
    let mut from = 0;
    // Elements outside the range are rare; only for these is it checked whether the range covers them.
    while let Some(found) = find(element, &bytes[from * element.size()..], bad) {
        let at = from + found.element;
        if meant(at) {
            return Some(Found { element: at, ..found });
        }
        from = at + 1;
    }
    None
}

/// The first integer of which `bad` is true.
fn find(element: Element, bytes: &[u8], bad: impl Fn(i128) -> bool) -> Option<Found> {
    macro_rules! search {
        ($t:ty) => {{
            let (all, _) = bytes.as_chunks::<{ size_of::<$t>() }>();
            let value = |b: &[u8; size_of::<$t>()]| i128::from(<$t>::from_le_bytes(*b));
            let element = all.iter().position(|b| bad(value(b)))?;
            Some(Found { element, value: value(&all[element]) })
        }};
    }
    match element {
        Element::I64 => search!(i64),
        Element::I32 => search!(i32),
        Element::I16 => search!(i16),
        Element::I8 => search!(i8),
        Element::U64 => search!(u64),
        Element::U32 => search!(u32),
        Element::U16 => search!(u16),
        Element::U8 | Element::Bool => search!(u8),
        Element::F64 | Element::F32 | Element::F16 | Element::BF16 => None,
    }
}

/// The smallest element but for the ignored number.
fn smallest(element: Element, bytes: &[u8], ignore: Option<i64>) -> i128 {
    let mut least = i128::MAX;
    let mut rest = bytes;
    while let Some(found) = find(element, rest, |x| x < least && Some(x) != ignore.map(i128::from))
    {
        least = found.value;
        rest = &rest[(found.element + 1) * element.size()..];
    }
    least
}

/// Which example an element is of, and where in it.
fn place(input: &InputSpec, first: usize, element: usize) -> String {
    let axes = input.ty.shape.dims().get(1..).unwrap_or_default();
    let per_example = axes.iter().product::<usize>().max(1);
    let mut rest = element % per_example;
    let mut at: Vec<String> = Vec::new();
    for size in axes.iter().rev() {
        at.push((rest % size).to_string());
        rest /= size;
    }
    at.reverse();
    let example = first + element / per_example;
    if at.is_empty() {
        return format!("example {example}");
    }
    format!("example {example} at [{}]", at.join(", "))
}

/// The likely cause.
fn advice(range: &IndexRange, value: i128, least: i128) -> String {
    let most = i128::from(range.hi);
    let n = most + 1;
    match range.kind {
        IndexKind::Class if least == 1 && value == n => {
            "labels begin at 0, and those of this file seem to begin at 1: subtract 1".into()
        }
        IndexKind::Class if value < 0 => match range.ignore {
            Some(ignore) => format!("the ignored label is {ignore}"),
            None => "no label is ignored here; see ignore_index".into(),
        },
        IndexKind::Class => format!("the model has {n} classes: does the data have more?"),
        IndexKind::Row if value > most => {
            format!("the table has {n} rows: does the data have a larger vocabulary?")
        }
        IndexKind::Row | IndexKind::Place => {
            format!("indices go from 0 to {most}, and from {} when counted from the end", range.lo)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::TensorType;
    use frit_ir::plan::BufferId;

    fn input(dims: &[usize], range: IndexRange) -> InputSpec {
        InputSpec {
            name: "ids".into(),
            ty: TensorType::new(DType::I64, dims.to_vec()),
            buffer: BufferId(0),
            per_example: true,
            ranges: vec![range],
        }
    }

    fn range(lo: i64, hi: i64, kind: IndexKind) -> IndexRange {
        IndexRange { lo, hi, ignore: None, within: vec![], kind, of: "wte".into(), causal: vec![] }
    }

    fn check(input: &InputSpec, values: &[i16], first: usize) -> Result<(), String> {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        ranges(Path::new("f.npz"), input, Element::I16, &bytes, first).map_err(|e| e.to_string())
    }

    #[test]
    fn an_element_outside_of_the_range_is_named() {
        let rows = input(&[4, 3], range(-5, 4, IndexKind::Row));
        assert_eq!(check(&rows, &[0, -5, 4], 0), Ok(()));
        assert_eq!(
            check(&rows, &[0, 1, 2, 3, 4, 5], 10).unwrap_err(),
            "f.npz: tensor `ids`, example 11 at [2]: 5 is outside of -5..=4, the rows of `wte`; the table has 5 \
             rows: does the data have a larger vocabulary?"
        );
        let classes =
            input(&[4], IndexRange { ignore: Some(-100), ..range(0, 9, IndexKind::Class) });
        assert_eq!(check(&classes, &[0, 9, -100], 0), Ok(()));
        let one_based = check(&classes, &[3, 1, 10], 0).unwrap_err();
        assert!(one_based.ends_with("seem to begin at 1: subtract 1"), "{one_based}");
        let one_based = check(&classes, &[-100, 1, 10], 0).unwrap_err();
        assert!(one_based.ends_with("seem to begin at 1: subtract 1"), "{one_based}");
        let more = check(&classes, &[5, 10, 12], 0).unwrap_err();
        assert!(more.ends_with("does the data have more?"), "{more}");
        let negative = check(&classes, &[0, -1], 0).unwrap_err();
        assert!(negative.contains("example 1: -1 is outside of 0..=9 or -100"), "{negative}");
        assert!(negative.ends_with("the ignored label is -100"), "{negative}");
    }

    #[test]
    fn only_the_part_that_is_meant_is_checked() {
        let shifted = input(
            &[2, 3],
            IndexRange { within: vec![(0, 2), (1, 3)], ..range(0, 4, IndexKind::Class) },
        );
        assert_eq!(check(&shifted, &[9, 0, 4, -9, 1, 1], 0), Ok(()));
        let found = check(&shifted, &[9, 0, 4, 9, 1, 5], 0).unwrap_err();
        assert!(found.contains("example 1 at [2]: 5"), "{found}");
    }
}
