//! Operations of plans with cuDNN candidates: those of the test models, and rarer ones.

use super::operations_of;
use crate::support::{compile_at, file};
use frit_ir::ops::{Attention, AttentionGrad, BatchNorm, BatchNormGrad, Conv, ConvGradInput};
use frit_ir::ops::{ConvGradWeight, Input, MaxPool, SumPool, SumPoolGrad, Window};
use frit_ir::plan::{Entry, Operation};
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, TensorType};
use std::collections::BTreeMap;

/// The operations that the given models ask for, by their key.
pub(super) fn operations_of_models() -> BTreeMap<String, Operation> {
    let mut all = BTreeMap::new();
    let bf16 = ["precision.compute=bf16"];
    let f32 = ["precision.compute=fp32"];
    let unet = ["precision.compute=bf16", "loss.kind=mse"];
    for (model, settings) in [
        ("resnet", &bf16[..]),
        ("resnet", &f32[..]),
        ("vit", &bf16[..]),
        ("gpt2", &bf16[..]),
        ("unet", &unet[..]),
    ] {
        let settings = [&["target.device=cuda"], settings].concat();
        let compiled = compile_at(&file(&format!("tests/models/{model}/model.onnx")), 4, &settings);
        for kernel in &compiled.plan.kernels {
            let Entry::Launches(selected) = &kernel.entry else { continue };
            for operation in operations_of(selected) {
                all.insert(operation.to_string(), operation.clone());
            }
        }
    }
    all
}

/// A convolution and its gradients: images, filters, groups.
fn convolutions(
    all: &mut BTreeMap<String, Operation>,
    (dtype, weights): (DType, Option<DType>),
    window: Window,
    groups: usize,
    (x, w): (&[usize], &[usize]),
) {
    let positions = window.positions(&x[2..], &w[2..]).expect("a window that fits");
    let y = [&[x[0], w[0]], &positions[..]].concat();
    let (size, taps) = (x[2..].to_vec(), w[2..].to_vec());
    let conv = Conv { window: window.clone(), groups, out: None };
    let grad_input = ConvGradInput { window: window.clone(), groups, size, out: None };
    let grad_weight = ConvGradWeight { window, groups, taps, out: weights };
    for (op, operands) in [
        (Op::Conv(conv), [x, w]),
        (Op::ConvGradInput(grad_input), [&y[..], w]),
        (Op::ConvGradWeight(grad_weight), [&y[..], x]),
    ] {
        let types = operands.map(|dims| TensorType::new(dtype, dims));
        offered(all, op, &types.each_ref());
    }
}

/// Convolutions that models rarely have.
pub(super) fn awkward_convolutions() -> BTreeMap<String, Operation> {
    let mut all = BTreeMap::new();
    let uneven =
        Window { strides: vec![2, 1], dilations: vec![1, 2], low: vec![1, 0], high: vec![0, 3] };
    let same = Window { low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) };
    let line = Window { strides: vec![3], low: vec![2], high: vec![1], ..Window::plain(1) };
    for types in [
        (DType::BF16, Some(DType::F32)),
        (DType::F16, None),
        (DType::F32, None),
        (DType::F64, None),
    ] {
        let mut add = |window: &Window, groups, x: &[usize], w: &[usize]| {
            convolutions(&mut all, types, window.clone(), groups, (x, w));
        };
        add(&uneven, 1, &[2, 8, 7, 9], &[16, 8, 3, 2]);
        add(&same, 2, &[2, 16, 6, 6], &[32, 8, 3, 3]);
        add(&same, 32, &[4, 32, 14, 14], &[32, 1, 3, 3]);
        add(&line, 1, &[2, 8, 50], &[8, 8, 7]);
        add(&Window::plain(3), 1, &[2, 8, 4, 5, 6], &[8, 8, 2, 3, 2]);
        add(&same, 1, &[3, 9, 7, 9], &[130, 9, 3, 3]);
    }
    all
}

/// Attention and its gradient: of the given sizes of models, and awkward ones.
pub(super) fn attentions() -> BTreeMap<String, Operation> {
    let mut all = BTreeMap::new();
    // Batch, query heads, key heads, queries, keys, sizes of keys and of values.
    for (dtype, causal, [b, h, g, t, s, d, e]) in [
        // GPT-2 of 124M, 774M and 1.5B parameters.
        (DType::BF16, true, [8, 12, 12, 1024, 1024, 64, 64]),
        (DType::BF16, true, [32, 12, 12, 1024, 1024, 64, 64]),
        (DType::BF16, true, [4, 20, 20, 1024, 1024, 64, 64]),
        (DType::F16, true, [2, 25, 25, 1024, 1024, 64, 64]),
        // Llama with shared key heads, BERT without a mask.
        (DType::BF16, true, [1, 32, 8, 2048, 2048, 128, 128]),
        (DType::BF16, false, [8, 12, 12, 512, 512, 64, 64]),
        (DType::F16, true, [2, 6, 1, 128, 384, 96, 40]),
        // Forward only.
        (DType::BF16, true, [1, 2, 2, 77, 100, 256, 200]),
        (DType::F16, false, [3, 4, 2, 1, 7, 8, 16]),
    ] {
        let ty = |dims: [usize; 4]| TensorType::new(dtype, dims);
        let [q, k, v, y] = [ty([b, h, t, d]), ty([b, g, s, d]), ty([b, g, s, e]), ty([b, h, t, e])];
        let lse = TensorType::new(DType::F32, [b, h, t]);
        let (scale, mask_grad) = (0.125, false);
        for (op, operands) in [
            (
                Op::Attention(Attention { scale, causal, window: None, keep: None }),
                vec![&q, &k, &v],
            ),
            (
                Op::AttentionGrad(AttentionGrad {
                    scale,
                    causal,
                    window: None,
                    keep: None,
                    mask_grad,
                }),
                vec![&y, &q, &k, &v, &y, &lse],
            ),
        ] {
            offered(&mut all, op, &operands);
        }
    }
    all
}

