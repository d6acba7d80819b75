//! Memory that kernels need beside the arenas: scratch memory of launches and of sums over ranks, and library workspace.

use super::{ALIGNMENT, Action, Entry, KernelId, Launch, Plan, RankSum, Stream};
use typed_index_collections::TiVec;

/// Workspace of the GEMMs of a stream, in bytes: NVIDIA's recommendation for Hopper.
pub const GEMM_WORKSPACE: usize = 32 << 20;

/// Memory of the kernels of one stream, which run in sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Memory that the launches of one task share, in bytes.
    pub scratch_bytes: usize,
    /// Whether GEMMs run there.
    pub gemms: bool,
    /// The most that an engine of cuDNN may use there if it is chosen, in bytes; 0 if there is no candidate.
    pub engine_bytes: usize,
}

impl Needs {
    /// Of two kernels of a stream.
    fn max(self, other: Needs) -> Needs {
        Needs {
            scratch_bytes: self.scratch_bytes.max(other.scratch_bytes),
            gemms: self.gemms || other.gemms,
            engine_bytes: self.engine_bytes.max(other.engine_bytes),
        }
    }

    /// Workspace of libraries except cuDNN engines, in bytes.
    pub fn workspace_bytes(&self) -> usize {
        if self.gemms { GEMM_WORKSPACE } else { 0 }
    }
}

impl Entry {
    /// Memory of a kernel with this entry.
    pub fn needs(&self) -> Needs {
        let none = Needs { scratch_bytes: self.scratch_bytes(), ..Needs::default() };
        let Entry::Launches(selected) = self else { return none };
        selected.every_launch().into_iter().fold(none, |needs, launch| match launch {
            Launch::Gemm(_) => Needs { gemms: true, ..needs },
            Launch::Operation(launch) => {
                let bytes = launch.operation.workspace_bytes();
                Needs { engine_bytes: needs.engine_bytes.max(bytes), ..needs }
            }
            _ => needs,
        })
    }
}

impl Plan {
    /// Memory of the kernels of each stream, in the order of [`Stream::ALL`].
    pub fn needs(&self) -> [Needs; Stream::ALL.len()] {
        let of_kernel: TiVec<KernelId, Needs> =
            self.kernels.iter().map(|k| k.entry.needs()).collect();
        let mut all = [Needs::default(); Stream::ALL.len()];
        for task in &self.tasks {
            let of_task = match &task.action {
                Action::Kernel { kernel, .. } => of_kernel[*kernel],
                other => {
                    let scratch_bytes = self.rank_sum(other).map_or(0, RankSum::bytes);
                    Needs { scratch_bytes, ..Needs::default() }
                }
            };
            let needs = &mut all[task.stream.index()];
            *needs = needs.max(of_task);
        }
        all
    }

    /// Device bytes of a rank for kernels, outside its arenas: scratch memory, and workspace of GEMMs. A cuDNN engine
    /// that is selected when the plan is loaded may need more, see [`Plan::engine_bytes`].
    pub fn kernel_bytes(&self) -> usize {
        let bytes = |needs: Needs| {
            needs.scratch_bytes.next_multiple_of(ALIGNMENT) + needs.workspace_bytes()
        };
        self.needs().map(bytes).iter().sum()
    }

    /// Maximum additional bytes of cuDNN engines, if they are selected.
    pub fn engine_bytes(&self) -> usize {
        let more = |needs: Needs| needs.engine_bytes.saturating_sub(needs.workspace_bytes());
        self.needs().map(more).iter().sum()
    }
}
