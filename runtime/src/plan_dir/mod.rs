//! Plan directories: reading and checking, and [writing](Contents::write). [`frit_ir::plan::layout`] names the files.

mod error;
mod weights;
mod write;

pub use error::PlanDirError;
pub use weights::digest;
pub use write::{Contents, Part, Reference, References, Stored, Value, check_free};

use crate::{RunError, init};
use frit_ir::ops::Init;
use frit_ir::plan::{DeviceType, ObjectFile, ParamHome, ParamSpec, Plan, layout, sha256_hex};
use frit_ir::{DType, Tensor};
use std::borrow::Cow;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use weights::Values;

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
    values: Values,
}

impl PlanDir {
    /// Loads and checks a plan directory.
    ///
    /// # Errors
    /// If a file is missing, was changed, has another version, or is for another processor.
    pub fn load(dir: &Path) -> Result<PlanDir, RunError> {
        PlanDir::open(dir, None)?.with_values(dir)
    }

    /// Loads and checks everything except that parameters have values.
    fn open(dir: &Path, training: Option<&Path>) -> Result<PlanDir, RunError> {
        let (text, plan) = parse(dir)?;
        check_target(&plan)?;
        let (mut library, mut ptx) = (None, None);
        if let Some(object) = &plan.object {
            let (path, bytes) = read_object(dir, object)?;
            let refuse = |reason: String| RunError::Plan { path: path.clone(), reason };
            if plan.target.device == DeviceType::Cuda {
                ptx = Some(String::from_utf8(bytes).map_err(|e| refuse(e.to_string()))?);
            } else {
                // SAFETY: the file is the one the compiler wrote for this plan, as its hash shows, and
                // has no initializers.
                let loaded = unsafe { libloading::Library::new(&path) };
                library = Some(loaded.map_err(|e| refuse(e.to_string()))?);
            }
        }
        let hash = sha256_hex(text.as_bytes());
        let values = Values::load(dir, &plan, training)?;
        Ok(PlanDir { plan, hash, path: dir.into(), library, ptx, values })
    }

    /// Loads the evaluation plan of a directory: its folder `eval`, or itself.
    ///
    /// # Errors
    /// As [`PlanDir::load`], or if the plan does not evaluate.
    pub fn load_evaluation(dir: &Path) -> Result<PlanDir, RunError> {
        let part = dir.join(layout::EVALUATION);
        if is_plan(&part) {
            return PlanDir::open(&part, Some(dir))?.with_values(dir);
        }
        let plan = PlanDir::load(dir)?;
        if plan.plan.eval.is_none() {
            let reason = "the plan has no evaluation; compile the model again with `frit compile`";
            return Err(RunError::Plan { path: dir.into(), reason: reason.into() });
        }
        Ok(plan)
    }

    /// Checks that every parameter has an initial value.
    fn with_values(self, dir: &Path) -> Result<PlanDir, RunError> {
        match self.without_value() {
            None => Ok(self),
            Some(name) => {
                let reason = format!(
                    "no value for the parameter `{name}`; compile again with --weights copy"
                );
                Err(RunError::Plan { path: dir.join(layout::WEIGHTS), reason })
            }
        }
    }

    /// Whether a parameter belongs to the evaluation only, not to its training.
    pub(crate) fn only_evaluated(&self, name: &str) -> bool {
        self.values.only_evaluated(name)
    }

