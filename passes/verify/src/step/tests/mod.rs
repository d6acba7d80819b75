//! The statements are compared with their formulas, written out in f64.

mod buffers;
mod formulas;
mod losses;
mod updates;

use frit_ir::interpret::{Options, leaf_key, run_ranks};
use frit_ir::ops::{Init, Input, Param, ParamKind};
use frit_ir::{
    DType, Graph, Op, Origin, OutputKind, Region, Tensor, TensorData, TensorType, ValueId,
};
use std::collections::HashMap;

pub(super) type Tensors = HashMap<String, Tensor>;

/// A graph under construction.
pub(super) struct Model(pub(super) Graph);

impl Model {
    pub(super) fn new() -> Model {
        Model(Graph::new("model"))
    }

    pub(super) fn op(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        self.0.add1(op, inputs, Origin::none(), Region::Forward).expect("fits")
    }

    pub(super) fn input(&mut self, name: &str, dtype: DType, shape: &[usize]) -> ValueId {
        let ty = TensorType::new(dtype, shape);
        self.op(Op::Input(Input { name: name.into(), ty }), &[])
    }

    pub(super) fn param(&mut self, name: &str, kind: ParamKind, ty: TensorType) -> ValueId {
        let (name, reason) = (name.into(), String::new());
        let init = Init::Constant(0.0);
        let param = Param { name, ty, kind, reason, init, held: None, unit: None, sharded: false };
        self.op(Op::Param(param), &[])
    }
}

/// An f32 tensor whose elements are not rounded.
pub(super) fn floats(shape: &[usize], values: &[f64]) -> Tensor {
    Tensor::exact(TensorType::new(DType::F32, shape), TensorData::Float(values.to_vec()))
}

pub(super) fn random(rng: &mut fastrand::Rng, n: usize) -> Vec<f64> {
    (0..n).map(|_| rng.f64() * 4.0 - 2.0).collect()
}

pub(super) fn close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        let same = a == b || (a - b).abs() <= 1e-12 * (1.0 + a.abs().max(b.abs()));
        assert!(same, "{what}, element {i}: {a}, expected {b}");
    }
}

/// The ranks of a training, whose state is kept between runs of the graph as the runtime keeps it.
pub(super) struct Ranks {
    pub(super) graph: Graph,
    pub(super) states: Vec<Tensors>,
}

impl Ranks {
    pub(super) fn new(graph: Graph, n: usize) -> Ranks {
        Ranks { graph, states: vec![Tensors::new(); n] }
    }

    /// Runs a step, its micro-steps with these inputs per rank; returns the outputs of the last one that are metrics.
    pub(super) fn step(&mut self, micro_steps: &[Vec<Tensors>]) -> HashMap<String, f64> {
        let mut metrics = HashMap::new();
        for (i, inputs) in micro_steps.iter().enumerate() {
            let with_state = |(state, inputs): (&Tensors, &Tensors)| {
                state.clone().into_iter().chain(inputs.clone()).collect()
            };
            let feeds: Vec<Tensors> = self.states.iter().zip(inputs).map(with_state).collect();
            let ranks = run_ranks(&self.graph, &feeds, Options::EXACT).expect("runs");
            let is_last = i + 1 == micro_steps.len();
            for (states, outputs) in self.states.iter_mut().zip(ranks) {
                for (output, (name, tensor)) in self.graph.outputs.iter().zip(outputs) {
                    match output.kind {
                        OutputKind::Carry(leaf) => {
                            let of_update = self.graph.def(output.value).region == Region::Update;
                            if is_last || !of_update {
                                let leaf = leaf_key(&self.graph.def(leaf).op).expect("a leaf");
                                states.insert(leaf, tensor);
                            }
                        }
                        OutputKind::Metric if is_last => {
                            metrics.insert(name, tensor.to_f64s()[0]);
                        }
                        _ => {}
                    }
                }
            }
        }
        for (_, node) in self.graph.nodes() {
            if let (Op::State(state), Some(leaf)) = (&node.op, leaf_key(&node.op))
                && state.name.is_within_step()
            {
                self.states.iter_mut().for_each(|states| drop(states.remove(&leaf)));
            }
        }
        metrics
    }

    /// A state or parameter of a rank.
    pub(super) fn value(&self, rank: usize, name: &str) -> Vec<f64> {
        self.states[rank].get(name).unwrap_or_else(|| panic!("no `{name}`")).to_f64s()
    }
}
