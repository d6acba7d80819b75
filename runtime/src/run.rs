//! The step loop of a rank on its device; rank 0 reports. On the CPU every rank is a thread.

use crate::RunError;
use crate::comm::Communicator;
use crate::comm::local::LocalComm;
use crate::data::Data;
use crate::device::Device;
use crate::device::cpu::Cpu;
use crate::gradients::{self, Gradients, Parts};
use crate::metrics::{StepMetrics, Writer};
use crate::plan_dir::PlanDir;
use crate::save::{self, Tensors};
use frit_ir::ops::random::RNG;
use frit_ir::plan::{ParamHome, Plan};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
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
    /// Execute every body by the IR interpreter.
    pub interpret: bool,
    /// Threads per rank; by default the cores divided by the ranks.
    pub threads: Option<usize>,
    /// Hyper-parameters to change.
    pub hyper: Vec<(String, f64)>,
    /// Show a progress bar if standard error is a terminal.
    pub progress: bool,
}

/// What a run did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunReport {
    /// Mean loss of every step.
    pub losses: Vec<f64>,
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
    let data = Data::load(&options.data, &dir.plan)?;
    check_hyper(&dir.plan, &options.hyper)?;
    let session = Session { dir: &dir, data: &data, options };
    let outcome = session.on_threads()?;
    if let Some(path) = &options.dump_grads {
        gradients::write(path, &dir.plan, &outcome.gradients)?;
    }
    if let Some(path) = &options.save {
        save::write(path, &dir.plan, &outcome.saved)?;
    }
    Ok(outcome.report)
}

fn is_abort(error: &RunError) -> bool {
    match error {
        RunError::Aborted { .. } => true,
        RunError::Task { reason, .. } => reason.contains("another rank failed"),
        _ => false,
    }
}

fn check_hyper(plan: &Plan, hyper: &[(String, f64)]) -> Result<(), RunError> {
    for (name, _) in hyper {
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
    report: RunReport,
    gradients: Gradients,
    saved: Tensors,
}

struct Session<'a> {
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
        let rank = |comm: LocalComm| {
            let (rank, end) = (comm.rank(), comm.clone());
            let result = Cpu::new(self.dir, comm, threads, self.options.interpret)
                .and_then(|mut device| self.train(&mut device, rank));
            if result.is_err() {
                end.abort();
            }
            result
        };
        let results: Vec<Result<Outcome, RunError>> = std::thread::scope(|scope| {
            let handles: Vec<_> = comms.into_iter().map(|c| scope.spawn(|| rank(c))).collect();
            let join = |h: std::thread::ScopedJoinHandle<'_, Result<Outcome, RunError>>| {
                h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            handles.into_iter().map(join).collect()
        });
        // A rank that failed by itself says more than those it stopped.
        let (aborted, mut others): (Vec<_>, Vec<_>) =
            results.into_iter().partition(|r| matches!(r, Err(e) if is_abort(e)));
        others.extend(aborted);
        let mut outcome = Outcome::default();
        for (i, result) in others.into_iter().enumerate() {
            let result = result?;
            if i == 0 {
                outcome = result;
            }
        }
        (outcome.report.collective_calls, outcome.report.collective_bytes) = watch.traffic();
        Ok(outcome)
    }

    /// One rank from start to end.
    fn train<D: Device>(&self, device: &mut D, rank: usize) -> Result<Outcome, RunError> {
        let metrics = self.options.metrics.as_deref().filter(|_| rank == 0);
        let mut reporter = Reporter {
            plan: &self.dir.plan,
            writer: Writer::open(metrics)?,
            bar: self.progress(rank),
            clock: Instant::now(),
            parts: None,
            outcome: Outcome::default(),
        };
        self.initialize(device, rank)?;
        reporter.clock = Instant::now();
        for step in 0..self.options.steps {
            let parts = self.step(device, step, rank)?;
            device.note_metrics()?;
            reporter.parts = reporter.parts.or(parts);
            if step >= D::METRICS_DELAY {
                reporter.report(step - D::METRICS_DELAY, &device.take_metrics()?)?;
            }
        }
        for step in self.options.steps.saturating_sub(D::METRICS_DELAY)..self.options.steps {
            reporter.report(step, &device.take_metrics()?)?;
        }
        reporter.bar.finish_and_clear();
        let mut outcome = reporter.outcome;
        if self.options.save.is_some() {
            outcome.saved = save::collect(&self.dir.plan, device, rank)?;
        }
        Ok(outcome)
    }

    fn progress(&self, rank: usize) -> indicatif::ProgressBar {
        let shown = self.options.progress && rank == 0 && std::io::stderr().is_terminal();
        if !shown {
            return indicatif::ProgressBar::hidden();
        }
        let style = indicatif::ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {eta}");
        let bar = indicatif::ProgressBar::new(self.options.steps as u64);
        if let Ok(style) = style { bar.with_style(style) } else { bar }
    }

    /// First values of everything persistent; the arenas are zero.
    fn initialize(&self, device: &mut impl Device, rank: usize) -> Result<(), RunError> {
        let plan = &self.dir.plan;
        for param in &plan.params {
            let ParamHome::Buffer(buffer) = param.home else { continue };
            if let Some(bytes) = self.dir.weight(&param.name) {
                device.write(buffer, 0, bytes)?;
            }
        }
        for group in &plan.groups {
            for segment in &group.segments {
                let Some((from, to, len)) = group.owned(segment, rank) else { continue };
                if let Some(bytes) = self.dir.weight(&plan.params[segment.param].name) {
                    device.write(group.master, to * 4, &bytes[from * 4..(from + len) * 4])?;
                }
            }
            for state in group.states.iter().filter(|s| s.init != 0.0) {
                let value = (state.init as f32).to_le_bytes();
                device.write(state.buffer, 0, &value.repeat(group.shard_numel))?;
            }
        }
        for constant in &plan.constants {
            if let Some(bytes) = self.dir.weight(&constant.name) {
                device.write(constant.buffer, 0, bytes)?;
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
            let changed = self.options.hyper.iter().rfind(|(name, _)| *name == hyper.name);
            let value = changed.map_or(hyper.value, |(_, value)| *value) as f32;
            device.write(hyper.buffer, 0, &value.to_le_bytes())?;
        }
        Ok(())
    }

    /// One step; the gradients if they are asked for.
    fn step(
        &self,
        device: &mut impl Device,
        step: usize,
        rank: usize,
    ) -> Result<Option<Parts>, RunError> {
        let plan = &self.dir.plan;
        let (micro, update) = (&plan.phases[0], &plan.phases[1]);
        let dump = step == 0 && self.options.dump_grads.is_some();
        for k in 0..plan.accumulation {
            self.data.feed(step, k, rank, |buffer, bytes| device.feed(buffer, bytes))?;
            let last = k + 1 == plan.accumulation;
            let end = if last && !dump { update.end } else { micro.end };
            device.run(micro.begin..end)?;
        }
        if !dump {
            return Ok(None);
        }
        let parts = Parts::read(plan, device)?;
        device.run(update.begin..update.end)?;
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
