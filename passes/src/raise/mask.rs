//! Analyzes attention masks.
//!
//! A mask is a condition (keep where true) or is added to the scores. A constant mask that keeps the lower triangle or a band around the
//! diagonal becomes the attributes `causal` and `window`; one that keeps everything is dropped; any other stays an operand. A
//! conjunction of conditions is split if one of them is constant.

use super::matcher::Matcher;
use super::{Raised, Step};
use crate::canonicalize::known_value;
use frit_ir::ops::attention::{FILLED, Sight};
use frit_ir::ops::{BinaryFn, Constant, LogicalFn, Reshape, UnaryFn};
use frit_ir::{DType, Op, Shape, Tensor, TensorType, ValueId};
use std::collections::HashSet;

/// A score this low has no weight beside any other: exporters write −∞, the dtype's minimum or −1e9.
const EXCLUDED: f64 = -1e9;

/// One mask between the matmul of queries and keys and the softmax.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mask {
    /// Added to the scores.
    Added(ValueId),
    /// Scores stay where the condition is `keep`, and are `fill` elsewhere.
    Filled {
        /// The condition.
        condition: ValueId,
        /// Where scores stay.
        keep: bool,
        /// The value of all other scores.
        fill: f64,
    },
}

/// All masks of one attention.
#[derive(Debug)]
pub(super) struct Masks {
    /// The known masks, combined.
    pub sight: Sight,
    /// The rest, as one operand.
    pub operand: Option<Step>,
}

impl Masks {
    /// Combines masks of scores of this type, adding nodes to the replacement. `None` if they have no
    /// equal among the operation's masks.
    pub(super) fn combine(
        m: &Matcher<'_>,
        raised: &mut Raised,
        masks: &[Mask],
        scores: &TensorType,
    ) -> Option<Masks> {
        let mut effective: Vec<(Mask, Option<Known>)> = Vec::new();
        for mask in masks {
            for (mask, known) in apart(m, simplified(m, *mask)) {
                if !matches!(known, Some(Known::Everything)) {
                    effective.push((mask, known));
                }
            }
        }
        let alone = effective.len() == 1;
        let mut sight = Sight::default();
        let mut parts = Parts { m, raised, scores, kept: None, filled: None, added: None };
        for (mask, known) in effective {
            match known {
                // Keys behind a finite fill come back in rows that another mask empties.
                Some(Known::Keys { sight: more, finite }) if alone || !finite => {
                    sight.causal |= more.causal;
                    sight.window = sight.window.into_iter().chain(more.window).min();
                }
                _ => parts.push(mask)?,
            }
        }
        Some(Masks { sight, operand: parts.join() })
    }
}

/// Masks that are not known while compiling, by kind.
struct Parts<'a, 'g> {
    m: &'a Matcher<'g>,
    raised: &'a mut Raised,
    scores: &'a TensorType,
    /// A condition: other scores are −∞.
    kept: Option<Step>,
    /// A finite fill and the condition where scores stay.
    filled: Option<(f64, Step)>,
    /// A sum of additive masks.
    added: Option<Step>,
}

impl Parts<'_, '_> {
    fn push(&mut self, mask: Mask) -> Option<()> {
        match mask {
            Mask::Added(v) => {
                let v = self.lift(v);
                self.add(v);
            }
            Mask::Filled { condition, keep, fill } => {
                let mut condition = self.lift(condition);
                if !keep {
                    condition = self.raised.push(Op::Unary(UnaryFn::Not), vec![condition]);
                }
                if fill == f64::NEG_INFINITY {
                    self.kept = Some(self.both(self.kept, condition));
                } else if fill <= EXCLUDED {
                    let same = self.filled.is_none_or(|(other, _)| other == fill);
                    let kept = same.then_some(self.filled.map(|(_, kept)| kept))?;
                    self.filled = Some((fill, self.both(kept, condition)));
                } else {
                    return None;
                }
            }
        }
        Some(())
    }

    fn both(&mut self, a: Option<Step>, b: Step) -> Step {
        match a {
            Some(a) => self.raised.push(Op::Logical(LogicalFn::And), vec![a, b]),
            None => b,
        }
    }

    fn add(&mut self, v: Step) {
        self.added = Some(match self.added {
            Some(sum) => self.raised.push(Op::Binary(BinaryFn::Add), vec![sum, v]),
            None => v,
        });
    }

