//! The certificate of a plan: its model is compiled again, and every pass is held against what it must keep.
//!
//! What a pass must keep is proved by `frit_verify`, which shares no code with the passes. The plan must then be, byte for byte but for
//! machine code, what the last graph is lowered to; that lowering is covered by the proof of the plan (`frit_passes::verify_plan`).

use crate::compilation::{Compiled, Observer, Request, compile, imported};
use crate::config::Config;
use crate::config::choices::{AdapterKind, BatchNorm};
use crate::diagnostics::Report;
use crate::statement;
use frit_ir::plan::{Entry, Plan};
use frit_ir::{Graph, Origin};
use frit_passes::{adapter, documents, fp8, loss_scale, sync_batch_norm};
use frit_passes::{differentiate, loss, shard, update};
use frit_verify::{
    Difference, Ranks, Roundings, Unstated, compare, compare_distributed, compare_rounded,
    gradient, roundings, step,
};
use serde::Serialize;
use std::collections::BTreeSet;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, available_parallelism};

/// What is known of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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
    /// The outputs of the step, and where they are rounded to less than 32 bits.
    pub outputs: Vec<Rounded>,
    /// Parts of the plan that differ from what the model compiles to, by the name of the field.
    pub edited: Vec<String>,
}

impl Certificate {
    /// Whether every pass was proved, or is part of what the model means.
    pub fn holds(&self) -> bool {
        self.edited.is_empty() && self.passes.iter().all(|p| p.verdict != Verdict::NotShown)
    }
}

/// Compiles again and checks every pass; with a plan, also that it is what comes of it.
///
/// # Errors
/// Everything that is wrong with the model or the configuration.
pub fn certify(
    request: &Request,
    config: &Config,
    plan: Option<&Plan>,
) -> Result<Certificate, Report> {
    let request = Request { without_code: true, evaluation: true, ..request.clone() };
    let checker = Checker::new(imported(&request, config)?.graph, config);
    let mut steps = Steps { checker, done: vec![] };
    let compiled = compile(&request, config, &mut steps)?;
    let edited = match (plan, &compiled) {
        (Some(plan), Some(compiled)) => differing(plan, compiled),
        _ => vec![],
    };
    let outputs = roundings(&steps.checker.before).into_iter().map(rounded).collect();
    Ok(Certificate { passes: steps.checked(), outputs, edited })
}

fn rounded(found: Roundings) -> Rounded {
    let operations = found.operations.into_iter();
    let operations = operations.map(|(dtype, op)| format!("{op} to {dtype}")).collect();
    Rounded { output: found.output, operations }
}

/// Checks what passes do to a graph, one after the other.
#[derive(Clone)]
pub struct Checker {
    before: Graph,
    /// The graph before `loss_scale`, which `update` completes.
    with_gradients: Option<Graph>,
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
            before: imported,
            with_gradients: None,
            config: config.clone(),
            ranks,
            capacity: 0.0,
        }
    }

    /// What is known of a pass that made `after` of the graph before.
    fn relation(&self, pass: &str, after: &Graph) -> (Verdict, Vec<Difference>) {
        let stated = |found: Result<Graph, Unstated>| match found {
            Ok(expected) => (Verdict::AsStated, compare(&expected, after, self.ranks)),
            Err(unstated) => (Verdict::NotShown, vec![unstated.into()]),
        };
        let (before, config) = (&self.before, &self.config);
        if before == after {
            return (Verdict::Unchanged, vec![]);
        }
        let meaning = [
            (adapter::INFO.name, config.adapter.kind != AdapterKind::None),
            (documents::INFO.name, config.data.document_separator.is_some()),
            (sync_batch_norm::INFO.name, config.model.batch_norm == BatchNorm::Sync),
            (fp8::INFO.name, config.precision.fp8),
        ];
        if meaning.contains(&(pass, true)) {
            return (Verdict::Assumed, vec![]);
        }
        if pass == loss::INFO.name {
            return stated(match statement::losses(config) {
                Ok(terms) => step::with_loss(before, &terms, self.ranks.number()),
                Err(wrong) => Err(Unstated::new("loss", &Origin::none(), wrong.to_string())),
            });
        }
        if pass == differentiate::INFO.name {
            let of_step = config.run.reproducible.unwrap_or(config.run.accumulation);
            return stated(gradient::differentiated(before, of_step, capacity(before)));
        }
        if pass == loss_scale::INFO.name {
            // What it adds is part of what `update` must be.
            return (Verdict::AsStated, vec![]);
        }
        if pass == update::INFO.name {
            let before = self.with_gradients.as_ref().unwrap_or(before);
            return stated(step::updated(before, &statement::update(config, self.capacity)));
        }
        if pass == shard::INFO.name {
            return (Verdict::AsStated, compare_distributed(before, after, self.ranks));
        }
        let otherwise = compare_rounded(before, after, self.ranks);
        if otherwise.is_empty() {
            return (Verdict::Equal, vec![]);
        }
        match compare(before, after, self.ranks) {
            found if found.is_empty() => (Verdict::Rounded, otherwise),
            found => (Verdict::NotShown, found),
        }
    }
}

