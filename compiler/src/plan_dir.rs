//! Puts what a compilation makes into a plan directory, and reads the plan of one; see [`frit_runtime::plan_dir`].

use crate::compilation::Compiled;
use crate::diagnostics::Report;
use crate::weights::Weights;
use frit_ir::Tensor;
use frit_ir::plan::{Plan, layout};
use frit_runtime::plan_dir::{self, Contents, Part, Reference, References, Value};
use std::collections::BTreeSet;
use std::path::Path;

/// Whether the values of parameters are in the plan directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Stored {
    /// All that the model's files hold. First values that are made from the seed, as those of JSON models
    /// with `init` are, are made where the plan is loaded.
    #[default]
    Copy,
    /// None that the model's files hold: the plan reads them there, and they must stay as they are.
    Reference,
    /// None. The plan can still be run if every parameter's first value is made from the seed; otherwise it
    /// can only be inspected.
    None,
}

/// Checks, before a model is compiled, that its plan can be written here.
///
/// # Errors
/// As [`plan_dir::check_free`].
pub fn check_free(path: &Path) -> Result<(), Report> {
    plan_dir::check_free(path).map_err(|e| e.diagnostic().into())
}

/// Writes a plan directory beside `path` and moves it there; an older plan at `path` is replaced.
///
/// # Errors
/// If the file system refuses, or something else than a plan is at `path`.
pub fn write(path: &Path, compiled: &Compiled, stored: Stored) -> Result<(), Report> {
    let Compiled { plan, object, weights, constants, evaluation, source, pass_trace } = compiled;
    let references = (stored == Stored::Reference).then(|| references(plan, weights));
    let referenced = references.iter().flat_map(|r| &r.tensors).map(|r| r.name);
    let mut elsewhere: BTreeSet<&str> = referenced.collect();
    let part = |plan, kernels, constants, elsewhere: &BTreeSet<&str>| {
        let is_stored = |name: &str| stored != Stored::None && !elsewhere.contains(name);
        Part { plan, kernels, tensors: tensors(plan, constants, weights, is_stored) }
    };
    let training = part(plan, object.as_slice(), constants.as_slice(), &elsewhere);
    elsewhere.extend(plan.params.iter().map(|p| p.name.as_str()));
    let evaluation = evaluation.as_ref();
    let contents = Contents {
        plan: training,
        evaluation: evaluation.map(|e| part(&e.plan, &e.object, &e.constants, &elsewhere)),
        pass_trace,
        source: vec![
            (layout::CONFIGURATION, plan.config.as_bytes()),
            (layout::ORIGIN, source.origin.as_bytes()),
            (&source.file, &source.model),
        ],
        references,
    };
    contents.write(path).map_err(|e| e.diagnostic().into())
}

/// The parameters that lie in the model's files.
fn references<'a>(plan: &'a Plan, weights: &'a Weights) -> References<'a> {
    let files = weights.files().map(|(path, bytes)| (path.into(), bytes.len()));
    let reference = |name: &'a str| {
        let weight = weights.get(name)?;
        let (file, offset) = weights.place(weight)?;
        Some(Reference { name, file, offset, bytes: weight.bytes() })
    };
    let tensors = plan.params.iter().filter_map(|p| reference(&p.name));
    References { files: files.collect(), tensors: tensors.collect() }
}

/// The values of a plan's parameters, as far as the model has them and they are stored, and of its constants.
fn tensors<'a>(
    plan: &'a Plan,
    constants: &'a [(String, Tensor)],
    weights: &'a Weights,
    is_stored: impl Fn(&str) -> bool,
) -> Vec<plan_dir::Stored<'a>> {
    let params = plan.params.iter().filter(|p| is_stored(&p.name)).filter_map(|p| {
        let value = Value::Bytes(weights.get(&p.name)?.bytes());
        Some(plan_dir::Stored { name: &p.name, ty: &p.ty, value })
    });
    let constant = |(name, value): &'a (String, Tensor)| plan_dir::Stored {
        name,
        ty: &value.ty,
        value: Value::Tensor(value),
    };
    params.chain(constants.iter().map(constant)).collect()
}

/// Reads and checks the plan of a plan directory.
///
/// # Errors
/// If there is none, or it is not one that this program reads.
pub fn read(path: &Path) -> Result<Plan, Report> {
    plan_dir::read(path).map_err(|e| e.diagnostic().into())
}
