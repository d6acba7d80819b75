//! Element types of tensors.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The element type of a tensor.
///
/// The two 8-bit floats have names and sizes but no operation accepts them yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinities (OCP FP8).
    F8E4M3,
    /// 8-bit float, 5 exponent and 2 mantissa bits (OCP FP8).
    F8E5M2,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned byte.
    U8,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Every element type, in declaration order.
    pub const ALL: [DType; 10] = [
        DType::F64,
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::I64,
        DType::I32,
        DType::U8,
        DType::Bool,
    ];

    /// Size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::F8E4M3 | DType::F8E5M2 | DType::U8 | DType::Bool => 1,
        }
    }

    /// Whether this is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(
            self,
            DType::F64 | DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2
        )
    }

    /// Whether this is a float of fewer than 32 bits.
    pub fn is_low_precision(self) -> bool {
        self.is_float() && self.size() < 4
    }

    /// Explicit significand bits, by which floats are ordered when promoted; 0 for integers.
    pub fn mantissa_bits(self) -> u32 {
        match self {
            DType::F64 => 52,
            DType::F32 => 23,
            DType::F16 => 10,
            DType::BF16 => 7,
            DType::F8E4M3 => 3,
            DType::F8E5M2 => 2,
            _ => 0,
        }
    }

    /// Whether every value of `self` is a value of `wider` (so that a cast there and back is exact).
    pub fn widens_to(self, wider: DType) -> bool {
        use DType::*;
        self == wider
            || match self {
                F8E4M3 | F8E5M2 => matches!(wider, F16 | BF16 | F32 | F64),
                F16 | BF16 => matches!(wider, F32 | F64),
                F32 => wider == F64,
                Bool => !matches!(wider, Bool),
                U8 => matches!(wider, I32 | I64 | F16 | F32 | F64),
                I32 => matches!(wider, I64 | F64),
                I64 | F64 => false,
            }
    }

    /// Name in the text form and in JSON: `f32`, `bf16`, `i64`, `bool` …
    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }

    /// Rounds a real number to the nearest value of this float type, ties to even.
    ///
    /// Integer types truncate toward zero, as a cast does; `Bool` is 0 or 1.
    pub fn round(self, x: f64) -> f64 {
        match self {
            DType::F64 => x,
            DType::F32 => f64::from(x as f32),
            DType::F16 => round_to(x, 10, 15),
            DType::BF16 => round_to(x, 7, 127),
            DType::F8E4M3 | DType::F8E5M2 => x,
            DType::I64 => x as i64 as f64,
            DType::I32 => f64::from(x as i32),
            DType::U8 => f64::from(x as u8),
            DType::Bool => f64::from(u8::from(x != 0.0)),
        }
    }
}

/// Rounds once, to a float of so many explicit significand bits whose largest exponent is `max`.
///
/// The conversions of `half` are not used: they look at the upper half of an f64 only, or go through
/// f32, and so round some numbers twice.
fn round_to(x: f64, bits: i32, max: i32) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let power = |e: i32| f64::from_bits(((e + 1023) as u64) << 52);
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let unit = power(exponent.max(1 - max) - bits);
    let rounded = (x / unit).round_ties_even() * unit;
    if rounded.abs() >= power(max) * 2.0 { f64::INFINITY.copysign(x) } else { rounded }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = String;

    /// Accepts the text-form names and the configuration spellings `fp64`, `fp32` and `fp16`.
    fn from_str(s: &str) -> Result<Self, String> {
        let name = match s {
            "fp64" => "f64",
            "fp32" => "f32",
            "fp16" => "f16",
            other => other,
        };
        DType::ALL
            .into_iter()
            .find(|d| d.name() == name)
            .ok_or_else(|| format!("unknown dtype `{s}`"))
    }
}

#[cfg(test)]
mod tests;
