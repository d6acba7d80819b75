//! The reference of an audit: the mean loss of a step, of the graph that the front end read, in f64.
//!
//! It shares no code with the passes but for adapters and for documents that are kept apart, which decide what is computed. Each
//! rank's micro-batches are evaluated as they are; where statistics of a batch norm are those of all ranks, all ranks' at once.
//! What a `detach` reads keeps its value when parameters move, and so do the rows of an embedding that are read for padding.

use super::losses::{Loss, Sum};
use crate::compilation::{Request, imported};
use crate::config::Config;
use crate::config::choices::BatchNorm;
use crate::config::losses;
use crate::diagnostics::Report;
use crate::pipeline::{Options, meaning};
use frit_ir::interpret::{EvalError, Options as Exact, eval_op, leaf_key, operations};
use frit_ir::ops::random::first_state;
use frit_ir::ops::{ParamKind, ReduceKind, StateName, UnaryFn};
use frit_ir::plan::Plan;
use frit_ir::{
    DType, Graph, Node, NodeId, Op, OutputKind, Tensor, TensorData, TensorType, ValueId,
};
use frit_passes::PassContext;
use frit_runtime::data::{Data, DataError, convert};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Values of parameters and buffers by name.
pub(super) type Params = BTreeMap<String, Arc<Tensor>>;

/// The values of a micro-step by rank and value; those that are missing are those of the base.
type Values = Vec<Vec<Option<Arc<Tensor>>>>;

/// The inputs of a micro-step, by rank.
type Feeds = Vec<HashMap<String, Arc<Tensor>>>;

/// The forward graph with its loss.
pub(super) struct Reference {
    pub(super) graph: Graph,
    /// Nodes that the loss and the buffers need, in order.
    needed: Vec<NodeId>,
    /// The next values of buffers, such as running statistics, by name.
    renewed: Vec<(String, ValueId)>,
    ends: Ends,
    ranks: usize,
    /// Whether batch norms have the statistics of all ranks.
    is_synchronous: bool,
}

/// Where the loss comes from.
enum Ends {
    /// Formulas of outputs.
    Losses(Vec<Loss>),
    /// Values of the graph, of which the sum and the count are added.
    Graph { sum: ValueId, count: ValueId },
}

/// A step at the point where the audit looks.
pub(super) struct Base {
    feeds: Vec<Feeds>,
    values: Vec<Values>,
    pub(super) params: Params,
    pub(super) loss: f64,
    /// Elements of the loss over all ranks and micro-steps.
    pub(super) count: f64,
    /// Whether the plan counts them: the loss is one mean.
    pub(super) is_counted: bool,
    /// Whether each micro-batch has as many.
    pub(super) counts_are_equal: bool,
}

impl Reference {
    /// Of the model of a plan.
    ///
    /// # Errors
    /// What is wrong with the model.
    pub(super) fn of(plan: &Plan, request: &Request, config: &Config) -> Result<Self, Report> {
        let mut graph = imported(request, config)?.graph;
        let options = Options::new(config)?;
        let mut context = PassContext::default();
        for pass in meaning(&options) {
            pass.run(&mut graph, &mut context)?;
        }
        let of = |kind| graph.outputs.iter().find(|o| o.kind == kind).map(|o| o.value);
        let ends = match (of(OutputKind::LossSum), of(OutputKind::LossCount)) {
            (Some(sum), Some(count)) => Ends::Graph { sum, count },
            _ => Ends::Losses(Loss::all(losses::terms(config)?, &graph, &plan.inputs)?),
        };
        let mut wanted = match &ends {
            Ends::Losses(all) => all.iter().map(|l| l.output).collect(),
            Ends::Graph { sum, count } => vec![*sum, *count],
        };
        let carried = graph.outputs.iter().filter_map(|o| {
            let OutputKind::Carry(old) = o.kind else { return None };
            let Op::Param(param) = &graph.def(old).op else { return None };
            Some((param.name.clone(), o.value))
        });
        let renewed: Vec<(String, ValueId)> = carried.collect();
        wanted.extend(renewed.iter().map(|(_, value)| *value));
        let needed = needed(&graph, wanted);
        let is_synchronous = config.model.batch_norm == BatchNorm::Sync;
        Ok(Reference { graph, needed, renewed, ends, ranks: plan.world_size, is_synchronous })
    }

