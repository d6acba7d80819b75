//! Collects how every kernel of a plan is executed and what that requires, before memory or a device is available.

use super::sums;
use crate::RunError;
use frit_ir::plan::{
    Action, Argument, CudaLaunch, Entry, Kernel, KernelId, Launch, Launches, Plan, Pointer,
    SourceKernel, TaskId, TiVec, layout,
};

/// How a kernel of the plan is executed.
pub(super) enum Code<'a> {
    Generated { launches: &'a [CudaLaunch], scratch_bytes: usize },
    Launches(&'a Launches),
}

/// Requirements of a plan's kernels.
pub(super) struct Survey<'a> {
    /// By kernel.
    pub(super) code: TiVec<KernelId, Code<'a>>,
    /// Tasks that may report a fault, ascending.
    pub(super) faulting: Vec<TaskId>,
    /// The kernels that add over ranks.
    sums: Vec<SourceKernel>,
}

impl<'a> Survey<'a> {
    /// Collects how every kernel is executed.
    ///
    /// # Errors
    /// A kernel that has no code for GPUs, or a collective that none adds.
    pub(super) fn of(plan: &'a Plan) -> Result<Survey<'a>, RunError> {
        let code: TiVec<KernelId, Code> =
            plan.kernels.iter().map(Code::of).collect::<Result<_, _>>()?;
        let launches = |code: &Code<'a>| match code {
            Code::Generated { .. } => vec![],
            Code::Launches(selected) => selected.every_launch(),
        };
        let by_kernel: TiVec<KernelId, Vec<&Launch>> = code.iter().map(launches).collect();
        let faulting = plan.tasks.iter_enumerated().filter(|(_, task)| match task.action {
            Action::Kernel { kernel, .. } => by_kernel[kernel].iter().any(|l| reports_faults(l)),
            _ => false,
        });
        let faulting = faulting.map(|(i, _)| i).collect();
        Ok(Survey { code, faulting, sums: sums::kernels(plan)? })
    }

    /// The kernels in CUDA C++, including those of all candidates and of sums over ranks.
    pub(super) fn sources(&self) -> Vec<&SourceKernel> {
        let launches = self.selected().flat_map(Launches::every_launch);
        let sources =
            launches.filter_map(|l| if let Launch::Source(k) = l { Some(k) } else { None });
        sources.chain(&self.sums).collect()
    }

    fn selected(&self) -> impl Iterator<Item = &Launches> {
        self.code.iter().filter_map(|code| match code {
            Code::Launches(selected) => Some(*selected),
            Code::Generated { .. } => None,
        })
    }
}

impl Code<'_> {
    fn of(kernel: &Kernel) -> Result<Code<'_>, RunError> {
        match &kernel.entry {
            Entry::Cuda { launches, scratch_bytes } => {
                Ok(Code::Generated { launches, scratch_bytes: *scratch_bytes })
            }
            Entry::Launches(selected) => Ok(Code::Launches(selected)),
            Entry::Host { .. } | Entry::Routine(_) | Entry::Interpreter => {
                let reason = format!("kernel `{}` has no code for a GPU", kernel.name);
                Err(RunError::Plan { path: layout::PLAN.into(), reason })
            }
        }
    }
}

fn reports_faults(launch: &Launch) -> bool {
    let Launch::Source(kernel) = launch else { return false };
    kernel.arguments.iter().any(|a| matches!(a, Argument::Pointer(Pointer::Fault)))
}
