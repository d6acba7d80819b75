//! The certificate of a plan: its model is compiled again, and every pass is held against what it must keep.
//!
//! What a pass must keep is proved by `frit_verify`, which shares no code with the passes. The plan must then be, byte for byte but for
//! machine code, what the last graph is lowered to; that lowering is covered by the proof of the plan (`frit_passes::verify_plan`).

use crate::compilation::{Compiled, Observer, Request, compile};
use crate::config::Config;
use crate::config::choices::{AdapterKind, BatchNorm};
use crate::diagnostics::Report;
use crate::statement;
use frit_ir::plan::{Entry, KernelKind, Plan, layout};
use frit_ir::{Graph, Origin};
use frit_passes::loss::evaluation::STATISTICS;
use frit_passes::{adapter, documents, evaluate, fp8, loss_scale, sync_batch_norm};
use frit_passes::{differentiate, loss, shard, update};
use frit_verify::{Comparer, Difference, Ranks, Roundings, Unstated};
use frit_verify::{gradient, on_large_stack, roundings, step};
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;

/// What is known of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It changed nothing.
    Unchanged,
    /// Every output is what it was, and rounded as it was.
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
            Verdict::Equal => "equal",
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

/// How an output of the plan differs from that of the model over the real numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rounded {
    /// The output, by its kind and name.
    pub output: String,
    /// Operations whose results are rounded on the way to it, as `matmul to bf16`. None: it differs at most by the order of
    /// sums, and by what arithmetic in f32 rounds.
    pub operations: BTreeSet<String>,
}

/// What is known of all passes of a compilation, and of the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Certificate {
    /// The passes in order.
    pub passes: Vec<Checked>,
    /// The passes of the evaluation beside a training, in order.
    pub evaluation: Vec<Checked>,
    /// The outputs of the step, and where they are rounded to less than 32 bits.
    pub outputs: Vec<Rounded>,
    /// Parts of the plan that differ from what the model compiles to, by the name of the field; those of its evaluation as
    /// `eval/field`.
    pub edited: Vec<String>,
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
}

/// Compiles again and checks every pass; with plans, also that they are what comes of it.
///
/// # Errors
/// Everything that is wrong with the model or the configuration.
pub fn certify(
    request: &Request,
    config: &Config,
    plans: Option<Plans>,
) -> Result<Certificate, Report> {
    let request = Request { without_code: true, evaluation: true, ..request.clone() };
    let mut all = Steps { config, training: None, evaluation: None };
    let compiled = compile(&request, config, &mut all)?;
    let edited = match (plans, &compiled) {
        (Some(plans), Some(compiled)) => self::edited(plans, compiled),
        _ => vec![],
    };
    drop(compiled);
    let steps = |of: Option<Passes>| of.map_or(vec![], |passes| passes.done);
    let outputs = all.training.as_ref().map_or(vec![], |p| roundings(&p.checker.before));
    let (training, evaluation) = (steps(all.training), steps(all.evaluation));
    let n = training.len();
    let mut passes = checked(&training.into_iter().chain(evaluation).collect::<Vec<_>>());
    let evaluation = passes.split_off(n);
    let outputs = outputs.into_iter().map(rounded).collect();
    Ok(Certificate { passes, evaluation, outputs, edited })
}

fn rounded(found: Roundings) -> Rounded {
    let operations = found.operations.into_iter();
    let operations = operations.map(|(dtype, op)| format!("{op} to {dtype}")).collect();
    Rounded { output: found.output, operations }
}

/// Checks what passes do to a graph, one after the other.
#[derive(Clone)]
pub struct Checker {
    before: Arc<Graph>,
    /// The graph before `loss_scale`, which `update` completes.
    with_gradients: Option<Arc<Graph>>,
    config: Config,
    ranks: Ranks,
    /// Elements of the loss of a micro-step.
    capacity: f64,
}

/// Differences that are listed of a pass.
const LISTED: usize = 3;

