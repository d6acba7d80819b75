//! Compares every kernel of a step with the IR interpreter.
//!
//! Each kernel runs on the plan's device, and its body is interpreted on the same operands. Later tasks use the
//! device's results, so an error is reported only at the kernel that causes it.

use crate::RunError;
use crate::device::Device;
use crate::initialize::initialize;
use crate::numerics::decode;
use crate::plan_dir::PlanDir;
use crate::save::Tensors;
use crate::session::{self, Session, Work};
use frit_comm::identity::Identity;
use frit_comm::launch::Launch;
use frit_data::{Data, Source, TokenDType};
use frit_ir::interpret;
use frit_ir::plan::{Action, Kernel, KernelId, Place, Plan, TaskId, TiVec};
use frit_ir::{DType, Graph, Op, Tensor};
use serde::Serialize;
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;

/// Options of a comparison.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = "Examples:
  frit-run compare plan --data data.safetensors
  frit-run compare plan --data data.safetensors --steps 2 --json")]
pub struct Options {
    /// The plan directory; the plan is for one rank.
    pub plan: PathBuf,
    /// Files or quoted patterns ('shards/*.bin'), in sequence: .safetensors or .npz with one tensor
    /// per input, or .bin with tokens.
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// The type of the tokens in .bin files without a header; by default u16.
    #[arg(long, value_name = "TYPE")]
    pub token_dtype: Option<TokenDType>,
    /// Steps to run.
    #[arg(long, default_value_t = 1)]
    pub steps: usize,
    /// Operations, in millions, that the interpreter may spend on one kernel: of a kernel that many tasks use,
    /// as many are compared as this allows.
    #[arg(long, default_value_t = 500, value_name = "MILLIONS")]
    pub budget: u64,
    /// Print JSON: device, tasks, compared, left_out, kernels (kernel, ops, dtype, task, tasks, error, tolerance,
    /// and of the largest error worst: buffer, index, found, expected).
    #[arg(long)]
    pub json: bool,
    /// Threads; by default all cores.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Seconds in which the first start on a GPU measures candidates of kernels (120).
    #[arg(long, value_name = "SECONDS")]
    pub tuning_seconds: Option<u64>,
}

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The plan's device.
    pub device: String,
    /// Tasks that ran, over all steps.
    pub tasks: usize,
    /// Tasks that were compared.
    pub compared: usize,
    /// Kernels of which no task was compared, because they are too large.
    pub left_out: Vec<String>,
    /// The kernels of which one was.
    pub kernels: Vec<Compared>,
}

/// The comparison of a kernel with the interpreter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// Its name.
    pub kernel: String,
    /// The operations of its body, each once.
    pub ops: String,
    /// The narrowest float type of its body, which determines the tolerance.
    pub dtype: String,
    /// The task with the largest error.
    pub task: String,
    /// Tasks that were compared.
    pub tasks: usize,
    /// The largest error of any element: for floats relative to the largest magnitude of the tensor, otherwise the
    /// number of elements that differ. Errors that rounding the operands would also cause are not counted.
    pub error: f64,
    /// The allowed error.
    pub tolerance: f64,
    /// Where the largest error is; absent where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst: Option<Element>,
}

/// An element of a tensor that a task writes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Element {
    /// The plan's buffer.
    pub buffer: String,
    /// The position along each axis.
    pub index: Vec<usize>,
    /// What the device wrote.
    pub found: f64,
    /// What the interpreter computes.
    pub expected: f64,
}

impl Compared {
    /// Whether the error is allowed.
    pub fn is_close(&self) -> bool {
        self.error <= self.tolerance
    }
}

impl Report {
    /// Whether the error of every compared kernel is allowed.
    pub fn is_close(&self) -> bool {
        self.kernels.iter().all(Compared::is_close)
    }

