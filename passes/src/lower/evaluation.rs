//! Lowers an evaluation: the phase `eval`, a forward graph whose outputs and statistics stay readable.

use super::Lowering;
use crate::loss::LossKind;
use crate::loss::evaluation::{EXAMPLES, STATISTICS};
use frit_ir::plan::{
    Action, Arena, BufferClass, EvalSpec, LossSpec, OutputSpec, Phase, PhaseName, Place, Stream,
    TaskId,
};
use frit_ir::{Diagnostic, Graph, Op, Origin, OutputKind, Region};

/// Whether a graph is evaluated, not trained.
pub(super) fn is_evaluation(graph: &Graph) -> bool {
    graph.outputs.iter().all(|o| o.kind == OutputKind::Result)
}

impl Lowering<'_> {
    /// Lowers the whole graph as one phase.
    pub(super) fn evaluation(&mut self) -> Result<(), Diagnostic> {
        self.place_leaves()?;
        let results = self.place_results();
        let graph = self.graph;
        for (_, node) in graph.nodes() {
            self.node(node)?;
        }
        let mut eval = EvalSpec::default();
        for (output, to) in graph.outputs.iter().zip(results) {
            let from = self.place(output.value)?;
            if from != to {
                let action = Action::Copy { from, to: to.clone() };
                let name = format!("output {}", output.name);
                self.task(&name, Stream::Compute, Region::Forward, &Origin::none(), action);
            }
            match output.name.as_str() {
                STATISTICS => eval.statistics = Some(to),
                _ => eval.outputs.push(OutputSpec { name: output.name.clone(), place: to }),
            }
        }
        if eval.statistics.is_some() {
            eval.losses = self.losses();
            eval.metrics.clone_from(&self.options.metrics);
        }
        if let Some(at) = self.plan.inputs.iter().position(|i| i.name == EXAMPLES) {
            let input = self.plan.inputs.remove(at);
            eval.weights = Some(Place { buffer: input.buffer, offset: 0, ty: input.ty });
        }
        let read_by_losses =
            graph.nodes().filter(|(_, n)| *n.origin.pass == *crate::loss::INFO.name);
        let are_labels = |name: &String| self.options.losses.iter().any(|t| t.labels == *name);
        eval.labels = read_by_losses
            .filter_map(|(_, n)| match &n.op {
                Op::Input(input) => Some(input.name.clone()).filter(are_labels),
                _ => None,
            })
            .collect();
        let end = self.plan.tasks.next_key();
        self.plan.phases.push(Phase { name: PhaseName::Eval, begin: TaskId::FIRST, end });
        self.plan.eval = Some(eval);
        Ok(())
    }

    /// Gives every output a buffer that outlives the phase, and requires it to be written there where possible.
    fn place_results(&mut self) -> Vec<Place> {
        let graph = self.graph;
        let mut places = Vec::new();
        for output in &graph.outputs {
            let ty = graph.ty(output.value).clone();
            let (arena, class) = (Arena::Persistent, BufferClass::Activation);
            let buffer = self.buffer(&output.name, arena, class, ty.bytes());
            let place = Place { buffer, offset: 0, ty };
            let mut value = output.value;
            loop {
                let node = graph.def(value);
                let elsewhere = node.op.is_leaf() || matches!(node.op, Op::AllGather(_));
                if elsewhere || self.required.contains_key(&value) {
                    break;
                }
                let ty = graph.ty(value).clone();
                self.required.insert(value, Place { ty, ..place.clone() });
                match &node.op {
                    Op::Reshape(_) => value = node.inputs[0],
                    _ => break,
                }
            }
            places.push(place);
        }
        places
    }

    fn losses(&self) -> Vec<LossSpec> {
        let counted = self.options.losses.iter().filter(|t| t.kind != LossKind::None);
        counted.map(|t| LossSpec { name: t.to_string(), weight: t.weight }).collect()
    }
}
