//! Buffers of the model that its forward pass updates, such as running statistics.
//!
//! Let `new = f(old)` be such an update. The micro-steps of a step apply it in turn, each to what the one before has left; the forward
//! pass reads the buffer of the last step throughout. A step that is taken then replaces the buffer by the mean over ranks.

use super::update::Update;
use super::writer::{Stated, Writer};
use crate::unstated::Unstated;
use frit_ir::ops::{AllReduce, BinaryFn, CompareFn, ReduceKind, StateName};
use frit_ir::{Graph, Op, Output, OutputKind, Region, ValueId};
use std::collections::{HashMap, HashSet};

/// A buffer that the forward pass updates.
pub(super) struct Buffer {
    name: String,
    pub(super) old: ValueId,
    pub(super) new: ValueId,
}

pub(super) fn of(outputs: &[Output]) -> Vec<Buffer> {
    let buffer = |o: &Output| match o.kind {
        OutputKind::Carry(old) => Some(Buffer { name: o.name.clone(), old, new: o.value }),
        _ => None,
    };
    outputs.iter().filter_map(buffer).collect()
}

impl Update {
    /// What the step makes of a buffer.
    pub(super) fn buffer(
        &self,
        w: &mut Writer,
        Buffer { name, old, new }: &Buffer,
        found_inf: ValueId,
    ) -> Result<(), Unstated> {
        let mut next = *new;
        let several = self.accumulation > 1 && !self.reproducible;
        if several {
            // The state is what the micro-steps so far have added to the buffer.
            w.region = Region::Backward;
            let state = StateName::BufferChange(name.clone());
            let before = w.state(&state, None, w.graph.ty(*old).clone())?;
            let now = w.binary(BinaryFn::Add, *old, before)?;
            let then = instead(w, *new, *old, now)?;
            next = w.binary(BinaryFn::Sub, then, *old)?;
            w.carry(&state, None, next, before);
        }
        w.region = Region::Update;
        if self.ranks > 1 && !self.reproducible && !is_same_on_all_ranks(&w.graph, *new) {
            let mean = AllReduce { reduce: ReduceKind::Mean, unit: None, dtype: None };
            next = w.one(Op::AllReduce(mean), &[next])?;
        }
        if several {
            next = w.binary(BinaryFn::Add, *old, next)?;
        }
        let zero = w.number(found_inf, 0.0)?;
        let skipped = w.one(Op::Compare(CompareFn::Ne), &[found_inf, zero])?;
        let next = w.one(Op::Select, &[skipped, *old, next])?;
        w.graph.add_output(name, next, OutputKind::Carry(*old));
        Ok(())
    }
}

/// `value` as it would be with `now` instead of `old`.
fn instead(w: &mut Writer, value: ValueId, old: ValueId, now: ValueId) -> Stated {
    let needed = w.graph.ancestors([value]);
    let mut changed = HashMap::from([(old, now)]);
    for id in w.graph.order().to_vec() {
        let node = w.graph.node(id);
        if needed.contains(&id) && node.inputs.iter().any(|v| changed.contains_key(v)) {
            let inputs: Vec<_> = node.inputs.iter().map(|v| *changed.get(v).unwrap_or(v)).collect();
            let (op, outputs) = (node.op.clone(), node.outputs.clone());
            changed.extend(outputs.into_iter().zip(w.all(op, &inputs)?));
        }
    }
    Ok(*changed.get(&value).unwrap_or(&value))
}

/// Whether a value depends on nothing that differs between ranks: parameters and buffers are equal on all, and so are sums over ranks.
pub(super) fn is_same_on_all_ranks(graph: &Graph, value: ValueId) -> bool {
    let (mut open, mut seen) = (vec![value], HashSet::new());
    while let Some(value) = open.pop() {
        let node = graph.def(value);
        match &node.op {
            // One with a unit may be over one copy of its parameters only.
            Op::AllReduce(op) if op.unit.is_none() => {}
            Op::Param(_) | Op::Constant(_) => {}
            Op::Input(_) | Op::State(_) | Op::Hyper(_) => return false,
            _ => open.extend(node.inputs.iter().filter(|v| seen.insert(**v))),
        }
    }
    true
}
