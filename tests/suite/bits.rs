//! Outputs that are certified bit for bit have the same bits: graphs between passes, and graphs that were changed at random, are
//! interpreted and compared. The interpreter computes in f64 and rounds once, so another order shows only where it changes what is rounded.

use crate::certificate::{Trace, changed, configured, edit, feeds, rounded};
use crate::driver::tensors;
use crate::pairs::rows;
use crate::simulate::frit;
use crate::support::{Planned, file, plan_to_evaluate, train};
use expect_test::expect;
use frit::compilation::{Request, compile, imported};
use frit::config::Config;
use frit::plan_dir::{self, Stored};
use frit_ir::interpret::{Options, run_ranks};
use frit_ir::ops::{BinaryFn, Cast, ReduceFn, Slice, UnaryFn};
use frit_ir::{DType, Graph, NodeId, Op, Origin, ValueId};
use frit_verify::{Comparer, Ranks, key_of, on_large_stack};
use std::collections::{BTreeMap, BTreeSet};

/// The bits of each output on each rank, by its name.
type Outputs = BTreeMap<String, Vec<u64>>;

fn outputs(graph: &Graph, ranks: Ranks) -> Option<Outputs> {
    let feeds: Vec<_> = (0..ranks.number()).map(|rank| feeds(graph, rank)).collect();
    let found = run_ranks(graph, &feeds, Options::default()).ok()?;
    let mut all = Outputs::new();
    for of_rank in found {
        for (output, (_, tensor)) in graph.outputs.iter().zip(of_rank) {
            // One NaN is as good as another.
            let bits = tensor.to_f64s().into_iter().map(|x| if x.is_nan() { f64::NAN } else { x });
            all.entry(key_of(graph, output)).or_default().extend(bits.map(f64::to_bits));
        }
    }
    Some(all)
}

/// The outputs of the second graph that are certified to have the bits of the first.
fn claimed(before: &Graph, after: &Graph, ranks: Ranks) -> BTreeSet<String> {
    claimed_by(&mut Comparer::of_bits(), before, after, ranks)
}

fn claimed_by(
    comparer: &mut Comparer,
    before: &Graph,
    after: &Graph,
    ranks: Ranks,
) -> BTreeSet<String> {
    let found = comparer.compare(before, after, ranks);
    let different: BTreeSet<String> = found.into_iter().map(|d| d.output).collect();
    let all = after.outputs.iter().map(|output| key_of(after, output));
    all.filter(|output| !different.contains(output)).collect()
}

/// The graphs of a compilation, from the imported one, each with the pass that made it.
fn graphs(request: &Request, config: &Config) -> Vec<(String, Graph)> {
    let request = Request { without_code: true, ..request.clone() };
    let mut trace = Trace::default();
    compile(&request, config, &mut trace).unwrap_or_else(|e| panic!("{e}"));
    let first = imported(&request, config).unwrap_or_else(|e| panic!("{e}")).graph;
    [(String::new(), first)].into_iter().chain(trace.0).collect()
}

fn ranks(config: &Config) -> Ranks {
    let sharding = &config.sharding;
    let shards = sharding.strategy.shards(sharding.ranks, sharding.shard_group);
    Ranks { shards, replicas: sharding.ranks / shards }
}

/// Passes that add outputs, or what these are.
const STATED: [&str; 4] = ["loss", "differentiate", "loss_scale", "update"];

/// How many times as many changes are tried as in a usual run: `FRIT_MANY`.
pub(crate) fn many() -> usize {
    std::env::var("FRIT_MANY").map_or(1, |n| n.parse().expect("a number"))
}

/// What was compared.
#[derive(Debug, Default)]
struct Count {
    /// Outputs of passes that changed the graph.
    all: usize,
    /// Those of them that are certified bit for bit.
    claimed: usize,
    /// Those of the others that have other bits.
    different: usize,
}

