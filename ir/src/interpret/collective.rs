//! Collectives over several ranks. Values are logical: every rank holds the full tensor.

use super::call::{Call, max};
use super::{Evaluate, Evaluated};
use crate::ops::{AllGather, AllReduce, Op, ReduceKind, ReduceScatter, reduction_factors};
use crate::{DType, Tensor, TensorData};

/// Of one rank: the identity.
macro_rules! alone {
    ($($collective:ident),*) => {$(
        impl Evaluate for $collective {
            fn evaluate(&self, call: &Call<'_>) -> Evaluated {
                Ok(vec![call.inputs[0].clone()])
            }
        }
    )*};
}

alone!(AllGather, ReduceScatter, AllReduce);

/// The results on every rank of a collective whose operand on rank `r` is `operands[r]`; `None` if
/// `op` is no collective. Elements are summed in the order of ranks, then divided.
pub(super) fn combine(op: &Op, operands: &[&Tensor], exact: bool) -> Option<Vec<Tensor>> {
    let (kind, dtype) = match op {
        Op::AllGather(_) => return Some(operands.iter().map(|t| (*t).clone()).collect()),
        Op::ReduceScatter(scatter) => (scatter.reduce, scatter.dtype),
        Op::AllReduce(all_reduce) => (all_reduce.reduce, all_reduce.dtype),
        _ => return None,
    };
    let first = *operands.first()?;
    if let Some(dtype) = dtype {
        return Some(combine_in(dtype, kind, operands, exact));
    }
    let call = Call { inputs: operands, results: vec![first.ty.clone()], exact };
    let combined = match first.data() {
        TensorData::Float(v) => {
            let mut sum = v.clone();
            for i in 1..operands.len() {
                let part = call.floats(i);
                let both = sum.iter_mut().zip(part.iter());
                match kind {
                    ReduceKind::Max => both.for_each(|(a, b)| *a = max(*a, *b)),
                    _ => both.for_each(|(a, b)| *a += b),
                }
            }
            if kind == ReduceKind::Mean {
                sum.iter_mut().for_each(|x| *x /= operands.len() as f64);
            }
            call.real(0, sum)
        }
        TensorData::Int(v) => {
            let mut sum = v.clone();
            for i in 1..operands.len() {
                let both = sum.iter_mut().zip(call.ints(i));
                match kind {
                    ReduceKind::Max => both.for_each(|(a, b)| *a = (*a).max(*b)),
                    _ => both.for_each(|(a, b)| *a = a.wrapping_add(*b)),
                }
            }
            if kind == ReduceKind::Mean {
                sum.iter_mut().for_each(|x| *x /= operands.len() as i64);
            }
            call.integer(0, sum)
        }
    };
    Some(vec![combined; operands.len()])
}

/// The same with operands and results rounded to the dtype of the exchange.
fn combine_in(dtype: DType, kind: ReduceKind, operands: &[&Tensor], exact: bool) -> Vec<Tensor> {
    let n = operands.len();
    let factors = reduction_factors(dtype, n).filter(|_| kind == ReduceKind::Mean);
    let (before, after) = factors.unwrap_or((1.0, 1.0));
    let scaled = |t: &Tensor, to: DType, factor: f64| {
        let call = Call { inputs: &[t], results: vec![t.ty.with_dtype(to)], exact };
        call.real(0, call.floats(0).iter().map(|x| x * factor).collect())
    };
    let sent: Vec<Tensor> = operands.iter().map(|t| scaled(t, dtype, before)).collect();
    let reduce = if factors.is_some() { ReduceKind::Sum } else { kind };
    let op = Op::AllReduce(AllReduce { reduce, unit: None, dtype: None });
    let received = combine(&op, &sent.iter().collect::<Vec<_>>(), exact).unwrap_or_default();
    received.iter().zip(operands).map(|(t, own)| scaled(t, own.ty.dtype, after)).collect()
}
