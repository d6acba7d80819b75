//! Static value ranges of a forward graph.
//!
//! Interval arithmetic from declared input ranges, weights and norms, with one more bound: the largest Euclidean norm of a vector along
//! the last axis. Normalization bounds it (√C times the scale), and by the Cauchy–Schwarz inequality it bounds a product with a weight
//! much more tightly than the largest element times a row sum does. Values without a bound have an infinite range, from which no lint
//! concludes anything.

mod transfer;

use frit_ir::ops::{Init, Param};
use frit_ir::{Graph, Op, Shape, ValueId};

/// Bounds of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// No element is smaller.
    pub lo: f64,
    /// No element is larger.
    pub hi: f64,
    /// No vector along the last axis has a larger Euclidean norm.
    pub norm: f64,
    /// Whether all elements are integers, whatever the dtype.
    pub whole: bool,
}

impl Range {
    /// Anything.
    pub const UNKNOWN: Range =
        Range { lo: f64::NEG_INFINITY, hi: f64::INFINITY, norm: f64::INFINITY, whole: false };

    /// Elements between two numbers, in vectors of `n`.
    pub fn new(lo: f64, hi: f64, n: usize) -> Range {
        Range { lo, hi, ..Range::UNKNOWN }.tightened(n)
    }

    /// The largest absolute value.
    pub fn max_abs(&self) -> f64 {
        self.lo.abs().max(self.hi.abs())
    }

    /// Tightened, as elements and norm bound each other; NaN is unknown.
    fn tightened(self, n: usize) -> Range {
        let known = |x: f64, unknown: f64| if x.is_nan() { unknown } else { x };
        let norm = known(self.norm, f64::INFINITY);
        let lo = known(self.lo, f64::NEG_INFINITY).max(-norm);
        let hi = known(self.hi, f64::INFINITY).min(norm);
        let all = lo.abs().max(hi.abs()) * (n as f64).sqrt();
        Range { lo, hi, norm: norm.min(known(all, f64::INFINITY)), whole: self.whole }
    }

    /// The smallest range that contains both.
    fn union(self, other: Range) -> Range {
        Range {
            lo: self.lo.min(other.lo),
            hi: self.hi.max(other.hi),
            norm: self.norm.max(other.norm),
            whole: self.whole && other.whole,
        }
    }
}

/// How the values of a parameter are spread: largest sums of absolute values, and norms, of its vectors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Smallest element.
    pub lo: f64,
    /// Largest element.
    pub hi: f64,
    /// Along the last axis: columns of one row of a matrix.
    pub last: Size,
    /// Along the axis before it: rows of one column.
    pub before: Size,
    /// Along all axes but the first: one output channel of a convolution.
    pub inner: Size,
    /// Frobenius norm of a matrix, the last two axes.
    pub matrix: f64,
}

/// The size of the largest vector along some axes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Size {
    /// Sum of absolute values.
    pub sum: f64,
    /// Euclidean norm.
    pub norm: f64,
}

impl Size {
    fn grow(&mut self, other: Size) {
        self.sum = self.sum.max(other.sum);
        self.norm = self.norm.max(other.norm);
    }
}

impl Spread {
    /// Of these values.
    pub fn of(values: &[f32], shape: &Shape) -> Spread {
        let dims = shape.dims();
        let columns = dims.last().copied().unwrap_or(1).max(1);
        let rows = dims.iter().rev().nth(1).copied().unwrap_or(1).max(1);
        let first = dims.first().copied().unwrap_or(1).max(1);
        let (mut lo, mut hi) = (f64::INFINITY, f64::NEG_INFINITY);
        let (mut last, mut before, mut inner) = (Size::default(), Size::default(), Size::default());
        let mut matrix: f64 = 0.0;
        for block in values.chunks(rows * columns) {
            let mut down = vec![(0.0_f64, 0.0_f64); columns];
            let mut total = 0.0;
            for row in block.chunks(columns) {
                let (mut sum, mut squares) = (0.0, 0.0);
                for (x, down) in row.iter().zip(&mut down) {
                    let x = f64::from(*x);
                    (lo, hi) = (lo.min(x), hi.max(x));
                    sum += x.abs();
                    squares += x * x;
                    down.0 += x.abs();
                    down.1 += x * x;
                }
                last.grow(Size { sum, norm: squares.sqrt() });
                total += squares;
            }
            for (sum, squares) in down {
                before.grow(Size { sum, norm: squares.sqrt() });
            }
            matrix = matrix.max(total.sqrt());
        }
        for channel in values.chunks((values.len() / first).max(1)) {
            let wide = || channel.iter().map(|x| f64::from(*x));
            let norm = wide().map(|x| x * x).sum::<f64>().sqrt();
            inner.grow(Size { sum: wide().map(f64::abs).sum(), norm });
        }
        if values.is_empty() {
            (lo, hi) = (0.0, 0.0);
        }
        Spread { lo, hi, last, before, inner, matrix }
    }

