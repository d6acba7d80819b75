//! Device memory of a test: every range is between guards, and is NaN until written.

use frit_ir::DType;
use half::{bf16, f16};

const ALIGNMENT: usize = 256;
const GUARD: usize = 256;

/// A range of bytes between guards.
pub(crate) struct Range {
    bytes: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Range {
    /// `len` bytes that begin `shift` bytes behind an aligned address.
    pub(crate) fn new(len: usize, shift: usize) -> Range {
        let bytes = vec![0xFF; len + shift + 2 * GUARD + ALIGNMENT];
        let address = bytes.as_ptr() as usize + GUARD;
        let begin = GUARD + address.next_multiple_of(ALIGNMENT) - address + shift;
        Range { bytes, begin, len }
    }

    pub(crate) fn of(content: &[u8], shift: usize) -> Range {
        let mut range = Range::new(content.len(), shift);
        range.content_mut().copy_from_slice(content);
        range
    }

    pub(crate) fn content(&self) -> &[u8] {
        &self.bytes[self.begin..self.begin + self.len]
    }

    pub(crate) fn content_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.begin..self.begin + self.len]
    }

    pub(crate) fn pointer(&mut self) -> *mut u8 {
        self.content_mut().as_mut_ptr()
    }

    /// Whether nothing was written outside.
    pub(crate) fn is_intact(&self) -> bool {
        let (before, rest) = self.bytes.split_at(self.begin);
        before.iter().chain(&rest[self.len..]).all(|b| *b == 0xFF)
    }
}

/// Element `i` of an array.
pub(crate) fn load(bytes: &[u8], dtype: DType, i: usize) -> f64 {
    let at = i * dtype.size();
    let part = |n: usize| &bytes[at..at + n];
    match dtype {
        DType::F64 => f64::from_le_bytes(part(8).try_into().unwrap()),
        DType::F32 => f32::from_le_bytes(part(4).try_into().unwrap()).into(),
        DType::F16 => f16::from_le_bytes(part(2).try_into().unwrap()).to_f64(),
        DType::BF16 => bf16::from_le_bytes(part(2).try_into().unwrap()).to_f64(),
        DType::F8E4M3 => eighth(part(1)[0], 3, 7, 0x7f),
        DType::F8E5M2 => eighth(part(1)[0], 2, 15, 0x7c),
        other => panic!("{other} in a matmul"),
    }
}

/// Decodes an 8-bit float with these significand bits, this exponent bias and first non-finite code, which is an
/// infinity if other codes follow.
fn eighth(code: u8, bits: i32, bias: i32, special: u8) -> f64 {
    let (size, sign) = (code & 0x7f, if code & 0x80 == 0 { 1.0 } else { -1.0 });
    if size >= special {
        return if size == special && special < 0x7f { sign * f64::INFINITY } else { f64::NAN };
    }
    let (exponent, fraction) = (i32::from(size) >> bits, f64::from(size & ((1 << bits) - 1)));
    let fraction = fraction / f64::from(1 << bits);
    let (lead, exponent) = if exponent == 0 { (0.0, 1) } else { (1.0, exponent) };
    sign * (lead + fraction) * f64::from(exponent - bias).exp2()
}

/// Writes element `i` of an array.
pub(crate) fn store(bytes: &mut [u8], dtype: DType, i: usize, x: f64) {
    let at = i * dtype.size();
    let mut put = |new: &[u8]| bytes[at..at + new.len()].copy_from_slice(new);
    match dtype {
        DType::F64 => put(&x.to_le_bytes()),
        DType::F32 => put(&(x as f32).to_le_bytes()),
        DType::F16 => put(&f16::from_f64(x).to_le_bytes()),
        DType::BF16 => put(&bf16::from_f64(x).to_le_bytes()),
        other => panic!("{other} in a matmul"),
    }
}
