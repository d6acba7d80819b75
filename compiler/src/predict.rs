//! Predicts the step of a plan on its target cluster; every command shows this prediction.

use crate::clusters;
use crate::config::Config;
use crate::diagnostics::Report;
use frit_ir::plan::Plan;
use frit_passes::simulate::{Simulation, simulate};

/// The prediction, over all micro-steps.
///
/// # Errors
/// If the plan's configuration names a cluster that cannot be read any more.
pub fn step(plan: &Plan) -> Result<Simulation, Report> {
    let config = Config::parse(&plan.config, "the plan's configuration", &[])?;
    Ok(simulate(plan, &clusters::of(&config, &plan.target)?))
}