    /// The report as text, or as JSON.
    pub fn render(&self, json: bool) -> String {
        if json {
            let text = serde_json::to_string_pretty(self).expect("invariant: a report serializes");
            return text + "\n";
        }
        let far: Vec<&Compared> = self.kernels.iter().filter(|k| !k.is_close()).collect();
        let mut text = format!(
            "{} of {} kernels agree with the interpreter, in {} of {} tasks on {}\n",
            self.kernels.len() - far.len(),
            self.kernels.len() + self.left_out.len(),
            self.compared,
            self.tasks,
            self.device
        );
        for k in far {
            let Compared { kernel, ops, task, error, tolerance, worst, .. } = k;
            text += &format!(
                "  {kernel} ({ops}) in task `{task}`: error {error:.1e}, allowed {tolerance:.1e}"
            );
            if let Some(Element { buffer, index, found, expected }) = worst {
                text += &format!("; `{buffer}` at {index:?} is {found:e} instead of {expected:e}");
            }
            text.push('\n');
        }
        if !self.left_out.is_empty() {
            text += &format!("  not compared, see --budget: {}\n", self.left_out.join(", "));
        }
        text
    }
}

/// Compares the kernels of a plan on its device.
///
/// # Errors
/// What is wrong with the plan, the data or the options, or the task that failed.
pub fn compare(options: &Options) -> Result<Report, RunError> {
    let dir = PlanDir::load(&options.plan)?;
    let refuse =
        |reason: &str| RunError::Plan { path: options.plan.clone(), reason: reason.into() };
    if dir.plan.world_size > 1 {
        return Err(refuse("kernels are compared on one rank; compile with sharding.ranks=1"));
    }
    if dir.plan.eval.is_some() {
        return Err(refuse("kernels are compared in training steps; this plan only evaluates"));
    }
    let session = Session {
        dir: &dir,
        beside: None,
        identity: Identity::of_plan(&dir.hash),
        threads: options.threads,
        interpret: false,
        tuning_seconds: options.tuning_seconds,
    };
    let launch = Launch::from_environment()?;
    let mut finished = session.run(&launch, &Comparing { dir: &dir, options })?;
    Ok(finished.outcomes.remove(0))
}

struct Comparing<'a> {
    dir: &'a PlanDir,
    options: &'a Options,
}

impl Work for Comparing<'_> {
    type Outcome = Report;

    fn rank<D: Device>(
        &self,
        _: usize,
        device: &mut D,
        _: Option<&mut D>,
    ) -> Result<Report, RunError> {
        on_device(self.dir, device, self.options)
    }
}

/// Compares the kernels of a plan for one rank on a device that is ready to run it.
///
/// # Errors
/// What is wrong with the data, or the task that failed.
pub fn on_device(
    dir: &PlanDir,
    device: &mut impl Device,
    options: &Options,
) -> Result<Report, RunError> {
    let plan = &dir.plan;
    let data = Data::load(&Source::new(options.data.clone(), options.token_dtype), plan)?;
    initialize(dir, &[], &Tensors::new(), device, 0)?;
    let mut comparison = Comparison::new(plan, options.budget.saturating_mul(1_000_000));
    for step in 0..options.steps {
        session::step(
            plan,
            data.micro_steps(step),
            device,
            |device, k| {
                data.feed(step, k, 0, |buffer, element, bytes| device.feed(buffer, element, bytes))
            },
            |device, tasks| {
                let mut tasks = tasks.start.until(tasks.end);
                tasks.try_for_each(|task| comparison.task(device, task))
            },
        )?;
        // The device reports asynchronous errors here.
        device.take_metrics()?;
    }
    Ok(comparison.report())
}

struct Comparison<'a> {
    plan: &'a Plan,
    /// Maximum interpreted operations per kernel.
    budget: u64,
    /// Interpreted operations so far, by kernel.
    spent: TiVec<KernelId, u64>,
    found: TiVec<KernelId, Option<Compared>>,
    tasks: usize,
    compared: usize,
}

impl<'a> Comparison<'a> {
    fn new(plan: &'a Plan, budget: u64) -> Self {
        let n = plan.kernels.len();
        let (spent, found) = (vec![0; n].into(), vec![None; n].into());
        Comparison { plan, budget, spent, found, tasks: 0, compared: 0 }
    }

