//! Bodies that return other values than those for which launches are selected: an operand, a value twice, what a fused launch does
//! not keep; and images of which only some lie channels last.

use crate::check::{Body, check_body, random};
use frit_ir::ops::*;
use frit_ir::{DType, Graph, Op, Tensor, TensorType, ValueId};

const ADD: Op = Op::Binary(BinaryFn::Add);
const GELU: Op = Op::Unary(UnaryFn::GeluTanh);

/// Adds operations behind operands of a body, and returns what may be its results.
type Build<'a> = &'a dyn Fn(&mut Body, &[ValueId]) -> Vec<ValueId>;

fn operands(types: &[(DType, &[usize])]) -> Vec<Tensor> {
    let value = |(i, (dtype, dims)): (usize, &(DType, &[usize]))| random(*dtype, dims, i as u64);
    types.iter().enumerate().map(value).collect()
}

/// The body that returns these of the values.
fn returning(operands: &[Tensor], build: Build<'_>, results: &[usize]) -> Graph {
    let mut body = Body::new();
    let v: Vec<ValueId> = operands.iter().map(|t| body.input(&t.ty)).collect();
    let values = build(&mut body, &v);
    body.outputs(&results.iter().map(|i| values[*i]).collect::<Vec<_>>())
}

/// For each list of results, what is selected computes them; if nothing is, the list is one of those that have no launches.
fn check_all(types: &[(DType, &[usize])], build: Build<'_>, some: &[&[usize]], none: &[&[usize]]) {
    let operands = operands(types);
    for results in some {
        let tolerance = if types[0].0 == DType::F32 { 1e-4 } else { 3e-2 };
        check_body(&returning(&operands, build, results), &operands, tolerance);
    }
    for results in none {
        let body = returning(&operands, build, results);
        assert!(frit_select::cuda(&body, frit_select::Options::default()).is_none(), "{body}");
    }
}

fn matmul(trans_a: bool) -> Op {
    Op::MatMul(MatMul { trans_a, trans_b: false, out: None })
}

fn reshape(body: &mut Body, v: ValueId, dims: &[usize]) -> ValueId {
    body.add(Op::Reshape(Reshape { shape: dims.into() }), &[v])[0]
}

#[test]
fn gemms_with_what_is_added() {
    let build = |body: &mut Body, v: &[ValueId]| {
        let product = body.add(matmul(false), &v[..2])[0];
        let y = body.add(ADD, &[product, v[2]])[0];
        let view = reshape(body, y, &[2, 3, 8]);
        vec![y, product, v[0], view]
    };
    let types = |added| [(DType::F32, &[6, 5][..]), (DType::F32, &[5, 8]), (DType::F32, added)];
    // Where the product is a result, only generated code adds to it; epilogues write no reshaped results.
    let some: &[&[usize]] = &[&[0], &[2], &[0, 0], &[0, 2]];
    let none: &[&[usize]] = &[&[1], &[1, 0], &[3, 1]];
    let reshaped: &[&[usize]] = &[&[3], &[3, 0]];
    check_all(&types(&[8]), &build, &[some, reshaped].concat(), none);
    check_all(&types(&[6, 8]), &build, some, &[none, reshaped].concat());
}

#[test]
fn gemms_with_gelu() {
    let types = [(DType::F32, &[6, 5][..]), (DType::F32, &[5, 8]), (DType::F32, &[8])];
    let build = |body: &mut Body, v: &[ValueId]| {
        let product = body.add(matmul(false), &v[..2])[0];
        let sum = body.add(ADD, &[product, v[2]])[0];
        let view = reshape(body, sum, &[2, 3, 8]);
        let y = body.add(GELU, &[view])[0];
        let last = reshape(body, y, &[48]);
        vec![y, sum, v[0], product, view, last]
    };
    // Only epilogues compute GELU.
    let none: &[&[usize]] = &[&[3], &[0, 3], &[4], &[0, 4], &[5], &[0, 5]];
    check_all(&types, &build, &[&[0], &[0, 0], &[1, 0], &[1, 0, 1], &[0, 2]], none);
}

