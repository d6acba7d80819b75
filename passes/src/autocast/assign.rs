//! Decides which nodes run in low precision.
//!
//! Classes fix most nodes. The rest are assigned by a minimum cut over the bytes of casts: one side is low precision, the other
//! f32; a value costs its cast once if its producer and any consumer are on different sides. Ties go to low precision, which makes
//! activations smaller.
//!
//! Accuracy has priority: a node that computes and reads an f32 value is f32, as in PyTorch, so the residual stream (f32
//! embedding + low-precision branches) stays f32. Only layout operations may read f32 and write low precision, and only if all their
//! readers are low precision, so that no value is rounded on a path from f32 to f32. For the same reason a matmul read only by f32
//! nodes (residual branches) writes its f32 accumulator. Logits of more classes than the matmul contracts are low precision, as in PyTorch:
//! they are the largest values of a step, and the cross-entropy widens them as it reads them. Fewer cost little in f32.

use super::min_cut::{INFINITE, Network, SINK, SOURCE};
use super::{constants, integers};
use frit_ir::ops::precision::Class;
use frit_ir::ops::{BinaryFn, Param};
use frit_ir::{DType, Graph, Node, NodeId, Op, ValueId};
use std::collections::{HashMap, HashSet};

/// Where a node computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Precision {
    /// In the low dtype.
    Low,
    /// On operands in the low dtype, with results in f32: a matmul writes its accumulator.
    LowToF32,
    /// In f32.
    F32,
    /// In f32, with results rounded to the low dtype.
    F32ToLow,
}

/// The precision of every node.
pub(super) type Assignment = HashMap<NodeId, Precision>;

/// Assigns a precision to every node. `bound` gives the nodes that an override binds; `lower` is whether contractions
/// run in the dtype `low`; if not, only bound nodes do. `keep` leaves f32 accumulators unrounded where only f32 is made of them.
pub(super) fn assign(
    graph: &Graph,
    bound: &HashMap<NodeId, Precision>,
    low: DType,
    lower: bool,
    keep: bool,
) -> Assignment {
    let users = graph.users();
    let problem = Problem { graph, users: &users, bound, lower };
    let only_low = problem.read_by_low_only();

    let mut network = Network::new();
    let mut place: HashMap<NodeId, usize> = HashMap::new();
    for (id, node) in graph.nodes() {
        let at = match problem.fixed(id, node) {
            Some(Precision::Low | Precision::LowToF32) => SOURCE,
            Some(Precision::F32 | Precision::F32ToLow) => SINK,
            None => network.node(),
        };
        place.insert(id, at);
    }
    let weak = |v: ValueId| is_weak(graph, v);
    for (id, node) in graph.nodes() {
        let at = place[&id];
        let free = node.op.precision().class == Class::Layout && only_low[id.0 as usize];
        for (i, &v) in node.inputs.iter().enumerate() {
            let def = place[&graph.value(v).def];
            if subject(graph, v) && !weak(v) && !free && at > SINK && reads(&node.op, i) {
                network.edge(at, problem.side_of(v, def), INFINITE);
            }
        }
        for &v in &node.outputs {
            if !subject(graph, v) || weak(v) {
                continue;
            }
            let producer = problem.side_of(v, at);
            let mut consumers: Vec<usize> = users[v.0 as usize]
                .iter()
                .filter(|user| takes(graph, **user, v))
                .map(|user| place[user])
                .collect();
            if graph.outputs.iter().any(|o| o.value == v) {
                consumers.push(SINK);
            }
            consumers.sort_unstable();
            consumers.dedup();
            let bytes = graph.ty(v).shape.numel() as u64 * 6;
            cast_cost(&mut network, producer, &consumers, bytes);
        }
    }
    let is_low = network.source_side();
    let choice =
        |(id, at): (NodeId, usize)| (id, if is_low[at] { Precision::Low } else { Precision::F32 });
    let mut assignment: Assignment = place.into_iter().map(choice).collect();
    assignment.extend(bound);
    constants::widen(&problem, low, &mut assignment);
    if keep {
        keep_accumulators(&problem, &mut assignment);
    }
    widen_layout(&problem, &mut assignment);
    assignment
}

