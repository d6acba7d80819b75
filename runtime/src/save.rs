//! The parameters after a run, under the model's own names, as one `.safetensors` file.

use crate::RunError;
use crate::device::Device;
use frit_ir::DType;
use frit_ir::plan::{ParamHome, Plan};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::path::Path;

/// Whole tensors by parameter name, little-endian.
pub(crate) type Tensors = BTreeMap<String, Vec<u8>>;

/// Adds what this rank holds: its part of every flat group, and, on rank 0, what all ranks hold.
pub(crate) fn collect(plan: &Plan, device: &impl Device, rank: usize, all: &mut Tensors) {
    for group in plan.groups.iter().filter(|g| g.sharded || rank == 0) {
        for segment in &group.segments {
            let Some((to, from, len)) = group.owned(segment, rank) else { continue };
            let param = &plan.params[segment.param];
            let whole = all.entry(param.name.clone()).or_insert_with(|| vec![0; segment.numel * 4]);
            whole[to * 4..(to + len) * 4].copy_from_slice(&device.read(
                group.master,
                from * 4,
                len * 4,
            ));
        }
    }
    for param in plan.params.iter().filter(|_| rank == 0) {
        if let ParamHome::Buffer(buffer) = param.home {
            let bytes = device.read(buffer, 0, param.ty.bytes());
            all.insert(param.name.clone(), bytes.to_vec());
        }
    }
}

/// Writes the tensors beside `path` and moves them there, so that no torn file is ever at `path`.
///
/// # Errors
/// If the file system refuses.
pub(crate) fn write(path: &Path, plan: &Plan, all: &Tensors) -> Result<(), RunError> {
    let other = |e: safetensors::SafeTensorError| RunError::Io {
        path: path.into(),
        error: std::io::Error::other(e.to_string()),
    };
    let mut views = Vec::new();
    for param in &plan.params {
        let Some(bytes) = all.get(&param.name) else { continue };
        // Parameters in flat groups are f32 whatever the model stores.
        let dtype = match param.home {
            ParamHome::Group { .. } => Dtype::F32,
            _ => safetensors_dtype(param.ty.dtype),
        };
        let view = TensorView::new(dtype, param.ty.shape.0.clone(), bytes).map_err(other)?;
        views.push((param.name.as_str(), view));
    }
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".partial-{}", std::process::id()));
    let aside = path.with_file_name(name);
    let written = safetensors::serialize_to_file(views, None, &aside)
        .map_err(other)
        .and_then(|()| std::fs::rename(&aside, path).map_err(RunError::io(path)));
    if written.is_err() {
        // The error that matters is the first; there may be nothing to remove.
        let _ = std::fs::remove_file(&aside);
    }
    written
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
