//! Generated PTX assembles with `ptxas` where that is installed, and has the expected memory accesses.

use crate::harness::{Body, compare, load, normal};
use crate::ptx_machine;
use frit_codegen::{CudaModule, HostTarget, compile_cuda, compile_host};
use frit_ir::ops::{
    BinaryFn, Cast, CrossEntropy, CrossEntropyGrad, FusionKind, LayerNorm, LayerNormGradAffine,
    OptimizerKind, OptimizerStep, Softmax, SoftmaxGrad, UnaryFn,
};
use frit_ir::{DType, Graph, Op, Tensor};
use frit_tests::requirements::Requirement;
use std::process::Command;

/// The loss of rows whose last column is padding, and the gradient of the logits.
fn loss_and_gradient(dtype: DType, rows: usize, cols: usize) -> Graph {
    let mut body = Body::new();
    let (x, labels) = (body.input(dtype, &[rows, cols]), body.input(DType::I64, &[rows]));
    let (dy, classes) = (body.input(DType::F32, &[rows]), Some((cols - 1).max(1)));
    let op = CrossEntropy { ignore_index: -100, classes };
    let loss = body.all(Op::CrossEntropy(op), &[x, labels]);
    let op = CrossEntropyGrad { ignore_index: -100, classes };
    let dx = body.one(Op::CrossEntropyGrad(op), &[dy, x, labels, loss[1]]);
    body.done(&[loss[0], dx])
}

fn regions(rows: usize, sizes: &[usize]) -> Vec<(String, Graph, FusionKind)> {
    let mut regions = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for &cols in sizes {
            let mut add = |name: &str, body: Graph, kind| {
                regions.push((format!("{name}_{dtype}_{cols}"), body, kind));
            };
            let mut body = Body::new();
            let (x, b) = (body.input(dtype, &[rows, cols]), body.input(dtype, &[cols]));
            let sum = body.one(Op::Binary(BinaryFn::Add), &[x, b]);
            let y = body.one(Op::Unary(UnaryFn::GeluTanh), &[sum]);
            let z = body.one(Op::Unary(UnaryFn::Erf), &[sum]);
            add("gelu", body.done(&[y, z]), FusionKind::Pointwise);
            let mut body = Body::new();
            let x = body.input(dtype, &[rows, cols]);
            let y = body.one(Op::Softmax(Softmax { axis: 1 }), &[x]);
            add("softmax", body.done(&[y]), FusionKind::RowReduce);
            let mut body = Body::new();
            let (x, w) = (body.input(dtype, &[rows, cols]), body.input(DType::F32, &[cols]));
            let y = body.all(Op::LayerNorm(LayerNorm { axis: 1, eps: 1e-5 }), &[x, w]);
            add("layer_norm", body.done(&y), FusionKind::RowReduce);
            let mut body = Body::new();
            let (x, labels) = (body.input(dtype, &[rows, cols]), body.input(DType::I64, &[rows]));
            let op = Op::CrossEntropy(CrossEntropy::ignoring(-100));
            let y = body.all(op, &[x, labels]);
            add("cross_entropy", body.done(&y), FusionKind::RowReduce);
            add("loss_and_gradient", loss_and_gradient(dtype, rows, cols), FusionKind::RowReduce);
            let mut body = Body::new();
            let (dy, x) = (body.input(dtype, &[rows, cols]), body.input(dtype, &[rows, cols]));
            let (mean, rstd) = (body.input(DType::F32, &[rows]), body.input(DType::F32, &[rows]));
            let op = Op::LayerNormGradAffine(LayerNormGradAffine { axis: 1 });
            let y = body.all(op, &[dy, x, mean, rstd]);
            add("affine", body.done(&y), FusionKind::ColReduce);
        }
    }
    let mut body = Body::new();
    let kind = OptimizerKind::Adamw;
    let mut values: Vec<_> = (0..4).map(|_| body.input(DType::F32, &[rows, 64])).collect();
    values.extend((0..kind.n_scalars()).map(|_| body.input(DType::F32, &[])));
    let y = body.all(Op::OptimizerStep(OptimizerStep::of(kind)), &values);
    regions.push(("adamw".into(), body.done(&y), FusionKind::Pointwise));
    regions
}

#[test]
fn every_kind_assembles_for_ampere_and_hopper() {
    assembles(&regions(64, &[768, 253, 50257]));
}

