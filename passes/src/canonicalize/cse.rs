//! Common subexpression elimination: merges nodes with the same operation, operands and region.
//!
//! Leaves other than constants, collectives and nodes of different regions are never merged. Floats are compared by their
//! bits, so that −0 and 0 stay distinct.

use frit_ir::{Graph, NodeId, Op, Region, ValueId};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The key by which nodes are equal.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    op: Op,
    inputs: Vec<ValueId>,
    region: Region,
}

/// Merges equal nodes into the first of them. Whether there were any.
pub(super) fn merge(graph: &mut Graph) -> bool {
    let mut first: HashMap<Key, NodeId> = HashMap::new();
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    for id in graph.order().to_vec() {
        let node = graph.node(id);
        if !merges(&node.op) {
            continue;
        }
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| at(&map, *v)).collect();
        match first.entry(Key { op: node.op.clone(), inputs, region: node.region }) {
            Entry::Occupied(same) => {
                let pairs = node.outputs.iter().zip(&graph.node(*same.get()).outputs);
                map.extend(pairs.map(|(duplicate, original)| (*duplicate, *original)));
            }
            Entry::Vacant(vacant) => drop(vacant.insert(id)),
        }
    }
    graph.substitute(&map);
    !map.is_empty() && graph.remove_dead() > 0
}

fn at(map: &HashMap<ValueId, ValueId>, value: ValueId) -> ValueId {
    map.get(&value).copied().unwrap_or(value)
}

/// Whether equal nodes of this operation are merged.
fn merges(op: &Op) -> bool {
    let stays = matches!(
        op,
        Op::Input(_)
            | Op::Param(_)
            | Op::State(_)
            | Op::Hyper(_)
            | Op::Fusion(_)
            | Op::AllGather(_)
            | Op::ReduceScatter(_)
            | Op::AllReduce(_)
    );
    !stays
}
