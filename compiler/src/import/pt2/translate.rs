//! Rewrites the graph of an archive as ONNX nodes, call by call.
//!
//! In: the program, and the ONNX names of what its placeholders stand for. Out: nodes in order, and the type that the archive
//! states for every result, which the importer compares with what it infers.

use super::call::{Call, Fault};
use super::dtype::{self, Dtype};
use super::mutation::Aliases;
use super::ops;
use super::schema::{Argument, Graph, Node, OptionalTensor, Size, SymInt, TensorMeta};
use super::{scopes, sizes, symbols};
use crate::import::onnx::messages::{
    DimensionProto, NodeProto, StringStringEntryProto, TensorShapeProto, TensorTypeProto,
};
use frit_ir::{Code, Diagnostic, Origin};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Errors of single calls that are reported at most.
const MAX_ERRORS: usize = 20;
/// Graphs inside one another at most.
const MAX_DEPTH: usize = 64;

/// A tensor of the program.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    /// Its name in the ONNX graph.
    pub(super) name: String,
    pub(super) dtype: Dtype,
    /// Its sizes, where they are known.
    pub(super) dims: Vec<Option<i64>>,
}

/// A size: known, or a number that the graph computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Int {
    Known(i64),
    Computed(String),
}

impl Int {
    pub(super) fn known(&self) -> Option<i64> {
        match self {
            Int::Known(n) => Some(*n),
            Int::Computed(_) => None,
        }
    }
}

/// The value of a name of the program.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Tensor(Tensor),
    Int(Int),
    /// A running statistic after its renewal, which the importer knows by the statistic itself.
    Renewed(Tensor),
    /// A result that its call is rewritten without.
    Omitted,
    /// The result of a call that could not be rewritten; calls that read it are not reported.
    Failed,
}

/// Names of the program by what they stand for.
pub(super) type Values = HashMap<String, Value>;

/// An operator that is not supported.
#[derive(Default)]
struct Missing {
    calls: usize,
    first: Option<Origin>,
}

/// A rewriting under way.
#[derive(Default)]
pub(super) struct Translator {
    pub(super) nodes: Vec<NodeProto>,
    /// What the archive says of results.
    pub(super) declared: HashMap<String, TensorTypeProto>,
    /// Names that are taken.
    pub(super) names: HashSet<String>,
    pub(super) errors: Vec<Diagnostic>,
    /// The first call that may stand for a `detach`.
    detach: Option<Origin>,
    missing: BTreeMap<String, Missing>,
    depth: usize,
}

/// How values are read by the graph that they are passed to.
#[derive(Clone, Copy, PartialEq)]
enum Gradients {
    Flow,
    Stop,
}

impl Translator {
    /// Rewrites the calls of a graph, of whose placeholders `values` knows what they stand for; its results are added.
    pub(super) fn graph(&mut self, graph: &Graph, values: &mut Values) {
        let mut aliases = Aliases::new(graph);
        for (place, node) in graph.nodes.iter().enumerate() {
            if self.errors.len() >= MAX_ERRORS {
                return;
            }
            if let Err(fault) = self.node(graph, (place, node), values, &mut aliases) {
                self.fault(node, fault);
                for name in result_names(node) {
                    values.insert(name.into(), Value::Failed);
                }
            }
        }
    }

    /// The operators that are not supported, as one error.
    pub(super) fn unsupported(&self) -> Option<Diagnostic> {
        let calls: usize = self.missing.values().map(|m| m.calls).sum();
        let (n, s) = (self.missing.len(), if calls == 1 { "" } else { "s" });
        let are = if n == 1 { " is" } else { "s are" };
        let message = format!("{n} operator{are} not supported ({calls} call{s})");
        let mut diagnostic = Diagnostic::error(Code::OperatorUnsupported, message).help(
            "`frit compile --list-ops` lists the supported ones; decompose the others before saving, \
             `program = program.run_decompositions()`, or export the module as ONNX",
        );
        for (name, Missing { calls, first }) in &self.missing {
            let place = first.as_ref().map_or_else(String::new, |origin| match &*origin.scope {
                "" => format!("\"{}\"", origin.source),
                scope => format!("\"{}\" in `{scope}`", origin.source),
            });
            diagnostic = diagnostic.note(format!("{name}  {calls}   first: {place}"));
        }
        (n > 0).then_some(diagnostic)
    }

