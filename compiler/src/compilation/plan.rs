//! Turns the final graph into a plan: lowering, offload, scheduling, memory layout and code generation.

use super::Compilation;
use super::saving::Saving;
use crate::config::choices::Prefetch as Decides;
use crate::diagnostics::Report;
use frit_ir::plan::{Plan, Strategy, too_large};
use frit_ir::{Code, Diagnostic, Tensor};
use frit_passes::fuse::Rules;
use frit_passes::lower::{LowerOptions, Lowered, lower};
use frit_passes::memory;
use frit_passes::offload::{Offload, offload};
use frit_passes::schedule::{Prefetch, auto, schedule};
use std::collections::BTreeSet;

/// A plan without machine code.
pub(super) struct Arranged {
    pub(super) lowered: Lowered,
    /// The schedule in words, if it was chosen.
    pub(super) schedule: Option<String>,
}

/// A plan with machine code, not yet proved.
pub(super) struct Made {
    pub(super) plan: Plan,
    /// The file with the generated kernels.
    pub(super) object: Vec<u8>,
    /// Values of large constants.
    pub(super) constants: Vec<(String, Tensor)>,
    /// The schedule in words, if it was chosen.
    pub(super) schedule: Option<String>,
}

impl Compilation<'_> {
    /// The same from here to the step of all ranks, with this saving and these parameters gathered in one collective:
    /// to learn what would become of it.
    pub(super) fn trial(
        &self,
        saving: Saving,
        small: &BTreeSet<String>,
    ) -> Result<Compilation<'_>, Report> {
        let mut trial = Compilation {
            loss_elements: self.loss_elements,
            saving,
            verify: false,
            ..Compilation::new(self.setup, self.graph.clone())
        };
        trial.distribute(small)?;
        Ok(trial)
    }

    /// The plan, scheduled and placed in memory; kernels are not generated yet.
    pub(super) fn arrange(&self) -> Result<Arranged, Report> {
        let (config, cluster) = (self.setup.config, &self.setup.cluster);
        let mut lowered = self.lowered()?;
        if config.sharding.prefetch == Decides::Auto {
            let chosen = auto::choose(&lowered.plan, cluster, config.memory.budget);
            let words = chosen.describe(cluster);
            lowered.plan = chosen.plan;
            return Ok(Arranged { lowered, schedule: Some(words) });
        }
        schedule(&mut lowered.plan, &self.prefetch());
        memory::assign(&mut lowered.plan);
        Ok(Arranged { lowered, schedule: None })
    }

    /// The plan with its offloads; it is neither scheduled nor placed.
    pub(super) fn lowered(&self) -> Result<Lowered, Report> {
        let (setup, config) = (self.setup, self.setup.config);
        let (options, strategy) = (&setup.options, config.sharding.strategy);
        let backend = &options.backend;
        let lower_options = LowerOptions {
            units: self.context.units.clone(),
            strategy,
            compute_dtype: config.precision.compute,
            seed: config.run.seed,
            deterministic: config.run.deterministic,
            accumulation: config.accumulation(),
            reproducible: config.run.reproducible,
            shards: strategy.shards(config.sharding.ranks, config.sharding.shard_group),
            gather_once: strategy == Strategy::ShardOptimizer
                && config.accumulation() > 1
                && config.sharding.ranks > 1,
            multi_tensor: self.saving.offload == Offload::None,
            copies: self.saving.offload != Offload::Parameters && options.rules == Rules::Frit,
            loss_capacity: self.loss_elements,
            target: backend.describe(),
            trained: self.trained,
            losses: options.loss.terms.clone(),
            metrics: self.context.metrics.clone(),
            cluster: &setup.cluster,
            config: config.to_toml(),
            frit_version: env!("CARGO_PKG_VERSION").into(),
            generated: &backend.generates(),
            library: &backend.has_library_kernel(),
            entry: &|body, kind, region| backend.entry(body, kind, region),
        };
        let mut lowered = lower(&self.graph, &lower_options)?;
        lowered.plan.model_bytes = self.traffic.model;
        lowered.plan.least_bytes = self.traffic.least;
        for input in &mut lowered.plan.inputs {
            let ranges = self.context.index_ranges.get(&input.name);
            input.ranges = ranges.cloned().unwrap_or_default();
        }
        offload(&mut lowered.plan, self.saving.offload, &setup.cluster);
        Ok(lowered)
    }

    /// When the configuration gathers units.
    fn prefetch(&self) -> Prefetch {
        let sharding = &self.setup.config.sharding;
        let limit = sharding.limit_all_gathers;
        Prefetch::Fixed {
            backward: sharding.backward_prefetch,
            forward: sharding.forward_prefetch,
            limit: if limit == 0 { usize::MAX } else { limit },
        }
    }

    /// Generates the kernels of a plan.
    pub(super) fn generate(&self, arranged: Arranged) -> Result<Made, Report> {
        let Arranged { lowered: Lowered { mut plan, constants, regions }, schedule } = arranged;
        if let Some(what) = too_large(&plan) {
            let message = format!("no plan can describe the memory of this step: {what}");
            return Err(Diagnostic::error(Code::PlanTooLarge, message)
                .help("use more ranks or a smaller batch, or correct the shapes of the parameters")
                .into());
        }
        let without_code = self.setup.request.without_code;
        let object = self.setup.options.backend.generate(&mut plan, &regions, without_code)?;
        Ok(Made { plan, object, constants, schedule })
    }
}
