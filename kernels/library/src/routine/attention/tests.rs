//! Attention against a naive f64 reference, and its gradient against finite differences of it.

use half::{bf16, f16};

use super::*;
use crate::pool::Pool;
use crate::routine::convert::convert;
use crate::routine::random::RandomMask;

/// Inputs as f64, in the layouts of the shape; masks as additive values `[batch, heads, q, kv]`.
struct Case {
    shape: Attention,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d_o: Vec<f64>,
    additive: Vec<f32>,
    keep: Vec<u8>,
    /// Which weights dropout keeps, `[batch, heads, q, kv]`.
    kept: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq)]
enum Masked {
    No,
    Additive,
    Keep,
}

/// Dimensions: batch, heads, key heads, queries, keys, head size, value size.
type Sizes = [usize; 7];

/// Whether attention is causal, and its window.
type Sight = (bool, Option<usize>);

const ALL: Sight = (false, None);

fn case(sizes: Sizes, elem: Elem, (causal, window): Sight, masked: Masked) -> Case {
    let [batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim] = sizes;
    let mask = Mask {
        kind: if masked == Masked::Additive { MaskKind::Additive(elem) } else { MaskKind::Keep },
        // One mask for all heads.
        batch: (q_len * kv_len) as isize,
        head: 0,
        query: kv_len as isize,
        key: 1,
    };
    let shape = Attention {
        batch,
        heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim,
        scale: 0.7 / (head_dim as f32).sqrt(),
        causal,
        window,
        elem,
        q: Strides::time_first(heads, q_len, head_dim),
        k: Strides::heads_first(kv_heads, kv_len, head_dim),
        v: Strides::time_first(kv_heads, kv_len, value_dim),
        o: Strides::time_first(heads, q_len, value_dim),
        mask: (masked != Masked::No).then_some(mask),
        dropout: None,
    };
    let values = |len: usize, seed: usize| -> Vec<f64> {
        let value = |i: usize| ((i * 7919 + seed * 4447) % 1999) as f32 / 700.0 - 1.4;
        (0..len)
            .map(|i| match elem {
                Elem::F32 => f64::from(value(i)),
                Elem::BF16 => bf16::from_f32(value(i)).to_f64(),
                Elem::F16 => f16::from_f32(value(i)).to_f64(),
            })
            .collect()
    };
    // The last query of each batch is masked completely.
    let dropped = |i: usize| (i * 31 % 11) < 4 || i / kv_len % q_len == q_len - 1;
    let len = batch * q_len * kv_len;
    // Exact in every type.
    let additive = |i| if dropped(i) { f32::NEG_INFINITY } else { (i % 5) as f32 * 0.3125 };
    Case {
        q: values(batch * heads * q_len * head_dim, 1),
        k: values(batch * kv_heads * kv_len * head_dim, 2),
        v: values(batch * kv_heads * kv_len * value_dim, 3),
        d_o: values(batch * heads * q_len * value_dim, 4),
        additive: (0..len).map(additive).collect(),
        keep: (0..len).map(|i| u8::from(!dropped(i)) * 3).collect(),
        kept: Vec::new(),
        shape,
    }
}

fn bytes<const N: usize>(values: &[f32], of: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| of(x)).collect()
}

/// A state of the generator.
const STATE: [i64; 5] = [0x1234_5678_9abc, 1, 7, 3, 2];

impl Case {
    /// With dropout by a random mask, drawn by the kernel or before it.
    fn with_dropout(mut self, drawn: bool) -> Case {
        let s = &self.shape;
        let len = s.batch * s.heads * s.q_len * s.kv_len;
        let mask = RandomMask { len, keep: 0.75, id: 5 };
        self.kept = vec![0; len];
        // SAFETY: the vector holds the mask.
        unsafe { mask.run(&Pool::new(1), STATE, self.kept.as_mut_ptr()) };
        self.shape.dropout = Some(Dropout { factor: 1.25, drawn: drawn.then_some(mask) });
        self
    }