    fn scalar(&mut self, value: f64) -> Step {
        let value = Tensor::splat(TensorType::scalar(self.scores.dtype), value);
        self.raised.push(Op::Constant(Constant { value }), vec![])
    }

    /// Scores of three axes become four with one head; so does a mask of three.
    fn lift(&mut self, v: ValueId) -> Step {
        let mut shape = self.m.graph.ty(v).shape.clone();
        if self.scores.shape.rank() == 4 || shape.rank() < 3 {
            return Step::Old(v);
        }
        shape.0.insert(1, 1);
        self.raised.push(Op::Reshape(Reshape { shape }), vec![Step::Old(v)])
    }

    fn join(mut self) -> Option<Step> {
        if let Some((_, kept)) = self.filled {
            // In a row without any key a finite fill makes the mean of all values, −∞ does not.
            let added = self.added.unwrap_or_else(|| self.scalar(0.0));
            let fill = self.scalar(FILLED);
            self.added = Some(self.raised.push(Op::Select, vec![kept, added, fill]));
        }
        match (self.kept, self.added) {
            (Some(kept), Some(added)) => {
                let excluded = self.scalar(f64::NEG_INFINITY);
                Some(self.raised.push(Op::Select, vec![kept, added, excluded]))
            }
            (kept, added) => kept.or(added),
        }
    }
}

/// An added `select(condition, 0, fill)` is a fill.
fn simplified(m: &Matcher<'_>, mask: Mask) -> Mask {
    let Mask::Added(v) = mask else { return mask };
    let node = m.graph.def(v);
    if node.op != Op::Select {
        return mask;
    }
    let condition = node.inputs[0];
    match (m.scalar(node.inputs[1]), m.scalar(node.inputs[2])) {
        (Some(0.0), Some(fill)) if fill == f64::NEG_INFINITY => {
            Mask::Filled { condition, keep: true, fill }
        }
        (Some(fill), Some(0.0)) if fill == f64::NEG_INFINITY => {
            Mask::Filled { condition, keep: false, fill }
        }
        _ => mask,
    }
}

/// The mask, or the parts of its condition if one of them is constant; each with its value, if constant.
fn apart(m: &Matcher<'_>, mask: Mask) -> Vec<(Mask, Option<Known>)> {
    let whole = known(m, &mask);
    let Mask::Filled { condition, keep, fill } = mask else { return vec![(mask, whole)] };
    if whole.is_some() || fill != f64::NEG_INFINITY {
        return vec![(mask, whole)];
    }
    let found = conditions(m, condition, keep);
    if found.len() == 1 {
        return vec![(mask, whole)];
    }
    let parts: Vec<(Mask, Option<Known>)> = found
        .into_iter()
        .map(|(condition, keep)| Mask::Filled { condition, keep, fill })
        .map(|part| (part, known(m, &part)))
        .collect();
    match parts.iter().any(|(_, known)| known.is_some()) {
        true => parts,
        false => vec![(mask, whole)],
    }
}

/// The conditions that must all be `keep` for this one to be it, with what each must be, in the order of the operands.
fn conditions(m: &Matcher<'_>, condition: ValueId, keep: bool) -> Vec<(ValueId, bool)> {
    let (mut stack, mut seen) = (vec![(condition, keep)], HashSet::new());
    let mut found = Vec::new();
    while let Some((condition, keep)) = stack.pop() {
        if !seen.insert((condition, keep)) {
            continue;
        }
        let node = m.graph.def(condition);
        match (&node.op, keep) {
            (Op::Logical(LogicalFn::And), true) | (Op::Logical(LogicalFn::Or), false) => {
                stack.extend(node.inputs.iter().rev().map(|part| (*part, keep)));
            }
            (Op::Unary(UnaryFn::Not), _) => stack.push((node.inputs[0], !keep)),
            _ => found.push((condition, keep)),
        }
    }
    found
}

enum Known {
    /// Every key, for every query.
    Everything,
    /// The keys that a query attends to by its position.
    Keys {
        /// Which they are.
        sight: Sight,
        /// Whether other scores are a low number rather than −∞.
        finite: bool,
    },
}

