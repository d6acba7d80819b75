//! Every gradient rule against central finite differences in f64: here on chosen operands, in
//! [`random`] on random ones.

mod functions;
mod random;

use frit_ir::interpret::{Options, run, run_ranks};
use frit_ir::ops::*;
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, Shape, Tensor, TensorType, ValueId};
use frit_passes::differentiate::Differentiate;
use frit_passes::{Pass, PassContext};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

thread_local! {
    /// Rules that this thread's tests used, as [`random::rule_of`] names them.
    static DIFFERENTIATED: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

/// Elements between 0.3 and 1.7 that repeat nothing, so that kinks and ties are far away.
fn values(n: usize, seed: usize) -> Vec<f64> {
    (0..n)
        .map(|i| 0.3 + 1.4 * (((i * 37 + seed * 101 + 13) * 2_654_435_761) % 9973) as f64 / 9973.0)
        .collect()
}

fn add(g: &mut Graph, op: Op, inputs: &[ValueId]) -> Vec<ValueId> {
    g.add(op, inputs, Origin::none(), Region::Forward).unwrap_or_else(|e| panic!("{e}"))
}

fn constant(g: &mut Graph, value: Tensor) -> ValueId {
    add(g, Op::Constant(Constant { value }), &[])[0]
}

fn trainable(name: &str, ty: TensorType) -> Param {
    Param {
        name: name.into(),
        ty,
        kind: ParamKind::Trainable,
        reason: String::new(),
        init: Init::Weights,
        held: None,
        unit: None,
        sharded: false,
    }
}

/// Notes the operations that read what depends on a parameter.
fn note_rules(g: &Graph) {
    let mut varied = vec![false; g.n_values()];
    for (_, node) in g.nodes() {
        let reads = node.inputs.iter().any(|v| varied[v.0 as usize]);
        if reads {
            DIFFERENTIATED.with_borrow_mut(|rules| rules.insert(random::rule_of(&node.op)));
        }
        let any = reads || matches!(node.op, Op::Param(_));
        node.outputs.iter().for_each(|v| varied[v.0 as usize] = any);
    }
}

/// The loss Σ cᵢ·yᵢ of the first result, with trainable parameters of these shapes as operands.
fn check(name: &str, shapes: &[&[usize]], build: impl Fn(&mut Graph, &[ValueId]) -> ValueId) {
    let mut g = Graph::new("g");
    let mut feeds = HashMap::new();
    let mut params = Vec::new();
    for (i, shape) in shapes.iter().enumerate() {
        let ty = TensorType::new(DType::F32, *shape);
        let data = values(ty.shape.numel(), i);
        feeds.insert(format!("p{i}"), Tensor::exact(ty.clone(), frit_ir::TensorData::Float(data)));
        params.push(add(&mut g, Op::Param(trainable(&format!("p{i}"), ty)), &[])[0]);
    }
    let y = build(&mut g, &params);
    note_rules(&g);
    let ty = g.ty(y).clone();
    let weights = values(ty.shape.numel(), 7);
    let c = constant(&mut g, Tensor::floats(DType::F32, ty.shape.clone(), weights));
    let product = add(&mut g, Op::Binary(BinaryFn::Mul), &[y, c])[0];
    let axes = (0..ty.shape.rank()).collect();
    let sum = Op::Reduce(Reduce { f: ReduceFn::Sum, axes, keep_dims: false });
    let loss = add(&mut g, sum, &[product])[0];
    let count = constant(&mut g, Tensor::scalar(1.0));
    g.add_output("loss", loss, OutputKind::LossSum);
    g.add_output("count", count, OutputKind::LossCount);
    let forward = g.clone();
    let pass = Differentiate { accumulation: 1, capacity: 1.0 };
    pass.run(&mut g, &mut PassContext::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
    let results = run(&g, &feeds, Options::EXACT).unwrap_or_else(|e| panic!("{name}: {e}"));
    let loss_at = |feeds: &HashMap<String, Tensor>| {
        run(&forward, feeds, Options::EXACT).unwrap()[0].1.to_f64s()[0]
    };
    let mut differentiated = 0;
    for (i, shape) in shapes.iter().enumerate() {
        let key = format!("p{i}");
        let Some((_, gradient)) = results.iter().find(|(n, _)| *n == key) else { continue };
        differentiated += 1;
        assert_eq!(gradient.shape().dims(), *shape, "{name}: the gradient of operand {i}");
        let gradient = gradient.to_f64s();
        for (e, found) in gradient.iter().enumerate() {
            let moved = |h: f64| {
                let mut data = feeds[&key].to_f64s();
                data[e] += h;
                let ty = TensorType::new(DType::F32, *shape);
                let mut feeds = feeds.clone();
                feeds.insert(key.clone(), Tensor::exact(ty, frit_ir::TensorData::Float(data)));
                loss_at(&feeds)
            };
            let h = 1e-5;
            let expected = (moved(h) - moved(-h)) / (2.0 * h);
            assert!(
                (found - expected).abs() <= 1e-6 * expected.abs().max(1.0),
                "{name}: gradient {e} of operand {i} is {found}, not {expected}"
            );
        }
    }
    // What has no elements is not trained.
    let empty = shapes.iter().all(|shape| shape.contains(&0));
    assert!(differentiated > 0 || empty, "{name}: nothing was differentiated");
}

fn single(name: &str, op: Op, shapes: &[&[usize]]) {
    check(name, shapes, |g, p| add(g, op.clone(), p)[0]);
}

/// The loss Σ cᵢ·aᵢ² of the mean a of w·x over ranks, whose x differ: the mean of the ranks' gradients is the
/// gradient of the mean of their losses, and these are equal.
fn mean_over_ranks(ranks: usize, shape: &[usize]) {
    let ty = TensorType::new(DType::F32, shape);
    let n = ty.shape.numel();
    if n == 0 {
        // What has no elements is not trained.
        return;
    }
    let mut g = Graph::new("g");
    let w = add(&mut g, Op::Param(trainable("w", ty.clone())), &[])[0];
    let x = add(&mut g, Op::Input(Input { name: "x".into(), ty: ty.clone() }), &[])[0];
    let product = add(&mut g, Op::Binary(BinaryFn::Mul), &[w, x])[0];
    let mean = AllReduce { reduce: ReduceKind::Mean, unit: None, dtype: None };
    let mean = add(&mut g, Op::AllReduce(mean), &[product])[0];
    note_rules(&g);
    let square = add(&mut g, Op::Binary(BinaryFn::Mul), &[mean, mean])[0];
    let c = constant(&mut g, Tensor::floats(DType::F32, ty.shape.clone(), values(n, 7)));
    let weighted = add(&mut g, Op::Binary(BinaryFn::Mul), &[square, c])[0];
    let axes = (0..shape.len()).collect();
    let sum = Op::Reduce(Reduce { f: ReduceFn::Sum, axes, keep_dims: false });
    let loss = add(&mut g, sum, &[weighted])[0];
    g.add_output("loss", loss, OutputKind::LossSum);
    let forward = g.clone();
    let pass = Differentiate { accumulation: 1, capacity: 1.0 };
    pass.run(&mut g, &mut PassContext::default()).unwrap_or_else(|e| panic!("{e}"));
    let feeds = |w: &[f64]| -> Vec<HashMap<String, Tensor>> {
        let exact = |v| Tensor::exact(ty.clone(), frit_ir::TensorData::Float(v));
        let of_rank =
            |rank| [("w".into(), exact(w.to_vec())), ("x".into(), exact(values(n, rank)))];
        (0..ranks).map(|rank| of_rank(rank).into()).collect()
    };
    let mean_of = |graph: &Graph, w: &[f64], name: &str| -> Vec<f64> {
        let found = run_ranks(graph, &feeds(w), Options::EXACT).unwrap_or_else(|e| panic!("{e}"));
        let mut mean = Vec::new();
        for outputs in &found {
            let one = outputs.iter().find(|(n, _)| n == name).expect("an output").1.to_f64s();
            mean.resize(one.len(), 0.0);
            mean.iter_mut().zip(one).for_each(|(m, x)| *m += x / ranks as f64);
        }
        mean
    };
    let at = values(n, 9);
    for (e, found) in mean_of(&g, &at, "w").iter().enumerate() {
        let loss = |h: f64| {
            let mut w = at.clone();
            w[e] += h;
            mean_of(&forward, &w, "loss")[0]
        };
        let expected = (loss(1e-5) - loss(-1e-5)) / 2e-5;
        assert!(
            (found - expected).abs() <= 1e-6 * expected.abs().max(1.0),
            "{found}, not {expected}"
        );
    }
}

/// From between 0.3 and 1.7 to where a function is smooth, on both sides of zero if it is there; none for steps,
/// which have no slope and so no gradient path.
fn domain(f: UnaryFn) -> Option<impl Fn(&mut Graph, ValueId) -> ValueId> {
    use UnaryFn::*;
    let (scale, shift) = match f {
        Sign | Floor | Ceil | Round | Not | Detach => return None,
        Log | Log1p | Sqrt | Rsqrt => (1.0, 0.0),
        Reciprocal => (-1.0, 0.0),
        Asin | Acos | Atanh => (1.2, -1.2),
        Acosh => (1.0, 1.0),
        _ => (2.0, -2.0),
    };
    Some(move |g: &mut Graph, x: ValueId| {
        let scale = constant(g, Tensor::scalar(scale));
        let shift = constant(g, Tensor::scalar(shift));
        let x = add(g, Op::Binary(BinaryFn::Mul), &[x, scale])[0];
        add(g, Op::Binary(BinaryFn::Add), &[x, shift])[0]
    })
}

#[test]
fn unary_functions() {
    for &f in UnaryFn::ALL {
        let Some(place) = domain(f) else { continue };
        check(f.name(), &[&[2, 3]], |g, p| {
            let x = place(g, p[0]);
            add(g, Op::Unary(f), &[x])[0]
        });
    }
    single("clip", Op::Clip(Clip { min: Some(0.7), max: Some(1.2) }), &[&[3, 5]]);
}

#[test]
fn binary_functions_with_broadcasting() {
    use BinaryFn::*;
    for f in [Add, Sub, Mul, Div, Pow, Max, Min] {
        single(f.name(), Op::Binary(f), &[&[2, 3], &[2, 3]]);
        single(f.name(), Op::Binary(f), &[&[2, 3], &[3]]);
        single(f.name(), Op::Binary(f), &[&[2, 1], &[4, 1, 3]]);
    }
    check("select", &[&[2, 3], &[3]], |g, p| {
        let mask = Tensor::ints(DType::Bool, [2, 1], vec![1, 0]);
        let mask = constant(g, mask);
        add(g, Op::Select, &[mask, p[0], p[1]])[0]
    });
    check("one parameter used twice", &[&[3]], |g, p| {
        let square = add(g, Op::Binary(Mul), &[p[0], p[0]])[0];
        add(g, Op::Binary(Add), &[square, p[0]])[0]
    });
}

#[test]
fn layout() {
    single("reshape", Op::Reshape(Reshape { shape: Shape::from([3, 2]) }), &[&[2, 3]]);
    single("transpose", Op::Transpose(Transpose { perm: vec![2, 0, 1] }), &[&[2, 3, 4]]);
    single("expand", Op::Expand(Expand { shape: Shape::from([4, 2, 3]) }), &[&[2, 1]]);
    let slice = |start: [usize; 2], size: [usize; 2], step: [isize; 2]| {
        Op::Slice(Slice { start: start.to_vec(), size: size.to_vec(), step: step.to_vec() })
    };
    single("slice", slice([1, 0], [2, 3], [1, 1]), &[&[4, 3]]);
    single("strided slice", slice([0, 1], [2, 2], [3, 2]), &[&[5, 6]]);
    single("negative slice", slice([3, 4], [2, 5], [-2, -1]), &[&[4, 5]]);
    single("concat", Op::Concat(Concat { axis: 1 }), &[&[2, 3], &[2, 1], &[2, 2]]);
    let pad = Pad { low: vec![1, 0], high: vec![0, 2], value: 0.5 };
    single("pad", Op::Pad(pad), &[&[2, 3]]);
    for part in 0..3 {
        check("split", &[&[2, 6]], |g, p| {
            add(g, Op::Split(Split { axis: 1, sizes: vec![1, 2, 3] }), p)[part]
        });
    }
}

#[test]
fn indexing_and_sums() {
    check("embedding", &[&[4, 3]], |g, p| {
        let ids = constant(g, Tensor::ints(DType::I64, [2, 2], vec![1, 3, 1, 0]));
        add(g, Op::Embedding(Embedding::default()), &[p[0], ids])[0]
    });
    for axis in 0..3 {
        check("gather", &[&[3, 3, 3]], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, [2, 2], vec![1, 2, 1, -3]));
            add(g, Op::Gather(Gather { axis }), &[p[0], ids])[0]
        });
    }
    for axis in 0..2 {
        check("gather_elements", &[&[3, 3]], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, [2, 3], vec![0, 1, 1, 2, 0, 1]));
            add(g, Op::GatherElements(GatherElements { axis }), &[p[0], ids])[0]
        });
    }
    for batch_dims in [0, 1] {
        check("gather_nd", &[&[2, 3, 2]], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, [2, 2, 1], vec![1, 0, 1, -1]));
            add(g, Op::GatherNd(GatherNd { batch_dims }), &[p[0], ids])[0]
        });
    }
    for f in [ScatterFn::Replace, ScatterFn::Add, ScatterFn::Mul, ScatterFn::Max, ScatterFn::Min] {
        check("scatter_elements", &[&[3, 4], &[2, 3]], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, [2, 3], vec![0, 2, -3, 1, 0, 2]));
            let op = ScatterElements { axis: 0, f };
            add(g, Op::ScatterElements(op), &[p[0], ids, p[1]])[0]
        });
        for (batch_dims, ids) in [(0, vec![2, -2]), (1, vec![2, -2])] {
            let updates: &[usize] = if batch_dims == 0 { &[2, 3] } else { &[2] };
            check("scatter_nd", &[&[2 + (1 - batch_dims), 3], updates], |g, p| {
                let shape = [2, 1];
                let ids = constant(g, Tensor::ints(DType::I64, shape, ids.clone()));
                add(g, Op::ScatterNd(ScatterNd { batch_dims, f }), &[p[0], ids, p[1]])[0]
            });
        }
    }
    check("scatter_elements with repeated indices", &[&[3], &[4]], |g, p| {
        let ids = constant(g, Tensor::ints(DType::I64, [4], vec![0, 2, 0, 0]));
        let op = ScatterElements { axis: 0, f: ScatterFn::Add };
        add(g, Op::ScatterElements(op), &[p[0], ids, p[1]])[0]
    });
    for largest in [true, false] {
        single("top_k", Op::TopK(TopK { axis: 1, k: 2, largest }), &[&[2, 4, 3]]);
    }
    for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)] {
        single("cum_sum", Op::CumSum(CumSum { axis: 1, exclusive, reverse }), &[&[2, 4]]);
    }
    for f in [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Max, ReduceFn::Min, ReduceFn::Prod] {
        for (axes, keep_dims) in [(vec![1], false), (vec![0, 2], true), (vec![0, 1, 2], false)] {
            single("reduce", Op::Reduce(Reduce { f, axes, keep_dims }), &[&[2, 3, 4]]);
        }
    }
    single("sum_to", Op::SumTo(SumTo { shape: Shape::from([3, 1]), dtype: None }), &[&[2, 3, 4]]);
}

