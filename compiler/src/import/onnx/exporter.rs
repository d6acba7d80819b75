//! Parses the node metadata of the dynamo exporter: `pkg.torch.onnx.fx_node` has the call of PyTorch's operation, such as
//! `%e : [num_users=1] = call_function[target=torch.ops.aten.embedding.default](args = (%w, %ids, 0), …)`.

use super::messages::NodeProto;
use super::{Importer, scope, trainable};
use frit_ir::{Code, Diagnostic, Origin};
use std::collections::HashSet;

const CALL: &str = "pkg.torch.onnx.fx_node";

/// A value that a call names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Value<'a> {
    /// Which positional argument it is, or is in the list of.
    pub(super) position: usize,
    pub(super) name: &'a str,
}

/// The call of PyTorch's operation that a node came from.
#[derive(Clone, Debug)]
pub(super) struct Call<'a> {
    /// All of it.
    pub(super) text: &'a str,
    /// Name of the operation, such as `linear`.
    pub(super) op: &'a str,
    /// The texts of its positional arguments.
    pub(super) arguments: Vec<&'a str>,
    /// The values that it names, in the order of the text; those of keywords are behind all positions.
    pub(super) values: Vec<Value<'a>>,
    /// Whether no keyword scales an operand.
    pub(super) is_plain: bool,
}

impl<'a> Call<'a> {
    /// The value that is the argument at this position.
    pub(super) fn value_at(&self, position: usize) -> Option<&'a str> {
        self.arguments.get(position)?.strip_prefix('%')
    }
}

/// The values that a text names.
fn values(text: &str) -> impl Iterator<Item = &str> {
    let end = |rest: &str| rest.find(|c: char| !c.is_alphanumeric() && c != '_');
    text.split('%').skip(1).map(move |rest| &rest[..end(rest).unwrap_or(rest.len())])
}

/// The call of the node.
pub(super) fn call(node: &NodeProto) -> Option<Call<'_>> {
    let text = &node.metadata_props.iter().find(|e| e.key == CALL)?.value;
    let (_, rest) = text.split_once("torch.ops.aten.")?;
    let (target, rest) = rest.split_once("](args = (")?;
    let op = target.split('.').next()?;
    let mut arguments = Vec::new();
    let (mut depth, mut start, mut end) = (0_usize, 0, None);
    for (i, c) in rest.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' if depth > 0 => depth -= 1,
            ',' if depth == 0 => {
                arguments.push(rest[start..i].trim());
                start = i + 1;
            }
            ')' => {
                arguments.push(rest[start..i].trim());
                end = Some(i);
                break;
            }
            _ => {}
        }
    }
    // A comma follows a single argument.
    arguments.pop_if(|last| last.is_empty());
    let keywords = &rest[end?..];
    let texts = arguments.iter().copied().chain([keywords]).enumerate();
    let of = |(position, text)| values(text).map(move |name| Value { position, name });
    let is_plain = !["alpha: ", "beta: ", "value: "].iter().any(|key| keywords.contains(key));
    Some(Call { text, op, values: texts.flat_map(of).collect(), arguments, is_plain })
}

/// The row of `torch.nn.Embedding` that gets no gradient, which ONNX's Gather has no attribute for.
pub(super) fn padding_idx(node: &NodeProto) -> Option<usize> {
    let Call { op, arguments, .. } = call(node)?;
    // The third of `weight, indices, padding_idx, …`; −1 means none.
    if op == "embedding" { arguments.get(2)?.parse().ok() } else { None }
}

/// Whether the node is a `detach`: no gradient flows through it.
pub(super) fn is_detach(node: &NodeProto) -> bool {
    node.op_type == "Identity" && call(node).is_some_and(|call| call.op == "detach")
}

/// Whether an operand of the call was detached by a node that the exporter's optimization removed; not if it is
/// a constant. A call of several nodes need not read its operands in each.
fn reads_removed_detach(
    node: &NodeProto,
    computed: &HashSet<&str>,
    is_constant: impl Fn(&str) -> bool,
) -> bool {
    let Some(call) = call(node) else { return false };
    let operands: Vec<&str> =
        (0..call.arguments.len()).filter_map(|position| call.value_at(position)).collect();
    let of_detach = |name: &str| {
        let rest = name.strip_prefix("detach");
        rest.is_some_and(|r| r.trim_start_matches('_').bytes().all(|b| b.is_ascii_digit()))
    };
    let variable = node.input.iter().filter(|i| !i.is_empty() && !is_constant(i)).count();
    variable >= operands.len()
        && operands.iter().any(|name| of_detach(name) && !computed.contains(name))
}

