//! Scaled dot-product attention and its gradient. Scores and softmax statistics are f32.
//!
//! Legend: `B` batch, `H` query heads, `G` key/value heads (H a multiple of G), `T` queries, `S` keys,
//! `D` head size, `E` value size. Source: Vaswani et al. 2017; Dao et al. 2022 (tiling, `lse`).

use super::number::by_bits;
use super::{
    Inferred, Linear, OpError, Operation, Precision, arity_in, float, same_shape, shape_is,
    statistics_dtype,
};
use crate::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Added to a score, this is the score: a mask has it where scores were replaced by a low number, such as −1e9. Their
/// order, and the weight of 1/n of each in a row of n such scores, do not depend on the number; no gradient passes to
/// the replaced scores. It absorbs scores even in f64, bf16 has it, and no exporter adds it.
pub const FILLED: f64 = -1.267_650_600_228_229_4e30; // -2^100

/// Below this, an `lse` of f32 may be so coarse that the exponentials of s − `lse` do not add up to 1 within 2e-6: the
/// gradient divides them by their sum.
pub const COARSE: f64 = -64.0;

/// `(q[B,H,T,D], k[B,G,S,D], v[B,G,S,E][, mask][, kept])` → `(y[B,H,T,E], lse[B,H,T])`.
///
/// The mask broadcasts to `[B,H,T,S]`: a bool mask keeps where true, a float mask is added to the
/// scores. `lse` is the log of the sum of exponentials of the scaled, masked scores. A row with every
/// key masked by a bool, or by −inf, gives `y` = 0 and `lse` = −inf. In a row with every key masked by a low
/// number, the keys of the greatest sum have the weight, and sums are f32: −1e9 absorbs usual scores.
///
/// With dropout, `kept: bool[B,H,T,S]` says which weights are kept; these are divided by `keep`, the others are 0. It does
/// not change `lse`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Factor of the scores, usually 1/√D.
    #[serde(with = "super::number")]
    pub scale: f64,
    /// Whether query `i` attends only to keys `j ≤ i`.
    #[serde(default)]
    pub causal: bool,
    /// Query `i` attends only to keys with `|i − j| < window`, if set: sliding-window, or local, attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Divisor of the kept weights, above 0 and below 1: with dropout, which reads `kept`.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "super::number::option")]
    pub keep: Option<f64>,
}

by_bits!(Attention { scale, keep } { causal, window });

impl Attention {
    /// The keys that queries attend to.
    pub fn sight(&self) -> Sight {
        Sight { causal: self.causal, window: self.window }
    }

    /// The operands `mask` and `kept`.
    pub fn masks<'a, T>(&self, operands: &'a [T]) -> [Option<&'a T>; 2] {
        masks(operands, 3, self.keep)
    }
}

