//! Attention by its definition.

use super::Operand;
use crate::index::Ix;
use crate::term::{TermId, Terms};
use frit_ir::DType;
use frit_ir::ops::Attention;

/// (q[B,H,T,D], k[B,G,S,D], v[B,G,S,E][, mask][, kept]): Σ p·v with p the softmax over keys of scale·q·k + mask, and the
/// logarithm of its denominator. Heads share keys in groups; causal, key j ≤ i, and a window bounds |i − j|. With dropout,
/// p·kept/keep takes the place of p.
pub(super) fn attention(
    t: &mut Terms,
    op: &Attention,
    operands: &[Operand],
    axes: &[Ix],
) -> Vec<TermId> {
    let (q, k, v) = (&operands[0], &operands[1], &operands[2]);
    let [_, heads, _, depth] = dims(q);
    let [_, groups, keys, _] = dims(k);
    let (batch, head, row, column) = (axes[0], axes[1], axes[2], axes[3]);
    let group = t.div(head, (heads / groups) as i64);
    let (key, j) = t.fresh_index(keys);
    let (inner, d) = t.fresh_index(depth);
    let query = q.at(t, &[batch, head, row, d]);
    let other = k.at(t, &[batch, group, j, d]);
    let product = t.mul(query, other);
    let score = t.sum_over(product, inner.as_slice());
    let mut weight = {
        let score = t.scale(score, op.scale);
        t.exp(score)
    };
    let [mask, kept] = op.masks(operands);
    if let Some(mask) = mask {
        let at = mask.broadcast(t, &[batch, head, row, j]);
        let factor = if mask.ty.dtype == DType::Bool { at } else { t.exp(at) };
        weight = t.mul(weight, factor);
    }
    // How far the key is behind the query.
    let minus = t.times(j, -1);
    let behind = t.plus(row, minus);
    if op.causal {
        let seen = t.index_not_negative(behind);
        weight = t.mul(weight, seen);
    }
    if let Some(window) = op.window {
        let ahead = t.times(behind, -1);
        let bounds = if op.causal { vec![ahead] } else { vec![ahead, behind] };
        for bound in bounds {
            let near = t.offset(bound, window as i64 - 1);
            let seen = t.index_not_negative(near);
            weight = t.mul(weight, seen);
        }
    }
    let total = t.sum_over(weight, key.as_slice());
    let value = v.at(t, &[batch, group, j, column]);
    let mut weighted = t.product(&[(weight, 1.0), (total, -1.0), (value, 1.0)]);
    if let (Some(kept), Some(keep)) = (kept, op.keep) {
        let kept = kept.at(t, &[batch, head, row, j]);
        weighted = t.mul(weighted, kept);
        weighted = t.scale(weighted, keep.recip());
    }
    vec![t.sum_over(weighted, key.as_slice()), t.log(total)]
}

fn dims(x: &Operand) -> [usize; 4] {
    let s = x.sizes();
    [s[0], s[1], s[2], s[3]]
}
