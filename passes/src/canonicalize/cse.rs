//! Common subexpressions: nodes of one operation, operands and region are one node.
//!
//! Leaves other than constants, collectives and whole regions are never merged. Attributes are compared
//! by their text, constants by their bits, so that −0 and 0 stay apart.

use frit_ir::{Graph, NodeId, Op, Region, Tensor, TensorData, ValueId};
use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

/// What makes two nodes candidates for merging.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    op: String,
    constant: u64,
    inputs: Vec<ValueId>,
    region: Region,
}

/// Merges equal nodes into the first of them. Whether there were any.
pub(super) fn merge(graph: &mut Graph) -> bool {
    let mut first: HashMap<Key, Vec<NodeId>> = HashMap::new();
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    for id in graph.order().to_vec() {
        let inputs: Vec<ValueId> = graph.node(id).inputs.iter().map(|v| at(&map, *v)).collect();
        let node = graph.node(id);
        let Some((op, constant)) = identity(&node.op) else { continue };
        let key = Key { op, constant, inputs, region: node.region };
        let candidates = first.entry(key).or_default();
        match candidates.iter().find(|c| same_constant(&graph.node(**c).op, &node.op)) {
            Some(&same) => {
                let pairs = node.outputs.iter().zip(&graph.node(same).outputs);
                map.extend(pairs.map(|(duplicate, original)| (*duplicate, *original)));
            }
            None => candidates.push(id),
        }
    }
    graph.substitute(&map);
    !map.is_empty() && graph.remove_dead() > 0
}

fn at(map: &HashMap<ValueId, ValueId>, value: ValueId) -> ValueId {
    map.get(&value).copied().unwrap_or(value)
}

/// The text of the operation and, for a constant, a hash of its bits; `None` for what is never merged.
fn identity(op: &Op) -> Option<(String, u64)> {
    match op {
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Hyper(_) | Op::Fusion(_) => None,
        Op::AllGather(_) | Op::ReduceScatter(_) | Op::AllReduce(_) => None,
        Op::Constant(c) => {
            let mut hasher = DefaultHasher::new();
            bits(&c.value).for_each(|b| b.hash(&mut hasher));
            Some((format!("constant {}", c.value.ty), hasher.finish()))
        }
        _ => {
            let (name, attributes) = op.to_parts();
            Some((format!("{name} {attributes:?}"), 0))
        }
    }
}

fn same_constant(a: &Op, b: &Op) -> bool {
    match (a, b) {
        (Op::Constant(a), Op::Constant(b)) => bits(&a.value).eq(bits(&b.value)),
        _ => true,
    }
}

fn bits(tensor: &Tensor) -> Box<dyn Iterator<Item = u64> + '_> {
    match tensor.data() {
        TensorData::Float(v) => Box::new(v.iter().map(|x| x.to_bits())),
        TensorData::Int(v) => Box::new(v.iter().map(|&x| x as u64)),
    }
}