    /// The little-endian elements of a stored tensor, or of a parameter whose initial value is generated.
    ///
    /// # Errors
    /// If they differ from those with which the plan was compiled.
    pub fn weight(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>, RunError> {
        if let Some(bytes) = self.values.get(name)? {
            return Ok(Some(Cow::Borrowed(bytes)));
        }
        let Some(param) = self.plan.params.iter().find(|p| p.name == name) else { return Ok(None) };
        let all = 0..param.ty.shape.numel();
        let Some(values) = init::values(&param.init, self.plan.seed, name, all) else {
            return Ok(None);
        };
        if param.ty.dtype == DType::F32 {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            return Ok(Some(Cow::Owned(bytes)));
        }
        let (dtype, shape) = (param.ty.dtype, param.ty.shape.clone());
        let value = match dtype.is_float() {
            true => Tensor::floats(dtype, shape, values.into_iter().map(f64::from).collect()),
            false => Tensor::ints(dtype, shape, values.into_iter().map(|x| x as i64).collect()),
        };
        Ok(Some(Cow::Owned(value.to_bytes())))
    }

    /// Gives back the memory of the stored tensors that were read; they may be read again.
    pub(crate) fn release(&self) {
        self.values.release();
    }

    /// The first parameter of the step that has no initial value.
    fn without_value(&self) -> Option<&str> {
        let lacks = |p: &&ParamSpec| {
            p.home != ParamHome::Unused && p.init == Init::Weights && !self.values.has(&p.name)
        };
        self.plan.params.iter().find(lacks).map(|p| p.name.as_str())
    }
}

/// Reads and checks the plan of a plan directory.
///
/// # Errors
/// If there is none, or this program does not read its version.
pub fn read(dir: &Path) -> Result<Plan, PlanDirError> {
    parse(dir).map(|(_, plan)| plan)
}

/// Whether a directory is a plan directory.
pub fn is_plan(dir: &Path) -> bool {
    dir.join(layout::PLAN).is_file()
}

/// The text of a plan, and the plan.
fn parse(dir: &Path) -> Result<(String, Plan), PlanDirError> {
    let path = dir.join(layout::PLAN);
    match std::fs::read_to_string(&path) {
        Err(error) => Err(PlanDirError::Unreadable { path, error }),
        Ok(text) => match Plan::from_json(&text) {
            Err(error) => Err(PlanDirError::Refused { path, error }),
            Ok(plan) => Ok((text, plan)),
        },
    }
}

/// The path and bytes of the generated kernels.
fn read_object(dir: &Path, object: &ObjectFile) -> Result<(PathBuf, Vec<u8>), RunError> {
    let path = dir.join(&object.file);
    let bytes = std::fs::read(&path).map_err(RunError::io(&path))?;
    if sha256_hex(&bytes) == object.sha256 {
        return Ok((path, bytes));
    }
    let reason = "changed after it was compiled; compile again".into();
    Err(RunError::Plan { path, reason })
}

/// The graphs after every pass, as a file of the plan directory; `None` if the plan has none.
///
/// # Errors
/// If the file is missing or was changed.
pub fn read_pass_trace(dir: &Path, plan: &Plan) -> Result<Option<Vec<u8>>, RunError> {
    let Some(digest) = &plan.pass_trace else { return Ok(None) };
    let path = dir.join(layout::PASS_TRACE);
    let bytes = std::fs::read(&path).map_err(RunError::io(&path))?;
    if sha256_hex(&bytes) == *digest {
        return Ok(Some(bytes));
    }
    let reason = "changed after it was compiled; compile again".into();
    Err(RunError::Plan { path, reason })
}

/// Checks the other files of a plan directory without executing them: generated kernels, which must include every one
/// that the plan calls, and all weights.
///
/// # Errors
/// If one is missing or was changed.
pub fn verify_files(dir: &Path, plan: &Plan) -> Result<(), RunError> {
    if let Some(object) = &plan.object {
        let (path, bytes) = read_object(dir, object)?;
        let is_name = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_';
        let names: HashSet<&[u8]> = bytes.split(|b| !is_name(b)).collect();
        let entries = plan.kernels.iter().map(|k| &k.entry);
        let mut symbols = entries.flat_map(|entry| entry.symbols());
        if let Some(symbol) = symbols.find(|s| !names.contains(s.as_bytes())) {
            let reason = format!("the kernel `{symbol}` is missing; compile again");
            return Err(RunError::Plan { path, reason });
        }
    }
    read_pass_trace(dir, plan)?;
    let training = dir.join("..");
    let is_part = dir.ends_with(layout::EVALUATION) && is_plan(&training);
    Values::load(dir, plan, is_part.then_some(training.as_path()))?.compare_all()
}

/// Limits the CPU's kernels to the features that the plan of a directory lists, so that it computes the same bits on every processor that
/// has them. For programs that run one plan, before anything else; a plan that cannot be read is refused later.
pub fn limit_kernels_to(dir: &Path) {
    if let Ok((_, plan)) = parse(dir)
        && plan.target.device == DeviceType::Cpu
    {
        frit_kernels::cpu::limit(&plan.target.features);
    }
}

/// Refuses a plan for the CPU whose code this processor cannot run.
///
/// # Errors
/// What the processor lacks.
#[cfg(target_arch = "x86_64")]
pub(crate) fn check_target(plan: &Plan) -> Result<(), RunError> {
    if plan.target.device == DeviceType::Cuda {
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

/// Code for another processor is refused when it is loaded.
///
/// # Errors
/// None.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn check_target(_: &Plan) -> Result<(), RunError> {
    Ok(())
}
