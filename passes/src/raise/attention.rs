//! Scaled dot-product attention from its parts.
//!
//! `softmax(scale·q·kᵀ [masked]) · v`: the scale before or after the matmul, as factor or divisor, or its root on each
//! of q and k; masks added or filled in; the guard that turns the NaN of rows without any key into 0; keys and values
//! repeated over groups of heads; operands of four axes, or of three as one head. Not raised if scores or weights are
//! also used elsewhere. Weights may be dropped: `select(kept, p/keep, 0)`.

use super::mask::{Mask, Masks};
use super::matcher::{Matcher, near};
use super::{Raised, Rule, Step};
use crate::rule::Statement;
use frit_ir::ops::attention::Sight;
use frit_ir::ops::{Attention, BinaryFn, MatMul, PredicateFn, Reshape, Transpose, UnaryFn};
use frit_ir::{Op, Shape, ValueId};
use std::collections::HashSet;

/// The rule.
pub(super) const RULE: Rule = Rule {
    statement: Statement::reals(
        "attention",
        "softmax(scale·q·kᵀ + mask)·v = attention(q, k, v, mask); filled masks, causal ones and windows: test `raise::mask::tests::every_small_mask`",
        ATTENTIONS,
    ),
    apply: raise,
};

/// The scale in each place, an added mask, keys as columns, groups of heads, three axes, dropout.
const ATTENTIONS: &[&str] = &[
    "s=mul(matmul{trans_a=false,trans_b=true}(q:f32[a,b,c,d],k:f32[a,b,e,d]),0.25:f32[]);matmul{trans_a=false,trans_b=false}(softmax{axis=3}(<s|add(s,m:f32[a,b,c,e])>),v:f32[a,b,e,f])",
    "s=matmul{trans_a=false,trans_b=true}(mul(q:f32[a,b,c,d],0.5:f32[]),div(k:f32[a,b,e,d],4:f32[]));matmul{trans_a=false,trans_b=false}(softmax{axis=3}(s),v:f32[a,b,e,f])",
    "s=matmul{trans_a=false,trans_b=false}(q:f32[a,b,c,d],k:f32[a,b,d,e]);matmul{trans_a=false,trans_b=false}(softmax{axis=3}(div(s,8:f32[])),v:f32[a,b,e,f])",
    "s=matmul{trans_a=false,trans_b=true}(q:f32[a,c,d],k:f32[a,e,d]);matmul{trans_a=false,trans_b=false}(softmax{axis=2}(mul(s,0.25:f32[])),v:f32[a,e,f])",
    "s=matmul{trans_a=false,trans_b=true}(q:f32[a,b,c,d],k:f32[a,b,e,d]);p=softmax{axis=3}(mul(s,0.25:f32[]));matmul{trans_a=false,trans_b=false}(select(m:bool[a,b,c,e],mul(p,1.25:f32[]),0:f32[]),v:f32[a,b,e,f])",
    "k=reshape{shape=[2,a*b,c,d]}(expand{shape=[2,a,b,c,d]}(p:f32[2,a,1,c,d]));v=reshape{shape=[2,a*b,c,f]}(expand{shape=[2,a,b,c,f]}(w:f32[2,a,1,c,f]));s=matmul{trans_a=false,trans_b=true}(q:f32[2,a*b,e,d],k);matmul{trans_a=false,trans_b=false}(softmax{axis=3}(mul(s,0.25:f32[])),v)",
];

