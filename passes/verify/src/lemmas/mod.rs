//! Lemmas: what an element of each result of an operation is, as a term of the elements of its operands.
//!
//! There is one row for each operation that is written out; any other is opaque, the same function of the same operands wherever it
//! occurs. `tests.rs` holds each row against the interpreter.

mod attention;
mod bits;
mod constant;
mod elementwise;
mod layout;
mod reduce;
mod rounding;
#[cfg(test)]
mod tests;

use crate::index::{Ix, Kind, Var};
use crate::integer::is_integer;
use crate::term::{Algebra, Function, TermId, Terms};
use frit_ir::ops::{BinaryFn, Embedding, Linear, PredicateFn, ReduceFn, ScaledCast, UnaryFn};
use frit_ir::{DType, Op, Tensor, TensorType};
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};
use std::rc::Rc;

pub(crate) use constant::{constant, scores_of_values, truths_of_values};
pub(crate) use elementwise::extremum;
pub(crate) use rounding::{ROUND, is_exact, rounded, rounded_by};

/// An operand: its element over its axes.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    pub(crate) term: TermId,
    pub(crate) ty: TensorType,
    /// Its value, where that is known.
    pub(crate) value: Option<Rc<Tensor>>,
}

impl Operand {
    pub(crate) fn sizes(&self) -> &[usize] {
        self.ty.shape.dims()
    }

    /// The element at these indices.
    pub(crate) fn at(&self, t: &mut Terms, at: &[Ix]) -> TermId {
        t.at(self.term, self.sizes(), at)
    }

    /// The element at these indices of the shape that it is broadcast to.
    pub(crate) fn broadcast(&self, t: &mut Terms, at: &[Ix]) -> TermId {
        let skipped = at.len() - self.sizes().len();
        let zero = t.constant_index(0);
        let at: Vec<Ix> = (self.sizes().iter().zip(&at[skipped..]))
            .map(|(n, ix)| if *n == 1 { zero } else { *ix })
            .collect();
        self.at(t, &at)
    }
}

/// The results of operations that were read, by a hash of what they are of.
#[derive(Default)]
pub(crate) struct Results(FxHashMap<u64, Vec<Read>>);

/// An operation that was read: its operands, the types of its results, and these.
struct Read {
    op: Op,
    operands: Vec<(TermId, TensorType)>,
    types: Vec<TensorType>,
    results: Vec<TermId>,
}

impl Read {
    fn is(&self, op: &Op, operands: &[Operand], types: &[&TensorType]) -> bool {
        self.op == *op
            && self.types.iter().eq(types.iter().copied())
            && self.operands.len() == operands.len()
            && self.operands.iter().zip(operands).all(|(a, b)| a.0 == b.term && a.1 == b.ty)
    }
}

/// The results of an operation, over their axes.
pub(crate) fn results(
    t: &mut Terms,
    op: &Op,
    operands: &[Operand],
    types: &[&TensorType],
) -> Vec<TermId> {
    if t.before_gradients && *op == Op::Unary(UnaryFn::Detach) {
        let function = Function { name: "detach", attributes: [0; 2] };
        return vec![t.function(function, &[operands[0].term])];
    }
    if t.before_gradients && matches!(op, Op::CustomGradient(_)) {
        return layout::opaque(t, op, operands, types);
    }
    if t.before_gradients
        && let Op::Embedding(Embedding { padding_idx: Some(row) }) = op
    {
        let read = Op::Embedding(Embedding { padding_idx: None });
        let element = results(t, &read, operands, types)[0];
        let axes = t.axes(types[0].shape.dims());
        let index = operands[1].at(t, &axes[..operands[1].sizes().len()]);
        let function = Function { name: "without_gradient_of_row", attributes: [*row as u64, 0] };
        return vec![t.function(function, &[element, index])];
    }
    // Values may be large, and operations on them are rare.
    if operands.iter().any(|x| x.value.is_some()) {
        return new_results(t, op, operands, types);
    }
    let mut hasher = FxHasher::default();
    op.hash(&mut hasher);
    operands.iter().for_each(|x| (x.term, &x.ty).hash(&mut hasher));
    types.hash(&mut hasher);
    let key = hasher.finish();
    let known =
        t.results.0.get(&key).and_then(|all| all.iter().find(|r| r.is(op, operands, types)));
    if let Some(known) = known {
        return known.results.clone();
    }
    let results = new_results(t, op, operands, types);
    let read = Read {
        op: op.clone(),
        operands: operands.iter().map(|x| (x.term, x.ty.clone())).collect(),
        types: types.iter().map(|ty| (*ty).clone()).collect(),
        results: results.clone(),
    };
    t.results.0.entry(key).or_default().push(read);
    results
}

