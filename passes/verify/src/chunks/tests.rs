//! A loss in chunks is that of the whole, and wrong chunks are not.

use crate::gradient::tests::{add, param};
use crate::{Comparer, Ranks};
use frit_ir::ops::*;
use frit_ir::{DType, Graph, OutputKind, TensorType, ValueId};

/// How the sums of chunks are made.
#[derive(Clone, Copy)]
struct Sums {
    /// Of the bias.
    f: ReduceFn,
    /// How many of the chunks the sum of the weight has.
    added: usize,
    /// Whether chunks are slices, or one split.
    by_slices: bool,
    /// Whether slices and results have rows of other lengths than the whole.
    flat: bool,
}

const RIGHT: Sums = Sums { f: ReduceFn::Sum, added: usize::MAX, by_slices: true, flat: false };

/// A head over six tokens: the loss, and the gradients of hidden states, weight and bias, in these chunks of tokens.
fn head(chunks: &[(usize, usize)], sums: Sums) -> Graph {
    let mut g = Graph::new("g");
    let ty = |dtype: DType, sizes: &[usize]| TensorType::new(dtype, sizes);
    let float = |sizes: &[usize]| ty(DType::F32, sizes);
    let mut leaf = |op: Op| add(&mut g, op, &[])[0];
    let input = |name: &str, ty: TensorType| Op::Input(Input { name: name.into(), ty });
    let labels = leaf(input("labels", ty(DType::I64, &[2, 3])));
    let x = leaf(input("x", float(&[2, 3, 4])));
    let w = leaf(param("w", float(&[5, 4]), ParamKind::Trainable));
    let scale = leaf(input("scale", float(&[])));
    let mut op = |op: Op, inputs: &[ValueId]| add(&mut g, op, inputs);
    let reshape = |shape: &[usize]| Op::Reshape(Reshape { shape: shape.into() });
    let matmul = |trans_a, trans_b| Op::MatMul(MatMul { trans_a, trans_b, out: None });
    let rows = op(reshape(&[6, 4]), &[x])[0];
    let labels = op(reshape(&[6]), &[labels])[0];
    let (mut losses, mut hidden, mut weights, mut biases) = (vec![], vec![], vec![], vec![]);
    let mut parts = vec![];
    if !sums.by_slices {
        let sizes = chunks.iter().map(|(start, end)| end - start).collect();
        let split = Op::Split(Split { axis: 0, sizes });
        parts = op(split.clone(), &[rows]).into_iter().zip(op(split, &[labels])).collect();
        parts.reverse();
    }
    for &(start, end) in chunks {
        let n = end - start;
        let slice = |sizes: Vec<usize>| {
            let (mut from, step) = (vec![0; sizes.len()], vec![1; sizes.len()]);
            from[0] = start * sizes[0] / n;
            Op::Slice(Slice { start: from, size: sizes, step })
        };
        let (mut part, mut own) = (rows, labels);
        if let Some(split) = parts.pop() {
            (part, own) = split;
        } else if n < 6 && sums.flat {
            let elements = op(reshape(&[24]), &[rows])[0];
            let elements = op(slice(vec![n * 4]), &[elements])[0];
            part = op(reshape(&[n, 4]), &[elements])[0];
            own = op(slice(vec![n]), &[labels])[0];
        } else if n < 6 {
            part = op(slice(vec![n, 4]), &[rows])[0];
            own = op(slice(vec![n]), &[labels])[0];
        }
        let logits = op(matmul(false, true), &[part, w])[0];
        let (ignore_index, classes) = (-100, None);
        let loss = op(Op::CrossEntropy(CrossEntropy { ignore_index, classes }), &[logits, own]);
        let seed = op(Op::Expand(Expand { shape: [n].into() }), &[scale])[0];
        let slope = Op::CrossEntropyGrad(CrossEntropyGrad { ignore_index, classes });
        let slope = op(slope, &[seed, logits, own, loss[1]])[0];
        let of_part = op(matmul(false, false), &[slope, w])[0];
        let [column, pairs] = [&[n, 1], &[n * 2, 2]].map(|shape| reshape(shape));
        losses.push(if sums.flat { op(column, &[loss[0]])[0] } else { loss[0] });
        hidden.push(if sums.flat { op(pairs, &[of_part])[0] } else { of_part });
        weights.push(op(matmul(true, false), &[slope, part])[0]);
        let reduce = Reduce { f: sums.f, axes: vec![0], keep_dims: false };
        biases.push(op(Op::Reduce(reduce), &[slope])[0]);
    }
    let mut all = |parts: &[ValueId]| match parts {
        [one] => *one,
        _ => op(Op::Concat(Concat { axis: 0 }), parts)[0],
    };
    let (losses, hidden) = (all(&losses), all(&hidden));
    let mut total = |parts: &[ValueId]| {
        let add = |a: ValueId, b: &ValueId| op(Op::Binary(BinaryFn::Add), &[a, *b])[0];
        parts[1..].iter().fold(parts[0], add)
    };
    let weight = total(&weights[..weights.len().min(sums.added)]);
    let bias = total(&biases);
    let losses = op(reshape(&[2, 3]), &[losses])[0];
    let hidden = op(reshape(&[2, 3, 4]), &[hidden])[0];
    for (name, value) in [("loss", losses), ("dx", hidden), ("dw", weight), ("db", bias)] {
        g.add_output(name, value, OutputKind::Gradient);
    }
    g
}

