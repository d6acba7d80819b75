//! What the calls of PyTorch behind the nodes name for each operand.
//!
//! The dynamo exporter's optimization transposes and renames weights (`val_42`), and stores tensors of equal values once: all zero
//! biases of one length, and buffers and constants with them. A node's metadata has the original call with its operands, and the
//! program's signature says which of these are parameters and buffers ([`slots`] says which operand is which).

mod slots;

pub(super) use slots::Slot;

use super::exporter::{self, Call};
use super::messages::GraphProto;
use super::tensor::is_float;
use super::trainable;
use slots::slot;
use std::collections::{HashMap, HashSet};

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
    pub(super) fn new(name: &str) -> Parameter {
        Parameter { name: name.into(), transposed: false, column: None }
    }
}

/// What an operand that reads an initializer of floats stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// The initializer itself, or nothing is known.
    Own,
    /// A parameter, or a statistic.
    Parameter(Parameter),
    /// A constant, although a parameter is stored in its place; with its name, if it is a buffer.
    Constant(Option<String>),
    /// The same, of a value of this name that the exporter computed, which may be a function of parameters.
    Computed(String),
}

/// What a call names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named<'a> {
    Parameter(&'a str),
    /// A buffer or constant of the module.
    Fixed(&'a str),
    /// A computed value, or an input.
    Value(&'a str),
}

/// The calls of a graph.
pub(super) struct Calls<'a> {
    pub(super) graph: &'a GraphProto,
    /// By position of the node.
    pub(super) calls: Vec<Option<Call<'a>>>,
    /// The nodes of each call, by its text.
    groups: HashMap<&'a str, Nodes<'a>>,
    placeholders: HashMap<&'a str, Named<'a>>,
    /// Targets that some call names.
    called: HashSet<&'a str>,
    /// Targets of the signature.
    listed: HashSet<&'a str>,
    /// Those that are parameters.
    parameters: HashSet<&'a str>,
    /// Shapes of the initializers that are floats.
    pub(super) stored: HashMap<&'a str, &'a [i64]>,
    /// Inputs, and results of nodes, with the positions of the latter.
    made: HashMap<&'a str, Option<usize>>,
    /// Whether some parameter is not stored, and no call names it.
    lacks_parameters: bool,
}

/// The nodes of a call.
#[derive(Default)]
struct Nodes<'a> {
    /// Position of the first.
    first: usize,
    n: usize,
    /// How many there are of each operator.
    of: HashMap<&'a str, usize>,
}

/// A call among all of them.
pub(super) struct Group<'c> {
    calls: &'c Calls<'c>,
    text: &'c str,
}

impl Group<'_> {
    /// How many nodes there are of this operator, or in all.
    fn count(&self, op_type: Option<&str>) -> usize {
        self.calls.groups.get(self.text).map_or(0, |nodes| match op_type {
            Some(op) => nodes.of.get(op).copied().unwrap_or(0),
            None => nodes.n,
        })
    }

    /// Whether one of the nodes makes the value.
    fn makes(&self, name: &str) -> bool {
        let place = self.calls.made.get(name).copied().flatten();
        let maker = place.and_then(|place| self.calls.calls[place].as_ref());
        maker.is_some_and(|call| call.text == self.text)
    }

    /// Whether it is a stored number that the signature does not list.
    fn is_number(&self, name: &str) -> bool {
        self.calls.is_number(name)
    }
}

