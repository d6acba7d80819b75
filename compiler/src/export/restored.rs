//! Parameters that the exporter's optimization merged with others, transposed or dropped ([`crate::import::onnx`]): each has an initializer
//! of its own again, which the operands that stand for it read. Those of recurrent layers are packed into one tensor again.

use super::message::{Elements, Message as Written, Piece};
use super::{Export, Fault, adapter_of, merge, trained};
use crate::import::limits::{Budget, Limits};
use crate::import::onnx::messages::{GraphProto, ModelProto, NodeProto};
use crate::import::onnx::{Packed, Replacement, Restored as Import};
use frit_passes::adapter::Adapted;
use prost::Message;
use prost::bytes::Bytes;
use std::collections::{BTreeMap, HashMap, HashSet};

/// An initializer that the model does not have.
#[derive(Clone, Debug)]
pub(super) struct Added {
    pub(super) parameter: String,
    /// Whether it is the transpose.
    pub(super) transposed: bool,
    /// Its shape, where that is the vector with further axes.
    pub(super) column: Option<Vec<i64>>,
    /// ONNX's number of its data type.
    pub(super) dtype: u64,
    /// The initializer that stands for it.
    pub(super) stored: String,
}

/// What is changed in the model's graph.
#[derive(Debug, Default)]
pub(super) struct Restored {
    /// Operands with their new names, by position of the node; one behind the last is appended.
    pub(super) operands: HashMap<usize, Vec<(usize, String)>>,
    /// Nodes behind another, by its position: copies of it.
    pub(super) copies: HashMap<usize, Vec<NodeProto>>,
    /// New initializers by name.
    pub(super) added: BTreeMap<String, Added>,
    /// New initializers by name, of several parameters, with ONNX's number of their data type.
    pub(super) packed: BTreeMap<String, (Packed, u64)>,
    /// New initializers by name, with the first values of these.
    pub(super) constants: BTreeMap<String, String>,
    /// Initializers that nothing reads any more.
    pub(super) dropped: HashSet<String>,
}

impl Restored {
    /// Restores the parameters of a model file that have trained weights.
    pub(super) fn of(model: Bytes, is_trained: impl Fn(&str) -> bool) -> Restored {
        let mut graph = ModelProto::decode(model).unwrap_or_default().graph.unwrap_or_default();
        // The import has made these.
        let mut budget = Budget::new(Limits::default());
        let import = Import::of(&mut graph, &mut budget).unwrap_or_default();
        let types: HashMap<&str, i32> =
            graph.initializer.iter().map(|t| (t.name.as_str(), t.data_type)).collect();
        let mut restored = Restored::default();
        let mut copies: BTreeMap<usize, NodeProto> =
            import.copied().iter().map(|c| (c.at, graph.node[c.at].clone())).collect();
        for replacement in import.replacements() {
            let Replacement { node, operand, parameter, transposed, column } = replacement;
            // A dropped bias stands beside the weight.
            let inputs = &graph.node[node].input;
            let beside = inputs.get(operand.min(inputs.len().saturating_sub(1)));
            let (true, Some(stored)) = (is_trained(&parameter), beside) else { continue };
            let Some(dtype) = types.get(stored.as_str()) else { continue };
            let name = match (transposed, &column) {
                (true, _) => format!("{parameter}.transposed"),
                (_, Some(_)) => format!("{parameter}.column"),
                _ => parameter.clone(),
            };
            match copies.get_mut(&node) {
                Some(copy) => copy.input[operand].clone_from(&name),
                None => restored.operands.entry(node).or_default().push((operand, name.clone())),
            }
            if !types.contains_key(name.as_str()) {
                let (dtype, stored) = (*dtype as u64, stored.clone());
                let added = Added { parameter, transposed, column, dtype, stored };
                restored.added.entry(name).or_insert(added);
            }
        }
        for ((node, operand), packed) in import.all_packed() {
            let stored = graph.node[node].input[operand].as_str();
            let (Some(dtype), [first, ..]) = (types.get(stored), &packed.parameters[..]) else {
                continue;
            };
            if packed.parameters.iter().any(|name| is_trained(name)) {
                let name = format!("{first}.packed");
                restored.operands.entry(node).or_default().push((operand, name.clone()));
                restored.packed.insert(name, (packed.clone(), *dtype as u64));
            }
        }
        for ((node, operand), name) in import.constants() {
            let stored = graph.node[node].input[operand].clone();
            let name = name.filter(|name| !types.contains_key(name));
            let name = name.map_or_else(|| format!("{stored}.constant"), str::to_string);
            restored.operands.entry(node).or_default().push((operand, name.clone()));
            restored.constants.insert(name, stored);
        }
        for copied in import.copied() {
            restored.copies.entry(copied.of).or_default().extend(copies.remove(&copied.at));
            for &(place, operand) in &copied.readers {
                let name = graph.node[place].input[operand].clone();
                restored.operands.entry(place).or_default().push((operand, name));
            }
        }
        restored.dropped = restored.unread(&graph);
        restored
    }

