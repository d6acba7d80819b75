//! Runs a plan: checks the options, trains, and writes the requested files.

use crate::RunError;
use crate::checkpoint::lock::{self, Run};
use crate::checkpoint::{Checkpoint, CheckpointOptions};
use crate::divergence::{Divergence, MAX_SKIPPED};
use crate::eval::in_words;
use crate::gradients;
use crate::hyper;
use crate::interrupt::Stop;
use crate::memory;
use crate::metrics;
use crate::numerics;
use crate::outputs;
use crate::plan_dir::PlanDir;
use crate::save;
use crate::session::{Finished, Session};
use crate::starting;
use crate::trace;
use crate::train::{Outcome, Steps, Training};
use crate::usage;
use crate::validation::{Examples, Validation, ValidationOptions};
use frit_comm::identity::Identity;
use frit_comm::launch::Launch;
use frit_data::{Data, Source};
use frit_ir::counted;
use frit_ir::plan::{PhaseName, Plan};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Options of a run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Steps, counted from the start of training.
    pub steps: usize,
    /// The data.
    pub data: Source,
    /// Start from the parameters of these files instead of the plan's; when resuming a checkpoint, only those that it
    /// omits.
    pub weights: Vec<PathBuf>,
    /// Omit parameters that no step changes from checkpoints and saved files.
    pub trained_only: bool,
    /// Append one JSON object per step here.
    pub metrics: Option<PathBuf>,
    /// Write event files of TensorBoard into this folder.
    pub tensorboard: Option<PathBuf>,
    /// Write the first step's gradients here.
    pub dump_grads: Option<PathBuf>,
    /// Write the parameters after the last step here.
    pub save: Option<PathBuf>,
    /// Write the moving average of the parameters after the last step here.
    pub save_ema: Option<PathBuf>,
    /// Write checkpoints, and resume from them.
    pub checkpoint: Option<CheckpointOptions>,
    /// Evaluate other examples between steps; by default those of the plan's configuration.
    pub validation: Option<ValidationOptions>,
    /// Stop after this many consecutive validations without improvement.
    pub patience: Option<usize>,
    /// A request to stop before the last step.
    pub stop: Option<Stop>,
    /// Write the times of the last step's tasks here.
    pub trace: Option<PathBuf>,
    /// Write the device resources that the run used here.
    pub usage: Option<PathBuf>,
    /// Execute every body with the IR interpreter.
    pub interpret: bool,
    /// Threads per rank; by default the cores divided by the ranks.
    pub threads: Option<usize>,
    /// Seconds in which the first start on a GPU measures candidates of kernels; by default
    /// [`TUNING_SECONDS`](crate::device::cuda::TUNING_SECONDS).
    pub tuning_seconds: Option<u64>,
    /// Hyper-parameters to change.
    pub hyper: Vec<(String, f64)>,
    /// Stop at the first task that produces a non-finite value.
    pub check_numerics: bool,
    /// Write histograms of exponents by scope here.
    pub numerics: Option<PathBuf>,
    /// Consecutive skipped steps after which the run has failed; by default [`MAX_SKIPPED`].
    pub max_skipped: Option<usize>,
    /// Show progress and warnings on standard error.
    pub progress: bool,
}

/// The result of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunReport {
    /// Steps of the checkpoint from which it resumed; 0 without one.
    pub start: usize,
    /// The rank that reports; 0 unless every rank is a process.
    pub rank: usize,
    /// The signal that ended it before the last step.
    pub interrupted: Option<i32>,
    /// Why it has failed, although all steps could be run.
    pub stopped: Option<Divergence>,
    /// Steps whose update was skipped because of non-finite gradients.
    pub skipped: usize,
    /// Warnings.
    pub warnings: Vec<String>,
    /// Why it stopped early, if it did.
    pub early: Option<String>,
    /// Mean loss of every step, from `start` on.
    pub losses: Vec<f64>,
    /// Validation losses, each with the number of steps before it.
    pub validation: Vec<(usize, f64)>,
    /// The metrics of the last validation, by name.
    pub validation_metrics: BTreeMap<String, f64>,
    /// Gradient norm of every step.
    pub grad_norms: Vec<f64>,
    /// Seconds of every step.
    pub seconds: Vec<f64>,
    /// Number of collectives, summed over ranks.
    pub collective_calls: u64,
    /// Bytes that ranks read from others.
    pub collective_bytes: u64,
}

impl RunReport {
    /// A summary in one line; and, in another, why it ended early, if it did.
    pub fn summary(&self) -> String {
        let ended = self.early_end().map(|why| format!("\n{why}"));
        self.training() + &ended.unwrap_or_default()
    }