/// An attention whose last node defines `y`.
fn raise(m: &Matcher<'_>, y: ValueId) -> Option<Raised> {
    let [weights, v] = matmul(m, y, false)?;
    let dropout = dropout(m, weights);
    let scores = softmax(m, dropout.map_or(weights, |dropout| dropout.weights))?;
    let ty = m.graph.ty(scores);
    let (q, k, scale, masks) = scaled_matmul(m, scores)?;
    let is_of_rank = |v: ValueId| m.graph.ty(v).shape.rank() == ty.shape.rank();
    if !matches!(ty.shape.rank(), 3 | 4) || ![q, k.value, v, y].into_iter().all(is_of_rank) {
        return None;
    }

    let mut raised = Raised::new();
    let masks = Masks::combine(m, &mut raised, &masks, ty)?;
    let (k, v) = match (unrepeated(m, k), unrepeated(m, v)) {
        (Some(k), Some(v)) => (ungroup(m, &mut raised, k), ungroup(m, &mut raised, v)),
        _ => (k.step(m, &mut raised), Step::Old(v)),
    };
    let mut operands = vec![Step::Old(q), k, v];
    if ty.shape.rank() == 3 {
        let shapes = [q, y].map(|v| m.graph.ty(v).shape.clone());
        let [Shape(q_dims), Shape(y_dims)] = shapes;
        let keys = ty.shape.0[2];
        let of = [[q_dims[1], q_dims[2]], [keys, q_dims[2]], [keys, y_dims[2]]];
        for (operand, [rows, columns]) in operands.iter_mut().zip(of) {
            let shape = Shape::from([y_dims[0], 1, rows, columns]);
            *operand = raised.push(Op::Reshape(Reshape { shape }), vec![*operand]);
        }
    }
    operands.extend(masks.operand);
    operands.extend(dropout.map(|Dropout { kept, .. }| match ty.shape.rank() {
        3 => {
            let &[b, t, s] = ty.shape.dims() else { unreachable!("of three axes") };
            raised.push(
                Op::Reshape(Reshape { shape: Shape::from([b, 1, t, s]) }),
                vec![Step::Old(kept)],
            )
        }
        _ => Step::Old(kept),
    }));
    let usual = m.graph.ty(q).shape.0.last().map_or(1.0, |&d| 1.0 / (d as f64).sqrt());
    // Exporters round the scale, or its root, to f32.
    let scale = if near(scale, usual) { usual } else { scale };
    let Sight { causal, window } = masks.sight;
    let op = Attention { scale, causal, window, keep: dropout.map(|dropout| dropout.keep) };
    let result = raised.push(Op::Attention(op), operands);
    if ty.shape.rank() == 3 {
        let shape = m.graph.ty(y).shape.clone();
        raised.push(Op::Reshape(Reshape { shape }), vec![result]);
    }
    Some(raised)
}

/// The operands of a matmul whose right operand is transposed as given.
fn matmul(m: &Matcher<'_>, v: ValueId, trans_b: bool) -> Option<[ValueId; 2]> {
    let node = m.graph.def(v);
    let Op::MatMul(op) = &node.op else { return None };
    let plain = MatMul { trans_a: false, trans_b, out: None };
    (*op == plain).then(|| [node.inputs[0], node.inputs[1]])
}

/// Weights of which some are kept.
#[derive(Clone, Copy)]
struct Dropout {
    weights: ValueId,
    kept: ValueId,
    keep: f64,
}

/// The parts of `select(kept, weights/keep, 0)`, used nowhere else.
fn dropout(m: &Matcher<'_>, v: ValueId) -> Option<Dropout> {
    let node = m.graph.def(v);
    if node.op != Op::Select || m.uses(v) != 1 {
        return None;
    }
    let (kept, scaled, other) = (node.inputs[0], node.inputs[1], node.inputs[2]);
    let same = [kept, scaled].iter().all(|x| m.graph.ty(*x).shape == m.graph.ty(v).shape);
    let (weights, factor) = m.scaled(scaled);
    let keep = factor.recip();
    let drops = keep > 0.0 && keep < 1.0 && m.scalar(other) == Some(0.0);
    (same && drops && m.uses(scaled) == 1).then_some(Dropout { weights, kept, keep })
}

/// The scores of weights that are a softmax over the last axis, guarded or not, used nowhere else.
fn softmax(m: &Matcher<'_>, weights: ValueId) -> Option<ValueId> {
    let softmax = match guarded(m, weights) {
        Some(softmax) if m.uses(softmax) == 2 => softmax,
        Some(_) => return None,
        None => weights,
    };
    let node = m.graph.def(softmax);
    let Op::Softmax(op) = &node.op else { return None };
    let last = op.axis + 1 == m.graph.ty(softmax).shape.rank();
    (last && m.uses(weights) == 1 && m.uses(node.inputs[0]) == 1).then(|| node.inputs[0])
}

/// `x` of `select(is_nan(x), 0, x)`.
fn guarded(m: &Matcher<'_>, v: ValueId) -> Option<ValueId> {
    let node = m.graph.def(v);
    if node.op != Op::Select {
        return None;
    }
    let (test, zero, x) = (node.inputs[0], node.inputs[1], node.inputs[2]);
    let test = m.graph.def(test);
    let fits = test.op == Op::Predicate(PredicateFn::IsNan) && test.inputs[0] == x;
    (fits && m.scalar(zero) == Some(0.0)).then_some(x)
}

/// Keys, as rows or as columns.
#[derive(Clone, Copy)]
struct Keys {
    value: ValueId,
    columns: bool,
}

impl Keys {
    /// The keys as rows.
    fn step(self, m: &Matcher<'_>, raised: &mut Raised) -> Step {
        if !self.columns {
            return Step::Old(self.value);
        }
        let mut perm: Vec<usize> = (0..m.graph.ty(self.value).shape.rank()).collect();
        let n = perm.len();
        perm.swap(n - 2, n - 1);
        raised.push(Op::Transpose(Transpose { perm }), vec![Step::Old(self.value)])
    }
}

