//! A plan beside another way to the same numbers: a plan for one rank, and the interpreter.

use super::execution::{Executed, Noise};
use super::gradients::{MARGIN, norm};
use super::reference::Base;
use super::update::NARROW;
use super::{Agreement, metric};
use crate::compilation::compile;
use crate::config::choices::{BatchNorm, Prefetch};
use crate::config::{Config, LossScale};
use crate::diagnostics::{Report, of_run};
use crate::plan_dir::{self, Stored};
use crate::repeat::Repeat;
use frit_ir::ops::StateName;
use frit_ir::plan::{MetricName, Plan, Strategy};
use frit_ir::{Code, Diagnostic};
use frit_passes::offload::Offload;
use frit_passes::recompute::Recompute;
use frit_runtime::compare;
use frit_runtime::data::{Data, Source};
use frit_runtime::plan_dir::PlanDir;
use frit_runtime::record;
use std::collections::BTreeMap;
use std::path::Path;

/// The error of rounding to f32, relative to what is rounded.
const STORED: f64 = 6e-8;

/// Elements of two gradients that differ by less than this part are of the same size.
const CLOSE: f64 = 0.1;

/// What another execution is compared with.
pub(super) struct Against<'a> {
    pub(super) executed: &'a Executed,
    pub(super) noise: &'a Noise,
    pub(super) floor: f64,
}

impl Against<'_> {
    /// The same step by a plan for one rank that is as simple as can be: nothing is sharded, offloaded, computed again or chunked.
    ///
    /// # Errors
    /// If there is no such plan, or it fails.
    pub(super) fn one_rank(
        &self,
        repeat: &Repeat,
        plan: &Plan,
        (source, run): (&Source, &record::Options),
        to: &Path,
    ) -> Result<Vec<Agreement>, Report> {
        let mut config = repeat.config.clone();
        // The backward pass begins with the scale over the micro-steps of a rank: as before, so that it overflows where it did.
        let mut ranks = plan.world_size as f64;
        match config.run.reproducible {
            Some(_) => ranks = 1.0,
            None => config.run.accumulation = plan.accumulation * plan.world_size,
        }
        config.precision.init_scale *= ranks;
        if let LossScale::Fixed(scale) = &mut config.precision.loss_scale {
            *scale *= ranks;
        }
        (config.sharding.ranks, config.sharding.shard_group) = (1, 0);
        (config.sharding.strategy, config.sharding.no_sync) = (Strategy::NoShard, false);
        config.sharding.reshard_after_forward = vec!["**".into()];
        (config.sharding.prefetch, config.sharding.cpu_offload) = (Prefetch::Fixed, false);
        config.memory.loss_chunks = Some(1);
        (config.memory.recompute, config.memory.budget) = (Some(Recompute::NONE), None);
        config.memory.offload = Some(Offload::None);
        let compiled = compile(&repeat.request, &config, &mut ())?;
        let compiled =
            compiled.ok_or_else(|| Diagnostic::error(Code::AuditPlan, "no plan was made"))?;
        plan_dir::write(to, &compiled, Stored::Copy)?;
        let dir = PlanDir::load(to).map_err(of_run)?;
        let data = Data::load(source, &dir.plan).map_err(super::refused)?;
        let other = Executed::of(&dir, &data, run)?;
        Ok(self.compare(&other, "one rank"))
    }

    /// The same step by the interpreter.
    ///
    /// # Errors
    /// If it fails.
    pub(super) fn interpreted(
        &self,
        dir: &PlanDir,
        data: &Data,
        run: &record::Options,
    ) -> Result<Vec<Agreement>, Report> {
        let run = record::Options { interpret: true, ..run.clone() };
        Ok(self.compare(&Executed::of(dir, data, &run)?, "the interpreter"))
    }

    /// Losses, gradients, and by how much the step changes each parameter.
    fn compare(&self, other: &Executed, by: &str) -> Vec<Agreement> {
        if other.at != self.executed.at {
            let what = format!("the first step that is not skipped, by {by}");
            return vec![Agreement::of(None, what, f64::INFINITY, 0.0)];
        }
        let losses = [metric(self.executed, MetricName::Loss), metric(other, MetricName::Loss)];
        let mut found = vec![self.loss(losses, format!("the loss by {by}"))];
        for (name, gradient) in &self.executed.step().gradients {
            let wide = |g: &[f32]| g.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
            let own = wide(gradient);
            let theirs = other.step().gradients.get(name).map(|g| wide(g)).unwrap_or_default();
            let noise = self.noise.gradients.get(name).copied().unwrap_or(0.0);
            let what = format!("the gradient by {by}");
            found.push(self.vectors(name, what, (&own, &theirs), (noise, self.floor)));
            let what = format!("the change by {by}");
            // Where gradients are rounding errors, a sign decides about the whole change of an element.
            let is_determined =
                |(a, b): (&f64, &f64)| (a - b).abs() <= CLOSE * a.abs().max(b.abs());
            let determined: Vec<bool> = own.iter().zip(&theirs).map(is_determined).collect();
            let only = |change: Vec<f64>| -> Vec<f64> {
                let pairs = change.into_iter().zip(&determined);
                pairs.map(|(x, determined)| if *determined { x } else { 0.0 }).collect()
            };
            let (own, theirs) = (only(self.executed.change(name)), only(other.change(name)));
            found.push(self.changes(name, what, (&own, &theirs)));
        }
        found
    }

    /// By how much the step changes a parameter.
    fn changes(&self, name: &str, what: String, pair: (&[f64], &[f64])) -> Agreement {
        let start = &self.executed.recorded.start;
        let noise = self.noise.changes.get(name).copied().unwrap_or(0.0);
        // What is stored is rounded to f32, whatever its change.
        let stored = start.get(&format!("param/{name}"));
        let noise = noise + STORED * stored.map_or(0.0, |p| norm(p));
        let momentum = format!("{}/{name}", StateName::MuonMomentum.word());
        let floor = if start.contains_key(&momentum) { NARROW } else { self.floor };
        self.vectors(name, what, pair, (noise, floor))
    }

    /// Compares two vectors of this noise, of which this relative error is allowed besides.
    fn vectors(
        &self,
        name: &str,
        what: String,
        (own, theirs): (&[f64], &[f64]),
        (noise, floor): (f64, f64),
    ) -> Agreement {
        if own.len() != theirs.len() {
            return Agreement::of(Some(name), what, f64::INFINITY, 0.0);
        }
        let apart: Vec<f64> = own.iter().zip(theirs).map(|(a, b)| a - b).collect();
        let size = norm(own).max(norm(theirs)).max(f64::MIN_POSITIVE);
        let allowed = floor + MARGIN * noise / size;
        Agreement::of(Some(name), what, norm(&apart) / size, allowed)
    }

    fn loss(&self, [a, b]: [f64; 2], what: String) -> Agreement {
        let size = a.abs().max(b.abs()).max(f64::MIN_POSITIVE);
        let allowed = self.floor + MARGIN * self.noise.loss / size;
        Agreement::of(None, what, (a - b).abs() / size, allowed)
    }
}

