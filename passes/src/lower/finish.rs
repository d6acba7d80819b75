//! Completes the phases of a step: metrics, carried state, and sums back to zero.

use super::{Lowering, internal};
use frit_ir::ops::{ParamKind, StateName};
use frit_ir::plan::{Action, Arena, BufferClass, Metric, MetricName, Place, Stream};
use frit_ir::{DType, Diagnostic, Op, Origin, OutputKind, Region, TensorType, ValueId};

impl Lowering<'_> {
    /// Completes the micro-step: the state that it carries.
    pub(super) fn finish_micro_step(&mut self) -> Result<(), Diagnostic> {
        self.finish_gradients()?;
        self.commit(|region| region != Region::Update)
    }

    /// Lets the update write metrics where they are read after the step.
    pub(super) fn place_metrics(&mut self) {
        let graph = self.graph;
        for output in graph.outputs.iter().filter(|o| o.kind == OutputKind::Metric) {
            let value = self.reshaped(output.value);
            let node = graph.def(value);
            let is_made = !node.op.is_leaf() && node.region == Region::Update;
            if is_made && !self.required.contains_key(&value) {
                let place = self.metric(&output.name, graph.ty(value).clone());
                self.required.insert(value, place.clone());
                self.metrics.insert(value, place);
            }
        }
    }

    /// What a value is a reshape of.
    fn reshaped(&self, mut value: ValueId) -> ValueId {
        while let Op::Reshape(_) = self.graph.def(value).op {
            value = self.graph.def(value).inputs[0];
        }
        value
    }

    /// A new place for a metric.
    fn metric(&mut self, name: &str, ty: TensorType) -> Place {
        let (arena, class) = (Arena::Persistent, BufferClass::State);
        let buffer = self.buffer(&format!("metric {name}"), arena, class, ty.bytes());
        Place { buffer, offset: 0, ty }
    }

    /// Metrics, then scalar state, then the accumulators back to zero.
    pub(super) fn finish_update(&mut self) -> Result<(), Diagnostic> {
        let graph = self.graph;
        for output in graph.outputs.iter().filter(|o| o.kind == OutputKind::Metric) {
            let name = MetricName::of(&output.name)
                .ok_or_else(|| internal(format!("`{}` is no metric", output.name)))?;
            let from = self.place(output.value)?;
            if self.metrics.remove(&self.reshaped(output.value)).is_some() {
                self.plan.metrics.push(Metric { name, place: from });
                continue;
            }
            let to = self.metric(&output.name, from.ty.clone());
            let action = Action::Copy { from, to: to.clone() };
            let label = format!("metric {name}");
            self.task(&label, Stream::Compute, Region::Update, &Origin::none(), action);
            self.plan.metrics.push(Metric { name, place: to });
        }
        self.commit(|region| region == Region::Update)?;
        let mut places = Vec::new();
        for state in &self.plan.states {
            if state.name.is_within_step() {
                places.push(Place { buffer: state.buffer, offset: 0, ty: state.ty.clone() });
            }
        }
        for group in &self.plan.groups {
            for state in group.states.iter().filter(|s| s.name == StateName::GradSum) {
                let ty = TensorType::new(DType::F32, [self.plan.buffers[state.buffer].bytes / 4]);
                places.push(Place { buffer: state.buffer, offset: 0, ty });
            }
        }
        if !places.is_empty() {
            let action = Action::Zero { places };
            self.task("zero sums", Stream::Compute, Region::Update, &Origin::none(), action);
        }
        Ok(())
    }

    /// Copies next values of state and buffers into their buffers, for carries computed in these regions.
    fn commit(&mut self, here: impl Fn(Region) -> bool) -> Result<(), Diagnostic> {
        let graph = self.graph;
        for output in &graph.outputs {
            let OutputKind::Carry(leaf) = output.kind else { continue };
            // State of trainable parameters is written by the optimizer.
            let own = match &graph.def(leaf).op {
                Op::State(state) => state.of.is_none(),
                Op::Param(param) => param.kind != ParamKind::Trainable,
                _ => false,
            };
            if !own || !here(graph.def(output.value).region) {
                continue;
            }
            let (from, to) = (self.place(output.value)?, self.place(leaf)?);
            if from == to {
                // Written in place.
                continue;
            }
            let name = format!("commit {}", output.name);
            let region = graph.def(output.value).region;
            let action = Action::Copy { from, to };
            self.task(&name, Stream::Compute, region, &Origin::none(), action);
        }
        Ok(())
    }
}