    /// Of values that will be drawn; `None` if they are stored. Six deviations bound a normal
    /// distribution well enough for advice, sums and norms of many elements more closely.
    pub fn drawn(init: &Init, shape: &Shape) -> Option<Spread> {
        let (largest, deviation, mean) = match init {
            Init::Weights => return None,
            Init::Constant(x) => (x.abs(), x.abs(), x.abs()),
            Init::Normal { std } => (6.0 * std, *std, 0.8 * std),
            Init::Uniform { bound } => (*bound, bound / 3f64.sqrt(), 0.5 * bound),
        };
        let size = |n: usize| {
            let n = n as f64;
            let slack = 6.0 * n.sqrt();
            let most = Size { sum: n * largest, norm: n.sqrt() * largest };
            Size {
                sum: most.sum.min(n * mean + slack * deviation),
                norm: most.norm.min(deviation * (n.sqrt() + 6.0)),
            }
        };
        let dims = shape.dims();
        let columns = dims.last().copied().unwrap_or(1);
        let rows = dims.iter().rev().nth(1).copied().unwrap_or(1);
        let inner = shape.numel() / dims.first().copied().unwrap_or(1).max(1);
        let lo = if let Init::Constant(x) = init { *x } else { -largest };
        let hi = if let Init::Constant(x) = init { *x } else { largest };
        Some(Spread {
            lo,
            hi,
            last: size(columns),
            before: size(rows),
            inner: size(inner),
            matrix: size(rows * columns).norm,
        })
    }
}

/// Known bounds of the leaves.
pub struct Leaves<'a> {
    /// The declared range of an input.
    pub input: &'a dyn Fn(&str) -> Option<(f64, f64)>,
    /// The values of a parameter, where they are worth looking at.
    pub param: &'a dyn Fn(&Param) -> Option<Spread>,
}

/// The ranges of all values of a graph.
#[derive(Debug)]
pub struct Ranges {
    of: Vec<Range>,
    spread: Vec<Option<Spread>>,
}

impl Ranges {
    /// Propagates bounds from the leaves through the graph.
    pub fn of(graph: &Graph, leaves: &Leaves<'_>) -> Ranges {
        let n = graph.n_values();
        let mut ranges = Ranges { of: vec![Range::UNKNOWN; n], spread: vec![None; n] };
        for (_, node) in graph.nodes() {
            if let Op::Param(param) = &node.op {
                ranges.spread[node.outputs[0].0 as usize] = (leaves.param)(param);
            } else if let (Op::Cast(_), [x]) = (&node.op, &node.inputs[..]) {
                ranges.spread[node.outputs[0].0 as usize] = ranges.spread[x.0 as usize];
            }
            for (i, &v) in node.outputs.iter().enumerate() {
                let ty = graph.ty(v);
                let width = ty.shape.dims().last().copied().unwrap_or(1);
                let mut range = transfer::result(graph, node, i, &ranges, leaves);
                range.whole |= !ty.dtype.is_float();
                ranges.of[v.0 as usize] = range.tightened(width);
            }
        }
        ranges
    }

    /// The range of a value.
    pub fn get(&self, v: ValueId) -> Range {
        self.of[v.0 as usize]
    }

    /// The spread of a parameter, or of a cast of one.
    pub fn spread(&self, v: ValueId) -> Option<Spread> {
        self.spread[v.0 as usize]
    }
}

#[cfg(test)]
mod tests;