impl Checker {
    /// What is known of the next pass, which made this graph.
    pub fn check(&mut self, pass: &str, graph: &Graph) -> Checked {
        let checked = self.checked(pass, graph);
        self.advance(pass, graph);
        checked
    }

    /// Goes on to the pass after one that made this graph.
    fn advance(&mut self, pass: &str, graph: &Graph) {
        let before = std::mem::replace(&mut self.before, graph.clone());
        if pass == differentiate::INFO.name {
            self.capacity = capacity(&before);
        }
        if pass == loss_scale::INFO.name {
            self.with_gradients = Some(before);
        }
    }

    fn checked(&self, pass: &str, graph: &Graph) -> Checked {
        let (verdict, differences) = self.relation(pass, graph);
        let differs = !differences.is_empty() && verdict != Verdict::Rounded;
        let verdict = if differs { Verdict::NotShown } else { verdict };
        let differences = differences.iter().take(LISTED).map(words).collect();
        Checked { pass: pass.into(), verdict, differences }
    }
}

/// What passes did, to be checked.
struct Steps {
    /// After the last of them.
    checker: Checker,
    /// Before each, with its name and the graph that it made.
    done: Vec<(Checker, String, Graph)>,
}

impl Observer for Steps {
    fn after(&mut self, _: usize, pass: &str, graph: &Graph) {
        self.done.push((self.checker.clone(), pass.into(), graph.clone()));
        self.checker.advance(pass, graph);
    }
}

impl Steps {
    /// What is known of each pass: they are checked side by side, as no check needs another.
    fn checked(&self) -> Vec<Checked> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut checked = vec![];
            while let Some((i, (before, pass, graph))) = self.take(&next) {
                checked.push((i, before.checked(pass, graph)));
            }
            checked
        };
        let threads = available_parallelism().map_or(1, NonZero::get);
        let mut checked: Vec<(usize, Checked)> = thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let results = threads.into_iter();
            results.flat_map(|t| t.join().expect("a check does not panic")).collect()
        });
        checked.sort_unstable_by_key(|(i, _)| *i);
        checked.into_iter().map(|(_, checked)| checked).collect()
    }

    /// A step that no thread has taken yet; the last are the largest.
    fn take(&self, next: &AtomicUsize) -> Option<(usize, &(Checker, String, Graph))> {
        let i = self.done.len().checked_sub(next.fetch_add(1, Ordering::Relaxed) + 1)?;
        Some((i, &self.done[i]))
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

/// Fields in which a plan differs from a compiled one, but for machine code and the values of parameters.
fn differing(plan: &Plan, compiled: &Compiled) -> Vec<String> {
    // Machine code is not made again, and values are in files that the digests of the plan verify.
    let json = |plan: &Plan| {
        let mut plan = plan.clone();
        for kernel in &mut plan.kernels {
            kernel.entry = Entry::Interpreter;
            kernel.entry_hash = String::new();
        }
        plan.object = None;
        plan.params.iter_mut().for_each(|param| param.digest = None);
        plan.constants.iter_mut().for_each(|constant| constant.digest = None);
        match serde_json::to_value(&plan) {
            Ok(serde_json::Value::Object(fields)) => fields,
            _ => serde_json::Map::new(),
        }
    };
    let (found, expected) = (json(plan), json(&compiled.plan));
    let mut fields: Vec<String> = found
        .iter()
        .filter(|(key, value)| expected.get(*key) != Some(*value))
        .map(|(key, _)| key.clone())
        .collect();
    fields.extend(expected.keys().filter(|key| !found.contains_key(*key)).cloned());
    fields
}
