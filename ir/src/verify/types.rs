//! Invariants of types.
//!
//! V201  the operands of a node are valid for its operation
//! V202  recorded types equal the inferred types
//! V203  no value is an 8-bit float, since no operation computes in one
//!
//! All hold inside the bodies of fusions too.

use super::Report;
use crate::{Code, DType, Graph, Op};

pub(super) fn check(graph: &Graph, report: &mut Report) {
    for (_, node) in graph.nodes() {
        let operands: Vec<_> = node.inputs.iter().map(|v| graph.ty(*v)).collect();
        match node.op.infer(&operands) {
            Err(error) => report.add(
                Code::OperandsMisfit,
                &node.origin,
                format!("{}: {error}", node.op.name()),
            ),
            Ok(inferred) => {
                let recorded = node.outputs.iter().map(|v| graph.ty(*v));
                if inferred.iter().ne(recorded.clone()) {
                    let list = |types: Vec<String>| types.join(", ");
                    let message = format!(
                        "`{}` is recorded as ({}) but gives ({})",
                        node.op.name(),
                        list(recorded.map(|t| t.to_string()).collect()),
                        list(inferred.iter().map(|t| t.to_string()).collect()),
                    );
                    report.add(Code::RecordedType, &node.origin, message);
                }
            }
        }
        for output in &node.outputs {
            let ty = graph.ty(*output);
            if matches!(ty.dtype, DType::F8E4M3 | DType::F8E5M2) {
                report.add(
                    Code::EightBitValue,
                    &node.origin,
                    format!("`{}` gives {ty}", node.op.name()),
                );
            }
        }
        if let Op::Fusion(fusion) = &node.op {
            check(&fusion.body, report);
        }
    }
}
