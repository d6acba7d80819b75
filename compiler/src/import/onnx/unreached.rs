//! Finds tensors of a TorchScript module that no gradient reaches although they are not known to be buffers.

use super::Importer;
use super::messages::NodeProto;
use super::subgraph::operands;
use frit_ir::{Code, Diagnostic, TensorType};
use std::collections::{BTreeSet, HashSet};

/// Names that the warning lists at most.
const MAX_LISTED: usize = 8;

impl Importer<'_> {
    /// Warns of these; `differentiable` are names from which a gradient path leads to an output.
    pub(super) fn unreached(
        &mut self,
        tensors: &[(&str, TensorType)],
        differentiable: impl Fn(&str) -> bool,
    ) {
        let Some((first, _)) = tensors.first() else { return };
        let nodes: Vec<&NodeProto> = self.nodes.iter().map(|(_, n)| *n).collect();
        let names: HashSet<&str> = tensors.iter().map(|(name, _)| *name).collect();
        let ends: Vec<String> = ends(&nodes, names, differentiable).into_iter().collect();
        let n = tensors.len();
        let message = format!(
            "`{first}` and {} other tensors of the module do not train: no gradient path leads from them to an output",
            n - 1
        );
        let message = match n {
            1 => format!("`{first}` does not train: no gradient path leads from it to an output"),
            _ => message,
        };
        let mut warning = Diagnostic::warning(Code::NotReached, message)
            .note(format!("it ends at {}", ends.join(", ")))
            .help(
                "if they are buffers, list them under params.ignored; an export holds no backward of a \
                 torch.autograd.Function (docs/exporting.md says what to do)",
            );
        for (name, ty) in tensors.iter().take(MAX_LISTED) {
            warning = warning.note(format!("{name} {ty}"));
        }
        self.warnings.push(warning);
    }
}

/// The operators after which a gradient path resumes.
fn ends<'a>(
    nodes: &[&'a NodeProto],
    from: HashSet<&'a str>,
    differentiable: impl Fn(&str) -> bool,
) -> BTreeSet<String> {
    let (mut reached, mut ends) = (from, BTreeSet::new());
    for node in nodes {
        if operands(node).iter().any(|name| reached.contains(name)) {
            if node.output.iter().any(|o| differentiable(o)) {
                ends.insert(format!("`{}`", node.op_type));
            }
            reached.extend(node.output.iter().map(String::as_str));
        }
    }
    ends
}
