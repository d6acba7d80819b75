//! The model file with trained weights: every other byte stays as it was.

use crate::diagnostics::Report;
use crate::import::{self, Tied};
use crate::source::Origin;
use crate::{plan_dir, wire};
use frit_ir::Diagnostic;
use frit_ir::plan::ParamHome;
use frit_runtime::checkpoint::Checkpoint;
use frit_runtime::safetensors_dtype;
use prost::bytes::Bytes;
use safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The largest message that Protocol Buffers allow.
const LARGEST: usize = i32::MAX as usize;

/// Trained parameters, and the plan they belong to.
pub struct Trained {
    /// Where the plan's source is.
    source: PathBuf,
    /// The parameters that the model must have.
    names: Vec<String>,
    values: Values,
}

enum Values {
    /// The bytes of a file that `frit run --save` wrote, and its path.
    File(Vec<u8>, PathBuf),
    Checkpoint(Checkpoint),
}

/// One parameter: element type, shape, little-endian elements.
type Parameter = (Dtype, Vec<usize>, Vec<u8>);

impl Trained {
    /// The weights of a file for the plan of a directory.
    ///
    /// # Errors
    /// If one of them cannot be read.
    pub fn of_plan(plan: &Path, weights: &Path) -> Result<Trained, Report> {
        let bytes = std::fs::read(weights).map_err(|e| {
            Diagnostic::error("E111", format!("cannot read {}: {e}", weights.display()))
                .help("give a file that `frit run --save` wrote")
        })?;
        SafeTensors::deserialize(&bytes)
            .map_err(|e| Diagnostic::error("E111", format!("{}: {e}", weights.display())))?;
        let params = plan_dir::read(plan)?.params;
        let used = params.into_iter().filter(|p| p.home != ParamHome::Unused);
        Ok(Trained {
            source: plan.join("source"),
            names: used.map(|p| p.name).collect(),
            values: Values::File(bytes, weights.into()),
        })
    }

    /// The parameters of a checkpoint.
    pub fn of_checkpoint(checkpoint: Checkpoint) -> Trained {
        let names = checkpoint.parameters().map(str::to_string).collect();
        Trained { source: checkpoint.source(), names, values: Values::Checkpoint(checkpoint) }
    }

    fn has(&self, name: &str) -> bool {
        match &self.values {
            Values::File(bytes, _) => {
                SafeTensors::deserialize(bytes).is_ok_and(|t| t.tensor(name).is_ok())
            }
            Values::Checkpoint(checkpoint) => checkpoint.entry(&format!("param/{name}")).is_some(),
        }
    }

    fn get(&self, name: &str) -> Result<Option<Parameter>, Diagnostic> {
        match &self.values {
            Values::File(bytes, _) => {
                let tensors = SafeTensors::deserialize(bytes).ok();
                let view = tensors.and_then(|t| t.tensor(name).ok());
                Ok(view.map(|v| (v.dtype(), v.shape().to_vec(), v.data().to_vec())))
            }
            Values::Checkpoint(checkpoint) => {
                let key = format!("param/{name}");
                let Some(entry) = checkpoint.entry(&key) else { return Ok(None) };
                let bytes = checkpoint.tensor(&key);
                let bytes = bytes.map_err(|e| Diagnostic::error("E111", e.to_string()))?;
                Ok(Some((safetensors_dtype(entry.dtype), entry.shape.clone(), bytes)))
            }
        }
    }

    fn path(&self) -> &Path {
        match &self.values {
            Values::File(_, path) => path,
            Values::Checkpoint(checkpoint) => &checkpoint.path,
        }
    }
}

