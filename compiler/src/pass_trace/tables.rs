//! Operations, origins and names by index, and graphs as rows that refer to them.

use super::form::{Kind, Nodes, Operation, Outputs, Part};
use frit_ir::{Graph, Node, NodeId, Op, Origin, OutputKind, Region, ValueId};
use sha2::{Digest, Sha256};
use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::io;
use std::sync::Arc;

/// Constants of more elements are written as bytes.
const WRITTEN_OUT: usize = 16;

/// Things by index, each once.
pub(super) struct Table<T> {
    index: HashMap<T, u32>,
    pub(super) all: Vec<T>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Table { index: HashMap::new(), all: vec![] }
    }
}

impl<T: Clone + Eq + Hash> Table<T> {
    /// The index of something, if it is there.
    fn get<Q: Eq + Hash + ?Sized>(&self, item: &Q) -> Option<u32>
    where
        T: Borrow<Q>,
    {
        self.index.get(item).copied()
    }

    /// Adds what is not there; returns its index.
    fn add(&mut self, item: T) -> u32 {
        let index = self.all.len() as u32;
        self.index.insert(item.clone(), index);
        self.all.push(item);
        index
    }
}

/// What graphs are made of.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) strings: Table<Arc<str>>,
    pub(super) origins: Table<Origin>,
    pub(super) operations: Table<Op>,
    /// Strings of the imported graph.
    pub(super) imported_strings: usize,
    /// The forms of origins and operations that were not in the imported graph.
    pub(super) new_origins: Vec<[u32; 3]>,
    pub(super) new_operations: Vec<Operation>,
}

impl Tables {
    /// Those of an imported graph, its form, and a digest of it.
    pub(super) fn of_imported(graph: &Graph) -> (Tables, Part, String) {
        let mut tables = Tables::default();
        let part = tables.whole(graph);
        let (origins, operations) = (&tables.new_origins, &tables.new_operations);
        let strings: Vec<&str> = tables.strings.all.iter().map(|s| &**s).collect();
        let mut digest = Hashed(Sha256::new());
        serde_json::to_writer(&mut digest, &(strings, origins, operations, &part))
            .expect("invariant: rows are JSON");
        let digest = digest.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        (tables.new_origins, tables.new_operations) = (vec![], vec![]);
        tables.imported_strings = tables.strings.all.len();
        (tables, part, digest)
    }

    fn string(&mut self, text: &str) -> u32 {
        self.strings.get(text).unwrap_or_else(|| self.strings.add(text.into()))
    }

    fn origin(&mut self, origin: &Origin) -> u32 {
        if let Some(index) = self.origins.get(origin) {
            return index;
        }
        let Origin { source, scope, pass } = origin;
        let strings = [source, scope, pass].map(|text| self.string(text));
        self.new_origins.push(strings);
        self.origins.add(origin.clone())
    }

    fn operation(&mut self, op: &Op) -> u32 {
        if let Some(index) = self.operations.get(op) {
            return index;
        }
        // What is in a region comes before it.
        let form = match op {
            Op::Fusion(fusion) => {
                Operation::Fusion(fusion.kind, Box::new(self.whole(&fusion.body)))
            }
            Op::Constant(c) if c.value.numel() > WRITTEN_OUT && c.value.as_splat().is_none() => {
                let bytes = c.value.to_bytes();
                let hex = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
                let digit = |n: u8| char::from_digit(n.into(), 16).unwrap_or('0');
                Operation::Constant(c.value.ty.clone(), hex.map(digit).collect())
            }
            _ => {
                let (name, attributes) = op.to_parts();
                Operation::Plain(name.into(), attributes)
            }
        };
        self.new_operations.push(form);
        self.operations.add(op.clone())
    }

    /// A whole graph.
    fn whole(&mut self, graph: &Graph) -> Part {
        let order = vec![(graph.len(), 0, 0)];
        let nodes = self.nodes(graph, graph.order());
        let outputs = Some(self.outputs(graph));
        self.part(graph, order, nodes, outputs)
    }

    fn part(
        &mut self,
        graph: &Graph,
        order: Vec<(usize, i64, usize)>,
        nodes: Nodes,
        outputs: Option<Outputs>,
    ) -> Part {
        let name = self.string(&graph.name);
        Part { name, world_size: graph.world_size, order, nodes, outputs }
    }

    /// A graph, from the nodes of one before it.
    pub(super) fn edit(&mut self, before: &Graph, graph: &Graph) -> Part {
        let positions: HashMap<NodeId, usize> =
            before.order().iter().enumerate().map(|(position, id)| (*id, position)).collect();
        let is_kept = |id: NodeId, node: &Node| {
            let same = |value: &ValueId| before.value(*value).name == graph.value(*value).name;
            before.node(id) == node && node.outputs.iter().all(same)
        };
        let mut order: Vec<(usize, i64, usize)> = vec![];
        let (mut new, mut next) = (vec![], 0);
        let mut added = 0;
        for (id, node) in graph.nodes() {
            let Some(&position) = positions.get(&id).filter(|_| is_kept(id, node)) else {
                new.push(id);
                added += 1;
                continue;
            };
            match order.last_mut() {
                Some((_, _, kept)) if added == 0 && position == next => *kept += 1,
                _ => order.push((added, position as i64 - next as i64, 1)),
            }
            (added, next) = (0, position + 1);
        }
        if added > 0 {
            order.push((added, 0, 0));
        }
        let nodes = self.nodes(graph, &new);
        let outputs = (before.outputs != graph.outputs).then(|| self.outputs(graph));
        self.part(graph, order, nodes, outputs)
    }

    fn nodes(&mut self, graph: &Graph, ids: &[NodeId]) -> Nodes {
        let mut nodes = Nodes::default();
        let mut next = 0;
        for id in ids {
            let node = graph.node(*id);
            let first = node.outputs.first().map_or(next, |value| i64::from(value.0));
            nodes.operations.push(self.operation(&node.op));
            nodes.origins.push(self.origin(&node.origin));
            nodes.regions.push(match node.region {
                Region::Forward => 0,
                Region::Backward => 1,
                Region::Update => 2,
                Region::Recompute(k) => 3 + k,
            });
            nodes.sizes.push((node.outputs.len(), node.inputs.len()));
            nodes.results.push(first - next);
            for value in &node.outputs {
                let name = graph.value(*value).name.as_ref();
                nodes.names.push(name.map_or(0, |name| 1 + self.string(name)));
            }
            nodes.operands.extend(node.inputs.iter().map(|value| first - i64::from(value.0)));
            next = first + node.outputs.len() as i64;
        }
        nodes
    }

    fn outputs(&mut self, graph: &Graph) -> Outputs {
        let mut outputs = Outputs::default();
        let mut before = 0;
        for output in &graph.outputs {
            let value = i64::from(output.value.0);
            outputs.names.push(self.string(&output.name));
            outputs.values.push(value - before);
            outputs.kinds.push(match output.kind {
                OutputKind::Result => Kind::Result,
                OutputKind::LossSum => Kind::LossSum,
                OutputKind::LossCount => Kind::LossCount,
                OutputKind::Gradient => Kind::Gradient,
                OutputKind::Metric => Kind::Metric,
                OutputKind::Carry(leaf) => {
                    outputs.carried.push(value - i64::from(leaf.0));
                    Kind::Carry
                }
            });
            before = value;
        }
        outputs
    }
}

/// Hashes what is written.
struct Hashed(Sha256);

impl io::Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
