//! Buffers of the model that the forward pass updates, such as running statistics.
//!
//! Every micro-step updates them in sequence, as if each were a step; the step commits the mean over ranks, unless it
//! is skipped. With accumulation the state [`StateName::BufferChange`] is the change of a buffer since the last update;
//! the update resets it to zero.

use super::{Emit, INFO, Update};
use crate::pass::bug;
use frit_ir::ops::{
    AllReduce, BinaryFn, CompareFn, Concat, Constant, Op, ReduceKind, Reshape, Split, StateName,
};
use frit_ir::{Code, DType, Diagnostic, Graph, OutputKind, Region, Shape, Tensor, ValueId};
use std::collections::{BTreeMap, HashMap};

/// A buffer of the model that the forward pass updates.
pub(super) struct Buffer {
    pub(super) name: String,
    pub(super) old: ValueId,
    pub(super) new: ValueId,
}

/// The buffers that a forward graph carries.
pub(super) fn renewed(graph: &Graph) -> Vec<Buffer> {
    let carries = graph.outputs.iter().filter_map(|o| match o.kind {
        OutputKind::Carry(old) => Some(Buffer { name: o.name.clone(), old, new: o.value }),
        _ => None,
    });
    carries.collect()
}

impl Update {
    /// The next value of each buffer or, with accumulation, its change since the last update.
    pub(super) fn stage(
        &self,
        b: &mut Emit<'_>,
        buffers: &[Buffer],
    ) -> Result<Vec<ValueId>, Diagnostic> {
        if self.accumulation == 1 {
            return Ok(buffers.iter().map(|buffer| buffer.new).collect());
        }
        let mut changes = Vec::with_capacity(buffers.len());
        for buffer in buffers {
            b.origin = b.graph.def(buffer.new).origin.by(INFO.name);
            let ty = b.graph.ty(buffer.old).clone();
            let name = StateName::BufferChange(buffer.name.clone());
            let before = b.state(&name, None, ty, 0.0, Region::Backward)?;
            let binary = |f| Op::Binary(f);
            let add = binary(BinaryFn::Add);
            let now = b.add(add, &[buffer.old, before], Region::Backward)?[0];
            let next = b.replay(buffer, now)?;
            let sub = binary(BinaryFn::Sub);
            let change = b.add(sub, &[next, buffer.old], Region::Backward)?[0];
            b.carry(&name, None, change, before);
            changes.push(change);
        }
        Ok(changes)
    }

    /// Commits the buffers if the step is taken.
    pub(super) fn commit(
        &self,
        b: &mut Emit<'_>,
        buffers: &[Buffer],
        mut staged: Vec<ValueId>,
        found_inf: ValueId,
    ) -> Result<(), Diagnostic> {
        if buffers.is_empty() {
            return Ok(());
        }
        let zero = Op::Constant(Constant { value: Tensor::scalar(0.0) });
        let zero = b.update(zero, &[])?[0];
        let skipped = b.update(Op::Compare(CompareFn::Ne), &[found_inf, zero])?[0];
        if self.world_size > 1 && !self.reproducible {
            average(b, buffers, &mut staged)?;
        }
        for (Buffer { name, old, new }, mut next) in buffers.iter().zip(staged) {
            b.origin = b.graph.def(*new).origin.by(INFO.name);
            if self.accumulation > 1 && !self.reproducible {
                next = b.update(Op::Binary(BinaryFn::Add), &[*old, next])?[0];
            }
            let next = b.update(Op::Select, &[skipped, *old, next])?[0];
            b.graph.add_output(name, next, OutputKind::Carry(*old));
        }
        Ok(())
    }
}

/// Averages values over ranks, all of one dtype at once; values that are equal on all ranks are left alone.
fn average(b: &mut Emit<'_>, buffers: &[Buffer], values: &mut [ValueId]) -> Result<(), Diagnostic> {
    let mut by_dtype: BTreeMap<DType, Vec<usize>> = BTreeMap::new();
    for (i, buffer) in buffers.iter().enumerate() {
        if !is_rank_uniform(b.graph, buffer.new) {
            by_dtype.entry(b.graph.ty(values[i]).dtype).or_default().push(i);
        }
    }
    for members in by_dtype.into_values() {
        let mut flat = Vec::with_capacity(members.len());
        let mut sizes = Vec::with_capacity(members.len());
        for &i in &members {
            let n = b.graph.ty(values[i]).shape.numel();
            flat.push(b.update(Op::Reshape(Reshape { shape: Shape::from([n]) }), &[values[i]])?[0]);
            sizes.push(n);
        }
        let joined = b.update(Op::Concat(Concat { axis: 0 }), &flat)?[0];
        let mean = AllReduce { reduce: ReduceKind::Mean, unit: None, dtype: None };
        let mean = b.update(Op::AllReduce(mean), &[joined])?[0];
        let parts = b.update(Op::Split(Split { axis: 0, sizes }), &[mean])?;
        for (i, part) in members.into_iter().zip(parts) {
            let shape = b.graph.ty(values[i]).shape.clone();
            values[i] = b.update(Op::Reshape(Reshape { shape }), &[part])?[0];
        }
    }
    Ok(())
}

/// Whether a value is computed only from reduced values and from state that is equal on all ranks.
pub(super) fn is_rank_uniform(graph: &Graph, value: ValueId) -> bool {
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        let node = graph.def(value);
        match &node.op {
            Op::AllReduce(_) | Op::Param(_) | Op::Constant(_) => {}
            op if op.is_leaf() => return false,
            _ => open.extend(&node.inputs),
        }
    }
    true
}

impl Emit<'_> {
    /// The buffer's next value if its current one is `now`: a copy of the nodes that depend on it.
    fn replay(&mut self, buffer: &Buffer, now: ValueId) -> Result<ValueId, Diagnostic> {
        let mut map = HashMap::from([(buffer.old, now)]);
        for id in self.graph.order().to_vec() {
            let node = self.graph.node(id).clone();
            if node.region != Region::Forward || !node.inputs.iter().any(|v| map.contains_key(v)) {
                continue;
            }
            let inputs: Vec<ValueId> =
                node.inputs.iter().map(|v| *map.get(v).unwrap_or(v)).collect();
            let results = self
                .graph
                .add(node.op, &inputs, self.origin.clone(), Region::Backward)
                .map_err(bug(INFO.name))?;
            map.extend(node.outputs.into_iter().zip(results));
        }
        map.get(&buffer.new).copied().ok_or_else(|| {
            Diagnostic::error(
                Code::PassFailed,
                format!("`{}` is not updated from its own value", buffer.name),
            )
        })
    }
}