    /// The parameters that train, with their types, in the model's order.
    pub(super) fn trainable(&self) -> impl Iterator<Item = (&str, &TensorType)> {
        let trains = |p: &frit_ir::ops::Param| p.kind == ParamKind::Trainable;
        let all = self.graph.params().filter(move |(_, p)| trains(p));
        all.map(|(_, p)| (p.name.as_str(), &p.ty))
    }

    /// The parameters that the loss is computed from.
    pub(super) fn used(&self) -> HashSet<&str> {
        let names = self.needed.iter().filter_map(|id| match &self.graph.node(*id).op {
            Op::Param(param) => Some(param.name.as_str()),
            _ => None,
        });
        names.collect()
    }

    /// Elements that one evaluation accesses, and the bytes of what it keeps, of one micro-batch.
    pub(super) fn work(&self) -> (u64, u64) {
        let types = |ids: &[ValueId]| ids.iter().map(|v| self.graph.ty(*v)).collect::<Vec<_>>();
        let mut all = (0u64, 0u64);
        for node in self.needed.iter().map(|id| self.graph.node(*id)) {
            let results = types(&node.outputs);
            all.0 = all.0.saturating_add(operations(&node.op, &types(&node.inputs), &results));
            let elements = results.iter().map(|t| t.shape.numel() as u64);
            all.1 = elements.fold(all.1, |n, m| n.saturating_add(8 * m));
        }
        all
    }

    /// What reaches the loss through the calls `stated`, by name of the parameter.
    pub(super) fn through(&self, stated: &HashSet<u32>) -> HashSet<String> {
        let calls = self.needed.iter().map(|id| self.graph.node(*id)).filter_map(|n| match &n.op {
            Op::CustomGradient(op) if stated.contains(&op.call) => Some(&n.inputs[..op.results]),
            _ => None,
        });
        let before = needed(&self.graph, calls.flatten().copied().collect());
        let names = before.iter().filter_map(|id| match &self.graph.node(*id).op {
            Op::Param(param) => Some(param.name.clone()),
            _ => None,
        });
        names.collect()
    }

    /// Evaluates a step of this data.
    ///
    /// # Errors
    /// If the data cannot be read, or the graph not be evaluated.
    pub(super) fn base(
        &self,
        plan: &Plan,
        data: &Data,
        step: usize,
        params: Params,
    ) -> Result<Base, Report> {
        let micro_steps = data.micro_steps(step);
        let mut feeds = Vec::new();
        for micro in 0..micro_steps {
            let ranks = (0..self.ranks).map(|rank| fed(plan, data, (step, micro, rank)));
            feeds.push(ranks.collect::<Result<Feeds, DataError>>().map_err(super::refused)?);
        }
        let mut base = Base {
            feeds,
            values: vec![],
            params,
            loss: f64::NAN,
            count: 0.0,
            is_counted: self.means().is_none(),
            counts_are_equal: true,
        };
        for micro in 0..micro_steps {
            let values = self.evaluate(&base, micro, None).map_err(super::refused)?;
            base.values.push(values);
        }
        let sums = self.sums(&base, |micro, rank, id| &base.values[micro][rank][id.0 as usize]);
        base.count = sums.iter().flatten().flatten().map(|s| s.count).sum();
        let first: Vec<f64> = sums[0][0].iter().map(|s| s.count).collect();
        base.counts_are_equal =
            sums.iter().flatten().all(|s| s.iter().map(|s| s.count).eq(first.iter().copied()));
        base.loss = self.mean(&sums);
        Ok(base)
    }

    /// The mean loss of the base with some parameters replaced.
    ///
    /// # Errors
    /// If the graph cannot be evaluated.
    pub(super) fn loss(&self, base: &Base, moved: &Params) -> Result<f64, EvalError> {
        let mut all = Vec::with_capacity(base.feeds.len());
        for micro in 0..base.feeds.len() {
            all.push(self.evaluate(base, micro, Some(moved))?);
        }
        let sums = self.sums(base, |micro, rank, id| {
            let own = &all[micro][rank][id.0 as usize];
            if own.is_some() { own } else { &base.values[micro][rank][id.0 as usize] }
        });
        Ok(self.mean(&sums))
    }

