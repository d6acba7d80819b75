//! Reads any range of any tensor of a checkpoint, after verifying the parts that contain it.

use super::{FORMAT_VERSION, INDEX, Index, LATEST, Part, SUMS, TensorEntry, Validated};
use crate::RunError;
use crate::mapped;
use frit_ir::plan::{layout, sha256_hex};
use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its directory.
    pub path: PathBuf,
    /// Its index.
    pub index: Index,
    /// The result of its validation, if any.
    pub validated: Option<Validated>,
    files: BTreeMap<String, Shard>,
}

/// One rank's file.
#[derive(Debug)]
struct Shard {
    map: Mmap,
    metadata: Metadata,
    /// Where the elements begin.
    data: usize,
}

/// The checkpoint in the same directory that a file names.
pub(super) fn named_by(file: &Path) -> Result<PathBuf, RunError> {
    let name = fs::read_to_string(file).map_err(RunError::io(file))?;
    if super::step_of(name.trim()).is_none() {
        let reason = "names no checkpoint; write the name of a complete one into it";
        return Err(RunError::checkpoint(file, reason));
    }
    Ok(file.with_file_name(name.trim()))
}

/// The newest complete checkpoint of a directory.
fn newest(dir: &Path) -> Result<Option<Checkpoint>, RunError> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(None) };
    let steps = entries.flatten().filter_map(|e| super::step_of(&e.file_name().to_string_lossy()));
    let mut steps: Vec<usize> = steps.collect();
    steps.sort_unstable();
    let mut first_error = None;
    for step in steps.into_iter().rev() {
        match Checkpoint::open(&dir.join(super::dir_name(step))) {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    match first_error {
        None => Ok(None),
        Some(error) => {
            Err(RunError::checkpoint(dir, format!("holds no complete checkpoint; {error}")))
        }
    }
}

impl Checkpoint {
    /// Gives back the memory of what was read; it may be read again.
    pub(crate) fn release(&self) {
        self.files.values().for_each(|shard| mapped::release(&shard.map));
    }

    /// The checkpoint of a directory of checkpoints that `latest` names or, without that file, the newest complete
    /// one; `None` if there is none yet.
    ///
    /// # Errors
    /// If it is not complete, was changed, or has another format version.
    pub fn latest(dir: &Path) -> Result<Option<Checkpoint>, RunError> {
        let latest = dir.join(LATEST);
        if latest.exists() { Checkpoint::open(&named_by(&latest)?).map(Some) } else { newest(dir) }
    }

    /// Opens a checkpoint, the latest of a directory of checkpoints, or the one that its file `best` or
    /// `latest` names.
    ///
    /// # Errors
    /// If there is none, or it is not complete, was changed, or has another format version.
    pub fn open(path: &Path) -> Result<Checkpoint, RunError> {
        if path.is_file() {
            return Checkpoint::open(&named_by(path)?);
        }
        if let Some(latest) = Checkpoint::latest(path)? {
            return Ok(latest);
        }
        let refuse = |reason: String| RunError::checkpoint(path, reason);
        let file = path.join(INDEX);
        if !file.is_file() {
            return Err(refuse("does not exist, or is not a checkpoint".into()));
        }
        let text = fs::read(&file).map_err(RunError::io(&file))?;
        let sums = fs::read_to_string(path.join(SUMS)).map_err(RunError::io(&path.join(SUMS)))?;
        if !sums.lines().any(|line| *line == format!("{}  {INDEX}", sha256_hex(&text))) {
            return Err(damaged(path, INDEX));
        }
        let version: serde_json::Value =
            serde_json::from_slice(&text).map_err(|e| refuse(e.to_string()))?;
        let found = version["frit_checkpoint"].as_u64();
        if found != Some(u64::from(FORMAT_VERSION)) {
            let found = found.map_or("none".into(), |v| v.to_string());
            return Err(refuse(format!(
                "has format version {found}, this program reads version {FORMAT_VERSION}"
            )));
        }
        let index: Index = serde_json::from_slice(&text).map_err(|e| refuse(e.to_string()))?;
        let mut files = BTreeMap::new();
        for (key, entry) in &index.tensors {
            check_entry(key, entry).map_err(&refuse)?;
            for part in &entry.parts {
                if !files.contains_key(&part.file) {
                    files.insert(part.file.clone(), Shard::open(&path.join(&part.file))?);
                }
            }
        }
        let validated = Validated::of(path);
        Ok(Checkpoint { path: path.into(), index, validated, files })
    }

    /// The folder of the model and configuration of the plan that wrote it.
    ///
    /// # Errors
    /// If a file of it was damaged.
    pub fn source(&self) -> Result<PathBuf, RunError> {
        let sums = self.path.join(SUMS);
        let text = fs::read_to_string(&sums).map_err(RunError::io(&sums))?;
        for (sum, name) in text.lines().filter_map(|line| line.split_once("  ")) {
            if name.split_once('/').is_some_and(|(folder, _)| folder == layout::SOURCE) {
                let file = self.path.join(name);
                let bytes = fs::read(&file).map_err(RunError::io(&file))?;
                if sha256_hex(&bytes) != sum {
                    return Err(damaged(&self.path, name));
                }
            }
        }
        Ok(self.path.join(layout::SOURCE))
    }

    /// The tensor of this name, such as `param/fc1.weight`.
    pub fn entry(&self, key: &str) -> Option<&TensorEntry> {
        self.index.tensors.get(key)
    }

    /// Passes the elements `begin..begin + len` of a tensor to `put`, part by part: the first element, and the bytes.
    /// At most one part is in memory, and its checksum has been verified.
    ///
    /// # Errors
    /// If there is no such tensor, or a part was damaged; the first error of `put`.
    pub fn read(
        &self,
        key: &str,
        begin: usize,
        len: usize,
        mut put: impl FnMut(usize, &[u8]) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        let entry = self
            .entry(key)
            .ok_or_else(|| RunError::checkpoint(&self.path, format!("holds no `{key}`")))?;
        let size = entry.dtype.size();
        for part in &entry.parts {
            let (from, to) = (begin.max(part.begin), (begin + len).min(part.begin + part.len));
            if from >= to {
                continue;
            }
            let bytes = self.part(key, part, size)?;
            put(from, &bytes[(from - part.begin) * size..(to - part.begin) * size])?;
        }
        Ok(())
    }

    /// All elements of a tensor, little-endian.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn tensor(&self, key: &str) -> Result<Vec<u8>, RunError> {
        let numel = self.entry(key).map_or(0, |e| e.shape.iter().product());
        let mut all = Vec::new();
        self.read(key, 0, numel, |_, bytes| {
            all.extend_from_slice(bytes);
            Ok(())
        })?;
        Ok(all)
    }

    fn part(&self, key: &str, part: &Part, size: usize) -> Result<&[u8], RunError> {
        let bytes = self.files.get(&part.file).and_then(|shard| {
            let (begin, end) = shard.metadata.info(key)?.data_offsets;
            shard.map.get(shard.data + begin..shard.data + end)
        });
        match bytes {
            Some(bytes) if bytes.len() == part.len * size && sha256_hex(bytes) == part.sha256 => {
                Ok(bytes)
            }
            _ => Err(damaged(&self.path, &part.file)),
        }
    }
}

