//! Scalars of the update: loss scale, schedule and gradient factor, in f32.
//!
//! Legend: `stats` = [non-finite elements, Σg², count, loss sum]. The formulas are those of `frit_ir::ops::training`.

use super::expr::{Bin, Dag, Id};
use super::math::Un;
use super::region::{Lowering, unsupported};
use super::view::{DimView, Stop, View};
use frit_ir::ops::training::Unscale;
use frit_ir::ops::{CompareFn, ScheduleKind};
use frit_ir::{Node, Op};
use std::f64::consts::PI;

/// Result `index` of a node that computes scalars of the update.
pub(crate) fn lower(cx: &mut Lowering<'_>, node: &Node, index: usize) -> Result<Id, Stop> {
    if let Op::Unscale(op) = &node.op {
        return unscale(cx, node, op, index);
    }
    let mut x = Vec::with_capacity(node.inputs.len());
    for &value in &node.inputs {
        x.push(cx.lower(value, &View(vec![]))?);
    }
    match (&node.op, &x[..]) {
        (Op::UpdateLossScale(_), &[scale, tracker, found, growth, backoff, interval]) => {
            let results = update_loss_scale(
                &mut cx.dag,
                [scale, tracker, found],
                [growth, backoff, interval],
            );
            Ok(results[index])
        }
        (Op::UpdateStep, &[step, found_inf]) => {
            let (zero, one) = (cx.dag.float(0.0), cx.dag.float(1.0));
            let taken = cx.dag.compare(CompareFn::Eq, found_inf, zero);
            let next = cx.dag.plus(step, one);
            Ok(cx.dag.select(taken, next, step))
        }
        (Op::LearningRate(op), operands) => Ok(learning_rate(&mut cx.dag, op.kind, operands)),
        (op, _) => Err(unsupported(op, "kernels do not compute it").into()),
    }
}

fn unscale(cx: &mut Lowering<'_>, node: &Node, op: &Unscale, index: usize) -> Result<Id, Stop> {
    let stat = |cx: &mut Lowering<'_>, i: i64| {
        cx.lower(node.inputs[0], &View(vec![DimView { atoms: vec![], start: i, step: 1 }]))
    };
    let [bad, squares, count, loss_sum] = [stat(cx, 0)?, stat(cx, 1)?, stat(cx, 2)?, stat(cx, 3)?];
    let scale = cx.lower(node.inputs[1], &View(vec![]))?;
    let clip = cx.lower(node.inputs[2], &View(vec![]))?;
    let d = &mut cx.dag;
    let (zero, one) = (d.float(0.0), d.float(1.0));
    let count = d.bin(Bin::Max, count, one);
    if index == 3 {
        return Ok(d.over(loss_sum, count));
    }
    if index == 1 {
        let all_finite = d.compare(CompareFn::Eq, bad, zero);
        return Ok(d.select(all_finite, zero, one));
    }
    // Dividing by a power-of-two scale is exact, so it comes last, after the ratio of the counts.
    let capacity = d.float(op.capacity as f32);
    let ratio = d.over(capacity, count);
    let unscale = d.over(ratio, scale);
    let root = d.un(Un::Sqrt, squares);
    let norm = d.times(root, unscale);
    if index == 2 {
        return Ok(norm);
    }
    let eps = d.float(1e-6);
    let guarded = d.plus(norm, eps);
    let share = d.over(clip, guarded);
    let at_most_one = d.bin(Bin::Min, share, one);
    let unlimited = d.compare(CompareFn::Eq, clip, zero);
    let limit = d.select(unlimited, one, at_most_one);
    Ok(d.times(unscale, limit))
}

