//! Verifies the stated ranges and sizes of inputs.
//!
//! P601  an input that a task reads as indices or labels has a range within the values that the
//!       task accepts; the range is checked only when the input is fed; an empty input has an
//!       empty range; for a part of an input that is read as indices, which kernels check
//!       themselves, there may be none
//! P602  a task reads no more of an input than is fed, and every input with axes has examples

use super::broken;
use frit_ir::plan::{Action, IndexKind, IndexRange, InputSpec, Place, Plan};
use frit_ir::{Code, DType, Diagnostic, Graph, Node, Op, ValueId};

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    for input in plan.inputs.iter().filter(|i| i.per_example != (i.ty.shape.rank() > 0)) {
        let message = format!("`{}` is {}, and fed otherwise", input.name, input.ty);
        found.push(Diagnostic::error(Code::InputBounds, message));
    }
    for (i, task) in plan.tasks.iter_enumerated() {
        for place in task.action.reads() {
            let input = plan.inputs.iter().find(|input| input.buffer == place.buffer);
            if let Some(input) = input.filter(|x| place.offset + place.ty.bytes() > x.ty.bytes()) {
                let message = format!("reads more of `{}` than {}", input.name, input.ty);
                found.push(broken(plan, Code::InputBounds, i, message));
            }
        }
        let Action::Kernel { kernel, reads, .. } = &task.action else { continue };
        let body = &plan.kernels[*kernel].body;
        let leaves: Vec<ValueId> = leaves(body).collect();
        for (_, node) in body.nodes() {
            let Some((operand, taken)) = taken(body, node) else { continue };
            if body.ty(node.inputs[operand]).shape.numel() == 0 {
                continue;
            }
            let leaf = whole(body, node.inputs[operand]);
            let place = leaves.iter().position(|l| *l == leaf).map(|k| &reads[k]);
            let Some((place, input)) = place.and_then(|place| {
                let input = plan.inputs.iter().find(|input| input.buffer == place.buffer)?;
                Some((place, input))
            }) else {
                continue;
            };
            let is_part = place.ty.bytes() < input.ty.bytes();
            if is_part && !matches!(node.op, Op::CrossEntropy(_) | Op::CrossEntropyGrad(_)) {
                continue;
            }
            let holds = |r: &IndexRange| r.is_within(&taken) && covers(r, input, place);
            if !input.ranges.iter().any(holds) {
                let message = format!(
                    "reads `{}` as indices in {taken}, but it may contain others",
                    input.name
                );
                found.push(broken(plan, Code::IndexRanges, i, message));
            }
        }
    }
}

/// Whether the range is about all elements that are read, which are consecutive.
fn covers(range: &IndexRange, input: &InputSpec, read: &Place) -> bool {
    let (dims, mut size) = (input.ty.shape.dims(), input.ty.bytes());
    let (mut begin, mut last) = (read.offset, read.offset + read.ty.bytes().saturating_sub(1));
    range.within.iter().zip(dims).all(|((low, high), places)| {
        size /= places.max(&1);
        let (first, end) = (begin / size.max(1), last / size.max(1));
        (begin, last) = (begin % size.max(1), last % size.max(1));
        let inside = *low <= first && end < *high;
        // Several rows have all places of the axes within.
        if first < end {
            (begin, last) = (0, size.saturating_sub(1));
        }
        inside
    })
}

fn leaves(body: &Graph) -> impl Iterator<Item = ValueId> + '_ {
    body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_))).map(|(_, n)| n.outputs[0])
}

/// The input of which the value contains all elements, unchanged.
fn whole(body: &Graph, mut value: ValueId) -> ValueId {
    loop {
        let def = body.def(value);
        value = match &def.op {
            Op::Reshape(_) | Op::Transpose(_) | Op::Expand(_) => def.inputs[0],
            Op::Cast(cast) if matches!(cast.to, DType::I64 | DType::I32) => {
                if body.ty(def.inputs[0]).dtype.is_float() {
                    return value;
                }
                def.inputs[0]
            }
            _ => return value,
        };
    }
}

/// Operands that are indices, and what they may be.
fn taken(body: &Graph, node: &Node) -> Option<(usize, IndexRange)> {
    let axis =
        |operand: usize, axis: usize| body.ty(node.inputs[operand]).shape.dims().get(axis).copied();
    let counted = |size: usize| IndexRange {
        lo: -(size as i64),
        hi: size as i64 - 1,
        ignore: None,
        within: vec![],
        kind: IndexKind::Place,
        of: String::new(),
        causal: vec![],
    };
    let class = |classes: usize, ignore: i64| {
        let ignore = (ignore != i64::MIN).then_some(ignore);
        IndexRange { lo: 0, ignore, kind: IndexKind::Class, ..counted(classes) }
    };
    let shape = |operand: usize| &body.ty(node.inputs[operand]).shape;
    Some(match &node.op {
        Op::Embedding(_) => (1, counted(axis(0, 0)?)),
        Op::EmbeddingGrad(op) => (1, counted(op.rows)),
        Op::Gather(op) => (1, counted(axis(0, op.axis)?)),
        Op::GatherElements(op) => (1, counted(axis(0, op.axis)?)),
        Op::ScatterElements(op) => (1, counted(axis(0, op.axis)?)),
        // Longer tuples have an axis for each of their columns.
        Op::GatherNd(op) if axis(1, body.ty(node.inputs[1]).shape.rank() - 1) == Some(1) => {
            (1, counted(axis(0, op.batch_dims)?))
        }
        Op::CrossEntropy(op) => (1, class(op.classes_of(shape(0)), op.ignore_index)),
        Op::CrossEntropyGrad(op) => (2, class(op.classes_of(shape(1)), op.ignore_index)),
        _ => return None,
    })
}
