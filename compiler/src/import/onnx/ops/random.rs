//! Operators that draw random numbers.

use super::super::context::{NodeContext, Outcome, misfit};
use super::{Operator, op};
use frit_ir::ops::random::{RNG, state_type};
use frit_ir::ops::{BinaryFn, RandomMask, State};
use frit_ir::{DType, Op, Shape, Tensor, TensorType, ValueId};

pub(super) const OPERATORS: &[Operator] = &[op("Dropout", &["seed"], dropout)];

/// `(x, ratio, training_mode)` → `(y, mask)`: in training, elements are kept with probability 1 − ratio
/// and divided by it. The attribute `seed` is the exporter's; the plan's own seed decides.
fn dropout(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let ratio = cx.known_scalar(1, "the ratio")?.unwrap_or(0.5);
    let training = cx.known_scalar(2, "training_mode")?.unwrap_or(0.0) != 0.0;
    if !(0.0..=1.0).contains(&ratio) {
        return misfit(format!("ratio {ratio} is no probability"));
    }
    let dims = cx.dims(x);
    if !training || ratio == 0.0 {
        let mut results = vec![x.into()];
        if cx.node.output.len() > 1 {
            let kept = cx.constant(Tensor::splat(TensorType::scalar(DType::Bool), 1.0))?;
            results.push(cx.expand(kept, dims)?.into());
        }
        return Ok(results);
    }
    let keep = 1.0 - ratio;
    let state = state(cx)?;
    let masks = cx.graph.nodes().filter(|(_, n)| matches!(n.op, Op::RandomMask(_))).count();
    let mask = RandomMask { shape: Shape(dims), keep, id: masks as u32 };
    let mask = cx.emit(Op::RandomMask(mask), &[state])?;
    let zero = cx.scalar_like(x, 0.0)?;
    let mut y = x;
    if keep > 0.0 {
        let factor = cx.scalar_like(x, 1.0 / keep)?;
        y = cx.emit(Op::Binary(BinaryFn::Mul), &[x, factor])?;
    }
    let y = cx.emit(Op::Select, &[mask, y, zero])?;
    Ok(vec![y.into(), mask.into()])
}

/// The state of the generator, of which the model has one.
fn state(cx: &mut NodeContext<'_>) -> Result<ValueId, super::super::context::Fault> {
    let known = cx.graph.nodes().find_map(|(_, n)| match &n.op {
        Op::State(s) if s.name == RNG => Some(n.outputs[0]),
        _ => None,
    });
    if let Some(state) = known {
        return Ok(state);
    }
    let (name, ty) = (RNG.to_string(), state_type());
    let state = Op::State(State { name, of: None, ty, init: 0.0, sharded: false });
    let state = cx.add(state, &[])?[0];
    cx.graph.set_name(state, RNG);
    Ok(state)
}