/// Checks that the regions' kernels have the entries that their launches name, and assemble without spilling registers.
pub(crate) fn assembles(regions: &[(String, Graph, FusionKind)]) {
    let ptxas = Requirement::Ptxas.find();
    let folder = tempfile::tempdir().unwrap();
    for chip in ["sm_80", "sm_90"] {
        let list: Vec<_> = regions.iter().map(|(s, b, k)| (s.as_str(), b, *k)).collect();
        let CudaModule { ptx, kernels } = compile_cuda(&list, chip).unwrap();
        assert_eq!(ptx.matches(".address_size").count(), 1);
        // Everything is computed in the kernels: no call to a device library.
        assert!(!ptx.contains(".extern .func"), "{ptx}");
        for launch in kernels.iter().flat_map(|k| &k.launches) {
            let head = format!(".visible .entry {}(", launch.symbol);
            let (_, kernel) = ptx.split_once(&head).expect("an entry of the launch's name");
            let (attributes, _) = kernel.split_once('{').unwrap();
            assert!(attributes.contains(&format!(".maxntid {}", launch.block)), "{attributes}");
        }
        let Some(ptxas) = &ptxas else { continue };
        let path = folder.path().join("kernels.ptx");
        std::fs::write(&path, &ptx).unwrap();
        let cubin = folder.path().join("kernels.cubin");
        let mut command = Command::new(ptxas);
        command.args(["-v", "-arch", chip, "-o"]).arg(&cubin).arg(&path);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "ptxas {chip}: {said}");
        let mut entry = "";
        for line in said.lines() {
            entry = if line.contains("Compiling") { line } else { entry };
            let spills = line.contains("spill") && !line.contains(" 0 bytes spill stores");
            assert!(!spills, "{chip}: {entry}: {line}");
        }
    }
}

fn kernel(rows: usize, name: &str) -> CudaModule {
    let (symbol, body, kind) =
        regions(rows, &[768, 253, 64, 24]).into_iter().find(|(s, _, _)| s == name).unwrap();
    compile_cuda(&[(&symbol, &body, kind)], "sm_90").unwrap()
}

/// Threads per block, and blocks, of each launch.
pub(crate) fn shape(module: &CudaModule) -> Vec<(u32, [u32; 2])> {
    module.kernels[0].launches.iter().map(|l| (l.block, l.grid)).collect()
}

#[test]
fn accesses_are_sixteen_bytes_wide() {
    let gelu = kernel(64, "gelu_bf16_768");
    assert!(gelu.ptx.contains("ld.global.v4.b32") && gelu.ptx.contains("st.global.v4.b32"));
    assert_eq!(shape(&gelu), [(256, [64 * 768 / 8 / 256, 1])]);
    let odd = kernel(64, "gelu_bf16_253");
    assert!(!odd.ptx.contains(".v4."));
}

/// Operands of one pointwise operation.
fn add_bias(dtype: DType, rows: usize, cols: usize) -> Graph {
    let mut body = Body::new();
    let (x, b) = (body.input(dtype, &[rows, cols]), body.input(dtype, &[cols]));
    let y = body.one(Op::Binary(BinaryFn::Add), &[x, b]);
    body.done(&[y])
}

#[test]
fn large_pointwise_kernels_are_grid_stride_loops() {
    let gelu = kernel(32768, "gelu_bf16_768");
    // Two loads of 16 bytes per vector, two vectors of a thread at a time.
    assert_eq!(shape(&gelu), [(256, [32768 * 768 / 8 / 256 / 2, 1])]);
    assert!(gelu.kernels[0].launches[0].grid_stride && gelu.ptx.contains("%nctaid.x"));
    // All are read before anything is written.
    let (before, after) = gelu.ptx.split_once("st.global").unwrap();
    assert_eq!(before.matches("ld.global.v4.b32").count(), 4, "{}", gelu.ptx);
    assert!(!after.contains("ld.global"));
    // A small one has a vector of each thread.
    let small = kernel(64, "gelu_bf16_768");
    assert_eq!(small.ptx.matches("ld.global.v4.b32").count(), 2);
    let softmax = kernel(32768, "softmax_bf16_768");
    assert!(!softmax.kernels[0].launches[0].grid_stride);
}

