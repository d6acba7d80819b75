//! Splits the graph into windows: connected sets of nodes that rules can inspect.
//!
//! A window ends at every operation that no rule handles, at matmul results, and at results of elementwise operations with several readers:
//! transposes do not move past those. All gathers and casts of one shard are in one window. Large sets are split in graph order.

use super::language::{Leaf, stage};
use frit_ir::ops::{AllGather, Op};
use frit_ir::plan::{TiVec, UnitId};
use frit_ir::sharding::sharded_values;
use frit_ir::{Graph, Node, NodeId, Region, ValueId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Nodes of a window.
const MAX_NODES: usize = 64;

/// An operand within a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Operand {
    /// A value from outside.
    Leaf(u32),
    /// The result of a node of the window.
    Node(u32),
}

/// A node of a window.
#[derive(Clone, Debug)]
pub(super) struct WindowNode {
    pub(super) id: NodeId,
    /// Its operation; units of gathers are numbered within the window.
    pub(super) op: Op,
    /// Its region; stages of recomputation are numbered within the window.
    pub(super) region: Region,
    pub(super) inputs: Vec<Operand>,
}

/// A part of the graph.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    /// In the order of the graph.
    pub(super) nodes: Vec<WindowNode>,
    /// Values read from outside.
    pub(super) leaves: Vec<ValueId>,
    pub(super) leaf_data: Vec<Leaf>,
    /// Nodes whose results are read outside.
    pub(super) roots: Vec<u32>,
    /// The units of its gathers, by their number in the window.
    pub(super) units: TiVec<UnitId, UnitId>,
    /// The regions of recomputation, by their number in the window.
    pub(super) recomputed: Vec<Region>,
}

/// A window without the values that it reads, its units and its stages.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct Form<'a> {
    leaf_data: &'a [Leaf],
    roots: &'a [u32],
    nodes: Vec<(&'a Op, Region, &'a [Operand])>,
}

impl Window {
    /// The region of the graph that this region of the window stands for.
    pub(super) fn region(&self, region: Region) -> Region {
        match region {
            Region::Recompute(i) => self.recomputed[i as usize],
            other => other,
        }
    }

    /// A key that is equal for windows that differ only in the values they read, their units and stages.
    pub(super) fn form(&self) -> Form<'_> {
        let nodes = self.nodes.iter().map(|n| (&n.op, n.region, &n.inputs[..])).collect();
        Form { leaf_data: &self.leaf_data, roots: &self.roots, nodes }
    }
}

/// Whether rules can look into the node.
fn is_term(node: &Node) -> bool {
    node.op.is_pointwise()
        || matches!(
            node.op,
            Op::Reshape(_)
                | Op::Transpose(_)
                | Op::Expand(_)
                | Op::Slice(_)
                | Op::Concat(_)
                | Op::Embedding(_)
                | Op::Gather(_)
                | Op::AllGather(_)
                | Op::MatMul(_)
        )
}

/// Whether a rule can start at the node: it moves or converts elements.
fn is_mover(op: &Op) -> bool {
    op.is_layout() || matches!(op, Op::Cast(_))
}

