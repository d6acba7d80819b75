//! Restores the original parameters of operands that the exporter's optimization changed.
//!
//! The dynamo exporter's default optimization transposes and renames weights (`val_42`), merges initializers with equal values,
//! such as zero biases, or drops such a bias. A node's metadata has the original PyTorch call with its operands, and the program's
//! signature says which of these are parameters, so each operand gets its own parameter back under its own name.

use super::exporter::{Argument, arguments};
use super::messages::{GraphProto, NodeProto};
use super::scope;
use super::tensor::is_float;
use super::trainable::{listed, places};
use std::collections::{HashMap, HashSet};

/// The role of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Weight,
    Bias,
    Other,
}

/// The parameter that an operand stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    /// Its own name.
    pub(super) name: String,
    /// Whether the initializer is its transpose.
    pub(super) transposed: bool,
    /// The shape of the initializer, if that is the vector with further axes of one element.
    pub(super) column: Option<Vec<i64>>,
}

impl Parameter {
    fn new(name: &str) -> Parameter {
        Parameter { name: name.into(), transposed: false, column: None }
    }
}

/// Operands that stand for a parameter of another name.
#[derive(Debug, Default)]
pub(super) struct Restored {
    /// The parameter, by position of the node and the operand.
    parameters: HashMap<(usize, usize), Parameter>,
    /// Operands that are constants, although a parameter of the same first values is stored in their place.
    constants: HashSet<(usize, usize)>,
    /// The all-zero bias that the exporter dropped from a matmul, by position of the node.
    zero_biases: HashMap<usize, String>,
    /// Initializers that some operand stands for under their own name, or as no parameter.
    kept: HashSet<String>,
}

/// An operand that is to read a parameter under its own name.
#[derive(Clone, Debug)]
pub(crate) struct Replacement {
    /// Position of the node.
    pub(crate) node: usize,
    /// Which operand; one that the node does not have is appended.
    pub(crate) operand: usize,
    /// The parameter.
    pub(crate) parameter: String,
    /// Whether the operand is its transpose.
    pub(crate) transposed: bool,
    /// The shape of the operand, if that is the vector with further axes of one element.
    pub(crate) column: Option<Vec<i64>>,
}

/// The operands of a graph that are constants, although they are stored as a parameter.
pub(crate) fn constants(graph: &GraphProto) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Restored::of(graph).constants.into_iter().collect();
    found.sort_unstable();
    found
}

/// The operands of a graph that stand for a parameter of another name, in the order of the nodes.
pub(crate) fn replacements(graph: &GraphProto) -> Vec<Replacement> {
    let restored = Restored::of(graph);
    let mut found: Vec<Replacement> =
        (restored.parameters.into_iter())
            .map(|((node, operand), Parameter { name: parameter, transposed, column })| {
                Replacement { node, operand, parameter, transposed, column }
            })
            .collect();
    found.extend(restored.zero_biases.into_iter().map(|(node, parameter)| Replacement {
        node,
        operand: 2,
        parameter,
        transposed: false,
        column: None,
    }));
    found.sort_by_key(|r| (r.node, r.operand));
    found
}

impl Restored {
    /// Reads the calls of a graph as it is stored; nothing without a signature.
    pub(super) fn of(graph: &GraphProto) -> Restored {
        let parameters = listed(graph, "PARAMETER");
        if parameters.is_empty() {
            return Restored::default();
        }
        let nodes: Vec<(usize, &NodeProto)> = graph.node.iter().enumerate().collect();
        let [buffers, constants] = ["BUFFER", "CONSTANT_TENSOR"].map(|kind| listed(graph, kind));
        Restored::new(graph, &nodes, &parameters, &buffers, &constants)
    }