impl Importer<'_> {
    /// Warns of gradients that flow where PyTorch stops them.
    pub(super) fn removed_detaches(&mut self) {
        let parameters = trainable::listed(self.source, "PARAMETER");
        let stored: HashSet<&str> =
            self.source.initializer.iter().map(|t| t.name.as_str()).collect();
        let parameters: HashSet<&str> = parameters.values().map(String::as_str).collect();
        let is_constant = |name: &str| stored.contains(name) && !parameters.contains(name);
        let computed: HashSet<&str> =
            self.nodes.iter().flat_map(|(_, n)| &n.output).map(String::as_str).collect();
        let reads = |n: &&NodeProto| reads_removed_detach(n, &computed, is_constant);
        let Some(first) = self.nodes.iter().map(|(_, n)| *n).find(reads) else { return };
        let message = "the exporter removed a `detach()`: gradients flow where PyTorch stops them";
        let warning = Diagnostic::warning(Code::DetachRemoved, message)
            .at(&Origin::new(&first.name, &scope::of(first)))
            .help("export with optimize=False, which keeps it");
        self.warnings.push(warning);
    }
}

#[cfg(test)]
mod tests {
    use super::super::messages::StringStringEntryProto;
    use super::*;

    fn node(target: &str, arguments: &str) -> NodeProto {
        let value = format!(
            "%e : [num_users=1] = call_function[target=torch.ops.{target}]({arguments}, kwargs = {{}})"
        );
        let entry = StringStringEntryProto { key: CALL.into(), value };
        NodeProto { metadata_props: vec![entry], ..Default::default() }
    }

    #[test]
    fn the_padding_row_is_read_from_the_call() {
        let of = |target: &str, arguments: &str| padding_idx(&node(target, arguments));
        assert_eq!(of("aten.embedding.default", "args = (%w, %ids, 3)"), Some(3));
        assert_eq!(of("aten.embedding.default", "args = (%w, %ids, -1)"), None);
        assert_eq!(of("aten.embedding.default", "args = (%w, %ids)"), None);
        assert_eq!(of("aten.index_select.default", "args = (%w, 0, 3)"), None);
    }

    #[test]
    fn values_are_counted_among_all_arguments() {
        let norm = node("aten.layer_norm.default", "args = (%x, [32, 4], %p_w, %p_b, 1e-05)");
        let norm = call(&norm).unwrap();
        let found: Vec<(usize, &str)> = norm.values.iter().map(|v| (v.position, v.name)).collect();
        assert_eq!((norm.op, found), ("layer_norm", vec![(0, "x"), (2, "p_w"), (3, "p_b")]));
        assert_eq!([1, 2, 9].map(|position| norm.value_at(position)), [None, Some("p_w"), None]);
        let cat = node("aten.cat.default", "args = ([%a, %b_1], %n)");
        let cat = call(&cat).unwrap();
        let found: Vec<(usize, &str)> = cat.values.iter().map(|v| (v.position, v.name)).collect();
        assert_eq!(found, [(0, "a"), (0, "b_1"), (1, "n")]);
    }

    #[test]
    fn a_removed_detach_of_what_is_computed_is_seen() {
        let linear = |inputs: &[&str]| {
            let mut node = node("aten.linear.default", "args = (%detach_1, %p_w, %p_b)");
            node.input = inputs.iter().map(|i| i.to_string()).collect();
            node
        };
        let is_constant = |name: &str| name == "table";
        let removed = HashSet::from(["h"]);
        assert!(reads_removed_detach(&linear(&["h", "w", "b"]), &removed, is_constant));
        assert!(!reads_removed_detach(&linear(&["table", "w", "b"]), &removed, is_constant));
        // Where it is there, nodes of the same call may read what others made of it.
        let kept = HashSet::from(["h", "detach_1"]);
        assert!(!reads_removed_detach(&linear(&["detach_1", "w", "b"]), &kept, is_constant));
        assert!(!reads_removed_detach(&linear(&["h", "w", "b"]), &kept, is_constant));
        let other = node("aten.mul.Tensor", "args = (%detached_h, 2)");
        assert!(!reads_removed_detach(&other, &removed, is_constant));
    }
}
