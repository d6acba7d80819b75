//! Every step of compiling a training graph, top to bottom.
//!
//! The order is checked by [`check`] from what each pass requires, ensures and breaks.

use crate::config::Config;
use crate::config::LossScale;
use crate::config::choices::{self, Padding};
use crate::losses;
use crate::target::Backend;
use frit_ir::ops::{OptimizerKind, ScheduleKind};
use frit_ir::{DType, Diagnostic};
use frit_passes::autocast::{Autocast, Override};
use frit_passes::canonicalize::Canonicalize;
use frit_passes::differentiate::Differentiate;
use frit_passes::fuse::Fuse;
use frit_passes::loss::Loss;
use frit_passes::loss_scale::{LossScale as LossScalePass, LossScaling};
use frit_passes::pad_tensor_cores::{PadMode, PadTensorCores};
use frit_passes::raise::Raise;
use frit_passes::shard::{Shard, Strategy, Wrap};
use frit_passes::simplify::Simplify;
use frit_passes::update::{Optimizer, Schedule, Update};
use frit_passes::{Pass, PassInfo, Property};
use std::collections::HashSet;

/// What the passes need to know.
#[derive(Clone, Debug)]
pub struct Options {
    loss: Loss,
    compute: DType,
    overrides: Vec<Override>,
    padding: PadMode,
    /// What is compiled for.
    pub(crate) backend: Backend,
    accumulation: usize,
    scaling: LossScaling,
    optimizer: Optimizer,
    clip_grad_norm: f64,
    schedule: Schedule,
    world_size: usize,
    strategy: Strategy,
    wrap: Wrap,
    reshard_after_forward: Vec<String>,
    no_sync: bool,
}

/// The passes before the loss is differentiated: they decide how many elements the loss has.
pub fn forward(o: &Options) -> Vec<Box<dyn Pass>> {
    vec![
        Box::new(o.loss.clone()),
        Box::new(Canonicalize {}),
        Box::new(Raise {}),
        Box::new(Canonicalize {}),
        Box::new(Autocast { compute: o.compute, overrides: o.overrides.clone() }),
        Box::new(PadTensorCores {
            mode: o.padding,
            target_is_cuda: matches!(o.backend, Backend::Cuda(_)),
            alignment_bytes: 16,
        }),
    ]
}

/// The passes after the forward graph is final; the loss sums `capacity` elements.
pub fn training(o: &Options, capacity: f64) -> Vec<Box<dyn Pass>> {
    vec![
        Box::new(Differentiate { accumulation: o.accumulation, capacity }),
        Box::new(LossScalePass { scaling: o.scaling }),
        Box::new(Update {
            optimizer: o.optimizer,
            clip_grad_norm: o.clip_grad_norm,
            schedule: o.schedule,
            scaling: o.scaling,
            accumulation: o.accumulation,
            capacity,
            world_size: o.world_size,
        }),
        Box::new(Shard {
            world_size: o.world_size,
            strategy: o.strategy,
            wrap: o.wrap.clone(),
            reshard_after_forward: o.reshard_after_forward.clone(),
            no_sync: o.no_sync,
        }),
        Box::new(Simplify::default()),
        Box::new(Canonicalize {}),
        Box::new(Fuse { supported: o.backend.fuses() }),
    ]
}

