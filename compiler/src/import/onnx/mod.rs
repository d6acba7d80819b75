//! Importer for ONNX models: opsets 1 to 27 of the default domain, with concrete shapes.
//!
//! Symbolic dimensions are bound first. Then nodes are converted in topological order; those whose operands are all constants
//! are evaluated at once, so no shape arithmetic remains. All unsupported operators are reported together. Source: onnx.proto,
//! the operator specifications of ONNX 1.16.

mod calls;
mod context;
mod draws;
mod exporter;
mod fixed;
mod folded;
mod frozen;
mod function;
mod initializers;
mod legacy;
mod masks;
mod merged;
pub mod messages;
mod ops;
mod opset;
mod order;
mod recurrent;
mod restore;
mod scope;
mod selected;
mod selection;
mod shared;
mod subgraph;
mod table;
mod tensor;
mod tied;
mod trainable;
mod unreached;
mod unread;

pub use opset::SUPPORTED as SUPPORTED_OPSETS;
pub(crate) use recurrent::Packed;
pub(crate) use restore::{Replacement, Restored};
pub(crate) use subgraph::operands;

use super::dims::{self, DimError, checked_numel};
use super::limits::{Budget, Exceeded, Resource};
use super::mapped::Folder;
use super::{ImportOptions, Imported, Inlined, Tied, unknown_binds};
use crate::diagnostics::Report;
use crate::weights::Weights;
use context::{Bound, Fault, NodeContext};
use frit_ir::ops::Input;
use frit_ir::{Code, Diagnostic, Graph, Op, Origin, OutputKind, Region, TensorType, ValueId};
use messages::{GraphProto, ModelProto, NodeProto, TensorProto, TensorTypeProto, ValueInfoProto};
use prost::Message;
use prost::bytes::Bytes;
use selected::Selections;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use tensor::ExternalFiles;

/// Errors of single nodes that are reported at most.
const MAX_ERRORS: usize = 20;

/// Names of the ONNX operators that can be read, sorted.
pub fn operators() -> Vec<&'static str> {
    let mut names = ops::names();
    names.extend(subgraph::OPERATORS);
    names.sort_unstable();
    names
}

/// Reads a model; its external tensors lie beside `path`, and `name` is used if the graph has none.
///
/// # Errors
/// Everything that is wrong with the model, as far as it could be found at once.
pub fn import(
    bytes: Bytes,
    name: &str,
    path: &Path,
    options: &ImportOptions,
) -> Result<Imported, Report> {
    let model = ModelProto::decode(bytes).map_err(|e| {
        Diagnostic::error(
            Code::NotAnOnnxModel,
            format!("the file is not a complete ONNX model: {e}"),
        )
        .help("it may be truncated, or of another format; export the model again")
    })?;
    import_model(model, name, path, None, options)
}

/// The file whose program was rewritten as an ONNX model.
pub(crate) struct Beside {
    /// Its name, where external data lie in it.
    pub(crate) file: String,
    /// Its contents.
    pub(crate) bytes: Bytes,
    /// What it states of values, which must be what is inferred of them.
    pub(crate) declared: HashMap<String, TensorTypeProto>,
}

