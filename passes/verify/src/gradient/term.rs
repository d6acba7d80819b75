//! Values as terms: formulas of lemmas, written into the graph as they are evaluated.
//!
//! An operation whose operands must have one float type gets them in the widest of theirs: over the real numbers a cast between
//! floats is the identity. A lemma takes shapes from the values of the forward graph alone, so that an operation which is
//! refused ends in an error and not in another one.

use frit_ir::ops::{
    BinaryFn, Cast, CompareFn, Constant, Expand, LogicalFn, Op, Pad, Reshape, Slice, SumTo,
    Transpose, UnaryFn,
};
use frit_ir::{DType, Graph, GraphError, Origin, Region, Shape, Tensor, TensorType, ValueId};
use std::cell::{Ref, RefCell};
use std::ops::{Add, Div, Mul, Neg, Sub};

/// The graph that is written.
pub(super) struct Writer {
    graph: RefCell<Graph>,
    /// Origin of what is written.
    origin: RefCell<Origin>,
    /// The first operation that was refused.
    refused: RefCell<Option<GraphError>>,
}

impl Writer {
    /// Writes after the nodes of this graph.
    pub(super) fn new(graph: &Graph) -> Self {
        let graph = RefCell::new(graph.clone());
        Writer { graph, origin: RefCell::default(), refused: RefCell::default() }
    }

    /// What follows comes from here.
    pub(super) fn at(&self, origin: &Origin) {
        self.origin.replace(origin.clone());
    }

