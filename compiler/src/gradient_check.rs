//! Compares the gradients that functions state with finite differences of these functions.
//!
//! A call is evaluated in f64 on random operands, each by itself: what it reads beside its float inputs, such as indices, is computed
//! from random inputs of the model. For a random weighting of the results and random directions of one input, the change of the weighted
//! sum is compared with the product of direction and gradient.

use fastrand::Rng;
use frit_ir::interpret::{EvalError, Options, leaf_key, run};
use frit_ir::ops::{CustomGradient, Init, Input};
use frit_ir::plan::IndexRange;
use frit_ir::{
    DType, Graph, Node, NodeId, Op, Origin, OutputKind, Region, Tensor, TensorData, TensorType,
    ValueId,
};
use frit_passes::index_ranges::IndexRanges;
use frit_passes::{Pass, PassContext};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Random directions of each input.
const DIRECTIONS: usize = 4;
/// The step of the differences.
const STEP: f64 = 1e-5;
/// Prefixes of the names of what is fed: no name of a model has a `#` first.
const OPERAND: &str = "#x";
const COTANGENT: &str = "#dy";

/// A gradient beside the finite differences.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The model's name of the function.
    pub function: String,
    /// The call.
    pub origin: Origin,
    /// Which of the inputs that have a gradient, from 0.
    pub input: usize,
    /// Its type.
    pub ty: TensorType,
    /// The error relative to the larger of both; `None` if the function or its gradient is not finite.
    pub error: Option<f64>,
}

/// Checks every call of an imported graph.
///
/// # Errors
/// If a function cannot be evaluated.
pub fn check(graph: &Graph, seed: u64) -> Result<Vec<Finding>, EvalError> {
    let mut context = PassContext::default();
    // Only analyzes.
    let _ = IndexRanges {}.run(&mut graph.clone(), &mut context);
    let mut found = Vec::new();
    for (_, node) in graph.nodes() {
        if let Op::CustomGradient(op) = &node.op {
            let call = Call::of(graph, node, op);
            let random = Rng::with_seed(seed ^ u64::from(op.call));
            found.extend(call.check(random, &context.index_ranges, op, &node.origin)?);
        }
    }
    Ok(found)
}

/// One call as a graph of its own: inputs for its float operands and its cotangents, outputs for results and gradients.
struct Call {
    graph: Graph,
    /// The types of the operands that have a gradient, with the names under which they are fed.
    operands: Vec<(String, TensorType)>,
    results: usize,
}

impl Call {
    fn of(graph: &Graph, node: &Node, op: &CustomGradient) -> Call {
        let pairs: Vec<(ValueId, ValueId)> =
            op.pairs(node.inputs.len()).map(|(x, dx)| (node.inputs[x], node.inputs[dx])).collect();
        let mut copy = Graph::new(&graph.name);
        let mut map: HashMap<ValueId, ValueId> = HashMap::new();
        let mut operands = Vec::new();
        for (x, _) in &pairs {
            let place = pairs.iter().position(|(other, _)| other == x).unwrap_or(0);
            let name = format!("{OPERAND}{place}");
            map.entry(*x).or_insert_with(|| leaf(&mut copy, &name, graph.ty(*x)));
            operands.push((name, graph.ty(*x).clone()));
        }
        let wanted: Vec<ValueId> = node.inputs[..op.results]
            .iter()
            .copied()
            .chain(pairs.iter().map(|(_, dx)| *dx))
            .collect();
        let needed = needed(graph, &wanted, &map);
        for (_, inner) in graph.nodes().filter(|(id, _)| needed.contains(id)) {
            let results: Vec<ValueId> = match &inner.op {
                Op::Cotangent(of) if of.call == op.call => {
                    let name = format!("{COTANGENT}{}", of.result);
                    vec![leaf(&mut copy, &name, graph.ty(inner.outputs[0]))]
                }
                _ => {
                    let inputs: Vec<ValueId> = inner.inputs.iter().map(|v| map[v]).collect();
                    let (op, origin) = (inner.op.clone(), inner.origin.clone());
                    let added = copy.add(op, &inputs, origin, Region::Forward);
                    added.expect("invariant: what fits a graph fits its copy")
                }
            };
            for (old, new) in inner.outputs.iter().zip(results) {
                map.entry(*old).or_insert(new);
            }
        }
        for (i, v) in wanted.iter().enumerate() {
            copy.add_output(&format!("{i}"), map[v], OutputKind::Result);
        }
        Call { graph: copy, operands, results: op.results }
    }

    fn check(
        &self,
        mut random: Rng,
        ranges: &BTreeMap<String, Vec<IndexRange>>,
        op: &CustomGradient,
        origin: &Origin,
    ) -> Result<Vec<Finding>, EvalError> {
        // Operands of any sign, or where that leaves the domain of the function positive ones.
        let mut errors = Vec::new();
        for positive in [false, true] {
            let feeds = self.feeds(&mut random, ranges, positive);
            errors = (0..self.operands.len())
                .map(|i| self.error(i, &feeds, &mut random))
                .collect::<Result<Vec<_>, _>>()?;
            if errors.iter().all(Option::is_some) {
                break;
            }
        }
        let finding = |(input, error): (usize, Option<f64>)| Finding {
            function: op.function.clone(),
            origin: origin.clone(),
            input,
            ty: self.operands[input].1.clone(),
            error,
        };
        Ok(errors.into_iter().enumerate().map(finding).collect())
    }

