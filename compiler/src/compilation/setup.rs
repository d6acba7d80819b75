//! Inputs of a compilation: the request, and everything that follows from it before a model is read.

use super::Request;
use crate::clusters;
use crate::config::Config;
use crate::config::choices::BatchNorm;
use crate::diagnostics::Report;
use crate::import::limits::Limits;
use crate::import::{self, ImportOptions, Imported, Tied};
use crate::pipeline::{self, Options};
use crate::source::Source;
use frit_ir::Diagnostic;
use frit_ir::plan::{ParamHome, Plan};
use frit_passes::adapter::Adapted;
use frit_passes::cost::Cluster;
use frit_passes::loss::LossKind;
use std::collections::BTreeMap;

/// The settings of a compilation.
pub(super) struct Setup<'a> {
    pub(super) request: &'a Request,
    pub(super) config: &'a Config,
    /// Options of the passes.
    pub(super) options: Options,
    /// What durations are predicted for.
    pub(super) cluster: Cluster,
}

impl<'a> Setup<'a> {
    /// Resolves a configuration; the passes are checked to find what they require.
    pub(super) fn new(request: &'a Request, config: &'a Config) -> Result<Self, Report> {
        let mut options = Options::new(config)?;
        if request.reference {
            options = options.like_pytorch();
        }
        let cluster = clusters::of(config, &options.backend.describe())?;
        let setup = Setup { request, config, options, cluster };
        setup.check_passes()?;
        Ok(setup)
    }

    /// Whether the model trains.
    pub(super) fn trains(&self) -> bool {
        self.config.loss.kind != LossKind::None
    }

    /// Whether the model is evaluated beside its training.
    pub(super) fn evaluates(&self) -> bool {
        self.trains() && self.request.evaluation
    }

    fn check_passes(&self) -> Result<(), Diagnostic> {
        let Request { disabled, stop_after, .. } = self.request;
        let passes = pipeline::contracts(&self.options, self.trains());
        pipeline::check(&passes, disabled, stop_after.as_deref())?;
        if self.evaluates() && stop_after.is_none() {
            pipeline::check(&pipeline::contracts(&self.options, false), disabled, None)?;
        }
        Ok(())
    }

    /// Reads the model.
    pub(super) fn import(&self) -> Result<Imported, Report> {
        let (request, config) = (self.request, self.config);
        let options = ImportOptions {
            binds: request.binds.clone(),
            trainable: config.params.trainable.clone(),
            frozen: config.params.frozen.clone(),
            adapted: config.adapter.targets.clone(),
            ignored: config.params.ignored.clone(),
            batch_norm_trains: config.model.batch_norm != BatchNorm::AsExported,
            batch_norm_ranks: match config.model.batch_norm {
                BatchNorm::Sync => config.sharding.ranks,
                BatchNorm::AsExported | BatchNorm::Train => 1,
            },
            tie_weights: config.model.tie_weights,
            limits: Limits {
                elements: config.import.max_elements,
                operations: config.import.max_operations,
                nodes: config.import.max_nodes,
                bytes: config.import.max_bytes,
                depth: config.import.max_depth,
            },
            allow_external_data: request.allow_external_data,
        };
        import::load(&request.model, &options)
    }

    /// Writes into a plan which data it takes, in which order.
    pub(super) fn order_data(&self, plan: &mut Plan) {
        let data = &self.config.data;
        (plan.shuffle, plan.drop_last) = (data.shuffle, data.drop_last);
        plan.validation = (data.validation != "none").then(|| data.validation.clone());
    }

    /// The model's source as stored in the plan.
    pub(super) fn source(
        &self,
        plan: &Plan,
        ties: &BTreeMap<String, Tied>,
        adapters: &BTreeMap<String, Adapted>,
    ) -> Result<Source, Diagnostic> {
        let Request { model, binds, allow_external_data, .. } = self.request;
        let stored = plan.params.iter().filter(|p| p.home != ParamHome::Unused);
        let stored = stored.map(|p| p.name.as_str()).collect();
        Source::of(model, binds, (ties, adapters), &stored, *allow_external_data)
    }
}
