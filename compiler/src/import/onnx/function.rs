//! Inlines calls of model-local functions.
//!
//! Values of a function are prefixed with the name of the call; attribute references take the call's value or the
//! function's default. A function whose metadata has `frit.gradient` or `frit.precision` is inlined between boundaries (domain
//! [`DOMAIN`]), and its gradient function beside it. Source: ONNX IR specification, model-local functions.

use super::messages::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, StringStringEntryProto,
};
use super::scope;
use crate::import::custom;
use crate::import::limits::{Budget, Resource};
use frit_ir::{Code, DType, Diagnostic, Origin, nearest};
use prost::Message;
use prost::bytes::Bytes;
use std::collections::HashMap;

/// The domain of boundaries; nodes of the file have another.
pub(super) const DOMAIN: &str = "frit.function";
/// The key of a function's metadata that names its gradient function.
const GRADIENT: &str = "frit.gradient";
/// The key of a function's metadata that states the dtype it runs in.
const PRECISION: &str = "frit.precision";

/// Memory of a node or an attribute beside its text, in bytes.
const OVERHEAD: usize = 256;

/// Numbers of calls in the graph: a call in the body of a loop is another one in every iteration.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// The body that is read, of so many so far; 0 is the graph itself.
    body: u32,
    bodies: u32,
    numbers: HashMap<(i64, u32), u32>,
}

impl Calls {
    /// Begins the body of a graph inside; the one around it is returned.
    pub(super) fn enter(&mut self) -> u32 {
        self.bodies += 1;
        std::mem::replace(&mut self.body, self.bodies)
    }

    /// Goes on with the body around.
    pub(super) fn leave(&mut self, around: u32) {
        self.body = around;
    }

    /// The number of a call that boundaries name; greater than those of the calls around it.
    pub(super) fn number(&mut self, call: i64) -> u32 {
        let next = self.numbers.len() as u32;
        *self.numbers.entry((call, self.body)).or_insert(next)
    }
}

/// Domain, name and overload.
type Key<'m> = (&'m str, &'m str, &'m str);

/// How messages and metadata name a function: `domain::name`, or `domain::name::overload`.
fn label((domain, name, overload): Key<'_>) -> String {
    let overload = if overload.is_empty() { String::new() } else { format!("::{overload}") };
    format!("{domain}::{name}{overload}")
}

fn key(function: &FunctionProto) -> Key<'_> {
    (function.domain.as_str(), function.name.as_str(), function.overload.as_str())
}

/// The graph without calls; `None` if the model has no functions.
///
/// # Errors
/// More nodes, names or levels than the budget allows; functions that call themselves are among them.
pub(super) fn inline(
    model: &ModelProto,
    graph: &GraphProto,
    budget: &mut Budget,
) -> Result<Option<GraphProto>, Diagnostic> {
    let nodes = graph.node.iter().chain(model.functions.iter().flat_map(|f| &f.node));
    if let Some(node) = foreign(nodes) {
        let message =
            format!("{DOMAIN}::{} is not supported: the domain is Frit's own", node.op_type);
        return Err(Diagnostic::error(Code::OperatorUnsupported, message)
            .at(&Origin::new(&node.name, ""))
            .help("call the function under another domain"));
    }
    if model.functions.is_empty() {
        return Ok(None);
    }
    let functions = model.functions.iter().map(|f| (key(f), f)).collect();
    let mut flat = GraphProto { node: Vec::new(), ..graph.clone() };
    let outside = Place { depth: 0, differentiated: true };
    Inliner { functions, budget, calls: 0 }.expand(&graph.node, outside, &mut flat.node)?;
    Ok(Some(flat))
}

/// The first node, also inside of others, that claims to be a boundary.
fn foreign<'m>(nodes: impl Iterator<Item = &'m NodeProto>) -> Option<&'m NodeProto> {
    let mut open: Vec<&NodeProto> = nodes.collect();
    while let Some(node) = open.pop() {
        if node.domain == DOMAIN {
            return Some(node);
        }
        open.extend(node.attribute.iter().filter_map(|a| a.g.as_ref()).flat_map(|g| &g.node));
    }
    None
}

/// Where nodes are written out.
#[derive(Clone, Copy)]
struct Place {
    /// Levels of functions and graphs around them.
    depth: u64,
    /// Whether they are differentiated: what lies in a function with a gradient of its own, or in a gradient function, is not.
    differentiated: bool,
}

impl Place {
    fn inside(self) -> Place {
        Place { depth: self.depth + 1, ..self }
    }
}

struct Inliner<'m, 'b> {
    functions: HashMap<Key<'m>, &'m FunctionProto>,
    budget: &'b mut Budget,
    calls: u32,
}

