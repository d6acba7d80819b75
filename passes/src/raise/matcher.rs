//! Small combinators that recognize expressions by structure, never by name.
//!
//! Every function takes a value and returns its parts if it has the requested form. Scalars are constants of equal elements; they are
//! compared with a relative tolerance, because exporters round them to the model's dtype.

use frit_ir::ops::{BinaryFn, Cast, ReduceFn, UnaryFn};
use frit_ir::{DType, Graph, NodeId, Op, ValueId};

/// Relative distance within which two scalars are the same; exporters print some with 4 digits less
/// than f32 holds.
const TOLERANCE: f64 = 1e-5;

/// Maximum depth to which a product is decomposed.
const DEPTH: usize = 4;

/// A graph with the users of its values.
pub(super) struct Matcher<'a> {
    /// The graph.
    pub graph: &'a Graph,
    users: Vec<Vec<NodeId>>,
    outputs: Vec<ValueId>,
}

/// A product: a scalar times values.
#[derive(Clone, Debug)]
pub(super) struct Product {
    /// The scalar.
    pub scalar: f64,
    /// The other factors.
    pub factors: Vec<ValueId>,
}

impl Product {
    /// Whether this is `scalar · a · b …` in any order.
    pub(super) fn is(&self, scalar: f64, factors: &[ValueId]) -> bool {
        let (mut own, mut other) = (self.factors.clone(), factors.to_vec());
        own.sort_unstable();
        other.sort_unstable();
        near(self.scalar, scalar) && own == other
    }
}

/// Whether two scalars are the same.
pub(super) fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= TOLERANCE * a.abs().max(b.abs())
}

impl<'a> Matcher<'a> {
    /// A matcher for this graph.
    pub(super) fn new(graph: &'a Graph) -> Self {
        let outputs = graph.outputs.iter().map(|o| o.value).collect();
        Matcher { graph, users: graph.users(), outputs }
    }

    /// How often the value is used, as operand or output.
    pub(super) fn uses(&self, v: ValueId) -> usize {
        let outputs = self.outputs.iter().filter(|o| **o == v).count();
        self.users[v.0 as usize].len() + outputs
    }

    /// The operand of the unary function `f`.
    pub(super) fn unary(&self, v: ValueId, f: UnaryFn) -> Option<ValueId> {
        let node = self.graph.def(v);
        (node.op == Op::Unary(f)).then(|| node.inputs[0])
    }

    /// The operands of the binary function `f`.
    pub(super) fn binary(&self, v: ValueId, f: BinaryFn) -> Option<[ValueId; 2]> {
        let node = self.graph.def(v);
        (node.op == Op::Binary(f)).then(|| [node.inputs[0], node.inputs[1]])
    }

    /// The first part of a commutative `f` that `part` recognizes, with the other operand.
    pub(super) fn either<T>(
        &self,
        v: ValueId,
        f: BinaryFn,
        part: impl Fn(ValueId) -> Option<T>,
    ) -> Option<(T, ValueId)> {
        let [a, b] = self.binary(v, f)?;
        part(a).map(|t| (t, b)).or_else(|| part(b).map(|t| (t, a)))
    }

    /// The value of a constant of equal elements, behind broadcasts, reshapes and casts.
    pub(super) fn scalar(&self, mut v: ValueId) -> Option<f64> {
        let mut casts = Vec::new();
        loop {
            let node = self.graph.def(v);
            match &node.op {
                Op::Constant(c) => {
                    let value = c.value.as_splat()?;
                    return Some(casts.iter().rev().fold(value, |x, to: &DType| to.round(x)));
                }
                Op::Cast(Cast { to }) => casts.push(*to),
                Op::Expand(_) | Op::Reshape(_) => {}
                _ => return None,
            }
            v = node.inputs[0];
        }
    }

    /// Whether the value is this scalar.
    pub(super) fn is_scalar(&self, v: ValueId, expected: f64) -> Option<()> {
        self.scalar(v).filter(|c| near(*c, expected)).map(drop)
    }

    /// `x + c`: x and the scalar.
    pub(super) fn plus_scalar(&self, v: ValueId) -> Option<(ValueId, f64)> {
        self.either(v, BinaryFn::Add, |a| self.scalar(a)).map(|(c, x)| (x, c))
    }

    /// Every way to read the value as a product, down to a small depth; the shortest first.
    pub(super) fn products(&self, v: ValueId) -> Vec<Product> {
        self.products_to(v, DEPTH)
    }

