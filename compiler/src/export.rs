//! The model file with trained weights: every other byte stays as it was.

use crate::diagnostics::Report;
use crate::{plan_dir, wire};
use frit_ir::Diagnostic;
use frit_ir::plan::{ParamHome, sha256_hex};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The largest message that Protocol Buffers allow.
const LARGEST: usize = i32::MAX as usize;

/// The ONNX model that the plan was compiled from, with the values of `weights`.
///
/// # Errors
/// If the model is no ONNX file, is gone or was changed, or does not store a parameter as the weights do.
pub fn onnx(plan: &Path, weights: &Path) -> Result<Vec<u8>, Report> {
    let params = plan_dir::read(plan)?.params;
    let (path, model) = original(plan)?;
    let refuse = |what: String| Diagnostic::error("E110", format!("{}: {what}", path.display()));
    let bytes = std::fs::read(weights).map_err(|e| {
        Diagnostic::error("E111", format!("cannot read {}: {e}", weights.display()))
            .help("give a file that `frit run --save` wrote")
    })?;
    let tensors = SafeTensors::deserialize(&bytes)
        .map_err(|e| Diagnostic::error("E111", format!("{}: {e}", weights.display())))?;
    let mut left = BTreeSet::new();
    for param in params.into_iter().filter(|p| p.home != ParamHome::Unused) {
        if tensors.tensor(&param.name).is_err() {
            let what = format!("{} holds no `{}`", weights.display(), param.name);
            return Err(Diagnostic::error("E111", what)
                .help("give the weights of this very model")
                .into());
        }
        left.insert(param.name);
    }
    let mut out = Vec::with_capacity(model.len());
    let broken = || refuse("it is no ONNX model".into());
    for field in wire::fields(&model).ok_or_else(broken)? {
        match field.content {
            Some(graph) if field.number == 7 => {
                let graph = replaced(graph, &tensors, &mut left).map_err(&refuse)?;
                wire::put(&mut out, 7, &graph);
            }
            _ => out.extend_from_slice(field.whole),
        }
    }
    if let Some(name) = left.first() {
        let what = format!("no initializer is `{name}`, nor {} others", left.len() - 1);
        return Err(refuse(what)
            .note("the exporter's optimization renamed or merged them")
            .help("export the model without optimization, or use the weights file as it is")
            .into());
    }
    if out.len() > LARGEST {
        return Err(refuse("with its weights inside it is larger than 2 GiB".into())
            .help("load the weights file into the original module instead")
            .into());
    }
    Ok(out)
}

/// The model file of a plan, unchanged since.
fn original(plan: &Path) -> Result<(PathBuf, Vec<u8>), Diagnostic> {
    let file = plan.join("source/origin.json");
    let refuse = |e: String| Diagnostic::error("E112", format!("{}: {e}", file.display()));
    let text = std::fs::read_to_string(&file).map_err(|e| refuse(e.to_string()))?;
    let origin: Value = serde_json::from_str(&text).map_err(|e| refuse(e.to_string()))?;
    let path = PathBuf::from(origin["path"].as_str().unwrap_or_default());
    let model = std::fs::read(&path).map_err(|e| refuse(format!("{}: {e}", path.display())))?;
    if origin["sha256"].as_str() != Some(&sha256_hex(&model)) {
        return Err(refuse(format!("{} was changed since it was compiled", path.display())));
    }
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
        return Err(refuse("the plan was compiled from a JSON model".into())
            .help("use the weights file as it is"));
    }
    Ok((path, model))
}

/// The graph with its initializers replaced; names that were found leave `left`.
fn replaced(
    graph: &[u8],
    tensors: &SafeTensors<'_>,
    left: &mut BTreeSet<String>,
) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(graph.len());
    for field in wire::fields(graph).ok_or("its graph is broken")? {
        let tensor = field.content.filter(|_| field.number == 5);
        match tensor.map(|t| initializer(t, tensors, left)).transpose()? {
            Some(Some(tensor)) => wire::put(&mut out, 5, &tensor),
            _ => out.extend_from_slice(field.whole),
        }
    }
    Ok(out)
}

/// An initializer with new data inside it; `None` if it has no new data.
fn initializer(
    tensor: &[u8],
    tensors: &SafeTensors<'_>,
    left: &mut BTreeSet<String>,
) -> Result<Option<Vec<u8>>, String> {
    let fields = wire::fields(tensor).ok_or("an initializer is broken")?;
    let name = fields.iter().find(|f| f.number == 8).and_then(|f| f.content).unwrap_or_default();
    let name = String::from_utf8_lossy(name).into_owned();
    let external = fields.iter().any(|f| f.number == 13);
    let Ok(view) = tensors.tensor(&name) else {
        return if external {
            Err(format!("the data of `{name}`, which does not train, is in another file"))
        } else {
            Ok(None)
        };
    };
    let stored = fields.iter().filter(|f| f.number == 2).find_map(|f| {
        let mut at = 1;
        wire::varint(f.whole, &mut at)
    });
    let data = convert(&view, stored.unwrap_or(0))
        .ok_or_else(|| format!("`{name}` is not stored as floats"))?;
    let mut out = Vec::new();
    for size in view.shape() {
        wire::put_integer(&mut out, 1, *size as u64);
    }
    wire::put_integer(&mut out, 2, stored.unwrap_or(0));
    wire::put(&mut out, 8, name.as_bytes());
    wire::put(&mut out, 9, &data);
    left.remove(&name);
    Ok(Some(out))
}

/// The elements in the data type of the initializer, by ONNX's number.
fn convert(view: &safetensors::tensor::TensorView<'_>, to: u64) -> Option<Vec<u8>> {
    use half::{bf16, f16};
    let same = match (view.dtype(), to) {
        (Dtype::F32, 1) | (Dtype::F16, 10) | (Dtype::BF16, 16) | (Dtype::F64, 11) => true,
        (Dtype::F32, 10 | 16 | 11) => false,
        _ => return None,
    };
    if same {
        return Some(view.data().to_vec());
    }
    let (values, _) = view.data().as_chunks::<4>();
    let values = values.iter().map(|b| f32::from_le_bytes(*b));
    Some(match to {
        10 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.flat_map(|x| f64::from(x).to_le_bytes()).collect(),
    })
}
