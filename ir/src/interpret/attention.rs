//! Scaled dot-product attention and its gradient, by definition.
//!
//! Keys excluded by their position (causal, window) are skipped; a masked key has the score −∞ and therefore
//! weight 0. Low scores are rounded to the type of the statistics, as where a low number is added in the parts.

use super::call::{Call, broadcast_places};
use super::softmax::log_sum_exp;
use super::{EvalError, Evaluate, Evaluated};
use crate::ops::attention::{COARSE, Dims, FILLED, Sight};
use crate::ops::{Attention, AttentionGrad, statistics_dtype};
use crate::{DType, Shape};
use std::borrow::Cow;
use std::ops::Range;

/// Operands of the scores, and the additive mask.
struct Scores<'a> {
    dims: Dims,
    scale: f64,
    sight: Sight,
    /// Type of the statistics, to which low scores are rounded.
    dtype: DType,
    q: Cow<'a, [f64]>,
    k: Cow<'a, [f64]>,
    /// Addend of each score, if there is a mask.
    mask: Option<Vec<f64>>,
    /// Factor of each weight, if some are dropped.
    kept: Option<Vec<f64>>,
}

impl<'a> Scores<'a> {
    /// `q`, `k`, `v` are the operands from `first` on; the masks, of those from `masks` on.
    fn new(
        call: &Call<'a>,
        first: usize,
        masks: usize,
        (scale, sight, keep): (f64, Sight, Option<f64>),
    ) -> Result<Self, EvalError> {
        let ty = |i: usize| &call.inputs[first + i].ty;
        let d = Dims::of(ty(0), ty(1), ty(2))?;
        let last = call.inputs.len() - 1;
        let kept = keep.map(|keep| call.floats(last).iter().map(|kept| kept / keep).collect());
        let has_mask = call.inputs.len() > masks + usize::from(keep.is_some());
        let mask = has_mask.then(|| {
            let (m, values) = (&call.inputs[masks], call.floats(masks));
            let full = Shape::from([d.b, d.h, d.t, d.s]);
            let added = |x: f64| match (m.dtype() == DType::Bool, x != 0.0) {
                (true, true) => 0.0,
                (true, false) => f64::NEG_INFINITY,
                (false, _) => x,
            };
            broadcast_places(m.shape(), &full).into_iter().map(|p| added(values[p])).collect()
        });
        let (q, k) = (call.floats(first), call.floats(first + 1));
        let dtype = if call.exact { DType::F64 } else { statistics_dtype(ty(0).dtype) };
        Ok(Scores { dims: d, scale, sight, dtype, q, k, mask, kept })
    }

    /// The keys that query row `row` (of `B·H·T`) attends to.
    fn keys(&self, row: usize) -> Range<usize> {
        self.sight.keys(row % self.dims.t, self.dims.s)
    }

    /// Scores of query row `row` with the keys it attends to.
    fn row(&self, row: usize) -> Vec<f64> {
        let d = &self.dims;
        let query = &self.q[row * d.d..(row + 1) * d.d];
        let first = self.first_key(row);
        self.keys(row)
            .map(|j| {
                let key = &self.k[(first + j) * d.d..(first + j + 1) * d.d];
                let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                let score = dot * self.scale + self.mask.as_ref().map_or(0.0, |m| m[row * d.s + j]);
                if score < COARSE { self.dtype.round(score) } else { score }
            })
            .collect()
    }

    /// Factor of the weight of a key for query row `row`.
    fn kept(&self, row: usize, key: usize) -> f64 {
        self.kept.as_ref().map_or(1.0, |kept| kept[row * self.dims.s + key])
    }

    /// First key row (of `B·G·S`) for query row `row`.
    fn first_key(&self, row: usize) -> usize {
        let d = &self.dims;
        let (b, h) = (row / (d.t * d.h), row / d.t % d.h);
        (b * d.g + h / (d.h / d.g)) * d.s
    }
}

impl Evaluate for Attention {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let scores = Scores::new(call, 0, 3, (self.scale, self.sight(), self.keep))?;
        let d = scores.dims;
        let v = call.floats(2);
        let n_rows = d.b * d.h * d.t;
        let mut y = vec![0.0; n_rows * d.e];
        let mut lses = Vec::with_capacity(n_rows);
        for row in 0..n_rows {
            let s = scores.row(row);
            let lse = log_sum_exp(s.iter().copied());
            lses.push(lse);
            if lse == f64::NEG_INFINITY {
                continue;
            }
            // 1, but where `lse` is too large to tell: in a row of equal, very low scores.
            let total: f64 = s.iter().map(|s| (s - lse).exp()).sum();
            let out = &mut y[row * d.e..(row + 1) * d.e];
            for (j, s) in scores.keys(row).zip(&s) {
                let p = (s - lse).exp() / total * scores.kept(row, j);
                let value = (scores.first_key(row) + j) * d.e;
                out.iter_mut().zip(&v[value..value + d.e]).for_each(|(y, v)| *y += p * v);
            }
        }
        Ok(vec![call.real(0, y), call.real(1, lses)])
    }
}

impl Evaluate for AttentionGrad {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let scores = Scores::new(call, 1, 6, (self.scale, self.sight(), self.keep))?;
        let d = scores.dims;
        let (dy, v, y, lse) = (call.floats(0), call.floats(3), call.floats(4), call.floats(5));
        let mut dq = vec![0.0; scores.q.len()];
        let mut dk = vec![0.0; scores.k.len()];
        let mut dv = vec![0.0; v.len()];
        let mut dmask = vec![0.0; call.results.get(3).map_or(0, |ty| ty.shape.numel())];
        let mask_places = match self.mask_grad {
            true => broadcast_places(call.inputs[6].shape(), &Shape::from([d.b, d.h, d.t, d.s])),
            false => Vec::new(),
        };
        let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        for row in 0..d.b * d.h * d.t {
            if lse[row] == f64::NEG_INFINITY {
                continue;
            }
            let (dy, y) = (&dy[row * d.e..(row + 1) * d.e], &y[row * d.e..(row + 1) * d.e]);
            let delta = dot(dy, y);
            let weights: Vec<f64> = scores.row(row).iter().map(|s| (s - lse[row]).exp()).collect();
            let total = if lse[row] < COARSE { weights.iter().sum() } else { 1.0 };
            for (j, weight) in scores.keys(row).zip(weights) {
                let key = scores.first_key(row) + j;
                let p = weight / total;
                let kept = scores.kept(row, j);
                let dp = kept * dot(dy, &v[key * d.e..(key + 1) * d.e]);
                let ds = if lse[row] == FILLED { 0.0 } else { p * (dp - delta) };
                if let Some(&place) = mask_places.get(row * d.s + j) {
                    dmask[place] += ds;
                }
                let ds = ds * self.scale;
                for c in 0..d.e {
                    dv[key * d.e + c] += kept * p * dy[c];
                }
                for c in 0..d.d {
                    dq[row * d.d + c] += ds * scores.k[key * d.d + c];
                    dk[key * d.d + c] += ds * scores.q[row * d.d + c];
                }
            }
        }
        let mut results = vec![call.real(0, dq), call.real(1, dk), call.real(2, dv)];
        if self.mask_grad {
            results.push(call.real(3, dmask));
        }
        Ok(results)
    }
}