#[test]
fn pointwise_vectors_are_as_wide_as_rows_allow() {
    for (cols, load) in [(764, "ld.global.v2.b32"), (762, "ld.global.b32"), (761, "ld.global.b16")]
    {
        let body = add_bias(DType::BF16, 64, cols);
        let module = compile_cuda(&[("add", &body, FusionKind::Pointwise)], "sm_90").unwrap();
        assert_eq!(module.ptx.matches(load).count(), 2, "{cols}: {}", module.ptx);
    }
}

#[test]
fn several_vectors_of_a_thread_agree_with_the_host() {
    // The last tile is partial.
    let body = add_bias(DType::F32, 541, 1001);
    let region = [("add", &body, FusionKind::Pointwise)];
    let inputs = [normal(DType::F32, &[541, 1001], 3, 1.0), normal(DType::F32, &[1001], 4, 1.0)];
    let module = compile_cuda(&region, "sm_80").unwrap();
    assert_eq!(shape(&module), [(256, [1058, 1])]);
    let found = ptx_machine::run(&module, &inputs);
    let expected = load(compile_host(&region, &HostTarget::native()).unwrap()).run(0, &inputs);
    assert_eq!(found[0].to_bytes(), expected[0].to_bytes());
}

#[test]
fn rows_are_reduced_by_shuffles_and_read_once() {
    let softmax = kernel(64, "softmax_bf16_768");
    assert!(softmax.ptx.contains("shfl.sync.bfly"));
    assert_eq!(softmax.ptx.matches("ld.global").count(), 1, "{}", softmax.ptx);
    assert_eq!(shape(&softmax), [(128, [64, 1])]);
}

#[test]
fn long_rows_stay_in_shared_memory() {
    let module = |dtype, cols| {
        let body = loss_and_gradient(dtype, 64, cols);
        compile_cuda(&[("loss", &body, FusionKind::RowReduce)], "sm_90").unwrap()
    };
    let row = module(DType::BF16, 50304);
    assert_eq!(row.kernels[0].launches[0].shared_bytes, 2 * 50304);
    assert!(row.ptx.contains(".extern .shared .align 16 .b8 loss_row[];"), "{}", row.ptx);
    let (maxima, rest) = row.ptx.split_once("bar.sync").unwrap();
    // Four vectors at once and what is left over; the later loops read what the first has kept.
    assert_eq!(maxima.matches("ld.global.v4.b32").count(), 5, "{}", row.ptx);
    assert_eq!(maxima.matches("st.shared.v4.b32").count(), 5);
    assert_eq!(rest.matches("ld.global.v4.b32").count(), 0);
    assert!(rest.contains("ld.shared.v4.b32"));
    // Too long a row is read again, and a short one is in registers.
    for (dtype, cols) in [(DType::F32, 50304), (DType::BF16, 65536), (DType::BF16, 16384)] {
        let module = module(dtype, cols);
        assert_eq!(module.kernels[0].launches[0].shared_bytes, 0, "{dtype} {cols}");
    }
}

#[test]
fn several_operands_of_long_rows_stay_in_shared_memory() {
    let (bf16, f32) = (DType::BF16, DType::F32);
    // Two operands, rows of single elements, operands of two dtypes, more than fit.
    for (dtypes, cols, kept) in [
        ([bf16, bf16], 16 * 1024 + 8, 2),
        ([bf16, bf16], 16 * 1024 + 9, 2),
        ([f32, bf16], 16 * 1024 + 8, 1),
        ([f32, f32], 16 * 1024 + 8, 1),
    ] {
        let mut body = Body::new();
        let [dy, y] = dtypes.map(|dtype| body.input(dtype, &[2, cols]));
        let [dy, y] = [dy, y].map(|v| body.one(Op::Cast(Cast { to: f32 }), &[v]));
        let dx = body.one(Op::SoftmaxGrad(SoftmaxGrad { axis: 1 }), &[dy, y]);
        let body = body.done(&[dx]);
        let region = |name| (name, &body, FusionKind::RowReduce);
        // The memory of a kernel is its own.
        let both = compile_cuda(&[region("first"), region("second")], "sm_90").unwrap();
        let bytes = kept * cols as u32 * dtypes[0].size() as u32;
        assert!(both.kernels.iter().all(|k| k.launches[0].shared_bytes == bytes), "{dtypes:?}");
        let inputs = [0, 1].map(|i| normal(dtypes[i], &[2, cols], 5 + i as u64, 1.0));
        let list = [region("first")];
        let expected = load(compile_host(&list, &HostTarget::native()).unwrap()).run(0, &inputs);
        let found = ptx_machine::run(&both, &inputs);
        compare("softmax_grad", &found[0], &expected[0].to_f64s(), 2e-6, 1.0);
    }
}

