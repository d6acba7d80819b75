//! L02, L03, L22: loss scaling, and updates that are too small.

use super::{Facts, Findings, computes_in};
use crate::loss_scale::LossScaling;
use frit_ir::{DType, Graph, Origin};

pub(super) fn lint(graph: &Graph, facts: &Facts<'_>, found: &mut Findings) {
    if let Some(node) = computes_in(graph, DType::F16) {
        match facts.scaling {
            LossScaling::None => {
                let message =
                    format!("{} computes in f16, and the loss is not scaled", node.op.name());
                found.add("L02", &Origin::none(), "", message);
            }
            LossScaling::Static(scale) => {
                let message = format!("the loss scale is always {scale}");
                found.add("L03", &Origin::none(), "", message);
            }
            LossScaling::Dynamic { .. } => {}
        }
    }
    if let Some(decay) = facts.decay.filter(|d| *d > 0.0) {
        // As the optimizer computes it, in f32, on f32 master weights.
        let kept = 1.0_f32 - decay as f32;
        if kept == 1.0 {
            let message = format!("each step would shrink weights by {decay:e}, which is 0 in f32");
            found.add("L22", &Origin::none(), "", message);
        }
    }
}
