//! The JSON graph of an archive, as far as Frit reads it. Source: torch/_export/serde/schema.py, version 8.

use serde::de::{Error, IgnoredAny};
use serde::{Deserialize, Deserializer};
use std::collections::HashMap;

/// The version of the schema that is read; a higher minor version adds what older readers may ignore.
pub(super) const MAJOR: u64 = 8;

#[derive(Deserialize)]
pub(super) struct Program {
    pub(super) graph_module: GraphModule,
    #[serde(default)]
    pub(super) torch_version: String,
}

#[derive(Deserialize)]
pub(super) struct Version {
    pub(super) major: u64,
    pub(super) minor: u64,
}

#[derive(Deserialize)]
pub(super) struct GraphModule {
    pub(super) graph: Graph,
    pub(super) signature: Signature,
    #[serde(default)]
    pub(super) module_call_graph: Vec<ModuleCall>,
}

#[derive(Deserialize)]
pub(super) struct ModuleCall {
    pub(super) fqn: String,
    pub(super) signature: Option<CallSignature>,
}

#[derive(Deserialize)]
pub(super) struct CallSignature {
    #[serde(default)]
    pub(super) out_spec: String,
}

#[derive(Deserialize)]
pub(super) struct Graph {
    pub(super) inputs: Vec<Argument>,
    pub(super) outputs: Vec<Argument>,
    pub(super) nodes: Vec<Node>,
    pub(super) tensor_values: HashMap<String, TensorMeta>,
}

#[derive(Deserialize)]
pub(super) struct Node {
    pub(super) target: String,
    pub(super) inputs: Vec<NamedArgument>,
    pub(super) outputs: Vec<Argument>,
    #[serde(default)]
    pub(super) metadata: Metadata,
    #[serde(default)]
    pub(super) name: Option<String>,
}

#[derive(Default, Deserialize)]
pub(super) struct Metadata {
    #[serde(default)]
    pub(super) nn_module_stack: String,
    /// The call in the module that this one came from, such as `detach_1;method_descriptor.detach`.
    #[serde(default)]
    pub(super) torch_fn: String,
}

#[derive(Deserialize)]
pub(super) struct NamedArgument {
    pub(super) name: String,
    pub(super) arg: Argument,
}

#[derive(Deserialize)]
pub(super) struct Named {
    pub(super) name: String,
}

#[derive(Deserialize)]
pub(super) struct GraphArgument {
    pub(super) graph: Box<Graph>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::enum_variant_names, reason = "variants are named after PyTorch's own")]
pub(super) enum Argument {
    AsNone(IgnoredAny),
    AsTensor(Named),
    AsTensors(Vec<Named>),
    AsInt(i64),
    AsInts(Vec<i64>),
    AsFloat(Number),
    AsFloats(Vec<Number>),
    AsString(String),
    AsStrings(IgnoredAny),
    AsSymInt(SymInt),
    AsSymInts(Vec<SymInt>),
    AsScalarType(u32),
    AsMemoryFormat(IgnoredAny),
    AsLayout(IgnoredAny),
    AsDevice(IgnoredAny),
    AsBool(bool),
    AsBools(IgnoredAny),
    AsSymBool(IgnoredAny),
    AsSymBools(IgnoredAny),
    AsGraph(GraphArgument),
    AsOptionalTensors(Vec<OptionalTensor>),
    AsCustomObj(IgnoredAny),
    AsOperator(IgnoredAny),
    AsSymFloat(IgnoredAny),
    AsSymFloats(IgnoredAny),
    AsOptionalTensor(OptionalTensor),
    AsComplex(IgnoredAny),
    AsNestedTensors(IgnoredAny),
    AsIntLists(IgnoredAny),
    AsStringToArgument(IgnoredAny),
    AsFloatLists(IgnoredAny),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OptionalTensor {
    AsTensor(Named),
    AsNone(IgnoredAny),
}

/// A size that is known, or the name of one that is computed.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SymInt {
    AsName(String),
    AsInt(i64),
}

