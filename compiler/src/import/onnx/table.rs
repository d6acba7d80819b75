//! Infers properties of a parameter from its values: the TorchScript exporter records neither the padding row of
//! `torch.nn.Embedding` nor which parameters are fixed.

use super::tensor::Stored;
use frit_ir::DType;

/// Rows that are looked at to recognize a table of sines and cosines.
const ROWS: usize = 64;
/// Error of a table's element, against the sum formula; tables are stored in f32 or less.
const TOLERANCE: f64 = 2e-3;

/// The one row of a table `[rows, width]` that is all zero, while no other is.
///
/// PyTorch sets the padding row to zero and gives it no gradient, so that it stays zero; a row that was
/// drawn at random or trained never is.
pub(super) fn padding_row(table: &Stored) -> Option<usize> {
    let &[rows, width] = table.ty.shape.dims() else { return None };
    let row_bytes = width * table.ty.dtype.size();
    if rows < 3 || width < 2 || !table.ty.dtype.is_float() {
        return None;
    }
    let mut zero =
        table.bytes.chunks_exact(row_bytes).enumerate().filter(|(_, r)| r.iter().all(|b| *b == 0));
    let (row, _) = zero.next()?;
    zero.next().is_none().then_some(row)
}

/// Whether row `p` of the table holds sin(p·ω) and cos(p·ω) for some frequencies, in two halves or in
/// pairs: the positions of Vaswani et al. 2017, which no model trains. The table may have an axis of one
/// element for the batch, before its rows or after.
///
/// Two neighboring rows differ by a rotation that is the same everywhere, which is what is checked.
pub(super) fn is_sinusoidal(table: &Stored) -> bool {
    let dims: Vec<usize> = table.ty.shape.dims().iter().copied().filter(|&n| n != 1).collect();
    let [rows, width] = dims[..] else { return false };
    if rows < 4 || width < 4 || !width.is_multiple_of(2) || table.ty.dtype != DType::F32 {
        return false;
    }
    let (elements, _) = table.bytes.as_chunks::<4>();
    let at =
        |row: usize, column: usize| f64::from(f32::from_le_bytes(elements[row * width + column]));
    let half = width / 2;
    let halves = |row: usize, i: usize| (at(row, i), at(row, half + i));
    let pairs = |row: usize, i: usize| (at(row, 2 * i), at(row, 2 * i + 1));
    let rotates = |point: &dyn Fn(usize, usize) -> (f64, f64)| {
        (0..half).all(|i| {
            let (sin, cos) = point(1, i);
            let near = |a: f64, b: f64| (a - b).abs() < TOLERANCE;
            point(0, i) == (0.0, 1.0)
                && (1..rows.min(ROWS)).all(|row| {
                    let ((s, c), (s0, c0)) = (point(row, i), point(row - 1, i));
                    near(s, s0 * cos + c0 * sin) && near(c, c0 * cos - s0 * sin)
                })
        })
    };
    // The first frequency is not zero, or a table of zeros and ones would do.
    at(1, 0) != 0.0 && (rotates(&halves) || rotates(&pairs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::TensorType;
    use prost::bytes::Bytes;

    fn table(rows: usize, width: usize, value: impl Fn(usize, usize) -> f64) -> Stored {
        let values = (0..rows * width).map(|i| value(i / width, i % width) as f32);
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        Stored { ty: TensorType::new(DType::F32, [rows, width]), bytes: Bytes::from(bytes) }
    }

    fn noise(row: usize, column: usize) -> f64 {
        ((row * 37 + column * 11 + 5) % 17) as f64 * 0.1 - 0.75
    }

    #[test]
    fn one_zero_row_is_padding() {
        let with = |zero: &'static [usize]| {
            padding_row(&table(5, 4, |r, c| if zero.contains(&r) { 0.0 } else { noise(r, c) }))
        };
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[2]), Some(2));
        assert_eq!(with(&[0, 3]), None);
    }

    #[test]
    fn sines_and_cosines_are_recognized_in_both_layouts() {
        let angle = |p: usize, i: usize| p as f64 / 10000f64.powf(2.0 * i as f64 / 8.0);
        let halves = table(20, 8, |p, c| match c {
            0..4 => angle(p, c).sin(),
            _ => angle(p, c - 4).cos(),
        });
        let pairs = table(20, 8, |p, c| match c % 2 {
            0 => angle(p, c / 2).sin(),
            _ => angle(p, c / 2).cos(),
        });
        assert!(is_sinusoidal(&halves) && is_sinusoidal(&pairs));
        for shape in [[1, 20, 8], [20, 1, 8]] {
            let ty = TensorType::new(DType::F32, shape);
            assert!(is_sinusoidal(&Stored { ty, bytes: pairs.bytes.clone() }));
        }
        assert!(!is_sinusoidal(&table(20, 8, noise)));
        assert!(!is_sinusoidal(&table(20, 8, |_, c| f64::from(u8::from(c >= 4)))));
    }
}
