//! Values of which data decide the size: what is computed of them is what would be of those that are selected alone.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::{ModelProto, NodeProto};
use frit_ir::{DType, Tensor};

const BOOL: i32 = 9;
/// Rows of the data, each of two elements.
const ROWS: usize = 6;

fn data(seed: u64) -> Vec<[f64; 2]> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..ROWS).map(|_| [0, 1].map(|_| f64::from(random.i8(-20..20)) / 8.0)).collect()
}

/// A model of `x [6, 2]`, of which `rows` are those that `mask` selects.
fn model_of(nodes: Vec<NodeProto>, output: &str) -> ModelProto {
    let n = |dims: &[i64]| dims.iter().map(|n| Dim::N(*n)).collect::<Vec<_>>();
    let inputs = vec![
        input("x", 1, &n(&[ROWS as i64, 2])),
        input("mask", BOOL, &n(&[ROWS as i64])),
        input("labels", 7, &n(&[ROWS as i64])),
    ];
    let constants = [
        ("zero", &[0][..]),
        ("one", &[1]),
        ("two", &[2]),
        ("flat", &[-1]),
        ("pairs", &[-1, 2]),
        ("halves", &[2, -1]),
        ("whole", &[ROWS as i64, -1]),
    ];
    let constants = constants.map(|(name, values)| ints(name, values)).to_vec();
    let mut all = vec![
        node("NonZero", &["mask"], &["columns"]),
        node("Transpose", &["columns"], &["places"]).with(&[list("perm", &[1, 0])]),
        node("GatherND", &["x", "places"], &["rows"]),
        node("GatherND", &["labels", "places"], &["classes"]),
        node("Squeeze", &["places", "one"], &["place"]),
    ];
    all.extend(nodes);
    model(inputs, constants, all, &[output])
}

