//! Writes the files of one checkpoint: every rank its part, then rank 0 the rest and finally `latest`.
//!
//! Files are written under temporary names, synced and renamed, so a file under its final name is always complete.

use super::read::named_by;
use super::snapshot::Piece;
use super::{BEST, INDEX, Index, LATEST, Part, SUMS, dir_name, shard_name, step_of};
use crate::RunError;
use crate::files::{self, Sink};
use crate::save::safetensors_dtype;
use crate::tensors::{Tensor, put};
use frit_ir::plan::{layout, sha256_hex};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Maximum wait for another rank's part to become visible: network file systems may delay it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Prefix of the names of files being written or removed.
pub(super) const ASIDE: &str = ".partial-";

/// What one rank writes of one checkpoint.
#[derive(Clone)]
pub(super) struct Job {
    pub(super) root: PathBuf,
    pub(super) aside: PathBuf,
    pub(super) step: usize,
    pub(super) rank: usize,
}

/// What rank 0 writes in addition.
pub(super) struct Leader {
    pub(super) index: Index,
    pub(super) source: PathBuf,
    pub(super) keep: Option<usize>,
    /// The metrics file, synced before `latest` names the checkpoint.
    pub(super) metrics: Option<Sink>,
}

/// The tensors of one file.
type Parts = BTreeMap<String, Part>;

impl Job {
    fn list_of(&self, rank: usize) -> PathBuf {
        self.aside.join(format!("rank-{rank:05}.json"))
    }

    /// Writes this rank's file, then the list of its tensors.
    pub(super) fn write_part(&self, pieces: &[Piece]) -> Result<(), RunError> {
        files::create_folder(&self.aside).map_err(RunError::io(&self.aside))?;
        if pieces.is_empty() {
            return replace(&self.list_of(self.rank), b"{}");
        }
        let file = shard_name(self.rank);
        let path = self.aside.join(&file);
        let mut parts = Parts::new();
        let mut tensors = Vec::new();
        for piece in pieces {
            let len = piece.bytes.len() / piece.dtype.size();
            let sha256 = sha256_hex(&piece.bytes);
            parts.insert(
                piece.key.clone(),
                Part { file: file.clone(), begin: piece.begin, len, sha256 },
            );
            let (dtype, bytes) = (safetensors_dtype(piece.dtype), Cow::Borrowed(&piece.bytes[..]));
            tensors.push((piece.key.clone(), Tensor { dtype, shape: vec![len], bytes }));
        }
        let written = Sink::create(&path).and_then(|sink| {
            let mut out = BufWriter::with_capacity(1 << 20, sink);
            put(&mut out, tensors, None)?;
            out.flush()?;
            out.get_ref().sync()
        });
        written.map_err(RunError::io(&path))?;
        let list = serde_json::to_vec(&parts).map_err(|e| self.refuse(&path, e))?;
        replace(&self.list_of(self.rank), &list)
    }

    fn refuse(&self, path: &Path, error: impl std::fmt::Display) -> RunError {
        RunError::checkpoint(path, format!("cannot be written: {error}"))
    }

    /// Writes the index and updates `latest`, when all parts are written; then removes checkpoints that need not be
    /// kept. Returns an error of that removal, which does not affect the checkpoint.
    ///
    /// # Errors
    /// If it is not complete.
    pub(super) fn complete(&self, leader: Leader) -> Result<Option<RunError>, RunError> {
        let keep = leader.keep;
        self.assemble(leader)?;
        let tidied = keep.map_or(Ok(()), |keep| forget(&self.root, self.step, keep));
        Ok(tidied.err())
    }

