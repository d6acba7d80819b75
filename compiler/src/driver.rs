//! Compiling: a model and a configuration into a plan, pass by pass.

use crate::budget::{self, Needs, Saving};
use crate::clusters;
use crate::commands::bytes;
use crate::config::Config;
use crate::config::choices::{self, BatchNorm, LossKind};
use crate::diagnostics::Report;
use crate::import::limits::Limits;
use crate::import::{self, ImportOptions, Imported, Inlined};
use crate::lints;
use crate::pipeline;
use crate::source::Source;
use crate::target;
use crate::weights::Weights;
use frit_ir::ops::ParamKind;
use frit_ir::plan::{ParamHome, PassReport, Plan, Strategy};
use frit_ir::{DType, Diagnostic, Graph, Origin, Tensor, verify};
use frit_passes::cost::Cluster;
use frit_passes::lower::{LowerOptions, Lowered, lower};
use frit_passes::offload::{Offload, offload};
use frit_passes::recompute::Recompute;
use frit_passes::schedule::{BackwardPrefetch, Prefetch, auto, schedule};
use frit_passes::shard::small;
use frit_passes::simulate::simulate;
use frit_passes::{Changed, Pass, PassContext, hold_frozen, lint, loss, memory, verify_plan};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Name of the front end in the reports of a plan.
pub const IMPORT: &str = "import";

/// Loss elements of a step, with all its ranks and micro-steps: an f64 counts them exactly.
const MAX_LOSS_ELEMENTS: f64 = (1_u64 << 53) as f64;

/// What is asked of one compilation.
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
}

/// Sees the graph after each pass.
pub trait Observer {
    /// The pass `name` has run as the `index`-th.
    fn after(&mut self, index: usize, name: &str, graph: &Graph);

    /// Something else begins that takes a while.
    fn stage(&mut self, _what: &str) {}
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
}

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

/// Compiles a model. `None` if `stop_after` ended the compilation before the plan.
///
/// # Errors
/// Everything that is wrong with the model, the configuration or the environment.
pub fn compile(
    request: &Request,
    config: &Config,
    observer: &mut dyn Observer,
) -> Result<Option<Compiled>, Report> {
    let options = pipeline::Options::new(config)?;
    let trains = config.loss.kind != LossKind::None;
    let contracts = pipeline::contracts(&options, trains);
    pipeline::check(&contracts, &request.disabled, request.stop_after.as_deref())?;
    if trains && request.evaluation && request.stop_after.is_none() {
        pipeline::check(&pipeline::contracts(&options, false), &request.disabled, None)?;
    }
    let Imported { mut graph, weights, warnings, inlined, ties } = load(request, config)?;
    let mut context = PassContext::default();
    warnings.into_iter().for_each(|w| context.warn(w));
    let mut run = Run::new(request, observer, context);
    run.reports.push(imported(graph.len(), &inlined));
    let as_read = (trains && request.evaluation).then(|| graph.clone());
    let evaluated = as_read.as_ref();
    let Some(capacity) = run.all(config, &options, &mut graph, evaluated, &weights)? else {
        return Ok(None);
    };
    run.observer.stage("schedule, memory and machine code");
    let Planned { mut plan, constants, object, chosen } =
        plan(&graph, config, &options, capacity, &run, None)?;
    run.reports.extend(offloaded(&plan, graph.len(), run.offload, run.why.take()));
    run.reports.extend(chosen);
    plan.shuffle = config.data.shuffle;
    plan.drop_last = config.data.drop_last;
    let validation = &config.data.validation;
    plan.validation = (validation != "none").then(|| validation.clone());
    plan.cast_baseline = run.context.cast_baseline.unwrap_or_default();
    let evaluation = match as_read {
        Some(graph) => Some(evaluation(graph, config, &options, &run, &plan)?),
        None => None,
    };
    plan.reports = run.reports;
    let mut found = run.context.warnings;
    found.extend(target::interpreted(&plan));
    let cluster = clusters::of(config, &options.backend.describe())?;
    found.extend(lint::plan(&plan, &cluster.device));
    lints::allow(&mut found, &config.lints.allow)?;
    plan.lints = found;
    run.observer.stage("proof");
    let proved = verify_plan::verify_plan(&plan).and_then(|()| match &evaluation {
        Some(evaluation) => verify_plan::verify_evaluation(&evaluation.plan, &plan),
        None => Ok(()),
    });
    proved.map_err(|diagnostics| Report { diagnostics })?;
    let stored = plan.params.iter().filter(|p| p.home != ParamHome::Unused);
    let stored = stored.map(|p| p.name.as_str()).collect();
    let anywhere = request.allow_external_data;
    let source = Source::of(&request.model, &request.binds, &ties, &stored, anywhere)?;
    Ok(Some(Compiled { plan, object, weights, constants, evaluation, source }))
}