/// Leaves the f32 accumulator of a low-precision contraction unrounded where only f32 is made of it: the
/// contraction, a bias and layout operations write f32 if every reader of the last of them computes in
/// f32. PyTorch rounds there and widens at once, which costs two casts and the rounding. The bias of a
/// convolution, which is added by a kernel of its own, is added before the one rounding in any case.
fn keep_accumulators(problem: &Problem<'_>, assignment: &mut Assignment) {
    let graph = problem.graph;
    for (id, node) in graph.nodes() {
        let convolves = matches!(node.op, Op::Conv(_) | Op::ConvGradInput(_));
        let contracts = convolves || matches!(node.op, Op::MatMul(_));
        if !contracts || assignment.get(&id) != Some(&Precision::Low) {
            continue;
        }
        if let [bias] = problem.users[node.outputs[0].0 as usize][..]
            && convolves
            && problem.is_bias_add(graph.node(bias))
            && !problem.bound.contains_key(&bias)
        {
            assignment.insert(id, Precision::LowToF32);
            assignment.insert(bias, Precision::F32);
        }
        let few_classes = match &node.op {
            Op::MatMul(op) => {
                let dims = op.dims(graph.ty(node.inputs[0]), graph.ty(node.inputs[1]));
                dims.n <= dims.k
            }
            _ => true,
        };
        let mut carried = Vec::new();
        let mut value = node.outputs[0];
        let wide = loop {
            let users = &problem.users[value.0 as usize];
            if users.iter().all(|u| {
                wants_f32(graph, *u, assignment, few_classes)
                    || is_gradient_of_f32(graph, *u, value, assignment)
            }) {
                break true;
            }
            if graph.outputs.iter().any(|o| o.value == value) {
                break false;
            }
            let [next] = users[..] else { break false };
            let reader = graph.node(next);
            let carries = reader.op.precision().class == Class::Layout && reader.outputs.len() == 1
                || problem.is_bias_add(reader);
            if !carries || problem.bound.contains_key(&next) {
                break false;
            }
            carried.push(next);
            value = reader.outputs[0];
        };
        if wide {
            // The loss would take either, and a function does not compute with its gradients.
            let users = problem.users[value.0 as usize].iter().copied();
            carried.extend(users.filter(|u| !is_gradient_of_f32(graph, *u, value, assignment)));
            assignment.insert(id, Precision::LowToF32);
            assignment.extend(carried.into_iter().map(|next| (next, Precision::F32)));
        }
    }
}

/// Keeps layout operations between f32 nodes in f32 if their neighbors were assigned f32.
fn widen_layout(problem: &Problem<'_>, assignment: &mut Assignment) {
    let graph = problem.graph;
    // Those that only f32 nodes read, through each other.
    let mut read_wide: HashSet<NodeId> = HashSet::new();
    for (id, node) in graph.nodes().rev() {
        let mut users = node.outputs.iter().flat_map(|v| &problem.users[v.0 as usize]);
        let wide = |u: &NodeId| read_wide.contains(u) || wants_f32(graph, *u, assignment, true);
        if problem.is_free_layout(id, node, assignment) && users.all(wide) {
            read_wide.insert(id);
        }
    }
    for (id, node) in graph.nodes() {
        let is_f32 = |v: &ValueId| {
            let def = assignment.get(&graph.value(*v).def);
            subject(graph, *v) && matches!(def, Some(Precision::F32 | Precision::LowToF32))
        };
        if read_wide.contains(&id) && node.inputs.first().is_some_and(is_f32) {
            assignment.insert(id, Precision::F32);
        }
    }
}

/// Whether the value is what a function gives as the gradient of an f32 value.
fn is_gradient_of_f32(graph: &Graph, id: NodeId, value: ValueId, assignment: &Assignment) -> bool {
    let node = graph.node(id);
    let Op::CustomGradient(op) = &node.op else { return false };
    let is_wide = |x: ValueId| {
        let def = graph.value(x).def;
        let wide = Some(&Precision::F32) == assignment.get(&def);
        subject(graph, x) && (wide || graph.node(def).op.is_leaf())
    };
    let mut read = op.pairs(node.inputs.len()).filter(|(_, dx)| node.inputs[*dx] == value);
    let wide = read.next().is_some_and(|(x, _)| is_wide(node.inputs[x]));
    wide && read.all(|(x, _)| is_wide(node.inputs[x]))
        && !node.inputs[..op.results].contains(&value)
}

