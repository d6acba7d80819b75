//! The step loop: every rank a thread, each with its device; rank 0 reports.

use crate::RunError;
use crate::comm::Communicator;
use crate::comm::local::LocalComm;
use crate::data::Data;
use crate::device::Device;
use crate::device::cpu::Cpu;
use crate::metrics::{StepMetrics, Writer};
use crate::plan_dir::PlanDir;
use crate::save::{self, Tensors};
use frit_ir::DType;
use frit_ir::ops::random::RNG;
use frit_ir::plan::{ParamHome, Plan};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
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

/// Unscaled, unclipped, averaged gradients by parameter name, f32.
type Gradients = BTreeMap<String, Vec<f32>>;

/// Runs a plan.
///
/// # Errors
/// What is wrong with the plan, the data or the options, or the task that failed.
pub fn run(plan_dir: &Path, options: &RunOptions) -> Result<RunReport, RunError> {
    let dir = PlanDir::load(plan_dir)?;
    let data = Data::load(&options.data, &dir.plan)?;
    check_hyper(&dir.plan, &options.hyper)?;
    let writer = Mutex::new(Writer::open(options.metrics.as_deref())?);
    let gradients = Mutex::new(Gradients::new());
    let ranks = dir.plan.world_size;
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = options.threads.unwrap_or((cores / ranks).max(1));
    let comms = LocalComm::world(ranks);
    let watch = comms[0].clone();
    let saved = Mutex::new(Tensors::new());
    let session = Session { dir: &dir, data: &data, options, writer, gradients, saved, threads };
    let results: Vec<Result<RunReport, RunError>> = std::thread::scope(|scope| {
        let handles: Vec<_> =
            comms.into_iter().map(|comm| scope.spawn(|| session.rank(comm))).collect();
        let join = |h: std::thread::ScopedJoinHandle<'_, Result<RunReport, RunError>>| {
            h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        handles.into_iter().map(join).collect()
    });
    let mut report = RunReport::default();
    // A rank that failed by itself says more than those it stopped.
    let (aborted, mut others): (Vec<_>, Vec<_>) =
        results.into_iter().partition(|r| matches!(r, Err(e) if is_abort(e)));
    others.extend(aborted);
    for (i, result) in others.into_iter().enumerate() {
        let result = result?;
        if i == 0 {
            report = result;
        }
    }
    (report.collective_calls, report.collective_bytes) = watch.traffic();
    if let Some(path) = &options.dump_grads {
        let gradients = session.gradients.into_inner().unwrap_or_default();
        write_gradients(path, &dir.plan, &gradients)?;
    }
    if let Some(path) = &options.save {
        save::write(path, &dir.plan, &session.saved.into_inner().unwrap_or_default())?;
    }
    Ok(report)
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

struct Session<'a> {
    dir: &'a PlanDir,
    data: &'a Data,
    options: &'a RunOptions,
    writer: Mutex<Writer>,
    gradients: Mutex<Gradients>,
    saved: Mutex<Tensors>,
    threads: usize,
}

