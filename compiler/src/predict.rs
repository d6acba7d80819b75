//! What a step of a plan is predicted to take on the cluster that it was compiled for: the one prediction that every
//! command shows.

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
