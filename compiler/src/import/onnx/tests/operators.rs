//! Conversions of single operators, against values worked out by hand.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::*;
use frit_ir::ops::ParamKind;
use frit_ir::{DType, Op, Shape, Tensor};

const X: [Dim; 2] = [Dim::N(2), Dim::N(3)];

/// `[[0, 1, 2], [3, 4, 5]]`
fn x() -> Tensor {
    Tensor::floats(DType::F32, [2, 3], (0..6).map(f64::from).collect())
}

/// The result of one node that reads the input `x` and these initializers.
fn apply(node: NodeProto, initializers: Vec<TensorProto>) -> Tensor {
    let name = node.output[0].clone();
    eval(&model(vec![input("x", 1, &X)], initializers, vec![node], &[&name]), &[("x", x())])
}

#[track_caller]
fn expect(found: Tensor, dims: &[usize], values: &[f64]) {
    assert_eq!(found.shape(), &Shape::from(dims));
    let found = found.to_f64s();
    let close = found.iter().zip(values).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(close && found.len() == values.len(), "{found:?} is not {values:?}");
}

fn slice(starts: &[i64], ends: &[i64], axes: &[i64], steps: &[i64]) -> Tensor {
    let tensors = vec![ints("s", starts), ints("e", ends), ints("a", axes), ints("t", steps)];
    apply(node("Slice", &["x", "s", "e", "a", "t"], &["y"]), tensors)
}

#[test]
fn slice_takes_negative_steps_axes_and_ends() {
    expect(slice(&[-1], &[i64::MIN], &[1], &[-1]), &[2, 3], &[2.0, 1.0, 0.0, 5.0, 4.0, 3.0]);
    expect(slice(&[0, 1], &[i64::MAX, -1], &[0, -1], &[1, 1]), &[2, 1], &[1.0, 4.0]);
    expect(slice(&[2, 1], &[-100, 0], &[1, 0], &[-2, -1]), &[1, 2], &[5.0, 3.0]);
    expect(slice(&[2], &[1], &[1], &[1]), &[2, 0], &[]);
}

#[test]
fn reshape_copies_infers_and_allows_zero() {
    let reshape =
        |shape: &[i64]| apply(node("Reshape", &["x", "s"], &["y"]), vec![ints("s", shape)]);
    assert_eq!(reshape(&[0, -1, 1]).shape(), &Shape::from([2, 3, 1]));
    assert_eq!(reshape(&[-1]).shape(), &Shape::from([6]));
    let empty = node("Reshape", &["x", "s"], &["y"]).with(&[int("allowzero", 1)]);
    let empty = model(
        vec![input("x", 1, &[Dim::N(0), Dim::N(3)])],
        vec![ints("s", &[0, 7])],
        vec![empty],
        &["y"],
    );
    let none = Tensor::floats(DType::F32, [0, 3], vec![]);
    assert_eq!(eval(&empty, &[("x", none)]).shape(), &Shape::from([0, 7]));
    let bad = |shape: &[i64]| {
        let reshape = node("Reshape", &["x", "s"], &["y"]);
        let model = model(vec![input("x", 1, &X)], vec![ints("s", shape)], vec![reshape], &["y"]);
        refused(&model, &ImportOptions::default())
    };
    assert!(bad(&[4, -1]).contains("6 elements do not fit"));
    assert!(bad(&[-1, -1]).contains("is not valid"));
    assert!(bad(&[1 << 40, 1 << 40]).contains("too large"));
}

#[test]
fn gemm_scales_and_transposes() {
    // xᵀ·b with b = [[1, 0], [0, 2]], times 0.5, plus 2·c.
    let gemm = node("Gemm", &["x", "b", "c"], &["y"]).with(&[
        float("alpha", 0.5),
        float("beta", 2.0),
        int("transA", 1),
    ]);
    let b = floats("b", &[2, 2], &[1.0, 0.0, 0.0, 2.0]);
    let c = floats("c", &[2], &[10.0, 20.0]);
    expect(apply(gemm, vec![b, c]), &[3, 2], &[20.0, 43.0, 20.5, 44.0, 21.0, 45.0]);
    let no_c = node("Gemm", &["x", "b"], &["y"]).with(&[int("transB", 1)]);
    expect(apply(no_c, vec![floats("b", &[1, 3], &[1.0, 1.0, 2.0])]), &[2, 1], &[5.0, 17.0]);
}

