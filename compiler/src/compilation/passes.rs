//! Runs the passes of a compilation, from the forward graph to the step of all ranks.

use super::saving::Saving;
use super::{Compilation, Observer, Setup};
use crate::diagnostics::Report;
use crate::import::{Imported, Inlined};
use crate::lints;
use crate::pipeline;
use crate::weights::Weights;
use frit_ir::ops::ParamKind;
use frit_ir::plan::PassReport;
use frit_ir::{Code, Diagnostic, Graph, Origin, verify};
use frit_passes::chunk_loss::ChunkLoss;
use frit_passes::model_traffic::model_traffic;
use frit_passes::{Changed, Pass, loss};
use std::collections::BTreeSet;

/// Name of the front end in the reports of a plan.
pub const IMPORT: &str = "import";

/// Loss elements of a step, with all its ranks and micro-steps: an f64 counts them exactly.
const MAX_LOSS_ELEMENTS: f64 = (1_u64 << 53) as f64;

/// Why a compilation ends before there is a plan.
pub(super) enum End {
    /// After the pass that was asked for, or when the observer asked for it.
    AsAsked,
    /// For what is wrong.
    Refused(Report),
}

impl From<Report> for End {
    fn from(wrong: Report) -> Self {
        End::Refused(wrong)
    }
}

impl From<Diagnostic> for End {
    fn from(wrong: Diagnostic) -> Self {
        End::Refused(wrong.into())
    }
}

impl From<End> for Report {
    fn from(end: End) -> Self {
        match end {
            End::AsAsked => {
                Diagnostic::error(Code::CommandLine, "a prediction needs all passes").into()
            }
            End::Refused(report) => report,
        }
    }
}

impl<'a> Compilation<'a> {
    /// Of a model, whose graph it takes.
    pub(super) fn of_model(
        setup: &'a Setup<'a>,
        imported: &mut Imported,
        observer: Option<&'a mut dyn Observer>,
    ) -> Self {
        let graph = std::mem::take(&mut imported.graph);
        let mut compilation = Compilation {
            observer: observing(observer, false, &graph),
            stop_after: setup.request.stop_after.as_deref(),
            ..Compilation::new(setup, graph)
        };
        let remarks = imported.inlined.iter().map(inlined).collect();
        compilation.report(IMPORT, compilation.graph.len(), remarks);
        imported.warnings.drain(..).for_each(|w| compilation.context.warn(w));
        compilation
    }

    /// Runs all passes.
    pub(super) fn all_passes(&mut self, weights: &Weights) -> Result<(), End> {
        self.passes(pipeline::adaptation(&self.setup.options))?;
        if !self.setup.trains() {
            return self.evaluate();
        }
        self.as_read = self.setup.evaluates().then(|| self.graph.clone());
        self.forward(weights)?;
        self.train()?;
        self.hold()?;
        self.measure_traffic();
        (self.saving, self.saving_reason) = self.choose_saving()?;
        let small = self.small_parameters()?;
        self.distribute(&small)
    }

    /// From the model to its final forward graph, whose loss elements are then known.
    fn forward(&mut self, weights: &Weights) -> Result<(), End> {
        let setup = self.setup;
        self.passes(pipeline::forward(&setup.options))?;
        let target = setup.options.backend.describe();
        let found = lints::forward(&self.graph, setup.config, &target, weights)?;
        self.context.warnings.extend(found);
        self.loss_elements = loss::capacity(&self.graph).ok_or_else(|| {
            Diagnostic::error(Code::PassFailed, "the graph has no loss")
                .help("set loss.kind and loss.logits")
        })?;
        Ok(self.countable()?)
    }

    /// To a whole step on one rank.
    fn train(&mut self) -> Result<(), End> {
        self.passes(pipeline::training(&self.setup.options, self.loss_elements as f64))
    }

    /// Measures what the model moves at least, before its step is made faster or smaller.
    pub(super) fn measure_traffic(&mut self) {
        let config = self.setup.config;
        let sharding = &config.sharding;
        let shards = sharding.strategy.shards(sharding.ranks, sharding.shard_group);
        self.traffic = model_traffic(&self.graph, config.accumulation(), shards);
    }

