//! Counts the casts of casting one operation at a time, as PyTorch's autocast does at run time: the baseline for the casts of a
//! plan.
//!
//! In: the graph before autocast. Every operation of class `lower_precision` casts its f32 operands, and one of class `fp32` its
//! low-precision ones, at each use; only casts of parameters are reused for the rest of the pass, as in PyTorch's weight cache. The
//! backward pass casts the gradient of everything that was cast and needs one. Promotion inside an elementwise kernel is not a cast,
//! but autograd casts the gradient of its low-precision operand back (`validate_outputs` in `torch/csrc/autograd/engine.cpp`).
//!
//! Operations are those of the raised graph, so this is a lower bound: of a composite such as `pow` in GPT-2's GELU, PyTorch casts
//! the parts.

use super::assign::{Precision, Problem, is_statistic, is_weak, reads, subject};
use crate::differentiate::varied_values;
use frit_ir::ops::precision::Class;
use frit_ir::plan::CastBaseline;
use frit_ir::{DType, Graph, Node, NodeId, Op, ValueId};
use std::collections::{HashMap, HashSet};

/// Counts the casts of one forward and backward pass.
pub(super) fn casts(
    graph: &Graph,
    low: DType,
    bound: &HashMap<NodeId, Precision>,
    lower: bool,
) -> CastBaseline {
    let users = graph.users();
    let problem = Problem { graph, users: &users, bound, lower };
    let mut count = Count {
        graph,
        varied: varied_values(graph),
        is_low: vec![false; graph.n_values()],
        cached: HashSet::new(),
        total: CastBaseline::default(),
        bytes_per_element: (DType::F32.size() + low.size()) as u64,
    };
    for (id, node) in graph.nodes() {
        let class = match bound.get(&id) {
            Some(Precision::Low | Precision::LowToF32) => Class::Lower,
            Some(Precision::F32 | Precision::F32ToLow) => Class::F32,
            None if lower && problem.is_bias_add(node) => Class::Lower,
            None => node.op.precision().class,
        };
        let is_low = count.node(node, class, lower || bound.contains_key(&id));
        for &output in &node.outputs {
            let low = is_low && subject(graph, output) && !is_statistic(graph, output);
            count.is_low[output.0 as usize] = low;
        }
    }
    count.total
}

struct Count<'a> {
    graph: &'a Graph,
    varied: Vec<bool>,
    /// For each value whether PyTorch would hold it in the low dtype.
    is_low: Vec<bool>,
    /// Parameters whose cast is kept.
    cached: HashSet<ValueId>,
    total: CastBaseline,
    bytes_per_element: u64,
}

impl Count<'_> {
    /// Counts the casts that a node makes of its operands; whether its results are low.
    fn node(&mut self, node: &Node, class: Class, lower: bool) -> bool {
        let graph = self.graph;
        let operands = node.inputs.iter().enumerate();
        let strong: Vec<ValueId> = operands
            .filter(|(i, v)| subject(graph, **v) && !is_weak(graph, **v) && reads(&node.op, *i))
            .map(|(_, v)| *v)
            .collect();
        let is_low = |count: &Self, v: &ValueId| count.is_low[v.0 as usize];
        match class {
            Class::Lower if lower => {
                for v in strong {
                    if !is_low(self, &v) {
                        self.cast(v);
                    }
                }
                true
            }
            Class::Lower | Class::F32 => {
                self.widen(&strong);
                false
            }
            Class::F32Inside if matches!(node.op, Op::CrossEntropy(_)) => {
                self.widen(&strong);
                false
            }
            Class::F32Inside | Class::Layout => strong.first().is_some_and(|v| is_low(self, v)),
            Class::Promote => {
                let all = !strong.is_empty() && strong.iter().all(|v| is_low(self, v));
                if !all && matches!(node.op, Op::Concat(_) | Op::ScatterElements(_)) {
                    self.widen(&strong);
                } else if !all {
                    let ty = graph.ty(node.outputs[0]);
                    let low = strong
                        .iter()
                        .filter(|v| is_low(self, v) && graph.ty(**v).shape == ty.shape);
                    let varied = low.filter(|v| self.varied[v.0 as usize]).count();
                    self.total.casts += varied;
                    self.total.bytes += (varied * ty.shape.numel()) as u64 * self.bytes_per_element;
                }
                all
            }
            Class::Fixed => false,
        }
    }

    fn widen(&mut self, values: &[ValueId]) {
        for &v in values {
            if self.is_low[v.0 as usize] {
                self.cast(v);
            }
        }
    }

    fn cast(&mut self, v: ValueId) {
        let is_param = matches!(self.graph.def(v).op, Op::Param(_));
        if is_param && !self.cached.insert(v) {
            return;
        }
        // The cast, and that of its gradient.
        let n = 1 + usize::from(self.varied[v.0 as usize]);
        let elements = self.graph.ty(v).shape.numel() as u64;
        self.total.casts += n;
        self.total.bytes += n as u64 * elements * self.bytes_per_element;
    }
}