/// Whether the node computes in f32 whatever it is given, or is a loss of few classes.
pub(super) fn wants_f32(
    graph: &Graph,
    id: NodeId,
    assignment: &Assignment,
    few_classes: bool,
) -> bool {
    let op = &graph.node(id).op;
    !matches!(op, Op::Cast(_))
        && (assignment.get(&id) == Some(&Precision::F32)
            || few_classes && matches!(op, Op::CrossEntropy(_)))
}

/// Adds the cost of casting a value once for all consumers on the other side.
fn cast_cost(network: &mut Network, producer: usize, consumers: &[usize], bytes: u64) {
    if consumers.iter().all(|c| *c == producer) {
        return;
    }
    if producer != SINK {
        let widened = network.node();
        network.edge(producer, widened, bytes);
        consumers.iter().for_each(|c| network.edge(widened, *c, INFINITE));
    }
    if producer != SOURCE {
        let rounded = network.node();
        network.edge(rounded, producer, bytes);
        consumers.iter().for_each(|c| network.edge(*c, rounded, INFINITE));
    }
}

/// Whether autocast may change the dtype of this value.
pub(super) fn subject(graph: &Graph, v: ValueId) -> bool {
    graph.ty(v).dtype == DType::F32
}

/// A constant of one element takes whatever dtype it is used with, as a Python scalar does.
pub(super) fn is_weak(graph: &Graph, v: ValueId) -> bool {
    graph.constant(v).is_some_and(|c| c.numel() == 1)
}

/// Statistics are f32 wherever their node computes.
pub(super) fn is_statistic(graph: &Graph, v: ValueId) -> bool {
    let value = graph.value(v);
    match &graph.def(v).op {
        Op::LayerNorm(_) | Op::RmsNorm(_) | Op::BatchNorm(_) | Op::Attention(_) => value.index > 0,
        Op::CrossEntropy(_) => true,
        _ => false,
    }
}

/// Whether operand `i` is read in the precision of the node; scale, bias and masks keep their own.
pub(super) fn reads(op: &Op, i: usize) -> bool {
    match op {
        Op::LayerNorm(_) | Op::RmsNorm(_) | Op::BatchNorm(_) => i == 0,
        Op::Attention(_) => i < 3,
        Op::CustomGradient(op) => i < op.results,
        _ => true,
    }
}

/// Whether the user needs the value in the precision it runs in; an explicit cast takes any.
fn takes(graph: &Graph, user: NodeId, v: ValueId) -> bool {
    let node = graph.node(user);
    if matches!(node.op, Op::Cast(_)) {
        return false;
    }
    node.inputs.iter().enumerate().any(|(i, x)| *x == v && reads(&node.op, i))
}

/// The unknowns and the given values.
pub(super) struct Problem<'a> {
    pub(super) graph: &'a Graph,
    pub(super) users: &'a [Vec<NodeId>],
    pub(super) bound: &'a HashMap<NodeId, Precision>,
    pub(super) lower: bool,
}

