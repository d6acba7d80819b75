//! Attention and rotary positions as single operators (opset 23 and later).

use super::super::context::{Bound, Fault, NodeContext, Outcome, misfit};
use super::composed::{binary, reduced, unary, with_scalar};
use super::layout::{join, permute};
use super::{Operator, one, op};
use frit_ir::ops::{
    Attention, BinaryFn, CompareFn, Concat, Gather, LogicalFn, MatMul, Pad, ReduceFn, Slice,
    Softmax, UnaryFn,
};
use frit_ir::{DType, Op, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op(
        "Attention",
        &[
            "is_causal",
            "kv_num_heads",
            "q_num_heads",
            "qk_matmul_output_mode",
            "scale",
            "softcap",
            "softmax_precision",
        ],
        attention,
    ),
    op("RotaryEmbedding", &["interleaved", "num_heads", "rotary_embedding_dim"], rotary),
];

/// `(q, k, v[, mask, past_key, past_value, lengths])`, each `[B, H, T, D]`, or `[B, T, H·D]` with the number
/// of heads as attributes. Source: ONNX Attention-25.
fn attention(cx: &mut NodeContext<'_>) -> Outcome {
    let (q, k, v) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let merged = cx.dims(q).len() == 3;
    let heads = |cx: &mut NodeContext<'_>, x: ValueId, key: &str| -> Result<ValueId, Fault> {
        if !merged {
            return Ok(x);
        }
        let dims = cx.dims(x);
        let n = cx.count(key, 0);
        let &[b, t, width] = dims.as_slice() else { return misfit("an operand needs 3 axes") };
        if n == 0 || !width.is_multiple_of(n) {
            return misfit(format!("{key} = {n} heads of {width} elements"));
        }
        let x = cx.reshape(x, vec![b, t, n, width / n])?;
        permute(cx, x, vec![0, 2, 1, 3])
    };
    let q = heads(cx, q, "q_num_heads")?;
    let (mut k, mut v) = (heads(cx, k, "kv_num_heads")?, heads(cx, v, "kv_num_heads")?);
    let mut past = 0;
    if let (Some(keys), Some(values)) = (cx.optional(4)?, cx.optional(5)?) {
        past = cx.dims(keys).get(2).copied().unwrap_or(0);
        (k, v) = (join(cx, &[keys, k], 2)?, join(cx, &[values, v], 2)?);
    }
    let (&[b, h, t, d], &[_, _, s, _]) = (cx.dims(q).as_slice(), cx.dims(k).as_slice()) else {
        return misfit(format!("queries {} and keys {}", cx.ty(q), cx.ty(k)));
    };
    let usual = 1.0 / (d as f64).sqrt();
    let scale = if cx.has("scale") { cx.float("scale", usual) } else { usual };
    let mut causal = cx.int("is_causal", 0) != 0;
    let mut mask = match cx.optional(3)? {
        Some(mask) => Some(widened(cx, mask, s)?),
        None => None,
    };
    if let Some(lengths) = cx.optional(6)? {
        let keep = filled(cx, lengths, (t, s), causal)?;
        mask = Some(restricted(cx, mask, keep)?);
        causal = false;
    } else if causal && past > 0 {
        let sees = |i: usize| (i % s <= i / s + past) as i64;
        let keep = cx.integers(DType::Bool, &[t, s], sees)?;
        mask = Some(restricted(cx, mask, keep)?);
        causal = false;
    }
    let asked = |i: usize| cx.node.output.get(i).is_some_and(|o| !o.is_empty());
    let softcap = cx.float("softcap", 0.0);
    let (y, scores) = if softcap != 0.0 || asked(3) {
        if causal {
            let sees = |i: usize| (i % s <= i / s) as i64;
            let keep = cx.integers(DType::Bool, &[t, s], sees)?;
            mask = Some(restricted(cx, mask, keep)?);
        }
        let (y, scores) = decomposed(cx, [q, k, v], mask, scale, softcap)?;
        (y, Some(scores))
    } else {
        let mut operands = vec![q, k, v];
        if let Some(mask) = mask {
            let boolean = cx.ty(mask).dtype == DType::Bool;
            operands.push(if boolean { mask } else { cx.cast(mask, DType::F32)? });
        }
        (
            cx.emit_all(
                Op::Attention(Attention { scale, causal, window: None, keep: None }),
                &operands,
            )?[0],
            None,
        )
    };
    let mut result = y;
    if merged {
        let e = cx.dims(y)[3];
        let y = permute(cx, y, vec![0, 2, 1, 3])?;
        result = cx.reshape(y, vec![b, t, h * e])?;
    }
    let mut outputs: Vec<Bound> = vec![result.into(), k.into(), v.into()];
    outputs.extend(scores.map(Bound::from));
    Ok(outputs)
}

