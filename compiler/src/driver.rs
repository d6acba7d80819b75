//! Compiling: a model and a configuration into a plan, pass by pass.

use crate::config::Config;
use crate::config::choices::{BatchNorm, LossKind};
use crate::diagnostics::Report;
use crate::import::{self, ImportOptions, Imported, Inlined};
use crate::lints;
use crate::pipeline;
use crate::source::Source;
use crate::weights::Weights;
use frit_ir::plan::{PassReport, Plan};
use frit_ir::{Diagnostic, Graph, Origin, Tensor, verify};
use frit_passes::lower::{LowerOptions, Lowered, lower};
use frit_passes::schedule::{BackwardPrefetch, ScheduleOptions, schedule};
use frit_passes::shard::Strategy;
use frit_passes::{Pass, PassContext, lint, loss, memory, verify_plan};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Name of the front end in the reports of a plan.
pub const IMPORT: &str = "import";

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
    /// Compile the evaluation of a model that trains, too.
    pub evaluation: bool,
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
    let Imported { mut graph, weights, warnings, inlined } =
        load(&request.model, config, &request.binds)?;
    let mut context = PassContext::default();
    warnings.into_iter().for_each(|w| context.warn(w));
    let nodes = graph.len();
    let mut run = Run { request, observer, reports: vec![], context, at: 0 };
    run.reports.push(imported(nodes, &inlined));
    let trains = config.loss.kind != LossKind::None;
    let as_read = (trains && request.evaluation).then(|| graph.clone());
    let mut capacity = 0;
    if !trains {
        if run.passes(pipeline::evaluation(&options), &mut graph)? {
            return Ok(None);
        }
    } else {
        if run.passes(pipeline::forward(&options), &mut graph)? {
            return Ok(None);
        }
        let found = lints::forward(&graph, config, &options.backend.describe(), &weights)?;
        run.context.warnings.extend(found);
        capacity = loss::capacity(&graph).ok_or_else(|| {
            Diagnostic::error("E070", "the graph has no loss").help("set loss.kind and loss.logits")
        })?;
        if run.passes(pipeline::training(&options, capacity as f64), &mut graph)? {
            return Ok(None);
        }
    }
    run.observer.stage("schedule, memory and machine code");
    let (mut plan, constants, object) = plan(&graph, config, &options, capacity, &run.context)?;
    plan.shuffle = config.data.shuffle;
    plan.drop_last = config.data.drop_last;
    plan.cast_baseline = run.context.cast_baseline.unwrap_or_default();
    let evaluation = match as_read {
        Some(graph) => Some(evaluation(graph, config, &options, &run)?),
        None => None,
    };
    plan.reports = run.reports;
    let mut found = run.context.warnings;
    found.extend(lint::plan(&plan));
    lints::allow(&mut found, &config.lints.allow)?;
    plan.lints = found;
    run.observer.stage("proof");
    verify_plan::verify_plan(&plan).map_err(|diagnostics| Report { diagnostics })?;
    let source = Source::of(&request.model, &request.binds)?;
    Ok(Some(Compiled { plan, object, weights, constants, evaluation, source }))
}

/// Compiles the evaluation of a model after its training; `graph` is as the front end read it.
fn evaluation(
    mut graph: Graph,
    config: &Config,
    options: &pipeline::Options,
    training: &Run<'_>,
) -> Result<Evaluation, Report> {
    let known = &training.context;
    let context = PassContext {
        units: known.units.clone(),
        unit_of: known.unit_of.clone(),
        ..PassContext::default()
    };
    let request = &Request { stop_after: None, ..training.request.clone() };
    let mut run = Run { request, observer: &mut (), reports: vec![], context, at: 0 };
    run.passes(pipeline::evaluation(options), &mut graph)?;
    let (mut plan, constants, object) = plan(&graph, config, options, 0, &run.context)?;
    plan.reports = run.reports;
    verify_plan::verify_plan(&plan).map_err(|diagnostics| Report { diagnostics })?;
    Ok(Evaluation { plan, object, constants })
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

fn load(
    model: &Path,
    config: &Config,
    binds: &BTreeMap<String, usize>,
) -> Result<Imported, Report> {
    let options = ImportOptions {
        binds: binds.clone(),
        trainable: config.params.trainable.clone(),
        frozen: config.params.frozen.clone(),
        ignored: config.params.ignored.clone(),
        batch_norm_trains: config.model.batch_norm == BatchNorm::Train,
    };
    import::load(model, &options)
}

struct Run<'a> {
    request: &'a Request,
    observer: &'a mut dyn Observer,
    reports: Vec<PassReport>,
    context: PassContext,
    at: usize,
}

impl Run<'_> {
    /// Runs passes in order; true if the compilation stops here.
    fn passes(&mut self, passes: Vec<Box<dyn Pass>>, graph: &mut Graph) -> Result<bool, Report> {
        for pass in passes {
            let name = pass.info().name;
            if self.request.disabled.iter().any(|d| d == name) {
                continue;
            }
            let nodes_before = graph.len();
            pass.run(graph, &mut self.context)?;
            if cfg!(debug_assertions) || self.request.verify_each {
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

/// The graph's laws, broken by a pass: a bug of the compiler.
fn check(graph: &Graph, pass: &str) -> Result<(), Report> {
    verify::verify(graph).map_err(|mut diagnostics| {
        for d in &mut diagnostics {
            d.message = format!("after pass `{pass}`: {}", d.message);
        }
        Report { diagnostics }
    })
}

type Planned = (Plan, Vec<(String, Tensor)>, Vec<u8>);

fn plan(
    graph: &Graph,
    config: &Config,
    options: &pipeline::Options,
    capacity: usize,
    context: &PassContext,
) -> Result<Planned, Report> {
    let backend = &options.backend;
    let strategy = pipeline::strategy(config);
    let lower_options = LowerOptions {
        units: context.units.clone(),
        strategy: config.sharding.strategy.word().into(),
        compute_dtype: config.precision.compute,
        seed: config.run.seed,
        accumulation: config.run.accumulation,
        shards: strategy.shards(config.sharding.ranks),
        gather_once: strategy == Strategy::ShardOptimizer
            && config.run.accumulation > 1
            && config.sharding.ranks > 1,
        loss_capacity: capacity,
        target: backend.describe(),
        losses: crate::losses::terms(config)?,
        config: config.to_toml(),
        frit_version: env!("CARGO_PKG_VERSION").into(),
        generated: &backend.generates(),
        library: &backend.has_library_kernel(),
    };
    let Lowered { mut plan, constants, regions } = lower(graph, &lower_options)?;
    let backward_prefetch = match config.sharding.backward_prefetch {
        crate::config::choices::Backward::Pre => BackwardPrefetch::Pre,
        crate::config::choices::Backward::Post => BackwardPrefetch::Post,
        crate::config::choices::Backward::None => BackwardPrefetch::None,
    };
    let limit = config.sharding.limit_all_gathers;
    let schedule_options = ScheduleOptions {
        backward_prefetch,
        forward_prefetch: config.sharding.forward_prefetch,
        limit_all_gathers: if limit == 0 { usize::MAX } else { limit },
    };
    schedule(&mut plan, &schedule_options);
    memory::assign(&mut plan);
    let object = backend.generate(&mut plan, &regions)?;
    Ok((plan, constants, object))
}
