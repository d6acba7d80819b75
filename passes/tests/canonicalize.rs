//! Random small graphs: canonicalization keeps every bit, shrinks or keeps the graph, and is stable.

use frit_ir::interpret::{Options, run};
use frit_ir::ops::{
    BinaryFn, Cast, CompareFn, Constant, Expand, Input, LogicalFn, Pad, Reduce, ReduceFn, Reshape,
    Slice, Transpose, UnaryFn,
};
use frit_ir::{
    DType, Graph, Op, Origin, OutputKind, Region, Shape, Tensor, TensorType, ValueId, text,
};
use frit_passes::canonicalize::Canonicalize;
use frit_passes::{Changed, Pass, PassContext};
use proptest::prelude::*;
use std::collections::HashMap;

/// Constants that rules look for, and those that they must not take for them.
const SCALARS: [f64; 8] = [1.0, 0.0, -0.0, -1.0, 2.0, 0.5, f64::NAN, f64::INFINITY];

/// Adds one node chosen by `choice`, or nothing if it does not fit.
fn add(graph: &mut Graph, values: &mut Vec<ValueId>, choice: &[u8; 6]) {
    let pick = |c: u8| values[c as usize % values.len()];
    let (x, y) = (pick(choice[1]), pick(choice[2]));
    let shape = graph.ty(x).shape.clone();
    let dtype = graph.ty(x).dtype;
    let rank = shape.rank();
    let f = choice[3] as usize;
    let wide = Shape([vec![2], shape.0.clone()].concat());
    let (op, inputs) = match choice[0] % 16 {
        0 => {
            (Op::Unary([UnaryFn::Neg, UnaryFn::Relu, UnaryFn::Not, UnaryFn::Sqrt][f % 4]), vec![x])
        }
        1 | 2 => {
            let all = [BinaryFn::Add, BinaryFn::Sub, BinaryFn::Mul, BinaryFn::Div, BinaryFn::Max];
            (Op::Binary(all[f % 5]), vec![x, y])
        }
        3 | 4 => {
            let c = SCALARS[choice[4] as usize % 8];
            let to = if choice[5].is_multiple_of(2) { Shape::scalar() } else { shape };
            let value = Tensor::splat(TensorType::new(dtype, to), c);
            (Op::Constant(Constant { value }), vec![])
        }
        5 => (Op::Compare([CompareFn::Eq, CompareFn::Lt][f % 2]), vec![x, y]),
        6 => (Op::Logical([LogicalFn::And, LogicalFn::Or, LogicalFn::Xor][f % 3]), vec![x, y]),
        7 => (Op::Select, vec![x, y, pick(choice[4])]),
        8 => {
            let flat = Shape(vec![shape.numel()]);
            let to = if f.is_multiple_of(2) { flat } else { Shape([shape.0, vec![1]].concat()) };
            (Op::Reshape(Reshape { shape: to }), vec![x])
        }
        9 => {
            let mut perm: Vec<usize> = (0..rank).collect();
            perm.rotate_left(if rank > 0 { f % rank } else { 0 });
            (Op::Transpose(Transpose { perm }), vec![x])
        }
        10 | 11 => (Op::Expand(Expand { shape: wide }), vec![x]),
        12 => {
            let reverse = f % 2 == 1;
            let start = shape.0.iter().map(|d| if reverse { d - 1 } else { 0 }).collect();
            let size = shape.0.iter().map(|d| if f.is_multiple_of(3) { *d } else { 1 }).collect();
            let step = vec![if reverse { -1 } else { 1 }; rank];
            (Op::Slice(Slice { start, size, step }), vec![x])
        }
        13 => {
            let to = [DType::F32, DType::F16, DType::F64, DType::I64, DType::Bool][f % 5];
            (Op::Cast(Cast { to }), vec![x])
        }
        14 => {
            let border = vec![f % 2; rank];
            (Op::Pad(Pad { low: vec![0; rank], high: border, value: 0.0 }), vec![x])
        }
        _ => {
            let axes = if rank > 0 && f % 2 == 1 { vec![rank - 1] } else { vec![] };
            let f = [ReduceFn::Sum, ReduceFn::Max][f % 2];
            (Op::Reduce(Reduce { f, axes, keep_dims: choice[4].is_multiple_of(2) }), vec![x])
        }
    };
    let small = |v: &ValueId| graph.ty(*v).shape.numel() <= 64;
    if inputs.iter().all(small)
        && let Ok(results) = graph.add(op, &inputs, Origin::none(), Region::Forward)
    {
        values.extend(results);
    }
}