/// Reads a model that is decoded already, or was rewritten from the file `beside`.
///
/// # Errors
/// As [`import`].
pub(crate) fn import_model(
    mut model: ModelProto,
    name: &str,
    path: &Path,
    beside: Option<Beside>,
    options: &ImportOptions,
) -> Result<Imported, Report> {
    let Some(mut graph) = model.graph.take() else {
        return Err(Diagnostic::error(Code::NotAnOnnxModel, "the file holds no ONNX graph")
            .help("it may be truncated, or of another format; export the model again")
            .into());
    };
    let opset = opset::of(&model)?;
    if graph.output.is_empty() {
        return Err(Diagnostic::error(Code::NotAnOnnxModel, "the ONNX graph has no output").into());
    }
    if !graph.sparse_initializer.is_empty() {
        return Err(Diagnostic::error(
            Code::AttributeUnsupported,
            "sparse initializers are not supported",
        )
        .into());
    }
    let mut budget = Budget::new(options.limits);
    merged::separate(&model, &mut graph, &mut budget)?;
    graph = function::inline(&model, &graph, &mut budget)?.unwrap_or(graph);
    graph = draws::as_masks(&graph).unwrap_or(graph);
    selection::by_mask(&mut graph);
    let left_out = unread::leave_out(&mut graph);
    let restored = Restored::of(&mut graph, &mut budget)?;
    let folder = Folder::of(path, options.allow_external_data);
    let mut importer = Importer::new(&graph, name, folder, opset, options, budget)?;
    importer.from_pytorch = from_pytorch(&model);
    importer.restored = restored;
    let fixed = if importer.from_pytorch { None } else { fixed::warning(&graph) };
    importer.warnings.extend(left_out.into_iter().chain(fixed));
    if let Some(Beside { file, bytes, declared }) = beside {
        importer.files.insert(file, bytes);
        importer.declared = Some(declared);
    }
    importer.run()
}

/// Parameters of a model file that its exporter stored as copies of another, each with that other's name.
pub(crate) fn merged(bytes: Bytes) -> Vec<(String, String)> {
    let model = ModelProto::decode(bytes).unwrap_or_default();
    let graph = model.graph.as_ref();
    graph.map_or_else(Vec::new, |graph| merged::pairs(&model, graph))
}

/// The data of a tensor that lie in a file beside the model; `None` if they are in the tensor itself.
pub(crate) fn external_data(tensor: &[u8], folder: &Folder) -> Option<Result<Bytes, String>> {
    let tensor = TensorProto::decode(tensor).ok().filter(|t| t.data_location == 1)?;
    Some(tensor::external(&tensor, folder.clone()).map_err(|e| e.to_string()))
}

/// The elements of a tensor that lie within the model.
pub(crate) fn elements(tensor: &TensorProto) -> Result<Bytes, String> {
    let mut nowhere = tensor::ExternalFiles::new(Folder::default());
    tensor::read(tensor, &mut nowhere).map(|stored| stored.bytes).map_err(|e| e.to_string())
}

/// Whether one of PyTorch's exporters wrote the model.
fn from_pytorch(model: &ModelProto) -> bool {
    model.producer_name == "pytorch"
}

struct Importer<'a> {
    source: &'a GraphProto,
    options: &'a ImportOptions,
    opset: i64,
    /// Whether one of PyTorch's exporters wrote the model.
    from_pytorch: bool,
    /// What the program that the model was rewritten from states of its values.
    declared: Option<HashMap<String, TensorTypeProto>>,
    graph: Graph,
    budget: Budget,
    /// The budget is used up: nothing else is read.
    exhausted: bool,
    /// Graphs inside one another around the node that is read.
    depth: u64,
    calls: function::Calls,
    selections: Selections,
    files: ExternalFiles,
    weights: Weights,
    inlined: Vec<Inlined>,
    warnings: Vec<Diagnostic>,
    values: HashMap<&'a str, Bound>,
    nodes: Vec<(usize, &'a NodeProto)>,
    /// Operands that stand for a parameter of another name.
    restored: Restored,
    /// Parameters that no initializer has the name of.
    restored_values: HashMap<String, ValueId>,
    /// Padding rows of tables, by initializer.
    padding_rows: HashMap<&'a str, usize>,
    /// Initializers that are copies of a table.
    ties: BTreeMap<String, Tied>,
    /// Graph inputs that are fed from data.
    inputs: Vec<&'a ValueInfoProto>,
    report: Report,
}

