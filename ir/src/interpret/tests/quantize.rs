//! Rounding to 8-bit floats.

use super::{eval, f32s};
use crate::ops::Quantize;
use crate::{DType, Op, Tensor};

fn quantize(to: DType, x: &[f64], recent: f64) -> (Vec<f64>, f64) {
    let x = Tensor::floats(DType::BF16, [x.len()], x.to_vec());
    let results = eval(Op::Quantize(Quantize { to, index: 1 }), &[x, f32s(&[2], &[9.0, recent])]);
    (results[0].to_f64s(), results[1].to_f64s()[0])
}

#[test]
fn the_scale_is_a_power_of_two_below_the_largest() {
    // 448 / 3 is scaled by 128: steps of 16 between 128 and 256, over 128.
    let (y, amax) = quantize(DType::F8E4M3, &[1.0, 1.0625, -1.09375, 3.0], 3.0);
    assert_eq!((y, amax), (vec![1.0, 1.0, -1.125, 3.0], 3.0));
    let (y, _) = quantize(DType::F8E5M2, &[1.0, 1.125, 1.375, 1.625], 57344.0);
    assert_eq!(y, [1.0, 1.0, 1.5, 1.5]);
}

#[test]
fn without_history_the_scale_is_that_of_the_values() {
    // 3 becomes 384, so that the least that is not zero is 2^-9 / 128.
    let least = 2f64.powi(-16);
    let x = [least, least / 2.0, -3.0];
    assert_eq!(quantize(DType::F8E4M3, &x, 0.0), (vec![least, 0.0, -3.0], 3.0));
    let alone = eval(
        Op::Quantize(Quantize { to: DType::F8E4M3, index: 1 }),
        &[Tensor::floats(DType::BF16, [3], x.to_vec())],
    );
    assert_eq!(alone[0].to_f64s(), [least, 0.0, -3.0]);
    assert_eq!(quantize(DType::F8E5M2, &[0.0, -0.0], 0.0), (vec![0.0, 0.0], 0.0));
}

#[test]
fn what_outgrows_its_history_saturates_and_what_is_not_finite_is_seen() {
    let x = [1000.0, -2.0, f64::INFINITY, f64::NAN];
    let (y, amax) = quantize(DType::F8E4M3, &x, 448.0);
    assert_eq!((&y[..2], amax), (&[448.0, -2.0][..], 1000.0));
    assert!(y[2].is_nan() && y[3].is_nan());
    let (y, _) = quantize(DType::F8E5M2, &x, 448.0);
    assert!(y[2].is_infinite() && y[3].is_nan());
}
