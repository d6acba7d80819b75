//! Large masks by position among the initializers.

use super::build::*;
use crate::import::{ImportOptions, Imported};
use frit_ir::ops::ParamKind;
use frit_ir::{DType, Op, Tensor};

const QUERIES: usize = 70;
const KEYS: usize = 72;

/// A mask that is added to scores of one value each.
fn masked(values: &[f32]) -> Imported {
    let weights = vec![floats("mask", &[2, 1, QUERIES as i64, KEYS as i64], values)];
    let nodes = vec![node("Add", &["x", "mask"], &["y"])];
    let model = model(vec![input("x", 1, &[Dim::N(1)])], weights, nodes, &["y"]);
    import(&model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"))
}

fn mask(keeps: impl Fn(usize, usize) -> bool, hidden: f32) -> Vec<f32> {
    let value = |i: usize| match keeps(i / KEYS % QUERIES, i % KEYS) {
        true => 0.0,
        false => hidden,
    };
    (0..2 * QUERIES * KEYS).map(value).collect()
}

#[test]
fn a_triangle_and_bands_are_computed() {
    let causal = mask(|query, key| key <= query, f32::MIN);
    let window = mask(|query, key| key <= query && key + 5 > query, f32::NEG_INFINITY);
    let both = mask(|query, key| key.abs_diff(query) < 9, -1e9);
    for values in [causal, window, both] {
        let imported = masked(&values);
        assert_eq!(imported.graph.params().count(), 0);
        assert_eq!(imported.inlined.len(), 1);
        let largest = imported.graph.nodes().flat_map(|(_, n)| match &n.op {
            Op::Constant(c) => Some(c.value.ty.shape.numel()),
            _ => None,
        });
        assert_eq!(largest.max(), Some(KEYS));
        let x = Tensor::floats(DType::F32, [1], vec![0.0]);
        let found = run(&imported, &[("x", x)]).remove(0).to_f64s();
        assert!(found.iter().zip(&values).all(|(a, b)| *a == f64::from(*b)));
    }
}

#[test]
fn any_other_mask_is_stored() {
    let mut uneven = mask(|query, key| key <= query, f32::MIN);
    uneven[QUERIES * KEYS + 1] = 0.0;
    let mut third = mask(|query, key| key <= query, f32::MIN);
    third[2] = -1e9;
    let empty = mask(|query, key| key < query, f32::MIN);
    for (values, kind) in [
        (uneven, ParamKind::Buffer),
        (empty, ParamKind::Buffer),
        // With a third value it is no mask.
        (third, ParamKind::Trainable),
    ] {
        let imported = masked(&values);
        let kinds: Vec<ParamKind> = imported.graph.params().map(|(_, p)| p.kind).collect();
        assert_eq!(kinds, [kind]);
    }
}

#[test]
fn masks_of_half_precision_and_of_old_exporters_do_not_train() {
    for (values, trains) in [
        ([0.0, -1e4, -1e4, 0.0], false),
        ([0.0, -65504.0, 0.0, 0.0], false),
        ([0.0, -1e4, -2e4, 0.0], true),
        ([0.0, -1e4, 0.5, 0.0], true),
        ([0.0; 4], true),
        ([0.0, f32::NAN, 0.0, 0.0], true),
    ] {
        let weights = vec![floats("mask", &[2, 2], &values)];
        let nodes = vec![node("Add", &["x", "mask"], &["y"])];
        let model = model(vec![input("x", 1, &[Dim::N(1)])], weights, nodes, &["y"]);
        let imported = import(&model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        let mut params = imported.graph.params();
        assert_eq!(params.any(|(_, p)| p.kind == ParamKind::Trainable), trains, "{values:?}");
    }
}
