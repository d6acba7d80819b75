//! Values that are computed in chunks of rows, as parts of what they are for all rows.
//!
//! Where an operation reads rows `start..end` of a value, its lemma is also applied to all rows. That the result is the same rows
//! of that, or the sum over those rows of a sum over all, is shown by the normal form for any operands. A concatenation of all rows,
//! and a sum of the sums over all rows, is what it is for the whole.

use crate::index::{Ix, Kind, Var};
use crate::lemmas::{self, Operand};
use crate::term::{Term, TermId, Terms};
use frit_ir::ops::{BinaryFn, Reduce, ReduceFn, Reshape, Slice};
use frit_ir::{Node, Op, TensorType, ValueId};
use std::collections::HashMap;
use std::ops::Range;

#[cfg(test)]
mod tests;

/// Part of a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Which rows, along the first axis.
    rows: Range<usize>,
    /// How many there are.
    of: usize,
    /// What it is for all rows.
    whole: TermId,
}

/// What is known of the values of a graph.
#[derive(Default)]
pub(crate) struct Chunks {
    /// Rows of a whole.
    rows: HashMap<ValueId, Chunk>,
    /// Sums over rows, of a whole that is the sum over all.
    sums: HashMap<ValueId, Chunk>,
}

impl Chunks {
    /// Gives a value of another graph what is known of one of this.
    pub(crate) fn hand_on(&self, value: ValueId, to: &mut Chunks, other: ValueId) {
        if let Some(chunk) = self.rows.get(&value) {
            to.rows.insert(other, chunk.clone());
        }
        if let Some(chunk) = self.sums.get(&value) {
            to.sums.insert(other, chunk.clone());
        }
    }

    /// The results of a node; those that are a whole as that.
    pub(crate) fn joined(
        &mut self,
        t: &mut Terms,
        node: &Node,
        operands: &[Operand],
        (results, types): (Vec<TermId>, &[&TensorType]),
    ) -> Vec<TermId> {
        let first = |v: &[ValueId]| v.first().copied();
        let (Some(input), Some(output)) = (first(&node.inputs), first(&node.outputs)) else {
            return results;
        };
        let all = |of: &HashMap<ValueId, Chunk>| {
            node.inputs.iter().map(|v| of.get(v).cloned()).collect::<Option<Vec<Chunk>>>()
        };
        match &node.op {
            Op::Slice(op) => self.sliced(t, op, output, operands, types),
            Op::Split(op) if op.axis == 0 => {
                let (of, whole, mut start) = (operands[0].sizes()[0], operands[0].term, 0);
                for (output, n) in node.outputs.iter().zip(&op.sizes) {
                    let rows = start..start + n;
                    start = rows.end;
                    if !rows.is_empty() && rows.len() < of {
                        self.rows.insert(*output, Chunk { rows, of, whole });
                    }
                }
            }
            Op::Concat(op) if op.axis == 0 => {
                if let Some(chunk) = all(&self.rows).and_then(union) {
                    let is_whole = types[0].shape == with_rows(&operands[0].ty, chunk.of).shape;
                    if chunk.rows == (0..chunk.of) && is_whole {
                        return vec![chunk.whole];
                    }
                    self.rows.insert(output, chunk);
                }
            }
            // A sum that is broadcast is another.
            Op::Binary(BinaryFn::Add)
                if all(&self.sums).is_some()
                    && operands.iter().all(|x| x.ty.shape == types[0].shape) =>
            {
                let mut parts = all(&self.sums).unwrap_or_default();
                parts.sort_unstable_by_key(|c| c.rows.start);
                if let Some(chunk) = union(parts) {
                    if chunk.rows == (0..chunk.of) {
                        return vec![chunk.whole];
                    }
                    self.sums.insert(output, chunk);
                }
            }
            Op::Reshape(_) if self.rows.contains_key(&input) => {
                let chunk = self.rows[&input].clone();
                if let Some(chunk) = reshaped(t, &chunk, &operands[0].ty, types[0]) {
                    self.rows.insert(output, chunk);
                }
            }
            _ if node.inputs.iter().any(|v| self.rows.contains_key(v)) => {
                self.widened(t, node, operands, types);
            }
            _ => {
                let same = operands.len() == 1
                    && results[0] == operands[0].term
                    && operands[0].ty.shape == types[0].shape;
                if let Some(chunk) = self.sums.get(&input).filter(|_| same).cloned() {
                    self.sums.insert(output, chunk);
                }
            }
        }
        results
    }