impl<'a> Calls<'a> {
    /// Reads them; `None` without a signature.
    pub(super) fn of(graph: &'a GraphProto) -> Option<Calls<'a>> {
        let mut placeholders = HashMap::new();
        let (mut parameters, mut listed) = (HashSet::new(), HashSet::new());
        for (placeholder, kind, target) in trainable::signature_of(graph) {
            let named = match kind {
                "PARAMETER" => Named::Parameter(target),
                "BUFFER" | "CONSTANT_TENSOR" => Named::Fixed(target),
                _ => continue,
            };
            placeholders.insert(placeholder, named);
            listed.insert(target);
            if kind == "PARAMETER" {
                parameters.insert(target);
            }
        }
        if parameters.is_empty() {
            return None;
        }
        let calls: Vec<Option<Call<'a>>> = graph.node.iter().map(exporter::call).collect();
        let mut groups: HashMap<&str, Nodes<'_>> = HashMap::new();
        let mut called = HashSet::new();
        for (place, call) in calls.iter().enumerate() {
            let Some(call) = call else { continue };
            let nodes = groups.entry(call.text).or_default();
            if nodes.n == 0 {
                nodes.first = place;
            }
            nodes.n += 1;
            *nodes.of.entry(graph.node[place].op_type.as_str()).or_default() += 1;
            for value in &call.values {
                if let Some(Named::Parameter(target) | Named::Fixed(target)) =
                    placeholders.get(value.name)
                {
                    called.insert(*target);
                }
            }
        }
        let floats = graph.initializer.iter().filter(|t| is_float(t.data_type));
        let stored: HashMap<&str, &[i64]> =
            floats.map(|t| (t.name.as_str(), t.dims.as_slice())).collect();
        let inputs = graph.input.iter().map(|i| (i.name.as_str(), None));
        let nodes = graph.node.iter().enumerate();
        let results = nodes.flat_map(|(p, n)| n.output.iter().map(move |o| (o.as_str(), Some(p))));
        let made = inputs.chain(results).collect();
        let lacks_parameters = parameters
            .iter()
            .any(|name: &&str| !stored.contains_key(name) && !called.contains(name));
        Some(Calls {
            graph,
            calls,
            groups,
            placeholders,
            called,
            listed,
            parameters,
            stored,
            made,
            lacks_parameters,
        })
    }

    /// Whether some call names the parameter or buffer.
    pub(super) fn is_called(&self, target: &str) -> bool {
        self.called.contains(target)
    }

    /// The parameters of the signature.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &'a str> {
        self.parameters.iter().copied()
    }

    fn named(&self, name: &'a str) -> Named<'a> {
        self.placeholders.get(name).copied().unwrap_or(Named::Value(name))
    }

    /// Whether the optimization removed, merged or computed a value. It leaves no Constant, which all other exports have where a call
    /// reads one.
    pub(super) fn is_optimized(&self) -> bool {
        let is_gone = |name: &str| !self.placeholders.contains_key(name) && self.is_absent(name);
        let mut values = self.calls.iter().flatten().flat_map(|call| &call.values);
        self.graph.node.iter().all(|n| n.op_type != "Constant") && values.any(|v| is_gone(v.name))
    }

    /// Whether nothing makes a value that a call names. The parts of several results have other names.
    fn is_absent(&self, name: &str) -> bool {
        !self.made.contains_key(name) && !matches!(operation(name), "getitem" | "sym_size_int")
    }

    /// The parameters that the node's call names.
    pub(super) fn parameters_of(&self, place: usize) -> impl Iterator<Item = &'a str> + '_ {
        self.named_parameters(place).into_iter().flatten()
    }

    /// What the node's call names, in the order of its text, where that is a parameter.
    pub(super) fn named_parameters(&self, place: usize) -> Vec<Option<&'a str>> {
        let values = self.calls[place].iter().flat_map(|call| &call.values);
        let named = values.map(|value| match self.named(value.name) {
            Named::Parameter(target) => Some(target),
            _ => None,
        });
        named.collect()
    }

    /// How many nodes of this operator the node's call has.
    pub(super) fn nodes_of(&self, place: usize, op_type: &str) -> usize {
        let nodes = self.calls[place].as_ref().and_then(|call| self.groups.get(call.text));
        nodes.and_then(|nodes| nodes.of.get(op_type).copied()).unwrap_or(0)
    }

