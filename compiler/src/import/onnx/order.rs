//! The nodes that the outputs depend on, in topological order.

use super::messages::{GraphProto, NodeProto};
use super::subgraph::operands;
use crate::diagnostics::Report;
use frit_ir::{Code, Diagnostic};
use std::collections::{HashMap, HashSet};

/// How messages name a node.
pub(super) fn label(index: usize, node: &NodeProto) -> String {
    if node.name.is_empty() {
        format!("node #{index} ({})", node.op_type)
    } else {
        format!("node #{index} \"{}\" ({})", node.name, node.op_type)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Mark {
    New,
    Open,
    Done,
}

/// The nodes with their places in the file: each after those whose results it reads; nodes that no
/// output needs are left out. `given` are the names of inputs and initializers.
pub(super) fn sort<'a>(
    graph: &'a GraphProto,
    given: &HashSet<&str>,
) -> Result<Vec<(usize, &'a NodeProto)>, Report> {
    let mut makers: HashMap<&str, usize> = HashMap::new();
    for (i, node) in graph.node.iter().enumerate() {
        for name in node.output.iter().filter(|o| !o.is_empty()) {
            if given.contains(name.as_str()) || makers.insert(name, i).is_some() {
                return Err(Diagnostic::error(
                    Code::ValueDefinedTwice,
                    format!("the value \"{name}\" is defined twice"),
                )
                .note(label(i, node))
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
    let mut mark = vec![Mark::New; graph.node.len()];
    let mut sorted = Vec::new();
    let mut roots = Vec::new();
    for output in &graph.output {
        match makers.get(output.name.as_str()) {
            Some(&i) => roots.push(i),
            None if given.contains(output.name.as_str()) => {}
            None => return Err(undefined(&output.name, "an output of the graph".into()).into()),
        }
    }
    // Nodes come in the order of the file where that is possible.
    let needed = needed(graph, &makers, &roots);
    for root in (0..graph.node.len()).filter(|i| needed[*i]) {
        // Each entry: a node, and which of its operands to look at next.
        let mut stack = vec![(root, 0)];
        while let Some((i, next)) = stack.pop() {
            if next == 0 {
                if mark[i] == Mark::Done {
                    continue;
                }
                mark[i] = Mark::Open;
            }
            let node = &graph.node[i];
            let Some(&input) = read[i].get(next) else {
                mark[i] = Mark::Done;
                sorted.push((i, node));
                continue;
            };
            stack.push((i, next + 1));
            if input.is_empty() || given.contains(input) {
                continue;
            }
            let Some(&maker) = makers.get(input) else {
                return Err(undefined(input, label(i, node)).into());
            };
            match mark[maker] {
                Mark::New => stack.push((maker, 0)),
                Mark::Done => {}
                Mark::Open => {
                    let from = stack.iter().position(|(n, _)| *n == maker).unwrap_or(0);
                    let mut cycle = Diagnostic::error(Code::GraphCycle, "the graph has a cycle");
                    for (n, _) in stack[from..].iter().take(16) {
                        cycle = cycle.note(label(*n, &graph.node[*n]));
                    }
                    return Err(cycle
                        .help("an ONNX graph must be acyclic; export the model again")
                        .into());
                }
            }
        }
    }
    Ok(sorted)
}

fn needed(graph: &GraphProto, makers: &HashMap<&str, usize>, roots: &[usize]) -> Vec<bool> {
    let mut needed = vec![false; graph.node.len()];
    let mut stack = roots.to_vec();
    while let Some(i) = stack.pop() {
        if !std::mem::replace(&mut needed[i], true) {
            let read = operands(&graph.node[i]);
            stack.extend(read.into_iter().filter_map(|name| makers.get(name)));
        }
    }
    needed
}