    fn mask_value(&self, b: usize, i: usize, j: usize) -> f64 {
        let shape = &self.shape;
        let at = (b * shape.q_len + i) * shape.kv_len + j;
        let hidden = (shape.causal && j > i) || shape.window.is_some_and(|n| i.abs_diff(j) >= n);
        match shape.mask.map(|mask| mask.kind) {
            _ if hidden => f64::NEG_INFINITY,
            Some(MaskKind::Additive(_)) => f64::from(self.additive[at]),
            Some(MaskKind::Keep) if self.keep[at] == 0 => f64::NEG_INFINITY,
            _ => 0.0,
        }
    }

    /// Output and lse in f64.
    fn reference(&self, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let s = &self.shape;
        let mut o = vec![0.0; self.d_o.len()];
        let mut lse = vec![f64::NEG_INFINITY; s.batch * s.heads * s.q_len];
        for b in 0..s.batch {
            for h in 0..s.heads {
                let kh = h / (s.heads / s.kv_heads);
                for i in 0..s.q_len {
                    let q_at = s.q.offset(b, h, i) as usize;
                    let scores: Vec<f64> = (0..s.kv_len)
                        .map(|j| {
                            let k_at = s.k.offset(b, kh, j) as usize;
                            let dot: f64 = (0..s.head_dim).map(|d| q[q_at + d] * k[k_at + d]).sum();
                            dot * f64::from(s.scale) + self.mask_value(b, i, j)
                        })
                        .collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    if max == f64::NEG_INFINITY {
                        continue;
                    }
                    let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
                    lse[(b * s.heads + h) * s.q_len + i] = max + sum.ln();
                    for (j, score) in scores.iter().enumerate() {
                        let row = (b * s.heads + h) * s.q_len + i;
                        let kept = self.kept.get(row * s.kv_len + j);
                        let factor = kept.map_or(1.0, |kept| 1.25 * f64::from(*kept));
                        let p = factor * (score - max).exp() / sum;
                        let v_at = s.v.offset(b, kh, j) as usize;
                        for d in 0..s.value_dim {
                            o[s.o.offset(b, h, i) as usize + d] += p * v[v_at + d];
                        }
                    }
                }
            }
        }
        (o, lse)
    }

    /// The sum of outputs weighted by `d_o`: its gradient is what the backward pass computes.
    fn objective(&self, q: &[f64], k: &[f64], v: &[f64]) -> f64 {
        self.reference(q, k, v).0.iter().zip(&self.d_o).map(|(o, d)| o * d).sum()
    }

    /// The mask's bytes.
    fn mask(&self) -> Vec<u8> {
        match self.shape.mask.map(|mask| mask.kind) {
            Some(MaskKind::Additive(Elem::F32)) => bytes(&self.additive, f32::to_ne_bytes),
            Some(MaskKind::Additive(Elem::BF16)) => {
                bytes(&self.additive, |x| bf16::from_f32(x).to_ne_bytes())
            }
            Some(MaskKind::Additive(Elem::F16)) => {
                bytes(&self.additive, |x| f16::from_f32(x).to_ne_bytes())
            }
            Some(MaskKind::Keep) => self.keep.clone(),
            None => Vec::new(),
        }
    }

    /// Output, lse, and the gradients of queries, keys and values.
    fn run(&self, threads: usize) -> [Vec<f32>; 5] {
        let [o, lse, d_q, d_k, d_v, _] = self.run_all(threads);
        [o, lse, d_q, d_k, d_v]
    }