#[test]
fn matmuls() {
    let op = |trans_a, trans_b| Op::MatMul(MatMul { trans_a, trans_b, out: None });
    for lead in [&[][..], &[2], &[2, 3]] {
        for (trans_a, trans_b) in [(false, false), (true, false), (false, true), (true, true)] {
            let a = if trans_a { [4, 3] } else { [3, 4] };
            let b = if trans_b { [5, 4] } else { [4, 5] };
            let (batched_a, batched_b) = ([lead, &a].concat(), [lead, &b].concat());
            let name = format!("matmul {trans_a} {trans_b} {lead:?}");
            single(&name, op(trans_a, trans_b), &[&batched_a, &batched_b]);
            single(&name, op(trans_a, trans_b), &[&batched_a, &b]);
            single(&name, op(trans_a, trans_b), &[&a, &batched_b]);
        }
    }
    single("broadcast batch", op(false, false), &[&[2, 1, 3, 4], &[5, 4, 2]]);
}

/// The steps of a recurrence, as rows or as columns, by a weight as it is or transposed.
#[test]
fn recurrences() {
    for (by_rows, trans) in [(true, false), (true, true), (false, false), (false, true)] {
        let state = if by_rows { [2, 8] } else { [8, 2] };
        check("a recurrence", &[&[8, 8], &state], |g, p| {
            let matmul = |trans_a, trans_b| Op::MatMul(MatMul { trans_a, trans_b, out: None });
            let mut h = p[1];
            for _ in 0..5 {
                h = match by_rows {
                    true => add(g, matmul(false, trans), &[h, p[0]])[0],
                    false => add(g, matmul(trans, false), &[p[0], h])[0],
                };
                h = add(g, Op::Unary(UnaryFn::Tanh), &[h])[0];
            }
            h
        });
    }
}

