//! Writes the trained parameters under the model's own names as one `.safetensors` file.

use crate::RunError;
use crate::convert::converted;
use crate::device::Device;
use crate::left_out::{self, AllLeftOut};
use crate::plan_dir::PlanDir;
use crate::tensors::{self, Tensor};
use frit_ir::ops::StateName;
use frit_ir::plan::{ParamHome, ParamId, ParamSpec, Plan};
use frit_ir::{DType, TensorType};
use safetensors::Dtype;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Whole tensors by parameter name, little-endian.
pub(crate) type Tensors = BTreeMap<String, Vec<u8>>;

/// Which values of the parameters to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    /// The trained parameters.
    Trained,
    /// Their moving average, where there is one.
    Average,
}

/// Whether the plan keeps a moving average of its parameters.
pub(crate) fn has_ema(plan: &Plan) -> bool {
    plan.groups.iter().any(|g| g.states.iter().any(|s| s.name == StateName::Ema))
}

/// Gathers the parameters whose indices satisfy `wants` on rank 0 and passes them on as whole tensors, a group at a
/// time; nothing on others. Every rank must call it.
///
/// # Errors
/// If the device or another rank failed.
pub(crate) fn gather(
    plan: &Plan,
    device: &impl Device,
    rank: usize,
    version: Version,
    wants: impl Fn(ParamId) -> bool,
    mut put: impl FnMut(&ParamSpec, DType, Vec<u8>),
) -> Result<(), RunError> {
    for group in &plan.groups {
        if !group.segments.iter().any(|s| wants(s.param)) {
            continue;
        }
        let average =
            group.states.iter().find(|s| s.name == StateName::Ema && version == Version::Average);
        let (buffer, dtype) =
            average.map_or((group.master, group.dtype), |s| (s.buffer, DType::F32));
        let (size, bytes) = (dtype.size(), group.shard_numel * dtype.size());
        let parts = match group.sharded {
            true => device.gather(buffer, 0, bytes)?,
            false if rank == 0 => device.read(buffer, 0, bytes)?,
            false => vec![],
        };
        if rank > 0 {
            continue;
        }
        for segment in group.segments.iter().filter(|s| wants(s.param)) {
            let mut whole = vec![0; segment.numel * size];
            for (owner, part) in parts.chunks(bytes.max(1)).enumerate() {
                let Some((to, from, len)) = group.owned(segment, owner) else { continue };
                whole[to * size..(to + len) * size]
                    .copy_from_slice(&part[from * size..(from + len) * size]);
            }
            put(&plan.params[segment.param], dtype, whole);
        }
    }
    for (_, param) in plan.params.iter_enumerated().filter(|(i, _)| rank == 0 && wants(*i)) {
        if let ParamHome::Buffer(buffer) = param.home {
            put(param, param.ty.dtype, device.read(buffer, 0, param.ty.bytes())?);
        }
    }
    Ok(())
}

/// Whether the parameters that are saved are gathered from several ranks.
pub(crate) fn is_collective(plan: &Plan, trained_only: bool) -> bool {
    let wants = |param| !trained_only || plan.is_of_run(param);
    let mut sharded = plan.groups.iter().filter(|g| g.sharded);
    sharded.any(|g| g.segments.iter().any(|s| wants(s.param)))
}

/// The parameters as they are saved, gathered on rank 0; empty on others. Every rank must call it.
///
/// # Errors
/// If the device or another rank failed.
pub(crate) fn collect(
    dir: &PlanDir,
    device: &impl Device,
    rank: usize,
    version: Version,
    trained_only: bool,
) -> Result<Tensors, RunError> {
    let mut all = Tensors::new();
    let wants = |param: ParamId| !trained_only || dir.plan.is_of_run(param);
    gather(&dir.plan, device, rank, version, wants, |param, dtype, whole| {
        let narrow = dtype != stored_type(param).dtype;
        let whole = if narrow { unrounded(dir, &param.name, &whole, dtype) } else { whole };
        all.insert(param.name.clone(), whole);
    })?;
    Ok(all)
}

/// A frozen parameter in f32: the plan's unrounded value if it is still the plan's.
fn unrounded(dir: &PlanDir, name: &str, held: &[u8], dtype: DType) -> Vec<u8> {
    if let Ok(Some(own)) = dir.weight(name)
        && converted(&own, DType::F32, dtype).is_some_and(|rounded| *rounded == *held)
    {
        return own.into_owned();
    }
    converted(held, dtype, DType::F32).expect("invariant: a dtype of parameters").into_owned()
}

/// The type in files. Parameters in flat groups are f32 whatever the model's type.
pub(crate) fn stored_type(param: &ParamSpec) -> TensorType {
    match param.home {
        ParamHome::Group { .. } => param.ty.with_dtype(DType::F32),
        _ => param.ty.clone(),
    }
}

fn stored_dtype(param: &ParamSpec) -> Dtype {
    safetensors_dtype(stored_type(param).dtype)
}

/// Writes the tensors of the plan's parameters, and the metadata of omitted ones.
///
/// # Errors
/// If the file system refuses.
pub(crate) fn write(
    path: &Path,
    plan: &Plan,
    all: &Tensors,
    left_out: &AllLeftOut,
) -> Result<(), RunError> {
    let mut tensors = Vec::new();
    for param in &plan.params {
        let Some(bytes) = all.get(&param.name) else { continue };
        let (dtype, shape) = (stored_dtype(param), param.ty.shape.0.clone());
        let bytes = Cow::Borrowed(bytes.as_slice());
        tensors.push((param.name.clone(), Tensor { dtype, shape, bytes }));
    }
    tensors::write(path, tensors, left_out::to_metadata(left_out))
}

/// The element type of `.safetensors` files.
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
