//! Finds settings that were written and have no effect beside the others, such as the momentum of an optimizer that has none.

use super::choices::{AdapterKind, Prefetch};
use super::field::LossScale;
use super::kind::Value;
use super::losses;
use super::{Config, KEYS, Values};
use frit_ir::ops::{OptimizerKind, ScheduleKind};
use frit_ir::{Code, DType, Diagnostic};
use frit_passes::loss::LossKind;
use std::collections::BTreeMap;

/// Where keys were written, by key.
pub(super) type Written = BTreeMap<&'static str, String>;

/// Keys with the setting that decides whether they have an effect.
struct Rule {
    keys: &'static [&'static str],
    /// That setting.
    by: &'static str,
    /// The values with which the key has an effect, in words; none if it has one.
    needs: fn(&Config, &str) -> Option<String>,
}

const RULES: &[Rule] = &[
    Rule {
        keys: &[
            "optimizer.betas",
            "optimizer.eps",
            "optimizer.momentum",
            "optimizer.dampening",
            "optimizer.decay_exponent",
            "optimizer.relative_eps",
            "optimizer.update_threshold",
            "optimizer.muon_momentum",
            "optimizer.muon_nesterov",
            "optimizer.muon_ns_steps",
            "optimizer.muon_ns_coefficients",
            "optimizer.muon_ns_eps",
            "optimizer.muon_adjust_lr",
        ],
        by: "optimizer.kind",
        needs: |config, key| {
            unless(OptimizerKind::ALL, config.optimizer.kind, OptimizerKind::word, |kind| {
                reads(kind, key)
            })
        },
    },
    Rule {
        keys: &[
            "schedule.total_steps",
            "schedule.min_lr",
            "schedule.step_size",
            "schedule.gamma",
            "schedule.pct_start",
            "schedule.div_factor",
            "schedule.final_div_factor",
        ],
        by: "schedule.kind",
        needs: |config, key| {
            unless(ScheduleKind::ALL, config.schedule.kind, ScheduleKind::word, |kind| {
                // A constant schedule is one that ends where it begins.
                kind != ScheduleKind::Constant && kind.hypers().contains(&key)
            })
        },
    },
    Rule {
        keys: &["loss.label_smoothing"],
        by: "loss.kind",
        needs: |config, _| of_loss(config, &[LossKind::CrossEntropy]),
    },
    Rule {
        keys: &["loss.ignore_index", "loss.targets", "loss.class_axis"],
        by: "loss.kind",
        needs: |config, _| {
            // A metric may read them where the loss does not.
            let is_usual = config.metrics.report.iter().all(|metric| metric == super::kind::AUTO);
            let kinds = [LossKind::CrossEntropy, LossKind::Kl];
            of_loss(config, &kinds).filter(|_| is_usual)
        },
    },
    Rule {
        keys: &["loss.beta"],
        by: "loss.kind",
        needs: |config, _| of_loss(config, &[LossKind::SmoothL1]),
    },
    Rule {
        // That `adapter.targets` has none is an error.
        keys: &["adapter.rank", "adapter.alpha", "adapter.dropout"],
        by: "adapter.kind",
        needs: |config, _| {
            let lora = format!("\"{}\"", AdapterKind::Lora.word());
            (config.adapter.kind == AdapterKind::None).then_some(lora)
        },
    },
    Rule {
        keys: &["precision.fp8_history"],
        by: "precision.fp8",
        needs: |config, _| (!config.precision.fp8).then(|| "true".into()),
    },
    Rule {
        keys: &[
            "precision.init_scale",
            "precision.growth_factor",
            "precision.backoff_factor",
            "precision.growth_interval",
        ],
        by: "precision.loss_scale",
        needs: |config, _| {
            let p = &config.precision;
            let is_dynamic = match p.loss_scale {
                LossScale::Auto => p.compute == DType::F16,
                LossScale::Dynamic => true,
                LossScale::None | LossScale::Fixed(_) => false,
            };
            (!is_dynamic).then(|| "\"dynamic\", and with \"auto\" in fp16".into())
        },
    },
    Rule {
        keys: &[
            "sharding.backward_prefetch",
            "sharding.forward_prefetch",
            "sharding.limit_all_gathers",
        ],
        by: "sharding.prefetch",
        needs: |config, _| {
            let fixed = format!("\"{}\"", Prefetch::Fixed.word());
            (config.sharding.prefetch == Prefetch::Auto).then_some(fixed)
        },
    },
];

/// The values of a choice with which a key has an effect, unless the one that is set is among them.
fn unless<K: Copy + PartialEq>(
    all: &[K],
    set: K,
    word: fn(K) -> &'static str,
    has: impl Fn(K) -> bool,
) -> Option<String> {
    let words: Vec<String> =
        all.iter().filter(|k| has(**k)).map(|k| format!("\"{}\"", word(*k))).collect();
    (!has(set)).then(|| words.join(" or "))
}

/// Whether steps of an optimizer, or of the one beside it, read a key.
fn reads(kind: OptimizerKind, key: &str) -> bool {
    let own = key.strip_prefix("optimizer.").unwrap_or(key);
    if own.starts_with("muon_") {
        return kind == OptimizerKind::Muon;
    }
    let beside = (kind == OptimizerKind::Muon).then_some(OptimizerKind::Adamw);
    let name = if own == "betas" { "optimizer.beta1" } else { key };
    [Some(kind), beside].into_iter().flatten().any(|kind| kind.hypers().contains(&name))
}

/// The losses that read a key, unless one of them is computed.
fn of_loss(config: &Config, kinds: &[LossKind]) -> Option<String> {
    // What is wrong with the losses is an error of its own.
    let terms = losses::terms(config).ok()?;
    let words: Vec<String> = kinds.iter().map(|k| format!("\"{}\"", k.word())).collect();
    (!terms.iter().any(|term| kinds.contains(&term.kind))).then(|| words.join(" or "))
}

/// Warnings of the keys that were written and have no effect. A value of 0 is not warned of: `momentum = 0` says that there is no
/// momentum, which is so without an effect, too. A configuration that writes every key, as plans store it, means those with another
/// value than the default.
pub(super) fn find(config: &Config, written: &Written, values: &Values) -> Vec<Diagnostic> {
    if config.loss.kind == LossKind::None {
        // The configuration of a training is that of its evaluation, too.
        return vec![];
    }
    let is_whole = written.len() == KEYS.len();
    let zero = [Value::Number(0.0), Value::Integer(0)];
    let is_zero = |key: &str| values.get(key).is_some_and(|value| zero.contains(value));
    let is_meant = |key: &str| {
        let row = KEYS.iter().find(|row| row.name == key);
        !is_whole || row.is_some_and(|row| values.get(row.name) != Some(&row.default()))
    };
    let found = RULES.iter().flat_map(|rule| rule.keys.iter().map(move |key| (rule, *key)));
    let found =
        found.filter(|(_, key)| is_meant(key) && !is_zero(key)).filter_map(|(rule, key)| {
            let (place, needs) = (written.get(key)?, (rule.needs)(config, key)?);
            let set = values.get(rule.by).map(Value::to_toml)?;
            // The place of a `--set` names the key.
            let subject = match place.starts_with("--set ") {
                true => "it".into(),
                false => format!("`{key}`"),
            };
            let message = format!("{place}{subject} has no effect with `{}` = {set}", rule.by);
            let help = format!("it is read with {needs}: set {} so, or remove the key", rule.by);
            Some(Diagnostic::warning(Code::SettingUnused, message).help(help))
        });
    found.collect()
}
