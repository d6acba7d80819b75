//! Batch normalization, which stores the reciprocal of the standard deviation, and its gradient.

use super::{check, grid, place};
use crate::memory::{load, store};
use frit_ir::DType;
use frit_ir::plan::{Operation, OperationKind, Strided};

pub(super) fn run(operation: &Operation, tensors: &mut [Vec<u8>]) {
    check(operation);
    let shapes = &operation.tensors;
    let image = &shapes[0];
    let channels = image.sizes[1];
    assert!(matches!(image.dtype, DType::F16 | DType::BF16 | DType::F32), "{operation}");
    assert!((channels * image.dtype.size()).is_multiple_of(16), "{operation}");
    let (images, vectors): (Vec<&Strided>, _) = shapes.iter().partition(|t| t.sizes == image.sizes);
    assert!(images.iter().all(|t| *t == image), "{operation}");
    let vector = Strided::dense(DType::F32, &[1, channels, 1, 1]);
    assert!(vectors.into_iter().all(|t| *t == vector), "{operation}");
    assert_eq!(images.len(), if operation.kind == OperationKind::BatchNormGrad { 3 } else { 2 });
    for c in 0..channels {
        let of_channel = grid(&[&image.sizes[..1], &image.sizes[2..]].concat());
        let places: Vec<usize> =
            of_channel.iter().map(|i| place(image, [i[0], c], &i[1..])).collect();
        match operation.kind {
            OperationKind::BatchNorm { eps_bits } => {
                forward(f32::from_bits(eps_bits).into(), image.dtype, tensors, c, &places);
            }
            _ => gradient(image.dtype, tensors, c, &places),
        }
    }
}

/// x, scale, bias; y, mean, rstd.
fn forward(eps: f64, dtype: DType, tensors: &mut [Vec<u8>], c: usize, places: &[usize]) {
    let of = |tensors: &[Vec<u8>], i: usize| load(&tensors[i], DType::F32, c);
    let (scale, bias, n) = (of(tensors, 1), of(tensors, 2), places.len() as f64);
    let x: Vec<f64> = places.iter().map(|at| load(&tensors[0], dtype, *at)).collect();
    let mean = x.iter().sum::<f64>() / n;
    let rstd = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + eps).sqrt();
    for (at, x) in places.iter().zip(x) {
        store(&mut tensors[3], dtype, *at, (x - mean) * rstd * scale + bias);
    }
    store(&mut tensors[4], DType::F32, c, mean);
    store(&mut tensors[5], DType::F32, c, rstd);
}

/// dy, x, scale, mean, rstd; dx, dscale, dbias.
fn gradient(dtype: DType, tensors: &mut [Vec<u8>], c: usize, places: &[usize]) {
    let [scale, mean, rstd] = [2, 3, 4].map(|i: usize| load(&tensors[i], DType::F32, c));
    let n = places.len() as f64;
    let values =
        |i: usize| -> Vec<f64> { places.iter().map(|at| load(&tensors[i], dtype, *at)).collect() };
    let (dy, x) = (values(0), values(1));
    let normal: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
    let dbias = dy.iter().sum::<f64>();
    let dscale = dy.iter().zip(&normal).map(|(dy, x)| dy * x).sum::<f64>();
    for ((at, dy), x) in places.iter().zip(dy).zip(normal) {
        let dx = scale * rstd * (dy - dbias / n - x * dscale / n);
        store(&mut tensors[5], dtype, *at, dx);
    }
    store(&mut tensors[6], DType::F32, c, dscale);
    store(&mut tensors[7], DType::F32, c, dbias);
}
