//! Calls that write their operand: they become plain ones, if nothing else sees the memory that they write.
//!
//! A program that was decomposed has none. In others, activations in place and counters of normalizations are the usual ones.

use super::call::Fault;
use super::schema::{Argument, Graph, Node};
use super::translate::{result_names, value_name, value_names};
use std::collections::{HashMap, HashSet};

/// Operators whose result may share the memory of their first operand.
const VIEWS: &[&str] = &[
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "broadcast_to",
    "chunk",
    "contiguous",
    "detach",
    "diagonal",
    "dropout",
    "expand",
    "expand_as",
    "flatten",
    "lift_fresh",
    "movedim",
    "narrow",
    "permute",
    "real",
    "reshape",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "swapaxes",
    "swapdims",
    "t",
    "to",
    "transpose",
    "type_as",
    "unbind",
    "unflatten",
    "unfold",
    "unsqueeze",
    "view",
    "view_as",
];

/// Whether a target is an operator that writes its first operand: `aten.add_.Tensor`, but not `aten.__and__.Tensor`.
pub(super) fn writes(target: &str) -> bool {
    let name = target.strip_prefix("torch.ops.").unwrap_or(target);
    let op = name.strip_prefix("aten.").and_then(|n| n.split('.').next()).unwrap_or("");
    op.ends_with('_') && !op.ends_with("__")
}

/// Which names may share memory.
pub(super) struct Aliases {
    /// The name whose memory a name may share; itself if it is not in the map.
    roots: HashMap<String, String>,
    /// The last call that reads a name; results of the graph are read after all calls.
    last: HashMap<String, usize>,
}

impl Aliases {
    pub(super) fn new(graph: &Graph) -> Aliases {
        let mut last = HashMap::new();
        for (i, node) in graph.nodes.iter().enumerate() {
            for name in node.inputs.iter().flat_map(|a| value_names(&a.arg)) {
                last.insert(name.to_string(), i);
            }
        }
        for name in graph.outputs.iter().flat_map(value_names) {
            last.insert(name.to_string(), usize::MAX);
        }
        Aliases { roots: HashMap::new(), last }
    }

    fn root<'a>(&'a self, name: &'a str) -> &'a str {
        self.roots.get(name).map_or(name, String::as_str)
    }

    /// Notes what the results of a call share.
    pub(super) fn results(&mut self, op: &str, node: &Node) {
        let Some(operand) = node.inputs.first().and_then(|i| value_name(&i.arg)) else { return };
        if VIEWS.contains(&op) || writes(&node.target) {
            let root = self.root(operand).to_string();
            for name in result_names(node) {
                self.roots.insert(name.into(), root.clone());
            }
        }
    }

    /// Allows a call at a place to write its first operand.
    ///
    /// # Errors
    /// If another name of the same memory is read later.
    pub(super) fn write(&self, place: usize, node: &Node) -> Result<(), Fault> {
        let Some(written) = node.inputs.first().and_then(|i| value_name(&i.arg)) else {
            return Ok(());
        };
        let root = self.root(written);
        let shares = |name: &str| name != written && self.root(name) == root;
        let others = self.roots.keys().map(String::as_str).chain([root]);
        let mut later = others.filter(|name| shares(name) && self.last.get(*name) > Some(&place));
        // The result of an earlier write is the operand under another name, and equal to it only before this one.
        match later.next() {
            None => Ok(()),
            Some(other) => Err(Fault::Unsupported(format!(
                "writing `{written}`, of which `{other}` is a view that is read later,"
            ))),
        }
    }
}

/// A buffer that the graph writes although its outputs depend on it, other than as a running statistic.
pub(super) fn state_that_matters<'a>(
    graph: &'a Graph,
    buffers: &HashMap<&'a str, &'a str>,
    mutated: &HashSet<&str>,
    outputs: &HashSet<&str>,
) -> Option<&'a str> {
    let mut written: HashSet<&str> = mutated.clone();
    let mut aliases = Aliases { roots: HashMap::new(), last: HashMap::new() };
    for node in &graph.nodes {
        let op = node.target.strip_prefix("torch.ops.aten.").unwrap_or(&node.target);
        let op = op.split('.').next().unwrap_or(op);
        let operand = node.inputs.first().and_then(|i| value_name(&i.arg));
        if writes(&node.target)
            && let Some(operand) = operand
        {
            let root = aliases.root(operand).to_string();
            written.extend(buffers.keys().filter(|b| **b == root));
        }
        aliases.results(op, node);
    }
    let mut sources: Vec<&str> = buffers.keys().copied().filter(|b| written.contains(b)).collect();
    sources.sort_unstable();
    sources
        .into_iter()
        .find(|buffer| reaches(graph, buffer, outputs))
        .and_then(|b| buffers.get(b).copied())
}

/// Whether an output depends on a placeholder.
fn reaches(graph: &Graph, from: &str, outputs: &HashSet<&str>) -> bool {
    let mut reached: HashSet<&str> = HashSet::from([from]);
    for node in &graph.nodes {
        let normalizes = node.target.contains("batch_norm");
        let statistic = |name: &str| normalizes && matches!(name, "running_mean" | "running_var");
        let reads = node.inputs.iter().filter(|i| !statistic(&i.name));
        let sees = reads.flat_map(|i| value_names(&i.arg)).any(|name| reached.contains(name));
        if sees {
            reached.extend(result_names(node));
            // What is written in place is seen under its own name.
            if let Some(Argument::AsTensor(t)) = node.inputs.first().map(|i| &i.arg)
                && writes(&node.target)
            {
                reached.insert(&t.name);
            }
        }
    }
    outputs.iter().any(|name| reached.contains(name))
}
