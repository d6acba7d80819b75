//! Attention against its parts, and its gradient.

use super::{assert_close, bools, eval, eval1, f64s, noise, numeric_gradient};
use crate::ops::attention::FILLED;
use crate::ops::{Attention, AttentionGrad, BinaryFn, MatMul, Softmax};
use crate::{DType, Op, Tensor};

const SCALE: f64 = 0.7;

fn forward(causal: bool, window: Option<usize>) -> Op {
    Op::Attention(Attention { scale: SCALE, causal, window, keep: None })
}

/// q [2,2,3,4], k [2,1,3,4], v [2,1,3,2]: two query heads share a key head.
fn operands() -> Vec<Tensor> {
    vec![
        f64s(&[2, 2, 3, 4], &noise(1, 48)),
        f64s(&[2, 1, 3, 4], &noise(2, 24)),
        f64s(&[2, 1, 3, 2], &noise(3, 12)),
    ]
}

#[test]
fn equals_its_parts() {
    let inputs = operands();
    let matmul = |a: &Tensor, b: &Tensor, trans_b| {
        let op = MatMul { trans_b, ..MatMul::default() };
        eval1(Op::MatMul(op), &[a.clone(), b.clone()])
    };
    let scores = matmul(&inputs[0], &inputs[1], true);
    let scores = eval1(Op::Binary(BinaryFn::Mul), &[scores, f64s(&[], &[SCALE])]);
    let masked = [0.0, f64::NEG_INFINITY];
    let causal: Vec<f64> = (0..9).map(|i| masked[usize::from(i % 3 > i / 3)]).collect();
    let near: Vec<f64> =
        (0..9).map(|i: usize| masked[usize::from((i % 3).abs_diff(i / 3) > 1)]).collect();
    let band = causal.iter().zip(&near).map(|(a, b)| a + b).collect();
    for (is_causal, window, mask) in [
        (false, None, vec![0.0; 9]),
        (true, None, causal),
        (false, Some(2), near),
        (true, Some(2), band),
        (false, Some(3), vec![0.0; 9]),
    ] {
        let scores = eval1(Op::Binary(BinaryFn::Add), &[scores.clone(), f64s(&[3, 3], &mask)]);
        let weights = eval1(Op::Softmax(Softmax { axis: 3 }), &[scores]);
        let expected = matmul(&weights, &inputs[2], false);
        let y = eval(forward(is_causal, window), &inputs).remove(0);
        assert_eq!(y.shape().dims(), [2, 2, 3, 2]);
        assert_close(&y.to_f64s(), &expected.to_f64s(), 1e-14);
        // The same by an explicit mask.
        let with_mask = [inputs.clone(), vec![f64s(&[3, 3], &mask)]].concat();
        assert_close(&eval(forward(false, None), &with_mask)[0].to_f64s(), &y.to_f64s(), 1e-14);
    }
}

#[test]
fn dropped_weights_are_zero_and_the_others_larger() {
    let keep = 0.8;
    let op = Attention { scale: SCALE, causal: true, window: None, keep: Some(keep) };
    let kept: Vec<i64> = (0..36).map(|i| i64::from(i % 5 != 1)).collect();
    let kept_or_not: Vec<f64> = kept.iter().map(|k| *k as f64 / keep).collect();
    for mask in [None, Some(f64s(&[3, 1], &[0.3, -0.2, 0.9]))] {
        let inputs: Vec<Tensor> = operands().into_iter().chain(mask.clone()).collect();
        let y = |v: &Tensor| {
            let all = [&inputs[..2], std::slice::from_ref(v), &inputs[3..]].concat();
            eval(forward(true, None), &all).remove(0).to_f64s()
        };
        // The weights, one key at a time.
        let weights: Vec<Vec<f64>> = (0..3)
            .map(|key| {
                y(&f64s(
                    &[2, 1, 3, 1],
                    &[0, 1, 2, 3, 4, 5].map(|j| f64::from(u8::from(j % 3 == key))),
                ))
            })
            .collect();
        let all: Vec<Tensor> =
            inputs.iter().cloned().chain([bools(&[2, 2, 3, 3], &kept)]).collect();
        let results = eval(Op::Attention(op.clone()), &all);
        let (found, v) = (results[0].to_f64s(), inputs[2].to_f64s());
        for (row, y) in found.chunks(2).enumerate() {
            for (column, y) in y.iter().enumerate() {
                let of = |key: usize| {
                    let value = v[(row / 6 * 3 + key) * 2 + column];
                    weights[key][row] * kept_or_not[row * 3 + key] * value
                };
                assert_close(&[*y], &[of(0) + of(1) + of(2)], 1e-14);
            }
        }
        let lse = eval(forward(true, None), &inputs).remove(1);
        assert_eq!(results[1], lse);
        let dy = f64s(&[2, 2, 3, 2], &noise(4, 24));
        let grad = Op::AttentionGrad(AttentionGrad::of(&op, mask.is_some()));
        let (rest, last) = all.split_at(3);
        let of_grad = [std::slice::from_ref(&dy), rest, &results[..], last].concat();
        for (i, found) in eval(grad, &of_grad).iter().enumerate() {
            let expected = numeric_gradient(&Op::Attention(op.clone()), &all, i, &dy);
            assert_close(&found.to_f64s(), &expected, 1e-8);
        }
    }
}

