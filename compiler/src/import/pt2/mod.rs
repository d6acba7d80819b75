//! Importer for PyTorch's archives, `model.pt2` of `torch.export.save`: a zip with a graph of ATen operators in JSON, a signature
//! that says what its placeholders are, and the tensors.
//!
//! Every call is rewritten as ONNX nodes ([`ops`]), as a faithful exporter would write them, and the importer beside this one reads
//! these: so `detach`, running statistics, tied parameters and frozen ones keep what they mean, plans contain an ONNX model, and
//! `frit export` writes one. Source: torch/_export/serde/schema.py, torch/export/pt2_archive.

mod archive;
mod call;
mod dtype;
mod mutation;
mod ops;
mod outputs;
mod schema;
mod scopes;
mod sizes;
mod symbols;
mod tensors;
mod translate;

use super::limits::Limits;
use super::onnx::messages::{
    DimensionProto, GraphProto, ModelProto, OperatorSetIdProto, StringStringEntryProto,
    TensorTypeProto, TypeProto, ValueInfoProto,
};
use super::onnx::{self, Beside};
use super::{ImportOptions, Imported, Tied};
use crate::diagnostics::Report;
use archive::{Archive, unreadable};
use frit_ir::{Code, Diagnostic};
use prost::bytes::Bytes;
use schema::{Argument, InputSpec, OutputSpec, Program};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use tensors::{Place, Tensors};
use translate::{Tensor, Translator, Value, Values, declared, identity, tensor, value_name};

/// The ONNX operators that calls are rewritten as.
const OPSET: i64 = 23;
/// The first of them with running products.
const OPSET_OF_PRODUCTS: i64 = 26;
/// The key of the graph's metadata under which PyTorch's exporter states the signature.
const SIGNATURE: &str = "pkg.torch.export.ExportedProgram.graph_signature";

/// A program as an ONNX model.
pub(crate) struct Translated {
    /// The model; its tensors lie in the archive.
    pub(crate) model: ModelProto,
    /// The types that the archive states, by value.
    declared: HashMap<String, TensorTypeProto>,
    /// Second names of parameters.
    ties: BTreeMap<String, Tied>,
    warning: Option<Diagnostic>,
}

/// Whether a file is a zip.
pub(crate) fn is_archive(bytes: &[u8]) -> bool {
    bytes.starts_with(b"PK\x03\x04")
}

/// Names of the ATen operators that can be read, sorted.
pub fn operators() -> Vec<&'static str> {
    ops::names()
}

/// Reads an archive; `name` is that of the model.
///
/// # Errors
/// Everything that is wrong with it, as far as it could be found at once.
pub(super) fn import(
    bytes: &Bytes,
    name: &str,
    path: &Path,
    options: &ImportOptions,
) -> Result<Imported, Report> {
    let Translated { model, declared, ties, warning } = translate(bytes, path, options.limits)?;
    let beside = Beside { file: file_name(path), bytes: bytes.clone(), declared };
    let mut imported = onnx::import_model(model, name, path, Some(beside), options)?;
    imported.ties.extend(ties);
    imported.warnings.extend(warning);
    Ok(imported)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Rewrites the program of an archive as an ONNX model, whose tensors are those of the file at `path`.
///
/// # Errors
/// Everything that cannot be rewritten, as far as it could be found at once.
pub(crate) fn translate(bytes: &Bytes, path: &Path, limits: Limits) -> Result<Translated, Report> {
    let archive = Archive::open(bytes.clone())?;
    version(&archive)?;
    let program = archive.program()?;
    let file = file_name(path);
    let tensors = Tensors::new(&archive, &file, limits.bytes)?;
    let mut reader = Reader {
        program: &program,
        tensors,
        translator: Translator::default(),
        values: Values::new(),
        // ONNX requires a name.
        graph: GraphProto { name: "main_graph".into(), ..GraphProto::default() },
        ties: BTreeMap::new(),
        outputs: Vec::new(),
        signature: String::new(),
    };
    reader.placeholders()?;
    reader.reserve();
    reader.body()?;
    reader.results()?;
    let Reader { translator, mut graph, ties, signature, .. } = reader;
    let warning = translator.warning();
    graph.node = translator.nodes;
    graph.metadata_props = vec![StringStringEntryProto { key: SIGNATURE.into(), value: signature }];
    let model = ModelProto {
        ir_version: 10,
        producer_name: "pytorch".into(),
        producer_version: program.torch_version.clone(),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: opset(&graph) }],
        graph: Some(graph),
        ..ModelProto::default()
    };
    Ok(Translated { model, declared: translator.declared, ties, warning })
}

