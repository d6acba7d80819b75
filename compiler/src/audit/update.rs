//! Updates of a plan beside the rules of its optimizer, from its own gradients, element by element.

use super::rules::{self, Muon, Numbers};
use super::{Agreement, Verdict, gradients::norm};
use crate::config::Config;
use crate::config::choices::Decay;
use crate::pipeline::scaling;
use frit_ir::TensorType;
use frit_ir::ops::{OptimizerKind, ScheduleKind};
use frit_ir::plan::{MetricName, Plan};
use frit_passes::loss_scale::LossScaling;
use frit_runtime::record::{Recorded, State, Step};
use std::collections::BTreeMap;

/// Relative errors of f32: of what a rule adds up, where bias corrections cancel; and of state.
const ADDED: f64 = 2e-4;
const KEPT: f64 = 2e-5;
/// Errors of what is stored, relative to it: a few roundings to f32.
const STORED: f64 = 3e-7;
/// Relative error of Muon's direction in bf16, in norm.
pub(super) const NARROW: f64 = 0.08;
/// Relative error of weight decay, and standard deviations by which it may be off.
const DECAY: (f64, f64) = (0.02, 8.0);

/// Compares every step of an execution. `types` are those of the parameters that train.
pub(super) fn check(
    plan: &Plan,
    config: &Config,
    recorded: &Recorded,
    types: &BTreeMap<&str, &TensorType>,
) -> Vec<Agreement> {
    let mut found = started(plan, config, recorded, types);
    let (mut before, mut taken) = (&recorded.start, 0);
    for (number, step) in recorded.steps.iter().enumerate() {
        let check = Check { config, types, before, step, taken, number };
        let is_finite = step.gradients.values().flatten().all(|g| g.is_finite());
        if is_finite {
            for name in step.gradients.keys() {
                found.push(check.parameter(name));
            }
            taken += 1;
        } else {
            found.extend(check.kept());
        }
        found.extend(check.scalars(plan, is_finite));
        before = &step.after;
    }
    found
}

/// State before the first step: zeros, averages that are the parameters, and the first loss scale.
fn started(
    plan: &Plan,
    config: &Config,
    recorded: &Recorded,
    types: &BTreeMap<&str, &TensorType>,
) -> Vec<Agreement> {
    let mut found = Vec::new();
    for (key, values) in &recorded.start {
        let (kind, name) = key.split_once('/').unwrap_or(("", key));
        let expected: Vec<f64> = match (kind, name) {
            ("param", _) => continue,
            ("ema", _) => recorded.start.get(&format!("param/{name}")).cloned().unwrap_or_default(),
            ("state", "loss_scale") => vec![single(scaling(config).init())],
            ("state", "rng") => {
                let [ranks, accumulation] = [plan.world_size, plan.accumulation];
                [config.run.seed as usize, 0, 0, ranks, accumulation].map(|x| x as f64).to_vec()
            }
            _ => vec![0.0; values.len()],
        };
        if *values != expected {
            let name = if types.contains_key(name) { Some(name) } else { None };
            found.push(Agreement::of(name, format!("{key} before step 1"), f64::INFINITY, 0.0));
        }
    }
    found
}

struct Check<'a> {
    config: &'a Config,
    types: &'a BTreeMap<&'a str, &'a TensorType>,
    before: &'a State,
    step: &'a Step,
    /// Steps that were taken before.
    taken: usize,
    /// Steps before.
    number: usize,
}

