//! Gradients on random and on awkward shapes: sizes of 0 and 1, operands that broadcast, steps
//! backward, indices from the end and repeated ones, windows that overhang. The seed is fixed.

use super::{add, check, constant, single, sliding};
use frit_ir::ops::*;
use frit_ir::{DType, Op, Shape, Tensor};

/// Random shapes for each operation.
const CASES: usize = 24;

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// An integer in `low..=high`.
    fn int(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    fn flag(&mut self) -> bool {
        self.next() & 1 == 1
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.int(0, from.len() - 1)]
    }

    /// Sizes of 1 to 4, many of them 1.
    fn shape(&mut self, min_rank: usize, max_rank: usize) -> Vec<usize> {
        let rank = self.int(min_rank, max_rank);
        (0..rank).map(|_| self.pick(&[1, 1, 2, 3, 4])).collect()
    }

    /// The same, now and then with an axis of size 0.
    fn shape_or_empty(&mut self, min_rank: usize, max_rank: usize) -> Vec<usize> {
        let mut shape = self.shape(min_rank, max_rank);
        if !shape.is_empty() && self.int(0, 5) == 0 {
            let axis = self.int(0, shape.len() - 1);
            shape[axis] = 0;
        }
        shape
    }

    /// A shape that broadcasts to this one.
    fn smaller(&mut self, shape: &[usize]) -> Vec<usize> {
        let from = self.int(0, shape.len());
        shape[from..].iter().map(|n| if self.flag() { 1 } else { *n }).collect()
    }

    /// Some of these axes, at least one.
    fn axes(&mut self, rank: usize) -> Vec<usize> {
        let mut axes: Vec<usize> = (0..rank).filter(|_| self.flag()).collect();
        if axes.is_empty() {
            axes.push(self.int(0, rank - 1));
        }
        axes
    }

    fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.int(0, i));
        }
        order
    }

    /// Indices into an axis of this size, from either end.
    fn indices(&mut self, n: usize, size: usize) -> Vec<i64> {
        (0..n).map(|_| self.int(0, 2 * size - 1) as i64 - size as i64).collect()
    }
}

fn each(seed: u64, mut case: impl FnMut(&mut Random)) {
    let mut random = Random(seed);
    (0..CASES).for_each(|_| case(&mut random));
}

fn numel(shape: &[usize]) -> usize {
    shape.iter().product()
}

#[test]
fn pointwise() {
    each(1, |r| {
        let shape = r.shape_or_empty(0, 4);
        let (a, b) = (r.smaller(&shape), shape);
        let f = r.pick(&[
            BinaryFn::Add,
            BinaryFn::Sub,
            BinaryFn::Mul,
            BinaryFn::Div,
            BinaryFn::Pow,
            BinaryFn::Max,
            BinaryFn::Min,
        ]);
        let operands: [&[usize]; 2] = if r.flag() { [&a, &b] } else { [&b, &a] };
        single(&format!("{} {a:?} {b:?}", f.name()), Op::Binary(f), &operands);
        let f =
            r.pick(&[UnaryFn::Exp, UnaryFn::Gelu, UnaryFn::Rsqrt, UnaryFn::Atan, UnaryFn::Cosh]);
        single(&format!("{} {b:?}", f.name()), Op::Unary(f), &[&b]);
        let mask: Vec<i64> = (0..numel(&a)).map(|_| i64::from(r.flag())).collect();
        check(&format!("select {a:?} {b:?}"), &[&a, &b], |g, p| {
            let mask = constant(g, Tensor::ints(DType::Bool, a.clone(), mask.clone()));
            add(g, Op::Select, &[mask, p[0], p[1]])[0]
        });
    });
}

#[test]
fn layout() {
    each(2, |r| {
        let shape = r.shape_or_empty(1, 4);
        let rank = shape.len();
        let name = format!("{shape:?}");
        let perm = r.permutation(rank);
        let turned: Vec<usize> = perm.iter().map(|&axis| shape[axis]).collect();
        single(&name, Op::Transpose(Transpose { perm }), &[&shape]);
        single(&name, Op::Reshape(Reshape { shape: Shape(turned) }), &[&shape]);
        let small = r.smaller(&shape);
        single(&name, Op::Expand(Expand { shape: Shape(shape.clone()) }), &[&small]);
        let op = SumTo { shape: Shape(small), dtype: None };
        single(&name, Op::SumTo(op), &[&shape]);
        let low = (0..rank).map(|_| r.int(0, 2)).collect();
        let high = (0..rank).map(|_| r.int(0, 2)).collect();
        single(&name, Op::Pad(Pad { low, high, value: 0.5 }), &[&shape]);
        let axis = r.int(0, rank - 1);
        let sizes: Vec<usize> = (0..r.int(1, 3)).map(|_| r.int(0, 2)).collect();
        let part = |n: usize| [&shape[..axis], &[n], &shape[axis + 1..]].concat();
        let parts: Vec<Vec<usize>> = sizes.iter().map(|n| part(*n)).collect();
        let operands: Vec<&[usize]> = parts.iter().map(Vec::as_slice).collect();
        single(&name, Op::Concat(Concat { axis }), &operands);
        let whole = part(sizes.iter().sum());
        let taken = r.int(0, sizes.len() - 1);
        check(&name, &[&whole], |g, p| {
            add(g, Op::Split(Split { axis, sizes: sizes.clone() }), p)[taken]
        });
        let full = r.shape(1, 3);
        let (mut start, mut size, mut step) = (vec![], vec![], vec![]);
        for &n in &full {
            let stride = r.int(1, 2);
            let first = r.int(0, n - 1);
            let backward = r.flag();
            let room = if backward { first / stride + 1 } else { (n - first).div_ceil(stride) };
            start.push(first);
            size.push(r.int(0, room));
            step.push(if backward { -(stride as isize) } else { stride as isize });
        }
        single(&format!("slice of {full:?}"), Op::Slice(Slice { start, size, step }), &[&full]);
    });
}

