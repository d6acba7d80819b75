//! Which task wrote each byte last: a value that shares memory with others is never read after another was written there.

use super::{Lowering, internal};
use frit_ir::plan::{BufferId, Place};
use frit_ir::{Diagnostic, Node, ValueId};
use std::collections::HashMap;

/// Bytes `begin..end` of a buffer, and the task that wrote them last.
type Range = (usize, usize, usize);

#[derive(Default)]
pub(super) struct Written {
    /// Disjoint ranges of each buffer, ascending.
    ranges: HashMap<BufferId, Vec<Range>>,
    /// What the place of each computed value consisted of when it was computed.
    values: HashMap<ValueId, Vec<Range>>,
}

impl Written {
    /// A task writes a place.
    pub(super) fn write(&mut self, place: &Place, task: usize) {
        let (begin, end) = (place.offset, place.offset + place.ty.bytes());
        let ranges = self.ranges.entry(place.buffer).or_default();
        let mut kept: Vec<Range> = Vec::with_capacity(ranges.len() + 2);
        for &(from, to, writer) in ranges.iter() {
            kept.extend((from < begin).then_some((from, to.min(begin), writer)));
            kept.extend((to > end).then_some((from.max(end), to, writer)));
        }
        kept.push((begin, end, task));
        kept.sort_unstable();
        *ranges = kept;
    }

    /// What a place consists of.
    fn parts(&self, place: &Place) -> Vec<Range> {
        let (begin, end) = (place.offset, place.offset + place.ty.bytes());
        let ranges = self.ranges.get(&place.buffer).into_iter().flatten();
        let inside = ranges.filter(|(from, to, _)| *from < end && *to > begin);
        inside.map(|&(from, to, writer)| (from.max(begin), to.min(end), writer)).collect()
    }
}

impl Lowering<'_> {
    /// Notes where the results of a node are, which was lowered just now.
    pub(super) fn note_results(&mut self, node: &Node) {
        for value in &node.outputs {
            if let Some(place) = self.places.get(value) {
                self.written.values.insert(*value, self.written.parts(place));
            }
        }
    }

    /// Checks that the memory of a computed value is as it was left.
    ///
    /// # Errors
    /// If another value was written there.
    pub(super) fn check_unwritten(&self, value: ValueId, place: &Place) -> Result<(), Diagnostic> {
        match self.written.values.get(&value) {
            Some(parts) if *parts != self.written.parts(place) => {
                let node = self.graph.def(value);
                let what =
                    format!("a result of `{}` is overwritten before it is read", node.op.name());
                Err(internal(what).at(&node.origin))
            }
            _ => Ok(()),
        }
    }
}