/// Requires of every pass that outputs which are certified bit for bit have the same bits.
fn check(model: &str, settings: &[&str], count: &mut Count) {
    let (request, config) = configured(model, 2, settings);
    let (graphs, ranks) = (graphs(&request, &config), ranks(&config));
    let mut expected = None;
    for pair in graphs.windows(2) {
        let [(_, before), (pass, after)] = pair else { continue };
        if before == after || STATED.contains(&pass.as_str()) {
            expected = None;
            continue;
        }
        let old: Option<Outputs> = expected.take().or_else(|| outputs(before, ranks));
        let new = outputs(after, ranks);
        let (Some(old), Some(new)) = (old, new) else { panic!("{model}, {pass}: not interpreted") };
        let claimed = on_large_stack(|| claimed(before, after, ranks));
        count.all += new.len();
        count.claimed += claimed.len();
        for (output, bits) in &new {
            if old.get(output) == Some(bits) {
                continue;
            }
            assert!(!claimed.contains(output), "{model} {settings:?}: {pass} changes {output}");
            count.different += 1;
        }
        expected = Some(new);
    }
}

#[test]
fn outputs_that_are_certified_bit_for_bit_have_the_same_bits() {
    let factors: [&[&str]; 8] = [
        &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3"],
        &[
            "sharding.strategy=\"full_shard\"",
            "sharding.strategy=\"no_shard\"",
            "sharding.strategy=\"shard_grad_op\"",
        ],
        &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
        &["run.accumulation=1", "run.accumulation=2"],
        &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
        &["memory.loss_chunks=1", "memory.loss_chunks=2", "memory.loss_chunks=3"],
        &["padding.tensor_cores=always", "padding.tensor_cores=never"],
        &["optimizer.clip_grad_norm=0", "optimizer.clip_grad_norm=0.5"],
    ];
    let mut count = Count::default();
    for row in rows(&factors, |_| true) {
        let settings: Vec<&str> = row.iter().zip(&factors).map(|(level, f)| f[*level]).collect();
        check("tests/museum/models/lm.json", &settings, &mut count);
    }
    assert!(count.claimed > 900 && count.different > 300, "{count:?}");
}

#[test]
fn outputs_of_models_that_are_certified_bit_for_bit_have_the_same_bits() {
    let mut count = Count::default();
    for (i, model) in [
        "mlp",
        "gpt2",
        "llama",
        "bert",
        "bloom",
        "opt",
        "t5",
        "vit",
        "resnet",
        "unet",
        "gru",
        "lstm",
        "moe_dispatch",
        "moe_einsum",
    ]
    .into_iter()
    .enumerate()
    {
        let path = format!("tests/models/{model}/model.onnx");
        // There are no classes whose loss could be computed in chunks.
        let (loss, second) = match model {
            "unet" => ("loss.kind=mse", "memory.recompute=selective"),
            _ => ("loss.kind=cross_entropy", "memory.loss_chunks=2"),
        };
        let settings = [loss, "padding.tensor_cores=always"];
        let more = match i % 2 {
            0 => ["sharding.ranks=1", "precision.compute=fp32", "memory.recompute=unit"],
            _ => ["sharding.ranks=2", "precision.compute=bf16", second],
        };
        check(&path, &[&settings[..], &more].concat(), &mut count);
    }
    assert!(count.claimed > 1500, "{count:?}");
}

