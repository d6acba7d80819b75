//! Writes a solution back to the graph: new nodes inherit the origins and positions of those they replace.

use super::INFO;
use super::saturate::Program;
use super::window::{Operand, Window};
use crate::order::by_rank;
use crate::pass::bug;
use frit_ir::ops::{AllGather, Op};
use frit_ir::{Code, Diagnostic, Graph, NodeId, OutputKind, ValueId};
use petgraph::graphmap::DiGraphMap;
use std::collections::HashMap;

/// New nodes, with the nodes that they replace.
pub(super) type Places = HashMap<NodeId, NodeId>;

/// Adds the nodes of `program` and records which value replaces each root of the window.
pub(super) fn rebuild(
    graph: &mut Graph,
    window: &Window,
    program: &Program,
    replaced: &mut HashMap<ValueId, ValueId>,
    places: &mut Places,
) -> Result<(), Diagnostic> {
    let mut made: Vec<ValueId> = Vec::with_capacity(program.steps.len());
    let value = |made: &[ValueId], operand: &Operand| match operand {
        Operand::Leaf(i) => window.leaves[*i as usize],
        Operand::Node(i) => made[*i as usize],
    };
    for step in &program.steps {
        let inputs: Vec<ValueId> = step.inputs.iter().map(|i| value(&made, i)).collect();
        let original = step.original.map(|i| graph.node(window.nodes[i as usize].id));
        if let Some(node) = original
            && node.inputs == inputs
        {
            made.push(node.outputs[0]);
            continue;
        }
        // A gather is made for what was gathered before, whatever reads it.
        let gather = window.nodes.iter().find(|n| n.op == step.op && n.region == step.region);
        let gather = gather.filter(|_| matches!(step.op, Op::AllGather(_)));
        let place = window.nodes[step.original.unwrap_or(step.made_for) as usize].id;
        let origin = match (original, gather) {
            (Some(node), _) => node.origin.clone(),
            (None, Some(gather)) => graph.node(gather.id).origin.by(INFO.name),
            (None, None) => graph.node(place).origin.by(INFO.name),
        };
        let op = match &step.op {
            Op::AllGather(gather) => Op::AllGather(AllGather { unit: window.units[gather.unit] }),
            op => op.clone(),
        };
        let new =
            graph.add1(op, &inputs, origin, window.region(step.region)).map_err(bug(INFO.name))?;
        places.insert(graph.value(new).def, place);
        made.push(new);
    }
    for (root, new) in window.roots.iter().zip(&program.roots) {
        let old = graph.node(window.nodes[*root as usize].id).outputs[0];
        let new = value(&made, new);
        if old == new {
            continue;
        }
        if graph.ty(old) != graph.ty(new) {
            return Err(Diagnostic::error(
                Code::PassFailed,
                "internal error in pass `simplify`: a type changed",
            )
            .at(&graph.def(old).origin)
            .help("this is a bug in frit; please report it with the model"));
        }
        if graph.value(new).name.is_none()
            && let Some(name) = graph.value(old).name.clone()
        {
            graph.set_name(new, &name);
        }
        replaced.insert(old, new);
    }
    Ok(())
}

/// The same graph in topological order: every node at its place of `order`, new nodes at that of the nodes they
/// replace.
pub(super) fn in_order(
    graph: &Graph,
    order: &[NodeId],
    places: &Places,
) -> Result<Graph, Diagnostic> {
    let position: HashMap<NodeId, usize> = order.iter().enumerate().map(|(i, n)| (*n, i)).collect();
    let mut reads = DiGraphMap::new();
    for (id, node) in graph.nodes() {
        reads.add_node(id);
        for &input in &node.inputs {
            reads.add_edge(id, graph.value(input).def, ());
        }
    }
    let rank = |id: NodeId| position[places.get(&id).unwrap_or(&id)];
    let order_by_place = by_rank(&reads, rank)
        .ok_or_else(|| Diagnostic::error(Code::PassFailed, "cycle after pass `simplify`"))?;
    let mut sorted = Graph::new(&graph.name);
    sorted.world_size = graph.world_size;
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    for id in order_by_place {
        let node = graph.node(id);
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| map[v]).collect();
        let outputs = sorted
            .add(node.op.clone(), &inputs, node.origin.clone(), node.region)
            .map_err(bug(INFO.name))?;
        for (old, new) in node.outputs.iter().zip(outputs) {
            if let Some(name) = &graph.value(*old).name {
                sorted.set_name(new, name);
            }
            map.insert(*old, new);
        }
    }
    for output in &graph.outputs {
        let kind = match output.kind {
            OutputKind::Carry(leaf) => OutputKind::Carry(map[&leaf]),
            kind => kind,
        };
        sorted.add_output(&output.name, map[&output.value], kind);
    }
    Ok(sorted)
}
