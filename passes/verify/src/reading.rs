//! What every value of a graph is, as a term over its axes.

use crate::chunks::Chunks;
use crate::index::{Atom, Ix, Kind, Var};
use crate::lemmas::{self, Operand};
use crate::steps::Steps;
use crate::term::{Algebra, Term, TermId, Terms};
use frit_ir::interpret::{Options, eval_op, leaf_key};
use frit_ir::ops::{
    Adafactor, AdafactorPart, AllReduce, Cast, Constant, Fusion, Param, ReduceKind, State,
    StateName, reduction_factors,
};
use frit_ir::sharding::sharded_values;
use frit_ir::{DType, Graph, Node, Op, Region, Tensor, TensorType, ValueId};
use std::collections::HashMap;
use std::rc::Rc;

/// More elements are not computed where all operands are constants.
const FOLDED: usize = 1 << 22;
/// Nor by more operations.
const FOLDING: u64 = 1 << 30;

/// The ranks that run a graph: replicas of as many ranks as share one copy of the sharded state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// Ranks that share one copy.
    pub shards: usize,
    /// Copies.
    pub replicas: usize,
}

impl Ranks {
    /// One rank.
    pub const ONE: Ranks = Ranks { shards: 1, replicas: 1 };

    /// All ranks.
    pub fn number(self) -> usize {
        self.shards * self.replicas
    }

    pub(crate) fn of_shards(self) -> Var {
        Var { kind: Kind::Rank, number: 0, extent: self.shards as u64 }
    }

    pub(crate) fn of_replicas(self) -> Var {
        Var { kind: Kind::Rank, number: 1, extent: self.replicas as u64 }
    }

    /// The rank, counted through all.
    fn index(self, t: &mut Terms) -> Ix {
        let [shard, replica] = [self.of_shards(), self.of_replicas()]
            .map(|var| if var.extent == 1 { t.constant_index(0) } else { t.atom(Atom::Var(var)) });
        let replica = t.times(replica, self.shards as i64);
        t.plus(shard, replica)
    }

    /// The sum or mean over the ranks of a team of an f32 number, as it is.
    pub(crate) fn reduced(
        self,
        t: &mut Terms,
        term: TermId,
        reduce: ReduceKind,
        [shards, replicas]: [bool; 2],
    ) -> TermId {
        let op = AllReduce { reduce, unit: None, dtype: None };
        self.exchanged(t, term, op, DType::F32, [shards, replicas])
    }

    /// What a collective makes of an element of this dtype, over the ranks of a team. Where bits are compared, the order in which it
    /// adds is its own.
    fn exchanged(
        self,
        t: &mut Terms,
        term: TermId,
        op: AllReduce,
        dtype: DType,
        [shards, replicas]: [bool; 2],
    ) -> TermId {
        let over = self.team(shards, replicas);
        if let Some(narrow) = op.dtype.filter(|narrow| *narrow != dtype) {
            let n: u64 = over.iter().map(|v| v.extent).product();
            let factors = reduction_factors(narrow, n as usize);
            let factors = factors.filter(|_| op.reduce == ReduceKind::Mean);
            let reduce = if factors.is_some() { ReduceKind::Sum } else { op.reduce };
            let (before, after) = factors.unwrap_or((1.0, 1.0));
            let sent = lemmas::scaled_cast(t, term, (dtype, narrow), before);
            let op = AllReduce { reduce, unit: None, dtype: None };
            let received = self.exchanged(t, sent, op, narrow, [shards, replicas]);
            return lemmas::scaled_cast(t, received, (narrow, dtype), after);
        }
        if t.algebra == Algebra::Bits {
            if over.is_empty() {
                return term;
            }
            let op = AllReduce { unit: None, dtype: None, ..op };
            let part = t.operation(&Op::AllReduce(op), &[dtype], &[term]);
            return t.reduction("of ranks", part, &over);
        }
        let sum = t.sum_over(term, &over);
        let n: u64 = over.iter().map(|v| v.extent).product();
        let mean = op.reduce == ReduceKind::Mean;
        let result = if mean { t.scale(sum, 1.0 / n as f64) } else { sum };
        match t.algebra {
            Algebra::Rounded => lemmas::rounded(t, result, dtype),
            _ => result,
        }
    }

