//! Losses.

use super::super::{LossKind, LossTerm, with_loss};
use super::{Model, Tensors, close, floats, random};
use frit_ir::interpret::{Options, run_ranks};
use frit_ir::{DType, OutputKind, Tensor};

const IGNORED: i64 = -7;
/// With five classes f32 has all numbers that follow from it.
const SMOOTHING: f64 = 0.3125;

/// Of an output and its target.
type Element<'a> = &'a dyn Fn(f64, f64) -> f64;

fn term(kind: LossKind) -> LossTerm {
    LossTerm { kind, weight: 1.0, output: "y".into(), labels: "t".into(), class_axis: None }
}

/// Sum and number of each rank, for models whose outputs of these shapes are inputs of the same name.
fn evaluated(
    outputs: &[(&str, &[usize])],
    labels: &[(&str, DType, &[usize])],
    terms: &[LossTerm],
    ranks: &[Tensors],
) -> Vec<[f64; 2]> {
    let mut model = Model::new();
    for (name, shape) in outputs {
        let value = model.input(name, DType::F32, shape);
        model.0.add_output(name, value, OutputKind::Result);
    }
    for (name, dtype, shape) in labels {
        model.input(name, *dtype, shape);
    }
    let graph = with_loss(&model.0, terms, ranks.len()).expect("stated");
    let kinds = graph.outputs[outputs.len()..].iter().map(|o| o.kind);
    assert_eq!(kinds.collect::<Vec<_>>(), [OutputKind::LossSum, OutputKind::LossCount]);
    let found = run_ranks(&graph, ranks, Options::EXACT).expect("runs");
    let last = |outputs: &Vec<(String, Tensor)>| {
        [1, 0].map(|back| outputs[outputs.len() - 1 - back].1.to_f64s()[0])
    };
    found.iter().map(last).collect()
}

/// ln of the softmax of a row.
fn log_softmax(row: &[f64]) -> Vec<f64> {
    let sum: f64 = row.iter().map(|x| x.exp()).sum();
    row.iter().map(|x| x - sum.ln()).collect()
}

/// −Σ t·ln p of rows of `classes`, with smoothed targets.
fn cross_entropy(x: &[f64], t: &[f64], classes: usize, smoothing: f64) -> f64 {
    let rows = x.chunks(classes).zip(t.chunks(classes));
    let of_row = |(x, t): (&[f64], &[f64])| -> f64 {
        let smooth = |t: f64| (1.0 - smoothing) * t + smoothing / classes as f64;
        log_softmax(x).iter().zip(t).map(|(log, t)| -smooth(*t) * log).sum()
    };
    rows.map(of_row).sum()
}

fn one_hot(labels: &[i64], classes: usize) -> Vec<f64> {
    let hot = |l: &i64| (0..classes as i64).map(move |c| f64::from(u8::from(c == *l))).collect();
    labels.iter().flat_map(|l| -> Vec<f64> { hot(l) }).collect()
}