    /// The parameter at this position of the node's call.
    pub(super) fn parameter_at(&self, place: usize, position: usize) -> Option<&'a str> {
        match self.named(self.calls[place].as_ref()?.value_at(position)?) {
            Named::Parameter(target) => Some(target),
            _ => None,
        }
    }

    /// What the operand is to the node's call.
    pub(super) fn slot(&self, place: usize, i: usize) -> Slot {
        let Some(call) = &self.calls[place] else { return Slot::Unknown };
        slot(call, &self.graph.node[place], i, &Group { calls: self, text: call.text })
    }

    /// Position of the first node of the same call.
    pub(super) fn first(&self, place: usize) -> usize {
        let call = self.calls[place].as_ref();
        call.and_then(|call| self.groups.get(call.text)).map_or(place, |nodes| nodes.first)
    }

    /// Whether it is a stored number that the signature does not list as a parameter.
    fn is_number(&self, name: &str) -> bool {
        self.stored.get(name).is_some_and(|dims| dims.is_empty()) && !self.parameters.contains(name)
    }

    /// What operand `i` of a node stands for, if it reads an initializer of floats.
    pub(super) fn reading(&self, place: usize, i: usize) -> Option<Reading> {
        let node = &self.graph.node[place];
        let operand = node.input.get(i)?.as_str();
        let dims = *self.stored.get(operand)?;
        let Some(call) = &self.calls[place] else { return Some(Reading::Own) };
        let constant = |name: Option<&str>| match self.parameters.contains(operand) {
            true => Reading::Constant(name.map(str::to_string)),
            false => Reading::Own,
        };
        // If no call names the parameter, the nodes that read it may be of other calls than they say.
        let added = || if self.is_called(operand) { constant(None) } else { Reading::Own };
        let slot = self.slot(place, i);
        let named = match slot {
            Slot::Argument(position) => match call.value_at(position) {
                Some(name) => self.named(name),
                // A number, or the default of a weight.
                None => return Some(added()),
            },
            Slot::Value(k) => self.named(call.values[k].name),
            Slot::Exporters => return Some(constant(None)),
            Slot::Unknown => return Some(self.unknown(call, operand).unwrap_or_else(added)),
        };
        let is_statistic = node.op_type == "BatchNormalization" && i >= 3;
        let transposed = call.op == "linear" && node.op_type == "MatMul" && i == 1;
        Some(match named {
            Named::Fixed(target) if target == operand => Reading::Own,
            Named::Fixed(target) if is_statistic => Reading::Parameter(Parameter::new(target)),
            Named::Fixed(target) => constant(Some(target)),
            // The only values in the place of an initializer are those that the exporter computed or removed. If no call names the
            // parameter, it may be meant itself: the optimization removes a factor of 1.
            Named::Value(name) if self.made.contains_key(name) => Reading::Own,
            Named::Value(name) if is_created(name) => added(),
            Named::Value(name) => match (View::of(name), added()) {
                (View::Same, _) | (_, Reading::Own) => Reading::Own,
                // It may be one of a parameter that is gone.
                (View::Other, _) if !self.lacks_parameters => Reading::Own,
                // The transpose is stored in the place of a matrix only if they are equal.
                (View::Transpose, _)
                    if !self.lacks_parameters && matches!(dims, [n, m] if n == m) =>
                {
                    let transposed = Parameter { transposed: true, ..Parameter::new(operand) };
                    Reading::Parameter(transposed)
                }
                _ => Reading::Computed(name.into()),
            },
            Named::Parameter(target) if target == operand && !transposed => Reading::Own,
            Named::Parameter(target) if self.may_hold(operand, target) => {
                let is_vector = matches!(call.op, "group_norm" | "prelu" | "_prelu_kernel");
                let column = column(dims).filter(|_| is_vector);
                Reading::Parameter(Parameter { name: target.into(), transposed, column })
            }
            Named::Parameter(_) => Reading::Own,
        })
    }

    /// What an operand stands for whose argument is not known; `None` for a constant that the exporter added.
    fn unknown(&self, call: &Call<'a>, operand: &str) -> Option<Reading> {
        let named: Vec<Named<'_>> = call.values.iter().map(|v| self.named(v.name)).collect();
        let is_own =
            |n: &Named<'_>| matches!(n, Named::Parameter(t) | Named::Fixed(t) if *t == operand);
        // What is not listed may be any function of what the call reads.
        if named.iter().any(is_own) || !self.parameters.contains(operand) {
            return Some(Reading::Own);
        }
        let missing = |n: &Named<'a>| match *n {
            Named::Parameter(target) if !self.stored.contains_key(target) => Some(target),
            _ => None,
        };
        let missing: HashSet<&str> = named.iter().filter_map(missing).collect();
        let is_gone = |n: &Named<'_>| matches!(*n, Named::Value(name) if self.is_absent(name) && !is_created(name));
        match (Vec::from_iter(missing).as_slice(), named.iter().any(is_gone)) {
            ([], false) => None,
            ([only], _) if self.may_hold(operand, only) => {
                Some(Reading::Parameter(Parameter::new(only)))
            }
            _ => Some(Reading::Own),
        }
    }

    /// Whether an initializer may hold a parameter that is not stored, or another copy of one that is.
    fn may_hold(&self, operand: &str, parameter: &str) -> bool {
        let elements = |dims: &[i64]| dims.iter().fold(1, |n: i64, d| n.saturating_mul(*d));
        let own = self.stored.get(parameter).map(|dims| elements(dims));
        let found = self.stored.get(operand).map(|dims| elements(dims));
        // Numbers that no signature lists are ratios and the like.
        !self.is_number(operand) && own.is_none_or(|n| Some(n) == found)
    }

    /// Whether the signature lists the initializer as a parameter, a buffer or a constant.
    pub(super) fn is_listed(&self, initializer: &str) -> bool {
        self.listed.contains(initializer)
    }
}

