//! Evaluation: a forward pass over every example of a data set, once.
//!
//! The last batch is padded with examples of weight 0, so that the loss is the mean over exactly the examples of the data. Sums
//! and counts of losses and metrics are accumulated over batches in f64.

use crate::RunError;
use crate::checkpoint::{Checkpoint, restore};
use crate::device::Device;
use crate::dump::{self, Examples, Outputs};
use crate::initialize::initialize;
use crate::outputs;
use crate::plan_dir::PlanDir;
use crate::save::Tensors;
use crate::session::{self, Session, Work};
use crate::starting::{self, Others, Replaced};
use frit_comm::identity::Identity;
use frit_comm::launch::Launch;
use frit_data::{Data, Element, Fed, TokenDType};
use frit_ir::ops::StateName;
use frit_ir::ops::random::evaluation_state;
use frit_ir::plan::{EvalSpec, ParamHome, Place, Plan};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Options of an evaluation.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = "Examples:
  frit eval plan --data test.safetensors
  frit eval plan --data test.safetensors --weights trained.safetensors --json
  frit eval plan --data test.safetensors --checkpoint checkpoints
  frit eval plan --data test.safetensors --dump-outputs outputs.safetensors
  frit eval plan --inputs inputs.npz --dump-outputs outputs.safetensors")]
pub struct Options {
    /// The plan directory: of a model that trains, or compiled with loss.kind=none.
    pub plan: PathBuf,
    /// Files or quoted patterns ('shards/*.bin'), of which every example is evaluated: .safetensors or .npz with
    /// one tensor per input, or .bin with tokens.
    #[arg(
        long,
        value_name = "FILE",
        num_args = 1..,
        required_unless_present = "inputs",
        conflicts_with = "inputs"
    )]
    pub data: Vec<PathBuf>,
    /// The type of the tokens in .bin files without a header; by default u16.
    #[arg(long, value_name = "TYPE")]
    pub token_dtype: Option<TokenDType>,
    /// A .safetensors or .npz file with the inputs exactly as the model declares them, for one batch.
    #[arg(long, value_name = "FILE")]
    pub inputs: Option<PathBuf>,
    /// Parameters as `frit run --save` or Hugging Face libraries write them, or an adapter of PEFT, instead of those of
    /// the plan; of one that several files hold the last counts.
    #[arg(long, value_name = "FILE.safetensors", num_args = 1..)]
    pub weights: Vec<PathBuf>,
    /// Parameters of a checkpoint, of the latest one in a directory of them, or of its `best`; what it leaves out is
    /// taken from --weights or the plan.
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Write the model's outputs for all examples, in the data's order, to this safetensors file.
    #[arg(long, value_name = "FILE.safetensors")]
    pub dump_outputs: Option<PathBuf>,
    /// Print JSON: loss, losses (name, weight, loss, count), metrics, examples, batches, examples_per_s.
    #[arg(long)]
    pub json: bool,
    /// Execute the kernels' bodies by the IR interpreter instead of machine code (slow).
    #[arg(long)]
    pub interpret: bool,
    /// Threads per rank; by default the cores divided by the ranks.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Seconds in which the first start on a GPU measures candidates of kernels (120).
    #[arg(long, value_name = "SECONDS")]
    pub tuning_seconds: Option<u64>,
}

/// The result of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The weighted sum of the losses; absent without losses, or if their labels were not given.
    pub loss: Option<f64>,
    /// Each loss separately.
    pub losses: Vec<Loss>,
    /// The metrics of the configuration's section `[metrics]`, by name.
    pub metrics: BTreeMap<String, f64>,
    /// Examples evaluated.
    pub examples: usize,
    /// Batches of all ranks.
    pub batches: usize,
    /// Examples per second, without loading.
    pub examples_per_s: f64,
    /// Which names of the weights differ from those of the plan, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A loss over the data set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Loss {
    /// Its name, such as `cross_entropy(logits, labels)`.
    pub name: String,
    /// Its factor in the sum.
    pub weight: f64,
    /// The mean over the elements that count.
    pub loss: f64,
    /// The number of elements that count.
    pub count: f64,
}

