//! Lock of a checkpoint directory: only one run at a time may write to it.
//!
//! Rank 0 takes a system lock on the file `lock`, which names the run. The lock is released when the process ends, however
//! it ends; the file stays.

use super::write::ASIDE;
use super::{CheckpointOptions, LATEST, step_of};
use crate::RunError;
use crate::files::{self, Sink};
use crate::outputs;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Name of the file that is locked.
const LOCK: &str = "lock";
/// Runs before the last that the file names at most.
const MAX_RUNS: usize = 1000;
/// The option that errors name.
const OPTION: &str = "--checkpoint";

/// Identity of a run, recorded in its metrics, in the lock of its checkpoints, and in the names of its temporary files,
/// so that they are not confused with those of other runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run(pub(super) u64);

impl Run {
    /// A random number, unique to the run.
    pub(crate) fn new() -> Run {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let nanoseconds = now.map_or(0, |d| d.as_nanos() as u64);
        Run(nanoseconds ^ u64::from(std::process::id()) << 40)
    }

    /// Broadcasts rank 0's identity to all ranks.
    ///
    /// # Errors
    /// If another rank failed.
    pub(crate) fn agreed(
        self,
        rank: usize,
        device: &impl crate::device::Device,
    ) -> Result<Run, RunError> {
        device.largest(if rank == 0 { self.0 } else { 0 }).map(Run)
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Seconds since 1970.
pub(crate) fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// The lock of a directory, held until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
    /// A warning for the user, if the file system has no locks.
    pub(crate) warning: Option<String>,
    /// The runs that wrote the checkpoints before, as their metrics name them.
    pub(crate) before: Vec<String>,
}

impl Drop for Lock {
    /// Closing the file is not enough: a process forked in the meantime that has not yet called `exec` also has it
    /// open.
    fn drop(&mut self) {
        // An error means that it was never locked.
        let _ = self.file.unlock();
    }
}

/// The content of the file.
#[derive(Serialize, Deserialize)]
struct Holder {
    run: String,
    pid: u32,
    host: String,
    /// Seconds since 1970.
    started: u64,
    /// The runs before it.
    #[serde(default)]
    before: Vec<String>,
}

/// Creates and locks the directory of checkpoints, and removes temporary files of a killed run. On rank 0.
///
/// # Errors
/// If it cannot be created or written, is locked by another run, or contains checkpoints that this run does not
/// continue.
pub(crate) fn take(options: &CheckpointOptions, run: Run) -> Result<Lock, RunError> {
    let dir = &options.dir;
    refuse_earlier(options)?;
    files::create_folder(dir).map_err(|e| {
        let reason = outputs::reason_of_folder(dir, &e);
        RunError::Output { option: OPTION, path: dir.into(), reason }
    })?;
    let lock = lock(dir, run)?;
    // Another run may have written in the meantime.
    refuse_earlier(options)?;
    for entry in fs::read_dir(dir).map_err(RunError::io(dir))? {
        let path = entry.map_err(RunError::io(dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(ASIDE) {
            let removed =
                if path.is_dir() { files::remove_folder(&path) } else { files::remove(&path) };
            removed.map_err(RunError::io(&path))?;
        }
    }
    Ok(lock)
}

fn refuse_earlier(options: &CheckpointOptions) -> Result<(), RunError> {
    let dir = &options.dir;
    if options.resume || !(dir.join(LATEST).exists() || holds_checkpoints(dir)) {
        return Ok(());
    }
    let reason = "holds the checkpoints of an earlier run; add --resume to continue it, or choose another \
                  directory";
    Err(RunError::checkpoint(dir, reason))
}

fn holds_checkpoints(dir: &Path) -> bool {
    let Ok(entries) = fs::read_dir(dir) else { return false };
    entries.flatten().any(|e| step_of(&e.file_name().to_string_lossy()).is_some())
}

fn lock(dir: &Path, run: Run) -> Result<Lock, RunError> {
    let path = dir.join(LOCK);
    let refuse = RunError::output(OPTION, &path);
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let file = opened.map_err(refuse)?;
    let warning = match file.try_lock() {
        Ok(()) => None,
        Err(TryLockError::WouldBlock) => {
            let reason = format!(
                "is written by {}; wait until it has ended, or choose another directory",
                holder(&path)
            );
            return Err(RunError::checkpoint(dir, reason));
        }
        // A file system without locks.
        Err(TryLockError::Error(e)) => Some(format!(
            "{} cannot be locked ({e}): make sure that no other run writes there",
            dir.display()
        )),
    };
    let known: Option<Holder> =
        fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let mut before = known.map_or(vec![], |h| [h.before, vec![h.run]].concat());
    before.drain(..before.len().saturating_sub(MAX_RUNS));
    let holder = Holder {
        before: before.clone(),
        run: run.to_string(),
        pid: std::process::id(),
        host: host(),
        started: wall_time() as u64,
    };
    let text = serde_json::to_string(&holder).unwrap_or_default() + "\n";
    let written = Sink::create(&path).and_then(|mut sink| sink.write_all(text.as_bytes()));
    written.map_err(RunError::output(OPTION, &path))?;
    Ok(Lock { file, warning, before })
}

/// The run recorded in a lock file.
fn holder(path: &Path) -> String {
    let text = fs::read(path).unwrap_or_default();
    match serde_json::from_slice(&text) {
        Ok(Holder { run, pid, host, started, .. }) => {
            let seconds = (wall_time() as u64).saturating_sub(started);
            format!("the run {run} (process {pid} on {host}, started {seconds} s ago)")
        }
        Err(_) => "another run".into(),
    }
}

fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_default();
    if name.trim().is_empty() { "an unnamed host".into() } else { name.trim().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_ends_with_its_run_though_the_file_is_open_elsewhere() {
        let dir = tempfile::tempdir().expect("a directory");
        let first = lock(dir.path(), Run(1)).expect("nobody else's");
        // As in a process that was just forked.
        let open_elsewhere = first.file.try_clone().expect("the same open file");
        assert!(lock(dir.path(), Run(2)).is_err());
        drop(first);
        let second = lock(dir.path(), Run(2)).expect("nobody else's");
        assert_eq!(second.before, [Run(1).to_string()]);
        drop(second);
        let third = lock(dir.path(), Run(3)).expect("nobody else's");
        assert_eq!(third.before, [Run(1), Run(2)].map(|run| run.to_string()));
        drop(open_elsewhere);
    }
}