    /// Values of all leaves.
    fn feeds(
        &self,
        random: &mut Rng,
        ranges: &BTreeMap<String, Vec<IndexRange>>,
        positive: bool,
    ) -> HashMap<String, Tensor> {
        let mut feeds = HashMap::new();
        for (_, node) in self.graph.nodes() {
            let Some(key) = leaf_key(&node.op) else { continue };
            let ty = self.graph.ty(node.outputs[0]).clone();
            let n = ty.shape.numel();
            let value = match &node.op {
                Op::Param(param) if matches!(param.init, Init::Constant(_)) => continue,
                Op::State(_) => continue,
                _ if ty.dtype.is_float() => {
                    let own = positive && key.starts_with(OPERAND);
                    let one = |random: &mut Rng| match own {
                        true => 0.3 + 1.4 * random.f64(),
                        false => normal(random),
                    };
                    let values = (0..n).map(|_| one(random)).collect();
                    Tensor::exact(ty, TensorData::Float(values))
                }
                _ => {
                    let given = ranges.get(&key).into_iter().flatten();
                    let least = given.map(|r| r.hi).min().unwrap_or(1).max(0);
                    let most = if ty.dtype == DType::Bool { 1 } else { least };
                    let values = (0..n).map(|_| random.i64(0..=most)).collect();
                    Tensor::ints(ty.dtype, ty.shape, values)
                }
            };
            feeds.insert(key, value);
        }
        for i in 0..self.results {
            feeds.entry(format!("{COTANGENT}{i}")).or_insert_with(|| {
                let ty = self.graph.ty(self.graph.outputs[i].value).clone();
                let values = (0..ty.shape.numel()).map(|_| normal(random)).collect();
                Tensor::exact(ty, TensorData::Float(values))
            });
        }
        feeds
    }

    /// The relative error of the gradient of an operand.
    fn error(
        &self,
        i: usize,
        feeds: &HashMap<String, Tensor>,
        random: &mut Rng,
    ) -> Result<Option<f64>, EvalError> {
        let (name, ty) = &self.operands[i];
        let outputs = run(&self.graph, feeds, Options::EXACT)?;
        // An operand that is given twice has the sum of both gradients.
        let mut gradient = vec![0.0; ty.shape.numel()];
        for (j, _) in self.operands.iter().enumerate().filter(|(_, (other, _))| other == name) {
            let part = outputs[self.results + j].1.to_f64s();
            gradient.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        let point = feeds[name].to_f64s();
        let moved = |direction: &[f64], by: f64| -> Result<f64, EvalError> {
            let values = point.iter().zip(direction).map(|(x, d)| x + by * d).collect();
            let mut feeds = feeds.clone();
            feeds.insert(name.clone(), Tensor::exact(ty.clone(), TensorData::Float(values)));
            let outputs = run(&self.graph, &feeds, Options::EXACT)?;
            let weighted = |j: usize| -> f64 {
                let weights = feeds[&format!("{COTANGENT}{j}")].to_f64s();
                outputs[j].1.to_f64s().iter().zip(weights).map(|(y, w)| y * w).sum()
            };
            Ok((0..self.results).map(weighted).sum())
        };
        let (mut difference, mut largest) = (0.0f64, 0.0f64);
        for _ in 0..DIRECTIONS {
            let direction: Vec<f64> = point.iter().map(|_| normal(random)).collect();
            let expected = (moved(&direction, STEP)? - moved(&direction, -STEP)?) / (2.0 * STEP);
            let stated: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
            if !(expected.is_finite() && stated.is_finite()) {
                return Ok(None);
            }
            difference += (expected - stated).powi(2);
            largest = largest.max(expected.abs()).max(stated.abs());
        }
        let error = (difference / DIRECTIONS as f64).sqrt();
        Ok(Some(if largest == 0.0 { 0.0 } else { error / largest }))
    }
}

/// The nodes that these values are computed by, up to those that are given.
fn needed(graph: &Graph, values: &[ValueId], given: &HashMap<ValueId, ValueId>) -> HashSet<NodeId> {
    let mut found = HashSet::new();
    let mut open: Vec<ValueId> = values.to_vec();
    while let Some(value) = open.pop() {
        let id = graph.value(value).def;
        if !given.contains_key(&value) && found.insert(id) {
            let node = graph.node(id);
            // A cotangent is fed.
            if !matches!(node.op, Op::Cotangent(_)) {
                open.extend(&node.inputs);
            }
        }
    }
    found
}

fn leaf(graph: &mut Graph, name: &str, ty: &TensorType) -> ValueId {
    let op = Op::Input(Input { name: name.into(), ty: ty.clone() });
    graph
        .add1(op, &[], Origin::none(), Region::Forward)
        .expect("invariant: an input takes no operands")
}

/// A normal number, by Box and Muller's transform.
pub(crate) fn normal(random: &mut Rng) -> f64 {
    let radius = (-2.0 * (1.0 - random.f64()).ln()).sqrt();
    radius * (std::f64::consts::TAU * random.f64()).cos()
}
