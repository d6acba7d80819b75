//! Regions that reduce rows and columns: all gradients of a norm and the bias gradient of the projection before it.

use crate::cuda::{assembles, shape};
use crate::harness::{Body, compare, normal};
use crate::ptx_machine;
use frit_codegen::{compile_cuda, supported, supported_on_cuda};
use frit_ir::interpret::{Options, run};
use frit_ir::ops::{
    BinaryFn, Cast, FusionKind, LayerNormGradAffine, LayerNormGradInput, Reduce, ReduceFn,
    RmsNormGradInput, RmsNormGradScale, Softmax, SumTo,
};
use frit_ir::{DType, Graph, Op, Shape, Tensor};

const KIND: FusionKind = FusionKind::RowColReduce;

/// The gradients of a norm of `x`, the gradient of `x` with that of the residual, also rounded, and its sum over the rows.
fn norm_gradients(dtype: DType, rows: usize, cols: usize, is_rms: bool) -> Graph {
    let mut body = Body::new();
    let dy = body.input(dtype, &[rows, cols]);
    let (x, scale) = (body.input(DType::F32, &[rows, cols]), body.input(DType::F32, &[cols]));
    let (mean, rstd) = (body.input(DType::F32, &[rows]), body.input(DType::F32, &[rows]));
    let residual = body.input(DType::F32, &[rows, cols]);
    let dy = body.one(Op::Cast(Cast { to: DType::F32 }), &[dy]);
    let mut results = Vec::new();
    let dx = if is_rms {
        let op = Op::RmsNormGradScale(RmsNormGradScale { axis: 1 });
        results.extend(body.all(op, &[dy, x, rstd]));
        body.one(Op::RmsNormGradInput(RmsNormGradInput { axis: 1 }), &[dy, x, scale, rstd])
    } else {
        let op = Op::LayerNormGradAffine(LayerNormGradAffine { axis: 1 });
        results.extend(body.all(op, &[dy, x, mean, rstd]));
        let op = Op::LayerNormGradInput(LayerNormGradInput { axis: 1 });
        body.one(op, &[dy, x, scale, mean, rstd])
    };
    let sum = body.one(Op::Binary(BinaryFn::Add), &[dx, residual]);
    let rounded = body.one(Op::Cast(Cast { to: DType::BF16 }), &[sum]);
    let to = SumTo { shape: Shape::from([cols]), dtype: None };
    let bias = body.one(Op::SumTo(to), &[sum]);
    results.extend([sum, rounded, bias]);
    body.done(&results)
}

/// The operands' names and values.
fn operands(body: &Graph) -> Vec<(String, Tensor)> {
    let inputs = body.nodes().filter_map(|(_, n)| match &n.op {
        Op::Input(input) => Some(input),
        _ => None,
    });
    let value = |(i, input): (usize, &frit_ir::ops::Input)| {
        let t = normal(input.ty.dtype, input.ty.shape.dims(), 40 + i as u64, 1.0);
        (input.name.clone(), t)
    };
    inputs.enumerate().map(value).collect()
}

/// Runs the region on the PTX machine and compares with the interpreter.
fn check(what: &str, body: &Graph, rows: usize) {
    let feeds = operands(body);
    let inputs: Vec<Tensor> = feeds.iter().map(|(_, t)| t.clone()).collect();
    let expected = run(body, &feeds.into_iter().collect(), Options::EXACT).unwrap();
    let module = compile_cuda(&[("k", body, KIND)], "sm_80").unwrap();
    let found = ptx_machine::run(&module, &inputs);
    for (r, (found, (_, expected))) in found.iter().zip(&expected).enumerate() {
        // Sums of many rows cancel.
        let floor = 10.0 * (rows as f64).sqrt();
        compare(&format!("{what}, result {r}"), found, &expected.to_f64s(), 2e-6, floor);
    }
}

#[test]
fn norm_gradients_agree_with_the_interpreter() {
    // A row per block and partial vectors; rows that share a warp and a block, evenly and not; one and several rows of
    // each block; several vectors of a thread; fewer rows than one block takes.
    for (rows, cols) in
        [(100, 768), (37, 253), (600, 24), (512, 64), (333, 40), (5, 4104), (9, 1600), (3, 16)]
    {
        for (dtype, is_rms) in
            [(DType::F32, false), (DType::BF16, false), (DType::F16, true), (DType::BF16, true)]
        {
            let body = norm_gradients(dtype, rows, cols, is_rms);
            check(&format!("{dtype} {rows} {cols} {is_rms}"), &body, rows);
        }
    }
}