impl<'a> Importer<'a> {
    fn new(
        source: &'a GraphProto,
        name: &str,
        folder: Folder,
        opset: i64,
        options: &'a ImportOptions,
        budget: Budget,
    ) -> Result<Self, Report> {
        let stored: HashSet<&str> = source.initializer.iter().map(|t| t.name.as_str()).collect();
        // Older files list initializers among the inputs.
        let inputs: Vec<_> =
            source.input.iter().filter(|i| !stored.contains(i.name.as_str())).collect();
        let given = stored.iter().copied().chain(inputs.iter().map(|i| i.name.as_str())).collect();
        let renews = |node: &NodeProto| {
            node.op_type == "BatchNormalization"
                && (options.batch_norm_trains || trainable::batch_norm_trains(node))
        };
        let nodes = order::sort(source, &given, renews)?;
        // Exporters call every graph the same; the file's name says more.
        let generic = matches!(source.name.as_str(), "" | "main_graph" | "torch_jit" | "main");
        Ok(Importer {
            source,
            options,
            opset,
            from_pytorch: false,
            declared: None,
            graph: Graph::new(if generic { name } else { &source.name }),
            budget,
            exhausted: false,
            depth: 0,
            calls: function::Calls::default(),
            selections: Selections::default(),
            files: ExternalFiles::new(folder),
            weights: Weights::default(),
            inlined: Vec::new(),
            warnings: Vec::new(),
            values: HashMap::new(),
            restored: Restored::default(),
            restored_values: HashMap::new(),
            padding_rows: HashMap::new(),
            ties: BTreeMap::new(),
            nodes,
            inputs,
            report: Report::default(),
        })
    }

    fn run(mut self) -> Result<Imported, Report> {
        self.unsupported();
        self.batch_norms();
        self.folded_batch_norms();
        self.removed_detaches();
        self.bind_inputs();
        self.initializers();
        if self.report.is_empty() {
            self.convert_nodes();
        }
        if self.report.is_empty() {
            self.outputs();
        }
        self.report.or(())?;
        draws::as_read(&mut self.graph);
        self.graph.remove_dead();
        let live: HashSet<&str> = self.graph.params().map(|(_, p)| p.name.as_str()).collect();
        self.weights.retain(|name| live.contains(name));
        for (path, bytes) in self.files.into_open() {
            self.weights.mapped(path, bytes);
        }
        let (weights, inlined, warnings) = (self.weights, self.inlined, self.warnings);
        Ok(Imported { graph: self.graph, weights, inlined, ties: self.ties, warnings })
    }

    /// Reports every operator and attribute that cannot be read, grouped.
    fn unsupported(&mut self) {
        let mut operators: BTreeMap<String, (usize, String)> = BTreeMap::new();
        let mut attributes: BTreeMap<String, (usize, String)> = BTreeMap::new();
        for (index, node) in &self.nodes {
            let place = order::label(Some(*index), node);
            if subgraph::holds_graphs(node) {
                continue;
            }
            let Some(operator) = ops::find(&node.domain, &node.op_type) else {
                let domain =
                    if node.domain.is_empty() { "".into() } else { format!("{}::", node.domain) };
                let entry = operators.entry(format!("{domain}{}", node.op_type));
                entry.or_insert((0, place)).0 += 1;
                continue;
            };
            for attribute in &node.attribute {
                let name = attribute.name.as_str();
                let known = operator.attributes.contains(&name)
                    || legacy::has_attribute(&node.op_type, name, self.opset);
                if !known || !attribute.ref_attr_name.is_empty() {
                    let key = format!("{}.{}", node.op_type, attribute.name);
                    attributes.entry(key).or_insert((0, place.clone())).0 += 1;
                }
            }
        }
        let opset = self.opset;
        let optimized = operators.keys().any(|name| name.starts_with("com.microsoft::"));
        for (code, what, found, help) in [
            (
                Code::OperatorUnsupported,
                "operator",
                operators,
                match optimized {
                    true => {
                        "`com.microsoft` operators are usually written by onnxruntime's optimizer: take the model from before it; \
                             `frit compile --list-ops` lists the supported operators"
                    }
                    false => "`frit compile --list-ops` lists the supported ones",
                },
            ),
            (Code::AttributeUnsupported, "attribute", attributes, "export the model without them"),
        ] {
            let nodes: usize = found.values().map(|(n, _)| n).sum();
            if nodes == 0 {
                continue;
            }
            let (n, plural) = (found.len(), if found.len() == 1 { " is" } else { "s are" });
            let s = if nodes == 1 { "" } else { "s" };
            let message =
                format!("{n} {what}{plural} not supported ({nodes} node{s}, opset {opset})");
            let mut diagnostic = Diagnostic::error(code, message).help(help);
            for (name, (count, first)) in found {
                diagnostic = diagnostic.note(format!("{name}  {count}   first: {first}"));
            }
            self.report.push(diagnostic);
        }
    }

