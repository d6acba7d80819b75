//! Attention and its gradient, on tensor cores and without.

use crate::check::{Body, body_of, check, check_body, check_launches, random, selected};
use frit_ir::interpret::{Options, eval_op, run};
use frit_ir::ops::attention::FILLED;
use frit_ir::ops::{Attention, AttentionGrad, Concat, Reshape, Split, Transpose};
use frit_ir::plan::{Candidate, Launch, Launches, Operation};
use frit_ir::{DType, Op, Shape, Tensor, TensorType};

/// Sizes by the letters of `frit_ir::ops::attention`.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    b: usize,
    h: usize,
    g: usize,
    t: usize,
    s: usize,
    d: usize,
    e: usize,
}

/// Which keys are visible; without a window determined by `causal`.
struct Sees {
    causal: bool,
    window: Option<usize>,
}

impl From<bool> for Sees {
    fn from(causal: bool) -> Sees {
        Sees { causal, window: None }
    }
}

/// Checks both directions, with the interpreter's results as operands of the gradient.
fn both(
    dtype: DType,
    n: Sizes,
    sight: impl Into<Sees>,
    mask: Option<Tensor>,
    mask_grad: bool,
    tolerance: f64,
) {
    let Sees { causal, window } = sight.into();
    let Sizes { b, h, g, t, s, d, e } = n;
    let scale = 1.0 / (d as f64).sqrt();
    let mut operands = vec![
        random(dtype, &[b, h, t, d], 1),
        random(dtype, &[b, g, s, d], 2),
        random(dtype, &[b, g, s, e], 3),
    ];
    operands.extend(mask.clone());
    let op = Op::Attention(Attention { scale, causal, window, keep: None });
    check(op.clone(), &operands, tolerance);
    let inputs: Vec<&Tensor> = operands.iter().collect();
    let results = eval_op(&op, &inputs, Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let mut all = vec![random(dtype, &[b, h, t, e], 4)];
    all.extend(operands[..3].iter().cloned());
    all.extend(results);
    all.extend(mask);
    check(
        Op::AttentionGrad(AttentionGrad { scale, causal, window, keep: None, mask_grad }),
        &all,
        tolerance,
    );
}

/// A mask that hides some keys, and row 2 of head 0 entirely.
fn added(dtype: DType, shape: [usize; 4]) -> Tensor {
    let mut values = random(dtype, &shape, 5).to_f64s();
    let s = shape[3];
    for (i, x) in values.iter_mut().enumerate() {
        if i % 7 == 3 || (i / s == 2 && shape[2] > 2) {
            *x = f64::NEG_INFINITY;
        }
    }
    Tensor::floats(dtype, shape, values)
}

/// A mask that hides some keys by a low number, and row 2 of head 0 entirely.
fn low(dtype: DType, shape: [usize; 4], low: f64) -> Tensor {
    let mut values = added(dtype, shape).to_f64s();
    for x in values.iter_mut().filter(|x| x.is_infinite()) {
        *x = low;
    }
    Tensor::floats(dtype, shape, values)
}

const SMALL: Sizes = Sizes { b: 2, h: 4, g: 2, t: 37, s: 70, d: 24, e: 20 };

#[test]
fn causal_heads_of_sixty_four() {
    for dtype in [DType::BF16, DType::F16] {
        let n = Sizes { b: 1, h: 2, g: 1, t: 70, s: 70, d: 64, e: 64 };
        both(dtype, n, true, None, false, if dtype == DType::F16 { 4e-3 } else { 3e-2 });
    }
}

#[test]
fn odd_sizes_and_shared_key_heads() {
    both(DType::F16, SMALL, false, None, false, 4e-3);
    both(DType::F16, Sizes { d: 19, e: 5, ..SMALL }, true, None, false, 4e-3);
    both(DType::F16, Sizes { t: 70, s: 33, ..SMALL }, true, None, false, 4e-3);
}

/// Windows within a tile, across several, wider than the blocks, and one that hides nothing; rows without visible keys.
#[test]
fn windows_around_the_diagonal() {
    for causal in [false, true] {
        for window in [1, 33, 100, 200] {
            let sees = || Sees { causal, window: Some(window) };
            let n = Sizes { b: 1, h: 2, g: 1, t: 200, s: 190, d: 16, e: 16 };
            both(DType::F16, n, sees(), None, false, 4e-3);
            let n = Sizes { b: 1, h: 4, t: 70, s: 20, d: 8, e: 4, ..SMALL };
            let mask = random(DType::F32, &[1, 4, 70, 20], 7);
            both(DType::F32, n, sees(), Some(mask), true, 2e-4);
            both(DType::F16, n, sees(), Some(random(DType::Bool, &[1, 1, 1, 20], 6)), false, 4e-3);
        }
    }
}

#[test]
fn masks_of_every_type() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        both(DType::F16, SMALL, false, Some(added(dtype, [1, 4, 37, 70])), true, 4e-3);
    }
    let keep = random(DType::Bool, &[2, 1, 1, 70], 6);
    both(DType::F16, SMALL, true, Some(keep), false, 4e-3);
}