#[test]
fn gradients_of_gelu_and_of_a_bias() {
    // The derivative is of another shape than the product: their product has more elements than both.
    let types = [(DType::F32, &[8, 5][..]), (DType::F32, &[5, 8]), (DType::F32, &[1, 64])];
    let crossed = |body: &mut Body, v: &[ValueId]| {
        let product = body.add(matmul(false), &v[..2])[0];
        let view = reshape(body, product, &[64, 1]);
        body.add(Op::Binary(BinaryFn::GeluTanhGrad), &[view, v[2]])
    };
    check_all(&types, &crossed, &[], &[&[0]]);
    let sum = |body: &mut Body, v: ValueId, dims: &[usize]| {
        body.add(Op::SumTo(SumTo { shape: dims.into(), dtype: None }), &[v])[0]
    };
    let types = [(DType::F32, &[8, 5][..]), (DType::F32, &[5, 8]), (DType::F32, &[8, 8])];
    let with_sums = |body: &mut Body, v: &[ValueId]| {
        let product = body.add(matmul(false), &v[..2])[0];
        let d = body.add(Op::Binary(BinaryFn::GeluTanhGrad), &[product, v[2]])[0];
        vec![d, sum(body, d, &[8])]
    };
    check_all(&types, &with_sums, &[&[0, 1], &[1, 0], &[1], &[1, 1, 0]], &[]);
    // As many sums, but along the other axis.
    let of_rows = |body: &mut Body, v: &[ValueId]| {
        let product = body.add(matmul(false), &v[..2])[0];
        let d = body.add(Op::Binary(BinaryFn::GeluTanhGrad), &[product, v[2]])[0];
        vec![d, sum(body, d, &[8, 1])]
    };
    check_all(&types, &of_rows, &[], &[&[0, 1]]);
    let types = [(DType::F32, &[7, 5][..]), (DType::F32, &[7, 7])];
    for shape in [&[7][..], &[7, 1]] {
        let weight = |body: &mut Body, v: &[ValueId]| {
            let product = body.add(matmul(true), v)[0];
            vec![product, sum(body, v[1], shape), v[1]]
        };
        check_all(&types, &weight, &[&[0, 1], &[1, 0], &[0], &[1], &[1, 0, 1], &[2, 0, 1]], &[]);
    }
}

#[test]
fn gemms_of_quantized_operands() {
    let types = [(DType::BF16, &[32, 48][..]), (DType::BF16, &[48, 16]), (DType::F32, &[1])];
    let quantize = |body: &mut Body, x: &[ValueId]| {
        body.add(Op::Quantize(Quantize { to: DType::F8E4M3, index: 0 }), x)
    };
    let build = |body: &mut Body, v: &[ValueId]| {
        let [a, b] = [0, 1].map(|i| quantize(body, &[v[i], v[2]]));
        let y = body.add(matmul(false), &[a[0], b[0]])[0];
        let view = reshape(body, y, &[512]);
        vec![y, a[1], b[1], a[0], v[0], view]
    };
    // Nothing computes the rounded values beside the GEMM.
    let none: &[&[usize]] = &[&[3], &[0, 3], &[5], &[0, 5]];
    check_all(&types, &build, &[&[0, 1, 2], &[0], &[2, 0], &[0, 0], &[1, 0, 1], &[0, 4]], none);
}

#[test]
fn attention_between_layout_operations() {
    let dims: &[usize] = &[1, 2, 5, 16];
    let types = [(DType::BF16, dims); 3];
    let build = |body: &mut Body, v: &[ValueId]| {
        let op = Attention { scale: 0.25, causal: true, window: None, keep: None };
        let y = body.add(Op::Attention(op), v);
        let rows = || Op::Transpose(Transpose { perm: vec![0, 2, 1, 3] });
        vec![body.add(rows(), &y[..1])[0], y[1], y[0], v[0], body.add(rows(), &v[..1])[0]]
    };
    let every: &[&[usize]] =
        &[&[0, 1], &[1, 0], &[0, 0, 1], &[0, 1, 1], &[2, 0, 1], &[0, 3, 1], &[4, 1], &[0, 1, 4]];
    check_all(&types, &build, every, &[]);
}

