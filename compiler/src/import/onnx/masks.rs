//! Recognizes masks among the initializers; none trains. Large positional masks (lower triangles, bands) that exporters store
//! are recomputed from positions, so that attention is recognized and the tensor need not be stored.

use super::Importer;
use super::context::MAX_FOLDED;
use super::tensor::Stored;
use frit_ir::ops::attention::Sight;
use frit_ir::ops::{BinaryFn, CompareFn, Constant, Expand, LogicalFn};
use frit_ir::{DType, GraphError, Op, Origin, Region, Shape, Tensor, TensorType, ValueId};

/// Scores with less than this added have no weight; exporters write −1e4, −1e9, the dtype's minimum or −∞.
const EXCLUDED: f64 = -1e4;
/// Elements examined at once.
const CHUNK: usize = 1 << 12;

/// Whether every element is 0 or the same very low number, and some are.
pub(super) fn is_saturated(stored: &Stored) -> bool {
    let mut low = None;
    for bytes in stored.bytes.chunks(CHUNK * stored.ty.dtype.size()) {
        let ty = stored.ty.with_shape([bytes.len() / stored.ty.dtype.size()]);
        let Ok(chunk) = Tensor::from_bytes(ty, bytes) else { return false };
        let Some(values) = chunk.as_floats() else { return false };
        for x in values.iter().filter(|x| **x != 0.0) {
            // NaN is not low.
            if !(*x <= EXCLUDED && *low.get_or_insert(*x) == *x) {
                return false;
            }
        }
    }
    low.is_some()
}

/// A mask with two values, by the positions of the last two axes.
pub(super) struct Positions {
    sight: Sight,
    queries: usize,
    keys: usize,
    /// Value where a query attends to a key, and elsewhere.
    seen: f64,
    hidden: f64,
}

impl Positions {
    /// What the tensor is, if it is such a mask.
    pub(super) fn of(stored: &Stored) -> Option<Positions> {
        let &[.., queries, keys] = stored.ty.shape.dims() else { return None };
        let n = queries * keys;
        if !stored.ty.dtype.is_float() || n == 0 || n > MAX_FOLDED {
            return None;
        }
        let mut planes = stored.bytes.chunks(n * stored.ty.dtype.size());
        let first = planes.next()?;
        if !planes.all(|plane| plane == first) {
            return None;
        }
        let plane = Tensor::from_bytes(stored.ty.with_shape([queries, keys]), first).ok()?;
        let values = plane.as_floats()?;
        // The first query attends to the first key, and not to the last.
        let (seen, hidden) = (values[0], values[keys - 1]);
        if !values.iter().all(|x| *x == seen || *x == hidden) {
            return None;
        }
        let kept: Vec<bool> = values.iter().map(|x| *x == seen).collect();
        let sight = Sight::of_mask(&kept, queries, keys)?;
        Some(Positions { sight, queries, keys, seen, hidden })
    }
}

impl Importer<'_> {
    /// The mask as a function of the positions.
    pub(super) fn mask(&mut self, at: &Positions, ty: &TensorType) -> Result<ValueId, GraphError> {
        let mut add = |op: Op, inputs: &[ValueId]| {
            self.graph.add1(op, inputs, Origin::none(), Region::Forward)
        };
        let leaf = |value: Tensor| Op::Constant(Constant { value });
        let range = |shape: [usize; 2]| {
            let n = shape[0] * shape[1];
            leaf(Tensor::ints(DType::I64, Shape::from(shape), (0..n as i64).collect()))
        };
        let (queries, keys) = (add(range([at.queries, 1]), &[])?, add(range([1, at.keys]), &[])?);
        let ahead = add(Op::Binary(BinaryFn::Sub), &[keys, queries])?;
        let scalar = |x: i64| leaf(Tensor::ints(DType::I64, Shape::from([]), vec![x]));
        let mut conditions = Vec::new();
        if at.sight.causal {
            let none = add(scalar(0), &[])?;
            conditions.push(add(Op::Compare(CompareFn::Le), &[ahead, none])?);
        }
        if let Some(window) = at.sight.window {
            let behind = add(scalar(-(window as i64)), &[])?;
            conditions.push(add(Op::Compare(CompareFn::Gt), &[ahead, behind])?);
            if !at.sight.causal {
                let window = add(scalar(window as i64), &[])?;
                conditions.push(add(Op::Compare(CompareFn::Lt), &[ahead, window])?);
            }
        }
        let mut conditions = conditions.into_iter();
        let mut seen = conditions.next().expect("invariant: a mask hides something");
        for other in conditions {
            seen = add(Op::Logical(LogicalFn::And), &[seen, other])?;
        }
        let value = |x: f64| leaf(Tensor::splat(TensorType::scalar(ty.dtype), x));
        let values = [add(value(at.seen), &[])?, add(value(at.hidden), &[])?];
        let mask = add(Op::Select, &[seen, values[0], values[1]])?;
        add(Op::Expand(Expand { shape: ty.shape.clone() }), &[mask])
    }
}
