//! The step loop of a rank on its device; rank 0 reports. On the CPU ranks are threads or processes, on GPUs
//! processes.

use crate::RunError;
use crate::checkpoint::write::{Run, Saver, prepare};
use crate::checkpoint::{Checkpoint, CheckpointOptions, Position, restore};
use crate::comm::Communicator;
use crate::comm::launch::{Launch, timeout_from_environment};
use crate::comm::local::LocalComm;
use crate::comm::processes::ProcessComm;
use crate::data::Data;
use crate::device::cpu::Cpu;
use crate::device::cuda::{Cuda, Real};
use crate::device::{Device, Span};
use crate::gradients::{self, Gradients, Parts};
use crate::interrupt::Stop;
use crate::metrics::{StepMetrics, ValidationMetrics, Writer};
use crate::numerics::{self, Histograms, Watch};
use crate::plan_dir::{CUDA, PlanDir};
use crate::save::{self, Tensors, Version};
use crate::trace;
use crate::usage::{self, Usage};
use crate::validation::{Validation, ValidationOptions};
use frit_ir::ops::EMA;
use frit_ir::ops::random::RNG;
use frit_ir::plan::{ParamHome, Plan, sha256_hex};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// What is asked of a run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Steps, counted from the start of training.
    pub steps: usize,
    /// The data file.
    pub data: PathBuf,
    /// Append one JSON object per step here.
    pub metrics: Option<PathBuf>,
    /// Write the first step's gradients here.
    pub dump_grads: Option<PathBuf>,
    /// Write the parameters after the last step here.
    pub save: Option<PathBuf>,
    /// Write the moving average of the parameters after the last step here.
    pub save_ema: Option<PathBuf>,
    /// Write checkpoints, and resume from them.
    pub checkpoint: Option<CheckpointOptions>,
    /// Take the loss over other examples between steps; by default those that the plan names.
    pub validation: Option<ValidationOptions>,
    /// When to leave before the last step.
    pub stop: Option<Stop>,
    /// Write when each task of the last step ran here.
    pub trace: Option<PathBuf>,
    /// Write what the run used of its device here.
    pub usage: Option<PathBuf>,
    /// Execute every body by the IR interpreter.
    pub interpret: bool,
    /// Threads per rank; by default the cores divided by the ranks.
    pub threads: Option<usize>,
    /// Hyper-parameters to change.
    pub hyper: Vec<(String, f64)>,
    /// Stop at the first task that produces what is not finite.
    pub check_numerics: bool,
    /// Write histograms of exponents by scope here.
    pub numerics: Option<PathBuf>,
    /// Show a progress bar if standard error is a terminal.
    pub progress: bool,
}

/// What a run did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunReport {
    /// Steps of the checkpoint from which it went on; 0 without one.
    pub start: usize,
    /// The rank that reports; 0 unless every rank is a process.
    pub rank: usize,
    /// The signal that ended it before the last step.
    pub interrupted: Option<i32>,
    /// Mean loss of every step, from `start` on.
    pub losses: Vec<f64>,
    /// The loss over the validation examples, and how many steps were run before it was taken.
    pub validation: Vec<(usize, f64)>,
    /// Gradient norm of every step.
    pub grad_norms: Vec<f64>,
    /// Seconds of every step.
    pub seconds: Vec<f64>,
    /// Collectives that ranks took part in, counted on every rank.
    pub collective_calls: u64,
    /// Bytes that ranks read from others.
    pub collective_bytes: u64,
}

