//! The certificate of a plan: every pass of its trace is held against what it must keep.
//!
//! The trace begins on the graph that is imported here. What a pass must keep is proved by `frit_verify`, which shares no code with the
//! passes; none of them runs but those that are part of what a model means. The plan must then be, byte for byte but for
//! machine code, what the last graph is lowered to; that lowering is covered by the proof of the plan (`frit_passes::verify_plan`), and its
//! tasks are read as a graph that is compared with the last one (`frit_verify::Tasks`).

mod compared;
mod summary;

pub use summary::{Group, KERNELS};

use crate::compilation::{Again, Passed, Request, imported, lowered, source};
use crate::config::Config;
use crate::config::choices::{AdapterKind, BatchNorm};
use crate::diagnostics::Report;
use crate::import::Imported;
use crate::pass_trace::{self, Stage};
use crate::pipeline::{self, Options};
use crate::source::Source;
use crate::statement;
use compared::{checked, kept};
use frit_ir::ops::OptimizerKind;
use frit_ir::plan::{Entry, KernelKind, Plan, layout};
use frit_ir::{Code, Diagnostic, Graph, Origin};
use frit_passes::loss::LossKind;
use frit_passes::loss::evaluation::STATISTICS;
use frit_passes::{Pass, PassContext, differentiate, index_ranges, loss, shard, update};
use frit_passes::{adapter, documents, evaluate, fp8, loss_scale, sync_batch_norm};
use frit_verify::{
    Comparer, Difference, Ranks, Tasks, Unstated, gradient, kept_wide, on_large_stack, step,
};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread;

/// What is known of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It changed nothing.
    Unchanged,
    /// Every output has the bits that it had.
    Bits,
    /// Every output has the bits that it had, but for values of 16 bits that a fused region rounds and reads, which its kernel may keep in
    /// f32.
    KeptWide,
    /// Every output is what it was, and rounded as it was to less than 32 bits: it differs at most by what arithmetic in f32 rounds, such as
    /// sums in another order.
    Equal,
    /// Every output is what it was but for where it is rounded to less than 32 bits.
    Rounded,
    /// Every output is what the definition of the step says.
    AsStated,
    /// What it does is part of what the model means, and is not checked.
    Assumed,
    /// Neither proved nor refuted.
    NotShown,
}

impl Verdict {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Verdict::Unchanged => "changed nothing",
            Verdict::Bits => "equal bit for bit",
            Verdict::KeptWide => "equal bit for bit but for 16-bit values that regions keep in f32",
            Verdict::Equal => "equal but for f32 rounding, such as the order of sums",
            Verdict::Rounded => "equal but for rounding",
            Verdict::AsStated => "as stated",
            Verdict::Assumed => "assumed",
            Verdict::NotShown => "not shown",
        }
    }
}

/// What is known of one pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Name of the pass.
    pub pass: String,
    /// What is known.
    pub verdict: Verdict,
    /// The first outputs that were not shown to be kept, or not rounded as they were, in words.
    pub differences: Vec<String>,
}

/// How an output of the plan differs from that of the step as it is stated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Kept {
    /// The output, by its kind and name.
    pub output: String,
    /// The weakest of what is known of it of the passes behind the last that states what it adds.
    pub verdict: Verdict,
    /// The passes of which the bits of this output are not known to stay.
    pub passes: Vec<String>,
    /// Operations whose results are rounded to less than 32 bits on the way to it, as `matmul to bf16`.
    pub operations: BTreeSet<String>,
}

/// What is known of all passes of a compilation, and of the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Certificate {
    /// The passes in order.
    pub passes: Vec<Checked>,
    /// The passes of the evaluation beside a training, in order.
    pub evaluation: Vec<Checked>,
    /// The outputs of the step.
    pub outputs: Vec<Kept>,
    /// The file that the model was read from, unless it is gone and what the plan has kept of the model was read instead.
    pub model: Option<Model>,
    /// Parts of the plan that differ from what the model compiles to, by the name of the field; those of its evaluation as
    /// `eval/field`, files of its folder `source` as `source/file`.
    pub edited: Vec<String>,
}

/// The file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Model {
    /// Where it is.
    pub path: PathBuf,
    /// The SHA-256 of its contents.
    pub sha256: String,
}