    /// The ranks of a team, as variables.
    fn team(self, shards: bool, replicas: bool) -> Vec<Var> {
        let mut over = vec![];
        if shards && self.shards > 1 {
            over.push(self.of_shards());
        }
        if replicas && self.replicas > 1 {
            over.push(self.of_replicas());
        }
        over
    }
}

/// The values of a graph.
pub(crate) struct Reading {
    ranks: Ranks,
    /// Which values a rank has only its part of.
    sharded: Vec<bool>,
    /// Whether gradients are reduced before they are added to those of other micro-steps: over the ranks that share one copy, or
    /// else over all.
    pub(crate) reduced_early: bool,
    /// By value, over the axes of its shape.
    pub(crate) terms: Vec<Option<TermId>>,
    chunks: Chunks,
    steps: Steps,
}

impl Reading {
    /// Of a graph whose leaves are named by their keys.
    pub(crate) fn new(t: &mut Terms, graph: &Graph, ranks: Ranks) -> Reading {
        Reading::with_constants(t, graph, ranks).0
    }

    /// The same, and the values that are made of constants alone.
    pub(crate) fn with_constants(
        t: &mut Terms,
        graph: &Graph,
        ranks: Ranks,
    ) -> (Reading, HashMap<ValueId, Known>) {
        let (mut reading, mut constants) = (Reading::unread(graph, ranks), HashMap::new());
        reading.read(t, graph, &mut constants);
        (reading, constants)
    }

    /// The same with gradients reduced, or not, before they are added.
    pub(crate) fn reduced_early(self, reduced_early: bool) -> Reading {
        Reading { reduced_early, ..self }
    }

    /// Of a graph of which nothing is read yet; what is given before [`Reading::read`] stays.
    pub(crate) fn unread(graph: &Graph, ranks: Ranks) -> Reading {
        // Reductions of gradients that stand before the update are those of a micro-step.
        let early = |n: &Node| match &n.op {
            Op::ReduceScatter(_) => n.region != Region::Update,
            Op::AllReduce(op) => op.unit.is_some() && n.region != Region::Update,
            _ => false,
        };
        Reading {
            ranks,
            sharded: sharded_values(graph),
            reduced_early: graph.nodes().any(|(_, n)| early(n)),
            terms: vec![None; graph.n_values()],
            chunks: Chunks::default(),
            steps: Steps::default(),
        }
    }

    pub(crate) fn give(&mut self, value: ValueId, term: TermId) {
        self.terms[value.0 as usize] = Some(term);
    }

    pub(crate) fn of(&self, value: ValueId) -> TermId {
        self.terms[value.0 as usize].expect("invariant: values are read in order")
    }

    /// Reads what was not given.
    pub(crate) fn read(
        &mut self,
        t: &mut Terms,
        graph: &Graph,
        constants: &mut HashMap<ValueId, Known>,
    ) {
        for (_, node) in graph.nodes() {
            if node.outputs.iter().all(|v| self.terms[v.0 as usize].is_some()) {
                continue;
            }
            let results = match &node.op {
                Op::Constant(Constant { value }) => {
                    constants.insert(node.outputs[0], Known::exact(value.clone()));
                    vec![lemmas::constant(t, value)]
                }
                Op::Fusion(fusion) => self.fusion(t, fusion, node, constants),
                op if op.is_leaf() => vec![self.leaf(t, graph, node)],
                Op::AllGather(_) => vec![self.of(node.inputs[0])],
                Op::ReduceScatter(op) => {
                    let (term, own) = (self.of(node.inputs[0]), graph.ty(node.inputs[0]).dtype);
                    let op = AllReduce { reduce: op.reduce, unit: None, dtype: op.dtype };
                    vec![self.ranks.exchanged(t, term, op, own, [true, false])]
                }
                Op::AllReduce(op) if op.reduce != ReduceKind::Max => {
                    let (term, own) = (self.of(node.inputs[0]), graph.ty(node.inputs[0]).dtype);
                    // That of a unit is over its replicas, any other over all ranks.
                    let shards = op.unit.is_none() || self.ranks.shards == 1;
                    vec![self.ranks.exchanged(t, term, op.clone(), own, [shards, true])]
                }
                Op::GradStats(_) | Op::Adafactor(_)
                    if node.inputs.iter().any(|v| self.sharded[v.0 as usize]) =>
                {
                    self.sums_of_shards(t, graph, node)
                }
                _ => match folded(t, graph, node, constants) {
                    Some(known) => {
                        let terms = known.iter().map(|x| lemmas::constant(t, &x.number)).collect();
                        constants.extend(node.outputs.iter().copied().zip(known));
                        terms
                    }
                    None => self.results(t, graph, node, constants),
                },
            };
            for (value, term) in node.outputs.iter().zip(results) {
                self.terms[value.0 as usize].get_or_insert(term);
            }
        }
    }

