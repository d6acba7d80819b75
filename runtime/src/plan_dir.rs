//! Loading a plan directory: `plan.json`, the object file, `weights.safetensors` and, where the plan reads
//! weights from the model's own files, `weights.json`, all checked.

use crate::{RunError, init};
use frit_ir::ops::Init;
use frit_ir::plan::{ParamHome, ParamSpec, Plan, check, sha256_hex};
use memmap2::Mmap;
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// [`frit_ir::plan::Target::device`] of plans for NVIDIA GPUs.
pub const CUDA: &str = "cuda";

/// A loaded plan.
pub struct PlanDir {
    /// The plan.
    pub plan: Plan,
    /// SHA-256 of `plan.json`, in hexadecimal.
    pub hash: String,
    /// The directory.
    pub path: PathBuf,
    /// The generated kernels of a plan for the CPU.
    pub library: Option<libloading::Library>,
    /// The generated kernels of a plan for CUDA, as PTX.
    pub ptx: Option<String>,
    /// The plan's own, then those of the training plan that it belongs to.
    weights: Vec<Weights>,
}

/// Values of parameters and constants.
struct Weights {
    file: Mmap,
    /// Weights that lie in the model's own files.
    referenced: References,
}

impl Weights {
    fn load(dir: &Path) -> Result<Weights, RunError> {
        let path = dir.join("weights.safetensors");
        let file = File::open(&path).map_err(RunError::io(&path))?;
        // SAFETY: the map is only read; a plan directory is not changed while it is in use.
        let file = unsafe { Mmap::map(&file) }.map_err(RunError::io(&path))?;
        safetensors::SafeTensors::deserialize(&file)
            .map_err(|e| RunError::Plan { path, reason: e.to_string() })?;
        let path = dir.join("weights.json");
        let referenced =
            if path.exists() { References::load(&path)? } else { References::default() };
        Ok(Weights { file, referenced })
    }

    fn get(&self, name: &str) -> Option<&[u8]> {
        if let Some(bytes) = self.referenced.get(name) {
            return Some(bytes);
        }
        let tensors = safetensors::SafeTensors::deserialize(&self.file).ok()?;
        Some(tensors.tensor(name).ok()?.data())
    }
}

/// `weights.json`: tensors as byte ranges of other files.
#[derive(Default)]
struct References {
    files: Vec<Mmap>,
    /// File, first byte and number of bytes, by tensor.
    tensors: BTreeMap<String, Place>,
}

#[derive(Deserialize)]
struct Place {
    file: usize,
    offset: usize,
    bytes: usize,
}

#[derive(Deserialize)]
struct FileSpec {
    path: PathBuf,
    bytes: usize,
    sha256: String,
}

