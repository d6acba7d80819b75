//! The step loop of a rank on its device; rank 0 reports. Ranks are threads or processes on the CPU, and processes on GPUs.

use crate::RunError;
use crate::checkpoint::lock::{self, Run};
use crate::checkpoint::saver::Saver;
use crate::checkpoint::{Checkpoint, CheckpointOptions, Position, restore};
use crate::comm::Communicator;
use crate::comm::launch::Launch;
use crate::comm::local::LocalComm;
use crate::course::Course;
use crate::data::{Data, Source};
use crate::device::cpu::Cpu;
use crate::device::cuda::{Cuda, Real};
use crate::device::{Device, Span};
use crate::divergence::{Divergence, Judge, MAX_SKIPPED};
use crate::eval::in_words;
use crate::files::Sink;
use crate::gradients::{self, Gradients, Parts};
use crate::hyper;
use crate::initialize::initialize;
use crate::interrupt::Stop;
use crate::left_out::{self, AllLeftOut};
use crate::memory;
use crate::metrics::{self, Writer};
use crate::numerics::{self, Histograms, Watch};
use crate::outputs;
use crate::plan_dir::PlanDir;
use crate::progress::Progress;
use crate::ranks;
use crate::reporter::Reporter;
use crate::save::{self, Tensors, Version};
use crate::starting;
use crate::trace;
use crate::usage::{self, Usage};
use crate::validation::{Measured, Validation, ValidationOptions};
use frit_ir::counted;
use frit_ir::plan::{DeviceType, PhaseName, Plan, sha256_hex};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// What is asked of a run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Steps, counted from the start of training.
    pub steps: usize,
    /// The data.
    pub data: Source,
    /// Start from the parameters of these files instead of the plan's; of a checkpoint that is continued, those that it
    /// leaves out.
    pub weights: Vec<PathBuf>,
    /// Leave what no step changes out of checkpoints and of what is saved.
    pub trained_only: bool,
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
    /// Leave after so many validations in a row without an improvement.
    pub patience: Option<usize>,
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
    /// Skipped steps in a row after which the run has failed; by default [`MAX_SKIPPED`].
    pub max_skipped: Option<usize>,
    /// Show people how far it is and what goes wrong, on standard error.
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
    /// Why it has failed, although all steps could be run.
    pub stopped: Option<Divergence>,
    /// Steps whose update was skipped because of gradients that are not finite.
    pub skipped: usize,
    /// What went wrong without ending it.
    pub warnings: Vec<String>,
    /// Why it stopped before the last step of its own accord, if it did.
    pub early: Option<String>,
    /// Mean loss of every step, from `start` on.
    pub losses: Vec<f64>,
    /// The loss over the validation examples, and how many steps were run before it was taken.
    pub validation: Vec<(usize, f64)>,
    /// The metrics of the last validation, by name.
    pub validation_metrics: BTreeMap<String, f64>,
    /// Gradient norm of every step.
    pub grad_norms: Vec<f64>,
    /// Seconds of every step.
    pub seconds: Vec<f64>,
    /// Collectives that ranks took part in, counted on every rank.
    pub collective_calls: u64,
    /// Bytes that ranks read from others.
    pub collective_bytes: u64,
}

impl RunReport {
    /// What it did, in a line; and why it ended early, if it did, in another.
    pub fn summary(&self) -> String {
        let ended = self.early_end().map(|why| format!("\n{why}"));
        self.training() + &ended.unwrap_or_default()
    }

    /// Why and when it ended before its last step of its own accord, in words.
    pub fn early_end(&self) -> Option<String> {
        let steps = self.start + self.losses.len();
        self.early.as_ref().map(|reason| format!("stopped early after {steps} steps: {reason}"))
    }

    fn training(&self) -> String {
        let (Some(first), Some(last)) = (self.losses.first(), self.losses.last()) else {
            return match self.start {
                0 => "no steps".into(),
                start => format!("nothing to do after {start} steps"),
            };
        };
        let mut text = counted(self.losses.len(), "step");
        if self.skipped > 0 {
            text += &format!(", {} of them skipped", self.skipped);
        }
        text += &format!(", loss {first:.4} -> {last:.4}");
        if let Some((_, loss)) = self.validation.last() {
            text += &format!(", validation loss {loss:.4}{}", in_words(&self.validation_metrics));
        }
        text
    }
}

