//! Invariants of regions. Leaves may stand in any region and be read from every one.
//!
//! V401  a forward node reads only forward values
//! V402  a backward or recompute node never reads a value of the update
//! V403  optimizer, schedule and scaler nodes belong to the update

use super::Report;
use crate::{Code, Graph, Op, Region};

pub(super) fn check(graph: &Graph, report: &mut Report) {
    for (_, node) in graph.nodes() {
        let name = node.op.name();
        for input in &node.inputs {
            let def = graph.def(*input);
            if def.op.is_leaf() {
                continue;
            }
            let code = match (node.region, def.region) {
                (Region::Forward, Region::Forward) => None,
                (Region::Forward, _) => Some(Code::ForwardReads),
                (Region::Backward | Region::Recompute(_), Region::Update) => {
                    Some(Code::BackwardReads)
                }
                _ => None,
            };
            if let Some(code) = code {
                let (here, there) = (node.region, def.region);
                let message = format!("{here} `{name}` reads {there} `{}`", def.op.name());
                report.add(code, &node.origin, message);
            }
        }
        let of_update = matches!(
            node.op,
            Op::Unscale(_)
                | Op::OptimizerStep(_)
                | Op::Adafactor(_)
                | Op::MuonMomentum(_)
                | Op::MuonStep(_)
                | Op::EmaStep
                | Op::UpdateLossScale(_)
                | Op::UpdateStep
                | Op::LearningRate(_)
        );
        if of_update && node.region != Region::Update {
            report.add(
                Code::UpdateRegion,
                &node.origin,
                format!("`{name}` in region {}", node.region),
            );
        }
    }
}
