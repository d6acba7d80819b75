//! Matmuls and attention.

use super::super::{add, check, constant, single};
use super::{Random, numel};
use frit_ir::ops::*;
use frit_ir::{DType, Op, Tensor};

pub(super) fn case(r: &mut Random) {
    let batch = r.shape_or_empty(0, 2);
    let (lead_a, lead_b) = if r.flag() {
        (batch.clone(), r.smaller(&batch))
    } else {
        (r.smaller(&batch), batch.clone())
    };
    let [m, n, k] = [(); 3].map(|()| r.pick(&[0, 1, 1, 2, 3, 3]));
    let (trans_a, trans_b) = (r.flag(), r.flag());
    let a = [&lead_a[..], &if trans_a { [k, m] } else { [m, k] }].concat();
    let b = [&lead_b[..], &if trans_b { [n, k] } else { [k, n] }].concat();
    let op = Op::MatMul(MatMul { trans_a, trans_b, out: None });
    single(&format!("matmul {trans_a} {trans_b} {a:?} {b:?}"), op, &[&a, &b]);
    attention(r);
}

fn attention(r: &mut Random) {
    let (heads, group) = (r.int(1, 2), r.int(1, 2));
    let [b, t, s, d, e] = [r.int(0, 2), r.int(1, 3), r.int(1, 3), r.int(1, 3), r.int(1, 2)];
    let (causal, window) = (r.flag(), r.pick(&[None, None, Some(1), Some(2)]));
    let q = [b, heads * group, t, d];
    let (key, value) = ([b, heads, s, d], [b, heads, s, e]);
    let name = format!("causal {causal}, window {window:?}, {q:?} {key:?} {value:?}");
    let op = Op::Attention(Attention { scale: 0.7, causal, window, keep: None });
    single(&format!("attention {name}"), op.clone(), &[&q, &key, &value]);
    let mask = r.smaller(&[b, heads * group, t, s]);
    single(&format!("added {mask:?}, {name}"), op.clone(), &[&q, &key, &value, &mask]);
    // Rows with nothing to attend to are among them.
    let kept = r.mask(numel(&mask));
    check(&format!("masked {mask:?} {kept:?}, {name}"), &[&q, &key, &value], |g, p| {
        let mask = constant(g, Tensor::ints(DType::Bool, mask.clone(), kept.clone()));
        add(g, op.clone(), &[p[0], p[1], p[2], mask])[0]
    });
}