#[test]
fn matmul_takes_vectors() {
    let right =
        apply(node("MatMul", &["x", "v"], &["y"]), vec![floats("v", &[3], &[1.0, 2.0, 3.0])]);
    expect(right, &[2], &[8.0, 26.0]);
    let left = apply(node("MatMul", &["v", "x"], &["y"]), vec![floats("v", &[2], &[1.0, 10.0])]);
    expect(left, &[3], &[30.0, 41.0, 52.0]);
}

#[test]
fn split_is_uneven_by_sizes_and_by_number() {
    let by_sizes = node("Split", &["x", "s"], &["a", "b"]).with(&[int("axis", 1)]);
    let one = model(vec![input("x", 1, &X)], vec![ints("s", &[1, 2])], vec![by_sizes], &["b"]);
    expect(eval(&one, &[("x", x())]), &[2, 2], &[1.0, 2.0, 4.0, 5.0]);
    let by_number =
        node("Split", &["x"], &["a", "b"]).with(&[int("axis", -1), int("num_outputs", 2)]);
    let two = model(vec![input("x", 1, &X)], vec![], vec![by_number], &["a", "b"]);
    expect(eval(&two, &[("x", x())]), &[2, 2], &[0.0, 1.0, 3.0, 4.0]);
}

#[test]
fn sequences_leave_no_trace() {
    let split = node("SplitToSequence", &["x", "s"], &["seq"]).with(&[int("axis", 1)]);
    let at = node("SequenceAt", &["seq", "i"], &["y"]);
    let mut two = ints("s", &[2]);
    two.dims.clear();
    let mut last = ints("i", &[-1]);
    last.dims.clear();
    let model = model(vec![input("x", 1, &X)], vec![two, last], vec![split, at], &["y"]);
    expect(eval(&model, &[("x", x())]), &[2, 1], &[2.0, 5.0]);
}

#[test]
fn reductions_take_axes_in_both_forms() {
    let by_input = apply(
        node("ReduceSum", &["x", "a"], &["y"]).with(&[int("keepdims", 0)]),
        vec![ints("a", &[-1])],
    );
    expect(by_input, &[2], &[3.0, 12.0]);
    let by_attribute =
        apply(node("ReduceMean", &["x"], &["y"]).with(&[list("axes", &[0])]), vec![]);
    expect(by_attribute, &[1, 3], &[1.5, 2.5, 3.5]);
    expect(
        apply(node("ReduceMax", &["x"], &["y"]).with(&[int("keepdims", 0)]), vec![]),
        &[],
        &[5.0],
    );
    let nothing = node("ReduceSum", &["x"], &["y"]).with(&[int("noop_with_empty_axes", 1)]);
    expect(apply(nothing, vec![]), &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let l2 = node("ReduceL2", &["x", "a"], &["y"]).with(&[int("keepdims", 0)]);
    expect(apply(l2, vec![ints("a", &[1])]), &[2], &[5f64.sqrt(), 50f64.sqrt()]);
    let lse = node("ReduceLogSumExp", &["x", "a"], &["y"]).with(&[int("keepdims", 0)]);
    let row = (1.0 + 1f64.exp() + 2f64.exp()).ln();
    expect(apply(lse, vec![ints("a", &[1])]), &[2], &[row, row + 3.0]);
}

#[test]
fn pad_adds_and_takes_away() {
    let pad = node("Pad", &["x", "p", "v"], &["y"]);
    let tensors = vec![ints("p", &[1, -1, 0, 1]), floats("v", &[], &[9.0])];
    expect(apply(pad, tensors), &[3, 3], &[9.0, 9.0, 9.0, 1.0, 2.0, 9.0, 4.0, 5.0, 9.0]);
    let some = node("Pad", &["x", "p", "", "a"], &["y"]);
    let tensors = vec![ints("p", &[0, 1]), ints("a", &[-2])];
    expect(apply(some, tensors), &[3, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0]);
}

#[test]
fn layout_operators_are_numpys() {
    let tile = apply(node("Tile", &["x", "r"], &["y"]), vec![ints("r", &[1, 2])]);
    expect(tile, &[2, 6], &[0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 3.0, 4.0, 5.0]);
    let trilu = apply(node("Trilu", &["x"], &["y"]).with(&[int("upper", 0)]), vec![]);
    expect(trilu, &[2, 3], &[0.0, 0.0, 0.0, 3.0, 4.0, 0.0]);
    let unsqueeze = apply(node("Unsqueeze", &["x", "a"], &["y"]), vec![ints("a", &[-1, 0])]);
    assert_eq!(unsqueeze.shape(), &Shape::from([1, 2, 3, 1]));
    let flatten = apply(node("Flatten", &["x"], &["y"]).with(&[int("axis", 0)]), vec![]);
    assert_eq!(flatten.shape(), &Shape::from([1, 6]));
    expect(
        apply(node("Transpose", &["x"], &["y"]), vec![]),
        &[3, 2],
        &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0],
    );
    let expand = apply(node("Expand", &["x", "s"], &["y"]), vec![ints("s", &[2, 1, 1])]);
    assert_eq!(expand.shape(), &Shape::from([2, 2, 3]));
}