/// A change that real numbers do not see: sums and products in another order, a product into a sum, a quotient as a product, a reduction
/// or a matmul cut in two, a multiplication and a sum that round once, a cast exchanged with a function.
fn reordered(graph: &Graph, random: &mut fastrand::Rng) -> Option<Graph> {
    let mut new = graph.clone();
    let ids: Vec<NodeId> = graph.order().to_vec();
    let node = graph.node(ids[random.usize(0..ids.len())]).clone();
    let output = *node.outputs.first()?;
    let mut add = |op: Op, of: &[ValueId]| new.add1(op, of, Origin::none(), node.region).ok();
    let same = |a: ValueId, b: ValueId| graph.ty(a) == graph.ty(b);
    let (binary, cast) = (Op::Binary, |to: DType| Op::Cast(Cast { to }));
    let half = |n: usize| n / 2;
    let cut = |add: &mut dyn FnMut(Op, &[ValueId]) -> Option<ValueId>, x: ValueId, axis: usize| {
        let sizes = graph.ty(x).shape.dims().to_vec();
        let n = half(sizes[axis]);
        [(0, n), (n, sizes[axis] - n)].map(|(start, size)| {
            let (mut at, mut parts) = (vec![0; sizes.len()], sizes.clone());
            (at[axis], parts[axis]) = (start, size);
            let step = vec![1; sizes.len()];
            add(Op::Slice(Slice { start: at, size: parts, step }), &[x])
        })
    };
    let made = match (&node.op, &node.inputs[..]) {
        (Op::Binary(f @ (BinaryFn::Add | BinaryFn::Mul)), &[x, c]) => {
            let inner = graph.def(x);
            if inner.inputs.len() != 2 || !same(x, output) {
                return None;
            }
            let (a, b) = (inner.inputs[0], inner.inputs[1]);
            match (f, &inner.op) {
                (f, Op::Binary(g)) if f == g => {
                    let rest = add(binary(*f), &[b, c])?;
                    add(binary(*f), &[a, rest])?
                }
                (BinaryFn::Mul, Op::Binary(BinaryFn::Add)) => {
                    let (a, b) = (add(binary(*f), &[a, c])?, add(binary(*f), &[b, c])?);
                    add(binary(BinaryFn::Add), &[a, b])?
                }
                (BinaryFn::Add, Op::Binary(BinaryFn::Mul)) => {
                    let [a, b, c] = [a, b, c].map(|x| add(cast(DType::F64), &[x]));
                    let product = add(binary(BinaryFn::Mul), &[a?, b?])?;
                    let sum = add(binary(BinaryFn::Add), &[product, c?])?;
                    add(cast(graph.ty(output).dtype), &[sum])?
                }
                _ => return None,
            }
        }
        (Op::Binary(BinaryFn::Div), &[a, b]) => {
            let inverse = add(Op::Unary(UnaryFn::Reciprocal), &[b])?;
            add(binary(BinaryFn::Mul), &[a, inverse])?
        }
        (Op::Reduce(op), &[x]) if op.f == ReduceFn::Sum => {
            let parts = cut(&mut add, x, *op.axes.first()?);
            let [a, b] = parts.map(|part| add(node.op.clone(), &[part?]));
            add(binary(BinaryFn::Add), &[a?, b?])?
        }
        (Op::MatMul(op), &[a, b]) => {
            let rank = |v: ValueId| graph.ty(v).shape.rank();
            let left = cut(&mut add, a, rank(a) - if op.trans_a { 2 } else { 1 });
            let right = cut(&mut add, b, rank(b) - if op.trans_b { 1 } else { 2 });
            let [[a, c], [b, d]] = [left, right];
            let (x, y) = (add(node.op.clone(), &[a?, b?])?, add(node.op.clone(), &[c?, d?])?);
            add(binary(BinaryFn::Add), &[x, y])?
        }
        (Op::Cast(Cast { to }), &[x]) if to.is_low_precision() => {
            let inner = graph.def(x);
            if !inner.op.is_pointwise() || matches!(inner.op, Op::Cast(_)) {
                return None;
            }
            let operands: Option<Vec<ValueId>> =
                inner.inputs.iter().map(|x| add(cast(*to), &[*x])).collect();
            add(inner.op.clone(), &operands?)?
        }
        _ => return None,
    };
    if new.ty(made) != graph.ty(output) {
        return None;
    }
    new.replace_uses(output, made);
    new.remove_dead();
    new.sort().ok()?;
    frit_ir::verify::verify(&new).ok()?;
    Some(new)
}