impl Report {
    /// The report on sums over batches of this many examples; `labeled` if the labels of the losses were given.
    pub(crate) fn of(
        eval: &EvalSpec,
        sums: &Sums,
        labeled: bool,
        examples: usize,
        seconds: f64,
    ) -> Report {
        let Sums { batches, totals } = sums;
        let measured = labeled && !eval.losses.is_empty();
        let means = eval.losses(totals);
        let each = |(i, l): (usize, &frit_ir::plan::LossSpec)| Loss {
            name: l.name.clone(),
            weight: l.weight,
            loss: means[&l.name],
            count: totals[2 * i + 1],
        };
        let losses =
            if measured { eval.losses.iter().enumerate().map(each).collect() } else { vec![] };
        Report {
            loss: measured.then(|| eval.loss(totals)),
            losses,
            metrics: if labeled { eval.metrics(totals) } else { BTreeMap::new() },
            examples,
            batches: *batches,
            examples_per_s: examples as f64 / seconds.max(1e-9),
            notes: vec![],
        }
    }

    /// The report as one line, after its notes, or as JSON.
    pub fn render(&self, json: bool) -> String {
        if json {
            let text = serde_json::to_string_pretty(self).expect("invariant: a report serializes");
            return text + "\n";
        }
        let Report { examples, batches, .. } = self;
        let mut text: String = self.notes.iter().map(|note| format!("{note}\n")).collect();
        text += &format!("{examples} examples in {batches} batches");
        if let Some(loss) = self.loss {
            text += &format!(", loss {loss:.6}");
        }
        text += &in_words(&self.metrics);
        if self.losses.len() > 1 {
            for l in &self.losses {
                text += &format!("\n  {} * {} = {:.6}", l.weight, l.name, l.loss);
            }
        }
        text + "\n"
    }
}

/// Metrics as text, each after a comma.
pub fn in_words(metrics: &BTreeMap<String, f64>) -> String {
    metrics.iter().map(|(name, value)| format!(", {name} {value:.4}")).collect()
}

/// The result of one rank.
struct Found {
    rank: usize,
    sums: Sums,
    seconds: f64,
}

/// Sums and counts of losses and metrics over batches, as the plan's statistics.
#[derive(Clone, Debug)]
pub(crate) struct Sums {
    /// Batches so far.
    pub(crate) batches: usize,
    /// The statistics, summed over them.
    pub(crate) totals: Vec<f64>,
}

impl Sums {
    /// Those over no batch.
    pub(crate) fn none(eval: &EvalSpec) -> Sums {
        let n = eval.statistics.as_ref().map_or(0, |p| p.ty.shape.numel());
        Sums { batches: 0, totals: vec![0.0; n] }
    }
}

/// The inputs of an evaluation.
pub(crate) enum Feed {
    /// The examples of a file.
    Examples(Data),
    /// One batch for every rank.
    Batch(Vec<Fed>),
}

impl Feed {
    /// Batches over all ranks.
    pub(crate) fn batches(&self) -> usize {
        match self {
            Feed::Examples(data) => data.batches(),
            Feed::Batch(_) => 1,
        }
    }

    /// That every label is ignored, if it is so.
    pub(crate) fn ignored_labels(&self) -> Option<String> {
        if let Feed::Examples(data) = self { data.ignored_labels() } else { None }
    }

    /// How many examples there are, and how outputs have them.
    fn examples(&self, plan: &Plan) -> Examples {
        match self {
            Feed::Examples(data) => Examples {
                count: data.len(),
                batch: data.batch(),
                is_whole: data.has_whole_examples(),
            },
            Feed::Batch(_) => {
                let count = plan.batch().unwrap_or(1);
                Examples { count, batch: count.max(1), is_whole: false }
            }
        }
    }
}