#[test]
fn indexing() {
    each(3, |r| {
        let data = r.shape(1, 3);
        let axis = r.int(0, data.len() - 1);
        let ids = r.shape_or_empty(0, 2);
        let values = r.indices(numel(&ids), data[axis]);
        check(&format!("gather {data:?} {ids:?}"), &[&data], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, ids.clone(), values.clone()));
            add(g, Op::Gather(Gather { axis }), &[p[0], ids])[0]
        });
        let rows = [&[r.int(1, 4)], &[r.int(1, 3)][..]].concat();
        let named: Vec<i64> = (0..numel(&ids)).map(|_| r.int(0, rows[0] - 1) as i64).collect();
        check(&format!("embedding {rows:?} {ids:?}"), &[&rows], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, ids.clone(), named.clone()));
            add(g, Op::Embedding(Embedding::default()), &[p[0], ids])[0]
        });
        // Other axes may be shorter than the data's.
        let mut part: Vec<usize> = data.iter().map(|&n| r.int(1, n)).collect();
        part[axis] = r.int(0, 4);
        let values = r.indices(numel(&part), data[axis]);
        check(&format!("gather_elements {data:?} {part:?}"), &[&data], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, part.clone(), values.clone()));
            add(g, Op::GatherElements(GatherElements { axis }), &[p[0], ids])[0]
        });
        let f = r.pick(&[ScatterFn::Add, ScatterFn::Mul]);
        check(&format!("scatter_elements {f:?} {data:?} {part:?}"), &[&data, &part], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, part.clone(), values.clone()));
            add(g, Op::ScatterElements(ScatterElements { axis, f }), &[p[0], ids, p[1]])[0]
        });
        let depth = r.int(1, data.len());
        let n = r.int(0, 3);
        let tuples: Vec<i64> = (0..n)
            .flat_map(|_| (0..depth).map(|k| r.indices(1, data[k])[0]).collect::<Vec<_>>())
            .collect();
        check(&format!("gather_nd {data:?} {tuples:?}"), &[&data], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, [n, depth], tuples.clone()));
            add(g, Op::GatherNd(GatherNd { batch_dims: 0 }), &[p[0], ids])[0]
        });
        let updates = [&[n], &data[depth..]].concat();
        check(&format!("scatter_nd {f:?} {data:?} {tuples:?}"), &[&data, &updates], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, [n, depth], tuples.clone()));
            add(g, Op::ScatterNd(ScatterNd { batch_dims: 0, f }), &[p[0], ids, p[1]])[0]
        });
        let (exclusive, reverse) = (r.flag(), r.flag());
        let sums = CumSum { axis, exclusive, reverse };
        single(&format!("cum_sum {data:?}"), Op::CumSum(sums), &[&data]);
        let top = TopK { axis, k: r.int(1, data[axis]), largest: r.flag() };
        single(&format!("{top:?} {data:?}"), Op::TopK(top), &[&data]);
    });
}

