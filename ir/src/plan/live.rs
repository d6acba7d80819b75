//! Bytes in use by purpose, over the tasks of a step.

use super::{ALIGNMENT, Action, BufferId, Plan, Task, TaskId};
use crate::Region;
use serde::Serialize;
use typed_index_collections::TiVec;

/// The purpose of a workspace buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Unsharded parameters.
    Gathered,
    /// Other operands of collectives: shards in the dtype of the exchange, gradients before and
    /// after their reduction; and copies in transit from or to the host.
    Communication,
    /// Results of the forward pass, or of its recomputation, that backward reads.
    Activation,
    /// Everything else: values local to forward or backward.
    Workspace,
}

impl Purpose {
    /// All of them.
    pub const ALL: [Purpose; 4] =
        [Purpose::Gathered, Purpose::Communication, Purpose::Activation, Purpose::Workspace];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Gathered => "gathered",
            Purpose::Communication => "communication",
            Purpose::Activation => "activations",
            Purpose::Workspace => "workspace",
        }
    }
}

/// Bytes in use by [`Purpose`], in the order of [`Purpose::ALL`].
pub type Live = [usize; Purpose::ALL.len()];

impl Plan {
    /// The purpose of each buffer; `None` for persistent buffers and those that no task uses.
    pub fn purposes(&self) -> TiVec<BufferId, Option<Purpose>> {
        let mut purposes: TiVec<BufferId, Option<Purpose>> = vec![None; self.buffers.len()].into();
        let mut forward: TiVec<BufferId, bool> = vec![false; self.buffers.len()].into();
        for task in &self.tasks {
            for place in task.action.writes() {
                forward[place.buffer] |= task.region != Region::Backward;
                purposes[place.buffer].get_or_insert(Purpose::Workspace);
            }
            for place in task.action.reads() {
                let purpose = purposes[place.buffer].get_or_insert(Purpose::Workspace);
                if task.region == Region::Backward && forward[place.buffer] {
                    *purpose = Purpose::Activation;
                }
            }
        }
        let moves = |t: &&Task| t.action.is_collective() || self.host_copy(&t.action).is_some();
        for task in self.tasks.iter().filter(moves) {
            for place in task.action.reads().into_iter().chain(task.action.writes()) {
                purposes[place.buffer] = Some(Purpose::Communication);
            }
        }
        for task in &self.tasks {
            if let Action::AllGather { recv, .. } | Action::Reshard { to: recv, .. } = &task.action
            {
                purposes[recv.buffer] = Some(Purpose::Gathered);
            }
        }
        for (buffer, purpose) in self.buffers.iter().zip(&mut purposes) {
            if buffer.arena.outlives_step() {
                *purpose = None;
            }
        }
        purposes
    }

    /// Workspace bytes in use while each task runs, if tasks ran one after the other in list order.
    pub fn live(&self) -> TiVec<TaskId, Live> {
        let purposes = self.purposes();
        let mut spans: TiVec<BufferId, Option<(TaskId, TaskId)>> =
            vec![None; self.buffers.len()].into();
        for (i, task) in self.tasks.iter_enumerated() {
            for place in task.action.reads().into_iter().chain(task.action.writes()) {
                spans[place.buffer].get_or_insert((i, i)).1 = i;
            }
        }
        let mut changes: TiVec<TaskId, _> =
            vec![[0_isize; Purpose::ALL.len()]; self.tasks.len() + 1].into();
        for ((buffer, span), purpose) in self.buffers.iter().zip(spans).zip(purposes) {
            let (Some((first, last)), Some(purpose)) = (span, purpose) else { continue };
            let bytes = buffer.bytes.next_multiple_of(ALIGNMENT) as isize;
            changes[first][purpose as usize] += bytes;
            changes[last.next()][purpose as usize] -= bytes;
        }
        let mut now = [0_isize; Purpose::ALL.len()];
        let mut live = TiVec::with_capacity(self.tasks.len());
        for change in &changes[..self.tasks.next_key()] {
            now.iter_mut().zip(change).for_each(|(n, c)| *n += c);
            live.push(now.map(isize::unsigned_abs));
        }
        live
    }
}
