//! The reference plan of a plan directory, on which PyTorch is emulated.

use crate::compilation::{self, Request};
use crate::config::Config;
use crate::diagnostics::Report;
use crate::source::Origin;
use frit_ir::plan::{Plan, layout};
use std::path::Path;

/// Compiles the reference plan of the model in a plan directory, from the source that is stored there; `model` is where the model is now
/// that the plan was compiled from.
///
/// # Errors
/// If the model cannot be found or compiled any more.
pub fn of(dir: &Path, plan: &Plan, model: Option<&Path>) -> Result<Plan, Report> {
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