    fn assemble(&self, leader: Leader) -> Result<(), RunError> {
        let Leader { mut index, source, metrics, .. } = leader;
        for rank in 0..index.world_size {
            let list = self.await_list(rank)?;
            let bytes = fs::read(&list).map_err(RunError::io(&list))?;
            let parts: Parts = serde_json::from_slice(&bytes).map_err(|e| self.refuse(&list, e))?;
            for (key, part) in parts {
                let entry = index.tensors.get_mut(&key);
                let entry = entry.ok_or_else(|| self.refuse(&list, format!("unknown `{key}`")))?;
                entry.parts.push(part);
            }
            files::remove(&list).map_err(RunError::io(&list))?;
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
            let to = self.aside.join(layout::SOURCE);
            files::create_folder(&to).map_err(RunError::io(&to))?;
            let mut names = Vec::new();
            for entry in fs::read_dir(&source).map_err(RunError::io(&source))? {
                let entry = entry.map_err(RunError::io(&source))?;
                names.push(entry.file_name().to_string_lossy().into_owned());
            }
            names.sort();
            for name in names {
                let from = source.join(&name);
                let bytes = fs::read(&from).map_err(RunError::io(&from))?;
                put(&format!("{}/{name}", layout::SOURCE), &bytes)?;
            }
            sync(&to)?;
        }
        create(&self.aside.join(SUMS), sums.as_bytes())?;
        sync(&self.aside)?;
        if let Some(metrics) = metrics {
            // A pipe cannot be synced, and need not be.
            let _ = metrics.sync();
        }
        let name = dir_name(self.step);
        let path = self.root.join(&name);
        if path.exists() {
            // A complete checkpoint that `latest` never named.
            remove(&path)?;
        }
        files::rename(&self.aside, &path).map_err(RunError::io(&path))?;
        sync(&self.root)?;
        replace(&self.root.join(LATEST), format!("{name}\n").as_bytes())
    }

    fn await_list(&self, rank: usize) -> Result<PathBuf, RunError> {
        let list = self.list_of(rank);
        let begin = Instant::now();
        let mut pause = Duration::from_micros(200);
        while !list.exists() {
            if begin.elapsed() > PATIENCE {
                let reason = format!("the part of rank {rank} is not visible from rank 0");
                return Err(RunError::checkpoint(&self.aside, reason));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
        Ok(list)
    }
}

/// Removes the checkpoints up to `last`, except the newest `keep` and the best.
pub(super) fn forget(root: &Path, last: usize, keep: usize) -> Result<(), RunError> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(root).map_err(RunError::io(root))? {
        let entry = entry.map_err(RunError::io(root))?;
        steps.extend(step_of(&entry.file_name().to_string_lossy()));
    }
    steps.sort_unstable();
    // Later checkpoints are from a run that was resumed earlier.
    steps.retain(|step| *step <= last);
    let best = named_by(&root.join(BEST)).ok();
    for step in &steps[..steps.len().saturating_sub(keep)] {
        let path = root.join(dir_name(*step));
        if best.as_ref() != Some(&path) {
            remove(&path)?;
        }
    }
    Ok(())
}

/// Removes a checkpoint atomically: a partial one is never left under its name.
fn remove(path: &Path) -> Result<(), RunError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let aside = path.with_file_name(format!("{ASIDE}removed-{}-{name}", std::process::id()));
    files::rename(path, &aside).map_err(RunError::io(path))?;
    files::remove_folder(&aside).map_err(RunError::io(&aside))
}

/// Makes the entries of a directory durable.
fn sync(path: &Path) -> Result<(), RunError> {
    files::sync_folder(path).map_err(RunError::io(path))
}

/// Writes a new file, durably.
fn create(path: &Path, bytes: &[u8]) -> Result<(), RunError> {
    files::write_durably(path, bytes).map_err(RunError::io(path))
}

/// Replaces a file durably: readers see the old or the new content.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> Result<(), RunError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!("{ASIDE}{name}"));
    let replaced = create(&aside, bytes)
        .and_then(|()| files::rename(&aside, path).map_err(RunError::io(path)));
    if replaced.is_err() {
        // The first error is the one to report; the file may not exist.
        let _ = files::remove(&aside);
    }
    replaced?;
    path.parent().map_or(Ok(()), sync)
}