#[test]
fn normalization_softmax_and_loss() {
    single("softmax", Op::Softmax(Softmax { axis: 1 }), &[&[2, 3, 2]]);
    single("log_softmax", Op::LogSoftmax(LogSoftmax { axis: 2 }), &[&[2, 2, 5]]);
    let norm = LayerNorm { axis: 1, eps: 1e-5 };
    single("layer_norm", Op::LayerNorm(norm.clone()), &[&[3, 5], &[5], &[5]]);
    single("layer_norm without bias", Op::LayerNorm(norm), &[&[3, 5], &[5]]);
    single("rms_norm", Op::RmsNorm(RmsNorm { axis: 2, eps: 1e-6 }), &[&[2, 2, 4], &[4]]);
    check("cross_entropy", &[&[4, 3]], |g, p| {
        let labels = constant(g, Tensor::ints(DType::I64, [4], vec![0, 2, -100, 1]));
        add(g, Op::CrossEntropy(CrossEntropy::ignoring(-100)), &[p[0], labels])[0]
    });
}

#[test]
fn attention() {
    let local =
        |causal, window| Op::Attention(Attention { scale: 0.5, causal, window, keep: None });
    let op = |causal| local(causal, None);
    for causal in [false, true] {
        let shapes: [&[usize]; 3] = [&[1, 2, 5, 3], &[1, 1, 4, 3], &[1, 1, 4, 2]];
        single("window", local(causal, Some(2)), &shapes);
    }
    for mask in [None, Some(&[1, 1, 3, 5][..])] {
        let shapes: Vec<&[usize]> =
            [&[2, 2, 3, 4][..], &[2, 1, 5, 4], &[2, 1, 5, 3]].into_iter().chain(mask).collect();
        check("dropout", &shapes, |g, p| {
            let kept = (0..60).map(|i| i64::from(i % 7 < 5)).collect();
            let kept = constant(g, Tensor::ints(DType::Bool, [2, 2, 3, 5], kept));
            let op = Attention { scale: 0.5, causal: false, window: None, keep: Some(0.75) };
            add(g, Op::Attention(op), &[p, &[kept]].concat())[0]
        });
    }
    single("attention", op(false), &[&[2, 2, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, 3]]);
    single("causal", op(true), &[&[1, 2, 4, 3], &[1, 2, 4, 3], &[1, 2, 4, 3]]);
    single("grouped heads", op(true), &[&[1, 4, 3, 2], &[1, 2, 3, 2], &[1, 2, 3, 2]]);
    for mask in [&[2, 2, 3, 5][..], &[1, 2, 3, 5], &[2, 1, 1, 5], &[3, 5], &[3, 1], &[]] {
        single("added mask", op(false), &[&[2, 2, 3, 4], &[2, 1, 5, 4], &[2, 1, 5, 3], mask]);
        single(
            "causal, added mask",
            op(true),
            &[&[2, 2, 3, 4], &[2, 1, 5, 4], &[2, 1, 5, 3], mask],
        );
    }
    check("masked", &[&[1, 2, 2, 3], &[1, 2, 3, 3], &[1, 2, 3, 2]], |g, p| {
        let mask = constant(g, Tensor::ints(DType::Bool, [2, 3], vec![1, 0, 1, 1, 1, 0]));
        add(g, op(false), &[p[0], p[1], p[2], mask])[0]
    });
}