    /// Runs a task, and compares it if its kernel is within the budget.
    fn task(&mut self, device: &mut impl Device, i: TaskId) -> Result<(), RunError> {
        let task = &self.plan.tasks[i];
        self.tasks += 1;
        let Action::Kernel { kernel, reads, writes } = &task.action else {
            return device.run(i..i.next());
        };
        let body = &self.plan.kernels[*kernel].body;
        let cost = operations(body);
        if self.spent[*kernel] + cost > self.budget {
            return device.run(i..i.next());
        }
        self.spent[*kernel] += cost;
        self.compared += 1;
        let failed = |reason: String| RunError::Task { task: task.name.clone(), rank: 0, reason };
        let mut feeds = HashMap::new();
        for (at, place) in reads.iter().enumerate() {
            let bytes = bytes(device, place)?;
            let tensor = Tensor::from_bytes(place.ty.clone(), &bytes);
            feeds.insert(at.to_string(), tensor.map_err(|e| failed(e.to_string()))?);
        }
        device.run(i..i.next())?;
        let expected = interpret::run(body, &feeds, interpret::Options::default())
            .map_err(|e| failed(e.to_string()))?;
        let (mut error, mut worst) = (0.0, None);
        for (at, ((_, expected), place)) in expected.iter().zip(writes).enumerate() {
            let (found, dtype) = (bytes(device, place)?, place.ty.dtype);
            let expected = expected.to_bytes();
            let (mut far, element) = distance(dtype, &found, &expected);
            if far > tolerance(body).1 && dtype.is_float() {
                // What errors of operands do to a sum that cancels may cancel as well.
                for seed in 0..NUDGES {
                    let options = interpret::Options::default();
                    let moved = interpret::run(body, &nudged(&feeds, seed), options)
                        .map_err(|e| failed(e.to_string()))?;
                    let (sway, _) = distance(dtype, &moved[at].1.to_bytes(), &expected);
                    if far <= 2.0 * sway {
                        far = 0.0;
                        break;
                    }
                }
            }
            if far > error {
                error = far;
                worst = Some(Element::of(self.plan, place, element, (&found, &expected)));
            }
        }
        self.note(*kernel, &task.name, error, worst);
        Ok(())
    }

    fn note(&mut self, kernel: KernelId, task: &str, error: f64, worst: Option<Element>) {
        let spec = &self.plan.kernels[kernel];
        let found = self.found[kernel].get_or_insert_with(|| Compared::none(spec));
        found.tasks += 1;
        if found.task.is_empty() || error > found.error {
            found.error = error;
            found.task = task.into();
            found.worst = worst;
        }
    }

    fn report(self) -> Report {
        let used: BTreeSet<KernelId> = self
            .plan
            .tasks
            .iter()
            .filter_map(|t| match &t.action {
                Action::Kernel { kernel, .. } => Some(*kernel),
                _ => None,
            })
            .collect();
        let missing = used.iter().filter(|k| self.found[**k].is_none());
        Report {
            device: self.plan.target.device.to_string(),
            tasks: self.tasks,
            compared: self.compared,
            left_out: missing.map(|k| self.plan.kernels[*k].name.clone()).collect(),
            kernels: self.found.into_iter().flatten().collect(),
        }
    }
}

impl Compared {
    /// Nothing compared yet.
    fn none(kernel: &Kernel) -> Compared {
        let body = &kernel.body;
        let (dtype, tolerance) = tolerance(body);
        let names: BTreeSet<&str> =
            body.nodes().filter(|(_, n)| !n.op.is_leaf()).map(|(_, n)| n.op.name()).collect();
        Compared {
            kernel: kernel.name.clone(),
            ops: names.into_iter().collect::<Vec<_>>().join(" "),
            dtype: dtype.map_or_else(|| "integers".into(), |d| d.name().into()),
            task: String::new(),
            tasks: 0,
            error: 0.0,
            tolerance,
            worst: None,
        }
    }
}

/// The narrowest float type of a body, and the error that it allows: four of its roundings and, for f32, an allowance
/// for the length of sums.
fn tolerance(body: &Graph) -> (Option<DType>, f64) {
    let of =
        |node: &frit_ir::Node| node.outputs.iter().map(|v| body.ty(*v).dtype).collect::<Vec<_>>();
    let dtypes: BTreeSet<DType> = body.nodes().flat_map(|(_, n)| of(n)).collect();
    let narrowest =
        [DType::BF16, DType::F16, DType::F32, DType::F64].into_iter().find(|d| dtypes.contains(d));
    let tolerance = match narrowest {
        Some(DType::BF16) => 4.0 / 256.0,
        Some(DType::F16) => 4.0 / 2048.0,
        Some(DType::F32) => 1e-4,
        Some(_) => 1e-10,
        None => 0.0,
    };
    (narrowest, tolerance)
}