/// Compiles the evaluation of a model after its training, which is `trained`; `graph` is as the front end read it.
fn evaluation(
    mut graph: Graph,
    config: &Config,
    options: &pipeline::Options,
    training: &Run<'_>,
    trained: &Plan,
) -> Result<Evaluation, Report> {
    let known = &training.context;
    let context = PassContext {
        units: known.units.clone(),
        unit_of: known.unit_of.clone(),
        held: known.held.clone(),
        ..PassContext::default()
    };
    let request = &Request { stop_after: None, ..training.request.clone() };
    let mut observer = ();
    let mut run = Run::new(request, &mut observer, context);
    run.offload = training.offload;
    run.passes(pipeline::evaluation(options), &mut graph)?;
    let Planned { mut plan, constants, object, .. } =
        plan(&graph, config, options, 0, &run, Some(trained))?;
    plan.reports = run.reports;
    Ok(Evaluation { plan, object, constants })
}

/// The plan of a model as far as predictions need it: scheduled and placed in memory, but neither proved
/// nor with the code of its kernels.
///
/// # Errors
/// Everything that is wrong with the model, the configuration or the environment.
pub fn predict(request: &Request, config: &Config) -> Result<Plan, Report> {
    let options = pipeline::Options::new(config)?;
    let Imported { mut graph, weights, .. } = load(request, config)?;
    let (mut observer, context) = ((), PassContext::default());
    let mut run = Run::new(request, &mut observer, context);
    let as_read = graph.clone();
    let Some(capacity) = run.all(config, &options, &mut graph, Some(&as_read), &weights)? else {
        return Err(Diagnostic::error("E097", "a prediction needs all passes").into());
    };
    let (lowered, _) =
        arrange(&graph, config, &options, capacity, &run.context, run.offload, None)?;
    Ok(lowered.plan)
}

/// The report of the front end: initializers that became constants of the graph.
fn imported(nodes: usize, inlined: &[Inlined]) -> PassReport {
    let remark = |i: &Inlined| {
        let origin = Origin::new(&i.name, "");
        (format!("constant {}: {}", i.ty, i.reason), origin)
    };
    PassReport {
        pass: IMPORT.into(),
        nodes_before: nodes,
        nodes_after: nodes,
        remarks: inlined.iter().map(remark).collect(),
    }
}

fn load(request: &Request, config: &Config) -> Result<Imported, Report> {
    let options = ImportOptions {
        binds: request.binds.clone(),
        trainable: config.params.trainable.clone(),
        frozen: config.params.frozen.clone(),
        ignored: config.params.ignored.clone(),
        batch_norm_trains: config.model.batch_norm != BatchNorm::AsExported,
        batch_norm_ranks: match config.model.batch_norm {
            BatchNorm::Sync => config.sharding.ranks,
            BatchNorm::AsExported | BatchNorm::Train => 1,
        },
        tie_weights: config.model.tie_weights,
        limits: Limits {
            elements: config.import.max_elements,
            operations: config.import.max_operations,
            nodes: config.import.max_nodes,
            bytes: config.import.max_bytes,
            depth: config.import.max_depth,
        },
        allow_external_data: request.allow_external_data,
    };
    import::load(&request.model, &options)
}

struct Run<'a> {
    request: &'a Request,
    observer: &'a mut dyn Observer,
    reports: Vec<PassReport>,
    context: PassContext,
    at: usize,
    /// What rests in host memory, and why if that was chosen.
    offload: Offload,
    why: Option<String>,
}