#[test]
fn the_padding_row_of_an_embedding_gets_no_gradient() {
    let gradient = |padding_idx| {
        let mut g = Graph::new("g");
        let ty = TensorType::new(DType::F32, [3, 2]);
        let table = add(&mut g, Op::Param(trainable("table", ty.clone())), &[])[0];
        let ids = constant(&mut g, Tensor::ints(DType::I64, [2, 2], vec![1, 2, 1, 0]));
        let rows = add(&mut g, Op::Embedding(Embedding { padding_idx }), &[table, ids])[0];
        let sum = Reduce { f: ReduceFn::Sum, axes: vec![0, 1, 2], keep_dims: false };
        let loss = add(&mut g, Op::Reduce(sum), &[rows])[0];
        g.add_output("loss", loss, OutputKind::LossSum);
        Differentiate { accumulation: 1, capacity: 1.0 }
            .run(&mut g, &mut PassContext::default())
            .unwrap_or_else(|e| panic!("{e}"));
        let feeds = [("table".to_string(), Tensor::splat(ty, 1.0))].into();
        let results = run(&g, &feeds, Options::EXACT).unwrap_or_else(|e| panic!("{e}"));
        results.iter().find(|(n, _)| n == "table").expect("a gradient").1.to_f64s()
    };
    assert_eq!(gradient(None), [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]);
    assert_eq!(gradient(Some(1)), [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]);
}

