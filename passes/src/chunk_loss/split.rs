//! Replaces a head by one that is computed chunk by chunk.

use super::INFO;
use super::head::{Head, Role, base};
use frit_ir::ops::{BinaryFn, Cast, Concat, Expand, MatMul, Reshape, Slice, SumTo};
use frit_ir::{DType, Graph, GraphError, Node, NodeId, Op, Origin, Region, Shape, ValueId};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

/// Replaces a head by `n` chunks, the last of which may be the smallest.
pub(super) fn split(graph: &mut Graph, head: &Head, n: usize) -> Result<(), GraphError> {
    for id in &head.moved {
        graph.node_mut(*id).region = Region::Forward;
    }
    let mut split = Split {
        outside: read_outside(graph, head),
        graph,
        head,
        origin: Origin::none(),
        added: Vec::new(),
        flat: HashMap::new(),
        slices: HashMap::new(),
    };
    let size = head.rows.div_ceil(n);
    let mut results: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
    let mut sums: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for begin in (0..head.rows).step_by(size) {
        let rows = begin..head.rows.min(begin + size);
        split.chunk(rows, &mut results, &mut sums)?;
    }
    let mut replaced = HashMap::new();
    for (old, parts) in results {
        split.origin = split.graph.def(old).origin.by(INFO.name);
        let whole = split.add(Op::Concat(Concat { axis: 0 }), &parts)?;
        replaced.insert(old, split.typed(whole, old)?);
    }
    for (old, sum) in sums {
        split.origin = split.graph.def(old).origin.by(INFO.name);
        replaced.insert(old, split.typed(sum, old)?);
    }
    let added = split.added;
    graph.move_before(head.loss, &added);
    graph.substitute(&replaced);
    graph.remove_dead();
    Ok(())
}

/// What anything besides the members of a head reads.
fn read_outside(graph: &Graph, head: &Head) -> HashSet<ValueId> {
    let members: HashSet<NodeId> = head.members.iter().map(|(id, _)| *id).collect();
    let others = graph.nodes().filter(|(id, _)| !members.contains(id));
    let outputs = graph.outputs.iter().map(|o| o.value);
    others.flat_map(|(_, node)| node.inputs.iter().copied()).chain(outputs).collect()
}

struct Split<'a> {
    graph: &'a mut Graph,
    head: &'a Head,
    /// What anything besides members reads.
    outside: HashSet<ValueId>,
    /// Where the nodes that are being added come from.
    origin: Origin,
    added: Vec<NodeId>,
    /// Operands with one axis of rows, by the value of which they are reshapes.
    flat: HashMap<ValueId, ValueId>,
    /// The rows of operands for the chunk that is being added, by the value of which they are reshapes.
    slices: HashMap<ValueId, ValueId>,
}

