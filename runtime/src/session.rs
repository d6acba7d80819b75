//! Sessions: a plan on the devices of its ranks, which are threads or processes on the CPU and processes on GPUs.
//! Training, evaluation and comparison are each a [`Work`] of the ranks, consisting of [`step`]s.

use crate::RunError;
use crate::device::Device;
use crate::device::cpu::Cpu;
use crate::device::cuda::{Cuda, Limits};
use crate::plan_dir::PlanDir;
use frit_comm::identity::Identity;
use frit_comm::launch::{Launch, timeout_from_environment};
use frit_comm::local::LocalComm;
use frit_comm::processes::ProcessComm;
use frit_comm::{CommError, Communicator};
use frit_ir::plan::{DeviceType, Plan, TaskId};
use std::ops::Range;

/// A plan, and how its ranks run it.
pub(crate) struct Session<'a> {
    pub(crate) dir: &'a PlanDir,
    /// A second plan on the same devices, with separate memory.
    pub(crate) beside: Option<&'a PlanDir>,
    /// Everything that must be equal on all ranks.
    pub(crate) identity: Identity,
    /// Threads per rank; by default the cores divided by the ranks.
    pub(crate) threads: Option<usize>,
    /// Execute every body with the IR interpreter.
    pub(crate) interpret: bool,
    /// Seconds in which a GPU measures candidates of kernels.
    pub(crate) tuning_seconds: Option<u64>,
}

/// What the ranks of a session do.
pub(crate) trait Work: Sync {
    /// The outcome of a rank.
    type Outcome: Send;

    /// One rank from start to end; `beside` is the device of the session's second plan.
    ///
    /// # Errors
    /// What ends the session.
    fn rank<D: Device>(
        &self,
        rank: usize,
        device: &mut D,
        beside: Option<&mut D>,
    ) -> Result<Self::Outcome, RunError>;
}

/// The outcomes of the ranks of this process, in rank order, and their communication volume.
pub(crate) struct Finished<T> {
    pub(crate) outcomes: Vec<T>,
    /// Number of collectives, and bytes received, summed over ranks; not counted on GPUs.
    pub(crate) traffic: (u64, u64),
}

impl Session<'_> {
    /// Runs all ranks, or the rank of this process.
    ///
    /// # Errors
    /// If the ranks were started incorrectly, cannot connect, or have no device; or the error of a rank.
    pub(crate) fn run<W: Work>(
        &self,
        launch: &Launch,
        work: &W,
    ) -> Result<Finished<W::Outcome>, RunError> {
        match (self.dir.plan.target.device == DeviceType::Cuda, launch.world_size) {
            (true, _) => self.on_gpu(work),
            (false, 1) => self.on_threads(work),
            (false, _) => self.as_process(launch, work),
        }
    }

    /// Runs every rank as a thread on the CPU; a failing rank ends the others.
    fn on_threads<W: Work>(&self, work: &W) -> Result<Finished<W::Outcome>, RunError> {
        let comms = LocalComm::world(self.dir.plan.world_size);
        let watch = comms[0].clone();
        let one = |comm: LocalComm| {
            let end = comm.clone();
            self.on_cpu(comm, work).inspect_err(|_| end.abort())
        };
        let results = std::thread::scope(|scope| {
            let handles: Vec<_> = comms.into_iter().map(|c| scope.spawn(|| one(c))).collect();
            let join = |h: std::thread::ScopedJoinHandle<'_, _>| {
                h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            handles.into_iter().map(join).collect()
        });
        let outcomes = own_failures_first(results).into_iter().collect::<Result<_, _>>()?;
        Ok(Finished { outcomes, traffic: watch.traffic() })
    }

    /// Runs the rank of this process on the CPU.
    fn as_process<W: Work>(
        &self,
        launch: &Launch,
        work: &W,
    ) -> Result<Finished<W::Outcome>, RunError> {
        launch.expect_ranks(self.dir.plan.world_size)?;
        let timeout = timeout_from_environment()?;
        let comm = ProcessComm::connect(launch, self.identity.text(), timeout)?;
        let outcome = self.on_cpu(comm.clone(), work).inspect_err(|_| comm.abort())?;
        let traffic = comm.traffic();
        comm.finish()?;
        Ok(Finished { outcomes: vec![outcome], traffic })
    }

    fn on_cpu<C: Communicator + Clone, W: Work>(
        &self,
        comm: C,
        work: &W,
    ) -> Result<W::Outcome, RunError> {
        let rank = comm.rank();
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = self.threads;
        let threads = threads.unwrap_or_else(|| (cores() / self.dir.plan.world_size).max(1));
        let open = |dir| Cpu::new(dir, comm.clone(), threads, self.interpret);
        let mut device = open(self.dir)?;
        let mut beside = self.beside.map(open).transpose()?;
        work.rank(rank, &mut device, beside.as_mut())
    }

    /// Runs the rank of this process on its GPU.
    fn on_gpu<W: Work>(&self, work: &W) -> Result<Finished<W::Outcome>, RunError> {
        if self.interpret {
            return Err(RunError::Interpret);
        }
        let limits = Limits::of(self.tuning_seconds);
        let mut device = Cuda::open(self.dir, self.beside, self.identity.text(), limits)?;
        let rank = device.rank();
        let beside = self.beside.map(|dir| device.beside(dir)).transpose();
        let outcome = beside
            .and_then(|mut beside| work.rank(rank, &mut device, beside.as_mut()))
            .inspect_err(|error| device.fail(error))?;
        device.finish()?;
        Ok(Finished { outcomes: vec![outcome], traffic: (0, 0) })
    }
}

/// Runs one step of a plan: `feed` writes the inputs of a micro-step and `run` executes tasks. Its metrics are
/// requested.
///
/// # Errors
/// The error of `feed`, `run`, or the device.
pub(crate) fn step<D: Device>(
    plan: &Plan,
    micro_steps: usize,
    device: &mut D,
    mut feed: impl FnMut(&mut D, usize) -> Result<(), RunError>,
    mut run: impl FnMut(&mut D, Range<TaskId>) -> Result<(), RunError>,
) -> Result<(), RunError> {
    for k in 0..micro_steps {
        feed(device, k)?;
        run(device, plan.micro_step_tasks(k, micro_steps))?;
    }
    device.note_metrics()
}

/// The results of ranks, with those stopped by another rank last: the original failure is more informative.
fn own_failures_first<T>(results: Vec<Result<T, RunError>>) -> Vec<Result<T, RunError>> {
    let (aborted, mut others): (Vec<_>, Vec<_>) =
        results.into_iter().partition(|r| matches!(r, Err(e) if is_abort(e)));
    others.extend(aborted);
    others
}

fn is_abort(error: &RunError) -> bool {
    match error {
        RunError::Comm(CommError::Aborted { .. }) => true,
        RunError::Task { reason, .. } => reason.contains("another rank failed"),
        _ => false,
    }
}