/// As `x / 49` rounded once, not `x` times a rounded 1/49, and as a count of ties that bf16 does not hold.
#[test]
fn factors_and_counts_are_not_rounded_in_low_precision() {
    for (f, n, factor, expected) in
        [(ReduceFn::Mean, 49, 3.0, 3.0 / 49.0), (ReduceFn::Max, 257, 1.0, 1.0 / 257.0)]
    {
        let mut g = Graph::new("g");
        let x = add(&mut g, Op::Param(trainable("x", TensorType::new(DType::F32, [n]))), &[])[0];
        let low = add(&mut g, Op::Cast(Cast { to: DType::BF16 }), &[x])[0];
        let reduce = Reduce { f, axes: vec![0], keep_dims: false };
        let y = add(&mut g, Op::Reduce(reduce), &[low])[0];
        let factor = constant(&mut g, Tensor::splat(TensorType::scalar(DType::BF16), factor));
        let scaled = add(&mut g, Op::Binary(BinaryFn::Mul), &[y, factor])[0];
        let loss = add(&mut g, Op::Cast(Cast { to: DType::F32 }), &[scaled])[0];
        g.add_output("loss", loss, OutputKind::LossSum);
        Differentiate { accumulation: 1, capacity: 1.0 }
            .run(&mut g, &mut PassContext::default())
            .unwrap_or_else(|e| panic!("{e}"));
        let feeds = [("x".to_string(), Tensor::floats(DType::F32, [n], vec![1.0; n]))].into();
        let results = run(&g, &feeds, Options::default()).unwrap_or_else(|e| panic!("{e}"));
        let gradient = results.iter().find(|(n, _)| n == "x").expect("a gradient");
        assert_eq!(gradient.1.to_f64s(), vec![DType::BF16.round(expected); n], "{f:?}");
    }
}