/// Runs a plan.
///
/// # Errors
/// What is wrong with the plan, the data or the options, or the task that failed.
pub fn run(plan_dir: &Path, options: &RunOptions) -> Result<RunReport, RunError> {
    let dir = PlanDir::load(plan_dir)?;
    let ranks = |reason| RunError::Ranks { reason };
    let launch = Launch::from_environment().map_err(ranks)?;
    let ranks_here = launch.ranks_here(dir.plan.world_size);
    memory::check(&[&dir.plan], ranks_here)?;
    let data = Data::load(&options.data, &dir.plan)?;
    hyper::check(&dir.plan, &options.hyper)?;
    if options.save_ema.is_some() && !save::has_ema(&dir.plan) {
        return Err(RunError::NoEma);
    }
    let named = dir.plan.validation.as_ref();
    let named = named.map(|file| Source::new(vec![file.into()], options.data.tokens));
    let validation = match options.validation.as_ref().map(|v| v.data.clone()).or(named) {
        Some(data) => Some(Validation::open(&dir, &data)?),
        None => None,
    };
    let beside = validation.as_ref().map(|v| &v.dir.plan);
    let plans: Vec<&Plan> = std::iter::once(&dir.plan).chain(beside).collect();
    memory::check(&plans, ranks_here)?;
    check_patience(options, validation.is_some())?;
    let run = Run::new();
    // What is wrong for rank 0 only is said when the others can be told.
    let taken = (launch.rank == 0).then(|| take_outputs(options, run)).transpose();
    let (lock, refusal) = match taken {
        Err(error) if launch.world_size == 1 => return Err(error),
        Err(error) => (None, Some(error)),
        Ok(lock) => (lock.flatten(), None),
    };
    let resumed = match &options.checkpoint {
        Some(checkpoint) if checkpoint.resume && refusal.is_none() => {
            Checkpoint::latest(&checkpoint.dir)?
        }
        _ => None,
    };
    let session = Session {
        replaced: starting::instead(&options.weights, &dir, resumed.as_ref())?,
        hyper: hyper::effective(&dir.plan, &options.hyper, resumed.as_ref()),
        first_batch: resumed.as_ref().map_or(0, |c| data.step_at(c.index.position)),
        start: resumed.as_ref().map_or(0, |c| c.index.step),
        notes: notes(options, resumed.as_ref(), lock.as_ref()),
        resumed,
        refused: refusal.is_some(),
        run,
        validation,
        dir: &dir,
        data: &data,
        options,
    };
    let outcome = match (dir.plan.target.device == DeviceType::Cuda, launch.world_size) {
        (true, _) => session.on_gpu(),
        (false, 1) => session.on_threads(),
        (false, _) => session.as_process(&launch),
    };
    // The other ranks know by now that this one cannot go on.
    let outcome = refusal.map_or(outcome, Err)?;
    if outcome.rank == 0 {
        write_outputs(&dir.plan, options, &outcome)?;
    }
    Ok(outcome.report)
}

/// Looks at everything that rank 0 will write, before anything is computed.
fn take_outputs(options: &RunOptions, run: Run) -> Result<Option<lock::Lock>, RunError> {
    let outputs = [
        ("--metrics", &options.metrics),
        ("--dump-grads", &options.dump_grads),
        ("--save", &options.save),
        ("--save-ema", &options.save_ema),
        ("--trace", &options.trace),
        ("--usage", &options.usage),
        ("--numerics", &options.numerics),
    ];
    let data = options.data.paths()?;
    let validation = options.validation.as_ref().map(|v| v.data.paths()).transpose()?;
    let named = data.iter().map(|path| ("--data", path.as_path()));
    let validated = validation.iter().flatten().map(|path| ("--validation", path.as_path()));
    let weights = options.weights.iter().map(|path| ("--weights", path.as_path()));
    let read: Vec<_> = named.chain(validated).chain(weights).collect();
    outputs::check(&outputs.map(|(option, path)| (option, path.as_deref())), &read)?;
    options.checkpoint.as_ref().map(|c| lock::take(c, run)).transpose()
}