fn new_results(t: &mut Terms, op: &Op, operands: &[Operand], types: &[&TensorType]) -> Vec<TermId> {
    // Terms of values have no variables of this kind, so their names may be used again, and what is known of them with it.
    t.next_fresh = 0;
    // What is said of an element of a value without elements does not matter.
    if types.iter().all(|ty| ty.shape.numel() == 0) {
        return vec![t.constant(0.0); types.len()];
    }
    let mut exact = match t.algebra {
        Algebra::Bits => bits::results(t, op, operands, types),
        _ => exact(t, op, operands, types),
    };
    let is_large = |(y, ty): (&TermId, &&TensorType)| is_integer(ty.dtype) && t.is_large(*y);
    if t.algebra != Algebra::Bits && exact.iter().zip(types).any(is_large) && !op.is_layout() {
        let axes = t.axes(types[0].shape.dims());
        exact = bits::without_laws(t, op, operands, types, &axes);
    }
    let is_free = |v: &Var| v.kind == Kind::Fresh;
    debug_assert!(
        !exact.iter().any(|y| t.vars_of(*y).iter().any(is_free)),
        "{op:?} binds its variables"
    );
    if t.algebra != Algebra::Rounded || rounding::is_exact(op) {
        return exact;
    }
    exact.into_iter().zip(types).map(|(term, ty)| rounding::rounded(t, term, ty.dtype)).collect()
}

/// An element cast between two dtypes and multiplied by a factor, where that is rounded.
pub(crate) fn scaled_cast(
    t: &mut Terms,
    x: TermId,
    (from, to): (DType, DType),
    factor: f64,
) -> TermId {
    if t.algebra == Algebra::Bits {
        return t.operation(&Op::ScaledCast(ScaledCast { to, factor }), &[from], &[x]);
    }
    let scaled = t.scale(x, factor);
    if t.algebra == Algebra::Rounded { rounded(t, scaled, to) } else { scaled }
}

