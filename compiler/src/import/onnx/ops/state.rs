//! Operators with an explicit state: caches, causal convolution, linear attention.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::composed::{binary, reduced, unary, with_scalar};
use super::layout::{join, permute};
use super::{Operator, one, op};
use frit_ir::ops::{
    BinaryFn, Conv, MatMul, ReduceFn, ScatterElements, ScatterFn, Slice, UnaryFn, Window,
};
use frit_ir::{DType, Op, Tensor, TensorType, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op("CausalConvWithState", &["activation"], causal_conv),
    op(
        "LinearAttention",
        &["chunk_size", "kv_num_heads", "q_num_heads", "scale", "update_rule"],
        linear_attention,
    ),
    op("TensorScatter", &["axis", "mode"], tensor_scatter),
];

/// Depthwise convolution over `[state, x]`; the next state is the end of that. Source: ONNX
/// CausalConvWithState-27.
fn causal_conv(cx: &mut NodeContext<'_>) -> Outcome {
    let (x, weight) = (cx.input(0)?, cx.input(1)?);
    let (&[b, c, t], &[_, _, k]) = (cx.dims(x).as_slice(), cx.dims(weight).as_slice()) else {
        return misfit("the operand and the weight need 3 axes");
    };
    if k == 0 {
        return misfit("the kernel has no elements");
    }
    let past = match cx.optional(3)? {
        Some(past) => past,
        None => zeros(cx, cx.ty(x).dtype, vec![b, c, k - 1])?,
    };
    let all = if k == 1 { x } else { join(cx, &[past, x], 2)? };
    let conv = Conv { window: Window::plain(1), groups: c, out: None };
    let mut y = cx.emit(Op::Conv(conv), &[all, weight])?;
    if let Some(bias) = cx.optional(2)? {
        let bias = cx.reshape(bias, vec![c, 1])?;
        y = binary(cx, BinaryFn::Add, y, bias)?;
    }
    y = match cx.text("activation", "none").as_str() {
        "none" => y,
        "silu" | "swish" => unary(cx, UnaryFn::Silu, y)?,
        other => return Err(Fault::Attribute(format!("activation = \"{other}\""))),
    };
    let tail = Slice { start: vec![0, 0, t], size: vec![b, c, k - 1], step: vec![1; 3] };
    let state = if k == 1 { past } else { cx.emit(Op::Slice(tail), &[all])? };
    Ok(vec![y.into(), state.into()])
}

fn zeros(cx: &mut NodeContext<'_>, dtype: DType, dims: Vec<usize>) -> Result<ValueId, Fault> {
    let zero = cx.constant(Tensor::splat(TensorType::scalar(dtype), 0.0))?;
    cx.expand(zero, dims)
}

