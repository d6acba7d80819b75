//! Parameters that checkpoints and saved files omit on request: those that no step changes.
//!
//! The digest of each omitted parameter is recorded, so that a run with another base model is refused. It covers the
//! whole parameter in its stored dtype, which is recorded with it.

use crate::RunError;
use crate::convert::converted;
use crate::device::Device;
use crate::plan_dir::PlanDir;
use crate::plan_dir::digest;
use crate::save::{self, Tensors, Version};
use frit_ir::DType;
use frit_ir::plan::{ParamHome, ParamId, ParamSpec, Plan};
use safetensors::tensor::Metadata;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The metadata key of a `.safetensors` file with the omitted parameters as JSON.
const KEY: &str = "frit.left_out";

/// An omitted parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The dtype in which it was stored on the device.
    pub dtype: DType,
    /// The digest of its elements in that dtype, computed like those of a plan's tensors.
    pub digest: String,
    /// Whether its value was the plan's, rounded to that dtype.
    pub of_plan: bool,
}

impl LeftOut {
    /// Whether these are its elements, in the dtype of the model's file.
    pub fn is(&self, dtype: DType, bytes: &[u8]) -> bool {
        // A parameter is f32 before it is stored in fewer bits.
        let wide = converted(bytes, dtype, DType::F32);
        let held = wide.as_ref().and_then(|wide| converted(wide, DType::F32, self.dtype));
        held.is_some_and(|held| digest(&held) == self.digest)
    }
}

/// All omitted parameters, by name.
pub type AllLeftOut = BTreeMap<String, LeftOut>;

/// The parameters that no step changes, gathered on rank 0; empty on others. Every rank must call it.
///
/// # Errors
/// If the device or another rank failed.
pub(crate) fn held(
    dir: &PlanDir,
    device: &impl Device,
    rank: usize,
) -> Result<AllLeftOut, RunError> {
    let mut all = AllLeftOut::new();
    let unchanged = |param: ParamId| !dir.plan.is_of_run(param);
    save::gather(&dir.plan, device, rank, Version::Trained, unchanged, |param, dtype, bytes| {
        // A value that cannot be read is not the plan's.
        let own = dir.weight(&param.name).ok().flatten();
        let own = own.as_ref().and_then(|own| converted(own, own_dtype(param), dtype));
        let of_plan = own.is_some_and(|own| *own == bytes);
        all.insert(param.name.clone(), LeftOut { dtype, digest: digest(&bytes), of_plan });
    })?;
    Ok(all)
}

/// The dtype of a parameter in plans and in files.
fn own_dtype(param: &ParamSpec) -> DType {
    save::stored_type(param).dtype
}

/// Compares omitted parameters with those that a run has, from files or the plan.
///
/// # Errors
/// Why the run cannot continue with these, or that the plan's values cannot be read.
pub(crate) fn compare(
    all: &AllLeftOut,
    plan: &Plan,
    dir: &PlanDir,
    files: &Tensors,
) -> Result<Option<String>, RunError> {
    let mut others = Vec::new();
    for param in plan.params.iter().filter(|p| p.home != ParamHome::Unused) {
        let Some(left_out) = all.get(&param.name) else { continue };
        let value = match files.get(&param.name) {
            Some(bytes) => Some(Cow::Borrowed(bytes.as_slice())),
            None => dir.weight(&param.name)?,
        };
        let value = value.as_ref().and_then(|v| converted(v, own_dtype(param), left_out.dtype));
        if value.is_none_or(|value| digest(&value) != left_out.digest) {
            others.push(param.name.as_str());
        }
    }
    let Some(first) = others.first() else { return Ok(None) };
    let more = match others.len() - 1 {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    Ok(Some(format!(
        "leaves out what was not trained, and that was another base: `{first}`{more} had other values; give the base \
         that it was trained on with --weights"
    )))
}

/// The metadata of a file that omits these.
pub(crate) fn to_metadata(all: &AllLeftOut) -> Option<(String, String)> {
    let text = serde_json::to_string(all).expect("invariant: texts and numbers serialize");
    (!all.is_empty()).then(|| (KEY.to_string(), text))
}

/// The parameters that a file with this metadata omits.
///
/// # Errors
/// If its metadata is damaged.
pub fn of_metadata(metadata: &Metadata) -> Result<AllLeftOut, String> {
    let text = metadata.metadata().as_ref().and_then(|m| m.get(KEY));
    let Some(text) = text else { return Ok(AllLeftOut::new()) };
    serde_json::from_str(text).map_err(|e| format!("its metadata `{KEY}` is damaged: {e}"))
}