/// The outputs that are not shown to be those of the whole.
fn wrong(chunks: &[(usize, usize)], sums: Sums) -> Vec<String> {
    let (whole, parts) = (head(&[(0, 6)], RIGHT), head(chunks, sums));
    let found = Comparer::of_real_numbers().compare(&whole, &parts, Ranks::ONE);
    found.into_iter().map(|d| d.output.trim_start_matches("gradient ").to_string()).collect()
}

#[test]
fn chunks_are_shown_to_be_the_whole() {
    let cases: [&[(usize, usize)]; 5] = [
        &[(0, 3), (3, 6)],
        &[(0, 2), (2, 4), (4, 6)],
        &[(0, 4), (4, 6)],
        &[(0, 2), (2, 3), (3, 6)],
        &[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)],
    ];
    for chunks in cases {
        for (by_slices, flat) in [(true, false), (false, false), (true, true), (false, true)] {
            let sums = Sums { by_slices, flat, ..RIGHT };
            assert_eq!(wrong(chunks, sums), Vec::<String>::new(), "{chunks:?} {flat}");
        }
    }
}

#[test]
fn wrong_chunks_are_not() {
    let all = ["db", "dw", "dx", "loss"];
    let flat = Sums { flat: true, ..RIGHT };
    assert_eq!(wrong(&[(0, 2), (2, 4), (3, 5)], flat), all);
    assert_eq!(wrong(&[(2, 4), (0, 2), (4, 6)], flat), ["dx", "loss"]);
    // A chunk twice, one beside its place, two exchanged.
    assert_eq!(wrong(&[(0, 2), (2, 4), (2, 4)], RIGHT), all);
    assert_eq!(wrong(&[(0, 2), (2, 4), (3, 5)], RIGHT), all);
    assert_eq!(wrong(&[(1, 4), (3, 6)], RIGHT), all);
    assert_eq!(wrong(&[(2, 4), (0, 2), (4, 6)], RIGHT), ["dx", "loss"]);
    // A chunk that is not added, and means of chunks.
    let chunks = [(0, 2), (2, 4), (4, 6)];
    assert_eq!(wrong(&chunks, Sums { added: 2, ..RIGHT }), ["dw"]);
    assert_eq!(wrong(&chunks, Sums { f: ReduceFn::Mean, ..RIGHT }), ["db"]);
    assert_eq!(wrong(&chunks, Sums { by_slices: false, added: 2, ..RIGHT }), ["dw"]);
}
