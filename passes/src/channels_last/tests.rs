//! Which operations compute channels last, what is transposed for it, and that results stay the same.

use super::{ChannelsLast, rewrite, transposed_bytes};
use crate::canonicalize;
use crate::fuse::tests::{feeds, fuse, outline, parse};
use crate::pass::{Changed, Pass, PassContext};
use frit_ir::interpret::{Options, run};
use frit_ir::ops::{
    BatchNorm, BinaryFn, Cast, CompareFn, Concat, Constant, Conv, ConvGradInput, ConvGradWeight,
    Expand, Input, MaxPool, MaxPoolGrad, Pad, Reduce, ReduceFn, Reshape, Slice, Split, SumPool,
    SumTo, Transpose, UnaryFn, Window,
};
use frit_ir::plan::{DeviceType, Target};
use frit_ir::verify::verify;
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, Shape, Tensor, TensorType, ValueId};
use proptest::prelude::*;

fn pass(device: DeviceType) -> ChannelsLast {
    ChannelsLast { target: Target { device, arch: "sm_90".into(), features: String::new() } }
}

/// The graph after the pass, which must compute the same.
fn changed(graph: &Graph) -> (Graph, Changed) {
    let mut last = graph.clone();
    let found = pass(DeviceType::Cuda).run(&mut last, &mut PassContext::default()).unwrap();
    computes_the_same(graph, &last);
    (last, found)
}

fn computes_the_same(graph: &Graph, last: &Graph) {
    if let Err(broken) = verify(last) {
        panic!("{}\n{last}", broken[0].message);
    }
    let feeds = feeds(graph);
    let evaluate = |g: &Graph| run(g, &feeds, Options::default()).expect("it evaluates");
    let bits = |g: &Graph| -> Vec<(String, Vec<u8>)> {
        evaluate(g).into_iter().map(|(name, t)| (name, t.to_bytes())).collect()
    };
    assert_eq!(bits(graph), bits(last), "\n{graph}\n{last}");
}