    fn bind_inputs(&mut self) {
        let mut used = BTreeSet::new();
        let mut symbols: BTreeSet<String> = BTreeSet::new();
        let named_otherwise = self.inputs.iter().any(|info| {
            let ty = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
            let mut others =
                ty.and_then(|t| t.shape.as_ref()).into_iter().flat_map(|s| &s.dim).skip(1);
            others.any(|dim| dim.dim_param.as_deref() == Some(UNNAMED_BATCH))
        });
        for info in self.inputs.clone() {
            let ty = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
            let Some((ty, shape)) = ty.and_then(|t| Some((t, t.shape.as_ref()?))) else {
                self.report.push(Diagnostic::error(
                    Code::DimensionUnknown,
                    format!("the input \"{}\" has no tensor type with a shape", info.name),
                ));
                continue;
            };
            let mut dims = Vec::new();
            for (axis, dim) in shape.dim.iter().enumerate() {
                let size = match (dim.dim_value, dim.dim_param.as_deref()) {
                    (Some(n), _) if n >= 0 => Ok(n as usize),
                    (_, Some(text)) if !text.is_empty() => {
                        symbols.insert(text.trim().to_string());
                        dims::evaluate(text, &self.options.binds, &mut used)
                    }
                    // The batch, where the exporter gave it no name.
                    _ if axis == 0 && !named_otherwise && self.declared.is_none() => {
                        symbols.insert(UNNAMED_BATCH.into());
                        dims::evaluate(UNNAMED_BATCH, &self.options.binds, &mut used)
                    }
                    _ => Err(DimError::Syntax("?".into())),
                };
                match size {
                    Ok(n) => dims.push(n),
                    Err(error) => self.report.push(unbound(&info.name, axis, &error)),
                }
            }
            if dims.len() != shape.dim.len() {
                continue;
            }
            let dtype = tensor::computed(ty.elem_type.into());
            let (Ok(dtype), Some(_)) = (dtype, checked_numel(&dims)) else {
                let message = format!(
                    "the input \"{}\" has element type number {} and shape {dims:?}, which is not \
                     supported",
                    info.name, ty.elem_type
                );
                self.report.push(Diagnostic::error(Code::DimensionUnknown, message));
                continue;
            };
            let input = Input { name: info.name.clone(), ty: TensorType::new(dtype, dims) };
            self.leaf(Op::Input(input), &info.name);
        }
        // Names inside expressions count as known too.
        let mut known: BTreeSet<&str> = symbols.iter().chain(&used).map(String::as_str).collect();
        // Without symbolic dimensions the shapes hold the batch: to give the same once more is no mistake.
        if known.is_empty()
            && self.options.binds.get("batch").is_some_and(|n| self.all_begin_with(*n))
        {
            known.insert("batch");
        }
        unknown_binds(self.options, known.into_iter(), &mut self.report);
    }

    /// Whether `n` is the first size of every input.
    fn all_begin_with(&self, n: usize) -> bool {
        !self.inputs.is_empty() && self.inputs.iter().all(|input| {
            let value = self.values.get(input.name.as_str());
            matches!(value, Some(Bound::Value(v)) if self.graph.ty(*v).shape.dims().first() == Some(&n))
        })
    }

