//! Structure of the generated code: wide vectors, no library calls, deterministic bytes.

use crate::harness::{Body, load, normal};
use frit_codegen::{HostTarget, Unit, compile_host, host_assembly, region_metadata};
use frit_ir::ops::{
    BinaryFn, CrossEntropy, CrossEntropyGrad, FusionKind, LayerNorm, Reduce, ReduceFn, Softmax,
    Transpose, UnaryFn,
};
use frit_ir::{DType, Graph, Op, Tensor, TensorType};

fn bias_gelu(dtype: DType, f: UnaryFn) -> Graph {
    let mut body = Body::new();
    let (x, b) = (body.input(dtype, &[64, 768]), body.input(dtype, &[768]));
    let sum = body.one(Op::Binary(BinaryFn::Add), &[x, b]);
    let y = body.one(Op::Unary(f), &[sum]);
    body.done(&[y])
}

fn softmax(dtype: DType) -> Graph {
    let mut body = Body::new();
    let x = body.input(dtype, &[64, 768]);
    let y = body.one(Op::Softmax(Softmax { axis: 1 }), &[x]);
    body.done(&[y])
}

fn layer_norm(dtype: DType) -> Graph {
    let mut body = Body::new();
    let (x, w) = (body.input(dtype, &[64, 768]), body.input(DType::F32, &[768]));
    let y = body.all(Op::LayerNorm(LayerNorm { axis: 1, eps: 1e-5 }), &[x, w]);
    body.done(&y)
}

/// The gradient of logits, and the loss.
fn loss_and_gradient() -> Graph {
    let mut body = Body::new();
    let (x, labels) = (body.input(DType::F32, &[64, 768]), body.input(DType::I64, &[64]));
    let dy = body.input(DType::F32, &[64]);
    let op = CrossEntropy { ignore_index: -100, classes: Some(765) };
    let loss = body.all(Op::CrossEntropy(op), &[x, labels]);
    let op = CrossEntropyGrad { ignore_index: -100, classes: Some(765) };
    let dx = body.one(Op::CrossEntropyGrad(op), &[dy, x, labels, loss[1]]);
    body.done(&[dx, loss[0]])
}

fn count(assembly: &str, what: &str) -> usize {
    assembly.lines().filter(|l| l.contains(what)).count()
}

#[test]
fn avx512_code_is_wide_and_calls_nothing() {
    let target = HostTarget::new(
        "znver4",
        "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512bf16",
    );
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (name, body, kind) in [
            ("gelu_tanh", bias_gelu(dtype, UnaryFn::GeluTanh), FusionKind::Pointwise),
            ("gelu", bias_gelu(dtype, UnaryFn::Gelu), FusionKind::Pointwise),
            ("log1p", bias_gelu(dtype, UnaryFn::Log1p), FusionKind::Pointwise),
            ("sin", bias_gelu(dtype, UnaryFn::Sin), FusionKind::Pointwise),
            ("softmax", softmax(dtype), FusionKind::RowReduce),
            ("layer_norm", layer_norm(dtype), FusionKind::RowReduce),
        ] {
            let assembly = host_assembly("k", &body, kind, &target).unwrap();
            assert!(count(&assembly, "zmm") > 20, "{name} {dtype}:\n{assembly}");
            for forbidden in ["call", "vpinsrw", "vpextrw"] {
                assert_eq!(count(&assembly, forbidden), 0, "{name} {dtype} has {forbidden}");
            }
        }
    }
    let assembly =
        host_assembly("k", &softmax(DType::BF16), FusionKind::RowReduce, &target).unwrap();
    assert!(assembly.contains("vcvtneps2bf16"));
}

#[test]
fn avx2_code_calls_nothing() {
    let target = HostTarget::new("x86-64-v3", "+avx2,+fma,+f16c,+bmi2");
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let body = bias_gelu(dtype, UnaryFn::Tanh);
        let assembly = host_assembly("k", &body, FusionKind::Pointwise, &target).unwrap();
        assert!(count(&assembly, "ymm") > 20 && count(&assembly, "call") == 0, "{dtype}");
    }
}

#[test]
fn equal_regions_give_equal_bytes() {
    let (a, b) = (bias_gelu(DType::BF16, UnaryFn::Gelu), softmax(DType::F32));
    let regions: Vec<(String, &Graph, FusionKind)> = (0..8)
        .flat_map(|i| {
            [
                (format!("a{i}"), &a, FusionKind::Pointwise),
                (format!("b{i}"), &b, FusionKind::RowReduce),
            ]
        })
        .collect();
    let regions: Vec<_> = regions.iter().map(|(s, b, k)| (s.as_str(), *b, *k)).collect();
    let compile = || compile_host(&regions, &HostTarget::native()).unwrap().so_bytes;
    assert!(compile() == compile());
}

