//! Attention and rotary positions as single operators (opset 23 and later).

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::layout::permute;
use super::{Operator, one, op};
use frit_ir::ops::{Attention, BinaryFn, Concat, Gather, Slice};
use frit_ir::{DType, Op, ValueId};

pub(super) const OPERATORS: &[Operator] = &[
    op(
        "Attention",
        &["is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap"],
        attention,
    ),
    op("RotaryEmbedding", &["interleaved", "num_heads", "rotary_embedding_dim"], rotary),
];

/// `(q, k, v[, mask])`, each `[B, H, T, D]`, or `[B, T, H·D]` with the number of heads as attributes.
fn attention(cx: &mut NodeContext<'_>) -> Outcome {
    let (q, k, v) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    if cx.optional(4)?.is_some() || cx.optional(5)?.is_some() || cx.optional(6)?.is_some() {
        return Err(Fault::Attribute("a cache of keys and values".into()));
    }
    if cx.float("softcap", 0.0) != 0.0 || cx.node.output.iter().skip(1).any(|o| !o.is_empty()) {
        return Err(Fault::Attribute("softcap, or a second result,".into()));
    }
    let merged = cx.dims(q).len() == 3;
    let heads = |cx: &mut NodeContext<'_>, x: ValueId, key: &str| -> Result<ValueId, Fault> {
        if !merged {
            return Ok(x);
        }
        let dims = cx.dims(x);
        let n = usize::try_from(cx.int(key, 0)).unwrap_or(0);
        let &[b, t, width] = dims.as_slice() else { return misfit("an operand needs 3 axes") };
        if n == 0 || !width.is_multiple_of(n) {
            return misfit(format!("{key} = {n} heads of {width} elements"));
        }
        let x = cx.reshape(x, vec![b, t, n, width / n])?;
        permute(cx, x, vec![0, 2, 1, 3])
    };
    let q = heads(cx, q, "q_num_heads")?;
    let (k, v) = (heads(cx, k, "kv_num_heads")?, heads(cx, v, "kv_num_heads")?);
    let usual = cx.dims(q).last().map_or(1.0, |&d| 1.0 / (d as f64).sqrt());
    let scale = if cx.has("scale") { cx.float("scale", usual) } else { usual };
    let mut operands = vec![q, k, v];
    if let Some(mask) = cx.optional(3)? {
        let dtype = cx.ty(mask).dtype;
        let mask = if dtype == DType::Bool { mask } else { cx.cast(mask, DType::F32)? };
        operands.push(mask);
    }
    let causal = cx.int("is_causal", 0) != 0;
    let mut y = cx.emit_all(Op::Attention(Attention { scale, causal }), &operands)?[0];
    if merged {
        let &[b, h, t, e] = cx.dims(y).as_slice() else { return misfit("q needs 4 axes") };
        y = permute(cx, y, vec![0, 2, 1, 3])?;
        y = cx.reshape(y, vec![b, t, h * e])?;
    }
    one(y)
}

/// `(x, cos, sin[, positions])`: pairs of elements turned by an angle that depends on the position.
fn rotary(cx: &mut NodeContext<'_>) -> Outcome {
    let (mut x, mut cos, mut sin) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let merged = cx.dims(x).len() == 3;
    if merged {
        let &[b, t, width] = cx.dims(x).as_slice() else { return misfit("x needs 3 or 4 axes") };
        let heads = usize::try_from(cx.int("num_heads", 0)).unwrap_or(0);
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
