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
    let mut score = t.scale(score, op.scale);
    let [mask, kept] = op.masks(operands);
    let mask = mask.map(|mask| (mask.broadcast(t, &[batch, head, row, j]), mask.ty.dtype));
    if let Some((added, _)) = mask.filter(|(_, dtype)| *dtype != DType::Bool) {
        score = t.add(score, added);
    }
    let mut weight = t.exp(score);
    if let Some((truth, _)) = mask.filter(|(_, dtype)| *dtype == DType::Bool) {
        weight = t.mul(weight, truth);
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
    let weight = t.with_one_mask(weight);
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

#[cfg(test)]
mod tests {
    use crate::{Comparer, Ranks};
    use frit_ir::text;

    /// Whether a softmax of scores, changed by these nodes from `%s` to `%t`, with its weights changed from `%p` to `%w`, is an attention
    /// with this operand and these attributes.
    fn is_attention([scores, weights]: [&str; 2], mask: &str, attributes: &str) -> bool {
        let leaves = r#"
 %q: f32[1, 1, 3, 2] = input {name = "q", ty = {"dtype": "f32", "shape": [1,1,3,2]}}
 %k: f32[1, 1, 3, 2] = input {name = "k", ty = {"dtype": "f32", "shape": [1,1,3,2]}}
 %v: f32[1, 1, 3, 2] = input {name = "v", ty = {"dtype": "f32", "shape": [1,1,3,2]}}
 %m: f32[3] = input {name = "m", ty = {"dtype": "f32", "shape": [3]}}
 %kept: bool[1, 1, 3, 3] = input {name = "kept", ty = {"dtype": "bool", "shape": [1,1,3,3]}}
 %first: bool[3] = constant {ty = {"dtype": "bool", "shape": [3]}, values = [1, 0, 0]}
 %lowest: f32[] = constant {splat = -3.4028234663852886e38, ty = {"dtype": "f32", "shape": []}}
 %low: f32[] = constant {splat = -10000.0, ty = {"dtype": "f32", "shape": []}}
 %one: f32[] = constant {splat = 1.0, ty = {"dtype": "f32", "shape": []}}
 %zero: f32[] = constant {splat = 0.0, ty = {"dtype": "f32", "shape": []}}
 %none: f32[3] = sub %one, %m
 %added: f32[3] = mul %none, %low
 %key: f32[3] = constant {ty = {"dtype": "f32", "shape": [3]}, values = [-1.2676506002282294e30, 0, 0]}
 %other: f32[3] = constant {ty = {"dtype": "f32", "shape": [3]}, values = [0, -1.2676506002282294e30, 0]}
 %half: f32[] = constant {splat = 0.5, ty = {"dtype": "f32", "shape": []}}
 %more: f32[] = constant {splat = 1.25, ty = {"dtype": "f32", "shape": []}}"#;
        let parts = format!(
            "graph @g world=1 {{{leaves}
 %dot: f32[1, 1, 3, 3] = matmul %q, %k {{trans_a = false, trans_b = true}}
 %s: f32[1, 1, 3, 3] = mul %dot, %half
 {scores}
 %p: f32[1, 1, 3, 3] = softmax %t {{axis = 3}}
 {weights}
 %y: f32[1, 1, 3, 2] = matmul %w, %v {{trans_a = false, trans_b = false}}
 return %y as \"y\"
}}"
        );
        let whole = format!(
            "graph @g world=1 {{{leaves}
 %y: f32[1, 1, 3, 2], %l: f32[1, 1, 3] = attention %q, %k, %v{mask} {{{attributes}scale = 0.5}}
 return %y as \"y\"
}}"
        );
        let parsed = |text: &str| text::parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let (parts, whole) = (parsed(&parts), parsed(&whole));
        let ranks = Ranks { shards: 1, replicas: 1 };
        Comparer::of_real_numbers().compare(&parts, &whole, ranks).is_empty()
    }

    const ALL: &str = "%w: f32[1, 1, 3, 3] = mul %p, %one";

    #[test]
    fn masks_may_be_chosen_or_added() {
        let filled = "%t: f32[1, 1, 3, 3] = select %first, %lowest, %s";
        assert!(is_attention([filled, ALL], ", %key", ""));
        assert!(!is_attention([filled, ALL], ", %other", ""));
        let added = "%t: f32[1, 1, 3, 3] = add %s, %added";
        assert!(is_attention([added, ALL], ", %added", ""));
        assert!(!is_attention([added, ALL], ", %none", ""));
        // A shift of all scores is absorbed by no more than they are.
        let moved =
            "%a: f32[3] = mul %m, %low\n %n: f32[3] = neg %a\n %t: f32[1, 1, 3, 3] = add %s, %n";
        assert!(!is_attention([moved, ALL], ", %added", ""));
    }

    #[test]
    fn dropout_chooses_among_the_weights() {
        let scores = "%t: f32[1, 1, 3, 3] = mul %s, %one";
        let dropped =
            "%x: f32[1, 1, 3, 3] = mul %p, %more\n %w: f32[1, 1, 3, 3] = select %kept, %x, %zero";
        assert!(is_attention([scores, dropped], ", %kept", "keep = 0.8, "));
        assert!(!is_attention([scores, dropped], ", %kept", "keep = 0.75, "));
        assert!(!is_attention([scores, dropped], ", %kept", ""));
        assert!(!is_attention([scores, ALL], ", %kept", "keep = 0.8, "));
    }
}