#[test]
fn shared_values_are_evaluated_once() {
    // Without sharing this would be 2⁶⁰ additions.
    for kind in [FusionKind::Pointwise, FusionKind::RowReduce, FusionKind::ColReduce] {
        let mut body = Body::new();
        let mut x = body.input(DType::F32, &[4, 40]);
        for _ in 0..60 {
            x = body.one(Op::Binary(BinaryFn::Add), &[x, x]);
        }
        let axis = match kind {
            FusionKind::Pointwise => None,
            FusionKind::RowReduce => Some(1),
            _ => Some(0),
        };
        if let Some(axis) = axis {
            let op = Reduce { f: ReduceFn::Sum, axes: vec![axis], keep_dims: false };
            x = body.one(Op::Reduce(op), &[x]);
        }
        let body = body.done(&[x]);
        let assembly = host_assembly("k", &body, kind, &HostTarget::native()).unwrap();
        assert!(assembly.lines().count() < 3000, "{}", kind.name());
    }
}

#[test]
fn metadata_says_how_to_call_and_what_may_share_memory() {
    let meta = region_metadata("k", &softmax(DType::F32), FusionKind::RowReduce).unwrap();
    assert_eq!((meta.unit, meta.parallel_extent, meta.grain), (Unit::Rows, 64, 22));
    assert_eq!(meta.in_place, [(0, 0)]);
    // The bias is read again for every row, and the sum has another shape.
    let gelu = bias_gelu(DType::F32, UnaryFn::Gelu);
    let meta = region_metadata("k", &gelu, FusionKind::Pointwise).unwrap();
    assert_eq!((meta.unit, meta.in_place), (Unit::Rows, vec![(0, 0)]));
    assert_eq!(meta.parallel_extent, 64);
    let norm = region_metadata("k", &layer_norm(DType::BF16), FusionKind::RowReduce).unwrap();
    assert_eq!(norm.in_place, [(0, 0)]);
    // A transposed operand is read elsewhere than the result is written.
    let mut body = Body::new();
    let x = body.input(DType::F32, &[8, 8]);
    let t = body.one(Op::Transpose(Transpose { perm: vec![1, 0] }), &[x]);
    let y = body.one(Op::Binary(BinaryFn::Add), &[x, t]);
    let meta = region_metadata("k", &body.done(&[y]), FusionKind::Pointwise).unwrap();
    assert_eq!(meta.in_place, []);
}

#[test]
fn results_may_overwrite_operands() {
    for (body, kind) in [
        (bias_gelu(DType::F32, UnaryFn::GeluTanh), FusionKind::Pointwise),
        (softmax(DType::F32), FusionKind::RowReduce),
        (loss_and_gradient(), FusionKind::RowReduce),
    ] {
        let loaded = load(compile_host(&[("k", &body, kind)], &HostTarget::native()).unwrap());
        let meta = &loaded.kernels[0];
        assert!(meta.in_place.contains(&(0, 0)));
        let types = meta.operands.iter().enumerate();
        let value = |(i, t): (usize, &TensorType)| match t.dtype {
            DType::I64 => {
                Tensor::ints(t.dtype, t.shape.clone(), (0..64).map(|row| 9 * row).collect())
            }
            _ => normal(t.dtype, t.shape.dims(), 7 + i as u64, 1.0),
        };
        let inputs: Vec<Tensor> = types.map(value).collect();
        let expected: Vec<Vec<u8>> = loaded.run(0, &inputs).iter().map(Tensor::to_bytes).collect();
        let mut buffers: Vec<Vec<u8>> = inputs.iter().map(Tensor::to_bytes).collect();
        buffers.extend(expected[1..].iter().map(|bytes| vec![0; bytes.len()]));
        let mut pointers: Vec<*mut std::ffi::c_void> =
            buffers.iter_mut().map(|b| b.as_mut_ptr().cast()).collect();
        pointers.insert(inputs.len(), pointers[0]);
        loaded.call(0, &pointers, 0..meta.parallel_extent);
        assert!(buffers[0] == expected[0] && buffers[inputs.len()..] == expected[1..]);
    }
}
