//! Range transfer functions: an operation's result range from its operand ranges.

use super::{Leaves, Range, Ranges};
use frit_ir::ops::{BinaryFn, MatMul, RandomFn, ReduceFn, UnaryFn};
use frit_ir::{Graph, Node, Op, Tensor, ValueId};

/// The range of result `i` of a node.
pub(super) fn result(
    graph: &Graph,
    node: &Node,
    i: usize,
    ranges: &Ranges,
    leaves: &Leaves<'_>,
) -> Range {
    let of = |k: usize| ranges.get(node.inputs[k]);
    let width = |v: ValueId| graph.ty(v).shape.dims().last().copied().unwrap_or(1);
    let out = node.outputs[i];
    let n = width(out);
    let free = |r: Range| Range { norm: f64::INFINITY, ..r };
    match &node.op {
        Op::Input(input) => {
            let declared = (leaves.input)(&input.name);
            declared.map_or(Range::UNKNOWN, |(lo, hi)| Range::new(lo, hi, n))
        }
        Op::Param(_) => ranges.spread(out).map_or(Range::UNKNOWN, |s| Range {
            lo: s.lo,
            hi: s.hi,
            norm: s.last.norm,
            whole: false,
        }),
        Op::Constant(c) => constant(&c.value, n),
        Op::Unary(f) => unary(*f, of(0)),
        Op::Predicate(_) | Op::Compare(_) | Op::Logical(_) => Range::new(0.0, 1.0, n),
        Op::Cast(c) if c.to.is_float() => of(0),
        Op::EnterPrecision(_) | Op::LeavePrecision(_) => of(0),
        Op::CustomGradient(_) => of(i),
        Op::Cast(_) => Range { lo: of(0).lo.floor(), hi: of(0).hi.ceil(), ..of(0) },
        Op::Clip(c) => {
            let (lo, hi) = (c.min.unwrap_or(f64::NEG_INFINITY), c.max.unwrap_or(f64::INFINITY));
            let x = free(of(0));
            // Where the least is above the largest, all become the largest.
            Range { lo: x.lo.max(lo).min(hi), hi: x.hi.max(lo).min(hi), whole: false, ..x }
        }
        Op::Binary(f) => {
            // An operand of one column is repeated along the last axis.
            let repeated = |k: usize| {
                let r = of(k);
                if width(node.inputs[k]) == n { r } else { free(r).tightened(n) }
            };
            let (a, b) = (repeated(0), repeated(1));
            let square = node.inputs[0] == node.inputs[1];
            if square && *f == BinaryFn::Mul { power(a, 2.0) } else { binary(*f, a, b) }
        }
        Op::Select => free(of(1).union(of(2))),
        Op::Reshape(_) => {
            let from = width(node.inputs[0]).max(1);
            let x = of(0);
            match (from % n.max(1), n % from) {
                (0, _) => x,
                (_, 0) => Range { norm: x.norm * ((n / from) as f64).sqrt(), ..x },
                _ => free(x),
            }
        }
        Op::Transpose(t) => {
            let last = t.perm.len().checked_sub(1);
            if last.is_some_and(|l| t.perm[l] == l) { of(0) } else { free(of(0)) }
        }
        Op::Expand(_) if width(node.inputs[0]) == n => of(0),
        Op::Expand(_) | Op::GatherElements(_) | Op::GatherNd(_) => free(of(0)),
        Op::Slice(_) | Op::Split(_) | Op::Embedding(_) => of(0),
        Op::Gather(g) => {
            let rank = graph.ty(node.inputs[0]).shape.rank();
            if g.axis + 1 < rank { of(0) } else { free(of(0)) }
        }
        Op::Concat(c) => {
            let all = node.inputs.iter().map(|v| ranges.get(*v));
            let squares: f64 = all.clone().map(|r| r.norm * r.norm).sum();
            let range = all.reduce(Range::union).unwrap_or(Range::UNKNOWN);
            let along = c.axis + 1 == graph.ty(out).shape.rank();
            if along { Range { norm: squares.sqrt(), ..range } } else { range }
        }
        Op::Pad(p) => {
            let (x, v) = (of(0), p.value);
            let norm = if v == 0.0 { x.norm } else { f64::INFINITY };
            Range { lo: x.lo.min(v), hi: x.hi.max(v), norm, whole: x.whole && v.fract() == 0.0 }
        }
        Op::TopK(_) if i == 0 => free(of(0)),
        Op::TopK(_) | Op::ArgReduce(_) => {
            let longest = graph.ty(node.inputs[0]).shape.dims().iter().max().copied().unwrap_or(1);
            Range::new(0.0, longest.saturating_sub(1) as f64, n)
        }
        Op::Random(op) => {
            // The longest radius of Box and Muller's transform is √(64 ln 2).
            let (low, high) = if op.f == RandomFn::Uniform { (0.0, 1.0) } else { (-6.67, 6.67) };
            Range::new(op.offset + op.scale * low, op.offset + op.scale * high, n)
        }
        Op::CumSum(op) => {
            let terms = graph.ty(node.inputs[0]).shape.0[op.axis] as f64;
            sum(of(0), terms)
        }
        Op::Reduce(op) => {
            let (x, y) = (graph.ty(node.inputs[0]).shape.numel(), graph.ty(out).shape.numel());
            let terms = (x / y.max(1)) as f64;
            match op.f {
                ReduceFn::Sum => sum(of(0), terms),
                ReduceFn::Mean => Range { whole: false, ..free(of(0)) },
                ReduceFn::Max | ReduceFn::Min => free(of(0)),
                ReduceFn::Prod => Range::UNKNOWN,
            }
        }
        Op::SumTo(_) => {
            let (x, y) = (graph.ty(node.inputs[0]).shape.numel(), graph.ty(out).shape.numel());
            sum(of(0), (x / y.max(1)) as f64)
        }
        Op::MatMul(op) => matmul(graph, node, op, ranges),
        Op::Conv(_) => {
            let (x, w) = (of(0), of(1));
            let taps = graph.ty(node.inputs[1]).shape.0[1..].iter().product::<usize>() as f64;
            let weight = ranges.spread(node.inputs[1]).map_or(taps * w.max_abs(), |s| s.inner.sum);
            symmetric(x.max_abs() * weight)
        }
        Op::MaxPool(_) => free(of(0)),
        Op::SumPool(op) => sum(of(0), op.taps.iter().product::<usize>() as f64),
        Op::Softmax(op) => {
            let along = op.axis + 1 == graph.ty(out).shape.rank();
            let norm = if along { 1.0 } else { f64::INFINITY };
            Range { lo: 0.0, hi: 1.0, norm, whole: false }
        }
        Op::LogSoftmax(_) => Range { hi: 0.0, ..Range::UNKNOWN },
        Op::LayerNorm(op) if i == 0 => normalized(graph, node, op.axis, ranges, of(0)),
        Op::RmsNorm(op) if i == 0 => normalized(graph, node, op.axis, ranges, of(0)),
        Op::LayerNorm(_) if i == 1 => free(of(0)),
        Op::LayerNorm(op) => Range::new(0.0, op.eps.sqrt().recip(), n),
        Op::RmsNorm(op) => Range::new(0.0, op.eps.sqrt().recip(), n),
        Op::BatchNorm(_) if i == 0 => {
            let channels = graph.ty(node.inputs[1]).shape.numel().max(1);
            let each = (graph.ty(out).shape.numel() / channels) as f64;
            let (scale, bias) = (of(1).max_abs(), of(2).max_abs());
            symmetric(each.sqrt() * scale + bias)
        }
        // A mean of values, or zero where everything is masked; with dropout, of those that are kept.
        Op::Attention(op) if i == 0 => {
            let (v, most) = (of(2), op.keep.map_or(1.0, f64::recip));
            let (lo, hi) = (v.lo.min(0.0) * most, v.hi.max(0.0) * most);
            Range { lo, hi, norm: v.norm * most, whole: false }
        }
        Op::CrossEntropy(_) if i == 0 => Range { lo: 0.0, ..Range::UNKNOWN },
        _ => Range::UNKNOWN,
    }
}