    /// Reads the calls; `parameters`, `buffers` and `constants` are the targets of the signature by placeholder.
    pub(super) fn new(
        graph: &GraphProto,
        nodes: &[(usize, &NodeProto)],
        parameters: &HashMap<String, String>,
        buffers: &HashMap<String, String>,
        constants: &HashMap<String, String>,
    ) -> Restored {
        let mut restored = Restored::default();
        let floats = graph.initializer.iter().filter(|t| !t.dims.is_empty());
        let dims: HashMap<&str, &[i64]> = floats
            .filter(|t| is_float(t.data_type))
            .map(|t| (t.name.as_str(), t.dims.as_slice()))
            .collect();
        // Elements of each.
        let product = |dims: &[i64]| dims.iter().fold(1, |n: i64, d| n.saturating_mul(*d));
        let stored: HashMap<&str, i64> =
            dims.iter().map(|(name, dims)| (*name, product(dims))).collect();
        for (place, node) in nodes {
            let call = arguments(node);
            let candidates: Vec<(Role, &str)> = call
                .iter()
                .flat_map(|(op, arguments)| {
                    arguments.iter().map(|a: &Argument<'_>| (of_argument(op, a.index), a.name))
                })
                .filter_map(|(role, name)| Some((role, parameters.get(name)?.as_str())))
                .collect();
            let has_bias = matches!(node.op_type.as_str(), "Gemm" | "Conv" | "ConvTranspose");
            if has_bias && node.input.len() == 2 {
                let bias = candidates.iter().find(|(role, _)| *role == Role::Bias);
                if let Some((_, name)) = bias.filter(|(_, name)| !stored.contains_key(name)) {
                    restored.zero_biases.insert(*place, name.to_string());
                }
            }
            for (i, operand) in node.input.iter().enumerate() {
                let Some(elements) = stored.get(operand.as_str()) else { continue };
                if node.op_type == "BatchNormalization" && i >= 3 {
                    let arguments = call.iter().flat_map(|(_, arguments)| arguments);
                    let own = arguments.into_iter().find(|a| a.index == i);
                    match own.and_then(|a| buffers.get(a.name)) {
                        Some(name) if name != operand => {
                            restored.parameters.insert((*place, i), Parameter::new(name));
                        }
                        _ => {
                            restored.kept.insert(operand.clone());
                        }
                    }
                    continue;
                }
                let role = of_operand(&node.op_type, i);
                let is_call = |name: &str| call.as_ref().is_some_and(|(op, _)| *op == name);
                let (linear, grouped) = (is_call("linear"), is_call("group_norm"));
                // The scales and offsets of groups are ones and zeros, whatever else begins like them.
                let of_groups = grouped && node.op_type == "InstanceNormalization";
                if of_groups && parameters.values().any(|name| name == operand) {
                    restored.constants.insert((*place, i));
                    continue;
                }
                // The input of a linear layer, whose weight is on the right.
                if of_groups || linear && node.op_type == "MatMul" && i == 0 {
                    restored.kept.insert(operand.clone());
                    continue;
                }
                // What else the call reads stands for itself, unless a parameter that is not stored belongs there: that was merged with
                // it.
                let target = |name: &str| buffers.get(name).or_else(|| constants.get(name));
                let is_read =
                    call.iter().flat_map(|(_, of)| of).any(|a| target(a.name) == Some(operand));
                let is_merged = candidates.iter().any(|(r, name)| {
                    *r == role && role != Role::Other && !stored.contains_key(name)
                });
                let own = candidates.iter().any(|(_, name)| name == operand);
                // A copy of a parameter has as many elements.
                let copies = |name: &str| stored.get(name).is_none_or(|n| n == elements);
                let found = match candidates[..] {
                    _ if own || (is_read && !is_merged) => None,
                    [(_, only)] => Some(only),
                    _ => candidates.iter().find(|(r, _)| *r == role).map(|(_, name)| *name),
                };
                let found = found.filter(|name| copies(name));
                match found {
                    Some(name) => {
                        let transposed = linear && node.op_type == "MatMul";
                        let column = column(dims[operand.as_str()]).filter(|_| grouped);
                        let parameter = Parameter { transposed, column, ..Parameter::new(name) };
                        restored.parameters.insert((*place, i), parameter);
                    }
                    None => {
                        restored.kept.insert(operand.clone());
                    }
                }
            }
        }
        restored.without_smaller(nodes, &stored);
        restored.without_call(graph, nodes, parameters, &stored);
        restored.kept.extend(graph.output.iter().map(|o| o.name.clone()));
        restored
    }

    /// Of operands that would stand for one parameter, those with fewer elements than others stand for themselves.
    fn without_smaller(&mut self, nodes: &[(usize, &NodeProto)], stored: &HashMap<&str, i64>) {
        let by_place: HashMap<usize, &NodeProto> = nodes.iter().copied().collect();
        let operand = |(place, i): &(usize, usize)| by_place.get(place)?.input.get(*i);
        let elements = |at: &(usize, usize)| stored.get(operand(at)?.as_str()).copied();
        let mut most: HashMap<&str, i64> = HashMap::new();
        for (at, parameter) in &self.parameters {
            let most = most.entry(parameter.name.as_str()).or_default();
            *most = (*most).max(elements(at).unwrap_or(0));
        }
        let is_smaller = |at: &(usize, usize), p: &Parameter| {
            elements(at).is_some_and(|n| most.get(p.name.as_str()).is_some_and(|most| n < *most))
        };
        let smaller: Vec<(usize, usize)> =
            self.parameters.iter().filter(|(at, p)| is_smaller(at, p)).map(|(at, _)| *at).collect();
        for at in smaller {
            self.parameters.remove(&at);
            self.kept.extend(operand(&at).cloned());
        }
    }

    /// Nodes that the optimization wrote have no call, such as the Split of a packed bias: one whose readers are all of a module reads
    /// the only parameter of that module that is missing, unless its operand is the module's own. Of equal tensors the optimization keeps
    /// the first; where a later one is kept, the other is a second name of it.
    fn without_call(
        &mut self,
        graph: &GraphProto,
        nodes: &[(usize, &NodeProto)],
        parameters: &HashMap<String, String>,
        stored: &HashMap<&str, i64>,
    ) {
        let missing = self.missing_of(parameters, |name| stored.contains_key(name));
        if missing.is_empty() {
            return;
        }
        let places = places(graph);
        let mut readers: HashMap<&str, HashSet<String>> = HashMap::new();
        for (_, node) in nodes {
            for operand in &node.input {
                readers.entry(operand).or_default().insert(scope::of(node));
            }
        }
        // Initializers that their own modules read, themselves or the results of a node without a call: another module may only borrow
        // the others.
        let mut owned: HashSet<&str> = HashSet::new();
        for (_, node) in nodes {
            let results = if arguments(node).is_none() { &node.output[..] } else { &[] };
            for operand in &node.input {
                let mut of = std::iter::once(operand).chain(results);
                if of.any(|name| {
                    readers.get(name.as_str()).is_some_and(|r| r.contains(module_of(operand)))
                }) {
                    owned.insert(operand);
                }
            }
        }
        let mut restored = vec![];
        for (place, node) in nodes.iter().filter(|(_, node)| arguments(node).is_none()) {
            let of_results = node.output.iter().filter_map(|o| readers.get(o.as_str())).flatten();
            let modules: HashSet<&String> = of_results.collect();
            let [module] = Vec::from_iter(modules)[..] else { continue };
            let Some([name]) = missing.get(module).map(Vec::as_slice) else { continue };
            for (i, operand) in node.input.iter().enumerate() {
                let of_name = places.get(name.as_str());
                let is_earlier =
                    places.get(operand.as_str()).is_some_and(|place| Some(place) < of_name);
                if stored.contains_key(operand.as_str())
                    && module_of(operand) != module
                    && is_earlier
                    && owned.contains(operand.as_str())
                {
                    restored.push(((*place, i), Parameter::new(name)));
                }
            }
        }
        self.parameters.extend(restored);
    }

    /// The parameters of each module that the graph does not store, and no operand is known to stand for.
    pub(super) fn missing(&self, graph: &GraphProto) -> HashMap<String, Vec<String>> {
        let stored: HashSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
        self.missing_of(&listed(graph, "PARAMETER"), |name| stored.contains(name))
    }

    fn missing_of(
        &self,
        parameters: &HashMap<String, String>,
        is_stored: impl Fn(&str) -> bool,
    ) -> HashMap<String, Vec<String>> {
        let found = self.parameters.values().map(|p| &p.name).chain(self.zero_biases.values());
        let found: HashSet<&String> = found.collect();
        let mut missing: HashMap<String, Vec<String>> = HashMap::new();
        for name in parameters.values().filter(|n| !is_stored(n) && !found.contains(n)) {
            missing.entry(module_of(name).into()).or_default().push(name.clone());
        }
        missing
    }

    /// The parameter that the operand stands for.
    pub(super) fn parameter(&self, node: usize, operand: usize) -> Option<&Parameter> {
        self.parameters.get(&(node, operand))
    }

    /// Whether the operand is a constant that is stored as a parameter.
    pub(super) fn is_constant(&self, node: usize, operand: usize) -> bool {
        self.constants.contains(&(node, operand))
    }

    /// Whether the exporter changed the name of anything.
    pub(super) fn is_optimized(&self) -> bool {
        !self.parameters.is_empty() || !self.zero_biases.is_empty()
    }

    /// The all-zero bias that the exporter dropped from a matmul.
    pub(super) fn zero_bias(&self, node: usize) -> Option<&str> {
        self.zero_biases.get(&node).map(String::as_str)
    }

    /// Whether an initializer stands for itself somewhere, or nothing is known of it.
    pub(super) fn keeps(&self, initializer: &str) -> bool {
        self.parameters.is_empty() || self.kept.contains(initializer)
    }
}

/// A shape of one axis and further ones of one element.
fn column(dims: &[i64]) -> Option<Vec<i64>> {
    let [_, others @ ..] = dims else { return None };
    (!others.is_empty() && others.iter().all(|n| *n == 1)).then(|| dims.to_vec())
}

/// The module that a parameter is of.
fn module_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}