#[test]
fn the_loss_of_a_row_is_read_before_its_gradient_overwrites_the_logits() {
    let kernel = kernel(64, "loss_and_gradient_bf16_768");
    let mut stores = kernel.ptx.split("st.global");
    let (_, after_loss) = (stores.next(), stores.next().expect("the loss is written"));
    assert!(after_loss.contains("bar.sync"), "{}", kernel.ptx);
}

#[test]
fn short_rows_share_a_block() {
    let shape_of = |rows, name: &str| shape(&kernel(rows, name));
    assert_eq!(shape_of(64, "softmax_bf16_64"), [(128, [4, 1])]);
    assert_eq!(shape_of(65, "softmax_bf16_64"), [(128, [5, 1])]);
    // No more threads than there are rows for, but a whole warp.
    assert_eq!(shape_of(3, "softmax_bf16_64"), [(32, [1, 1])]);
    assert_eq!(shape_of(3, "softmax_f32_24"), [(32, [1, 1])]);
}

#[test]
fn long_columns_are_split_over_blocks() {
    let few = kernel(255, "affine_bf16_768");
    assert_eq!((shape(&few), few.kernels[0].scratch_bytes), (vec![(512, [12, 1])], 0));
    let many = kernel(32768, "affine_bf16_768");
    assert_eq!(shape(&many), [(512, [12, 44]), (512, [12, 1])]);
    assert_eq!(many.kernels[0].scratch_bytes, 2 * 44 * 768 * 4);
    // Vectors of the operands, of the parts, and of the results.
    assert!(many.ptx.contains("ld.global.v4.b32") && many.ptx.contains("st.global.v4.b32"));
    assert!(!many.ptx.contains("ld.global.b16") && !many.ptx.contains("st.global.b32"));
    let odd = kernel(32768, "affine_bf16_253");
    assert_eq!(shape(&odd), [(512, [8, 66]), (512, [8, 1])]);
    assert!(!odd.ptx.contains(".v4."));
}

#[test]
fn cuda_and_host_kernels_agree() {
    // Vectors in registers, partial vectors, one warp, and rows too long for registers.
    // Short rows that share a block, evenly and not. Columns whose rows are split, evenly and not.
    for (rows, cols) in [
        (3, 768),
        (5, 253),
        (2, 24),
        (1, 2051),
        (512, 24),
        (387, 9),
        (64, 2),
        (37, 250),
        (21, 40),
        (3, 2052),
        // Several vectors of a thread at once, and some that are left over.
        (2, 16 * 1024 + 520),
    ] {
        let regions = regions(rows, &[cols]);
        let list: Vec<_> = regions.iter().map(|(s, b, k)| (s.as_str(), b, *k)).collect();
        let host = load(compile_host(&list, &HostTarget::native()).unwrap());
        for (k, (symbol, body, kind)) in regions.iter().enumerate() {
            let types = host.kernels[k].operands.iter().enumerate();
            let inputs: Vec<Tensor> = types
                .map(|(i, t)| match t.dtype {
                    DType::I64 => {
                        let labels = (0..rows).map(|i| ((i * 16411) % cols) as i64).collect();
                        Tensor::ints(t.dtype, t.shape.clone(), labels)
                    }
                    // Second moments and the optimizer's scalars are positive.
                    _ if i > 1 => {
                        let x = normal(t.dtype, t.shape.dims(), 3 + i as u64, 0.2);
                        let x = x.as_floats().unwrap().iter().map(|x| x.abs()).collect();
                        Tensor::floats(t.dtype, t.shape.clone(), x)
                    }
                    _ => normal(t.dtype, t.shape.dims(), 3 + i as u64, 2.0),
                })
                .collect();
            let module = compile_cuda(&[(symbol, body, *kind)], "sm_80").unwrap();
            let found = ptx_machine::run(&module, &inputs);
            for (found, expected) in found.iter().zip(host.run(k, &inputs)) {
                // Sums of many rows cancel.
                let floor = (rows as f64).sqrt();
                compare(symbol, found, &expected.to_f64s(), 2e-6, floor);
            }
        }
    }
}