/// The operator set of a graph, whose newest operator decides.
fn opset(graph: &GraphProto) -> i64 {
    let is_newer = graph.node.iter().any(|node| node.op_type == "CumProd");
    if is_newer { OPSET_OF_PRODUCTS } else { OPSET }
}

/// Refuses a schema of another version, before its fields are looked at.
fn version(archive: &Archive) -> Result<(), Diagnostic> {
    #[derive(Deserialize)]
    struct Versioned {
        schema_version: schema::Version,
    }
    let Versioned { schema_version: found } = archive.model_json()?;
    if found.major == schema::MAJOR {
        return Ok(());
    }
    let (major, minor) = (found.major, found.minor);
    Err(unreadable(format!(
        "its schema is version {major}.{minor}, and Frit reads {}",
        schema::MAJOR
    )))
}

/// A program on its way.
struct Reader<'a> {
    program: &'a Program,
    tensors: Tensors<'a>,
    translator: Translator,
    values: Values,
    graph: GraphProto,
    ties: BTreeMap<String, Tied>,
    /// Names of results, where the module has one for them.
    outputs: Vec<Option<String>>,
    /// As PyTorch's exporter writes it.
    signature: String,
}

impl<'a> Reader<'a> {
    /// Binds what the signature says that the placeholders are.
    fn placeholders(&mut self) -> Result<(), Report> {
        let module = &self.program.graph_module;
        let specs = &module.signature.input_specs;
        // By where they lie: parameters are tied if that is the same place.
        let mut places: HashMap<Place, &'a str> = HashMap::new();
        for spec in specs {
            let (placeholder, name, kind, suffix) = match spec {
                InputSpec::Parameter { arg, parameter_name } => {
                    (&arg.name, parameter_name, "PARAMETER", "")
                }
                InputSpec::Buffer { arg, buffer_name, persistent } => {
                    let suffix = if *persistent { " persistent=True" } else { " persistent=False" };
                    (&arg.name, buffer_name, "BUFFER", suffix)
                }
                InputSpec::TensorConstant { arg, tensor_constant_name } => {
                    (&arg.name, tensor_constant_name, "CONSTANT_TENSOR", "")
                }
                _ => continue,
            };
            let stored = self.tensors.read(name)?;
            let mut own = name.as_str();
            if kind == "PARAMETER" {
                own = places.entry(stored.place).or_insert(name);
            }
            if own == name {
                if !self.translator.names.insert(name.clone()) {
                    return Err(unreadable(format!("the tensor `{name}` is listed twice")).into());
                }
                let trains = match (kind, stored.requires_grad) {
                    ("PARAMETER", true) => " requires_grad=True",
                    ("PARAMETER", false) => " requires_grad=False",
                    _ => "",
                };
                self.signature +=
                    &format!("{placeholder}: {kind} target='{name}'{suffix}{trains}\n");
                self.graph.initializer.push(stored.proto);
            } else {
                let tied = Tied { parameter: own.into(), transposed: false };
                self.ties.insert(name.clone(), tied);
            }
            let value = self.described(placeholder, own.into())?;
            self.values.insert(placeholder.clone(), Value::Tensor(value));
        }
        if let Some((a, b)) = tensors::overlapping(&places) {
            let message =
                format!("the parameters `{a}` and `{b}` share memory, but are not the same tensor");
            return Err(Diagnostic::error(Code::AttributeUnsupported, message)
                .help("train one of them, and compute the other from it in `forward`")
                .into());
        }
        let first = self.batch();
        for spec in specs {
            let InputSpec::UserInput { arg } = spec else { continue };
            match arg {
                Argument::AsTensor(t) => self.input(&t.name, first.as_deref())?,
                Argument::AsSymInt(_) => {
                    let message = "an input of the program is a number, not a tensor";
                    return Err(Diagnostic::error(Code::AttributeUnsupported, message)
                        .help("export the module with that number fixed")
                        .into());
                }
                // A constant of the program, which the graph has written in.
                _ => {}
            }
        }
        Ok(())
    }