/// How often operands are perturbed.
const NUDGES: usize = 8;

/// Operands perturbed by a rounding error of their type or, in f32 and wider, of a sum of a few dozen elements,
/// alternately up and down. A result that this changes as much suffers from cancellation, which no device can avoid.
fn nudged(operands: &HashMap<String, Tensor>, seed: usize) -> HashMap<String, Tensor> {
    let nudge = |(name, tensor): (&String, &Tensor)| {
        let Some(values) = tensor.as_floats() else { return (name.clone(), tensor.clone()) };
        let part = match tensor.dtype() {
            DType::BF16 => 1.0 / 256.0,
            DType::F16 => 1.0 / 2048.0,
            _ => 1.0 / f64::from(1 << 21),
        };
        // Neighbors along any axis have different signs often enough.
        let bit = |i: usize| i.wrapping_mul(0x9E37_79B9) >> (16 + seed) & 1;
        let sign = |i: usize| if bit(i) == 0 { part } else { -part };
        let values = values.iter().enumerate().map(|(i, x)| x * (1.0 + sign(i))).collect();
        (name.clone(), Tensor::floats(tensor.dtype(), tensor.shape().clone(), values))
    };
    operands.iter().map(nudge).collect()
}

/// The cost of interpreting a body: operations of its nodes, plus elements that they write.
fn operations(body: &Graph) -> u64 {
    let types = |ids: &[frit_ir::ValueId]| ids.iter().map(|v| body.ty(*v)).collect::<Vec<_>>();
    let one = |n: &frit_ir::Node| {
        if matches!(n.op, Op::Input(_)) {
            return 0;
        }
        let results = types(&n.outputs);
        let elements: usize = results.iter().map(|t| t.shape.numel()).sum();
        n.op.flops(&types(&n.inputs), &results) + elements as u64
    };
    body.nodes().map(|(_, n)| one(n)).sum()
}

impl Element {
    fn of(plan: &Plan, place: &Place, at: usize, (found, expected): (&[u8], &[u8])) -> Element {
        let value = |bytes: &[u8]| {
            let tensor = Tensor::from_bytes(place.ty.clone(), bytes)
                .expect("invariant: as many bytes as the tensor has");
            let float = tensor.as_floats().map(|values| values[at]);
            float.or_else(|| Some(tensor.as_ints()?[at] as f64)).unwrap_or(f64::NAN)
        };
        let (mut rest, mut index) = (at, vec![]);
        for size in place.ty.shape.dims().iter().rev() {
            index.insert(0, rest % size);
            rest /= size;
        }
        let buffer = plan.buffers[place.buffer].name.clone();
        Element { buffer, index, found: value(found), expected: value(expected) }
    }
}

/// The largest error of an element, see [`Compared::error`], and which it is.
fn distance(dtype: DType, found: &[u8], expected: &[u8]) -> (f64, usize) {
    if !dtype.is_float() {
        let size = dtype.size();
        let pairs = found.chunks(size).zip(expected.chunks(size)).enumerate();
        let mut differing = pairs.filter(|(_, (a, b))| a != b).map(|(i, _)| i);
        let first = differing.next();
        return (first.map_or(0.0, |_| 1.0 + differing.count() as f64), first.unwrap_or(0));
    }
    let (found, expected) = (decode(dtype, found), decode(dtype, expected));
    let finite = |x: &&f64| x.is_finite();
    let largest = expected.iter().filter(finite).fold(0.0, |m, x| f64::max(m, x.abs()));
    let one = |(a, b): (&f64, &f64)| match (a.is_finite(), b.is_finite()) {
        (true, true) if a == b => 0.0,
        (true, true) => (a - b).abs() / largest.max(f64::MIN_POSITIVE),
        _ if a == b || (a.is_nan() && b.is_nan()) => 0.0,
        _ => f64::INFINITY,
    };
    let errors = found.iter().zip(&expected).map(one).enumerate();
    errors.fold((0.0, 0), |most, (i, error)| if error > most.0 { (error, i) } else { most })
}

fn bytes(device: &impl Device, place: &Place) -> Result<Vec<u8>, RunError> {
    device.read(place.buffer, place.offset, place.ty.bytes())
}