    /// As [`Case::run`], and the gradient of the mask.
    fn run_all(&self, threads: usize) -> [Vec<f32>; 6] {
        let pool = Pool::new(threads);
        let elem = self.shape.elem;
        let narrow = |values: &[f64]| -> Vec<u32> {
            let wide: Vec<f32> = values.iter().map(|&v| v as f32).collect();
            let mut out = vec![0u32; values.len()];
            let (from, to) = (wide.as_ptr().cast(), out.as_mut_ptr().cast());
            // SAFETY: each vector has room for the elements.
            unsafe { convert(&pool, from, Elem::F32, to, elem, wide.len()) };
            out
        };
        let wide = |values: &[u32]| -> Vec<f32> {
            let mut out = vec![0f32; values.len()];
            let to = out.as_mut_ptr().cast();
            // SAFETY: each vector has room for the elements.
            unsafe { convert(&pool, values.as_ptr().cast(), elem, to, Elem::F32, out.len()) };
            out
        };
        let (q, k, v, d_o) = (narrow(&self.q), narrow(&self.k), narrow(&self.v), narrow(&self.d_o));
        let mut o = vec![u32::MAX; d_o.len()];
        let mut lse = vec![f32::NAN; self.shape.batch * self.shape.heads * self.shape.q_len];
        let (mut d_q, mut d_k, mut d_v) =
            (vec![u32::MAX; q.len()], vec![u32::MAX; k.len()], vec![u32::MAX; v.len()]);
        let mask = self.mask();
        let mask = if mask.is_empty() { std::ptr::null() } else { mask.as_ptr() };
        let drawn = self.shape.dropout.is_some_and(|dropout| dropout.drawn.is_some());
        let kept = if drawn { STATE.as_ptr().cast() } else { self.kept.as_ptr() };
        let added = self.shape.mask.filter(|mask| mask.kind != MaskKind::Keep);
        let mut d_mask = vec![f32::NAN; added.map_or(0, |mask| mask.len(&self.shape))];
        // SAFETY: all tensors have the shape's sizes.
        unsafe {
            self.shape.forward(
                &pool,
                q.as_ptr().cast(),
                k.as_ptr().cast(),
                v.as_ptr().cast(),
                [mask, kept],
                o.as_mut_ptr().cast(),
                lse.as_mut_ptr(),
            );
            let inputs = BackwardInputs {
                q: q.as_ptr().cast(),
                k: k.as_ptr().cast(),
                v: v.as_ptr().cast(),
                mask,
                kept,
                o: o.as_ptr().cast(),
                lse: lse.as_ptr(),
                d_o: d_o.as_ptr().cast(),
            };
            let outputs = BackwardOutputs {
                d_q: d_q.as_mut_ptr().cast(),
                d_k: d_k.as_mut_ptr().cast(),
                d_v: d_v.as_mut_ptr().cast(),
                d_mask: if d_mask.is_empty() { std::ptr::null_mut() } else { d_mask.as_mut_ptr() },
            };
            self.shape.backward(&pool, &self.shape.gradient_strides(), &inputs, &outputs);
        }
        [wide(&o), lse, wide(&d_q), wide(&d_k), wide(&d_v), d_mask]
    }

    /// Compares with the reference: `tolerance` is relative to the largest value of each tensor.
    fn check(&self, tolerance: f64) -> [Vec<f32>; 5] {
        let got = self.run(1);
        let again = self.run(3);
        for (x, y) in got.iter().zip(&again) {
            assert!(x.iter().zip(y).all(|(x, y)| x.to_bits() == y.to_bits()));
        }
        let (o, lse) = self.reference(&self.q, &self.k, &self.v);
        close("o", &got[0], &o, tolerance);
        for (got, want) in got[1].iter().zip(&lse) {
            let error = (f64::from(*got) - want).abs();
            assert!(f64::from(*got) == *want || error <= 1e-5 * want.abs().max(1.0));
        }
        got
    }

    /// Compares the gradients with central differences of the reference.
    fn check_gradients(&self, tolerance: f64) {
        let [_, _, d_q, d_k, d_v] = self.check(tolerance);
        let inputs = [&self.q, &self.k, &self.v];
        for (which, got) in [d_q, d_k, d_v].iter().enumerate() {
            let want: Vec<f64> = (0..inputs[which].len())
                .map(|i| {
                    let at = |step: f64| {
                        let mut moved = inputs.map(Clone::clone);
                        moved[which][i] += step;
                        self.objective(&moved[0], &moved[1], &moved[2])
                    };
                    (at(1e-4) - at(-1e-4)) / 2e-4
                })
                .collect();
            close(["d_q", "d_k", "d_v"][which], got, &want, tolerance);
        }
    }
}

fn close(name: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(1e-3f64, |a, b| a.max(b.abs()));
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= tolerance * largest, "{name}[{i}]: {got} instead of {want}");
    }
}

const EXACT: f64 = 2e-6;
const HALF: f64 = 2e-3;
const BRAIN: f64 = 1.5e-2;

