//! The audit of a plan by numbers: executes a step on small data and compares what comes out with what does not share its code.
//!
//! - The loss and the gradients with the forward graph that the front end read, in f64: slopes along random directions by central
//!   differences ([`gradients`], [`reference`]).
//! - The updates with the rules of the optimizers, from the plan's own gradients ([`update`], [`rules`]).
//! - Several ranks with a plan for one, and the kernels with the interpreter ([`agreement`]).
//!
//! What rounding may change is measured, not assumed ([`execution`]).

mod agreement;
mod execution;
mod gradients;
mod losses;
mod page;
mod reference;
mod rules;
mod update;

use crate::diagnostics::{Report, of_run};
use crate::gradient_check;
use crate::plan_dir;
use crate::repeat::{Repeat, random_data};
use execution::{Executed, Noise};
use frit_ir::plan::{DeviceType, MetricName, Plan};
use frit_ir::{Code, DType, Diagnostic, Op, TensorType, nearest, pattern};
use frit_runtime::compare;
use frit_runtime::data::{Data, Source};
use frit_runtime::plan_dir::PlanDir;
use frit_runtime::progress::Progress;
use frit_runtime::record;
use gradients::Subject;
use reference::{Base, Reference};
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Elements that the interpreter accesses in a second, at least.
const SPEED: f64 = 1e8;
/// Bytes that the values of a step may take.
const MEMORY: u64 = 8 << 30;
/// The part of an evaluation that depends on a parameter, on average.
const DEPENDENT: f64 = 0.6;

/// What to audit.
#[derive(Clone, Debug)]
pub struct Options {
    /// The plan directory.
    pub plan: PathBuf,
    /// Data; without any, random numbers.
    pub data: Source,
    /// Path of the model that the plan was compiled from, if it was moved.
    pub model: Option<PathBuf>,
    /// Patterns of parameters whose gradients are compared; all if there are none.
    pub parameters: Vec<String>,
    /// Random directions of each parameter.
    pub directions: usize,
    /// Seconds that the differences may take.
    pub seconds: u64,
    /// Of the random directions.
    pub seed: u64,
    /// Threads per rank; by default the cores divided by the ranks.
    pub threads: Option<usize>,
    /// Read external data of the model also outside of the model's folder.
    pub allow_external_data: bool,
    /// Show progress on standard error.
    pub progress: bool,
}

/// What was found of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Both agree.
    Right,
    /// They agree, but rounding leaves no digit to compare.
    Rounded,
    /// A function states a gradient that is not its derivative.
    Stated,
    /// The loss has a kink, where differences say nothing.
    Kink,
    /// They do not agree.
    Wrong,
}

/// The gradient of a parameter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gradient {
    /// The parameter.
    pub parameter: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The slope along the first direction, by central differences.
    pub by_differences: f64,
    /// The same by the plan.
    pub by_plan: f64,
    /// The norm of the plan's gradient.
    pub norm: f64,
    /// The error over all directions, relative to the norm.
    pub error: f64,
    /// What rounding and differences explain of it.
    pub allowed: f64,
    /// What was found.
    pub verdict: Verdict,
}

/// Two ways to a number, of a parameter or of the step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// The parameter, if it is of one.
    pub parameter: Option<String>,
    /// What was compared.
    pub what: String,
    /// The error; of updates a multiple of what is allowed.
    pub error: f64,
    /// What is allowed.
    pub allowed: f64,
    /// Decimal digits in which both agree.
    pub digits: f64,
    /// What was found.
    pub verdict: Verdict,
}

