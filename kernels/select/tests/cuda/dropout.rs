//! Attention with dropout of weights, by masks that are stored and by those that the kernels draw.

use crate::check::{Body, body_of, check, check_body, random, selected};
use frit_ir::interpret::{Options, eval_op, run};
use frit_ir::ops::{Attention, AttentionGrad, RandomMask};
use frit_ir::plan::Launch;
use frit_ir::{DType, Graph, Op, Tensor, TensorType};

const KEEP: f64 = 0.75;

/// Checks both directions of an attention of `[b, h, t, d]` queries and `[b, g, s, d]` keys.
fn both(
    dtype: DType,
    [b, h, g, t, s, d]: [usize; 6],
    causal: bool,
    mask: Option<Tensor>,
    tolerance: f64,
) {
    let qkv = [
        random(dtype, &[b, h, t, d], 1),
        random(dtype, &[b, g, s, d], 2),
        random(dtype, &[b, g, s, d], 3),
    ];
    let dy = random(dtype, &[b, h, t, d], 4);
    let mask_grad = mask.as_ref().is_some_and(|mask| mask.dtype().is_float());
    let op = Attention { scale: 0.3, causal, window: None, keep: Some(KEEP) };
    let grad = Op::AttentionGrad(AttentionGrad::of(&op, mask_grad));
    let op = Op::Attention(op);

    let state = Tensor::ints(DType::I64, [5], vec![987_654_321_012, 1, 5, 2, 2]);
    let draw = Op::RandomMask(RandomMask { shape: [b, h, t, s].into(), keep: KEEP, id: 3 });
    let kept = eval_op(&draw, &[&state], Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let forward: Vec<Tensor> =
        qkv.iter().cloned().chain(mask.clone()).chain(kept.clone()).collect();
    check(op.clone(), &forward, tolerance);
    let results = eval_op(&op, &forward.iter().collect::<Vec<_>>(), Options::default());
    let results = results.unwrap_or_else(|e| panic!("{e}"));
    let before: Vec<Tensor> = [dy].into_iter().chain(qkv).chain(results).chain(mask).collect();
    let backward: Vec<Tensor> = before.iter().cloned().chain(kept).collect();
    check(grad.clone(), &backward, tolerance);

    // The mask drawn inside: the same results, and nothing is stored.
    let n = forward.len() - 1;
    for (op, operands) in [(op, &forward[..n]), (grad, &before[..])] {
        let operands: Vec<Tensor> = operands.iter().cloned().chain([state.clone()]).collect();
        let body = drawing(op, &draw, &operands.iter().map(|x| &x.ty).collect::<Vec<_>>());
        let sources = selected(&body).every_launch().into_iter().cloned().collect::<Vec<_>>();
        let is_mask = |l: &Launch| matches!(l, Launch::Source(kernel) if kernel.file == "random");
        assert!(!sources.iter().any(is_mask), "{sources:?}");
        check_body(&body, &operands, tolerance);
    }
}

/// A body of an attention whose last operand is drawn; the last operand of the body is the state.
fn drawing(op: Op, draw: &Op, operands: &[&TensorType]) -> Graph {
    let mut body = Body::new();
    let mut inputs: Vec<_> = operands.iter().map(|ty| body.input(ty)).collect();
    let state = inputs.pop().expect("a state");
    inputs.extend(body.add(draw.clone(), &[state]));
    let results = body.add(op, &inputs);
    body.outputs(&results)
}

/// Bodies of an attention and its gradient that draw a mask, for heads of size `d`.
pub(crate) fn drawing_bodies(dtype: DType, d: usize, causal: bool) -> [Graph; 2] {
    let q = TensorType::new(dtype, [2, 4, 256, d]);
    let (lse, state) =
        (TensorType::new(DType::F32, [2, 4, 256]), frit_ir::ops::random::state_type());
    let draw = Op::RandomMask(RandomMask { shape: [2, 4, 256, 256].into(), keep: 0.9, id: 1 });
    let op = Attention { scale: 0.1, causal, window: None, keep: Some(0.9) };
    let grad = Op::AttentionGrad(AttentionGrad::of(&op, false));
    [
        drawing(Op::Attention(op), &draw, &[&q, &q, &q, &state]),
        drawing(grad, &draw, &[&q, &q, &q, &q, &q, &lse, &state]),
    ]
}

#[test]
fn dropout_of_weights_on_tensor_cores() {
    for causal in [false, true] {
        both(DType::F16, [2, 2, 1, 37, 70, 16], causal, None, 4e-3);
        both(DType::BF16, [1, 2, 2, 70, 64, 24], causal, None, 3e-2);
        let keep = random(DType::Bool, &[2, 1, 1, 70], 6);
        both(DType::F16, [2, 4, 2, 37, 70, 20], causal, Some(keep), 4e-3);
    }
    // Gradients of keys and of values in kernels of their own.
    both(DType::F16, [1, 1, 1, 33, 35, 136], false, None, 4e-3);
}

#[test]
fn dropout_of_weights_without_tensor_cores() {
    both(DType::F32, [2, 2, 1, 37, 41, 24], true, None, 2e-5);
    let added = random(DType::F32, &[1, 4, 37, 70], 5);
    both(DType::F32, [2, 4, 2, 37, 70, 9], false, Some(added), 2e-4);
    let added = random(DType::F16, &[1, 2, 20, 33], 5);
    both(DType::F16, [2, 2, 2, 20, 33, 16], false, Some(added), 4e-3);
    both(DType::F64, [1, 2, 1, 9, 35, 7], true, None, 1e-10);
}

#[test]
fn what_is_kept_does_not_change_the_statistics() {
    let op = Attention { scale: 0.3, causal: false, window: None, keep: None };
    let ty = TensorType::new(DType::F32, [1, 1, 3, 4]);
    let kept = TensorType::new(DType::Bool, [1, 1, 3, 3]);
    let plain = body_of(Op::Attention(op.clone()), &[&ty; 3]);
    let dropped = Op::Attention(Attention { keep: Some(KEEP), ..op });
    let dropped = body_of(dropped, &[&ty, &ty, &ty, &kept]);
    let feeds = |names: usize| {
        let operand = |i: usize| match i {
            3 => Tensor::splat(kept.clone(), 0.0),
            _ => random(DType::F32, &[1, 1, 3, 4], i as u64),
        };
        (0..names).map(|i| (i.to_string(), operand(i))).collect()
    };
    let of = |body: &Graph, n: usize| {
        run(body, &feeds(n), Options::default()).unwrap_or_else(|e| panic!("{e}"))
    };
    let (plain, dropped) = (of(&plain, 3), of(&dropped, 4));
    assert_eq!(plain[1].1, dropped[1].1);
    assert!(dropped[0].1.to_f64s().iter().all(|y| *y == 0.0));
}