impl Checker {
    /// For the compilation of an imported graph.
    pub fn new(imported: Graph, config: &Config) -> Checker {
        let (n, sharding) = (config.sharding.ranks, &config.sharding);
        let shards = sharding.strategy.shards(n, sharding.shard_group);
        let ranks = Ranks { shards, replicas: n / shards };
        Checker {
            before: Arc::new(imported),
            with_gradients: None,
            config: config.clone(),
            ranks,
            capacity: 0.0,
        }
    }

    /// What a pass must keep.
    fn duty(&self, pass: &str, after: &Graph) -> Duty {
        let config = &self.config;
        let meaning = [
            (evaluate::INFO.name, true),
            (adapter::INFO.name, config.adapter.kind != AdapterKind::None),
            (documents::INFO.name, config.data.document_separator.is_some()),
            (sync_batch_norm::INFO.name, config.model.batch_norm == BatchNorm::Sync),
            (fp8::INFO.name, config.precision.fp8),
        ];
        let stated = [loss::INFO, differentiate::INFO, loss_scale::INFO, update::INFO, shard::INFO];
        match () {
            () if *self.before == *after => Duty::Nothing(Verdict::Unchanged),
            () if meaning.contains(&(pass, true)) => Duty::Nothing(Verdict::Assumed),
            () if stated.iter().any(|info| info.name == pass) => Duty::Statement,
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
                // Those of a reproducible evaluation are added in order by who reads them.
                let summed = config.run.reproducible.is_none();
                let sums = if summed { &[STATISTICS][..] } else { &[] };
                return real.compare_distributed(before, after, self.ranks, sums);
            }
            _ if pass == loss::INFO.name => match statement::losses(config) {
                Ok(terms) => step::with_loss(before, &terms, self.ranks.number()),
                Err(wrong) => Err(Unstated::new("loss", &Origin::none(), wrong.to_string())),
            },
            _ if pass == differentiate::INFO.name => {
                let of_step = config.run.reproducible.unwrap_or(config.run.accumulation);
                gradient::differentiated(before, of_step, capacity(before))
            }
            _ => {
                let before = self.with_gradients.as_ref().unwrap_or(before);
                step::updated(before, &statement::update(config, self.capacity))
            }
        };
        match stated {
            Ok(expected) => real.compare(&expected, after, self.ranks),
            Err(unstated) => vec![unstated.into()],
        }
    }

    /// What is known of the next pass, which made this graph.
    pub fn check(&mut self, pass: &str, graph: &Graph) -> Checked {
        let after = Arc::new(graph.clone());
        let step = Step { before: self.clone(), pass: pass.into(), after: after.clone() };
        self.advance(pass, after);
        let found = checked(&[step]);
        found.into_iter().next().expect("invariant: one verdict for each pass")
    }

    /// Goes on to the pass after one that made this graph.
    fn advance(&mut self, pass: &str, graph: Arc<Graph>) {
        let before = std::mem::replace(&mut self.before, graph);
        if pass == differentiate::INFO.name {
            self.capacity = capacity(&before);
        }
        if pass == loss_scale::INFO.name {
            self.with_gradients = Some(before);
        }
    }
}

/// What a pass must keep.
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
}

impl Step {
    fn checked(&self, verdict: Verdict, differences: &[Difference]) -> Checked {
        let differences = differences.iter().take(LISTED).map(words).collect();
        Checked { pass: self.pass.clone(), verdict, differences }
    }
}

/// Passes that follow each other.
struct Passes {
    /// After the last of them.
    checker: Checker,
    done: Vec<Step>,
}

/// All passes of a compilation.
struct Steps<'a> {
    config: &'a Config,
    training: Option<Passes>,
    /// Those of the evaluation beside it.
    evaluation: Option<Passes>,
}

impl Observer for Steps<'_> {
    fn begin(&mut self, evaluation: bool, graph: &Graph) -> bool {
        let passes = if evaluation { &mut self.evaluation } else { &mut self.training };
        *passes = Some(Passes { checker: Checker::new(graph.clone(), self.config), done: vec![] });
        true
    }

    fn after(&mut self, _: usize, pass: &str, graph: &Graph) {
        let passes = self.evaluation.as_mut().or(self.training.as_mut());
        let Passes { checker, done } = passes.expect("invariant: passes begin");
        let same = *checker.before == *graph;
        let after = if same { checker.before.clone() } else { Arc::new(graph.clone()) };
        done.push(Step { before: checker.clone(), pass: pass.into(), after: after.clone() });
        checker.advance(pass, after);
    }
}

