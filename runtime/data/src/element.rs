//! Element types of data files, and the input types that accept them.

use frit_ir::DType;
use half::{bf16, f16};
use std::fmt;

/// The element type of a tensor in a data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the variants are the types' own names")]
pub enum Element {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

impl Element {
    /// Every element type.
    pub const ALL: [Element; 13] = [
        Element::F64,
        Element::F32,
        Element::F16,
        Element::BF16,
        Element::I64,
        Element::I32,
        Element::I16,
        Element::I8,
        Element::U64,
        Element::U32,
        Element::U16,
        Element::U8,
        Element::Bool,
    ];

    /// Its name, as that of a [`DType`] where there is one.
    pub fn name(self) -> &'static str {
        match self {
            Element::F64 => "f64",
            Element::F32 => "f32",
            Element::F16 => "f16",
            Element::BF16 => "bf16",
            Element::I64 => "i64",
            Element::I32 => "i32",
            Element::I16 => "i16",
            Element::I8 => "i8",
            Element::U64 => "u64",
            Element::U32 => "u32",
            Element::U16 => "u16",
            Element::U8 => "u8",
            Element::Bool => "bool",
        }
    }

    /// Size in bytes.
    pub fn size(self) -> usize {
        match self {
            Element::F64 | Element::I64 | Element::U64 => 8,
            Element::F32 | Element::I32 | Element::U32 => 4,
            Element::F16 | Element::BF16 | Element::I16 | Element::U16 => 2,
            Element::I8 | Element::U8 | Element::Bool => 1,
        }
    }

    /// Whether it is an integer or boolean type.
    pub fn is_integer(self) -> bool {
        !matches!(self, Element::F64 | Element::F32 | Element::F16 | Element::BF16)
    }

    /// The minimum and maximum of an integer type; `None` for floats.
    pub fn bounds(self) -> Option<(i128, i128)> {
        let bits = 8 * self.size() as u32;
        match self {
            Element::Bool => Some((0, 1)),
            Element::U64 | Element::U32 | Element::U16 | Element::U8 => Some((0, (1 << bits) - 1)),
            Element::I64 | Element::I32 | Element::I16 | Element::I8 => {
                Some((-(1 << (bits - 1)), (1 << (bits - 1)) - 1))
            }
            _ => None,
        }
    }

    /// Whether its bytes are those of `dtype`.
    pub fn is(self, dtype: DType) -> bool {
        self.name() == dtype.name() || (self, dtype) == (Element::U64, DType::I64)
    }

    /// Whether an input of `dtype` accepts elements of this type. Integers are widened, or narrowed after checking that
    /// every value fits; a float input accepts integer types that it represents exactly; floats are widened, and f32 is
    /// rounded to 16 bits. A boolean input accepts any integer type.
    pub fn feeds(self, dtype: DType) -> bool {
        match dtype {
            DType::Bool => self.is_integer(),
            DType::I64 | DType::I32 | DType::U8 => self.is_integer(),
            DType::F64 => self.size() <= 4 || self == Element::F64,
            DType::F32 => self.is_exact_in(24) || self == Element::F32,
            DType::F16 => self.is_exact_in(11) || self.is_narrow_float() || self == Element::F32,
            DType::BF16 => self.is_exact_in(8) || self.is_narrow_float() || self == Element::F32,
            DType::F8E4M3 | DType::F8E5M2 => false,
        }
    }

    /// Whether a float with this many significant bits represents every value.
    fn is_exact_in(self, bits: u32) -> bool {
        match self.bounds() {
            Some((_, most)) => most < 1 << bits,
            None => bits > 11 && self.is_narrow_float(),
        }
    }

    fn is_narrow_float(self) -> bool {
        matches!(self, Element::F16 | Element::BF16)
    }

