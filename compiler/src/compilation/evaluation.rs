//! Compiles the evaluation plan, alone or beside a training plan.

use super::passes::{End, observing};
use super::{Compilation, Evaluation, Made, Observer};
use crate::diagnostics::Report;
use crate::pipeline;
use frit_ir::plan::Plan;
use frit_ir::{DType, Graph};
use frit_passes::{PassContext, hold_frozen};
use std::collections::{BTreeMap, BTreeSet};

impl Compilation<'_> {
    /// From a model to what evaluates it.
    pub(super) fn evaluate(&mut self) -> Result<(), End> {
        self.saving.offload = self.asked_offload().unwrap_or_default();
        self.run_evaluation_passes()
    }

    /// Runs the passes of an evaluation.
    fn run_evaluation_passes(&mut self) -> Result<(), End> {
        let options = &self.setup.options;
        self.passes(pipeline::evaluation_forward(options))?;
        self.passes(pipeline::holding(options))?;
        self.measure_traffic();
        self.passes(pipeline::evaluation_distribution(options))
    }

    /// The evaluation of the model beside its training, which is `trained`, if it is asked for.
    pub(super) fn evaluation(&mut self, trained: &Plan) -> Result<Option<Evaluation>, Report> {
        let Some(graph) = self.as_read.take() else { return Ok(None) };
        let known = &self.context;
        let context = PassContext {
            units: known.units.clone(),
            unit_of: known.unit_of.clone(),
            held: known.held.clone(),
            ..PassContext::default()
        };
        let observer = self.observer.take().map(|observer| observer as &mut dyn Observer);
        let mut evaluation = Compilation {
            observer: observing(observer, true, &graph),
            context,
            trained: Some(trained),
            saving: self.saving,
            ..Compilation::new(self.setup, graph)
        };
        evaluation.run_evaluation_passes()?;
        let Made { mut plan, object, constants, .. } =
            evaluation.generate(evaluation.arrange()?)?;
        plan.reports = evaluation.reports;
        Ok(Some(Evaluation { plan, object, constants }))
    }

    /// The dtypes in which the evaluation will read parameters.
    pub(super) fn dtypes_evaluated(
        &self,
        as_read: &Graph,
    ) -> Result<BTreeMap<String, BTreeSet<DType>>, Report> {
        let mut evaluation = Compilation::new(self.setup, as_read.clone());
        evaluation.passes(pipeline::evaluation_forward(&self.setup.options))?;
        Ok(hold_frozen::dtypes_read(&evaluation.graph))
    }
}
