//! Random numbers: what of a node's attributes comes out in its draws.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::*;
use frit_ir::Op;
use frit_ir::ops::RandomFn;

const X: [Dim; 2] = [Dim::N(2), Dim::N(3)];

/// Every draw of a model: the function, the offset, the scale and the number.
fn draws(m: &ModelProto) -> Vec<(RandomFn, f64, f64, u32)> {
    let imported = import(m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let draws = imported.graph.nodes().filter_map(|(_, n)| match &n.op {
        Op::Random(r) => Some((r.f, r.offset, r.scale, r.id)),
        _ => None,
    });
    draws.collect()
}

#[test]
fn numbers_that_are_moved_and_scaled_are_drawn_so() {
    // As torch.randint(3, 10) and torch.normal(0.5, 2) are written.
    let nodes = vec![
        node("RandomUniformLike", &["x"], &["u"]),
        node("Mul", &["u", "seven"], &["scaled"]),
        node("Add", &["scaled", "three"], &["moved"]),
        node("Floor", &["moved"], &["places"]),
        node("RandomNormalLike", &["x"], &["z"]).with(&[float("scale", 2.0)]),
        node("Sub", &["z", "three"], &["below"]),
        node("Add", &["places", "below"], &["y"]),
    ];
    let numbers = vec![floats("seven", &[], &[7.0]), floats("three", &[], &[3.0])];
    let m = model(vec![input("x", 1, &X)], numbers.clone(), nodes, &["y"]);
    let expected = [(RandomFn::Uniform, 3.0, 7.0, 0), (RandomFn::Normal, -3.0, 2.0, 1)];
    assert_eq!(draws(&m), expected);
    // Not where others read the number itself.
    let nodes = vec![
        node("RandomUniformLike", &["x"], &["u"]),
        node("Mul", &["u", "seven"], &["scaled"]),
        node("Add", &["u", "scaled"], &["y"]),
    ];
    let m = model(vec![input("x", 1, &X)], numbers, nodes, &["y"]);
    assert_eq!(draws(&m), [(RandomFn::Uniform, 0.0, 1.0, 0)]);
}

#[test]
fn draws_have_the_attributes_of_their_nodes() {
    let seeded =
        |op: &str, to: &str, seed: f32| node(op, &["x"], &[to]).with(&[float("seed", seed)]);
    let nodes = vec![
        node("RandomNormal", &[], &["a"]).with(&[list("shape", &[3]), float("mean", 1.5)]),
        node("RandomUniform", &[], &["b"]).with(&[
            list("shape", &[3]),
            float("low", -1.0),
            int("dtype", 16),
        ]),
        seeded("RandomNormalLike", "c", 7.0),
        seeded("RandomUniformLike", "d", 7.0),
        seeded("RandomNormalLike", "e", 8.0),
        node("Bernoulli", &["x"], &["f"]).with(&[int("dtype", 7)]),
        node("Multinomial", &["x"], &["g"]).with(&[int("sample_size", 4), int("dtype", 7)]),
    ];
    let outputs = ["a", "b", "c", "d", "e", "f", "g"];
    let m = model(vec![input("x", 1, &X)], vec![], nodes, &outputs);
    let found = draws(&m);
    let of: Vec<_> = found.iter().map(|d| (d.0, d.1, d.2)).collect();
    let (normal, uniform) = (RandomFn::Normal, RandomFn::Uniform);
    let unit = (uniform, 0.0, 1.0);
    let expected = [
        (normal, 1.5, 1.0),
        (uniform, -1.0, 2.0),
        (normal, 0.0, 1.0),
        unit,
        (normal, 0.0, 1.0),
        unit,
        unit,
    ];
    assert_eq!(of, expected);
    let ids: Vec<u32> = found.iter().map(|d| d.3).collect();
    assert_eq!([ids[0], ids[1], ids[5], ids[6]], [0, 1, 2, 3]);
    assert!(ids[2] == ids[3] && ids[2] != ids[4] && ids[2] >= 1 << 31);
    let imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let types: Vec<String> =
        imported.graph.outputs.iter().map(|o| imported.graph.ty(o.value).to_string()).collect();
    let expected =
        ["f32[3]", "bf16[3]", "f32[2, 3]", "f32[2, 3]", "f32[2, 3]", "i64[2, 3]", "i64[2, 4]"];
    assert_eq!(types, expected);
}

#[test]
fn draws_that_cannot_be_are_refused() {
    for (op, attributes, reason) in [
        ("RandomUniformLike", vec![float("low", 2.0)], "high is below low"),
        ("RandomNormalLike", vec![float("scale", -1.0)], "is negative"),
        ("RandomNormalLike", vec![int("dtype", 7)], "are floats, not i64"),
        ("RandomNormalLike", vec![float("mean", f32::INFINITY)], "cannot be inf"),
        ("RandomNormal", vec![], "the shape is missing"),
        ("Multinomial", vec![int("sample_size", -1)], "is not a valid shape"),
        ("Multinomial", vec![int("sample_size", i64::MAX)], "is not a valid shape"),
        ("Multinomial", vec![int("dtype", 1)], "are integers, not f32"),
    ] {
        let drawn = node(op, &["x"], &["y"]).with(&attributes);
        let m = model(vec![input("x", 1, &X)], vec![], vec![drawn], &["y"]);
        let text = refused(&m, &ImportOptions::default());
        assert!(text.contains(reason), "{op}: {text}");
    }
}
