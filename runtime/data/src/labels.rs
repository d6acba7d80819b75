//! Labels that are doubtful: all ignored, or not the next tokens of their inputs but shifted twice, or not at all, as models that shift
//! by themselves expect them.
//!
//! Labels that are the tokens themselves are meant by autoencoders, whose places see the tokens behind them.

use super::column::Column;
use super::element::{Element, convert};
use frit_ir::plan::IndexKind;
use frit_ir::{DType, plan::IndexRange};
use std::collections::BTreeSet;

/// Examples that are looked at.
const EXAMPLES: usize = 256;
/// Labels that must agree, and of how many classes, to be no coincidence.
const AGREEING: usize = 16;
const CLASSES: usize = 3;

/// What is wrong with the labels, in a sentence; `None` if they may be right.
pub(crate) fn misplaced(columns: &[Column]) -> Option<String> {
    // Where a part of an input is read, the model may shift by itself.
    let kind = |c: &Column, kind: IndexKind| {
        let whole = c.input.ranges.iter().all(|r| r.within.is_empty());
        c.input.ranges.iter().find(|r| r.kind == kind && whole).cloned()
    };
    let labels = columns.iter().filter_map(|c| Some((c, kind(c, IndexKind::Class)?)));
    let mut pairs = labels.flat_map(|(labels, range)| {
        let tokens = columns.iter().filter(|c| kind(c, IndexKind::Row).is_some());
        tokens.map(move |tokens| (labels, range.clone(), tokens))
    });
    pairs.find_map(|(labels, range, tokens)| misplaced_in(labels, &range, tokens))
}

/// That every label is ignored, so that there is no loss.
pub(crate) fn ignored(columns: &[Column]) -> Option<String> {
    let ignore = |c: &Column| {
        let range = c.input.ranges.iter().find(|r| r.kind == IndexKind::Class);
        range.filter(|r| r.within.is_empty()).and_then(|r| r.ignore)
    };
    let labels = columns.iter().filter(|c| c.element.is_integer() && c.element != Element::Bool);
    labels.filter_map(|c| Some((c, ignore(c)?))).find_map(|(labels, ignore)| {
        let mut wide = Vec::new();
        let mut are_ignored = |bytes: &[u8]| {
            wide.clear();
            convert(labels.element, bytes, DType::I64, &mut wide);
            wide.as_chunks::<8>().0.iter().all(|b| i64::from_le_bytes(*b) == ignore)
        };
        let mut chunks = labels.parts.iter().flat_map(|part| part.chunks(EXAMPLES * 64)).peekable();
        let all = chunks.peek().is_some() && chunks.all(&mut are_ignored);
        all.then(|| {
            let name = &labels.input.name;
            format!("every label of `{name}` is {ignore}, which is ignored: no element has a loss")
        })
    })
}

fn misplaced_in(labels: &Column, range: &IndexRange, tokens: &Column) -> Option<String> {
    let dims = labels.input.ty.shape.dims();
    let length = *dims.last().filter(|_| dims.len() > 1)?;
    if tokens.input.ty.shape.dims() != dims || labels.input.name == tokens.input.name {
        return None;
    }
    let (ours, theirs) = (first(labels)?, first(tokens)?);
    let all_at = |shift: usize| {
        let inside = |at: &usize| at % length + shift < length && range.ignore != Some(ours[*at]);
        let mut compared = 0;
        let mut classes = BTreeSet::new();
        let agree = (0..ours.len().min(theirs.len())).filter(inside).all(|at| {
            compared += 1;
            classes.insert(ours[at]);
            ours[at] == theirs[at + shift]
        });
        agree && compared >= AGREEING && classes.len() >= CLASSES
    };
    let (label, token) = (&labels.input.name, &tokens.input.name);
    let predicts = range.causal.contains(token);
    let what = match (predicts && all_at(0), all_at(2)) {
        (true, _) => {
            "at its own place, behind which the model sees none: nothing shifts them here, and the model learns to copy"
        }
        (_, true) => "two places later: labels of the next token were shifted once more",
        _ => return None,
    };
    Some(format!(
        "every label of `{label}` is the token of `{token}` {what}; give each place the token that follows it"
    ))
}

