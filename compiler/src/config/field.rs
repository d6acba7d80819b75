//! Types of configuration values.

use super::choices::{
    AdapterKind, BatchNorm, Decay, FrozenDtype, Prefetch, Reduction, Residual, Targets,
};
use super::kind::{AUTO, COUNT, INF, Kind, Value, float_name};
use frit_ir::DType;
use frit_ir::ops::{AdjustLr, OptimizerKind, ScheduleKind};
use frit_ir::plan::{DeviceType, Strategy};
use frit_passes::loss::LossKind;
use frit_passes::offload::Offload;
use frit_passes::pad_tensor_cores::PadMode;
use frit_passes::recompute::Recompute;
use frit_passes::schedule::BackwardPrefetch;

/// A number that is absent.
const NONE: &str = "none";

/// The type of one field, read from and written as the value of a key.
pub(super) trait Field: Sized {
    /// The values that it takes, unless its key says otherwise.
    const KIND: Kind;

    /// From a value of its key.
    fn get(value: &Value) -> Option<Self>;

    /// As a value of its key.
    fn put(&self) -> Value;
}

impl Field for usize {
    const KIND: Kind = Kind::Integer(0, COUNT);

    fn get(value: &Value) -> Option<Self> {
        if let Value::Integer(i) = value { usize::try_from(*i).ok() } else { None }
    }

    fn put(&self) -> Value {
        Value::Integer(*self as u64)
    }
}

impl Field for u64 {
    const KIND: Kind = Kind::Integer(0, i64::MAX as u64);

    fn get(value: &Value) -> Option<Self> {
        if let Value::Integer(i) = value { Some(*i) } else { None }
    }

    fn put(&self) -> Value {
        Value::Integer(*self)
    }
}

impl Field for i64 {
    const KIND: Kind = Kind::ChoiceOrInteger(&[], i64::MIN);

    fn get(value: &Value) -> Option<Self> {
        if let Value::Signed(i) = value { Some(*i) } else { None }
    }

    fn put(&self) -> Value {
        Value::Signed(*self)
    }
}

/// `"none"`, or a number of at least 0.
impl Field for Option<usize> {
    const KIND: Kind = Kind::ChoiceOrInteger(&[NONE], 0);

    fn get(value: &Value) -> Option<Self> {
        match value {
            Value::Signed(i) => usize::try_from(*i).ok().map(Some),
            Value::Text(_) => Some(None),
            _ => None,
        }
    }

    fn put(&self) -> Value {
        self.map_or_else(|| Value::Text(NONE.into()), |n| Value::Signed(n as i64))
    }
}

/// `"auto"`, or an integer.
impl Field for Option<i64> {
    const KIND: Kind = Kind::ChoiceOrInteger(&[AUTO], i64::MIN);

    fn get(value: &Value) -> Option<Self> {
        match value {
            Value::Signed(i) => Some(Some(*i)),
            Value::Text(_) => Some(None),
            _ => None,
        }
    }

    fn put(&self) -> Value {
        self.map_or_else(|| Value::Text(AUTO.into()), Value::Signed)
    }
}

impl Field for f64 {
    const KIND: Kind = Kind::Number(0.0, INF);

    fn get(value: &Value) -> Option<Self> {
        if let Value::Number(x) = value { Some(*x) } else { None }
    }

    fn put(&self) -> Value {
        Value::Number(*self)
    }
}

/// `"none"`, or a number of bytes.
impl Field for Option<u64> {
    const KIND: Kind = Kind::Bytes(&["none"]);

    fn get(value: &Value) -> Option<Self> {
        match value {
            Value::Number(x) => Some(Some(*x as u64)),
            Value::Text(_) => Some(None),
            _ => None,
        }
    }

    fn put(&self) -> Value {
        self.map_or_else(|| Value::Text("none".into()), |n| Value::Number(n as f64))
    }
}

impl Field for bool {
    const KIND: Kind = Kind::Boolean;

    fn get(value: &Value) -> Option<Self> {
        if let Value::Boolean(b) = value { Some(*b) } else { None }
    }

    fn put(&self) -> Value {
        Value::Boolean(*self)
    }
}

impl Field for String {
    const KIND: Kind = Kind::Text;

    fn get(value: &Value) -> Option<Self> {
        if let Value::Text(s) = value { Some(s.clone()) } else { None }
    }

    fn put(&self) -> Value {
        Value::Text(self.clone())
    }
}

impl Field for [f64; 2] {
    const KIND: Kind = Kind::Pair;

    fn get(value: &Value) -> Option<Self> {
        if let Value::Pair(pair) = value { Some(*pair) } else { None }
    }

    fn put(&self) -> Value {
        Value::Pair(*self)
    }
}

impl Field for [f64; 3] {
    const KIND: Kind = Kind::Triple;

    fn get(value: &Value) -> Option<Self> {
        if let Value::Triple(triple) = value { Some(*triple) } else { None }
    }