/// Takes scores apart into `(q, k, scale, masks)`.
fn scaled_matmul(m: &Matcher<'_>, scores: ValueId) -> Option<(ValueId, Keys, f64, Vec<Mask>)> {
    let mut masks = Vec::new();
    let mut v = scores;
    while let Some((rest, mask)) = masked(m, v) {
        masks.push(mask);
        v = rest;
    }
    let (v, after) = m.scaled(v);
    let (q, k, columns) = match (matmul(m, v, true), matmul(m, v, false)) {
        (Some([q, k]), _) => (q, k, false),
        (_, Some([q, k])) => (q, k, true),
        (None, None) => return None,
    };
    let (q, before_q) = m.scaled(q);
    let (k, before_k) = m.scaled(k);
    let mut keys = Keys { value: k, columns };
    let mut before_swap = 1.0;
    if let (true, Some(rows)) = (columns, swapped(m, k)) {
        let (rows, scale) = m.scaled(rows);
        (keys, before_swap) = (Keys { value: rows, columns: false }, scale);
    }
    let scale = after * before_q * before_k * before_swap;
    (scale.is_finite() && scale > 0.0).then_some((q, keys, scale, masks))
}

fn swapped(m: &Matcher<'_>, v: ValueId) -> Option<ValueId> {
    let node = m.graph.def(v);
    let Op::Transpose(op) = &node.op else { return None };
    let mut perm: Vec<usize> = (0..op.perm.len()).collect();
    let n = perm.len();
    perm.swap(n.checked_sub(2)?, n - 1);
    (perm == op.perm).then(|| node.inputs[0])
}

/// Strips one mask from the scores: the masked value, and the mask.
fn masked(m: &Matcher<'_>, v: ValueId) -> Option<(ValueId, Mask)> {
    let under = |x: ValueId| {
        let same = m.graph.ty(x) == m.graph.ty(v);
        (same && m.uses(x) == 1 && leads_to_matmul(m, x)).then_some(x)
    };
    if let Some((rest, mask)) = m.either(v, BinaryFn::Add, under) {
        return Some((rest, Mask::Added(mask)));
    }
    let node = m.graph.def(v);
    if node.op != Op::Select {
        return None;
    }
    let (condition, a, b) = (node.inputs[0], node.inputs[1], node.inputs[2]);
    let (condition, flipped) = match m.unary(condition, UnaryFn::Not) {
        Some(inner) => (inner, true),
        None => (condition, false),
    };
    let filled = |x: ValueId, fill: ValueId, keep: bool| {
        let fill = m.scalar(fill)?;
        Some((under(x)?, Mask::Filled { condition, keep: keep != flipped, fill }))
    };
    filled(a, b, true).or_else(|| filled(b, a, false))
}

/// Whether the value is a matmul under masks and scalar factors.
fn leads_to_matmul(m: &Matcher<'_>, v: ValueId) -> bool {
    let (mut stack, mut seen) = (vec![v], HashSet::new());
    while let Some(v) = stack.pop() {
        let (v, _) = m.scaled(v);
        if !seen.insert(v) {
            continue;
        }
        let node = m.graph.def(v);
        match node.op {
            Op::MatMul(_) => return true,
            Op::Binary(BinaryFn::Add) => stack.extend(&node.inputs),
            Op::Select => stack.extend(&node.inputs[1..]),
            _ => {}
        }
    }
    false
}

/// The value repeated over groups of heads: `x[B, G, 1, S, D]` of `reshape(expand(x, [B, G, R, S,
/// D]), [B, G·R, S, D])`.
fn unrepeated<V: Into<Keys>>(m: &Matcher<'_>, v: V) -> Option<ValueId> {
    let keys: Keys = v.into();
    let reshape = m.graph.def(keys.value);
    let (Op::Reshape(_), false) = (&reshape.op, keys.columns) else { return None };
    let expand = m.graph.def(reshape.inputs[0]);
    let Op::Expand(_) = &expand.op else { return None };
    let x = expand.inputs[0];
    let from = m.graph.ty(x).shape.dims();
    let wide = m.graph.ty(reshape.inputs[0]).shape.dims();
    let to = m.graph.ty(keys.value).shape.dims();
    let (&[b, g, 1, s, d], &[.., r, _, _]) = (from, wide) else { return None };
    (wide == [b, g, r, s, d] && to == [b, g * r, s, d]).then_some(x)
}

impl From<ValueId> for Keys {
    fn from(value: ValueId) -> Self {
        Keys { value, columns: false }
    }
}

/// `x[B, G, 1, S, D]` as `[B, G, S, D]`.
fn ungroup(m: &Matcher<'_>, raised: &mut Raised, x: ValueId) -> Step {
    let mut shape = m.graph.ty(x).shape.clone();
    shape.0.remove(2);
    raised.push(Op::Reshape(Reshape { shape }), vec![Step::Old(x)])
}