impl Certificate {
    /// Whether every pass was proved, or is part of what the model means.
    pub fn holds(&self) -> bool {
        self.edited.is_empty() && self.open().is_empty()
    }

    /// The passes of which nothing is known.
    pub fn open(&self) -> Vec<&Checked> {
        let all = self.passes.iter().chain(&self.evaluation);
        all.filter(|p| p.verdict == Verdict::NotShown).collect()
    }
}

/// The plans of a plan directory.
#[derive(Clone, Copy, Debug)]
pub struct Plans<'a> {
    /// Its plan.
    pub plan: &'a Plan,
    /// The evaluation beside a training.
    pub evaluation: Option<&'a Plan>,
    /// What is kept of the model, unless that is the model.
    pub source: Option<&'a Source>,
}

/// Checks every pass of a trace that begins on a model, and that plans are what its last graphs are lowered to.
///
/// # Errors
/// Everything that is wrong with the model or the configuration, and a trace that is not one of them.
pub fn certify(
    request: &Request,
    config: &Config,
    trace: &[u8],
    plans: Plans,
) -> Result<Certificate, Report> {
    let Imported { graph, weights, ties, .. } = imported(request, config)?;
    let imported = Arc::new(graph);
    let (stages, evaluation) = pass_trace::read(trace, &imported).map_err(another_trace)?;
    let options = Options::new(config)?;
    let adapted = stages.iter().rfind(|stage| stage.pass == adapter::INFO.name);
    let adapted = adapted.map_or(&imported, |stage| &stage.graph).clone();
    let trains = config.loss.kind != LossKind::None;
    let training = Passes::new(imported, config, stages, &pipeline::all(&options, trains))?;
    let evaluation = match plans.evaluation {
        Some(_) => Some(Passes::new(adapted, config, evaluation, &pipeline::evaluation(&options))?),
        None => None,
    };
    let tasks = OnceLock::new();
    thread::scope(|scope| {
        let (training, evaluation, weights) = (&training, &evaluation, &weights);
        let again = || -> Result<_, Report> {
            let evaluation = evaluation.as_ref().zip(plans.evaluation);
            let passed = evaluation.map(|(passes, plan)| passes.passed(plan));
            let again = lowered(request, config, weights, training.passed(plans.plan), passed);
            Ok(again.map_err(|report| no_stage("lowering", &report))?)
        };
        let tasks = &tasks;
        let edited = scope.spawn(move || {
            let again =
                catch_unwind(AssertUnwindSafe(|| on_large_stack(again))).unwrap_or_else(|_| {
                    Err(another_trace("lowering does not end on its graph").into())
                });
            let of = |again: &(Again, Option<Again>)| {
                computed(plans, training, evaluation.as_ref(), again)
            };
            // The checks wait for this, whatever it is.
            let steps = || on_large_stack(|| again.as_ref().map(of).unwrap_or_default());
            let _ = tasks.set(catch_unwind(AssertUnwindSafe(steps)).unwrap_or_default());
            let (plan, other) = again?;
            Ok::<_, Report>(edited(plans, &plan.plan, other.as_ref().map(|other| &other.plan)))
        });
        let source = plans.source.map(|kept| {
            let adapters = &training.context.adapters;
            let expected = source(request, config, plans.plan, &ties, adapters)?;
            Ok::<_, Report>(kept.differences(&expected))
        });
        let evaluation = evaluation.as_ref().map_or(&[][..], |passes| &passes.done);
        let all: Vec<&Step> = training.done.iter().chain(evaluation).collect();
        let mut found = catch_unwind(AssertUnwindSafe(|| checked(&all, Some(tasks))))
            .map_err(|_| another_trace("a check does not end on its graphs"))?;
        // What is not shown of lowering, which rounds nothing, is covered by the proof of the plan, and by lowering that runs again.
        let lowered = found.split_off(all.len()).into_iter().map(|f| match f.pass.verdict {
            Verdict::NotShown | Verdict::Rounded => Checked { verdict: Verdict::Assumed, ..f.pass },
            _ => f.pass,
        });
        let evaluation = found.split_off(training.done.len()).into_iter().map(|f| f.pass);
        let outputs = kept(&training.checker.before, &found, training.checker.ranks.number());
        let mut passes: Vec<Checked> = found.into_iter().map(|f| f.pass).collect();
        let mut evaluation: Vec<Checked> = evaluation.collect();
        for (list, lowered) in [&mut passes, &mut evaluation].into_iter().zip(lowered) {
            list.push(lowered);
        }
        let mut edited = edited
            .join()
            .unwrap_or_else(|_| Err(another_trace("lowering does not end on its graph").into()))?;
        edited.extend(source.transpose()?.unwrap_or_default());
        Ok(Certificate { passes, evaluation, outputs, edited, model: None })
    })
}

