//! Collectives over several ranks. Values are logical: every rank holds the full tensor.

use super::call::Call;
use crate::ops::{Op, ReduceKind};
use crate::{Tensor, TensorData};

/// The results on every rank of a collective whose operand on rank `r` is `operands[r]`; `None` if
/// `op` is no collective. Elements are summed in the order of ranks, then divided.
pub(super) fn combine(op: &Op, operands: &[&Tensor], exact: bool) -> Option<Vec<Tensor>> {
    let kind = match op {
        Op::AllGather(_) => return Some(operands.iter().map(|t| (*t).clone()).collect()),
        Op::ReduceScatter(_) => ReduceKind::Mean,
        Op::AllReduce(all_reduce) => all_reduce.reduce,
        _ => return None,
    };
    let first = *operands.first()?;
    let call = Call { inputs: operands, results: vec![first.ty.clone()], exact };
    let combined = match first.data() {
        TensorData::Float(v) => {
            let mut sum = v.clone();
            for i in 1..operands.len() {
                sum.iter_mut().zip(call.floats(i).iter()).for_each(|(a, b)| *a += b);
            }
            if kind == ReduceKind::Mean {
                sum.iter_mut().for_each(|x| *x /= operands.len() as f64);
            }
            call.real(0, sum)
        }
        TensorData::Int(v) => {
            let mut sum = v.clone();
            for i in 1..operands.len() {
                sum.iter_mut().zip(call.ints(i)).for_each(|(a, b)| *a = a.wrapping_add(*b));
            }
            if kind == ReduceKind::Mean {
                sum.iter_mut().for_each(|x| *x /= operands.len() as i64);
            }
            call.integer(0, sum)
        }
    };
    Some(vec![combined; operands.len()])
}
