//! Recognizes normalizations by stored statistics that are written out as primitives instead of BatchNormalization:
//!
//! ```text
//! scale = weight · 1/√(variance + ε)      offset = bias − mean · scale      y = x · scale + offset
//! ```
//!
//! Detectors use them in their backbone (torchvision.ops.FrozenBatchNorm2d). Everything computed from a stored variance before
//! data is involved depends on buffers alone.

use super::messages::{GraphProto, NodeProto};
use super::subgraph::operands;
use std::collections::{HashMap, HashSet};

/// Operators that change nothing but how elements are seen.
const VIEWS: &[&str] =
    &["Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"];

/// Results that depend on no data (`from_data` names what does) and on the root of a tensor of the model with a
/// number added.
pub(super) fn of_stored_variances<'a>(
    graph: &'a GraphProto,
    nodes: &[&'a NodeProto],
    from_data: &HashSet<&str>,
) -> HashSet<&'a str> {
    let made: HashMap<&str, &NodeProto> =
        nodes.iter().flat_map(|n| n.output.iter().map(|o| (o.as_str(), *n))).collect();
    let mut is_scalar: HashMap<&str, bool> = HashMap::new();
    for tensor in &graph.initializer {
        is_scalar.insert(&tensor.name, tensor.dims.iter().all(|d| *d == 1));
    }
    // What a value is a view of; each view reads an earlier result.
    let mut sources: HashMap<&'a str, &'a str> = HashMap::new();
    for node in nodes.iter().filter(|n| VIEWS.contains(&n.op_type.as_str())) {
        let Some(first) = node.input.first().map(String::as_str) else { continue };
        let source = sources.get(first).copied().unwrap_or(first);
        sources.extend(node.output.iter().map(|o| (o.as_str(), source)));
    }
    let source = |name: &'a str| sources.get(name).copied().unwrap_or(name);
    let is_number = |name: &'a str| {
        let name = source(name);
        let constant = made.get(name).is_some_and(|n| n.op_type == "Constant");
        constant || is_scalar.get(name) == Some(&true)
    };
    let is_stored = |name: &'a str| is_scalar.get(source(name)) == Some(&false);
    let is_root = |node: &'a NodeProto| {
        let sum = node.input.first().and_then(|name| made.get(source(name)));
        node.op_type == "Sqrt"
            && sum.is_some_and(|sum| match &sum.input[..] {
                [a, b] if sum.op_type == "Add" => {
                    (is_stored(a) && is_number(b)) || (is_stored(b) && is_number(a))
                }
                _ => false,
            })
    };
    let mut found: HashSet<&'a str> = HashSet::new();
    for &node in nodes {
        let reads = operands(node);
        let follows = reads.iter().any(|name| found.contains(name));
        if (follows || is_root(node)) && !reads.iter().any(|name| from_data.contains(name)) {
            found.extend(node.output.iter().map(String::as_str));
        }
    }
    found
}