/// The keys that a constant mask keeps, if it is one of the simple cases.
fn known(m: &Matcher<'_>, mask: &Mask) -> Option<Known> {
    let (kept, shape, finite): (Vec<bool>, Shape, bool) = match *mask {
        Mask::Added(v) => {
            let tensor = known_value(m.graph, v)?;
            let values = tensor.as_floats()?;
            if !values.iter().all(|&x| x == 0.0 || x <= EXCLUDED) {
                return None;
            }
            let finite = values.iter().any(|x| *x != 0.0 && x.is_finite());
            (values.iter().map(|&x| x == 0.0).collect(), tensor.shape().clone(), finite)
        }
        Mask::Filled { condition, keep, fill } => {
            let tensor = known_value(m.graph, condition).filter(|_| fill <= EXCLUDED)?;
            debug_assert_eq!(tensor.dtype(), DType::Bool);
            let kept = tensor.as_ints()?.iter().map(|&x| (x != 0) == keep).collect();
            (kept, tensor.shape().clone(), fill.is_finite())
        }
    };
    if kept.iter().all(|&k| k) {
        return Some(Known::Everything);
    }
    let [.., rows, columns] = shape.dims() else { return None };
    // In a row without any key a finite fill makes the mean of all values: that is none of these.
    let mut planes = kept.chunks(rows * columns);
    let first = planes.next()?;
    let sight = Sight::of_mask(first, *rows, *columns).filter(|_| planes.all(|p| p == first))?;
    Some(Known::Keys { sight, finite })
}

