//! One compilation: a model and a configuration into a plan, pass by pass.
//!
//! [`Setup`] is everything the request and the configuration determine before a model is read; a [`Compilation`] takes one
//! graph from there to a plan. Training and evaluation are separate compilations, as is every trial for the memory budget or
//! the choice of gathers.

mod evaluation;
mod finish;
mod gathers;
mod lowered;
mod passes;
mod plan;
mod recorded;
mod saving;
mod setup;

use crate::config::Config;
use crate::config::choices::Prefetch;
use crate::diagnostics::Report;
use crate::import::Imported;
use crate::source::Source;
use crate::weights::Weights;
use frit_ir::plan::{PassReport, Plan, sha256_hex};
use frit_ir::{Code, Diagnostic, Graph, Node, Op, Tensor};
use frit_passes::PassContext;
use frit_passes::model_traffic::Traffic;
use frit_passes::offload::Offload;
use frit_passes::recompute::Recompute;
use frit_runtime::first_values;
use passes::End;
use plan::Made;
use recorded::Recorded;
use saving::Saving;
use setup::Setup;
use std::collections::BTreeMap;
use std::path::PathBuf;

pub use lowered::{Again, Passed, lowered, source};
pub use passes::IMPORT;

/// Options of one compilation.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The model file.
    pub model: PathBuf,
    /// Values of symbolic dimensions.
    pub binds: BTreeMap<String, usize>,
    /// Passes that are left out.
    pub disabled: Vec<String>,
    /// The last pass to run; the plan is then not made.
    pub stop_after: Option<String>,
    /// Check the graph after every pass, in release builds too.
    pub verify_each: bool,
    /// External data of the model may lie anywhere, not only in the folder of the model.
    pub allow_external_data: bool,
    /// Compile the evaluation of a model that trains, too.
    pub evaluation: bool,
    /// Make no machine code: the plan is proved as with it, but cannot be run.
    pub without_code: bool,
    /// Leave out what PyTorch does not do, for predictions of it; see [`reference`].
    pub reference: bool,
}

/// Observes the graph after each pass.
pub trait Observer {
    /// Passes begin on this graph: those of the model, or of its evaluation. Returns whether to observe them.
    fn begin(&mut self, evaluation: bool, _graph: &Graph) -> bool {
        !evaluation
    }

    /// The pass `name` has run as the `index`-th.
    fn after(&mut self, index: usize, name: &str, graph: &Graph);

    /// Something else begins that takes a while.
    fn stage(&mut self, _what: &str) {}

    /// Whether the compilation is to end after this pass or before this stage, without a plan.
    fn stops(&mut self) -> bool {
        false
    }
}

impl Observer for () {
    fn after(&mut self, _: usize, _: &str, _: &Graph) {}
}

/// A compiled model.
#[derive(Debug)]
pub struct Compiled {
    /// The plan.
    pub plan: Plan,
    /// The file with the generated kernels; empty if there are none.
    pub object: Vec<u8>,
    /// Values of parameters.
    pub weights: Weights,
    /// Values of large constants.
    pub constants: Vec<(String, Tensor)>,
    /// How the model is evaluated while it trains, and after.
    pub evaluation: Option<Evaluation>,
    /// The model that the plan was compiled from.
    pub source: Source,
    /// The file with the graph after every pass.
    pub pass_trace: Vec<u8>,
}

impl Compiled {
    /// A warning if parameters have elements with which no step computes anything.
    pub fn weights_not_finite(&self) -> Option<Diagnostic> {
        let found = self.plan.params.iter_enumerated().filter_map(|(index, param)| {
            let weight = self.weights.get(&param.name)?;
            let trains = first_values::trains(&self.plan, index);
            let found = first_values::not_finite(weight.bytes(), weight.ty.dtype, trains);
            found.map(|(element, value)| {
                (format!("`{}` is {value} in element {element}", param.name), value)
            })
        });
        let (found, values): (Vec<String>, Vec<f64>) = found.unzip();
        let message = match &found[..] {
            [] => return None,
            [one] => format!("not every weight is a finite number: {one}"),
            [first, ..] => {
                format!(
                    "{} parameters have weights that are no finite numbers: {first}",
                    found.len()
                )
            }
        };
        let diagnostic = Diagnostic::warning(Code::WeightsNotFinite, message);
        let masks = first_values::of_masks(values);
        let help = "`frit run` refuses them: correct the model, or start from other weights with --weights";
        let diagnostic = diagnostic.help(format!("{help}{masks}"));
        Some(found.into_iter().skip(1).take(MAX_NOTES).fold(diagnostic, Diagnostic::note))
    }
}

/// Parameters that a warning lists after the first.
const MAX_NOTES: usize = 7;

/// The evaluation of a model that trains: the same parameters, in the same units and precision.
#[derive(Debug)]
pub struct Evaluation {
    /// The plan, of the phase `eval`.
    pub plan: Plan,
    /// The shared object with its generated kernels; empty if there are none.
    pub object: Vec<u8>,
    /// Values of its large constants.
    pub constants: Vec<(String, Tensor)>,
}

/// Compiles a model. `None` if `stop_after` or the observer ended the compilation before the plan.
///
/// # Errors
/// Everything that is wrong with the model, the configuration or the environment.
pub fn compile(
    request: &Request,
    config: &Config,
    observer: &mut dyn Observer,
) -> Result<Option<Compiled>, Report> {
    match compiled(request, config, observer) {
        Ok(compiled) => Ok(Some(compiled)),
        Err(End::AsAsked) => Ok(None),
        Err(End::Refused(report)) => Err(report),
    }
}

