//! Writes the nodes of a statement.

use crate::unstated::Unstated;
use frit_ir::ops::{
    BinaryFn, Cast, Constant, Hyper, Reduce, ReduceFn, Reshape, State, StateName, UnaryFn,
};
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, Shape, Tensor, TensorType, ValueId};
use std::collections::HashMap;

/// A value, or why there is no statement of it.
pub(super) type Stated = Result<ValueId, Unstated>;

/// A graph to which nodes are added.
pub(super) struct Writer {
    pub(super) graph: Graph,
    /// That of the nodes that are added.
    pub(super) region: Region,
    hypers: HashMap<String, ValueId>,
}

impl Writer {
    pub(super) fn of(graph: &Graph, region: Region) -> Writer {
        Writer { graph: graph.clone(), region, hypers: HashMap::new() }
    }

    pub(super) fn all(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, Unstated> {
        Ok(self.graph.add(op, inputs, Origin::none().by("verify"), self.region)?)
    }

    pub(super) fn one(&mut self, op: Op, inputs: &[ValueId]) -> Stated {
        Ok(self.all(op, inputs)?[0])
    }

    pub(super) fn unary(&mut self, f: UnaryFn, x: ValueId) -> Stated {
        self.one(Op::Unary(f), &[x])
    }

    /// Of two values over the reals: the second takes the dtype of the first.
    pub(super) fn binary(&mut self, f: BinaryFn, a: ValueId, b: ValueId) -> Stated {
        let b = self.cast(b, self.dtype(a))?;
        self.one(Op::Binary(f), &[a, b])
    }

    pub(super) fn cast(&mut self, x: ValueId, to: DType) -> Stated {
        if self.dtype(x) == to { Ok(x) } else { self.one(Op::Cast(Cast { to }), &[x]) }
    }

    pub(super) fn constant(&mut self, value: Tensor) -> Stated {
        self.one(Op::Constant(Constant { value }), &[])
    }

    /// A number in the dtype of `like`.
    pub(super) fn number(&mut self, like: ValueId, x: f64) -> Stated {
        self.constant(Tensor::splat(TensorType::scalar(self.dtype(like)), x))
    }

    /// `x` with a number.
    pub(super) fn with(&mut self, f: BinaryFn, x: ValueId, number: f64) -> Stated {
        let number = self.number(x, number)?;
        self.binary(f, x, number)
    }

    pub(super) fn reshape(&mut self, x: ValueId, shape: Shape) -> Stated {
        self.one(Op::Reshape(Reshape { shape }), &[x])
    }

    pub(super) fn reduce(&mut self, f: ReduceFn, x: ValueId, axes: Vec<usize>) -> Stated {
        self.one(Op::Reduce(Reduce { f, axes, keep_dims: false }), &[x])
    }

    /// The sum of all elements.
    pub(super) fn sum(&mut self, x: ValueId) -> Stated {
        let rank = self.shape(x).rank();
        let sum = if rank == 0 { x } else { self.reduce(ReduceFn::Sum, x, (0..rank).collect())? };
        self.cast(sum, DType::F32)
    }

    /// The leaf of a hyper-parameter.
    pub(super) fn hyper(&mut self, name: &str, default: f64) -> Stated {
        if let Some(&leaf) = self.hypers.get(name) {
            return Ok(leaf);
        }
        let leaf = self.one(Op::Hyper(Hyper { name: name.into(), default }), &[])?;
        self.hypers.insert(name.into(), leaf);
        Ok(leaf)
    }

    /// State that starts at zero.
    pub(super) fn state(&mut self, name: &StateName, of: Option<&str>, ty: TensorType) -> Stated {
        let of = of.map(String::from);
        self.one(Op::State(State { name: name.clone(), of, ty, init: 0.0, sharded: false }), &[])
    }

    /// The state of this name that the graph has already.
    pub(super) fn find_state(&self, name: &StateName) -> Option<ValueId> {
        self.graph.nodes().find_map(|(_, node)| match &node.op {
            Op::State(state) if state.name == *name => Some(node.outputs[0]),
            _ => None,
        })
    }

    /// The next value of a state.
    pub(super) fn carry(
        &mut self,
        name: &StateName,
        of: Option<&str>,
        next: ValueId,
        leaf: ValueId,
    ) {
        let name = of.map_or_else(|| name.to_string(), |of| format!("{name}.{of}"));
        self.graph.add_output(&name, next, OutputKind::Carry(leaf));
    }

    pub(super) fn dtype(&self, x: ValueId) -> DType {
        self.graph.ty(x).dtype
    }

    pub(super) fn shape(&self, x: ValueId) -> &Shape {
        &self.graph.ty(x).shape
    }
}