/// Runs a plan.
///
/// # Errors
/// What is wrong with the plan, the data or the options, or the task that failed.
pub fn run(plan_dir: &Path, options: &RunOptions) -> Result<RunReport, RunError> {
    let dir = PlanDir::load(plan_dir)?;
    let ranks = |reason| RunError::Ranks { reason };
    let launch = Launch::from_environment().map_err(ranks)?;
    let data = Data::load(&options.data, &dir.plan)?;
    check_hyper(&dir.plan, &options.hyper)?;
    if options.save_ema.is_some() && !save::has_ema(&dir.plan) {
        return Err(RunError::NoEma);
    }
    let named = dir.plan.validation.as_ref().map(PathBuf::from);
    let validation = match options.validation.as_ref().map(|v| v.data.clone()).or(named) {
        Some(data) => Some(Validation::open(plan_dir, &data)?),
        None => None,
    };
    let resumed = match &options.checkpoint {
        Some(checkpoint) => {
            prepare(checkpoint, launch.rank)?;
            if checkpoint.resume { Checkpoint::latest(&checkpoint.dir)? } else { None }
        }
        None => None,
    };
    let session = Session {
        hyper: effective_hyper(&dir.plan, options, resumed.as_ref()),
        first_batch: resumed.as_ref().map_or(0, |c| data.step_at(c.index.position)),
        start: resumed.as_ref().map_or(0, |c| c.index.step),
        resumed,
        failed: Arc::default(),
        run: Run::new(),
        validation,
        dir: &dir,
        data: &data,
        options,
    };
    let outcome = match (dir.plan.target.device == CUDA, launch.world_size) {
        (true, _) => session.on_gpu()?,
        (false, 1) => session.on_threads()?,
        (false, _) => session.as_process(&launch)?,
    };
    if let Some(path) = options.dump_grads.as_ref().filter(|_| outcome.rank == 0) {
        gradients::write(path, &dir.plan, &outcome.gradients)?;
    }
    if let Some(path) = options.numerics.as_ref().filter(|_| outcome.rank == 0) {
        let steps = outcome.report.losses.len();
        numerics::write(path, &dir.plan, steps, outcome.ranks, outcome.counted)?;
    }
    if let Some(path) = options.save.as_ref().filter(|_| outcome.rank == 0) {
        save::write(path, &dir.plan, &outcome.saved)?;
    }
    if let Some(path) = options.trace.as_ref().filter(|_| outcome.rank == 0) {
        trace::write(path, &dir.plan, &outcome.spans)?;
    }
    if let Some(path) = options.usage.as_ref().filter(|_| outcome.rank == 0) {
        usage::write(path, &outcome.usage)?;
    }
    if let Some(path) = options.save_ema.as_ref().filter(|_| outcome.rank == 0) {
        save::write(path, &dir.plan, &outcome.averages)?;
    }
    Ok(outcome.report)
}

/// Runs `rank` for every rank on a thread of its own; one that fails ends the others. The results are in rank order,
/// but those of ranks that another one stopped come last: one that failed by itself says more.
pub(crate) fn ranks_on_threads<T: Send>(
    comms: Vec<LocalComm>,
    rank: impl Fn(LocalComm) -> Result<T, RunError> + Sync,
) -> Vec<Result<T, RunError>> {
    let one = |comm: LocalComm| {
        let end = comm.clone();
        rank(comm).inspect_err(|_| end.abort())
    };
    let results = std::thread::scope(|scope| {
        let handles: Vec<_> = comms.into_iter().map(|c| scope.spawn(|| one(c))).collect();
        let join = |h: std::thread::ScopedJoinHandle<'_, _>| {
            h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        handles.into_iter().map(join).collect()
    });
    own_failures_first(results)
}

/// The results of ranks, but those that another rank stopped last: one that failed by itself says more.
fn own_failures_first<T>(results: Vec<Result<T, RunError>>) -> Vec<Result<T, RunError>> {
    let (aborted, mut others): (Vec<_>, Vec<_>) =
        results.into_iter().partition(|r| matches!(r, Err(e) if is_abort(e)));
    others.extend(aborted);
    others
}

fn is_abort(error: &RunError) -> bool {
    match error {
        RunError::Aborted { .. } => true,
        RunError::Task { reason, .. } => reason.contains("another rank failed"),
        _ => false,
    }
}

fn check_hyper(plan: &Plan, hyper: &[(String, f64)]) -> Result<(), RunError> {
    for (name, value) in hyper {
        // Every one of them is a rate, a factor or a number of steps.
        if !(value.is_finite() && *value >= 0.0) {
            return Err(RunError::HyperValue { name: name.clone(), value: *value });
        }
        if plan.hyper.iter().all(|h| h.name != *name) {
            let known: Vec<&str> = plan.hyper.iter().map(|h| h.name.as_str()).collect();
            return Err(RunError::Hyper { name: name.clone(), known: known.join(", ") });
        }
    }
    Ok(())
}