/// Rows wholly masked by a number that absorbs their scores have equal weights; those of the operation's own number, no
/// gradient of scores.
#[test]
fn rows_of_low_numbers() {
    for value in [-1e9, f64::from(f32::MIN), FILLED] {
        for dtype in [DType::F32, DType::BF16] {
            both(DType::F16, SMALL, false, Some(low(dtype, [1, 4, 37, 70], value)), true, 4e-3);
        }
        both(DType::BF16, SMALL, true, Some(low(DType::F32, [1, 1, 37, 70], value)), false, 3e-2);
        both(DType::F32, SMALL, false, Some(low(DType::F32, [1, 4, 37, 70], value)), true, 2e-5);
        both(DType::F64, SMALL, true, Some(low(DType::F64, [2, 1, 37, 70], value)), true, 1e-9);
        // Every row, and large heads with a kernel each for keys and values.
        let n = Sizes { b: 1, h: 1, g: 1, t: 20, s: 40, d: 128, e: 72 };
        let all = Tensor::splat(TensorType::new(DType::F32, [1, 1, 1, 40]), value);
        both(DType::F16, n, false, Some(all), true, 4e-3);
    }
}

#[test]
fn gradients_of_broadcast_masks() {
    for shape in [[2, 4, 37, 70], [1, 4, 37, 70], [2, 1, 1, 70], [1, 1, 37, 1], [1, 1, 1, 1]] {
        let mask = random(DType::F32, &shape, 7);
        both(DType::F32, SMALL, false, Some(mask), true, 2e-4);
    }
}

#[test]
fn large_heads() {
    let n = Sizes { b: 1, h: 1, g: 1, t: 20, s: 40, d: 128, e: 72 };
    both(DType::BF16, n, true, None, false, 3e-2);
    both(DType::BF16, Sizes { t: 70, s: 70, e: 128, ..n }, true, None, false, 3e-2);
    both(
        DType::BF16,
        Sizes { d: 256, e: 200, ..n },
        false,
        Some(added(DType::F32, [1, 1, 1, 40])),
        false,
        3e-2,
    );
    // All the shared memory of smaller GPUs, and several tiles of queries.
    both(DType::F16, Sizes { t: 70, d: 250, e: 256, ..n }, true, None, false, 4e-3);
    both(DType::BF16, Sizes { d: 300, ..n }, false, None, false, 3e-2);
}

