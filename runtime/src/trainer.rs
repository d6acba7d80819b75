//! Trains step by step, on batches that the caller gives.
//!
//! A [`Trainer`] runs a session on threads of its own: the ranks of a plan for the CPU, or the rank of this process. They do
//! what they are ordered, in the same steps as a [run](crate::run): the numbers are those of `frit run` on the same examples.

use crate::RunError;
use crate::checkpoint::{CheckpointOptions, Position};
use crate::divergence::Divergence;
use crate::eval::{self, Feed, Sums};
use crate::left_out::AllLeftOut;
use crate::memory;
use crate::metrics::StepMetrics;
use crate::orders::{self, Begun, Order, Orderer, Reply, Stepped};
use crate::plan_dir::PlanDir;
use crate::run::{self, RunOptions, RunReport};
use crate::save::{self, Tensors, Version};
use crate::starting::{self, Replaced};
use crate::train::Steps;
use crate::validation::{self, Examples, Validation};
use frit_comm::launch::Launch;
use frit_data::{Batch, Data};
use frit_ir::TensorType;
use frit_ir::plan::{DeviceType, Plan, layout};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use crate::eval::Report as Evaluated;

/// How often whoever waits may look at something else.
const TICK: Duration = Duration::from_millis(50);

/// Options of a trainer.
#[derive(Clone, Debug, Default)]
pub struct TrainerOptions {
    /// Start from the parameters of these files instead of the plan's.
    pub weights: Vec<PathBuf>,
    /// Write checkpoints, and resume from them.
    pub checkpoint: Option<CheckpointOptions>,
    /// Append one JSON object per step here.
    pub metrics: Option<PathBuf>,
    /// Threads per rank; by default the cores divided by the ranks.
    pub threads: Option<usize>,
    /// Hyper-parameters to change.
    pub hyper: Vec<(String, f64)>,
    /// Consecutive skipped steps after which the run has failed.
    pub max_skipped: Option<usize>,
    /// Evaluate nothing, which needs the memory of the training plan only.
    pub without_evaluation: bool,
}

/// A tensor by its type, as files have it, and its little-endian elements.
pub type Stored = (TensorType, Vec<u8>);

/// A session that waits for orders.
///
/// Every method that waits calls `tick` several times per second meanwhile.
pub struct Trainer {
    dir: Arc<PlanDir>,
    /// The evaluation plan, for the labels and the statistics of its losses.
    evaluation: Option<Plan>,
    orders: Option<Orderer>,
    session: Option<JoinHandle<Result<RunReport, RunError>>>,
    rank: usize,
    step: usize,
    warnings: Vec<String>,
    /// Whether the labels of a batch were compared with its tokens.
    looked_at_labels: bool,
    /// Why no more steps are taken.
    ended: Option<String>,
}

/// An evaluation that is under way.
pub struct Evaluating {
    sums: Sums,
    examples: usize,
    began: Instant,
}

impl Trainer {
    /// Loads a plan directory, and initializes or resumes its training.
    ///
    /// # Errors
    /// What is wrong with the plan or the options, or what keeps the ranks from starting.
    pub fn open(
        path: &Path,
        options: TrainerOptions,
        tick: &mut dyn FnMut(),
    ) -> Result<Trainer, RunError> {
        let dir = Arc::new(PlanDir::load(path)?);
        if dir.plan.eval.is_some() {
            let reason = "the plan evaluates only; compile the model with a loss to train it";
            return Err(RunError::Plan { path: path.into(), reason: reason.into() });
        }
        let launch = Launch::from_environment()?;
        memory::check(&[&dir.plan], launch.ranks_here(dir.plan.world_size))?;
        let run_options = RunOptions {
            steps: usize::MAX,
            weights: options.weights,
            checkpoint: options.checkpoint,
            metrics: options.metrics,
            threads: options.threads,
            hyper: options.hyper,
            max_skipped: options.max_skipped,
            ..RunOptions::default()
        };
        run::check_options(&dir.plan, &run_options)?;
        let evaluates = !options.without_evaluation && path.join(layout::EVALUATION).is_dir();
        let validation = match evaluates {
            true => Some(Validation::open(&dir)?),
            false => None,
        };
        let evaluation = validation.as_ref().map(|v| v.dir.plan.clone());
        let alone = dir.plan.target.device == DeviceType::Cuda || launch.world_size > 1;
        let (orderer, orders) = orders::lines(if alone { 1 } else { dir.plan.world_size });
        let session = {
            let dir = Arc::clone(&dir);
            let validation = validation.map(|v| (v, None));
            std::thread::spawn(move || {
                run::train(&dir, &launch, &run_options, validation, |resumed| {
                    let from = resumed.map_or(Position::default(), |c| c.index.position);
                    Steps::Ordered { orders, from }
                })
            })
        };
        let mut trainer = Trainer {
            dir,
            evaluation,
            orders: Some(orderer),
            session: Some(session),
            rank: 0,
            step: 0,
            warnings: vec![],
            looked_at_labels: false,
            ended: None,
        };
        let Begun { rank, step, warnings } = trainer.ask(Order::Begin, tick)?;
        (trainer.rank, trainer.step) = (rank, step);
        trainer.warnings = warnings;
        Ok(trainer)
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.dir.plan
    }

