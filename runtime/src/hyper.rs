//! Hyper-parameters of a run: the plan's, overridden by a resumed checkpoint and by `--set`.

use crate::RunError;
use crate::checkpoint::Checkpoint;
use frit_ir::Op;
use frit_ir::nearest::alike;
use frit_ir::ops::ScheduleKind;
use frit_ir::plan::Plan;

/// What a hyper-parameter must be, in words, and whether a value is that: as in the configuration, but that any is known here by its name.
fn expected(name: &str) -> (&'static str, fn(f64) -> bool) {
    match name {
        // Coefficients of a polynomial.
        "optimizer.muon_ns_a" | "optimizer.muon_ns_b" | "optimizer.muon_ns_c" => {
            ("a number below 3.4e38", |x| (x as f32).is_finite())
        }
        "optimizer.beta1" | "optimizer.beta2" => {
            ("a number from 0 to below 1", |x| (0.0..1.0).contains(&x))
        }
        "optimizer.momentum"
        | "optimizer.dampening"
        | "optimizer.muon_momentum"
        | "optimizer.ema"
        | "schedule.pct_start" => ("a number from 0 to 1", |x| (0.0..=1.0).contains(&x)),
        "schedule.warmup_steps"
        | "schedule.total_steps"
        | "schedule.step_size"
        | "precision.growth_interval" => {
            // Steps are counted in f32.
            ("a whole number from 0 to 16777216", |x| {
                x.fract() == 0.0 && (0.0..=16_777_216.0).contains(&x)
            })
        }
        _ => ("a number of at least 0 and below 3.4e38", |x| x >= 0.0 && (x as f32).is_finite()),
    }
}

/// Checks hyper-parameters given to a run.
///
/// # Errors
/// The first unknown name, with a suggestion, or invalid value.
pub(crate) fn check(plan: &Plan, hyper: &[(String, f64)]) -> Result<(), RunError> {
    for (name, value) in hyper {
        if plan.hyper.iter().all(|h| h.name != *name) {
            let known: Vec<&str> = plan.hyper.iter().map(|h| h.name.as_str()).collect();
            let configured = configuration_keys(&plan.config);
            let all = known.iter().copied().chain(configured.iter().map(String::as_str));
            let remedy = match alike(name, all) {
                Some(key) if key == name => format!(
                    "this key of the configuration is fixed when a model is compiled: compile it again with \
                     --set {name}=VALUE"
                ),
                Some(key) => format!("did you mean `{key}`?"),
                None => "`frit compile --help-config` lists all keys".into(),
            };
            return Err(RunError::Hyper { name: name.clone(), remedy, known: known.join(", ") });
        }
        let (expected, fits) = expected(name);
        if !fits(*value) {
            return Err(RunError::HyperValue { name: name.clone(), value: *value, expected });
        }
    }
    Ok(())
}

/// Checks that a schedule which ends does so after its warmup, in the hyper-parameters that are in effect.
///
/// # Errors
/// If it does not.
pub(crate) fn check_schedule(plan: &Plan, effective: &[(String, f64)]) -> Result<(), RunError> {
    let of = |name| value(plan, effective, name);
    let total = "schedule.total_steps";
    match (of(total), of("schedule.warmup_steps")) {
        (Some(steps), Some(warmup)) if ends(plan) && steps <= warmup => {
            let expected = "above `schedule.warmup_steps`";
            Err(RunError::HyperValue { name: total.into(), value: steps, expected })
        }
        _ => Ok(()),
    }
}

/// Whether the schedule leads from the base rate to `schedule.min_lr`.
fn ends(plan: &Plan) -> bool {
    plan.kernels.iter().flat_map(|kernel| kernel.body.nodes()).any(|(_, n)| {
        matches!(&n.op, Op::LearningRate(op) if matches!(op.kind, ScheduleKind::Linear | ScheduleKind::Cosine))
    })
}

/// A hyper-parameter as it is in effect; none if the plan does not have it.
fn value(plan: &Plan, effective: &[(String, f64)], name: &str) -> Option<f64> {
    let given = effective.iter().rev().find(|(given, _)| given == name).map(|(_, value)| *value);
    given.or_else(|| plan.hyper.iter().find(|h| h.name == name).map(|h| h.value))
}

/// That the learning rate of every parameter is zero in all steps, in the hyper-parameters that are in effect.
pub(crate) fn zero_rate(plan: &Plan, effective: &[(String, f64)]) -> Option<String> {
    let is_rate = |name: &str| name.starts_with("optimizer.") && name.ends_with("lr");
    let is_zero = |name: &str| value(plan, effective, name).is_none_or(|value| value == 0.0);
    let mut rates = plan.hyper.iter().filter(|h| is_rate(&h.name)).peekable();
    rates.peek()?;
    let stays = !ends(plan) || is_zero("schedule.min_lr");
    (stays && rates.all(|h| is_zero(&h.name)))
        .then(|| "optimizer.lr is 0: no step changes a parameter".into())
}

/// The keys of the plan's configuration, as `section.key`.
fn configuration_keys(config: &str) -> Vec<String> {
    let (mut section, mut keys) = ("", Vec::new());
    for line in config.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            section = name.trim_matches(['[', ']']);
        } else if let Some((key, _)) = line.split_once('=').filter(|_| !line.starts_with('#')) {
            keys.push(format!("{section}.{}", key.trim()));
        }
    }
    keys
}

/// Hyper-parameters that differ from the plan's: those of the resumed checkpoint, then those of this run.
pub(crate) fn effective(
    plan: &Plan,
    asked: &[(String, f64)],
    resumed: Option<&Checkpoint>,
) -> Vec<(String, f64)> {
    let mut set = resumed.map(|c| c.index.set.clone()).unwrap_or_default();
    set.retain(|name, _| plan.hyper.iter().any(|h| h.name == *name));
    set.extend(asked.iter().cloned());
    set.into_iter().collect()
}