    /// The buffers after the base: each rank's micro-steps change them in turn, and then the mean of the ranks is kept.
    ///
    /// # Errors
    /// If the graph cannot be evaluated.
    pub(super) fn renewed(&self, base: &Base) -> Result<BTreeMap<String, Vec<f64>>, EvalError> {
        let mut all: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for rank in 0..self.ranks {
            let mut now = Params::new();
            for micro in 0..base.feeds.len() {
                let values = self.evaluate(base, micro, Some(&now))?;
                let next = self.renewed.iter().map(|(name, id)| {
                    let own = values[rank][id.0 as usize].as_ref();
                    let own = own.or(base.values[micro][rank][id.0 as usize].as_ref());
                    (name.clone(), own.expect("invariant: it is needed").clone())
                });
                now = next.collect();
            }
            for (name, tensor) in now {
                let values = tensor.to_f64s();
                let mean = all.entry(name).or_insert_with(|| vec![0.0; values.len()]);
                mean.iter_mut().zip(values).for_each(|(m, x)| *m += x / self.ranks as f64);
            }
        }
        Ok(all)
    }

    /// By micro-step and rank, the sums of all losses.
    fn sums<'v>(
        &self,
        base: &Base,
        get: impl Fn(usize, usize, ValueId) -> &'v Option<Arc<Tensor>>,
    ) -> Vec<Vec<Vec<Sum>>> {
        let value =
            |micro, rank, id| get(micro, rank, id).as_ref().expect("invariant: it is needed");
        let of_rank = |micro: usize, rank: usize| match &self.ends {
            Ends::Graph { sum, count } => {
                let scalar = |id: ValueId| value(micro, rank, id).to_f64s()[0];
                vec![Sum { sum: scalar(*sum), count: scalar(*count) }]
            }
            Ends::Losses(all) => {
                let one = |loss: &Loss| {
                    let labels = loss.labels().and_then(|name| base.feeds[micro][rank].get(name));
                    loss.sum(value(micro, rank, loss.output), labels.map(|t| &**t))
                };
                all.iter().map(one).collect()
            }
        };
        let ranks = |micro| (0..self.ranks).map(|rank| of_rank(micro, rank)).collect();
        (0..base.feeds.len()).map(ranks).collect()
    }

    /// The mean over all elements of the step; of losses that count different elements, the mean over micro-steps of those over ranks.
    fn mean(&self, sums: &[Vec<Vec<Sum>>]) -> f64 {
        let added = |all: &mut dyn Iterator<Item = Sum>| {
            let total = all
                .fold(Sum::default(), |a, b| Sum { sum: a.sum + b.sum, count: a.count + b.count });
            total.sum / total.count.max(1.0)
        };
        let weight = |k: usize| match &self.ends {
            Ends::Losses(all) => all[k].weight(),
            Ends::Graph { .. } => 1.0,
        };
        let Some(losses) = self.means() else {
            let of_rank = |all: &Vec<Sum>| Sum {
                sum: all.iter().enumerate().map(|(k, s)| weight(k) * s.sum).sum(),
                count: all[0].count,
            };
            return added(&mut sums.iter().flatten().map(of_rank));
        };
        let micro = |ranks: &Vec<Vec<Sum>>| -> f64 {
            let one =
                |(k, loss): (usize, &Loss)| loss.weight() * added(&mut ranks.iter().map(|s| s[k]));
            losses.iter().enumerate().map(one).sum()
        };
        sums.iter().map(micro).sum::<f64>() / sums.len() as f64
    }

    /// The losses, if each is a mean of its own.
    fn means(&self) -> Option<&[Loss]> {
        let Ends::Losses(all) = &self.ends else { return None };
        let first = all[0].counted();
        let is_one =
            all.len() == 1 || first.is_some() && all.iter().all(|loss| loss.counted() == first);
        (!is_one).then_some(all)
    }

    /// The values of a micro-step; with `moved`, of what depends on these parameters.
    fn evaluate(
        &self,
        base: &Base,
        micro: usize,
        moved: Option<&Params>,
    ) -> Result<Values, EvalError> {
        let mut values: Values = vec![vec![None; self.graph.n_values()]; self.ranks];
        let before = moved.map(|_| &base.values[micro]);
        for id in &self.needed {
            let node = self.graph.node(*id);
            let changed =
                |v: &ValueId| values.iter().any(|of_rank| of_rank[v.0 as usize].is_some());
            let is_same = match &node.op {
                Op::Param(param) => moved.is_some_and(|m| !m.contains_key(&param.name)),
                Op::Unary(UnaryFn::Detach) => moved.is_some(),
                _ => moved.is_some() && !node.inputs.iter().any(changed),
            };
            if is_same {
                continue;
            }
            let operand = |rank: usize, v: ValueId| -> &Arc<Tensor> {
                let own = values[rank][v.0 as usize].as_ref();
                let own = own.or_else(|| before.and_then(|b| b[rank][v.0 as usize].as_ref()));
                own.expect("invariant: values are defined before use")
            };
            let results: Vec<Vec<Arc<Tensor>>> = match &node.op {
                Op::CustomGradient(op) => {
                    let own = |rank| node.inputs[..op.results].iter().map(move |v| (rank, *v));
                    let all = (0..self.ranks)
                        .map(|rank| own(rank).map(|(rank, v)| operand(rank, v).clone()).collect());
                    all.collect()
                }
                Op::BatchNorm(_) if self.is_synchronous && self.ranks > 1 => {
                    let all: Vec<&Tensor> =
                        (0..self.ranks).map(|rank| &**operand(rank, node.inputs[0])).collect();
                    let rest = [1, 2].map(|i| &**operand(0, node.inputs[i]));
                    normalized(node, &all, rest)?
                }
                Op::AllReduce(op) if self.ranks > 1 => {
                    let all: Vec<&Tensor> =
                        (0..self.ranks).map(|rank| &**operand(rank, node.inputs[0])).collect();
                    vec![vec![Arc::new(reduced(op.reduce, &all))]; self.ranks]
                }
                op if op.is_leaf() && !matches!(op, Op::Constant(_)) => {
                    let leaf = |rank| Ok(vec![leaf(node, base, moved, (micro, rank))?]);
                    (0..self.ranks).map(leaf).collect::<Result<_, EvalError>>()?
                }
                op => {
                    let one = |rank: usize| {
                        let inputs: Vec<&Tensor> =
                            node.inputs.iter().map(|v| &**operand(rank, *v)).collect();
                        let mut results = eval_op(op, &inputs, Exact::EXACT).map_err(|error| {
                            let (op, origin) = (op.name(), node.origin.clone());
                            EvalError::At { op, origin, error: Box::new(error) }
                        })?;
                        let base =
                            before.and_then(|b| b[rank][node.outputs[0].0 as usize].as_ref());
                        if let (Op::Embedding(op), Some(base)) = (op, base)
                            && let Some(row) = op.padding_idx
                        {
                            results[0] =
                                with_padding(&results[0], base, (inputs[0], inputs[1]), row);
                        }
                        Ok(results.into_iter().map(Arc::new).collect())
                    };
                    (0..self.ranks).map(one).collect::<Result<_, EvalError>>()?
                }
            };
            for (of_rank, results) in values.iter_mut().zip(results) {
                for (output, tensor) in node.outputs.iter().zip(results) {
                    of_rank[output.0 as usize] = Some(tensor);
                }
            }
        }
        Ok(values)
    }
}