/// What is known of each of these, of which none needs another: rounded numbers in one thread, and real ones in another.
fn checked(steps: &[Step]) -> Vec<Checked> {
    let duties: Vec<Duty> = steps.iter().map(|s| s.before.duty(&s.pass, &s.after)).collect();
    let (sender, not_equal) = std::sync::mpsc::channel::<(usize, Vec<Difference>)>();
    let outputs = steps.iter().zip(&duties).enumerate();
    let rounded = || {
        // Dropped at the end, after which nothing more is received.
        let sender = sender;
        let mut comparer = Comparer::of_rounded_numbers();
        for (i, (step, _)) in outputs.filter(|(_, (_, duty))| matches!(duty, Duty::Outputs)) {
            let ranks = step.before.ranks;
            let found = comparer.compare(&step.before.before, &step.after, ranks);
            if !found.is_empty() && sender.send((i, found)).is_err() {
                return;
            }
        }
    };
    let real = || {
        let mut comparer = Comparer::of_real_numbers();
        let mut all = vec![];
        for (step, duty) in steps.iter().zip(&duties) {
            all.push(match duty {
                Duty::Nothing(verdict) => step.checked(*verdict, &[]),
                Duty::Outputs => step.checked(Verdict::Equal, &[]),
                Duty::Statement => {
                    let found =
                        step.before.against_statement(&mut comparer, &step.pass, &step.after);
                    let holds = found.is_empty();
                    step.checked(if holds { Verdict::AsStated } else { Verdict::NotShown }, &found)
                }
            });
        }
        for (i, rounded) in not_equal {
            let step = &steps[i];
            let ranks = step.before.ranks;
            let found = comparer.compare(&step.before.before, &step.after, ranks);
            all[i] = match found.is_empty() {
                true => step.checked(Verdict::Rounded, &rounded),
                false => step.checked(Verdict::NotShown, &found),
            };
        }
        all
    };
    thread::scope(|scope| {
        scope.spawn(|| on_large_stack(rounded));
        on_large_stack(real)
    })
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

/// Fields in which plans differ from compiled ones, but for generated code and the values of parameters.
pub fn edited(plans: Plans, compiled: &Compiled) -> Vec<String> {
    let mut different = fields(plans.plan, &compiled.plan);
    match (plans.evaluation, &compiled.evaluation) {
        (Some(plan), Some(compiled)) => {
            let fields = fields(plan, &compiled.plan).into_iter();
            different.extend(fields.map(|field| format!("{}/{field}", layout::EVALUATION)));
        }
        (Some(_), None) => different.push(layout::EVALUATION.into()),
        (None, _) => {}
    }
    different
}

/// Fields in which a plan differs from a compiled one.
fn fields(plan: &Plan, compiled: &Plan) -> Vec<String> {
    // Values are in files that the digests of the plan verify.
    let json = |mut plan: Plan| {
        plan.object = None;
        plan.params.iter_mut().for_each(|param| param.digest = None);
        plan.constants.iter_mut().for_each(|constant| constant.digest = None);
        match serde_json::to_value(&plan) {
            Ok(serde_json::Value::Object(fields)) => fields,
            _ => serde_json::Map::new(),
        }
    };
    let (mut plan, mut compiled) = (plan.clone(), compiled.clone());
    for (found, expected) in plan.kernels.iter_mut().zip(&mut compiled.kernels) {
        // Code is not generated again. That of a kernel is found by a digest of its body and of how it is called.
        if expected.entry == Entry::Interpreter && found.kind() == KernelKind::Generated {
            for kernel in [found, expected] {
                (kernel.entry, kernel.entry_hash) = (Entry::Interpreter, String::new());
            }
        }
    }
    let (found, expected) = (json(plan), json(compiled));
    let differs = |key: &&String| found.get(*key) != expected.get(*key);
    let keys: BTreeSet<&String> = found.keys().chain(expected.keys()).collect();
    keys.into_iter().filter(differs).cloned().collect()
}