/// What the tasks of the plans compute, to be compared with the graphs that are lowered to them. The values of constants are those of
/// lowering; the plan has their digests.
fn computed(
    plans: Plans,
    training: &Passes,
    evaluation: Option<&Passes>,
    (again, other): &(Again, Option<Again>),
) -> Vec<Step> {
    let of = |passes: &Passes, plan: &Plan, again: &Again, trained: Option<&Plan>| {
        let graph = &passes.checker.before;
        let made = catch_unwind(AssertUnwindSafe(|| {
            Tasks::new(plan, graph, &again.constants, (passes.checker.ranks, trained))
                .map_err(|unstated| format!("{} ({})", unstated.reason, unstated.origin))
        }));
        let made = made.unwrap_or_else(|_| Err("the tasks are none of a plan".into()));
        let (before, after, refused) = match made {
            Ok(Tasks { expected, computed }) => (Arc::new(expected), Arc::new(computed), None),
            Err(why) => (graph.clone(), graph.clone(), Some(why)),
        };
        let before = Checker { before, ..passes.checker.clone() };
        Step::new(before, LOWERING, after, refused)
    };
    let mut steps = vec![of(training, plans.plan, again, None)];
    let evaluation = evaluation.zip(plans.evaluation).zip(other.as_ref());
    steps.extend(
        evaluation.map(|((passes, plan), again)| of(passes, plan, again, Some(plans.plan))),
    );
    steps
}

/// That a trace is not one of this model and configuration.
fn another_trace(why: impl Display) -> Diagnostic {
    let message = "the pass trace is not one of this model and configuration";
    Diagnostic::error(Code::PlanEdited, message).note(why.to_string()).help(COMPILE_AGAIN)
}

/// That a graph of a trace is none of a compilation that ended: something refuses it.
fn no_stage(by: &str, report: &Report) -> Diagnostic {
    let why = report.diagnostics.first().map_or("it fails", |first| &first.message);
    another_trace(format!("{by} refuses its graph: {why}"))
}

/// What to do about a plan that cannot be certified.
pub const COMPILE_AGAIN: &str =
    "it was edited, or compiled by another version of frit: compile the model again";

/// Checks what passes do to a graph, one after the other.
#[derive(Clone)]
pub struct Checker {
    before: Arc<Graph>,
    /// Whether gradients are still to be taken.
    before_gradients: bool,
    /// The graph before `loss_scale`, which `update` completes.
    with_gradients: Option<Arc<Graph>>,
    config: Config,
    ranks: Ranks,
    /// Elements of the loss of a micro-step.
    capacity: f64,
    /// The parameters that Muon steps unless a group says otherwise.
    matrices: Arc<BTreeSet<String>>,
}

/// What is checked behind the passes.
const LOWERING: &str = "lower";

/// Differences that are listed of a pass.
const LISTED: usize = 3;

impl Checker {
    /// For the compilation of an imported graph.
    pub fn new(imported: Arc<Graph>, config: &Config) -> Checker {
        let (n, sharding) = (config.sharding.ranks, &config.sharding);
        let shards = sharding.strategy.shards(n, sharding.shard_group);
        let ranks = Ranks { shards, replicas: n / shards };
        Checker {
            before: imported,
            before_gradients: false,
            with_gradients: None,
            config: config.clone(),
            ranks,
            capacity: 0.0,
            matrices: Arc::default(),
        }
    }

    /// For a compilation that takes gradients.
    #[must_use]
    pub fn of_training(self) -> Checker {
        Checker { before_gradients: true, ..self }
    }

