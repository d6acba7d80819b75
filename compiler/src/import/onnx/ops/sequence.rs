//! Sequences of tensors with lengths and positions known at import; none remains in the graph.

use super::super::context::{Bound, Fault, NodeContext, Outcome, misfit};
use super::layout::{even_parts, join, parts, sum};
use super::{Operator, one, op};
use frit_ir::{DType, Shape, Tensor};

pub(super) const OPERATORS: &[Operator] = &[
    op("ConcatFromSequence", &["axis", "new_axis"], concat_from_sequence),
    op("SequenceAt", &[], sequence_at),
    op("SequenceConstruct", &[], sequence_construct),
    op("SequenceEmpty", &["dtype"], |_| Ok(vec![Bound::Sequence(vec![])])),
    op("SequenceErase", &[], sequence_erase),
    op("SequenceInsert", &[], sequence_insert),
    op("SequenceLength", &[], sequence_length),
    op("SplitToSequence", &["axis", "keepdims"], split_to_sequence),
];

/// Longest sequence that is read.
const MAX_LENGTH: usize = 1 << 16;

fn sequence_construct(cx: &mut NodeContext<'_>) -> Outcome {
    Ok(vec![Bound::Sequence(cx.variadic()?)])
}

fn sequence_length(cx: &mut NodeContext<'_>) -> Outcome {
    let n = cx.sequence(0)?.len() as i64;
    one(cx.constant(Tensor::ints(DType::I64, Shape::scalar(), vec![n]))?)
}

fn sequence_at(cx: &mut NodeContext<'_>) -> Outcome {
    let values = cx.sequence(0)?;
    let position = cx.known_ints(1, "the position")?.unwrap_or_default();
    let &[position] = position.as_slice() else {
        return misfit("the position must be one number");
    };
    one(values[cx.axis_in(values.len(), position).map_err(|_| {
        Fault::Misfit(format!("position {position} in a sequence of {}", values.len()))
    })?])
}

fn sequence_erase(cx: &mut NodeContext<'_>) -> Outcome {
    let mut values = cx.sequence(0)?;
    let at = match cx.known_scalar(1, "the position")? {
        Some(position) => cx.axis_in(values.len(), position as i64)?,
        None if values.is_empty() => return misfit("the sequence is empty"),
        None => values.len() - 1,
    };
    values.remove(at);
    Ok(vec![Bound::Sequence(values)])
}

fn sequence_insert(cx: &mut NodeContext<'_>) -> Outcome {
    let (mut values, value) = (cx.sequence(0)?, cx.input(1)?);
    if values.len() >= MAX_LENGTH {
        return misfit("the sequence is too long");
    }
    let at = match cx.known_scalar(2, "the position")? {
        // It may be one past the last.
        Some(position) if position as i64 == values.len() as i64 => values.len(),
        Some(position) => cx.axis_in(values.len(), position as i64)?,
        None => values.len(),
    };
    values.insert(at, value);
    Ok(vec![Bound::Sequence(values)])
}

fn split_to_sequence(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let axis = cx.axis(x, cx.int("axis", 0))?;
    let size = cx.dims(x)[axis];
    let split = cx.known(1, "the split")?;
    let sizes = match &split {
        Some(split) if split.shape().rank() == 1 => cx.parts(&split.to_i64s(), "the split")?,
        other => {
            let part = other.as_ref().map_or(1, |t| t.to_i64s().first().copied().unwrap_or(0));
            let Some(part) = usize::try_from(part).ok().filter(|p| *p > 0) else {
                return misfit(format!("a split into parts of {part}"));
            };
            if size.div_ceil(part) > MAX_LENGTH {
                return misfit("the sequence is too long");
            }
            even_parts(size, part, size.div_ceil(part))
        }
    };
    if sum(&sizes) != size || sizes.is_empty() {
        return misfit(format!("parts {sizes:?} of axis {axis} with size {size}"));
    }
    let mut values = parts(cx, x, axis, sizes)?;
    if split.is_none() && cx.int("keepdims", 1) == 0 {
        let mut dims = cx.dims(x);
        dims.remove(axis);
        for value in &mut values {
            *value = cx.reshape(*value, dims.clone())?;
        }
    }
    Ok(vec![Bound::Sequence(values)])
}

fn concat_from_sequence(cx: &mut NodeContext<'_>) -> Outcome {
    let mut values = cx.sequence(0)?;
    let Some(&first) = values.first() else { return misfit("the sequence is empty") };
    let axis = cx.int("axis", 0);
    if cx.int("new_axis", 0) == 0 {
        let axis = cx.axis(first, axis)?;
        return one(join(cx, &values, axis)?);
    }
    let axis = cx.axis_in(cx.dims(first).len() + 1, axis)?;
    for value in &mut values {
        let mut dims = cx.dims(*value);
        dims.insert(axis.min(dims.len()), 1);
        *value = cx.reshape(*value, dims)?;
    }
    one(join(cx, &values, axis)?)
}
