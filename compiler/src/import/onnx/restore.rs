//! Restores the original parameters of operands that the exporter's optimization changed.
//!
//! Each operand gets back what its call names ([`super::calls`]): a parameter under its own name, or a constant where a parameter of
//! the same first values is stored in its place. Nodes that the optimization wrote have no call; their parameters follow from the
//! modules that read them.

use super::calls::{Calls, Parameter, Reading, Slot};
use super::messages::GraphProto;
use super::recurrent::Packed;
use super::trainable::places;
use super::{recurrent, scope, shared};
use crate::import::limits::Budget;
use frit_ir::Diagnostic;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Operators of PyTorch that read the shape of a tensor only.
const OF_SHAPES: &[&str] = &[
    "empty_like",
    "expand_as",
    "full_like",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "rand_like",
    "randn_like",
    "reshape_as",
    "sym_size",
    "type_as",
    "view_as",
    "zeros_like",
];

/// What the exporter's optimization changed.
#[derive(Debug, Default)]
pub(crate) struct Restored {
    /// The parameter that an operand stands for, by position of the node and the operand.
    parameters: HashMap<(usize, usize), Parameter>,
    /// Operands that are constants, although a parameter of the same first values is stored in their place, with their names.
    constants: HashMap<(usize, usize), Option<String>>,
    /// What the tensors of recurrent layers hold, by position of the node and the operand.
    packed: HashMap<(usize, usize), Packed>,
    /// The all-zero bias that the exporter dropped from a matmul, by position of the node.
    zero_biases: HashMap<usize, String>,
    /// Initializers that some operand stands for under their own name, or as no parameter.
    kept: HashSet<String>,
    /// Copies of nodes.
    copied: Vec<shared::Copied>,
    /// Targets of the signature that a call names.
    called: HashSet<String>,
    /// Whether values that calls name are gone.
    is_optimized: bool,
    /// Initializers that the signature does not list and that the exporter computed, each with the parameter from which, if a call
    /// says so.
    computed: BTreeSet<(String, Option<String>)>,
    /// Values that the exporter computed, and stored as a parameter that begins like them.
    alike: BTreeMap<String, String>,
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

impl Restored {
    /// Reads the calls of a graph, and copies nodes that are to read different parameters; nothing without a signature.
    ///
    /// # Errors
    /// If the copies are more than the import may make.
    pub(crate) fn of(graph: &mut GraphProto, budget: &mut Budget) -> Result<Restored, Diagnostic> {
        let Some(calls) = Calls::of(graph) else { return Ok(Restored::default()) };
        let mut restored = Restored::read(&calls);
        let mut is_called: Vec<bool> = calls.calls.iter().map(Option::is_some).collect();
        let missing = restored.missing(&calls);
        if !missing.is_empty() {
            let shared = shared::find(graph, &is_called);
            restored.copied = shared::copy(graph, shared, &missing, budget)?;
            is_called.resize(graph.node.len(), false);
            restored.without_call(graph, &is_called, &missing);
        }
        Ok(restored)
    }

    /// What the calls name.
    fn read(calls: &Calls<'_>) -> Restored {
        let mut restored = Restored { is_optimized: calls.is_optimized(), ..Restored::default() };
        let graph = calls.graph;
        let stored: HashSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
        // Of each call so far.
        let mut layers: HashMap<&str, usize> = HashMap::new();
        for (place, node) in graph.node.iter().enumerate() {
            if let Some(call) = &calls.calls[place]
                && recurrent::is_layer(&node.op_type)
            {
                let layer = layers.entry(call.text).or_default();
                let packed = Packed::of(calls, place, *layer).into_iter();
                restored.packed.extend(packed.map(|(i, packed)| ((place, i), packed)));
                *layer += 1;
            }
            let has_bias = matches!(node.op_type.as_str(), "Gemm" | "Conv" | "ConvTranspose");
            if has_bias
                && node.input.len() == 2
                && let Slot::Argument(position) = calls.slot(place, 2)
                && let Some(name) = calls.parameter_at(place, position)
                && !stored.contains(name)
            {
                restored.zero_biases.insert(place, name.into());
            }
            for (i, operand) in super::operands(node).into_iter().enumerate() {
                if restored.packed.contains_key(&(place, i)) {
                    continue;
                }
                // What is behind the operands is read by graphs inside the node.
                match calls.reading(place, i).unwrap_or(Reading::Own) {
                    Reading::Own => _ = restored.kept.insert(operand.into()),
                    Reading::Parameter(of) => {
                        if of.name == operand {
                            restored.kept.insert(operand.into());
                        }
                        restored.parameters.insert((place, i), of);
                    }
                    Reading::Constant(name) => _ = restored.constants.insert((place, i), name),
                    Reading::Computed(name) => {
                        restored.constants.insert((place, i), None);
                        restored.alike.insert(name, operand.into());
                    }
                }
            }
        }
        restored.without_smaller(calls);
        let targets = calls.parameters().filter(|target| calls.is_called(target));
        restored.called = targets.map(str::to_string).collect();
        restored.kept.extend(graph.output.iter().map(|o| o.name.clone()));
        restored.find_computed(calls);
        restored
    }