/// Launches of attention and its gradient on heads of one size.
fn launches(d: usize, mask: Option<DType>) -> Vec<Launch> {
    let q = TensorType::new(DType::BF16, [1, 1, 64, d]);
    let lse = TensorType::new(DType::F32, [1, 1, 64]);
    let mask = mask.map(|dtype| TensorType::new(dtype, [1, 1, 64, 64]));
    let mut forward = vec![&q; 3];
    let mut backward = vec![&q, &q, &q, &q, &q, &lse];
    forward.extend(&mask);
    backward.extend(&mask);
    let (scale, causal, window, mask_grad) = (0.1, true, None, false);
    let forward = body_of(Op::Attention(Attention { scale, causal, window, keep: None }), &forward);
    let backward = body_of(
        Op::AttentionGrad(AttentionGrad { scale, causal, window, keep: None, mask_grad }),
        &backward,
    );
    let sources = |l: &&Launch| matches!(l, Launch::Source(_));
    let all = |body| selected(body).every_launch().into_iter().filter(sources).cloned().collect();
    [forward, backward].iter().flat_map(|body| -> Vec<Launch> { all(body) }).collect()
}

#[test]
fn heads_up_to_256_fit_the_shared_memory_of_the_smaller_gpus() {
    for d in (8..=256).step_by(8) {
        for mask in [None, Some(DType::Bool)] {
            for launch in launches(d, mask) {
                let Launch::Source(kernel) = launch else { panic!("{launch:?}") };
                assert!(kernel.shared_bytes <= 99 << 10, "{d}: {kernel:?}");
            }
        }
    }
}

#[test]
fn single_and_double_precision() {
    both(DType::F32, SMALL, true, None, false, 2e-5);
    both(
        DType::F32,
        Sizes { d: 65, e: 33, ..SMALL },
        false,
        Some(added(DType::F32, [1, 4, 37, 70])),
        false,
        2e-5,
    );
    both(DType::F64, SMALL, true, Some(added(DType::F64, [2, 1, 37, 70])), true, 1e-10);
}

#[test]
fn nothing_to_attend_to() {
    both(DType::F16, Sizes { s: 0, ..SMALL }, false, None, false, 0.0);
    both(DType::F16, Sizes { t: 0, ..SMALL }, false, None, false, 0.0);
    both(DType::F32, Sizes { s: 0, ..SMALL }, false, None, false, 0.0);
}

