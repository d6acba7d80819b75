//! Sets the initial value of the loss scale.
//!
//! In: the state leaf `loss_scale` of `differentiate`. Out: the same with its initial value. Updating the scale depends on `found_inf`,
//! which exists only in the update region, so the pass `update` adds that, with the same [`LossScaling`]. Source:
//! `torch.amp.GradScaler`.

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property};
use frit_ir::ops::{Op, StateName};
use frit_ir::{Code, Diagnostic, Graph};

/// The contract of [`LossScale`].
pub const INFO: PassInfo = PassInfo {
    name: "loss_scale",
    summary: "set the initial loss scale",
    requires: &[Property::Differentiated],
    ensures: &[Property::LossScaled],
    breaks: &[],
    numerics: Numerics::Bitwise,
};

/// How the loss is scaled before gradients are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LossScaling {
    /// By 1.
    #[default]
    None,
    /// By this factor, always.
    Static(f64),
    /// By a factor that halves on overflow and grows after good steps.
    Dynamic {
        /// The first factor.
        init_scale: f64,
        /// The factor's growth.
        growth_factor: f64,
        /// The factor's decrease on overflow.
        backoff_factor: f64,
        /// Good steps before it grows.
        growth_interval: f64,
    },
}

impl LossScaling {
    /// The first scale.
    pub fn init(&self) -> f64 {
        match *self {
            LossScaling::None => 1.0,
            LossScaling::Static(scale) => scale,
            LossScaling::Dynamic { init_scale, .. } => init_scale,
        }
    }
}

/// Initializes the loss scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// How the loss is scaled.
    pub scaling: LossScaling,
}

impl Pass for LossScale {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, _: &mut PassContext) -> Result<Changed, Diagnostic> {
        let init = self.scaling.init();
        // The scale is an f32 scalar on the device.
        if !(init > 0.0 && (init as f32).is_finite()) {
            return Err(Diagnostic::error(
                Code::LossScaleUnusable,
                format!("loss scale {init} is not usable"),
            )
            .help("precision.loss_scale must be positive and finite in f32"));
        }
        let leaf = graph.nodes().find_map(|(id, node)| match &node.op {
            Op::State(s) if s.name == StateName::LossScale => Some((id, s.init)),
            _ => None,
        });
        let Some((id, before)) = leaf else { return Ok(Changed::No) };
        if let Op::State(state) = &mut graph.node_mut(id).op {
            state.init = init;
        }
        Ok(Changed::when(before != init))
    }
}
