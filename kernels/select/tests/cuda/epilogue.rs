//! GEMMs with GELU, its gradient, and bias gradients, with and without the library's epilogues.

use crate::check::{Body, check_body, random, selected, selected_with_kernels};
use expect_test::expect;
use frit_ir::ops::{BinaryFn, MatMul, Reshape, SumTo, UnaryFn};
use frit_ir::plan::{CandidateName, Epilogue, Launch};
use frit_ir::{DType, Graph, Op, TensorType, ValueId};

const TYPES: [(DType, f64); 3] = [(DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 3e-2)];

fn inputs(body: &mut Body, types: &[(DType, &[usize])]) -> Vec<ValueId> {
    types.iter().map(|(dtype, dims)| body.input(&TensorType::new(*dtype, *dims))).collect()
}

fn add1(body: &mut Body, op: Op, operands: &[ValueId]) -> ValueId {
    body.add(op, operands)[0]
}

fn reshape(body: &mut Body, v: ValueId, dims: &[usize]) -> ValueId {
    add1(body, Op::Reshape(Reshape { shape: dims.into() }), &[v])
}

fn sum(body: &mut Body, v: ValueId, n: usize, dtype: Option<DType>) -> ValueId {
    add1(body, Op::SumTo(SumTo { shape: [n].into(), dtype }), &[v])
}

fn matmul(trans_a: bool, trans_b: bool, out: Option<DType>) -> Op {
    Op::MatMul(MatMul { trans_a, trans_b, out })
}

/// Runs a body on random operands; it is computed by a GEMM with this epilogue, or by a GEMM without and generated
/// kernels, of which there are so many.
fn check(body: &Graph, tolerance: f64, is_epilogue: fn(&Epilogue) -> bool, kernels: usize) {
    let selected = selected(body);
    let [Launch::Choice(candidates)] = &selected.launches[..] else {
        panic!("{:?}", selected.launches)
    };
    let [fused, unfused] = &candidates[..] else { panic!("{candidates:?}") };
    let [Launch::Gemm(gemm)] = &fused.launches[..] else { panic!("{candidates:?}") };
    assert!(is_epilogue(&gemm.epilogue), "{:?}", gemm.epilogue);
    assert_eq!([fused.name, unfused.name], [CandidateName::Cublaslt, CandidateName::Unfused]);
    let [Launch::Gemm(plain), rest @ ..] = &unfused.launches[..] else { panic!("{unfused:?}") };
    assert!(matches!(plain.epilogue, Epilogue::None | Epilogue::Add { bias: None, .. }));
    assert!(rest.iter().all(|l| matches!(l, Launch::Generated(_))), "{rest:?}");
    assert_eq!(rest.len(), kernels, "{rest:?}");
    let leaves = body.nodes().map(|(_, n)| n).filter(|n| n.op.is_leaf());
    let types: Vec<TensorType> = leaves.map(|n| body.ty(n.outputs[0]).clone()).collect();
    let operands: Vec<_> =
        types.iter().enumerate().map(|(i, t)| random(t.dtype, t.shape.dims(), i as u64)).collect();
    check_body(body, &operands, tolerance);
}

/// x · w (+ b), reshaped to three axes, then GELU; with GELU's input as a result if `before`.
pub(crate) fn forward(dtype: DType, bias: bool, before: bool, n: usize) -> Graph {
    let mut body = Body::new();
    let v = inputs(&mut body, &[(dtype, &[6, 5]), (dtype, &[5, n]), (dtype, &[n])]);
    let mut last = add1(&mut body, matmul(false, false, None), &v[..2]);
    if bias {
        last = add1(&mut body, Op::Binary(BinaryFn::Add), &[last, v[2]]);
    }
    let view = reshape(&mut body, last, &[2, 3, n]);
    let y = add1(&mut body, Op::Unary(UnaryFn::GeluTanh), &[view]);
    if before { body.outputs(&[last, y]) } else { body.outputs(&[y]) }
}

#[test]
fn gelu_with_and_without_a_bias_and_what_is_before_it() {
    for (dtype, tolerance) in TYPES {
        for (bias, before) in [(true, true), (true, false), (false, true), (false, false)] {
            let body = forward(dtype, bias, before, 8);
            check(&body, tolerance, |e| matches!(e, Epilogue::Gelu { .. }), 1);
        }
    }
}

