//! The text form is printed, parsed, and the same again.

use super::parse;
use crate::ids::UnitId;
use crate::ops::{
    BinaryFn, Cast, Clip, Constant, Fusion, FusionKind, Hyper, Init, Input, MatMul, StateName,
};
use crate::ops::{Pad, Param, ParamKind, Reduce, ReduceFn, Reshape, Split, State, UnaryFn};
use crate::{DType, Graph, Op, Origin, OutputKind, Region, Tensor, TensorType, ValueId};
use expect_test::expect;
use proptest::prelude::*;

/// Choices for one random node; operands are chosen among the values so far.
#[derive(Clone, Debug)]
struct Step {
    op: usize,
    operands: [usize; 2],
    number: f64,
    name: Option<String>,
    region: Region,
    origin: (String, String, String),
}

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![
        any::<f64>(),
        Just(f64::NAN),
        Just(f64::INFINITY),
        Just(f64::NEG_INFINITY),
        Just(-0.0),
        (-5i8..5).prop_map(f64::from),
    ]
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof!["[a-c]", "[a-c]_[12]", "[0-9]{1,3}", "\\PC{0,6}", Just("/h.0/MatMul:1".into())]
}

fn step() -> impl Strategy<Value = Step> {
    let region = prop_oneof![
        Just(Region::Forward),
        Just(Region::Backward),
        (0..3u32).prop_map(Region::Recompute),
        Just(Region::Update),
    ];
    let origin = prop_oneof![Just(Default::default()), ("\\PC{0,5}", "[a-z.]{0,5}", "[a-z]{0,4}"),];
    (0..17usize, any::<[usize; 2]>(), number(), prop::option::of(name()), region, origin).prop_map(
        |(op, operands, number, name, region, origin)| Step {
            op,
            operands,
            number,
            name,
            region,
            origin,
        },
    )
}

/// The operation of a step, for operands of these types.
fn op_of(step: &Step, a: &TensorType, depth: usize) -> Op {
    let ty = TensorType::new(DType::F32, [2, 3]);
    let name = step.name.clone().unwrap_or_default();
    match step.op {
        0 => Op::Input(Input { name, ty }),
        1 => Op::Param(Param {
            name,
            ty,
            kind: ParamKind::Frozen,
            reason: step.origin.0.clone(),
            init: Init::Constant(step.number),
            held: step.operands[1].is_multiple_of(3).then_some(DType::BF16),
            unit: Some(UnitId(step.operands[0] % 9)),
            sharded: step.operands[1].is_multiple_of(2),
        }),
        2 => Op::State(State {
            name: StateName::BufferChange(name),
            of: None,
            ty,
            init: step.number,
            sharded: false,
        }),
        3 => Op::Hyper(Hyper { name, default: step.number }),
        4 => {
            let dtype = [DType::F64, DType::F32, DType::BF16, DType::F16][step.operands[0] % 4];
            let values = vec![step.number, 1.0, f64::NAN, -0.0, f64::INFINITY, 0.1];
            Op::Constant(Constant { value: Tensor::floats(dtype, [6], values) })
        }
        5 => {
            let value = Tensor::splat(ty.with_dtype(DType::F64), step.number);
            Op::Constant(Constant { value })
        }
        6 => {
            let values = vec![step.operands[0] as i64, -7];
            Op::Constant(Constant { value: Tensor::ints(DType::I64, [2, 1], values) })
        }
        7 => Op::Unary(UnaryFn::ALL[step.operands[1] % UnaryFn::ALL.len()]),
        8 => Op::Binary(BinaryFn::ALL[step.operands[1] % BinaryFn::ALL.len()]),
        9 => Op::Cast(Cast { to: DType::ALL[step.operands[1] % 10] }),
        10 => Op::Clip(Clip { min: Some(step.number), max: None }),
        11 => Op::Pad(Pad {
            low: vec![1; a.shape.rank()],
            high: vec![0; a.shape.rank()],
            value: step.number,
        }),
        12 => Op::Reshape(Reshape { shape: vec![a.shape.numel()].into() }),
        13 => Op::Split(Split {
            axis: 0,
            sizes: a.shape.0.first().map_or(vec![], |&d| vec![1, d.saturating_sub(1)]),
        }),
        14 => Op::Reduce(Reduce { f: ReduceFn::Mean, axes: vec![0], keep_dims: true }),
        15 if depth == 0 => {
            let kind = FusionKind::RowReduce;
            let mut body = Graph::new(&step.origin.1);
            let inner = Op::Input(Input { name, ty: a.clone() });
            let x = body.add1(inner, &[], Origin::none(), Region::Forward).expect("a leaf");
            let steps = [Step { op: 7, ..step.clone() }, Step { op: 10, ..step.clone() }];
            grow(&mut body, &steps, vec![x], 1);
            let last = *body.order().last().expect("the input is there");
            body.add_output("y", body.node(last).outputs[0], OutputKind::Result);
            Op::Fusion(Box::new(Fusion { kind, body }))
        }
        _ => Op::MatMul(MatMul { trans_b: true, ..MatMul::default() }),
    }
}