fn build(choices: &[[u8; 6]]) -> (Graph, HashMap<String, Tensor>) {
    let mut graph = Graph::new("random");
    let mut feeds = HashMap::new();
    let mut values = Vec::new();
    let inputs = [
        Tensor::floats(DType::F32, [2, 3], vec![1.5, -0.0, f64::NAN, 3e38, -2.25, 0.0]),
        Tensor::floats(DType::F32, [3], vec![-1.0, 0.1, f64::NEG_INFINITY]),
        Tensor::floats(DType::F16, [1, 3], vec![0.25, 65504.0, -6e-8]),
        Tensor::ints(DType::I64, [2, 1], vec![-7, 3]),
        Tensor::ints(DType::Bool, [3], vec![1, 0, 1]),
    ];
    for (i, value) in inputs.into_iter().enumerate() {
        let name = format!("x{i}");
        let op = Op::Input(Input { name: name.clone(), ty: value.ty.clone() });
        values.extend(graph.add(op, &[], Origin::none(), Region::Forward).expect("a leaf"));
        feeds.insert(name, value);
    }
    choices.iter().for_each(|choice| add(&mut graph, &mut values, choice));
    for (i, value) in values.iter().rev().take(4).enumerate() {
        graph.add_output(&format!("y{i}"), *value, OutputKind::Result);
    }
    (graph, feeds)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn keeps_every_bit(choices in prop::collection::vec(any::<[u8; 6]>(), 1..24)) {
        let (mut graph, feeds) = build(&choices);
        // An integer division by zero has no value to keep.
        let Ok(before) = run(&graph, &feeds, Options::default()) else { return Ok(()) };
        let text_before = graph.to_string();
        Canonicalize {}.run(&mut graph, &mut PassContext::default()).expect("runs");
        let text_after = graph.to_string();
        prop_assert!(text::parse(&text_after).is_ok(), "{text_after}");
        let after = run(&graph, &feeds, Options::default()).expect("evaluates");
        for ((name, x), (_, y)) in before.iter().zip(&after) {
            let bits = |t: &Tensor| -> Vec<u64> {
                // One NaN is as good as another.
                let canonical = |x: f64| if x.is_nan() { f64::NAN } else { x };
                t.to_f64s().into_iter().map(|x| canonical(x).to_bits()).collect()
            };
            prop_assert_eq!(&x.ty, &y.ty);
            prop_assert_eq!(bits(x), bits(y), "{}: {}\n{}", name, text_before, text_after);
        }
        let again = Canonicalize {}.run(&mut graph, &mut PassContext::default());
        prop_assert_eq!(again, Ok(Changed::No), "{}", text_after);
    }
}

/// What canonicalization makes of the last nodes of a graph: the operation of each.
fn canonical(nodes: &str) -> Graph {
    let mut graph = text::parse(&format!("graph @g world=1 {{\n{nodes}\n}}")).expect("a graph");
    Canonicalize::default().run(&mut graph, &mut PassContext::default()).expect("it runs");
    graph
}