/// The result of an audit.
#[derive(Clone, Debug, Serialize)]
pub struct Audit {
    /// The plan directory.
    pub plan: PathBuf,
    /// Its ranks.
    pub ranks: usize,
    /// Its micro-steps per step.
    pub accumulation: usize,
    /// The narrowest dtype that a micro-step rounds to.
    pub dtype: String,
    /// Random directions of each parameter.
    pub directions: usize,
    /// The mean loss by the plan and by the reference.
    pub loss: [f64; 2],
    /// Loss, counts and what else is one number.
    pub step: Vec<Agreement>,
    /// The gradients.
    pub gradients: Vec<Gradient>,
    /// The optimizer.
    pub optimizer: String,
    /// Every update beside the optimizer's rule.
    pub updates: Vec<Agreement>,
    /// The ranks beside one; `None` with one rank, or where that computes something else.
    pub one_rank: Option<Vec<Agreement>>,
    /// The kernels beside the interpreter; `None` of plans for GPUs.
    pub interpreted: Option<Vec<Agreement>>,
    /// Each kernel by itself; `None` with several ranks.
    pub kernels: Option<compare::Report>,
    /// What was not compared, and why.
    pub notes: Vec<String>,
}

impl Audit {
    /// All that does not agree, in a sentence each.
    pub fn wrong(&self) -> Vec<String> {
        page::wrong(self)
    }

    /// The page, or JSON.
    pub fn render(&self, json: bool) -> String {
        page::render(self, json)
    }
}

/// Audits a plan.
///
/// # Errors
/// What is wrong with the plan, the data or the options; not that something does not agree.
pub fn audit(options: &Options) -> Result<Audit, Report> {
    let plan = plan_dir::read(&options.plan)?;
    auditable(&plan, &options.plan)?;
    let scratch = tempfile::tempdir().map_err(|e| {
        Diagnostic::error(Code::FileUnwritable, format!("no directory for data: {e}"))
    })?;
    let model = options.model.as_deref();
    let external = options.allow_external_data;
    let beside = scratch.path().join("model");
    let repeat = Repeat::of(&options.plan, &plan, model, &beside, external)?;
    let reference = Reference::of(&plan, &repeat.request, &repeat.config)?;
    affordable(&reference, &plan, options)?;
    let source = match options.data.files.is_empty() {
        false => options.data.clone(),
        true => random_data(&plan, scratch.path())?.into(),
    };
    let dir = PlanDir::load(&options.plan).map_err(of_run)?;
    let data = Data::load(&source, &plan).map_err(refused)?;
    let run = record::Options {
        params: execution::start(&dir, options.seed)?,
        threads: options.threads,
        ..record::Options::default()
    };
    let progress = Mutex::new(Progress::hidden());
    let executed = Executed::of(&dir, &data, &run)?;
    let noise = Noise::of(&dir, &data, &run, (&executed, options.seed))?;
    let params = execution::tensors(&plan, &run.params);
    let began = Instant::now();
    let base = reference.base(&plan, &data, executed.at, params)?;
    let evaluation = began.elapsed().as_secs_f64();
    let dtype = execution::narrowest(&plan);
    let floor = floor(dtype);
    let subjects = subjects(&reference, &executed, &noise, floor, options)?;
    let seconds = evaluation * DEPENDENT * 2.0 * (subjects.len() * options.directions) as f64;
    in_time(seconds / cores() as f64, subjects.len(), options)?;
    if options.progress {
        let total = subjects.len();
        *progress.lock().unwrap_or_else(|p| p.into_inner()) = Progress::new("parameter", 0, total);
    }
    let gradients = compared(&reference, &base, &subjects, options, &progress)?;
    let types: BTreeMap<&str, &TensorType> = reference.trainable().collect();
    let mut updates = update::check(&plan, &repeat.config, &executed.recorded, &types);
    let unknown = executed.step().gradients.keys().filter(|n| !types.contains_key(n.as_str()));
    updates.extend(unknown.map(|name| {
        let what = format!("`{name}`, which does not train,");
        Agreement::of(Some(name), what, f64::INFINITY, 0.0)
    }));
    let mut notes = Vec::new();
    let against = agreement::Against { executed: &executed, noise: &noise, floor };
    let one_rank = match agreement::reason_against_one_rank(&repeat.config, &plan, &base) {
        Some(reason) => {
            notes.extend(reason);
            None
        }
        None => {
            let one = scratch.path().join("one");
            Some(against.one_rank(&repeat, &plan, (&source, &run), &one)?)
        }
    };
    let renewed = reference.renewed(&base).map_err(refused)?;
    let is_cpu = plan.target.device == DeviceType::Cpu;
    let interpreted = match is_cpu {
        true => Some(against.interpreted(&dir, &data, &run)?),
        false => None,
    };
    let kernels = match (plan.world_size, executed.at) {
        (1, 0) => Some(agreement::kernels(options, &source)?),
        (1, _) => {
            // A sum that overflows in f32 does not in the interpreter.
            notes.push("kernels are not compared one by one: the first step overflows".into());
            None
        }
        _ => None,
    };
    progress.lock().unwrap_or_else(|p| p.into_inner()).finish();
    let loss = metric(&executed, MetricName::Loss);
    Ok(Audit {
        plan: options.plan.clone(),
        ranks: plan.world_size,
        accumulation: plan.accumulation,
        dtype: dtype.name().into(),
        directions: options.directions,
        loss: [loss, base.loss],
        step: agreement::step(&against, &base, &renewed),
        gradients,
        optimizer: repeat.config.optimizer.kind.word().into(),
        updates,
        one_rank,
        interpreted,
        kernels,
        notes,
    })
}