    fn products_to(&self, v: ValueId, depth: usize) -> Vec<Product> {
        if let Some(scalar) = self.scalar(v) {
            return vec![Product { scalar, factors: Vec::new() }];
        }
        let mut all = vec![Product { scalar: 1.0, factors: vec![v] }];
        if depth == 0 {
            return all;
        }
        if let Some([a, b]) = self.binary(v, BinaryFn::Mul) {
            let right = self.products_to(b, depth - 1);
            for left in self.products_to(a, depth - 1) {
                for right in &right {
                    let scalar = left.scalar * right.scalar;
                    let factors = left.factors.iter().chain(&right.factors).copied().collect();
                    all.push(Product { scalar, factors });
                }
            }
        }
        let quotient = self.binary(v, BinaryFn::Div);
        if let Some((a, c)) = quotient.and_then(|[a, b]| Some((a, self.scalar(b)?))) {
            let numerators = self.products_to(a, depth - 1).into_iter();
            all.extend(numerators.map(|p| Product { scalar: p.scalar / c, ..p }));
        }
        if let Some(a) = self.unary(v, UnaryFn::Neg) {
            let operands = self.products_to(a, depth - 1).into_iter();
            all.extend(operands.map(|p| Product { scalar: -p.scalar, ..p }));
        }
        all
    }

    /// `c · x`: x without the scalar factors around it, and their product.
    pub(super) fn scaled(&self, v: ValueId) -> (ValueId, f64) {
        let (mut x, mut scale) = (v, 1.0);
        loop {
            let step = self
                .either(x, BinaryFn::Mul, |a| self.scalar(a))
                .map(|(c, rest)| (rest, c))
                .or_else(|| {
                    let [a, b] = self.binary(x, BinaryFn::Div)?;
                    Some((a, 1.0 / self.scalar(b)?))
                })
                .filter(|(rest, _)| self.graph.ty(*rest) == self.graph.ty(x));
            let Some((rest, c)) = step else { return (x, scale) };
            x = rest;
            scale *= c;
        }
    }

    /// `x²`, as a power or a product.
    pub(super) fn square(&self, v: ValueId) -> Option<ValueId> {
        if let Some([x, y]) = self.binary(v, BinaryFn::Mul).filter(|[x, y]| x == y) {
            debug_assert_eq!(x, y);
            return Some(x);
        }
        let [x, exponent] = self.binary(v, BinaryFn::Pow)?;
        self.is_scalar(exponent, 2.0)?;
        Some(x)
    }

    /// `x³`, as a power or a product.
    pub(super) fn is_cube(&self, product: &Product, x: ValueId) -> bool {
        match product.factors[..] {
            [a, b, c] => a == x && b == x && c == x,
            [a, b] if b == x => self.square(a) == Some(x),
            [a, b] if a == x => self.square(b) == Some(x),
            [p] => self
                .binary(p, BinaryFn::Pow)
                .is_some_and(|[a, e]| a == x && self.is_scalar(e, 3.0).is_some()),
            _ => false,
        }
    }

    /// `n / √r`, in any of its spellings: `n` (`None` for 1) and `r`.
    pub(super) fn over_root(&self, v: ValueId) -> Option<(Option<ValueId>, ValueId)> {
        if let Some(r) = self.one_over_root(v) {
            return Some((None, r));
        }
        if let Some([n, d]) = self.binary(v, BinaryFn::Div) {
            return self.root(d).map(|r| (Some(n), r));
        }
        let (r, n) = self.either(v, BinaryFn::Mul, |a| self.one_over_root(a))?;
        Some((Some(n), r))
    }

    /// `1 / √r`, in any of its spellings: `r`.
    fn one_over_root(&self, v: ValueId) -> Option<ValueId> {
        if let Some(r) = self.unary(v, UnaryFn::Rsqrt) {
            return Some(r);
        }
        if let Some(r) = self.unary(v, UnaryFn::Reciprocal).and_then(|s| self.root(s)) {
            return Some(r);
        }
        if let Some([n, d]) = self.binary(v, BinaryFn::Div) {
            return self.is_scalar(n, 1.0).and_then(|()| self.root(d));
        }
        let [r, e] = self.binary(v, BinaryFn::Pow)?;
        self.is_scalar(e, -0.5).map(|()| r)
    }
    fn root(&self, v: ValueId) -> Option<ValueId> {
        if let Some(r) = self.unary(v, UnaryFn::Sqrt) {
            return Some(r);
        }
        let [r, e] = self.binary(v, BinaryFn::Pow)?;
        self.is_scalar(e, 0.5).map(|()| r)
    }

    /// The reduction `f` of a value over trailing axes, with the first of them. The axes must be kept
    /// with size 1, or be put back by a reshape, so that the result broadcasts against the operand.
    pub(super) fn trailing(&self, v: ValueId, f: ReduceFn) -> Option<(ValueId, usize)> {
        let mut node = self.graph.def(v);
        if let Op::Reshape(_) = node.op {
            node = self.graph.def(node.inputs[0]);
        }
        let Op::Reduce(op) = &node.op else { return None };
        let x = node.inputs[0];
        let from = &self.graph.ty(x).shape;
        let axis = *op.axes.first()?;
        let mut kept = from.0[..axis].to_vec();
        kept.resize(from.rank(), 1);
        let fits = op.f == f
            && op.axes.iter().copied().eq(axis..from.rank())
            && self.graph.ty(v).shape.0 == kept;
        fits.then_some((x, axis))
    }
}