fn symmetric(most: f64) -> Range {
    Range { lo: -most, hi: most, ..Range::UNKNOWN }
}

fn constant(value: &Tensor, n: usize) -> Range {
    let values = value.to_f64s();
    let (mut lo, mut hi, mut norm) = (f64::INFINITY, f64::NEG_INFINITY, 0.0_f64);
    for row in values.chunks(n.max(1)) {
        row.iter().for_each(|x| (lo, hi) = (lo.min(*x), hi.max(*x)));
        norm = norm.max(row.iter().map(|x| x * x).sum::<f64>().sqrt());
    }
    let whole = values.iter().all(|x| x.fract() == 0.0);
    if values.is_empty() { Range::new(0.0, 0.0, n) } else { Range { lo, hi, norm, whole } }
}

/// A sum of so many terms.
fn sum(x: Range, terms: f64) -> Range {
    // Fewer terms than all: running sums, or windows over a border.
    let (lo, hi) = ((terms * x.lo).min(x.lo).min(0.0), (terms * x.hi).max(x.hi).max(0.0));
    Range { lo, hi, norm: f64::INFINITY, whole: x.whole }
}

/// Rows of norm at most √n, times the scale, plus the bias.
fn normalized(graph: &Graph, node: &Node, axis: usize, ranges: &Ranges, x: Range) -> Range {
    let size: usize = graph.ty(node.inputs[0]).shape.0[axis..].iter().product();
    let root = (size as f64).sqrt();
    let scale = ranges.get(node.inputs[1]);
    let bias = node.inputs.get(2).map_or(Range::new(0.0, 0.0, 1), |b| ranges.get(*b));
    // A row of zeros stays one.
    let root = if x.max_abs() == 0.0 { 0.0 } else { root };
    let most = root * scale.max_abs() + bias.max_abs();
    let norm = root * scale.max_abs() + bias.norm;
    Range { norm, ..symmetric(most) }
}