    /// What the user should know.
    pub(super) fn warning(&self) -> Option<Diagnostic> {
        let origin = self.detach.as_ref()?;
        let message = "an alias may be a `detach()` that was decomposed: gradients flow through it";
        let warning = Diagnostic::warning(Code::DetachRemoved, message).at(origin);
        Some(warning.help("save the program without `run_decompositions()`, which keeps `detach`"))
    }

    fn node(
        &mut self,
        graph: &Graph,
        (place, node): (usize, &Node),
        values: &mut Values,
        aliases: &mut Aliases,
    ) -> Result<(), Fault> {
        if let Some(name) = result_names(node).find(|name| values.contains_key(*name)) {
            return Err(Fault::Damaged(format!("the value `{name}` is defined twice")));
        }
        let target = node.target.strip_prefix("torch.ops.").unwrap_or(&node.target);
        if symbols::is_check(target) {
            return Ok(());
        }
        if let Some(name) = target.strip_prefix("higher_order.") {
            return self.inner(name, node, values);
        }
        if let Some(f) = symbols::function(target) {
            return self.sizes(f, node, values);
        }
        let Some((op, overload)) = target.strip_prefix("aten.").map(split_overload) else {
            self.miss(target, node);
            return Err(Fault::Upstream);
        };
        // `add_` is `add` that writes its first operand.
        let plain = op.strip_suffix('_').filter(|plain| !plain.ends_with('_'));
        let (op, writes) = match ops::find(op) {
            Some(_) => (op, false),
            None => (plain.unwrap_or(op), plain.is_some()),
        };
        let Some(convert) = ops::find(op) else {
            self.miss(target, node);
            return Err(Fault::Upstream);
        };
        if writes {
            aliases.write(place, node)?;
        }
        if node.may_be_detach() {
            self.detach.get_or_insert_with(|| origin(node));
        }
        let mut call = Call { op, overload, node, values, names: &mut self.names, made: vec![] };
        let results = convert(&mut call)?;
        let made = call.made;
        self.results(graph, node, made, results, values)?;
        aliases.results(op, node);
        if writes
            && let (Some(Argument::AsTensor(target)), Some(result)) =
                (node.inputs.first().map(|i| &i.arg), result_names(node).next())
            && let Some(value) = values.get(result).cloned()
        {
            values.insert(target.name.clone(), value);
        }
        Ok(())
    }

    /// Binds the results of a call to its names, and adds what takes its place.
    fn results(
        &mut self,
        graph: &Graph,
        node: &Node,
        mut made: Vec<NodeProto>,
        results: Vec<String>,
        values: &mut Values,
    ) -> Result<(), Fault> {
        let mut results = results.into_iter();
        let mut own: HashSet<String> = made.iter().flat_map(|n| n.output.clone()).collect();
        let mut renamed: HashMap<String, String> = HashMap::new();
        for name in result_names(node) {
            let Some(result) = results.next().filter(|r| !r.is_empty()) else {
                // Statistics and the like, which only a backward pass reads.
                values.insert(name.into(), Value::Omitted);
                continue;
            };
            let meta = graph.tensor_values.get(name);
            let meta =
                meta.ok_or_else(|| Fault::Damaged(format!("nothing is known of `{name}`")))?;
            let mut tensor = tensor(meta, result)?;
            if let Some(statistic) = tensor.name.strip_prefix(ops::RENEWED) {
                tensor.name = statistic.into();
                values.insert(name.into(), Value::Renewed(tensor));
                continue;
            }
            if node.is_under_no_grad() && dtype::is_float(tensor.dtype) {
                let detached = format!("{}/detached", tensor.name);
                if self.names.insert(detached.clone()) {
                    made.push(ops::detach_node(&tensor.name, &detached));
                    own.insert(detached.clone());
                    tensor.name = detached;
                }
            }
            if own.remove(&tensor.name) {
                if self.names.insert(name.into()) {
                    renamed.insert(std::mem::replace(&mut tensor.name, name.into()), name.into());
                }
                self.declared.insert(tensor.name.clone(), declared(meta, tensor.dtype));
            } else if let Some(new) = renamed.get(&tensor.name) {
                tensor.name.clone_from(new);
            }
            values.insert(name.into(), Value::Tensor(tensor));
        }
        for name in made.iter_mut().flat_map(|n| n.input.iter_mut().chain(&mut n.output)) {
            if let Some(new) = renamed.get(name) {
                name.clone_from(new);
            }
        }
        self.push(node, made);
        Ok(())
    }

