//! Removes the boundaries of functions.
//!
//! In: a graph that needs them no more, since every node has its dtype and gradients, if there are any, are taken. Out: the same graph
//! without `custom_gradient`, `cotangent`, `enter_precision` and `leave_precision`, and without what only they read.

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property};
use frit_ir::{Code, Diagnostic, Graph, Op};
use std::collections::HashMap;

/// The contract of [`StripFunctions`].
pub const INFO: PassInfo = PassInfo {
    name: "strip_functions",
    summary: "remove the boundaries of functions with a gradient or precision of their own",
    requires: &[Property::Autocast],
    ensures: &[Property::Stripped],
    breaks: &[Property::Canonical],
    numerics: Numerics::Bitwise,
};

/// Removes the boundaries of functions.
#[derive(Clone, Copy, Debug, Default)]
pub struct StripFunctions {
    /// Whether the pass `fp8` quantizes matmuls.
    pub fp8: bool,
}

impl Pass for StripFunctions {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, _: &mut PassContext) -> Result<Changed, Diagnostic> {
        let mut map = HashMap::new();
        for (_, node) in graph.nodes() {
            if let Op::EnterPrecision(op) = &node.op
                && self.fp8
                && op.dtype.is_low_precision()
            {
                let message = format!("a function states that it runs in {}", op.dtype);
                return Err(Diagnostic::error(Code::NeedsAnotherSetting, message)
                    .at(&node.origin)
                    .note("precision.fp8 runs matmuls of this dtype in 8-bit floats")
                    .help("remove `frit.precision` from the function, or precision.fp8"));
            }
            let is_boundary = matches!(
                node.op,
                Op::CustomGradient(_) | Op::EnterPrecision(_) | Op::LeavePrecision(_)
            );
            if is_boundary {
                map.extend(node.outputs.iter().copied().zip(node.inputs.iter().copied()));
            }
        }
        if map.is_empty() {
            return Ok(Changed::No);
        }
        graph.substitute(&map);
        graph.remove_dead();
        Ok(Changed::Yes)
    }
}