#[cfg(test)]
mod tests {
    use crate::differentiate::Differentiate;
    use crate::raise::Raise;
    use crate::{Changed, Pass, PassContext};
    use frit_ir::interpret::{Options, run};
    use frit_ir::ops::{
        BinaryFn, Constant, Init, Input, LogicalFn, MatMul, Param, ParamKind, Reduce, ReduceFn,
        Softmax,
    };
    use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, Tensor, TensorType, ValueId};
    use std::collections::HashMap;

    /// Queries and keys.
    const N: usize = 3;

    fn add(graph: &mut Graph, op: Op, inputs: &[ValueId]) -> ValueId {
        graph.add1(op, inputs, Origin::none(), Region::Forward).expect("it fits")
    }

    fn input(graph: &mut Graph, name: &str, dtype: DType, dims: &[usize]) -> ValueId {
        let ty = TensorType::new(dtype, dims);
        add(graph, Op::Input(Input { name: name.into(), ty }), &[])
    }

    fn trainable(graph: &mut Graph, name: &str, dims: &[usize]) -> ValueId {
        let param = Param {
            name: name.into(),
            ty: TensorType::new(DType::F32, dims),
            kind: ParamKind::Trainable,
            reason: String::new(),
            init: Init::Weights,
            held: None,
            unit: None,
            sharded: false,
        };
        add(graph, Op::Param(param), &[])
    }

    fn constant(graph: &mut Graph, value: Tensor) -> ValueId {
        add(graph, Op::Constant(Constant { value }), &[])
    }

    /// How a table masks scores.
    #[derive(Clone, Copy, Debug)]
    enum Kind {
        Select,
        SelectOther,
        Add,
        /// Together with a condition that is fed.
        And,
    }

    fn attention(table: &[bool], kind: Kind, fill: f64) -> Graph {
        let mut graph = Graph::new("g");
        let g = &mut graph;
        let [q, k, v] = ["q", "k", "v"].map(|name| trainable(g, name, &[1, 1, N, 2]));
        let matmul = |trans_b| Op::MatMul(MatMul { trans_a: false, trans_b, out: None });
        let scores = add(g, matmul(true), &[q, k]);
        let filled = constant(g, Tensor::scalar(fill));
        let flipped = matches!(kind, Kind::SelectOther);
        let bits = table.iter().map(|kept| i64::from(*kept != flipped)).collect();
        let bits = Tensor::ints(DType::Bool, [N, N], bits);
        let masked = match kind {
            Kind::Select => {
                let condition = constant(g, bits);
                add(g, Op::Select, &[condition, scores, filled])
            }
            Kind::SelectOther => {
                let condition = constant(g, bits);
                add(g, Op::Select, &[condition, filled, scores])
            }
            Kind::And => {
                let condition = constant(g, bits);
                let fed = input(g, "c", DType::Bool, &[N, N]);
                let both = add(g, Op::Logical(LogicalFn::And), &[condition, fed]);
                add(g, Op::Select, &[both, scores, filled])
            }
            Kind::Add => {
                let numbers = table.iter().map(|kept| if *kept { 0.0 } else { fill }).collect();
                let sum = constant(g, Tensor::floats(DType::F32, [N, N], numbers));
                add(g, Op::Binary(BinaryFn::Add), &[scores, sum])
            }
        };
        let weights = add(g, Op::Softmax(Softmax { axis: 3 }), &[masked]);
        let y = add(g, matmul(false), &[weights, v]);
        graph.add_output("y", y, OutputKind::Result);
        graph.remove_dead();
        graph
    }

    /// The gradients of queries, keys and values, for a sum of the results that weighs each differently.
    fn differentiated(graph: &Graph) -> Graph {
        let mut graph = graph.clone();
        let g = &mut graph;
        let y = g.outputs.remove(0).value;
        let numbers = (0..N * 2).map(|i| (i * 5 % 7) as f64 / 3.0 - 0.8).collect();
        let numbers = constant(g, Tensor::floats(DType::F32, [1, 1, N, 2], numbers));
        let product = add(g, Op::Binary(BinaryFn::Mul), &[y, numbers]);
        let sum = Reduce { f: ReduceFn::Sum, axes: vec![0, 1, 2, 3], keep_dims: false };
        let loss = add(g, Op::Reduce(sum), &[product]);
        let count = constant(g, Tensor::scalar(1.0));
        g.add_output("loss", loss, OutputKind::LossSum);
        g.add_output("count", count, OutputKind::LossCount);
        let pass = Differentiate { accumulation: 1, capacity: 1.0 };
        pass.run(g, &mut PassContext::default()).expect("it differentiates");
        graph
    }

    /// The elements of all outputs.
    fn evaluate(graph: &Graph) -> Vec<f64> {
        let floats = |f: fn(usize) -> f64| {
            Tensor::floats(DType::F32, [1, 1, N, 2], (0..N * 2).map(f).collect())
        };
        let kept = (0..N * N).map(|i| i64::from(i % 4 != 2)).collect();
        let feeds: HashMap<String, Tensor> = [
            ("q".into(), floats(|i| (i * 7 % 5) as f64 / 3.0 - 0.7)),
            ("k".into(), floats(|i| (i * 3 % 7) as f64 / 4.0 - 0.6)),
            ("v".into(), floats(|i| i as f64 - 1.5)),
            ("c".into(), Tensor::ints(DType::Bool, [N, N], kept)),
        ]
        .into();
        let results = run(graph, &feeds, Options::default()).expect("it evaluates");
        results.into_iter().flat_map(|(_, x)| x.to_f64s()).collect()
    }

    #[test]
    fn every_small_mask() {
        let low = f64::from(f32::MIN);
        let kinds = [
            (Kind::Select, f64::NEG_INFINITY),
            (Kind::Select, -1e9),
            (Kind::Select, low),
            (Kind::SelectOther, f64::NEG_INFINITY),
            (Kind::SelectOther, -1e9),
            (Kind::Add, f64::NEG_INFINITY),
            (Kind::Add, -1e9),
            (Kind::Add, low),
            (Kind::And, f64::NEG_INFINITY),
            (Kind::And, -1e9),
        ];
        for number in 0..1 << (N * N) {
            let table: Vec<bool> = (0..N * N).map(|i| number >> i & 1 == 1).collect();
            for (kind, fill) in kinds {
                let before = attention(&table, kind, fill);
                let mut after = before.clone();
                let changed = Raise::default().run(&mut after, &mut PassContext::default());
                assert_eq!(changed.expect("the pass succeeds"), Changed::Yes, "{table:?} {kind:?}");
                for (x, y) in evaluate(&before).into_iter().zip(evaluate(&after)) {
                    // With −∞ it is not a number in the parts, and zero in the operation.
                    let same = (x - y).abs() < 1e-5 || (x.is_nan() && y == 0.0);
                    assert!(same, "{table:?} {kind:?} {fill}: {x} became {y}\n{after}");
                }
                let gradients = [&before, &after].map(|graph| evaluate(&differentiated(graph)));
                for (x, y) in gradients[0].iter().zip(&gradients[1]) {
                    let same = (x - y).abs() < 1e-5 || x.is_nan();
                    assert!(same, "{table:?} {kind:?} {fill}: gradient {x} became {y}\n{after}");
                }
            }
        }
    }
}
