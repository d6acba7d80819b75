//! Builds the fused graph: region bodies, and one node for each region.

use super::INFO;
use super::cluster::{ClusterId, Clusters, Interface};
use super::facts::Facts;
use crate::order::by_rank;
use crate::pass::bug;
use frit_ir::ops::{Constant, Fusion, FusionKind, Input, Op};
use frit_ir::{Code, Diagnostic, Graph, GraphError, Node, Origin, OutputKind, Region, ValueId};
use petgraph::graphmap::DiGraphMap;
use std::cmp::Reverse;
use std::collections::HashMap;

/// The body of a region. Equal regions have equal bodies.
pub(super) fn body(
    facts: &Facts<'_>,
    kind: FusionKind,
    members: &[usize],
    interface: &Interface,
) -> Result<Graph, GraphError> {
    let mut body = Body { facts, graph: Graph::new(kind.name()), values: HashMap::new() };
    for (i, &operand) in interface.operands.iter().enumerate() {
        let input = Input { name: i.to_string(), ty: facts.graph.ty(operand).clone() };
        let value = body.add(Op::Input(input), &[])?[0];
        body.values.insert(operand, value);
    }
    for member in needed(facts, members, &interface.results) {
        let node = facts.node(member);
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for &input in &node.inputs {
            inputs.push(body.value(input)?);
        }
        let outputs = body.add(node.op.clone(), &inputs)?;
        body.values.extend(node.outputs.iter().copied().zip(outputs));
    }
    for (i, result) in interface.results.iter().enumerate() {
        let value = body.values[result];
        body.graph.add_output(&i.to_string(), value, OutputKind::Result);
    }
    Ok(body.graph)
}

struct Body<'f, 'g> {
    facts: &'f Facts<'g>,
    graph: Graph,
    values: HashMap<ValueId, ValueId>,
}

impl Body<'_, '_> {
    fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, GraphError> {
        self.graph.add(op, inputs, Origin::none(), Region::Forward)
    }

    /// The value in the body; reshapes of values computed inside, and constants, are copied into it.
    fn value(&mut self, value: ValueId) -> Result<ValueId, GraphError> {
        if let Some(&known) = self.values.get(&value) {
            return Ok(known);
        }
        let node = self.facts.graph.def(value);
        let inside = match &node.op {
            Op::Constant(Constant { .. }) => self.add(node.op.clone(), &[])?[0],
            op => {
                let input = self.value(node.inputs[0])?;
                self.add(op.clone(), &[input])?[0]
            }
        };
        self.values.insert(value, inside);
        Ok(inside)
    }
}

/// The members on which a result depends.
fn needed(facts: &Facts<'_>, members: &[usize], results: &[ValueId]) -> Vec<usize> {
    let mut live = vec![false; members.len()];
    let mut stack: Vec<ValueId> = results.to_vec();
    while let Some(value) = stack.pop() {
        if let Ok(at) = members.binary_search(&facts.source(value))
            && !std::mem::replace(&mut live[at], true)
        {
            stack.extend(&facts.node(members[at]).inputs);
        }
    }
    members.iter().zip(live).filter(|(_, live)| *live).map(|(m, _)| *m).collect()
}

/// What the pass reports.
#[derive(Default)]
pub(super) struct Remarks {
    pub(super) regions: usize,
    pub(super) nodes: usize,
    pub(super) members: Vec<(Origin, String)>,
}

/// Something to emit: a node of its own, or a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Item {
    Node(usize),
    Cluster(ClusterId),
}

/// The graph with one node for each cluster. Nodes keep their order, a cluster takes the place of its last member; only
/// readers of an earlier member's result move behind it.
pub(super) fn emit(clusters: &Clusters<'_, '_>) -> Result<(Graph, Remarks), Diagnostic> {
    let facts = clusters.facts;
    let interfaces: Vec<Interface> =
        (0..clusters.clusters.len()).map(|id| clusters.interface_of(id)).collect();
    let mut items: Vec<(usize, Item)> = Vec::new();
    for (id, interface) in interfaces.iter().enumerate() {
        if let Some(cluster) = clusters.cluster(id)
            && !interface.results.is_empty()
        {
            // Copies of producers do not count: their originals come earlier.
            let own = cluster.members.iter().filter(|m| clusters.owner[**m] == Some(id));
            items.push((own.max().copied().unwrap_or(cluster.members[0]), Item::Cluster(id)));
        }
    }
    let droppable = droppable(clusters);
    let read = droppable_read(clusters, &interfaces, &droppable);
    for (position, read) in read.into_iter().enumerate() {
        if clusters.owner[position].is_none() && (read || !droppable[position]) {
            items.push((position, Item::Node(position)));
        }
    }
    items.sort_unstable();
    let mut emit = Emit {
        clusters,
        interfaces: &interfaces,
        graph: Graph::new(&facts.graph.name),
        map: HashMap::new(),
        remarks: Remarks::default(),
    };
    emit.graph.world_size = facts.graph.world_size;
    for item in emit.in_order(&items)? {
        match item {
            Item::Node(position) => emit.node(facts.node(position))?,
            Item::Cluster(id) => emit.cluster(id)?,
        }
    }
    for output in &facts.graph.outputs {
        let kind = match output.kind {
            OutputKind::Carry(leaf) => OutputKind::Carry(emit.map[&leaf]),
            kind => kind,
        };
        let value = emit.map[&output.value];
        emit.graph.add_output(&output.name, value, kind);
    }
    Ok((emit.graph, emit.remarks))
}