    /// Why an operation was refused, if one was.
    pub(super) fn refused(&self) -> Option<Ref<'_, GraphError>> {
        Ref::filter_map(self.refused.borrow(), Option::as_ref).ok()
    }

    pub(super) fn into_graph(self) -> Graph {
        self.graph.into_inner()
    }

    pub(super) fn term(&self, id: ValueId) -> Term<'_> {
        Term { writer: self, id }
    }

    /// The results of an operation. Of one that is refused, stand-ins.
    pub(super) fn apply(&self, op: Op, operands: &[Term<'_>]) -> Vec<Term<'_>> {
        let operands = self.alike(&op, operands);
        let origin = self.origin.borrow().clone();
        let added = self.graph.borrow_mut().add(op, &operands, origin, Region::Backward);
        let results = added.unwrap_or_else(|error| {
            self.refused.borrow_mut().get_or_insert(error);
            vec![operands.first().copied().unwrap_or(ValueId(0)); 4]
        });
        results.into_iter().map(|id| self.term(id)).collect()
    }

    /// Operands, those that must have one type cast to the widest of theirs.
    fn alike(&self, op: &Op, operands: &[Term<'_>]) -> Vec<ValueId> {
        let is_one_of = |i: usize| match op {
            Op::Binary(_) | Op::Compare(_) | Op::Concat(_) | Op::MatMul(_) => true,
            Op::Conv(_) | Op::ConvGradInput(_) | Op::ConvGradWeight(_) => true,
            Op::Select => i > 0,
            Op::ScatterElements(_) | Op::ScatterNd(_) => i != 1,
            _ => false,
        };
        let types = operands.iter().map(|x| x.dtype()).enumerate();
        let floats = types.filter(|(i, dtype)| is_one_of(*i) && dtype.is_float());
        let widest = floats.map(|(_, dtype)| dtype).max_by_key(|dtype| dtype.mantissa_bits());
        let cast = |(i, x): (usize, &Term<'_>)| match widest {
            Some(widest) if is_one_of(i) => self.term(x.id).cast(widest).id,
            _ => x.id,
        };
        operands.iter().enumerate().map(cast).collect()
    }
}

/// A value of the graph that is written.
#[derive(Clone, Copy)]
pub(super) struct Term<'w> {
    writer: &'w Writer,
    pub(super) id: ValueId,
}

impl<'w> Term<'w> {
    /// Another value of the graph.
    pub(super) fn beside(self, id: ValueId) -> Term<'w> {
        self.writer.term(id)
    }

    pub(super) fn ty(self) -> TensorType {
        self.writer.graph.borrow().ty(self.id).clone()
    }

    pub(super) fn dtype(self) -> DType {
        self.writer.graph.borrow().ty(self.id).dtype
    }

    pub(super) fn dims(self) -> Vec<usize> {
        self.ty().shape.0
    }

    /// The value of every element, if it is a constant that has one.
    pub(super) fn known(self) -> Option<f64> {
        self.writer.graph.borrow().constant(self.id).and_then(Tensor::as_splat)
    }

    /// The results of an operation on terms, of which there is at least one.
    pub(super) fn all(op: Op, operands: &[Term<'w>]) -> Vec<Term<'w>> {
        operands[0].writer.apply(op, operands)
    }

    /// The first result.
    pub(super) fn of(op: Op, operands: &[Term<'w>]) -> Term<'w> {
        Term::all(op, operands)[0]
    }

    /// A constant without axes, of this element type, or f32 if that does not hold it.
    pub(super) fn number(self, value: f64) -> Term<'w> {
        let own = self.dtype();
        let is_held = !own.is_low_precision() || own.round(value) == value;
        let dtype = if is_held { own } else { DType::F32 };
        self.constant(Tensor::splat(TensorType::scalar(dtype), value))
    }

    pub(super) fn constant(self, value: Tensor) -> Term<'w> {
        self.writer.apply(Op::Constant(Constant { value }), &[])[0]
    }

    /// Zeros of this element type.
    pub(super) fn zeros(self, shape: impl Into<Shape>) -> Term<'w> {
        self.number(0.0).expand(shape)
    }

    pub(super) fn unary(self, f: UnaryFn) -> Term<'w> {
        Term::of(Op::Unary(f), &[self])
    }

    pub(super) fn binary(self, f: BinaryFn, other: Term<'w>) -> Term<'w> {
        Term::of(Op::Binary(f), &[self, other])
    }

    pub(super) fn compare(self, f: CompareFn, other: Term<'w>) -> Term<'w> {
        Term::of(Op::Compare(f), &[self, other])
    }

    pub(super) fn and(self, other: Term<'w>) -> Term<'w> {
        Term::of(Op::Logical(LogicalFn::And), &[self, other])
    }

    /// `yes` where this holds, else `no`.
    pub(super) fn choose(self, yes: Term<'w>, no: Term<'w>) -> Term<'w> {
        Term::of(Op::Select, &[self, yes, no])
    }

    pub(super) fn cast(self, to: DType) -> Term<'w> {
        if self.dtype() == to { self } else { Term::of(Op::Cast(Cast { to }), &[self]) }
    }

    pub(super) fn reshape(self, shape: impl Into<Shape>) -> Term<'w> {
        let shape = shape.into();
        if self.ty().shape == shape {
            return self;
        }
        Term::of(Op::Reshape(Reshape { shape }), &[self])
    }

    pub(super) fn expand(self, shape: impl Into<Shape>) -> Term<'w> {
        let shape = shape.into();
        if self.ty().shape == shape {
            return self;
        }
        Term::of(Op::Expand(Expand { shape }), &[self])
    }

    /// The sum over the axes along which a value of this shape is broadcast to the term's.
    pub(super) fn sum_to(self, shape: impl Into<Shape>) -> Term<'w> {
        let shape = shape.into();
        if self.ty().shape == shape {
            return self;
        }
        Term::of(Op::SumTo(SumTo { shape, dtype: None }), &[self])
    }

    pub(super) fn transpose(self, perm: Vec<usize>) -> Term<'w> {
        Term::of(Op::Transpose(Transpose { perm }), &[self])
    }

    /// The box of this size whose first element is at `start`.
    pub(super) fn part(self, start: Vec<usize>, size: Vec<usize>) -> Term<'w> {
        let step = vec![1; size.len()];
        Term::of(Op::Slice(Slice { start, size, step }), &[self])
    }

    /// This inside zeros.
    pub(super) fn padded(self, low: Vec<usize>, high: Vec<usize>) -> Term<'w> {
        if low.iter().chain(&high).all(|n| *n == 0) {
            return self;
        }
        Term::of(Op::Pad(Pad { low, high, value: 0.0 }), &[self])
    }
}

macro_rules! arithmetic {
    ($($operator:ident, $method:ident;)*) => {$(
        impl<'w> $operator for Term<'w> {
            type Output = Term<'w>;

            fn $method(self, other: Term<'w>) -> Term<'w> {
                self.binary(BinaryFn::$operator, other)
            }
        }

        impl<'w> $operator<f64> for Term<'w> {
            type Output = Term<'w>;

            fn $method(self, number: f64) -> Term<'w> {
                self.binary(BinaryFn::$operator, self.number(number))
            }
        }
    )*};
}

arithmetic! {
    Add, add;
    Sub, sub;
    Mul, mul;
    Div, div;
}

impl<'w> Neg for Term<'w> {
    type Output = Term<'w>;

    fn neg(self) -> Term<'w> {
        self.unary(UnaryFn::Neg)
    }
}