/// A name of PyTorch's graph without the number at its end: the operation's.
pub(super) fn operation(name: &str) -> &str {
    match name.rsplit_once('_') {
        Some((operation, number)) if number.bytes().all(|b| b.is_ascii_digit()) => operation,
        _ => name,
    }
}

/// How a value that the optimization removed shows a tensor.
enum View {
    /// Its elements, in their order and shape.
    Same,
    Transpose,
    /// Some of its elements, or all in another shape.
    Other,
    /// It computes.
    None,
}

impl View {
    /// That of a value of this name.
    fn of(name: &str) -> View {
        match operation(name) {
            "alias" | "clone" | "contiguous" | "detach" | "dropout" | "to" | "_to_copy"
            | "type_as" => View::Same,
            "permute" | "t" | "transpose" | "numpy_t" => View::Transpose,
            "expand" | "flatten" | "getitem" | "reshape" | "select" | "slice" | "squeeze"
            | "unsqueeze" | "_unsafe_view" | "view" => View::Other,
            _ => View::None,
        }
    }
}

/// Whether a value is a constant of PyTorch's program.
fn is_created(name: &str) -> bool {
    matches!(
        operation(name),
        "arange"
            | "eye"
            | "full"
            | "full_like"
            | "lift_fresh_copy"
            | "new_full"
            | "new_ones"
            | "new_zeros"
            | "ones"
            | "ones_like"
            | "scalar_tensor"
            | "scalar_tensor_default"
            | "zeros"
            | "zeros_like"
    )
}

/// A shape of which at most one axis has several elements, where it has further ones.
fn column(dims: &[i64]) -> Option<Vec<i64>> {
    let is_vector = dims.len() > 1 && dims.iter().filter(|n| **n != 1).count() < 2;
    is_vector.then(|| dims.to_vec())
}