/// Pooling and its gradients: of the given sizes of models, and awkward ones.
pub(super) fn pools() -> BTreeMap<String, Operation> {
    let mut all = BTreeMap::new();
    let window = |strides: &[usize], low: &[usize], high: &[usize]| Window {
        strides: strides.into(),
        low: low.into(),
        high: high.into(),
        ..Window::plain(strides.len())
    };
    for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
        let mut add = |window: Window, x: &[usize], taps: &[usize]| {
            let positions = window.positions(&x[2..], taps).expect("a window that fits");
            let image = TensorType::new(dtype, x);
            let result = TensorType::new(dtype, [&x[..2], &positions[..]].concat());
            let (taps, size) = (taps.to_vec(), x[2..].to_vec());
            let sum = SumPoolGrad { window: window.clone(), taps: taps.clone(), size };
            offered(&mut all, Op::SumPoolGrad(sum), &[&result]);
            let sum = SumPool { window: window.clone(), taps: taps.clone() };
            offered(&mut all, Op::SumPool(sum), &[&image]);
            offered(&mut all, Op::MaxPool(MaxPool { window, taps }), &[&image]);
        };
        // ResNet-50, VGG-16, DenseNet-121, Inception.
        add(window(&[2, 2], &[1, 1], &[1, 1]), &[32, 64, 112, 112], &[3, 3]);
        add(window(&[2, 2], &[0, 0], &[0, 0]), &[8, 64, 224, 224], &[2, 2]);
        add(window(&[2, 2], &[0, 0], &[0, 0]), &[8, 128, 56, 56], &[2, 2]);
        add(window(&[1, 1], &[1, 1], &[1, 1]), &[8, 192, 35, 35], &[3, 3]);
        add(window(&[2, 1], &[1, 0], &[0, 1]), &[2, 3, 7, 9], &[3, 2]);
        add(window(&[2], &[1], &[1]), &[2, 5, 50], &[3]);
        add(window(&[2, 1, 2], &[1, 0, 1], &[1, 0, 1]), &[2, 3, 6, 5, 7], &[3, 2, 2]);
        add(window(&[1, 1], &[6, 6], &[6, 6]), &[2, 8, 40, 40], &[13, 13]);
    }
    all
}

/// Batch normalization and its gradient: of ResNet-50, and awkward ones.
pub(super) fn norms() -> BTreeMap<String, Operation> {
    let mut all = BTreeMap::new();
    for (dtype, x) in [
        (DType::BF16, &[32, 64, 112, 112][..]),
        (DType::F16, &[32, 256, 56, 56]),
        (DType::BF16, &[32, 2048, 7, 7]),
        (DType::F32, &[32, 512, 28, 28]),
        (DType::BF16, &[4, 1024]),
        (DType::F16, &[3, 24, 5]),
        (DType::F32, &[2, 4, 3, 5, 2]),
        // Of no more channels than engines take at once, and of fewer.
        (DType::BF16, &[1, 8, 3, 3]),
        (DType::BF16, &[2, 12, 3, 3]),
        (DType::F32, &[2, 3, 8, 8]),
        (DType::F64, &[2, 8, 8, 8]),
    ] {
        let image = TensorType::new(dtype, x);
        let vector =
            TensorType::new(if dtype == DType::F64 { dtype } else { DType::F32 }, &x[1..2]);
        let (norm, grad) = (BatchNorm { eps: 1e-5 }, BatchNormGrad { eps: 1e-5 });
        offered(&mut all, Op::BatchNorm(norm), &[&image, &vector, &vector]);
        let operands = [&image, &image, &vector, &vector, &vector];
        offered(&mut all, Op::BatchNormGrad(grad), &operands);
    }
    all
}

/// Adds what cuDNN may compute of an operation, in a fixed order of additions and gradients of attention in any.
fn offered(all: &mut BTreeMap<String, Operation>, op: Op, operands: &[&TensorType]) {
    let mut body = Graph::new("kernel");
    let mut add = |op: Op, inputs: &[_]| {
        body.add(op, inputs, Origin::none(), Region::Forward).unwrap_or_else(|e| panic!("{e}"))
    };
    let inputs: Vec<_> = operands
        .iter()
        .enumerate()
        .map(|(i, ty)| add(Op::Input(Input { name: i.to_string(), ty: (*ty).clone() }), &[])[0])
        .collect();
    let results = add(op, &inputs);
    for (i, result) in results.into_iter().enumerate() {
        body.add_output(&i.to_string(), result, OutputKind::Result);
    }
    let sums = body.nodes().any(|(_, n)| matches!(n.op, Op::AttentionGrad(_)));
    let orders: &[bool] = if sums { &[true, false] } else { &[true] };
    for &deterministic in orders {
        let selected = frit_select::cuda(&body, frit_select::Options { deterministic });
        for operation in operations_of(&selected.expect("launches").entry) {
            all.insert(operation.to_string(), operation.clone());
        }
    }
}