    /// The plan directory.
    pub fn path(&self) -> &Path {
        &self.dir.path
    }

    /// The rank that replies: 0, unless every rank is a process.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Steps that were run, those of a resumed checkpoint included.
    pub fn steps(&self) -> usize {
        self.step
    }

    /// Returns the warnings since the last call.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Runs one step on the examples of a batch, in order: those of all ranks, or of this one if every rank is a
    /// process. A checkpoint is begun if one is due.
    ///
    /// # Errors
    /// If the batch does not fit the plan, which changes nothing; or if the run has failed.
    pub fn step(&mut self, batch: &Batch, tick: &mut dyn FnMut()) -> Result<StepMetrics, RunError> {
        let data = Data::given(batch, &self.dir.plan, self.ranks_here()?)?;
        data.is_one_step()?;
        if !self.looked_at_labels {
            self.looked_at_labels = true;
            self.warnings.extend(data.misplaced_labels());
            self.warnings.extend(data.ignored_labels());
        }
        let data = Arc::new(data);
        let stepped = self.ask(|reply| Order::Step(data, reply), tick)?;
        let Stepped { metrics, ended, warnings } = stepped;
        self.step += 1;
        self.warnings.extend(warnings);
        match (ended, metrics) {
            (Some(why), _) => Err(self.fail(why)),
            (None, metrics) => Ok(metrics.expect("invariant: a step has metrics")),
        }
    }

    /// Begins to evaluate the current parameters.
    ///
    /// # Errors
    /// If the trainer was opened without the evaluation, or has ended.
    pub fn begin_evaluation(&mut self) -> Result<Evaluating, RunError> {
        self.ranks_here()?;
        let plan = self.evaluation_plan()?;
        let sums = Sums::none(validation::spec(plan));
        Ok(Evaluating { sums, examples: 0, began: Instant::now() })
    }

    /// Evaluates the examples of another batch, of any number. The last batch of a rank is filled with examples that do
    /// not count, so that a batch may be of any size; batches that fill those of the plan are the fastest.
    ///
    /// # Errors
    /// If the batch does not fit the plan, or a rank has failed.
    pub fn evaluate(
        &mut self,
        evaluating: &mut Evaluating,
        batch: &Batch,
        tick: &mut dyn FnMut(),
    ) -> Result<(), RunError> {
        let (ranks, plan) = (self.ranks_here()?, self.evaluation_plan()?);
        let data = Data::given(batch, plan, ranks)?;
        eval::check(&data, Path::new("batch"), plan, validation::spec(plan))?;
        evaluating.examples += data.len();
        let (examples, sums) = (Arc::new(Examples(Feed::Examples(data))), evaluating.sums.clone());
        evaluating.sums = self.ask(|reply| Order::Evaluate(examples, sums, reply), tick)?;
        Ok(())
    }

    /// The loss and the metrics over all batches of an evaluation.
    ///
    /// # Errors
    /// If there was no example.
    pub fn evaluated(&self, evaluating: &Evaluating) -> Result<Evaluated, RunError> {
        if evaluating.examples == 0 {
            return Err(RunError::data(Path::new("batches"), "there are no examples"));
        }
        let spec = validation::spec(self.evaluation_plan()?);
        let seconds = evaluating.began.elapsed().as_secs_f64();
        Ok(Evaluated::of(spec, &evaluating.sums, true, evaluating.examples, seconds))
    }

    /// The parameters in the plan's order, in the types in which [`Trainer::save`] writes them; only on rank 0. With
    /// `average` their moving average where there is one.
    ///
    /// # Errors
    /// If a rank has failed, or the plan keeps no average.
    pub fn state(
        &mut self,
        average: bool,
        tick: &mut dyn FnMut(),
    ) -> Result<Vec<(String, Stored)>, RunError> {
        let mut all = self.tensors(average, tick)?;
        let plan = &self.dir.plan;
        let stored = |param: &frit_ir::plan::ParamSpec| {
            let bytes = all.remove(&param.name)?;
            Some((param.name.clone(), (save::stored_type(param), bytes)))
        };
        Ok(plan.params.iter().filter_map(stored).collect())
    }