/// What a rank brings back; tensors only on rank 0.
#[derive(Default)]
struct Outcome {
    rank: usize,
    report: RunReport,
    gradients: Gradients,
    saved: Tensors,
    /// The traced step, by rank of this process.
    spans: Vec<(usize, Vec<Span>)>,
    usage: Usage,
    /// Moving averages, as `saved`.
    averages: Tensors,
    /// What was counted of numbers, and by how many ranks.
    counted: Histograms,
    ranks: usize,
}

/// Hyper-parameters that differ from the plan's: those of the run that is continued, then those of this one.
fn effective_hyper(
    plan: &Plan,
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
) -> Vec<(String, f64)> {
    let mut set = resumed.map(|c| c.index.set.clone()).unwrap_or_default();
    set.retain(|name, _| plan.hyper.iter().any(|h| h.name == *name));
    set.extend(options.hyper.iter().cloned());
    set.into_iter().collect()
}

/// The validation loss with the parameters of a device.
type Validate<'a, D> = dyn FnMut(&D) -> Result<f64, RunError> + 'a;

struct Session<'a> {
    /// Hyper-parameters that differ from the plan's.
    hyper: Vec<(String, f64)>,
    /// The checkpoint from which to go on.
    resumed: Option<Checkpoint>,
    /// Its steps.
    start: usize,
    /// The data's step that is read at `start`.
    first_batch: usize,
    /// Whether a rank has failed.
    failed: Arc<AtomicBool>,
    /// Identity of this run.
    run: Run,
    /// What is evaluated between steps.
    validation: Option<Validation>,
    dir: &'a PlanDir,
    data: &'a Data,
    options: &'a RunOptions,
}

