//! Matmul.

use super::call::{Call, broadcast_places};
use super::{Evaluate, Evaluated};
use crate::Shape;
use crate::ops::MatMul;

impl Evaluate for MatMul {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (a, b) = (call.floats(0), call.floats(1));
        let (a_dims, b_dims, dims) = (call.dims(0), call.dims(1), call.results[0].shape.dims());
        let (lead, [m, n]) =
            (&dims[..dims.len() - 2], [dims[dims.len() - 2], dims[dims.len() - 1]]);
        let k = a_dims[a_dims.len() - if self.trans_a { 2 } else { 1 }];
        let matrices = |dims: &[usize]| {
            broadcast_places(&Shape::from(&dims[..dims.len() - 2]), &Shape::from(lead))
        };
        let mut out = Vec::with_capacity(call.results[0].shape.numel());
        for (a_matrix, b_matrix) in matrices(a_dims).into_iter().zip(matrices(b_dims)) {
            let a = &a[a_matrix * m * k..(a_matrix + 1) * m * k];
            let b = &b[b_matrix * k * n..(b_matrix + 1) * k * n];
            for i in 0..m {
                let a_at = |p: usize| if self.trans_a { a[p * m + i] } else { a[i * k + p] };
                if self.trans_b {
                    for j in 0..n {
                        let row = &b[j * k..(j + 1) * k];
                        out.push(row.iter().enumerate().fold(0.0, |sum, (p, y)| sum + a_at(p) * y));
                    }
                } else {
                    let first = out.len();
                    out.resize(first + n, 0.0);
                    for p in 0..k {
                        let x = a_at(p);
                        for (sum, y) in out[first..].iter_mut().zip(&b[p * n..(p + 1) * n]) {
                            *sum += x * y;
                        }
                    }
                }
            }
        }
        Ok(vec![call.real(0, out)])
    }
}