/// What people have to know before the first step.
fn notes(
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
    lock: Option<&lock::Lock>,
) -> Vec<String> {
    let mut notes: Vec<String> = lock.and_then(|l| l.warning.clone()).into_iter().collect();
    let resumes = options.checkpoint.as_ref().filter(|c| c.resume);
    if let Some((options, checkpoint)) = resumes.zip(resumed)
        && !options.names_latest()
    {
        let (dir, path) = (options.dir.display(), checkpoint.path.display());
        notes.push(format!(
            "{dir} lacks the file `latest`; going on from its newest complete checkpoint, {path}"
        ));
    }
    if let (Some(weights), Some(checkpoint)) = (options.weights.first(), resumed)
        && checkpoint.index.left_out.is_empty()
    {
        let (weights, path) = (weights.display(), checkpoint.path.display());
        notes.push(format!("{weights} is not read: the run goes on from the checkpoint {path}"));
    }
    if let Some(path) = options.metrics.as_ref().filter(|p| metrics::holds_lines(p)) {
        let path = path.display();
        if resumes.is_none() {
            notes.push(format!(
                "{path} holds lines of an earlier run; those of this one follow, by another `run`"
            ));
        } else if resumed.is_none() {
            notes.push(format!(
                "there is no checkpoint to go on from; the lines that {path} holds are removed"
            ));
        }
    }
    notes
}

/// Writes what was asked for at the end: all that can be written. A run that ended because its state is worth
/// nothing saves none of it.
fn write_outputs(plan: &Plan, options: &RunOptions, outcome: &Outcome) -> Result<(), RunError> {
    let worthless = outcome.report.stopped.as_ref().is_some_and(Divergence::is_final);
    let mut lost: Vec<String> = outcome.lost.clone().into_iter().collect();
    let mut put =
        |option: &str, path: &Option<PathBuf>, write: &dyn Fn(&Path) -> Result<(), RunError>| {
            if let Some(Err(e)) = path.as_deref().map(write) {
                lost.push(format!("{option} is lost: {e}"));
            }
        };
    put("--dump-grads", &options.dump_grads, &|path| {
        gradients::write(path, plan, &outcome.gradients)
    });
    put("--numerics", &options.numerics, &|path| {
        let steps = outcome.report.losses.len();
        numerics::write(path, plan, steps, outcome.ranks, outcome.counted.clone())
    });
    put("--trace", &options.trace, &|path| trace::write(path, plan, &outcome.spans));
    put("--usage", &options.usage, &|path| usage::write(path, &outcome.usage));
    if !worthless {
        let left_out = &outcome.left_out;
        put("--save", &options.save, &|path| save::write(path, plan, &outcome.saved, left_out));
        put("--save-ema", &options.save_ema, &|path| {
            save::write(path, plan, &outcome.averages, left_out)
        });
    }
    if lost.is_empty() { Ok(()) } else { Err(RunError::Lost { reason: lost.join("; ") }) }
}