/// The role of the operand in PyTorch's operation.
fn of_argument(op: &str, index: usize) -> Role {
    match (op, index) {
        ("addmm" | "baddbmm", 0) => Role::Bias,
        ("addmm" | "baddbmm", 2) | ("embedding", 0) => Role::Weight,
        ("linear" | "conv1d" | "conv2d" | "conv3d" | "convolution", 1) => Role::Weight,
        ("linear" | "conv1d" | "conv2d" | "conv3d" | "convolution", 2) => Role::Bias,
        ("conv_transpose1d" | "conv_transpose2d" | "conv_transpose3d", 1) => Role::Weight,
        ("conv_transpose1d" | "conv_transpose2d" | "conv_transpose3d", 2) => Role::Bias,
        ("instance_norm", 1) => Role::Weight,
        ("instance_norm", 2) => Role::Bias,
        // Its operators are many: by whether they train, and whether they return the statistics.
        (op, 1) if op.contains("batch_norm") => Role::Weight,
        (op, 2) if op.contains("batch_norm") => Role::Bias,
        ("layer_norm" | "group_norm" | "rms_norm" | "native_layer_norm", 2) => Role::Weight,
        ("layer_norm" | "group_norm" | "native_layer_norm", 3) => Role::Bias,
        _ => Role::Other,
    }
}

/// The role of the operand in an ONNX node.
fn of_operand(op_type: &str, index: usize) -> Role {
    match (op_type, index) {
        ("MatMul", _) | ("Gather", 0) | ("Mul", _) => Role::Weight,
        ("Gemm" | "Conv" | "ConvTranspose", 1) => Role::Weight,
        ("Gemm" | "Conv" | "ConvTranspose", 2) => Role::Bias,
        ("LayerNormalization" | "BatchNormalization", 1) => Role::Weight,
        ("LayerNormalization" | "BatchNormalization", 2) => Role::Bias,
        ("GroupNormalization" | "InstanceNormalization" | "RMSNormalization", 1) => Role::Weight,
        ("GroupNormalization" | "InstanceNormalization", 2) | ("Add", _) => Role::Bias,
        _ => Role::Other,
    }
}
