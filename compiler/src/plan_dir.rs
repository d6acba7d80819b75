//! Plan directories: what is in them, and how one is written so that none is ever left half-written.
//!
//! `plan.json`, `kernels/kernels.so` or `kernels/kernels.ptx`, `weights.safetensors` (every parameter by the model's own name,
//! f32, and large constants), `source/` (see [`crate::source`]), and `eval/`, the plan that evaluates the
//! model: a plan directory whose `weights.safetensors` holds only what the other one does not.

use crate::diagnostics::Report;
use crate::driver::Compiled;
use crate::weights::Weights;
use frit_ir::Diagnostic;
use frit_ir::ops::{Param, ParamKind};
use frit_ir::plan::{Plan, PlanError, sha256_hex};
use frit_runtime::safetensors_dtype;
use safetensors::{Dtype, View};
use serde_json::json;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Whether the values of parameters are in the plan directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Stored {
    /// All of them.
    #[default]
    Copy,
    /// None that the model's files hold: the plan reads them there, and they must stay as they are.
    Reference,
    /// None. The plan can still be run if every parameter's first value is made from the seed, as those
    /// of JSON models with `init` are; otherwise it can only be inspected.
    None,
}

/// Name of the plan that evaluates, within the directory of one that trains.
pub const EVALUATION: &str = "eval";

/// Writes a plan directory beside `path` and moves it there; an older plan at `path` is replaced.
///
/// # Errors
/// If the file system refuses, or `path` exists and is no plan.
pub fn write(path: &Path, compiled: &Compiled, weights: Stored) -> Result<(), Report> {
    if path.exists() && !path.join("plan.json").exists() {
        return Err(Diagnostic::error("E090", format!("{} exists and is no plan", path.display()))
            .help("choose another directory with -o")
            .into());
    }
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".partial-{}", std::process::id()));
    let aside = path.with_file_name(name);
    let result = fill(&aside, compiled, weights).and_then(|()| {
        if path.exists() {
            std::fs::remove_dir_all(path).map_err(|e| io(path, e))?;
        }
        std::fs::rename(&aside, path).map_err(|e| io(path, e))
    });
    if result.is_err() {
        // The error that matters is the first; the remains may not exist at all.
        let _ = std::fs::remove_dir_all(&aside);
    }
    result
}

fn io(path: &Path, error: std::io::Error) -> Report {
    Diagnostic::error("E091", format!("cannot write {}: {error}", path.display())).into()
}

fn fill(dir: &Path, compiled: &Compiled, weights: Stored) -> Result<(), Report> {
    let file = |name: &str| -> PathBuf { dir.join(name) };
    for sub in ["kernels", "source"] {
        let path = file(sub);
        std::fs::create_dir_all(&path).map_err(|e| io(&path, e))?;
    }
    let put = |name: &str, bytes: &[u8]| {
        let path = file(name);
        std::fs::write(&path, bytes).map_err(|e| io(&path, e))
    };
    put("plan.json", compiled.plan.to_json().as_bytes())?;
    put("source/train.toml", compiled.plan.config.as_bytes())?;
    put("source/origin.json", compiled.source.origin.as_bytes())?;
    put(&format!("source/{}", compiled.source.file), &compiled.source.model)?;
    if let Some(evaluation) = &compiled.evaluation {
        let path = file("eval/kernels");
        std::fs::create_dir_all(&path).map_err(|e| io(&path, e))?;
        put("eval/plan.json", evaluation.plan.to_json().as_bytes())?;
        if let Some(object) = &evaluation.plan.object {
            put(&format!("eval/{}", object.file), &evaluation.object)?;
        }
    }
    if let Some(object) = &compiled.plan.object {
        put(&object.file, &compiled.object)?;
    }
    let mut elsewhere = BTreeSet::new();
    if weights == Stored::None {
        elsewhere.extend(compiled.plan.params.iter().map(|p| p.name.as_str()));
        let evaluated = compiled.evaluation.iter().flat_map(|e| &e.plan.params);
        elsewhere.extend(evaluated.map(|p| p.name.as_str()));
    }
    if weights == Stored::Reference {
        let (text, referenced) = references(compiled);
        put("weights.json", text.as_bytes())?;
        elsewhere = referenced;
    }
    let Compiled { plan, constants, weights, .. } = compiled;
    write_weights(&file("weights.safetensors"), plan, constants, weights, &elsewhere)?;
    let Some(evaluation) = &compiled.evaluation else { return Ok(()) };
    elsewhere.extend(plan.params.iter().map(|p| p.name.as_str()));
    let path = file("eval/weights.safetensors");
    write_weights(&path, &evaluation.plan, &evaluation.constants, weights, &elsewhere)
}