    /// Decides how parameters are held.
    fn hold(&mut self) -> Result<(), End> {
        let is_frozen = |kind: ParamKind| kind == ParamKind::Frozen;
        if let Some(as_read) = &self.as_read
            && self.graph.params().any(|(_, p)| is_frozen(p.kind))
        {
            self.context.evaluated = self.dtypes_evaluated(as_read)?;
        }
        self.passes(pipeline::holding(&self.setup.options))
    }

    /// Up to the step of all ranks, with these parameters gathered in one collective.
    pub(super) fn distribute(&mut self, small: &BTreeSet<String>) -> Result<(), End> {
        let Saving { recompute, chunks, .. } = self.saving;
        let chunk_loss = ChunkLoss { chunks, device: self.setup.cluster.device.clone() };
        self.passes(pipeline::distribution(&self.setup.options, chunk_loss, recompute, small))
    }

    /// Runs passes in order.
    pub(super) fn passes(&mut self, passes: Vec<Box<dyn Pass>>) -> Result<(), End> {
        for pass in passes {
            let name = pass.info().name;
            if self.setup.request.disabled.iter().any(|d| d == name) {
                continue;
            }
            self.pass(&*pass)?;
            if self.stop_after == Some(name) {
                return Err(End::AsAsked);
            }
            self.go_on()?;
        }
        Ok(())
    }

    fn pass(&mut self, pass: &dyn Pass) -> Result<(), Report> {
        let name = pass.info().name;
        let nodes_before = self.graph.len();
        let changed = pass.run(&mut self.graph, &mut self.context)?;
        if changed == Changed::Yes && self.verify {
            verified(&self.graph, name)?;
        }
        let remarks = std::mem::take(&mut self.context.remarks);
        let remarks = remarks.into_iter().map(|r| (r.message, r.origin)).collect();
        self.report(name, nodes_before, remarks);
        self.passes_run += 1;
        if let Some(observer) = &mut self.observer {
            observer.after(self.passes_run, name, &self.graph);
        }
        Ok(())
    }

    /// Stores the graph after a transformation; it had `nodes_before` nodes.
    pub(super) fn report(
        &mut self,
        name: &str,
        nodes_before: usize,
        remarks: Vec<(String, Origin)>,
    ) {
        let (pass, nodes_after) = (name.into(), self.graph.len());
        self.reports.push(PassReport { pass, nodes_before, nodes_after, remarks });
    }

    /// Refuses a step of more loss elements than an f64 counts.
    fn countable(&self) -> Result<(), Diagnostic> {
        let (config, capacity) = (self.setup.config, self.loss_elements);
        let (ranks, accumulation) = (config.sharding.ranks, config.accumulation());
        let elements = capacity as f64 * accumulation as f64 * ranks as f64;
        if elements < MAX_LOSS_ELEMENTS {
            return Ok(());
        }
        let message = format!(
            "a step sums {capacity} loss elements on each of {ranks} ranks in each of \
             {accumulation} micro-steps: more than an f64 counts exactly"
        );
        Err(Diagnostic::error(Code::TooManyLossElements, message)
            .help("lower run.accumulation or sharding.ranks"))
    }
}

/// The observer, if it observes the passes of this graph.
pub(super) fn observing<'a>(
    observer: Option<&'a mut dyn Observer>,
    evaluation: bool,
    graph: &Graph,
) -> Option<&'a mut dyn Observer> {
    observer.and_then(|observer| observer.begin(evaluation, graph).then_some(observer))
}

/// The remark on an initializer that became a constant of the graph.
fn inlined(constant: &Inlined) -> (String, Origin) {
    let message = format!("constant {}: {}", constant.ty, constant.reason);
    (message, Origin::new(&constant.name, ""))
}

/// The graph's laws, broken by a pass: a bug of the compiler.
fn verified(graph: &Graph, pass: &str) -> Result<(), Report> {
    verify::verify(graph).map_err(|mut diagnostics| {
        for d in &mut diagnostics {
            d.message = format!("after pass `{pass}`: {}", d.message);
        }
        Report { diagnostics }
    })
}