impl Shard {
    fn open(path: &Path) -> Result<Shard, RunError> {
        let file = File::open(path).map_err(RunError::io(path))?;
        // SAFETY: the map is only read; checkpoints are not changed once they have their name.
        let map = unsafe { Mmap::map(&file) }.map_err(RunError::io(path))?;
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|e| RunError::checkpoint(path, format!("was damaged: {e}")))?;
        // The header follows its length, eight bytes.
        Ok(Shard { map, metadata, data: header + 8 })
    }
}

fn damaged(path: &Path, file: &str) -> RunError {
    let reason = format!(
        "`{file}` was damaged: it does not have its checksum; write the name of an older checkpoint into \
         `{LATEST}` to go back to it"
    );
    RunError::checkpoint(path, reason)
}

/// Checks that the parts are contiguous and complete, and are in files of the checkpoint.
fn check_entry(key: &str, entry: &TensorEntry) -> Result<(), String> {
    let mut end = 0_usize;
    for part in &entry.parts {
        if part.begin != end {
            return Err(format!("`{key}` lacks the elements from {end} to {}", part.begin));
        }
        end = end.checked_add(part.len).ok_or_else(|| format!("`{key}` is too large"))?;
        if Path::new(&part.file).file_name().is_none_or(|name| name != part.file.as_str()) {
            return Err(format!("`{key}` lies in {:?}, which is no name of a file", part.file));
        }
    }
    let numel = entry.shape.iter().try_fold(1_usize, |n, size| n.checked_mul(*size));
    let numel = numel.filter(|n| n.checked_mul(entry.dtype.size()).is_some());
    match numel {
        Some(numel) if numel == end => Ok(()),
        Some(numel) => Err(format!("`{key}` has {end} of {numel} elements")),
        None => Err(format!("`{key}` is too large")),
    }
}