    /// Initializers that the signature does not list, where a parameter that the call names is not read by its nodes, or is one of
    /// the same shape beside it.
    fn find_computed(&mut self, calls: &Calls<'_>) {
        let graph = calls.graph;
        let mut read: HashSet<(usize, &str)> = HashSet::new();
        for (place, node) in graph.node.iter().enumerate() {
            let first = calls.first(place);
            read.extend(node.input.iter().map(|operand| (first, operand.as_str())));
            let zero_bias = self.zero_biases.get(&place).map(String::as_str);
            read.extend(zero_bias.map(|name| (first, name)));
        }
        for ((place, _), parameter) in &self.parameters {
            read.insert((calls.first(*place), &parameter.name));
        }
        let mut computed = BTreeSet::new();
        for (place, node) in graph.node.iter().enumerate() {
            let call = calls.calls[place].as_ref();
            let first = calls.first(place);
            for (i, operand) in node.input.iter().enumerate() {
                let Some(dims) = calls.stored.get(operand.as_str()) else { continue };
                let slot = calls.slot(place, i);
                if self.parameters.contains_key(&(place, i))
                    || self.packed.contains_key(&(place, i))
                    || slot == Slot::Exporters
                    || calls.is_listed(operand)
                {
                    continue;
                }
                let may_be_of = call.is_some_and(|call| {
                    let names_it = call.values.iter().any(|v| v.name == operand);
                    !names_it && !dims.is_empty() && !OF_SHAPES.contains(&call.op)
                });
                let is_of = |target: &&str| {
                    may_be_of
                        && calls.stored.contains_key(target)
                        && (!read.contains(&(first, target))
                            || (slot == Slot::Unknown && calls.stored[target] == *dims))
                };
                let of = calls.parameters_of(place).find(is_of);
                computed.insert((operand.clone(), of.map(str::to_string)));
            }
        }
        self.computed = computed;
    }

    /// Of operands that would stand for one parameter, those with fewer elements than others stand for themselves.
    fn without_smaller(&mut self, calls: &Calls<'_>) {
        let operand = |(place, i): &(usize, usize)| calls.graph.node[*place].input.get(*i);
        let product = |dims: &[i64]| dims.iter().fold(1, |n: i64, d| n.saturating_mul(*d));
        let elements =
            |at: &(usize, usize)| Some(product(calls.stored.get(operand(at)?.as_str())?));
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
        is_called: &[bool],
        missing: &HashMap<String, Vec<String>>,
    ) {
        let places = places(graph);
        let mut readers: HashMap<&str, HashSet<String>> = HashMap::new();
        for node in &graph.node {
            for operand in &node.input {
                readers.entry(operand).or_default().insert(scope::of(node));
            }
        }
        // Initializers that their own modules read, themselves or the results of a node without a call: another module may only borrow
        // the others.
        let mut owned: HashSet<&str> = HashSet::new();
        for (node, is_called) in graph.node.iter().zip(is_called) {
            let results = if *is_called { &[] } else { &node.output[..] };
            for operand in &node.input {
                let mut of = std::iter::once(operand).chain(results);
                if of.any(|name| {
                    readers.get(name.as_str()).is_some_and(|r| r.contains(module_of(operand)))
                }) {
                    owned.insert(operand);
                }
            }
        }
        let stored: HashSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
        let mut restored = vec![];
        for (place, node) in graph.node.iter().enumerate().filter(|(place, _)| !is_called[*place]) {
            let of_results = node.output.iter().filter_map(|o| readers.get(o.as_str())).flatten();
            let modules: HashSet<&String> = of_results.collect();
            let [module] = Vec::from_iter(modules)[..] else { continue };
            let Some([name]) = missing.get(module).map(Vec::as_slice) else { continue };
            for (i, operand) in node.input.iter().enumerate() {
                let of_name = places.get(name.as_str());
                let is_earlier =
                    places.get(operand.as_str()).is_some_and(|place| Some(place) < of_name);
                if stored.contains(operand.as_str())
                    && module_of(operand) != module
                    && is_earlier
                    && owned.contains(operand.as_str())
                {
                    restored.push(((place, i), Parameter::new(name)));
                }
            }
        }
        self.parameters.extend(restored);
    }