#[test]
fn gradients_are_those_of_the_reference() {
    for masked in [Masked::No, Masked::Additive, Masked::Keep] {
        for sight in [ALL, (true, None), (true, Some(3)), (false, Some(3))] {
            for sizes in [[2, 4, 2, 6, 9, 5, 3], [1, 2, 2, 7, 4, 3, 4]] {
                case(sizes, Elem::F32, sight, masked).check_gradients(EXACT);
            }
        }
    }
}

#[test]
fn narrow_types_follow_the_reference() {
    for sight in [ALL, (true, None), (true, Some(2))] {
        for masked in [Masked::No, Masked::Additive] {
            let sizes = [1, 4, 2, 7, 9, 6, 5];
            case(sizes, Elem::BF16, sight, masked).check_gradients(BRAIN);
            case(sizes, Elem::F16, sight, masked).check_gradients(HALF);
        }
    }
}

#[test]
fn several_tiles() {
    for sight in [ALL, (true, None), (true, Some(150)), (false, Some(40))] {
        let sizes = [1, 2, 1, 300, 333, 16, 24];
        case(sizes, Elem::F32, sight, Masked::No).check(EXACT);
        case(sizes, Elem::BF16, sight, Masked::Keep).check(BRAIN);
    }
}

#[test]
fn dropped_weights_have_no_part_in_the_output() {
    for masked in [Masked::No, Masked::Additive] {
        for sight in [ALL, (true, None), (true, Some(3)), (false, Some(3))] {
            let sizes = [2, 4, 2, 6, 9, 5, 3];
            let case = |drawn| case(sizes, Elem::F32, sight, masked).with_dropout(drawn);
            case(true).check_gradients(EXACT);
            assert_eq!(case(true).run_all(2), case(false).run_all(1));
        }
        let sizes = [1, 4, 2, 7, 9, 6, 5];
        case(sizes, Elem::BF16, ALL, masked).with_dropout(true).check_gradients(BRAIN);
        let sizes = [1, 2, 1, 300, 333, 16, 24];
        case(sizes, Elem::F32, (true, Some(150)), masked).with_dropout(true).check(EXACT);
    }
}

#[test]
fn tiles_add_up_in_the_gradients() {
    // The gradient of a sum over tiles equals the sum of the gradients over query ranges.
    let sizes = [1, 2, 1, 290, 50, 8, 8];
    let whole = case(sizes, Elem::F32, ALL, Masked::No);
    let [.., d_k, d_v] = whole.run(1);
    let mut sums = [vec![0f64; d_k.len()], vec![0f64; d_v.len()]];
    for first in (0..290).step_by(29) {
        let mut part = case(sizes, Elem::F32, ALL, Masked::No);
        for (i, d) in part.d_o.iter_mut().enumerate() {
            let time = i / (2 * 8);
            if !(first..first + 29).contains(&time) {
                *d = 0.0;
            }
        }
        let [.., d_k, d_v] = part.run(1);
        for (sum, part) in sums.iter_mut().zip([d_k, d_v]) {
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += f64::from(x));
        }
    }
    close("d_k", &d_k, &sums[0], EXACT);
    close("d_v", &d_v, &sums[1], EXACT);
}

#[test]
fn rows_that_see_nothing_are_zero() {
    // Queries 4 and 5 are farther than the window from every key; the mask hides the last query.
    let case = case([1, 1, 1, 6, 3, 4, 4], Elem::F32, (true, Some(2)), Masked::Keep);
    let [o, lse, d_q, ..] = case.run(1);
    for i in [4, 5] {
        assert_eq!(lse[i], f32::NEG_INFINITY);
        assert!(o[i * 4..i * 4 + 4].iter().chain(&d_q[i * 4..i * 4 + 4]).all(|&x| x == 0.0));
    }
    assert!(lse[..4].iter().any(|x| x.is_finite()));
}

