//! The training of one rank on its device: steps, checkpoints and validations. Rank 0 reports. Either the examples of
//! files are trained on in a loop, or each step is ordered with its examples.

use crate::RunError;
use crate::checkpoint::lock::Run;
use crate::checkpoint::saver::{Saved, Saver};
use crate::checkpoint::snapshot::parameter_not_finite;
use crate::checkpoint::{Checkpoint, Position, restore};
use crate::course::Course;
use crate::device::{Device, Span};
use crate::divergence::{Judge, MAX_SKIPPED};
use crate::gradients::{Gradients, Parts};
use crate::initialize::{initialize, write_params};
use crate::left_out::{self, AllLeftOut};
use crate::metrics::Writer;
use crate::numerics::{Histograms, Watch};
use crate::orders::{Begun, Order, Orders, Stepped};
use crate::plan_dir::PlanDir;
use crate::progress::Progress;
use crate::reporter::Reporter;
use crate::run::{RunOptions, RunReport};
use crate::save::{self, Tensors, Version};
use crate::session::{self, Work};
use crate::tensorboard;
use crate::trace;
use crate::usage::Usage;
use crate::validation::{Examples, Validation};
use frit_comm::CommError;
use frit_data::Data;
use frit_ir::plan::{PhaseName, TaskId};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::Instant;

/// The outcome of a rank; tensors only on rank 0.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) rank: usize,
    pub(crate) report: RunReport,
    pub(crate) gradients: Gradients,
    pub(crate) saved: Tensors,
    /// Parameters omitted from `saved`.
    pub(crate) left_out: AllLeftOut,
    /// The traced step, by rank of this process.
    pub(crate) spans: Vec<(usize, Vec<Span>)>,
    pub(crate) usage: Usage,
    /// Moving averages, as `saved`.
    pub(crate) averages: Tensors,
    /// Why the final state is lost, if its checkpoint could not be written.
    pub(crate) lost: Option<String>,
    /// Histograms, and the number of ranks that counted.
    pub(crate) counted: Histograms,
    pub(crate) ranks: usize,
}

/// The steps of a run.
pub(crate) enum Steps<'a> {
    /// On the examples of files; `first` is the data step of the first one.
    Files { data: &'a Data, first: usize },
    /// As ordered, each with its examples; `from` is the position of the first of them.
    Ordered { orders: Orders, from: Position },
}

/// What all ranks train, and from which state.
pub(crate) struct Training<'a> {
    /// Hyper-parameters that differ from the plan's.
    pub(crate) hyper: Vec<(String, f64)>,
    /// The checkpoint from which to resume.
    pub(crate) resumed: Option<Checkpoint>,
    /// Its steps.
    pub(crate) start: usize,
    /// Parameters to start from instead of the plan's.
    pub(crate) replaced: Tensors,
    /// Whether this is rank 0 and its outputs cannot be written.
    pub(crate) refused: bool,
    /// Notes for the user before the first step.
    pub(crate) notes: Vec<String>,
    /// Identity of this run.
    pub(crate) run: Run,
    /// The runs that it continues, known to rank 0.
    pub(crate) before: Vec<String>,
    /// The validation between steps, or on order.
    pub(crate) validation: Option<Validation>,
    /// The examples of the validation between steps.
    pub(crate) validated: Option<Examples>,
    pub(crate) steps: Steps<'a>,
    pub(crate) dir: &'a PlanDir,
    pub(crate) options: &'a RunOptions,
}

impl Work for Training<'_> {
    type Outcome = Outcome;

    fn rank<D: Device>(
        &self,
        rank: usize,
        device: &mut D,
        mut beside: Option<&mut D>,
    ) -> Result<Outcome, RunError> {
        if self.refused {
            // The other ranks are connected and can be told.
            return Err(CommError::Aborted { rank }.into());
        }
        if let Some(beside) = beside.as_deref_mut().filter(|_| self.validated.is_some()) {
            self.initialize(beside, rank)?;
        }
        let run = self.run.agreed(rank, device)?;
        let mut reporter = self.reporter(rank, run)?;
        if let Some(note) = device.note() {
            reporter.warn(note.into());
        }
        initialize(self.dir, &self.hyper, &self.replaced, device, rank)?;
        if let Some(checkpoint) = &self.resumed {
            restore::restore(checkpoint, &self.dir.plan, device, rank, self.first_batch())?;
        }
        let left_out = match self.options.trained_only {
            true => Some(left_out::held(self.dir, device, rank)?),
            false => None,
        };
        let mut saver = self.saver(run, rank, &reporter);
        if let (Some(saver), Some(left_out)) = (&mut saver, &left_out) {
            saver.leave_out(left_out.clone());
        }
        let (check, count) = (self.options.check_numerics, self.options.numerics.is_some());
        let watch = Watch::new(&self.dir.plan, rank, check, count);
        reporter.start_clock();
        let course = Course::new(self.options.patience, self.resumed.as_ref());
        let (training, step, number) = (self, self.start, rank);
        let (read, evaluates, warned) = (0, self.validated.is_some(), 0);
        let mut rank = Rank {
            training,
            rank,
            device,
            beside,
            reporter,
            saver,
            course,
            watch,
            step,
            read,
            evaluates,
            warned,
        };
        match &self.steps {
            Steps::Files { data, first } => rank.train(data, *first)?,
            Steps::Ordered { orders, .. } => rank.obey(orders.of(number))?,
        }
        let mut outcome = rank.outcome()?;
        outcome.left_out = left_out.unwrap_or_default();
        Ok(outcome)
    }
}