/// The first examples of a column, if they are integers.
fn first(column: &Column) -> Option<Vec<i64>> {
    let integer = column.element.is_integer() && column.element != Element::Bool;
    let size = column.example.filter(|size| integer && *size > 0)?;
    let part = column.parts.iter().find(|p| !p.is_empty())?;
    let bytes = &part[..part.len().min(EXAMPLES * size)];
    let mut wide = Vec::new();
    convert(column.element, bytes, DType::I64, &mut wide);
    Some(wide.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bytes;
    use frit_ir::TensorType;
    use frit_ir::plan::{BufferId, InputSpec};

    const LENGTH: usize = 8;

    fn column(name: &str, kind: IndexKind, values: &[i64]) -> Column {
        column_within(name, kind, values, vec![])
    }

    fn column_within(
        name: &str,
        kind: IndexKind,
        values: &[i64],
        within: Vec<(usize, usize)>,
    ) -> Column {
        let range = IndexRange {
            lo: 0,
            hi: 99,
            ignore: (kind == IndexKind::Class).then_some(-100),
            within,
            kind,
            of: "table".into(),
            causal: vec!["ids".into()],
        };
        let input = InputSpec {
            name: name.into(),
            ty: TensorType::new(DType::I64, [2, LENGTH]),
            buffer: BufferId(0),
            per_example: true,
            ranges: vec![range],
        };
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (example, parts) = (Some(8 * LENGTH), vec![Bytes::from(bytes)]);
        Column { input, element: Element::I64, example, parts }
    }

    /// Four texts, and their labels at this distance; of the last token, and of every fifth place, they are ignored.
    fn of(shift: usize, text: fn(usize) -> i64) -> Option<String> {
        let place = |at: usize| (at / LENGTH * (LENGTH + 2)) + at % LENGTH;
        let tokens: Vec<i64> = (0..4 * LENGTH).map(|at| text(place(at))).collect();
        let label = |at: usize| if at % 5 == 4 { -100 } else { text(place(at) + shift) };
        let labels: Vec<i64> = (0..4 * LENGTH).map(label).collect();
        let columns =
            [column("ids", IndexKind::Row, &tokens), column("labels", IndexKind::Class, &labels)];
        misplaced(&columns)
    }

    #[test]
    fn labels_at_other_places_than_the_next_are_told() {
        let text = |at: usize| (at * at + 3 * at) as i64 % 31;
        assert!(of(0, text).expect("a note").contains("`ids` at its own place"));
        assert_eq!(of(1, text), None);
        assert!(of(2, text).expect("a note").contains("two places later"));
        // Two tokens in turn are as they are wherever labels come from.
        for shift in 0..3 {
            assert_eq!(of(shift, |at| at as i64 % 2), None);
        }
    }

    #[test]
    fn models_that_shift_by_themselves_take_tokens_as_labels() {
        let tokens: Vec<i64> = (0..32).map(|at| at * at % 29).collect();
        let ids = column("ids", IndexKind::Row, &tokens);
        let shifted = vec![(1, LENGTH)];
        let labels = column_within("labels", IndexKind::Class, &tokens, shifted);
        assert_eq!(misplaced(&[ids, labels]), None);
    }

    /// A place that sees the tokens behind it predicts none of them; labels two places later are wrong all the same.
    #[test]
    fn autoencoders_take_tokens_as_labels() {
        let text = |at: usize| (at * at + 3 * at) as i64 % 31;
        let tokens: Vec<i64> = (0..32).map(text).collect();
        let found = |labels: &[i64]| {
            let mut labels = column("labels", IndexKind::Class, labels);
            labels.input.ranges[0].causal = vec!["decoder_ids".into()];
            misplaced(&[column("ids", IndexKind::Row, &tokens), labels])
        };
        assert_eq!(found(&tokens), None);
        let ignored = |at: usize| if at % LENGTH + 2 < LENGTH { text(at + 2) } else { -100 };
        let later: Vec<i64> = (0..32).map(ignored).collect();
        assert!(found(&later).expect("a note").contains("two places later"));
    }

    #[test]
    fn one_label_of_another_token_is_enough() {
        let tokens: Vec<i64> = (0..32).map(|at| at * at % 29).collect();
        let mut labels = tokens.clone();
        labels[13] += 1;
        let columns =
            [column("ids", IndexKind::Row, &tokens), column("labels", IndexKind::Class, &labels)];
        assert_eq!(misplaced(&columns), None);
    }
}