impl Session<'_> {
    /// Every rank as a thread on the CPU.
    fn on_threads(&self) -> Result<Outcome, RunError> {
        let ranks = self.dir.plan.world_size;
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = self.options.threads.unwrap_or((cores / ranks).max(1));
        let comms = LocalComm::world(ranks);
        let watch = comms[0].clone();
        let results = ranks_on_threads(comms, |comm| {
            let failed = |_: &RunError| self.failed.store(true, Ordering::Relaxed);
            self.on_cpu(comm, threads).inspect_err(failed)
        });
        let mut outcome = Outcome::default();
        let (mut spans, mut counted) = (Vec::new(), Histograms::new());
        for (i, result) in results.into_iter().enumerate() {
            let mut result = result?;
            spans.append(&mut result.spans);
            numerics::merge(&mut counted, std::mem::take(&mut result.counted));
            if i == 0 {
                outcome = result;
            }
        }
        (outcome.spans, outcome.counted, outcome.ranks) = (spans, counted, ranks);
        (outcome.report.collective_calls, outcome.report.collective_bytes) = watch.traffic();
        Ok(outcome)
    }

    /// The rank of this process on the CPU.
    fn as_process(&self, launch: &Launch) -> Result<Outcome, RunError> {
        let refuse = |reason| RunError::Ranks { reason };
        let ranks = self.dir.plan.world_size;
        launch.expect_ranks(ranks).map_err(refuse)?;
        let timeout = timeout_from_environment().map_err(refuse)?;
        let comm = ProcessComm::connect(launch, &self.identity(), timeout)?;
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = self.options.threads.unwrap_or((cores / ranks).max(1));
        let trained = self.on_cpu(comm.clone(), threads);
        if trained.is_err() {
            self.failed.store(true, Ordering::Relaxed);
            comm.abort();
        }
        let mut outcome = trained?;
        (outcome.report.collective_calls, outcome.report.collective_bytes) = comm.traffic();
        comm.finish()?;
        Ok(outcome)
    }

    /// One rank on the CPU, and beside it what it validates with.
    fn on_cpu<C: Communicator + Clone>(
        &self,
        comm: C,
        threads: usize,
    ) -> Result<Outcome, RunError> {
        let (rank, interpret) = (comm.rank(), self.options.interpret);
        let mut device = Cpu::new(self.dir, comm.clone(), threads, interpret)?;
        let Some(validation) = &self.validation else {
            return self.train(&mut device, rank, None);
        };
        let mut beside = validation.on_cpu(comm, threads, interpret)?;
        let mut validate =
            |trained: &Cpu<'_, C>| validation.loss(&self.dir.plan, trained, &mut beside, rank);
        self.train(&mut device, rank, Some(&mut validate))
    }

    /// The rank of this process on its GPU.
    fn on_gpu(&self) -> Result<Outcome, RunError> {
        if self.options.interpret {
            return Err(RunError::Interpret);
        }
        let beside = self.validation.as_ref().map(|v| &v.dir);
        let mut device = Cuda::open(self.dir, beside, &self.identity())?;
        let rank = device.rank();
        let trained = match &self.validation {
            None => self.train(&mut device, rank, None),
            Some(validation) => validation.on_gpu(&device).and_then(|mut beside| {
                let mut validate = |trained: &Cuda<'_, Real>| {
                    validation.loss(&self.dir.plan, trained, &mut beside, rank)
                };
                self.train(&mut device, rank, Some(&mut validate))
            }),
        };
        match trained {
            Ok(outcome) => device.finish().map(|()| outcome),
            Err(error) => {
                device.fail(&error);
                Err(error)
            }
        }
    }

    /// What all ranks must have in common, as a hash: the plan, the hyper-parameters that were changed, and
    /// the step at which they begin.
    fn identity(&self) -> String {
        let mut text = self.dir.hash.clone();
        for (name, value) in &self.hyper {
            text += &format!(" {name}={value}");
        }
        text += &format!(" from step {}", self.start);
        sha256_hex(text.as_bytes())
    }

    /// One rank from start to end.
    fn train<D: Device>(
        &self,
        device: &mut D,
        rank: usize,
        mut validate: Option<&mut Validate<'_, D>>,
    ) -> Result<Outcome, RunError> {
        let metrics = self.options.metrics.as_deref().filter(|_| rank == 0);
        let resumes = self.options.checkpoint.as_ref().is_some_and(|c| c.resume);
        let mut reporter = Reporter {
            plan: &self.dir.plan,
            writer: if resumes {
                Writer::resume(metrics, self.start)
            } else {
                Writer::open(metrics)
            }?,
            bar: self.progress(rank),
            clock: Instant::now(),
            parts: None,
            outcome: Outcome { rank, ..Outcome::default() },
        };
        reporter.outcome.report.start = self.start;
        reporter.outcome.report.rank = rank;
        initialize(self.dir, &self.hyper, &Tensors::new(), device, rank)?;
        if let Some(checkpoint) = &self.resumed {
            restore::restore(checkpoint, &self.dir.plan, device, rank)?;
        }
        let mut saver = self.saver(device, rank, &reporter.writer)?;
        let (check, count) = (self.options.check_numerics, self.options.numerics.is_some());
        let mut watch = Watch::new(&self.dir.plan, rank, check, count);
        reporter.clock = Instant::now();
        let mut step = self.start;
        // Of the state after `step` steps.
        let mut validation_loss = None;
        while step < self.options.steps {
            if let Some(stop) = &self.options.stop {
                // Ranks may see a signal at different steps; they leave at the same one.
                let signal = device.largest(stop.load(Ordering::Relaxed) as u64)?;
                if signal > 0 {
                    reporter.outcome.report.interrupted = Some(signal as i32);
                    break;
                }
            }
            let spans = &mut reporter.outcome.spans;
            let parts = self.step(device, &mut watch, step, rank, spans)?;
            device.note_metrics()?;
            reporter.parts = reporter.parts.or(parts);
            step += 1;
            reporter.catch_up(device, step.saturating_sub(D::METRICS_DELAY))?;
            validation_loss = match &mut validate {
                Some(validate) if self.validates_after(step) => {
                    reporter.catch_up(device, step)?;
                    Some(reporter.validated(step, validate(device)?)?)
                }
                _ => None,
            };
            if let Some(saver) = &mut saver {
                saver.check()?;
                if saver.due(step) {
                    // The metrics of every step come before the checkpoint that follows it.
                    reporter.catch_up(device, step)?;
                    saver.save(step, self.position(step), validation_loss, device)?;
                }
            }
        }
        reporter.catch_up(device, step)?;
        reporter.bar.finish_and_clear();
        if let Some(saver) = &mut saver {
            saver.finish(step, self.position(step), validation_loss, device)?;
        }
        let mut outcome = reporter.outcome;
        outcome.usage = device.usage()?;
        (outcome.counted, outcome.ranks) = (watch.into_histograms(), 1);
        if self.options.save.is_some() {
            outcome.saved = save::collect(&self.dir.plan, device, rank, Version::Trained)?;
        }
        if self.options.save_ema.is_some() {
            outcome.averages = save::collect(&self.dir.plan, device, rank, Version::Average)?;
        }
        Ok(outcome)
    }

    /// Whether the validation loss is taken after so many steps.
    fn validates_after(&self, step: usize) -> bool {
        let asked = self.options.validation.as_ref().and_then(|v| v.every);
        let every = asked.or(self.options.checkpoint.as_ref().and_then(|c| c.every));
        step == self.options.steps || every.is_some_and(|every| step.is_multiple_of(every))
    }

    fn saver(
        &self,
        device: &impl Device,
        rank: usize,
        writer: &Writer,
    ) -> Result<Option<Saver<'_>>, RunError> {
        let Some(options) = &self.options.checkpoint else { return Ok(None) };
        let run = self.run.agreed(device)?;
        let last = self.resumed.as_ref().map(|_| self.start);
        let (failed, set) = (Arc::clone(&self.failed), &self.hyper);
        let saver = Saver::new(self.dir, options, run, rank, set, failed, writer.file(), last);
        Ok(Some(saver))
    }

    /// The data's number of step `step`.
    fn batch(&self, step: usize) -> usize {
        self.first_batch + step - self.start
    }

    fn position(&self, step: usize) -> Position {
        self.data.position(self.batch(step))
    }

    fn progress(&self, rank: usize) -> indicatif::ProgressBar {
        let shown = self.options.progress && rank == 0 && std::io::stderr().is_terminal();
        if !shown {
            return indicatif::ProgressBar::hidden();
        }
        let style = indicatif::ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {eta}");
        let bar = indicatif::ProgressBar::new(self.options.steps.saturating_sub(self.start) as u64);
        if let Ok(style) = style { bar.with_style(style) } else { bar }
    }

    /// One step; the gradients if they are asked for.
    fn step(
        &self,
        device: &mut impl Device,
        watch: &mut Watch<'_>,
        step: usize,
        rank: usize,
        spans: &mut Vec<(usize, Vec<Span>)>,
    ) -> Result<Option<Parts>, RunError> {
        let plan = &self.dir.plan;
        let update = plan.phase("update").map_or(0..0, |p| p.begin..p.end);
        let dump = step == self.start && self.options.dump_grads.is_some();
        let batch = self.batch(step);
        let micro_steps = self.data.micro_steps(batch);
        for k in 0..micro_steps {
            self.data.feed(batch, k, rank, |buffer, bytes| device.feed(buffer, bytes))?;
            let mut tasks = plan.micro_step_tasks(k, micro_steps);
            if dump {
                tasks.end = tasks.end.min(update.start);
            }
            if k + 1 == plan.accumulation
                && self.options.trace.is_some()
                && step + 1 == self.options.steps
            {
                spans.push((rank, device.trace(tasks)?));
            } else {
                watch.run(device, tasks)?;
            }
        }
        if !dump {
            return Ok(None);
        }
        let parts = Parts::read(plan, device)?;
        watch.run(device, update)?;
        Ok(Some(parts))
    }
}