    fn results(
        &mut self,
        t: &mut Terms,
        graph: &Graph,
        node: &Node,
        constants: &HashMap<ValueId, Known>,
    ) -> Vec<TermId> {
        let operands = node.inputs.iter().map(|v| Operand {
            term: self.of(*v),
            ty: graph.ty(*v).clone(),
            value: constants.get(v).map(|x| x.rounded.clone()),
        });
        let operands: Vec<Operand> = operands.collect();
        let types: Vec<_> = node.outputs.iter().map(|v| graph.ty(*v)).collect();
        self.steps.note(t, node, &operands);
        let results = match self.steps.summed(t, node, &types) {
            Some(sum) => vec![sum],
            None => lemmas::results(t, &node.op, &operands, &types),
        };
        self.chunks.joined(t, node, &operands, (results, &types))
    }

    /// The part of a rank in the sums of what all ranks of a replica hold together: which part does not matter, as it is only
    /// ever summed, so the first rank has all.
    fn sums_of_shards(&mut self, t: &mut Terms, graph: &Graph, node: &Node) -> Vec<TermId> {
        let whole = self.results(t, graph, node, &HashMap::new());
        // Moments and parameters are what they are on every rank.
        let is_sum = |k: usize| match &node.op {
            Op::Adafactor(Adafactor { part, .. }) => match part {
                AdafactorPart::Sums => true,
                AdafactorPart::Moments => k == 1,
                AdafactorPart::Step => false,
            },
            _ => true,
        };
        let rank = match self.ranks.shards {
            1 => t.constant_index(0),
            _ => t.atom(Atom::Var(self.ranks.of_shards())),
        };
        let rank = t.times(rank, -1);
        let first = t.index_not_negative(rank);
        let own = |(k, term): (usize, TermId)| if is_sum(k) { t.mul(first, term) } else { term };
        whole.into_iter().enumerate().map(own).collect()
    }

    /// The element of a leaf: of each rank its own, if ranks differ.
    fn leaf(&self, t: &mut Terms, graph: &Graph, node: &Node) -> TermId {
        let ty = graph.ty(node.outputs[0]);
        let dtype = ty.dtype;
        let leaf = t.typed_leaf(&key_of_leaf(&node.op, ty), dtype);
        let axes = t.axes(ty.shape.dims());
        let mut at: Vec<Ix> =
            axes.into_iter().filter(|ix| !t.vars_of_index(*ix).is_empty()).collect();
        match &node.op {
            Op::Input(_) | Op::State(State { name: StateName::Rng, .. }) => {
                at.push(self.ranks.index(t));
            }
            // Sums of gradients that were reduced among the ranks of a replica differ by replica, others not at all.
            Op::State(s) if s.name == StateName::GradSum && self.reduced_early => {
                let replica = Ranks { shards: 1, ..self.ranks }.index(t);
                at.extend((self.ranks.shards > 1).then_some(replica));
            }
            Op::State(s) if s.name.is_within_step() => at.push(self.ranks.index(t)),
            _ => {}
        }
        let element = t.term(Term::Leaf(leaf, at.into()));
        match &node.op {
            // A parameter is read as the model has it, whatever it is held in.
            Op::Param(param) if t.algebra == Algebra::Bits => {
                t.operation(&Op::Cast(Cast { to: ty.dtype }), &[param.ty.dtype], &[element])
            }
            Op::Param(param) if t.algebra == Algebra::Rounded && dtype != param.ty.dtype => {
                lemmas::rounded(t, element, dtype)
            }
            _ => element,
        }
    }

