//! Decomposes optimizer steps and the moving average of parameters into expressions.
//!
//! # Source
//! `torch.optim.AdamW`, `Adam`, `SGD`, `Muon`; Chen et al. 2023 for Lion.

use super::composite::{rsqrt, sign};
use super::expr::{Bin, Dag, Id};
use super::math::Un;
use crate::error::Unsupported;
use frit_ir::ops::{CompareFn, OptimizerKind};

/// The new values of parameter and state; bit for bit the old ones if `found_inf` is not zero.
///
/// # Errors
/// Adafactor and Muon are no elementwise operations.
pub(crate) fn step(
    dag: &mut Dag,
    kind: OptimizerKind,
    operands: &[Id],
) -> Result<Vec<Id>, Unsupported> {
    let n_states = kind.n_states();
    let (tensors, scalars) = operands.split_at(2 + n_states);
    let (hypers, common) = scalars.split_at(kind.hypers().len());
    let &[clip, step, factor, found_inf] = common else {
        unreachable!("invariant: every optimizer has these operands")
    };
    let (lr, decay) = (hypers[0], hypers[hypers.len() - 1]);
    let param = tensors[0];
    let grad = dag.times(tensors[1], factor);
    let grad = limit(dag, grad, clip);
    let states = &tensors[2..];
    let new = match kind {
        OptimizerKind::Adamw => {
            let decayed = shrink(dag, param, lr, decay);
            adam(dag, decayed, grad, states, hypers, step)
        }
        OptimizerKind::Adam => {
            let grad = dag.fma(decay, param, grad);
            adam(dag, param, grad, states, hypers, step)
        }
        OptimizerKind::Sgd => {
            let grad = dag.fma(decay, param, grad);
            vec![descend(dag, param, lr, grad)]
        }
        OptimizerKind::Momentum | OptimizerKind::Nesterov => {
            let grad = dag.fma(decay, param, grad);
            let (zero, one) = (dag.float(0.0), dag.float(1.0));
            let part = if kind == OptimizerKind::Nesterov {
                grad
            } else {
                let kept = dag.minus(one, hypers[2]);
                dag.times(kept, grad)
            };
            let later = dag.fma(hypers[1], states[0], part);
            let first = dag.compare(CompareFn::Eq, step, zero);
            let buffer = dag.select(first, grad, later);
            let along = match kind {
                OptimizerKind::Nesterov => dag.fma(hypers[1], buffer, grad),
                _ => buffer,
            };
            vec![descend(dag, param, lr, along), buffer]
        }
        OptimizerKind::Adafactor | OptimizerKind::Muon => {
            return Err(Unsupported::new("optimizer_step", "it reduces over whole parameters"));
        }
        OptimizerKind::Lion => {
            let mut mix = |beta: Id| {
                let one = dag.float(1.0);
                let rest = dag.minus(one, beta);
                let part = dag.times(rest, grad);
                dag.fma(beta, states[0], part)
            };
            let (along, m) = (mix(hypers[1]), mix(hypers[2]));
            let decayed = shrink(dag, param, lr, decay);
            let along = sign(dag, along);
            vec![descend(dag, decayed, lr, along), m]
        }
    };
    let old: Vec<Id> = std::iter::once(param).chain(states.iter().copied()).collect();
    Ok(keep_if_skipped(dag, found_inf, &old, new))
}

/// Muon's momentum, and what is to be orthogonalized; the old momentum and zero if `found_inf` is not zero.
pub(crate) fn muon_momentum(dag: &mut Dag, nesterov: bool, operands: &[Id]) -> Vec<Id> {
    let &[grad, momentum, keep, clip, factor, found_inf] = operands else {
        unreachable!("invariant: inference counted the operands")
    };
    let grad = dag.times(grad, factor);
    let grad = limit(dag, grad, clip);
    let (zero, one) = (dag.float(0.0), dag.float(1.0));
    let rest = dag.minus(one, keep);
    let apart = dag.minus(grad, momentum);
    let new = dag.fma(rest, apart, momentum);
    let mixed = if nesterov {
        let apart = dag.minus(grad, new);
        dag.fma(rest, apart, new)
    } else {
        new
    };
    keep_if_skipped(dag, found_inf, &[momentum, zero], vec![new, mixed])
}