/// g · wᵀ, reshaped, times the derivative of GELU at h, and the sum of its rows in the dtype `rows`, if any.
fn backward(dtype: DType, rows: Option<DType>) -> Graph {
    let mut body = Body::new();
    let v = inputs(&mut body, &[(dtype, &[6, 5]), (dtype, &[8, 5]), (dtype, &[2, 3, 8])]);
    let m = add1(&mut body, matmul(false, true, None), &v[..2]);
    let view = reshape(&mut body, m, &[2, 3, 8]);
    let d = add1(&mut body, Op::Binary(BinaryFn::GeluTanhGrad), &[view, v[2]]);
    let Some(rows) = rows else { return body.outputs(&[d]) };
    let sums = sum(&mut body, d, 8, Some(rows));
    body.outputs(&[d, sums])
}

#[test]
fn the_gradient_of_gelu_and_of_a_bias_before_it() {
    for (dtype, tolerance) in TYPES {
        let is_grad = |e: &Epilogue| matches!(e, Epilogue::GeluGrad { .. });
        check(&backward(dtype, None), tolerance, is_grad, 1);
        check(&backward(dtype, Some(dtype)), 6.0 * tolerance, is_grad, 2);
    }
}

/// The gradient of a weight, [n, m] if the summed operand comes `first`, and of its bias.
fn weight(dtype: DType, out: DType, first: bool) -> Graph {
    let mut body = Body::new();
    let v = inputs(&mut body, &[(dtype, &[6, 5]), (dtype, &[2, 3, 7])]);
    let sums = sum(&mut body, v[1], 7, Some(out));
    let g = reshape(&mut body, v[1], &[6, 7]);
    let operands = if first { [g, v[0]] } else { [v[0], g] };
    let w = add1(&mut body, matmul(true, false, Some(out)), &operands);
    body.outputs(&[sums, w])
}

/// x · w (+ b), viewed with three axes, and another tensor that is added to it.
fn with_sum(dtype: DType, out: DType, bias: bool) -> Graph {
    let mut body = Body::new();
    let types = [(dtype, &[6, 5][..]), (dtype, &[5, 7]), (out, &[7]), (out, &[2, 3, 7])];
    let v = inputs(&mut body, &types);
    let mut last = add1(&mut body, matmul(false, false, Some(out)), &v[..2]);
    let add = Op::Binary(BinaryFn::Add);
    if bias {
        last = add1(&mut body, add.clone(), &[last, v[2]]);
    }
    let view = reshape(&mut body, last, &[2, 3, 7]);
    let y = add1(&mut body, add, &[v[3], view]);
    body.outputs(&[y])
}

#[test]
fn another_tensor_is_added_with_and_without_a_bias() {
    for (dtype, tolerance) in TYPES {
        for out in [dtype, DType::F32] {
            let biased = with_sum(dtype, out, true);
            check(&biased, tolerance, |e| matches!(e, Epilogue::Add { bias: Some(_), .. }), 1);
            // Every GPU has a GEMM that adds a matrix.
            let plain = with_sum(dtype, out, false);
            let selected = selected(&plain);
            let [Launch::Gemm(gemm)] = &selected.launches[..] else { panic!("{selected:?}") };
            assert!(matches!(gemm.epilogue, Epilogue::Add { bias: None, .. }));
            let leaves = plain.nodes().map(|(_, n)| n).filter(|n| n.op.is_leaf());
            let types = leaves.map(|n| plain.ty(n.outputs[0]).clone());
            let value = |(i, t): (usize, TensorType)| random(t.dtype, t.shape.dims(), i as u64);
            let operands: Vec<_> = types.enumerate().map(value).collect();
            check_body(&plain, &operands, tolerance);
        }
    }
}

#[test]
fn the_gradient_of_a_bias_comes_with_that_of_its_weight() {
    for (dtype, tolerance) in TYPES {
        for out in [dtype, DType::F32] {
            let [sum_a, sum_b] = [true, false].map(|first| weight(dtype, out, first));
            check(&sum_a, 6.0 * tolerance, |e| matches!(e, Epilogue::SumA(_)), 1);
            check(&sum_b, 6.0 * tolerance, |e| matches!(e, Epilogue::SumB(_)), 1);
        }
    }
}

