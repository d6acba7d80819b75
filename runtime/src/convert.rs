//! Converts parameter elements between the float types of files and plans.

use crate::RunError;
use crate::device::Device;
use frit_ir::DType;
use frit_ir::plan::{BufferId, Group};
use half::{bf16, f16};
use std::borrow::Cow;

/// Elements that are converted at a time when written to a device.
const CHUNK: usize = 1 << 20;

/// Little-endian elements in another dtype; narrowing rounds to nearest even. `None` unless both are dtypes of stored
/// parameters: f32, f16 and bf16.
pub fn converted(bytes: &[u8], from: DType, to: DType) -> Option<Cow<'_, [u8]>> {
    let words = || bytes.as_chunks::<2>().0.iter();
    let wide = || bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
    let all: Vec<u8> = match (from, to) {
        (from, to) if from == to => return Some(Cow::Borrowed(bytes)),
        (DType::F32, DType::F16) => wide().flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        (DType::F32, DType::BF16) => wide().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        (DType::F16, DType::F32) => {
            words().flat_map(|b| f16::from_le_bytes(*b).to_f32().to_le_bytes()).collect()
        }
        (DType::BF16, DType::F32) => {
            words().flat_map(|b| bf16::from_le_bytes(*b).to_f32().to_le_bytes()).collect()
        }
        (DType::F16 | DType::BF16, DType::F16 | DType::BF16) => {
            return Some(
                converted(&converted(bytes, from, DType::F32)?, DType::F32, to)?
                    .into_owned()
                    .into(),
            );
        }
        _ => return None,
    };
    Some(Cow::Owned(all))
}

/// The buffers, with their dtypes, to which values of a group's parameters are written: the parameters and their copies.
pub(crate) fn held(group: &Group) -> impl Iterator<Item = (BufferId, DType)> {
    let copies = group.copies.iter().map(|c| (c.buffer, c.dtype));
    std::iter::once((group.master, group.dtype)).chain(copies)
}

/// Writes elements to a buffer of another dtype, from its element `first` on. Both dtypes must be supported by
/// [`converted`].
///
/// # Errors
/// If the device failed.
pub(crate) fn write(
    device: &mut impl Device,
    (buffer, dtype): (BufferId, DType),
    first: usize,
    bytes: &[u8],
    stored: DType,
) -> Result<(), RunError> {
    if dtype == stored {
        return device.write(buffer, first * dtype.size(), bytes);
    }
    for (i, chunk) in bytes.chunks(CHUNK * stored.size()).enumerate() {
        let chunk = converted(chunk, stored, dtype).expect("invariant: a dtype of parameters");
        device.write(buffer, (first + i * CHUNK) * dtype.size(), &chunk)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::{Tensor, TensorType};

    #[test]
    fn it_is_the_cast_of_the_interpreter() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut values =
            vec![0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 3.4e38, f32::INFINITY, 1e-40];
        values.extend((0..4096).map(|_| f32::from_bits(random.u32(..))));
        // Halfway between two neighbors in bf16.
        values.extend([0x3f80_8000_u32, 0x3f81_8000, 0x3f80_8001].map(f32::from_bits));
        values.retain(|x| !x.is_nan());
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let tensor = |dtype, bytes: &[u8]| {
            Tensor::from_bytes(TensorType::new(dtype, [values.len()]), bytes).expect("fits")
        };
        let held = [DType::F32, DType::F16, DType::BF16];
        for from in held {
            let stored = tensor(DType::F32, &bytes).cast(from).to_bytes();
            for to in held {
                let found = converted(&stored, from, to).expect("known");
                let expected = tensor(from, &stored).cast(to).to_bytes();
                assert!(*found == expected, "{from} to {to}");
            }
        }
        assert_eq!(converted(&bytes, DType::F32, DType::I32), None);
    }
}