impl Check<'_> {
    fn what(&self, of: &str) -> String {
        format!("{of} in step {}", self.number + 1)
    }

    /// The parameter's optimizer, by the state that the plan keeps of it where there are two.
    fn kind(&self, name: &str) -> OptimizerKind {
        let adamw = self.before.contains_key(&format!("adam_m/{name}"));
        match self.config.optimizer.kind {
            OptimizerKind::Muon if adamw => OptimizerKind::Adamw,
            kind => kind,
        }
    }

    /// The optimizer's numbers for a parameter.
    fn numbers(&self, name: &str, kind: OptimizerKind) -> Numbers {
        let c = &self.config.optimizer;
        let (mut lr, mut weight_decay) = (c.lr, c.weight_decay);
        if c.kind == OptimizerKind::Muon && kind == OptimizerKind::Adamw {
            lr = c.adamw_lr.unwrap_or(lr);
            weight_decay = c.adamw_weight_decay.unwrap_or(weight_decay);
        }
        let rank = self.types.get(name).map_or(0, |ty| ty.shape.rank());
        if c.decay == Decay::Matrices && rank <= 1 {
            weight_decay = 0.0;
        }
        for group in c.groups.iter().filter(|g| g.covers(name)) {
            lr = group.lr.unwrap_or(lr);
            weight_decay = group.weight_decay.unwrap_or(weight_decay);
        }
        Numbers {
            lr: single(self.rate(lr)),
            weight_decay: single(weight_decay),
            betas: c.betas.map(single),
            eps: single(c.eps),
            momentum: single(c.momentum),
            dampening: single(c.dampening),
            decay_exponent: single(c.decay_exponent),
            relative_eps: single(c.relative_eps),
            update_threshold: single(c.update_threshold),
            muon: Muon {
                momentum: single(c.muon_momentum),
                nesterov: c.muon_nesterov,
                steps: c.muon_ns_steps,
                coefficients: c.muon_ns_coefficients.map(single),
                eps: single(c.muon_ns_eps),
                adjust_lr: c.muon_adjust_lr,
            },
        }
    }

    /// The learning rate of this step, from that of the configuration.
    fn rate(&self, lr: f64) -> f64 {
        let (s, step) = (&self.config.schedule, self.taken as f64);
        let half_cosine = |from: f64, to: f64, part: f64| {
            to + 0.5 * (from - to) * (1.0 + (std::f64::consts::PI * part).cos())
        };
        if s.kind == ScheduleKind::OneCycle {
            let (first, total) = (lr / s.div_factor, s.total_steps as f64);
            let (top, end) = (s.pct_start * total - 1.0, total - 1.0);
            return match step <= top {
                true => half_cosine(first, lr, step / top),
                false => {
                    let part = ((step - top) / (end - top)).min(1.0);
                    half_cosine(lr, first / s.final_div_factor, part)
                }
            };
        }
        let warmup = s.warmup_steps as f64;
        if step < warmup {
            return lr * (step + 1.0) / warmup;
        }
        let after = step - warmup;
        let part = (after / (s.total_steps as f64 - warmup).max(1.0)).min(1.0);
        match s.kind {
            ScheduleKind::Step => lr * s.gamma.powf((after / s.step_size as f64).floor()),
            ScheduleKind::Linear => lr + (s.min_lr - lr) * part,
            ScheduleKind::Cosine => half_cosine(lr, s.min_lr, part),
            ScheduleKind::Constant | ScheduleKind::OneCycle => lr,
        }
    }

    /// The norm of all gradients.
    fn norm(&self) -> f64 {
        let all = self.step.gradients.values().flatten();
        all.map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt()
    }

    /// The gradient of a parameter as the optimizer gets it.
    fn clipped(&self, name: &str) -> Vec<f64> {
        let c = &self.config.optimizer;
        let factor = match c.clip_grad_norm {
            0.0 => 1.0,
            most => (single(most) / (self.norm() + 1e-6)).min(1.0),
        };
        let most = if c.clip_grad_value == 0.0 { f64::INFINITY } else { single(c.clip_grad_value) };
        let clip = |g: &f32| (f64::from(*g) * factor).clamp(-most, most);
        self.step.gradients.get(name).into_iter().flatten().map(clip).collect()
    }

    /// Compares a parameter and its state with the rule.
    fn parameter(&self, name: &str) -> Agreement {
        let kind = self.kind(name);
        let missing = || Agreement::of(Some(name), self.what("its state"), f64::INFINITY, 0.0);
        let read = |state: &State, key: &str| state.get(key).cloned();
        let keys: Vec<String> = kind
            .states(name)
            .iter()
            .map(|state| match kind.has_states_by_element() {
                true => format!("{}/{name}", state.word()),
                false => format!("state/{state}"),
            })
            .collect();
        let param = format!("param/{name}");
        let states = keys.iter().map(|key| read(self.before, key)).collect::<Option<Vec<_>>>();
        let (Some(ty), Some(states)) = (self.types.get(name), states) else { return missing() };
        let (Some(old), Some(new)) = (read(self.before, &param), read(&self.step.after, &param))
        else {
            return missing();
        };
        let (numbers, gradient) = (self.numbers(name, kind), self.clipped(name));
        let t = self.taken as f64 + 1.0;
        if gradient.len() != old.len() || new.len() != old.len() {
            return missing();
        }
        let shape = ty.shape.dims();
        let outcome = rules::step(kind, &numbers, (shape, t), (&old, &gradient), &states);
        let expected: Vec<f64> = old
            .iter()
            .zip(&outcome.change.values)
            .map(|(p, change)| p * (1.0 + outcome.shrinks) + change)
            .collect();
        let sizes: Vec<f64> = old
            .iter()
            .zip(&outcome.change.sizes)
            .map(|(p, size)| ADDED * (size + (outcome.shrinks * p).abs()) + STORED * p.abs())
            .collect();
        let changed = |values: &[f64]| -> Vec<f64> {
            values.iter().zip(&old).map(|(new, old)| new - old).collect()
        };
        let (by, wanted) = (changed(&new), changed(&expected));
        let off = norm(&new.iter().zip(&expected).map(|(a, b)| a - b).collect::<Vec<_>>());
        let relative = off / norm(&wanted).max(f64::MIN_POSITIVE);
        let mut excess = match kind {
            OptimizerKind::Muon => {
                let stored = STORED * norm(&old);
                off / (NARROW * norm(&wanted) + stored).max(f64::MIN_POSITIVE)
            }
            _ => largest(&new, &expected, &sizes),
        };
        let mut worst = name.to_string();
        if decays_apart(kind) && !shrinks(&by, &outcome.change.values, &old, outcome.shrinks) {
            (excess, worst) = (excess.max(2.0), format!("weight decay of {name}"));
        }
        for ((key, before), after) in keys.iter().zip(&states).zip(&outcome.states) {
            let Some(new) = read(&self.step.after, key) else { return missing() };
            let pairs = before.iter().zip(&after.sizes);
            let sizes: Vec<f64> = pairs.map(|(old, size)| KEPT * (size + old.abs())).collect();
            let own = largest(&new, &after.values, &sizes);
            if own > excess {
                (excess, worst) = (own, key.clone());
            }
        }
        if let Some((own, key)) = self.average(name, &new).filter(|(own, _)| *own > excess) {
            (excess, worst) = (own, key);
        }
        let mut found = Agreement::of(Some(name), self.what(&worst), excess, 1.0);
        found.digits = super::digits(relative);
        found
    }

    /// The moving average of a parameter whose new value is this.
    fn average(&self, name: &str, new: &[f64]) -> Option<(f64, String)> {
        if self.config.optimizer.ema == 0.0 {
            return None;
        }
        let (key, decay) = (format!("ema/{name}"), single(self.config.optimizer.ema));
        let (Some(before), Some(after)) = (self.before.get(&key), self.step.after.get(&key)) else {
            return Some((f64::INFINITY, key));
        };
        let mixed = before.iter().zip(new).map(|(old, new)| match self.taken {
            0 => *new,
            _ => decay * old + (1.0 - decay) * new,
        });
        let sizes: Vec<f64> =
            before.iter().zip(new).map(|(a, b)| STORED * (a.abs() + b.abs())).collect();
        Some((largest(after, &mixed.collect::<Vec<_>>(), &sizes), key))
    }

    /// What a step whose gradients are not finite must not change.
    fn kept(&self) -> Vec<Agreement> {
        let kept =
            |key: &str| !matches!(key, "state/loss_scale" | "state/growth_tracker" | "state/rng");
        let changed = self.before.iter().filter(|(key, old)| {
            kept(key) && !key.starts_with("state/amax") && self.step.after.get(*key) != Some(old)
        });
        let one = |(key, _): (&String, &Vec<f64>)| {
            let name = key.split_once('/').map(|(_, name)| name);
            let name = name.filter(|name| self.types.contains_key(name));
            Agreement::of(name, self.what(&format!("{key}, which is skipped,")), f64::INFINITY, 0.0)
        };
        changed.map(one).collect()
    }

    /// Counters, the loss scale and what is reported.
    fn scalars(&self, plan: &Plan, is_taken: bool) -> Vec<Agreement> {
        let old = |name: &str| self.before.get(&format!("state/{name}")).map(|v| v[0]);
        let mut expected: Vec<(&str, f64)> = vec![];
        expected.push(("step", self.taken as f64 + f64::from(u8::from(is_taken))));
        let scale = old("loss_scale").unwrap_or(1.0);
        if let LossScaling::Dynamic { growth_factor, backoff_factor, growth_interval, .. } =
            scaling(self.config)
        {
            let tracker = old("growth_tracker").unwrap_or(0.0) + 1.0;
            let grown = scale * growth_factor;
            let (scale, tracker) = match (is_taken, tracker >= growth_interval) {
                (false, _) => (scale * backoff_factor, 0.0),
                (true, true) => (if (grown as f32).is_finite() { grown } else { scale }, 0.0),
                (true, false) => (scale, tracker),
            };
            expected.extend([("loss_scale", scale), ("growth_tracker", tracker)]);
        } else {
            expected.push(("loss_scale", single(scaling(self.config).init())));
        }
        let after = |name: &str| self.step.after.get(&format!("state/{name}")).map(|v| v[0]);
        let mut found: Vec<Agreement> = expected
            .into_iter()
            .filter_map(|(name, value)| {
                let error = (after(name)? - value).abs() / value.abs().max(1.0);
                Some(Agreement::of(None, self.what(name), error, STORED))
            })
            .collect();
        let mut metric = |name: MetricName, value: f64, allowed: f64| {
            let own = self.step.metrics.get(&name).copied().unwrap_or(f64::NAN);
            let error = (own - value).abs() / value.abs().max(f64::from(f32::MIN_POSITIVE));
            let error = if own == value { 0.0 } else { error };
            found.push(Agreement::of(
                None,
                self.what(&format!("the metric {}", name.word())),
                error,
                allowed,
            ));
        };
        metric(MetricName::FoundInf, f64::from(u8::from(!is_taken)), 0.0);
        metric(MetricName::LossScale, scale, 0.0);
        metric(MetricName::Lr, self.rate(self.config.optimizer.lr), 1e-5);
        if is_taken {
            metric(MetricName::GradNorm, self.norm(), 1e-4);
        }
        if let (Some(before), Some(after)) =
            (self.before.get("state/rng"), self.step.after.get("state/rng"))
        {
            let moved = (after[2] - before[2] - plan.accumulation as f64).abs();
            found.push(Agreement::of(None, self.what("the random state"), moved, 0.0));
        }
        found
    }
}

