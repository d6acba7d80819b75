//! The precision classes of operations.
//!
//! Source: the operator lists `lower_precision_fp`, `fp32` and `promote` of PyTorch for CUDA (`aten/src/ATen/autocast_mode.h`);
//! operations in none of them run in the dtype of their operands. Operations that differ from PyTorch say so.

/// In which precision autocast runs an operation, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// The precision class.
    pub class: Class,
    /// Its source.
    pub source: Source,
}

impl Precision {
    pub(crate) const LOWER: Precision = torch(Class::Lower, "lower_precision_fp");
    pub(crate) const F32: Precision = torch(Class::F32, "fp32");
    pub(crate) const PROMOTE: Precision = torch(Class::Promote, "promote");
    pub(crate) const UNLISTED: Precision =
        Precision { class: Class::Promote, source: Source::Unlisted };
    pub(crate) const LAYOUT: Precision =
        Precision { class: Class::Layout, source: Source::Unlisted };
    pub(crate) const INTEGER: Precision = own(Class::Fixed, "truth values or random bits");
    pub(crate) const GIVEN: Precision = own(Class::Fixed, "says itself which dtype it has");
    pub(crate) const BOUNDARY: Precision = own(
        Class::Layout,
        "is a boundary of a function, which is gone once every node has its dtype",
    );
    pub(crate) const AFTER: Precision =
        own(Class::Fixed, "comes after autocast, in the dtypes of what it is made from");

    /// Whether a model computes with the operation: others come after autocast, or compute nothing.
    pub fn is_of_models(&self) -> bool {
        *self != Precision::AFTER && *self != Precision::BOUNDARY
    }
}

pub(crate) const fn own(class: Class, why: &'static str) -> Precision {
    Precision { class, source: Source::Own(why) }
}

const fn torch(class: Class, list: &'static str) -> Precision {
    Precision { class, source: Source::Torch(list) }
}

/// The precision class of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Operands in low precision, accumulation in f32, result in low precision.
    Lower,
    /// Operands and results in f32.
    F32,
    /// The dtype of the first operand, with statistics in f32 inside; scale, bias and statistics stay
    /// f32, and so does the result of an f32 operand.
    F32Inside,
    /// The widest float among the operands.
    Promote,
    /// The dtype of its operand. Nothing is computed, so a cast may as well come before as after.
    Layout,
    /// The operation itself says which dtype it has: explicit casts, leaves, training operations.
    Fixed,
}

impl Class {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Class::Lower => "lower_precision",
            Class::F32 => "fp32",
            Class::F32Inside => "fp32_inside",
            Class::Promote => "promote",
            Class::Layout => "layout",
            Class::Fixed => "fixed",
        }
    }
}

/// The source of an operation's class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// PyTorch's list of this name for CUDA.
    Torch(&'static str),
    /// PyTorch does not list it: it runs in the dtype that it is given.
    Unlisted,
    /// Frit's own rule, and the reason.
    Own(&'static str),
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Torch(list) => write!(f, "PyTorch `{list}`"),
            Source::Unlisted => write!(f, "not in PyTorch's lists"),
            Source::Own(why) => write!(f, "{why}"),
        }
    }
}