    /// Adds nodes that take the place of a call.
    fn push(&mut self, node: &Node, made: Vec<NodeProto>) {
        let name = node.name.as_deref().or_else(|| result_names(node).next()).unwrap_or("");
        let scopes = scopes::entry(&node.metadata.nn_module_stack, name);
        let last = made.len();
        for (i, mut onnx) in made.into_iter().enumerate() {
            onnx.name = if i + 1 == last { name.into() } else { format!("{name}/{i}") };
            onnx.metadata_props
                .push(StringStringEntryProto { key: scopes::KEY.into(), value: scopes.clone() });
            self.nodes.push(onnx);
        }
    }

    /// A function of sizes.
    fn sizes(
        &mut self,
        f: symbols::Function,
        node: &Node,
        values: &mut Values,
    ) -> Result<(), Fault> {
        let mut call =
            Call { op: "", overload: "", node, values, names: &mut self.names, made: vec![] };
        let result = symbols::compute(&mut call, f)?;
        let made = call.made;
        self.push(node, made);
        for name in result_names(node) {
            values.insert(name.into(), Value::Int(result.clone()));
        }
        Ok(())
    }

    /// A graph inside, which a region without gradients or of another precision is.
    fn inner(&mut self, name: &str, node: &Node, values: &mut Values) -> Result<(), Fault> {
        let place = node.inputs.iter().position(|i| matches!(i.arg, Argument::AsGraph(_)));
        let flags: Vec<Option<bool>> = node.inputs[..place.unwrap_or(0)]
            .iter()
            .map(|i| if let Argument::AsBool(b) = i.arg { Some(b) } else { None })
            .collect();
        let gradients = match (name, &flags[..]) {
            ("wrap_with_set_grad_enabled", [Some(true)]) => Gradients::Flow,
            ("wrap_with_set_grad_enabled", [Some(false)]) => Gradients::Stop,
            ("wrap_with_autocast", [_, _, Some(false), ..]) => Gradients::Flow,
            ("wrap_with_autocast", [_, _, Some(true), ..]) => {
                return Err(Fault::Unsupported("a region under `torch.autocast`".into()));
            }
            _ => {
                self.miss(&format!("higher_order.{name}"), node);
                return Err(Fault::Upstream);
            }
        };
        let Some((Argument::AsGraph(inner), i)) = place.map(|i| (&node.inputs[i].arg, i)) else {
            return Err(Fault::Damaged(format!("{name} holds no graph")));
        };
        if self.depth >= MAX_DEPTH {
            return Err(Fault::Unsupported(format!(
                "more than {MAX_DEPTH} graphs inside one another"
            )));
        }
        let call =
            Call { op: name, overload: "", node, values, names: &mut self.names, made: vec![] };
        let mut own = Values::new();
        let arguments = &node.inputs[i + 1..];
        if arguments.len() != inner.graph.inputs.len() {
            return Err(Fault::Damaged(format!("{name} passes {} values", arguments.len())));
        }
        for (input, given) in inner.graph.inputs.iter().zip(arguments) {
            let (Some(inside), Some(outside)) = (value_name(input), value_name(&given.arg)) else {
                continue;
            };
            own.insert(inside.into(), call.value(outside)?.clone());
        }
        self.depth += 1;
        self.graph(&inner.graph, &mut own);
        self.depth -= 1;
        let outside: Vec<&str> = result_names(node).collect();
        let inside: Vec<&str> = inner.graph.outputs.iter().filter_map(value_name).collect();
        if outside.len() != inside.len() {
            return Err(Fault::Damaged(format!("{name} gives {} values", inside.len())));
        }
        for (name, inside) in outside.into_iter().zip(inside) {
            let value = own.get(inside).ok_or_else(|| Fault::Undefined(inside.into()))?.clone();
            let value = match value {
                Value::Tensor(t) if gradients == Gradients::Stop && dtype::is_float(t.dtype) => {
                    let mut call = Call {
                        op: "detach",
                        overload: "",
                        node,
                        values,
                        names: &mut self.names,
                        made: vec![],
                    };
                    let detached = ops::detached(&mut call, &t.name);
                    let made = call.made;
                    self.push(node, made);
                    Value::Tensor(Tensor { name: detached, ..t })
                }
                value => value,
            };
            values.insert(name.into(), value);
        }
        Ok(())
    }