    /// The operands of a node in the order of their positions, with what is appended last.
    pub(super) fn rename(&self, place: usize, node: &mut NodeProto) {
        for (operand, name) in self.operands.get(&place).into_iter().flatten() {
            match node.input.get_mut(*operand) {
                Some(input) => input.clone_from(name),
                None => node.input.push(name.clone()),
            }
        }
    }

    /// Initializers of which all readers read another now.
    fn unread(&self, graph: &GraphProto) -> HashSet<String> {
        let has_graphs = |n: &NodeProto| n.attribute.iter().any(|a| a.g.is_some());
        // Graphs inside nodes may read them, too.
        if graph.node.iter().any(has_graphs) {
            return HashSet::new();
        }
        let mut replaced = HashSet::new();
        let mut read: HashSet<String> = graph.output.iter().map(|o| o.name.clone()).collect();
        for (place, node) in graph.node.iter().enumerate() {
            let mut renamed = node.clone();
            self.rename(place, &mut renamed);
            for (before, after) in node.input.iter().zip(&renamed.input) {
                if before != after {
                    replaced.insert(before.clone());
                }
            }
            read.extend(renamed.input);
        }
        replaced.retain(|name| !read.contains(name));
        replaced
    }
}

impl Export<'_> {
    /// A tensor of several parameters.
    pub(super) fn packed(
        &mut self,
        name: &str,
        packed: &Packed,
        dtype: u64,
    ) -> Result<Written, Fault> {
        let mut parts = vec![];
        for parameter in &packed.parameters {
            let found = self.trained.ty(parameter);
            let is_adapted = adapter_of(self.origin, self.trained, parameter).is_some();
            let Some((own, shape)) = found.filter(|_| !is_adapted) else {
                return Err(Fault::LeftOut(parameter.clone()));
            };
            let Some(size) = trained::stored_size(own, dtype) else {
                return Err(self.base.refuse(format!("`{name}` is not stored as floats")).into());
            };
            let elements = Elements {
                parameter: parameter.clone(),
                transposed: false,
                dtype,
                bytes: shape.iter().map(|n| *n as u64).product::<u64>() * size,
                adapter: None,
            };
            parts.push(self.trained.elements(&elements)?.into_owned());
            self.left.remove(parameter);
        }
        Ok(self.tensor(&packed.dims, dtype, name, Piece::Bytes(packed.packed(&parts).into())))
    }

    /// The initializer of a parameter that the model has under another name, of these tensors, or not at all.
    pub(super) fn added(
        &mut self,
        name: &str,
        added: &Added,
        tensors: &HashMap<String, Bytes>,
    ) -> Result<Written, Fault> {
        let Added { parameter, transposed, column, dtype, stored } = added;
        let adapter = adapter_of(self.origin, self.trained, parameter);
        let Some((own, shape)) = self.trained.ty(parameter) else {
            let found = adapter.zip(tensors.get(stored));
            let (adapter, tensor) = found.ok_or_else(|| Fault::LeftOut(stored.clone()))?;
            let adapter = Adapted { out_first: adapter.out_first != *transposed, ..adapter };
            return self.adapted(tensor, (name, parameter), adapter);
        };
        let Some(size) = trained::stored_size(own, *dtype) else {
            return Err(self.base.refuse(format!("`{stored}` is not stored as floats")).into());
        };
        let mut dims: Vec<i64> = shape.iter().map(|n| *n as i64).collect();
        if *transposed {
            dims.reverse();
        }
        dims = column.clone().unwrap_or(dims);
        let data = Elements {
            parameter: parameter.clone(),
            transposed: *transposed,
            dtype: *dtype,
            bytes: shape.iter().map(|n| *n as u64).product::<u64>() * size,
            adapter: adapter.and_then(|a| merge(shape, a, None)),
        };
        self.left.remove(parameter);
        Ok(self.tensor(&dims, *dtype, name, Piece::Elements(data)))
    }
}
