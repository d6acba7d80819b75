//! Writing checkpoints, beside training and so that a kill at any moment leaves the last complete one.
//!
//! Every rank writes its file, and a list of what is in it, into a directory whose name no reader knows;
//! rank 0 waits for all lists, writes the index, renames the directory, and only then points `latest` to it.
//! All that is named is synced before its name is. Ranks meet in the file system only, so that it makes no
//! difference whether they are threads or processes.

use super::read::named_by;
use super::snapshot::{self, Piece};
use super::{
    BEST, CheckpointOptions, INDEX, Index, LATEST, Part, Position, SOURCE, SUMS, dir_name,
    shard_name, step_of,
};
use crate::RunError;
use crate::device::Device;
use crate::plan_dir::PlanDir;
use crate::save::safetensors_dtype;
use frit_ir::plan::sha256_hex;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for another rank's part, in seconds.
const PATIENCE: u64 = 600;

/// Beginning of the names of directories that are being written or removed.
const ASIDE: &str = ".partial-";

/// Identity of a run, the same on all ranks: parts of other runs are not taken for its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run(u64);

impl Run {
    /// A number that no other run on the same directory has.
    pub(crate) fn new() -> Run {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanoseconds = now.map_or(0, |d| d.as_nanos() as u64);
        Run(nanoseconds ^ u64::from(std::process::id()) << 40)
    }

    /// The one that all ranks agree on.
    ///
    /// # Errors
    /// If another rank failed.
    pub(crate) fn agreed(self, device: &impl Device) -> Result<Run, RunError> {
        device.largest(self.0).map(Run)
    }
}

/// One rank's side of the checkpoints of a run.
pub(crate) struct Saver<'a> {
    plan: &'a PlanDir,
    options: &'a CheckpointOptions,
    run: Run,
    rank: usize,
    set: &'a [(String, f64)],
    /// Set when any rank fails.
    cancel: Arc<AtomicBool>,
    /// The metrics, which must be on disk before `latest` says that their steps are done.
    metrics: Option<File>,
    in_flight: Option<JoinHandle<Result<(), RunError>>>,
    /// Steps of the last checkpoint, if this run wrote or read one.
    last: Option<usize>,
}

impl<'a> Saver<'a> {
    /// A saver that goes on after the checkpoint of `last` steps, if there is one.
    #[expect(clippy::too_many_arguments, reason = "each is one fact of the run")]
    pub(crate) fn new(
        plan: &'a PlanDir,
        options: &'a CheckpointOptions,
        run: Run,
        rank: usize,
        set: &'a [(String, f64)],
        cancel: Arc<AtomicBool>,
        metrics: Option<File>,
        last: Option<usize>,
    ) -> Self {
        Saver { plan, options, run, rank, set, cancel, metrics, in_flight: None, last }
    }

    /// Whether a checkpoint is due after `step` steps.
    pub(crate) fn due(&self, step: usize) -> bool {
        self.options.every.is_some_and(|every| step.is_multiple_of(every))
    }

    /// Copies what this rank owns after `step` steps, and writes it while training goes on. Waits for the
    /// checkpoint before.
    ///
    /// # Errors
    /// If the one before failed, or the device.
    pub(crate) fn save(
        &mut self,
        step: usize,
        position: Position,
        validation_loss: Option<f64>,
        device: &impl Device,
    ) -> Result<(), RunError> {
        self.wait()?;
        let pieces = snapshot::take(&self.plan.plan, device, self.rank)?;
        let aside = format!("{ASIDE}{:016x}-{}", self.run.0, dir_name(step));
        let job = Job {
            root: self.options.dir.clone(),
            aside: self.options.dir.join(aside),
            step,
            rank: self.rank,
            cancel: Arc::clone(&self.cancel),
        };
        let leader = match self.rank {
            0 => Some(Leader {
                index: snapshot::index(self.plan, step, position, validation_loss, self.set),
                source: self.plan.path.join(SOURCE),
                keep: self.options.keep,
                metrics: self.metrics.as_ref().and_then(|f| f.try_clone().ok()),
            }),
            _ => None,
        };
        self.in_flight = Some(std::thread::spawn(move || job.write(pieces, leader)));
        self.last = Some(step);
        Ok(())
    }