#[derive(Deserialize)]
struct ReferenceFile {
    files: Vec<FileSpec>,
    tensors: BTreeMap<String, Place>,
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
            if map.len() != spec.bytes || sha256_hex(&map) != spec.sha256 {
                let reason = "the plan reads its weights here, and it was changed; compile again";
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

impl PlanDir {
    /// Loads and checks a plan directory.
    ///
    /// # Errors
    /// If a file is missing, was changed, is of another version, or is for another processor.
    pub fn load(dir: &Path) -> Result<PlanDir, RunError> {
        PlanDir::open(dir)?.with_values(dir)
    }

    /// Loads and checks all but that parameters have values.
    fn open(dir: &Path) -> Result<PlanDir, RunError> {
        let path = dir.join("plan.json");
        let text = std::fs::read_to_string(&path).map_err(RunError::io(&path))?;
        let refuse = |reason: String| RunError::Plan { path: path.clone(), reason };
        let plan = Plan::from_json(&text).map_err(|e| refuse(e.to_string()))?;
        check(&plan).map_err(|e| refuse(e.to_string()))?;
        check_target(&plan)?;
        let (mut library, mut ptx) = (None, None);
        if let Some(object) = &plan.object {
            let path = dir.join(&object.file);
            let bytes = std::fs::read(&path).map_err(RunError::io(&path))?;
            let refuse = |reason: String| RunError::Plan { path: path.clone(), reason };
            if sha256_hex(&bytes) != object.sha256 {
                return Err(refuse("changed after it was compiled; compile again".into()));
            }
            if plan.target.device == CUDA {
                ptx = Some(String::from_utf8(bytes).map_err(|e| refuse(e.to_string()))?);
            } else {
                // SAFETY: the file is the one the compiler wrote for this plan, as its hash shows, and
                // has no initializers.
                let loaded = unsafe { libloading::Library::new(&path) };
                library = Some(loaded.map_err(|e| refuse(e.to_string()))?);
            }
        }
        let hash = sha256_hex(text.as_bytes());
        let (path, weights) = (dir.into(), vec![Weights::load(dir)?]);
        Ok(PlanDir { plan, hash, path, library, ptx, weights })
    }

    /// Loads the plan of a directory that evaluates: its part `eval`, or itself.
    ///
    /// # Errors
    /// As [`PlanDir::load`], or if the plan does not evaluate.
    pub fn load_evaluation(dir: &Path) -> Result<PlanDir, RunError> {
        let part = dir.join("eval");
        if part.join("plan.json").exists() {
            let mut plan = PlanDir::open(&part)?;
            plan.weights.push(Weights::load(dir)?);
            return plan.with_values(dir);
        }
        let plan = PlanDir::load(dir)?;
        if plan.plan.eval.is_none() {
            let reason = "the plan has no evaluation; compile the model again with `frit compile`";
            return Err(RunError::Plan { path: dir.into(), reason: reason.into() });
        }
        Ok(plan)
    }

    /// The same, if every parameter has a first value.
    fn with_values(self, dir: &Path) -> Result<PlanDir, RunError> {
        match self.without_value() {
            None => Ok(self),
            Some(name) => {
                let reason = format!(
                    "no value for the parameter `{name}`; compile again with --weights copy"
                );
                Err(RunError::Plan { path: dir.join("weights.safetensors"), reason })
            }
        }
    }

    /// Whether a parameter of an evaluation is none of the training that it belongs to.
    pub(crate) fn only_evaluated(&self, name: &str) -> bool {
        self.weights.len() > 1 && self.weights[0].get(name).is_some()
    }

    /// The little-endian elements of a stored tensor, or of a parameter whose first value is made.
    pub fn weight(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        if let Some(bytes) = self.stored(name) {
            return Some(Cow::Borrowed(bytes));
        }
        let param = self.plan.params.iter().find(|p| p.name == name)?;
        let values = init::values(&param.init, self.plan.seed, name, 0..param.ty.shape.numel())?;
        Some(Cow::Owned(values.iter().flat_map(|x| x.to_le_bytes()).collect()))
    }

    fn stored(&self, name: &str) -> Option<&[u8]> {
        self.weights.iter().find_map(|w| w.get(name))
    }

    /// The first parameter of the step that has no first value.
    fn without_value(&self) -> Option<&str> {
        let lacks = |p: &&ParamSpec| {
            p.home != ParamHome::Unused && p.init == Init::Weights && self.stored(&p.name).is_none()
        };
        self.plan.params.iter().find(lacks).map(|p| p.name.as_str())
    }
}

#[cfg(target_arch = "x86_64")]
fn check_target(plan: &Plan) -> Result<(), RunError> {
    if plan.target.device == CUDA {
        return Ok(());
    }
    let missing = |feature: &str| match feature {
        "+avx2" => !std::is_x86_feature_detected!("avx2"),
        "+fma" => !std::is_x86_feature_detected!("fma"),
        "+f16c" => !std::is_x86_feature_detected!("f16c"),
        "+avx512f" => !std::is_x86_feature_detected!("avx512f"),
        "+avx512bw" => !std::is_x86_feature_detected!("avx512bw"),
        "+avx512dq" => !std::is_x86_feature_detected!("avx512dq"),
        "+avx512vl" => !std::is_x86_feature_detected!("avx512vl"),
        "+avx512bf16" => !std::is_x86_feature_detected!("avx512bf16"),
        _ => false,
    };
    match plan.target.features.split(',').find(|f| missing(f)) {
        None => Ok(()),
        Some(f) => Err(RunError::Target { arch: plan.target.arch.clone(), feature: f.into() }),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn check_target(_: &Plan) -> Result<(), RunError> {
    Ok(())
}