/// Evaluates a plan: on the CPU with threads as ranks, or with processes if started as several; on GPUs with one
/// process per rank. Only rank 0 returns a report.
///
/// # Errors
/// What is wrong with the plan, the data, the weights or the options, or the task that failed.
pub fn evaluate(options: &Options) -> Result<Option<Report>, RunError> {
    let source = frit_data::Source::new(options.data.clone(), options.token_dtype);
    let data = if options.inputs.is_none() { source.paths()? } else { vec![] };
    let read = data.iter().map(|path| ("--data", path.as_path()));
    let inputs = options.inputs.iter().map(|path| ("--inputs", path.as_path()));
    let weights = options.weights.iter().map(|path| ("--weights", path.as_path()));
    let of_plan = outputs::files_of(&options.plan);
    let of_plan = of_plan.iter().map(|path| ("the plan", path.as_path()));
    let read: Vec<_> = read.chain(inputs).chain(weights).chain(of_plan).collect();
    outputs::check(&[("--dump-outputs", options.dump_outputs.as_deref())], &read)?;
    let dir = PlanDir::load_evaluation(&options.plan)?;
    let plan = &dir.plan;
    let Some(eval) = &plan.eval else {
        return Err(RunError::Plan { path: options.plan.clone(), reason: "no evaluation".into() });
    };
    let trained = trained(&dir);
    let checkpoint = options.checkpoint.as_deref().map(Checkpoint::open).transpose()?;
    let (weights, ignored) = (&options.weights, Others::Ignored);
    let replaced = match &checkpoint {
        None => starting::read(weights, &dir, &trained, ignored)?,
        Some(c) if c.index.left_out.is_empty() && !weights.is_empty() => {
            let reason = "holds all parameters; give either it or --weights";
            return Err(RunError::checkpoint(&c.path, reason));
        }
        Some(c) => starting::base(c, weights, &dir, &trained, ignored)?,
    };
    let (feed, labeled) = feed(options, plan, eval)?;
    let examples = feed.examples(plan);
    let Replaced { tensors: replaced, mut notes } = replaced;
    notes.extend(feed.ignored_labels());
    let source = Source { replaced, checkpoint, trained };
    let work = Evaluation { dir: &dir, eval, options, feed: &feed, source: &source, examples };
    let session = Session {
        dir: &dir,
        beside: None,
        identity: identity(&dir, options, &feed),
        threads: options.threads,
        interpret: options.interpret,
        tuning_seconds: options.tuning_seconds,
    };
    let launch = Launch::from_environment()?;
    let finished = session.run(&launch, &work)?;
    let found = finished.outcomes.into_iter().next().expect("invariant: a plan has a rank");
    if found.rank > 0 {
        return Ok(None);
    }
    let report = Report::of(eval, &found.sums, labeled, examples.count, found.seconds);
    Ok(Some(Report { notes, ..report }))
}

/// What must be equal on all ranks.
fn identity(dir: &PlanDir, options: &Options, feed: &Feed) -> Identity {
    let mut identity = Identity::of_plan(&dir.hash);
    identity.add("the number of batches", feed.batches());
    identity.add_option("--dump-outputs", options.dump_outputs.is_some());
    identity.add_option("--weights", !options.weights.is_empty());
    identity.add_option("--checkpoint", options.checkpoint.is_some());
    identity
}

/// The plan without parameters that only the evaluation reads, as in training.
fn trained(dir: &PlanDir) -> Plan {
    let mut plan = dir.plan.clone();
    for param in plan.params.iter_mut().filter(|p| dir.only_evaluated(&p.name)) {
        param.home = ParamHome::Unused;
    }
    plan
}

/// Sources of parameters other than the plan.
struct Source {
    replaced: Tensors,
    checkpoint: Option<Checkpoint>,
    /// The plan to which the parameters belong.
    trained: Plan,
}

/// The inputs, and whether they include the labels of the losses.
fn feed(options: &Options, plan: &Plan, eval: &EvalSpec) -> Result<(Feed, bool), RunError> {
    if let Some(path) = &options.inputs {
        let (fed, labeled) = frit_data::read_inputs(path, plan, &eval.labels)?;
        return Ok((Feed::Batch(fed), labeled));
    }
    let source = frit_data::Source::new(options.data.clone(), options.token_dtype);
    Ok((Feed::Examples(examples(&source, plan, eval)?), true))
}

/// The examples of some files.
///
/// # Errors
/// If these cannot be read, are empty, or the last batch would be counted incorrectly.
pub(crate) fn examples(
    source: &frit_data::Source,
    plan: &Plan,
    eval: &EvalSpec,
) -> Result<Data, RunError> {
    let data = Data::load(source, plan)?;
    check(&data, source.to_string().as_ref(), plan, eval)?;
    Ok(data)
}

/// Checks examples of an evaluation, which errors call `path`.
///
/// # Errors
/// If there are none, or the last batch would be counted incorrectly.
pub(crate) fn check(
    data: &Data,
    path: &Path,
    plan: &Plan,
    eval: &EvalSpec,
) -> Result<(), RunError> {
    let refuse = |reason: String| Err(RunError::data(path, reason));
    if data.is_empty() {
        return refuse("there are no examples".into());
    }
    let whole = data.batch() * plan.world_size;
    if eval.weights.is_none() && eval.statistics.is_some() && !data.len().is_multiple_of(whole) {
        let reason = format!(
            "{} examples do not fill batches of {whole}, and the loss is one of whole batches; compile with a batch \
             that divides them",
            data.len()
        );
        return refuse(reason);
    }
    Ok(())
}

struct Evaluation<'a> {
    dir: &'a PlanDir,
    eval: &'a EvalSpec,
    options: &'a Options,
    feed: &'a Feed,
    source: &'a Source,
    examples: Examples,
}