fn input(name: &str, shape: &str, dtype: &str) -> String {
    let ty = format!(r#"{{"dtype":"{dtype}","shape":[{shape}]}}"#);
    let shown = shape.replace(',', ", ");
    format!("%{name}: {dtype}[{shown}] = input {{name = \"{name}\", ty = {ty}}}\n")
}

const SLIDE: &str =
    r#"window = {"strides":[1,1],"dilations":[1,1],"low":[1,1],"high":[1,1]}, groups = 1"#;
const PLAIN: &str =
    r#"window = {"strides":[1,1],"dilations":[1,1],"low":[0,0],"high":[0,0]}, groups = 1"#;
const HALVE: &str =
    r#"window = {"strides":[2,2],"dilations":[1,1],"low":[0,0],"high":[0,0]}, taps = [2,2]"#;

/// A network of images `x`, two convolutions, and its loss's gradient `d` for the pooled features.
fn network() -> Graph {
    let leaves = [
        input("x", "2,3,8,8", "bf16"),
        input("k", "8,3,3,3", "bf16"),
        input("w", "16,8,1,1", "bf16"),
        input("s", "8", "f32"),
        input("b", "8", "f32"),
        input("c", "16,1,1", "bf16"),
        input("d", "2,16", "bf16"),
    ]
    .concat();
    parse(&format!(
        r#"{leaves}
        %h: bf16[2, 8, 8, 8] = conv %x, %k {{{SLIDE}}}
        %n: bf16[2, 8, 8, 8], %mean: f32[8], %var: f32[8] = batch_norm %h, %s, %b {{eps = 0.00001}}
        %r: bf16[2, 8, 8, 8] = relu %n
        %p: bf16[2, 8, 4, 4] = max_pool %r {{{HALVE}}}
        %y: bf16[2, 16, 4, 4] = conv %p, %w {{{PLAIN}}}
        %z: bf16[2, 16, 4, 4] = add %y, %c
        %m: bf16[2, 16] = reduce %z {{f = "mean", axes = [2,3]}}
        %e: bf16[2, 16, 1, 1] = reshape %d {{shape = [2,16,1,1]}} @backward
        %dz: bf16[2, 16, 4, 4] = expand %e {{shape = [2,16,4,4]}} @backward
        %dc: bf16[16, 1, 1] = sum_to %dz {{shape = [16,1,1]}} @backward
        %dw: bf16[16, 8, 1, 1] = conv_grad_weight %dz, %p {{{PLAIN}, taps = [1,1]}} @backward
        %dp: bf16[2, 8, 4, 4] = conv_grad_input %dz, %w {{{PLAIN}, size = [4,4]}} @backward
        %dr: bf16[2, 8, 8, 8] = max_pool_grad %dp, %r {{{HALVE}}} @backward
        %dn: bf16[2, 8, 8, 8] = relu_grad %dr, %r @backward
        %dh: bf16[2, 8, 8, 8], %ds: f32[8], %db: f32[8] = batch_norm_grad %dn, %h, %s, %mean, %var {{eps = 0.00001}} @backward
        %dk: bf16[8, 3, 3, 3] = conv_grad_weight %dh, %x {{{SLIDE}, taps = [3,3]}} @backward
        return %m as "m"
        return %mean as "mean"
        return %dc as "dc"
        return %dw as "dw"
        return %ds as "ds"
        return %db as "db"
        return %dk as "dk""#
    ))
}

#[test]
fn a_network_computes_channels_last() {
    let graph = network();
    let (last, found) = changed(&graph);
    assert_eq!(found, Changed::Yes);
    // Images and kernels of three channels stay as they are.
    assert_eq!(transposed_bytes(&last), 0);
    assert_eq!(
        outline(&fuse(&last)),
        "reshape; pointwise(expand) 1->1; sum_to; \
         channels_last(conv transpose) 2->1; \
         batch_norm(transpose batch_norm transpose relu) 3->3; \
         channels_last(transpose max_pool transpose) 1->1; \
         channels_last(transpose conv transpose) 2->1; \
         reshape; reshape; pointwise(add) 2->1; reduce; \
         reshape; pointwise(expand) 1->1; \
         channels_last(transpose transpose conv_grad_weight) 2->1; \
         channels_last(transpose conv_grad_input transpose) 2->1; \
         channels_last(transpose transpose max_pool_grad transpose) 2->1; \
         batch_norm(relu_grad transpose transpose batch_norm_grad transpose) 6->3; \
         channels_last(transpose conv_grad_weight) 2->1"
    );
}

#[test]
fn a_processor_keeps_its_images() {
    let mut graph = network();
    let found = pass(DeviceType::Cpu).run(&mut graph, &mut PassContext::default()).unwrap();
    assert_eq!(found, Changed::No);
}

#[test]
fn convolutions_between_other_operations_keep_their_images() {
    // Each convolution would transpose its images for itself, and the sum over groups of channels once more.
    let graph = parse(&format!(
        r#"{}{}
        %y: bf16[2, 8, 4, 4] = conv %x, %k {{{SLIDE}}}
        %g: bf16[2, 2, 64] = reshape %y {{shape = [2,2,64]}}
        %n: bf16[2, 2, 64] = softmax %g {{axis = 2}}
        %u: bf16[2, 8, 4, 4] = reshape %n {{shape = [2,8,4,4]}}
        %z: bf16[2, 8, 4, 4] = conv %u, %k {{{SLIDE}}}
        return %z as "z""#,
        input("x", "2,8,4,4", "bf16"),
        input("k", "8,8,3,3", "bf16"),
    ));
    assert_eq!(changed(&graph).1, Changed::No);
}

#[test]
fn axes_follow_their_channels() {
    let graph = parse(&format!(
        r#"{}{}
        %a: bf16[2, 8, 4, 4] = conv %x, %k {{{SLIDE}}}
        %b: bf16[2, 8, 4, 4] = conv %a, %k {{{SLIDE}}}
        %c: bf16[2, 16, 4, 4] = concat %a, %b {{axis = 1}}
        %l: bf16[2, 4, 4, 4], %r: bf16[2, 12, 4, 4] = split %c {{axis = 1, sizes = [4,12]}}
        %s: bf16[2, 8, 4, 4] = slice %r {{start = [0,2,0,0], size = [2,8,4,4], step = [1,1,1,1]}}
        %p: bf16[2, 8, 5, 6] = pad %s {{low = [0,0,1,0], high = [0,0,0,2], value = 1.0}}
        %q: bf16[2, 8, 5, 6] = conv %p, %k {{{SLIDE}}}
        %f: bf16[2, 30, 8] = reshape %q {{shape = [2,30,8]}}
        %i: bf16[2, 8, 30] = reshape %q {{shape = [2,8,30]}}
        %j: bf16[2, 30, 8] = transpose %i {{perm = [0,2,1]}}
        %k2: bf16[2, 8, 30] = transpose %j {{perm = [0,2,1]}}
        %l2: bf16[2, 8, 6, 5] = reshape %k2 {{shape = [2,8,6,5]}}
        %o: bf16[2, 8, 6, 5] = conv %l2, %k {{{SLIDE}}}
        %u: bf16[2, 6, 5, 8] = transpose %o {{perm = [0,2,3,1]}}
        %t: bf16[2, 5, 6, 8] = transpose %q {{perm = [0,2,3,1]}}
        %m: bf16[2, 1, 5, 6] = reduce %q {{f = "max", axes = [1], keep_dims = true}}
        %v: bf16[8, 6] = reduce %q {{f = "sum", axes = [0,2]}}
        %w: bf16[2, 1, 1, 6] = sum_to %q {{shape = [2,1,1,6]}}
        return %l as "l"
        return %f as "f"
        return %j as "j"
        return %u as "u"
        return %t as "t"
        return %m as "m"
        return %v as "v"
        return %w as "w""#,
        input("x", "2,8,4,4", "bf16"),
        input("k", "8,8,3,3", "bf16"),
    ));
    let (last, found) = changed(&graph);
    assert_eq!(found, Changed::Yes);
    // `x` and `k` once; what is read in another order: `l`, `f` and `v`.
    let moved = 2 * (2 * 8 * 16 + 8 * 8 * 9 + 2 * 4 * 16 + 2 * 8 * 30 + 8 * 6);
    assert_eq!(transposed_bytes(&last), moved);
}

/// Chooses one node of a random graph; operands are chosen among the values so far.
#[derive(Clone, Debug)]
struct Step {
    op: usize,
    operands: [usize; 3],
    pick: usize,
    is_output: bool,
}

fn step() -> impl Strategy<Value = Step> {
    (0..30usize, any::<[usize; 3]>(), any::<usize>(), prop::bool::weighted(0.2))
        .prop_map(|(op, operands, pick, is_output)| Step { op, operands, pick, is_output })
}

/// Operations on images and around them, most of which fit `[2, 8, 4, 4]`.
fn op_of(step: &Step, a: &TensorType) -> Op {
    let (rank, pick) = (a.shape.rank(), step.pick);
    let axis = if rank == 0 { 0 } else { pick % rank };
    let same = Window { low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) };
    let window = if pick.is_multiple_of(2) { same } else { Window::plain(2) };
    let (taps, size) = (vec![3 - 2 * (pick % 2); 2], vec![4, 4]);
    let dims = |choices: &[&[usize]]| Shape::from(choices[pick % choices.len()]);
    match step.op {
        0..=4 => Op::Conv(Conv { window, groups: 1, out: None }),
        5 => Op::Conv(Conv { window, groups: 8, out: None }),
        6 => Op::ConvGradInput(ConvGradInput { window, groups: 1, size, out: None }),
        7 => Op::ConvGradWeight(ConvGradWeight { window, groups: 1, taps, out: None }),
        8 => Op::BatchNorm(BatchNorm { eps: 0.1 }),
        9 => Op::MaxPool(MaxPool { window, taps }),
        10 => Op::MaxPoolGrad(MaxPoolGrad { window, taps }),
        11 => Op::SumPool(SumPool { window, taps }),
        12..=14 => Op::Binary([BinaryFn::Add, BinaryFn::Mul, BinaryFn::ReluGrad][pick % 3]),
        15 => Op::Unary([UnaryFn::Relu, UnaryFn::Neg][pick % 2]),
        16 => Op::Cast(Cast { to: [DType::BF16, DType::F32][pick % 2] }),
        17 => Op::Compare(CompareFn::Lt),
        18 => Op::Select,
        19 => Op::Concat(Concat { axis }),
        20 => Op::Split(Split { axis, sizes: vec![a.shape.0.get(axis).map_or(0, |n| n / 2); 2] }),
        21 => Op::Slice(Slice {
            start: vec![0; rank],
            size: a
                .shape
                .0
                .iter()
                .enumerate()
                .map(|(i, n)| n.saturating_sub((i == axis).into()))
                .collect(),
            step: vec![1; rank],
        }),
        22 => Op::Pad(Pad {
            low: (0..rank).map(|i| usize::from(i == axis)).collect(),
            high: vec![0; rank],
            value: 0.5,
        }),
        23 => Op::Reduce(Reduce {
            f: [ReduceFn::Max, ReduceFn::Min][pick % 2],
            axes: (axis..rank.min(axis + 1 + pick / 4 % 3)).collect(),
            keep_dims: pick / 2 % 2 == 0,
        }),
        24 => Op::SumTo(SumTo {
            shape: dims(&[&[8, 1, 1], &[1, 8, 1, 1], &[4], &[2, 1, 4, 1], &[4, 4]]),
            dtype: None,
        }),
        25 => Op::Transpose(Transpose {
            perm: [vec![0, 2, 3, 1], vec![0, 3, 1, 2], vec![0, 2, 1], vec![1, 0, 3, 2]][pick % 4]
                .clone(),
        }),
        26 | 27 => Op::Reshape(Reshape {
            shape: dims(&[&[2, 8, 16], &[2, 8, 4, 4], &[2, 8, 2, 8], &[2, 2, 4, 16], &[2, 16, 8]]),
        }),
        28 => Op::Expand(Expand { shape: dims(&[&[2, 8, 4, 4], &[2, 8, 16]]) }),
        _ => Op::Constant(Constant {
            value: Tensor::splat(TensorType::new(a.dtype, a.shape.clone()), 0.5),
        }),
    }
}

