//! Writes plan directories atomically.
//!
//! `plan.json`, `kernels/kernels.so` or `kernels/kernels.ptx`, `weights.safetensors` (every parameter by the model's own name, f32,
//! and large constants), `source/` (see [`crate::source`]), and `eval/`, the evaluation plan: a plan directory whose
//! `weights.safetensors` has only what the other one does not.

use crate::compilation::Compiled;
use crate::diagnostics::Report;
use crate::weights::{Weight, Weights};
use frit_ir::plan::{Plan, PlanError};
use frit_ir::{Code, Diagnostic, TensorType};
use frit_runtime::files::{self, Sink};
use frit_runtime::{digest, safetensors_dtype, tensors};
use safetensors::{Dtype, View};
use serde_json::json;
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Whether the values of parameters are in the plan directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Stored {
    /// All that the model's files hold. First values that are made from the seed, as those of JSON models
    /// with `init` are, are made where the plan is loaded.
    #[default]
    Copy,
    /// None that the model's files hold: the plan reads them there, and they must stay as they are.
    Reference,
    /// None. The plan can still be run if every parameter's first value is made from the seed; otherwise it
    /// can only be inspected.
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
        return Err(Diagnostic::error(
            Code::NotAPlanDirectory,
            format!("{} exists and is no plan", path.display()),
        )
        .help("choose another directory with -o")
        .into());
    }
    let aside = files::beside(path);
    let result = fill(&aside, compiled, weights)
        .and_then(|()| files::replace_folder(&aside, path).map_err(|e| io(path, e)));
    if result.is_err() {
        // The error that matters is the first; the remains may not exist at all.
        let _ = files::remove_folder(&aside);
    }
    result
}

fn io(path: &Path, error: std::io::Error) -> Report {
    Diagnostic::error(Code::FileUnwritable, format!("cannot write {}: {error}", path.display()))
        .into()
}

fn fill(dir: &Path, compiled: &Compiled, weights: Stored) -> Result<(), Report> {
    let file = |name: &str| -> PathBuf { dir.join(name) };
    for sub in ["kernels", "source"] {
        let path = file(sub);
        files::create_folder(&path).map_err(|e| io(&path, e))?;
    }
    let put = |name: &str, bytes: &[u8]| {
        let path = file(name);
        files::write(&path, bytes).map_err(|e| io(&path, e))
    };
    put("source/train.toml", compiled.plan.config.as_bytes())?;
    put("source/origin.json", compiled.source.origin.as_bytes())?;
    put(&format!("source/{}", compiled.source.file), &compiled.source.model)?;
    if let Some(evaluation) = &compiled.evaluation {
        let path = file("eval/kernels");
        files::create_folder(&path).map_err(|e| io(&path, e))?;
        if let Some(object) = &evaluation.plan.object {
            put(&format!("eval/{}", object.file), &evaluation.object)?;
        }
    }
    if let Some(object) = &compiled.plan.object {
        put(&object.file, &compiled.object)?;
    }
    let evaluated = compiled.evaluation.iter().flat_map(|e| &e.plan.params);
    let all = compiled.plan.params.iter().chain(evaluated).map(|p| p.name.as_str());
    let made = |name: &&str| compiled.weights.get(name).is_none();
    let mut elsewhere: BTreeSet<&str> =
        all.filter(|n| weights == Stored::None || made(n)).collect();
    let mut referenced = Digests::new();
    if weights == Stored::Reference {
        let text;
        (text, referenced) = references(compiled);
        put("weights.json", text.as_bytes())?;
        let all = compiled.plan.params.iter().map(|p| p.name.as_str());
        elsewhere.extend(all.filter(|name| referenced.contains_key(*name)));
    }
    let Compiled { plan, constants, weights, .. } = compiled;
    let path = file("weights.safetensors");
    let mut digests = write_weights(&path, plan, constants, weights, &elsewhere)?;
    digests.extend(referenced);
    put("plan.json", with_digests(plan, &digests).to_json().as_bytes())?;
    let Some(evaluation) = &compiled.evaluation else { return Ok(()) };
    elsewhere.extend(plan.params.iter().map(|p| p.name.as_str()));
    let (path, plan) = (file("eval/weights.safetensors"), &evaluation.plan);
    // What lies beside the evaluation comes before what training has of the same name.
    digests.extend(write_weights(&path, plan, &evaluation.constants, weights, &elsewhere)?);
    put("eval/plan.json", with_digests(plan, &digests).to_json().as_bytes())
}

/// Digests of stored tensors by name.
type Digests = BTreeMap<String, String>;