fn matmul(graph: &Graph, node: &Node, op: &MatMul, ranges: &Ranges) -> Range {
    let [a, b] = [node.inputs[0], node.inputs[1]];
    let dims = op.dims(graph.ty(a), graph.ty(b));
    let k = dims.k as f64;
    let (x, w) = (ranges.get(a), ranges.get(b));
    // The contracted vectors of both operands: their norms and sums of absolute values.
    let row = if op.trans_a { x.max_abs() * k.sqrt() } else { x.norm };
    let spread = ranges.spread(b);
    let column = spread.map(|s| if op.trans_b { s.last } else { s.before });
    let column_norm = match column {
        Some(size) => size.norm,
        None if op.trans_b => w.norm,
        None => w.max_abs() * k.sqrt(),
    };
    let column_sum = column.map_or(k * w.max_abs(), |size| size.sum);
    let most = (row * column_norm).min(x.max_abs() * column_sum);
    let norm = spread.map_or(f64::INFINITY, |s| row * s.matrix);
    Range { norm, ..symmetric(most) }
}

fn unary(f: UnaryFn, x: Range) -> Range {
    let Range { lo, hi, norm, whole } = x;
    let map = |g: &dyn Fn(f64) -> f64| Range { lo: g(lo), hi: g(hi), ..Range::UNKNOWN };
    // |f(x)| ≤ |x|: the norm is no larger either.
    let shrinks = |lo: f64, hi: f64| Range { lo, hi, norm, whole: false };
    let bounded = |lo: f64, hi: f64| Range { lo, hi, ..Range::UNKNOWN };
    match f {
        UnaryFn::Detach => Range { lo, hi, norm, whole },
        UnaryFn::Neg => Range { lo: -hi, hi: -lo, norm, whole },
        UnaryFn::Abs => {
            let least = if lo <= 0.0 && hi >= 0.0 { 0.0 } else { lo.abs().min(hi.abs()) };
            Range { lo: least, hi: x.max_abs(), norm, whole }
        }
        UnaryFn::Sign => Range { whole: true, ..bounded(-1.0, 1.0) },
        UnaryFn::Exp => map(&f64::exp),
        UnaryFn::Expm1 => map(&f64::exp_m1),
        UnaryFn::Log => map(&|x| if x <= 0.0 { f64::NEG_INFINITY } else { x.ln() }),
        UnaryFn::Log1p => map(&|x| if x <= -1.0 { f64::NEG_INFINITY } else { x.ln_1p() }),
        UnaryFn::Sqrt => map(&|x| x.max(0.0).sqrt()),
        UnaryFn::Rsqrt if lo > 0.0 => bounded(hi.sqrt().recip(), lo.sqrt().recip()),
        UnaryFn::Rsqrt => bounded(0.0, f64::INFINITY),
        UnaryFn::Reciprocal if lo > 0.0 || hi < 0.0 => bounded(hi.recip(), lo.recip()),
        UnaryFn::Floor => Range { whole: true, ..map(&f64::floor) },
        UnaryFn::Ceil => Range { whole: true, ..map(&f64::ceil) },
        UnaryFn::Round => Range { whole: true, ..map(&f64::round_ties_even) },
        UnaryFn::Cos => bounded(-1.0, 1.0),
        UnaryFn::Sin => shrinks(-1.0, 1.0),
        UnaryFn::Tanh => shrinks(lo.tanh(), hi.tanh()),
        UnaryFn::Erf => bounded(-1.0, 1.0),
        UnaryFn::Sigmoid => map(&|x| 1.0 / (1.0 + (-x).exp())),
        UnaryFn::Softplus => bounded(0.0, if hi > 30.0 { hi + 1e-12 } else { hi.exp().ln_1p() }),
        UnaryFn::Relu => Range { whole, ..shrinks(lo.max(0.0), hi.max(0.0)) },
        UnaryFn::Silu => shrinks((-0.2785_f64).max(lo.min(0.0)), hi.max(0.0)),
        UnaryFn::Gelu | UnaryFn::GeluTanh => shrinks((-0.1701_f64).max(lo.min(0.0)), hi.max(0.0)),
        _ => Range::UNKNOWN,
    }
}