impl<'m> Inliner<'m, '_> {
    /// Writes nodes out.
    fn expand(
        &mut self,
        nodes: &[NodeProto],
        place: Place,
        out: &mut Vec<NodeProto>,
    ) -> Result<(), Diagnostic> {
        for node in nodes {
            let key = (node.domain.as_str(), node.op_type.as_str(), node.overload.as_str());
            let Some(&function) = self.functions.get(&key) else {
                let mut node = node.clone();
                for attribute in &mut node.attribute {
                    if let Some(graph) = &mut attribute.g {
                        let inner = std::mem::take(&mut graph.node);
                        self.charge(&node.op_type, &node.name, Resource::Depth, place.depth + 1)?;
                        self.expand(&inner, place.inside(), &mut graph.node)?;
                    }
                }
                out.push(node);
                continue;
            };
            let gradient = self.gradient(function, node)?.filter(|_| place.differentiated);
            let precision = precision(function, node)?;
            match (gradient, precision) {
                (None, None) => self.call(function, node, place, out)?,
                _ => self.bounded_call(function, gradient, precision, node, place, out)?,
            }
        }
        Ok(())
    }

    /// Writes the nodes of one call out.
    fn call(
        &mut self,
        function: &FunctionProto,
        node: &NodeProto,
        place: Place,
        out: &mut Vec<NodeProto>,
    ) -> Result<(), Diagnostic> {
        self.charge(&function.name, &node.name, Resource::Depth, place.depth + 1)?;
        let call = Call::new(function, node, self.calls);
        self.calls += 1;
        // A call counts even if it is of nothing.
        let n = 1 + function.node.len();
        self.charge(&function.name, &node.name, Resource::Nodes, n as u64)?;
        self.charge(&function.name, &node.name, Resource::Bytes, call.bytes())?;
        let body: Vec<NodeProto> = function.node.iter().map(|n| call.node(n)).collect();
        self.expand(&body, place.inside(), out)
    }

    /// The gradient function that a function names.
    fn gradient(
        &self,
        function: &FunctionProto,
        node: &NodeProto,
    ) -> Result<Option<&'m FunctionProto>, Diagnostic> {
        let Some(name) = stated(function, GRADIENT) else { return Ok(None) };
        let (domain, rest) = name.split_once("::").unwrap_or((&function.domain, name));
        let (own, overload) = rest.split_once("::").unwrap_or((rest, ""));
        let known = self.functions.get(&(domain, own, overload));
        known.copied().map(Some).ok_or_else(|| {
            let function = label(key(function));
            let message = format!(
                "`{function}` names the gradient `{name}`, which is no function of the model"
            );
            let labels: Vec<String> = self.functions.keys().map(|key| label(*key)).collect();
            Diagnostic::error(Code::FunctionGradient, message)
                .at(&origin(node))
                .help(nearest::advice(name, labels.iter().map(String::as_str)))
        })
    }

    /// Writes one call out between boundaries, and the gradient function for it.
    fn bounded_call(
        &mut self,
        function: &FunctionProto,
        gradient: Option<&FunctionProto>,
        precision: Option<DType>,
        node: &NodeProto,
        place: Place,
        out: &mut Vec<NodeProto>,
    ) -> Result<(), Diagnostic> {
        let number = self.calls;
        let prefix = format!("{}#{number}#", own_name(node));
        let named = |kind: &str, n: usize| -> Vec<String> {
            (0..n).map(|i| format!("{prefix}{kind}{i}")).collect()
        };
        let (n, m) = (function.input.len(), function.output.len());
        let boundaries = 1 + n + 3 * m + gradient.map_or(0, |g| g.output.len());
        self.charge(&function.name, &node.name, Resource::Nodes, boundaries as u64)?;
        let text =
            prefix.len() + node.metadata_props.iter().map(Message::encoded_len).sum::<usize>();
        let bytes = boundaries.saturating_mul(text + 2 * OVERHEAD);
        self.charge(&function.name, &node.name, Resource::Bytes, bytes as u64)?;
        let boundary = |op_type: &str, input: Vec<String>, output: Vec<String>| NodeProto {
            input,
            output,
            name: node.name.clone(),
            op_type: op_type.into(),
            attribute: vec![integer("call", number as usize)],
            domain: DOMAIN.into(),
            metadata_props: node.metadata_props.clone(),
            ..NodeProto::default()
        };
        let mut outside: Vec<String> = node.input.clone();
        outside.resize(n.max(outside.len()), String::new());
        let mut inputs = outside.clone();
        if let Some(dtype) = precision {
            for (x, inside) in inputs.iter_mut().zip(named("in", n)).filter(|(x, _)| !x.is_empty())
            {
                let mut enter = boundary(
                    "EnterPrecision",
                    vec![std::mem::replace(x, inside.clone())],
                    vec![inside],
                );
                enter.attribute.push(text_attribute("dtype", dtype.name()));
                out.push(enter);
            }
        }
        let results = named("out", m);
        let inner = NodeProto { input: inputs.clone(), output: results.clone(), ..node.clone() };
        let differentiated = place.differentiated && gradient.is_none();
        self.call(function, &inner, Place { differentiated, ..place }, out)?;
        let mut given = node.output.clone();
        given.resize(m, String::new());
        let mut made = results.clone();
        if let Some(gradient) = gradient {
            let (of, by) = (label(key(function)), label(key(gradient)));
            let call = custom::Call { number, function: &of, gradient: &by };
            custom::takes(&call, gradient.input.len(), [n, m]).map_err(|message| {
                let error = Diagnostic::error(Code::FunctionGradient, message).at(&origin(node));
                error.help("docs/custom-gradients.md says what a gradient function takes and gives")
            })?;
            let cotangents = named("d", m);
            for (i, (y, dy)) in results.iter().zip(&cotangents).enumerate() {
                let mut cotangent = boundary("Cotangent", vec![y.clone()], vec![dy.clone()]);
                cotangent.attribute.push(integer("result", i));
                out.push(cotangent);
            }
            // A result without a name is no gradient.
            let unnamed =
                |(name, of): (String, &String)| if of.is_empty() { of.clone() } else { name };
            let gradients: Vec<String> = named("g", gradient.output.len())
                .into_iter()
                .zip(&gradient.output)
                .map(unnamed)
                .collect();
            inputs.truncate(n);
            let defaults = function.attribute_proto.iter();
            let own = |a: &&AttributeProto| node.attribute.iter().all(|given| given.name != a.name);
            let backward = NodeProto {
                input: [&inputs[..], &results, &cotangents].concat(),
                output: gradients.clone(),
                attribute: defaults.filter(own).chain(&node.attribute).cloned().collect(),
                ..node.clone()
            };
            let place = Place { differentiated: false, ..place };
            self.call(gradient, &backward, place, out)?;
            outside.truncate(n);
            let input = [&results[..], &outside, &gradients].concat();
            made = if precision.is_some() { named("y", m) } else { given.clone() };
            let mut custom = boundary("CustomGradient", input, made.clone());
            custom.attribute.extend([
                integer("inputs", n),
                integer("results", m),
                text_attribute("function", &of),
                text_attribute("gradient", &by),
            ]);
            out.push(custom);
        }
        if precision.is_some() {
            let pairs = made.into_iter().zip(given).filter(|(_, outside)| !outside.is_empty());
            out.extend(
                pairs.map(|(y, outside)| boundary("LeavePrecision", vec![y], vec![outside])),
            );
        }
        Ok(())
    }

    fn charge(
        &mut self,
        operator: &str,
        name: &str,
        resource: Resource,
        amount: u64,
    ) -> Result<(), Diagnostic> {
        let subject = || format!("the function or operator `{operator}`");
        let charged = self.budget.charge(resource, amount);
        charged.map_err(|e| {
            let diagnostic = e.diagnostic(&subject(), &Origin::new(name, ""));
            diagnostic.note("does a function call itself?")
        })
    }
}