    fn leaf(&mut self, op: Op, name: &'a str) -> Option<ValueId> {
        match self.graph.add1(op, &[], Origin::none(), Region::Forward) {
            Ok(value) => {
                self.graph.set_name(value, name);
                self.values.insert(name, Bound::Value(value));
                Some(value)
            }
            Err(error) => {
                self.report.push(Diagnostic::error(Code::OperandMismatch, error.to_string()));
                None
            }
        }
    }

    /// Says which batch normalizations keep their running statistics, and that there are none to train.
    fn batch_norms(&mut self) {
        let all = self.nodes.iter().map(|(_, n)| *n).filter(|n| n.op_type == "BatchNormalization");
        let how = match self.declared {
            Some(_) => {
                "export the module in training mode, `torch.export.export(net.train(), ...)`"
            }
            None => {
                "a dynamo export drops their training mode; export with \
                 `torch.onnx.export(..., dynamo=False, training=TrainingMode.TRAINING)`"
            }
        };
        if self.options.batch_norm_trains {
            if all.count() == 0 {
                let message = "model.batch_norm is set, but the model has no BatchNormalization";
                let note = "the exporter may have folded them into convolutions";
                self.report
                    .push(Diagnostic::error(Code::NoBatchNorm, message).note(note).help(how));
            }
            return;
        }
        let fixed: Vec<&NodeProto> = all.filter(|n| !trainable::batch_norm_trains(n)).collect();
        if let Some(first) = fixed.first() {
            let n = fixed.len();
            let message = format!("{n} BatchNormalization node(s) keep their running statistics");
            let help = format!("set model.batch_norm = \"train\" to use those of the batch; {how}");
            let origin = Origin::new(&first.name, &scope::of(first));
            self.warnings
                .push(Diagnostic::warning(Code::BatchNormFixed, message).at(&origin).help(help));
        }
    }

    fn convert_nodes(&mut self) {
        for (index, node) in std::mem::take(&mut self.nodes) {
            self.convert_node(Some(index), node);
            if self.is_over() {
                return;
            }
        }
    }

    /// Whether enough is known to be wrong.
    fn is_over(&self) -> bool {
        self.exhausted || self.report.diagnostics.len() >= MAX_ERRORS
    }

    /// Adds one node to the graph; `index` is its place in the file, none for a node of a graph inside another.
    fn convert_node(&mut self, index: Option<usize>, node: &'a NodeProto) {
        if let Err(exceeded) = self.count(node) {
            let origin = Origin::new(&node.name, "");
            self.report.push(exceeded.diagnostic(&node.op_type, &origin));
            self.exhausted = true;
            return;
        }
        let origin = Origin::new(&node.name, &scope::of(node));
        let operand = |name: &String| match name.as_str() {
            "" => None,
            name => Some(self.values.get(name).cloned().unwrap_or(Bound::Failed)),
        };
        let mut inputs: Vec<Option<Bound>> = node.input.iter().map(operand).collect();
        for (i, input) in inputs.iter_mut().enumerate() {
            if let Some(restored) = index.and_then(|at| self.restored_operand(at, i, &origin)) {
                *input = Some(restored);
            }
        }
        inputs.extend(index.and_then(|at| self.restored_bias(at)).map(Some));
        let of_selected = |bound: &Option<Bound>| match bound {
            Some(Bound::Value(value)) => self.selections.has(*value),
            Some(Bound::Sequence(values)) => values.iter().any(|v| self.selections.has(*v)),
            _ => false,
        };
        let (outcome, given) =
            if inputs.iter().any(of_selected) && !Selections::may_convert(&node.op_type) {
                (Err(Fault::Dynamic("a size of an operand".into())), inputs)
            } else if subgraph::holds_graphs(node) {
                (self.control(node, &origin, &inputs), inputs)
            } else if let Some(operator) = ops::find(&node.domain, &node.op_type) {
                let mut cx = NodeContext {
                    graph: &mut self.graph,
                    budget: &mut self.budget,
                    files: &mut self.files,
                    node,
                    origin: origin.clone(),
                    inputs,
                    opset: self.opset,
                    calls: &mut self.calls,
                    selections: &mut self.selections,
                    batch_norm_trains: self.options.batch_norm_trains,
                    batch_norm_ranks: self.options.batch_norm_ranks,
                    from_pytorch: self.from_pytorch,
                    padding_rows: &self.padding_rows,
                    weights: &self.weights,
                };
                let outcome = legacy::modernize(&mut cx).and_then(|()| (operator.convert)(&mut cx));
                (outcome, cx.inputs)
            } else {
                (Err(Fault::Attribute("this operator".into())), inputs)
            };
        let results = outcome.unwrap_or_else(|fault| {
            self.fault(index, node, &origin, &given, fault);
            Vec::new()
        });
        let mut results = results.into_iter();
        for name in node.output.iter() {
            let bound = results.next().unwrap_or(Bound::Failed);
            if name.is_empty() {
                continue;
            }
            if let Bound::Value(value) = bound {
                if self.graph.value(value).name.is_none() {
                    self.graph.set_name(value, name);
                }
                self.as_declared(name, value, &origin);
            }
            self.values.insert(name, bound);
        }
    }