fn update_loss_scale(
    d: &mut Dag,
    [scale, tracker, found_inf]: [Id; 3],
    [growth, backoff, interval]: [Id; 3],
) -> [Id; 2] {
    let (zero, one, inf) = (d.float(0.0), d.float(1.0), d.float(f32::INFINITY));
    let bad = d.compare(CompareFn::Ne, found_inf, zero);
    let next = d.plus(tracker, one);
    let due = d.compare(CompareFn::Ge, next, interval);
    let grown = d.times(scale, growth);
    let finite = d.compare(CompareFn::Lt, grown, inf);
    let grown = d.select(finite, grown, scale);
    let kept = d.select(due, grown, scale);
    let counted = d.select(due, zero, next);
    let smaller = d.times(scale, backoff);
    [d.select(bad, smaller, kept), d.select(bad, zero, counted)]
}

fn learning_rate(d: &mut Dag, kind: ScheduleKind, operands: &[Id]) -> Id {
    let (base, hypers, step) = (operands[0], &operands[1..], operands[operands.len() - 1]);
    if kind == ScheduleKind::OneCycle {
        return one_cycle(d, base, [hypers[0], hypers[1], hypers[2], hypers[3]], step);
    }
    let warmup = hypers[0];
    let (zero, one) = (d.float(0.0), d.float(1.0));
    let next = d.plus(step, one);
    let rising = d.times(base, next);
    let rising = d.over(rising, warmup);
    let warms = d.compare(CompareFn::Lt, step, warmup);
    let after = d.minus(step, warmup);
    if kind == ScheduleKind::Step {
        let later = decay_in_steps(d, base, after, hypers[1], hypers[2]);
        return d.select(warms, rising, later);
    }
    let (total, least) = (hypers[1], hypers[2]);
    let span = d.minus(total, warmup);
    let share = d.over(after, span);
    let share = d.bin(Bin::Min, share, one);
    let has_span = d.compare(CompareFn::Gt, span, zero);
    let done = d.select(has_span, share, one);
    let decayed = match kind {
        ScheduleKind::Linear => {
            let slope = d.minus(least, base);
            d.fma(slope, done, base)
        }
        ScheduleKind::Cosine => half_cosine(d, base, least, done),
        _ => base,
    };
    let endless = d.compare(CompareFn::Eq, total, zero);
    let later = d.select(endless, base, decayed);
    d.select(warms, rising, later)
}

/// From `from` where `share` is 0 to `to` where it is 1.
fn half_cosine(d: &mut Dag, from: Id, to: Id, share: Id) -> Id {
    let (pi, half) = (d.float(PI as f32), d.float(0.5));
    let angle = d.times(pi, share);
    let cos = d.un(Un::Cos, angle);
    let wave = d.fma(cos, half, half);
    let range = d.minus(from, to);
    d.fma(range, wave, to)
}

/// `base · gamma^⌊after / size⌋`.
fn decay_in_steps(d: &mut Dag, base: Id, after: Id, size: Id, gamma: Id) -> Id {
    let zero = d.float(0.0);
    let changes = d.over(after, size);
    let changes = d.un(Un::Floor, changes);
    let log = d.un(Un::Log, gamma);
    let exponent = d.times(changes, log);
    let factor = d.un(Un::Exp, exponent);
    let decayed = d.times(base, factor);
    // Before the first change the result is `base` even if the logarithm is NaN.
    let unchanged = d.compare(CompareFn::Le, changes, zero);
    d.select(unchanged, base, decayed)
}

fn one_cycle(d: &mut Dag, base: Id, [total, pct_start, div, final_div]: [Id; 4], step: Id) -> Id {
    let one = d.float(1.0);
    let first = d.over(base, div);
    let last = d.over(first, final_div);
    let top = d.times(pct_start, total);
    let top = d.minus(top, one);
    let end = d.minus(total, one);
    let share = d.over(step, top);
    let rising = half_cosine(d, first, base, share);
    let (after, span) = (d.minus(step, top), d.minus(end, top));
    let share = d.over(after, span);
    let share = d.bin(Bin::Min, share, one);
    let falling = half_cosine(d, base, last, share);
    let rises = d.compare(CompareFn::Le, step, top);
    d.select(rises, rising, falling)
}
