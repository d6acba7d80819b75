//! Reductions: of lanes of elements that are equal one by one, in the same order, any reduction is equal.
//!
//! The result of a reduction is a constant. For each two reductions by the same function over lanes of the same size, the solver is
//! told that the results are equal unless the elements differ at some index, for which there is a fresh name. Composites are read by
//! their definition as reductions, over the reals.

use super::elements::Elements;
use super::encode::Encoder;
use easy_smt::SExpr;
use frit_ir::ops::{Attention, BinaryFn, MatMul, Reduce, ReduceFn};
use frit_ir::{DType, Op, ValueId};
use std::rc::Rc;

type Body = Rc<dyn Fn(&mut Encoder<'_>, &[SExpr]) -> SExpr>;

/// The result of a reduction.
pub(super) struct Lane {
    /// The function.
    tag: &'static str,
    /// Which one it is: that of a value at an index.
    key: (ValueId, Vec<SExpr>),
    result: SExpr,
    sizes: Vec<usize>,
    /// More than that of any reduction inside of the elements.
    height: usize,
    /// The comparisons of other lanes inside of which it is.
    context: Vec<usize>,
    body: Body,
}

const SUM: &str = "sum";
const MAX: &str = "max";
const PRODUCTS: &str = "sum of products";

impl Encoder<'_> {
    /// How many reductions are nested in the value.
    fn height(&self, v: ValueId) -> usize {
        let node = self.graph.def(v);
        let of = |i: usize| node.inputs.get(i).map_or(0, |x| self.height(*x));
        let inside = (0..node.inputs.len()).map(of).max().unwrap_or(0);
        match node.op {
            Op::Reduce(_) | Op::MatMul(_) | Op::RmsNorm(_) => inside + 1,
            Op::SoftmaxGrad(_) | Op::LogSoftmaxGrad(_) => inside + 1,
            Op::Softmax(_) | Op::LogSoftmax(_) | Op::CrossEntropy(_) | Op::LayerNorm(_) => {
                inside + 2
            }
            Op::Attention(ref op) => {
                let [mask, kept] = op.masks(&node.inputs);
                let [mask, kept] = [mask, kept].map(|v| v.map_or(0, |v| self.height(*v)));
                ((of(0).max(of(1)) + 1).max(mask) + 2).max(of(2)).max(kept) + 1
            }
            _ => inside,
        }
    }

    fn lane(
        &mut self,
        (tag, sort): (&'static str, SExpr),
        key: (ValueId, Vec<SExpr>),
        height: usize,
        sizes: &[usize],
        body: Body,
    ) -> SExpr {
        if let Some(lane) = self.lanes.iter().find(|lane| lane.tag == tag && lane.key == key) {
            return lane.result;
        }
        let (result, sizes, context) = (self.fresh(sort), sizes.to_vec(), self.context.clone());
        self.lanes.push(Lane { tag, key, result, sizes, height, context, body });
        result
    }

    /// Says of each two reductions that they are equal if all their elements are.
    pub(super) fn equal_lanes_are_equal(&mut self) {
        let mut next = 0;
        let mut n_pairs = 0;
        while next < self.lanes.len() {
            for other in 0..next {
                let (a, b) = (&self.lanes[next], &self.lanes[other]);
                let comparable = (a.tag, &a.sizes, a.height) == (b.tag, &b.sizes, b.height);
                let visible =
                    a.context.starts_with(&b.context) || b.context.starts_with(&a.context);
                if !comparable || !visible {
                    continue;
                }
                let deeper = if a.context.len() > b.context.len() { a } else { b };
                let (results, context) = ([a.result, b.result], deeper.context.clone());
                let (bodies, sizes) = ([a.body.clone(), b.body.clone()], a.sizes.clone());
                n_pairs += 1;
                let outer = std::mem::replace(&mut self.context, [context, vec![n_pairs]].concat());
                let index: Vec<SExpr> = sizes.iter().map(|n| self.index_below(*n)).collect();
                let elements = bodies.map(|body| body(self, &index));
                self.context = outer;
                let differ = self.apply("not", &[self.apply("=", &elements)]);
                self.assert(self.apply("or", &[self.apply("=", &results), differ]));
            }
            next += 1;
        }
    }

    pub(super) fn reduction(&mut self, v: ValueId, index: &[SExpr]) -> SExpr {
        let graph = self.graph;
        let node = graph.def(v);
        assert_eq!(node.outputs[0], v, "rules are about first results");
        let x = node.inputs[0];
        match (&node.op, self.elements) {
            (Op::Reduce(op), _) => self.reduce(v, op, index),
            (Op::MatMul(op), _) => self.matmul(v, op, index),
            (Op::Softmax(op), Elements::Reals) => {
                let (max, sum) = self.over_softmax(v, x, op.axis, index);
                let shifted = [self.at(x, index), max];
                let e = self.exp(self.apply("-", &shifted));
                self.quotient(e, sum)
            }
            (Op::LogSoftmax(op), Elements::Reals) => {
                let (max, sum) = self.over_softmax(v, x, op.axis, index);
                let shifted = [self.at(x, index), max];
                let log = self.log(sum);
                self.apply("-", &[self.apply("-", &shifted), log])
            }
            (Op::Softmax(op), _) => self.along(v, op.axis, index),
            (Op::LogSoftmax(op), _) => self.along(v, op.axis, index),
            (Op::SoftmaxGrad(op), Elements::Any) => self.along(v, op.axis, index),
            (Op::LogSoftmaxGrad(op), Elements::Any) => self.along(v, op.axis, index),
            (Op::CrossEntropy(op), _) => self.cross_entropy(v, op.ignore_index, op.classes, index),
            (Op::LayerNorm(op), Elements::Reals) => self.norm(v, op.axis, op.eps, true, index),
            (Op::RmsNorm(op), Elements::Reals) => self.norm(v, op.axis, op.eps, false, index),
            (Op::Attention(op), Elements::Reals) => self.attention(v, op, index),
            (op, elements) => panic!("{} has no reading for {elements:?}", op.name()),
        }
    }

    fn reduce(&mut self, v: ValueId, op: &Reduce, index: &[SExpr]) -> SExpr {
        let x = self.graph.def(v).inputs[0];
        let (dims, dtype) = (self.dims(x), self.dtype(x));
        let mut kept = index.iter().copied();
        let zero = self.int(0);
        let mut from = Vec::with_capacity(dims.len());
        for axis in 0..dims.len() {
            let reduced = op.axes.contains(&axis);
            let i = if !reduced || op.keep_dims { kept.next() } else { None };
            from.push(if reduced { zero } else { i.expect("an index for each axis") });
        }
        let sizes: Vec<usize> = op.axes.iter().map(|axis| dims[*axis]).collect();
        if self.elements == Elements::Floats {
            assert!(sizes.iter().all(|n| *n == 1), "only one element is read as bits");
            let x = self.at(x, &from);
            return if sizes.is_empty() { x } else { self.extreme(op.f, dtype, x) };
        }
        let (key, axes) = ((v, from.clone()), op.axes.clone());
        let body = move |encoder: &mut Encoder<'_>, k: &[SExpr]| {
            let mut at = from.clone();
            axes.iter().zip(k).for_each(|(axis, k)| at[*axis] = *k);
            encoder.at(x, &at)
        };
        let (tag, sort) = match op.f {
            ReduceFn::Sum | ReduceFn::Mean => (SUM, self.sort(dtype)),
            ReduceFn::Max => (MAX, self.sort(dtype)),
            f => panic!("{f:?} has no reading"),
        };
        let result = self.lane((tag, sort), key, self.height(v), &sizes, Rc::new(body));
        if op.f == ReduceFn::Mean { self.mean_of(result, &sizes) } else { result }
    }

    fn mean_of(&mut self, sum: SExpr, sizes: &[usize]) -> SExpr {
        assert_eq!(self.elements, Elements::Reals, "a mean is read over the reals");
        let count: Vec<SExpr> = sizes.iter().map(|n| self.size(*n)).collect();
        let count = if count.len() > 1 { self.apply("*", &count) } else { count[0] };
        self.quotient(sum, self.apply("to_real", &[count]))
    }

    /// The value without scalar factors, and these: over the reals a sum is linear.
    fn unscaled(&mut self, v: ValueId) -> (ValueId, Vec<SExpr>) {
        let graph = self.graph;
        let (mut v, mut factors) = (v, Vec::new());
        while self.elements == Elements::Reals {
            let node = graph.def(v);
            let known = |i: usize| node.inputs.get(i).and_then(|x| graph.constant(*x)?.as_splat());
            let (rest, factor) = match (&node.op, known(0), known(1)) {
                (Op::Binary(BinaryFn::Mul), None, Some(c)) => (node.inputs[0], c),
                (Op::Binary(BinaryFn::Mul), Some(c), None) => (node.inputs[1], c),
                (Op::Binary(BinaryFn::Div), None, Some(c)) => (node.inputs[0], 1.0 / c),
                _ => break,
            };
            factors.push(self.number(DType::F32, factor));
            v = rest;
        }
        (v, factors)
    }

    /// A product; of uninterpreted ones it is known that they commute.
    fn product(&mut self, dtype: DType, x: [SExpr; 2]) -> SExpr {
        if self.elements == Elements::Reals {
            return self.apply("*", &x);
        }
        let (name, sort) = (format!("product {}", dtype.name()), self.sort(dtype));
        let [left, right] =
            [x, [x[1], x[0]]].map(|x| self.function(&name, &x.map(|x| (x, sort)), sort));
        self.assert(self.apply("=", &[left, right]));
        left
    }

    fn matmul(&mut self, v: ValueId, op: &MatMul, index: &[SExpr]) -> SExpr {
        let graph = self.graph;
        let inputs = &graph.def(v).inputs;
        let dtype = self.dtype(inputs[0]);
        let (a, mut factors) = self.unscaled(inputs[0]);
        let (b, more) = self.unscaled(inputs[1]);
        factors.extend(more);
        let (trans_a, trans_b) = (op.trans_a, op.trans_b);
        let n = *self.dims(a).iter().rev().nth(usize::from(trans_a)).expect("a matrix");
        let (batch, place) = index.split_at(index.len() - 2);
        let (batch, row, column) = (batch.to_vec(), place[0], place[1]);
        let body = move |encoder: &mut Encoder<'_>, k: &[SExpr]| {
            let at = |flag: bool, x: SExpr, y: SExpr| {
                let place = if flag { [y, x] } else { [x, y] };
                [&batch[..], &place].concat()
            };
            let left = encoder.at_broadcast(a, &at(trans_a, row, k[0]));
            let right = encoder.at_broadcast(b, &at(trans_b, k[0], column));
            encoder.product(dtype, [left, right])
        };
        let sort = self.sort(self.dtype(v));
        let key = (v, index.to_vec());
        let sum = self.lane((PRODUCTS, sort), key, self.height(v), &[n], Rc::new(body));
        factors.into_iter().fold(sum, |sum, factor| self.apply("*", &[factor, sum]))
    }

    /// A function of whole lanes along the axis and the place in them.
    fn along(&mut self, v: ValueId, axis: usize, index: &[SExpr]) -> SExpr {
        let graph = self.graph;
        let node = graph.def(v);
        let lane_sort = self.smt.atom("Lane");
        let mut arguments = vec![(index[axis], self.smt.int_sort())];
        for x in &node.inputs {
            arguments.push((self.whole_lane(v, *x, axis, index), lane_sort));
        }
        let sort = self.sort(self.dtype(v));
        self.function(node.op.name(), &arguments, sort)
    }

    /// The lane of operand `x` of `v` along the axis.
    fn whole_lane(&mut self, v: ValueId, x: ValueId, axis: usize, index: &[SExpr]) -> SExpr {
        let mut from = index.to_vec();
        from[axis] = self.int(0);
        let (key, size, height) = ((x, from.clone()), self.dims(v)[axis], self.height(x) + 1);
        let body = move |encoder: &mut Encoder<'_>, k: &[SExpr]| {
            let mut at = from.clone();
            at[axis] = k[0];
            encoder.at(x, &at)
        };
        let sort = self.smt.atom("Lane");
        self.lane(("lane", sort), key, height, &[size], Rc::new(body))
    }

    /// The largest of `n` scores, and the sum of the exponentials of what they are below it, which is positive.
    fn softmax_of(
        &mut self,
        key: (ValueId, Vec<SExpr>),
        height: usize,
        n: usize,
        score: Body,
    ) -> (SExpr, SExpr) {
        let real = self.smt.real_sort();
        let max = self.lane((MAX, real), key.clone(), height + 1, &[n], score.clone());
        let body = move |encoder: &mut Encoder<'_>, k: &[SExpr]| {
            let score = score(encoder, k);
            encoder.exp(encoder.apply("-", &[score, max]))
        };
        let sum = self.lane((SUM, real), key, height + 2, &[n], Rc::new(body));
        self.assert(self.apply(">", &[sum, self.smt.atom("0.0")]));
        (max, sum)
    }

    fn over_softmax(
        &mut self,
        v: ValueId,
        x: ValueId,
        axis: usize,
        index: &[SExpr],
    ) -> (SExpr, SExpr) {
        let mut from = index.to_vec();
        from[axis] = self.int(0);
        let (key, n, height) = ((v, from.clone()), self.dims(x)[axis], self.height(x));
        let score = move |encoder: &mut Encoder<'_>, k: &[SExpr]| {
            let mut at = from.clone();
            at[axis] = k[0];
            encoder.at(x, &at)
        };
        self.softmax_of(key, height, n, Rc::new(score))
    }

    fn cross_entropy(
        &mut self,
        v: ValueId,
        ignore: i64,
        classes: Option<usize>,
        index: &[SExpr],
    ) -> SExpr {
        let graph = self.graph;
        let node = graph.def(v);
        let (x, row) = (node.inputs[0], index.to_vec());
        let n = classes.unwrap_or_else(|| *self.dims(x).last().expect("an axis of classes"));
        let label = self.at(node.inputs[1], index);
        let ignored = self.apply("=", &[label, self.int(ignore)]);
        // Anything else is an error of the data.
        self.assert(self.apply("or", &[ignored, self.is_below(label, n)]));
        let chosen = self.at(x, &[index, &[label]].concat());
        let score =
            move |encoder: &mut Encoder<'_>, k: &[SExpr]| encoder.at(x, &[&row[..], k].concat());
        let (zero, sort) = (self.number(DType::F32, 0.0), self.sort(DType::F32));
        let (key, height) = ((v, index.to_vec()), self.height(x));
        let loss = if self.elements == Elements::Reals {
            let (max, sum) = self.softmax_of(key, height, n, Rc::new(score));
            let log = self.log(sum);
            self.apply("-", &[self.apply("+", &[max, log]), chosen])
        } else {
            let lane_sort = self.smt.atom("Lane");
            let lane = self.lane(("lane", lane_sort), key, height + 1, &[n], Rc::new(score));
            let sum = self.function("log_sum_exp", &[(lane, lane_sort)], sort);
            let from = self.sort(self.dtype(x));
            self.function("minus", &[(sum, sort), (chosen, from)], sort)
        };
        self.apply("ite", &[ignored, zero, loss])
    }

    fn norm(
        &mut self,
        v: ValueId,
        axis: usize,
        eps: f64,
        centered: bool,
        index: &[SExpr],
    ) -> SExpr {
        let graph = self.graph;
        let inputs = &graph.def(v).inputs;
        let (x, row) = (inputs[0], index[..axis].to_vec());
        let (sizes, height) = (self.dims(x)[axis..].to_vec(), self.height(x));
        let real = self.smt.real_sort();
        let element = {
            let row = row.clone();
            move |encoder: &mut Encoder<'_>, k: &[SExpr]| encoder.at(x, &[&row[..], k].concat())
        };
        let mean = centered.then(|| {
            let body = Rc::new(element.clone());
            let sum = self.lane((SUM, real), (v, row.clone()), height + 1, &sizes, body);
            self.mean_of(sum, &sizes)
        });
        let deviation = move |encoder: &mut Encoder<'_>, k: &[SExpr]| {
            let x = element(encoder, k);
            mean.map_or(x, |mean| encoder.apply("-", &[x, mean]))
        };
        let square = {
            let deviation = deviation.clone();
            move |encoder: &mut Encoder<'_>, k: &[SExpr]| {
                let x = deviation(encoder, k);
                encoder.apply("*", &[x, x])
            }
        };
        let eps = self.number(DType::F32, eps);
        // Of another name than the sum of the mean.
        let key = (v, [row, vec![eps]].concat());
        let height = height + 1 + usize::from(centered);
        let sum = self.lane((SUM, real), key, height, &sizes, Rc::new(square));
        let variance = self.mean_of(sum, &sizes);
        let inverse = self.inverse_root(self.apply("+", &[variance, eps]));
        let top = deviation(self, &index[axis..]);
        let scale = self.at(inputs[1], &index[axis..]);
        let result = self.apply("*", &[top, inverse, scale]);
        let Some(bias) = inputs.get(2) else { return result };
        let bias = self.at(*bias, &index[axis..]);
        self.apply("+", &[result, bias])
    }

    fn attention(&mut self, v: ValueId, op: &Attention, index: &[SExpr]) -> SExpr {
        assert!(!op.causal && op.window.is_none(), "masks by position have no reading");
        let graph = self.graph;
        let inputs = &graph.def(v).inputs;
        let (q, k, value) = (inputs[0], inputs[1], inputs[2]);
        let [mask, kept] = op.masks(inputs).map(Option::<&ValueId>::copied);
        let (heads, groups) = (self.dims(q)[1], self.dims(k)[1]);
        let (keys, depth) = (self.dims(k)[2], self.dims(q)[3]);
        let [b, h, t, column] = index[..] else { panic!("attention has four axes") };
        let group = match heads == groups {
            true => h,
            false => self.split(h, &[groups, heads / groups])[0],
        };
        let real = self.smt.real_sort();
        let scale = self.number(DType::F32, op.scale);
        let inner = self.height(q).max(self.height(k)) + 1;
        let score: Body = Rc::new(move |encoder: &mut Encoder<'_>, s: &[SExpr]| {
            let s = s[0];
            let product = move |encoder: &mut Encoder<'_>, d: &[SExpr]| {
                let (x, y) = (encoder.at(q, &[b, h, t, d[0]]), encoder.at(k, &[b, group, s, d[0]]));
                encoder.apply("*", &[x, y])
            };
            let key = (v, vec![b, h, t, s]);
            let dot = encoder.lane((PRODUCTS, real), key, inner, &[depth], Rc::new(product));
            let scaled = encoder.apply("*", &[scale, dot]);
            let Some(mask) = mask else { return scaled };
            let mask = encoder.at_broadcast(mask, &[b, h, t, s]);
            encoder.apply("+", &[scaled, mask])
        });
        let scores = inner.max(mask.map_or(0, |mask| self.height(mask)));
        let (max, sum) = self.softmax_of((v, vec![b, h, t]), scores, keys, score.clone());
        let factor = op.keep.map(|keep| self.number(DType::F32, keep.recip()));
        let weighted = move |encoder: &mut Encoder<'_>, s: &[SExpr]| {
            let score = score(encoder, s);
            let e = encoder.exp(encoder.apply("-", &[score, max]));
            let mut weight = encoder.quotient(e, sum);
            if let (Some(kept), Some(factor)) = (kept, factor) {
                let kept = encoder.at(kept, &[b, h, t, s[0]]);
                let zero = encoder.number(DType::F32, 0.0);
                let scaled = encoder.apply("*", &[weight, factor]);
                weight = encoder.apply("ite", &[kept, scaled, zero]);
            }
            let value = encoder.at(value, &[b, group, s[0], column]);
            encoder.apply("*", &[weight, value])
        };
        let key = (v, index.to_vec());
        self.lane((PRODUCTS, real), key, self.height(v), &[keys], Rc::new(weighted))
    }
}
