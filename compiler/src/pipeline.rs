//! The pipelines: the order of all passes for training and for evaluation.
//!
//! Every compilation checks the order with [`check`], from what each pass requires, ensures and breaks.

use crate::config::Config;
use crate::config::LossScale;
use crate::config::choices;
use crate::config::losses;
use crate::metrics;
use crate::target::Backend;
use frit_ir::ops::{MuonRule, OptimizerKind, ScheduleKind};
use frit_ir::plan::Strategy;
use frit_ir::{Code, DType, Diagnostic};
use frit_passes::adapter::{self, Lora};
use frit_passes::autocast::Autocast;
use frit_passes::canonicalize::Canonicalize;
use frit_passes::channels_last::ChannelsLast;
use frit_passes::chunk_loss::{ChunkLoss, Chunks};
use frit_passes::cost::Device;
use frit_passes::differentiate::Differentiate;
use frit_passes::documents::Documents;
use frit_passes::evaluate::Evaluate;
use frit_passes::fp8::Fp8;
use frit_passes::fuse::{Fuse, Rules};
use frit_passes::hold_frozen::HoldFrozen;
use frit_passes::index_ranges::IndexRanges;
use frit_passes::loss::metrics::Metric;
use frit_passes::loss::{Loss, LossKind, Term};
use frit_passes::loss_scale::{LossScale as LossScalePass, LossScaling};
use frit_passes::lower;
use frit_passes::pad_tensor_cores::{PadMode, PadTensorCores};
use frit_passes::raise::Raise;
use frit_passes::recompute::Recompute;
use frit_passes::shard::{Reshard, Shard, Wrap};
use frit_passes::simplify::Simplify;
use frit_passes::strip_functions::StripFunctions;
use frit_passes::sync_batch_norm::SyncBatchNorm;
use frit_passes::update::{ParamGroups, Update};
use frit_passes::{Pass, PassInfo, Property};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Options of the passes.
#[derive(Clone, Debug)]
pub struct Options {
    adapter: Lora,
    documents: Documents,
    /// The loss to minimize.
    pub(crate) loss: Loss,
    metrics: Vec<Metric>,
    autocast: Autocast,
    fp8: Fp8,
    narrow_gathers: bool,
    hold_frozen: HoldFrozen,
    /// The chunks of the loss.
    pub(crate) chunks: Chunks,
    padding: PadMode,
    /// The target.
    pub(crate) backend: Backend,
    accumulation: usize,
    /// Pieces of a reproducible step.
    reproducible: Option<usize>,
    scaling: LossScaling,
    optimizer: OptimizerKind,
    muon: MuonRule,
    schedule: ScheduleKind,
    hypers: BTreeMap<&'static str, f64>,
    groups: ParamGroups,
    ema: bool,
    world_size: usize,
    sync_batch_norm: bool,
    strategy: Strategy,
    /// Ranks that share one copy under `hybrid_shard`.
    group: usize,
    wrap: Wrap,
    reshard_after_forward: Vec<Reshard>,
    no_sync: bool,
    reduce_dtype: DType,
    /// The regions that are formed.
    pub(crate) rules: Rules,
}

/// The passes over the graph as the front end read it, for training and evaluation alike.
pub fn adaptation(o: &Options) -> Vec<Box<dyn Pass>> {
    if o.adapter.targets.is_empty() { vec![] } else { vec![Box::new(o.adapter.clone())] }
}

/// The passes that decide what is computed of a model, as opposed to how: adapters and, where documents are kept apart, that with
/// the loss whose labels it changes.
pub(crate) fn meaning(o: &Options) -> Vec<Box<dyn Pass>> {
    let mut passes = adaptation(o);
    if o.documents.separator.is_some() {
        passes.push(Box::new(o.loss.clone()));
        passes.extend(composed(o));
    }
    passes
}

/// The passes before the loss is differentiated: they decide how many elements the loss has.
pub fn forward(o: &Options) -> Vec<Box<dyn Pass>> {
    let mut passes: Vec<Box<dyn Pass>> = vec![Box::new(o.loss.clone())];
    passes.extend(composed(o));
    passes.extend([Box::new(IndexRanges {}) as Box<dyn Pass>, Box::new(o.autocast.clone())]);
    passes.push(Box::new(padding(o)));
    passes
}

/// The passes that find composite operations, which some others read.
fn composed(o: &Options) -> Vec<Box<dyn Pass>> {
    let mut passes: Vec<Box<dyn Pass>> =
        vec![Box::new(Canonicalize {}), Box::new(Raise {}), Box::new(Canonicalize {})];
    if o.documents.separator.is_some() {
        passes.extend([Box::new(o.documents.clone()) as Box<dyn Pass>, Box::new(Canonicalize {})]);
    }
    passes
}