/// What a function's metadata say about it.
fn stated<'f>(function: &'f FunctionProto, key: &str) -> Option<&'f str> {
    let entry = |e: &&StringStringEntryProto| e.key == key;
    function.metadata_props.iter().find(entry).map(|e| e.value.as_str())
}

/// The dtype that a function states to run in.
fn precision(function: &FunctionProto, node: &NodeProto) -> Result<Option<DType>, Diagnostic> {
    let Some(word) = stated(function, PRECISION) else { return Ok(None) };
    let dtype = custom::precision(word, &label(key(function)));
    dtype.map(Some).map_err(|e| e.at(&origin(node)))
}

fn origin(node: &NodeProto) -> Origin {
    Origin::new(&node.name, &scope::of(node))
}

/// The name of a node, or of its first result.
fn own_name(node: &NodeProto) -> &str {
    let first = node.output.iter().find(|o| !o.is_empty());
    let own = if node.name.is_empty() { first } else { Some(&node.name) };
    own.map_or("", String::as_str)
}

fn integer(name: &str, value: usize) -> AttributeProto {
    AttributeProto { name: name.into(), i: value as i64, r#type: 2, ..AttributeProto::default() }
}

fn text_attribute(name: &str, value: &str) -> AttributeProto {
    let s = Bytes::copy_from_slice(value.as_bytes());
    AttributeProto { name: name.into(), s, r#type: 3, ..AttributeProto::default() }
}

/// Text of a node, and its number of names and structures, including those of subgraphs.
fn size(node: &NodeProto) -> (usize, usize) {
    let mut names = 1 + node.input.len() + node.output.len();
    let mut structures = 1 + node.attribute.len();
    for graph in node.attribute.iter().filter_map(|a| a.g.as_ref()) {
        names += graph.input.len() + graph.output.len() + graph.initializer.len();
        for node in &graph.node {
            let (more_names, more_structures) = size(node);
            names += more_names;
            structures += more_structures;
        }
    }
    (names, structures)
}

/// One call of a function.
struct Call<'m> {
    function: &'m FunctionProto,
    node: &'m NodeProto,
    prefix: String,
    /// Names outside by names inside.
    names: HashMap<&'m str, &'m str>,
    /// The attributes of the call, or the function's defaults.
    attributes: HashMap<&'m str, &'m AttributeProto>,
}

impl<'m> Call<'m> {
    fn new(function: &'m FunctionProto, node: &'m NodeProto, number: u32) -> Self {
        // Operands and results that are not given have no name.
        let given = |list: &'m [String], i: usize| list.get(i).map_or("", String::as_str);
        let inputs = function.input.iter().enumerate();
        let outputs = function.output.iter().enumerate();
        let mut names: HashMap<&str, &str> =
            inputs.map(|(i, name)| (name.as_str(), given(&node.input, i))).collect();
        for (i, name) in outputs {
            let outside = given(&node.output, i);
            if !outside.is_empty() {
                names.insert(name, outside);
            }
        }
        let attributes = function.attribute_proto.iter().chain(&node.attribute);
        let attributes = attributes.map(|a| (a.name.as_str(), a)).collect();
        Call { function, node, prefix: format!("{}#{number}/", own_name(node)), names, attributes }
    }

    /// About how much memory the nodes of the call take.
    fn bytes(&self) -> u64 {
        let longest =
            self.names.values().map(|n| n.len()).max().unwrap_or(0).max(self.prefix.len());
        let metadata: usize = self.node.metadata_props.iter().map(Message::encoded_len).sum();
        let attributes: usize = self.node.attribute.iter().map(Message::encoded_len).sum();
        let of = |node: &NodeProto| {
            let (names, structures) = size(node);
            let refers = node.attribute.iter().filter(|a| !a.ref_attr_name.is_empty()).count();
            let (text, made) = (node.encoded_len(), names * longest);
            let copied = metadata + self.node.name.len() + refers * attributes;
            (text + made + copied + structures * OVERHEAD) as u64
        };
        let operands = (self.function.input.len() + self.function.output.len()) as u64;
        self.function.node.iter().map(of).fold(64 * operands, u64::saturating_add)
    }

    fn name(&self, inside: &str) -> String {
        match self.names.get(inside) {
            _ if inside.is_empty() => String::new(),
            Some(outside) => (*outside).to_string(),
            None => format!("{}{inside}", self.prefix),
        }
    }

    fn node(&self, inner: &NodeProto) -> NodeProto {
        let mut node = inner.clone();
        node.input.iter_mut().for_each(|name| *name = self.name(name));
        node.output.iter_mut().for_each(|name| *name = self.name(name));
        node.name = match (self.node.name.is_empty(), inner.name.is_empty()) {
            (false, false) => format!("{}/{}", self.node.name, inner.name),
            (false, true) => self.node.name.clone(),
            (true, _) => inner.name.clone(),
        };
        if node.metadata_props.is_empty() {
            node.metadata_props = self.node.metadata_props.clone();
        }
        node.attribute = inner.attribute.iter().filter_map(|a| self.attribute(a)).collect();
        node
    }

    /// The attribute with the call's value; `None` if it refers to one that is not given.
    fn attribute(&self, attribute: &AttributeProto) -> Option<AttributeProto> {
        let mut attribute = attribute.clone();
        if let Some(graph) = &mut attribute.g {
            self.rename(graph);
        }
        if attribute.ref_attr_name.is_empty() {
            return Some(attribute);
        }
        let value = *self.attributes.get(attribute.ref_attr_name.as_str())?;
        Some(AttributeProto { name: attribute.name.clone(), ..value.clone() })
    }

    /// Renames the values of a graph inside of the function.
    fn rename(&self, graph: &mut GraphProto) {
        for node in &mut graph.node {
            *node = self.node(node);
        }
        for value in graph.input.iter_mut().chain(&mut graph.output) {
            value.name = self.name(&value.name);
        }
        for tensor in &mut graph.initializer {
            tensor.name = self.name(&tensor.name);
        }
    }
}
