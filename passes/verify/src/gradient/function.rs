//! Functions that state their own gradient.
//!
//! Of `y = custom_gradient(y, x, dx)` the cotangent of `x` is `dx`, in which `cotangent(y)` stands for that of `y`: the gradient of
//! the mean loss, without the loss scale. So `dx` is taken for dy/(scale) and the result is scaled again; if `dx` is homogeneous of
//! degree one in the cotangents of the call, the scale cancels and is left out.

use super::term::Term;
use super::{Cotangents, Site};
use frit_ir::ops::{CustomGradient, Linear, Op};
use frit_ir::{Graph, Node, NodeId, ValueId};
use std::collections::HashMap;

/// How a value grows with the cotangents that it is computed of.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Degree {
    /// It is zero, of any degree.
    Zero,
    /// As this power of them; by 0 not at all.
    Power(u8),
    /// Otherwise.
    Other,
}

/// What the graph computes of cotangents.
pub(super) struct Calls {
    /// The nodes that read the cotangents of each call, in order.
    readers: HashMap<u32, Vec<NodeId>>,
    /// The degree of each value, of power 0 if it is not listed.
    degrees: HashMap<ValueId, Degree>,
}

impl Calls {
    pub(super) fn of(graph: &Graph) -> Self {
        let mut calls = Calls { readers: HashMap::new(), degrees: HashMap::new() };
        if !graph.nodes().any(|(_, node)| matches!(node.op, Op::CustomGradient(_))) {
            return calls;
        }
        // Nothing is computed of the cotangents of two calls (V501).
        let mut of: HashMap<ValueId, u32> = HashMap::new();
        for (id, node) in graph.nodes() {
            let call = match &node.op {
                Op::Cotangent(op) => Some(op.call),
                Op::CustomGradient(_) => None,
                _ => node.inputs.iter().find_map(|x| of.get(x).copied()),
            };
            if let Some(call) = call {
                of.extend(node.outputs.iter().map(|y| (*y, call)));
                calls.readers.entry(call).or_default().push(id);
            }
            let degree = calls.degree_of(node);
            if degree != Degree::Power(0) {
                calls.degrees.extend(node.outputs.iter().map(|y| (*y, degree)));
            }
        }
        calls
    }

    fn degree(&self, value: ValueId) -> Degree {
        self.degrees.get(&value).copied().unwrap_or(Degree::Power(0))
    }

    /// The degree of the results of a node.
    fn degree_of(&self, node: &Node) -> Degree {
        use Degree::{Other, Power, Zero};
        let operands: Vec<Degree> = node.inputs.iter().map(|x| self.degree(*x)).collect();
        let sum = |terms: &[Degree]| {
            let mut terms = terms.iter().filter(|term| **term != Zero);
            let Some(first) = terms.next() else { return Zero };
            if terms.all(|term| term == first) { *first } else { Other }
        };
        let product = |degree, factor: &Degree| match (degree, *factor) {
            (Zero, _) | (_, Zero) => Zero,
            (Power(n), Power(m)) if n + m <= 1 => Power(n + m),
            _ => Other,
        };
        let is_free = |degree: &Degree| matches!(degree, Power(0) | Zero);
        match (&node.op, node.op.linear()) {
            (Op::Constant(c), _) if c.value.as_splat() == Some(0.0) => Zero,
            (Op::Cotangent(_), _) => Power(1),
            (Op::CustomGradient(_), _) => Power(0),
            (_, _) if operands.contains(&Other) => Other,
            (_, Linear::InEach) => operands.iter().fold(Power(0), product),
            (_, Linear::InAll) => sum(&operands),
            (_, Linear::In(terms)) => {
                let (inside, outside): (Vec<_>, Vec<_>) =
                    (0..operands.len()).partition(|i| terms.contains(i));
                let inside: Vec<Degree> = inside.into_iter().map(|i| operands[i]).collect();
                if outside.iter().all(|i| is_free(&operands[*i])) { sum(&inside) } else { Other }
            }
            (_, Linear::No) if operands.iter().all(is_free) => Power(0),
            (_, Linear::No) => Other,
        }
    }

    /// The cotangents of the operands of a call, from those of its results. The seed of the loss is its scale times a factor.
    pub(super) fn cotangents<'w>(
        &self,
        forward: &Graph,
        op: &CustomGradient,
        at: &Site<'w>,
        (seed, factor): (Term<'w>, f64),
    ) -> Cotangents<'w> {
        let pairs: Vec<(usize, usize)> =
            op.pairs(at.x.len()).filter(|(x, _)| at.needed[*x]).collect();
        let is_one = |dx: &(usize, usize)| {
            matches!(self.degree(at.x[dx.1].id), Degree::Zero | Degree::Power(1))
        };
        let homogeneous = pairs.iter().all(is_one);
        let mut written: HashMap<ValueId, Term<'w>> = HashMap::new();
        for id in self.readers.get(&op.call).into_iter().flatten() {
            let node = forward.node(*id);
            let operands: Vec<Term<'w>> = node
                .inputs
                .iter()
                .map(|x| written.get(x).copied().unwrap_or(at.x[0].beside(*x)))
                .collect();
            let results = match &node.op {
                Op::Cotangent(cotangent) => {
                    let like = operands[0];
                    vec![match at.dy.get(cotangent.result).copied().flatten() {
                        None => like.zeros(like.dims()),
                        Some(dy) if homogeneous => dy.cast(like.dtype()),
                        Some(dy) => (dy / seed * factor).cast(like.dtype()),
                    }]
                }
                Op::EnterPrecision(_) | Op::LeavePrecision(_) => operands,
                op => Term::all(op.clone(), &operands),
            };
            written.extend(node.outputs.iter().copied().zip(results));
        }
        let mut cotangents = vec![None; at.x.len()];
        for (x, dx) in pairs {
            let dx = written.get(&at.x[dx].id).copied().unwrap_or(at.x[dx]);
            cotangents[x] = Some(if homogeneous { dx } else { dx * factor.recip() * seed });
        }
        cotangents
    }
}