/// The ONNX model that a plan was compiled from, with trained weights.
///
/// # Errors
/// If the model is no ONNX file, is gone or was changed, or does not store a parameter as it was trained.
pub fn onnx(trained: &Trained) -> Result<Vec<u8>, Report> {
    let (path, model, ties) = original(&trained.source)?;
    let model = Bytes::from(model);
    let merged = import::onnx::merged(model.clone());
    let refuse = |what: String| Diagnostic::error("E110", format!("{}: {what}", path.display()));
    let mut left = BTreeSet::new();
    for name in &trained.names {
        if !trained.has(name) {
            let what = format!("{} holds no `{name}`", trained.path().display());
            return Err(Diagnostic::error("E111", what)
                .help("give the weights of this very model")
                .into());
        }
        left.insert(name.clone());
    }
    let mut out = Vec::with_capacity(model.len());
    let broken = || refuse("it is no ONNX model".into());
    for field in wire::fields(&model).ok_or_else(broken)? {
        match field.content {
            Some(graph) if field.number == 7 => {
                let graph = replaced(graph, trained, &ties, &merged, &mut left).map_err(&refuse)?;
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

/// Initializers that are copies of a parameter.
type Ties = BTreeMap<String, Tied>;

/// The model file of a plan's source, unchanged since, and what is tied in it.
fn original(source: &Path) -> Result<(PathBuf, Vec<u8>, Ties), Diagnostic> {
    let origin = Origin::read(source)?;
    if origin.path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
        return Err(Diagnostic::error("E112", "the plan was compiled from a JSON model")
            .help("use the weights file as it is"));
    }
    let path = origin.model(source)?;
    let model = std::fs::read(&path)
        .map_err(|e| Diagnostic::error("E112", format!("{}: {e}", path.display())))?;
    Ok((path, model, origin.ties))
}

/// The graph with its initializers replaced, those that were merged beside the one that they are copies of; names
/// that were found leave `left`.
fn replaced(
    graph: &[u8],
    trained: &Trained,
    ties: &Ties,
    merged: &[(String, String)],
    left: &mut BTreeSet<String>,
) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(graph.len());
    for field in wire::fields(graph).ok_or("its graph is broken")? {
        match (field.number, field.content) {
            // A node: its second field names what it makes.
            (1, Some(node)) => {
                let made = text(node, 2).ok_or("a node is broken")?;
                if merged.iter().all(|(name, _)| *name != made) {
                    out.extend_from_slice(field.whole);
                }
            }
            (5, Some(tensor)) => {
                let own = text(tensor, 8).ok_or("an initializer is broken")?;
                let copies = merged.iter().filter(|(_, source)| *source == own);
                for name in std::iter::once(&own).chain(copies.map(|(name, _)| name)) {
                    match initializer(tensor, name, trained, ties, left)? {
                        Some(tensor) => wire::put(&mut out, 5, &tensor),
                        None if *name == own => out.extend_from_slice(field.whole),
                        None => wire::put(&mut out, 5, &renamed(tensor, name)),
                    }
                }
            }
            _ => out.extend_from_slice(field.whole),
        }
    }
    Ok(out)
}

/// The last text of a message under this number, empty if it has none; `None` if the bytes are no message.
fn text(message: &[u8], number: u64) -> Option<String> {
    let fields = wire::fields(message)?;
    let last = fields.iter().rfind(|f| f.number == number).and_then(|f| f.content);
    Some(String::from_utf8_lossy(last.unwrap_or_default()).into_owned())
}

/// The initializer under another name: of a field that is there twice, the last one counts.
fn renamed(tensor: &[u8], name: &str) -> Vec<u8> {
    let mut out = tensor.to_vec();
    wire::put(&mut out, 8, name.as_bytes());
    out
}

/// The initializer with the trained data of `name` inside it; `None` if there are none.
fn initializer(
    tensor: &[u8],
    name: &str,
    trained: &Trained,
    ties: &Ties,
    left: &mut BTreeSet<String>,
) -> Result<Option<Vec<u8>>, String> {
    let fields = wire::fields(tensor).ok_or("an initializer is broken")?;
    let external = fields.iter().any(|f| f.number == 13);
    let tied = ties.get(name);
    let found = trained.get(tied.map_or(name, |t| &t.parameter)).map_err(|e| e.message)?;
    let found = match found {
        Some(matrix) if tied.is_some_and(|t| t.transposed) => Some(transposed(matrix)),
        found => found,
    };
    let Some((dtype, shape, data)) = found else {
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
    let data = convert(dtype, data, stored.unwrap_or(0))
        .ok_or_else(|| format!("`{name}` is not stored as floats"))?;
    let mut out = Vec::new();
    for size in &shape {
        wire::put_integer(&mut out, 1, *size as u64);
    }
    wire::put_integer(&mut out, 2, stored.unwrap_or(0));
    wire::put(&mut out, 8, name.as_bytes());
    wire::put(&mut out, 9, &data);
    left.remove(name);
    Ok(Some(out))
}

/// The matrix with its axes exchanged.
fn transposed((dtype, shape, data): Parameter) -> Parameter {
    let &[rows, columns] = &shape[..] else { return (dtype, shape, data) };
    let size = data.len() / (rows * columns).max(1);
    let mut turned = Vec::with_capacity(data.len());
    for column in 0..columns {
        for row in 0..rows {
            turned.extend_from_slice(&data[(row * columns + column) * size..][..size]);
        }
    }
    (dtype, vec![columns, rows], turned)
}

/// The elements in the data type of the initializer, by ONNX's number.
fn convert(dtype: Dtype, data: Vec<u8>, to: u64) -> Option<Vec<u8>> {
    use half::{bf16, f16};
    let same = match (dtype, to) {
        (Dtype::F32, 1) | (Dtype::F16, 10) | (Dtype::BF16, 16) | (Dtype::F64, 11) => true,
        (Dtype::F32, 10 | 16 | 11) => false,
        _ => return None,
    };
    if same {
        return Some(data);
    }
    let (values, _) = data.as_chunks::<4>();
    let values = values.iter().map(|b| f32::from_le_bytes(*b));
    Some(match to {
        10 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.flat_map(|x| f64::from(x).to_le_bytes()).collect(),
    })
}
