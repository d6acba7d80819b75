//! Completes a plan: its summary, lints and reports, and verification.

use super::{Compilation, Evaluation, Made};
use crate::diagnostics::Report;
use crate::lints;
use crate::render::bytes;
use crate::target;
use frit_ir::Origin;
use frit_ir::plan::Plan;
use frit_passes::offload::Offload;
use frit_passes::{lint, verify_plan};

impl Compilation<'_> {
    /// Writes data order, remarks of the passes and findings into the plan.
    pub(super) fn describe(&mut self, made: &mut Made) -> Result<(), Report> {
        let (config, plan) = (self.setup.config, &mut made.plan);
        self.setup.order_data(plan);
        plan.cast_baseline = self.context.cast_baseline.unwrap_or_default();
        let offload = self.saving_reason.take().into_iter().chain(self.offloaded(plan)).collect();
        self.remark("offload", offload);
        self.remark("schedule", made.schedule.take().into_iter().collect());
        plan.reports = std::mem::take(&mut self.reports);
        let mut found = std::mem::take(&mut self.context.warnings);
        found.extend(target::interpreted(plan));
        let rounds = self.rounds || config.precision.pure || config.sharding.param_dtype.is_some();
        found.extend(lint::plan(plan, &self.setup.cluster.device, rounds));
        lints::allow(&mut found, &config.lints.allow)?;
        plan.lints = found;
        Ok(())
    }

    /// Reports what was done after the passes, if anything was.
    fn remark(&mut self, step: &str, remarks: Vec<String>) {
        if !remarks.is_empty() {
            let remarks = remarks.into_iter().map(|message| (message, Origin::none())).collect();
            self.report(step, self.graph.len(), remarks);
        }
    }

    /// What rests in host memory, in words.
    fn offloaded(&self, plan: &Plan) -> Option<String> {
        let what = match self.saving.offload {
            Offload::None => return None,
            Offload::Optimizer => "optimizer state",
            Offload::Parameters => "optimizer state and parameters",
        };
        let summary = plan.summary();
        Some(format!(
            "{what} in host memory: {}; {} copied in and {} out in a step",
            bytes(summary.host_bytes as u64),
            bytes(summary.bytes_copied_in_per_step),
            bytes(summary.bytes_copied_out_per_step)
        ))
    }
}

/// Proves that a plan, and its evaluation, are sound.
pub(super) fn prove(plan: &Plan, evaluation: Option<&Evaluation>) -> Result<(), Report> {
    let proved = verify_plan::verify_plan(plan).and_then(|()| match evaluation {
        Some(evaluation) => verify_plan::verify_evaluation(&evaluation.plan, plan),
        None => Ok(()),
    });
    proved.map_err(|diagnostics| Report { diagnostics })
}