    /// Writes the parameters as `frit run --save` does, on rank 0.
    ///
    /// # Errors
    /// As [`Trainer::state`], or if the file system refuses.
    pub fn save(
        &mut self,
        path: &Path,
        average: bool,
        tick: &mut dyn FnMut(),
    ) -> Result<(), RunError> {
        let all = self.tensors(average, tick)?;
        match self.rank {
            0 => save::write(path, &self.dir.plan, &all, &AllLeftOut::new()),
            _ => Ok(()),
        }
    }

    fn tensors(&mut self, average: bool, tick: &mut dyn FnMut()) -> Result<Tensors, RunError> {
        if average && !save::has_ema(&self.dir.plan) {
            return Err(RunError::NoEma);
        }
        let version = if average { Version::Average } else { Version::Trained };
        self.ask(|reply| Order::State(version, reply), tick)
    }

    /// Replaces all parameters by tensors of their names, or of names that differ by one prefix; the optimizer keeps its state.
    ///
    /// # Errors
    /// If they do not fit the plan, with all that are missing, unknown or of another type; or a rank has failed.
    pub fn load(&mut self, state: &Batch, tick: &mut dyn FnMut()) -> Result<(), RunError> {
        let Replaced { tensors, notes } = starting::given(state, &self.dir.plan)?;
        self.warnings.extend(notes);
        let params = Arc::new(tensors);
        self.ask(|reply| Order::Load(params, reply), tick)
    }

    /// Saves a checkpoint of the current state, and waits until it is on disk.
    ///
    /// # Errors
    /// If it could not be written, or a rank has failed.
    pub fn checkpoint(&mut self, tick: &mut dyn FnMut()) -> Result<(), RunError> {
        let (lost, warnings) = self.ask(Order::Checkpoint, tick)?;
        self.warnings.extend(warnings);
        lost.map_or(Ok(()), |reason| Err(RunError::Lost { reason }))
    }

    /// Ends the session; with checkpoints, the state is saved first. Nothing happens if it has ended.
    ///
    /// # Errors
    /// What failed, or could not be saved.
    pub fn close(&mut self, tick: &mut dyn FnMut()) -> Result<(), RunError> {
        self.orders = None;
        self.ended.get_or_insert_with(|| "it was closed".into());
        let Some(session) = self.session.take() else { return Ok(()) };
        while !session.is_finished() {
            std::thread::park_timeout(Duration::from_millis(2));
            tick();
        }
        joined(session).map(|_| ())
    }

    /// Ranks of this process.
    ///
    /// # Errors
    /// If the trainer has ended.
    fn ranks_here(&self) -> Result<usize, RunError> {
        match (&self.ended, &self.orders) {
            (None, Some(orders)) => Ok(orders.ranks()),
            (reason, _) => {
                let reason = reason.clone().unwrap_or_else(|| "it was closed".into());
                Err(RunError::Ended { reason })
            }
        }
    }

    fn evaluation_plan(&self) -> Result<&Plan, RunError> {
        self.evaluation.as_ref().ok_or_else(|| RunError::Plan {
            path: self.dir.path.clone(),
            reason: "the trainer was opened without the plan's evaluation".into(),
        })
    }

    /// Takes no more steps, for the run has failed; its state can still be read.
    fn fail(&mut self, why: Divergence) -> RunError {
        self.ended = Some(why.to_string());
        RunError::Diverged(why)
    }

    /// Gives an order and waits for the reply. If a rank has failed, its error.
    fn ask<T>(
        &mut self,
        order: impl FnOnce(Reply<T>) -> Order,
        tick: &mut dyn FnMut(),
    ) -> Result<T, RunError> {
        let Some(orders) = &self.orders else {
            let reason = self.ended.clone().unwrap_or_default();
            return Err(RunError::Ended { reason });
        };
        let (sender, receiver): (Sender<T>, _) = channel();
        orders.give(order(Reply::to(sender)));
        loop {
            match receiver.recv_timeout(TICK) {
                Ok(reply) => return Ok(reply),
                Err(RecvTimeoutError::Timeout) => tick(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.orders = None;
        let error = match self.session.take().map(joined) {
            Some(Err(error)) => error,
            _ => RunError::Internal { reason: "a session ended without being told to".into() },
        };
        self.ended = Some(error.to_string());
        Err(error)
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        // Whoever wants to know calls `close`.
        let _ = self.close(&mut || ());
    }
}

/// The result of a session, of which a panic is an error.
fn joined(session: JoinHandle<Result<RunReport, RunError>>) -> Result<RunReport, RunError> {
    session.join().unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(RunError::Internal { reason: text.unwrap_or("a panic").into() })
    })
}
