//! Nodes without a call that several modules read, copied so that each module has its own.
//!
//! The dynamo exporter's optimization merges initializers with equal values, and then nodes that do the same to them: the packed biases of
//! all `torch.nn.MultiheadAttention` begin as zeros, so one Split serves all layers. A copy reads the initializer, which
//! [`super::restore`] replaces by the parameter of its module.

use super::messages::{GraphProto, NodeProto};
use super::scope;
use crate::import::limits::{Budget, Exceeded, Resource};
use frit_ir::{Diagnostic, Origin};
use prost::Message;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Positions of a node and of one of its operands.
type Operand = (usize, usize);

/// A copy of a node.
#[derive(Clone, Debug)]
pub(crate) struct Copied {
    /// Position of the node.
    pub(crate) of: usize,
    /// Position of the copy, behind all nodes that were there.
    pub(crate) at: usize,
    /// The operands that read its results.
    pub(crate) readers: Vec<Operand>,
}

/// A node with the operands that read its results, by their modules.
pub(super) type Shared = (usize, BTreeMap<String, Vec<Operand>>);

/// The nodes without a call that several modules read, and that read initializers.
pub(super) fn find(graph: &GraphProto, is_called: &[bool]) -> Vec<Shared> {
    let mut readers: HashMap<&str, Vec<Operand>> = HashMap::new();
    for (place, node) in graph.node.iter().enumerate() {
        for (i, operand) in node.input.iter().enumerate() {
            readers.entry(operand).or_default().push((place, i));
        }
    }
    let stored: HashSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    let mut shared = vec![];
    for (place, node) in graph.node.iter().enumerate() {
        if is_called[place] || !node.input.iter().any(|i| stored.contains(i.as_str())) {
            continue;
        }
        let mut modules: BTreeMap<String, Vec<Operand>> = BTreeMap::new();
        for reader in node.output.iter().filter_map(|o| readers.get(o.as_str())).flatten() {
            modules.entry(scope::of(&graph.node[reader.0])).or_default().push(*reader);
        }
        if modules.len() > 1 {
            shared.push((place, modules));
        }
    }
    shared
}

/// Copies them, each once for every module that lacks one parameter.
///
/// # Errors
/// If the copies are more than the import may make.
pub(super) fn copy(
    graph: &mut GraphProto,
    shared: Vec<Shared>,
    missing: &HashMap<String, Vec<String>>,
    budget: &mut Budget,
) -> Result<Vec<Copied>, Diagnostic> {
    let mut copied = vec![];
    for (of, modules) in shared {
        for (module, readers) in modules {
            if missing.get(&module).is_none_or(|names| names.len() != 1) {
                continue;
            }
            let own = |name: &String| format!("{name}@{module}");
            let node = &graph.node[of];
            let copy = NodeProto {
                name: own(&node.name),
                output: node.output.iter().map(own).collect(),
                ..node.clone()
            };
            let exceeded = |e: Exceeded| e.diagnostic(&node.op_type, &Origin::new(&node.name, ""));
            let names = readers.len() * (module.len() + 1);
            let bytes = copy.encoded_len().saturating_add(names) as u64;
            budget.charge(Resource::Bytes, bytes).map_err(exceeded)?;
            let at = graph.node.len();
            graph.node.push(copy);
            for &(place, i) in &readers {
                let operand = own(&graph.node[place].input[i]);
                graph.node[place].input[i] = operand;
            }
            copied.push(Copied { of, at, readers });
        }
    }
    Ok(copied)
}
