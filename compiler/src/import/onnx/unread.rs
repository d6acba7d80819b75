//! Outputs that no loss can read: the labels that a classifier of scikit-learn returns beside its scores, sequences, texts.
//!
//! They are left out if their operators are not supported, so that the model can be trained on its other outputs.

use super::messages::{GraphProto, NodeProto};
use super::tensor::is_float;
use super::{ops, subgraph};
use frit_ir::{Code, Diagnostic};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// ONNX's number of no element type.
const UNDEFINED: i32 = 0;

/// Leaves out the outputs that no loss can read and that need operators that are not supported, unless there are no others.
pub(super) fn leave_out(graph: &mut GraphProto) -> Option<Diagnostic> {
    let made: HashMap<&str, &NodeProto> = graph
        .node
        .iter()
        .flat_map(|node| node.output.iter().map(move |name| (name.as_str(), node)))
        .collect();
    let mut left: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for output in &graph.output {
        // An output without a type may be a loss; sequences and maps are types without a tensor.
        let Some(ty) = &output.r#type else { continue };
        let element = ty.tensor_type.as_ref().map(|ty| ty.elem_type);
        if element.is_some_and(|code| code == UNDEFINED || is_float(code)) {
            continue;
        }
        let unsupported = unsupported(&made, &output.name);
        if !unsupported.is_empty() {
            left.insert(&output.name, unsupported);
        }
    }
    if left.is_empty() || left.len() == graph.output.len() {
        return None;
    }
    let names: Vec<String> = left.keys().map(|name| format!("`{name}`")).collect();
    let operators: BTreeSet<&str> = left.values().flatten().copied().collect();
    let message = format!("left out, as no loss reads them: outputs {}", names.join(", "));
    let operators: Vec<&str> = operators.into_iter().collect();
    let note = format!("they need operators that are not supported: {}", operators.join(", "));
    let warning = Diagnostic::warning(Code::OutputLeftOut, message)
        .note(note)
        .help("`frit export` writes the model with them");
    let names: HashSet<String> = left.keys().map(ToString::to_string).collect();
    graph.output.retain(|output| !names.contains(&output.name));
    Some(warning)
}

/// The operators behind a value that are not supported.
fn unsupported<'a>(made: &HashMap<&'a str, &'a NodeProto>, name: &'a str) -> BTreeSet<&'a str> {
    let (mut stack, mut seen, mut found) = (vec![name], HashSet::new(), BTreeSet::new());
    while let Some(name) = stack.pop() {
        let Some(node) = made.get(name).filter(|_| seen.insert(name)) else { continue };
        if !subgraph::holds_graphs(node) && ops::find(&node.domain, &node.op_type).is_none() {
            found.insert(node.op_type.as_str());
        }
        stack.extend(subgraph::operands(node));
    }
    found
}
