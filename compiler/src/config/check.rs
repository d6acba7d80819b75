//! Checks the configuration for contradictions between keys.

use super::Config;
use super::kind::AUTO;
use crate::diagnostics::Report;
use frit_ir::ops::{OptimizerKind, ScheduleKind};
use frit_ir::plan::Strategy;
use frit_ir::{Code, DType, Diagnostic};
use frit_passes::offload::Offload;

/// Contradictions among valid values.
pub(super) fn check(config: &Config) -> Report {
    let found = [
        schedule(config),
        one_cycle_warm_up(config),
        fp8(config),
        offload(config),
        group(config),
        muon(config),
        separator(config),
    ];
    Report { diagnostics: found.into_iter().flatten().collect() }
}

fn wrong(message: String, help: impl Into<String>) -> Diagnostic {
    Diagnostic::error(Code::ConfigContradiction, message).help(help)
}

/// A schedule without the key that it requires.
fn schedule(config: &Config) -> Option<Diagnostic> {
    let s = &config.schedule;
    let rise = s.pct_start * s.total_steps as f64;
    match s.kind {
        ScheduleKind::Linear | ScheduleKind::Cosine if s.total_steps <= s.warmup_steps => {
            let message = format!(
                "`schedule.total_steps` is {}, not above `schedule.warmup_steps` = {}",
                s.total_steps, s.warmup_steps
            );
            let kind = s.kind.word();
            Some(wrong(message, format!("a {kind} schedule needs to know where it ends")))
        }
        ScheduleKind::Step if s.step_size == 0 => {
            let help = "a step schedule needs the number of steps between two changes";
            Some(wrong("`schedule.step_size` is 0".into(), help))
        }
        ScheduleKind::OneCycle if !(rise > 1.0 && rise < s.total_steps as f64) => {
            let message = format!(
                "`schedule.pct_start` = {} of `schedule.total_steps` = {} has no step to rise or \
                 none to fall",
                s.pct_start, s.total_steps
            );
            let help = "one_cycle needs total_steps, and more than one step on either side";
            Some(wrong(message, help))
        }
        _ => None,
    }
}

/// A schedule that warms up itself, with another warm-up.
fn one_cycle_warm_up(config: &Config) -> Option<Diagnostic> {
    let s = &config.schedule;
    (s.kind == ScheduleKind::OneCycle && s.warmup_steps > 0).then(|| {
        let help = "one_cycle warms up itself, over schedule.pct_start of all steps";
        wrong("`schedule.warmup_steps` with a one_cycle schedule".into(), help)
    })
}

/// Labels of the token that ends a document, which a model then never learns to give.
fn separator(config: &Config) -> Option<Diagnostic> {
    let separator = config.data.document_separator?;
    (i64::try_from(separator) == Ok(config.loss.ignore_index)).then(|| {
        let message = format!(
            "`loss.ignore_index` is {separator}, and so is `data.document_separator`: no label of \
             the token that ends a document would count"
        );
        wrong(message, "pad with another token, or with -100 in the labels")
    })
}

/// fp8 without bf16.
fn fp8(config: &Config) -> Option<Diagnostic> {
    let p = &config.precision;
    (p.fp8 && p.compute != DType::BF16).then(|| {
        let message = format!("`precision.fp8` with `precision.compute` = {}", p.compute);
        let help = "fp8 matmuls quantize bf16 values; set precision.compute = \"fp8\"";
        wrong(message, help)
    })
}

/// Two keys that say different things of what rests in host memory.
fn offload(config: &Config) -> Option<Diagnostic> {
    let offload = match config.memory.offload {
        Some(Offload::None | Offload::Parameters) => return None,
        Some(Offload::Optimizer) => Offload::Optimizer.word(),
        None => AUTO,
    };
    config.sharding.cpu_offload.then(|| {
        let message =
            format!("`sharding.cpu_offload` = true with `memory.offload` = \"{offload}\"");
        let help = "sharding.cpu_offload means memory.offload = \"parameters\"; set one of the two";
        wrong(message, help)
    })
}

/// What has a meaning only beside Muon.
fn muon(config: &Config) -> Option<Diagnostic> {
    let o = &config.optimizer;
    if o.kind == OptimizerKind::Muon {
        return None;
    }
    let groups = || o.groups.iter().any(|g| g.kind.is_some());
    let key = [
        ("optimizer.adamw_lr", o.adamw_lr.is_some()),
        ("optimizer.adamw_weight_decay", o.adamw_weight_decay.is_some()),
        ("kind` of `[[optimizer.group]]", groups()),
    ];
    let (key, _) = key.into_iter().find(|(_, set)| *set)?;
    let kind = o.kind.word();
    let help = "it says what AdamW steps beside Muon; set optimizer.kind = \"muon\", or remove it";
    Some(wrong(format!("`{key}` has no effect with `optimizer.kind` = \"{kind}\""), help))
}

/// A group of ranks that is missing, does not fit, or has no meaning.
fn group(config: &Config) -> Option<Diagnostic> {
    let (ranks, group) = (config.sharding.ranks, config.sharding.shard_group);
    let message = match (config.sharding.strategy, group) {
        (Strategy::HybridShard, 0) => "`hybrid_shard` needs `sharding.shard_group`".into(),
        (Strategy::HybridShard, n) if !ranks.is_multiple_of(n) => {
            format!("`sharding.shard_group` = {n} does not divide {ranks} ranks")
        }
        (Strategy::HybridShard, _) | (_, 0) => return None,
        (other, _) => format!("`sharding.shard_group` has no meaning in `{}`", other.word()),
    };
    let help = "only hybrid_shard uses it: the number of ranks that share one copy of the \
        parameters, such as the GPUs of a node";
    Some(wrong(message, help))
}
