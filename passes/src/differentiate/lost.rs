//! Finds where gradients end on the way from the loss, for parameters that should train but receive none.

use frit_ir::ops::{Op, Param};
use frit_ir::{Code, Diagnostic, Graph, NodeId, Origin, ValueId};
use std::collections::{BTreeMap, HashSet};

/// Names that one warning lists at most.
const MAX_LISTED: usize = 8;

/// Where a gradient ends, and the node, if it is one.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum End {
    /// The parameter has no elements.
    Empty,
    /// The loss is computed without the parameter.
    Unused,
    /// It is only computed of what this makes.
    At(String, Origin),
}

impl End {
    /// Why one parameter, or several, are not trained.
    pub(super) fn reason(&self, several: bool) -> String {
        let they = if several { "them" } else { "it" };
        match self {
            End::Empty if several => "they have no elements".into(),
            End::Empty => "it has no elements".into(),
            End::Unused => format!("the loss does not depend on {they}"),
            End::At(what, _) => {
                format!("the loss depends on {they} only through {what}, which has no gradient")
            }
        }
    }
}

/// Why parameters have no gradient. `has_cotangent` tells of every value of the forward graph whether a gradient
/// reached it.
pub(super) struct Lost<'a> {
    graph: &'a Graph,
    forward: &'a [NodeId],
    /// The nodes that the loss is computed from.
    used: HashSet<NodeId>,
    has_cotangent: &'a dyn Fn(ValueId) -> bool,
}

impl<'a> Lost<'a> {
    pub(super) fn new(
        graph: &'a Graph,
        loss: ValueId,
        forward: &'a [NodeId],
        has_cotangent: &'a dyn Fn(ValueId) -> bool,
    ) -> Self {
        Lost { graph, forward, used: graph.ancestors([loss]), has_cotangent }
    }

    /// Where the gradient of this parameter ends, on the first way from it to the loss.
    pub(super) fn end(&self, param: ValueId) -> End {
        if self.graph.ty(param).shape.numel() == 0 {
            return End::Empty;
        }
        let mut reached: HashSet<ValueId> = [param].into();
        for id in self.forward.iter().filter(|id| self.used.contains(id)) {
            let node = self.graph.node(*id);
            if !node.inputs.iter().any(|v| reached.contains(v)) {
                continue;
            }
            let is_float = |v: &ValueId| self.graph.ty(*v).dtype.is_float();
            // A gradient came this far and no further, or could not, as there is none of integers.
            if node.outputs.iter().any(|v| (self.has_cotangent)(*v) || !is_float(v)) {
                let what = match &node.op {
                    Op::Cast(cast) => format!("the conversion to {}", cast.to),
                    Op::CustomGradient(op) => format!("the function `{}`", op.function),
                    op => format!("`{}`", op.name()),
                };
                return End::At(what, node.origin.clone());
            }
            reached.extend(&node.outputs);
        }
        End::Unused
    }
}

/// One warning for all parameters whose gradient ends alike.
pub(super) fn warnings(lost: &[(Param, End)]) -> Vec<Diagnostic> {
    let mut groups: BTreeMap<String, Vec<&(Param, End)>> = BTreeMap::new();
    for entry in lost {
        groups.entry(entry.1.reason(true)).or_default().push(entry);
    }
    groups.into_values().filter_map(|group| warning(&group)).collect()
}

fn warning(group: &[&(Param, End)]) -> Option<Diagnostic> {
    let (first, end) = group.first()?;
    let several = group.len() > 1;
    let elements: usize = group.iter().map(|(p, _)| p.ty.shape.numel()).sum();
    let reason = end.reason(several);
    let message = match several {
        false => format!("parameter `{}` is not trained: {reason}", first.name),
        true => format!(
            "parameter `{}` and {} more ({elements} elements) are not trained: {reason}",
            first.name,
            group.len() - 1
        ),
    };
    let help = "an export holds no backward of a torch.autograd.Function (docs/exporting.md says what to do); list what is \
                not to be trained under params.frozen to silence this";
    let warning = Diagnostic::warning(Code::NoGradientPath, message).help(help);
    let warning = match end {
        End::At(_, origin) => warning.at(origin),
        End::Empty | End::Unused => warning,
    };
    let listed = group.iter().take(MAX_LISTED).filter(|_| several);
    Some(listed.fold(warning, |w, (p, _)| w.note(format!("{} {}", p.name, p.ty))))
}
