//! L19: results in f16 that may overflow.

use super::Findings;
use super::range::Ranges;
use frit_ir::{DType, Graph, Op};

/// The largest finite f16.
const LARGEST: f64 = 65504.0;

pub(super) fn lint(graph: &Graph, ranges: &Ranges, found: &mut Findings) {
    for (_, node) in graph.nodes().filter(|(_, n)| !n.op.is_leaf()) {
        for &v in node.outputs.iter().filter(|v| graph.ty(**v).dtype == DType::F16) {
            let most = ranges.get(v).max_abs();
            // The first that exceeds it: what is computed from it does so too.
            let operands = node.inputs.iter().map(|v| ranges.get(*v).max_abs());
            let inherited =
                operands.clone().any(|m| m > LARGEST) && !matches!(node.op, Op::Cast(_));
            // A parameter that is itself too large is L18.
            let of_param = matches!(node.op, Op::Cast(_)) && ranges.spread(v).is_some();
            if !most.is_finite() || most <= LARGEST || inherited || of_param {
                continue;
            }
            let from: Vec<String> = operands.map(|m| format!("{m:.3e}")).collect();
            let name = node.op.name();
            let message = format!(
                "{name} in f16 may reach {most:.3e}, above 65504 (bounds of its operands: {})",
                from.join(", ")
            );
            found.add("L19", &node.origin, name, message);
        }
    }
}
