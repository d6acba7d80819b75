//! Column reductions: bias gradients and the gradients of norms' scales.

use crate::harness::{Body, COLS, Case, FLOATS, check, normal};
use frit_ir::ops::{
    BinaryFn, FusionKind, LayerNormGradAffine, Reduce, ReduceFn, RmsNormGradScale, SumTo,
};
use frit_ir::{DType, Op, Shape, Tensor};

fn case(name: String, body: frit_ir::Graph, inputs: Vec<Tensor>, expected: Vec<Vec<f64>>) -> Case {
    let kind = FusionKind::ColReduce;
    // Sums of 300 terms near 1 are off by the roundings of partial sums that reach twenty.
    Case { name, body, kind, inputs, expected, tolerance: 2e-6, floor: 20.0 }
}

fn column_sums(rows: usize, cols: usize, of: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    (0..cols).map(|c| (0..rows).map(|r| of(r, c)).sum()).collect()
}

#[test]
fn sums_over_leading_axes() {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        for cols in COLS {
            let rows = 3 * 100;
            let mut body = Body::new();
            let (x, g) = (body.input(dtype, &[3, 100, cols]), body.input(dtype, &[100, cols]));
            let product = body.one(Op::Binary(BinaryFn::Mul), &[x, g]);
            let to = SumTo { shape: Shape::from([cols]), dtype: Some(DType::F32) };
            let y = body.one(Op::SumTo(to), &[product]);
            let max = Reduce { f: ReduceFn::Max, axes: vec![0, 1], keep_dims: false };
            let z = body.one(Op::Reduce(max), &[x]);
            let inputs =
                vec![normal(dtype, &[3, 100, cols], 1, 1.0), normal(dtype, &[100, cols], 2, 1.0)];
            let (xs, gs) = (inputs[0].as_floats().unwrap(), inputs[1].as_floats().unwrap());
            let sums = column_sums(rows, cols, |r, c| xs[r * cols + c] * gs[r % 100 * cols + c]);
            let maxima = (0..cols)
                .map(|c| (0..rows).map(|r| xs[r * cols + c]).fold(f64::MIN, f64::max))
                .collect();
            cases.push(case(
                format!("sum {dtype} {cols}"),
                body.done(&[y, z]),
                inputs,
                vec![sums, maxima],
            ));
        }
    }
    check(&cases);
}

#[test]
fn gradients_of_scale_and_bias() {
    let (rows, mut cases) = (333, Vec::new());
    for cols in COLS {
        let mut body = Body::new();
        let (dy, x) =
            (body.input(DType::BF16, &[rows, cols]), body.input(DType::F32, &[rows, cols]));
        let (mean, rstd) = (body.input(DType::F32, &[rows]), body.input(DType::F32, &[rows]));
        let op = Op::LayerNormGradAffine(LayerNormGradAffine { axis: 1 });
        let mut results = body.all(op, &[dy, x, mean, rstd]);
        results.push(body.one(Op::RmsNormGradScale(RmsNormGradScale { axis: 1 }), &[dy, x, rstd]));
        let inputs = vec![
            normal(DType::BF16, &[rows, cols], 3, 1.0),
            normal(DType::F32, &[rows, cols], 4, 1.0),
            normal(DType::F32, &[rows], 5, 0.1),
            normal(DType::F32, &[rows], 6, 0.1),
        ];
        let v: Vec<&[f64]> = inputs.iter().map(|t| t.as_floats().unwrap()).collect();
        let at = |t: usize, r: usize, c: usize| v[t][r * cols + c];
        let scale = column_sums(rows, cols, |r, c| at(0, r, c) * (at(1, r, c) - v[2][r]) * v[3][r]);
        let bias = column_sums(rows, cols, |r, c| at(0, r, c));
        let rms = column_sums(rows, cols, |r, c| at(0, r, c) * at(1, r, c) * v[3][r]);
        let name = format!("affine {cols}");
        cases.push(case(name, body.done(&results), inputs, vec![scale, bias, rms]));
    }
    check(&cases);
}

#[test]
fn long_columns_keep_their_digits() {
    // A plain running f32 sum of these is off by more than 1e-5.
    let rows = 20_000;
    let mut body = Body::new();
    let x = body.input(DType::F32, &[rows, 2]);
    let op = Reduce { f: ReduceFn::Sum, axes: vec![0], keep_dims: true };
    let y = body.one(Op::Reduce(op), &[x]);
    let x = Tensor::floats(DType::F32, [rows, 2], vec![0.1; 2 * rows]);
    let expected = vec![vec![f64::from(0.1f32) * rows as f64; 2]];
    check(&[case("long".into(), body.done(&[y]), vec![x], expected)]);
}