#[test]
fn as_many_columns_as_rows() {
    let n = 24;
    check("square", &norm_gradients(DType::F32, n, n, false), n);
    // One result of the square per row and one per column.
    let mut body = Body::new();
    let x = body.input(DType::F32, &[n, n]);
    let y = body.one(Op::Softmax(Softmax { axis: 1 }), &[x]);
    let mut reduce = |axis| {
        let op = Reduce { f: ReduceFn::Mean, axes: vec![axis], keep_dims: false };
        body.one(Op::Reduce(op), &[y])
    };
    let results = [reduce(0), reduce(1)];
    check("square softmax", &body.done(&results), n);
}

#[test]
fn a_block_sums_many_rows() {
    let launches = |rows, cols| {
        let body = norm_gradients(DType::BF16, rows, cols, false);
        let module = compile_cuda(&[("k", &body, KIND)], "sm_90").unwrap();
        (shape(&module), module.kernels[0].scratch_bytes)
    };
    // Four blocks for each multiprocessor.
    let scratch = 3 * 528 * 768 * 4;
    assert_eq!(launches(32768, 768), (vec![(128, [528, 1]), (512, [12, 1])], scratch));
    assert_eq!(launches(32768, 4096).0, [(512, [132, 1]), (512, [64, 1])]);
    // Eight rows of each block at least, and one block.
    assert_eq!(launches(800, 768).0[0], (128, [100, 1]));
    assert_eq!(launches(7, 768).0[0], (128, [1, 1]));
    // Rows that share a block have sums of their own.
    let scratch = 3 * (16 * 4) * 64 * 4;
    assert_eq!(launches(512, 64), (vec![(128, [4, 1]), (512, [1, 1])], scratch));
}

#[test]
fn each_operand_is_read_once() {
    let body = norm_gradients(DType::BF16, 4096, 768, false);
    let module = compile_cuda(&[("k", &body, KIND)], "sm_90").unwrap();
    let (rows, sums) = module.ptx.split_once(".entry k(").unwrap();
    // Eight elements of dy in one access, of x, the scale and the residual in two; the statistics of the row.
    assert_eq!(rows.matches("ld.global").count(), 1 + 3 * 2 + 2, "{rows}");
    assert_eq!(rows.matches("bar.sync").count(), 3, "{rows}");
    // dy, x and the residual of the next row.
    assert_eq!(rows.matches("prefetch.L2").count(), 3, "{rows}");
    assert!(sums.contains("ld.global.v4.b32") && sums.contains("st.global.v4.b32"), "{sums}");
}

#[test]
fn registers_suffice() {
    let mut regions = Vec::new();
    for cols in [768, 1024, 1600, 4096, 8192, 253] {
        for (dtype, is_rms) in [(DType::F32, false), (DType::BF16, false), (DType::BF16, true)] {
            let body = norm_gradients(dtype, 4096, cols, is_rms);
            if supported_on_cuda(&body, KIND).is_ok() {
                regions.push((format!("norm_{dtype}_{cols}_{is_rms}"), body, KIND));
            }
        }
    }
    assert!(regions.len() >= 15);
    assembles(&regions);
}

#[test]
fn what_does_not_fit_is_refused() {
    let refusal = |body: &Graph| supported_on_cuda(body, KIND).unwrap_err().to_string();
    let long = refusal(&norm_gradients(DType::BF16, 64, 50256, false));
    assert!(long.contains("too long"), "{long}");
    let rows = refusal(&norm_gradients(DType::BF16, 64, 12288, true));
    assert!(rows.contains("too long"), "{rows}");
    let mut body = Body::new();
    let x = body.input(DType::BF16, &[64, 8192]);
    let mut results = body.all(Op::Softmax(Softmax { axis: 1 }), &[x]);
    for f in [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Max, ReduceFn::Min, ReduceFn::Prod] {
        let op = Reduce { f, axes: vec![0], keep_dims: false };
        results.push(body.one(Op::Reduce(op), &[x]));
    }
    let sums = refusal(&body.done(&results));
    assert!(sums.contains("too many sums"), "{sums}");
    let one = refusal(&norm_gradients(DType::F32, 1, 64, false));
    assert!(one.contains("one row"), "{one}");
    let host = supported(&norm_gradients(DType::F32, 64, 64, false), KIND).unwrap_err();
    assert!(host.to_string().contains("CPU"), "{host}");
    // A reduction of a row that reads one over the rows.
    let mut body = Body::new();
    let x = body.input(DType::F32, &[64, 64]);
    let op = Reduce { f: ReduceFn::Sum, axes: vec![0], keep_dims: true };
    let sum = body.one(Op::Reduce(op), &[x]);
    let y = body.one(Op::Binary(BinaryFn::Mul), &[x, sum]);
    let z = body.one(Op::Softmax(Softmax { axis: 1 }), &[y]);
    let nested = refusal(&body.done(&[z]));
    assert!(nested.contains("depends on a reduction over the rows"), "{nested}");
}