impl Session<'_> {
    /// One rank from start to end.
    fn rank(&self, comm: LocalComm) -> Result<RunReport, RunError> {
        let rank = comm.rank();
        let end = comm.clone();
        let mut device = match Cpu::new(self.dir, comm, self.threads, self.options.interpret) {
            Ok(device) => device,
            Err(e) => {
                end.abort();
                return Err(e);
            }
        };
        self.initialize(&mut device, rank);
        let bar = self.progress(rank);
        let mut report = RunReport::default();
        for step in 0..self.options.steps {
            let started = Instant::now();
            let metrics = match self.step(&mut device, step, rank) {
                Ok(metrics) => metrics,
                Err(e) => {
                    end.abort();
                    return Err(e);
                }
            };
            let seconds = started.elapsed().as_secs_f64();
            report.losses.push(metrics["loss"]);
            report.grad_norms.push(metrics["grad_norm"]);
            report.seconds.push(seconds);
            if rank == 0 {
                let line = StepMetrics {
                    step,
                    loss: metrics["loss"],
                    grad_norm: metrics["grad_norm"],
                    lr: metrics["lr"],
                    loss_scale: metrics["loss_scale"],
                    skipped: metrics["found_inf"] != 0.0,
                    tokens_or_examples_per_s: metrics["tokens"] / seconds,
                };
                self.writer.lock().unwrap_or_else(|e| e.into_inner()).write(&line)?;
                bar.set_message(format!("loss {:.4}", line.loss));
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        if self.options.save.is_some() {
            let mut saved = self.saved.lock().unwrap_or_else(|e| e.into_inner());
            save::collect(&self.dir.plan, &device, rank, &mut saved);
        }
        Ok(report)
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
    fn initialize(&self, device: &mut impl Device, rank: usize) {
        let plan = &self.dir.plan;
        for param in &plan.params {
            let ParamHome::Buffer(buffer) = param.home else { continue };
            if let Some(bytes) = self.dir.weight(&param.name) {
                device.write(buffer, 0, bytes);
            }
        }
        for group in &plan.groups {
            for segment in &group.segments {
                let Some((from, to, len)) = group.owned(segment, rank) else { continue };
                if let Some(bytes) = self.dir.weight(&plan.params[segment.param].name) {
                    device.write(group.master, to * 4, &bytes[from * 4..(from + len) * 4]);
                }
            }
            for state in group.states.iter().filter(|s| s.init != 0.0) {
                let value = (state.init as f32).to_le_bytes();
                device.write(state.buffer, 0, &value.repeat(group.shard_numel));
            }
        }
        for constant in &plan.constants {
            if let Some(bytes) = self.dir.weight(&constant.name) {
                device.write(constant.buffer, 0, bytes);
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
            device.write(state.buffer, 0, &value.to_bytes());
        }
        for hyper in &plan.hyper {
            let changed = self.options.hyper.iter().rfind(|(name, _)| *name == hyper.name);
            let value = changed.map_or(hyper.value, |(_, value)| *value) as f32;
            device.write(hyper.buffer, 0, &value.to_le_bytes());
        }
    }

    fn step(
        &self,
        device: &mut impl Device,
        step: usize,
        rank: usize,
    ) -> Result<BTreeMap<&str, f64>, RunError> {
        let plan = &self.dir.plan;
        let (micro, update) = (&plan.phases[0], &plan.phases[1]);
        for k in 0..plan.accumulation {
            self.data.feed(step, k, rank, |buffer, bytes| device.write(buffer, 0, bytes));
            device.run(micro.begin, micro.end)?;
        }
        let dump = step == 0 && self.options.dump_grads.is_some();
        let gradients = if dump { self.read_gradients(device) } else { vec![] };
        device.run(update.begin, update.end)?;
        let mut metrics = BTreeMap::new();
        for metric in &plan.metrics {
            let place = &metric.place;
            let bytes = device.read(place.buffer, place.offset, place.ty.bytes());
            let value = bytes.first_chunk::<4>().map_or(f32::NAN, |b| f32::from_le_bytes(*b));
            metrics.insert(metric.name.as_str(), f64::from(value));
        }
        if dump {
            self.collect_gradients(&gradients, &metrics, rank);
        }
        Ok(metrics)
    }

    /// This rank's part of every group's gradient.
    fn read_gradients(&self, device: &impl Device) -> Vec<Vec<f32>> {
        let part = |place: &frit_ir::plan::Place| {
            let bytes = device.read(place.buffer, place.offset, place.ty.bytes());
            bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        self.dir.plan.gradients.iter().map(|g| part(&g.place)).collect()
    }

    /// Adds this rank's parts, unscaled, to the gradients by parameter.
    fn collect_gradients(&self, parts: &[Vec<f32>], metrics: &BTreeMap<&str, f64>, rank: usize) {
        let plan = &self.dir.plan;
        let capacity = (plan.loss_capacity * plan.accumulation * plan.world_size) as f64;
        let factor = capacity / metrics["tokens"].max(1.0) / metrics["loss_scale"];
        let mut all = self.gradients.lock().unwrap_or_else(|e| e.into_inner());
        for (spec, part) in plan.gradients.iter().zip(parts) {
            let group = &plan.groups[spec.group];
            for segment in &group.segments {
                let Some((to, from, len)) = group.owned(segment, rank) else { continue };
                let name = &plan.params[segment.param].name;
                let whole = all.entry(name.clone()).or_insert_with(|| vec![0.0; segment.numel]);
                for (g, x) in whole[to..to + len].iter_mut().zip(&part[from..from + len]) {
                    *g = (f64::from(*x) * factor) as f32;
                }
            }
        }
    }
}

fn write_gradients(path: &Path, plan: &Plan, gradients: &Gradients) -> Result<(), RunError> {
    let bytes: Vec<(&String, Vec<usize>, Vec<u8>)> = gradients
        .iter()
        .filter_map(|(name, values)| {
            let param = plan.params.iter().find(|p| p.name == *name)?;
            debug_assert_eq!(param.ty.dtype, DType::F32);
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            Some((name, param.ty.shape.0.clone(), bytes))
        })
        .collect();
    let refuse = |e: safetensors::SafeTensorError| RunError::Io {
        path: path.into(),
        error: std::io::Error::other(e.to_string()),
    };
    let mut views = Vec::new();
    for (name, shape, bytes) in &bytes {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes)
                .map_err(refuse)?;
        views.push((name.as_str(), view));
    }
    safetensors::serialize_to_file(views, None, path).map_err(refuse)
}
