//! Tables that are stored a second time, as the right operand of a matmul.

use super::build::*;
use crate::import::onnx::messages::*;
use crate::import::{ImportOptions, Imported};
use frit_ir::ops::ParamKind;
use frit_ir::{DType, Tensor};

const TABLE: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
const TURNED: [f32; 6] = [1.0, 3.0, 5.0, 2.0, 4.0, 6.0];

/// Rows of `table[3, 2]` times `copy[2, 3]`.
fn language_model(table: &[f32], copy: &[f32]) -> ModelProto {
    let weights = vec![floats("table", &[3, 2], table), floats("copy", &[2, 3], copy)];
    let nodes =
        vec![node("Gather", &["table", "ids"], &["h"]), node("MatMul", &["h", "copy"], &["y"])];
    model(vec![input("ids", 7, &[Dim::N(2)])], weights, nodes, &["y"])
}

fn read(model: &ModelProto, tie_weights: bool) -> (Imported, Vec<String>) {
    let options = ImportOptions { tie_weights, ..ImportOptions::default() };
    let imported = import(model, &options).unwrap_or_else(|e| panic!("{e}"));
    let trains = imported.graph.params().filter(|(_, p)| p.kind == ParamKind::Trainable);
    let names = trains.map(|(_, p)| p.name.clone()).collect();
    (imported, names)
}

#[test]
fn a_transposed_copy_is_warned_of_or_tied() {
    let model = language_model(&TABLE, &TURNED);
    let (apart, names) = read(&model, false);
    assert_eq!(names, ["table", "copy"]);
    assert_eq!(apart.warnings[0].code, "W037");
    assert!(apart.ties.is_empty());
    let (tied, names) = read(&model, true);
    assert_eq!(names, ["table"]);
    assert!(tied.warnings.is_empty());
    assert!(tied.ties["copy"].parameter == "table" && tied.ties["copy"].transposed);
    let ids = Tensor::ints(DType::I64, [2], vec![2, 0]);
    let [a, b] = [&apart, &tied].map(|imported| run(imported, &[("ids", ids.clone())]).remove(0));
    assert_eq!(a.to_f64s(), b.to_f64s());
    assert_eq!(a.to_f64s(), [17.0, 39.0, 61.0, 5.0, 11.0, 17.0]);
}

#[test]
fn a_square_copy_is_tied_as_it_lies() {
    let square = |copy: &[f32]| {
        let weights = vec![floats("table", &[2, 2], &TABLE[..4]), floats("copy", &[2, 2], copy)];
        let nodes =
            vec![node("Gather", &["table", "ids"], &["h"]), node("MatMul", &["h", "copy"], &["y"])];
        model(vec![input("ids", 7, &[Dim::N(2)])], weights, nodes, &["y"])
    };
    assert!(read(&square(&[1.0, 3.0, 2.0, 4.0]), true).0.ties["copy"].transposed);
    assert!(!read(&square(&[1.0, 2.0, 3.0, 4.0]), true).0.ties["copy"].transposed);
}

#[test]
fn what_only_looks_alike_stays_apart() {
    let mut other = TURNED;
    other[5] = 6.5;
    for (table, copy) in [(&TABLE, &other), (&[0.5; 6], &[0.5; 6])] {
        for tie in [false, true] {
            let (imported, names) = read(&language_model(table, copy), tie);
            assert_eq!(names, ["table", "copy"]);
            assert!(imported.warnings.is_empty() && imported.ties.is_empty());
        }
    }
}