/// The smallest and largest of a function of all pairs of ends.
fn corners(a: Range, b: Range, f: impl Fn(f64, f64) -> f64) -> (f64, f64) {
    let all = [f(a.lo, b.lo), f(a.lo, b.hi), f(a.hi, b.lo), f(a.hi, b.hi)];
    // Zero times infinity: the zero is exact, the infinity a bound.
    let all = all.map(|x| if x.is_nan() { 0.0 } else { x });
    (
        all.into_iter().fold(f64::INFINITY, f64::min),
        all.into_iter().fold(f64::NEG_INFINITY, f64::max),
    )
}

fn power(x: Range, exponent: f64) -> Range {
    let p = |x: f64| x.powf(exponent);
    if exponent > 0.0 && exponent % 2.0 == 0.0 {
        let least = if x.lo <= 0.0 && x.hi >= 0.0 { 0.0 } else { x.lo.abs().min(x.hi.abs()) };
        return Range { lo: p(least), hi: p(x.max_abs()), norm: f64::INFINITY, whole: x.whole };
    }
    if x.lo > 0.0 {
        let (a, b) = (p(x.lo), p(x.hi));
        return Range { lo: a.min(b), hi: a.max(b), ..Range::UNKNOWN };
    }
    Range::UNKNOWN
}

fn binary(f: BinaryFn, a: Range, b: Range) -> Range {
    let whole = a.whole && b.whole;
    match f {
        BinaryFn::Add => Range { lo: a.lo + b.lo, hi: a.hi + b.hi, norm: a.norm + b.norm, whole },
        BinaryFn::Sub => Range { lo: a.lo - b.hi, hi: a.hi - b.lo, norm: a.norm + b.norm, whole },
        BinaryFn::Mul => {
            let (lo, hi) = corners(a, b, |x, y| x * y);
            let norm = (a.norm * b.max_abs()).min(a.max_abs() * b.norm);
            Range { lo, hi, norm, whole }
        }
        BinaryFn::Div if b.lo > 0.0 || b.hi < 0.0 => {
            let (lo, hi) = corners(a, b, |x, y| x / y);
            let least = b.lo.abs().min(b.hi.abs());
            Range { lo, hi, norm: a.norm / least, whole: false }
        }
        BinaryFn::Pow if b.lo == b.hi => power(a, b.lo),
        BinaryFn::Max => {
            Range { lo: a.lo.max(b.lo), hi: a.hi.max(b.hi), norm: f64::INFINITY, whole }
        }
        BinaryFn::Min => {
            Range { lo: a.lo.min(b.lo), hi: a.hi.min(b.hi), norm: f64::INFINITY, whole }
        }
        BinaryFn::Mod | BinaryFn::Fmod => Range { whole, ..symmetric(b.max_abs()) },
        _ => Range::UNKNOWN,
    }
}