    /// A region: its body, of these operands.
    fn fusion(
        &mut self,
        t: &mut Terms,
        fusion: &Fusion,
        node: &Node,
        constants: &mut HashMap<ValueId, Known>,
    ) -> Vec<TermId> {
        let body = &fusion.body;
        let mut inner = Reading::unread(body, self.ranks);
        let mut known = HashMap::new();
        let inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
        for ((_, input), operand) in inputs.zip(&node.inputs) {
            let value = input.outputs[0];
            inner.terms[value.0 as usize] = Some(self.of(*operand));
            known.extend(constants.get(operand).map(|x| (value, x.clone())));
            self.chunks.hand_on(*operand, &mut inner.chunks, value);
            self.steps.hand_on(*operand, &mut inner.steps, value);
        }
        inner.read(t, body, &mut known);
        for (output, result) in body.outputs.iter().zip(&node.outputs) {
            constants.extend(known.get(&output.value).map(|x| (*result, x.clone())));
            inner.chunks.hand_on(output.value, &mut self.chunks, *result);
            inner.steps.hand_on(output.value, &mut self.steps, *result);
        }
        body.outputs.iter().map(|o| inner.of(o.value)).collect()
    }
}

/// What names a leaf: all that it is, but for where a parameter is stored and in which dtype.
pub(crate) fn key_of_leaf(op: &Op, ty: &TensorType) -> String {
    let name = leaf_key(op).unwrap_or_default();
    match op {
        Op::Input(_) => format!("input {name}: {ty}"),
        Op::Param(Param { kind, ty, init, .. }) => format!("{kind:?} {name}: {ty} = {init:?}"),
        Op::Hyper(hyper) => format!("hyper {name} = {}", hyper.default),
        Op::State(state) => format!("state {name}: {ty} = {}", state.init),
        op => format!("{} {name}", op.name()),
    }
}

/// A value that is made of constants alone.
#[derive(Clone)]
pub(crate) struct Known {
    /// As the graph computes it.
    rounded: Rc<Tensor>,
    /// Where numbers are real: without the roundings of casts between floats.
    number: Rc<Tensor>,
}

impl Known {
    /// The number that all elements are, if they are one.
    pub(crate) fn as_splat(&self) -> Option<f64> {
        self.rounded.as_splat()
    }

    fn exact(value: Tensor) -> Known {
        let rounded = Rc::new(value);
        Known { number: rounded.clone(), rounded }
    }
}

/// The results of a node whose operands are all constants. What is compared, or cast to integers, is rounded as in the graph.
fn folded(
    t: &Terms,
    graph: &Graph,
    node: &Node,
    constants: &HashMap<ValueId, Known>,
) -> Option<Vec<Known>> {
    let size = |v: &ValueId| graph.ty(*v).shape.numel();
    let types = |values: &[ValueId]| values.iter().map(|v| graph.ty(*v)).collect::<Vec<_>>();
    if node.inputs.is_empty()
        || node.outputs.iter().map(size).sum::<usize>() > FOLDED
        || node.op.flops(&types(&node.inputs), &types(&node.outputs)) > FOLDING
    {
        return None;
    }
    let operands: Vec<&Known> =
        node.inputs.iter().map(|v| constants.get(v)).collect::<Option<_>>()?;
    let evaluated = |of: fn(&Known) -> &Tensor| {
        let operands: Vec<&Tensor> = operands.iter().map(|x| of(x)).collect();
        eval_op(&node.op, &operands, Options::default()).ok()
    };
    let rounded = evaluated(|x| &x.rounded)?;
    let is_float = |v: &ValueId| graph.ty(*v).dtype.is_float();
    let all_float = node.inputs.iter().chain(&node.outputs).all(is_float);
    let rounds = matches!(node.op, Op::Cast(_)) && all_float;
    let differ = operands.iter().any(|x| !Rc::ptr_eq(&x.rounded, &x.number));
    if t.algebra != Algebra::Real || !(rounds || differ) || !node.outputs.iter().any(is_float) {
        return Some(rounded.into_iter().map(Known::exact).collect());
    }
    let numbers = match rounds {
        true => vec![(*operands[0].number).clone()],
        false => evaluated(|x| &x.number)?,
    };
    let both = rounded.into_iter().zip(numbers);
    Some(both.map(|(x, y)| Known { rounded: Rc::new(x), number: Rc::new(y) }).collect())
}
