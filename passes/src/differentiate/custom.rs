//! The gradients that functions state themselves: their nodes are written out anew in region backward, with the cotangents of the
//! results in place of `cotangent`.
//!
//! The seed of the backward pass holds the loss scale. A gradient function that is linear in the cotangents passes it on; one that is not,
//! such as one that clips them, is given cotangents without the loss scale, and what it gives is scaled again. Either way it
//! sees the gradient of the mean over a micro-batch, divided by the number of micro-steps.

use super::builder::{Builder, Gradients, Rule, RuleError};
use crate::pass::bug;
use frit_ir::ops::{CustomGradient, Linear, Op};
use frit_ir::{DType, Graph, Node, NodeId, Region, ValueId};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The seed of the backward pass.
#[derive(Clone, Copy)]
pub(super) struct Seed {
    /// Its value, in f32.
    pub(super) value: ValueId,
    /// Its constant factor; the rest is the loss scale.
    pub(super) factor: f64,
}

/// What is needed to write gradient functions out.
pub(super) struct Functions {
    seed: Seed,
    /// The nodes that the training step computes forward in any case.
    forward: HashSet<NodeId>,
    /// Positions of nodes in the forward graph.
    position: HashMap<NodeId, usize>,
}

impl Functions {
    /// Of a forward graph whose nodes in order are `forward`.
    pub(super) fn new(graph: &Graph, forward: &[NodeId], seed: Seed) -> Self {
        let mut kept = HashSet::new();
        let mut open: Vec<ValueId> = graph.outputs.iter().map(|o| o.value).collect();
        while let Some(value) = open.pop() {
            let id = graph.value(value).def;
            if kept.insert(id) {
                let node = graph.node(id);
                let own = match &node.op {
                    Op::CustomGradient(op) => op.results,
                    _ => node.inputs.len(),
                };
                open.extend(&node.inputs[..own]);
            }
        }
        let position = forward.iter().enumerate().map(|(i, id)| (*id, i)).collect();
        Functions { seed, forward: kept, position }
    }

    /// The cotangents of the operands of a call, from those of its results.
    pub(super) fn vjp(
        &self,
        b: &mut Builder<'_>,
        node: &Node,
        op: &CustomGradient,
        dys: &[Option<ValueId>],
    ) -> Gradients {
        let pairs = op.pairs(node.inputs.len()).filter(|(x, _)| b.needs(*x));
        let pairs: Vec<(ValueId, usize, ValueId)> =
            pairs.map(|(x, dx)| (node.inputs[x], x, node.inputs[dx])).collect();
        let nodes = self.nodes(b.graph, pairs.iter().map(|(.., dx)| *dx));
        let linear = is_linear(b.graph, &nodes, pairs.iter().map(|(.., dx)| *dx));
        let mut map: HashMap<ValueId, ValueId> = HashMap::new();
        for id in nodes {
            let inner = b.graph.node(id).clone();
            let made = match &inner.op {
                Op::Cotangent(of) => {
                    let ty = b.ty(inner.outputs[0]);
                    vec![match dys[of.result] {
                        None => b.zeros(ty)?,
                        Some(dy) if linear => b.cast(dy, ty.dtype)?,
                        Some(dy) => self.unscaled(b, dy, ty.dtype)?,
                    }]
                }
                Op::EnterPrecision(_) | Op::LeavePrecision(_) => {
                    vec![read(&map, inner.inputs[0])]
                }
                _ => {
                    let inputs: Vec<ValueId> =
                        inner.inputs.iter().map(|v| read(&map, *v)).collect();
                    let origin = inner.origin.by(super::INFO.name);
                    let added = b.graph.add(inner.op, &inputs, origin, Region::Backward);
                    added.map_err(|e| RuleError::Bug(Box::new(bug(super::INFO.name)(e))))?
                }
            };
            map.extend(inner.outputs.into_iter().zip(made));
        }
        let mut gradients = vec![None; node.inputs.len()];
        for (x, at, dx) in pairs {
            let dx = read(&map, dx);
            let dx = if linear { dx } else { self.scaled(b, dx)? };
            let to = b.grad_dtype(x);
            gradients[at] = Some(b.cast(dx, to)?);
        }
        Ok(gradients)
    }