    fn put(&self) -> Value {
        Value::Triple(*self)
    }
}

/// `"auto"`, or a number of at least 0.
impl Field for Option<f64> {
    const KIND: Kind = Kind::ChoiceOrNumber(&[AUTO], 0.0, INF);

    fn get(value: &Value) -> Option<Self> {
        match value {
            Value::Number(x) => Some(Some(*x)),
            Value::Text(_) => Some(None),
            _ => None,
        }
    }

    fn put(&self) -> Value {
        self.map_or_else(|| Value::Text(AUTO.into()), Value::Number)
    }
}

impl Field for Vec<String> {
    const KIND: Kind = Kind::List;

    fn get(value: &Value) -> Option<Self> {
        if let Value::List(list) = value { Some(list.clone()) } else { None }
    }

    fn put(&self) -> Value {
        Value::List(self.clone())
    }
}

impl Field for DType {
    const KIND: Kind = Kind::Float(&[]);

    fn get(value: &Value) -> Option<Self> {
        if let Value::Text(s) = value { s.parse().ok() } else { None }
    }

    fn put(&self) -> Value {
        Value::Text(float_name(self.name()).unwrap_or(self.name()).into())
    }
}

/// `"auto"`, or a float type.
impl Field for Option<DType> {
    const KIND: Kind = Kind::Float(&[AUTO]);

    fn get(value: &Value) -> Option<Self> {
        match value {
            Value::Text(s) if s == AUTO => Some(None),
            other => DType::get(other).map(Some),
        }
    }

    fn put(&self) -> Value {
        self.map_or_else(|| Value::Text(AUTO.into()), |d| d.put())
    }
}

/// How the loss is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// Dynamic if `precision.compute` is fp16, else none.
    Auto,
    /// Dynamic.
    Dynamic,
    /// None.
    None,
    /// Always this.
    Fixed(f64),
}

impl Field for LossScale {
    const KIND: Kind = Kind::ChoiceOrNumber(&["auto", "dynamic", "none"], 0.0, INF);

    fn get(value: &Value) -> Option<Self> {
        match value {
            Value::Number(x) => Some(LossScale::Fixed(*x)),
            Value::Text(s) => match s.as_str() {
                "auto" => Some(LossScale::Auto),
                "dynamic" => Some(LossScale::Dynamic),
                "none" => Some(LossScale::None),
                _ => None,
            },
            _ => None,
        }
    }

    fn put(&self) -> Value {
        match self {
            LossScale::Fixed(x) => Value::Number(*x),
            LossScale::Auto => Value::Text("auto".into()),
            LossScale::Dynamic => Value::Text("dynamic".into()),
            LossScale::None => Value::Text("none".into()),
        }
    }
}

/// The value as text; `None` is `auto`.
const RECOMPUTE: [(&str, Option<Recompute>); 4] = [
    ("none", Some(Recompute::NONE)),
    ("unit", Some(Recompute::UNIT)),
    ("selective", Some(Recompute::SELECTIVE)),
    (AUTO, None),
];

impl Field for Option<Recompute> {
    const KIND: Kind =
        Kind::Choice(&[RECOMPUTE[0].0, RECOMPUTE[1].0, RECOMPUTE[2].0, RECOMPUTE[3].0]);

    fn get(value: &Value) -> Option<Self> {
        let Value::Text(s) = value else { return None };
        RECOMPUTE.iter().find(|(word, _)| word == s).map(|(_, recompute)| *recompute)
    }

    fn put(&self) -> Value {
        let known = RECOMPUTE.iter().find(|(_, recompute)| recompute == self);
        Value::Text(known.map_or(AUTO, |(word, _)| *word).into())
    }
}

/// Fields that are one of some words; as an `Option`, `None` is `auto`.
macro_rules! words {
    ($($name:ident)*) => {$(
        impl Field for $name {
            const KIND: Kind = Kind::Choice($name::WORDS);

            fn get(value: &Value) -> Option<Self> {
                if let Value::Text(s) = value { $name::of(s) } else { None }
            }

            fn put(&self) -> Value {
                Value::Text(self.word().into())
            }
        }

        impl Field for Option<$name> {
            const KIND: Kind = Kind::ChoiceOrAuto($name::WORDS);

            fn get(value: &Value) -> Option<Self> {
                match value {
                    Value::Text(s) if s == AUTO => Some(None),
                    other => $name::get(other).map(Some),
                }
            }

            fn put(&self) -> Value {
                self.map_or_else(|| Value::Text(AUTO.into()), |word| word.put())
            }
        }
    )*};
}

words! {
    AdapterKind AdjustLr BackwardPrefetch BatchNorm Decay DeviceType FrozenDtype LossKind Offload OptimizerKind PadMode Prefetch Reduction
    Residual ScheduleKind Strategy Targets
}
