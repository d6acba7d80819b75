//! Which argument of a call of PyTorch an operand of an ONNX node is.
//!
//! The exporter writes a call as one node or several. Operations that take weights are listed here, and a few of several nodes; the
//! operands of an elementwise node that is a whole call are the arguments in their order.

use super::super::exporter::Call;
use super::super::messages::NodeProto;
use super::Group;

/// What an operand is to the call of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// The argument at this position.
    Argument(usize),
    /// One of the values that the call names, in the order of the text.
    Value(usize),
    /// What the exporter added to express the operation.
    Exporters,
    Unknown,
}

/// What operand `i` of a node is to its call, which `group` are the nodes of.
pub(super) fn slot(call: &Call<'_>, node: &NodeProto, i: usize, group: &Group<'_>) -> Slot {
    use Slot::{Argument, Exporters, Unknown, Value};
    let is_computed = |k: usize| node.input.get(k).is_some_and(|name| group.makes(name));
    let is_number = |k: usize| node.input.get(k).is_some_and(|name| group.is_number(name));
    let is_whole = call.is_plain && group.count(None) == 1;
    match (call.op, node.op_type.as_str(), i) {
        ("linear", "Gemm" | "MatMul", _) => Argument(i),
        ("linear", "Add", _) => Argument(2),
        ("addmm" | "baddbmm", "Gemm" | "MatMul", 0 | 1) => Argument(i + 1),
        ("addmm" | "baddbmm", "Gemm" | "Add", _) if call.is_plain => Argument(0),
        (op, "Conv" | "ConvTranspose", _) if op.starts_with("conv") => Argument(i),
        ("embedding", "Gather", _) => Argument(i),
        // One that was folded into a convolution; its offset is the bias.
        (op, "Conv" | "ConvTranspose", 2) if op.contains("batch_norm") => Argument(2),
        // Its operators are many: by whether they train, and whether they return the statistics.
        (op, "BatchNormalization", _) if op.contains("batch_norm") => Argument(i),
        ("instance_norm", "InstanceNormalization" | "BatchNormalization", _) => Argument(i),
        ("layer_norm" | "native_layer_norm" | "rms_norm", _, 0) if is_norm(node) => Argument(0),
        // Between them is the shape that is normalized.
        ("layer_norm" | "native_layer_norm" | "rms_norm", _, _) if is_norm(node) => Argument(i + 1),
        ("rms_norm", "Mul", _) => Argument(2),
        // The scales and offsets of groups are ones and zeros.
        ("group_norm", "InstanceNormalization", 1 | 2) => Exporters,
        ("group_norm", "GroupNormalization", 1 | 2) => Argument(i + 1),
        ("group_norm", "Mul", _) => Argument(2),
        ("group_norm", "Add", _) => Argument(3),
        ("prelu" | "_prelu_kernel", "PRelu", _) => Argument(i),
        ("rsub", "Sub", 0 | 1) if is_whole => Argument(1 - i),
        // self + value · first · second
        ("addcmul" | "addcdiv", "Add", 0) => Argument(0),
        ("addcdiv", "Div", _) => Argument(i + 1),
        ("addcmul", "Mul", _) if call.is_plain && group.count(Some("Mul")) == 1 => Argument(i + 1),
        ("addcmul", "Mul", 1) if is_computed(0) => Argument(2),
        ("addcmul", "Mul", 1) if is_number(0) => Argument(1),
        // self + weight · (end − self) or end − (end − self) · (1 − weight)
        ("lerp", "Less", 0) | ("lerp", "Mul", 0) => Argument(2),
        ("lerp", "Sub", 1) if is_number(0) => Argument(2),
        ("lerp", "Add", 0) | ("lerp", "Sub", 1) => Argument(0),
        ("lerp", "Sub", 0) => Argument(1),
        (op, op_type, _) if is_whole && is_elementwise(op, op_type) => {
            if call.arguments.len() == node.input.len() { Argument(i) } else { Unknown }
        }
        (op, op_type, _) if is_whole && takes_values(op, op_type) => {
            if call.values.len() == node.input.len() { Value(i) } else { Unknown }
        }
        _ => Unknown,
    }
}

fn is_norm(node: &NodeProto) -> bool {
    matches!(node.op_type.as_str(), "LayerNormalization" | "RMSNormalization")
}

/// Whether the node computes PyTorch's operation of the same operands.
fn is_elementwise(op: &str, op_type: &str) -> bool {
    let pairs = [
        ("add", "Add"),
        ("sub", "Sub"),
        ("mul", "Mul"),
        ("div", "Div"),
        ("pow", "Pow"),
        ("maximum", "Max"),
        ("minimum", "Min"),
        ("where", "Where"),
    ];
    pairs.contains(&(op, op_type))
}

/// Whether the operands of the node are what the call names, which may be in a list.
fn takes_values(op: &str, op_type: &str) -> bool {
    match op_type {
        "Concat" => op == "cat",
        "Einsum" => op == "einsum",
        "MatMul" => matches!(op, "matmul" | "mm" | "bmm" | "mv" | "dot"),
        _ => false,
    }
}
