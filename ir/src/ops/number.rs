//! Numbers in attributes. JSON has no infinities and no NaN, so these are written as strings. Equality is by
//! bits: 0 and −0 differ, and a NaN equals every NaN.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::hash::Hash;

/// A float with bitwise equality and hashing.
pub(crate) trait Bits {
    /// Its bits.
    type Bits: Eq + Hash;

    /// The bits, the same for every NaN.
    fn bits(&self) -> Self::Bits;
}

impl Bits for f64 {
    type Bits = u64;

    fn bits(&self) -> u64 {
        if self.is_nan() { f64::NAN.to_bits() } else { self.to_bits() }
    }
}

impl Bits for Option<f64> {
    type Bits = Option<u64>;

    fn bits(&self) -> Option<u64> {
        self.as_ref().map(Bits::bits)
    }
}

/// Equality and hashing of a structure by the bits of these floats, and by these other fields: all that it has.
macro_rules! by_bits {
    ($name:ident { $($float:ident),* } { $($field:ident),* }) => {
        impl $name {
            fn identity(&self) -> impl Eq + std::hash::Hash {
                use $crate::ops::number::Bits;
                let $name { $($float,)* $($field,)* } = self;
                (($($float.bits(),)*), ($($field,)*))
            }
        }

        $crate::ops::number::by_identity!($name);
    };
}
pub(crate) use by_bits;

/// Equality and hashing by what the method `identity` gives.
macro_rules! by_identity {
    ($name:ident) => {
        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.identity() == other.identity()
            }
        }

        impl Eq for $name {}

        impl std::hash::Hash for $name {
            fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
                self.identity().hash(state);
            }
        }
    };
}
pub(crate) use by_identity;

/// A number that JSON can write: an integer, a finite float, or `"inf"`, `"-inf"`, `"nan"`.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Scalar {
    Int(i64),
    Float(f64),
    Special(String),
}

impl Scalar {
    pub(super) fn of(x: f64, float: bool, int: i64) -> Scalar {
        match (float, x) {
            (false, _) => Scalar::Int(int),
            (true, x) if x.is_finite() => Scalar::Float(x),
            (true, x) if x.is_nan() => Scalar::Special("nan".into()),
            (true, x) => Scalar::Special(if x > 0.0 { "inf" } else { "-inf" }.into()),
        }
    }

    pub(super) fn float(&self) -> Option<f64> {
        match self {
            Scalar::Int(i) => Some(*i as f64),
            Scalar::Float(x) => Some(*x),
            Scalar::Special(s) => match s.as_str() {
                "nan" => Some(f64::NAN),
                "inf" => Some(f64::INFINITY),
                "-inf" => Some(f64::NEG_INFINITY),
                _ => None,
            },
        }
    }

    pub(super) fn int(&self) -> Option<i64> {
        match self {
            Scalar::Int(i) => Some(*i),
            _ => None,
        }
    }
}

/// Writes a float; for `#[serde(with)]`.
pub(crate) fn serialize<S: Serializer>(x: &f64, s: S) -> Result<S::Ok, S::Error> {
    Scalar::of(*x, true, 0).serialize(s)
}

/// Reads a float; for `#[serde(with)]`.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
    let scalar = Scalar::deserialize(d)?;
    scalar.float().ok_or_else(|| serde::de::Error::custom("expected a number"))
}

/// The same for a float that may be missing.
pub(super) mod option {
    use super::Scalar;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Writes a float or nothing; for `#[serde(with)]`.
    pub(in super::super) fn serialize<S: Serializer>(
        x: &Option<f64>,
        s: S,
    ) -> Result<S::Ok, S::Error> {
        x.map(|x| Scalar::of(x, true, 0)).serialize(s)
    }

    /// Reads a float or nothing; for `#[serde(with)]`.
    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        d: D,
    ) -> Result<Option<f64>, D::Error> {
        let error = || serde::de::Error::custom("expected a number");
        let scalar = Option::<Scalar>::deserialize(d)?;
        scalar.map(|x| x.float().ok_or_else(error)).transpose()
    }
}