/// The passes from the final forward graph to a whole step on one rank; the loss sums `capacity`
/// elements.
pub fn training(o: &Options, capacity: f64) -> Vec<Box<dyn Pass>> {
    vec![
        Box::new(SyncBatchNorm { ranks: if o.sync_batch_norm { o.world_size } else { 1 } }),
        // The seed is the same however the pieces of a reproducible step are divided.
        Box::new(Differentiate {
            accumulation: o.reproducible.unwrap_or(o.accumulation),
            capacity,
        }),
        Box::new(StripFunctions { fp8: o.fp8.enabled }),
        Box::new(LossScalePass { scaling: o.scaling }),
        Box::new(Update {
            optimizer: o.optimizer,
            muon: o.muon,
            schedule: o.schedule,
            hypers: o.hypers.clone(),
            groups: o.groups.clone(),
            ema: o.ema,
            scaling: o.scaling,
            accumulation: o.accumulation,
            capacity,
            world_size: o.world_size,
            reproducible: o.reproducible.is_some(),
        }),
        Box::new(o.fp8.clone()),
    ]
}

/// The passes that decide how parameters are held, once it is known which train.
pub fn holding(o: &Options) -> Vec<Box<dyn Pass>> {
    vec![Box::new(o.hold_frozen)]
}

/// The passes that spread a step over ranks and make it small. The parameters `small`, by name, are gathered together
/// whatever their units.
pub fn distribution(
    o: &Options,
    chunk_loss: ChunkLoss,
    recompute: Recompute,
    small: &BTreeSet<String>,
) -> Vec<Box<dyn Pass>> {
    let mut passes: Vec<Box<dyn Pass>> = vec![Box::new(chunk_loss), Box::new(recompute)];
    passes.extend(sharding(o, Shard { small_parameters: small.clone(), ..shard(o) }));
    passes
}

/// The last passes of every graph.
fn sharding(o: &Options, shard: Shard) -> [Box<dyn Pass>; 5] {
    [
        Box::new(shard),
        Box::new(Simplify { narrow_gathers: o.narrow_gathers, ..Simplify::default() }),
        Box::new(Canonicalize {}),
        Box::new(ChannelsLast { target: o.backend.describe() }),
        Box::new(match o.rules {
            Rules::Frit => Fuse { supported: o.backend.fuses(), rules: o.rules },
            Rules::Inductor => Fuse { rules: o.rules, ..Fuse::default() },
        }),
    ]
}

fn shard(o: &Options) -> Shard {
    Shard {
        world_size: o.world_size,
        strategy: o.strategy,
        group: o.group,
        wrap: o.wrap.clone(),
        reshard_after_forward: o.reshard_after_forward.clone(),
        no_sync: o.no_sync,
        reproducible: o.reproducible.is_some(),
        reduce_dtype: o.reduce_dtype,
        small_parameters: BTreeSet::new(),
    }
}

/// The passes for a graph that is only evaluated: in the precision and the units of training.
pub fn evaluation(o: &Options) -> Vec<Box<dyn Pass>> {
    let mut passes = evaluation_forward(o);
    passes.extend(holding(o));
    passes.extend(evaluation_distribution(o));
    passes
}

/// The last of these: they spread the evaluation over ranks and make it small.
pub fn evaluation_distribution(o: &Options) -> Vec<Box<dyn Pass>> {
    sharding(o, Shard { no_sync: false, ..shard(o) }).into()
}

/// The first of these: they decide in which dtypes the evaluation reads parameters.
pub fn evaluation_forward(o: &Options) -> Vec<Box<dyn Pass>> {
    let evaluate = Evaluate { terms: o.loss.terms.clone(), metrics: o.metrics.clone() };
    let mut passes: Vec<Box<dyn Pass>> = vec![Box::new(evaluate)];
    passes.extend(composed(o));
    passes.extend([Box::new(IndexRanges {}) as Box<dyn Pass>, Box::new(o.autocast.clone())]);
    passes.push(Box::new(padding(o)));
    passes.push(Box::new(StripFunctions { fp8: o.fp8.enabled }));
    passes.push(Box::new(Fp8 { history: None, ..o.fp8.clone() }));
    passes
}

fn padding(o: &Options) -> PadTensorCores {
    PadTensorCores { mode: o.padding, target: o.backend.describe(), fp8: o.fp8.clone() }
}