/// Puts together what a run reports, as the metrics of its steps arrive.
struct Reporter<'a> {
    plan: &'a Plan,
    writer: Writer,
    bar: indicatif::ProgressBar,
    /// When the last metrics arrived.
    clock: Instant,
    /// The first step's gradients, until its metrics say by what to divide them.
    parts: Option<Parts>,
    outcome: Outcome,
}

impl Reporter<'_> {
    /// Reports the steps before `step` that are not reported yet.
    fn catch_up(&mut self, device: &mut impl Device, step: usize) -> Result<(), RunError> {
        let report = &self.outcome.report;
        for step in report.start + report.losses.len()..step {
            let values = device.take_metrics()?;
            self.report(step, &values)?;
        }
        Ok(())
    }

    /// Reports the validation loss after `step` steps, and gives it back.
    fn validated(&mut self, step: usize, loss: f64) -> Result<f64, RunError> {
        self.writer.write(&ValidationMetrics { step: step - 1, validation_loss: loss })?;
        self.outcome.report.validation.push((step, loss));
        self.bar.set_message(format!("validation loss {loss:.4}"));
        self.clock = Instant::now();
        Ok(loss)
    }

    /// Takes the metrics of a step, in the plan's order.
    fn report(&mut self, step: usize, values: &[f32]) -> Result<(), RunError> {
        let names = self.plan.metrics.iter().map(|m| m.name.as_str());
        let metrics: BTreeMap<&str, f64> =
            names.zip(values.iter().map(|v| f64::from(*v))).collect();
        let seconds = self.clock.elapsed().as_secs_f64();
        self.clock = Instant::now();
        if let Some(parts) = self.parts.take() {
            let (tokens, scale) = (metrics["tokens"], metrics["loss_scale"]);
            self.outcome.gradients = parts.combine(self.plan, tokens, scale);
        }
        let report = &mut self.outcome.report;
        report.losses.push(metrics["loss"]);
        report.grad_norms.push(metrics["grad_norm"]);
        report.seconds.push(seconds);
        let line = StepMetrics {
            step,
            loss: metrics["loss"],
            grad_norm: metrics["grad_norm"],
            lr: metrics["lr"],
            loss_scale: metrics["loss_scale"],
            skipped: metrics["found_inf"] != 0.0,
            tokens_or_examples_per_s: metrics["tokens"] / seconds,
        };
        self.writer.write(&line)?;
        self.bar.set_message(format!("loss {:.4}", line.loss));
        self.bar.inc(1);
        Ok(())
    }
}