impl Training<'_> {
    /// The reporter: rank 0 shows and writes metrics; every rank decides by them.
    fn reporter(&self, rank: usize, run: Run) -> Result<Reporter<'_>, RunError> {
        let metrics = self.options.metrics.as_deref().filter(|_| rank == 0);
        let resumes = self.options.checkpoint.as_ref().is_some_and(|c| c.resume);
        let writer = match resumes {
            true => Writer::resume(metrics, (run, &self.before), &self.dir.hash, self.start),
            false => Writer::open(metrics, run, &self.dir.hash),
        }?;
        let folder = self.options.tensorboard.as_deref().filter(|_| rank == 0);
        let events = folder.map(|folder| tensorboard::Writer::create(folder, run, self.start));
        let writer = writer.with_events(events.transpose()?);
        let progress = match self.options.progress && rank == 0 {
            true => Progress::new("step", self.start, self.options.steps),
            false => Progress::hidden(),
        };
        let max_skipped = self.options.max_skipped.unwrap_or(MAX_SKIPPED);
        let judge = Judge::new(max_skipped, self.start == 0);
        let mut reporter = Reporter::new(&self.dir.plan, writer, progress, judge);
        reporter.outcome.rank = rank;
        reporter.outcome.report.start = self.start;
        reporter.outcome.report.rank = rank;
        for note in self.notes.iter().filter(|_| rank == 0) {
            reporter.warn(note.clone());
        }
        Ok(reporter)
    }

    fn saver(&self, run: Run, rank: usize, reporter: &Reporter<'_>) -> Option<Saver<'_>> {
        let options = self.options.checkpoint.as_ref()?;
        let last = self.resumed.as_ref().map(|_| self.start);
        let metrics = reporter.metrics_file();
        Some(Saver::new(self.dir, options, run, rank, &self.hyper, metrics, last))
    }

    /// Whether there is a validation after this many steps.
    fn validates_after(&self, step: usize) -> bool {
        self.validated.is_some() && (step == self.options.steps || self.is_regular(step))
    }

    /// Whether there is a validation after this many steps wherever the run ends.
    fn is_regular(&self, step: usize) -> bool {
        let asked = self.options.validation.as_ref().and_then(|v| v.every);
        let every = asked.or(self.options.checkpoint.as_ref().and_then(|c| c.every));
        every.is_some_and(|every| step.is_multiple_of(every))
    }

    /// The data step of the first step.
    fn first_batch(&self) -> usize {
        match self.steps {
            Steps::Files { first, .. } => first,
            Steps::Ordered { .. } => self.start,
        }
    }

    /// Writes the initial values of the validation's device.
    fn initialize(&self, beside: &mut impl Device, rank: usize) -> Result<(), RunError> {
        self.validation.as_ref().map_or(Ok(()), |validation| validation.initialize(beside, rank))
    }
}

/// A training rank.
struct Rank<'a, D> {
    training: &'a Training<'a>,
    rank: usize,
    device: &'a mut D,
    /// The device of its evaluation plan.
    beside: Option<&'a mut D>,
    reporter: Reporter<'a>,
    saver: Option<Saver<'a>>,
    course: Course,
    watch: Watch<'a>,
    /// Steps done.
    step: usize,
    /// Examples that were ordered.
    read: usize,
    /// Whether the device of the evaluation plan is initialized.
    evaluates: bool,
    /// Warnings that were passed on.
    warned: usize,
}