impl Split<'_> {
    fn add_all(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, GraphError> {
        let results = self.graph.add(op, inputs, self.origin.clone(), Region::Forward)?;
        self.added.push(self.graph.value(results[0]).def);
        Ok(results)
    }

    fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, GraphError> {
        Ok(self.add_all(op, inputs)?[0])
    }

    fn reshaped(&mut self, value: ValueId, shape: Shape) -> Result<ValueId, GraphError> {
        match self.graph.ty(value).shape == shape {
            true => Ok(value),
            false => self.add(Op::Reshape(Reshape { shape }), &[value]),
        }
    }

    /// A result in the type of the value that it replaces.
    fn typed(&mut self, value: ValueId, old: ValueId) -> Result<ValueId, GraphError> {
        let ty = self.graph.ty(old).clone();
        let cast = match self.graph.ty(value).dtype == ty.dtype {
            true => value,
            false => self.add(Op::Cast(Cast { to: ty.dtype }), &[value])?,
        };
        self.reshaped(cast, ty.shape)
    }

    /// Computes some rows: those of results are appended to `results`, sums are added to `sums`.
    fn chunk(
        &mut self,
        rows: Range<usize>,
        results: &mut BTreeMap<ValueId, Vec<ValueId>>,
        sums: &mut BTreeMap<ValueId, ValueId>,
    ) -> Result<(), GraphError> {
        let head = self.head;
        self.slices.clear();
        // The chunk's part of each value.
        let mut parts: HashMap<ValueId, ValueId> = HashMap::new();
        for &(id, role) in &head.members {
            let node = self.graph.node(id).clone();
            self.origin = node.origin.by(INFO.name);
            if let Op::Reshape(_) = node.op {
                parts.insert(node.outputs[0], parts[&node.inputs[0]]);
                continue;
            }
            let mut inputs = Vec::with_capacity(node.inputs.len());
            for i in 0..node.inputs.len() {
                inputs.push(self.operand(&node, i, role, &rows, &mut parts)?);
            }
            let dtype = self.graph.ty(node.outputs[0]).dtype;
            let made = self.add_all(of_chunk(&node.op, role, dtype), &inputs)?;
            for (&old, &new) in node.outputs.iter().zip(&made) {
                if role == Role::Sum {
                    let sum = match sums.get(&old) {
                        Some(&sum) => self.add(Op::Binary(BinaryFn::Add), &[sum, new])?,
                        None => new,
                    };
                    sums.insert(old, sum);
                    continue;
                }
                parts.insert(old, new);
                if !head.wide.contains(&old) && self.outside.contains(&old) {
                    results.entry(old).or_default().push(new);
                }
            }
        }
        Ok(())
    }

    /// Operand `i` of a member, for some rows.
    fn operand(
        &mut self,
        node: &Node,
        i: usize,
        role: Role,
        rows: &Range<usize>,
        parts: &mut HashMap<ValueId, ValueId>,
    ) -> Result<ValueId, GraphError> {
        let value = node.inputs[i];
        if let Some(&part) = parts.get(&value) {
            return Ok(part);
        }
        let has_rows = match (&node.op, role) {
            (Op::MatMul(_), Role::MatMul) => i == 0,
            (Op::MatMul(_), _) | (Op::CrossEntropy(_) | Op::CrossEntropyGrad(_), _) => true,
            _ => false,
        };
        let part = match (has_rows, role) {
            (true, _) => self.rows_of(value, rows, matches!(node.op, Op::MatMul(_)))?,
            (false, Role::Rows) => {
                // One element, or one for each class, whatever its axes of size 1.
                let n = self.graph.ty(value).shape.numel();
                let shape = if n == 1 { Shape::from([]) } else { Shape::from([n]) };
                self.reshaped(value, shape)?
            }
            (false, _) => value,
        };
        parts.insert(value, part);
        Ok(part)
    }

    /// Some rows of a value that has all; of a matrix if it is an operand of a matmul, else of a vector.
    fn rows_of(
        &mut self,
        value: ValueId,
        rows: &Range<usize>,
        is_matrix: bool,
    ) -> Result<ValueId, GraphError> {
        let value = base(self.graph, value);
        if let Some(&slice) = self.slices.get(&value) {
            return Ok(slice);
        }
        let numel = self.graph.ty(value).shape.numel();
        let columns = if is_matrix { vec![numel / self.head.rows] } else { vec![] };
        let sized = |n: usize| [&[n][..], &columns].concat();
        let node = self.graph.def(value);
        if let Op::Expand(_) = node.op
            && self.graph.ty(node.inputs[0]).shape.numel() == 1
        {
            let one = node.inputs[0];
            let one = self.reshaped(one, Shape(vec![1; 1 + columns.len()]))?;
            let shape = Shape(sized(rows.len()));
            let expanded = self.add(Op::Expand(Expand { shape }), &[one])?;
            self.slices.insert(value, expanded);
            return Ok(expanded);
        }
        let flat = match self.flat.get(&value) {
            Some(&flat) => flat,
            None => self.reshaped(value, Shape(sized(self.head.rows)))?,
        };
        self.flat.insert(value, flat);
        let start = [vec![rows.start], vec![0; columns.len()]].concat();
        let step = vec![1; 1 + columns.len()];
        let slice = self.add(Op::Slice(Slice { start, size: sized(rows.len()), step }), &[flat])?;
        self.slices.insert(value, slice);
        Ok(slice)
    }
}

/// The operation on a chunk, whose results are of type `dtype` for all rows. Chunks are summed in f32 at least.
fn of_chunk(op: &Op, role: Role, dtype: DType) -> Op {
    let wide = if dtype.is_low_precision() { DType::F32 } else { dtype };
    match (op, role) {
        (Op::MatMul(op), Role::Sum) if wide != dtype => {
            Op::MatMul(MatMul { out: Some(wide), ..op.clone() })
        }
        (Op::SumTo(op), _) => {
            let n = op.shape.numel();
            let shape = if n == 1 { Shape::from([]) } else { Shape::from([n]) };
            Op::SumTo(SumTo { shape, dtype: Some(wide) })
        }
        (op, _) => op.clone(),
    }
}
