//! Every lemma at random against central differences of its operation, in f64.

pub(crate) mod cases;
pub(crate) mod draw;
mod functions;
mod mutants;
mod whole;

use super::{Lemma, Site, by, lemmas};
use cases::cases;
use draw::{Case, Kind};
use frit_ir::interpret::{Options, run};
use frit_ir::ops::*;
use frit_ir::verify::verify;
use frit_ir::{DType, Graph, Origin, OutputKind, Region, Tensor, TensorData, TensorType, ValueId};
use std::collections::{BTreeSet, HashMap};

/// Distance of the points of a difference.
const STEP: f64 = 1e-3;

/// Loss scale and factor of the seed, powers of two.
const SEED: (f64, f64) = (1024.0, 0.125);

pub(crate) fn add(g: &mut Graph, op: Op, inputs: &[ValueId]) -> Vec<ValueId> {
    g.add(op, inputs, Origin::none(), Region::Forward).unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn param(name: &str, ty: TensorType, kind: ParamKind) -> Op {
    let (init, reason) = (Init::Weights, String::new());
    let (held, unit, sharded) = (None, None, false);
    Op::Param(Param { name: name.into(), ty, kind, reason, init, held, unit, sharded })
}

/// Adds the sum of all elements of these values, each times a weight, as the loss.
fn add_loss(g: &mut Graph, values: &[(ValueId, Vec<f64>)]) {
    let mut total: Option<ValueId> = None;
    for (value, weights) in values {
        let shape = g.ty(*value).shape.clone();
        let axes = (0..shape.rank()).collect();
        let y = add(g, Op::Cast(Cast { to: DType::F64 }), &[*value])[0];
        let value = Tensor::floats(DType::F64, shape, weights.clone());
        let w = add(g, Op::Constant(Constant { value }), &[])[0];
        let product = add(g, Op::Binary(BinaryFn::Mul), &[y, w])[0];
        let sum = Reduce { f: ReduceFn::Sum, axes, keep_dims: false };
        let sum = add(g, Op::Reduce(sum), &[product])[0];
        total =
            Some(total.map_or(sum, |other| add(g, Op::Binary(BinaryFn::Add), &[other, sum])[0]));
    }
    g.add_output("loss", total.expect("a value"), OutputKind::LossSum);
    verify(g).unwrap_or_else(|broken| panic!("{broken:?}\n{g}"));
}

fn name(i: usize) -> String {
    format!("x{i}")
}

/// A case as a graph: its operands are the first values, its loss a weighted sum of the results that it reads.
struct Trial<'a> {
    case: &'a Case,
    graph: Graph,
    feeds: HashMap<String, Tensor>,
    /// The gradient of each trained operand, by differences.
    expected: Vec<(usize, Vec<f64>)>,
}

impl<'a> Trial<'a> {
    fn of(case: &'a Case) -> Self {
        let mut graph = Graph::new("g");
        let mut feeds = HashMap::new();
        let mut operands = Vec::new();
        for (i, (value, kind)) in case.operands.iter().enumerate() {
            let ty = value.ty.clone();
            let op = match kind {
                Kind::Trained => param(&name(i), ty, ParamKind::Trainable),
                Kind::Given => Op::Input(Input { name: name(i), ty }),
                Kind::Constant => Op::Constant(Constant { value: value.clone() }),
            };
            operands.push(add(&mut graph, op, &[])[0]);
            feeds.insert(name(i), value.clone());
        }
        let mut results = add(&mut graph, case.op.clone(), &operands);
        if let Op::EnterPrecision(EnterPrecision { call, .. }) = case.op {
            // What entered is only read as it leaves (V502).
            results = add(&mut graph, Op::LeavePrecision(LeavePrecision { call }), &results);
        }
        let read = results.iter().zip(&case.weights);
        let read =
            read.filter_map(|(y, w)| w.as_ref().map(|w| (*y, w.clone()))).collect::<Vec<_>>();
        add_loss(&mut graph, &read);
        let mut trial = Trial { case, graph, feeds, expected: Vec::new() };
        let trained = (0..operands.len()).filter(|i| case.operands[*i].1 == Kind::Trained);
        trial.expected = trained.map(|i| (i, trial.differences(i))).collect();
        trial
    }

    fn loss(&self, feeds: &HashMap<String, Tensor>) -> f64 {
        let results = run(&self.graph, feeds, Options::EXACT);
        results.unwrap_or_else(|e| panic!("{:?}: {e}", self.case.op))[0].1.to_f64s()[0]
    }

    /// The slope along every element of an operand by five points.
    fn differences(&self, i: usize) -> Vec<f64> {
        let value = &self.feeds[&name(i)];
        let elements = value.to_f64s();
        let slope = |at: usize| {
            let shifted = |by: f64| {
                let mut elements = elements.clone();
                elements[at] += by;
                let tensor = Tensor::exact(value.ty.clone(), TensorData::Float(elements));
                let mut feeds = self.feeds.clone();
                feeds.insert(name(i), tensor);
                self.loss(&feeds)
            };
            let near = shifted(STEP) - shifted(-STEP);
            let far = shifted(2.0 * STEP) - shifted(-2.0 * STEP);
            (8.0 * near - far) / (12.0 * STEP)
        };
        let flat = &self.case.flat;
        (0..elements.len()).map(|at| if flat.contains(&at) { 0.0 } else { slope(at) }).collect()
    }