/// `weights.json`: the files that hold weights, by absolute path, size and digest, and where in them each
/// tensor lies. With the names of these tensors.
fn references(compiled: &Compiled) -> (String, BTreeSet<&str>) {
    let mut tensors = serde_json::Map::new();
    let mut names = BTreeSet::new();
    for spec in &compiled.plan.params {
        let Some(weight) = compiled.weights.get(&spec.name) else { continue };
        let Some((file, offset)) = compiled.weights.place(weight) else { continue };
        let place = json!({"file": file, "offset": offset, "bytes": weight.bytes().len()});
        tensors.insert(spec.name.clone(), place);
        names.insert(spec.name.as_str());
    }
    let file = |(path, bytes): (&Path, &[u8])| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        json!({"path": path, "bytes": bytes.len(), "sha256": sha256_hex(bytes)})
    };
    let files: Vec<_> = compiled.weights.files().map(file).collect();
    (format!("{:#}\n", json!({"files": files, "tensors": tensors})), names)
}

/// Writes the parameters and constants of a plan, but for the parameters in `without`.
fn write_weights(
    path: &Path,
    plan: &Plan,
    constants: &[(String, frit_ir::Tensor)],
    weights: &Weights,
    without: &BTreeSet<&str>,
) -> Result<(), Report> {
    let mut tensors: Vec<(String, Tensor<'_>)> = Vec::new();
    for spec in plan.params.iter().filter(|s| !without.contains(s.name.as_str())) {
        let param = Param {
            name: spec.name.clone(),
            ty: spec.ty.clone(),
            kind: ParamKind::Trainable,
            reason: String::new(),
            init: spec.init.clone(),
            unit: None,
            sharded: false,
        };
        let tensor = Tensor::Param { param, weights, seed: plan.seed };
        tensors.push((spec.name.clone(), tensor));
    }
    for (name, value) in constants {
        tensors.push((name.clone(), Tensor::Constant(value)));
    }
    safetensors::serialize_to_file(tensors, None, path).map_err(|e| {
        Diagnostic::error("E091", format!("cannot write {}: {e}", path.display())).into()
    })
}

/// One tensor of the weights file; its bytes are made when they are written.
enum Tensor<'a> {
    Param { param: Param, weights: &'a Weights, seed: u64 },
    Constant(&'a frit_ir::Tensor),
}

impl Tensor<'_> {
    fn ty(&self) -> &frit_ir::TensorType {
        match self {
            Tensor::Param { param, .. } => &param.ty,
            Tensor::Constant(value) => &value.ty,
        }
    }
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        safetensors_dtype(self.ty().dtype)
    }

    fn shape(&self) -> &[usize] {
        self.ty().shape.dims()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self {
            Tensor::Param { param, weights, seed } => {
                if let Some(weight) = weights.get(&param.name) {
                    return Cow::Borrowed(weight.bytes());
                }
                let numel = param.ty.shape.numel();
                // The front end made sure that what has no stored value has an `init`.
                let values = weights.first_values(param, *seed, 0..numel).unwrap_or_default();
                Cow::Owned(values.iter().flat_map(|x| x.to_le_bytes()).collect())
            }
            Tensor::Constant(value) => Cow::Owned(value.to_bytes()),
        }
    }

    fn data_len(&self) -> usize {
        self.ty().bytes()
    }
}

/// Reads the plan of a plan directory.
///
/// # Errors
/// If there is none, or it is not one that this program reads.
pub fn read(path: &Path) -> Result<Plan, Report> {
    let file = path.join("plan.json");
    let text = std::fs::read_to_string(&file).map_err(|e| {
        Diagnostic::error("E092", format!("cannot read {}: {e}", file.display()))
            .help("give a directory that `frit compile` wrote")
    })?;
    let refuse = |e: PlanError| {
        let help = "compile the model again with this version of frit";
        Diagnostic::error("E093", format!("{}: {e}", file.display())).help(help)
    };
    let plan = Plan::from_json(&text).map_err(refuse)?;
    frit_ir::plan::check(&plan).map_err(|e| {
        Diagnostic::error("E094", format!("{}: {e}", file.display()))
            .help("the file was changed after it was compiled; compile the model again")
    })?;
    Ok(plan)
}