#[test]
fn no_keys_and_no_queries() {
    let none = case([1, 2, 1, 3, 0, 4, 4], Elem::BF16, ALL, Masked::No);
    let [o, lse, d_q, ..] = none.run(2);
    assert!(o.iter().chain(&d_q).all(|&x| x == 0.0));
    assert!(lse.iter().all(|&x| x == f32::NEG_INFINITY));
    let none = case([1, 2, 1, 0, 3, 4, 4], Elem::F32, ALL, Masked::No);
    let [.., d_k, d_v] = none.run(2);
    assert!(d_k.iter().chain(&d_v).all(|&x| x == 0.0));
}

#[test]
fn nan_stays_in_its_row() {
    let mut case = case([1, 1, 1, 5, 5, 4, 4], Elem::F32, ALL, Masked::No);
    case.q[2 * 4] = f64::NAN;
    let [o, lse, ..] = case.run(1);
    for i in 0..5 {
        assert_eq!(lse[i].is_nan(), i == 2);
        assert!(o[i * 4..i * 4 + 4].iter().all(|x| x.is_nan() == (i == 2)));
    }
}

#[test]
fn a_mask_may_have_any_strides() {
    for masked in [Masked::Additive, Masked::Keep] {
        let plain = case([2, 2, 1, 5, 7, 4, 4], Elem::F32, ALL, masked);
        let mut turned = case([2, 2, 1, 5, 7, 4, 4], Elem::F32, ALL, masked);
        // The same mask, stored [batch, key, query].
        for b in 0..2 {
            for i in 0..5 {
                for j in 0..7 {
                    let (to, from) = ((b * 7 + j) * 5 + i, (b * 5 + i) * 7 + j);
                    turned.additive[to] = plain.additive[from];
                    turned.keep[to] = plain.keep[from];
                }
            }
        }
        let mask = turned.shape.mask.as_mut().expect("the case is masked");
        (mask.query, mask.key) = (1, 5);
        assert_eq!(plain.run(1), turned.run(2));
        // One row of the mask for all batches and queries.
        let mask = turned.shape.mask.as_mut().expect("the case is masked");
        (mask.batch, mask.query, mask.key) = (0, 0, 1);
        let mut spread = case([2, 2, 1, 5, 7, 4, 4], Elem::F32, ALL, masked);
        for at in 0..70 {
            spread.additive[at] = turned.additive[at % 7];
            spread.keep[at] = turned.keep[at % 7];
        }
        assert_eq!(spread.run(1), turned.run(2));
    }
}

#[test]
fn the_gradient_of_a_mask_is_that_of_the_reference() {
    for (elem, tolerance) in [(Elem::F32, 2e-4), (Elem::BF16, BRAIN)] {
        let sizes = [2, 4, 2, 5, 6, 4, 3];
        let whole = case(sizes, elem, (true, Some(3)), Masked::Additive);
        let [.., d_mask] = whole.run_all(2);
        let want: Vec<f64> = (0..d_mask.len())
            .map(|i| {
                let at = |step: f32| {
                    let mut moved = case(sizes, elem, (true, Some(3)), Masked::Additive);
                    moved.additive[i] += step;
                    moved.objective(&moved.q, &moved.k, &moved.v)
                };
                if whole.additive[i].is_finite() { (at(0.004) - at(-0.004)) / 0.008 } else { 0.0 }
            })
            .collect();
        close("d_mask", &d_mask, &want, tolerance);
    }
}

#[test]
fn the_gradient_of_a_broadcast_mask_is_a_sum() {
    let sizes = [3, 4, 2, 5, 6, 4, 3];
    // Distances of batch, head, query and key in a mask that has only some of the axes.
    let dims = [3, 4, 5, 6];
    for kept in 0..16_usize {
        let mut strides = [0; 4];
        let mut len = 1;
        for axis in (0..4).rev().filter(|axis| kept >> axis & 1 == 1) {
            strides[axis] = len;
            len *= dims[axis];
        }
        let with = |strides: [usize; 4], additive: Vec<f32>| {
            let mut case = case(sizes, Elem::F32, ALL, Masked::Additive);
            let mask = case.shape.mask.as_mut().expect("the case is masked");
            let [batch, head, query, key] = strides.map(|s| s as isize);
            (mask.batch, mask.head, mask.query, mask.key) = (batch, head, query, key);
            case.additive = additive;
            let [.., d_mask] = case.run_all(3);
            d_mask
        };
        let small: Vec<f32> = (0..len).map(|i| (i % 7) as f32 * 0.2).collect();
        let place = |at: [usize; 4]| (0..4).map(|axis| at[axis] * strides[axis]).sum::<usize>();
        let every = (0..3 * 4 * 5 * 6).map(|i| [i / 120, i / 30 % 4, i / 6 % 5, i % 6]);
        let full = every.clone().map(|at| small[place(at)]).collect();
        let mut want = vec![0f64; len];
        for (at, d) in every.zip(with([120, 30, 6, 1], full)) {
            want[place(at)] += f64::from(d);
        }
        // A sum over all keys is zero but for rounding.
        for (got, want) in with(strides, small).into_iter().zip(want) {
            assert!((f64::from(got) - want).abs() < 1e-5, "{got} instead of {want}");
        }
    }
}