    /// How far the gradients by these lemmas are from the differences, in the largest of these; or why there are none.
    fn error(&self, lemma: &Lemma<'_>) -> Result<f64, String> {
        let (scale, factor) = SEED;
        let graph = by(&self.graph, factor, lemma).map_err(|e| e.to_string())?;
        verify(&graph).map_err(|broken| format!("{broken:?}"))?;
        let mut feeds = self.feeds.clone();
        feeds.insert("loss_scale".into(), Tensor::scalar(scale));
        let results: HashMap<String, Tensor> =
            run(&graph, &feeds, Options::EXACT).map_err(|e| e.to_string())?.into_iter().collect();
        let mut error = 0f64;
        for (i, expected) in &self.expected {
            let found = match results.get(&name(*i)) {
                Some(gradient) if gradient.ty != self.feeds[&name(*i)].ty => {
                    return Err(format!("a gradient of type {}", gradient.ty));
                }
                Some(gradient) => gradient.to_f64s(),
                None => vec![0.0; expected.len()],
            };
            let size = expected.iter().fold(1.0, |size: f64, x| size.max(x.abs()));
            for (found, expected) in found.iter().zip(expected) {
                let difference = (found / (scale * factor) - expected).abs() / size;
                error = if difference.is_nan() { f64::INFINITY } else { error.max(difference) };
            }
        }
        Ok(error)
    }

    /// What the error may be: numbers in formulas are rounded to the element type.
    fn tolerance(&self) -> f64 {
        let types = self.case.operands.iter().map(|(value, _)| value.dtype());
        let bits = types.filter(|d| d.is_float()).map(DType::mantissa_bits).min().unwrap_or(0);
        1e-8 + 4.0 * 0.5f64.powi(bits as i32)
    }

    /// What is wrong with these lemmas here, if anything is.
    fn refuted(&self, lemma: &Lemma<'_>) -> Option<String> {
        match self.error(lemma) {
            Ok(error) if error < self.tolerance() => None,
            Ok(error) => Some(format!("an error of {error:e}")),
            Err(reason) => Some(reason),
        }
    }
}

#[test]
fn lemmas_agree_with_differences() {
    let all: Vec<Case> = (0..3).flat_map(cases).collect();
    let wrong = all.iter().filter_map(|case| {
        let wrong = Trial::of(case).refuted(&lemmas::cotangents)?;
        Some(format!("{wrong} for {case:?}"))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty() && all.len() > 1000, "{} cases\n{}", all.len(), wrong.join("\n"));
}

/// What has no lemma: leaves, results that are discrete or random, second derivatives, and what later passes add.
const WITHOUT: &[&str] = &[
    "adafactor",
    "all_gather",
    "and",
    "arg_reduce",
    "attention_grad",
    "batch_norm_grad",
    "by_param_group",
    "constant",
    "conv_grad_weight",
    "cotangent",
    "cross_entropy_grad",
    "ema_step",
    "embedding_grad",
    "eq",
    "ge",
    "gelu_grad",
    "gelu_tanh_grad",
    "grad_stats",
    "gt",
    "hyper",
    "input",
    "is_inf",
    "is_nan",
    "layer_norm_grad_affine",
    "layer_norm_grad_input",
    "le",
    "learning_rate",
    "log_softmax_grad",
    "loss_scale",
    "lt",
    "max_pool_grad",
    "muon_momentum",
    "muon_step",
    "ne",
    "optimizer_step",
    "or",
    "param",
    "quantize",
    "random",
    "random_mask",
    "reduce_scatter",
    "relu_grad",
    "rms_norm_grad_input",
    "rms_norm_grad_scale",
    "round_stats",
    "scaled_cast",
    "sigmoid_grad",
    "silu_grad",
    "softmax_grad",
    "state",
    "sum_pool_grad",
    "tanh_grad",
    "tree_sum",
    "unscale",
    "update_loss_scale",
    "update_step",
    "xor",
];

/// What has one that differences do not show: `detach` is said to be flat, `not` has no floats, and others have tests of their own.
const ELSEWHERE: &[&str] = &["all_reduce", "custom_gradient", "not"];

#[test]
fn every_operation_has_a_lemma_and_a_case_or_is_listed_without() {
    let tested: BTreeSet<&str> = (0..3).flat_map(cases).map(|case| case.op.name()).collect();
    let examples: BTreeSet<&str> = Op::examples().iter().map(Op::name).collect();
    for name in &examples {
        let places = [tested.contains(name), WITHOUT.contains(name), ELSEWHERE.contains(name)];
        let n = places.iter().filter(|there| **there).count();
        assert_eq!(n, 1, "`{name}`: {places:?}");
    }
    assert!(WITHOUT.iter().chain(ELSEWHERE).all(|name| examples.contains(name)));
    // The table of lemmas has none for them.
    let mut g = Graph::new("g");
    let leaf = param("x", TensorType::new(DType::F32, [2, 2]), ParamKind::Trainable);
    let leaf = add(&mut g, leaf, &[])[0];
    let writer = super::Writer::new(&g);
    let x = vec![writer.term(leaf); 8];
    let mut dy = vec![None; 8];
    dy[0] = Some(x[0]);
    let site = Site { y: x.clone(), dy, needed: vec![true; 8], x };
    for op in Op::examples().iter().filter(|op| WITHOUT.contains(&op.name())) {
        assert!(lemmas::cotangents(op, &site).is_none(), "`{}`", op.name());
    }
}