/// The contracts of all passes of a compilation, in order.
pub fn contracts(o: &Options, trains: bool) -> Vec<&'static PassInfo> {
    all(o, trains).iter().map(|p| p.info()).collect()
}

/// All passes of a compilation, in order, as far as the configuration determines them.
pub(crate) fn all(o: &Options, trains: bool) -> Vec<Box<dyn Pass>> {
    let mut passes = adaptation(o);
    passes.extend(if trains { forward(o) } else { evaluation(o) });
    if trains {
        passes.extend(training(o, 1.0));
        passes.extend(holding(o));
        let chunk_loss = ChunkLoss { chunks: o.chunks, device: Device::cpu("") };
        passes.extend(distribution(o, chunk_loss, Recompute::NONE, &BTreeSet::new()));
    }
    passes
}

/// Checks that the requirements of every enabled pass, and of lowering unless compilation stops earlier, are met.
///
/// # Errors
/// The first pass that lacks something, what that is, and which disabled pass would have ensured it; or that the last
/// pass does not run.
pub fn check(
    passes: &[&'static PassInfo],
    disabled: &[String],
    stop_after: Option<&str>,
) -> Result<(), Diagnostic> {
    let runs = |info: &&&PassInfo| disabled.iter().all(|d| d != info.name);
    let mut facts: HashSet<Property> = HashSet::new();
    let lacks = |name: &str, requires: &[Property], facts: &HashSet<Property>| {
        let missing = requires.iter().find(|fact| !facts.contains(fact));
        missing.map_or(Ok(()), |fact| Err(lacking(name, *fact, passes, disabled)))
    };
    for info in passes.iter().filter(runs) {
        lacks(&format!("pass `{}`", info.name), info.requires, &facts)?;
        facts.retain(|fact| !info.breaks.contains(fact));
        facts.extend(info.ensures);
        if stop_after == Some(info.name) {
            return Ok(());
        }
    }
    match stop_after {
        Some(name) => {
            let message = format!("pass `{name}` does not run in this compilation");
            Err(Diagnostic::error(Code::PassUnknown, message)
                .help("--stop-after takes a pass that runs"))
        }
        None => lacks("lowering", lower::REQUIRES, &facts),
    }
}

/// That something needs a fact which no pass before it ensures.
fn lacking(
    name: &str,
    fact: Property,
    passes: &[&'static PassInfo],
    disabled: &[String],
) -> Diagnostic {
    let ensures =
        |info: &&&PassInfo| info.ensures.contains(&fact) && disabled.iter().any(|d| d == info.name);
    match passes.iter().find(ensures) {
        Some(left_out) => {
            let left_out = left_out.name;
            let message =
                format!("{name} requires {fact}, which the disabled pass `{left_out}` ensures");
            Diagnostic::error(Code::PassRequires, message)
                .help(format!("remove --disable-pass {left_out}"))
        }
        None => {
            let message = format!("{name} requires {fact}, which no earlier pass ensures");
            Diagnostic::error(Code::PassOrder, message)
        }
    }
}

impl Options {
    /// The options of a configuration.
    ///
    /// # Errors
    /// The first value that is not implemented, by its key.
    pub fn new(config: &Config) -> Result<Options, Diagnostic> {
        let c = config;
        if c.loss.reduction != choices::Reduction::GlobalMean {
            let what = format!("`loss.reduction = {}` is not implemented", c.loss.reduction.word());
            return Err(Diagnostic::error(Code::ArchUnknown, what));
        }
        let backend = Backend::of(c)?;
        if c.precision.fp8 {
            backend.multiplies_fp8()?;
        }
        let autocast = autocast(c);
        Ok(Options {
            adapter: adapter(c)?,
            documents: documents(c)?,
            loss: Loss {
                terms: losses::terms(c)?,
                world_size: c.sharding.ranks,
                reproducible: c.run.reproducible.is_some(),
            },
            metrics: metrics::metrics(c)?,
            fp8: Fp8 {
                enabled: c.precision.fp8,
                history: Some(c.precision.fp8_history),
                exceptions: autocast.overrides.clone(),
                world_size: c.sharding.ranks,
            },
            autocast,
            narrow_gathers: c.sharding.param_dtype != Some(DType::F32),
            // Parameters gathered in f32 must be stored in f32.
            hold_frozen: HoldFrozen {
                enabled: c.params.frozen_dtype == choices::FrozenDtype::Compute
                    && c.sharding.param_dtype != Some(DType::F32),
            },
            chunks: chunks(c)?,
            padding: c.padding.tensor_cores,
            backend,
            accumulation: c.accumulation(),
            reproducible: c.run.reproducible,
            scaling: scaling(c),
            optimizer: c.optimizer.kind,
            muon: MuonRule {
                nesterov: c.optimizer.muon_nesterov,
                ns_steps: c.optimizer.muon_ns_steps,
                adjust_lr: c.optimizer.muon_adjust_lr,
            },
            schedule: c.schedule.kind,
            hypers: hypers(c),
            groups: groups(c),
            ema: c.optimizer.ema != 0.0,
            world_size: c.sharding.ranks,
            sync_batch_norm: c.model.batch_norm == choices::BatchNorm::Sync,
            strategy: c.sharding.strategy,
            group: c.sharding.shard_group,
            wrap: wrap(&c.sharding.wrap)?,
            reshard_after_forward: reshard(&c.sharding.reshard_after_forward)?,
            // A rank adds its own pieces before those of ranks are added.
            no_sync: c.sharding.no_sync || c.run.reproducible.is_some(),
            reduce_dtype: c.sharding.reduce_dtype,
            rules: Rules::Frit,
        })
    }

    /// Leaves out what PyTorch does not do, for the reference plan of a compilation.
    pub(crate) fn like_pytorch(mut self) -> Self {
        self.rules = Rules::Inductor;
        self.autocast.keep_accumulators = false;
        self
    }
}

fn adapter(config: &Config) -> Result<Lora, Diagnostic> {
    let a = &config.adapter;
    let refuse =
        |what: &str, help: &str| Err(Diagnostic::error(Code::ConfigContradiction, what).help(help));
    match (a.kind, a.targets.is_empty()) {
        (choices::AdapterKind::None, true) => return Ok(Lora::default()),
        (choices::AdapterKind::None, false) => {
            return refuse("adapter.targets has no effect", "set adapter.kind = \"lora\"");
        }
        (choices::AdapterKind::Lora, true) => {
            return refuse(
                "adapter.kind = \"lora\" without adapter.targets",
                "name modules, as in adapter.targets = [\"**.q_proj\", \"**.v_proj\"]",
            );
        }
        (choices::AdapterKind::Lora, false) => {}
    }
    // The default lets everything train, which an adapter replaces.
    let trainable = adapter::trainable(&config.params.trainable);
    let (targets, frozen) = (a.targets.clone(), config.params.frozen.clone());
    Ok(Lora { rank: a.rank, alpha: a.alpha, dropout: a.dropout, targets, trainable, frozen })
}

fn documents(config: &Config) -> Result<Documents, Diagnostic> {
    let Some(separator) = config.data.document_separator else { return Ok(Documents::default()) };
    let terms = losses::terms(config)?;
    let indexed = |t: &Term| t.kind == LossKind::CrossEntropy && !t.soft_targets;
    if let Some(other) = terms.iter().find(|t| t.kind != LossKind::None && !indexed(t)) {
        let what = format!("data.document_separator with the loss {other}");
        let help = "the label of a separator is of another document, and only a cross_entropy of indices can ignore it";
        return Err(Diagnostic::error(Code::ConfigContradiction, what).help(help));
    }
    let labels = terms.into_iter().filter(indexed).map(|t| (t.labels, t.ignore_index)).collect();
    Ok(Documents { separator: Some(separator as i64), labels })
}

fn chunks(config: &Config) -> Result<Chunks, Diagnostic> {
    match config.memory.loss_chunks {
        None => Ok(Chunks::Auto),
        Some(n) => match usize::try_from(n) {
            Ok(n) if n > 0 => Ok(Chunks::Fixed(n)),
            _ => {
                let message = format!("`memory.loss_chunks` = {n}");
                Err(Diagnostic::error(Code::ConfigContradiction, message)
                    .help("use \"auto\", or the number of chunks, at least 1"))
            }
        },
    }
}

fn autocast(config: &Config) -> Autocast {
    let (p, s) = (&config.precision, &config.sharding);
    // Values that are f32 anyway are not rounded.
    let narrow = |dtype: Option<DType>| dtype.filter(|d| *d != DType::F32);
    let param_dtype = s.param_dtype.or(p.pure.then_some(p.compute));
    Autocast {
        compute: p.compute,
        pure: p.pure && p.compute != DType::F32,
        narrow_residual: p.residual == choices::Residual::Compute,
        keep_accumulators: true,
        param_dtype: narrow(param_dtype),
        buffer_dtype: narrow(s.buffer_dtype),
        overrides: p.overrides.clone(),
    }
}

/// First values of hyper-parameters, which may be changed when the plan is run, by key.
fn hypers(config: &Config) -> BTreeMap<&'static str, f64> {
    let mut hypers = config.numbers();
    let [beta1, beta2] = config.optimizer.betas;
    let [a, b, c] = config.optimizer.muon_ns_coefficients;
    hypers.extend([("optimizer.beta1", beta1), ("optimizer.beta2", beta2)]);
    hypers.extend([
        ("optimizer.muon_ns_a", a),
        ("optimizer.muon_ns_b", b),
        ("optimizer.muon_ns_c", c),
    ]);
    hypers
}

fn groups(config: &Config) -> ParamGroups {
    ParamGroups {
        only_matrices_decay: config.optimizer.decay == choices::Decay::Matrices,
        adamw_lr: config.optimizer.adamw_lr,
        adamw_weight_decay: config.optimizer.adamw_weight_decay,
        groups: config.optimizer.groups.clone(),
    }
}

/// `auto` scales dynamically for f16 and not at all otherwise.
pub fn scaling(config: &Config) -> LossScaling {
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

/// Patterns of units, each alone or as `PATTERN=N` with the number of ranks that share a copy.
fn reshard(patterns: &[String]) -> Result<Vec<Reshard>, Diagnostic> {
    let parse = |text: &String| {
        let Some((units, ranks)) = text.rsplit_once('=') else {
            return Ok(Reshard { units: text.clone(), ranks: None });
        };
        let ranks = ranks.trim().parse().map_err(|_| {
            let what = format!("`{text}` in sharding.reshard_after_forward: not a number of ranks");
            Diagnostic::error(Code::ShardingPattern, what).help("write PATTERN or PATTERN=N")
        })?;
        Ok(Reshard { units: units.trim().into(), ranks: Some(ranks) })
    };
    patterns.iter().map(parse).collect()
}

fn wrap(text: &str) -> Result<Wrap, Diagnostic> {
    let size = text.strip_prefix("size").map(|s| s.trim_start_matches(['=', ':', ' ']));
    match (text, size.map(str::parse)) {
        ("blocks", _) => Ok(Wrap::Blocks),
        ("none", _) => Ok(Wrap::None),
        (_, Some(Ok(size))) if size > 0 => Ok(Wrap::Size(size)),
        (_, None) if text.split(',').all(|p| !p.trim().is_empty()) => {
            Ok(Wrap::Scopes(text.split(',').map(|p| p.trim().to_string()).collect()))
        }
        _ => {
            let help = "use \"blocks\", \"none\", \"size=1000000\", or patterns of modules such as \"h.*, head\"";
            Err(Diagnostic::error(
                Code::ConfigContradiction,
                format!("`sharding.wrap = {text}` says nothing"),
            )
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
        for trains in [true, false] {
            check(&contracts(&options, trains), &[], None).unwrap();
        }
    }

    #[test]
    fn a_pass_too_early_is_named() {
        let error = check(&[&frit_passes::shard::INFO], &[], None).unwrap_err();
        assert!(error.message.starts_with("pass `shard` requires the update"), "{error}");
        assert_eq!(error.code, "B010");
    }

    #[test]
    fn a_pass_that_another_needs_cannot_be_disabled() {
        let options = Options::new(&Config::default()).unwrap();
        for (trains, disabled, needs) in [
            (true, "loss", "pass `differentiate` requires a loss"),
            (true, "raise", "requires composite operations"),
            (true, "index_ranges", "lowering requires the ranges of indices"),
            (false, "index_ranges", "lowering requires the ranges of indices"),
            (true, "autocast", "requires the precision of every node"),
            (true, "loss_scale", "pass `update` requires a scaled loss"),
            (true, "shard", "pass `simplify` requires units and collectives"),
        ] {
            let error = check(&contracts(&options, trains), &[disabled.into()], None).unwrap_err();
            assert!(error.message.contains(needs), "{disabled}: {error}");
            assert_eq!(error.help.unwrap(), format!("remove --disable-pass {disabled}"));
        }
        for disabled in ["simplify", "fuse", "recompute", "fp8", "hold_frozen", "pad_tensor_cores"]
        {
            check(&contracts(&options, true), &[disabled.into()], None).unwrap();
        }
    }

    #[test]
    fn what_lies_after_the_last_pass_needs_nothing() {
        let options = Options::new(&Config::default()).unwrap();
        let all = contracts(&options, true);
        check(&all, &["index_ranges".into()], Some("autocast")).unwrap();
        let error = check(&all, &["fuse".into()], Some("fuse")).unwrap_err();
        assert!(error.message.contains("`fuse` does not run"), "{error}");
        let error = check(&contracts(&options, false), &[], Some("update")).unwrap_err();
        assert!(error.message.contains("`update` does not run"), "{error}");
    }
}