/// A float; JSON has no infinities, which are texts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Number(pub(super) f64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(f64),
            Text(String),
        }
        match Written::deserialize(from)? {
            Written::Number(x) => Ok(Number(x)),
            Written::Text(text) => text.parse().map(Number).map_err(D::Error::custom),
        }
    }
}

#[derive(Deserialize)]
pub(super) struct TensorMeta {
    pub(super) dtype: u32,
    pub(super) sizes: Vec<Size>,
    #[serde(default)]
    pub(super) requires_grad: bool,
    #[serde(default)]
    pub(super) strides: Vec<Size>,
    #[serde(default)]
    pub(super) storage_offset: Option<Size>,
}

/// A size that is known, or an expression of symbols.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Size {
    AsInt(i64),
    AsExpr(Expression),
}

impl Size {
    /// The size, if it is known.
    pub(super) fn known(&self) -> Option<i64> {
        match self {
            Size::AsInt(n) => Some(*n),
            Size::AsExpr(_) => None,
        }
    }
}

#[derive(Clone, Deserialize)]
pub(super) struct Expression {
    pub(super) expr_str: String,
}

#[derive(Deserialize)]
pub(super) struct Signature {
    pub(super) input_specs: Vec<InputSpec>,
    pub(super) output_specs: Vec<OutputSpec>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum InputSpec {
    UserInput {
        arg: Argument,
    },
    Parameter {
        arg: Named,
        parameter_name: String,
    },
    Buffer {
        arg: Named,
        buffer_name: String,
        #[serde(default)]
        persistent: bool,
    },
    TensorConstant {
        arg: Named,
        tensor_constant_name: String,
    },
    CustomObj(IgnoredAny),
    Token(IgnoredAny),
    ConstantInput(IgnoredAny),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OutputSpec {
    UserOutput { arg: Argument },
    LossOutput(IgnoredAny),
    BufferMutation { buffer_name: String },
    GradientToParameter(IgnoredAny),
    GradientToUserInput(IgnoredAny),
    UserInputMutation(IgnoredAny),
    Token(IgnoredAny),
    ParameterMutation(IgnoredAny),
}

impl Node {
    /// Whether a decomposition made it of `detach`, for which it stands.
    pub(super) fn is_detach(&self) -> bool {
        self.metadata.torch_fn.ends_with(".detach")
    }

    /// Whether it may stand for a `detach`: a decomposition writes that as an alias, and may lose where it came from.
    pub(super) fn may_be_detach(&self) -> bool {
        let origin = self.metadata.torch_fn.as_str();
        let known = origin.contains("__getitem__") || origin.ends_with(".alias");
        self.target.starts_with("torch.ops.aten.alias") && !self.is_detach() && !known
    }

    /// Whether a decomposition took it out of a region without gradients.
    pub(super) fn is_under_no_grad(&self) -> bool {
        self.metadata.torch_fn.starts_with("wrap_with_set_grad_enabled;")
    }
}

/// What a record of `data/` holds, `model_weights_config.json`.
#[derive(Deserialize)]
pub(super) struct Payloads {
    pub(super) config: HashMap<String, Payload>,
}

#[derive(Deserialize)]
pub(super) struct Payload {
    pub(super) path_name: String,
    #[serde(default)]
    pub(super) use_pickle: bool,
    pub(super) tensor_meta: Option<TensorMeta>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_are_texts() {
        for (text, expected) in [
            ("1.5", 1.5),
            ("2", 2.0),
            ("\"-Infinity\"", f64::NEG_INFINITY),
            ("\"Infinity\"", f64::INFINITY),
        ] {
            assert_eq!(serde_json::from_str::<Number>(text).expect(text).0, expected);
        }
        assert!(serde_json::from_str::<Number>("\"NaN\"").expect("a number").0.is_nan());
        assert!(serde_json::from_str::<Number>("\"one\"").is_err());
    }
}
