//! Actions of tasks, and the places they read and write.

use super::{GroupId, KernelId, Place};
use crate::ops::ReduceKind;
use serde::{Deserialize, Serialize};

/// The action of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Runs a kernel.
    Kernel {
        /// Index of the kernel.
        kernel: KernelId,
        /// Operands.
        reads: Vec<Place>,
        /// Results; one may be the same place as an operand (updated in place).
        writes: Vec<Place>,
    },
    /// Concatenates the parts of the ranks that share the group, in rank order.
    AllGather {
        /// The flat group.
        group: GroupId,
        /// Consecutive ranks that have the whole in parts, if not all that share the group.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ranks: Option<usize>,
        /// This rank's part.
        send: Place,
        /// The whole.
        recv: Place,
    },
    /// Combines the wholes of the ranks that share the group, of which each receives its part.
    ReduceScatter {
        /// The flat group.
        group: GroupId,
        /// How ranks are combined.
        reduce: ReduceKind,
        /// The whole.
        send: Place,
        /// This rank's part.
        recv: Place,
    },
    /// Reduces over the replicas of a group or, without a group, over all ranks.
    AllReduce {
        /// The flat group, for gradients.
        group: Option<GroupId>,
        /// How ranks are combined.
        reduce: ReduceKind,
        /// The operand.
        send: Place,
        /// The result; may be the same place.
        recv: Place,
    },
    /// Copies of a gathered group the part that this rank keeps, its place among consecutive ranks.
    Reshard {
        /// The flat group.
        group: GroupId,
        /// Number of ranks that share the whole.
        ranks: usize,
        /// The whole.
        from: Place,
        /// The part.
        to: Place,
    },
    /// Copies bytes.
    Copy {
        /// From here.
        from: Place,
        /// To here.
        to: Place,
    },
    /// Sets bytes to zero.
    Zero {
        /// These.
        places: Vec<Place>,
    },
}

impl Action {
    /// The places it reads.
    pub fn reads(&self) -> Vec<&Place> {
        match self {
            Action::Kernel { reads, .. } => reads.iter().collect(),
            Action::AllGather { send, .. }
            | Action::ReduceScatter { send, .. }
            | Action::AllReduce { send, .. } => vec![send],
            Action::Copy { from, .. } | Action::Reshard { from, .. } => vec![from],
            Action::Zero { .. } => vec![],
        }
    }

    /// The places it writes.
    pub fn writes(&self) -> Vec<&Place> {
        match self {
            Action::Kernel { writes, .. } => writes.iter().collect(),
            Action::AllGather { recv, .. }
            | Action::ReduceScatter { recv, .. }
            | Action::AllReduce { recv, .. } => vec![recv],
            Action::Copy { to, .. } | Action::Reshard { to, .. } => vec![to],
            Action::Zero { places } => places.iter().collect(),
        }
    }

    /// The places it reads, to change them.
    pub fn reads_mut(&mut self) -> Vec<&mut Place> {
        match self {
            Action::Kernel { reads, .. } => reads.iter_mut().collect(),
            Action::AllGather { send, .. }
            | Action::ReduceScatter { send, .. }
            | Action::AllReduce { send, .. } => vec![send],
            Action::Copy { from, .. } | Action::Reshard { from, .. } => vec![from],
            Action::Zero { .. } => vec![],
        }
    }

    /// The places it writes, to change them.
    pub fn writes_mut(&mut self) -> Vec<&mut Place> {
        match self {
            Action::Kernel { writes, .. } => writes.iter_mut().collect(),
            Action::AllGather { recv, .. }
            | Action::ReduceScatter { recv, .. }
            | Action::AllReduce { recv, .. } => vec![recv],
            Action::Copy { to, .. } | Action::Reshard { to, .. } => vec![to],
            Action::Zero { places } => places.iter_mut().collect(),
        }
    }

    /// Of a `reshard`, the part of the whole that rank `rank` keeps.
    pub fn kept_by(&self, rank: usize) -> Option<Place> {
        let Action::Reshard { ranks, from, to, .. } = self else { return None };
        let offset = from.offset + rank % ranks * to.ty.bytes();
        Some(Place { buffer: from.buffer, offset, ty: to.ty.clone() })
    }

    /// Whether ranks exchange data in it.
    pub fn is_collective(&self) -> bool {
        matches!(
            self,
            Action::AllGather { .. } | Action::ReduceScatter { .. } | Action::AllReduce { .. }
        )
    }
}