fn check_patience(options: &RunOptions, validates: bool) -> Result<(), RunError> {
    let every = options.validation.as_ref().and_then(|v| v.every);
    let repeats = every.or(options.checkpoint.as_ref().and_then(|c| c.every)).is_some();
    if options.patience.is_some() && !(validates && repeats) {
        return Err(RunError::Patience);
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
    /// What is left out of it.
    left_out: AllLeftOut,
    /// The traced step, by rank of this process.
    spans: Vec<(usize, Vec<Span>)>,
    usage: Usage,
    /// Moving averages, as `saved`.
    averages: Tensors,
    /// The state at the end, if its checkpoint could not be written.
    pub(crate) lost: Option<String>,
    /// What was counted of numbers, and by how many ranks.
    counted: Histograms,
    ranks: usize,
}

/// A validation with the parameters of a device.
type Validate<'a, D> = dyn FnMut(&D) -> Result<Measured, RunError> + 'a;

struct Session<'a> {
    /// Hyper-parameters that differ from the plan's.
    hyper: Vec<(String, f64)>,
    /// The checkpoint from which to go on.
    resumed: Option<Checkpoint>,
    /// Its steps.
    start: usize,
    /// Parameters to start from instead of the plan's.
    replaced: Tensors,
    /// The data's step that is read at `start`.
    first_batch: usize,
    /// Whether this is rank 0, and cannot write what it shall.
    refused: bool,
    /// What people have to know before the first step.
    notes: Vec<String>,
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
        let results = ranks::on_threads(comms, |comm| self.on_cpu(comm));
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
        let ranks = self.dir.plan.world_size;
        let train = |comm| self.on_cpu(comm);
        let (mut outcome, traffic) = ranks::as_process(ranks, launch, &self.identity(), train)?;
        (outcome.report.collective_calls, outcome.report.collective_bytes) = traffic;
        Ok(outcome)
    }

    /// One rank on the CPU, and beside it what it validates with.
    fn on_cpu<C: Communicator + Clone>(&self, comm: C) -> Result<Outcome, RunError> {
        let (rank, interpret) = (comm.rank(), self.options.interpret);
        self.refuse()?;
        let threads = ranks::threads_per_rank(self.options.threads, self.dir.plan.world_size);
        let mut device = Cpu::new(self.dir, comm.clone(), threads, interpret)?;
        let Some(validation) = &self.validation else {
            return self.train(&mut device, rank, None);
        };
        let mut beside = validation.on_cpu(comm, threads, interpret)?;
        let mut validate = |trained: &Cpu<'_, C>| validation.measure(trained, &mut beside, rank);
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
                    |trained: &Cuda<'_, Real>| validation.measure(trained, &mut beside, rank);
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

    /// Ends a rank that cannot go on, once the others are there to be told.
    fn refuse(&self) -> Result<(), RunError> {
        if self.refused { Err(RunError::Aborted { rank: 0 }) } else { Ok(()) }
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
        self.refuse()?;
        let run = self.run.agreed(rank, device)?;
        let mut reporter = self.reporter(rank, run)?;
        initialize(self.dir, &self.hyper, &self.replaced, device, rank)?;
        if let Some(checkpoint) = &self.resumed {
            restore::restore(checkpoint, &self.dir.plan, device, rank, self.first_batch)?;
        }
        let left_out = match self.options.trained_only {
            true => Some(left_out::held(self.dir, device, rank)?),
            false => None,
        };
        let mut saver = self.saver(run, rank, reporter.metrics_file());
        if let (Some(saver), Some(left_out)) = (&mut saver, &left_out) {
            saver.leave_out(left_out.clone());
        }
        let (check, count) = (self.options.check_numerics, self.options.numerics.is_some());
        let mut watch = Watch::new(&self.dir.plan, rank, check, count);
        reporter.start_clock();
        let mut step = self.start;
        let mut course = Course::new(self.options.patience, self.resumed.as_ref());
        if let Some(validate) = &mut validate
            && self.resumed.as_ref().is_some_and(|c| c.validated.is_none())
            && self.validates_after(step)
        {
            // The run that is continued ended before it did.
            self.validate(step, device, *validate, &mut reporter, &mut saver, &mut course)?;
        }
        while step < self.options.steps && !course.is_over() && !reporter.judge.has_ended() {
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
            if reporter.judge.has_ended() {
                break;
            }
            if let Some(saver) = &mut saver {
                saver.advance(device)?;
                if saver.due(step) || step == self.options.steps {
                    // The metrics of every step come before the checkpoint that follows it.
                    reporter.catch_up(device, step)?;
                    if reporter.judge.has_ended() {
                        break;
                    }
                    let position = self.position(step);
                    let saved = saver.save(step, position, course.before(step), device)?;
                    reporter.saved(step, saved);
                }
                saver.take_warnings().into_iter().for_each(|w| reporter.warn(w));
            }
            if reporter.judge.has_ended() {
                break;
            }
            if let Some(validate) = &mut validate
                && self.validates_after(step)
            {
                self.validate(step, device, *validate, &mut reporter, &mut saver, &mut course)?;
            }
        }
        reporter.catch_up(device, step)?;
        if let Some(saver) = &mut saver {
            if reporter.judge.has_ended() {
                saver.settle(device)?;
            } else {
                let position = self.position(step);
                let saved = saver.finish(step, position, course.before(step), device)?;
                reporter.saved(step, saved);
                course.found(step).into_iter().for_each(|found| saver.validated(step, &found));
            }
            saver.take_warnings().into_iter().for_each(|w| reporter.warn(w));
        }
        reporter.outcome.report.early = course.reason().filter(|_| step < self.options.steps);
        let worthless = reporter.judge.has_ended();
        let mut outcome = reporter.finish();
        outcome.usage = device.usage()?;
        (outcome.counted, outcome.ranks) = (watch.into_histograms(), 1);
        let trained_only = self.options.trained_only;
        if self.options.save.is_some() && !worthless {
            outcome.saved = save::collect(self.dir, device, rank, Version::Trained, trained_only)?;
        }
        if self.options.save_ema.is_some() && !worthless {
            let version = Version::Average;
            outcome.averages = save::collect(self.dir, device, rank, version, trained_only)?;
        }
        outcome.left_out = left_out.unwrap_or_default();
        Ok(outcome)
    }

    /// What rank 0 tells people, and every rank judges by.
    fn reporter(&self, rank: usize, run: Run) -> Result<Reporter<'_>, RunError> {
        let metrics = self.options.metrics.as_deref().filter(|_| rank == 0);
        let resumes = self.options.checkpoint.as_ref().is_some_and(|c| c.resume);
        let writer = match resumes {
            true => Writer::resume(metrics, run, self.start),
            false => Writer::open(metrics, run),
        }?;
        let progress = match self.options.progress && rank == 0 {
            true => Progress::new("step", self.start, self.options.steps),
            false => Progress::hidden(),
        };
        let judge = Judge::new(self.options.max_skipped.unwrap_or(MAX_SKIPPED));
        let mut reporter = Reporter::new(&self.dir.plan, writer, progress, judge);
        reporter.outcome.rank = rank;
        reporter.outcome.report.start = self.start;
        reporter.outcome.report.rank = rank;
        for note in self.notes.iter().filter(|_| rank == 0) {
            reporter.warn(note.clone());
        }
        Ok(reporter)
    }

    /// Takes the validation loss of the state after `step` steps, which is on disk by then if it is to be.
    fn validate<D: Device>(
        &self,
        step: usize,
        device: &mut D,
        validate: &mut Validate<'_, D>,
        reporter: &mut Reporter<'_>,
        saver: &mut Option<Saver<'_>>,
        course: &mut Course,
    ) -> Result<(), RunError> {
        reporter.catch_up(device, step)?;
        if reporter.judge.has_ended() {
            return Ok(());
        }
        saver.as_mut().map_or(Ok(()), |saver| saver.settle(device))?;
        let found = validate(device)?;
        let loss = found.loss;
        reporter.validated(step, found);
        course.take(step, loss, self.is_regular(step), device)?;
        if let (Some(saver), Some(found)) = (saver, course.found(step)) {
            saver.validated(step, &found);
        }
        Ok(())
    }

    /// Whether the validation loss is taken after so many steps.
    fn validates_after(&self, step: usize) -> bool {
        step == self.options.steps || self.is_regular(step)
    }

    /// Whether it is taken after so many steps wherever the run ends.
    fn is_regular(&self, step: usize) -> bool {
        let asked = self.options.validation.as_ref().and_then(|v| v.every);
        let every = asked.or(self.options.checkpoint.as_ref().and_then(|c| c.every));
        every.is_some_and(|every| step.is_multiple_of(every))
    }

    fn saver(&self, run: Run, rank: usize, metrics: Option<Sink>) -> Option<Saver<'_>> {
        let options = self.options.checkpoint.as_ref()?;
        let last = self.resumed.as_ref().map(|_| self.start);
        Some(Saver::new(self.dir, options, run, rank, &self.hyper, metrics, last))
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
        let update = plan.tasks_of(PhaseName::Update);
        let dump = step == self.start && self.options.dump_grads.is_some();
        let batch = self.batch(step);
        let micro_steps = self.data.micro_steps(batch);
        let traced = self.options.trace.is_some() && step + 1 == self.options.steps;
        let (mut trace, origin) = (Vec::new(), Instant::now());
        let mut run = |device: &mut _, tasks| match traced {
            true => trace::run(device, tasks, &origin, &mut trace),
            false => watch.run(device, tasks),
        };
        let mut parts = None;
        for k in 0..micro_steps {
            self.data.feed(batch, k, rank, |buffer, element, bytes| {
                device.feed(buffer, element, bytes)
            })?;
            let mut tasks = plan.micro_step_tasks(k, micro_steps);
            if dump {
                tasks.end = tasks.end.min(update.start);
            }
            run(device, tasks)?;
        }
        if dump {
            parts = Some(Parts::read(plan, device)?);
            run(device, update)?;
        }
        if traced {
            spans.push((rank, trace));
        }
        Ok(parts)
    }
}