    /// The parameters of each module that the graph does not store, and no operand is known to stand for.
    fn missing(&self, calls: &Calls<'_>) -> HashMap<String, Vec<String>> {
        let graph = calls.graph;
        let stored: HashSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
        let found = self.names();
        let mut missing: HashMap<String, Vec<String>> = HashMap::new();
        for name in calls.parameters().filter(|n| !stored.contains(n) && !found.contains(n)) {
            missing.entry(module_of(name).into()).or_default().push(name.into());
        }
        missing
    }

    /// The parameters that operands stand for under other names.
    pub(super) fn names(&self) -> HashSet<&str> {
        let packed = self.packed.values().flat_map(|packed| &packed.parameters);
        let found = self.parameters.values().map(|p| &p.name).chain(self.zero_biases.values());
        found.chain(packed).map(String::as_str).collect()
    }

    /// The operands that stand for a parameter of another name, in the order of the nodes.
    pub(crate) fn replacements(&self) -> Vec<Replacement> {
        let of = |(&(node, operand), parameter): (&(usize, usize), &Parameter)| {
            let Parameter { name: parameter, transposed, column } = parameter.clone();
            Replacement { node, operand, parameter, transposed, column }
        };
        let zeros = self.zero_biases.iter();
        let zeros = zeros.map(|(&node, name)| of((&(node, 2), &Parameter::new(name))));
        let mut found: Vec<Replacement> = self.parameters.iter().map(of).chain(zeros).collect();
        found.sort_by_key(|r| (r.node, r.operand));
        found
    }

    /// The operands that are tensors of recurrent layers, in the order of the nodes.
    pub(crate) fn all_packed(&self) -> Vec<((usize, usize), &Packed)> {
        let mut found: Vec<_> = self.packed.iter().map(|(at, packed)| (*at, packed)).collect();
        found.sort_unstable_by_key(|(at, _)| *at);
        found
    }

    /// The operands that are constants, although they are stored as a parameter, with the names of buffers, in the order of the nodes.
    pub(crate) fn constants(&self) -> Vec<((usize, usize), Option<&str>)> {
        let all = self.constants.iter();
        let mut found: Vec<_> = all.map(|(at, name)| (*at, name.as_deref())).collect();
        found.sort_unstable();
        found
    }

    /// The copies of nodes.
    pub(crate) fn copied(&self) -> &[shared::Copied] {
        &self.copied
    }

    /// The parameter that the operand stands for.
    pub(super) fn parameter(&self, node: usize, operand: usize) -> Option<&Parameter> {
        self.parameters.get(&(node, operand))
    }

    /// What the operand, a tensor of a recurrent layer, holds.
    pub(super) fn packed(&self, node: usize, operand: usize) -> Option<&Packed> {
        self.packed.get(&(node, operand))
    }

    /// Whether the operand is a constant that is stored as a parameter.
    pub(super) fn is_constant(&self, node: usize, operand: usize) -> bool {
        self.constants.contains_key(&(node, operand))
    }

    /// Whether the exporter's optimization changed what the graph reads.
    pub(super) fn is_optimized(&self) -> bool {
        let restores =
            !self.parameters.is_empty() || !self.packed.is_empty() || !self.zero_biases.is_empty();
        self.is_optimized || restores
    }

    /// Whether a call names the parameter.
    pub(super) fn is_called(&self, parameter: &str) -> bool {
        self.called.contains(parameter)
    }

    /// Initializers that the exporter computed, each with the parameter from which, if that is known.
    pub(super) fn computed(&self) -> &BTreeSet<(String, Option<String>)> {
        &self.computed
    }

    /// Values that the exporter computed, each with the parameter that it is stored as.
    pub(super) fn alike(&self) -> &BTreeMap<String, String> {
        &self.alike
    }

    /// The all-zero bias that the exporter dropped from a matmul.
    pub(super) fn zero_bias(&self, node: usize) -> Option<&str> {
        self.zero_biases.get(&node).map(String::as_str)
    }

    /// Whether an initializer stands for itself somewhere, or nothing is known of it.
    pub(super) fn keeps(&self, initializer: &str) -> bool {
        let replaces_none =
            self.parameters.is_empty() && self.packed.is_empty() && self.constants.is_empty();
        replaces_none || self.kept.contains(initializer)
    }
}

/// The module that a parameter is of.
fn module_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}