impl Work for Evaluation<'_> {
    type Outcome = Found;

    fn rank<D: Device>(
        &self,
        rank: usize,
        device: &mut D,
        _: Option<&mut D>,
    ) -> Result<Found, RunError> {
        let plan = &self.dir.plan;
        initialize(self.dir, &[], &self.source.replaced, device, rank)?;
        if let Some(checkpoint) = &self.source.checkpoint {
            restore::restore(checkpoint, &self.source.trained, device, rank, 0)?;
        }
        let dump = self.options.dump_outputs.as_deref();
        let create = |path| Outputs::create(path, self.eval, self.examples);
        let mut outputs = dump.filter(|_| rank == 0).map(create).transpose()?;
        let started = Instant::now();
        let each = |number, device: &D| match dump {
            Some(_) => dump::collect(self.eval, number, device, &mut outputs),
            None => Ok(()),
        };
        let mut sums = Sums::none(self.eval);
        add(&mut sums, plan, self.eval, self.feed, rank, device, each)?;
        let seconds = started.elapsed().as_secs_f64();
        outputs.map_or(Ok(()), Outputs::finish)?;
        Ok(Found { rank, sums, seconds })
    }
}

/// Adds all batches of all ranks to the sums, which are equal on every rank. `each` is called with the device after each
/// batch.
pub(crate) fn add<D: Device>(
    sums: &mut Sums,
    plan: &Plan,
    eval: &EvalSpec,
    feed: &Feed,
    rank: usize,
    device: &mut D,
    mut each: impl FnMut(usize, &D) -> Result<(), RunError>,
) -> Result<(), RunError> {
    let earlier = sums.batches;
    let by_batch = plan.reproducible.is_some();
    for number in 0..feed.batches() {
        session::step(
            plan,
            1,
            device,
            |device, _| {
                let counting = put_batch(feed, number, rank, device)?;
                draw_anew(plan, earlier + number, rank, device)?;
                let Some(weights) = &eval.weights else { return Ok(()) };
                let n = weights.ty.shape.numel();
                let counting = counting.saturating_mul(n / feed.examples(plan).batch);
                let bytes: Vec<u8> =
                    (0..n).flat_map(|i| f32::from(u8::from(i < counting)).to_le_bytes()).collect();
                device.feed(weights.buffer, Element::F32, &bytes)
            },
            D::run,
        )?;
        // An evaluation has no metrics, but taking them reports errors of the device.
        device.take_metrics()?;
        if let Some(statistics) = &eval.statistics {
            // In a reproducible plan they are of this rank's batch alone, and batches are added in order.
            let bytes = match by_batch {
                true => {
                    device.gather(statistics.buffer, statistics.offset, statistics.ty.bytes())?
                }
                false => read(device, statistics)?,
            };
            for batch in bytes.chunks(statistics.ty.bytes().max(1)) {
                for (sum, x) in sums.totals.iter_mut().zip(batch.as_chunks::<4>().0) {
                    *sum += f64::from(f32::from_le_bytes(*x));
                }
            }
        }
        each(number, device)?;
        sums.batches += 1;
    }
    if by_batch {
        // Rank 0 has them all.
        for sum in &mut sums.totals {
            let own = if rank == 0 { sum.to_bits() } else { 0 };
            *sum = f64::from_bits(device.largest(own)?);
        }
    }
    Ok(())
}

/// Sets the random generator's state for a batch, so that its random numbers are reproducible.
fn draw_anew(
    plan: &Plan,
    number: usize,
    rank: usize,
    device: &mut impl Device,
) -> Result<(), RunError> {
    let Some(state) = plan.states.iter().find(|s| s.name == StateName::Rng) else { return Ok(()) };
    let words = evaluation_state(plan.seed, rank, plan.world_size, number);
    let bytes: Vec<u8> = words.iter().flat_map(|x| x.to_le_bytes()).collect();
    device.write(state.buffer, 0, &bytes)
}

/// Feeds one batch; returns the number of its examples that count.
fn put_batch(
    feed: &Feed,
    number: usize,
    rank: usize,
    device: &mut impl Device,
) -> Result<usize, RunError> {
    match feed {
        Feed::Examples(data) => {
            data.feed_once(number, rank, |b, element, bytes| device.feed(b, element, bytes))
        }
        Feed::Batch(fed) => {
            for Fed { buffer, element, bytes } in fed {
                device.feed(*buffer, *element, bytes)?;
            }
            Ok(usize::MAX)
        }
    }
}

fn read(device: &impl Device, place: &Place) -> Result<Vec<u8>, RunError> {
    device.read(place.buffer, place.offset, place.ty.bytes())
}
