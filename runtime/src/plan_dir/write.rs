//! Writes plan directories atomically.

use super::error::PlanDirError;
use super::is_plan;
use super::weights::{FileSpec, Place, ReferenceFile, digest};
use crate::files::{self, Sink};
use crate::save::safetensors_dtype;
use crate::tensors;
use frit_ir::plan::{Plan, layout};
use frit_ir::{Tensor, TensorType};
use safetensors::{Dtype, View};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The content of a plan directory.
pub struct Contents<'a> {
    /// The plan.
    pub plan: Part<'a>,
    /// The evaluation of a plan that trains.
    pub evaluation: Option<Part<'a>>,
    /// The graph after every pass.
    pub pass_trace: &'a [u8],
    /// The model and its configuration: files by name.
    pub source: Vec<(&'a str, &'a [u8])>,
    /// Parameters that the plan reads from the model's own files.
    pub references: Option<References<'a>>,
}

/// A plan, and the files stored with it.
pub struct Part<'a> {
    /// The plan; the digests of stored tensors are added to it.
    pub plan: &'a Plan,
    /// The generated kernels; empty if there are none.
    pub kernels: &'a [u8],
    /// Parameters and large constants.
    pub tensors: Vec<Stored<'a>>,
}

/// A tensor that is stored.
pub struct Stored<'a> {
    /// The name in the plan.
    pub name: &'a str,
    /// Its type.
    pub ty: &'a TensorType,
    /// Its elements.
    pub value: Value<'a>,
}

/// The elements of a stored tensor.
pub enum Value<'a> {
    /// Little-endian bytes.
    Bytes(&'a [u8]),
    /// A tensor, converted to bytes when it is written.
    Tensor(&'a Tensor),
}

/// Parameters in the model's own files.
pub struct References<'a> {
    /// The files, with their lengths in bytes.
    pub files: Vec<(PathBuf, usize)>,
    /// The parameters.
    pub tensors: Vec<Reference<'a>>,
}

/// A parameter in one of the model's files.
pub struct Reference<'a> {
    /// The name in the plan.
    pub name: &'a str,
    /// Index of the file.
    pub file: usize,
    /// Byte offset in the file.
    pub offset: usize,
    /// The elements.
    pub bytes: &'a [u8],
}

type Result<T> = std::result::Result<T, PlanDirError>;

/// Checks that a plan directory can be written here, and replaces nothing but an older plan. A symbolic link is followed.
///
/// # Errors
/// If something else is there, or something else beside an older plan; or if a link leads into a folder that does not exist.
pub fn check_free(path: &Path) -> Result<()> {
    files::followed_folder(path).map_err(astray(path))?;
    if !path.exists() {
        return Ok(());
    }
    if !is_plan(path) {
        return Err(PlanDirError::Occupied(path.into()));
    }
    let mut others = vec![];
    for folder in ["", layout::EVALUATION] {
        let entries = std::fs::read_dir(path.join(folder)).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let is_other = |n: &String| !layout::NAMES.contains(&n.as_str()) && n != ".DS_Store";
        others.extend(
            names.filter(is_other).map(|n| Path::new(folder).join(n).display().to_string()),
        );
    }
    if others.is_empty() {
        return Ok(());
    }
    others.sort();
    if others.len() > MAX_LISTED {
        let left = others.len() - MAX_LISTED;
        others.truncate(MAX_LISTED);
        others.push(format!("and {left} more"));
    }
    Err(PlanDirError::Others { path: path.into(), names: others })
}

/// Names that an error lists at most.
const MAX_LISTED: usize = 5;

/// Digests of stored tensors by name.
type Digests = BTreeMap<String, String>;

