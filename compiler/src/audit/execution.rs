//! Executions of a plan for an audit: from where it starts, and with what its rounding errors are found.
//!
//! Every trained parameter is moved by a rounding error of the plan's narrowest dtype, at random. What then changes in a result is
//! as large as what rounding changes in it, since all values in between are rounded anew. A wrong gradient does not change so.

use super::refused;
use crate::diagnostics::Report;
use frit_ir::ops::ParamKind;
use frit_ir::plan::{Action, MetricName, ParamHome, Plan};
use frit_ir::{Code, DType, Diagnostic, Region, Tensor};
use frit_runtime::data::Data;
use frit_runtime::plan_dir::PlanDir;
use frit_runtime::record::{Options, Recorded, State, Step, record};
use std::collections::BTreeMap;

/// Executions with rounding errors.
const SAMPLES: u64 = 3;
/// Steps in which a dynamic loss scale is found.
const SCALING_STEPS: usize = 40;
/// Steps whose update is checked.
const UPDATES: usize = 2;
/// What a parameter with one value everywhere is spread by.
const SPREAD: f64 = 0.02;

/// Little-endian parameters by name.
pub(super) type Bytes = BTreeMap<String, Vec<u8>>;

/// The parameters that an audit starts from: those of the plan, but where one has the same value everywhere, as zero biases and
/// the second matrix of an adapter, that is spread, lest gradients vanish beside it.
///
/// # Errors
/// If the plan has no value for a parameter.
pub(super) fn start(dir: &PlanDir, seed: u64) -> Result<Bytes, Report> {
    let mut all = Bytes::new();
    for param in dir.plan.params.iter().filter(|p| p.home != ParamHome::Unused) {
        let Some(bytes) = dir.weight(&param.name).map_err(refused)? else {
            let message = format!("no value for the parameter `{}`", param.name);
            return Err(Diagnostic::error(Code::RunFailed, message).into());
        };
        let mut bytes = bytes.into_owned();
        let mut random = fastrand::Rng::with_seed(seed ^ super::digest(&param.name));
        if param.kind == ParamKind::Trainable && is_flat(&bytes) {
            each(&mut bytes, |x| x + SPREAD * super::normal(&mut random));
        }
        all.insert(param.name.clone(), bytes);
    }
    Ok(all)
}

/// Whether all of several floats are the same.
fn is_flat(bytes: &[u8]) -> bool {
    let (values, _) = bytes.as_chunks::<4>();
    values.len() > 1 && values.iter().all(|x| x == &values[0])
}

/// Changes every f32.
fn each(bytes: &mut [u8], mut f: impl FnMut(f64) -> f64) {
    for x in bytes.as_chunks_mut::<4>().0 {
        *x = (f(f64::from(f32::from_le_bytes(*x))) as f32).to_le_bytes();
    }
}

/// The parameters as tensors of the model's types.
pub(super) fn tensors(plan: &Plan, bytes: &Bytes) -> super::reference::Params {
    let one = |param: &frit_ir::plan::ParamSpec| {
        let dtype = match param.home {
            ParamHome::Group { .. } => DType::F32,
            _ => param.ty.dtype,
        };
        let stored = Tensor::from_bytes(param.ty.with_dtype(dtype), bytes.get(&param.name)?);
        let stored = stored.expect("invariant: parameters have their sizes");
        let tensor = match stored.as_floats() {
            Some(values) => {
                let values = frit_ir::TensorData::Float(values.to_vec());
                Tensor::exact(param.ty.clone(), values)
            }
            None => stored,
        };
        Some((param.name.clone(), tensor.into()))
    };
    plan.params.iter().filter_map(one).collect()
}

/// The narrowest float type that a plan rounds to before its update.
pub(super) fn narrowest(plan: &Plan) -> DType {
    let tasks = || plan.tasks.iter().filter(|t| t.region != Region::Update);
    let used = tasks().filter_map(|t| match &t.action {
        Action::Kernel { kernel, .. } => Some(*kernel),
        _ => None,
    });
    let bodies = used.map(|kernel| &plan.kernels[kernel].body);
    let values =
        bodies.flat_map(|b| b.nodes().flat_map(|(_, n)| n.outputs.iter().map(|v| b.ty(*v).dtype)));
    let places = tasks().flat_map(|t| t.action.reads()).map(|p| p.ty.dtype);
    let floats = values.chain(places).filter(|d| d.is_float());
    floats.min_by_key(|d| d.mantissa_bits()).unwrap_or(DType::F32)
}

/// The error of rounding to a dtype, relative to what is rounded.
pub(super) fn rounding(dtype: DType) -> f64 {
    2f64.powi(-(dtype.mantissa_bits() as i32) - 1)
}