/// Refuses plans that have no step to audit here.
fn auditable(plan: &Plan, path: &Path) -> Result<(), Diagnostic> {
    let refuse = |what: &str, help: &str| {
        let message = format!("{} {what}", path.display());
        Err(Diagnostic::error(Code::AuditPlan, message).help(help))
    };
    if plan.eval.is_some() {
        return refuse("only evaluates: it has no gradients", "give a plan that trains");
    }
    if plan.target.device == DeviceType::Cuda && plan.world_size > 1 {
        let what = format!("is for {} GPUs", plan.world_size);
        return refuse(&what, "compile it with sharding.ranks=1, or with target.device=cpu");
    }
    Ok(())
}

/// Refuses models of which even one evaluation takes too long or too much memory.
fn affordable(reference: &Reference, plan: &Plan, options: &Options) -> Result<(), Diagnostic> {
    let (work, bytes) = reference.work();
    let batches = (plan.world_size * plan.accumulation) as u64;
    let bytes = bytes.saturating_mul(batches);
    if bytes > MEMORY {
        let message = format!(
            "the values of a step take {} in f64; an audit keeps at most {}",
            crate::render::bytes(bytes),
            crate::render::bytes(MEMORY)
        );
        return Err(Diagnostic::error(Code::AuditPlan, message).help(SMALLER));
    }
    let seconds = work.saturating_mul(batches) as f64 / SPEED;
    in_time(seconds / cores() as f64, 1, options)
}

/// What makes an audit cheaper.
const SMALLER: &str = "compile the same model with fewer layers, a smaller batch and shorter sequences: its rules, passes and \
    kernels are the same; or name some parameters with --parameters, lower --directions, raise --seconds";

fn in_time(seconds: f64, parameters: usize, options: &Options) -> Result<(), Diagnostic> {
    if seconds <= options.seconds as f64 {
        return Ok(());
    }
    let message = format!(
        "the differences of {} along {} would take about {:.0} s, of which --seconds allows {}",
        frit_ir::counted(parameters, "parameter"),
        frit_ir::counted(options.directions, "direction"),
        seconds.ceil(),
        options.seconds
    );
    Err(Diagnostic::error(Code::AuditPlan, message).help(SMALLER))
}

/// The error that is none, of a plan that rounds to this dtype.
fn floor(dtype: DType) -> f64 {
    (2.0 * execution::rounding(dtype)).max(2e-6)
}