#[test]
fn cross_entropy_reads_padded_logits_as_they_are() {
    let head = |start: &str, size: &str| {
        format!(
            r#"%x: f32[3, 4, 8] = input {{name = "x", ty = {{"dtype":"f32","shape":[3,4,8]}}}}
               %t: i64[3, 4] = input {{name = "t", ty = {{"dtype":"i64","shape":[3,4]}}}}
               %u: i64[3, 3] = input {{name = "u", ty = {{"dtype":"i64","shape":[3,3]}}}}
               %s: f32[{size}] = slice %x {{start = [{start}], size = [{size}], step = [1,1,1]}}"#
        )
    };
    let loss = |start: &str, size: &str, rows: &str| {
        let labels = if rows == "3, 4" { "t" } else { "u" };
        format!(
            "{}\n%l: f32[{rows}], %e: f32[{rows}] = cross_entropy %s, %{labels} {{ignore_index = -1}}\nreturn %l as \"l\"",
            head(start, size)
        )
    };
    let ops = |graph: &Graph| -> Vec<String> {
        let inner = graph.nodes().filter(|(_, node)| !node.op.is_leaf());
        inner.map(|(_, node)| format!("{:?}", node.op)).collect()
    };
    // Only the class axis is cut; another one, too; and a cut that does not begin with the first class.
    for (start, size, rows, expected) in [
        ("0,0,0", "3, 4, 6", "3, 4", &["classes: Some(6)"][..]),
        ("0,1,0", "3, 3, 6", "3, 3", &["size: [3, 3, 8]", "classes: Some(6)"]),
        ("0,0,2", "3, 4, 6", "3, 4", &["size: [3, 4, 6]", "classes: None"]),
    ] {
        let text = loss(start, size, rows);
        let graph = canonical(&text);
        let ops = ops(&graph);
        assert_eq!(ops.len(), expected.len(), "{ops:?}");
        assert!(ops.iter().zip(expected).all(|(op, part)| op.contains(part)), "{ops:?}");
        let before = text::parse(&format!("graph @g world=1 {{\n{text}\n}}")).unwrap();
        let feeds: HashMap<String, Tensor> = [
            (
                "x",
                Tensor::floats(
                    DType::F32,
                    [3, 4, 8],
                    (0..96).map(|i| f64::from(i % 11) / 3.0).collect(),
                ),
            ),
            ("t", Tensor::ints(DType::I64, [3, 4], (0..12).map(|i| i % 7 - 1).collect())),
            ("u", Tensor::ints(DType::I64, [3, 3], (0..9).map(|i| i % 7 - 1).collect())),
        ]
        .map(|(name, value)| (name.to_string(), value))
        .into();
        let evaluate =
            |graph: &Graph| run(graph, &feeds, Options::default()).expect("it evaluates");
        assert_eq!(evaluate(&graph), evaluate(&before));
    }
}

/// Parts of columns, in an order of their own; with a gap, an overlap, or too few they stay slices.
#[test]
fn slices_that_share_out_an_axis_are_one_split() {
    let text = |parts: &[(usize, usize)]| {
        let mut text =
            r#"%x: f32[2, 20] = input {name = "x", ty = {"dtype":"f32","shape":[2,20]}}"#
                .to_string();
        let mut result = String::new();
        for (i, (start, size)) in parts.iter().enumerate() {
            text += &format!(
                "\n%s{i}: f32[2, {size}] = slice %x {{start = [0,{start}], size = [2,{size}], step = [1,1]}}"
            );
            text += &format!("\n%y{i}: f32[2, {size}] = neg %s{i}");
            result += &format!("\nreturn %y{i} as \"y{i}\"");
        }
        text + &result
    };
    let all: Vec<(usize, usize)> = (0..10).map(|i| (i * 7 % 10 * 2, 2)).collect();
    let uneven = [
        (0, 2),
        (2, 1),
        (3, 1),
        (4, 2),
        (6, 2),
        (8, 2),
        (10, 2),
        (12, 2),
        (14, 2),
        (16, 2),
        (18, 2),
    ];
    let overlapping = [&all[..], &[(1, 2)]].concat();
    for (parts, splits) in
        [(&all[..], 1), (&uneven, 1), (&all[1..], 0), (&all[..7], 0), (&overlapping, 0)]
    {
        let text = text(parts);
        let graph = canonical(&text);
        let count = |is: fn(&Op) -> bool| graph.nodes().filter(|(_, node)| is(&node.op)).count();
        let slices = if splits > 0 { 0 } else { parts.len() };
        assert_eq!(count(|op| matches!(op, Op::Split(_))), splits, "{parts:?}");
        assert_eq!(count(|op| matches!(op, Op::Slice(_))), slices, "{parts:?}");
        let before = text::parse(&format!("graph @g world=1 {{\n{text}\n}}")).unwrap();
        let x = Tensor::floats(DType::F32, [2, 20], (0..40).map(f64::from).collect());
        let feeds: HashMap<String, Tensor> = [("x".to_string(), x)].into();
        let evaluate =
            |graph: &Graph| run(graph, &feeds, Options::default()).expect("it evaluates");
        assert_eq!(evaluate(&graph), evaluate(&before));
    }
}