/// The last query of each batch is wholly masked by low numbers; only it has a gradient of the output.
#[test]
fn a_row_of_low_numbers_has_the_weights_of_its_parts() {
    let (low, third) = (-3e38, 1.0 / 3.0);
    for (elem, tolerance) in [(Elem::F32, EXACT), (Elem::BF16, BRAIN)] {
        for (mask, weights) in [
            ([-1e9; 5], [0.2; 5]),
            ([-1e9, -2e9, -1e9, -2e9, -1e9], [third, 0.0, third, 0.0, third]),
            ([low, low, low, low, f32::NEG_INFINITY], [0.25, 0.25, 0.25, 0.25, 0.0]),
            ([FILLED; 5], [0.2; 5]),
        ] {
            let mut case = case([1, 1, 1, 3, 5, 4, 4], elem, ALL, Masked::Additive);
            case.additive[10..].copy_from_slice(&mask);
            case.d_o[..8].fill(0.0);
            let [o, _, d_q, d_k, d_v, d_mask] = case.run_all(2);

            let (q, d_o) = (&case.q[8..], &case.d_o[8..]);
            let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
            let column = |x: &[f64], by: &[f64], c: usize| -> f64 {
                by.iter().zip(x.chunks(4)).map(|(by, x)| by * x[c]).sum()
            };
            let outer = |a: &[f64], b: &[f64]| -> Vec<f64> {
                a.iter().flat_map(|a| b.iter().map(move |b| a * b)).collect()
            };
            let d_p: Vec<f64> = case.v.chunks(4).map(|v| dot(v, d_o)).collect();
            let mean = dot(&weights, &d_p);
            let flows = if mask[0] == FILLED { 0.0 } else { 1.0 };
            let d_s: Vec<f64> =
                weights.iter().zip(&d_p).map(|(p, x)| flows * p * (x - mean)).collect();
            let scaled: Vec<f64> = d_s.iter().map(|d| d * f64::from(case.shape.scale)).collect();
            close("o", &o[8..], &[0, 1, 2, 3].map(|c| column(&case.v, &weights, c)), tolerance);
            close("d_q", &d_q[8..], &[0, 1, 2, 3].map(|c| column(&case.k, &scaled, c)), tolerance);
            close("d_k", &d_k, &outer(&scaled, q), tolerance);
            close("d_v", &d_v, &outer(&weights, d_o), tolerance);
            close("d_mask", &d_mask[10..], &d_s, tolerance);
        }
    }
}

/// Where `lse` is only somewhat coarse, as with BERT's −10,000, the weights still add up to 1.
#[test]
fn the_weights_of_a_low_row_add_up_to_one() {
    for low in [-300.0, -1e4, -1e6, -1e8] {
        let mut case = case([1, 1, 1, 3, 5, 4, 4], Elem::F32, ALL, Masked::Additive);
        case.additive[10..].fill(low);
        case.d_o[..8].fill(0.0);
        let [.., d_v] = case.run(1);
        for (c, d_o) in case.d_o[8..].iter().enumerate() {
            let sum: f64 = d_v.chunks(4).map(|d| f64::from(d[c])).sum();
            assert!((sum - d_o).abs() < 1e-6, "{low}: {sum} of {d_o}");
        }
    }
}