    /// Makes sure that the state after `step` steps is saved and on disk.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn finish(
        &mut self,
        step: usize,
        position: Position,
        validation_loss: Option<f64>,
        device: &impl Device,
    ) -> Result<(), RunError> {
        if self.last != Some(step) {
            self.save(step, position, validation_loss, device)?;
        }
        self.wait()
    }

    /// Reports the checkpoint that is being written if it has failed by now.
    ///
    /// # Errors
    /// Why it failed.
    pub(crate) fn check(&mut self) -> Result<(), RunError> {
        match &self.in_flight {
            Some(job) if job.is_finished() => self.wait(),
            _ => Ok(()),
        }
    }

    fn wait(&mut self) -> Result<(), RunError> {
        let Some(job) = self.in_flight.take() else { return Ok(()) };
        job.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Makes the directory of checkpoints ready; rank 0 removes what a killed run left aside.
///
/// # Errors
/// If it cannot be created, or holds checkpoints that this run neither continues nor may replace.
pub(crate) fn prepare(options: &CheckpointOptions, rank: usize) -> Result<(), RunError> {
    let dir = &options.dir;
    if dir.join(LATEST).exists() && !options.resume {
        let reason = "holds the checkpoints of an earlier run; add --resume to continue it, or choose \
                      another directory";
        return Err(RunError::checkpoint(dir, reason));
    }
    fs::create_dir_all(dir).map_err(RunError::io(dir))?;
    if rank > 0 {
        return Ok(());
    }
    for entry in fs::read_dir(dir).map_err(RunError::io(dir))? {
        let entry = entry.map_err(RunError::io(dir))?;
        if entry.file_name().to_string_lossy().starts_with(ASIDE) {
            let path = entry.path();
            let removed =
                if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(RunError::io(&path))?;
        }
    }
    Ok(())
}

/// What one rank writes of one checkpoint.
struct Job {
    root: PathBuf,
    aside: PathBuf,
    step: usize,
    rank: usize,
    cancel: Arc<AtomicBool>,
}

/// What rank 0 adds.
struct Leader {
    index: Index,
    source: PathBuf,
    keep: Option<usize>,
    metrics: Option<File>,
}

/// The tensors of one file.
type Parts = BTreeMap<String, Part>;

impl Job {
    fn write(&self, pieces: Vec<Piece>, leader: Option<Leader>) -> Result<(), RunError> {
        let written = self.write_part(pieces).and_then(|()| match leader {
            Some(leader) => self.complete(leader),
            None => Ok(()),
        });
        if written.is_err() {
            self.cancel.store(true, Ordering::Relaxed);
            if self.rank == 0 {
                // The error that matters is the first; there may be nothing to remove.
                let _ = fs::remove_dir_all(&self.aside);
            }
        }
        written
    }

    fn list_of(&self, rank: usize) -> PathBuf {
        self.aside.join(format!("rank-{rank:05}.json"))
    }

    /// Writes this rank's file, then the list of its tensors.
    fn write_part(&self, pieces: Vec<Piece>) -> Result<(), RunError> {
        fs::create_dir_all(&self.aside).map_err(RunError::io(&self.aside))?;
        if pieces.is_empty() {
            return replace(&self.list_of(self.rank), b"{}");
        }
        let file = shard_name(self.rank);
        let path = self.aside.join(&file);
        let mut parts = Parts::new();
        let mut views = Vec::new();
        for piece in &pieces {
            let len = piece.bytes.len() / piece.dtype.size();
            let sha256 = sha256_hex(&piece.bytes);
            parts.insert(
                piece.key.clone(),
                Part { file: file.clone(), begin: piece.begin, len, sha256 },
            );
            let view = TensorView::new(safetensors_dtype(piece.dtype), vec![len], &piece.bytes);
            views.push((piece.key.as_str(), view.map_err(|e| self.refuse(&path, e))?));
        }
        safetensors::serialize_to_file(views, None, &path).map_err(|e| self.refuse(&path, e))?;
        sync(&path)?;
        let list = serde_json::to_vec(&parts).map_err(|e| self.refuse(&path, e))?;
        replace(&self.list_of(self.rank), &list)
    }

    fn refuse(&self, path: &Path, error: impl std::fmt::Display) -> RunError {
        RunError::checkpoint(path, format!("cannot be written: {error}"))
    }

    /// Waits for all parts, writes the index, and makes the checkpoint the latest.
    fn complete(&self, leader: Leader) -> Result<(), RunError> {
        let Leader { mut index, source, keep, metrics } = leader;
        for rank in 0..index.world_size {
            let list = self.await_list(rank)?;
            let bytes = fs::read(&list).map_err(RunError::io(&list))?;
            let parts: Parts = serde_json::from_slice(&bytes).map_err(|e| self.refuse(&list, e))?;
            for (key, part) in parts {
                let entry = index.tensors.get_mut(&key);
                let entry = entry.ok_or_else(|| self.refuse(&list, format!("unknown `{key}`")))?;
                entry.parts.push(part);
            }
            fs::remove_file(&list).map_err(RunError::io(&list))?;
        }
        for entry in index.tensors.values_mut() {
            entry.parts.sort_by_key(|p| p.begin);
        }
        let text = serde_json::to_vec_pretty(&index).map_err(|e| self.refuse(&self.aside, e))?;
        let mut sums = String::new();
        let mut put = |name: &str, bytes: &[u8]| {
            sums += &format!("{}  {name}\n", sha256_hex(bytes));
            create(&self.aside.join(name), bytes)
        };
        put(INDEX, &text)?;
        if source.is_dir() {
            let to = self.aside.join(SOURCE);
            fs::create_dir_all(&to).map_err(RunError::io(&to))?;
            let mut names = Vec::new();
            for entry in fs::read_dir(&source).map_err(RunError::io(&source))? {
                let entry = entry.map_err(RunError::io(&source))?;
                names.push(entry.file_name().to_string_lossy().into_owned());
            }
            names.sort();
            for name in names {
                let from = source.join(&name);
                let bytes = fs::read(&from).map_err(RunError::io(&from))?;
                put(&format!("{SOURCE}/{name}"), &bytes)?;
            }
            sync(&to)?;
        }
        create(&self.aside.join(SUMS), sums.as_bytes())?;
        sync(&self.aside)?;
        if let Some(metrics) = metrics {
            // A pipe cannot be synced, and needs not to be.
            let _ = metrics.sync_data();
        }
        let name = dir_name(self.step);
        let path = self.root.join(&name);
        if path.exists() {
            // Complete, but `latest` never came to name it.
            remove(&path)?;
        }
        fs::rename(&self.aside, &path).map_err(RunError::io(&path))?;
        sync(&self.root)?;
        replace(&self.root.join(LATEST), format!("{name}\n").as_bytes())?;
        if index.validation_loss.is_some_and(|loss| self.best().is_none_or(|(_, best)| loss < best))
        {
            replace(&self.root.join(BEST), format!("{name}\n").as_bytes())?;
        }
        match keep {
            Some(keep) => self.forget(keep),
            None => Ok(()),
        }
    }

    fn await_list(&self, rank: usize) -> Result<PathBuf, RunError> {
        let list = self.list_of(rank);
        let begin = Instant::now();
        let mut pause = Duration::from_micros(200);
        while !list.exists() {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(RunError::Aborted { rank: self.rank });
            }
            if begin.elapsed() > Duration::from_secs(PATIENCE) {
                let reason = format!("rank {rank} did not write its part within {PATIENCE} s");
                return Err(RunError::checkpoint(&self.aside, reason));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
        Ok(list)
    }

    /// The step and the validation loss of the best checkpoint so far; not one that is ahead of this one,
    /// which is of a run that was resumed before it.
    fn best(&self) -> Option<(usize, f64)> {
        let path = named_by(&self.root.join(BEST)).ok()?;
        let index: Index = serde_json::from_slice(&fs::read(path.join(INDEX)).ok()?).ok()?;
        let loss = index.validation_loss.filter(|_| index.step < self.step)?;
        Some((index.step, loss))
    }

    /// Removes all but the newest checkpoints, and the best.
    fn forget(&self, keep: usize) -> Result<(), RunError> {
        let mut steps = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(RunError::io(&self.root))? {
            let entry = entry.map_err(RunError::io(&self.root))?;
            steps.extend(step_of(&entry.file_name().to_string_lossy()));
        }
        steps.sort_unstable();
        // What is ahead of the latest is of a run that was resumed before it.
        steps.retain(|step| *step <= self.step);
        let best = named_by(&self.root.join(BEST)).ok();
        for step in &steps[..steps.len().saturating_sub(keep)] {
            let path = self.root.join(dir_name(*step));
            if best.as_ref() != Some(&path) {
                remove(&path)?;
            }
        }
        Ok(())
    }
}

/// Removes a checkpoint; at no moment a part of it is left under its name.
fn remove(path: &Path) -> Result<(), RunError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let aside = path.with_file_name(format!("{ASIDE}removed-{}-{name}", std::process::id()));
    fs::rename(path, &aside).map_err(RunError::io(path))?;
    fs::remove_dir_all(&aside).map_err(RunError::io(&aside))
}

/// Makes what was written to a file or directory durable.
fn sync(path: &Path) -> Result<(), RunError> {
    File::open(path).and_then(|f| f.sync_all()).map_err(RunError::io(path))
}

/// Writes a new file, durably.
fn create(path: &Path, bytes: &[u8]) -> Result<(), RunError> {
    let written = File::create(path).and_then(|mut f| {
        f.write_all(bytes)?;
        f.sync_all()
    });
    written.map_err(RunError::io(path))
}

/// Replaces a file durably: readers see the old or the new content.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), RunError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!("{ASIDE}{name}"));
    create(&aside, bytes)?;
    fs::rename(&aside, path).map_err(RunError::io(path))?;
    path.parent().map_or(Ok(()), sync)
}