    /// The nodes that compute these values and are not computed forward, in order.
    fn nodes(&self, graph: &Graph, values: impl Iterator<Item = ValueId>) -> Vec<NodeId> {
        let mut found = BTreeSet::new();
        let mut open: Vec<ValueId> = values.collect();
        while let Some(value) = open.pop() {
            let id = graph.value(value).def;
            let node = graph.node(id);
            let Some(position) = self.position.get(&id) else { continue };
            if !node.op.is_leaf() && !self.forward.contains(&id) && found.insert((*position, id)) {
                open.extend(&node.inputs);
            }
        }
        found.into_iter().map(|(_, id)| id).collect()
    }

    /// A cotangent without the loss scale.
    fn unscaled(&self, b: &mut Builder<'_>, dy: ValueId, to: DType) -> Rule<ValueId> {
        let dtype = wide(b.ty(dy).dtype);
        let (dy, seed) = (b.cast(dy, dtype)?, b.cast(self.seed.value, dtype)?);
        let whole = b.div(dy, seed)?;
        let mean = b.scaled(whole, self.seed.factor)?;
        b.cast(mean, to)
    }

    /// The inverse: a gradient with the loss scale.
    fn scaled(&self, b: &mut Builder<'_>, dx: ValueId) -> Rule<ValueId> {
        let dtype = wide(b.ty(dx).dtype);
        let (dx, seed) = (b.cast(dx, dtype)?, b.cast(self.seed.value, dtype)?);
        let whole = b.scaled(dx, self.seed.factor.recip())?;
        b.mul(whole, seed)
    }
}

/// The dtype in which loss scales are multiplied and divided.
fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

fn read(map: &HashMap<ValueId, ValueId>, value: ValueId) -> ValueId {
    map.get(&value).copied().unwrap_or(value)
}

/// How a value depends on the cotangents of a call.
#[derive(Clone, Copy, PartialEq)]
enum Dependence {
    Zero,
    None,
    Linear,
}

/// Whether values that these nodes compute are linear in the cotangents.
fn is_linear(graph: &Graph, nodes: &[NodeId], mut values: impl Iterator<Item = ValueId>) -> bool {
    let mut known: HashMap<ValueId, Dependence> = HashMap::new();
    let of = |known: &HashMap<ValueId, Dependence>, v: ValueId| match known.get(&v) {
        Some(found) => *found,
        None if graph.constant(v).is_some_and(|c| c.as_splat() == Some(0.0)) => Dependence::Zero,
        None => Dependence::None,
    };
    for &id in nodes {
        let node = graph.node(id);
        let operands: Vec<Dependence> = node.inputs.iter().map(|v| of(&known, *v)).collect();
        let Some(found) = dependence(&node.op, &operands) else { return false };
        known.extend(node.outputs.iter().map(|v| (*v, found)));
    }
    values.all(|v| of(&known, v) != Dependence::None)
}

/// How the results of an operation depend on the cotangents; `None` if not linearly.
fn dependence(op: &Op, operands: &[Dependence]) -> Option<Dependence> {
    use Dependence::{Linear as InCotangents, None as Free, Zero};
    let sum = |terms: Vec<Dependence>| {
        let mut terms = terms.into_iter().filter(|term| *term != Zero);
        let Some(first) = terms.next() else { return Some(Zero) };
        terms.all(|term| term == first).then_some(first)
    };
    let n = operands.iter().filter(|o| **o == InCotangents).count();
    match (op, op.linear()) {
        (Op::Cotangent(_), _) => Some(InCotangents),
        (_, Linear::InEach) if operands.contains(&Zero) => Some(Zero),
        (_, Linear::InEach) => (n <= 1).then_some(if n == 1 { InCotangents } else { Free }),
        (_, Linear::InAll) => sum(operands.to_vec()),
        (_, Linear::In(terms)) => {
            let (inside, outside): (Vec<usize>, Vec<usize>) =
                (0..operands.len()).partition(|i| terms.contains(i));
            if outside.iter().any(|i| operands[*i] == InCotangents) {
                return None;
            }
            sum(inside.into_iter().map(|i| operands[i]).collect())
        }
        (_, Linear::No) => (n == 0).then_some(Free),
    }
}
