//! Front ends: from a model file to the forward graph and its weights.
//!
//! In: an ONNX file, an archive of PyTorch, or a JSON model. Out: an [`Imported`] graph with concrete shapes, the parameters with whether and why
//! they train, and their values, which are read on demand.

mod custom;
pub mod dims;
pub mod json;
pub mod limits;
pub(crate) mod mapped;
mod names;
pub mod onnx;
pub mod pt2;
pub mod symbols;

use crate::diagnostics::Report;
use crate::weights::Weights;
use frit_ir::{Code, Diagnostic, Graph, TensorType, nearest, pattern};
use frit_passes::adapter;
use limits::Limits;
use prost::Message;
use prost::bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The user's options of an import.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Values of symbolic dimensions, as given with `--bind`.
    pub binds: BTreeMap<String, usize>,
    /// Patterns of parameter names that may train (`params.trainable`).
    pub trainable: Vec<String>,
    /// Patterns of parameter names that never train but are sharded (`params.frozen`).
    pub frozen: Vec<String>,
    /// Patterns of parameter names that stay constants of the model (`params.ignored`).
    pub ignored: Vec<String>,
    /// Patterns of modules beside whose weight the matrices of an adapter come (`adapter.targets`).
    pub adapted: Vec<String>,
    /// Whether every BatchNormalization uses the statistics of its batch, whatever the model says
    /// (`model.batch_norm`).
    pub batch_norm_trains: bool,
    /// Ranks over which a BatchNormalization computes statistics.
    pub batch_norm_ranks: usize,
    /// Whether a table and its copy in a matmul train as one parameter (`model.tie_weights`).
    pub tie_weights: bool,
    /// Limits of the import (`import.*`).
    pub limits: Limits,
    /// Whether external data may lie anywhere, not only in the folder of the model.
    pub allow_external_data: bool,
}

impl Default for ImportOptions {
    fn default() -> Self {
        ImportOptions {
            binds: BTreeMap::new(),
            trainable: vec!["**".into()],
            frozen: Vec::new(),
            ignored: Vec::new(),
            adapted: Vec::new(),
            batch_norm_trains: false,
            batch_norm_ranks: 1,
            tie_weights: false,
            limits: Limits::default(),
            allow_external_data: false,
        }
    }
}

/// An initializer of the model that became a constant of the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Inlined {
    /// The model's name for it.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
    /// Why it does not train.
    pub reason: String,
}

/// The original of an initializer that is a copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tied {
    /// The parameter that trains.
    pub parameter: String,
    /// Whether the initializer is its transpose.
    pub transposed: bool,
}

/// An imported model.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The forward graph; outputs are [`frit_ir::OutputKind::Result`].
    pub graph: Graph,
    /// Values of the graph's parameters and buffers, by name. Parameters that are not in it start from
    /// their `init`.
    pub weights: Weights,
    /// Initializers that became constants.
    pub inlined: Vec<Inlined>,
    /// Initializers that are no parameters of their own, by name.
    pub ties: BTreeMap<String, Tied>,
    /// What the user should know.
    pub warnings: Vec<Diagnostic>,
}

/// Reads a model; `.json` files are JSON models, zip files are PyTorch's archives, all others ONNX.
///
/// # Errors
/// Everything that is wrong with the model, as far as it could be found at once.
pub fn load(path: &Path, options: &ImportOptions) -> Result<Imported, Report> {
    let bytes = mapped::map(path).map_err(|e| {
        Diagnostic::error(
            Code::ModelUnreadable,
            format!("cannot read the model {}: {e}", path.display()),
        )
        .help("give the path of an .onnx, .pt2 or .json file")
    })?;
    let stem = path.file_stem().map_or_else(|| "model".into(), |s| s.to_string_lossy());
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
        let mut imported = json::import(&bytes, &path.display().to_string(), options)?;
        unused_patterns(options, &mut imported);
        return names::check(&imported.graph).or(imported);
    }
    let imported = match pt2::is_archive(&bytes) {
        true => pt2::import(&bytes, &stem, path, options),
        false => onnx::import(bytes.clone(), &stem, path, options).map(|mut imported| {
            imported.weights.mapped(path.into(), bytes);
            imported
        }),
    };
    let imported = imported.and_then(|mut imported| {
        unused_patterns(options, &mut imported);
        names::check(&imported.graph).or(imported)
    });
    imported.map_err(|mut report| {
        for diagnostic in &mut report.diagnostics {
            diagnostic.notes.push(format!("in {}", path.display()));
        }
        report
    })
}

/// The ONNX model in a file: its bytes, or what the program of an archive is rewritten as.
///
/// # Errors
/// If the file is an archive that cannot be rewritten.
pub(crate) fn as_onnx(bytes: Bytes, path: &Path) -> Result<Bytes, Report> {
    if !pt2::is_archive(&bytes) {
        return Ok(bytes);
    }
    // The limits were checked when the model was read.
    let limits = Limits { bytes: u64::MAX, ..Limits::default() };
    let translated = pt2::translate(&bytes, path, limits)?;
    Ok(translated.model.encode_to_vec().into())
}

/// Warns of patterns that cover no tensor of the model.
fn unused_patterns(options: &ImportOptions, imported: &mut Imported) {
    let params = imported.graph.params().map(|(_, p)| p.name.as_str());
    let others = imported.inlined.iter().map(|i| i.name.as_str());
    let names: BTreeSet<&str> =
        params.chain(others).chain(imported.ties.keys().map(String::as_str)).collect();
    let is_adapted = |name: &&&str| pattern::any(&options.adapted, adapter::module(name));
    let of_adapters: Vec<String> =
        names.iter().filter(is_adapted).flat_map(|name| adapter::names(name)).collect();
    let lists = [
        ("trainable", &options.trainable),
        ("frozen", &options.frozen),
        ("ignored", &options.ignored),
    ];
    let mut warnings = Vec::new();
    for (key, given) in lists.iter().flat_map(|(key, list)| list.iter().map(move |p| (key, p))) {
        let matches = |name: &str| pattern::matches(given, name);
        let is_of_adapter = *key != "ignored"
            && adapter::is_of_matrices(given)
            && of_adapters.iter().any(|name| matches(name));
        if given == "**" || is_of_adapter || names.iter().any(|name| matches(name)) {
            continue;
        }
        let message = format!("`{given}` in params.{key} matches no parameter");
        let help = nearest::advice(given, names.iter().copied());
        warnings.push(Diagnostic::warning(Code::PatternCoversNothing, message).help(help));
    }
    imported.warnings.append(&mut warnings);
}

/// An error for every bound name that no dimension of the model uses.
pub(crate) fn unknown_binds<'a>(
    options: &ImportOptions,
    known: impl Iterator<Item = &'a str>,
    report: &mut Report,
) {
    let known: BTreeSet<&str> = known.collect();
    for name in options.binds.keys().filter(|n| !known.contains(n.as_str())) {
        let have = if known.is_empty() {
            "the model has no symbolic dimension".to_string()
        } else {
            let list: Vec<String> = known.iter().map(|k| format!("`{k}`")).collect();
            format!("the model's symbolic dimensions are {}", list.join(", "))
        };
        report.push(
            Diagnostic::error(
                Code::BindUnknown,
                format!("--bind names an unknown dimension `{name}`"),
            )
            .help(have),
        );
    }
}