fn grow(steps: &[Step]) -> Graph {
    let mut graph = Graph::new("random");
    let mut values: Vec<ValueId> = Vec::new();
    let leaves: [&[usize]; 10] = [
        &[2, 8, 4, 4],
        &[2, 8, 4, 4],
        &[8, 8, 3, 3],
        &[8, 8, 1, 1],
        &[8, 1, 3, 3],
        &[8, 1, 1],
        &[2, 3, 4, 4],
        &[8, 3, 3, 3],
        &[2, 8, 1, 1],
        &[],
    ];
    for (i, dims) in leaves.into_iter().enumerate() {
        let ty = TensorType::new(DType::BF16, dims);
        let leaf = Op::Input(Input { name: format!("x{i}"), ty });
        values.push(graph.add1(leaf, &[], Origin::none(), Region::Forward).expect("a leaf"));
    }
    let ty = TensorType::new(DType::F32, [8]);
    let leaf = Op::Input(Input { name: "vector".into(), ty });
    let vector = graph.add1(leaf, &[], Origin::none(), Region::Forward).expect("a leaf");
    let kernels = [values[2], values[3], values[4], values[7]];
    for (i, step) in steps.iter().enumerate() {
        // Later values are chosen more often, so that chains are long.
        let choose = |r: usize| {
            let n = values.len();
            if r.is_multiple_of(3) { values[r / 3 % n] } else { values[n - 1 - r / 3 % n.min(4)] }
        };
        let [a, b, c] = step.operands.map(choose);
        let kernel = kernels[step.pick / 2 % 4];
        let op = op_of(step, graph.ty(a));
        let region = if i * 2 < steps.len() { Region::Forward } else { Region::Backward };
        let operands =
            [vec![], vec![a, kernel], vec![a, vector, vector], vec![a], vec![a, b], vec![c, a, b]];
        let added = operands.into_iter().find_map(|inputs| {
            if inputs.is_empty() != op.is_leaf() {
                return None;
            }
            graph.add(op.clone(), &inputs, Origin::none(), region).ok()
        });
        let Some(added) = added else { continue };
        if step.is_output {
            graph.add_output(&format!("y{i}"), added[0], OutputKind::Result);
        }
        values.extend(added);
    }
    if let Some(last) = values.last() {
        graph.add_output("last", *last, OutputKind::Result);
    }
    graph.remove_dead();
    graph
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]
    /// However many bytes are transposed for it.
    #[test]
    fn random_graphs_compute_the_same(steps in prop::collection::vec(step(), 1..30)) {
        let graph = grow(&steps);
        let mut last = graph.clone();
        rewrite(&mut last).expect("it succeeds");
        canonicalize::sort(&mut last).expect("no cycle");
        computes_the_same(&graph, &last);
        fuse(&last);
    }
}