    /// Compares a value with what the program that the model was rewritten from states of it.
    fn as_declared(&mut self, name: &str, value: ValueId, origin: &Origin) {
        let Some(stated) = self.declared.as_ref().and_then(|d| d.get(name)) else { return };
        let ty = self.graph.ty(value);
        let dims = stated.shape.iter().flat_map(|s| &s.dim);
        let sizes: Vec<Option<usize>> = dims
            .map(|d| match (d.dim_value, &d.dim_param) {
                (Some(n), _) => usize::try_from(n).ok(),
                (None, Some(text)) => {
                    dims::evaluate(text, &self.options.binds, &mut BTreeSet::new()).ok()
                }
                (None, None) => None,
            })
            .collect();
        let found = ty.shape.dims();
        let fits = sizes.len() == found.len()
            && sizes.iter().zip(found).all(|(s, n)| s.is_none_or(|s| s == *n))
            && tensor::computed(stated.elem_type.into()).is_ok_and(|d| d == ty.dtype);
        if fits {
            return;
        }
        let sizes: Vec<String> =
            sizes.iter().map(|s| s.map_or_else(|| "?".into(), |s| s.to_string())).collect();
        let dtype = tensor::computed(stated.elem_type.into());
        let dtype = dtype.map_or_else(|_| "?".into(), |d| d.to_string());
        let message =
            format!("`{name}` is {ty}, but the file states {dtype}[{}]", sizes.join(", "));
        self.report.push(
            Diagnostic::error(Code::OperandMismatch, message)
                .at(origin)
                .help("a size that was fixed when the program was exported cannot be another one: bind that, or export with a dynamic size"),
        );
    }

    /// Counts the copies of a node, often in nested graphs.
    fn count(&mut self, node: &NodeProto) -> Result<(), Exceeded> {
        let sequences = node.input.iter().filter_map(|name| match self.values.get(name.as_str()) {
            Some(Bound::Sequence(values)) => Some(values.len() as u64),
            _ => None,
        });
        let copied = sequences.sum();
        self.budget.charge(Resource::Operations, copied)?;
        if self.depth == 0 {
            return Ok(());
        }
        let metadata = node.metadata_props.iter().map(|e| e.key.len() + e.value.len());
        let names = node.output.iter().map(String::len);
        let bytes = names.chain(metadata).chain([node.name.len()]).sum::<usize>();
        self.budget.charge(Resource::Bytes, bytes as u64)?;
        self.budget.charge(Resource::Nodes, 1)
    }

