//! Writes at the places of a mask that depends on data, as PyTorch's exporters write them.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::{ModelProto, NodeProto};
use frit_ir::{DType, Tensor};

const BOOL: i32 = 9;
/// Two sequences of three tokens of two channels each.
const DATA: [f64; 12] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0];

/// A model that writes `source` into `x` where `mask` is true; `updates` says how the exporter passes it.
fn writes(mask: &[i64], source: &[i64], updates: Vec<NodeProto>) -> ModelProto {
    let dims = |dims: &[i64]| dims.iter().map(|n| Dim::N(*n)).collect::<Vec<_>>();
    let inputs = vec![
        input("x", 1, &dims(&[2, 3, 2])),
        input("mask", BOOL, &dims(mask)),
        input("source", 1, &dims(source)),
    ];
    let constants =
        [("flat", &[-1][..]), ("zero", &[0]), ("two", &[2]), ("three", &[3]), ("last", &[-1])];
    let constants = constants.map(|(name, values)| ints(name, values)).to_vec();
    let mut nodes = vec![
        node("Shape", &["x"], &["shape"]),
        node("Expand", &["mask", "shape"], &["wide"]),
        node("NonZero", &["wide"], &["columns"]),
        node("Transpose", &["columns"], &["places"]).with(&[list("perm", &[1, 0])]),
    ];
    nodes.extend(updates);
    nodes.push(node("ScatterND", &["x", "places", "updates"], &["y"]));
    model(inputs, constants, nodes, &["y"])
}

/// `masked_scatter`: as many elements as there are places, in their order.
fn in_order() -> Vec<NodeProto> {
    vec![
        node("Reshape", &["source", "flat"], &["all"]),
        node("Shape", &["places"], &["size"]),
        node("Gather", &["size", "zero"], &["count"]),
        node("Slice", &["all", "zero", "count", "zero"], &["updates"]),
    ]
}

/// `x[mask] = y`: as many rows as there are places.
fn rows() -> Vec<NodeProto> {
    vec![
        node("Reshape", &["mask", "flat"], &["marks"]),
        node("Cast", &["marks"], &["ones"]).with(&[int("to", 7)]),
        node("ReduceSum", &["ones"], &["count"]),
        node("Slice", &["shape", "two", "three"], &["row"]),
        node("Concat", &["count", "row"], &["as_rows"]).with(&[int("axis", 0)]),
        node("Expand", &["source", "as_rows"], &["repeated"]),
        node("Reshape", &["repeated", "flat"], &["updates"]),
    ]
}

fn written(model: &ModelProto, mask: (&[usize], Vec<i64>), source: (&[usize], &[f64])) -> Vec<f64> {
    let feeds = [
        ("x", Tensor::floats(DType::F32, [2, 3, 2], DATA.to_vec())),
        ("mask", Tensor::ints(DType::Bool, mask.0.to_vec(), mask.1)),
        ("source", Tensor::floats(DType::F32, source.0.to_vec(), source.1.to_vec())),
    ];
    eval(model, &feeds).to_f64s()
}

#[test]
fn tokens_take_the_rows_of_the_source_in_order() {
    let tokens: (&[usize], Vec<i64>) = (&[2, 3, 1], vec![0, 1, 0, 1, 1, 0]);
    let source: (&[usize], &[f64]) =
        (&[2, 2, 2], &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]);
    let wanted = [0.0, 1.0, -1.0, -2.0, 4.0, 5.0, -3.0, -4.0, -5.0, -6.0, 10.0, 11.0];
    assert_eq!(
        written(&writes(&[2, 3, 1], &[2, 2, 2], in_order()), tokens.clone(), source),
        wanted
    );
    let source: (&[usize], &[f64]) = (&[3, 2], &source.1[..6]);
    assert_eq!(written(&writes(&[2, 3, 1], &[3, 2], rows()), tokens, source), wanted);
}

#[test]
fn elements_take_the_elements_of_the_source_in_order() {
    let mask: (&[usize], Vec<i64>) = (&[2, 3, 2], vec![0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1]);
    let source: (&[usize], &[f64]) = (&[5], &[-1.0, -2.0, -3.0, -4.0, -5.0]);
    let wanted = [0.0, 1.0, -1.0, 3.0, 4.0, -2.0, -3.0, 7.0, 8.0, 9.0, 10.0, -4.0];
    assert_eq!(written(&writes(&[2, 3, 2], &[5], in_order()), mask, source), wanted);
    // A row of five elements and a half is none.
    let tokens: (&[usize], Vec<i64>) = (&[2, 3, 1], vec![0, 1, 0, 0, 0, 1]);
    let wanted = [0.0, 1.0, -1.0, -2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, -3.0, -4.0];
    assert_eq!(written(&writes(&[2, 3, 1], &[5], in_order()), tokens, source), wanted);
}

#[test]
fn a_mask_of_fewer_axes_that_is_expanded_has_the_last_of_the_data() {
    // Of as many channels as tokens, so that the mask fits to either.
    let wanted = [-1.0, 1.0, -2.0, 3.0, -3.0, 5.0, -4.0, 7.0, -5.0, 9.0, -6.0, 11.0];
    let source: (&[usize], &[f64]) = (&[6], &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
    let mask: (&[usize], Vec<i64>) = (&[2], vec![1, 0]);
    assert_eq!(written(&writes(&[2], &[6], in_order()), mask, source), wanted);
    let mask: (&[usize], Vec<i64>) = (&[3, 1], vec![0, 1, 0]);
    let source: (&[usize], &[f64]) = (&[2, 2], &[-1.0, -2.0, -3.0, -4.0]);
    let wanted = [0.0, 1.0, -1.0, -2.0, 4.0, 5.0, 6.0, 7.0, -3.0, -4.0, 10.0, 11.0];
    assert_eq!(written(&writes(&[3, 1], &[2, 2], in_order()), mask, source), wanted);
}

#[test]
fn one_row_is_written_to_all_tokens() {
    let tokens: (&[usize], Vec<i64>) = (&[2, 3, 1], vec![1, 0, 0, 0, 1, 1]);
    let wanted = [-1.0, -2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -1.0, -2.0, -1.0, -2.0];
    for dims in [&[2][..], &[1, 2]] {
        let of_source: Vec<i64> = dims.iter().map(|n| *n as i64).collect();
        let model = writes(&[2, 3, 1], &of_source, rows());
        assert_eq!(written(&model, tokens.clone(), (dims, &[-1.0, -2.0])), wanted);
    }
}

#[test]
fn a_source_without_elements_and_other_uses_of_the_places_are_refused() {
    let empty = writes(&[2, 3, 1], &[0, 2], in_order());
    assert!(refused(&empty, &ImportOptions::default()).contains("the source is empty"));
    // How many there are is asked for itself.
    let mut counted = writes(&[2, 3, 1], &[3, 2], in_order());
    let graph = counted.graph.as_mut().expect("a graph");
    graph.output.push(input("count", 7, &[]));
    assert!(
        refused(&counted, &ImportOptions::default())
            .contains("the output \"count\" has, or is, a size")
    );
}