#[test]
fn elements_are_what_the_definitions_say() {
    let mut rng = fastrand::Rng::with_seed(1);
    let (x, mut t) = (random(&mut rng, 12), random(&mut rng, 12));
    t[3] = x[3] + 0.01;
    let smooth = |d: f64| if d.abs() < 0.25 { d * d / 0.5 } else { d.abs() - 0.125 };
    let elements: [(LossKind, Element<'_>); 4] = [
        (LossKind::Mse, &|x, t| (x - t).powi(2)),
        (LossKind::L1, &|x, t| (x - t).abs()),
        (LossKind::SmoothL1 { beta: 0.25 }, &|x, t| smooth(x - t)),
        (LossKind::BceWithLogits, &|x, t| {
            let p = 1.0 / (1.0 + (-x).exp());
            -(t * p.ln() + (1.0 - t) * (1.0 - p).ln())
        }),
    ];
    for (kind, element) in elements {
        let feeds = [("y", &x), ("t", &t)].map(|(n, v)| (n.to_string(), floats(&[3, 4], v))).into();
        let found = evaluated(&[("y", &[3, 4])], &[], &[term(kind)], &[feeds]);
        let sum: f64 = x.iter().zip(&t).map(|(x, t)| element(*x, *t)).sum();
        close(&found[0], &[sum, 12.0], &format!("{kind:?}"));
    }
}

#[test]
fn a_loss_of_the_model_is_itself() {
    let feeds = [("z".to_string(), floats(&[1, 1], &[0.75]))].into();
    // The only output, whatever its name.
    let found = evaluated(&[("z", &[1, 1])], &[], &[term(LossKind::Output)], &[feeds]);
    close(&found[0], &[0.75, 1.0], "output");
}

#[test]
fn probabilities_are_of_all_classes() {
    let mut rng = fastrand::Rng::with_seed(2);
    let (x, mut t) = (random(&mut rng, 20), random(&mut rng, 20));
    t.iter_mut().for_each(|t| *t = t.abs());
    t[7] = 0.0;
    let kl = x.chunks(5).zip(t.chunks(5)).map(|(x, t)| -> f64 {
        let terms = log_softmax(x).into_iter().zip(t);
        terms.map(|(log, t)| if *t == 0.0 { 0.0 } else { t * (t.ln() - log) }).sum()
    });
    let kl: f64 = kl.sum();
    for (kind, sum) in [
        (LossKind::Kl, kl),
        (LossKind::SoftCrossEntropy { smoothing: 0.0 }, cross_entropy(&x, &t, 5, 0.0)),
        (LossKind::SoftCrossEntropy { smoothing: SMOOTHING }, cross_entropy(&x, &t, 5, SMOOTHING)),
    ] {
        let feeds =
            [("y", &x), ("t", &t)].map(|(n, v)| (n.to_string(), floats(&[2, 2, 5], v))).into();
        let found = evaluated(&[("y", &[2, 2, 5])], &[], &[term(kind)], &[feeds]);
        close(&found[0], &[sum, 4.0], &format!("{kind:?}"));
    }
}

#[test]
fn indices_choose_a_class_unless_they_are_ignored() {
    let mut rng = fastrand::Rng::with_seed(3);
    // Rows of five classes, as [2, 3, 5] and, with the classes on axis 1, as [2, 5, 3].
    let rows = random(&mut rng, 30);
    let labels = [4, IGNORED, 0, 2, 2, IGNORED];
    let columns: Vec<f64> = (0..30)
        .map(|i| {
            let (b, c, t) = (i / 15, i / 3 % 5, i % 3);
            rows[(b * 3 + t) * 5 + c]
        })
        .collect();
    let counted: Vec<usize> = (0..6).filter(|i| labels[*i] != IGNORED).collect();
    let x: Vec<f64> = counted.iter().flat_map(|i| rows[i * 5..][..5].to_vec()).collect();
    let t = one_hot(&counted.iter().map(|i| labels[*i]).collect::<Vec<_>>(), 5);
    for smoothing in [0.0, SMOOTHING] {
        let kind = LossKind::CrossEntropy { ignore_index: IGNORED, smoothing };
        let expected = [cross_entropy(&x, &t, 5, smoothing), 4.0];
        for dtype in [DType::I64, DType::I32] {
            let t = Tensor::ints(dtype, [2, 3], labels.to_vec());
            let own: &[(&str, DType, &[usize])] = &[("t", dtype, &[2, 3])];
            // Without labels of the model's own, which are i64, the axis must be given.
            let new = if dtype == DType::I64 { &[] } else { own };
            let on_axis = |class_axis| LossTerm { class_axis, ..term(kind) };
            for (shape, x, labels, class_axis) in [
                ([2, 3, 5], &rows, own, None),
                ([2, 3, 5], &rows, new, Some(2)),
                ([2, 5, 3], &columns, own, None),
                ([2, 5, 3], &columns, new, Some(-2)),
            ] {
                let feeds =
                    [("y".to_string(), floats(&shape, x)), ("t".to_string(), t.clone())].into();
                let found = evaluated(&[("y", &shape)], labels, &[on_axis(class_axis)], &[feeds]);
                close(&found[0], &expected, &format!("{shape:?}, ε = {smoothing}"));
            }
        }
    }
}

#[test]
fn several_losses_are_means_over_all_ranks() {
    let mut rng = fastrand::Rng::with_seed(4);
    let kind = LossKind::CrossEntropy { ignore_index: IGNORED, smoothing: 0.0 };
    let terms = [
        LossTerm { weight: 0.5, ..term(kind) },
        LossTerm {
            kind: LossKind::Mse,
            weight: 3.0,
            output: "z".into(),
            labels: "u".into(),
            class_axis: None,
        },
    ];
    let (mut sums, mut counted, mut ranks) = ([0.0; 2], 0.0, vec![]);
    for labels in [[1, IGNORED, IGNORED], [0, 3, 2]] {
        let (x, z, u) = (random(&mut rng, 12), random(&mut rng, 6), random(&mut rng, 6));
        for (row, label) in x.chunks(4).zip(labels).filter(|(_, l)| *l != IGNORED) {
            sums[0] += cross_entropy(row, &one_hot(&[label], 4), 4, 0.0);
            counted += 1.0;
        }
        sums[1] += z.iter().zip(&u).map(|(z, u)| (z - u).powi(2)).sum::<f64>();
        let t = Tensor::ints(DType::I64, [3], labels.to_vec());
        let feeds = [
            ("y".to_string(), floats(&[3, 4], &x)),
            ("t".to_string(), t),
            ("z".to_string(), floats(&[6], &z)),
            ("u".to_string(), floats(&[6], &u)),
        ];
        ranks.push(Tensors::from(feeds));
    }
    let found = evaluated(&[("y", &[3, 4]), ("z", &[6])], &[], &terms, &ranks);
    let mean = (found[0][0] + found[1][0]) / 2.0;
    close(&[mean], &[0.5 * sums[0] / counted + 3.0 * sums[1] / 12.0], "the mean of both ranks");
    assert!(found.iter().all(|f| f[1] == 1.0), "{found:?}");
    // One loss with a factor is a sum, too.
    let alone = evaluated(&[("y", &[3, 4])], &[], &terms[..1], &ranks[1..]);
    let all = evaluated(&[("y", &[3, 4])], &[], &[term(kind)], &ranks[1..]);
    close(&alone[0], &[0.5 * all[0][0], 3.0], "one loss");
    // Where no label counts the loss is 0.
    let nothing = Tensor::ints(DType::I64, [3], vec![IGNORED; 3]);
    let rank: Tensors = ranks[0].clone().into_iter().chain([("t".to_string(), nothing)]).collect();
    let found = evaluated(&[("y", &[3, 4])], &[], &terms[..1], &[rank]);
    close(&found[0], &[0.0, 0.0], "no label");
}

#[test]
fn what_has_no_statement_is_named() {
    let mut model = Model::new();
    let y = model.input("y", DType::F32, &[2, 3, 3]);
    let t = model.input("t", DType::I64, &[2, 3]);
    model.0.add_output("y", y, OutputKind::Result);
    model.0.add_output("t", t, OutputKind::Result);
    let kind = LossKind::CrossEntropy { ignore_index: IGNORED, smoothing: 0.0 };
    for (term, what) in [
        (LossTerm { output: "logits".into(), ..term(kind) }, "the model has no output `logits`"),
        (term(kind), "`y` [2, 3, 3] has no such class axis"),
        (LossTerm { class_axis: Some(-4), ..term(kind) }, "`y` [2, 3, 3] has no such class axis"),
        (term(LossKind::Mse), "`t` has shape [2, 3], not [2, 3, 3]"),
    ] {
        let error = with_loss(&model.0, std::slice::from_ref(&term), 1).expect_err("unstated");
        assert!(error.to_string().contains(what), "{error}");
    }
    assert_eq!(with_loss(&model.0, &[], 1), Ok(model.0));
}
