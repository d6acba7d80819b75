//! Units that are sharded over a smaller group of ranks between forward and backward.
//!
//! After the last use of what forward gathered, each rank copies its part among `reshard` consecutive ranks;
//! backward gathers these parts among those ranks, instead of the shards among all. Both give the same
//! values, since parameters change only in the update.
//! Source: PyTorch's `fully_shard`, an integer `reshard_after_forward`.

use super::Lowering;
use frit_ir::plan::{Action, Arena, Buffer, BufferClass, Place, Plan, Stream, Task, TaskId, TiVec};
use frit_ir::{Region, TensorType};
use std::collections::HashMap;

impl Lowering<'_> {
    /// Adds the copies and gathers of these parts to the plan.
    pub(super) fn keep_parts(&mut self) {
        let mut after: HashMap<TaskId, Vec<Task>> = HashMap::new();
        for (backward, forward) in repeated(&self.plan) {
            let Action::AllGather { group, recv, .. } = &self.plan.tasks[forward].action else {
                continue;
            };
            let (group, whole) = (*group, recv.clone());
            let unit = &self.plan.units[self.plan.groups[group].unit];
            let Some(ranks) = unit.reshard else { continue };
            let reads = |t: &Task| t.action.reads().iter().any(|p| p.buffer == whole.buffer);
            let Some(last) = self.plan.tasks.rposition(reads) else { continue };
            let part = TensorType::new(whole.ty.dtype, [whole.ty.shape.numel() / ranks]);
            let name = format!("{} kept", unit.name);
            let label = format!("reshard {}", unit.name);
            let bytes = part.bytes();
            let (arena, class) = (Arena::Workspace, BufferClass::Gathered);
            let buffer =
                self.plan.buffers.push_and_get_key(Buffer { name, arena, class, offset: 0, bytes });
            let kept = Place { buffer, offset: 0, ty: part };
            let moved = 2 * bytes as u64;
            after.entry(last).or_default().push(Task {
                lowered: 0,
                operands_digest: String::new(),
                name: label,
                stream: Stream::Compute,
                region: Region::Forward,
                origin: self.plan.tasks[forward].origin.clone(),
                action: Action::Reshard { group, ranks, from: whole, to: kept.clone() },
                waits: vec![],
                flops: 0,
                bytes: moved,
                cost_us: 1e6 * self.cluster.device.copy_seconds(moved),
            });
            let Action::AllGather { ranks: among, send, recv, .. } =
                &mut self.plan.tasks[backward].action
            else {
                continue;
            };
            (*among, *send) = (Some(ranks), kept);
            let bytes = send.ty.bytes() + recv.ty.bytes();
            let cost_us = self.exchange_us(&self.plan.tasks[backward].action);
            let task = &mut self.plan.tasks[backward];
            (task.bytes, task.cost_us) = (bytes as u64, cost_us);
        }
        insert(&mut self.plan, after);
    }
}

/// Pairs of a backward gather and the forward gather of the same phase that it repeats.
fn repeated(plan: &Plan) -> Vec<(TaskId, TaskId)> {
    let mut found = Vec::new();
    for phase in &plan.phases {
        let mut forward = HashMap::new();
        for i in phase.tasks() {
            let Action::AllGather { group, recv, .. } = &plan.tasks[i].action else { continue };
            let what = (*group, recv.ty.dtype);
            match (plan.tasks[i].region, forward.get(&what)) {
                (Region::Forward, _) => {
                    forward.insert(what, i);
                }
                (_, Some(&first)) => found.push((i, first)),
                (_, None) => {}
            }
        }
    }
    found
}

/// Inserts tasks behind others, by index, and renumbers all.
fn insert(plan: &mut Plan, mut after: HashMap<TaskId, Vec<Task>>) {
    if after.is_empty() {
        return;
    }
    let mut tasks: TiVec<TaskId, Task> = TiVec::with_capacity(plan.tasks.len() + after.len());
    let mut ends: TiVec<TaskId, TaskId> = TiVec::with_capacity(plan.tasks.len() + 1);
    for (i, task) in std::mem::take(&mut plan.tasks).into_iter_enumerated() {
        ends.push(tasks.next_key());
        tasks.push(task);
        tasks.extend(after.remove(&i).into_iter().flatten());
    }
    ends.push(tasks.next_key());
    tasks.iter_mut_enumerated().for_each(|(i, task)| task.lowered = i.0);
    plan.tasks = tasks;
    for phase in &mut plan.phases {
        (phase.begin, phase.end) = (ends[phase.begin], ends[phase.end]);
    }
}