#[test]
fn a_row_without_keys_is_zero() {
    let mut inputs = operands();
    inputs.push(bools(&[3, 1], &[1, 0, 1]));
    let results = eval(forward(false, None), &inputs);
    for row in 0..12 {
        let y = &results[0].to_f64s()[row * 2..row * 2 + 2];
        let lse = results[1].to_f64s()[row];
        assert_eq!(y == [0.0, 0.0], row % 3 == 1);
        assert_eq!(lse == f64::NEG_INFINITY, row % 3 == 1);
    }
}

#[test]
fn gradient_agrees_with_differences() {
    let dy = f64s(&[2, 2, 3, 2], &noise(4, 24));
    let some = bools(&[1, 2, 3, 3], &[1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0]);
    let added = f64s(&[3], &[0.3, -0.2, f64::NEG_INFINITY]);
    for (causal, window, mask) in [
        (false, None, None),
        (true, None, None),
        (false, Some(2), None),
        (true, Some(1), None),
        (false, None, Some(some)),
        (true, Some(2), Some(added)),
    ] {
        let inputs = [operands(), mask.clone().into_iter().collect()].concat();
        let [y, lse] = &eval(forward(causal, window), &inputs)[..] else { panic!("two results") };
        let mut of_grad = vec![dy.clone()];
        of_grad.extend(operands());
        of_grad.extend([y.clone(), lse.clone()]);
        of_grad.extend(mask);
        let found = eval(
            Op::AttentionGrad(AttentionGrad {
                scale: SCALE,
                causal,
                window,
                keep: None,
                mask_grad: false,
            }),
            &of_grad,
        );
        for (i, found) in found.iter().enumerate() {
            let expected = numeric_gradient(&forward(causal, window), &inputs, i, &dy);
            assert_close(&found.to_f64s(), &expected, 1e-8);
        }
    }
}

/// The gradients of two queries of one head, with the second wholly masked by low numbers, from the weights that its
/// keys then have.
#[test]
fn a_row_of_low_numbers_has_the_weights_of_its_parts() {
    let (n, d) = (3, 2);
    let third = 1.0 / 3.0;
    for (low, weights) in [
        ([-1e9; 3], [third; 3]),
        ([-1e9, -2e9, -1e9], [0.5, 0.0, 0.5]),
        ([f64::from(f32::MIN); 3], [third; 3]),
        ([FILLED; 3], [third; 3]),
    ] {
        let f32s = |dims: &[usize], values: &[f64]| Tensor::floats(DType::F32, dims, values.into());
        let q = f32s(&[1, 1, 2, d], &noise(1, 4));
        let [k, v] = [2, 3].map(|seed| f32s(&[1, 1, n, d], &noise(seed, 6)));
        let dy = f32s(&[1, 1, 2, d], &[0.0, 0.0, 0.75, -0.5]);
        let mask = f32s(&[2, n], &[&[0.0, low[1], 0.0], &low[..]].concat());
        let operands = [q.clone(), k.clone(), v.clone(), mask.clone()];
        let [y, lse] = &eval(forward(false, None), &operands)[..] else { panic!("two results") };
        let op = AttentionGrad {
            scale: SCALE,
            causal: false,
            window: None,
            keep: None,
            mask_grad: true,
        };
        let operands = [&dy, &q, &k, &v, y, lse, &mask].map(Clone::clone);
        let found = eval(Op::AttentionGrad(op), &operands);

        let [q, k, v, dy] = [q, k, v, dy].map(|x| x.to_f64s());
        let (q, dy) = (&q[d..], &dy[d..]);
        let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        let dp: Vec<f64> = v.chunks(d).map(|v| dot(v, dy)).collect();
        let delta = dot(&weights, &dp);
        let flows = f64::from(u8::from(low[0] != FILLED));
        let ds: Vec<f64> = weights.iter().zip(&dp).map(|(p, x)| flows * p * (x - delta)).collect();
        let outer = |a: &[f64], b: &[f64], by: f64| -> Vec<f64> {
            a.iter().flat_map(|a| b.iter().map(move |b| by * a * b)).collect()
        };
        let row = |c: usize| ds.iter().zip(k.chunks(d)).map(|(s, k)| SCALE * s * k[c]).sum();
        let dq = [0.0, 0.0, row(0), row(1)];
        assert_close(
            &y.to_f64s()[d..],
            &[0, 1].map(|c| weights.iter().zip(v.chunks(d)).map(|(p, v)| p * v[c]).sum()),
            1e-6,
        );
        assert_close(&found[0].to_f64s(), &dq, 1e-6);
        assert_close(&found[1].to_f64s(), &outer(&ds, q, SCALE), 1e-6);
        assert_close(&found[2].to_f64s(), &outer(&weights, dy, 1.0), 1e-6);
        assert_close(&found[3].to_f64s()[n..], &ds, 1e-6);
    }
}
