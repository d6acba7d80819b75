//! Reads the weights of a plan directory: `weights.safetensors` and, if the plan reads weights from the model's own files,
//! `weights.json`.
//!
//! The plan has a digest of each tensor, checked when the tensor is first read, so that a rank hashes only what it holds. A digest
//! is the SHA-256 of the SHA-256s of all 8 MiB blocks, so that all cores can compute it.

use crate::RunError;
use crate::mapped;
use frit_ir::plan::{Plan, layout};
use memmap2::Mmap;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Bytes per separately hashed block.
const CHUNK: usize = 8 << 20;

/// The digest of a tensor's little-endian elements, in hexadecimal.
pub fn digest(bytes: &[u8]) -> String {
    let mut parts = vec![[0; 32]; bytes.len().div_ceil(CHUNK)];
    let hash = |chunk: &[u8], part: &mut [u8; 32]| *part = Sha256::digest(chunk).into();
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let each = parts.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (bytes, parts) in bytes.chunks(each * CHUNK).zip(parts.chunks_mut(each)) {
            let work = move || {
                bytes.chunks(CHUNK).zip(parts).for_each(|(chunk, part)| hash(chunk, part));
            };
            if bytes.len() <= CHUNK {
                work();
            } else {
                threads.push(scope.spawn(work));
            }
        }
        // Joined, because glibc 2.36 may read a thread that ends while it is let go after it was freed.
        threads.into_iter().for_each(|t| t.join().expect("invariant: hashing does not panic"));
    });
    Sha256::digest(parts.as_flattened()).iter().map(|b| format!("{b:02x}")).collect()
}

/// The values of a plan's parameters and constants, as far as they are stored.
pub(crate) struct Values {
    path: PathBuf,
    /// Those of the plan, then those of its training plan.
    parts: Vec<Weights>,
    digests: HashMap<String, String>,
    /// Tensors whose digests were verified.
    compared: Mutex<HashSet<String>>,
}

impl Values {
    /// Maps the files of a plan directory, and of that of its training plan.
    ///
    /// # Errors
    /// If one cannot be read, lacks a constant, or contains a tensor of another size or one that the plan does not
    /// have.
    pub(crate) fn load(
        dir: &Path,
        plan: &Plan,
        training: Option<&Path>,
    ) -> Result<Values, RunError> {
        let parts = [Some(dir), training].into_iter().flatten().map(Weights::load);
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let params = plan.params.iter().map(|p| (&p.name, &p.ty, &p.digest));
        let constants = plan.constants.iter().map(|c| (&c.name, &c.ty, &c.digest));
        let specs: Vec<_> = params.chain(constants).collect();
        let digests = specs
            .iter()
            .filter_map(|(name, _, digest)| Some(((*name).clone(), digest.as_ref()?.clone())))
            .collect();
        let path = dir.join(layout::WEIGHTS);
        let values = Values { path, parts, digests, compared: Mutex::default() };
        for (name, ty, digest) in specs {
            let Some(bytes) = values.stored(name) else { continue };
            let (is, wants) = (bytes.len(), ty.bytes());
            if is != wants {
                let why = format!("`{name}` has {is} bytes, and {wants} in the plan");
                return Err(values.refuse(why));
            }
            if digest.is_none() {
                return Err(values.refuse(format!("the plan has no digest of `{name}`")));
            }
        }
        match plan.constants.iter().find(|c| values.stored(&c.name).is_none()) {
            None => Ok(values),
            Some(c) => Err(values.refuse(format!("the constant `{}` is missing", c.name))),
        }
    }

    fn refuse(&self, what: String) -> RunError {
        let reason = format!("{what}; compile the model again");
        RunError::Plan { path: self.path.clone(), reason }
    }

    fn stored(&self, name: &str) -> Option<&[u8]> {
        self.parts.iter().find_map(|w| w.get(name))
    }

    /// Gives back the memory of all that was read.
    pub(crate) fn release(&self) {
        for part in &self.parts {
            mapped::release(&part.file);
            part.referenced.files.iter().for_each(mapped::release);
        }
    }

    /// Whether a tensor is stored.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.stored(name).is_some()
    }

    /// Whether a tensor is stored with this plan rather than with its training plan.
    pub(crate) fn only_evaluated(&self, name: &str) -> bool {
        self.parts.len() > 1 && self.parts[0].get(name).is_some()
    }

    /// The bytes of a stored tensor.
    ///
    /// # Errors
    /// If they differ from those with which the plan was compiled.
    pub(crate) fn get(&self, name: &str) -> Result<Option<&[u8]>, RunError> {
        let Some(bytes) = self.stored(name) else { return Ok(None) };
        self.compare(name, bytes)?;
        Ok(Some(bytes))
    }

    /// Compares the bytes of a tensor with the plan's digest, if it has one and was not verified before.
    ///
    /// # Errors
    /// If they differ.
    pub(crate) fn compare(&self, name: &str, bytes: &[u8]) -> Result<(), RunError> {
        let Some(expected) = self.digests.get(name) else { return Ok(()) };
        let known = || self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        if known().contains(name) {
            return Ok(());
        }
        if digest(bytes) != *expected {
            let what = format!("`{name}` was changed after the plan was compiled");
            return Err(self.refuse(what));
        }
        known().insert(name.into());
        Ok(())
    }

    /// Compares every stored tensor.
    ///
    /// # Errors
    /// If one differs.
    pub(crate) fn compare_all(&self) -> Result<(), RunError> {
        let mut names: Vec<&String> = self.digests.keys().collect();
        names.sort();
        names.into_iter().try_for_each(|name| self.get(name).map(drop))
    }
}