/// A mask whose last axis has all `s` keys; added ones are masked.
fn widened(cx: &mut NodeContext<'_>, mask: ValueId, s: usize) -> Result<ValueId, Fault> {
    let dims = cx.dims(mask);
    let named = dims.last().copied().unwrap_or(1);
    if named >= s || named == 1 {
        return Ok(mask);
    }
    let boolean = cx.ty(mask).dtype == DType::Bool;
    let value = if boolean { 0.0 } else { f64::NEG_INFINITY };
    let mut border = Pad { low: vec![0; dims.len()], high: vec![0; dims.len()], value };
    border.high[dims.len() - 1] = s - named;
    cx.emit(Op::Pad(border), &[mask])
}

/// The mask, and only where `keep`.
fn restricted(
    cx: &mut NodeContext<'_>,
    mask: Option<ValueId>,
    keep: ValueId,
) -> Result<ValueId, Fault> {
    let Some(mask) = mask else { return Ok(keep) };
    if cx.ty(mask).dtype == DType::Bool {
        return cx.emit(Op::Logical(LogicalFn::And), &[mask, keep]);
    }
    let never = cx.scalar_like(mask, f64::NEG_INFINITY)?;
    cx.emit(Op::Select, &[keep, mask, never])
}

/// Which keys of a buffer that is filled up to `lengths[B]` are seen, `[B, 1, T or 1, S]`; `causal` aligns
/// the last query with the last key that is filled.
fn filled(
    cx: &mut NodeContext<'_>,
    lengths: ValueId,
    (t, s): (usize, usize),
    causal: bool,
) -> Result<ValueId, Fault> {
    let lengths = cx.cast(lengths, DType::I64)?;
    let n = cx.dims(lengths).first().copied().unwrap_or(1);
    let lengths = cx.reshape(lengths, vec![n, 1, 1, 1])?;
    let keys = cx.integers(DType::I64, &[1, 1, 1, s], |i| i as i64)?;
    let keep = cx.emit(Op::Compare(CompareFn::Lt), &[keys, lengths])?;
    if !causal {
        return Ok(keep);
    }
    // Query i attends to keys up to length − T + i.
    let shift = cx.integers(DType::I64, &[1, 1, t, 1], |i| i as i64 - t as i64)?;
    let last = cx.emit(Op::Binary(BinaryFn::Add), &[lengths, shift])?;
    let sees = cx.emit(Op::Compare(CompareFn::Le), &[keys, last])?;
    cx.emit(Op::Logical(LogicalFn::And), &[keep, sees])
}

/// Attention as matmuls and a softmax, where the scores are capped or asked for: the result, and
/// the scores of `qk_matmul_output_mode`.
fn decomposed(
    cx: &mut NodeContext<'_>,
    [q, k, v]: [ValueId; 3],
    mask: Option<ValueId>,
    scale: f64,
    softcap: f64,
) -> Result<(ValueId, ValueId), Fault> {
    let (heads, groups) = (cx.dims(q)[1], cx.dims(k)[1]);
    if groups == 0 || !heads.is_multiple_of(groups) {
        return misfit(format!("{heads} heads of queries for {groups} of keys"));
    }
    // Every head of keys and values, once for each head of queries.
    let repeated = |cx: &mut NodeContext<'_>, x: ValueId| {
        let &[b, g, s, d] = cx.dims(x).as_slice() else { return misfit("x needs 4 axes") };
        let x = cx.reshape(x, vec![b, g, 1, s, d])?;
        let x = cx.expand(x, vec![b, g, heads / groups, s, d])?;
        cx.reshape(x, vec![b, heads, s, d])
    };
    let (k, v) = (repeated(cx, k)?, repeated(cx, v)?);
    let (q, k) = (
        with_scalar(cx, BinaryFn::Mul, q, scale.sqrt())?,
        with_scalar(cx, BinaryFn::Mul, k, scale.sqrt())?,
    );
    let matmul = Op::MatMul(MatMul { trans_b: true, ..MatMul::default() });
    let raw = cx.emit(matmul, &[q, k])?;
    let mut capped = raw;
    if softcap != 0.0 {
        let x = with_scalar(cx, BinaryFn::Div, raw, softcap)?;
        let x = unary(cx, UnaryFn::Tanh, x)?;
        capped = with_scalar(cx, BinaryFn::Mul, x, softcap)?;
    }
    let mut masked = capped;
    if let Some(mask) = mask {
        masked = if cx.ty(mask).dtype == DType::Bool {
            let never = cx.scalar_like(capped, f64::NEG_INFINITY)?;
            cx.emit(Op::Select, &[mask, capped, never])?
        } else {
            let dtype = cx.ty(capped).dtype;
            let mask = cx.cast(mask, dtype)?;
            binary(cx, BinaryFn::Add, capped, mask)?
        };
    }
    // A fully masked row gives zero.
    let axis = cx.dims(masked).len() - 1;
    let most = reduced(cx, ReduceFn::Max, masked, vec![axis])?;
    let least = cx.scalar_like(most, f64::NEG_INFINITY)?;
    let blind = cx.emit(Op::Compare(CompareFn::Eq), &[most, least])?;
    let zero = cx.scalar_like(masked, 0.0)?;
    let safe = cx.emit(Op::Select, &[blind, zero, masked])?;
    let p = cx.emit(Op::Softmax(Softmax { axis }), &[safe])?;
    let p = cx.emit(Op::Select, &[blind, zero, p])?;
    let y = cx.emit(Op::MatMul(MatMul::default()), &[p, v])?;
    let scores = match cx.int("qk_matmul_output_mode", 0) {
        0 => raw,
        1 => capped,
        2 => masked,
        3 => p,
        other => return Err(Fault::Attribute(format!("qk_matmul_output_mode = {other}"))),
    };
    Ok((y, scores))
}