/// The parameter after a step along orthogonalized momentum; bit for bit the old one if `found_inf` is not zero.
pub(crate) fn muon_step(dag: &mut Dag, operands: &[Id]) -> Id {
    let &[param, along, lr, ratio, decay, found_inf] = operands else {
        unreachable!("invariant: inference counted the operands")
    };
    let decayed = shrink(dag, param, lr, decay);
    let rate = dag.times(lr, ratio);
    let new = descend(dag, decayed, rate, along);
    keep_if_skipped(dag, found_inf, &[param], vec![new])[0]
}

/// The new average; bit for bit the old one if `found_inf` is not zero.
pub(crate) fn ema(dag: &mut Dag, operands: &[Id]) -> Id {
    let &[average, param, decay, step, found_inf] = operands else {
        unreachable!("invariant: inference counted the operands")
    };
    let (zero, one) = (dag.float(0.0), dag.float(1.0));
    let rest = dag.minus(one, decay);
    let part = dag.times(rest, param);
    let mixed = dag.fma(decay, average, part);
    let first = dag.compare(CompareFn::Eq, step, zero);
    let new = dag.select(first, param, mixed);
    keep_if_skipped(dag, found_inf, &[average], vec![new])[0]
}

fn keep_if_skipped(dag: &mut Dag, found_inf: Id, old: &[Id], new: Vec<Id>) -> Vec<Id> {
    let zero = dag.float(0.0);
    let taken = dag.compare(CompareFn::Eq, found_inf, zero);
    new.into_iter().zip(old).map(|(new, old)| dag.select(taken, new, *old)).collect()
}

/// `grad` within ±`clip`, or itself if that is zero.
fn limit(dag: &mut Dag, grad: Id, clip: Id) -> Id {
    let (zero, infinity) = (dag.float(0.0), dag.float(f32::INFINITY));
    let off = dag.compare(CompareFn::Eq, clip, zero);
    let high = dag.select(off, infinity, clip);
    let low = dag.un(Un::Neg, high);
    let grad = dag.bin(Bin::Max, grad, low);
    dag.bin(Bin::Min, grad, high)
}

/// `param · (1 − lr · decay)`.
fn shrink(dag: &mut Dag, param: Id, lr: Id, decay: Id) -> Id {
    let one = dag.float(1.0);
    let shrink = dag.times(lr, decay);
    let keep = dag.minus(one, shrink);
    dag.times(param, keep)
}

/// `param − lr · along`.
fn descend(dag: &mut Dag, param: Id, lr: Id, along: Id) -> Id {
    let minus = dag.un(Un::Neg, lr);
    dag.fma(minus, along, param)
}

/// Parameter and both moments after a step from `param` along `grad`.
fn adam(dag: &mut Dag, param: Id, grad: Id, states: &[Id], hypers: &[Id], step: Id) -> Vec<Id> {
    let [lr, beta1, beta2, eps] = [hypers[0], hypers[1], hypers[2], hypers[3]];
    let one = dag.float(1.0);
    let t = dag.plus(step, one);
    // 1 − βᵗ as −expm1(t·ln β), which does not cancel.
    let mut correction = |beta: Id| {
        let log = dag.un(Un::Log, beta);
        let exponent = dag.times(t, log);
        let power = dag.un(Un::Expm1, exponent);
        dag.un(Un::Neg, power)
    };
    let (c1, c2) = (correction(beta1), correction(beta2));
    let step_size = dag.over(lr, c1);
    let inv_root = rsqrt(dag, c2);
    let (rest1, rest2) = (dag.minus(one, beta1), dag.minus(one, beta2));
    let part = dag.times(rest1, grad);
    let m = dag.fma(beta1, states[0], part);
    let square = dag.times(grad, grad);
    let part = dag.times(rest2, square);
    let v = dag.fma(beta2, states[1], part);
    let root = dag.un(Un::Sqrt, v);
    let denominator = dag.fma(root, inv_root, eps);
    let update = dag.over(m, denominator);
    vec![descend(dag, param, step_size, update), m, v]
}