/// The files of one directory.
struct Weights {
    file: Mmap,
    /// The byte offset and length of each tensor in the file.
    own: BTreeMap<String, (usize, usize)>,
    /// Weights in the model's own files.
    referenced: References,
}

impl Weights {
    /// Maps the files of a plan directory.
    ///
    /// # Errors
    /// If one cannot be read, or is shorter than its tensors.
    fn load(dir: &Path) -> Result<Weights, RunError> {
        let path = dir.join(layout::WEIGHTS);
        let file = File::open(&path).map_err(RunError::io(&path))?;
        // SAFETY: the map is only read; a plan directory is not changed while it is in use.
        let file = unsafe { Mmap::map(&file) }.map_err(RunError::io(&path))?;
        let tensors = safetensors::SafeTensors::deserialize(&file)
            .map_err(|e| RunError::Plan { path, reason: e.to_string() })?;
        let start = file.as_ptr() as usize;
        let place = |data: &[u8]| (data.as_ptr() as usize - start, data.len());
        let own = tensors.iter().map(|(name, t)| (name.to_string(), place(t.data()))).collect();
        let path = dir.join(layout::REFERENCES);
        let referenced =
            if path.exists() { References::load(&path)? } else { References::default() };
        Ok(Weights { file, own, referenced })
    }

    /// The bytes of a tensor.
    fn get(&self, name: &str) -> Option<&[u8]> {
        if let Some(bytes) = self.referenced.get(name) {
            return Some(bytes);
        }
        let (begin, bytes) = *self.own.get(name)?;
        Some(&self.file[begin..begin + bytes])
    }
}

/// `weights.json`: tensors as byte ranges of other files.
#[derive(Default)]
struct References {
    files: Vec<Mmap>,
    /// File, first byte and number of bytes, by tensor.
    tensors: BTreeMap<String, Place>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Place {
    pub(super) file: usize,
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

#[derive(Serialize, Deserialize)]
pub(super) struct FileSpec {
    /// An absolute path.
    pub(super) path: PathBuf,
    pub(super) bytes: usize,
}

#[derive(Serialize, Deserialize)]
pub(super) struct ReferenceFile {
    pub(super) files: Vec<FileSpec>,
    pub(super) tensors: BTreeMap<String, Place>,
}

impl ReferenceFile {
    /// The text of the file.
    ///
    /// # Errors
    /// If a path is not Unicode.
    pub(super) fn to_json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}

impl References {
    fn load(path: &Path) -> Result<References, RunError> {
        let refuse = |path: &Path, reason: String| RunError::Plan { path: path.into(), reason };
        let text = std::fs::read(path).map_err(RunError::io(path))?;
        let ReferenceFile { files: specs, tensors } =
            serde_json::from_slice(&text).map_err(|e| refuse(path, e.to_string()))?;
        let mut files = Vec::new();
        for spec in specs {
            let file = File::open(&spec.path).map_err(RunError::io(&spec.path))?;
            // SAFETY: the map is only read; the files of a plan are not changed while it is in use.
            let map = unsafe { Mmap::map(&file) }.map_err(RunError::io(&spec.path))?;
            if map.len() != spec.bytes {
                let reason =
                    "the plan reads weights from this file, which was changed; compile again";
                return Err(refuse(&spec.path, reason.into()));
            }
            files.push(map);
        }
        let references = References { files, tensors };
        match references.tensors.keys().find(|name| references.get(name).is_none()) {
            None => Ok(references),
            Some(name) => Err(refuse(path, format!("`{name}` lies outside its file"))),
        }
    }

    fn get(&self, name: &str) -> Option<&[u8]> {
        let place = self.tensors.get(name)?;
        self.files.get(place.file)?.get(place.offset..place.offset.checked_add(place.bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_tensor_counts() {
        let mut bytes = vec![7_u8; 2 * CHUNK + 5];
        let all = digest(&bytes);
        assert_eq!(digest(&bytes), all);
        for at in [0, CHUNK - 1, CHUNK, 2 * CHUNK + 4] {
            bytes[at] ^= 1;
            assert_ne!(digest(&bytes), all, "byte {at}");
            bytes[at] ^= 1;
        }
        assert_ne!(digest(&bytes[1..]), all);
        assert_eq!(digest(&[]), digest(&[]));
    }
}