/// `(x, cos, sin[, positions])`: pairs of elements turned by an angle that depends on the position.
fn rotary(cx: &mut NodeContext<'_>) -> Outcome {
    let (mut x, mut cos, mut sin) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let merged = cx.dims(x).len() == 3;
    if merged {
        let &[b, t, width] = cx.dims(x).as_slice() else { return misfit("x needs 3 or 4 axes") };
        let heads = cx.count("num_heads", 0);
        if heads == 0 || !width.is_multiple_of(heads) {
            return misfit(format!("num_heads = {heads} of {width} elements"));
        }
        x = cx.reshape(x, vec![b, t, heads, width / heads])?;
    } else {
        x = permute(cx, x, vec![0, 2, 1, 3])?;
    }
    let &[b, t, heads, d] = cx.dims(x).as_slice() else { return misfit("x needs 3 or 4 axes") };
    let turned = match usize::try_from(cx.int("rotary_embedding_dim", 0)) {
        Ok(0) => d,
        Ok(n) if n <= d && n.is_multiple_of(2) => n,
        _ => return misfit("rotary_embedding_dim is not an even part of the head"),
    };
    if let Some(positions) = cx.optional(3)? {
        cos = cx.emit(Op::Gather(Gather { axis: 0 }), &[cos, positions])?;
        sin = cx.emit(Op::Gather(Gather { axis: 0 }), &[sin, positions])?;
    }
    let half = turned / 2;
    // `[B, T, half]` for all heads.
    let cos = cx.reshape(cos, vec![b, t, 1, half])?;
    let sin = cx.reshape(sin, vec![b, t, 1, half])?;
    let part = |cx: &mut NodeContext<'_>, start: usize, size: usize, step: isize| {
        let cut = Slice {
            start: vec![0, 0, 0, start],
            size: vec![b, t, heads, size],
            step: vec![1, 1, 1, step],
        };
        cx.emit(Op::Slice(cut), &[x])
    };
    let interleaved = cx.int("interleaved", 0) != 0;
    let (first, second) = match interleaved {
        true => (part(cx, 0, half, 2)?, part(cx, 1, half, 2)?),
        false => (part(cx, 0, half, 1)?, part(cx, half, half, 1)?),
    };
    let mut product = |a, b| cx.emit(Op::Binary(BinaryFn::Mul), &[a, b]);
    let (cc, ss) = (product(cos, first)?, product(sin, second)?);
    let (sc, cs) = (product(sin, first)?, product(cos, second)?);
    let real = cx.emit(Op::Binary(BinaryFn::Sub), &[cc, ss])?;
    let imaginary = cx.emit(Op::Binary(BinaryFn::Add), &[sc, cs])?;
    let mut y = match interleaved {
        true => {
            let real = cx.reshape(real, vec![b, t, heads, half, 1])?;
            let imaginary = cx.reshape(imaginary, vec![b, t, heads, half, 1])?;
            let pairs = cx.emit(Op::Concat(Concat { axis: 4 }), &[real, imaginary])?;
            cx.reshape(pairs, vec![b, t, heads, turned])?
        }
        false => cx.emit(Op::Concat(Concat { axis: 3 }), &[real, imaginary])?,
    };
    if turned < d {
        let rest = part(cx, turned, d - turned, 1)?;
        y = cx.emit(Op::Concat(Concat { axis: 3 }), &[y, rest])?;
    }
    if merged {
        return one(cx.reshape(y, vec![b, t, heads * d])?);
    }
    one(permute(cx, y, vec![0, 2, 1, 3])?)
}
