//! Starts the ranks of a CPU plan: as threads of this process, or this process as one of several.

use crate::RunError;
use crate::comm::Communicator;
use crate::comm::launch::{Launch, timeout_from_environment};
use crate::comm::local::LocalComm;
use crate::comm::processes::ProcessComm;

/// Threads of a rank: as asked, or the cores divided by the ranks.
pub(crate) fn threads_per_rank(asked: Option<usize>, ranks: usize) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
    asked.unwrap_or_else(|| (cores() / ranks).max(1))
}

/// Runs `rank` for every rank on a thread of its own; one that fails ends the others. The results are in rank order,
/// but those of ranks that another one stopped come last: one that failed by itself says more.
pub(crate) fn on_threads<T: Send>(
    comms: Vec<LocalComm>,
    rank: impl Fn(LocalComm) -> Result<T, RunError> + Sync,
) -> Vec<Result<T, RunError>> {
    let one = |comm: LocalComm| {
        let end = comm.clone();
        rank(comm).inspect_err(|_| end.abort())
    };
    let results = std::thread::scope(|scope| {
        let handles: Vec<_> = comms.into_iter().map(|c| scope.spawn(|| one(c))).collect();
        let join = |h: std::thread::ScopedJoinHandle<'_, _>| {
            h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        handles.into_iter().map(join).collect()
    });
    own_failures_first(results)
}

/// Runs `rank` for the rank of this process, connected to the others of a plan of so many; `identity` is what
/// all must have in common. Also gives how many collectives it took part in, and the bytes it received in them.
///
/// # Errors
/// If the ranks were started wrong or do not find each other, or what `rank` failed with.
pub(crate) fn as_process<T>(
    ranks: usize,
    launch: &Launch,
    identity: &str,
    rank: impl FnOnce(ProcessComm) -> Result<T, RunError>,
) -> Result<(T, (u64, u64)), RunError> {
    let refuse = |reason| RunError::Ranks { reason };
    launch.expect_ranks(ranks).map_err(refuse)?;
    let timeout = timeout_from_environment().map_err(refuse)?;
    let comm = ProcessComm::connect(launch, identity, timeout)?;
    let result = rank(comm.clone()).inspect_err(|_| comm.abort())?;
    let traffic = comm.traffic();
    comm.finish()?;
    Ok((result, traffic))
}

/// The results of ranks, but those that another rank stopped last: one that failed by itself says more.
fn own_failures_first<T>(results: Vec<Result<T, RunError>>) -> Vec<Result<T, RunError>> {
    let (aborted, mut others): (Vec<_>, Vec<_>) =
        results.into_iter().partition(|r| matches!(r, Err(e) if is_abort(e)));
    others.extend(aborted);
    others
}

fn is_abort(error: &RunError) -> bool {
    match error {
        RunError::Aborted { .. } => true,
        RunError::Task { reason, .. } => reason.contains("another rank failed"),
        _ => false,
    }
}