#[test]
fn what_the_library_has_not_is_no_epilogue() {
    for body in [
        // Rows that are not a multiple of eight elements.
        forward(DType::BF16, true, true, 12),
        // Sums in another type than the result.
        backward(DType::BF16, Some(DType::F32)),
        forward(DType::F64, true, true, 8),
    ] {
        assert!(frit_select::cuda(&body, frit_select::Options::default()).is_none(), "{body}");
    }
    // The sum runs over the axis that the matmul keeps.
    let mut body = Body::new();
    let v = inputs(&mut body, &[(DType::BF16, &[6, 6])]);
    let sums = sum(&mut body, v[0], 6, Some(DType::F32));
    let w = add1(&mut body, matmul(false, true, Some(DType::F32)), &[v[0], v[0]]);
    let launches = selected(&body.outputs(&[sums, w])).launches;
    assert!(launches.iter().all(|l| !matches!(l, Launch::Choice(_))));
}

/// The candidates of a body with their launches, and the kernels that are generated for it.
fn text(body: &Graph) -> String {
    let selected = selected_with_kernels(body);
    let mut text = String::new();
    for launch in &selected.entry.launches {
        let Launch::Choice(candidates) = launch else { panic!("{launch:?}") };
        for candidate in candidates {
            text += &format!("{}\n", candidate.name.word());
            for launch in &candidate.launches {
                text += &match launch {
                    Launch::Gemm(g) => format!(
                        "  gemm {}x{}x{} of {} and {} to {}, {:?}\n",
                        g.m, g.n, g.k, g.a.at, g.b.at, g.d.at, g.epilogue
                    ),
                    Launch::Generated(g) => {
                        let words = |all: &[frit_ir::plan::Pointer]| {
                            all.iter().map(|p| p.to_string()).collect::<Vec<_>>().join(", ")
                        };
                        let (reads, writes) = (words(&g.reads), words(&g.writes));
                        format!("  kernel {} of {reads} to {writes}\n", g.kernel)
                    }
                    other => panic!("{other:?}"),
                };
            }
        }
    }
    for (body, kind) in &selected.generated {
        text += &format!("{}: {body}", kind.name());
    }
    text
}

#[test]
fn an_epilogue_or_generated_kernels_as_text() {
    let both =
        text(&forward(DType::BF16, true, true, 8)) + &text(&backward(DType::F32, Some(DType::F32)));
    expect![[r#"
        cublaslt
          gemm 6x8x5 of read 0 and read 1 to write 1, Gelu { bias: Some(Read(2, 0)), before: Some(Write(0, 0)) }
        unfused
          gemm 6x8x5 of read 0 and read 1 to write 0, None
          kernel 0 of write 0, read 2 to write 0, write 1
        pointwise: graph @kernel world=1 {
          %0: bf16[6, 8] = input {name = "0", ty = {"dtype":"bf16","shape":[6,8]}}
          %1: bf16[8] = input {name = "1", ty = {"dtype":"bf16","shape":[8]}}
          %2: bf16[6, 8] = add %0, %1
          %3: bf16[6, 8] = gelu_tanh %2
          return %2 as "0"
          return %3 as "1"
        }
        cublaslt
          gemm 6x8x5 of read 0 and read 1 to write 0, GeluGrad { before: Read(2, 0), rows: Some(Write(1, 0)) }
        unfused
          gemm 6x8x5 of read 0 and read 1 to write 0, None
          kernel 0 of write 0, read 2 to write 0
          kernel 1 of write 0 to write 1
        pointwise: graph @kernel world=1 {
          %0: f32[6, 8] = input {name = "0", ty = {"dtype":"f32","shape":[6,8]}}
          %1: f32[6, 8] = input {name = "1", ty = {"dtype":"f32","shape":[6,8]}}
          %2: f32[6, 8] = gelu_tanh_grad %0, %1
          return %2 as "0"
        }
        col_reduce: graph @kernel world=1 {
          %0: f32[6, 8] = input {name = "0", ty = {"dtype":"f32","shape":[6,8]}}
          %1: f32[8] = sum_to %0 {shape = [8]}
          return %1 as "0"
        }
    "#]].assert_eq(&both);
}