/// All windows in which a rule can start, in the order of the graph.
pub(super) fn windows(graph: &Graph) -> Vec<Window> {
    let users = graph.users();
    let order = graph.order();
    let position: HashMap<NodeId, usize> = order.iter().enumerate().map(|(i, n)| (*n, i)).collect();
    let mut sets: Vec<usize> = (0..order.len()).collect();
    for (i, (_, node)) in graph.nodes().enumerate() {
        for input in node.inputs.iter().filter(|_| is_term(node)) {
            let def = graph.def(*input);
            let ends = match &def.op {
                // A transpose of only the matmul's result may be folded into it.
                Op::MatMul(_) => {
                    !matches!(node.op, Op::Transpose(_)) || users[input.0 as usize].len() > 1
                }
                Op::Cast(_) => false,
                op => op.is_pointwise() && users[input.0 as usize].len() > 1,
            };
            if is_term(def) && !ends {
                let (a, b) =
                    (find(&mut sets, position[&graph.value(*input).def]), find(&mut sets, i));
                sets[a.max(b)] = a.min(b);
            }
        }
    }
    // Gathers and casts of one shard are in one window.
    let sharded = sharded_values(graph);
    for (_, node) in graph.nodes().filter(|(_, n)| n.op.is_leaf()) {
        for output in node.outputs.iter().filter(|v| sharded[v.0 as usize]) {
            let reads = |n: &&NodeId| matches!(graph.node(**n).op, Op::AllGather(_) | Op::Cast(_));
            let readers: Vec<usize> =
                users[output.0 as usize].iter().filter(reads).map(|n| position[n]).collect();
            for pair in readers.windows(2) {
                let (a, b) = (find(&mut sets, pair[0]), find(&mut sets, pair[1]));
                sets[a.max(b)] = a.min(b);
            }
        }
    }
    let mut members: BTreeMap<usize, Vec<NodeId>> = BTreeMap::new();
    for (i, (id, node)) in graph.nodes().enumerate() {
        if is_term(node) {
            members.entry(find(&mut sets, i)).or_default().push(id);
        }
    }
    let outputs: HashSet<ValueId> = graph.outputs.iter().map(|o| o.value).collect();
    let parts = members.values().flat_map(|nodes| nodes.chunks(MAX_NODES));
    parts
        .filter(|nodes| nodes.iter().any(|n| is_mover(&graph.node(*n).op)))
        .map(|nodes| window(graph, nodes, &users, &outputs, &sharded))
        .collect()
}

fn find(sets: &mut [usize], mut i: usize) -> usize {
    while sets[i] != i {
        sets[i] = sets[sets[i]];
        i = sets[i];
    }
    i
}

fn window(
    graph: &Graph,
    nodes: &[NodeId],
    users: &[Vec<NodeId>],
    outputs: &HashSet<ValueId>,
    sharded: &[bool],
) -> Window {
    let inside: HashMap<NodeId, u32> = nodes.iter().zip(0..).map(|(n, i)| (*n, i)).collect();
    let mut window = Window::default();
    let mut leaf_of: HashMap<ValueId, u32> = HashMap::new();
    for (&id, at) in nodes.iter().zip(0..) {
        let node = graph.node(id);
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for &input in &node.inputs {
            let def = graph.value(input).def;
            if let Some(&node) = inside.get(&def) {
                inputs.push(Operand::Node(node));
                continue;
            }
            let leaf = *leaf_of.entry(input).or_insert_with(|| {
                let of = graph.node(def);
                window.leaves.push(input);
                window.leaf_data.push(Leaf {
                    ty: graph.ty(input).clone(),
                    sharded: sharded[input.0 as usize],
                    // Leaves are read from every region.
                    stage: if of.op.is_leaf() { 0 } else { stage(of.region) },
                });
                window.leaves.len() as u32 - 1
            });
            inputs.push(Operand::Leaf(leaf));
        }
        let op = match &node.op {
            Op::AllGather(gather) => {
                let unit = UnitId(number(&mut window.units.raw, gather.unit));
                Op::AllGather(AllGather { unit })
            }
            op => op.clone(),
        };
        let region = match node.region {
            Region::Recompute(_) => {
                Region::Recompute(number(&mut window.recomputed, node.region) as u32)
            }
            region => region,
        };
        let output = node.outputs[0];
        let read_outside = users[output.0 as usize].iter().any(|u| !inside.contains_key(u));
        if read_outside || outputs.contains(&output) {
            window.roots.push(at);
        }
        window.nodes.push(WindowNode { id, op, region, inputs });
    }
    window
}

/// The number of an item in the order in which they are first seen.
fn number<T: PartialEq>(seen: &mut Vec<T>, item: T) -> usize {
    let known = seen.iter().position(|other| *other == item);
    known.unwrap_or_else(|| {
        seen.push(item);
        seen.len() - 1
    })
}