fn feeds(x: &[[f64; 2]], mask: &[bool], labels: &[i64]) -> [(&'static str, Tensor); 3] {
    let mask = mask.iter().map(|m| i64::from(*m)).collect();
    [
        ("x", Tensor::floats(DType::F32, [ROWS, 2], x.concat())),
        ("mask", Tensor::ints(DType::Bool, [ROWS], mask)),
        ("labels", Tensor::ints(DType::I64, [ROWS], labels.to_vec())),
    ]
}

type Rows = [[f64; 2]];

fn sum(rows: &Rows) -> [f64; 2] {
    rows.iter().fold([0.0; 2], |s, r| [s[0] + r[0], s[1] + r[1]])
}

/// Nodes, their result, and the same of the rows and classes that are selected, their places, and all rows.
type Case = (&'static str, Vec<NodeProto>, fn(&Rows, &[i64], &[usize], &Rows) -> Vec<f64>);

fn cases() -> Vec<Case> {
    let reduced = |op: &str, of: &str| node(op, &[of, "zero"], &["y"]).with(&[int("keepdims", 0)]);
    let square = || node("Mul", &["rows", "rows"], &["squares"]);
    let loss = |attributes: &[_]| {
        vec![
            node("LogSoftmax", &["rows"], &["logs"]).with(&[int("axis", 1)]),
            node("NegativeLogLikelihoodLoss", &["logs", "classes"], &["y"]).with(attributes),
        ]
    };
    vec![
        ("mean", vec![square(), reduced("ReduceMean", "squares")], |rows, _, _, _| {
            let squares: Vec<_> = rows.iter().map(|r| r.map(|x| x * x)).collect();
            sum(&squares).map(|x| x / rows.len() as f64).to_vec()
        }),
        (
            "mean of all",
            vec![node("ReduceMean", &["rows"], &["y"]).with(&[int("keepdims", 0)])],
            |rows, _, _, _| vec![sum(rows).iter().sum::<f64>() / (2 * rows.len()) as f64],
        ),
        (
            "sum",
            vec![node("Exp", &["rows"], &["e"]), reduced("ReduceSum", "e")],
            |rows, _, _, _| sum(&rows.iter().map(|r| r.map(f64::exp)).collect::<Vec<_>>()).to_vec(),
        ),
        ("largest", vec![reduced("ReduceMax", "rows")], |rows, _, _, _| {
            [0, 1].map(|k| rows.iter().map(|r| r[k]).fold(f64::MIN, f64::max)).to_vec()
        }),
        ("smallest", vec![reduced("ReduceMin", "rows")], |rows, _, _, _| {
            [0, 1].map(|k| rows.iter().map(|r| r[k]).fold(f64::MAX, f64::min)).to_vec()
        }),
        ("product", vec![reduced("ReduceProd", "rows")], |rows, _, _, _| {
            [0, 1].map(|k| rows.iter().map(|r| r[k]).product()).to_vec()
        }),
        (
            "first largest",
            vec![
                node("ArgMax", &["rows"], &["i"]).with(&[int("axis", 0), int("keepdims", 0)]),
                node("Cast", &["i"], &["y"]).with(&[int("to", 1)]),
            ],
            |rows, _, _, _| {
                let first = |k: usize| {
                    let most = rows.iter().map(|r| r[k]).fold(f64::MIN, f64::max);
                    rows.iter().position(|r| r[k] == most).expect("there is one") as f64
                };
                [0, 1].map(first).to_vec()
            },
        ),
        (
            "products of columns",
            vec![
                node("Transpose", &["rows"], &["columns_of"]).with(&[list("perm", &[1, 0])]),
                node("MatMul", &["columns_of", "rows"], &["y"]),
            ],
            |rows, _, _, _| {
                let product = |a: usize, b: usize| rows.iter().map(|r| r[a] * r[b]).sum();
                vec![product(0, 0), product(0, 1), product(1, 0), product(1, 1)]
            },
        ),
        (
            "weights that sum to one",
            vec![
                node("Softmax", &["rows"], &["w"]).with(&[int("axis", 0)]),
                node("Mul", &["w", "rows"], &["weighted"]),
                reduced("ReduceSum", "weighted"),
            ],
            |rows, _, _, _| {
                let of = |k: usize| {
                    let all: f64 = rows.iter().map(|r| r[k].exp()).sum();
                    rows.iter().map(|r| r[k].exp() / all * r[k]).sum()
                };
                [0, 1].map(of).to_vec()
            },
        ),
        (
            "joined and apart again",
            vec![
                node("Reshape", &["rows", "flat"], &["all"]),
                node("Exp", &["all"], &["e"]),
                node("ReduceSum", &["e", "zero"], &["s"]).with(&[int("keepdims", 1)]),
                node("Reshape", &["e", "pairs"], &["apart"]),
                node("Mul", &["apart", "s"], &["scaled"]),
                reduced("ReduceMean", "scaled"),
            ],
            |rows, _, _, _| {
                let e: Vec<_> = rows.iter().map(|r| r.map(f64::exp)).collect();
                let s = sum(&e);
                s.map(|x| x * (s[0] + s[1]) / rows.len() as f64).to_vec()
            },
        ),
        (
            "ones of their number",
            vec![
                node("Shape", &["classes"], &["size"]),
                node("ConstantOfShape", &["size"], &["zeros"]),
                node("Exp", &["zeros"], &["ones"]),
                reduced("ReduceSum", "ones"),
            ],
            |rows, _, _, _| vec![rows.len() as f64],
        ),
        (
            "the last of them",
            vec![
                node("Neg", &["classes"], &["negative"]),
                node("Sub", &["negative", "classes"], &["twice"]),
                node("Sub", &["twice", "twice"], &["nothing"]),
                node("ReduceMax", &["nothing", "zero"], &["none"]).with(&[int("keepdims", 1)]),
                node("Sub", &["none", "one"], &["last"]),
                node("Gather", &["rows", "last"], &["y"]).with(&[int("axis", 0)]),
            ],
            |rows, _, _, _| rows[rows.len() - 1].to_vec(),
        ),
        (
            "loss of all classes",
            vec![node("SoftmaxCrossEntropyLoss", &["rows", "classes"], &["y"])],
            |rows, classes, _, _| {
                let log =
                    |(r, c): (&[f64; 2], &i64)| (r[0].exp() + r[1].exp()).ln() - r[*c as usize];
                vec![rows.iter().zip(classes).map(log).sum::<f64>() / rows.len() as f64]
            },
        ),
        (
            "compressed",
            vec![
                node("Compress", &["x", "mask"], &["own"]).with(&[int("axis", 0)]),
                node("Mul", &["own", "rows"], &["squares"]),
                reduced("ReduceMean", "squares"),
            ],
            |rows, _, _, _| {
                let squares: Vec<_> = rows.iter().map(|r| r.map(|x| x * x)).collect();
                sum(&squares).map(|x| x / rows.len() as f64).to_vec()
            },
        ),
        (
            "their number",
            vec![
                node("Shape", &["rows"], &["size"]),
                node("ReduceProd", &["size"], &["elements"]).with(&[int("keepdims", 0)]),
                node("Gather", &["size", "zero"], &["n"]),
                node("Sub", &["n", "one"], &["fewer"]),
                node("Add", &["fewer", "elements"], &["all"]),
                node("CastLike", &["all", "x"], &["f"]),
                node("Mul", &["x", "f"], &["y"]),
            ],
            |rows, _, _, x| {
                let n = rows.len() as f64;
                x.concat().iter().map(|x| x * (n - 1.0 + 2.0 * n)).collect()
            },
        ),
        (
            "numbered",
            vec![
                node("Shape", &["classes"], &["size"]),
                node("Squeeze", &["size"], &["n"]),
                node("Squeeze", &["zero"], &["start"]),
                node("Squeeze", &["one"], &["step"]),
                node("Range", &["start", "n", "step"], &["numbers"]),
                node("Unsqueeze", &["numbers", "one"], &["column"]),
                node("CastLike", &["column", "rows"], &["f"]),
                node("Mul", &["rows", "f"], &["weighted"]),
                reduced("ReduceSum", "weighted"),
            ],
            |rows, _, _, _| {
                let weighted = rows.iter().enumerate().map(|(i, r)| r.map(|x| x * i as f64));
                sum(&weighted.collect::<Vec<_>>()).to_vec()
            },
        ),
        (
            "selected of what is selected",
            vec![
                node("Gather", &["rows", "zero"], &["first"]).with(&[int("axis", 1)]),
                node("Squeeze", &["first", "one"], &["firsts"]),
                node("CastLike", &["zero", "firsts"], &["nought"]),
                node("Greater", &["firsts", "nought"], &["positive"]),
                node("NonZero", &["positive"], &["again"]),
                node("Transpose", &["again"], &["again_t"]).with(&[list("perm", &[1, 0])]),
                node("GatherND", &["rows", "again_t"], &["fewer"]),
                reduced("ReduceSum", "fewer"),
            ],
            |rows, _, _, _| {
                sum(&rows.iter().filter(|r| r[0] > 0.0).copied().collect::<Vec<_>>()).to_vec()
            },
        ),
        (
            "added where they are from",
            vec![
                node("Exp", &["rows"], &["e"]),
                node("ScatterND", &["x", "places", "e"], &["y"]).with(&[text("reduction", "add")]),
            ],
            |_, _, places, x| {
                let of = |(i, r): (usize, &[f64; 2])| {
                    r.map(|x| if places.contains(&i) { x + x.exp() } else { x })
                };
                x.iter().enumerate().flat_map(of).collect()
            },
        ),
        (
            "written where they are from",
            vec![node("Exp", &["rows"], &["e"]), node("ScatterND", &["x", "places", "e"], &["y"])],
            |_, _, places, x| {
                let of = |(i, r): (usize, &[f64; 2])| {
                    r.map(|x| if places.contains(&i) { x.exp() } else { x })
                };
                x.iter().enumerate().flat_map(of).collect()
            },
        ),
        (
            // The last that has a label is there.
            "written elsewhere",
            vec![
                node("Unsqueeze", &["classes", "one"], &["at"]),
                node("ScatterND", &["x", "at", "rows"], &["y"]),
            ],
            |rows, classes, _, x| {
                let mut y = x.to_vec();
                classes.iter().zip(rows).for_each(|(at, row)| y[*at as usize] = *row);
                y.concat()
            },
        ),
        (
            "written along an axis",
            vec![
                node("Gather", &["rows", "zero"], &["column"]).with(&[int("axis", 1)]),
                node("Squeeze", &["column", "one"], &["values"]),
                node("Gather", &["x", "zero"], &["own"]).with(&[int("axis", 1)]),
                node("Squeeze", &["own", "one"], &["owns"]),
                node("ScatterElements", &["owns", "classes", "values"], &["y"])
                    .with(&[int("axis", 0)]),
            ],
            |rows, classes, _, x| {
                let mut y: Vec<f64> = x.iter().map(|r| r[0]).collect();
                classes.iter().zip(rows).for_each(|(at, row)| y[*at as usize] = row[0]);
                y
            },
        ),
        ("loss", loss(&[]), |rows, classes, _, _| {
            let log = |(r, c): (&[f64; 2], &i64)| (r[0].exp() + r[1].exp()).ln() - r[*c as usize];
            vec![rows.iter().zip(classes).map(log).sum::<f64>() / rows.len() as f64]
        }),
        ("loss but of one class", loss(&[int("ignore_index", 1)]), |rows, classes, _, _| {
            let log = |(r, _): (&[f64; 2], &i64)| (r[0].exp() + r[1].exp()).ln() - r[0];
            let counted: Vec<_> = rows.iter().zip(classes).filter(|(_, c)| **c != 1).collect();
            let n = counted.len() as f64;
            vec![counted.into_iter().map(log).sum::<f64>() / n]
        }),
        (
            "in order",
            vec![
                node("CumSum", &["rows", "zero"], &["sums"]),
                node("Mul", &["sums", "rows"], &["weighted"]),
                reduced("ReduceSum", "weighted"),
            ],
            |rows, _, _, _| {
                let of = |k: usize| {
                    let mut so_far = 0.0;
                    rows.iter()
                        .map(|r| {
                            so_far += r[k];
                            so_far * r[k]
                        })
                        .sum()
                };
                [0, 1].map(of).to_vec()
            },
        ),
    ]
}

#[test]
fn what_is_selected_is_computed_alone() {
    let mut random = fastrand::Rng::with_seed(4);
    for (name, nodes, expected) in cases() {
        let model = model_of(nodes, "y");
        for seed in 0..12 {
            let x = data(seed);
            let mut mask: Vec<bool> = (0..ROWS).map(|_| random.bool()).collect();
            mask[random.usize(..ROWS)] = true;
            let written = name.starts_with("written");
            let most = if written { ROWS as i64 } else { 2 };
            let mut labels: Vec<i64> = (0..ROWS).map(|_| random.i64(0..most)).collect();
            if name.starts_with("loss but") {
                labels[mask.iter().position(|m| *m).expect("one")] = 0;
            }
            let places: Vec<usize> = (0..ROWS).filter(|i| mask[*i]).collect();
            let rows: Vec<[f64; 2]> = places.iter().map(|i| x[*i]).collect();
            let classes: Vec<i64> = places.iter().map(|i| labels[*i]).collect();
            let found = eval(&model, &feeds(&x, &mask, &labels)).to_f64s();
            let expected = expected(&rows, &classes, &places, &x);
            let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * (1.0 + b.abs());
            let same = found.len() == expected.len() && found.iter().zip(&expected).all(close);
            assert!(same, "{name} of {x:?}, {mask:?}, {labels:?}: {found:?}, not {expected:?}");
        }
    }
}

/// A write of nothing changes nothing, and a sum of nothing is zero.
#[test]
fn a_mask_may_select_nothing() {
    // Of nothing there is no last element.
    for (name, nodes, _) in cases().into_iter().filter(|case| case.0 != "the last of them") {
        let x = data(3);
        let found = eval(&model_of(nodes, "y"), &feeds(&x, &[false; ROWS], &[0; ROWS])).to_f64s();
        match name {
            "sum" => assert_eq!(found, [0.0, 0.0]),
            "added where they are from" | "written where they are from" | "written elsewhere" => {
                assert_eq!(found, x.concat(), "{name}");
            }
            _ => {}
        }
    }
}

#[test]
fn what_would_show_how_many_there_are_is_refused() {
    let shape = || node("Shape", &["classes"], &["size"]);
    for (nodes, output, what) in [
        (vec![], "rows", "the output \"rows\" has, or is, a size that depends on data"),
        (
            vec![
                node("Reshape", &["rows", "halves"], &["apart"]),
                node("ReduceSum", &["apart"], &["y"]),
            ],
            "y",
            "a size of [6, 2] as [2, 6] depends on data",
        ),
        (
            vec![
                node("Reshape", &["rows", "whole"], &["apart"]),
                node("ReduceSum", &["apart"], &["y"]),
            ],
            "y",
            "a size of [6, 2] as [6, -1] depends on data",
        ),
        (
            vec![
                shape(),
                node("Sub", &["size", "one"], &["fewer"]),
                node("ConstantOfShape", &["fewer"], &["y"]),
            ],
            "y",
            "ConstantOfShape: the shape depends on data",
        ),
        (
            vec![
                node("Slice", &["rows", "one", "two"], &["part"]),
                node("ReduceSum", &["part"], &["y"]),
            ],
            "y",
            "a size of what `slice` computes with depends on data",
        ),
        (
            vec![
                node("Concat", &["rows", "x"], &["both"]).with(&[int("axis", 0)]),
                node("ReduceSum", &["both"], &["y"]),
            ],
            "y",
            "a size of what `concat` computes with depends on data",
        ),
        (
            vec![
                node("Transpose", &["rows"], &["turned"]).with(&[list("perm", &[1, 0])]),
                node("MatMul", &["rows", "turned"], &["square"]),
                node("ReduceSum", &["square"], &["y"]),
            ],
            "y",
            "more than one size depends on data",
        ),
        (
            vec![
                node("InstanceNormalization", &["rows", "one", "one"], &["n"]),
                node("ReduceSum", &["n"], &["y"]),
            ],
            "y",
            "InstanceNormalization: a size of an operand depends on data",
        ),
        (
            vec![
                shape(),
                node("Squeeze", &["size"], &["n"]),
                node("Squeeze", &["one"], &["start"]),
                node("Range", &["start", "n", "start"], &["r"]),
                node("ReduceSum", &["r"], &["y"]),
            ],
            "y",
            "Range: the limit depends on data",
        ),
    ] {
        let found = refused(&model_of(nodes, output), &ImportOptions::default());
        assert!(found.contains("E034") && found.contains(what), "{what}: {found}");
    }
}