#[test]
fn no_gradient_flows_through_a_detach() {
    let mut g = Graph::new("g");
    let ty = TensorType::new(DType::F32, [2]);
    let x = add(&mut g, Op::Param(trainable("x", ty.clone())), &[])[0];
    let fixed = add(&mut g, Op::Unary(UnaryFn::Detach), &[x])[0];
    let product = add(&mut g, Op::Binary(BinaryFn::Mul), &[x, fixed])[0];
    let sum = Reduce { f: ReduceFn::Sum, axes: vec![0], keep_dims: false };
    let loss = add(&mut g, Op::Reduce(sum), &[product])[0];
    g.add_output("loss", loss, OutputKind::LossSum);
    Differentiate { accumulation: 1, capacity: 1.0 }
        .run(&mut g, &mut PassContext::default())
        .unwrap_or_else(|e| panic!("{e}"));
    let feeds = [("x".to_string(), Tensor::floats(DType::F32, [2], vec![3.0, -5.0]))].into();
    let results = run(&g, &feeds, Options::EXACT).unwrap_or_else(|e| panic!("{e}"));
    // Of x·x it would be twice that.
    let gradient = results.iter().find(|(n, _)| n == "x").expect("a gradient");
    assert_eq!(gradient.1.to_f64s(), [3.0, -5.0]);
}

