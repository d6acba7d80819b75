//! The arenas that hold buffers.

use super::Plan;
use serde::{Deserialize, Serialize};

/// Which arena a buffer is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arena {
    /// Lives as long as the run.
    Persistent,
    /// Lives within a step.
    Workspace,
    /// Lives as long as the run, in host memory.
    Host,
}

impl Arena {
    /// Every arena.
    pub const ALL: [Arena; 3] = [Arena::Persistent, Arena::Workspace, Arena::Host];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Arena::Persistent => "persistent",
            Arena::Workspace => "workspace",
            Arena::Host => "host",
        }
    }

    /// Whether its contents persist across steps.
    pub fn outlives_step(self) -> bool {
        self != Arena::Workspace
    }
}

impl Plan {
    /// Size of an arena of one rank, in bytes.
    pub fn arena_bytes(&self, arena: Arena) -> usize {
        match arena {
            Arena::Persistent => self.persistent_bytes,
            Arena::Workspace => self.workspace_bytes,
            Arena::Host => self.host_bytes,
        }
    }
}