/// Writes the first values of everything persistent; the arenas are zero. `replaced` are parameters to
/// take instead of the plan's, `changes` hyper-parameters.
///
/// # Errors
/// If the device failed.
pub(crate) fn initialize(
    dir: &PlanDir,
    changes: &[(String, f64)],
    replaced: &Tensors,
    device: &mut impl Device,
    rank: usize,
) -> Result<(), RunError> {
    let plan = &dir.plan;
    let weight = |name: &str| {
        let given = replaced.get(name).map(|bytes| Cow::Borrowed(bytes.as_slice()));
        given.or_else(|| dir.weight(name))
    };
    for param in &plan.params {
        let ParamHome::Buffer(buffer) = param.home else { continue };
        if let Some(bytes) = weight(&param.name) {
            device.write(buffer, 0, &bytes)?;
        }
    }
    for group in &plan.groups {
        for segment in &group.segments {
            let Some((from, to, len)) = group.owned(segment, rank) else { continue };
            if let Some(bytes) = weight(&plan.params[segment.param].name) {
                let bytes = &bytes[from * 4..(from + len) * 4];
                device.write(group.master, to * 4, bytes)?;
                // Until the first step the average is the parameter.
                for average in group.states.iter().filter(|s| s.name == EMA) {
                    device.write(average.buffer, to * 4, bytes)?;
                }
            }
        }
        let begins = group.begins.map(|buffer| (buffer, group.begins_of(rank)));
        let starts = group.starts.map(|buffer| (buffer, group.starts_of(rank)));
        for (buffer, table) in begins.into_iter().chain(starts) {
            let bytes: Vec<u8> = table.iter().flat_map(|x| x.to_le_bytes()).collect();
            device.write(buffer, 0, &bytes)?;
        }
        for state in group.states.iter().filter(|s| s.init != 0.0) {
            let value = (state.init as f32).to_le_bytes();
            device.write(state.buffer, 0, &value.repeat(group.shard_numel))?;
        }
    }
    for constant in &plan.constants {
        if let Some(bytes) = weight(&constant.name) {
            device.write(constant.buffer, 0, &bytes)?;
        }
    }
    for state in &plan.states {
        let value = if state.name == RNG {
            // Ranks draw different masks.
            let start = [plan.seed as i64, rank as i64, 0];
            frit_ir::Tensor::ints(state.ty.dtype, state.ty.shape.clone(), start.to_vec())
        } else {
            frit_ir::Tensor::splat(state.ty.clone(), state.init)
        };
        device.write(state.buffer, 0, &value.to_bytes())?;
    }
    for hyper in &plan.hyper {
        let changed = changes.iter().find(|(name, _)| *name == hyper.name);
        let value = changed.map_or(hyper.value, |(_, value)| *value) as f32;
        device.write(hyper.buffer, 0, &value.to_le_bytes())?;
    }
    Ok(())
}