/// The recurrence `S ← decay · S + k ⊗ (update)`, `o = scale · Sᵀq`, unrolled over time; `update` is `v`,
/// or with a delta rule `β · (v − Sᵀk)` of the decayed state. Source: ONNX LinearAttention-27.
fn linear_attention(cx: &mut NodeContext<'_>) -> Outcome {
    let (q, k, v) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let (q_heads, heads) = (cx.count("q_num_heads", 0), cx.count("kv_num_heads", 0));
    let (&[b, t, wide], &[_, _, k_wide], &[_, _, v_wide]) =
        (cx.dims(q).as_slice(), cx.dims(k).as_slice(), cx.dims(v).as_slice())
    else {
        return misfit("query, key and value need 3 axes");
    };
    let fits = |width: usize, n: usize| n > 0 && width.is_multiple_of(n);
    if !(fits(wide, q_heads) && fits(k_wide, heads) && fits(v_wide, heads) && fits(q_heads, heads))
    {
        return misfit(format!("{q_heads} and {heads} heads of {wide}, {k_wide} and {v_wide}"));
    }
    let (dk, dv) = (k_wide / heads, v_wide / heads);
    let scale = match cx.float("scale", 0.0) {
        0.0 => 1.0 / ((wide / q_heads) as f64).sqrt(),
        scale => scale,
    };
    let rule = cx.text("update_rule", "gated_delta");
    let (gated, delta) = match rule.as_str() {
        "linear" => (false, false),
        "gated" => (true, false),
        "delta" => (false, true),
        "gated_delta" => (true, true),
        other => return Err(Fault::Attribute(format!("update_rule = \"{other}\""))),
    };
    let dtype = cx.ty(q).dtype;
    let statistics = frit_ir::ops::statistics_dtype(dtype);
    // `[T, B, heads, per head]`, in the dtype of the state.
    let split = |cx: &mut NodeContext<'_>, x: ValueId, n: usize| {
        let Some(&width) = cx.dims(x).get(2) else {
            return misfit(format!("an operand {}, but it needs 3 axes", cx.ty(x)));
        };
        let x = cx.cast(x, statistics)?;
        let x = cx.reshape(x, vec![b, t, n, width / n])?;
        permute(cx, x, vec![1, 0, 2, 3])
    };
    let (q, k, v) = (split(cx, q, q_heads)?, split(cx, k, heads)?, split(cx, v, heads)?);
    let decay = match (gated, cx.optional(4)?) {
        (true, Some(decay)) => {
            let decay = split(cx, decay, heads)?;
            Some(unary(cx, UnaryFn::Exp, decay)?)
        }
        (true, None) => return misfit(format!("update_rule = \"{rule}\" needs a decay")),
        _ => None,
    };
    let beta = match (delta, cx.optional(5)?) {
        (true, Some(beta)) => {
            let n = cx.dims(beta).get(2).copied().unwrap_or(0);
            Some(split(cx, beta, n.max(1))?)
        }
        (true, None) => return misfit(format!("update_rule = \"{rule}\" needs a beta")),
        _ => None,
    };
    let mut state = match cx.optional(3)? {
        Some(past) => cx.cast(past, statistics)?,
        None => zeros(cx, statistics, vec![b, heads, dk, dv])?,
    };
    cx.nodes(t)?;
    let mut outputs = Vec::with_capacity(t);
    for step in 0..t {
        let (k, v) = (at(cx, k, step)?, at(cx, v, step)?);
        if let Some(decay) = decay {
            // `[B, H, dk or 1]` scales the rows of the state.
            let decay = at(cx, decay, step)?;
            let mut dims = cx.dims(decay);
            dims.push(1);
            let decay = cx.reshape(decay, dims)?;
            state = binary(cx, BinaryFn::Mul, state, decay)?;
        }
        let column = cx.reshape(k, vec![b, heads, dk, 1])?;
        let mut update = v;
        if let Some(beta) = beta {
            let seen = binary(cx, BinaryFn::Mul, state, column)?;
            let seen = reduced(cx, ReduceFn::Sum, seen, vec![2])?;
            let seen = cx.reshape(seen, vec![b, heads, dv])?;
            update = binary(cx, BinaryFn::Sub, v, seen)?;
            let beta = at(cx, beta, step)?;
            update = binary(cx, BinaryFn::Mul, update, beta)?;
        }
        let row = cx.reshape(update, vec![b, heads, 1, dv])?;
        let outer = binary(cx, BinaryFn::Mul, column, row)?;
        state = binary(cx, BinaryFn::Add, state, outer)?;
        let q = at(cx, q, step)?;
        let q = cx.reshape(q, vec![b, heads, q_heads / heads, dk])?;
        let y = cx.emit(Op::MatMul(MatMul::default()), &[q, state])?;
        outputs.push(cx.reshape(y, vec![b, 1, q_heads * dv])?);
    }
    let y = match outputs.is_empty() {
        true => zeros(cx, statistics, vec![b, 0, q_heads * dv])?,
        false => join(cx, &outputs, 1)?,
    };
    let y = with_scalar(cx, BinaryFn::Mul, y, scale)?;
    let y = cx.cast(y, dtype)?;
    let state = cx.cast(state, dtype)?;
    Ok(vec![y.into(), state.into()])
}

/// Element `i` of the first axis, which goes.
fn at(cx: &mut NodeContext<'_>, x: ValueId, i: usize) -> Result<ValueId, Fault> {
    let dims = cx.dims(x);
    let mut cut =
        Slice { start: vec![0; dims.len()], size: dims.clone(), step: vec![1; dims.len()] };
    (cut.start[0], cut.size[0]) = (i, 1);
    let x = cx.emit(Op::Slice(cut), &[x])?;
    cx.reshape(x, dims[1..].to_vec())
}

/// A cache with a part of one axis written over, from an index of its own for every example. Source:
/// ONNX TensorScatter-24.
fn tensor_scatter(cx: &mut NodeContext<'_>) -> Outcome {
    let (cache, update) = (cx.input(0)?, cx.input(1)?);
    let axis = cx.axis(cache, cx.int("axis", -2))?;
    let (dims, size) = (cx.dims(update), cx.dims(cache)[axis]);
    if axis == 0 || dims.len() != cx.dims(cache).len() {
        return misfit(format!(
            "an update {} along axis {axis} of {}",
            cx.ty(update),
            cx.ty(cache)
        ));
    }
    let mut places = cx.integers(DType::I64, &[dims[axis]], |i| i as i64)?;
    let mut along = vec![1; dims.len()];
    along[axis] = dims[axis];
    places = cx.reshape(places, along)?;
    if let Some(first) = cx.optional(2)? {
        let mut column = vec![1; dims.len()];
        column[0] = dims[0];
        let first = cx.reshape(first, column)?;
        places = binary(cx, BinaryFn::Add, places, first)?;
    }
    match cx.text("mode", "linear").as_str() {
        "linear" => {}
        "circular" => places = with_scalar(cx, BinaryFn::Mod, places, size as f64)?,
        other => return Err(Fault::Attribute(format!("mode = \"{other}\""))),
    }
    let places = cx.expand(places, dims)?;
    let scatter = ScatterElements { axis, f: ScatterFn::Replace };
    one(cx.emit(Op::ScatterElements(scatter), &[cache, places, update])?)
}