impl Problem<'_> {
    /// The side of a value whose producer is at `at`.
    fn side_of(&self, v: ValueId, at: usize) -> usize {
        if is_statistic(self.graph, v) {
            return SINK;
        }
        match self.bound.get(&self.graph.value(v).def) {
            Some(Precision::LowToF32) => SINK,
            Some(Precision::F32ToLow) => SOURCE,
            _ => at,
        }
    }

    /// The precision that override or class fix.
    fn fixed(&self, id: NodeId, node: &Node) -> Option<Precision> {
        if let Some(precision) = self.bound.get(&id) {
            return Some(*precision);
        }
        let own = |v: &ValueId| self.graph.ty(*v).dtype.is_float() && !subject(self.graph, *v);
        if node.inputs.iter().chain(&node.outputs).any(own) {
            // The model's own f16, bf16 or f64: as it is.
            return Some(Precision::F32);
        }
        match node.op.precision().class {
            Class::Lower if self.lower && !self.reads_integers(node) => Some(Precision::Low),
            Class::Lower | Class::F32 | Class::Fixed => Some(Precision::F32),
            _ if self.lower && self.is_bias_add(node) => Some(Precision::Low),
            _ if !self.reads_strong(node) => Some(Precision::F32),
            Class::F32Inside | Class::Promote | Class::Layout => None,
        }
    }

    /// Whether a contraction reads large integers.
    fn reads_integers(&self, node: &Node) -> bool {
        node.inputs.iter().any(|v| integers::are_large(self.graph, *v))
    }

    /// Whether this is a layout operation in low precision that may as well be f32.
    pub(super) fn is_free_layout(&self, id: NodeId, node: &Node, assignment: &Assignment) -> bool {
        node.op.precision().class == Class::Layout
            && assignment.get(&id) == Some(&Precision::Low)
            && !self.bound.contains_key(&id)
            && node.outputs.iter().all(|v| self.graph.outputs.iter().all(|o| o.value != *v))
    }

    /// Whether an operand has a precision of its own; what is computed from scalars alone is f32.
    fn reads_strong(&self, node: &Node) -> bool {
        let strong = |v: &ValueId| subject(self.graph, *v) && !is_weak(self.graph, *v);
        node.inputs.iter().any(strong)
    }

    /// Whether this adds a bias vector to a matmul or convolution without other uses: one
    /// contraction, as `torch.addmm`.
    pub(super) fn is_bias_add(&self, node: &Node) -> bool {
        let pairs = [(0, 1), (1, 0)];
        node.op == Op::Binary(BinaryFn::Add)
            && pairs.into_iter().any(|(matmul, bias)| {
                let (matmul, bias) = (node.inputs[matmul], node.inputs[bias]);
                let def = self.graph.value(matmul).def;
                let contraction = &self.graph.node(def).op;
                let channels = match contraction {
                    Op::MatMul(_) => Some(0),
                    Op::Conv(_) | Op::ConvGradInput(_) => {
                        Some(self.graph.ty(matmul).shape.rank() - 2)
                    }
                    _ => None,
                };
                channels.is_some()
                    && !self.reads_integers(self.graph.node(def))
                    && self.bound.get(&def) != Some(&Precision::F32)
                    && self.users[matmul.0 as usize].len() == 1
                    && self.graph.ty(matmul) == self.graph.ty(node.outputs[0])
                    && is_vector_param(self.graph, bias, channels.unwrap_or(0))
            })
    }

    /// For each node, whether only low-precision nodes read its results, through layout operations.
    fn read_by_low_only(&self) -> Vec<bool> {
        let n = self.graph.nodes().map(|(id, _)| id.0 as usize + 1).max().unwrap_or(0);
        let mut only = vec![false; n];
        for (id, node) in self.graph.nodes().rev() {
            let is_output =
                node.outputs.iter().any(|v| self.graph.outputs.iter().any(|o| o.value == *v));
            let mut readers = node.outputs.iter().flat_map(|v| &self.users[v.0 as usize]);
            only[id.0 as usize] = !is_output
                && readers.all(|r| {
                    let reader = self.graph.node(*r);
                    match self.fixed(*r, reader) {
                        Some(precision) => {
                            matches!(precision, Precision::Low | Precision::LowToF32)
                        }
                        None => reader.op.precision().class == Class::Layout && only[r.0 as usize],
                    }
                });
        }
        only
    }
}

/// Whether the value is a parameter, perhaps reshaped, of one axis that counts, `inner` axes before the
/// last.
fn is_vector_param(graph: &Graph, v: ValueId, inner: usize) -> bool {
    let shape = &graph.ty(v).shape;
    let vector = shape.0.iter().rev().nth(inner) == Some(&shape.numel());
    let mut node = graph.def(v);
    while matches!(node.op, Op::Reshape(_) | Op::Slice(_) | Op::Split(_)) {
        node = graph.def(node.inputs[0]);
    }
    vector && matches!(&node.op, Op::Param(Param { .. }))
}