/// The parameters whose gradients are compared.
fn subjects<'a>(
    reference: &'a Reference,
    executed: &Executed,
    noise: &Noise,
    floor: f64,
    options: &Options,
) -> Result<Vec<Subject<'a>>, Report> {
    let used = reference.used();
    let stated = stated(reference, options.seed)?;
    let gradient = |name: &str| {
        let found = executed.step().gradients.get(name)?;
        Some(found.iter().map(|g| f64::from(*g)).collect::<Vec<f64>>())
    };
    let all: Vec<(&str, &TensorType)> =
        reference.trainable().filter(|(name, _)| used.contains(name)).collect();
    for given in &options.parameters {
        if !all.iter().any(|(name, _)| pattern::matches(given, name)) {
            let message = format!("--parameters {given} matches no parameter that trains");
            let help = nearest::advice(given, all.iter().map(|(name, _)| *name));
            return Err(Diagnostic::error(Code::CommandLine, message).help(help).into());
        }
    }
    let chosen =
        |name: &str| options.parameters.is_empty() || pattern::any(&options.parameters, name);
    let subject = |(name, ty): (&'a str, &'a TensorType)| Subject {
        name,
        ty,
        gradient: gradient(name),
        noise: noise.gradients.get(name).copied().unwrap_or(0.0),
        floor,
        is_stated: stated.contains(name),
    };
    Ok(all.into_iter().filter(|(name, _)| chosen(name)).map(subject).collect())
}

/// The parameters that reach the loss through a function whose stated gradient is not its derivative.
fn stated(reference: &Reference, seed: u64) -> Result<HashSet<String>, Report> {
    let found = gradient_check::check(&reference.graph, seed).map_err(refused)?;
    let differs = found.iter().filter(|f| f.error.is_none_or(|error| error > 1e-4));
    let functions: HashSet<&str> = differs.map(|f| f.function.as_str()).collect();
    let calls = reference.graph.nodes().filter_map(|(_, node)| match &node.op {
        Op::CustomGradient(op) if functions.contains(op.function.as_str()) => Some(op.call),
        _ => None,
    });
    Ok(reference.through(&calls.collect()))
}

/// Compares the gradients of all subjects, on all cores.
fn compared(
    reference: &Reference,
    base: &Base,
    subjects: &[Subject<'_>],
    options: &Options,
    progress: &Mutex<Progress>,
) -> Result<Vec<Gradient>, Report> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(vec![None; subjects.len()]);
    let work = || -> Result<(), Report> {
        while let Some((at, subject)) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            subjects.get(at).map(|s| (at, s))
        } {
            let how = (options.directions, options.seed);
            let gradient = gradients::compare(reference, base, subject, how).map_err(refused)?;
            found.lock().unwrap_or_else(|p| p.into_inner())[at] = Some(gradient);
            progress.lock().unwrap_or_else(|p| p.into_inner()).advance(subject.name, &[]);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..cores()).map(|_| scope.spawn(work)).collect();
        let join = |h: std::thread::ScopedJoinHandle<'_, _>| {
            h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        handles.into_iter().map(join).collect::<Result<Vec<()>, Report>>()
    })?;
    let found = found.into_inner().unwrap_or_else(|p| p.into_inner());
    Ok(found.into_iter().flatten().collect())
}

fn metric(executed: &Executed, name: MetricName) -> f64 {
    executed.step().metrics.get(&name).copied().unwrap_or(f64::NAN)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

fn refused(error: impl std::fmt::Display) -> Report {
    Diagnostic::error(Code::RunFailed, error.to_string()).into()
}

/// Decimal digits of a relative error.
fn digits(error: f64) -> f64 {
    if error.is_finite() { (-error.max(1e-15).log10()).max(0.0) } else { 0.0 }
}

/// A number that depends on a name (FNV-1a).
fn digest(name: &str) -> u64 {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, mix)
}

use gradient_check::normal;