/// What an execution computed.
pub(super) struct Executed {
    pub(super) recorded: Recorded,
    /// The first step that was not skipped.
    pub(super) at: usize,
}

impl Executed {
    /// Runs a plan until its first steps are taken.
    ///
    /// # Errors
    /// If it fails, or every step is skipped.
    pub(super) fn of(dir: &PlanDir, data: &Data, options: &Options) -> Result<Executed, Report> {
        for steps in [UPDATES, SCALING_STEPS] {
            let options = Options { steps, ..options.clone() };
            let mut recorded = record(dir, data, &options).map_err(refused)?;
            let taken = recorded.steps.iter().enumerate().filter(|(_, s)| !is_skipped(s));
            let taken: Vec<usize> = taken.map(|(k, _)| k).collect();
            if let [first, .., last] = taken[..] {
                recorded.steps.truncate(taken.get(UPDATES - 1).copied().unwrap_or(last) + 1);
                return Ok(Executed { recorded, at: first });
            }
        }
        let message = format!("gradients are not finite in any of {SCALING_STEPS} steps");
        let help = "`frit run --check-numerics` finds the first value that is not; or lower precision.init_scale";
        Err(Diagnostic::error(Code::AuditFailed, message).help(help).into())
    }

    /// The step whose gradients are compared.
    pub(super) fn step(&self) -> &Step {
        &self.recorded.steps[self.at]
    }

    /// By how much that step changes a parameter.
    pub(super) fn change(&self, name: &str) -> Vec<f64> {
        change(&self.recorded, self.at, name)
    }
}

fn is_skipped(step: &Step) -> bool {
    step.metrics.get(&MetricName::FoundInf).is_some_and(|x| *x != 0.0)
}

/// By how much a step changes a parameter.
pub(super) fn change(recorded: &Recorded, at: usize, name: &str) -> Vec<f64> {
    let key = format!("param/{name}");
    let before: &State = match at {
        0 => &recorded.start,
        at => &recorded.steps[at - 1].after,
    };
    let (before, after) = (before.get(&key), recorded.steps[at].after.get(&key));
    let pairs = before.into_iter().flatten().zip(after.into_iter().flatten());
    pairs.map(|(before, after)| after - before).collect()
}

/// The rounding errors of results, in norms.
#[derive(Clone, Debug, Default)]
pub(super) struct Noise {
    pub(super) loss: f64,
    /// Of gradients by parameter.
    pub(super) gradients: BTreeMap<String, f64>,
    /// Of changes by a step.
    pub(super) changes: BTreeMap<String, f64>,
}

impl Noise {
    /// Of a plan that starts from these parameters, of which this is an execution.
    ///
    /// # Errors
    /// If an execution fails.
    pub(super) fn of(
        dir: &PlanDir,
        data: &Data,
        options: &Options,
        (executed, seed): (&Executed, u64),
    ) -> Result<Noise, Report> {
        let unit = 2.0 * rounding(narrowest(&dir.plan));
        let mut noise = Noise::default();
        let add = |all: &mut BTreeMap<String, f64>, name: &str, a: &[f64], b: &[f64]| {
            let square: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
            *all.entry(name.into()).or_default() += square / SAMPLES as f64;
        };
        for sample in 1..=SAMPLES {
            let mut options = Options { steps: executed.at + 1, ..options.clone() };
            for param in dir.plan.params.iter().filter(|p| p.kind == ParamKind::Trainable) {
                let Some(bytes) = options.params.get_mut(&param.name) else { continue };
                let own = seed ^ super::digest(&param.name) ^ sample.wrapping_mul(0x9E37_79B9);
                let mut random = fastrand::Rng::with_seed(own);
                each(bytes, |x| x * (1.0 + unit * (2.0 * random.f64() - 1.0)));
            }
            let recorded = record(dir, data, &options).map_err(refused)?;
            let (own, base) = (&recorded.steps[executed.at], executed.step());
            let loss = |step: &Step| step.metrics.get(&MetricName::Loss).copied();
            let (Some(a), Some(b)) = (loss(own), loss(base)) else { continue };
            noise.loss += (a - b).powi(2) / SAMPLES as f64;
            for (name, gradient) in &base.gradients {
                let wide = |g: &[f32]| g.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
                let found = own.gradients.get(name).map(|g| wide(g)).unwrap_or_default();
                add(&mut noise.gradients, name, &found, &wide(gradient));
            }
            for key in recorded.start.keys() {
                let Some(name) = key.strip_prefix("param/") else { continue };
                let found = change(&recorded, executed.at, name);
                add(&mut noise.changes, name, &found, &executed.change(name));
            }
        }
        noise.loss = noise.loss.sqrt();
        for all in [&mut noise.gradients, &mut noise.changes] {
            all.values_mut().for_each(|x| *x = x.sqrt());
        }
        Ok(noise)
    }
}