/// Checks that every pass finds what it requires.
///
/// # Errors
/// The first pass that does not, and what it lacks.
pub fn check(passes: &[&'static PassInfo]) -> Result<(), Diagnostic> {
    let mut facts: HashSet<Property> = HashSet::new();
    for info in passes {
        for fact in info.requires {
            if !facts.contains(fact) {
                let message = format!("{} needs {fact:?}; no earlier pass ensures it", info.name);
                return Err(Diagnostic::error("B010", message));
            }
        }
        info.breaks.iter().for_each(|fact| {
            facts.remove(fact);
        });
        facts.extend(info.ensures);
    }
    Ok(())
}

impl Options {
    /// The options of a configuration.
    ///
    /// # Errors
    /// The first value that is not implemented, by its key.
    pub fn new(config: &Config) -> Result<Options, Diagnostic> {
        let c = config;
        let refuse = |condition: bool, key: &str, value: &str| {
            if !condition {
                return Ok(());
            }
            Err(Diagnostic::error("E055", format!("`{key} = {value}` is not implemented yet")))
        };
        refuse(c.sharding.cpu_offload, "sharding.cpu_offload", "true")?;
        refuse(c.sharding.param_dtype.is_some(), "sharding.param_dtype", "other than auto")?;
        refuse(c.sharding.buffer_dtype.is_some(), "sharding.buffer_dtype", "other than auto")?;
        let reduce = c.sharding.reduce_dtype;
        refuse(reduce != DType::F32, "sharding.reduce_dtype", reduce.name())?;
        let recompute = c.memory.recompute;
        refuse(recompute != choices::Recompute::None, "memory.recompute", recompute.word())?;
        refuse(c.memory.budget.is_some(), "memory.budget", "other than none")?;
        refuse(c.optimizer.ema != 0.0, "optimizer.ema", "other than 0")?;
        refuse(c.loss.kind == choices::LossKind::None, "loss.kind", "none")?;
        let mean = c.loss.reduction;
        refuse(mean != choices::Reduction::GlobalMean, "loss.reduction", mean.word())?;
        let norm = c.model.batch_norm;
        refuse(norm == choices::BatchNorm::Sync, "model.batch_norm", norm.word())?;
        refuse(c.data.validation != "none", "data.validation", "other than none")?;
        let kind = match c.optimizer.kind {
            choices::Optimizer::Adamw => OptimizerKind::Adamw,
            choices::Optimizer::Sgd => OptimizerKind::Sgd,
            choices::Optimizer::Momentum => OptimizerKind::Momentum,
            other => {
                refuse(true, "optimizer.kind", other.word())?;
                OptimizerKind::Adamw
            }
        };
        Ok(Options {
            loss: Loss { terms: losses::terms(c)?, world_size: c.sharding.ranks },
            compute: c.precision.compute,
            overrides: overrides(c)?,
            padding: match c.padding.tensor_cores {
                Padding::Auto => PadMode::Auto,
                Padding::Always => PadMode::On,
                Padding::Never => PadMode::Off,
            },
            backend: Backend::of(c)?,
            accumulation: c.run.accumulation,
            scaling: scaling(c),
            optimizer: Optimizer {
                kind,
                lr: c.optimizer.lr,
                beta1: c.optimizer.betas[0],
                beta2: c.optimizer.betas[1],
                eps: c.optimizer.eps,
                weight_decay: c.optimizer.weight_decay,
                momentum: c.optimizer.momentum,
            },
            clip_grad_norm: c.optimizer.clip_grad_norm,
            schedule: Schedule {
                kind: match c.schedule.kind {
                    choices::Schedule::Constant => ScheduleKind::Constant,
                    choices::Schedule::Linear => ScheduleKind::Linear,
                    choices::Schedule::Cosine => ScheduleKind::Cosine,
                },
                warmup_steps: c.schedule.warmup_steps as f64,
                total_steps: c.schedule.total_steps as f64,
                min_lr: c.schedule.min_lr,
            },
            world_size: c.sharding.ranks,
            strategy: strategy(c),
            wrap: wrap(&c.sharding.wrap)?,
            reshard_after_forward: c.sharding.reshard_after_forward.clone(),
            no_sync: c.sharding.no_sync,
        })
    }
}

fn overrides(config: &Config) -> Result<Vec<Override>, Diagnostic> {
    let convert = |o: &crate::config::Override| {
        let dtype = o.dtype.parse().map_err(|e: String| Diagnostic::error("E051", e))?;
        Ok(Override { scope: o.scope.clone(), op: o.op.clone(), dtype })
    };
    config.precision.overrides.iter().map(convert).collect()
}

/// `auto` scales dynamically for f16 and not at all otherwise.
fn scaling(config: &Config) -> LossScaling {
    let p = &config.precision;
    let dynamic = LossScaling::Dynamic {
        init_scale: p.init_scale,
        growth_factor: p.growth_factor,
        backoff_factor: p.backoff_factor,
        growth_interval: p.growth_interval as f64,
    };
    match p.loss_scale {
        LossScale::Auto if p.compute == DType::F16 => dynamic,
        LossScale::Dynamic => dynamic,
        LossScale::Auto | LossScale::None => LossScaling::None,
        LossScale::Fixed(scale) => LossScaling::Static(scale),
    }
}

/// The strategy of the passes; its group was checked with the configuration.
pub(crate) fn strategy(config: &Config) -> Strategy {
    match config.sharding.strategy {
        choices::Strategy::FullShard => Strategy::FullShard,
        choices::Strategy::ShardGradOp => Strategy::ShardGradOp,
        choices::Strategy::ShardOptimizer => Strategy::ShardOptimizer,
        choices::Strategy::HybridShard => Strategy::HybridShard(config.sharding.shard_group),
        choices::Strategy::NoShard => Strategy::NoShard,
    }
}

fn wrap(text: &str) -> Result<Wrap, Diagnostic> {
    let size = text.strip_prefix("size").map(|s| s.trim_start_matches(['=', ':', ' ']));
    match (text, size.map(str::parse)) {
        ("blocks", _) => Ok(Wrap::Blocks),
        ("none", _) => Ok(Wrap::None),
        (_, Some(Ok(size))) => Ok(Wrap::Size(size)),
        (_, None) if text.split(',').all(|p| !p.trim().is_empty()) => {
            Ok(Wrap::Scopes(text.split(',').map(|p| p.trim().to_string()).collect()))
        }
        _ => {
            let help = "use \"blocks\", \"none\", \"size=1000000\", or patterns of modules such as \"h.*, head\"";
            Err(Diagnostic::error("E053", format!("`sharding.wrap = {text}` says nothing"))
                .help(help))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_finds_what_it_requires() {
        let options = Options::new(&Config::default()).unwrap();
        let passes = [forward(&options), training(&options, 1.0)].concat_infos();
        check(&passes).unwrap();
    }

    #[test]
    fn a_pass_too_early_is_named() {
        let error = check(&[&frit_passes::shard::INFO]).unwrap_err();
        assert!(error.message.starts_with("shard needs Updated"), "{error}");
    }

    trait Infos {
        fn concat_infos(&self) -> Vec<&'static PassInfo>;
    }

    impl Infos for [Vec<Box<dyn Pass>>; 2] {
        fn concat_infos(&self) -> Vec<&'static PassInfo> {
            self.iter().flatten().map(|p| p.info()).collect()
        }
    }
}
