//! Runs steps of a plan and records the gradients and the metrics of each, and all state before and after it.

use crate::RunError;
use crate::checkpoint::snapshot::{self, Piece};
use crate::device::Device;
use crate::gradients::Parts;
use crate::initialize::initialize;
use crate::plan_dir::PlanDir;
use crate::session::{self, Session, Work};
use frit_comm::identity::Identity;
use frit_comm::launch::Launch;
use frit_data::Data;
use frit_ir::Tensor;
use frit_ir::TensorType;
use frit_ir::plan::{MetricName, PhaseName, Plan};
use std::collections::BTreeMap;
use std::ops::Range;

/// Values of parameters and state by their names in checkpoints: `param/NAME`, `adam_m/NAME`, `state/loss_scale`.
pub type State = BTreeMap<String, Vec<f64>>;

/// What to record.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Little-endian elements of parameters that are used instead of the plan's, in the type of files.
    pub params: BTreeMap<String, Vec<u8>>,
    /// Steps to run.
    pub steps: usize,
    /// Execute every body with the IR interpreter.
    pub interpret: bool,
    /// Threads per rank; by default the cores divided by the ranks.
    pub threads: Option<usize>,
}

/// What was computed.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// All state before the first step.
    pub start: State,
    /// The steps.
    pub steps: Vec<Step>,
}

/// One step.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// What the plan reports.
    pub metrics: BTreeMap<MetricName, f64>,
    /// Gradients by parameter: unscaled, averaged, and not clipped.
    pub gradients: BTreeMap<String, Vec<f32>>,
    /// All state after it.
    pub after: State,
}

/// Runs steps of a plan on data: the ranks of a plan for the CPU as threads, or the only rank of a plan for a GPU.
///
/// # Errors
/// If a plan for GPUs has several ranks; or the task that failed.
pub fn record(dir: &PlanDir, data: &Data, options: &Options) -> Result<Recorded, RunError> {
    let session = Session {
        dir,
        beside: None,
        identity: Identity::of_plan(&dir.hash),
        threads: options.threads,
        interpret: options.interpret,
        tuning_seconds: None,
    };
    let (local_rank, local_size, master) = (None, None, None);
    let alone = Launch { rank: 0, world_size: 1, local_rank, local_size, master, by_mpirun: false };
    let finished = session.run(&alone, &Recording { dir, data, options })?;
    let mut ranks = finished.outcomes;
    let states = (0..=options.steps).map(|k| {
        let pieces = ranks.iter_mut().flat_map(|rank| std::mem::take(&mut rank.states[k]));
        joined(pieces.collect())
    });
    let states: Vec<State> = states.collect();
    let rank = ranks.swap_remove(0);
    let mut after = states.into_iter();
    let start = after.next().unwrap_or_default();
    let step = |((values, parts), after): ((Vec<f32>, Parts), State)| {
        let names = dir.plan.metrics.iter().map(|m| m.name);
        let metrics: BTreeMap<MetricName, f64> =
            names.zip(values.into_iter().map(f64::from)).collect();
        let of = |name| metrics.get(&name).copied().unwrap_or(1.0);
        let (tokens, scale) = (of(MetricName::Tokens), of(MetricName::LossScale));
        Step { gradients: parts.combine(&dir.plan, tokens, scale), metrics, after }
    };
    Ok(Recorded { start, steps: rank.steps.into_iter().zip(after).map(step).collect() })
}

struct Recording<'a> {
    dir: &'a PlanDir,
    data: &'a Data,
    options: &'a Options,
}

/// The outcome of a rank.
#[derive(Default)]
struct Rank {
    /// What it holds before the first step and after each.
    states: Vec<Vec<Piece>>,
    /// Metrics, and the parts of gradients, which rank 0 has.
    steps: Vec<(Vec<f32>, Parts)>,
}

impl Work for Recording<'_> {
    type Outcome = Rank;

    fn rank<D: Device>(
        &self,
        rank: usize,
        device: &mut D,
        _: Option<&mut D>,
    ) -> Result<Rank, RunError> {
        let plan: &Plan = &self.dir.plan;
        initialize(self.dir, &[], &self.options.params, device, rank)?;
        let mut outcome = Rank::default();
        outcome.states.push(snapshot::take(plan, device, rank, false)?);
        let update = plan.tasks_of(PhaseName::Update).start;
        for step in 0..self.options.steps {
            let mut parts = None;
            session::step(
                plan,
                self.data.micro_steps(step),
                device,
                |device, k| {
                    self.data.feed(step, k, rank, |buffer, element, bytes| {
                        device.feed(buffer, element, bytes)
                    })
                },
                |device, tasks: Range<_>| {
                    if tasks.end <= update {
                        return device.run(tasks);
                    }
                    device.run(tasks.start..update)?;
                    parts = Some(Parts::read(plan, device)?);
                    device.run(update..tasks.end)
                },
            )?;
            let parts = parts.expect("invariant: a step ends with its update");
            outcome.steps.push((device.take_metrics()?, parts));
            outcome.states.push(snapshot::take(plan, device, rank, false)?);
        }
        Ok(outcome)
    }
}

/// Whole tensors of the pieces that all ranks hold.
fn joined(pieces: Vec<Piece>) -> State {
    let mut all = State::new();
    for Piece { key, dtype, begin, bytes } in pieces {
        let ty = TensorType::new(dtype, [bytes.len() / dtype.size()]);
        let values = Tensor::from_bytes(ty, &bytes).expect("invariant: whole elements").to_f64s();
        let whole = all.entry(key).or_default();
        whole.resize(whole.len().max(begin + values.len()), 0.0);
        whole[begin..begin + values.len()].copy_from_slice(&values);
    }
    all
}