    /// Why and when it stopped early, as text.
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
    let launch = Launch::from_environment()?;
    memory::check(&[&dir.plan], launch.ranks_here(dir.plan.world_size))?;
    let data = Data::load(&options.data, &dir.plan)?;
    check_options(&dir.plan, options)?;
    let named = dir.plan.validation.as_ref();
    let named = named.map(|file| Source::new(vec![file.into()], options.data.tokens));
    let given = options.validation.as_ref().map(|v| v.data.clone());
    let validation = match given.filter(|data| !data.files.is_empty()).or(named) {
        Some(data) => {
            let validation = Validation::open(&dir)?;
            let examples = validation.examples(&data)?;
            Some((validation, Some(examples)))
        }
        None if options.validation.is_some() => return Err(RunError::NoValidation),
        None => None,
    };
    check_patience(options, validation.is_some())?;
    train(&dir, &launch, options, validation, |resumed| Steps::Files {
        data: &data,
        first: resumed.map_or(0, |c| data.step_at(c.index.position)),
    })
}

/// Checks options against a plan.
///
/// # Errors
/// What the plan does not have.
pub(crate) fn check_options(plan: &Plan, options: &RunOptions) -> Result<(), RunError> {
    if plan.phase(PhaseName::Update).is_none() {
        return Err(RunError::OnlyEvaluates);
    }
    hyper::check(plan, &options.hyper)?;
    if options.save_ema.is_some() && !save::has_ema(plan) {
        return Err(RunError::NoEma);
    }
    Ok(())
}

/// Trains with checked options; the steps depend on the checkpoint that is resumed. The examples of a validation are
/// those between steps.
///
/// # Errors
/// As [`run`].
pub(crate) fn train<'a>(
    dir: &PlanDir,
    launch: &Launch,
    options: &RunOptions,
    validation: Option<(Validation, Option<Examples>)>,
    steps: impl FnOnce(Option<&Checkpoint>) -> Steps<'a>,
) -> Result<RunReport, RunError> {
    let beside = validation.as_ref().map(|(v, _)| &v.dir.plan);
    let plans: Vec<&Plan> = std::iter::once(&dir.plan).chain(beside).collect();
    memory::check(&plans, launch.ranks_here(dir.plan.world_size))?;
    let (validation, validated) = validation.unzip();
    let run = Run::new();
    // An error of rank 0 alone is returned when the other ranks can be told.
    let taken = (launch.rank == 0).then(|| take_outputs(dir, options, run)).transpose();
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
    let replaced = starting::instead(&options.weights, dir, resumed.as_ref())?;
    let mut notes = notes(options, resumed.as_ref(), lock.as_ref());
    notes.extend(replaced.notes);
    let steps = steps(resumed.as_ref());
    if let Steps::Files { data, .. } = &steps {
        notes.extend(data.misplaced_labels());
        if let Some(what) = data.ignored_labels() {
            return Err(RunError::NothingCounts(what));
        }
    }
    let validated = validated.flatten();
    let of_validation = validated.as_ref().and_then(|examples| examples.0.ignored_labels());
    notes.extend(of_validation.map(|note| format!("validation: {note}")));
    let hyper = hyper::effective(&dir.plan, &options.hyper, resumed.as_ref());
    hyper::check_schedule(&dir.plan, &hyper)?;
    notes.extend(hyper::zero_rate(&dir.plan, &hyper));
    let training = Training {
        replaced: replaced.tensors,
        hyper,
        steps,
        start: resumed.as_ref().map_or(0, |c| c.index.step),
        notes,
        resumed,
        refused: refusal.is_some(),
        run,
        before: lock.as_ref().map_or(vec![], |lock| lock.before.clone()),
        validation,
        validated,
        dir,
        options,
    };
    let session = Session {
        dir,
        beside: training.validation.as_ref().map(|v| &v.dir),
        identity: identity(&training),
        threads: options.threads,
        interpret: options.interpret,
        tuning_seconds: options.tuning_seconds,
    };
    let finished = session.run(launch, &training);
    // The other ranks have been told that this one cannot continue.
    let outcome = merged(refusal.map_or(finished, Err)?);
    if outcome.rank == 0 {
        write_outputs(&dir.plan, options, &outcome)?;
    }
    Ok(outcome.report)
}

/// Everything that must be equal on all ranks: the plan, the changed hyper-parameters, and what decides about the steps
/// and what ranks do together between them.
fn identity(training: &Training<'_>) -> Identity {
    let Training { dir, options, start, validated, .. } = training;
    let mut identity = Identity::of_plan(&dir.hash);
    for (name, value) in &training.hyper {
        identity.add(name, value);
    }
    let remedy =
        "--checkpoint must be the same directory on all ranks, and --resume given to all or none";
    identity.add_with("the step at which it begins", start, remedy);
    // Those of a trainer are as many as its caller gives.
    if let Steps::Files { data, .. } = &training.steps {
        identity.add("--steps", options.steps);
        let remedy = "--data must be the same files on all ranks";
        identity.add_with("the number of examples of --data", data.len(), remedy);
    }
    if let Some(Examples(examples)) = validated {
        let remedy = "--validation must be the same files on all ranks";
        identity.add_with("the number of batches of --validation", examples.batches(), remedy);
    }
    let checkpoint = options.checkpoint.as_ref();
    identity.add_if("--checkpoint-every", checkpoint.and_then(|c| c.every));
    identity.add_if("--validate-every", options.validation.as_ref().and_then(|v| v.every));
    identity.add_if("--patience", options.patience);
    identity.add("--max-skipped", options.max_skipped.unwrap_or(MAX_SKIPPED));
    for (option, is_given) in [
        ("--weights", !options.weights.is_empty()),
        ("--checkpoint", checkpoint.is_some()),
        ("--dump-grads", options.dump_grads.is_some()),
    ] {
        identity.add_option(option, is_given);
    }
    // Otherwise rank 0 has all that it saves, and what others are told to save does not matter.
    if save::is_collective(&dir.plan, options.trained_only) {
        identity.add_option("--save", options.save.is_some());
        identity.add_option("--save-ema", options.save_ema.is_some());
    }
    // It gathers what is left out, and decides what every rank writes of a checkpoint.
    if checkpoint.is_some() || dir.plan.groups.iter().any(|g| g.sharded) {
        identity.add_option("--trained-only", options.trained_only);
    }
    identity
}