#[test]
fn a_change_of_a_bit_is_never_certified_bit_for_bit() {
    let squares = ["loss.kind=mse", "precision.compute=fp32"];
    let logits = [&squares[..], &["loss.logits=y"]].concat();
    let models: [(&str, &[&str], usize); 10] = [
        ("lm", &["precision.compute=fp32", "optimizer.clip_grad_norm=1.0"], 180),
        ("lm", &["precision.compute=fp16", "sharding.ranks=2", "sharding.strategy=no_shard"], 180),
        ("lm", &["precision.compute=bf16", "memory.recompute=unit", "optimizer.kind=sgd"], 180),
        ("lm", &["precision.compute=fp32", "sharding.ranks=2", "run.accumulation=2"], 180),
        ("attention", &["precision.compute=fp32", "sharding.ranks=2"], 60),
        ("pooled", &["loss.kind=cross_entropy", "precision.compute=bf16"], 60),
        ("grouped", &squares, 60),
        ("masked", &logits, 60),
        ("modulated", &squares, 60),
        ("scattered", &squares, 60),
    ];
    let mut random = fastrand::Rng::with_seed(3);
    // Of each kind of change: how many changed a bit, and outputs that kept all and are certified.
    let mut counts = [[0; 2]; 3];
    for (model, settings, attempts) in models {
        let path = format!("tests/museum/models/{model}.json");
        let (request, config) = configured(&path, 2, settings);
        let ranks = ranks(&config);
        let mut last = None;
        for (pass, graph) in graphs(&request, &config) {
            if last.as_ref() == Some(&graph) {
                continue;
            }
            let Some(expected) = outputs(&graph, ranks) else { continue };
            let of_graph = on_large_stack(|| {
                let mut comparer = Comparer::of_bits();
                let mut counts = [[0; 2]; 3];
                for attempt in 0..attempts * many() {
                    let kind = attempt % 3;
                    let change = [changed, rounded, reordered][kind];
                    let mutant = (0..3).find_map(|_| change(&graph, &mut random));
                    let found = mutant.and_then(|mutant| Some((outputs(&mutant, ranks)?, mutant)));
                    let Some((found, mutant)) = found else { continue };
                    let claimed = claimed_by(&mut comparer, &graph, &mutant, ranks);
                    counts[kind][0] += usize::from(found != expected);
                    for (output, bits) in &found {
                        let same = expected.get(output) == Some(bits);
                        let claimed = claimed.contains(output);
                        counts[kind][1] += usize::from(same && claimed);
                        if claimed && !same {
                            return Err(format!("{output}:\n{}", edit(&graph, &mutant)));
                        }
                    }
                }
                Ok(counts)
            });
            match of_graph {
                Ok(of_graph) => {
                    let all = counts.iter_mut().flatten().zip(of_graph.iter().flatten());
                    all.for_each(|(sum, n)| *sum += n);
                }
                Err(wrong) => panic!("{model} {settings:?}: {pass} changes {wrong}"),
            }
            last = Some(graph);
        }
    }
    let [operands, roundings, orders] = counts;
    assert!(operands[0] > 700 && roundings[0] > 700 && orders[0] > 300, "{counts:?}");
    assert!(counts.iter().all(|count| count[1] > 1000), "{counts:?}");
}

/// A plan of a model, executed for a step.
struct Executed {
    /// What it was lowered from.
    graph: Graph,
    /// Bits of the loss and of each gradient, by the output.
    numbers: BTreeMap<String, Vec<u64>>,
}

fn executed(model: &str, settings: &[&str], disabled: &[&str], interpret: bool) -> Executed {
    let (request, config) = configured(&format!("tests/models/{model}/model.onnx"), 4, settings);
    let disabled = disabled.iter().map(|pass| (*pass).to_string()).collect();
    let request = Request { disabled, ..request };
    let mut trace = Trace::default();
    let compiled = compile(&request, &config, &mut trace).unwrap_or_else(|e| panic!("{e}"));
    let compiled = compiled.expect("a plan");
    let planned = Planned { compiled, dir: tempfile::tempdir().expect("a directory") };
    plan_dir::write(&planned.path(), &planned.compiled, Stored::Copy)
        .unwrap_or_else(|e| panic!("{e}"));
    let data = format!("tests/models/{model}/data.safetensors");
    let loss = train(&planned, &data, 1, interpret).losses[0];
    let gradients = tensors(&planned.dir.path().join("grads.safetensors")).into_iter();
    let bits = |values: Vec<f32>| values.into_iter().map(|x| u64::from(x.to_bits())).collect();
    let mut numbers: BTreeMap<String, Vec<u64>> =
        gradients.map(|(name, values)| (format!("gradient {name}"), bits(values))).collect();
    numbers.insert("metric loss".into(), vec![loss.to_bits()]);
    let graph = trace.0.pop().expect("a pass").1;
    Executed { graph, numbers }
}

