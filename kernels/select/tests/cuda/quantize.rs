//! Quantization to 8-bit floats, as values and as GEMM operands, against the interpreter.

use crate::check::{Body, check_body, random};
use frit_ir::ops::{BinaryFn, MatMul, Quantize, Reshape, UnaryFn};
use frit_ir::plan::Launch;
use frit_ir::{DType, Graph, Op, Tensor, TensorType, ValueId};

const FORMATS: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];

fn floats(dtype: DType, values: &[f64]) -> Tensor {
    Tensor::floats(dtype, [values.len()], values.to_vec())
}

fn quantize(
    body: &mut Body,
    to: DType,
    index: usize,
    x: ValueId,
    recent: Option<ValueId>,
) -> Vec<ValueId> {
    let inputs: Vec<ValueId> = [x].into_iter().chain(recent).collect();
    body.add(Op::Quantize(Quantize { to, index }), &inputs)
}

#[test]
fn values_are_those_of_the_interpreter_bit_by_bit() {
    // Every significand of bf16 near the ends of both formats, halves between neighbors, and NaN.
    let mut values: Vec<f64> = Vec::new();
    for exponent in [-40, -17, -16, -15, -14, -10, -9, -7, -6, -1, 0, 8, 14, 15, 16, 100] {
        values.extend((128..256).map(|m| f64::from(m) * f64::from(exponent - 7).exp2()));
    }
    values.extend(values.clone().iter().map(|x| -x));
    values.extend([0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e38, 1e-38]);
    for to in FORMATS {
        for dtype in [DType::BF16, DType::F32] {
            let x = floats(dtype, &values);
            // No history, one of equal amax, one much smaller, one much larger, none in the second row.
            for recent in
                [None, Some(1.0), Some(448.0), Some(448.5), Some(1e-30), Some(3e38), Some(0.0)]
            {
                let mut body = Body::new();
                let input = body.input(&x.ty);
                let mut operands = vec![x.clone()];
                let recent = recent.map(|recent| {
                    operands.push(floats(DType::F32, &[7.0, recent]));
                    body.input(&operands[1].ty)
                });
                let results = quantize(&mut body, to, 1, input, recent);
                check_body(&body.outputs(&results), &operands, 0.0);
            }
        }
    }
    let zeros = Tensor::splat(TensorType::new(DType::BF16, [40]), 0.0);
    let mut body = Body::new();
    let input = body.input(&zeros.ty);
    let results = quantize(&mut body, FORMATS[0], 0, input, None);
    check_body(&body.outputs(&results), &[zeros], 0.0);
}

/// A GEMM of quantized operands, in e4m3 and `to`, and the amax of operand `amax`; optionally a bias and GELU.
pub(crate) fn matmul(op: MatMul, to: DType, amax: usize, bias: bool, gelu: bool) -> Graph {
    let [m, n, k] = [32, 80, 48];
    let mut body = Body::new();
    let low = |dims: [usize; 2]| TensorType::new(DType::BF16, dims);
    let a = body.input(&low(if op.trans_a { [k, m] } else { [m, k] }));
    let b = body.input(&low(if op.trans_b { [n, k] } else { [k, n] }));
    let recent = body.input(&TensorType::new(DType::F32, [2]));
    let dtype = op.out.unwrap_or(DType::BF16);
    let vector = body.input(&TensorType::new(dtype, [n]));
    let a = quantize(&mut body, DType::F8E4M3, 0, a, Some(recent));
    let b = quantize(&mut body, to, 1, b, Some(recent));
    let mut last = body.add(Op::MatMul(op), &[a[0], b[0]])[0];
    let mut results = vec![[a[1], b[1]][amax]];
    if bias {
        last = body.add(Op::Binary(BinaryFn::Add), &[last, vector])[0];
    }
    if gelu {
        results.push(last);
        let view = body.add(Op::Reshape(Reshape { shape: [2, m / 2, n].into() }), &[last])[0];
        last = body.add(Op::Unary(UnaryFn::GeluTanh), &[view])[0];
    }
    results.push(last);
    body.outputs(&results)
}

fn operands(body: &Graph, recent: [f64; 2]) -> Vec<Tensor> {
    let leaves = body.nodes().map(|(_, n)| n).filter(|n| n.op.is_leaf());
    let types: Vec<TensorType> = leaves.map(|n| body.ty(n.outputs[0]).clone()).collect();
    let mut operands: Vec<Tensor> =
        types.iter().enumerate().map(|(i, t)| random(t.dtype, t.shape.dims(), i as u64)).collect();
    operands[2] = floats(DType::F32, &recent);
    operands
}

#[test]
fn gemms_read_8_bit_floats_in_every_layout() {
    for (trans_a, trans_b) in [(false, false), (false, true), (true, false), (true, true)] {
        for (to, out) in [(FORMATS[0], None), (FORMATS[1], Some(DType::F32))] {
            let op = MatMul { trans_a, trans_b, out };
            for (recent, amax) in [([0.0, 0.0], 0), ([1.5, 0.0], 1), ([9.0, 1e-3], 1)] {
                let body = matmul(op.clone(), to, amax, false, false);
                let launches = frit_select::cuda(&body, frit_select::Options::default())
                    .expect("launches")
                    .entry
                    .launches;
                let matmuls: Vec<_> = launches
                    .iter()
                    .filter_map(|l| if let Launch::Gemm(gemm) = l { Some(gemm) } else { None })
                    .collect();
                assert_eq!(matmuls.len(), 1);
                assert_eq!([matmuls[0].a.dtype, matmuls[0].b.dtype], [DType::F8E4M3, to]);
                check_body(&body, &operands(&body, recent), 1e-2);
            }
        }
    }
}

#[test]
fn a_bias_and_gelu_stay_epilogues() {
    for gelu in [false, true] {
        let body = matmul(MatMul::default(), FORMATS[0], 0, true, gelu);
        check_body(&body, &operands(&body, [2.0, 2.0]), 2e-2);
    }
}

#[test]
fn what_the_library_does_not_multiply_has_no_launches() {
    let wide = MatMul { out: Some(DType::F32), ..MatMul::default() };
    assert!(
        frit_select::cuda(
            &matmul(wide, FORMATS[0], 0, true, false),
            frit_select::Options::default()
        )
        .is_none(),
        "a bias of f32"
    );
    let mut body = Body::new();
    let x = body.input(&TensorType::new(DType::BF16, [16, 16]));
    let y = body.input(&TensorType::new(DType::BF16, [16, 24]));
    let a = quantize(&mut body, FORMATS[1], 0, x, None)[0];
    let b = quantize(&mut body, FORMATS[1], 1, x, None)[0];
    let mut other = Body(body.0.clone());
    let both = body.add(Op::MatMul(MatMul::default()), &[a, b])[0];
    assert!(
        frit_select::cuda(&body.outputs(&[both]), frit_select::Options::default()).is_none(),
        "e5m2 on both sides"
    );
    let c = quantize(&mut other, FORMATS[0], 1, y, None)[0];
    let narrow = other.add(Op::MatMul(MatMul::default()), &[a, c])[0];
    assert!(
        frit_select::cuda(&other.outputs(&[narrow]), frit_select::Options::default()).is_none(),
        "24 columns"
    );
}
