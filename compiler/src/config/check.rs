//! Checks the configuration for contradictions between keys.

use super::Config;
use super::choices::BatchNorm;
use super::kind::AUTO;
use super::losses;
use crate::diagnostics::Report;
use frit_ir::ops::reproducible::MAX_PIECES;
use frit_ir::ops::{OptimizerKind, ScheduleKind};
use frit_ir::plan::{DeviceType, Strategy};
use frit_ir::{Code, DType, Diagnostic};
use frit_passes::loss::LossKind;
use frit_passes::offload::Offload;

/// Contradictions among valid values.
pub(super) fn check(config: &Config) -> Report {
    let found = [
        weightless(config),
        schedule(config),
        one_cycle_warm_up(config),
        fp8(config),
        offload(config),
        group(config),
        muon(config),
        separator(config),
        reproducible(config),
    ];
    Report { diagnostics: found.into_iter().flatten().collect() }
}

fn wrong(message: String, help: impl Into<String>) -> Diagnostic {
    Diagnostic::error(Code::ConfigContradiction, message).help(help)
}

/// Losses that all have the factor 0, so that every gradient is zero.
fn weightless(config: &Config) -> Option<Diagnostic> {
    let terms = losses::terms(config).ok()?;
    let trains = config.loss.kind != LossKind::None;
    (trains && terms.iter().all(|term| term.weight == 0.0)).then(|| {
        let also = if terms.len() > 1 { " and every weight of `loss.also`" } else { "" };
        let message = format!("`loss.weight`{also} is 0: all gradients would be zero");
        let help =
            "give a loss a weight above 0; loss.kind = \"none\" compiles the forward pass only";
        wrong(message, help)
    })
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

/// What cannot be the same on any number of ranks.
fn reproducible(config: &Config) -> Option<Diagnostic> {
    let (pieces, ranks) = (config.run.reproducible?, config.sharding.ranks);
    let own = |key: &str, value: String, help: &str| {
        Some(wrong(format!("`run.reproducible` with `{key}` = {value}"), help))
    };
    if !pieces.is_power_of_two() || pieces > MAX_PIECES {
        let message =
            format!("`run.reproducible` = {pieces} is not a power of two up to {MAX_PIECES}");
        return Some(wrong(
            message,
            "it is the number of micro-batches of a step, which are added in pairs",
        ));
    }
    if !pieces.is_multiple_of(ranks) {
        let message =
            format!("`sharding.ranks` = {ranks} does not divide `run.reproducible` = {pieces}");
        return Some(wrong(
            message,
            "use a power of two of ranks, at most as many as the step has micro-batches",
        ));
    }
    if config.run.accumulation > 1 {
        let n = config.run.accumulation;
        let help = format!(
            "run.reproducible is the number of all micro-batches of a step; set it to {pieces} times {n}, and \
             remove run.accumulation"
        );
        return own("run.accumulation", n.to_string(), &help);
    }
    if !config.run.deterministic {
        let help = "kernels that add in any order do not compute the same bits even twice; leave run.deterministic true";
        return own("run.deterministic", "false".into(), help);
    }
    let kind = config.optimizer.kind;
    if matches!(kind, OptimizerKind::Adafactor | OptimizerKind::Muon) {
        let help = "its steps sum over whole parameters, in an order that depends on how these are sharded; use an optimizer \
            that steps each element by itself, such as adamw";
        return own("optimizer.kind", format!("\"{}\"", kind.word()), help);
    }
    if config.model.batch_norm == BatchNorm::Sync && pieces > 1 {
        let help = "statistics over the batches of all ranks need all pieces at once; with \"train\" each piece has its own";
        return own("model.batch_norm", "\"sync\"".into(), help);
    }
    if config.precision.fp8 {
        let help = "the amax history has a column per micro-step of a rank; use bf16";
        return own("precision.fp8", "true".into(), help);
    }
    if config.sharding.reduce_dtype != DType::F32 {
        let dtype = config.sharding.reduce_dtype;
        let help =
            "what ranks exchange would be rounded, and what one rank adds would not; use fp32";
        return own("sharding.reduce_dtype", format!("\"{dtype}\""), help);
    }
    if !config.data.drop_last {
        let help = "the last step of an epoch would have fewer pieces; leave data.drop_last true";
        return own("data.drop_last", "false".into(), help);
    }
    if config.memory.budget.is_some() && config.memory.loss_chunks.is_none() {
        let help = "to fit the budget the loss may be computed in more chunks on fewer ranks; set memory.loss_chunks to a number";
        return own("memory.loss_chunks", "\"auto\" and a memory.budget".into(), help);
    }
    if config.memory.budget.is_some() && config.target.device == DeviceType::Cuda {
        let help = "to fit the budget other values may be recomputed on fewer ranks, and a GPU's library may compute a GEMM with \
            another epilogue by another algorithm; set memory.recompute and memory.offload instead";
        return own("target.device", "\"cuda\" and a memory.budget".into(), help);
    }
    if config.memory.budget.is_some() && config.memory.recompute.is_none() {
        let help = "to fit the budget more may be recomputed on fewer ranks; set memory.recompute to \"none\", \"selective\" or \"unit\"";
        return own("memory.recompute", "\"auto\" and a memory.budget".into(), help);
    }
    None
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