    fn sliced(
        &mut self,
        t: &mut Terms,
        op: &Slice,
        output: ValueId,
        operands: &[Operand],
        types: &[&TensorType],
    ) {
        let Some(&of) = operands[0].sizes().first() else { return };
        let (n, start) = (op.size[0], op.start[0]);
        if n == of || n == 0 || op.step[0] != 1 {
            return;
        }
        let mut all = op.clone();
        (all.start[0], all.size[0]) = (0, of);
        let ty = with_rows(types[0], of);
        let whole = lemmas::results(t, &Op::Slice(all), operands, &[&ty])[0];
        self.rows.insert(output, Chunk { rows: start..start + n, of, whole });
    }

    /// Finds what the results are rows or sums of.
    fn widened(&mut self, t: &mut Terms, node: &Node, operands: &[Operand], types: &[&TensorType]) {
        let mut known = node.inputs.iter().filter_map(|v| self.rows.get(v));
        let Some(Chunk { rows, of, .. }) = known.next().cloned() else { return };
        if known.any(|c| c.rows != rows || c.of != of) {
            return;
        }
        // The operands for all rows, and the same as any operands of their kind: for all rows, and for these.
        let (mut wide, mut any, mut part) = (vec![], vec![], vec![]);
        for (k, (value, operand)) in node.inputs.iter().zip(operands).enumerate() {
            let whole = self.rows.get(value).map(|chunk| chunk.whole);
            let repeated = whole.is_none() && is_repeated(t, operand, rows.len());
            let is_wide = whole.is_some() || repeated;
            let ty = if is_wide { with_rows(&operand.ty, of) } else { operand.ty.clone() };
            let term = whole.unwrap_or(operand.term);
            let leaf = any_operand(t, k, &ty, repeated);
            let own = if is_wide { rows_of(t, leaf, &ty, &rows) } else { leaf };
            any.push(Operand { term: leaf, ty: ty.clone(), value: None });
            wide.push(Operand { term, ty, value: None });
            part.push(Operand { term: own, ty: operand.ty.clone(), value: None });
        }
        let inferred = node.op.infer(&wide.iter().map(|x| &x.ty).collect::<Vec<_>>());
        let Ok(wide_types) = inferred else { return };
        let wide_types: Vec<&TensorType> = wide_types.iter().collect();
        let parts = lemmas::results(t, &node.op, &part, types);
        let all = lemmas::results(t, &node.op, &any, &wide_types);
        let is_rows = |t: &mut Terms, k: usize| {
            types[k].shape.rank() > 0
                && *wide_types[k] == with_rows(types[k], of)
                && rows_of(t, all[k], wide_types[k], &rows) == parts[k]
        };
        let of_rows: Vec<usize> = (0..parts.len()).filter(|k| is_rows(t, *k)).collect();
        // A sum of which nothing is rounded.
        let is_sum = match &node.op {
            Op::MatMul(_) | Op::SumTo(_) => true,
            Op::Reduce(Reduce { f, .. }) => *f == ReduceFn::Sum,
            _ => false,
        };
        let is_sum = is_sum && wide_types[0] == types[0] && !types[0].dtype.is_low_precision();
        // The order of rows does not matter, so this is shown of the first ones.
        let first = 0..rows.len();
        let is_sum = is_sum && {
            for k in 0..any.len() {
                if any[k].ty != part[k].ty {
                    part[k].term = rows_of(t, any[k].term, &any[k].ty, &first);
                }
            }
            let place = node.inputs.iter().position(|v| self.rows.contains_key(v));
            let place = place.expect("invariant: an operand is in chunks");
            any[place].term = masked(t, &any[place], &first);
            let parts = lemmas::results(t, &node.op, &part, types);
            lemmas::results(t, &node.op, &any, &wide_types)[0] == parts[0]
        };
        if of_rows.is_empty() && !is_sum {
            return;
        }
        let wholes = lemmas::results(t, &node.op, &wide, &wide_types);
        let chunk = |whole: TermId| Chunk { rows: rows.clone(), of, whole };
        self.rows.extend(of_rows.into_iter().map(|k| (node.outputs[k], chunk(wholes[k]))));
        if is_sum {
            self.sums.insert(node.outputs[0], chunk(wholes[0]));
        }
    }
}