    /// What a pass must keep.
    fn duty(&self, pass: &str, after: &Graph) -> Duty {
        let stated = [loss::INFO, differentiate::INFO, loss_scale::INFO, update::INFO, shard::INFO];
        let is_stated = stated.iter().any(|info| info.name == pass);
        // A pass that does nothing does not do what is stated of it; all that `loss_scale` adds is stated of `update`.
        let may_do_nothing = !is_stated || pass == loss_scale::INFO.name;
        match () {
            () if may_do_nothing && *self.before == *after => Duty::Nothing(Verdict::Unchanged),
            () if is_meant(pass, &self.config) => Duty::Nothing(Verdict::Assumed),
            () if is_stated => Duty::Statement,
            () => Duty::Outputs,
        }
    }

    /// The differences of what a pass made from what its statement says.
    fn against_statement(&self, real: &mut Comparer, pass: &str, after: &Graph) -> Vec<Difference> {
        let (before, config) = (&self.before, &self.config);
        let stated = match pass {
            // What it adds is part of what `update` must be.
            _ if pass == loss_scale::INFO.name => return vec![],
            _ if pass == shard::INFO.name => {
                return self.distributed(real, after);
            }
            _ if pass == loss::INFO.name => self.with_loss(),
            _ if pass == differentiate::INFO.name => {
                let of_step = config.run.reproducible.unwrap_or(config.run.accumulation);
                gradient::differentiated(before, of_step, capacity(before))
            }
            _ => {
                let before = self.with_gradients.as_ref().unwrap_or(before);
                let matrices = BTreeSet::clone(&self.matrices);
                step::updated(before, &statement::update(config, self.capacity, matrices))
            }
        };
        match stated {
            Ok(expected) => real
                .before_gradients(self.before_gradients && pass != differentiate::INFO.name)
                .compare_stated(&expected, after, self.ranks),
            Err(unstated) => vec![unstated.into()],
        }
    }

    /// The graph with the loss that is stated of it.
    fn with_loss(&self) -> Result<Graph, Unstated> {
        let wrong = |e: Diagnostic| Unstated::new("loss", &Origin::none(), e.to_string());
        let terms = statement::losses(&self.config).map_err(wrong)?;
        step::with_loss(&self.before, &terms, self.ranks.number())
    }

    /// The differences of the step of all ranks from that of one.
    fn distributed(&self, comparer: &mut Comparer, after: &Graph) -> Vec<Difference> {
        // Those of a reproducible evaluation are added in order by who reads them.
        let summed = self.config.run.reproducible.is_none();
        let sums = if summed { &[STATISTICS][..] } else { &[] };
        let comparer = comparer.before_gradients(false);
        comparer.compare_distributed(&self.before, after, self.ranks, sums)
    }

    /// What is known of the next pass, which made this graph.
    pub fn check(&mut self, pass: &str, graph: &Graph) -> Checked {
        let after = Arc::new(graph.clone());
        let step = Step::new(self.clone(), pass, after.clone(), None);
        self.advance(pass, after);
        let found = checked(&[&step], None);
        found.into_iter().next().expect("invariant: one verdict for each pass").pass
    }

    /// Goes on to the pass after one that made this graph.
    fn advance(&mut self, pass: &str, graph: Arc<Graph>) {
        if pass == loss::INFO.name
            && self.config.optimizer.kind == OptimizerKind::Muon
            && let Ok(stated) = self.with_loss()
        {
            self.matrices = Arc::new(step::matrices(&stated));
        }
        let before = std::mem::replace(&mut self.before, graph);
        if pass == differentiate::INFO.name {
            self.capacity = capacity(&before);
            self.before_gradients = false;
        }
        if pass == loss_scale::INFO.name {
            self.with_gradients = Some(before);
        }
    }
}

/// What a pass must keep.
#[derive(Clone, Copy)]
enum Duty {
    /// There is nothing to compare.
    Nothing(Verdict),
    /// What it made is what is stated of it.
    Statement,
    /// Every output.
    Outputs,
}

/// What a pass did, to be checked.
struct Step {
    before: Checker,
    pass: String,
    after: Arc<Graph>,
    /// Why there is nothing to compare.
    refused: Option<String>,
    duty: Duty,
}

