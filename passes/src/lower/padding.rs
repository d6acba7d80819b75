//! Parameters with zeros after them, as tensor cores want them: the gap behind a parameter in its flat group is zero and stays
//! zero, so that a padded parameter is a view of the group.

use super::flat::only_cast;
use super::{GatherKey, Lowering};
use frit_ir::ops::Pad;
use frit_ir::plan::{BufferId, Place};
use frit_ir::{Graph, Node, Op, ValueId};
use std::collections::HashMap;

/// Elements of zeros after each padded parameter, by its name.
pub(super) fn rooms(graph: &Graph) -> HashMap<&str, usize> {
    let mut rooms: HashMap<&str, usize> = HashMap::new();
    for (_, node) in graph.nodes() {
        let Some((name, zeros)) = padded(graph, node) else { continue };
        let room = rooms.entry(name).or_default();
        *room = zeros.max(*room);
    }
    rooms
}

/// The parameter to which a node adds zeros at its end, and how many.
fn padded<'g>(graph: &'g Graph, node: &Node) -> Option<(&'g str, usize)> {
    let Op::Pad(Pad { low, high, value }) = &node.op else { return None };
    let outer =
        low.iter().all(|n| *n == 0) && high.iter().skip(1).all(|n| *n == 0) && *value == 0.0;
    let numel = |v: ValueId| graph.ty(v).shape.numel();
    let zeros = numel(node.outputs[0]).checked_sub(numel(node.inputs[0])).filter(|_| outer)?;
    Some((param_of(graph, node.inputs[0])?, zeros))
}

/// The parameter of which a value is a cast, gathered or not.
fn param_of(graph: &Graph, mut value: ValueId) -> Option<&str> {
    loop {
        let node = graph.def(value);
        let is_cast = match &node.op {
            Op::Param(param) => return param.unit.map(|_| param.name.as_str()),
            Op::AllGather(_) => true,
            _ => only_cast(node).is_some(),
        };
        value = *node.inputs.first().filter(|_| is_cast)?;
    }
}

impl Lowering<'_> {
    /// Makes a padded parameter a view of its flat group, or of its part in another dtype, if there is room behind it.
    pub(super) fn alias_padded(&mut self, node: &Node) -> bool {
        let Some((name, _)) = padded(self.graph, node) else { return false };
        let (Some(place), Some(&(group, segment))) =
            (self.places.get(&node.inputs[0]), self.group_of.get(name))
        else {
            return false;
        };
        let ty = self.graph.ty(node.outputs[0]).clone();
        let g = &self.plan.groups[group];
        let next = g.segments.get(segment + 1).map_or(g.numel, |s| s.offset);
        let has_room = g.segments[segment].offset + ty.shape.numel() <= next
            && place.offset + ty.bytes() <= self.plan.buffers[place.buffer].bytes;
        if !(has_room && self.is_flat(place.buffer)) || self.required.contains_key(&node.outputs[0])
        {
            return false;
        }
        self.places.insert(node.outputs[0], Place { ty, ..place.clone() });
        true
    }

    /// Whether a buffer holds a flat group as a whole, or most of it.
    fn is_flat(&self, buffer: BufferId) -> bool {
        let gathered = |(_, b): (&GatherKey, &BufferId)| *b == buffer;
        self.plan.groups.iter().any(|g| {
            g.master == buffer && !g.sharded || g.copies.iter().any(|c| c.buffer == buffer)
        }) || self.gathered.iter().any(gathered)
            || self.param_casts.values().any(|(b, _)| *b == buffer)
    }
}