#[test]
fn batch_normalization_with_what_is_around_it() {
    let relu = Op::Unary(UnaryFn::Relu);
    let norm = Op::BatchNorm(BatchNorm { eps: 1e-5 });
    let build = |body: &mut Body, v: &[ValueId]| {
        let n = body.add(norm.clone(), &v[..3]);
        vec![body.add(relu.clone(), &n[..1])[0], n[1], n[2], n[0], v[0]]
    };
    let types = [(DType::F32, &[2, 3, 4, 4][..]), (DType::F32, &[3]), (DType::F32, &[3])];
    // Only regions compute the ReLU.
    let none: &[&[usize]] = &[&[0, 1, 2, 3], &[0, 1, 2, 0], &[4, 1, 2], &[0, 1, 1]];
    check_all(&types, &build, &[&[0, 1, 2], &[2, 1, 0]], none);
    let last = |body: &mut Body, v: &[ValueId]| {
        let x = body.add(Op::Transpose(Transpose::channels_first(4)), &v[..1])[0];
        let n = body.add(norm.clone(), &[x, v[1], v[2]]);
        let y = body.add(Op::Transpose(Transpose::channels_last(4)), &n[..1])[0];
        vec![y, n[1], n[2], n[0], v[0], x]
    };
    let types = [(DType::F32, &[2, 4, 4, 3][..]), (DType::F32, &[3]), (DType::F32, &[3])];
    let every: &[&[usize]] =
        &[&[0, 1, 2], &[0, 1, 2, 3], &[0, 1, 2, 0], &[4, 1, 2], &[0, 1, 1], &[5, 0, 1, 2]];
    check_all(&types, &last, every, &[]);
}

/// Operations on images of which only some are transposed, in every combination: where one is not, nothing may take it for one that
/// lies channels last.
#[test]
fn images_that_are_not_transposed() {
    let window = || Window { strides: vec![2, 2], ..Window::plain(2) };
    let taps = || vec![2, 2];
    let (image, pooled, weight) = ([2, 3, 4, 6], [2, 3, 2, 3], [3, 3, 2, 2]);
    let out = None;
    let size = vec![4, 6];
    let all: [(Op, &[[usize; 4]]); 7] = [
        (Op::MaxPool(MaxPool { window: window(), taps: taps() }), &[image]),
        (Op::SumPool(SumPool { window: window(), taps: taps() }), &[image]),
        (Op::MaxPoolGrad(MaxPoolGrad { window: window(), taps: taps() }), &[pooled, image]),
        (
            Op::SumPoolGrad(SumPoolGrad { window: window(), taps: taps(), size: size.clone() }),
            &[pooled],
        ),
        (Op::Conv(Conv { window: window(), groups: 1, out }), &[image, weight]),
        (
            Op::ConvGradInput(ConvGradInput { window: window(), groups: 1, size, out }),
            &[pooled, weight],
        ),
        (
            Op::ConvGradWeight(ConvGradWeight { window: window(), groups: 1, taps: taps(), out }),
            &[pooled, image],
        ),
    ];
    for (op, shapes) in all {
        for lying in 0..1 << (shapes.len() + 1) {
            let is_last = |i: usize| lying >> i & 1 == 1;
            let mut body = Body::new();
            let (mut operands, mut inputs) = (vec![], vec![]);
            for (i, shape) in shapes.iter().enumerate() {
                let [n, c, h, w] = *shape;
                let held = if is_last(i) { [n, h, w, c] } else { *shape };
                operands.push(random(DType::F32, &held, i as u64));
                let input = body.input(&TensorType::new(DType::F32, held));
                inputs.push(match is_last(i) {
                    true => body.add(Op::Transpose(Transpose::channels_first(4)), &[input])[0],
                    false => input,
                });
            }
            let mut y = body.add(op.clone(), &inputs)[0];
            if is_last(shapes.len()) {
                y = body.add(Op::Transpose(Transpose::channels_last(4)), &[y])[0];
            }
            check_body(&body.outputs(&[y]), &operands, 1e-4);
        }
    }
}
