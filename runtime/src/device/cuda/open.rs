//! Opens a rank on a real GPU, from a plan and the launcher's environment.

use super::survey::Survey;
use super::{Cuda, Limits, Ranks};
use crate::RunError;
use crate::plan_dir::PlanDir;
use frit_comm::launch::{Launch, timeout_from_environment};
use frit_comm::rendezvous::Rendezvous;
use frit_cuda::CudaError;
use frit_cuda::Machine;
use frit_cuda::{Libraries, NcclLibrary, Real};
use frit_ir::plan::Plan;
use std::time::Duration;

/// The libraries that a plan needs besides the driver, and whether it needs NCCL.
///
/// # Errors
/// A kernel that has no code for GPUs.
pub(super) fn needs(plan: &Plan) -> Result<(Libraries, bool), RunError> {
    let (survey, needs) = (Survey::of(plan)?, plan.needs());
    let libraries = Libraries {
        cublaslt: needs.iter().any(|n| n.gemms),
        cudnn: needs.iter().any(|n| n.engine_bytes > 0),
        nvrtc: !survey.sources().is_empty(),
    };
    Ok((libraries, plan.world_size > 1))
}

impl<'a> Cuda<'a, Real> {
    /// Opens this process's rank on its GPU: connects to the other ranks and loads the libraries that the plan, and one
    /// `beside` it, need; the memory that the latter needs is left free. `identity` distinguishes runs of the plan that must
    /// not be mixed.
    ///
    /// # Errors
    /// What is missing: a variable, a rank, the driver, a GPU, a library, memory.
    pub fn open(
        dir: &'a PlanDir,
        beside: Option<&PlanDir>,
        identity: &str,
        mut limits: Limits,
    ) -> Result<Self, RunError> {
        let (mut libraries, collectives) = needs(&dir.plan)?;
        if let Some(beside) = beside {
            let (more, _) = needs(&beside.plan)?;
            libraries.cublaslt |= more.cublaslt;
            libraries.cudnn |= more.cudnn;
            libraries.nvrtc |= more.nvrtc;
            let plan = &beside.plan;
            limits.reserved_bytes +=
                plan.persistent_bytes + plan.workspace_bytes + super::extra_bytes(plan)?;
        }
        let launch = Launch::from_environment()?;
        launch.expect_ranks(dir.plan.world_size)?;
        let timeout = timeout_from_environment()?;
        let rendezvous = match collectives {
            true => Some(Rendezvous::meet(&launch, identity, timeout)?),
            false => None,
        };
        let opened = open_device(&launch, libraries, rendezvous.as_ref(), timeout);
        let driver = opened.inspect_err(|e| tell(rendezvous.as_ref(), &launch, e))?;
        Cuda::new(dir, driver, Ranks { rank: launch.rank, rendezvous, timeout }, limits)
    }
}

/// Reports to the other ranks why this one cannot continue.
fn tell(rendezvous: Option<&Rendezvous>, launch: &Launch, error: &RunError) {
    if let Some(rendezvous) = rendezvous {
        rendezvous.fail(&format!("rank {} stopped: {error}", launch.rank));
    }
}

fn open_device(
    launch: &Launch,
    libraries: Libraries,
    rendezvous: Option<&Rendezvous>,
    timeout: Duration,
) -> Result<Real, RunError> {
    if let Some(rendezvous) = rendezvous {
        // From here on, the failure of a rank is noticed by those that wait for it in NCCL.
        rendezvous.watch()?;
    }
    let mut driver = Real::open(ordinal(launch)?, libraries)?;
    let Some(rendezvous) = rendezvous else { return Ok(driver) };
    let library = NcclLibrary::open().map_err(CudaError::from)?;
    let identity = if launch.rank == 0 { library.identity()? } else { vec![] };
    let identity = rendezvous.share(identity)?;
    let (rank, world_size) = (launch.rank, launch.world_size);
    let failure = || rendezvous.failure();
    driver.join(library.join(&identity, rank, world_size, timeout, failure)?);
    Ok(driver)
}

/// The GPU of a process: its local rank, or the only GPU that its launcher makes visible. Processes that NCCL treats as
/// different machines may share a GPU.
fn ordinal(launch: &Launch) -> Result<usize, CudaError> {
    let shares = std::env::var_os("NCCL_HOSTID").is_some();
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    if !shares && !visible.is_empty() && !visible.contains(',') {
        return Ok(0);
    }
    if let Some(local_rank) = launch.local_rank.filter(|_| !shares) {
        return Ok(local_rank);
    }
    let n = Machine::open()?.n_devices()?;
    if n == 0 {
        return Err(CudaError::NoDevice { wanted: launch.local_rank_of(1), found: 0 });
    }
    Ok(launch.local_rank_of(n) % n)
}