    fn miss(&mut self, target: &str, node: &Node) {
        let missing = self.missing.entry(target.into()).or_default();
        missing.calls += 1;
        missing.first.get_or_insert_with(|| origin(node));
    }

    fn fault(&mut self, node: &Node, fault: Fault) {
        let op = node.target.strip_prefix("torch.ops.").unwrap_or(&node.target);
        let diagnostic = match fault {
            Fault::Upstream => return,
            Fault::Unsupported(what) => {
                Diagnostic::error(Code::AttributeUnsupported, format!("{op}: {what} is not supported"))
                    .help("decompose it before saving, `program.run_decompositions()`, or export the module as ONNX")
            }
            Fault::Damaged(what) => super::archive::unreadable(format!("{op}: {what}")),
            Fault::Undefined(name) => {
                let message = format!("the value \"{name}\" is used but never defined");
                Diagnostic::error(Code::ValueUndefined, message)
                    .help("the file is damaged or was edited; save the program again")
            }
        };
        self.errors.push(diagnostic.at(&origin(node)));
    }
}

fn origin(node: &Node) -> Origin {
    let name = node.name.as_deref().or_else(|| result_names(node).next()).unwrap_or(&node.target);
    Origin::new(name, &scopes::module(&node.metadata.nn_module_stack))
}

/// The tensor that metadata describe.
pub(super) fn tensor(meta: &TensorMeta, name: String) -> Result<Tensor, Fault> {
    let dtype = dtype::of_torch(meta.dtype).ok_or_else(|| {
        Fault::Unsupported(format!("the element type number {} of `{name}`", meta.dtype))
    })?;
    if meta.sizes.iter().filter_map(Size::known).any(|n| n < 0) {
        return Err(Fault::Damaged(format!("`{name}` has a negative size")));
    }
    Ok(Tensor { name, dtype, dims: meta.sizes.iter().map(Size::known).collect() })
}

/// The type that metadata state.
pub(super) fn declared(meta: &TensorMeta, dtype: Dtype) -> TensorTypeProto {
    let dim = |size: &Size| match size {
        Size::AsInt(n) => DimensionProto { dim_value: Some(*n), dim_param: None },
        Size::AsExpr(e) => DimensionProto { dim_value: None, dim_param: sizes::infix(&e.expr_str) },
    };
    let shape = TensorShapeProto { dim: meta.sizes.iter().map(dim).collect() };
    TensorTypeProto { elem_type: dtype, shape: Some(shape) }
}

/// Operator and overload of `add.Tensor`.
fn split_overload(target: &str) -> (&str, &str) {
    target.split_once('.').unwrap_or((target, ""))
}

/// The name in an argument that holds one value.
pub(super) fn value_name(argument: &Argument) -> Option<&str> {
    match argument {
        Argument::AsTensor(t) => Some(&t.name),
        Argument::AsOptionalTensor(OptionalTensor::AsTensor(t)) => Some(&t.name),
        Argument::AsSymInt(SymInt::AsName(name)) => Some(name),
        _ => None,
    }
}

/// The names in an argument.
pub(super) fn value_names(argument: &Argument) -> Vec<&str> {
    match argument {
        Argument::AsTensors(list) => list.iter().map(|t| t.name.as_str()).collect(),
        Argument::AsOptionalTensors(list) => {
            let given = list.iter().filter_map(|t| match t {
                OptionalTensor::AsTensor(t) => Some(t.name.as_str()),
                OptionalTensor::AsNone(_) => None,
            });
            given.collect()
        }
        Argument::AsSymInts(list) => {
            let computed = list.iter().filter_map(|s| match s {
                SymInt::AsName(name) => Some(name.as_str()),
                SymInt::AsInt(_) => None,
            });
            computed.collect()
        }
        argument => value_name(argument).into_iter().collect(),
    }
}

/// The names of a call's results.
pub(super) fn result_names(node: &Node) -> impl Iterator<Item = &str> {
    node.outputs.iter().flat_map(value_names)
}

/// A node that gives a value another name.
pub(super) fn identity(from: &str, to: &str) -> NodeProto {
    NodeProto {
        input: vec![from.into()],
        output: vec![to.into()],
        op_type: "Identity".into(),
        name: to.into(),
        ..NodeProto::default()
    }
}
