//! Softmax and cross-entropy.

use super::super::EvalError;
use super::{assert_close, eval, eval1, f32s, f64s, i64s, noise, numeric_gradient, try_eval};
use crate::Op;
use crate::ops::{
    CrossEntropy, CrossEntropyGrad, LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad,
};

#[test]
fn softmax_sums_to_one_along_its_axis() {
    let x = f64s(&[2, 3, 4], &noise(3, 24));
    let y = eval1(Op::Softmax(Softmax { axis: 1 }), std::slice::from_ref(&x)).to_f64s();
    for (o, i) in (0..2).flat_map(|o| (0..4).map(move |i| (o, i))) {
        let sum: f64 = (0..3).map(|j| y[(o * 3 + j) * 4 + i]).sum();
        assert!((sum - 1.0).abs() < 1e-15);
    }
    let logs = eval1(Op::LogSoftmax(LogSoftmax { axis: 1 }), &[x]).to_f64s();
    assert_close(&logs, &y.iter().map(|y| y.ln()).collect::<Vec<_>>(), 1e-14);
}

#[test]
fn softmax_of_large_masked_and_empty_lanes() {
    let softmax = |dims: &[usize], x: &[f64]| {
        eval1(Op::Softmax(Softmax { axis: 0 }), &[f32s(dims, x)]).to_f64s()
    };
    assert_eq!(softmax(&[2], &[1e30, 1e30]), [0.5, 0.5]);
    assert_eq!(softmax(&[2], &[0.0, f64::NEG_INFINITY]), [1.0, 0.0]);
    assert!(softmax(&[2], &[f64::NEG_INFINITY; 2]).iter().all(|x| x.is_nan()));
    assert!(softmax(&[2], &[f64::NAN, 0.0]).iter().all(|x| x.is_nan()));
    assert!(softmax(&[0, 3], &[]).is_empty());
}

#[test]
fn softmax_gradients_agree_with_differences() {
    let (x, dy) = (f64s(&[2, 3, 2], &noise(4, 12)), f64s(&[2, 3, 2], &noise(5, 12)));
    for axis in [1, 2] {
        for (forward, backward) in [
            (Op::Softmax(Softmax { axis }), Op::SoftmaxGrad(SoftmaxGrad { axis })),
            (Op::LogSoftmax(LogSoftmax { axis }), Op::LogSoftmaxGrad(LogSoftmaxGrad { axis })),
        ] {
            let y = eval1(forward.clone(), std::slice::from_ref(&x));
            let found = eval1(backward, &[dy.clone(), y]).to_f64s();
            let expected = numeric_gradient(&forward, std::slice::from_ref(&x), 0, &dy);
            assert_close(&found, &expected, 1e-8);
        }
    }
}

#[test]
fn cross_entropy_of_uniform_logits_is_the_log_of_the_classes() {
    let op = || Op::CrossEntropy(CrossEntropy::ignoring(-100));
    let results = eval(op(), &[f64s(&[2, 4], &[3.0; 8]), i64s(&[2], &[0, -100])]);
    assert_close(&results[0].to_f64s(), &[4f64.ln(), 0.0], 1e-15);
    assert_close(&results[1].to_f64s(), &[3.0 + 4f64.ln(); 2], 1e-15);
    for label in [4, -1] {
        let result = try_eval(op(), &[f64s(&[1, 4], &[0.0; 4]), i64s(&[1], &[label])]);
        assert!(matches!(result, Err(EvalError::Index { size: 4, .. })));
    }
}

#[test]
fn cross_entropy_gradient_agrees_with_differences() {
    let logits = f64s(&[3, 4], &noise(6, 12));
    let labels = i64s(&[3], &[2, 9, 0]);
    let dy = f64s(&[3], &[0.5, 2.0, -1.5]);
    let forward = Op::CrossEntropy(CrossEntropy::ignoring(9));
    let inputs = [logits.clone(), labels.clone()];
    let lse = eval(forward.clone(), &inputs).remove(1);
    let backward = Op::CrossEntropyGrad(CrossEntropyGrad::ignoring(9));
    let found = eval1(backward, &[dy.clone(), logits, labels, lse]).to_f64s();
    assert_close(&found, &numeric_gradient(&forward, &inputs, 0, &dy), 1e-8);
    assert_eq!(found[4..8], [0.0; 4]);
}

#[test]
fn further_columns_of_padded_logits_take_no_part() {
    let (rows, classes, columns) = (3, 4, 6);
    let logits = noise(6, rows * classes);
    let padded: Vec<f64> =
        logits.chunks(classes).flat_map(|row| [row, &[9.0, -9.0]].concat()).collect();
    let (labels, dy) = (i64s(&[rows], &[2, -1, 3]), f64s(&[rows], &[0.5, 2.0, -1.5]));
    let of = |values: &[f64], columns: usize, classes: Option<usize>| {
        let logits = f64s(&[rows, columns], values);
        let forward = Op::CrossEntropy(CrossEntropy { ignore_index: -1, classes });
        let results = eval(forward, &[logits.clone(), labels.clone()]);
        let backward = Op::CrossEntropyGrad(CrossEntropyGrad { ignore_index: -1, classes });
        let inputs = [dy.clone(), logits, labels.clone(), results[1].clone()];
        (results, eval1(backward, &inputs).to_f64s())
    };
    let (plain, gradient) = of(&logits, classes, None);
    let (same, wide) = of(&padded, columns, Some(classes));
    assert_eq!(plain, same);
    let expected: Vec<f64> =
        gradient.chunks(classes).flat_map(|row| [row, &[0.0; 2]].concat()).collect();
    assert_eq!(wide, expected);
    // A column of padding is no class.
    let op = Op::CrossEntropy(CrossEntropy { ignore_index: -1, classes: Some(classes) });
    let result = try_eval(op, &[f64s(&[1, columns], &[0.0; 6]), i64s(&[1], &[4])]);
    assert!(matches!(result, Err(EvalError::Index { size: 4, .. })));
}
