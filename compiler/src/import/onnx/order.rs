//! The nodes that the outputs and running statistics depend on, in topological order.

use super::messages::{GraphProto, NodeProto};
use super::subgraph::operands;
use crate::diagnostics::Report;
use frit_ir::{Code, Diagnostic};
use petgraph::algo::tarjan_scc;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::{Dfs, DfsPostOrder, Visitable, Walker};
use std::collections::{BTreeSet, HashMap, HashSet};

/// How messages name a node: by its place in the file, if it is not of a graph inside another.
pub(super) fn label(index: Option<usize>, node: &NodeProto) -> String {
    let place = index.map_or_else(String::new, |index| format!(" #{index}"));
    let name = if node.name.is_empty() { String::new() } else { format!(" \"{}\"", node.name) };
    format!("node{place}{name} ({})", node.op_type)
}

/// The nodes with their places in the file: each after those whose results it reads; nodes that no
/// output needs are left out, but for those that `renews` statistics, as PyTorch does where nothing reads the normalized
/// values. `given` are the names of inputs and initializers.
pub(super) fn sort<'a>(
    graph: &'a GraphProto,
    given: &HashSet<&str>,
    renews: impl Fn(&NodeProto) -> bool,
) -> Result<Vec<(usize, &'a NodeProto)>, Report> {
    let mut makers: HashMap<&str, usize> = HashMap::new();
    for (i, node) in graph.node.iter().enumerate() {
        for name in node.output.iter().filter(|o| !o.is_empty()) {
            if given.contains(name.as_str()) || makers.insert(name, i).is_some() {
                return Err(Diagnostic::error(
                    Code::ValueDefinedTwice,
                    format!("the value \"{name}\" is defined twice"),
                )
                .note(label(Some(i), node))
                .into());
            }
        }
    }
    let undefined = |name: &str, user: String| {
        Diagnostic::error(
            Code::ValueUndefined,
            format!("the value \"{name}\" is used but never defined"),
        )
        .note(format!("used by {user}"))
        .help("the file is damaged or was edited; export the model again")
    };
    let read: Vec<Vec<&str>> = graph.node.iter().map(operands).collect();
    let mut roots = Vec::new();
    for output in &graph.output {
        match makers.get(output.name.as_str()) {
            Some(&i) => roots.push(NodeIndex::new(i)),
            None if given.contains(output.name.as_str()) => {}
            None => return Err(undefined(&output.name, "an output of the graph".into()).into()),
        }
    }
    roots.extend((0..graph.node.len()).filter(|&i| renews(&graph.node[i])).map(NodeIndex::new));
    // From each node to the definitions of its operands.
    let mut reads: DiGraph<(), ()> = DiGraph::new();
    graph.node.iter().for_each(|_| _ = reads.add_node(()));
    for (i, names) in read.iter().enumerate() {
        for &maker in names.iter().filter_map(|name| makers.get(name)) {
            reads.add_edge(NodeIndex::new(i), NodeIndex::new(maker), ());
        }
    }
    let needed: BTreeSet<NodeIndex> =
        Dfs::from_parts(roots, reads.visit_map()).iter(&reads).collect();
    for i in needed.iter().map(|i| i.index()) {
        let known =
            |name: &&&str| name.is_empty() || given.contains(**name) || makers.contains_key(**name);
        if let Some(name) = read[i].iter().find(|name| !known(name)) {
            return Err(undefined(name, label(Some(i), &graph.node[i])).into());
        }
    }
    let is_cycle = |part: &Vec<NodeIndex>| part.len() > 1 || reads.contains_edge(part[0], part[0]);
    let mut cycles = tarjan_scc(&reads).into_iter().filter(is_cycle);
    if let Some(mut cycle) = cycles.find(|part| needed.contains(&part[0])) {
        cycle.sort_unstable();
        let error = Diagnostic::error(Code::GraphCycle, "the graph has a cycle");
        let labels = cycle.iter().take(16).map(|i| label(Some(i.index()), &graph.node[i.index()]));
        return Err(labels
            .fold(error, Diagnostic::note)
            .help("an ONNX graph must be acyclic; export the model again")
            .into());
    }
    // Nodes come in the order of the file where that is possible.
    let mut operands_first = DfsPostOrder::empty(&reads);
    let mut sorted = Vec::with_capacity(needed.len());
    for root in needed {
        operands_first.move_to(root);
        sorted.extend(std::iter::from_fn(|| operands_first.next(&reads)).map(NodeIndex::index));
    }
    Ok(sorted.into_iter().map(|i| (i, &graph.node[i])).collect())
}
