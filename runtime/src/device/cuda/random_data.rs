//! Random operands for measurements: on zeros a GPU draws less power and runs at higher clocks than in training.
//!
//! The numbers depend only on their type and range, so every start measures on the same data.

use frit_cuda::CudaError;
use frit_cuda::driver::{Address, Driver, StreamHandle};
use frit_ir::plan::{IndexRange, Place, Plan};
use frit_ir::{DType, Tensor};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::collections::HashMap;

/// Numbers before they repeat: a prime, so that rows of a matrix differ.
const PERIOD: usize = 65_537;

/// Elements in device memory, and which values they may have.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Region {
    pub(super) at: Address,
    pub(super) bytes: usize,
    pub(super) values: Values,
}

/// The values that elements may have: floats are between −1 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Values {
    dtype: DType,
    /// The least and the greatest integer.
    range: (i64, i64),
}

impl Values {
    /// Of floats.
    pub(super) fn floats(dtype: DType) -> Values {
        Values { dtype, range: (0, 0) }
    }

    /// Of what a task reads: integers that every reader of an input takes as labels or indices, and 0 where that is not
    /// known, which is an index of any axis.
    pub(super) fn of(plan: &Plan, place: &Place) -> Values {
        let dtype = place.ty.dtype;
        let input = plan.inputs.iter().find(|input| input.buffer == place.buffer);
        let ranges: &[IndexRange] = input.map_or(&[], |input| &input.ranges);
        let least = ranges.iter().map(|r| r.lo.max(0)).max().unwrap_or(0);
        let greatest = ranges.iter().map(|r| r.hi).min().unwrap_or(0).max(least);
        Values { dtype, range: if dtype == DType::Bool { (0, 1) } else { (least, greatest) } }
    }

    /// The numbers of a period.
    fn bytes(self) -> Vec<u8> {
        let Values { dtype, range: (least, greatest) } = self;
        let mut random = ChaCha12Rng::seed_from_u64(PERIOD as u64);
        let mut unit = || (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        if let Some(one) = one_in_8_bits(dtype) {
            // Codes of a sign are ordered as the magnitudes are.
            let mut code = || (unit() * f64::from(one + 1)) as u8 | (u8::from(unit() < 0.5) << 7);
            return (0..PERIOD).map(|_| code()).collect();
        }
        let tensor = match dtype.is_float() {
            true => {
                let values = (0..PERIOD).map(|_| 2.0 * unit() - 1.0).collect();
                Tensor::floats(dtype, [PERIOD], values)
            }
            false => {
                let count = (greatest - least + 1) as f64;
                let values = (0..PERIOD).map(|_| least + (unit() * count) as i64).collect();
                Tensor::ints(dtype, [PERIOD], values)
            }
        };
        tensor.to_bytes()
    }
}

/// The code of 1 in a dtype of 8-bit floats.
fn one_in_8_bits(dtype: DType) -> Option<u8> {
    match dtype {
        // A sign; 4 bits of an exponent with bias 7, or 5 with bias 15; the rest.
        DType::F8E4M3 => Some(7 << 3),
        DType::F8E5M2 => Some(15 << 2),
        _ => None,
    }
}

/// Periods of random numbers, made once each. They are copied to the device while this lives.
#[derive(Default)]
pub(super) struct RandomData(HashMap<Values, Vec<u8>>);

impl RandomData {
    /// Fills regions of device memory, in order; ends when everything is on its way.
    ///
    /// # Errors
    /// If a copy is refused.
    pub(super) fn fill(
        &mut self,
        driver: &impl Driver,
        regions: &[Region],
        on: StreamHandle,
    ) -> Result<(), CudaError> {
        for Region { at, bytes, values } in regions.iter().filter(|r| r.bytes > 0) {
            let period = self.0.entry(*values).or_insert_with(|| values.bytes());
            let mut done = period.len().min(*bytes);
            // SAFETY: the period lives as long as this, and its owner waits for the copy.
            unsafe { driver.copy_in(*at, period.as_ptr(), done, on)? };
            while done < *bytes {
                // Whole periods, so that these go on where they end.
                let more = done.min(bytes - done);
                driver.copy(at + done as Address, *at, more, on)?;
                done += more;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_cuda::recording::{Call, Recording};

    fn numbers(dtype: DType, range: (i64, i64)) -> Vec<f64> {
        let bytes = Values { dtype, range }.bytes();
        assert_eq!(bytes, Values { dtype, range }.bytes(), "{dtype}: the same in every start");
        let ty = frit_ir::TensorType::new(dtype, [PERIOD]);
        Tensor::from_bytes(ty, &bytes).expect("a period").to_f64s()
    }

    #[test]
    fn floats_are_small_and_finite_and_integers_within_their_range() {
        use DType::{BF16, Bool, F8E4M3, F8E5M2, F16, F32, F64, I32, I64, U8};
        for dtype in [F8E4M3, F8E5M2] {
            let bytes = Values::floats(dtype).bytes();
            let one = one_in_8_bits(dtype).expect("8 bits");
            assert_eq!(bytes.len(), PERIOD, "{dtype}");
            assert!(bytes.iter().all(|code| code & 0x7f <= one), "{dtype}: no more than 1");
            assert!((0..=one).all(|code| bytes.contains(&code) && bytes.contains(&(code | 0x80))));
        }
        for dtype in [F64, F32, F16, BF16] {
            let all = numbers(dtype, (0, 0));
            assert!(all.iter().all(|x| x.abs() <= 1.0), "{dtype}");
            let negative = all.iter().filter(|x| **x < 0.0).count();
            assert!((PERIOD / 3..PERIOD * 2 / 3).contains(&negative), "{dtype}: {negative}");
            let zeros = all.iter().filter(|x| **x == 0.0).count();
            assert!(zeros < PERIOD / 20, "{dtype}: {zeros}");
        }
        for (dtype, range) in [(I64, (0, 9)), (I32, (3, 5)), (U8, (0, 0)), (Bool, (0, 1))] {
            let all = numbers(dtype, range);
            let (least, greatest) = (range.0 as f64, range.1 as f64);
            assert!(all.iter().all(|x| (least..=greatest).contains(x)), "{dtype}");
            assert!(all.contains(&least) && all.contains(&greatest), "{dtype}");
        }
    }

    #[test]
    fn a_region_is_filled_to_its_end() {
        let driver = Recording::new((9, 0));
        let on = StreamHandle(7);
        for bytes in [0, 6, 2 * PERIOD, 2 * PERIOD + 2, 14 * PERIOD + 6] {
            let region = Region { at: 256, bytes, values: Values::floats(DType::BF16) };
            RandomData::default().fill(&driver, &[region], on).expect("filled");
            let mut end = 256;
            for call in driver.take() {
                let (to, n) = match call {
                    Call::CopyIn(to, n, _) => (to, n),
                    Call::Copy(to, from, n, _) => {
                        assert!(from == 256 && (end - 256) % (2 * PERIOD as Address) == 0);
                        (to, n)
                    }
                    other => panic!("{other:?}"),
                };
                assert_eq!(to, end);
                end += n as Address;
            }
            assert_eq!(end, 256 + bytes as Address);
        }
    }
}