/// For every position, whether the node may be removed if it has no reader: reshapes, which regions copy, and nodes
/// that some region copies.
fn droppable(clusters: &Clusters<'_, '_>) -> Vec<bool> {
    let facts = clusters.facts;
    let is_reshape = |p: usize| matches!(facts.node(p).op, Op::Reshape(_));
    let mut droppable: Vec<bool> = (0..facts.order.len()).map(is_reshape).collect();
    for cluster in clusters.clusters.iter().flatten() {
        cluster.copies.iter().for_each(|&copy| droppable[copy] = true);
    }
    droppable
}

/// For every position, whether it is a removable node that is needed by a node outside of regions, an operand of a
/// region, or an output.
fn droppable_read(
    clusters: &Clusters<'_, '_>,
    interfaces: &[Interface],
    droppable: &[bool],
) -> Vec<bool> {
    let facts = clusters.facts;
    let mut read = vec![false; facts.order.len()];
    let mut mark = |value: ValueId| read[facts.def(value)] = true;
    facts.graph.outputs.iter().for_each(|o| mark(o.value));
    interfaces.iter().flat_map(|i| &i.operands).for_each(|v| mark(*v));
    for position in (0..facts.order.len()).rev() {
        let node = facts.node(position);
        if if droppable[position] { read[position] } else { clusters.owner[position].is_none() } {
            node.inputs.iter().for_each(|v| read[facts.def(*v)] = true);
        }
    }
    read
}

struct Emit<'c, 'f, 'g> {
    clusters: &'c Clusters<'f, 'g>,
    interfaces: &'c [Interface],
    graph: Graph,
    /// From values of the old graph to values of the new one.
    map: HashMap<ValueId, ValueId>,
    remarks: Remarks,
}

impl Emit<'_, '_, '_> {
    fn operands(&self, item: Item) -> &[ValueId] {
        match item {
            Item::Node(position) => &self.clusters.facts.node(position).inputs,
            Item::Cluster(id) => &self.interfaces[id].operands,
        }
    }

    fn results(&self, item: Item) -> &[ValueId] {
        match item {
            Item::Node(position) => &self.clusters.facts.node(position).outputs,
            Item::Cluster(id) => &self.interfaces[id].results,
        }
    }

    /// The topological order that is least by position.
    fn in_order(&self, items: &[(usize, Item)]) -> Result<Vec<Item>, Diagnostic> {
        let mut definer: HashMap<ValueId, usize> = HashMap::new();
        for (i, (_, item)) in items.iter().enumerate() {
            definer.extend(self.results(*item).iter().map(|v| (*v, i)));
        }
        let mut reads = DiGraphMap::new();
        for (i, (_, item)) in items.iter().enumerate() {
            reads.add_node(i);
            for operand in self.operands(*item) {
                let definer =
                    definer.get(operand).ok_or_else(|| internal("a value has no definition"))?;
                reads.add_edge(i, *definer, ());
            }
        }
        let order = by_rank(&reads, |i| i);
        let order = order.ok_or_else(|| internal("regions depend on each other"))?;
        Ok(order.into_iter().map(|i| items[i].1).collect())
    }

    fn node(&mut self, node: &Node) -> Result<(), Diagnostic> {
        self.add(node.op.clone(), &node.inputs, &node.outputs, node.origin.clone(), node.region)
    }

    fn add(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        outputs: &[ValueId],
        origin: Origin,
        region: Region,
    ) -> Result<(), Diagnostic> {
        let inputs: Vec<ValueId> = inputs.iter().map(|v| self.map[v]).collect();
        let made = self.graph.add(op, &inputs, origin, region).map_err(bug(INFO.name))?;
        for (old, new) in outputs.iter().zip(made) {
            if let Some(name) = &self.clusters.facts.graph.value(*old).name {
                self.graph.set_name(new, name);
            }
            self.map.insert(*old, new);
        }
        Ok(())
    }

    fn cluster(&mut self, id: ClusterId) -> Result<(), Diagnostic> {
        let facts = self.clusters.facts;
        let Some(cluster) = self.clusters.cluster(id) else { return Ok(()) };
        let interface = &self.interfaces[id];
        let body =
            body(facts, cluster.kind, &cluster.members, interface).map_err(bug(INFO.name))?;
        let members = needed(facts, &cluster.members, &interface.results);
        let Some(&main) = members.iter().min_by_key(|m| (Reverse(flops(facts, **m)), **m)) else {
            return Err(internal("an empty region"));
        };
        let (origin, region) = (facts.node(main).origin.by(INFO.name), facts.node(main).region);
        self.remarks.regions += 1;
        self.remarks.nodes += members.len();
        if members.len() > 1 {
            let names: Vec<&str> = members.iter().map(|m| facts.node(*m).op.name()).collect();
            let message = format!("one {} kernel: {}", cluster.kind.name(), names.join(", "));
            self.remarks.members.push((origin.clone(), message));
        }
        let op = Op::Fusion(Box::new(Fusion { kind: cluster.kind, body }));
        self.add(op, &interface.operands, &interface.results, origin, region)
    }
}

/// Work of a node; a reduction is worth more than the elementwise work around it.
fn flops(facts: &Facts<'_>, position: usize) -> u64 {
    let node = facts.node(position);
    let types = |values: &[ValueId]| values.iter().map(|v| facts.graph.ty(*v)).collect::<Vec<_>>();
    let flops = node.op.flops(&types(&node.inputs), &types(&node.outputs));
    if node.op.is_pointwise() { flops } else { flops.saturating_mul(2) }
}

fn internal(what: &str) -> Diagnostic {
    Diagnostic::error(Code::PassFailed, format!("internal error in pass `{}`: {what}", INFO.name))
        .help("this is a bug in frit; please report it with the model")
}
