//! Inlines calls of model-local functions.
//!
//! Values of a function are prefixed with the name of the call; attribute references take the call's value or the
//! function's default. Source: ONNX IR specification, model-local functions.

use super::messages::{AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto};
use crate::import::limits::{Budget, Resource};
use frit_ir::{Diagnostic, Origin};
use prost::Message;
use std::collections::HashMap;

/// Memory of a node or an attribute beside its text, in bytes.
const OVERHEAD: usize = 256;

type Functions<'m> = HashMap<(&'m str, &'m str), &'m FunctionProto>;

/// The graph without calls; `None` if the model has no functions.
///
/// # Errors
/// More nodes, names or levels than the budget allows; functions that call themselves are among them.
pub(super) fn inline(
    model: &ModelProto,
    graph: &GraphProto,
    budget: &mut Budget,
) -> Result<Option<GraphProto>, Diagnostic> {
    if model.functions.is_empty() {
        return Ok(None);
    }
    let functions: Functions<'_> =
        model.functions.iter().map(|f| ((f.domain.as_str(), f.name.as_str()), f)).collect();
    let mut flat = GraphProto { node: Vec::new(), ..graph.clone() };
    Inliner { functions, budget, calls: 0 }.expand(&graph.node, 0, &mut flat.node)?;
    Ok(Some(flat))
}

struct Inliner<'m, 'b> {
    functions: Functions<'m>,
    budget: &'b mut Budget,
    calls: u64,
}

impl Inliner<'_, '_> {
    /// Writes nodes out that lie so many levels deep in functions and graphs.
    fn expand(
        &mut self,
        nodes: &[NodeProto],
        depth: u64,
        out: &mut Vec<NodeProto>,
    ) -> Result<(), Diagnostic> {
        for node in nodes {
            let key = (node.domain.as_str(), node.op_type.as_str());
            let Some(&function) = self.functions.get(&key) else {
                let mut node = node.clone();
                for attribute in &mut node.attribute {
                    if let Some(graph) = &mut attribute.g {
                        let inner = std::mem::take(&mut graph.node);
                        self.charge(&node.op_type, &node.name, Resource::Depth, depth + 1)?;
                        self.expand(&inner, depth + 1, &mut graph.node)?;
                    }
                }
                out.push(node);
                continue;
            };
            self.charge(&function.name, &node.name, Resource::Depth, depth + 1)?;
            let call = Call::new(function, node, self.calls);
            self.calls += 1;
            // A call counts even if it is of nothing.
            let n = 1 + function.node.len();
            self.charge(&function.name, &node.name, Resource::Nodes, n as u64)?;
            self.charge(&function.name, &node.name, Resource::Bytes, call.bytes())?;
            let body: Vec<NodeProto> = function.node.iter().map(|n| call.node(n)).collect();
            self.expand(&body, depth + 1, out)?;
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
    fn new(function: &'m FunctionProto, node: &'m NodeProto, number: u64) -> Self {
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
        let first = node.output.iter().find(|o| !o.is_empty());
        let own = if node.name.is_empty() { first } else { Some(&node.name) };
        let own = own.map_or("", String::as_str);
        let attributes = function.attribute_proto.iter().chain(&node.attribute);
        let attributes = attributes.map(|a| (a.name.as_str(), a)).collect();
        Call { function, node, prefix: format!("{own}#{number}/"), names, attributes }
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