impl<'a> Run<'a> {
    fn new(request: &'a Request, observer: &'a mut dyn Observer, context: PassContext) -> Self {
        let (offload, why) = (Offload::None, None);
        Run { request, observer, reports: vec![], context, at: 0, offload, why }
    }

    /// Runs all passes. `evaluated` is the graph as the front end read it, if it will be evaluated too. Returns the
    /// elements that the loss sums, 0 without one; `None` if the compilation stops before the plan.
    fn all(
        &mut self,
        config: &Config,
        options: &pipeline::Options,
        graph: &mut Graph,
        evaluated: Option<&Graph>,
        weights: &Weights,
    ) -> Result<Option<usize>, Report> {
        if config.loss.kind == LossKind::None {
            self.offload = budget::asked_offload(config).unwrap_or_default();
            let stopped = self.passes(pipeline::evaluation(options), graph)?;
            return Ok((!stopped).then_some(0));
        }
        if self.passes(pipeline::forward(options), graph)? {
            return Ok(None);
        }
        let found = lints::forward(graph, config, &options.backend.describe(), weights)?;
        self.context.warnings.extend(found);
        let capacity = loss::capacity(graph).ok_or_else(|| {
            Diagnostic::error("E070", "the graph has no loss").help("set loss.kind and loss.logits")
        })?;
        countable(capacity, config)?;
        if self.passes(pipeline::training(options, capacity as f64), graph)? {
            return Ok(None);
        }
        if let Some(evaluated) = evaluated
            && graph.params().any(|(_, p)| p.kind == ParamKind::Frozen)
        {
            self.context.evaluated = self.dtypes_evaluated(options, evaluated)?;
        }
        if self.passes(pipeline::holding(options), graph)? {
            return Ok(None);
        }
        let request = self.request;
        let needs = |saving| needs(graph, config, options, request, capacity, saving);
        let (saving, why) = budget::saving(graph, config, &needs)?;
        (self.offload, self.why) = (saving.offload, why);
        let recompute = saving.recompute;
        let together = match config.sharding.prefetch {
            choices::Prefetch::Auto => together(graph, config, options, request, capacity, saving)?,
            choices::Prefetch::Fixed => BTreeSet::new(),
        };
        let options = &options.gathering(together);
        let stopped = self.passes(pipeline::distribution(options, recompute), graph)?;
        Ok((!stopped).then_some(capacity))
    }

    /// The dtypes in which the evaluation will read parameters.
    fn dtypes_evaluated(
        &self,
        options: &pipeline::Options,
        as_read: &Graph,
    ) -> Result<BTreeMap<String, BTreeSet<DType>>, Report> {
        let (mut graph, mut observer) = (as_read.clone(), ());
        let request = &Request { stop_after: None, ..self.request.clone() };
        let mut run = Run::new(request, &mut observer, PassContext::default());
        run.passes(pipeline::evaluation_forward(options), &mut graph)?;
        Ok(hold_frozen::dtypes_read(&graph))
    }

