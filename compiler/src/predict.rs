//! Predicts the step of a plan on its target cluster; every command shows this prediction.

use crate::clusters;
use crate::config::Config;
use crate::diagnostics::Report;
use frit_ir::plan::Plan;
use frit_passes::cost::Cluster;
use frit_passes::simulate::{Simulation, simulate};

/// The prediction, over all micro-steps.
///
/// # Errors
/// If the plan's configuration names a cluster that cannot be read any more.
pub fn step(plan: &Plan) -> Result<Simulation, Report> {
    Ok(simulate(plan, &cluster(plan)?))
}

/// The cluster that the plan was compiled for.
///
/// # Errors
/// If it is a file that cannot be read any more.
pub fn cluster(plan: &Plan) -> Result<Cluster, Report> {
    let config = Config::parse(&plan.config, "the plan's configuration", &[])?;
    clusters::of(&config, &plan.target)
}
