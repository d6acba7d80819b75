//! Learning-rate schedules.

use super::training::{scalar, scalars};
use super::{Inferred, Linear, Operation, Precision, arity};
use crate::TensorType;
use serde::{Deserialize, Serialize};

crate::choices! {
    /// Shape of the learning rate over the steps taken.
    ScheduleKind {
        /// The base rate.
        Constant = "constant",
        /// From the base rate to `min_lr` in a straight line.
        Linear = "linear",
        /// From the base rate to `min_lr` along half a cosine (Loshchilov & Hutter 2017).
        Cosine = "cosine",
        /// Times `gamma` every `step_size` steps, as `torch.optim.lr_scheduler.StepLR`.
        Step = "step",
        /// Up along half a cosine from base / `div_factor` to base over `pct_start` of all steps, then down
        /// along another to base / `div_factor` / `final_div_factor` (Smith & Topin 2018), as
        /// `torch.optim.lr_scheduler.OneCycleLR`.
        OneCycle = "one_cycle",
    }
}

impl ScheduleKind {
    /// Keys of its operands, between the base rate and the step.
    pub fn hypers(self) -> &'static [&'static str] {
        match self {
            ScheduleKind::Constant | ScheduleKind::Linear | ScheduleKind::Cosine => {
                &["schedule.warmup_steps", "schedule.total_steps", "schedule.min_lr"]
            }
            ScheduleKind::Step => {
                &["schedule.warmup_steps", "schedule.step_size", "schedule.gamma"]
            }
            ScheduleKind::OneCycle => &[
                "schedule.total_steps",
                "schedule.pct_start",
                "schedule.div_factor",
                "schedule.final_div_factor",
            ],
        }
    }
}

/// `(base_lr, hypers…, step)` → the learning rate of the step about to be taken; the operands in between
/// are those of [`ScheduleKind::hypers`].
///
/// While `step < warmup_steps`: base_lr · (step + 1) / warmup_steps. After that the schedule counts steps
/// from there. `linear` and `cosine` run over the remaining `total_steps − warmup_steps` steps and stay
/// at their end.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearningRate {
    /// The schedule.
    pub kind: ScheduleKind,
}

impl Operation for LearningRate {
    fn examples() -> Vec<Self> {
        vec![LearningRate { kind: ScheduleKind::Cosine }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, self.kind.hypers().len() + 2)?;
        scalars(inputs, "operands")?;
        Ok(vec![scalar()])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}