/// Whether matmuls on this machine add along the contracted axis in an order that depends on its size alone.
fn adds_by_depth() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Plans whose last graphs have the same bits are executed, by the interpreter and by kernels. Kernels of regions add in an order of
/// their own, so plans with and without regions are left to the interpreter.
#[test]
fn executed_steps_that_are_certified_bit_for_bit_have_the_same_bits() {
    let mut counts = [0; 2];
    for (model, interpret) in ["mlp", "gpt2", "llama", "bert", "bloom", "opt", "vit", "resnet"]
        .into_iter()
        .flat_map(|m| [(m, true), (m, false)])
    {
        let fixed = ["loss.kind=cross_entropy", "precision.compute=fp32"];
        let of = |more: &[&str], disabled: &[&str]| {
            executed(model, &[&fixed[..], more].concat(), disabled, interpret)
        };
        let first = of(&["padding.tensor_cores=never"], &[]);
        let sizes = interpret || adds_by_depth();
        for (more, disabled, holds) in [
            (&["memory.recompute=unit"][..], &[][..], true),
            (&["padding.tensor_cores=always"], &[], sizes),
            (&["memory.loss_chunks=3"], &[], sizes),
            (&[], &["fuse"], interpret),
        ] {
            if !holds {
                continue;
            }
            let other = of(more, disabled);
            let claimed = on_large_stack(|| claimed(&first.graph, &other.graph, Ranks::ONE));
            for (output, bits) in first.numbers.iter().filter(|(o, _)| claimed.contains(*o)) {
                counts[usize::from(interpret)] += 1;
                let same = other.numbers.get(output) == Some(bits);
                assert!(same, "{model}, {more:?} {disabled:?}: {output}");
            }
        }
    }
    assert!(counts[1] > 300 && counts[0] > 80, "{counts:?}");
}

#[test]
fn the_page_says_which_outputs_are_equal_bit_for_bit() {
    let page = |model: &str, settings: &[&str]| {
        let model = format!("tests/models/{model}/model.onnx");
        let settings = [&["loss.kind=cross_entropy"], settings].concat();
        let planned = plan_to_evaluate(&model, 2, &settings);
        let dir = planned.path().display().to_string();
        let model = file(&model).display().to_string();
        let page = frit(&["verify", &dir, "--model", &model]).unwrap_or_else(|e| panic!("{e}"));
        page.replace(&dir, "plan")
    };
    let fp32 = page("gpt2", &["precision.compute=fp32", "memory.recompute=unit"]);
    expect![[r#"
        plan: sound (89 tasks)
        plan/eval: sound (41 tasks)
          model: models/gpt2/model.onnx (sha256 a18984723900011195abbc4d9af011f5188bb37e80ff9146e6023cbc7724ac3c)
          12 passes changed nothing
          equal bit for bit: canonicalize, recompute
          equal but for f32 rounding, such as the order of sums: raise, fuse, lower
          as stated: loss, differentiate, update, shard
          evaluation: 9 passes changed nothing
          evaluation: equal bit for bit: canonicalize, fuse, lower
          evaluation: equal but for f32 rounding, such as the order of sums: raise
          evaluation: as stated: shard
          evaluation: assumed: evaluate
          30 of 119 outputs (gradients: 27, metrics: 3) equal bit for bit
          assumed: an operation has the same bits in every kernel, inside and outside of fused regions
          89 of 119 outputs (gradients: 1, metrics: 3, parameters and states: 85) equal but for f32 rounding, such as the order of sums: fuse
        plan: certified: every rank computes the step of the model
    "#]]
    .assert_eq(&fp32);
    let bf16 = page("gpt2", &["sharding.ranks=4", "memory.loss_chunks=2"]);
    expect![[r#"
        plan: sound (118 tasks)
        plan/eval: sound (50 tasks)
          model: models/gpt2/model.onnx (sha256 a18984723900011195abbc4d9af011f5188bb37e80ff9146e6023cbc7724ac3c)
          9 passes changed nothing
          equal bit for bit: canonicalize, recompute, simplify
          equal but for f32 rounding, such as the order of sums: raise, chunk_loss, fuse, lower
          equal but for rounding: autocast
          as stated: loss, differentiate, update, shard
          evaluation: 7 passes changed nothing
          evaluation: equal bit for bit: canonicalize, simplify, lower
          evaluation: equal bit for bit but for 16-bit values that regions keep in f32: fuse
          evaluation: equal but for f32 rounding, such as the order of sums: raise
          evaluation: equal but for rounding: autocast
          evaluation: as stated: shard
          evaluation: assumed: evaluate
          2 of 119 outputs (metrics: 2) equal bit for bit
          assumed: an operation has the same bits in every kernel, inside and outside of fused regions
          117 of 119 outputs (gradients: 28, metrics: 4, parameters and states: 85) equal but for f32 rounding, such as the order of sums: chunk_loss, fuse, shard over 4 ranks
          117 outputs rounded, by add to bf16, attention to bf16, attention_grad to bf16, cast to bf16, cross_entropy_grad to bf16, gelu_tanh to bf16, gelu_tanh_grad to bf16, matmul to bf16
        plan: certified: every rank computes the step of the model
    "#]].assert_eq(&bf16);
}
