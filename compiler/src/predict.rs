//! Predicts the step of a plan on its target cluster, which every command shows, and compiles the reference plan of a plan directory.

use crate::clusters;
use crate::compilation::{self, Request};
use crate::config::Config;
use crate::diagnostics::Report;
use crate::source::Origin;
use frit_ir::plan::{Plan, layout};
use frit_passes::cost::Cluster;
use frit_passes::simulate::{Simulation, simulate};
use std::path::Path;

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

/// The reference plan of the model in a plan directory, from the source that is stored there; `model` is where the model is now that the
/// plan was compiled from.
///
/// # Errors
/// If the model cannot be found or compiled any more.
pub fn reference(dir: &Path, plan: &Plan, model: Option<&Path>) -> Result<Plan, Report> {
    let config = Config::parse(&plan.config, "source/train.toml", &[])?;
    let source = dir.join(layout::SOURCE);
    let origin = Origin::read(&source)?;
    let request = Request {
        model: origin.model(&source, model)?,
        binds: origin.binds,
        allow_external_data: origin.allow_external_data,
        ..Request::default()
    };
    compilation::reference(&request, &config)
}