impl Step {
    fn new(before: Checker, pass: &str, after: Arc<Graph>, refused: Option<String>) -> Step {
        let duty = match refused {
            Some(_) => Duty::Nothing(Verdict::NotShown),
            None => before.duty(pass, &after),
        };
        Step { before, pass: pass.into(), after, refused, duty }
    }

    fn checked(&self, verdict: Verdict, differences: &[Difference]) -> Checked {
        let differences = differences.iter().take(LISTED).map(words).collect();
        Checked { pass: self.pass.clone(), verdict, differences }
    }

    /// The outputs for which a region keeps a value in f32 that the graph before rounded.
    fn wide(&self) -> BTreeSet<String> {
        let before = kept_wide(&self.before.before);
        kept_wide(&self.after).into_iter().filter(|output| !before.contains(output)).collect()
    }
}

/// Whether what a pass does is part of what the model means.
fn is_meant(pass: &str, config: &Config) -> bool {
    let meaning = [
        (evaluate::INFO.name, true),
        (adapter::INFO.name, config.adapter.kind != AdapterKind::None),
        (documents::INFO.name, config.data.document_separator.is_some()),
        (sync_batch_norm::INFO.name, config.model.batch_norm == BatchNorm::Sync),
        (fp8::INFO.name, config.precision.fp8),
    ];
    meaning.contains(&(pass, true))
}

/// Passes that follow each other.
struct Passes {
    /// After the last of them.
    checker: Checker,
    done: Vec<Step>,
    /// What those found that run again.
    context: PassContext,
    /// Elements of the loss of a micro-step.
    loss_elements: usize,
}

impl Passes {
    /// The passes of a trace, which are those of the configuration but for disabled ones. Those that are part of what the model means,
    /// and the one that looks for indices, must make what they made.
    fn new(
        begin: Arc<Graph>,
        config: &Config,
        stages: Vec<Stage>,
        passes: &[Box<dyn Pass>],
    ) -> Result<Passes, Report> {
        let ran: BTreeSet<&str> = stages.iter().map(|stage| stage.pass.as_str()).collect();
        let names = passes.iter().map(|pass| pass.info().name);
        let disabled = names.filter(|pass| !ran.contains(pass));
        let disabled: Vec<String> = disabled.map(str::to_string).collect();
        let contracts: Vec<_> = passes.iter().map(|pass| pass.info()).collect();
        pipeline::check(&contracts, &disabled, None).map_err(|e| another_trace(e.message))?;
        let all = passes.iter().map(|pass| &**pass);
        let enabled: Vec<&dyn Pass> = all.filter(|pass| ran.contains(pass.info().name)).collect();
        let is_same =
            enabled.iter().map(|pass| pass.info().name).eq(stages.iter().map(|s| &*s.pass));
        if !is_same || disabled.iter().any(|pass| is_meant(pass, config)) {
            return Err(another_trace("its passes are not those of this configuration").into());
        }
        // What is part of the meaning reads how a graph is written, and not only what it computes: the passes up to the last of these run
        // again on what is not from the trace. Fp8 only decides what is rounded.
        let reads_form = |pass: &str| is_meant(pass, config) && pass != fp8::INFO.name;
        let last = enabled.iter().rposition(|pass| reads_form(pass.info().name));
        let (mut own, mut own_context) = (Graph::clone(&begin), PassContext::default());
        let mut checker = Checker::new(begin, config);
        if ran.contains(differentiate::INFO.name) {
            checker = checker.of_training();
        }
        let mut all =
            Passes { checker, done: vec![], context: PassContext::default(), loss_elements: 0 };
        for (k, (pass, Stage { pass: name, graph })) in enabled.into_iter().zip(stages).enumerate()
        {
            let before = &all.checker.before;
            if name == differentiate::INFO.name {
                all.loss_elements = loss::capacity(before).unwrap_or(0);
            }
            let run = |graph: &mut Graph, context: &mut PassContext| {
                pass.run(graph, context).map_err(|refused| no_stage(&name, &refused.into()))
            };
            if last.is_some_and(|last| k <= last) {
                run(&mut own, &mut own_context)?;
                if reads_form(&name) && !own.is_like(&graph) {
                    let why = format!("pass `{name}` makes something else of the model");
                    return Err(another_trace(why).into());
                }
            }
            let is_meant_here = is_meant(&name, config) && !reads_form(&name);
            if is_meant_here || name == index_ranges::INFO.name {
                let mut made = Graph::clone(before);
                run(&mut made, &mut all.context)?;
                if !made.is_like(&graph) {
                    let why = format!("pass `{name}` makes something else of the graph before it");
                    return Err(another_trace(why).into());
                }
            }
            let before = all.checker.clone();
            all.done.push(Step::new(before, &name, graph.clone(), None));
            all.checker.advance(&name, graph);
        }
        let PassContext { metrics, adapters, .. } = own_context;
        (all.context.metrics, all.context.adapters) = (metrics, adapters);
        Ok(all)
    }

