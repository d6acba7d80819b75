//! How every kernel of a plan is executed, and what that needs: known before there is memory, or a device.

use super::memory::{Needs, STREAMS, index};
use crate::RunError;
use frit_ir::plan::{
    Action, Argument, CudaLaunch, Entry, Kernel, Launch, Launches, Plan, Pointer, SourceKernel,
};

/// How a kernel of the plan is executed.
pub(super) enum Code<'a> {
    Generated { launches: &'a [CudaLaunch], scratch_bytes: usize },
    Launches(&'a Launches),
}

/// What is known of a plan's kernels before there is memory.
pub(super) struct Survey<'a> {
    /// By kernel.
    pub(super) code: Vec<Code<'a>>,
    /// What kernels need, by stream.
    pub(super) needs: [Needs; STREAMS],
    /// Tasks that may report a fault, ascending.
    pub(super) faulting: Vec<usize>,
}

impl<'a> Survey<'a> {
    /// Finds how every kernel is executed.
    ///
    /// # Errors
    /// A kernel that has no code for GPUs.
    pub(super) fn of(plan: &'a Plan) -> Result<Survey<'a>, RunError> {
        let code: Vec<Code> = plan.kernels.iter().map(Code::of).collect::<Result<_, _>>()?;
        let mut needs = [Needs::default(); STREAMS];
        let mut faulting = Vec::new();
        for (i, task) in plan.tasks.iter().enumerate() {
            let Action::Kernel { kernel, .. } = &task.action else { continue };
            let need = &mut needs[index(task.stream)];
            match &code[*kernel] {
                Code::Generated { scratch_bytes, .. } => {
                    need.scratch_bytes = need.scratch_bytes.max(*scratch_bytes);
                }
                Code::Launches(selected) => {
                    need.scratch_bytes = need.scratch_bytes.max(selected.scratch_bytes);
                    let launches = selected.every_launch();
                    let is_product = |l: &&Launch| matches!(l, Launch::Gemm(_));
                    need.products |= launches.iter().any(is_product);
                    need.operations |= launches.iter().any(|l| matches!(l, Launch::Operation(_)));
                    if launches.iter().any(|launch| reports_faults(launch)) {
                        faulting.push(i);
                    }
                }
            }
        }
        Ok(Survey { code, needs, faulting })
    }

    /// The kernels in CUDA C++, those of every choice among them.
    pub(super) fn sources(&self) -> Vec<&SourceKernel> {
        let launches = self.selected().flat_map(Launches::every_launch);
        launches.filter_map(|l| if let Launch::Source(k) = l { Some(k) } else { None }).collect()
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
                Err(RunError::Plan { path: "plan.json".into(), reason })
            }
        }
    }
}

fn reports_faults(launch: &Launch) -> bool {
    let Launch::Source(kernel) = launch else { return false };
    kernel.arguments.iter().any(|a| matches!(a, Argument::Pointer(Pointer::Fault)))
}