/// Whether the rows of an operand are all the same, by its term.
fn is_repeated(t: &Terms, x: &Operand, rows: usize) -> bool {
    let is_row = |v: &Var| v.kind == Kind::Axis && v.number == 0;
    x.sizes().first() == Some(&rows) && !t.vars_of(x.term).iter().any(is_row)
}

/// A value of which nothing is known, or only that all of its rows are the same.
fn any_operand(t: &mut Terms, k: usize, ty: &TensorType, repeated: bool) -> TermId {
    let leaf = t.leaf(&format!("operand {k}"));
    let at = t.axes(ty.shape.dims()).split_off(usize::from(repeated));
    t.term(Term::Leaf(leaf, at.into()))
}

/// Rows in another shape: as both are consecutive elements of the whole, rows of that in the other shape.
fn reshaped(t: &mut Terms, chunk: &Chunk, from: &TensorType, to: &TensorType) -> Option<Chunk> {
    let elements = |ty: &TensorType| ty.shape.dims().iter().skip(1).product::<usize>();
    let (size, other) = (elements(from), elements(to));
    let Range { start, end } = chunk.rows;
    let rows = |n: usize| (other > 0 && (n * size).is_multiple_of(other)).then(|| n * size / other);
    let (start, end, of) = (rows(start)?, rows(end)?, rows(chunk.of)?);
    if to.shape.rank() == 0 {
        return None;
    }
    let ty = with_rows(from, chunk.of);
    let whole = Operand { term: chunk.whole, ty: ty.clone(), value: None };
    let ty = with_rows(to, of);
    let op = Op::Reshape(Reshape { shape: ty.shape.clone() });
    let whole = lemmas::results(t, &op, &[whole], &[&ty])[0];
    Some(Chunk { rows: start..end, of, whole })
}

/// What parts that follow each other are together.
fn union(parts: Vec<Chunk>) -> Option<Chunk> {
    let mut parts = parts.into_iter();
    let mut union = parts.next()?;
    for part in parts {
        if (part.of, part.whole, part.rows.start) != (union.of, union.whole, union.rows.end) {
            return None;
        }
        union.rows.end = part.rows.end;
    }
    Some(union)
}

fn with_rows(ty: &TensorType, rows: usize) -> TensorType {
    let mut sizes = ty.shape.dims().to_vec();
    if let Some(first) = sizes.first_mut() {
        *first = rows;
    }
    TensorType::new(ty.dtype, sizes)
}

/// These rows of a term.
fn rows_of(t: &mut Terms, term: TermId, ty: &TensorType, rows: &Range<usize>) -> TermId {
    let part = with_rows(ty, rows.len());
    let mut at: Vec<Ix> = t.axes(part.shape.dims());
    at[0] = t.offset(at[0], rows.start as i64);
    t.at(term, ty.shape.dims(), &at)
}

/// The operand where it has these rows, else 0.
fn masked(t: &mut Terms, x: &Operand, rows: &Range<usize>) -> TermId {
    let row = t.axes(x.sizes())[0];
    let first = t.offset(row, -(rows.start as i64));
    let last = t.times(row, -1);
    let last = t.offset(last, rows.end as i64 - 1);
    let (low, high) = (t.index_not_negative(first), t.index_not_negative(last));
    t.product(&[(low, 1.0), (high, 1.0), (x.term, 1.0)])
}