    /// What is lowered to this plan.
    fn passed<'a>(&'a self, plan: &'a Plan) -> Passed<'a> {
        let PassContext { index_ranges, metrics, .. } = &self.context;
        let (index_ranges, metrics) = (index_ranges.clone(), metrics.clone());
        let context = PassContext { index_ranges, metrics, ..PassContext::default() };
        Passed { graph: &self.checker.before, context, loss_elements: self.loss_elements, plan }
    }
}

/// Elements of the loss of a micro-step, in the graph before `differentiate`.
fn capacity(graph: &Graph) -> f64 {
    loss::capacity(graph).unwrap_or(0) as f64
}

fn words(difference: &Difference) -> String {
    /// Characters of a term that are shown.
    const SHOWN: usize = 400;
    let what: String = difference.what.chars().take(SHOWN).collect();
    match difference.output.as_str() {
        "" => format!("{what} ({})", difference.origin),
        output => format!("{output}: {what} ({})", difference.origin),
    }
}

/// Fields in which plans differ from lowered ones, but for generated code and what is
/// only told: the version of the compiler, remarks, advice and sums of bytes.
pub fn edited(plans: Plans, lowered: &Plan, evaluation: Option<&Plan>) -> Vec<String> {
    let mut different = fields(plans.plan, lowered);
    if let Some((plan, lowered)) = plans.evaluation.zip(evaluation) {
        let fields = fields(plan, lowered).into_iter();
        different.extend(fields.map(|field| format!("{}/{field}", layout::EVALUATION)));
    }
    different
}

/// Fields in which a plan differs from a lowered one.
fn fields(plan: &Plan, lowered: &Plan) -> Vec<String> {
    let json = |mut plan: Plan| {
        plan.object = None;
        match serde_json::to_value(&plan) {
            Ok(serde_json::Value::Object(fields)) => fields,
            _ => serde_json::Map::new(),
        }
    };
    let mut lowered = Plan {
        frit_version: plan.frit_version.clone(),
        cast_baseline: plan.cast_baseline,
        model_bytes: plan.model_bytes,
        least_bytes: plan.least_bytes,
        pass_trace: plan.pass_trace.clone(),
        reports: plan.reports.clone(),
        lints: plan.lints.clone(),
        ..lowered.clone()
    };
    // What is not stored has no digest.
    for (found, expected) in plan.params.iter().zip(&mut lowered.params) {
        expected.digest = expected.digest.take().filter(|_| found.digest.is_some());
    }
    for (found, expected) in plan.constants.iter().zip(&mut lowered.constants) {
        expected.digest = expected.digest.take().filter(|_| found.digest.is_some());
    }
    let mut plan = plan.clone();
    for (found, expected) in plan.kernels.iter_mut().zip(&mut lowered.kernels) {
        // Code is not generated again. That of a kernel is found by a digest of its body and of how it is called.
        if expected.entry == Entry::Interpreter && found.kind() == KernelKind::Generated {
            for kernel in [found, expected] {
                (kernel.entry, kernel.entry_hash) = (Entry::Interpreter, String::new());
            }
        }
    }
    let (found, expected) = (json(plan), json(lowered));
    let differs = |key: &&String| found.get(*key) != expected.get(*key);
    let keys: BTreeSet<&String> = found.keys().chain(expected.keys()).collect();
    keys.into_iter().filter(differs).cloned().collect()
}
