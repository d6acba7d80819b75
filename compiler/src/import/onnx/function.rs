//! Calls of the model's own functions, replaced by their nodes.
//!
//! Values of a function get the name of the call before theirs; attributes that refer to the call take
//! its value, or the function's default. Source: ONNX IR specification, model-local functions.

use super::messages::{AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto};
use frit_ir::Diagnostic;
use std::collections::HashMap;

/// Deepest nesting of calls.
const MAX_DEPTH: usize = 64;
/// Nodes after all calls are replaced.
const MAX_NODES: usize = 1 << 22;

type Functions<'m> = HashMap<(&'m str, &'m str), &'m FunctionProto>;

/// The graph without calls; `None` if the model has no functions.
///
/// # Errors
/// Functions that call themselves, or too many nodes.
pub(super) fn inline(
    model: &ModelProto,
    graph: &GraphProto,
) -> Result<Option<GraphProto>, Diagnostic> {
    if model.functions.is_empty() {
        return Ok(None);
    }
    let functions: Functions<'_> =
        model.functions.iter().map(|f| ((f.domain.as_str(), f.name.as_str()), f)).collect();
    let mut flat = GraphProto { node: Vec::new(), ..graph.clone() };
    expand(&graph.node, &functions, 0, &mut flat.node)?;
    Ok(Some(flat))
}

fn expand(
    nodes: &[NodeProto],
    functions: &Functions<'_>,
    depth: usize,
    out: &mut Vec<NodeProto>,
) -> Result<(), Diagnostic> {
    for node in nodes {
        let Some(function) = functions.get(&(node.domain.as_str(), node.op_type.as_str())) else {
            let mut node = node.clone();
            for attribute in &mut node.attribute {
                if let Some(graph) = &mut attribute.g {
                    let inner = std::mem::take(&mut graph.node);
                    expand(&inner, functions, depth, &mut graph.node)?;
                }
            }
            out.push(node);
            continue;
        };
        if depth >= MAX_DEPTH || out.len() >= MAX_NODES {
            let message = format!("the function \"{}\" is nested too deeply", function.name);
            return Err(Diagnostic::error("E011", message).help("does it call itself?"));
        }
        let call = Call::new(function, node, out.len());
        let body: Vec<NodeProto> = function.node.iter().map(|n| call.node(n)).collect();
        expand(&body, functions, depth + 1, out)?;
    }
    Ok(())
}

/// One call of a function.
struct Call<'m> {
    function: &'m FunctionProto,
    node: &'m NodeProto,
    prefix: String,
    /// Names outside by names inside.
    names: HashMap<&'m str, &'m str>,
}

impl<'m> Call<'m> {
    fn new(function: &'m FunctionProto, node: &'m NodeProto, place: usize) -> Self {
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
        Call { function, node, prefix: format!("{own}#{place}/"), names }
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
        let named = |a: &&AttributeProto| a.name == attribute.ref_attr_name;
        let value = self.node.attribute.iter().find(named);
        let value = value.or_else(|| self.function.attribute_proto.iter().find(named))?;
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