/// The nodes that these values are computed by, in order; of a function that states its gradient, without that.
fn needed(graph: &Graph, wanted: Vec<ValueId>) -> Vec<NodeId> {
    let (mut found, mut open) = (HashSet::new(), wanted);
    while let Some(value) = open.pop() {
        let id = graph.value(value).def;
        if found.insert(id) {
            let node = graph.node(id);
            let reads = match &node.op {
                Op::CustomGradient(op) => &node.inputs[..op.results],
                _ => &node.inputs[..],
            };
            open.extend(reads);
        }
    }
    graph.order().iter().copied().filter(|id| found.contains(id)).collect()
}

/// What a rank reads in a micro-step, and the state of its random numbers.
fn fed(
    plan: &Plan,
    data: &Data,
    (step, micro, rank): (usize, usize, usize),
) -> Result<HashMap<String, Arc<Tensor>>, DataError> {
    let mut feeds = HashMap::new();
    data.feed(step, micro, rank, |buffer, element, bytes| {
        for input in plan.inputs.iter().filter(|i| i.buffer == buffer) {
            let mut own = Vec::new();
            convert(element, bytes, input.ty.dtype, &mut own);
            let tensor = Tensor::from_bytes(input.ty.clone(), &own);
            let tensor = tensor.expect("invariant: data have the size of their input");
            feeds.insert(input.name.clone(), Arc::new(tensor));
        }
        Ok::<(), DataError>(())
    })?;
    let mut rng = first_state(plan.seed, rank, plan.world_size, plan.accumulation);
    rng[2] = (step * plan.accumulation + micro) as i64;
    let rng = Tensor::ints(DType::I64, [5], rng.to_vec());
    feeds.insert(StateName::Rng.word().into(), Arc::new(rng));
    Ok(feeds)
}