/// Adds a node for each step whose operands fit.
fn grow(graph: &mut Graph, steps: &[Step], mut values: Vec<ValueId>, depth: usize) -> Vec<ValueId> {
    for step in steps {
        let any = TensorType::scalar(DType::F32);
        let pick = |i: usize| values.get(step.operands[i] % values.len().max(1)).copied();
        let (a, b) = (pick(0), pick(1));
        let op = op_of(step, a.map_or(&any, |a| graph.ty(a)), depth);
        let operands: Vec<ValueId> = match &op {
            op if op.is_leaf() => vec![],
            Op::Binary(_) | Op::MatMul(_) => a.into_iter().chain(b).collect(),
            _ => a.into_iter().collect(),
        };
        let (source, scope, pass) = &step.origin;
        let origin = Origin::new(source, scope).by(pass);
        let Ok(results) = graph.add(op, &operands, origin, step.region) else { continue };
        if let Some(name) = &step.name {
            results.iter().for_each(|v| graph.set_name(*v, name));
        }
        values.extend(results);
    }
    values
}

fn graph() -> impl Strategy<Value = Graph> {
    let outputs = prop::collection::vec((0..6usize, any::<[usize; 2]>(), "\\PC{0,6}"), 0..6);
    (name(), 1..5usize, prop::collection::vec(step(), 0..20), outputs).prop_map(
        |(name, world_size, steps, outputs)| {
            let mut graph = Graph::new(&name);
            graph.world_size = world_size;
            let values = grow(&mut graph, &steps, vec![], 0);
            for (kind, [a, b], name) in outputs.iter().filter(|_| !values.is_empty()) {
                let at = |i: usize| values[i % values.len()];
                let kind = match kind {
                    0 => OutputKind::Result,
                    1 => OutputKind::LossSum,
                    2 => OutputKind::LossCount,
                    3 => OutputKind::Gradient,
                    4 => OutputKind::Metric,
                    _ => OutputKind::Carry(at(*b)),
                };
                graph.add_output(name, at(*a), kind);
            }
            graph
        },
    )
}

