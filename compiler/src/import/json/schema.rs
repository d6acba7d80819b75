//! The types of JSON models; the JSON Schema is derived from them.

use frit_ir::DType;
use frit_ir::ops::Init;
use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// A model.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Frit model")]
pub struct Model {
    /// Version of the format: 1.
    pub frit_model: u32,
    /// Name of the model.
    pub name: String,
    /// Named sizes; `null` must be bound with `--bind`.
    #[serde(default)]
    pub dims: BTreeMap<String, Option<usize>>,
    /// Tensors fed from data at every micro-step.
    pub inputs: Vec<InputDecl>,
    /// Parameters.
    #[serde(default)]
    pub params: Vec<ParamDecl>,
    /// Functions, in any order.
    #[serde(default)]
    pub functions: Vec<FunctionDecl>,
    /// Operations, calls and repeats, in order.
    pub nodes: Vec<Item>,
    /// Names of the values that the model returns.
    pub outputs: Vec<String>,
}

/// A function, which calls are replaced by.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FunctionDecl {
    /// Name in calls.
    pub name: String,
    /// Names of the operands inside.
    pub inputs: Vec<String>,
    /// Names of the results inside; of a gradient function `_` for an input without a gradient.
    pub outputs: Vec<String>,
    /// Attributes that a call may give, with their defaults; inside, `{"attr": "NAME"}` stands for the value.
    #[serde(default)]
    pub attrs: Map<String, Value>,
    /// Operations, calls and repeats, in order; they read nothing but the operands and each other.
    pub nodes: Vec<Item>,
    /// Name of the function that is its gradient.
    #[serde(default)]
    pub gradient: Option<String>,
    /// The dtype that it and its gradient run in, whatever `precision` says: f32, bf16 or f16.
    #[serde(default)]
    pub precision: Option<String>,
}

/// A tensor fed from data.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InputDecl {
    /// Name in the model and in the data.
    pub name: String,
    /// Element type.
    pub dtype: ElementType,
    /// Shape.
    pub shape: Vec<Size>,
}

/// A parameter.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ParamDecl {
    /// Name; inside a repeat, the scope is put before it.
    pub name: String,
    /// Shape.
    pub shape: Vec<Size>,
    /// Element type.
    #[serde(default = "f32_type")]
    pub dtype: ElementType,
    /// First value.
    #[serde(default)]
    pub init: InitDecl,
    /// Whether it trains.
    #[serde(default = "yes")]
    pub trainable: bool,
}

fn f32_type() -> ElementType {
    ElementType::F32
}

fn yes() -> bool {
    true
}

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the variants are the types' own names")]
pub enum ElementType {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    U8,
    Bool,
}

impl ElementType {
    /// The type in the graph.
    pub fn dtype(self) -> DType {
        match self {
            ElementType::F64 => DType::F64,
            ElementType::F32 => DType::F32,
            ElementType::F16 => DType::F16,
            ElementType::BF16 => DType::BF16,
            ElementType::I64 => DType::I64,
            ElementType::I32 => DType::I32,
            ElementType::U8 => DType::U8,
            ElementType::Bool => DType::Bool,
        }
    }
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum InitDecl {
    /// All zeros.
    #[default]
    Zeros,
    /// All ones.
    Ones,
    /// Every element this.
    Constant(f64),
    /// Normal with mean 0.
    #[serde(rename_all = "snake_case")]
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform between `-bound` and `bound`.
    Uniform {
        /// Half the width of the range.
        bound: f64,
    },
}

impl InitDecl {
    /// The same for the graph.
    pub fn init(self) -> Init {
        match self {
            InitDecl::Zeros => Init::Constant(0.0),
            InitDecl::Ones => Init::Constant(1.0),
            InitDecl::Constant(value) => Init::Constant(value),
            InitDecl::Normal { std } => Init::Normal { std },
            InitDecl::Uniform { bound } => Init::Uniform { bound },
        }
    }
}

/// A size: a number, or an expression over the names in `dims`.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(untagged)]
pub enum Size {
    /// A number.
    Number(usize),
    /// An expression such as `4*width`.
    Expression(String),
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Size;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a size: a number or an expression over `dims`")
            }
            fn visit_u64<E: Error>(self, n: u64) -> Result<Size, E> {
                usize::try_from(n).map(Size::Number).map_err(|_| E::custom("the size is too large"))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Size, E> {
                Ok(Size::Expression(text.into()))
            }
        }
        d.deserialize_any(Visitor)
    }
}

