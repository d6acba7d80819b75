//! The parameters after a run, under the model's own names, as one `.safetensors` file.

use crate::RunError;
use crate::convert::converted;
use crate::device::Device;
use crate::plan_dir::PlanDir;
use crate::tensors::{self, Tensor};
use frit_ir::ops::EMA;
use frit_ir::plan::{ParamHome, ParamSpec, Plan};
use frit_ir::{DType, TensorType};
use safetensors::Dtype;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Whole tensors by parameter name, little-endian.
pub(crate) type Tensors = BTreeMap<String, Vec<u8>>;

/// Which values of the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    /// Those that train.
    Trained,
    /// Their moving average, where there is one.
    Average,
}

/// Whether the plan keeps a moving average of its parameters.
pub(crate) fn has_ema(plan: &Plan) -> bool {
    plan.groups.iter().any(|g| g.states.iter().any(|s| s.name == EMA))
}

/// What the ranks hold, on rank 0; nothing on others. Every rank must ask.
///
/// # Errors
/// If the device or another rank failed.
pub(crate) fn collect(
    dir: &PlanDir,
    device: &impl Device,
    rank: usize,
    version: Version,
) -> Result<Tensors, RunError> {
    let plan = &dir.plan;
    let mut all = Tensors::new();
    for group in &plan.groups {
        let average = group.states.iter().find(|s| s.name == EMA && version == Version::Average);
        let (buffer, dtype) =
            average.map_or((group.master, group.dtype), |s| (s.buffer, DType::F32));
        let (size, bytes) = (dtype.size(), group.shard_numel * dtype.size());
        let parts = match group.sharded {
            true => device.gather(buffer, 0, bytes)?,
            false if rank == 0 => device.read(buffer, 0, bytes)?,
            false => vec![],
        };
        for (owner, part) in parts.chunks(bytes.max(1)).enumerate() {
            for segment in &group.segments {
                let Some((to, from, len)) = group.owned(segment, owner) else { continue };
                let name = &plan.params[segment.param].name;
                let whole =
                    all.entry(name.clone()).or_insert_with(|| vec![0; segment.numel * size]);
                whole[to * size..(to + len) * size]
                    .copy_from_slice(&part[from * size..(from + len) * size]);
            }
        }
        if dtype != DType::F32 {
            for segment in &group.segments {
                let name = &plan.params[segment.param].name;
                if let Some(held) = all.get_mut(name) {
                    *held = unrounded(dir, name, held, dtype);
                }
            }
        }
    }
    for param in plan.params.iter().filter(|_| rank == 0) {
        if let ParamHome::Buffer(buffer) = param.home {
            all.insert(param.name.clone(), device.read(buffer, 0, param.ty.bytes())?);
        }
    }
    Ok(all)
}

/// A frozen parameter in f32: where it is still the plan's, as the plan has it, not as it was rounded to be held.
fn unrounded(dir: &PlanDir, name: &str, held: &[u8], dtype: DType) -> Vec<u8> {
    if let Ok(Some(own)) = dir.weight(name)
        && converted(&own, DType::F32, dtype).is_some_and(|rounded| *rounded == *held)
    {
        return own.into_owned();
    }
    converted(held, dtype, DType::F32).expect("invariant: a dtype of parameters").into_owned()
}

/// Reads the parameters of a plan from a file as [`write`] makes it; what it holds besides is ignored.
///
/// # Errors
/// If the file cannot be read, lacks a parameter, or has one of another type.
pub(crate) fn read(path: &Path, plan: &Plan) -> Result<Tensors, RunError> {
    let bytes = std::fs::read(path).map_err(RunError::io(path))?;
    let file = safetensors::SafeTensors::deserialize(&bytes)
        .map_err(|e| RunError::data(path, format!("not a safetensors file: {e}")))?;
    let mut all = Tensors::new();
    for param in plan.params.iter().filter(|p| p.home != ParamHome::Unused) {
        let Ok(view) = file.tensor(&param.name) else {
            return Err(RunError::data(path, format!("it holds no `{}`", param.name)));
        };
        if view.dtype() != stored_dtype(param) || view.shape() != param.ty.shape.dims() {
            let (dtype, shape) = (view.dtype(), view.shape());
            let reason =
                format!("`{}` is {dtype:?} {shape:?}; the plan wants {}", param.name, param.ty);
            return Err(RunError::data(path, reason));
        }
        all.insert(param.name.clone(), view.data().to_vec());
    }
    Ok(all)
}

/// The type in files. Parameters in flat groups are f32 whatever the model stores.
pub(crate) fn stored_type(param: &ParamSpec) -> TensorType {
    match param.home {
        ParamHome::Group { .. } => param.ty.with_dtype(DType::F32),
        _ => param.ty.clone(),
    }
}

fn stored_dtype(param: &ParamSpec) -> Dtype {
    safetensors_dtype(stored_type(param).dtype)
}

/// Writes the tensors of the plan's parameters.
///
/// # Errors
/// If the file system refuses.
pub(crate) fn write(path: &Path, plan: &Plan, all: &Tensors) -> Result<(), RunError> {
    let mut tensors = Vec::new();
    for param in &plan.params {
        let Some(bytes) = all.get(&param.name) else { continue };
        let (dtype, shape) = (stored_dtype(param), param.ty.shape.0.clone());
        let bytes = Cow::Borrowed(bytes.as_slice());
        tensors.push((param.name.clone(), Tensor { dtype, shape, bytes }));
    }
    tensors::write(path, tensors)
}

/// The element type as `.safetensors` files name it.
pub fn safetensors_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F8E4M3 => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
    }
}
