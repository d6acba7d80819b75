//! Copies of parameters in the dtypes in which a step reads them.
//!
//! A step that reads parameters in a lower dtype casts them, once per micro-step, or has a copy that the optimizer step of the
//! step before wrote beside the parameters, if the rank holds them whole. A copy takes memory during the whole step, a cast only while it is read:
//! a group has a copy if that does not raise the peak.

use super::flat::is_aligned;
use super::{Lowering, body};
use frit_ir::ops::Cast;
use frit_ir::plan::{
    ALIGNMENT, Arena, BufferClass, BufferId, GroupCopy, GroupId, Place, Plan, TaskId, TiVec,
};
use frit_ir::{DType, Diagnostic, Graph, Op};
use std::collections::{BTreeMap, BTreeSet};

/// The copies that a plan has.
pub(super) enum Copies {
    /// Of every group that can have them.
    All,
    /// Of these groups, in these dtypes.
    Only(BTreeSet<(GroupId, DType)>),
}

impl Lowering<'_> {
    /// Gives every group its copies, in the dtypes to which most of its parameters are cast.
    pub(super) fn make_copies(&mut self) {
        if !self.options.copies || self.steps_by_parameter() {
            return;
        }
        for group in self.plan.groups.keys() {
            for dtype in self.copied_dtypes(group) {
                let g = &self.plan.groups[group];
                let (bytes, unit) = (g.shard_numel * dtype.size(), g.unit);
                let name = format!("{} in {}", self.plan.units[unit].name, dtype.name());
                let buffer = self.buffer(&name, Arena::Persistent, BufferClass::Gathered, bytes);
                self.plan.groups[group].copies.push(GroupCopy { dtype, buffer });
            }
        }
    }

    fn copied_dtypes(&self, group: GroupId) -> Vec<DType> {
        let g = &self.plan.groups[group];
        let is_copied = |dtype: &DType| {
            let chosen = match &self.copies {
                Copies::All => true,
                Copies::Only(copies) => copies.contains(&(group, *dtype)),
            };
            g.trainable && !g.sharded && self.casts_most(group, *dtype) && chosen
        };
        [DType::BF16, DType::F16].into_iter().filter(is_copied).collect()
    }

    /// Whether most elements of a group are of parameters that are cast to a dtype, all aligned in it.
    fn casts_most(&self, group: GroupId, to: DType) -> bool {
        let g = &self.plan.groups[group];
        let is_cast = |name: &str| self.cast_dtypes.get(name).is_some_and(|d| d.contains(&to));
        let cast = || g.segments.iter().filter(|s| is_cast(&self.plan.params[s.param].name));
        let needed: usize = cast().map(|s| s.numel).sum();
        4 * g.shard_numel <= 5 * needed && cast().all(|s| is_aligned(s.offset, to))
    }

    /// A group's copy in a dtype, if it has one.
    pub(super) fn copy_in(&self, group: GroupId, dtype: DType) -> Option<Place> {
        let copy = self.plan.groups[group].copies.iter().find(|c| c.dtype == dtype)?;
        Some(Place { buffer: copy.buffer, offset: 0, ty: self.part(group, dtype) })
    }

    /// Adds to the step of a group, whose first result are the new parameters, the copies of these.
    pub(super) fn write_copies(
        &self,
        group: GroupId,
        step: &mut Graph,
        writes: &mut Vec<Place>,
    ) -> Result<(), Diagnostic> {
        for copy in &self.plan.groups[group].copies {
            body::add_result(step, Op::Cast(Cast { to: copy.dtype }), &[step.outputs[0].value])?;
            writes.extend(self.copy_in(group, copy.dtype));
        }
        Ok(())
    }
}

/// The number of copies of a plan that is not scheduled yet, and those of them that do not raise its peak: it is as high with
/// casts instead.
pub(super) fn within_peak(plan: &Plan) -> (usize, BTreeSet<(GroupId, DType)>) {
    let mut kept: BTreeMap<BufferId, (GroupId, DType)> = BTreeMap::new();
    for (g, group) in plan.groups.iter_enumerated() {
        kept.extend(group.copies.iter().map(|c| (c.buffer, (g, c.dtype))));
    }
    let all = kept.len();
    let spans = spans(plan);
    let bytes = |buffer: BufferId| plan.buffers[buffer].bytes.next_multiple_of(ALIGNMENT);
    // The peak if these copies are there throughout and all others are casts, and when it is reached.
    let peak = |kept: &BTreeMap<BufferId, (GroupId, DType)>| {
        let mut changes: TiVec<TaskId, isize> = vec![0; plan.tasks.len() + 1].into();
        let temporary = |b: &BufferId| spans[*b].is_some() && !kept.contains_key(b);
        for buffer in plan.buffers.keys().filter(temporary) {
            let (first, last) = spans[buffer].unwrap_or((TaskId::FIRST, TaskId::FIRST));
            changes[first] += bytes(buffer) as isize;
            changes[last.next()] -= bytes(buffer) as isize;
        }
        let sums = changes.iter_enumerated().scan(0, |sum, (task, change)| {
            *sum += change;
            Some((*sum, task))
        });
        let (most, at) = sums.max_by_key(|(sum, _)| *sum).unwrap_or((0, TaskId::FIRST));
        (most + kept.keys().map(|b| bytes(*b) as isize).sum::<isize>(), at)
    };
    let (limit, _) = peak(&BTreeMap::new());
    loop {
        let (most, at) = peak(&kept);
        if most <= limit {
            return (all, kept.into_values().collect());
        }
        // Those that are not read around there add to it.
        kept.retain(|b, _| spans[*b].is_some_and(|(first, last)| (first..=last).contains(&at)));
    }
}

/// The first and last task, in list order, between which each buffer of the workspace is in use, or each copy is read.
fn spans(plan: &Plan) -> TiVec<BufferId, Option<(TaskId, TaskId)>> {
    let copies: BTreeSet<BufferId> =
        plan.groups.iter().flat_map(|g| &g.copies).map(|c| c.buffer).collect();
    let mut spans: TiVec<BufferId, Option<(TaskId, TaskId)>> =
        vec![None; plan.buffers.len()].into();
    for (i, task) in plan.tasks.iter_enumerated() {
        let writes = task.action.writes().into_iter().filter(|p| !copies.contains(&p.buffer));
        for place in task.action.reads().into_iter().chain(writes) {
            let is_copy = copies.contains(&place.buffer);
            if is_copy || plan.buffers[place.buffer].arena == Arena::Workspace {
                spans[place.buffer].get_or_insert((i, i)).1 = i;
            }
        }
    }
    spans
}