impl Operation for Attention {
    fn examples() -> Vec<Self> {
        vec![Attention { scale: 0.125, causal: true, window: None, keep: None }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        check_arity(inputs, 3, self.keep)?;
        self.sight().check()?;
        let d = Dims::of(inputs[0], inputs[1], inputs[2])?;
        check_masks(self.masks(inputs), &d)?;
        Ok(vec![inputs[0].with_shape([d.b, d.h, d.t, d.e]), d.statistics(inputs[0].dtype)])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        Dims::of(inputs[0], inputs[1], inputs[2]).map_or(0, |d| d.flops(self.sight()))
    }

    fn precision(&self) -> Precision {
        // Scores and softmax statistics are in f32 inside.
        Precision::LOWER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(dy, q, k, v, y, lse[, mask][, kept])` → `(dq, dk, dv[, dmask])`; `dmask` has the shape of the mask, in the
/// dtype of the statistics. Weights are the exponentials of s − `lse`, divided by their sum where `lse` is below
/// [`COARSE`]. Scores of a row whose `lse` is [`FILLED`] have no gradient.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionGrad {
    /// As [`Attention::scale`].
    #[serde(with = "super::number")]
    pub scale: f64,
    /// As [`Attention::causal`].
    #[serde(default)]
    pub causal: bool,
    /// As [`Attention::window`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// As [`Attention::keep`].
    #[serde(default, skip_serializing_if = "Option::is_none", with = "super::number::option")]
    pub keep: Option<f64>,
    /// Whether the gradient of an added mask is a result.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mask_grad: bool,
}

by_bits!(AttentionGrad { scale, keep } { causal, window, mask_grad });

impl AttentionGrad {
    /// The gradient of an attention.
    pub fn of(attention: &Attention, mask_grad: bool) -> Self {
        let Attention { scale, causal, window, keep } = *attention;
        AttentionGrad { scale, causal, window, keep, mask_grad }
    }

    /// The keys that queries attend to.
    pub fn sight(&self) -> Sight {
        Sight { causal: self.causal, window: self.window }
    }

    /// The operands `mask` and `kept`.
    pub fn masks<'a, T>(&self, operands: &'a [T]) -> [Option<&'a T>; 2] {
        masks(operands, 6, self.keep)
    }
}

impl Operation for AttentionGrad {
    fn examples() -> Vec<Self> {
        vec![AttentionGrad::of(&Attention::examples()[0], false)]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        check_arity(inputs, 6, self.keep)?;
        self.sight().check()?;
        let d = Dims::of(inputs[1], inputs[2], inputs[3])?;
        same_shape(inputs[0], inputs[4], "dy and y")?;
        shape_is(inputs[4], &[d.b, d.h, d.t, d.e], "y")?;
        shape_is(inputs[5], &[d.b, d.h, d.t], "lse")?;
        let masks = self.masks(inputs);
        check_masks(masks, &d)?;
        let mut results: Vec<TensorType> = inputs[1..4].iter().map(|t| (*t).clone()).collect();
        match masks[0] {
            _ if !self.mask_grad => {}
            Some(mask) if mask.dtype.is_float() => {
                results.push(mask.with_dtype(statistics_dtype(inputs[1].dtype)));
            }
            _ => return Err(OpError::new("only an added mask has a gradient")),
        }
        Ok(results)
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        Dims::of(inputs[1], inputs[2], inputs[3]).map_or(0, |d| 5 * d.flops(self.sight()) / 2)
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// The keys that a query attends to by the positions of both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sight {
    /// As [`Attention::causal`].
    pub causal: bool,
    /// As [`Attention::window`].
    pub window: Option<usize>,
}

impl Sight {
    /// The keys, of `keys`, that a query attends to.
    pub fn keys(self, query: usize, keys: usize) -> Range<usize> {
        let ahead = if self.causal { Some(1) } else { self.window };
        let end = ahead.map_or(keys, |n| query.saturating_add(n).min(keys));
        let begin = self.window.map_or(0, |n| (query + 1).saturating_sub(n));
        begin.min(end)..end
    }

    /// The same without a window that masks nothing.
    pub fn of(self, queries: usize, keys: usize) -> Sight {
        let most = if self.causal { queries } else { queries.max(keys) };
        Sight { window: self.window.filter(|&n| n < most), ..self }
    }

    /// The sight equal to a mask of `[queries, keys]`, if there is one, some key is masked, and every query attends
    /// to at least one.
    pub fn of_mask(kept: &[bool], queries: usize, keys: usize) -> Option<Sight> {
        // A single row that hides keys may be broadcast over all queries.
        if queries < 2 || keys == 0 || kept.iter().all(|&k| k) {
            return None;
        }
        let seen = || {
            let places = kept.iter().enumerate().filter(|(_, kept)| **kept);
            places.map(|(i, _)| (i / keys, i % keys))
        };
        let reach = seen().map(|(query, key)| query.abs_diff(key)).max()? + 1;
        let causal = seen().all(|(query, key)| key <= query);
        let sight = Sight { causal, window: Some(reach) }.of(queries, keys);
        let row = |(query, row): (usize, &[bool])| {
            let visible = sight.keys(query, keys);
            let equal = |(key, &kept): (usize, &bool)| kept == visible.contains(&key);
            !visible.is_empty() && row.iter().enumerate().all(equal)
        };
        kept.chunks(keys).enumerate().all(row).then_some(sight)
    }

    /// Number of unmasked pairs of a query and a key: the sum of the lengths of [`Sight::keys`].
    fn pairs(self, queries: usize, keys: usize) -> u128 {
        let (queries, keys) = (queries as i128, keys as i128);
        // Σ over the queries i of i + shift, within the keys.
        let ramp = |shift: i128| {
            let first = (-shift).clamp(0, queries);
            let last = (keys - shift).clamp(first, queries);
            let rising = (first + last - 1) * (last - first) / 2 + shift * (last - first);
            rising + (queries - last) * keys
        };
        let (all, window) = (queries * keys, self.window.map(|n| (n as i128).min(queries + keys)));
        let ends = match (self.causal, window) {
            (true, _) => ramp(1),
            (false, Some(window)) => ramp(window),
            (false, None) => all,
        };
        (ends - window.map_or(0, |n| ramp(1 - n))).unsigned_abs()
    }

    fn check(self) -> Result<(), OpError> {
        match self.window {
            Some(0) => Err(OpError::new("a window of 0 hides every key")),
            _ => Ok(()),
        }
    }
}

/// Sizes of an attention, by the letters of this file's legend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are the letters of the legend")]
pub struct Dims {
    pub b: usize,
    pub h: usize,
    pub g: usize,
    pub t: usize,
    pub s: usize,
    pub d: usize,
    pub e: usize,
}

impl Dims {
    /// The sizes of operands `q`, `k`, `v`.
    ///
    /// # Errors
    /// If they do not fit together.
    pub fn of(q: &TensorType, k: &TensorType, v: &TensorType) -> Result<Dims, OpError> {
        for ty in [q, k, v] {
            float(ty, "q, k and v")?;
        }
        let misfit = || OpError::new(format!("q {q}, k {k} and v {v} do not match"));
        let (&[b, h, t, d], &[bk, g, s, dk], &[bv, gv, sv, e]) =
            (q.shape.dims(), k.shape.dims(), v.shape.dims())
        else {
            return Err(misfit());
        };
        let fits = b == bk && b == bv && d == dk && g == gv && s == sv && g > 0 && h % g == 0;
        if !fits || q.dtype != k.dtype || q.dtype != v.dtype {
            return Err(misfit());
        }
        Ok(Dims { b, h, g, t, s, d, e })
    }

    fn statistics(&self, dtype: DType) -> TensorType {
        TensorType::new(statistics_dtype(dtype), [self.b, self.h, self.t])
    }

    /// Two matmuls over the unmasked pairs of queries and keys; without a window, causal pairs are counted as half of
    /// all.
    fn flops(&self, sight: Sight) -> u64 {
        let sight = sight.of(self.t, self.s);
        let heads = self.b as u128 * self.h as u128;
        let pairs = match sight.window {
            Some(_) => sight.pairs(self.t, self.s),
            None => self.t as u128 * self.s as u128,
        };
        let full = [heads, pairs, (self.d + self.e) as u128]
            .iter()
            .fold(2u128, |n, &factor| n.saturating_mul(factor));
        let flops = if sight.causal && sight.window.is_none() { full / 2 } else { full };
        // Of the gradient there are more.
        u64::try_from(flops).unwrap_or(u64::MAX).min(u64::MAX / 5)
    }
}

/// The operands `mask` and `kept`, of which the first can be number `first` and the second is the last one.
fn masks<T>(operands: &[T], first: usize, keep: Option<f64>) -> [Option<&T>; 2] {
    let (kept, others) = match operands.split_last() {
        Some((kept, others)) if keep.is_some() => (Some(kept), others),
        _ => (None, operands),
    };
    [others.get(first), kept]
}

fn check_arity(inputs: &[&TensorType], least: usize, keep: Option<f64>) -> Result<(), OpError> {
    if keep.is_some_and(|keep| !(keep > 0.0 && keep < 1.0)) {
        return Err(OpError::new("keep must be above 0 and below 1"));
    }
    let least = least + usize::from(keep.is_some());
    arity_in(inputs, least, least + 1)
}

fn check_masks(masks: [Option<&&TensorType>; 2], d: &Dims) -> Result<(), OpError> {
    let full = Shape::from([d.b, d.h, d.t, d.s]);
    if let Some(kept) = masks[1].filter(|kept| kept.dtype != DType::Bool || kept.shape != full) {
        return Err(OpError::new(format!("kept must be bool{full}, not {kept}")));
    }
    let Some(mask) = masks[0] else { return Ok(()) };
    if mask.shape.broadcast_strides(&full).is_none() {
        return Err(OpError::new(format!("mask {} does not broadcast to {full}", mask.shape)));
    }
    if mask.dtype != DType::Bool && !mask.dtype.is_float() {
        return Err(OpError::new(format!("mask must be bool or float, not {}", mask.dtype)));
    }
    Ok(())
}