    fn fault(
        &mut self,
        index: Option<usize>,
        node: &NodeProto,
        origin: &Origin,
        inputs: &[Option<Bound>],
        fault: Fault,
    ) {
        let op = &node.op_type;
        let mut diagnostic = match fault {
            Fault::Upstream => return,
            Fault::Misfit(message) => {
                Diagnostic::error(Code::OperandMismatch, format!("{op}: {message}"))
            }
            Fault::Gradient(message) => Diagnostic::error(Code::FunctionGradient, message)
                .help("docs/custom-gradients.md says what a gradient function takes and gives"),
            Fault::Attribute(message) => Diagnostic::error(
                Code::AttributeUnsupported,
                format!("{op}: {message} is not supported"),
            ),
            Fault::Limit(exceeded) => {
                self.exhausted = true;
                exceeded.diagnostic(op, origin)
            }
            Fault::Dynamic(what) => {
                Diagnostic::error(Code::DependsOnData, format!("{op}: {what} depends on data"))
                    .help(
                        "Frit needs it at import: bind all dimensions, export with it constant, or let the model compute everywhere \
                         and choose by a mask, as `torch.where` does",
                    )
            }
        }
        .at(origin)
        .note(format!("{}, opset {}", order::label(index, node), self.opset));
        for (i, (name, bound)) in node.input.iter().zip(inputs).enumerate() {
            let ty = match bound {
                Some(Bound::Value(v)) => self.graph.ty(*v).to_string(),
                Some(Bound::Sequence(values)) => format!("a sequence of {}", values.len()),
                _ => continue,
            };
            diagnostic = diagnostic.note(format!("input {i}  \"{name}\"  {ty}"));
        }
        self.report.push(diagnostic);
    }

    fn outputs(&mut self) {
        for output in &self.source.output {
            match self.values.get(output.name.as_str()) {
                Some(Bound::Value(value)) if self.selections.has(*value) => {
                    let message = format!(
                        "the output \"{}\" has, or is, a size that depends on data",
                        output.name
                    );
                    self.report.push(Diagnostic::error(Code::DependsOnData, message).help(
                        "let the model return what has a size of its own, such as a sum or a mean of it, or \
                         everything beside the mask",
                    ));
                }
                Some(Bound::Value(value)) => {
                    self.graph.add_output(&output.name, *value, OutputKind::Result);
                }
                Some(Bound::Sequence(_)) => self.report.push(Diagnostic::error(
                    Code::AttributeUnsupported,
                    format!("the output \"{}\" is a sequence", output.name),
                )),
                _ => self.report.push(Diagnostic::error(
                    Code::ValueUndefined,
                    format!("the output \"{}\" has no value", output.name),
                )),
            }
        }
    }
}

/// What the first axis of an input is called if it has neither a size nor a name.
pub(super) const UNNAMED_BATCH: &str = "batch";

fn unbound(input: &str, axis: usize, error: &DimError) -> Diagnostic {
    match error {
        DimError::Unbound(name) => Diagnostic::error(
            Code::DimensionUnknown,
            format!("dimension `{name}` (axis {axis} of input \"{input}\") has no size"),
        )
        .help(match name.as_str() {
            "N" => "give it one with --bind, as in --bind N=8".to_string(),
            name => format!("give it one with --bind {name}=N"),
        }),
        DimError::Syntax(text) if text == "?" => Diagnostic::error(
            Code::DimensionUnknown,
            format!("axis {axis} of input \"{input}\" has neither a size nor a name"),
        )
        .help("export the model with that dimension named or fixed"),
        DimError::Syntax(text) => Diagnostic::error(
            Code::DimensionUnknown,
            format!("dimension `{text}` (axis {axis} of input \"{input}\") has no size"),
        )
        .help(format!("give it one with --bind \"{text}=N\"")),
        error => Diagnostic::error(
            Code::DimensionUnknown,
            format!("axis {axis} of input \"{input}\": {error}"),
        ),
    }
}

#[cfg(test)]
mod tests;