/// Whether weight decay is apart from the gradient.
fn decays_apart(kind: OptimizerKind) -> bool {
    use OptimizerKind::{Adafactor, Adamw, Lion, Muon};
    matches!(kind, Adamw | Lion | Muon | Adafactor)
}

/// Whether a change is along a direction and, by this factor, along the parameter: by least squares, which tell a small decay
/// from the errors of the direction.
fn shrinks(by: &[f64], direction: &[f64], param: &[f64], factor: f64) -> bool {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let (dd, pp, dp) = (dot(direction, direction), dot(param, param), dot(direction, param));
    let apart = dd * pp - dp * dp;
    if param.len() < 16 || apart <= 1e-3 * dd * pp {
        return true;
    }
    let (bd, bp) = (dot(by, direction), dot(by, param));
    let (along, own) = ((bd * pp - bp * dp) / apart, (bp * dd - bd * dp) / apart);
    let left = by.iter().zip(direction).zip(param).map(|((b, d), p)| b - along * d - own * p);
    let variance = left.map(|x| x * x).sum::<f64>() / (param.len() - 2) as f64;
    let deviation = (variance * dd / apart).sqrt();
    let (part, deviations) = DECAY;
    // Elements of one size are rounded alike, each by up to half of the distance to the next number of f32.
    let rounding = f64::from(f32::EPSILON) / 2.0;
    (own - factor).abs() <= part * factor.abs() + deviations * deviation + rounding
}

/// The largest difference of an element, relative to what it may be.
fn largest(found: &[f64], expected: &[f64], sizes: &[f64]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let one = |((a, b), size): ((&f64, &f64), &f64)| match (a - b).abs() {
        0.0 => 0.0,
        off if off.is_finite() => off / size.max(1e-37),
        _ => f64::INFINITY,
    };
    found.iter().zip(expected).zip(sizes).map(one).fold(0.0, f64::max)
}

/// As f32 holds it.
fn single(x: f64) -> f64 {
    f64::from(x as f32)
}

impl Agreement {
    /// A comparison of which this error is allowed.
    pub(super) fn of(parameter: Option<&str>, what: String, error: f64, allowed: f64) -> Agreement {
        let verdict = if error <= allowed { Verdict::Right } else { Verdict::Wrong };
        let digits = super::digits(error);
        Agreement {
            parameter: parameter.map(str::to_string),
            what,
            error,
            allowed,
            digits,
            verdict,
        }
    }
}