/// A part of a model's computation.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(untagged)]
pub enum Item {
    /// One operation.
    Node(NodeDecl),
    /// A call of a function.
    Call(CallDecl),
    /// A block written once and repeated.
    Repeat(RepeatDecl),
}

/// One operation.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct NodeDecl {
    /// Name of an operation of Frit's graph.
    pub op: String,
    /// Names of the operands.
    #[schemars(default)]
    pub inputs: Vec<String>,
    /// Names of the results, `_` for one that nobody reads.
    pub outputs: Vec<String>,
    /// Attributes of the operation.
    #[schemars(default)]
    pub attrs: Map<String, Value>,
    /// Name of the node in messages.
    #[schemars(default)]
    pub id: Option<String>,
    /// Added to the module path.
    #[schemars(default)]
    pub scope: Option<String>,
}

/// A call of a function.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct CallDecl {
    /// Name of the function.
    pub call: String,
    /// Names of the operands.
    #[schemars(default)]
    pub inputs: Vec<String>,
    /// Names of the results, `_` for one that nobody reads.
    pub outputs: Vec<String>,
    /// Attributes of the function.
    #[schemars(default)]
    pub attrs: Map<String, Value>,
    /// Name of the call in messages.
    #[schemars(default)]
    pub id: Option<String>,
    /// Added to the module path.
    #[schemars(default)]
    pub scope: Option<String>,
}

/// A block written once and repeated.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct RepeatDecl {
    /// How often.
    pub repeat: Size,
    /// Module path of each copy; `{i}` is its number, from 0.
    #[schemars(default)]
    pub scope: Option<String>,
    /// The name between braces that stands for the number; `i` if absent.
    #[schemars(default)]
    pub index: Option<String>,
    /// Values that go from copy to copy.
    #[schemars(default)]
    pub carry: Vec<String>,
    /// Parameters of each copy.
    #[schemars(default)]
    pub params: Vec<ParamDecl>,
    /// Operations of each copy.
    pub nodes: Vec<Item>,
}

/// All kinds of item at once, so that errors inside one keep their place in the text.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AnyItem {
    op: Option<String>,
    call: Option<String>,
    inputs: Option<Vec<String>>,
    outputs: Option<Vec<String>>,
    attrs: Option<Map<String, Value>>,
    id: Option<String>,
    scope: Option<String>,
    repeat: Option<Size>,
    index: Option<String>,
    carry: Option<Vec<String>>,
    params: Option<Vec<ParamDecl>>,
    nodes: Option<Vec<Item>>,
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let any = AnyItem::deserialize(d)?;
        let of_repeat = any.carry.is_some()
            || any.params.is_some()
            || any.nodes.is_some()
            || any.index.is_some();
        let of_node = any.inputs.is_some()
            || any.outputs.is_some()
            || any.attrs.is_some()
            || any.id.is_some();
        match (any.op, any.call, any.repeat) {
            (Some(_), None, None) | (None, Some(_), None) if of_repeat => Err(D::Error::custom(
                "`carry`, `params`, `nodes` and `index` belong to a `repeat`, not to an `op` or `call`",
            )),
            (Some(op), None, None) => Ok(Item::Node(NodeDecl {
                op,
                inputs: any.inputs.unwrap_or_default(),
                outputs: any.outputs.ok_or_else(|| D::Error::missing_field("outputs"))?,
                attrs: any.attrs.unwrap_or_default(),
                id: any.id,
                scope: any.scope,
            })),
            (None, Some(call), None) => Ok(Item::Call(CallDecl {
                call,
                inputs: any.inputs.unwrap_or_default(),
                outputs: any.outputs.ok_or_else(|| D::Error::missing_field("outputs"))?,
                attrs: any.attrs.unwrap_or_default(),
                id: any.id,
                scope: any.scope,
            })),
            (None, None, Some(_)) if of_node => Err(D::Error::custom(
                "`inputs`, `outputs`, `attrs` and `id` belong to an `op` or `call`, not to a `repeat`",
            )),
            (None, None, Some(repeat)) => Ok(Item::Repeat(RepeatDecl {
                repeat,
                scope: any.scope,
                index: any.index,
                carry: any.carry.unwrap_or_default(),
                params: any.params.unwrap_or_default(),
                nodes: any.nodes.ok_or_else(|| D::Error::missing_field("nodes"))?,
            })),
            _ => Err(D::Error::custom("a node needs one of `op`, `call` and `repeat`")),
        }
    }
}