/// A packed projection `[b, t, 3·h·d]`, attention over its heads, and the gradient of the projection.
fn packed(dtype: DType, [b, t, h, d]: [usize; 4], tolerance: f64) {
    let width = h * d;
    let mut body = Body::new();
    let x = body.input(&TensorType::new(dtype, [b, t, 3 * width]));
    let parts = body.add(Op::Split(Split { axis: 2, sizes: vec![width; 3] }), &[x]);
    let heads = |body: &mut Body, v| {
        let v = body.add(Op::Reshape(Reshape { shape: Shape::from([b, t, h, d]) }), &[v])[0];
        body.add(Op::Transpose(Transpose { perm: vec![0, 2, 1, 3] }), &[v])[0]
    };
    let rows = |body: &mut Body, v| {
        let v = body.add(Op::Transpose(Transpose { perm: vec![0, 2, 1, 3] }), &[v])[0];
        body.add(Op::Reshape(Reshape { shape: Shape::from([b, t, width]) }), &[v])[0]
    };
    let qkv: Vec<_> = parts.into_iter().map(|v| heads(&mut body, v)).collect();
    let mut forward = Body(body.0.clone());
    let y = forward.add(
        Op::Attention(Attention { scale: 0.25, causal: true, window: None, keep: None }),
        &qkv,
    );
    let z = rows(&mut forward, y[0]);
    let forward = forward.outputs(&[z, y[1]]);
    assert_eq!(selected(&forward).launches.len(), 1, "nothing is copied");
    let x = random(dtype, &[b, t, 3 * width], 1);
    check_body(&forward, std::slice::from_ref(&x), tolerance);

    let feeds = [("0".to_string(), x.clone())].into();
    let results = run(&forward, &feeds, Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let [z, lse]: [Tensor; 2] =
        results.into_iter().map(|(_, t)| t).collect::<Vec<_>>().try_into().expect("two results");
    let (z_in, lse_in, dz_in) = (body.input(&z.ty), body.input(&lse.ty), body.input(&z.ty));
    let (y, dy) = (heads(&mut body, z_in), heads(&mut body, dz_in));
    let op =
        AttentionGrad { scale: 0.25, causal: true, window: None, keep: None, mask_grad: false };
    let operands = [dy, qkv[0], qkv[1], qkv[2], y, lse_in];
    let gradients = body.add(Op::AttentionGrad(op), &operands);
    let gradients: Vec<_> = gradients.into_iter().map(|v| rows(&mut body, v)).collect();
    let dx = body.add(Op::Concat(Concat { axis: 2 }), &gradients);
    let backward = body.outputs(&dx);
    let copies = |l: &&Launch| match l {
        Launch::Source(kernel) => !kernel.file.starts_with("attention"),
        Launch::Choice(_) | Launch::Operation(_) => false,
        _ => true,
    };
    assert!(!selected(&backward).every_launch().iter().any(copies), "nothing is copied");
    check_body(&backward, &[x, z, lse, random(dtype, &[b, t, width], 2)], tolerance);
}

#[test]
fn heads_of_packed_projections_are_read_and_written_in_place() {
    packed(DType::F16, [2, 37, 3, 16], 4e-3);
    packed(DType::BF16, [2, 37, 3, 16], 3e-2);
    // A gradient for which cuDNN may have an engine.
    packed(DType::F16, [1, 128, 2, 8], 4e-3);
}

#[test]
fn whole_tiles_with_shared_key_heads() {
    let n = Sizes { b: 1, h: 4, g: 2, t: 128, s: 256, d: 16, e: 8 };
    both(DType::BF16, n, true, None, false, 3e-2);
    both(DType::F16, Sizes { h: 2, t: 256, s: 128, ..n }, true, None, false, 4e-3);
    both(DType::F16, Sizes { h: 2, t: 128, s: 128, ..n }, false, None, false, 4e-3);
}

/// Whether attention and its gradient have cuDNN candidates.
fn offered(dtype: DType, n: Sizes, window: Option<usize>, mask: Option<DType>) -> [bool; 2] {
    let Sizes { b, h, g, t, s, d, e } = n;
    let ty = |dims: [usize; 4]| TensorType::new(dtype, dims);
    let [q, k, v, y] = [ty([b, h, t, d]), ty([b, g, s, d]), ty([b, g, s, e]), ty([b, h, t, e])];
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let lse = TensorType::new(wide, [b, h, t]);
    let mask = mask.map(|dtype| TensorType::new(dtype, [1, 1, 1, s]));
    let (mut forward, mut backward) = (vec![&q, &k, &v], vec![&y, &q, &k, &v, &y, &lse]);
    forward.extend(&mask);
    backward.extend(&mask);
    let (scale, causal, mask_grad) = (0.1, true, false);
    [
        body_of(Op::Attention(Attention { scale, causal, window, keep: None }), &forward),
        body_of(
            Op::AttentionGrad(AttentionGrad { scale, causal, window, keep: None, mask_grad }),
            &backward,
        ),
    ]
    .map(|body| selected(&body).launches.iter().any(|l| matches!(l, Launch::Choice(_))))
}

#[test]
fn cudnn_is_offered_what_its_engines_know() {
    let n = Sizes { b: 2, h: 4, g: 2, t: 128, s: 256, d: 64, e: 64 };
    let (both, forward, none) = ([true, true], [true, false], [false, false]);
    for (sizes, expected) in [
        (n, both),
        (Sizes { d: 128, e: 8, ..n }, both),
        // Partial tiles of queries, of keys.
        (Sizes { t: 1, ..n }, forward),
        (Sizes { s: 192, ..n }, forward),
        // Large heads, and heads that are not a multiple of 16 bytes.
        (Sizes { d: 256, ..n }, forward),
        (Sizes { d: 264, ..n }, none),
        (Sizes { d: 20, ..n }, none),
        (Sizes { e: 20, ..n }, none),
        // Scores of a gigabyte, and of GPT-2 of 124M parameters at a batch of 32.
        (Sizes { b: 16, h: 32, t: 1024, s: 1024, ..n }, both),
        (Sizes { b: 32, h: 12, g: 12, t: 1024, s: 1024, ..n }, both),
        (Sizes { s: 0, ..n }, none),
    ] {
        assert_eq!(offered(DType::BF16, sizes, None, None), expected, "{sizes:?}");
    }
    assert_eq!(offered(DType::F16, n, None, None), both);
    assert_eq!(offered(DType::F16, n, Some(100), None), none);
    // A window that hides nothing.
    assert_eq!(offered(DType::F16, n, Some(300), None), both);
    assert_eq!(offered(DType::F32, n, None, None), none);
    assert_eq!(offered(DType::F64, n, None, None), none);
    for mask in [DType::Bool, DType::BF16, DType::F32] {
        assert_eq!(offered(DType::BF16, n, None, Some(mask)), none, "{mask}");
    }
}

#[test]
fn a_gradient_that_may_add_in_any_order_has_a_candidate_more() {
    let ty = |dims: [usize; 4]| TensorType::new(DType::BF16, dims);
    let (b, h, g, t, s, d) = (2, 4, 2, 128, 256, 16);
    let [q, k] = [ty([b, h, t, d]), ty([b, g, s, d])];
    let lse = TensorType::new(DType::F32, [b, h, t]);
    let op = AttentionGrad { scale: 0.1, causal: true, window: None, keep: None, mask_grad: false };
    let body = body_of(Op::AttentionGrad(op), &[&q, &q, &k, &k, &q, &lse]);
    let candidates = |deterministic| {
        let selected = frit_select::cuda(&body, frit_select::Options { deterministic });
        let launches = selected.expect("launches").entry.launches;
        let [Launch::Choice(candidates)] = &launches[..] else { panic!("{launches:?}") };
        candidates.clone()
    };
    use frit_ir::plan::CandidateName::{Cudnn, CudnnAnyOrder, Frit};
    let names = |all: &[Candidate]| all.iter().map(|c| c.name).collect::<Vec<_>>();
    assert_eq!(names(&candidates(true)), [Cudnn, Frit]);
    let all = candidates(false);
    assert_eq!(names(&all), [Cudnn, CudnnAnyOrder, Frit]);
    let operations: Vec<&Operation> = all[..2]
        .iter()
        .map(|candidate| match &candidate.launches[..] {
            [Launch::Operation(launch)] => &launch.operation,
            other => panic!("{other:?}"),
        })
        .collect();
    let scores = b * h * t * s * 2;
    let [in_order, any_order] =
        operations.iter().map(|o| o.workspace_bytes()).collect::<Vec<_>>()[..]
    else {
        panic!("two")
    };
    assert!(in_order >= scores && any_order > 0, "{in_order} and {any_order} of {scores}");
    assert_ne!(operations[0].to_string(), operations[1].to_string());
    // Every one computes the gradient.
    let qkv = [random(q.dtype, q.shape.dims(), 1), random(k.dtype, k.shape.dims(), 2)];
    let qkv = [&qkv[0], &qkv[1], &random(k.dtype, k.shape.dims(), 3)].map(Clone::clone);
    let forward = Op::Attention(Attention { scale: 0.1, causal: true, window: None, keep: None });
    let results =
        eval_op(&forward, &qkv.each_ref(), Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let dy = random(q.dtype, q.shape.dims(), 4);
    let [q, k, v] = qkv;
    let operands = [dy, q, k, v, results[0].clone(), results[1].clone()];
    let all = frit_select::cuda(&body, frit_select::Options { deterministic: false });
    let scratch_bytes = all.expect("launches").entry.scratch_bytes;
    for Candidate { launches, .. } in candidates(false) {
        check_launches(&body, Launches { launches, scratch_bytes }, &operands, 3e-2);
    }
}