fn leaf(
    node: &Node,
    base: &Base,
    moved: Option<&Params>,
    (micro, rank): (usize, usize),
) -> Result<Arc<Tensor>, EvalError> {
    let key = leaf_key(&node.op).ok_or_else(|| EvalError::Leaf(node.op.name()))?;
    let found = match &node.op {
        Op::Param(_) => moved.and_then(|m| m.get(&key)).or_else(|| base.params.get(&key)),
        _ => base.feeds[micro][rank].get(&key),
    };
    match (&node.op, found) {
        (_, Some(tensor)) => Ok(tensor.clone()),
        (Op::State(state), None) => Ok(Arc::new(Tensor::splat(state.ty.clone(), state.init))),
        (_, None) => Err(EvalError::MissingFeed(key)),
    }
}

/// A batch norm of the batches of all ranks.
fn normalized(
    node: &Node,
    ranks: &[&Tensor],
    [scale, bias]: [&Tensor; 2],
) -> Result<Vec<Vec<Arc<Tensor>>>, EvalError> {
    let ty = &ranks[0].ty;
    let mut whole = ty.clone();
    whole.shape.0[0] *= ranks.len();
    let values = ranks.iter().flat_map(|t| t.to_f64s()).collect();
    let all = Tensor::exact(whole, TensorData::Float(values));
    let results = eval_op(&node.op, &[&all, scale, bias], Exact::EXACT)?;
    let y = results[0].to_f64s();
    let statistics: Vec<Arc<Tensor>> = results[1..].iter().cloned().map(Arc::new).collect();
    let part = |y: &[f64]| {
        let own = Tensor::exact(ty.clone(), TensorData::Float(y.to_vec()));
        [vec![Arc::new(own)], statistics.clone()].concat()
    };
    Ok(y.chunks(ty.shape.numel().max(1)).map(part).collect())
}

/// The rows of a table, of which those that were read for padding are those of the base: they have no gradient.
fn with_padding(
    moved: &Tensor,
    base: &Tensor,
    (table, ids): (&Tensor, &Tensor),
    row: usize,
) -> Tensor {
    let rows = table.shape().dims()[0] as i64;
    let (mut values, base) = (moved.to_f64s(), base.to_f64s());
    let width = values.len().checked_div(ids.numel()).unwrap_or(0).max(1);
    let pairs = values.chunks_mut(width).zip(base.chunks(width)).zip(ids.to_i64s());
    for ((own, base), id) in pairs {
        if id.rem_euclid(rows) == row as i64 {
            own.copy_from_slice(base);
        }
    }
    Tensor::exact(moved.ty.clone(), TensorData::Float(values))
}

fn reduced(reduce: ReduceKind, ranks: &[&Tensor]) -> Tensor {
    let mut all = ranks[0].to_f64s();
    for other in &ranks[1..] {
        all.iter_mut().zip(other.to_f64s()).for_each(|(a, b)| match reduce {
            ReduceKind::Max => *a = a.max(b),
            ReduceKind::Sum | ReduceKind::Mean => *a += b,
        });
    }
    if reduce == ReduceKind::Mean {
        all.iter_mut().for_each(|x| *x /= ranks.len() as f64);
    }
    Tensor::exact(ranks[0].ty.clone(), TensorData::Float(all))
}