/// The plan with the digests of what is stored with it.
fn with_digests(plan: &Plan, digests: &Digests) -> Plan {
    let mut plan = plan.clone();
    for param in &mut plan.params {
        param.digest = digests.get(&param.name).cloned();
    }
    for constant in &mut plan.constants {
        constant.digest = digests.get(&constant.name).cloned();
    }
    plan
}

/// `weights.json`: the files that hold weights, by absolute path and size, and where in them each tensor lies.
/// With the digests of these tensors.
fn references(compiled: &Compiled) -> (String, Digests) {
    let mut tensors = serde_json::Map::new();
    let mut digests = Digests::new();
    for spec in &compiled.plan.params {
        let Some(weight) = compiled.weights.get(&spec.name) else { continue };
        let Some((file, offset)) = compiled.weights.place(weight) else { continue };
        let place = json!({"file": file, "offset": offset, "bytes": weight.bytes().len()});
        tensors.insert(spec.name.clone(), place);
        digests.insert(spec.name.clone(), digest(weight.bytes()));
    }
    let file = |(path, bytes): (&Path, &[u8])| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        json!({"path": path, "bytes": bytes.len()})
    };
    let files: Vec<_> = compiled.weights.files().map(file).collect();
    (format!("{:#}\n", json!({"files": files, "tensors": tensors})), digests)
}

/// Writes the parameters and constants of a plan, but for the parameters in `without`. Returns their digests.
fn write_weights(
    path: &Path,
    plan: &Plan,
    constants: &[(String, frit_ir::Tensor)],
    weights: &Weights,
    without: &BTreeSet<&str>,
) -> Result<Digests, Report> {
    let digests = RefCell::new(Digests::new());
    let mut all: Vec<(String, Tensor<'_>)> = Vec::new();
    let tensor = |name: &String, value| {
        (name.clone(), Tensor { value, name: name.clone(), digests: &digests })
    };
    for spec in plan.params.iter().filter(|s| !without.contains(s.name.as_str())) {
        if let Some(weight) = weights.get(&spec.name) {
            all.push(tensor(&spec.name, Value::Param(&spec.ty, weight)));
        }
    }
    for (name, value) in constants {
        all.push(tensor(name, Value::Constant(value)));
    }
    let written = Sink::create(path).and_then(|sink| {
        let mut out = BufWriter::with_capacity(1 << 20, sink);
        tensors::put(&mut out, all, None)?;
        out.flush()
    });
    written.map_err(|e| io(path, e))?;
    Ok(digests.into_inner())
}

/// One tensor of the weights file; its bytes are made, and its digest noted, when they are written.
struct Tensor<'a> {
    value: Value<'a>,
    name: String,
    digests: &'a RefCell<Digests>,
}

enum Value<'a> {
    Param(&'a TensorType, &'a Weight),
    Constant(&'a frit_ir::Tensor),
}

impl Value<'_> {
    fn ty(&self) -> &TensorType {
        match self {
            Value::Param(ty, _) => ty,
            Value::Constant(value) => &value.ty,
        }
    }

    fn bytes(&self) -> Cow<'_, [u8]> {
        match self {
            Value::Param(_, weight) => Cow::Borrowed(weight.bytes()),
            Value::Constant(value) => Cow::Owned(value.to_bytes()),
        }
    }
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        safetensors_dtype(self.value.ty().dtype)
    }

    fn shape(&self) -> &[usize] {
        self.value.ty().shape.dims()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.value.bytes();
        self.digests.borrow_mut().insert(self.name.clone(), digest(&bytes));
        bytes
    }

    fn data_len(&self) -> usize {
        self.value.ty().bytes()
    }
}

/// Reads and checks the plan of a plan directory.
///
/// # Errors
/// If there is none, or it is not one that this program reads.
pub fn read(path: &Path) -> Result<Plan, Report> {
    let file = path.join("plan.json");
    let text = std::fs::read_to_string(&file).map_err(|e| {
        Diagnostic::error(Code::PlanUnreadable, format!("cannot read {}: {e}", file.display()))
            .help("give a directory that `frit compile` wrote")
    })?;
    let refuse = |e: PlanError| match e {
        PlanError::Malformed(_) | PlanError::Changed => {
            Diagnostic::error(Code::PlanChanged, format!("{}: {e}", file.display()))
                .help("the file was changed after it was compiled; compile the model again")
        }
        _ => Diagnostic::error(Code::PlanInvalid, format!("{}: {e}", file.display()))
            .help("compile the model again with this version of frit"),
    };
    Ok(Plan::from_json(&text).map_err(refuse)?)
}
