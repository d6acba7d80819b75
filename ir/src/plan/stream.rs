//! Streams of tasks.

use super::{Action, Arena, Place, Plan};
use serde::{Deserialize, Serialize};

/// Where a task runs. Tasks of one stream run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Kernels.
    Compute,
    /// All-gathers.
    Gather,
    /// Reductions of gradients.
    Reduce,
    /// Copies from host memory.
    CopyIn,
    /// Copies to host memory.
    CopyOut,
}

impl Stream {
    /// Every stream.
    pub const ALL: [Stream; 5] =
        [Stream::Compute, Stream::Gather, Stream::Reduce, Stream::CopyIn, Stream::CopyOut];

    /// Its place among all.
    pub fn index(self) -> usize {
        self as usize
    }

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Stream::Compute => "compute",
            Stream::Gather => "gather",
            Stream::Reduce => "reduce",
            Stream::CopyIn => "copy in",
            Stream::CopyOut => "copy out",
        }
    }
}

impl Plan {
    /// The stream of a copy between device and host; `None` for every other action.
    pub fn host_copy(&self, action: &Action) -> Option<Stream> {
        let Action::Copy { from, to } = action else { return None };
        let on_host = |place: &Place| self.buffers[place.buffer].arena == Arena::Host;
        match (on_host(from), on_host(to)) {
            (true, false) => Some(Stream::CopyIn),
            (false, true) => Some(Stream::CopyOut),
            _ => None,
        }
    }

    /// The streams on which anything runs.
    pub fn streams(&self) -> Vec<Stream> {
        let used = |s: &Stream| *s == Stream::Compute || self.tasks.iter().any(|t| t.stream == *s);
        Stream::ALL.into_iter().filter(used).collect()
    }
}