/// The outcome of the first rank of this process, with the counts of all of them.
fn merged(finished: Finished<Outcome>) -> Outcome {
    let mut outcomes = finished.outcomes.into_iter();
    let mut first = outcomes.next().expect("invariant: a plan has a rank");
    for mut other in outcomes {
        first.spans.append(&mut other.spans);
        numerics::merge(&mut first.counted, other.counted);
        first.ranks += other.ranks;
    }
    (first.report.collective_calls, first.report.collective_bytes) = finished.traffic;
    first
}

/// Checks everything that rank 0 will write, before anything is computed.
fn take_outputs(
    dir: &PlanDir,
    options: &RunOptions,
    run: Run,
) -> Result<Option<lock::Lock>, RunError> {
    let outputs = [
        ("--metrics", &options.metrics),
        ("--dump-grads", &options.dump_grads),
        ("--save", &options.save),
        ("--save-ema", &options.save_ema),
        ("--trace", &options.trace),
        ("--usage", &options.usage),
        ("--numerics", &options.numerics),
    ];
    let data = if options.data.files.is_empty() { vec![] } else { options.data.paths()? };
    let validation = options.validation.as_ref().filter(|v| !v.data.files.is_empty());
    let validation = validation.map(|v| v.data.paths()).transpose()?;
    let named = data.iter().map(|path| ("--data", path.as_path()));
    let validated = validation.iter().flatten().map(|path| ("--validation", path.as_path()));
    let weights = options.weights.iter().map(|path| ("--weights", path.as_path()));
    let of_plan = outputs::files_of(&dir.path);
    let of_plan = of_plan.iter().map(|path| ("the plan", path.as_path()));
    let read: Vec<_> = named.chain(validated).chain(weights).chain(of_plan).collect();
    outputs::check(&outputs.map(|(option, path)| (option, path.as_deref())), &read)?;
    options.metrics.as_deref().map_or(Ok(()), metrics::check)?;
    options.checkpoint.as_ref().map(|c| lock::take(c, run)).transpose()
}

/// That a validation may find the best model where no checkpoint keeps it.
fn unsaved_best(options: &RunOptions) -> Option<String> {
    let validated = options.validation.as_ref()?.every?;
    let saved = options.checkpoint.as_ref()?.every;
    if saved.is_some_and(|saved| validated.is_multiple_of(saved)) {
        return None;
    }
    let saved = saved.map_or("only the last step".into(), |n| format!("every {n} steps"));
    Some(format!(
        "the best model may not be kept: validations are every {validated} steps, checkpoints {saved}; give --checkpoint-every {validated}"
    ))
}

/// Notes for the user before the first step.
fn notes(
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
    lock: Option<&lock::Lock>,
) -> Vec<String> {
    let mut notes: Vec<String> = lock.and_then(|l| l.warning.clone()).into_iter().collect();
    notes.extend(unsaved_best(options));
    let resumes = options.checkpoint.as_ref().filter(|c| c.resume);
    if let Some((options, checkpoint)) = resumes.zip(resumed)
        && !options.names_latest()
    {
        let (dir, path) = (options.dir.display(), checkpoint.path.display());
        notes.push(format!(
            "{dir} lacks the file `latest`; resuming from its newest complete checkpoint, {path}"
        ));
    }
    if let (Some(weights), Some(checkpoint)) = (options.weights.first(), resumed)
        && checkpoint.index.left_out.is_empty()
    {
        let (weights, path) = (weights.display(), checkpoint.path.display());
        notes.push(format!("{weights} is not read: the run resumes from the checkpoint {path}"));
    }
    if let Some(path) = options.metrics.as_ref().filter(|p| metrics::holds_lines(p)) {
        let path = path.display();
        if resumes.is_none() {
            notes.push(format!(
                "{path} has lines of an earlier run; those of this run follow, with another `run`"
            ));
        } else if resumed.is_none() {
            notes.push(format!(
                "there is no checkpoint to resume from; the lines of {path} are removed"
            ));
        }
    }
    notes
}

/// Writes the requested files at the end, as many as possible. A run that failed with a useless state saves none of it.
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