#[test]
fn activations_are_composed() {
    let shifted = |op: &str, attributes: &[AttributeProto]| {
        let sub = node("Sub", &["x", "two"], &["z"]);
        let op = node(op, &["z"], &["y"]).with(attributes);
        let two = floats("two", &[], &[2.0]);
        eval(&model(vec![input("x", 1, &X)], vec![two], vec![sub, op], &["y"]), &[("x", x())])
    };
    let (e1, e2) = ((-1f64).exp() - 1.0, (-2f64).exp() - 1.0);
    expect(
        shifted("Elu", &[float("alpha", 2.0)]),
        &[2, 3],
        &[2.0 * e2, 2.0 * e1, 0.0, 1.0, 2.0, 3.0],
    );
    expect(
        shifted("LeakyRelu", &[float("alpha", 0.5)]),
        &[2, 3],
        &[-1.0, -0.5, 0.0, 1.0, 2.0, 3.0],
    );
    expect(shifted("HardSigmoid", &[]), &[2, 3], &[0.1, 0.3, 0.5, 0.7, 0.9, 1.0]);
    let clip = apply(node("Clip", &["x", "", "hi"], &["y"]), vec![floats("hi", &[], &[3.5])]);
    expect(clip, &[2, 3], &[0.0, 1.0, 2.0, 3.0, 3.5, 3.5]);
    let mean = apply(node("Mean", &["x", "c"], &["y"]), vec![floats("c", &[3], &[2.0, 4.0, 6.0])]);
    expect(mean, &[2, 3], &[1.0, 2.5, 4.0, 2.5, 4.0, 5.5]);
}

#[test]
fn normalizations_are_those_of_onnx() {
    let tensors = || vec![floats("g", &[3], &[1.0, 2.0, 3.0]), floats("b", &[3], &[0.0, 0.0, 1.0])];
    let ln =
        node("LayerNormalization", &["x", "g", "b"], &["y", "m"]).with(&[float("epsilon", 0.0)]);
    let r = 1.5f64.sqrt();
    expect(
        apply(ln.clone(), tensors()),
        &[2, 3],
        &[-r, 0.0, 3.0 * r + 1.0, -r, 0.0, 3.0 * r + 1.0],
    );
    let mean = model(vec![input("x", 1, &X)], tensors(), vec![ln], &["m"]);
    expect(eval(&mean, &[("x", x())]), &[2, 1], &[1.0, 4.0]);
    let image = vec![input("x", 1, &[Dim::N(1), Dim::N(2), Dim::N(2)])];
    let tensors = vec![floats("g", &[2], &[1.0, 10.0]), floats("b", &[2], &[0.0, 1.0])];
    let instance =
        node("InstanceNormalization", &["x", "g", "b"], &["y"]).with(&[float("epsilon", 0.0)]);
    let value = Tensor::floats(DType::F32, [1, 2, 2], vec![0.0, 2.0, 5.0, 3.0]);
    let found = eval(&model(image, tensors, vec![instance], &["y"]), &[("x", value)]);
    expect(found, &[1, 2, 2], &[-1.0, 1.0, 11.0, -9.0]);
}

#[test]
fn a_loss_in_the_model_counts_what_is_not_ignored() {
    let loss =
        node("SoftmaxCrossEntropyLoss", &["x", "l", "w"], &["y"]).with(&[int("ignore_index", -1)]);
    let inputs = vec![input("x", 1, &X), input("l", 7, &[Dim::N(2)])];
    let weights = vec![floats("w", &[3], &[1.0, 2.0, 4.0])];
    let model = model(inputs, weights, vec![loss], &["y"]);
    let labels = |v: &[i64]| Tensor::vector_i64(v.to_vec());
    let lse = (1.0 + 1f64.exp() + 2f64.exp()).ln();
    let both = eval(&model, &[("x", x()), ("l", labels(&[0, 2]))]);
    expect(both, &[], &[(lse + 4.0 * (lse - 2.0)) / 5.0]);
    let one = eval(&model, &[("x", x()), ("l", labels(&[-1, 1]))]);
    expect(one, &[], &[lse - 1.0]);
}

