//! Operations that read and write elements by index, and running sums.

use super::super::{add, check, constant, single};
use super::{Random, numel};
use frit_ir::ops::*;
use frit_ir::{DType, Op, Tensor};

pub(super) fn case(r: &mut Random) {
    along_an_axis(r);
    tuples(r);
}

fn along_an_axis(r: &mut Random) {
    let mut data = r.shape(1, 3);
    let axis = r.int(0, data.len() - 1);
    if data.len() > 1 && r.int(0, 5) == 0 {
        data[(axis + 1) % 2] = 0;
    }
    let ids = r.shape_or_empty(0, 2);
    let dtype = r.pick(&[DType::I32, DType::I64]);
    let values = r.indices(numel(&ids), data[axis]);
    check(&format!("gather {data:?} {ids:?}"), &[&data], |g, p| {
        let ids = constant(g, Tensor::ints(dtype, ids.clone(), values.clone()));
        add(g, Op::Gather(Gather { axis }), &[p[0], ids])[0]
    });
    let rows = [r.int(1, 4), r.int(1, 3)];
    let named: Vec<i64> = (0..numel(&ids)).map(|_| r.int(0, rows[0] - 1) as i64).collect();
    check(&format!("embedding {rows:?} {ids:?}"), &[&rows], |g, p| {
        let ids = constant(g, Tensor::ints(dtype, ids.clone(), named.clone()));
        add(g, Op::Embedding(Embedding::default()), &[p[0], ids])[0]
    });
    // Other axes may be shorter than the data's.
    let mut part: Vec<usize> = data.iter().map(|&n| r.int(n.min(1), n)).collect();
    part[axis] = r.int(0, 4);
    let values = r.indices(numel(&part), data[axis]);
    check(&format!("gather_elements {data:?} {part:?}"), &[&data], |g, p| {
        let ids = constant(g, Tensor::ints(dtype, part.clone(), values.clone()));
        add(g, Op::GatherElements(GatherElements { axis }), &[p[0], ids])[0]
    });
    for &f in ScatterFn::ALL {
        let (mut part, mut values) = (part.clone(), values.clone());
        if f == ScatterFn::Replace {
            // Each place once: of several the gradient is not that of the function, as in PyTorch.
            part[axis] = part[axis].min(data[axis]);
            let inner = numel(&part[axis + 1..]);
            let order = r.permutation(data[axis]);
            values = (0..numel(&part))
                .map(|i| order[i / inner.max(1) % part[axis].max(1)] as i64)
                .collect();
        }
        check(&format!("scatter_elements {f:?} {data:?} {part:?}"), &[&data, &part], |g, p| {
            let ids = constant(g, Tensor::ints(dtype, part.clone(), values.clone()));
            add(g, Op::ScatterElements(ScatterElements { axis, f }), &[p[0], ids, p[1]])[0]
        });
    }
    let (exclusive, reverse) = (r.flag(), r.flag());
    let sums = CumSum { axis, exclusive, reverse };
    single(&format!("cum_sum {data:?}"), Op::CumSum(sums), &[&data]);
    let top = TopK { axis, k: r.int(0, data[axis]), largest: r.flag() };
    single(&format!("{top:?} {data:?}"), Op::TopK(top), &[&data]);
}

fn tuples(r: &mut Random) {
    let data = r.shape(1, 4);
    let batch_dims = r.int(0, data.len() - 1);
    let depth = r.int(1, data.len() - batch_dims);
    let (lead, indexed) = (&data[..batch_dims], &data[batch_dims..batch_dims + depth]);
    let n = r.int(0, 3);
    let tuples: Vec<i64> = (0..numel(lead) * n)
        .flat_map(|_| indexed.iter().map(|size| r.indices(1, *size)[0]).collect::<Vec<_>>())
        .collect();
    let ids = [lead, &[n, depth]].concat();
    let name = format!("{data:?} {ids:?} {tuples:?}");
    check(&format!("gather_nd {name}"), &[&data], |g, p| {
        let ids = constant(g, Tensor::ints(DType::I64, ids.clone(), tuples.clone()));
        add(g, Op::GatherNd(GatherNd { batch_dims }), &[p[0], ids])[0]
    });
    for &f in ScatterFn::ALL {
        let (mut ids, mut tuples, mut n) = (ids.clone(), tuples.clone(), n);
        if f == ScatterFn::Replace {
            n = 1;
            ids[batch_dims] = 1;
            tuples =
                (0..numel(lead) * depth).map(|i| r.indices(1, indexed[i % depth])[0]).collect();
        }
        let updates = [lead, &[n], &data[batch_dims + depth..]].concat();
        check(&format!("scatter_nd {f:?} {name}"), &[&data, &updates], |g, p| {
            let ids = constant(g, Tensor::ints(DType::I64, ids.clone(), tuples.clone()));
            add(g, Op::ScatterNd(ScatterNd { batch_dims, f }), &[p[0], ids, p[1]])[0]
        });
    }
}
