//! Parameters that a run starts from, out of a file instead of the plan.
//!
//! The file has every parameter of the plan and none besides, under the names that `--save` writes. What is stored
//! in 16 bits is widened where the plan holds f32.

use crate::RunError;
use crate::save::{self, Tensors};
use frit_ir::plan::{ParamHome, Plan};
use frit_ir::{DType, Tensor, TensorType};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeSet;
use std::path::Path;

/// Names of one kind that an error lists.
const LISTED: usize = 8;

/// Reads all parameters of a plan.
///
/// # Errors
/// If the file cannot be read, or does not fit: with all that is missing, unknown, or of another type.
pub(crate) fn read(path: &Path, plan: &Plan) -> Result<Tensors, RunError> {
    let bytes = std::fs::read(path).map_err(RunError::io(path))?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|e| RunError::data(path, format!("not a safetensors file: {e}")))?;
    let mut all = Tensors::new();
    let (mut missing, mut misfits) = (Vec::new(), Vec::new());
    for param in plan.params.iter().filter(|p| p.home != ParamHome::Unused) {
        let wanted = save::stored_type(param);
        match file.tensor(&param.name) {
            Err(_) => missing.push(format!("`{}`", param.name)),
            Ok(view) => match widened(&view, &wanted) {
                Some(bytes) => drop(all.insert(param.name.clone(), bytes)),
                None => misfits.push(format!(
                    "`{}`, {:?} {:?} where the plan wants {wanted}",
                    param.name,
                    view.dtype(),
                    view.shape()
                )),
            },
        }
    }
    let known: BTreeSet<&str> = plan.params.iter().map(|p| p.name.as_str()).collect();
    let names = file.names();
    let mut unknown: Vec<String> =
        names.iter().filter(|n| !known.contains(**n)).map(|n| format!("`{n}`")).collect();
    unknown.sort();
    let kinds =
        [("missing", missing), ("of another type", misfits), ("unknown to the plan", unknown)];
    let found: Vec<String> =
        kinds.iter().filter(|(_, of)| !of.is_empty()).map(|(what, of)| listed(what, of)).collect();
    if found.is_empty() {
        return Ok(all);
    }
    let help = "the file must hold the parameters of the plan under the names that --save writes";
    Err(RunError::data(path, format!("{}; {help}", found.join("; "))))
}

/// `2 missing: a, b`.
fn listed(what: &str, names: &[String]) -> String {
    let shown = names[..names.len().min(LISTED)].join(", ");
    let more = names.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{} {what}: {shown}{more}", names.len())
}

/// The little-endian elements of a stored tensor as the plan wants them; `None` if they are others.
fn widened(view: &TensorView<'_>, wanted: &TensorType) -> Option<Vec<u8>> {
    if view.shape() != wanted.shape.dims() {
        return None;
    }
    let narrow = match view.dtype() {
        dtype if dtype == save::safetensors_dtype(wanted.dtype) => {
            return Some(view.data().to_vec());
        }
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        _ => return None,
    };
    if wanted.dtype != DType::F32 {
        return None;
    }
    let stored = Tensor::from_bytes(wanted.with_dtype(narrow), view.data()).ok()?;
    Some(stored.cast(DType::F32).to_bytes())
}