/// Asserts that both graphs are the same but for ids and preferred names.
fn assert_same(a: &Graph, b: &Graph) {
    assert_eq!((a.world_size, a.len()), (b.world_size, b.len()));
    let mut ids = std::collections::HashMap::new();
    for ((_, x), (_, y)) in a.nodes().zip(b.nodes()) {
        match (&x.op, &y.op) {
            (Op::Fusion(x), Op::Fusion(y)) => {
                assert_eq!(x.kind, y.kind);
                assert_same(&x.body, &y.body);
            }
            (x, y) => assert_eq!(x, y),
        }
        assert_eq!((&x.origin, x.region), (&y.origin, y.region));
        assert_eq!(x.inputs.iter().map(|v| ids[v]).collect::<Vec<_>>(), y.inputs);
        assert_eq!(x.outputs.len(), y.outputs.len());
        for (v, w) in x.outputs.iter().zip(&y.outputs) {
            assert_eq!(a.ty(*v), b.ty(*w));
            ids.insert(*v, *w);
        }
        if let (Op::Constant(x), Op::Constant(y)) = (&x.op, &y.op) {
            assert_eq!(x, y);
        }
    }
    assert_eq!(a.outputs.len(), b.outputs.len());
    for (x, y) in a.outputs.iter().zip(&b.outputs) {
        assert_eq!((&x.name, ids[&x.value]), (&y.name, y.value));
        match (x.kind, y.kind) {
            (OutputKind::Carry(x), OutputKind::Carry(y)) => assert_eq!(ids[&x], y),
            (x, y) => assert_eq!(x, y),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn printing_and_parsing_change_nothing(graph in graph()) {
        let text = graph.to_string();
        let parsed = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_same(&graph, &parsed);
        prop_assert_eq!(parsed.to_string(), text);
    }

    #[test]
    fn no_text_makes_the_parser_panic(
        text in "(graph @g world=1 \\{\n)?[%a-z0-9:={}\\[\\]\", .@;()-]{0,80}",
    ) {
        let _ = parse(&text);
    }
}

#[test]
fn names_are_made_legal_and_unique() {
    let mut graph = Graph::new("my model");
    let names = ["/a", "a b", "a_b", "_a", "7", "+0", ""];
    for name in names {
        let op = Op::Hyper(Hyper { name: "h".into(), default: 0.5 });
        let v = graph.add1(op, &[], Origin::none(), Region::Forward).expect("a leaf");
        graph.set_name(v, name);
    }
    expect![[r#"
        graph @my_model world=1 {
          %_a: f32[] = hyper {default = 0.5, name = "h"}
          %a_b: f32[] = hyper {default = 0.5, name = "h"}
          %a_b_1: f32[] = hyper {default = 0.5, name = "h"}
          %_a_1: f32[] = hyper {default = 0.5, name = "h"}
          %_7: f32[] = hyper {default = 0.5, name = "h"}
          %_0: f32[] = hyper {default = 0.5, name = "h"}
          %_: f32[] = hyper {default = 0.5, name = "h"}
        }
    "#]]
    .assert_eq(&graph.to_string());
}

#[test]
fn comments_are_left_out() {
    let text = "; a graph\ngraph @g world=2 { ; begin\n  %a: f32[] = hyper {default = 1.0, name = \"a;b\"}\n}";
    let graph = parse(text).expect("a graph");
    assert_eq!((graph.world_size, graph.len()), (2, 1));
}

#[test]
fn errors_name_the_line() {
    let check = |body: &str, expected: &str| {
        let text = format!(
            "graph @g world=1 {{\n  %x: f32[2] = input {{name = \"x\", ty = {{\"dtype\": \"f32\", \"shape\": [2]}}}}\n{body}\n}}"
        );
        assert_eq!(parse(&text).expect_err(body).to_string(), expected);
    };
    check("  %y: f32[2] = neg %z", "line 3: %z is not defined");
    check("  %y: f32[3] = neg %x", "line 3: %y is f32[2], not f32[3]");
    check("  %x: f32[2] = neg %x", "line 3: %x is defined twice");
    check("  %y: f32[2] = negate %x", "line 3: unknown operation `negate`");
    check("  %y: f33[2] = neg %x", "line 3: unknown dtype `f33`");
    check("  %y: f32[2], %z: f32[2] = neg %x", "line 3: `neg` has 1 results");
    check("  %y: f32[2] = neg %x @sideways", "line 3: unknown region `sideways`");
    check("  return %x as 3", "line 3: expected a string, found 3");
    check("} graph", "line 3: text after the graph");
}

#[test]
fn graphs_that_are_too_deep_or_too_large_are_refused() {
    let deep = |n: usize| {
        let open = "graph @g world=1 { %a: f32[2] = fusion {kind = \"pointwise\"} body ".repeat(n);
        format!("{open}graph @g world=1 {{}} {}", "}".repeat(n))
    };
    for n in [8, 100_000] {
        let error = parse(&deep(n)).expect_err("too deep").to_string();
        assert!(error.contains("nested too deeply"), "{error}");
    }
    for dims in
        ["[4294967296, 4294967296, 2]", "[18446744073709551615]", "[0, 9223372036854775807, 4]"]
    {
        let ty = format!("{{\"dtype\": \"f32\", \"shape\": {dims}}}");
        let text =
            format!("graph @g world=1 {{ %a: f32{dims} = input {{name = \"a\", ty = {ty}}} }}");
        let error = parse(&text).expect_err("too large").to_string();
        assert!(error.contains("a tensor has at most"), "{error}");
    }
    let constant = r#"graph @g world=1 { %a: f32[1099511627776] = constant {value = {"ty": {"dtype": "f32", "shape": [1099511627776]}, "splat": 0.0}} }"#;
    parse(constant).expect_err("too large");
}