/// Loss, counts and buffers of the step beside the reference, whose buffers are these after the step.
pub(super) fn step(
    against: &Against<'_>,
    base: &Base,
    renewed: &BTreeMap<String, Vec<f64>>,
) -> Vec<Agreement> {
    let executed = against.executed;
    let losses = [metric(executed, MetricName::Loss), base.loss];
    let counted = (metric(executed, MetricName::Tokens) - base.count).abs();
    let mut found = vec![against.loss(losses, "the loss by the graph".into())];
    if base.is_counted {
        found.push(Agreement::of(None, "the elements of the loss".into(), counted, 0.0));
    }
    for (name, after) in renewed {
        let before = base.params.get(name).map(|t| t.to_f64s()).unwrap_or_default();
        let change: Vec<f64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
        let pair = (&executed.change(name)[..], &change[..]);
        found.push(against.changes(name, "the change by the graph".into(), pair));
    }
    found
}

/// Why a plan is not compared with one for one rank, or nothing to say about it.
pub(super) fn reason_against_one_rank(
    config: &Config,
    plan: &Plan,
    base: &Base,
) -> Option<Option<String>> {
    let reason = |what: &str| Some(Some(format!("not compared with one rank: {what}")));
    if plan.world_size == 1 {
        return Some(None);
    }
    if config.model.batch_norm == BatchNorm::Sync {
        return reason(
            "batch norms have the statistics of all ranks, which the differences have too",
        );
    }
    if !base.counts_are_equal && !base.is_counted {
        return reason(
            "losses of different elements are means over the ranks of each micro-step, which count differently",
        );
    }
    None
}

/// Compares every kernel of a plan for one rank with the interpreter.
///
/// # Errors
/// If the plan fails.
pub(super) fn kernels(
    options: &super::Options,
    source: &Source,
) -> Result<compare::Report, Report> {
    let options = compare::Options {
        plan: options.plan.clone(),
        data: source.files.clone(),
        token_dtype: source.tokens,
        steps: 1,
        budget: 500,
        threads: options.threads,
        ..compare::Options::default()
    };
    compare::compare(&options).map_err(|e| of_run(e).into())
}
