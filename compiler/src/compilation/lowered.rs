//! The plan that a graph is lowered to which passes made before, for the certificate of that plan.

use super::saving::Saving;
use super::{Compilation, Made, Request, Setup};
use crate::config::Config;
use crate::diagnostics::Report;
use crate::import::Tied;
use crate::source::Source;
use crate::weights::Weights;
use frit_ir::plan::{Arena, BufferId, Plan};
use frit_ir::{Graph, Tensor};
use frit_passes::PassContext;
use frit_passes::adapter::Adapted;
use frit_passes::offload::Offload;
use frit_runtime::plan_dir::digest;
use std::collections::{BTreeMap, HashMap};

/// A graph after all passes, and what lowering it takes besides.
#[derive(Debug)]
pub struct Passed<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// The ranges of inputs and the metrics of an evaluation, as their passes found them.
    pub context: PassContext,
    /// Elements that the loss sums in a micro-step; 0 without a loss.
    pub loss_elements: usize,
    /// The plan that is compared with what it is lowered to, which decides the names of units and what is offloaded: the proof of a
    /// plan covers both.
    pub plan: &'a Plan,
}

/// A plan without machine code. Of parameters and constants it has the digests of the values that are stored with it.
#[derive(Debug)]
pub struct Again {
    /// The plan.
    pub plan: Plan,
    /// The values of its constants, by name.
    pub constants: HashMap<String, Tensor>,
}

/// The plan of a model with these weights, and that of the evaluation beside its training.
///
/// # Errors
/// If the graphs cannot be lowered with this configuration.
pub fn lowered(
    request: &Request,
    config: &Config,
    weights: &Weights,
    passed: Passed,
    evaluation: Option<Passed>,
) -> Result<(Again, Option<Again>), Report> {
    let request = &Request { without_code: true, ..request.clone() };
    let setup = Setup::new(request, config)?;
    let mut again = one(&setup, weights, passed, None)?;
    setup.order_data(&mut again.plan);
    let evaluation = evaluation.map(|passed| one(&setup, weights, passed, Some(&again.plan)));
    let evaluation = evaluation.transpose()?;
    Ok((again, evaluation))
}

/// What is kept of the model beside its plan.
///
/// # Errors
/// If the model cannot be read any more.
pub fn source(
    request: &Request,
    config: &Config,
    plan: &Plan,
    ties: &BTreeMap<String, Tied>,
    adapters: &BTreeMap<String, Adapted>,
) -> Result<Source, Report> {
    Ok(Setup::new(request, config)?.source(plan, ties, adapters)?)
}

fn one(
    setup: &Setup,
    weights: &Weights,
    passed: Passed,
    trained: Option<&Plan>,
) -> Result<Again, Report> {
    let Passed { graph, context, loss_elements, plan } = passed;
    let saving = Saving { offload: offload(trained.unwrap_or(plan)), ..Saving::default() };
    let compilation = Compilation {
        context: PassContext { units: plan.units.clone(), ..context },
        loss_elements,
        saving,
        trained,
        ..Compilation::new(setup, graph.clone())
    };
    let Made { plan: mut made, constants, .. } = compilation.generate(compilation.arrange()?)?;
    // A plan may be without the values of parameters. Its evaluation has the same.
    if plan.params.iter().any(|param| param.digest.is_some()) {
        let digests = |plan: &Plan| -> BTreeMap<String, Option<String>> {
            plan.params.iter().map(|param| (param.name.clone(), param.digest.clone())).collect()
        };
        let known = trained.map(digests).unwrap_or_default();
        for param in &mut made.params {
            param.digest = match known.get(&param.name) {
                Some(known) => known.clone(),
                None => weights.get(&param.name).map(|weight| digest(weight.bytes())),
            };
        }
    }
    let constants: HashMap<String, Tensor> = constants.into_iter().collect();
    for constant in &mut made.constants {
        let value = constants.get(&constant.name);
        constant.digest = value.map(|value| digest(&value.to_bytes()));
    }
    Ok(Again { plan: made, constants })
}

/// What a plan keeps in host memory.
fn offload(plan: &Plan) -> Offload {
    let rests = |buffer: BufferId| plan.buffers[buffer].arena == Arena::Host;
    match () {
        () if plan.groups.iter().any(|group| rests(group.master)) => Offload::Parameters,
        () if plan.buffers.iter().any(|buffer| buffer.arena == Arena::Host) => Offload::Optimizer,
        () => Offload::None,
    }
}
