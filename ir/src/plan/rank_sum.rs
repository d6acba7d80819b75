//! Sums over ranks whose order is not a library's: on a GPU, the ranks of a reproducible plan exchange their elements, and a kernel
//! adds them in a balanced binary tree.

use super::{Action, DeviceType, Plan};
use crate::DType;
use crate::ops::ReduceKind;

/// Elements that every rank adds all of, rather than a share that it sends to the others.
const FEW: usize = 1 << 14;

/// How the ranks of a team add tensors: rank `i` adds share `i`, and every rank adds what is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankSum {
    /// The ranks of the team.
    pub ranks: usize,
    /// Elements of a share.
    pub share: usize,
    /// Elements behind all shares.
    pub rest: usize,
}

impl RankSum {
    /// Bytes of the rows, one of each rank, that a rank receives and adds at a time.
    pub fn bytes(self) -> usize {
        self.ranks * self.share.max(self.rest) * DType::F32.size()
    }
}

impl Plan {
    /// How a collective's sum is computed; `None` if it is the library's, or the action is none.
    pub fn rank_sum(&self, action: &Action) -> Option<RankSum> {
        if self.reproducible.is_none() || self.target.device != DeviceType::Cuda {
            return None;
        }
        // Any order gives the same maximum.
        let (n, is_whole) = match action {
            Action::ReduceScatter { reduce, recv, .. } if *reduce != ReduceKind::Max => {
                (recv.ty.shape.numel(), false)
            }
            Action::AllReduce { reduce, send, .. } if *reduce != ReduceKind::Max => {
                (send.ty.shape.numel(), true)
            }
            _ => return None,
        };
        let ranks = self.team(action, 0)?.count;
        Some(match is_whole {
            false => RankSum { ranks, share: n, rest: 0 },
            true if n <= FEW => RankSum { ranks, share: 0, rest: n },
            true => RankSum { ranks, share: n / ranks, rest: n % ranks },
        })
    }
}
