//! Measurements, printed; run with `--ignored --nocapture throughput`.

use crate::harness::{Body, load};
use frit_codegen::{HostTarget, compile_host};
use frit_ir::ops::{
    BinaryFn, CrossEntropy, FusionKind, LayerNorm, LayerNormGradAffine, LayerNormGradInput,
    OptimizerKind, OptimizerStep, Softmax, UnaryFn,
};
use frit_ir::{DType, Graph, Op, Tensor, TensorType};
use std::ffi::c_void;
use std::time::Instant;

fn regions(dtype: DType, rows: usize, cols: usize) -> Vec<(&'static str, Graph, FusionKind)> {
    let f32s = DType::F32;
    let mut regions = Vec::new();
    let mut b = Body::new();
    let (x, bias) = (b.input(dtype, &[rows, cols]), b.input(dtype, &[cols]));
    let sum = b.one(Op::Binary(BinaryFn::Add), &[x, bias]);
    let y = b.one(Op::Unary(UnaryFn::GeluTanh), &[sum]);
    regions.push(("bias_gelu_tanh", b.done(&[y]), FusionKind::Pointwise));
    let mut b = Body::new();
    let (dy, x) = (b.input(dtype, &[rows, cols]), b.input(dtype, &[rows, cols]));
    let y = b.one(Op::Binary(BinaryFn::GeluTanhGrad), &[dy, x]);
    regions.push(("gelu_tanh_grad", b.done(&[y]), FusionKind::Pointwise));
    let mut b = Body::new();
    let (x, w, bias) =
        (b.input(dtype, &[rows, cols]), b.input(f32s, &[cols]), b.input(f32s, &[cols]));
    let y = b.all(Op::LayerNorm(LayerNorm { axis: 1, eps: 1e-5 }), &[x, w, bias]);
    regions.push(("layer_norm", b.done(&y), FusionKind::RowReduce));
    let mut b = Body::new();
    let (dy, x, w) =
        (b.input(dtype, &[rows, cols]), b.input(dtype, &[rows, cols]), b.input(f32s, &[cols]));
    let (mean, rstd) = (b.input(f32s, &[rows]), b.input(f32s, &[rows]));
    let op = Op::LayerNormGradInput(LayerNormGradInput { axis: 1 });
    let y = b.one(op, &[dy, x, w, mean, rstd]);
    regions.push(("layer_norm_grad_input", b.done(&[y]), FusionKind::RowReduce));
    let mut b = Body::new();
    let (dy, x) = (b.input(dtype, &[rows, cols]), b.input(dtype, &[rows, cols]));
    let (mean, rstd) = (b.input(f32s, &[rows]), b.input(f32s, &[rows]));
    let op = Op::LayerNormGradAffine(LayerNormGradAffine { axis: 1 });
    let y = b.all(op, &[dy, x, mean, rstd]);
    regions.push(("layer_norm_grad_affine", b.done(&y), FusionKind::ColReduce));
    let mut b = Body::new();
    let x = b.input(dtype, &[rows, cols]);
    let y = b.one(Op::Softmax(Softmax { axis: 1 }), &[x]);
    regions.push(("softmax", b.done(&[y]), FusionKind::RowReduce));
    let mut b = Body::new();
    let (x, labels) = (b.input(dtype, &[rows, cols]), b.input(DType::I64, &[rows]));
    let y = b.all(Op::CrossEntropy(CrossEntropy::ignoring(-100)), &[x, labels]);
    regions.push(("cross_entropy", b.done(&y), FusionKind::RowReduce));
    let mut b = Body::new();
    let kind = OptimizerKind::Adamw;
    let mut values: Vec<_> =
        [f32s, dtype, f32s, f32s].iter().map(|&d| b.input(d, &[rows, cols])).collect();
    values.extend((0..kind.n_scalars()).map(|_| b.input(f32s, &[])));
    let y = b.all(Op::OptimizerStep(OptimizerStep::of(kind)), &values);
    regions.push(("adamw", b.done(&y), FusionKind::Pointwise));
    regions
}

#[test]
#[ignore = "measures time"]
fn throughput() {
    for (dtype, rows, cols) in
        [(DType::F32, 8192, 768), (DType::BF16, 8192, 768), (DType::F32, 512, 50257)]
    {
        let regions = regions(dtype, rows, cols);
        let list: Vec<_> = regions.iter().map(|(s, b, k)| (*s, b, *k)).collect();
        let loaded = load(compile_host(&list, &HostTarget::native()).unwrap());
        for (k, meta) in loaded.kernels.iter().enumerate() {
            let in_place = meta.symbol == "adamw";
            let bytes = |types: &[TensorType]| types.iter().map(TensorType::bytes).sum::<usize>();
            let mut buffers: Vec<Vec<u8>> = meta
                .operands
                .iter()
                .chain(&meta.results)
                .map(|t| Tensor::splat(t.clone(), 0.5).to_bytes())
                .collect();
            let mut pointers: Vec<*mut c_void> =
                buffers.iter_mut().map(|b| b.as_mut_ptr().cast()).collect();
            if in_place {
                (pointers[12], pointers[13], pointers[14]) =
                    (pointers[0], pointers[2], pointers[3]);
            }
            let mut times: Vec<f64> = (0..9)
                .map(|_| {
                    let start = Instant::now();
                    loaded.call(k, &pointers, 0..meta.parallel_extent);
                    start.elapsed().as_secs_f64()
                })
                .collect();
            times.sort_by(f64::total_cmp);
            let moved = bytes(&meta.operands) + bytes(&meta.results);
            eprintln!(
                "{:24} {dtype}[{rows}, {cols}]: {:6.1} GB/s median, {:6.1} best",
                meta.symbol,
                moved as f64 / times[4] / 1e9,
                moved as f64 / times[0] / 1e9
            );
        }
    }
}

#[test]
#[ignore = "measures time"]
fn compile_time() {
    // As many distinct regions as a large model has, none equal.
    let all: Vec<_> = (0..5).flat_map(|i| regions(DType::BF16, 512, 768 + 64 * i)).collect();
    let names: Vec<String> = all.iter().enumerate().map(|(i, r)| format!("{}_{i}", r.0)).collect();
    let list: Vec<_> = all.iter().zip(&names).map(|((_, b, k), n)| (n.as_str(), b, *k)).collect();
    let start = Instant::now();
    let object = compile_host(&list, &HostTarget::native()).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("{} regions: {seconds:.2} s, {} bytes", list.len(), object.so_bytes.len());
    for (name, body, kind) in all.iter().take(8) {
        let start = Instant::now();
        compile_host(&[(*name, body, *kind)], &HostTarget::native()).unwrap();
        eprintln!("{name:24} alone: {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
    }
}
