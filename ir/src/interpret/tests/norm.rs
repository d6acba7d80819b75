//! Normalization and its gradients.

use super::{assert_close, eval, eval1, f32s, f64s, noise, numeric_gradient};
use crate::ops::{
    LayerNorm, LayerNormGradAffine, LayerNormGradInput, RmsNorm, RmsNormGradInput, RmsNormGradScale,
};
use crate::{DType, Op, Tensor};

#[test]
fn layer_norm_by_hand() {
    let op = Op::LayerNorm(LayerNorm { axis: 1, eps: 0.0 });
    let inputs = [f32s(&[1, 2], &[1.0, 3.0]), f32s(&[2], &[2.0, 10.0]), f32s(&[2], &[0.5, 0.0])];
    let results = eval(op.clone(), &inputs);
    assert_eq!(results[0], f32s(&[1, 2], &[-1.5, 10.0]));
    assert_eq!(results[1], f32s(&[1], &[2.0]));
    assert_eq!(results[2], f32s(&[1], &[1.0]));
    assert_eq!(eval(op, &inputs[..2])[0], f32s(&[1, 2], &[-2.0, 10.0]));
}

#[test]
fn rms_norm_by_hand() {
    let op = Op::RmsNorm(RmsNorm { axis: 0, eps: 0.5 });
    let results = eval(op, &[f32s(&[2], &[1.0, 2.0]), f32s(&[2], &[1.0, 3.0])]);
    let rstd = 1.0 / 3f64.sqrt();
    assert_close(&results[0].to_f64s(), &[rstd, 6.0 * rstd], 1e-7);
    assert_close(&results[1].to_f64s(), &[rstd], 1e-7);
}

#[test]
fn statistics_of_low_precision_are_f32() {
    let x = Tensor::floats(DType::BF16, [1, 2], vec![1.0, 1.0078125]);
    let op = Op::LayerNorm(LayerNorm { axis: 1, eps: 1e-5 });
    let results = eval(op, &[x, f32s(&[2], &[1.0, 1.0])]);
    assert_eq!(results[0].dtype(), DType::BF16);
    assert_eq!(results[1], f32s(&[1], &[1.00390625]));
}

#[test]
fn rows_of_nothing() {
    let op = Op::LayerNorm(LayerNorm { axis: 1, eps: 1e-5 });
    let results = eval(op.clone(), &[f32s(&[2, 0], &[]), f32s(&[0], &[])]);
    assert!(results[0].to_f64s().is_empty() && results[1].to_f64s().iter().all(|x| x.is_nan()));
    assert!(eval(op, &[f32s(&[0, 2], &[]), f32s(&[2], &[1.0; 2])])[1].to_f64s().is_empty());
}

#[test]
fn layer_norm_gradients_agree_with_differences() {
    let (x, dy) = (f64s(&[3, 2, 2], &noise(1, 12)), f64s(&[3, 2, 2], &noise(2, 12)));
    let (scale, bias) = (f64s(&[2, 2], &noise(3, 4)), f64s(&[2, 2], &noise(4, 4)));
    let forward = Op::LayerNorm(LayerNorm { axis: 1, eps: 1e-3 });
    let inputs = [x.clone(), scale.clone(), bias];
    let [_, mean, rstd] = &eval(forward.clone(), &inputs)[..] else { panic!("three results") };
    let dx = eval1(
        Op::LayerNormGradInput(LayerNormGradInput { axis: 1 }),
        &[dy.clone(), x.clone(), scale, mean.clone(), rstd.clone()],
    );
    assert_close(&dx.to_f64s(), &numeric_gradient(&forward, &inputs, 0, &dy), 1e-7);
    let affine = eval(
        Op::LayerNormGradAffine(LayerNormGradAffine { axis: 1 }),
        &[dy.clone(), x, mean.clone(), rstd.clone()],
    );
    for (i, found) in affine.iter().enumerate() {
        let expected = numeric_gradient(&forward, &inputs, 1 + i, &dy);
        assert_close(&found.to_f64s(), &expected, 1e-8);
    }
}

#[test]
fn rms_norm_gradients_agree_with_differences() {
    let (x, dy) = (f64s(&[3, 4], &noise(5, 12)), f64s(&[3, 4], &noise(6, 12)));
    let scale = f64s(&[4], &noise(7, 4));
    let forward = Op::RmsNorm(RmsNorm { axis: 1, eps: 1e-3 });
    let inputs = [x.clone(), scale.clone()];
    let rstd = eval(forward.clone(), &inputs).remove(1);
    let dx = eval1(
        Op::RmsNormGradInput(RmsNormGradInput { axis: 1 }),
        &[dy.clone(), x.clone(), scale, rstd.clone()],
    );
    assert_close(&dx.to_f64s(), &numeric_gradient(&forward, &inputs, 0, &dy), 1e-7);
    let grad = Op::RmsNormGradScale(RmsNormGradScale { axis: 1 });
    let dscale = eval1(grad, &[dy.clone(), x, rstd]);
    assert_close(&dscale.to_f64s(), &numeric_gradient(&forward, &inputs, 1, &dy), 1e-8);
}
