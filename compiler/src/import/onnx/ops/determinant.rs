//! Determinants of small matrices, by expansion along the first row.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::composed::binary;
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, Slice};
use frit_ir::{Op, ValueId};

pub(super) const OPERATORS: &[Operator] = &[op("Det", &[], det)];

/// Larger matrices would need pivoting, which depends on data.
const MAX_SIZE: usize = 4;

fn det(cx: &mut NodeContext<'_>) -> Outcome {
    let x = cx.input(0)?;
    let dims = cx.dims(x);
    let (rank, n) = (dims.len(), dims.last().copied().unwrap_or(0));
    if rank < 2 || dims[rank - 2] != n || n == 0 {
        return misfit(format!("matrices {}", cx.ty(x)));
    }
    if n > MAX_SIZE {
        return Err(Fault::Attribute(format!("the determinant of {n}×{n} matrices")));
    }
    let mut elements = Vec::new();
    for place in 0..n * n {
        let mut cut = Slice { start: vec![0; rank], size: dims.clone(), step: vec![1; rank] };
        (cut.start[rank - 2], cut.size[rank - 2]) = (place / n, 1);
        (cut.start[rank - 1], cut.size[rank - 1]) = (place % n, 1);
        let element = cx.emit(Op::Slice(cut), &[x])?;
        elements.push(cx.reshape(element, dims[..rank - 2].to_vec())?);
    }
    let rows: Vec<&[ValueId]> = elements.chunks(n).collect();
    one(expanded(cx, &rows, &(0..n).collect::<Vec<_>>())?)
}

/// The determinant of the rows, restricted to these columns.
fn expanded(
    cx: &mut NodeContext<'_>,
    rows: &[&[ValueId]],
    columns: &[usize],
) -> Result<ValueId, Fault> {
    if let [column] = columns {
        return Ok(rows[0][*column]);
    }
    let mut sum = None;
    for (i, &column) in columns.iter().enumerate() {
        let rest: Vec<usize> = columns.iter().copied().filter(|c| *c != column).collect();
        let minor = expanded(cx, &rows[1..], &rest)?;
        let term = binary(cx, BinaryFn::Mul, rows[0][column], minor)?;
        sum = Some(match sum {
            None => term,
            Some(sum) if i % 2 == 1 => binary(cx, BinaryFn::Sub, sum, term)?,
            Some(sum) => binary(cx, BinaryFn::Add, sum, term)?,
        });
    }
    sum.ok_or_else(|| Fault::Misfit("a matrix without columns".into()))
}