impl<D: Device> Rank<'_, D> {
    /// Trains on the examples of files, from data step `first` on.
    fn train(&mut self, data: &Data, first: usize) -> Result<(), RunError> {
        let resumed = self.training.resumed.as_ref();
        if resumed.is_some_and(|c| c.validated.is_none())
            && self.training.validates_after(self.step)
        {
            // The resumed run ended before this validation.
            self.validate()?;
        }
        while self.step < self.training.options.steps
            && !self.course.is_over()
            && !self.has_ended()
            && !self.is_interrupted()?
        {
            self.next(data, first + self.step - self.training.start)?;
        }
        self.reporter.catch_up(self.device, self.step)?;
        self.last_checkpoint()
    }

    /// Does what is ordered, until there are no more orders. If nobody waits for a reply any more, there are no more
    /// orders either.
    fn obey(&mut self, orders: Receiver<Order>) -> Result<(), RunError> {
        for order in orders {
            match order {
                Order::Begin(reply) => {
                    let Rank { rank, step, .. } = *self;
                    reply.send(Begun { rank, step, warnings: self.warnings() });
                }
                Order::Step(data, reply) => {
                    self.reporter.start_clock();
                    self.read += data.len();
                    self.next(&data, 0)?;
                    self.reporter.catch_up(self.device, self.step)?;
                    let (metrics, warnings) = (self.reporter.last.clone(), self.warnings());
                    let ended = self.reporter.judge.ended().cloned();
                    reply.send(Stepped { metrics, ended, warnings });
                }
                Order::Evaluate(examples, mut sums, reply) => {
                    let training = self.training;
                    let beside = training.validation.as_ref().zip(self.beside.as_deref_mut());
                    let (validation, beside) = beside.expect("invariant: the plan evaluates");
                    if !std::mem::replace(&mut self.evaluates, true) {
                        training.initialize(beside, self.rank)?;
                    }
                    if sums.batches == 0 {
                        validation.copy(self.device, beside, self.rank)?;
                    }
                    validation.add(&mut sums, &examples, beside, self.rank)?;
                    reply.send(sums);
                }
                Order::State(version, reply) => {
                    let dir = self.training.dir;
                    reply.send(save::collect(dir, self.device, self.rank, version, false)?);
                }
                Order::Load(params, reply) => {
                    let weight = |name: &str| Ok(params.get(name).map(|b| b.as_slice().into()));
                    let starts = self.step == 0;
                    write_params(self.training.dir, weight, starts, self.device, self.rank)?;
                    reply.send(());
                }
                Order::Checkpoint(reply) => {
                    self.last_checkpoint()?;
                    reply.send((self.reporter.outcome.lost.take(), self.warnings()));
                }
            }
        }
        self.last_checkpoint()
    }

    /// The warnings since the last call.
    fn warnings(&mut self) -> Vec<String> {
        let all = &self.reporter.outcome.report.warnings;
        let new = all[self.warned..].to_vec();
        self.warned = all.len();
        new
    }

    /// Runs the next step, on the examples of a data step, with the checkpoint and the validation that follow it.
    fn next(&mut self, data: &Data, batch: usize) -> Result<(), RunError> {
        self.advance(data, batch)?;
        if !self.has_ended() {
            self.checkpoint()?;
        }
        if !self.has_ended() && self.training.validates_after(self.step) {
            self.validate()?;
        }
        Ok(())
    }

    /// The position in the data after the steps that were run.
    fn position(&self) -> Position {
        let Training { steps, start, .. } = self.training;
        match steps {
            Steps::Files { data, first } => data.position(first + self.step - start),
            Steps::Ordered { from, .. } => Position { example: from.example + self.read, ..*from },
        }
    }

    fn has_ended(&self) -> bool {
        self.reporter.judge.has_ended()
    }

    /// Whether a signal ends the run here. Ranks may receive it in different steps but stop at the same one.
    fn is_interrupted(&mut self) -> Result<bool, RunError> {
        let Some(stop) = &self.training.options.stop else { return Ok(false) };
        let signal = self.device.largest(stop.load(Ordering::Relaxed) as u64)?;
        if signal > 0 {
            self.reporter.outcome.report.interrupted = Some(signal as i32);
        }
        Ok(signal > 0)
    }

    /// Runs one step on the examples of a data step, and keeps the gradients if requested.
    fn advance(&mut self, data: &Data, batch: usize) -> Result<(), RunError> {
        let Training { dir, options, start, .. } = self.training;
        let (step, rank, watch) = (self.step, self.rank, &mut self.watch);
        let update = dir.plan.tasks_of(PhaseName::Update).start;
        let dump = step == *start && options.dump_grads.is_some();
        let traced = options.trace.is_some() && step + 1 == options.steps;
        let (mut trace, origin, mut parts) = (Vec::new(), Instant::now(), None);
        let mut run = |device: &mut D, tasks| match traced {
            true => trace::run(device, tasks, &origin, &mut trace),
            false => watch.run(device, tasks),
        };
        session::step(
            &dir.plan,
            data.micro_steps(batch),
            self.device,
            |device, k| {
                data.feed(batch, k, rank, |buffer, element, bytes| {
                    device.feed(buffer, element, bytes)
                })
            },
            |device, tasks: Range<TaskId>| {
                if !dump || tasks.end <= update {
                    return run(device, tasks);
                }
                run(device, tasks.start..update)?;
                parts = Some(Parts::read(&dir.plan, device)?);
                run(device, update..tasks.end)
            },
        )?;
        if traced {
            self.reporter.outcome.spans.push((rank, trace));
        }
        self.reporter.keep(parts);
        self.step += 1;
        self.reporter.catch_up(self.device, self.step.saturating_sub(D::METRICS_DELAY))
    }

    /// Advances the last checkpoint, and begins the next one if it is due.
    fn checkpoint(&mut self) -> Result<(), RunError> {
        let position = self.position();
        let Some(saver) = &mut self.saver else { return Ok(()) };
        let step = self.step;
        saver.advance(self.device)?;
        if saver.due(step) || step == self.training.options.steps {
            // The metrics of every step come before the checkpoint that follows it.
            self.reporter.catch_up(self.device, step)?;
            if self.reporter.judge.has_ended() {
                return Ok(());
            }
            let saved = saver.save(step, position, self.course.before(step), self.device)?;
            self.reporter.saved(step, saved);
        }
        saver.take_warnings().into_iter().for_each(|w| self.reporter.warn(w));
        Ok(())
    }

    /// Ensures that the final state is finite, and on disk if checkpoints are saved, unless the run has failed.
    fn last_checkpoint(&mut self) -> Result<(), RunError> {
        let (position, step) = (self.position(), self.step);
        let Some(saver) = &mut self.saver else {
            if !self.reporter.judge.has_ended() {
                let plan = &self.training.dir.plan;
                let found = parameter_not_finite(plan, self.device, self.rank)?;
                found
                    .into_iter()
                    .for_each(|name| self.reporter.saved(step, Saved::NotFinite(name)));
            }
            return Ok(());
        };
        if self.reporter.judge.has_ended() {
            saver.settle(self.device)?;
        } else {
            let saved = saver.finish(step, position, self.course.before(step), self.device)?;
            self.reporter.saved(step, saved);
            self.course.found(step).into_iter().for_each(|found| saver.validated(step, &found));
        }
        saver.take_warnings().into_iter().for_each(|w| self.reporter.warn(w));
        Ok(())
    }

    /// Validates the current state, after its checkpoint, if any, is on disk.
    fn validate(&mut self) -> Result<(), RunError> {
        let validation = self.training.validation.as_ref().zip(self.beside.as_deref_mut());
        let validation = validation.zip(self.training.validated.as_ref());
        let Some(((validation, beside), examples)) = validation else { return Ok(()) };
        let step = self.step;
        self.reporter.catch_up(self.device, step)?;
        if self.reporter.judge.has_ended() {
            return Ok(());
        }
        self.saver.as_mut().map_or(Ok(()), |saver| saver.settle(self.device))?;
        self.reporter.doing("validating");
        let found = validation.measure(self.device, beside, self.rank, examples)?;
        let loss = found.loss;
        self.reporter.validated(step, found);
        self.course.take(step, loss, self.training.is_regular(step), self.device)?;
        if let (Some(saver), Some(found)) = (&mut self.saver, self.course.found(step)) {
            saver.validated(step, &found);
        }
        Ok(())
    }

    /// The outcome of the rank.
    fn outcome(self) -> Result<Outcome, RunError> {
        let Rank { training, rank, device, mut reporter, course, watch, step, .. } = self;
        let options = training.options;
        reporter.outcome.report.early = course.reason().filter(|_| step < options.steps);
        let is_worth_saving = !reporter.judge.has_ended();
        let mut outcome = reporter.finish();
        outcome.usage = device.usage()?;
        (outcome.counted, outcome.ranks) = (watch.into_histograms(), 1);
        let collect =
            |version| save::collect(training.dir, device, rank, version, options.trained_only);
        if options.save.is_some() && is_worth_saving {
            outcome.saved = collect(Version::Trained)?;
        }
        if options.save_ema.is_some() && is_worth_saving {
            outcome.averages = collect(Version::Average)?;
        }
        Ok(outcome)
    }
}