#[test]
fn one_hot_and_indices_count_from_the_end() {
    let ids = vec![input("i", 7, &[Dim::N(2)])];
    let hot = node("OneHot", &["i", "d", "v"], &["y"]).with(&[int("axis", 0)]);
    let tensors = vec![ints("d", &[3]), floats("v", &[2], &[-1.0, 5.0])];
    let found =
        eval(&model(ids, tensors, vec![hot], &["y"]), &[("i", Tensor::vector_i64(vec![1, -1]))]);
    expect(found, &[3, 2], &[-1.0, -1.0, 5.0, -1.0, -1.0, 5.0]);
    let gather = node("Gather", &["x", "i"], &["y"]).with(&[int("axis", 1)]);
    expect(apply(gather, vec![ints("i", &[-1, 0])]), &[2, 2], &[2.0, 0.0, 5.0, 3.0]);
}

#[test]
fn shape_arithmetic_vanishes() {
    // x.reshape(shape(x)[0], -1) + arange(size(x)/2)
    let nodes = vec![
        node("Shape", &["x"], &["s"]).with(&[int("end", 1)]),
        node("Concat", &["s", "minus"], &["to"]).with(&[int("axis", 0)]),
        node("Reshape", &["x", "to"], &["flat"]),
        node("Size", &["x"], &["n"]),
        node("Div", &["n", "two"], &["half"]),
        node("Range", &["zero", "half", "one"], &["r"]),
        node("Cast", &["r"], &["rf"]).with(&[int("to", 1)]),
        node("Add", &["flat", "rf"], &["y"]),
    ];
    let scalar = |name: &str, v: i64| TensorProto { dims: vec![], ..ints(name, &[v]) };
    let tensors = vec![ints("minus", &[-1]), scalar("two", 2), scalar("zero", 0), scalar("one", 1)];
    let inputs = vec![input("x", 1, &[Dim::S("batch"), Dim::N(3)])];
    let imported = import(&model(inputs, tensors, nodes, &["y"]), &bind(&[("batch", 2)])).unwrap();
    let ops: Vec<&str> = imported.graph.nodes().map(|(_, n)| n.op.name()).collect();
    assert_eq!(ops, ["input", "constant", "add"]);
    expect(run(&imported, &[("x", x())]).remove(0), &[2, 3], &[0.0, 2.0, 4.0, 3.0, 5.0, 7.0]);
}