    /// The names of the types that an input of `dtype` accepts, its own first.
    pub(crate) fn feeding(dtype: DType) -> String {
        let mut all = Element::ALL.to_vec();
        all.retain(|e| e.feeds(dtype));
        all.sort_by_key(|e| !e.is(dtype));
        all.iter().map(|e| e.name()).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<DType> for Element {
    /// The type with the same bytes; u8 for 8-bit floats.
    fn from(dtype: DType) -> Element {
        Element::ALL.into_iter().find(|e| e.is(dtype)).unwrap_or(Element::U8)
    }
}

/// A number of any element type.
#[derive(Clone, Copy)]
enum Number {
    Float(f64),
    Int(i64),
}

/// The elements in order.
fn numbers(from: Element, bytes: &[u8]) -> Box<dyn Iterator<Item = Number> + '_> {
    macro_rules! read {
        ($t:ty, $number:expr) => {{
            let (elements, _) = bytes.as_chunks::<{ size_of::<$t>() }>();
            Box::new(elements.iter().map(|b| $number(<$t>::from_le_bytes(*b))))
        }};
    }
    match from {
        Element::F64 => read!(f64, Number::Float),
        Element::F32 => read!(f32, |x| Number::Float(f64::from(x))),
        Element::F16 => read!(f16, |x: f16| Number::Float(x.to_f64())),
        Element::BF16 => read!(bf16, |x: bf16| Number::Float(x.to_f64())),
        Element::I64 => read!(i64, Number::Int),
        Element::U64 => read!(u64, |x| Number::Int(x as i64)),
        Element::I32 => read!(i32, |x| Number::Int(i64::from(x))),
        Element::U32 => read!(u32, |x| Number::Int(i64::from(x))),
        Element::I16 => read!(i16, |x| Number::Int(i64::from(x))),
        Element::U16 => read!(u16, |x| Number::Int(i64::from(x))),
        Element::I8 => read!(i8, |x| Number::Int(i64::from(x))),
        Element::U8 | Element::Bool => read!(u8, |x| Number::Int(i64::from(x))),
    }
}

/// Writes elements in the type of an input, as ONNX's Cast does: the bytes are appended to `out`.
pub fn convert(from: Element, bytes: &[u8], to: DType, out: &mut Vec<u8>) {
    if from.is(to) {
        return out.extend_from_slice(bytes);
    }
    let float = |x: Number| match x {
        Number::Float(x) => x,
        Number::Int(x) => x as f64,
    };
    let int = |x: Number| match x {
        Number::Float(x) => x as i64,
        Number::Int(x) => x,
    };
    let all = numbers(from, bytes);
    macro_rules! write {
        ($convert:expr) => {
            for x in all {
                out.extend_from_slice(&$convert(x).to_le_bytes());
            }
        };
    }
    match to {
        DType::F64 => write!(float),
        DType::F32 => write!(|x| float(x) as f32),
        DType::F16 => write!(|x| f16::from_f64(DType::F16.round(float(x)))),
        // Every type that is converted to bf16 is exact in f32.
        DType::BF16 => write!(|x| bf16::from_f32(float(x) as f32)),
        DType::I64 => write!(int),
        DType::I32 => write!(|x| int(x) as i32),
        DType::U8 | DType::F8E4M3 | DType::F8E5M2 => write!(|x| int(x) as u8),
        DType::Bool => write!(|x| u8::from(float(x) != 0.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::{Tensor, TensorType};

    #[test]
    fn inputs_take_what_they_hold() {
        let taken = |dtype| Element::feeding(dtype);
        assert_eq!(taken(DType::F32), "f32, f16, bf16, i16, i8, u16, u8, bool");
        assert_eq!(taken(DType::BF16), "bf16, f32, f16, i8, u8, bool");
        assert_eq!(taken(DType::F16), "f16, f32, bf16, i8, u8, bool");
        assert_eq!(taken(DType::I32), "i32, i64, i16, i8, u64, u32, u16, u8, bool");
        assert_eq!(taken(DType::I64), "i64, u64, i32, i16, i8, u32, u16, u8, bool");
        assert!(!Element::F64.feeds(DType::F32) && !Element::F32.feeds(DType::I64));
        assert!(!Element::I64.feeds(DType::F32) && Element::U32.feeds(DType::F64));
    }

    #[test]
    fn conversions_are_those_of_a_cast() {
        let bytes: Vec<u8> = (0..=255).flat_map(|i: u8| [i, i.wrapping_mul(37)]).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::I32, DType::U8, DType::Bool] {
            let from = Element::from(dtype);
            let bytes: Vec<u8> = match dtype {
                DType::Bool => bytes.iter().map(|b| b & 1).collect(),
                _ => bytes.clone(),
            };
            let ty = TensorType::new(dtype, [bytes.len() / dtype.size()]);
            let tensor = Tensor::from_bytes(ty, &bytes).expect("it fits");
            for to in [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::Bool] {
                if !from.feeds(to) {
                    continue;
                }
                let mut found = Vec::new();
                convert(from, &bytes, to, &mut found);
                let found =
                    Tensor::from_bytes(TensorType::new(to, tensor.ty.shape.clone()), &found);
                let same = |(a, b): (f64, f64)| a == b || (a.is_nan() && b.is_nan());
                let (a, b) = (found.expect("it fits").to_f64s(), tensor.cast(to).to_f64s());
                assert!(a.into_iter().zip(b).all(same), "{from} to {to}");
            }
        }
    }
}
