//! Precomputed facts about the graph.
//!
//! Reshapes are free and ignored. The *base* of a value is the value before the reshapes that produced it.

use frit_ir::ops::Op;
use frit_ir::sharding::sharded_values;
use frit_ir::{Graph, Node, NodeId, ValueId};

/// Tables over the nodes, by position in the order, and over values.
pub(super) struct Facts<'g> {
    pub(super) graph: &'g Graph,
    pub(super) order: &'g [NodeId],
    /// Position of the node that defines a value.
    def: Vec<usize>,
    base: Vec<ValueId>,
    /// Positions of the nodes other than reshapes that read a base or a reshape of it, ascending.
    uses: Vec<Vec<usize>>,
    escapes: Vec<bool>,
    sharded: Vec<bool>,
}

impl<'g> Facts<'g> {
    pub(super) fn new(graph: &'g Graph) -> Self {
        let n = graph.n_values();
        let mut facts = Facts {
            graph,
            order: graph.order(),
            def: vec![usize::MAX; n],
            base: (0..n as u32).map(ValueId).collect(),
            uses: vec![Vec::new(); n],
            escapes: vec![false; n],
            sharded: sharded_values(graph),
        };
        for (position, (_, node)) in graph.nodes().enumerate() {
            for output in &node.outputs {
                facts.def[output.0 as usize] = position;
            }
            if let Op::Reshape(_) = node.op {
                facts.base[node.outputs[0].0 as usize] = facts.base(node.inputs[0]);
                continue;
            }
            for input in &node.inputs {
                let uses = &mut facts.uses[facts.base[input.0 as usize].0 as usize];
                if uses.last() != Some(&position) {
                    uses.push(position);
                }
            }
        }
        for output in &graph.outputs {
            let base = facts.base(output.value);
            facts.escapes[base.0 as usize] = true;
        }
        facts
    }

    pub(super) fn node(&self, position: usize) -> &'g Node {
        self.graph.node(self.order[position])
    }

    /// The value of which this is a reshape, or itself.
    pub(super) fn base(&self, value: ValueId) -> ValueId {
        self.base[value.0 as usize]
    }

    /// Position of the node that computes the base of a value.
    pub(super) fn source(&self, value: ValueId) -> usize {
        self.def[self.base(value).0 as usize]
    }

    /// Position of the node that defines a value, which may be a reshape.
    pub(super) fn def(&self, value: ValueId) -> usize {
        self.def[value.0 as usize]
    }

    /// Positions of the readers of a base.
    pub(super) fn uses(&self, base: ValueId) -> &[usize] {
        &self.uses[base.0 as usize]
    }

    /// Whether a base, or a reshape of it, is an output of the graph.
    pub(super) fn escapes(&self, base: ValueId) -> bool {
        self.escapes[base.0 as usize]
    }

    pub(super) fn numel(&self, value: ValueId) -> usize {
        self.graph.ty(value).shape.numel()
    }

    /// Whether the value is a constant with equal elements, which becomes part of a region's code.
    pub(super) fn is_splat(&self, value: ValueId) -> bool {
        self.graph.constant(self.base(value)).is_some_and(|c| c.as_splat().is_some())
    }

    /// Whether lowering processes this node per flat group: an operand or result is sharded, or it reads the state of a
    /// parameter.
    pub(super) fn is_sharded(&self, node: &Node) -> bool {
        let state = |v: &ValueId| matches!(&self.graph.def(*v).op, Op::State(s) if s.of.is_some());
        node.inputs.iter().any(state)
            || node.inputs.iter().chain(&node.outputs).any(|v| self.sharded[v.0 as usize])
    }
}