impl Contents<'_> {
    /// Writes a plan directory under a temporary name and renames it to `path`, replacing an older plan. If `path` is a symbolic
    /// link it is kept, and what it names is written.
    ///
    /// # Errors
    /// If the file system refuses, or as [`check_free`].
    pub fn write(&self, path: &Path) -> Result<()> {
        check_free(path)?;
        let path = &files::followed_folder(path).map_err(astray(path))?;
        let aside = files::beside(path);
        let result = self
            .fill(&aside)
            .and_then(|()| files::replace_folder(&aside, path).map_err(unwritable(path)));
        if result.is_err() {
            // The first error is the one to report; the directory may not exist.
            let _ = files::remove_folder(&aside);
        }
        result
    }

    fn fill(&self, dir: &Path) -> Result<()> {
        let source = dir.join(layout::SOURCE);
        folder(&source)?;
        for (name, bytes) in &self.source {
            put(&source.join(name), bytes)?;
        }
        put(&dir.join(layout::PASS_TRACE), self.pass_trace)?;
        let mut digests = Digests::new();
        if let Some(references) = &self.references {
            let path = dir.join(layout::REFERENCES);
            let text = references.file().to_json().map_err(|e| unwritable(&path)(e.into()))?;
            put(&path, text.as_bytes())?;
            let of = |r: &Reference<'_>| (r.name.to_string(), digest(r.bytes));
            digests.extend(references.tensors.iter().map(of));
        }
        self.plan.write(dir, &mut digests)?;
        // Tensors of the evaluation take precedence over those of training with the same name.
        let evaluation = dir.join(layout::EVALUATION);
        self.evaluation.as_ref().map_or(Ok(()), |part| part.write(&evaluation, &mut digests))
    }
}

impl Part<'_> {
    /// Writes the kernels, the tensors and the plan, whose digests are those known and those of the tensors.
    fn write(&self, dir: &Path, digests: &mut Digests) -> Result<()> {
        folder(&dir.join(layout::KERNELS))?;
        if let Some(object) = &self.plan.object {
            put(&dir.join(&object.file), self.kernels)?;
        }
        digests.extend(self.write_tensors(&dir.join(layout::WEIGHTS))?);
        let mut plan = self.plan.clone();
        for param in &mut plan.params {
            param.digest = digests.get(&param.name).cloned();
        }
        for constant in &mut plan.constants {
            constant.digest = digests.get(&constant.name).cloned();
        }
        put(&dir.join(layout::PLAN), plan.to_json().as_bytes())
    }

    fn write_tensors(&self, path: &Path) -> Result<Digests> {
        let digests = RefCell::new(Digests::new());
        let mut all = Vec::new();
        for tensor in &self.tensors {
            all.push((tensor.name.to_string(), Digested { tensor, digests: &digests }));
        }
        let written = Sink::create(path).and_then(|sink| {
            let mut out = BufWriter::with_capacity(1 << 20, sink);
            tensors::put(&mut out, all, None)?;
            out.flush()
        });
        written.map_err(unwritable(path))?;
        Ok(digests.into_inner())
    }
}

impl References<'_> {
    fn file(&self) -> ReferenceFile {
        let file = |(path, bytes): &(PathBuf, usize)| {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
            FileSpec { path, bytes: *bytes }
        };
        let place = |r: &Reference<'_>| {
            let place = Place { file: r.file, offset: r.offset, bytes: r.bytes.len() };
            (r.name.to_string(), place)
        };
        ReferenceFile {
            files: self.files.iter().map(file).collect(),
            tensors: self.tensors.iter().map(place).collect(),
        }
    }
}

/// A tensor whose digest is recorded when it is written.
struct Digested<'a> {
    tensor: &'a Stored<'a>,
    digests: &'a RefCell<Digests>,
}

impl View for Digested<'_> {
    fn dtype(&self) -> Dtype {
        safetensors_dtype(self.tensor.ty.dtype)
    }

    fn shape(&self) -> &[usize] {
        self.tensor.ty.shape.dims()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = match self.tensor.value {
            Value::Bytes(bytes) => Cow::Borrowed(bytes),
            Value::Tensor(tensor) => Cow::Owned(tensor.to_bytes()),
        };
        self.digests.borrow_mut().insert(self.tensor.name.into(), digest(&bytes));
        bytes
    }

    fn data_len(&self) -> usize {
        self.tensor.ty.bytes()
    }
}

fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    files::write(path, bytes).map_err(unwritable(path))
}

fn folder(path: &Path) -> Result<()> {
    files::create_folder(path).map_err(unwritable(path))
}

/// A symbolic link cannot be followed.
fn astray(path: &Path) -> impl FnOnce(io::Error) -> PlanDirError + '_ {
    |error| {
        let to = path.read_link().unwrap_or_default();
        PlanDirError::Astray { path: path.into(), to, error }
    }
}

fn unwritable(path: &Path) -> impl FnOnce(io::Error) -> PlanDirError + '_ {
    |error| PlanDirError::Unwritable { path: path.into(), error }
}
