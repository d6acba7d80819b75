//! Rows whose even and odd elements lie apart, so that a window of stride 2 reads neighbors.

use crate::simd::vectorized;

vectorized! {
    /// Writes the elements of a row into their halves; if their number is odd, the last one at the end of `even`.
    pub(crate) fn split_row(row: &[f32], even: &mut [f32], odd: &mut [f32]) {
        let (pairs, rest) = row.as_chunks::<2>();
        for ((pair, even), odd) in pairs.iter().zip(&mut *even).zip(odd) {
            (*even, *odd) = (pair[0], pair[1]);
        }
        if let ([last], Some(to)) = (rest, even.last_mut()) {
            *to = *last;
        }
    }
}

vectorized! {
    /// The row of both halves, as [`split_row`] writes them.
    pub(crate) fn join_row(even: &[f32], odd: &[f32], row: &mut [f32]) {
        let (pairs, rest) = row.as_chunks_mut::<2>();
        for ((pair, first), second) in pairs.iter_mut().zip(even).zip(odd) {
            *pair = [*first, *second];
        }
        if let ([last], Some(from)) = (rest, even.last()) {
            *last = *from;
        }
    }
}