/// The results before they are rounded to their dtypes.
fn exact(t: &mut Terms, op: &Op, operands: &[Operand], types: &[&TensorType]) -> Vec<TermId> {
    let one = |term: TermId| vec![term];
    let axes = types.first().map_or(vec![], |ty| t.axes(ty.shape.dims()));
    if types.first().is_some_and(|ty| wraps(op, ty.dtype)) {
        return bits::without_laws(t, op, operands, types, &axes);
    }
    match op {
        Op::Cast(cast) => one(elementwise::cast(t, &operands[0], cast.to)),
        Op::Unary(f) => one(elementwise::unary(t, *f, operands[0].term)),
        // No value is a NaN.
        Op::Predicate(PredicateFn::IsNan) => one(t.constant(0.0)),
        Op::Predicate(f) => one(t.apply(f.name(), &[operands[0].term])),
        Op::Clip(clip) => one(elementwise::clip(t, clip, operands[0].term)),
        Op::Binary(f) => {
            let [a, b] = [0, 1].map(|k| operands[k].broadcast(t, &axes));
            one(elementwise::binary(t, *f, a, b, types[0].dtype))
        }
        Op::Compare(f) => {
            let [a, b] = [0, 1].map(|k| operands[k].broadcast(t, &axes));
            one(elementwise::compare(t, *f, a, b))
        }
        Op::Logical(f) => {
            let [a, b] = [0, 1].map(|k| operands[k].broadcast(t, &axes));
            one(elementwise::logical(t, *f, a, b))
        }
        Op::Select => {
            let [c, a, b] = [0, 1, 2].map(|k| operands[k].broadcast(t, &axes));
            one(t.select(c, a, b))
        }
        Op::EnterPrecision(_) | Op::LeavePrecision(_) => one(operands[0].term),
        Op::CustomGradient(op) => operands[..op.results].iter().map(|y| y.term).collect(),
        Op::ScaledCast(op) => one(t.scale(operands[0].term, op.factor)),

        Op::Reshape(_) => one(layout::reshape(t, &operands[0], types[0].shape.dims())),
        Op::Transpose(op) => one(layout::transpose(t, &operands[0], &op.perm, &axes)),
        Op::Expand(_) => one(operands[0].broadcast(t, &axes)),
        Op::Slice(op) => one(layout::slice(t, &operands[0], op, &axes)),
        Op::Concat(op) => one(layout::concat(t, operands, op.axis, &axes)),
        Op::Split(op) => layout::split(t, &operands[0], op),
        Op::Pad(op) => one(layout::pad(t, &operands[0], op, &axes)),
        Op::Embedding(_) => one(layout::gather(t, operands, 0, &axes)),
        Op::Gather(op) => one(layout::gather(t, operands, op.axis, &axes)),
        Op::EmbeddingGrad(_) => one(layout::embedding_grad(t, operands, &axes)),
        Op::GatherNd(op) if operands[1].value.is_some() => {
            one(layout::gather_nd(t, operands, op.batch_dims, &axes))
        }
        Op::GatherElements(op) => one(layout::gather_elements(t, operands, op.axis, &axes)),

        // A mean of integers is rounded.
        Op::Reduce(op) if op.f != ReduceFn::Mean || types[0].dtype.is_float() => {
            one(reduce::reduce(t, &operands[0], op))
        }
        Op::SumTo(op) => one(reduce::sum_to(t, &operands[0], op.shape.dims())),
        Op::MatMul(op) => one(reduce::matmul(t, op, operands, &axes)),
        Op::Softmax(op) => one(reduce::softmax(t, &operands[0], op.axis, &axes)),
        Op::LogSoftmax(op) => {
            let softmax = reduce::softmax(t, &operands[0], op.axis, &axes);
            one(t.log(softmax))
        }
        Op::LayerNorm(op) => reduce::layer_norm(t, op, operands, &axes),
        Op::RmsNorm(op) => reduce::rms_norm(t, op, operands, &axes),
        Op::CrossEntropy(op) => reduce::cross_entropy(t, op, operands, &axes),
        Op::CrossEntropyGrad(op) => one(reduce::cross_entropy_grad(t, op, operands, &axes)),
        Op::SoftmaxGrad(op) => one(reduce::softmax_grad(t, operands, op.axis, &axes)),
        Op::LogSoftmaxGrad(op) => one(reduce::log_softmax_grad(t, operands, op.axis, &axes)),
        Op::Attention(op) => attention::attention(t, op, operands, &axes),
        Op::GradStats(op) => one(reduce::grad_stats(t, *op, operands, axes[0])),
        Op::Unscale(_) | Op::RoundStats => {
            let parts = layout::elements(t, &operands[0]);
            layout::opaque(t, op, &[parts, operands[1..].to_vec()].concat(), types)
        }
        Op::LossScale(op) => one(t.scale(operands[0].term, op.factor)),
        _ => layout::opaque(t, op, operands, types),
    }
}

/// Whether what an operation computes of integers is not what it would be of real numbers: results are taken to be small only where
/// numbers of 64 bits are added and multiplied, as indices are.
fn wraps(op: &Op, result: DType) -> bool {
    if result.is_float() || result == DType::Bool {
        return false;
    }
    let moves = op.is_layout() || rounding::is_exact(op) && !matches!(op, Op::Unary(_));
    let of_indices = matches!(
        op,
        Op::Binary(BinaryFn::Add | BinaryFn::Sub | BinaryFn::Mul) | Op::Unary(UnaryFn::Neg)
    );
    let is_pointwise = matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Logical(_) | Op::Clip(_));
    !moves
        && match result {
            DType::I64 => is_pointwise && !of_indices,
            _ => !matches!(op, Op::Cast(_)),
        }
}

/// The operation without the dtypes of its results.
pub(crate) fn without_dtypes(op: &Op) -> Op {
    let mut op = op.clone();
    match &mut op {
        Op::EmbeddingGrad(g) => g.dtype = DType::F32,
        Op::ReduceScatter(r) => r.dtype = None,
        Op::AllReduce(r) => r.dtype = None,
        Op::Conv(conv) => conv.out = None,
        Op::ConvGradInput(conv) => conv.out = None,
        Op::ConvGradWeight(conv) => conv.out = None,
        _ => {}
    }
    op
}

/// The operands that a result is linear in together, if any, by index.
pub(crate) fn linear_in(op: &Op, operands: usize) -> Vec<Vec<usize>> {
    match op.linear() {
        Linear::In(terms) => vec![terms.iter().copied().filter(|k| *k < operands).collect()],
        Linear::InAll => vec![(0..operands).collect()],
        Linear::InEach => (0..operands).map(|k| vec![k]).collect(),
        Linear::No => vec![],
    }
}