#[test]
fn reductions_and_normalizations() {
    each(4, |r| {
        let shape = r.shape(1, 4);
        let name = format!("{shape:?}");
        let (axes, keep_dims) = (r.axes(shape.len()), r.flag());
        let f = r.pick(&[ReduceFn::Mean, ReduceFn::Max, ReduceFn::Min, ReduceFn::Prod]);
        let op = Reduce { f, axes: axes.clone(), keep_dims };
        single(&format!("{op:?} {name}"), Op::Reduce(op), &[&shape]);
        let empty = r.shape_or_empty(1, 3);
        let op = Reduce { f: ReduceFn::Sum, axes: r.axes(empty.len()), keep_dims };
        single(&format!("{op:?} {empty:?}"), Op::Reduce(op), &[&empty]);
        let axis = r.int(0, shape.len() - 1);
        single(&name, Op::Softmax(Softmax { axis }), &[&shape]);
        single(&name, Op::LogSoftmax(Softmax { axis }), &[&shape]);
        let scale = &shape[axis..];
        let norm = LayerNorm { axis, eps: 0.1 };
        single(&name, Op::LayerNorm(norm), &[&shape, scale, scale]);
        single(&name, Op::RmsNorm(RmsNorm { axis, eps: 0.1 }), &[&shape, scale]);
        let image = [&[r.int(2, 4), r.int(1, 3)], &r.shape(0, 2)[..]].concat();
        let channels = [image[1]];
        check(&format!("batch_norm {image:?}"), &[&image, &channels, &channels], |g, p| {
            add(g, Op::BatchNorm(BatchNorm { eps: 0.1 }), p)[0]
        });
        let logits = [r.int(1, 4), r.int(1, 4)];
        let labels = (0..logits[0]).map(|_| r.int(0, logits[1] - 1) as i64).collect::<Vec<_>>();
        check(&format!("cross_entropy {logits:?}"), &[&logits], |g, p| {
            let labels = constant(g, Tensor::ints(DType::I64, [logits[0]], labels.clone()));
            add(g, Op::CrossEntropy(CrossEntropy { ignore_index: -100 }), &[p[0], labels])[0]
        });
    });
}

#[test]
fn matrix_products_and_attention() {
    each(5, |r| {
        let batch = r.shape(0, 2);
        let (lead_a, lead_b) = if r.flag() {
            (batch.clone(), r.smaller(&batch))
        } else {
            (r.smaller(&batch), batch.clone())
        };
        let [m, n] = [r.int(1, 3), r.int(1, 3)];
        let k = r.pick(&[0, 1, 1, 2, 3]);
        let (trans_a, trans_b) = (r.flag(), r.flag());
        let a = [&lead_a[..], &if trans_a { [k, m] } else { [m, k] }].concat();
        let b = [&lead_b[..], &if trans_b { [n, k] } else { [k, n] }].concat();
        let op = Op::MatMul(MatMul { trans_a, trans_b, out: None });
        single(&format!("matmul {trans_a} {trans_b} {a:?} {b:?}"), op, &[&a, &b]);
        let (heads, group) = (r.int(1, 2), r.int(1, 2));
        let [b, t, s, d, e] = [r.int(1, 2), r.int(1, 3), r.int(1, 3), r.int(1, 3), r.int(1, 2)];
        let causal = r.flag();
        let s = if causal { t } else { s };
        let q = [b, heads * group, t, d];
        let (key, value) = ([b, heads, s, d], [b, heads, s, e]);
        let op = Op::Attention(Attention { scale: 0.7, causal });
        single(&format!("attention {q:?} {key:?} {value:?}"), op, &[&q, &key, &value]);
    });
}

#[test]
fn windows() {
    each(6, |r| {
        let rank = r.int(1, 2);
        let groups = r.int(1, 3);
        let (channels, filters) = (r.int(1, 2), r.int(1, 2));
        let taps: Vec<usize> = (0..rank).map(|_| r.int(1, 3)).collect();
        let mut window = sliding(rank, r.int(1, 3), r.int(1, 2), 0, 0);
        let mut sizes = Vec::new();
        for (i, taps) in taps.iter().enumerate() {
            (window.low[i], window.high[i]) = (r.int(0, 2), r.int(0, 2));
            let extent = window.dilations[i] * (taps - 1) + 1;
            let border = window.low[i] + window.high[i];
            sizes.push(extent.saturating_sub(border).max(1) + r.int(0, 2));
        }
        let x = [&[r.int(1, 2), groups * channels], &sizes[..]].concat();
        let w = [&[groups * filters, channels], &taps[..]].concat();
        let name = format!("{window:?} groups {groups} {x:?} {w:?}");
        let op = Op::Conv(Conv { window: window.clone(), groups, out: None });
        single(&name, op, &[&x, &w]);
        let positions = window.positions(&sizes, &taps).expect("it fits");
        let y = [&[x[0], w[0]], &positions[..]].concat();
        let op = ConvGradInput { window: window.clone(), groups, size: sizes, out: None };
        single(&name, Op::ConvGradInput(op), &[&y, &w]);
        // Every pooling window needs an element that is not of the border.
        for (i, taps) in taps.iter().enumerate() {
            window.low[i] = window.low[i].min(taps - 1);
            window.high[i] = window.high[i].min(taps - 1);
            window.dilations[i] = 1;
        }
        let large: Vec<usize> = (0..rank).map(|i| taps[i] + r.int(0, 2)).collect();
        let image = [&[1, 2], &large[..]].concat();
        let op = MaxPool { window: window.clone(), taps: taps.clone() };
        single(&format!("{op:?} {image:?}"), Op::MaxPool(op), &[&image]);
        let op = SumPool { window, taps };
        single(&format!("{op:?} {image:?}"), Op::SumPool(op), &[&image]);
    });
}