fn sliding(rank: usize, stride: usize, dilation: usize, low: usize, high: usize) -> Window {
    Window {
        strides: vec![stride; rank],
        dilations: vec![dilation; rank],
        low: vec![low; rank],
        high: vec![high; rank],
    }
}

#[test]
fn convolutions() {
    for (groups, x, w, window) in [
        (1, &[2, 2, 5][..], &[3, 2, 3][..], sliding(1, 1, 1, 1, 1)),
        (1, &[1, 2, 4, 5], &[2, 2, 2, 3], sliding(2, 2, 1, 1, 0)),
        (2, &[2, 4, 6], &[4, 2, 2], sliding(1, 1, 2, 0, 1)),
        (3, &[1, 3, 3, 3], &[3, 1, 2, 2], sliding(2, 1, 1, 0, 0)),
        (1, &[1, 1, 2, 3, 2], &[1, 1, 1, 2, 2], sliding(3, 1, 1, 0, 0)),
    ] {
        let op = Op::Conv(Conv { window: window.clone(), groups, out: None });
        check("conv", &[x, w], |g, p| add(g, op.clone(), p)[0]);
        // The transposed convolution that leads back to the sizes of x.
        let positions = window.positions(&x[2..], &w[2..]).expect("fits");
        let y = [&[x[0], w[0]], &positions[..]].concat();
        let op = ConvGradInput { window, groups, size: x[2..].to_vec(), out: None };
        check("conv_grad_input", &[&y, w], |g, p| add(g, Op::ConvGradInput(op.clone()), p)[0]);
    }
}

#[test]
fn pooling() {
    for (x, taps, window) in [
        (&[2, 2, 5][..], vec![3], sliding(1, 1, 1, 1, 1)),
        (&[1, 2, 4, 5], vec![2, 3], sliding(2, 2, 1, 0, 0)),
        (&[1, 1, 6], vec![2], sliding(1, 3, 2, 1, 1)),
    ] {
        let max = Op::MaxPool(MaxPool { window: window.clone(), taps: taps.clone() });
        check("max_pool", &[x], |g, p| add(g, max.clone(), p)[0]);
        let sum = Op::SumPool(SumPool { window, taps });
        check("sum_pool", &[x], |g, p| add(g, sum.clone(), p)[0]);
    }
}

#[test]
fn batch_normalization() {
    for shape in [&[4, 3][..], &[3, 2, 4], &[2, 1, 2, 3]] {
        let c = [shape[1]];
        check("batch_norm", &[shape, &c, &c], |g, p| {
            add(g, Op::BatchNorm(BatchNorm { eps: 1e-3 }), p)[0]
        });
    }
}