    /// Runs passes in order; true if the compilation stops here.
    fn passes(&mut self, passes: Vec<Box<dyn Pass>>, graph: &mut Graph) -> Result<bool, Report> {
        for pass in passes {
            let name = pass.info().name;
            if self.request.disabled.iter().any(|d| d == name) {
                continue;
            }
            let nodes_before = graph.len();
            let changed = pass.run(graph, &mut self.context)?;
            if changed == Changed::Yes && (cfg!(debug_assertions) || self.request.verify_each) {
                check(graph, name)?;
            }
            let remarks = std::mem::take(&mut self.context.remarks);
            self.reports.push(PassReport {
                pass: name.into(),
                nodes_before,
                nodes_after: graph.len(),
                remarks: remarks.into_iter().map(|r| (r.message, r.origin)).collect(),
            });
            self.at += 1;
            self.observer.after(self.at, name, graph);
            if self.request.stop_after.as_deref() == Some(name) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Refuses a step of more loss elements than an f64 counts.
fn countable(capacity: usize, config: &Config) -> Result<(), Diagnostic> {
    let (ranks, accumulation) = (config.sharding.ranks, config.run.accumulation);
    let elements = capacity as f64 * accumulation as f64 * ranks as f64;
    if elements < MAX_LOSS_ELEMENTS {
        return Ok(());
    }
    let message = format!(
        "a step sums {capacity} loss elements on each of {ranks} ranks in each of {accumulation} micro-steps: \
         more than can be counted"
    );
    Err(Diagnostic::error("E071", message).help("lower run.accumulation or sharding.ranks"))
}

/// The graph's laws, broken by a pass: a bug of the compiler.
fn check(graph: &Graph, pass: &str) -> Result<(), Report> {
    verify::verify(graph).map_err(|mut diagnostics| {
        for d in &mut diagnostics {
            d.message = format!("after pass `{pass}`: {}", d.message);
        }
        Report { diagnostics }
    })
}

/// What the plan with this saving needs; nothing is reported or generated.
fn needs(
    graph: &Graph,
    config: &Config,
    options: &pipeline::Options,
    request: &Request,
    capacity: usize,
    saving: Saving,
) -> Result<Needs, Report> {
    let (graph, context) = distributed(graph, options, request, saving.recompute)?;
    let (Lowered { plan, .. }, _) =
        arrange(&graph, config, options, capacity, &context, saving.offload, None)?;
    let cluster = clusters::of(config, &options.backend.describe())?;
    let simulation = simulate(&plan, &cluster);
    Ok(Needs { peak_bytes: simulation.peak_bytes, seconds: simulation.step_seconds })
}

/// The report of what rests in host memory, and why.
fn offloaded(
    plan: &Plan,
    nodes: usize,
    offload: Offload,
    why: Option<String>,
) -> Option<PassReport> {
    let what = match offload {
        Offload::None => None,
        Offload::Optimizer => Some("optimizer state"),
        Offload::Parameters => Some("optimizer state and parameters"),
    };
    let summary = plan.summary();
    let message = |what| {
        format!(
            "{what} in host memory: {}; {} copied in and {} out in a step",
            bytes(summary.host_bytes as u64),
            bytes(summary.bytes_copied_in_per_step),
            bytes(summary.bytes_copied_out_per_step)
        )
    };
    let remarks: Vec<_> = why.into_iter().chain(what.map(message)).collect();
    (!remarks.is_empty()).then(|| PassReport {
        pass: "offload".into(),
        nodes_before: nodes,
        nodes_after: nodes,
        remarks: remarks.into_iter().map(|message| (message, Origin::none())).collect(),
    })
}

/// The graph of all ranks; nothing is reported.
fn distributed(
    graph: &Graph,
    options: &pipeline::Options,
    request: &Request,
    recompute: Recompute,
) -> Result<(Graph, PassContext), Report> {
    let (mut graph, mut context) = (graph.clone(), PassContext::default());
    for pass in pipeline::distribution(options, recompute) {
        if request.disabled.iter().all(|d| d != pass.info().name) {
            pass.run(&mut graph, &mut context)?;
        }
    }
    Ok((graph, context))
}

/// The parameters that are gathered together, if the usual schedule is then faster: the best one is not slower.
fn together(
    graph: &Graph,
    config: &Config,
    options: &pipeline::Options,
    request: &Request,
    capacity: usize,
    saving: Saving,
) -> Result<BTreeSet<String>, Report> {
    let cluster = clusters::of(config, &options.backend.describe())?;
    let lowered = |together: &BTreeSet<String>| -> Result<Plan, Report> {
        let options = options.gathering(together.clone());
        let (graph, context) = distributed(graph, &options, request, saving.recompute)?;
        let mut plan = lowered(&graph, config, &options, capacity, &context, &cluster, None)?.plan;
        offload(&mut plan, saving.offload, &cluster);
        Ok(plan)
    };
    let apart = lowered(&BTreeSet::new())?;
    let small = small::parameters(&apart, &cluster);
    if small.is_empty() {
        return Ok(small);
    }
    let usual = |plan: &Plan| auto::usual(plan, &cluster, config.memory.budget);
    let (apart, together) = (usual(&apart), usual(&lowered(&small)?));
    Ok(if together.is_better_than(&apart) { small } else { BTreeSet::new() })
}

struct Planned {
    plan: Plan,
    constants: Vec<(String, Tensor)>,
    object: Vec<u8>,
    /// The report of the scheduler, if it chose.
    chosen: Option<PassReport>,
}

fn plan(
    graph: &Graph,
    config: &Config,
    options: &pipeline::Options,
    capacity: usize,
    run: &Run<'_>,
    trained: Option<&Plan>,
) -> Result<Planned, Report> {
    let (Lowered { mut plan, constants, regions }, chosen) =
        arrange(graph, config, options, capacity, &run.context, run.offload, trained)?;
    let without_code = run.request.without_code;
    let object = options.backend.generate(&mut plan, &regions, without_code)?;
    let report = |message| PassReport {
        pass: "schedule".into(),
        nodes_before: graph.len(),
        nodes_after: graph.len(),
        remarks: vec![(message, Origin::none())],
    };
    Ok(Planned { plan, constants, object, chosen: chosen.map(report) })
}

/// Lowers a graph; its plan is neither scheduled nor placed.
fn lowered(
    graph: &Graph,
    config: &Config,
    options: &pipeline::Options,
    capacity: usize,
    context: &PassContext,
    cluster: &Cluster,
    trained: Option<&Plan>,
) -> Result<Lowered, Report> {
    let backend = &options.backend;
    let strategy = config.sharding.strategy;
    let lower_options = LowerOptions {
        units: context.units.clone(),
        strategy,
        compute_dtype: config.precision.compute,
        seed: config.run.seed,
        accumulation: config.run.accumulation,
        shards: strategy.shards(config.sharding.ranks, config.sharding.shard_group),
        gather_once: strategy == Strategy::ShardOptimizer
            && config.run.accumulation > 1
            && config.sharding.ranks > 1,
        loss_capacity: capacity,
        target: backend.describe(),
        trained,
        losses: crate::losses::terms(config)?,
        metrics: context.metrics.clone(),
        cluster,
        config: config.to_toml(),
        frit_version: env!("CARGO_PKG_VERSION").into(),
        generated: &backend.generates(),
        library: &backend.has_library_kernel(),
        entry: &|body, kind, region| backend.entry(body, kind, region),
    };
    let mut lowered = lower(graph, &lower_options)?;
    for input in &mut lowered.plan.inputs {
        input.ranges = context.index_ranges.get(&input.name).cloned().unwrap_or_default();
    }
    Ok(lowered)
}

/// Lowers, offloads, schedules and places a graph; kernels are not generated yet. With the schedule that was chosen,
/// in words, if it was.
fn arrange(
    graph: &Graph,
    config: &Config,
    options: &pipeline::Options,
    capacity: usize,
    context: &PassContext,
    what: Offload,
    trained: Option<&Plan>,
) -> Result<(Lowered, Option<String>), Report> {
    let cluster = clusters::of(config, &options.backend.describe())?;
    let mut lowered = lowered(graph, config, options, capacity, context, &cluster, trained)?;
    offload(&mut lowered.plan, what, &cluster);
    if config.sharding.prefetch == choices::Prefetch::Auto {
        let chosen = auto::choose(&lowered.plan, &cluster, config.memory.budget);
        let words = chosen.describe(&cluster);
        lowered.plan = chosen.plan;
        return Ok((lowered, Some(words)));
    }
    let limit = config.sharding.limit_all_gathers;
    let prefetch = Prefetch::Fixed {
        backward: match config.sharding.backward_prefetch {
            choices::Backward::Pre => BackwardPrefetch::Pre,
            choices::Backward::Post => BackwardPrefetch::Post,
            choices::Backward::None => BackwardPrefetch::None,
        },
        forward: config.sharding.forward_prefetch,
        limit: if limit == 0 { usize::MAX } else { limit },
    };
    schedule(&mut lowered.plan, &prefetch);
    memory::assign(&mut lowered.plan);
    Ok((lowered, None))
}