#[test]
fn a_table_of_embeddings_is_recognized() {
    let gather = node("Gather", &["w", "i"], &["y"]);
    let inputs = vec![input("i", 7, &[Dim::N(2)])];
    let w = floats("w", &[3, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let imported =
        import(&model(inputs, vec![w], vec![gather], &["y"]), &ImportOptions::default()).unwrap();
    assert!(imported.graph.nodes().any(|(_, n)| matches!(n.op, Op::Embedding(_))));
    let found = run(&imported, &[("i", Tensor::vector_i64(vec![2, 0]))]).remove(0);
    expect(found, &[2, 2], &[4.0, 5.0, 0.0, 1.0]);
}

#[test]
fn pad_has_other_borders() {
    let pad = |mode: &str, pads: &[i64]| {
        let pad = node("Pad", &["x", "p"], &["y"]).with(&[text("mode", mode)]);
        apply(pad, vec![ints("p", pads)])
    };
    let row = |found: Tensor| found.to_f64s()[..found.shape().0[1]].to_vec();
    assert_eq!(row(pad("reflect", &[0, 2, 0, 1])), [2.0, 1.0, 0.0, 1.0, 2.0, 1.0]);
    assert_eq!(row(pad("edge", &[0, 1, 0, 2])), [0.0, 0.0, 1.0, 2.0, 2.0, 2.0]);
    assert_eq!(row(pad("wrap", &[0, 1, 0, 2])), [2.0, 0.0, 1.0, 2.0, 0.0, 1.0]);
    assert_eq!(pad("edge", &[1, 0, 1, 0]).shape(), &Shape::from([4, 3]));
}

#[test]
fn einsum_contracts_and_keeps_labels() {
    let einsum = |equation: &str, inputs: &[&str], tensors: Vec<TensorProto>| {
        let node = node("Einsum", inputs, &["y"]).with(&[text("equation", equation)]);
        apply(node, tensors)
    };
    expect(einsum("ij->ji", &["x"], vec![]), &[3, 2], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    expect(einsum("ij->i", &["x"], vec![]), &[2], &[3.0, 12.0]);
    expect(einsum("ij->", &["x"], vec![]), &[], &[15.0]);
    expect(einsum("...j->...", &["x"], vec![]), &[2], &[3.0, 12.0]);
    let w = || floats("w", &[3, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    expect(einsum("ij,jk", &["x", "w"], vec![w()]), &[2, 2], &[2.0, 3.0, 8.0, 9.0]);
    expect(einsum("ij,jk->kj", &["x", "w"], vec![w()]), &[2, 3], &[3.0, 0.0, 7.0, 0.0, 5.0, 7.0]);
    expect(einsum(" i j , j i -> i ", &["x", "w"], vec![w()]), &[2], &[2.0, 9.0]);
    let v = floats("v", &[2], &[1.0, 10.0]);
    let outer = einsum("ij,k->kij", &["x", "v"], vec![v]);
    assert_eq!(outer.shape(), &Shape::from([2, 2, 3]));
    assert_eq!(outer.to_f64s()[6..8], [0.0, 10.0]);
    let square = floats("s", &[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    expect(einsum("ii->i", &["s"], vec![square.clone()]), &[2], &[1.0, 4.0]);
    expect(einsum("ii,ij->j", &["s", "x"], vec![square]), &[3], &[12.0, 17.0, 22.0]);
    let three = einsum("ij,jk,k->i", &["x", "w", "v"], vec![w(), floats("v", &[2], &[1.0, 10.0])]);
    expect(three, &[2], &[32.0, 98.0]);
}

#[test]
fn the_largest_elements_and_their_places_are_found() {
    let top = node("TopK", &["x", "k"], &["v", "i"]).with(&[int("largest", 0), int("axis", 0)]);
    let m = model(vec![input("x", 1, &X)], vec![ints("k", &[1])], vec![top], &["v", "i"]);
    let imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let results = run(&imported, &[("x", x())]);
    assert_eq!(results[0].to_f64s(), [0.0, 1.0, 2.0]);
    assert_eq!(results[1].to_i64s(), [0, 0, 0]);
    let place = |op: &str, last: i64| {
        let node = node(op, &["x"], &["y"]).with(&[
            int("axis", 1),
            int("keepdims", 0),
            int("select_last_index", last),
        ]);
        let same = Tensor::floats(DType::F32, [2, 3], vec![1.0, 2.0, 2.0, 0.0, 0.0, 3.0]);
        let m = model(vec![input("x", 1, &X)], vec![], vec![node], &["y"]);
        eval(&m, &[("x", same)]).to_i64s()
    };
    assert_eq!((place("ArgMax", 0), place("ArgMax", 1)), (vec![1, 2], vec![2, 2]));
    assert_eq!((place("ArgMin", 0), place("ArgMin", 1)), (vec![0, 0], vec![0, 1]));
}

#[test]
fn scatters_write_in_order() {
    let elements = |reduction: &str| {
        let node = node("ScatterElements", &["x", "i", "u"], &["y"])
            .with(&[int("axis", 1), text("reduction", reduction)]);
        let mut ids = ints("i", &[0, -1, 2, 2]);
        ids.dims = vec![2, 2];
        apply(node, vec![ids, floats("u", &[2, 2], &[10.0, 20.0, 30.0, 40.0])]).to_f64s()
    };
    assert_eq!(elements("none"), [10.0, 1.0, 20.0, 3.0, 4.0, 40.0]);
    assert_eq!(elements("add"), [10.0, 1.0, 22.0, 3.0, 4.0, 75.0]);
    assert_eq!(elements("max"), [10.0, 1.0, 20.0, 3.0, 4.0, 40.0]);
    assert_eq!(elements("min"), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(elements("mul"), [0.0, 1.0, 40.0, 3.0, 4.0, 6000.0]);
    let mut ids = ints("i", &[1]);
    ids.dims = vec![1, 1];
    let rows = node("ScatterND", &["x", "i", "u"], &["y"]);
    let y = apply(rows, vec![ids, floats("u", &[1, 3], &[7.0, 8.0, 9.0])]);
    assert_eq!(y.to_f64s(), [0.0, 1.0, 2.0, 7.0, 8.0, 9.0]);
}

/// An initializer of integers that Frit widens, in ONNX's raw bytes.
fn raw(name: &str, data_type: i32, bytes: &[u8], n: i64) -> TensorProto {
    TensorProto {
        dims: vec![n],
        data_type,
        raw_data: Some(bytes.to_vec().into()),
        ..ints(name, &[])
    }
}

#[test]
fn small_and_unsigned_integers_are_widened() {
    let cast = |tensor: TensorProto| {
        let nodes = vec![
            node("Cast", &["n"], &["f"]).with(&[int("to", 1)]),
            node("Add", &["x", "f"], &["y"]),
        ];
        let m = model(vec![input("x", 1, &[Dim::N(1)])], vec![tensor], nodes, &["y"]);
        eval(&m, &[("x", Tensor::floats(DType::F32, [1], vec![0.0]))]).to_f64s()[0]
    };
    assert_eq!(cast(raw("n", 3, &[0xfe], 1)), -2.0, "int8");
    assert_eq!(cast(raw("n", 4, &[0xff, 0xff], 1)), 65535.0, "uint16");
    assert_eq!(cast(raw("n", 5, &[0x00, 0x80], 1)), -32768.0, "int16");
    assert_eq!(cast(raw("n", 12, &[0, 0, 0, 0x80], 1)), 2f64.powi(31), "uint32");
    assert_eq!(cast(raw("n", 13, &[5, 0, 0, 0, 0, 0, 0, 0], 1)), 5.0, "uint64");
    let fields = TensorProto { int32_data: vec![-3], raw_data: None, ..raw("n", 3, &[], 1) };
    assert_eq!(cast(fields), -3.0, "int8 in the field of 32-bit integers");
    let short = model(
        x_inputs(),
        vec![raw("n", 5, &[1], 1)],
        vec![node("Add", &["x", "n"], &["y"])],
        &["y"],
    );
    assert!(refused(&short, &ImportOptions::default()).contains("2 bytes, but 1 are stored"));
}

fn x_inputs() -> Vec<ValueInfoProto> {
    vec![input("x", 1, &X)]
}

#[test]
fn casts_to_small_integers_wrap() {
    let to = |to: i64, value: f64| {
        let nodes = vec![
            node("Cast", &["x"], &["i"]).with(&[int("to", to)]),
            node("Cast", &["i"], &["y"]).with(&[int("to", 1)]),
        ];
        let m = model(vec![input("x", 1, &[Dim::N(1)])], vec![], nodes, &["y"]);
        eval(&m, &[("x", Tensor::floats(DType::F32, [1], vec![value]))]).to_f64s()[0]
    };
    assert_eq!((to(3, 200.0), to(3, -129.0), to(3, 5.0)), (-56.0, 127.0, 5.0));
    assert_eq!((to(4, -1.0), to(5, 40000.0)), (65535.0, -25536.0));
}

#[test]
fn a_cast_of_the_model_is_kept_whether_or_not_its_node_has_a_name() {
    // Integers, bf16 and f16: 0.3 is in none of them.
    for (to, kept) in [(7, 0.0), (16, 0.300_781_25), (10, 0.300_048_828_125)] {
        for name in ["", "rounds"] {
            let mut rounds = node("Cast", &["x"], &["r"]).with(&[int("to", to)]);
            rounds.name = name.into();
            let nodes = vec![rounds, node("Cast", &["r"], &["y"]).with(&[int("to", 1)])];
            let m = model(vec![input("x", 1, &[Dim::N(1)])], vec![], nodes, &["y"]);
            let found = eval(&m, &[("x", Tensor::floats(DType::F32, [1], vec![0.3]))]).to_f64s();
            assert_eq!(found, [kept], "{to} {name}");
        }
    }
}

#[test]
fn integers_have_bitwise_logic_and_shifts() {
    let bits = |op: &str, attributes: &[AttributeProto]| {
        let inputs: &[&str] = if op == "BitwiseNot" { &["i"] } else { &["i", "n"] };
        let nodes = vec![
            node("Cast", &["x"], &["i"]).with(&[int("to", 7)]),
            node(op, inputs, &["b"]).with(attributes),
            node("Cast", &["b"], &["y"]).with(&[int("to", 1)]),
        ];
        let m = model(x_inputs(), vec![ints("n", &[3])], nodes, &["y"]);
        eval(&m, &[("x", x())])
    };
    expect(bits("BitwiseAnd", &[]), &[2, 3], &[0.0, 1.0, 2.0, 3.0, 0.0, 1.0]);
    expect(bits("BitwiseOr", &[]), &[2, 3], &[3.0, 3.0, 3.0, 3.0, 7.0, 7.0]);
    expect(bits("BitwiseXor", &[]), &[2, 3], &[3.0, 2.0, 1.0, 0.0, 7.0, 6.0]);
    expect(bits("BitwiseNot", &[]), &[2, 3], &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
    let left = bits("BitShift", &[text("direction", "LEFT")]);
    expect(left, &[2, 3], &[0.0, 8.0, 16.0, 24.0, 32.0, 40.0]);
    let right = bits("BitShift", &[text("direction", "RIGHT")]);
    expect(right, &[2, 3], &[0.0; 6]);
}

#[test]
fn sequences_are_reversed_up_to_their_lengths() {
    let reverse = node("ReverseSequence", &["x", "n"], &["y"])
        .with(&[int("batch_axis", 0), int("time_axis", 1)]);
    expect(apply(reverse, vec![ints("n", &[3, 2])]), &[2, 3], &[2.0, 1.0, 0.0, 4.0, 3.0, 5.0]);
}

#[test]
fn indices_of_maxima_count_over_the_whole_operand() {
    let pool = node("MaxPool", &["x"], &["y", "i"])
        .with(&[list("kernel_shape", &[2]), list("strides", &[2])]);
    let unpool = node("MaxUnpool", &["y", "i"], &["z"])
        .with(&[list("kernel_shape", &[2]), list("strides", &[2])]);
    let m = model(
        vec![input("x", 1, &[Dim::N(1), Dim::N(2), Dim::N(4)])],
        vec![],
        vec![pool, unpool],
        &["z"],
    );
    let x = Tensor::floats(DType::F32, [1, 2, 4], vec![3.0, 1.0, 2.0, 2.0, -1.0, -5.0, 0.0, 7.0]);
    expect(eval(&m, &[("x", x)]), &[1, 2, 4], &[3.0, 0.0, 2.0, 0.0, -1.0, 0.0, 0.0, 7.0]);
}

#[test]
fn a_bias_of_zeros_adds_nothing_whatever_its_shape() {
    let convolved = |bias: &[&str], nodes: Vec<NodeProto>| {
        let inputs = [&["x", "w"], bias].concat();
        let nodes = [nodes, vec![node("Conv", &inputs, &["y"])]].concat();
        let x = input("x", 1, &[Dim::N(1), Dim::N(1), Dim::N(2), Dim::N(2), Dim::N(2)]);
        let w = floats("w", &[2, 1, 1, 1, 1], &[2.0, 3.0]);
        let tensors = vec![w, floats("onnx::zero", &[], &[0.0]), ints("shape", &[2, 2])];
        let x_value = Tensor::floats(DType::F32, [1, 1, 2, 2, 2], (1..9).map(f64::from).collect());
        eval(&model(vec![x], tensors, nodes, &["y"]), &[("x", x_value)])
    };
    let expanded = node("Expand", &["onnx::zero", "shape"], &["bias"]);
    assert_eq!(convolved(&["bias"], vec![expanded]), convolved(&[], vec![]));
}

#[test]
fn uniform_numbers_that_decide_what_is_kept_are_masks() {
    let rows = vec![
        node("Shape", &["x"], &["sizes"]).with(&[int("end", 1)]),
        node("Concat", &["sizes", "one"], &["shape"]).with(&[int("axis", 0)]),
        node("ConstantOfShape", &["shape"], &["zeros"]),
        node("RandomUniformLike", &["zeros"], &["u"]).with(&[int("dtype", 1)]),
    ];
    let less = vec![
        node("Less", &["u", "p"], &["below"]),
        node("Cast", &["below"], &["kept"]).with(&[int("to", 1)]),
    ];
    let floor = vec![node("Add", &["p", "u"], &["moved"]), node("Floor", &["moved"], &["kept"])];
    let rest = vec![node("Div", &["kept", "p"], &["part"]), node("Mul", &["x", "part"], &["y"])];
    for decide in [less, floor] {
        let nodes = [rows.clone(), decide, rest.clone()].concat();
        let tensors = vec![floats("p", &[], &[0.75]), ints("one", &[1])];
        let m = model(vec![input("x", 1, &X)], tensors, nodes, &["y"]);
        let imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        let masks: Vec<_> = imported
            .graph
            .nodes()
            .filter_map(|(_, n)| match &n.op {
                Op::RandomMask(mask) => Some((mask.shape.clone(), mask.keep)),
                _ => None,
            })
            .collect();
        assert_eq!(masks, [(Shape::from([2, 1]), 0.75)]);
    }
    // Any other number is drawn, and one whose probability is not known.
    let drawn = vec![node("Mul", &["x", "u"], &["y"])];
    let decided =
        vec![node("Less", &["u", "x"], &["k"]), node("Cast", &["k"], &["y"]).with(&[int("to", 1)])];
    for rest in [drawn, decided] {
        let nodes = [rows.clone(), rest].concat();
        let m = model(vec![input("x", 1, &X)], vec![ints("one", &[1])], nodes, &["y"]);
        let imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        assert!(imported.graph.nodes().any(|(_, n)| matches!(n.op, Op::Random(_))));
    }
}

#[test]
fn no_gradient_flows_through_a_detach() {
    let mut detach = node("Identity", &["h"], &["detach"]);
    let value = "%detach : [num_users=1] = call_function[target=torch.ops.aten.detach.default](args = (%h,), \
                 kwargs = {})";
    let entry =
        StringStringEntryProto { key: "pkg.torch.onnx.fx_node".into(), value: value.into() };
    detach.metadata_props.push(entry);
    let nodes =
        vec![node("Mul", &["x", "a"], &["h"]), detach, node("Mul", &["detach", "b"], &["y"])];
    let weights = vec![floats("a", &[2], &[2.0, 3.0]), floats("b", &[2], &[5.0, 7.0])];
    let model = model(vec![input("x", 1, &[Dim::N(2)])], weights, nodes, &["y"]);
    let imported = import(&model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let x = Tensor::floats(DType::F32, [2], vec![1.0, 1.0]);
    assert_eq!(run(&imported, &[("x", x)])[0].to_f64s(), [10.0, 21.0]);
    // What reaches the outputs through it alone does not train.
    let trains = imported.graph.params().filter(|(_, p)| p.kind == ParamKind::Trainable);
    assert_eq!(trains.map(|(_, p)| p.name.as_str()).collect::<Vec<_>>(), ["b"]);
}

#[test]
fn a_detach_that_the_exporter_removed_is_warned_of() {
    let mut square = node("Mul", &["h", "h"], &["y"]);
    let value = "%y : [num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%detach, %h), \
                 kwargs = {})";
    let entry =
        StringStringEntryProto { key: "pkg.torch.onnx.fx_node".into(), value: value.into() };
    square.metadata_props.push(entry);
    let nodes = vec![node("Mul", &["x", "a"], &["h"]), square];
    let weights = vec![floats("a", &[2], &[2.0, 3.0])];
    let model = model(vec![input("x", 1, &[Dim::N(2)])], weights, nodes, &["y"]);
    let imported = import(&model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(imported.warnings.iter().map(|w| &w.code).collect::<Vec<_>>(), ["W038"]);
}

#[test]
fn a_parameter_stored_in_f16_is_rounded_only_for_what_reads_it_so() {
    let casts = |stored: i32, nodes: &[NodeProto]| {
        let bytes: &[u8] = if stored == 10 { &[0x00, 0x3c] } else { &[0x00, 0x00, 0x80, 0x3f] };
        let mut nodes = nodes.to_vec();
        nodes.push(node("Add", &["x", "v"], &["y"]));
        let w = raw("w", stored, bytes, 1);
        let m = model(vec![input("x", 1, &[Dim::N(1)])], vec![w], nodes, &["y"]);
        let imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        imported.graph.nodes().filter(|(_, n)| matches!(n.op, Op::Cast(_))).count()
    };
    let cast = |x: &str, y: &str, to: i64| node("Cast", &[x], &[y]).with(&[int("to", to)]);
    assert_eq!(casts(10, &[cast("w", "v", 1)]), 0);
    assert_eq!(casts(10, &[node("Transpose", &["w"], &["t"]), cast("t", "v", 1)]), 0);
    // What the model itself rounds stays rounded.
    assert_eq!(casts(1, &[cast("w", "h", 10), cast("h", "v", 1)]), 2);
}