/// The gradient of Σ f(a, b) for `a` with these elements.
fn gradient_at(a: &[f64], f: impl Fn(&mut Graph, ValueId) -> ValueId) -> Vec<f64> {
    let mut g = Graph::new("g");
    let ty = TensorType::new(DType::F32, [a.len()]);
    let a_id = add(&mut g, Op::Param(trainable("a", ty.clone())), &[])[0];
    let y = f(&mut g, a_id);
    let axes = (0..g.ty(y).shape.rank()).collect();
    let sum = Op::Reduce(Reduce { f: ReduceFn::Sum, axes, keep_dims: false });
    let loss = add(&mut g, sum, &[y])[0];
    g.add_output("loss", loss, OutputKind::LossSum);
    Differentiate { accumulation: 1, capacity: 1.0 }
        .run(&mut g, &mut PassContext::default())
        .unwrap_or_else(|e| panic!("{e}"));
    let feeds = [("a".to_string(), Tensor::floats(DType::F32, [a.len()], a.to_vec()))].into();
    let results = run(&g, &feeds, Options::EXACT).unwrap_or_else(|e| panic!("{e}"));
    results.iter().find(|(n, _)| n == "a").expect("a gradient").1.to_f64s()
}

#[test]
fn products_with_zeros_have_gradients() {
    let product = |a: &[f64]| {
        gradient_at(a, |g, a| {
            let op = Reduce { f: ReduceFn::Prod, axes: vec![0], keep_dims: false };
            add(g, Op::Reduce(op), &[a])[0]
        })
    };
    assert_eq!(product(&[2.0, 3.0, 4.0]), [12.0, 8.0, 6.0]);
    assert_eq!(product(&[2.0, 0.0, 4.0]), [0.0, 8.0, 0.0]);
    assert_eq!(product(&[0.0, 0.0, 4.0]), [0.0, 0.0, 0.0]);
    // 5 · a₀ · a₂ at one place and 7 · a₁ at another.
    let scattered = |a: &[f64]| {
        gradient_at(a, |g, a| {
            let data = constant(g, Tensor::floats(DType::F32, [2], vec![5.0, 7.0]));
            let ids = constant(g, Tensor::ints(DType::I64, [3], vec![0, 1, 0]));
            let op = ScatterElements { axis: 0, f: ScatterFn::Mul };
            add(g, Op::ScatterElements(op), &[data, ids, a])[0]
        })
    };
    assert_eq!(scattered(&[2.0, 3.0, 4.0]), [20.0, 7.0, 10.0]);
    assert_eq!(scattered(&[0.0, 3.0, 4.0]), [20.0, 7.0, 0.0]);
    assert_eq!(scattered(&[0.0, 0.0, 0.0]), [0.0, 7.0, 0.0]);
    // The scattered-over data: zero times what is scattered.
    let data = |a: &[f64]| {
        gradient_at(a, |g, a| {
            let updates = constant(g, Tensor::floats(DType::F32, [2], vec![3.0, 4.0]));
            let ids = constant(g, Tensor::ints(DType::I64, [2], vec![1, 1]));
            let op = ScatterElements { axis: 0, f: ScatterFn::Mul };
            add(g, Op::ScatterElements(op), &[a, ids, updates])[0]
        })
    };
    assert_eq!(data(&[2.0, 0.0]), [1.0, 12.0]);
}

#[test]
fn gradients_flow_past_what_is_drawn() {
    // mean + exp(s) · z, read through a chain; the draws are those of one state.
    for f in [RandomFn::Normal, RandomFn::Uniform] {
        check("a reparameterized draw", &[&[3, 4], &[3, 4]], |g, p| {
            let state = constant(g, Tensor::ints(DType::I64, [5], vec![7, 0, 3, 1, 1]));
            let shape = Shape::from([3, 4]);
            let random = Random { f, shape, offset: 0.25, scale: 1.5, id: 2 };
            let z = add(g, Op::Random(random), &[state])[0];
            let deviation = add(g, Op::Unary(UnaryFn::Exp), &[p[1]])[0];
            let scaled = add(g, Op::Binary(BinaryFn::Mul), &[deviation, z])[0];
            let drawn = add(g, Op::Binary(BinaryFn::Add), &[p[0], scaled])[0];
            add(g, Op::Unary(UnaryFn::Tanh), &[drawn])[0]
        });
    }
}
