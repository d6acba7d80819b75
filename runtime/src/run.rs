//! The step loop of a rank on its device; rank 0 reports. On the CPU ranks are threads or processes, on GPUs
//! processes.

use crate::RunError;
use crate::checkpoint::write::{Run, Saver, prepare};
use crate::checkpoint::{Checkpoint, CheckpointOptions, Position, restore};
use crate::comm::Communicator;
use crate::comm::launch::Launch;
use crate::comm::local::LocalComm;
use crate::data::Data;
use crate::device::cpu::Cpu;
use crate::device::cuda::{Cuda, Real};
use crate::device::{Device, Span};
use crate::gradients::{self, Gradients, Parts};
use crate::initialize::initialize;
use crate::interrupt::Stop;
use crate::metrics::Writer;
use crate::numerics::{self, Histograms, Watch};
use crate::plan_dir::{CUDA, PlanDir};
use crate::ranks;
use crate::reporter::Reporter;
use crate::save::{self, Tensors, Version};
use crate::trace;
use crate::usage::{self, Usage};
use crate::validation::{Validation, ValidationOptions};
use frit_ir::plan::{Plan, sha256_hex};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
        Some(data) => Some(Validation::open(&dir, &data)?),
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
pub(crate) struct Outcome {
    rank: usize,
    pub(crate) report: RunReport,
    pub(crate) gradients: Gradients,
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
        let comms = LocalComm::world(ranks);
        let watch = comms[0].clone();
        let results = ranks::on_threads(comms, |comm| {
            let failed = |_: &RunError| self.failed.store(true, Ordering::Relaxed);
            self.on_cpu(comm).inspect_err(failed)
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
        let failed = |_: &RunError| self.failed.store(true, Ordering::Relaxed);
        let train = |comm| self.on_cpu(comm).inspect_err(failed);
        let ranks = self.dir.plan.world_size;
        let (mut outcome, traffic) = ranks::as_process(ranks, launch, &self.identity(), train)?;
        (outcome.report.collective_calls, outcome.report.collective_bytes) = traffic;
        Ok(outcome)
    }

    /// One rank on the CPU, and beside it what it validates with.
    fn on_cpu<C: Communicator + Clone>(&self, comm: C) -> Result<Outcome, RunError> {
        let (rank, interpret) = (comm.rank(), self.options.interpret);
        let threads = ranks::threads_per_rank(self.options.threads, self.dir.plan.world_size);
        let mut device = Cpu::new(self.dir, comm.clone(), threads, interpret)?;
        let Some(validation) = &self.validation else {
            return self.train(&mut device, rank, None);
        };
        let mut beside = validation.on_cpu(comm, threads, interpret)?;
        let mut validate = |trained: &Cpu<'_, C>| validation.loss(trained, &mut beside, rank);
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
                let mut validate =
                    |trained: &Cuda<'_, Real>| validation.loss(trained, &mut beside, rank);
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
        let writer = match resumes {
            true => Writer::resume(metrics, self.start),
            false => Writer::open(metrics),
        }?;
        let steps = (self.options.progress && rank == 0)
            .then(|| self.options.steps.saturating_sub(self.start));
        let mut reporter = Reporter::new(&self.dir.plan, writer, steps);
        reporter.outcome.rank = rank;
        reporter.outcome.report.start = self.start;
        reporter.outcome.report.rank = rank;
        initialize(self.dir, &self.hyper, &Tensors::new(), device, rank)?;
        if let Some(checkpoint) = &self.resumed {
            restore::restore(checkpoint, &self.dir.plan, device, rank)?;
        }
        let mut saver = self.saver(device, rank, reporter.metrics_file())?;
        let (check, count) = (self.options.check_numerics, self.options.numerics.is_some());
        let mut watch = Watch::new(&self.dir.plan, rank, check, count);
        reporter.start_clock();
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
            reporter.keep(parts);
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
        if let Some(saver) = &mut saver {
            saver.finish(step, self.position(step), validation_loss, device)?;
        }
        let mut outcome = reporter.finish();
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
        metrics: Option<File>,
    ) -> Result<Option<Saver<'_>>, RunError> {
        let Some(options) = &self.options.checkpoint else { return Ok(None) };
        let run = self.run.agreed(device)?;
        let last = self.resumed.as_ref().map(|_| self.start);
        let (failed, set) = (Arc::clone(&self.failed), &self.hyper);
        let saver = Saver::new(self.dir, options, run, rank, set, failed, metrics, last);
        Ok(Some(saver))
    }

    /// The data's number of step `step`.
    fn batch(&self, step: usize) -> usize {
        self.first_batch + step - self.start
    }

    fn position(&self, step: usize) -> Position {
        self.data.position(self.batch(step))
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