fn compiled(
    request: &Request,
    config: &Config,
    observer: &mut dyn Observer,
) -> Result<Compiled, End> {
    let setup = Setup::new(request, config)?;
    let mut imported = setup.import()?;
    let mut recorded = Recorded::beside(observer);
    let mut compilation = Compilation::of_model(&setup, &mut imported, Some(&mut recorded));
    compilation.all_passes(&imported.weights)?;
    compilation.stage("schedule, memory and machine code")?;
    let mut made = compilation.generate(compilation.arrange()?)?;
    compilation.describe(&mut made)?;
    let evaluation = compilation.evaluation(&made.plan)?;
    compilation.stage("proof")?;
    let Made { mut plan, object, constants, .. } = made;
    finish::prove(&plan, evaluation.as_ref())?;
    let source = setup.source(&plan, &imported.ties, &compilation.context.adapters)?;
    let (weights, pass_trace) = (imported.weights, recorded.recorder.finish());
    plan.pass_trace = Some(sha256_hex(&pass_trace));
    Ok(Compiled { plan, object, weights, constants, evaluation, source, pass_trace })
}

/// Reads the model of a request as its compilation does.
///
/// # Errors
/// Everything that is wrong with the model or the configuration.
pub fn imported(request: &Request, config: &Config) -> Result<Imported, Report> {
    Setup::new(request, config)?.import()
}

/// The plan of a model as far as predictions need it: scheduled and placed in memory, but neither proved
/// nor with the code of its kernels.
///
/// # Errors
/// Everything that is wrong with the model, the configuration or the environment.
pub fn predict(request: &Request, config: &Config) -> Result<Plan, Report> {
    // The dtypes in which evaluations read parameters affect those in which training stores them.
    let request = &Request { evaluation: true, ..request.clone() };
    let setup = Setup::new(request, config)?;
    let mut imported = setup.import()?;
    let mut compilation = Compilation::of_model(&setup, &mut imported, None);
    compilation.all_passes(&imported.weights)?;
    Ok(compilation.arrange()?.lowered.plan)
}

/// The reference plan of a model: the tasks and kernels of a step by PyTorch, which
/// [`emulate`](frit_passes::simulate::emulate) gives the durations of. It has this configuration's precision, ranks and optimizer; what
/// Frit does to be faster or smaller is left out:
///
/// - kernels are those of torch.compile ([`frit_passes::fuse::Rules::Inductor`]), and matmuls round what they write;
/// - parameters are cast in every step, and all logits exist at once;
/// - nothing is computed again or kept on the host, and gathers run one unit ahead as FSDP2 issues them.
///
/// # Errors
/// Everything that is wrong with the model, the configuration or the environment.
pub fn reference(request: &Request, config: &Config) -> Result<Plan, Report> {
    let mut config = config.clone();
    config.memory.loss_chunks = Some(1);
    (config.memory.recompute, config.memory.offload) = (Some(Recompute::NONE), Some(Offload::None));
    (config.memory.budget, config.sharding.cpu_offload) = (None, false);
    config.sharding.prefetch = Prefetch::Fixed;
    predict(&Request { reference: true, ..request.clone() }, &config)
}

/// One graph on its way to a plan.
struct Compilation<'a> {
    setup: &'a Setup<'a>,
    /// Observes the passes.
    observer: Option<&'a mut dyn Observer>,
    graph: Graph,
    /// Whether the graph rounds values before any pass.
    rounds: bool,
    /// The graph as the front end read it, with adapters, if the model is evaluated beside its training.
    as_read: Option<Graph>,
    context: PassContext,
    reports: Vec<PassReport>,
    passes_run: usize,
    stop_after: Option<&'a str>,
    /// Whether the graph is verified after every pass that changes it.
    verify: bool,
    /// Elements that the loss sums in a micro-step; 0 without a loss.
    loss_elements: usize,
    /// Weights, activations and gradients in a step, each read and written once.
    traffic: Traffic,
    saving: Saving,
    /// Why this saving, if it was chosen.
    saving_reason: Option<String>,
    /// The plan that trains what this one evaluates.
    trained: Option<&'a Plan>,
}

impl<'a> Compilation<'a> {
    fn new(setup: &'a Setup<'a>, graph: Graph) -> Self {
        let is_rounding =
            |node: &Node| matches!(&node.op, Op::Cast(cast) if cast.to.is_low_precision());
        let rounds = graph.nodes().any(|(_, node)| is_rounding(node));
        Compilation {
            setup,
            observer: None,
            graph,
            rounds,
            as_read: None,
            context: PassContext::default(),
            reports: vec![],
            passes_run: 0,
            stop_after: None,
            verify: cfg!(debug_assertions) || setup.request.verify_each,
            loss_elements: 0,
            traffic: Traffic::default(),
            saving: Saving::default(),
            saving_reason: None,
            trained: None,
        }
    }

    /// Begins a stage, unless the compilation is to end.
    fn stage(&mut self, what: &str) -> Result<(), End> {
        if let Some(observer) = &mut self.observer {
            observer.stage(what);
        }
        self.go_on()
    }

    /// Whether the observer lets the compilation go on.
    fn go_on(&mut self) -> Result<(), End> {
        let stops = self.observer.as_mut().is_some_and(|observer| observer.stops());
        if stops { Err(End::AsAsked) } else { Ok(()) }
    }
}