    /// What the graph states of a name.
    fn described(&self, name: &str, as_name: String) -> Result<Tensor, Diagnostic> {
        let meta = self.program.graph_module.graph.tensor_values.get(name);
        let meta = meta.ok_or_else(|| unreadable(format!("nothing is known of `{name}`")))?;
        tensor(meta, as_name)
            .map_err(|fault| unreadable(format!("the placeholder `{name}`: {fault:?}")))
    }

    /// The symbol that is the first size of inputs, if it is one: the batch.
    fn batch(&self) -> Option<String> {
        let module = &self.program.graph_module;
        let mut found: Option<String> = None;
        for spec in &module.signature.input_specs {
            let InputSpec::UserInput { arg: Argument::AsTensor(t) } = spec else { continue };
            let sizes = &module.graph.tensor_values.get(&t.name)?.sizes;
            let Some(schema::Size::AsExpr(first)) = sizes.first() else { continue };
            let symbol = sizes::infix(&first.expr_str)?;
            let other = found.as_ref().is_some_and(|f| *f != symbol);
            if other || !symbol.chars().all(char::is_alphanumeric) {
                return None;
            }
            found = Some(symbol);
        }
        found
    }

    fn input(&mut self, name: &str, batch: Option<&str>) -> Result<(), Diagnostic> {
        let module = &self.program.graph_module;
        let mut own = name.to_string();
        while !self.translator.names.insert(own.clone()) {
            own += "_input";
        }
        let value = self.described(name, own.clone())?;
        let meta = &module.graph.tensor_values[name];
        let mut ty = declared(meta, value.dtype);
        for dim in ty.shape.iter_mut().flat_map(|s| &mut s.dim) {
            rename_batch(dim, batch);
        }
        self.values.insert(name.into(), Value::Tensor(value));
        let r#type = Some(TypeProto { tensor_type: Some(ty) });
        self.graph.input.push(ValueInfoProto { name: own, r#type });
        Ok(())
    }

    /// Rewrites the calls.
    fn body(&mut self) -> Result<(), Report> {
        let module = &self.program.graph_module;
        self.state()?;
        self.translator.graph(&module.graph, &mut self.values);
        let mut report = Report::default();
        report.diagnostics.extend(self.translator.unsupported());
        report.diagnostics.append(&mut self.translator.errors);
        report.or(())?;
        let batch = self.batch();
        let types = self.translator.declared.values_mut();
        for dim in types.flat_map(|ty| &mut ty.shape).flat_map(|s| &mut s.dim) {
            rename_batch(dim, batch.as_deref());
        }
        Ok(())
    }

    /// Refuses state that forward writes and that its results depend on, other than running statistics.
    fn state(&self) -> Result<(), Diagnostic> {
        let module = &self.program.graph_module;
        let mut buffers: HashMap<&str, &str> = HashMap::new();
        for spec in &module.signature.input_specs {
            if let InputSpec::Buffer { arg, buffer_name, .. } = spec {
                buffers.insert(&arg.name, buffer_name);
            }
        }
        let specs = &module.signature.output_specs;
        let written: HashSet<&str> = specs
            .iter()
            .filter_map(|s| {
                if let OutputSpec::BufferMutation { buffer_name } = s {
                    Some(buffer_name.as_str())
                } else {
                    None
                }
            })
            .collect();
        let mutated =
            buffers.iter().filter(|(_, b)| written.contains(*b)).map(|(p, _)| *p).collect();
        let outputs = specs.iter().filter_map(user_output).filter_map(value_name).collect();
        let found = mutation::state_that_matters(&module.graph, &buffers, &mutated, &outputs);
        let Some(buffer) = found else { return Ok(()) };
        let message =
            format!("`forward` writes the buffer `{buffer}`, and the outputs depend on it");
        Err(Diagnostic::error(Code::AttributeUnsupported, message)
            .note("of what forward writes, only running statistics of batch normalization are kept")
            .help("make it an input and an output of the module, or use the optimizer's moving average (`optimizer.ema`)"))
    }

    /// The names that results have in the module, which no other value may take.
    fn reserve(&mut self) {
        let module = &self.program.graph_module;
        let spec = module.module_call_graph.iter().find(|c| c.fqn.is_empty());
        let spec = spec.and_then(|c| c.signature.as_ref()).map_or("", |s| &s.out_spec);
        let n = module.signature.output_specs.iter().filter_map(user_output).count();
        let names = outputs::names(spec, n).into_iter();
        let taken = &mut self.translator.names;
        self.outputs = names.map(|name| name.filter(|n| taken.insert(n.clone()))).collect();
    }

    /// Names the results.
    fn results(&mut self) -> Result<(), Report> {
        let module = &self.program.graph_module;
        let given = module.signature.output_specs.iter().filter_map(user_output);
        let batch = self.batch();
        let mut taken: HashSet<String> = HashSet::new();
        for (i, argument) in given.enumerate() {
            let Some(own) = value_name(argument) else { continue };
            let tensor = match self.values.get(own) {
                Some(Value::Tensor(tensor)) => tensor.clone(),
                Some(_) => continue,
                None => {
                    let message = format!("the output \"{own}\" is never defined");
                    let help = "the file is damaged or was edited; save the program again";
                    return Err(Diagnostic::error(Code::ValueUndefined, message).help(help).into());
                }
            };
            let wanted = match self.outputs.get(i).cloned().flatten() {
                Some(name) => name,
                None => self.own_name(own, &tensor.name, &taken),
            };
            if wanted != tensor.name {
                self.translator.nodes.push(identity(&tensor.name, &wanted));
            }
            taken.insert(wanted.clone());
            let mut ty = module.graph.tensor_values.get(own).map(|m| declared(m, tensor.dtype));
            for dim in ty.iter_mut().flat_map(|t| &mut t.shape).flat_map(|s| &mut s.dim) {
                rename_batch(dim, batch.as_deref());
            }
            let r#type = Some(TypeProto { tensor_type: ty });
            self.graph.output.push(ValueInfoProto { name: wanted, r#type });
        }
        if self.graph.output.is_empty() {
            return Err(unreadable("the program returns no tensor").into());
        }
        Ok(())
    }
}

impl Reader<'_> {
    /// The name of a result that has none in the module: that of its value, if this is its alone.
    fn own_name(&mut self, own: &str, value: &str, taken: &HashSet<String>) -> String {
        let made = self.translator.declared.contains_key(value);
        if made && own == value && !taken.contains(value) {
            return own.into();
        }
        let mut wanted = own.to_string();
        while !self.translator.names.insert(wanted.clone()) {
            wanted += "_output";
        }
        wanted
    }
}

fn user_output(spec: &OutputSpec) -> Option<&Argument> {
    match spec {
        OutputSpec::UserOutput { arg } => Some(arg),
        _ => None,
    }
}

/// Calls the symbol of the batch `batch`.
fn rename_batch(dim: &mut DimensionProto, batch: Option<&str>) {
    if let (Some(text), Some(batch)) = (&mut dim.dim_param, batch) {
        let words = text.split_inclusive(|c: char| !c.is_alphanumeric());
        let renamed = words.map(|word| {
            let name = word.trim_end_matches(|c: char| !c.is_alphanumeric());
            if name == batch { word.replacen(name, "batch", 1) } else { word.to_string() }
        });
        *text = renamed.collect();
    }
}

#[cfg(test)]
mod tests;
