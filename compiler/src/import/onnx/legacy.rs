//! Converts operators of older opsets: attributes that became operands, and explicit broadcasting. Source: the histories
//! in ONNX's Changelog.md.

use super::context::{Bound, Fault, NodeContext};
use super::messages::AttributeProto;
use frit_ir::{DType, Shape, Tensor, ValueId};

/// An attribute that is an operand since a later opset: operator, attribute, operand, that opset.
type Moved = (&'static str, &'static str, usize, i64);

const MOVED: &[Moved] = &[
    ("Clip", "min", 1, 11),
    ("Clip", "max", 2, 11),
    ("Dropout", "ratio", 1, 12),
    ("Pad", "pads", 1, 11),
    ("Pad", "value", 2, 11),
    ("Reshape", "shape", 1, 5),
    ("Slice", "starts", 1, 10),
    ("Slice", "ends", 2, 10),
    ("Slice", "axes", 3, 10),
    ("Split", "split", 1, 13),
    ("Squeeze", "axes", 1, 13),
    ("TopK", "k", 1, 10),
    ("Unsqueeze", "axes", 1, 13),
    ("Upsample", "scales", 1, 9),
];

/// Operators that broadcast their second operand only with `broadcast = 1`, from `axis` on.
const BROADCAST: &[&str] =
    &["Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor"];
/// The opset since which operators broadcast by themselves.
const BROADCASTS: i64 = 7;

/// Whether the operator has this attribute in this opset, and later ones do not.
pub(super) fn has_attribute(operator: &str, attribute: &str, opset: i64) -> bool {
    let moved = |m: &&Moved| m.0 == operator && m.1 == attribute && opset < m.3;
    let broadcast = BROADCAST.contains(&operator) && matches!(attribute, "axis" | "broadcast");
    let others = match operator {
        "BatchNormalization" | "Dropout" => matches!(attribute, "consumed_inputs" | "is_test"),
        "Gemm" => attribute == "broadcast",
        _ => attribute == "consumed_inputs",
    };
    MOVED.iter().any(|m| moved(&m)) || (opset < BROADCASTS && (broadcast || others))
}

/// Makes the node what a later opset would have written.
pub(super) fn modernize(cx: &mut NodeContext<'_>) -> Result<(), Fault> {
    let (name, opset) = (cx.node.op_type.as_str(), cx.opset);
    for &(_, attribute, operand, _) in MOVED.iter().filter(|m| m.0 == name && opset < m.3) {
        let Some(found) = cx.node.attribute.iter().find(|a| a.name == attribute) else { continue };
        let value = value(cx, found)?;
        let value = cx.constant(value)?;
        give(cx, operand, value);
    }
    if cx.opset < BROADCASTS {
        before_broadcasting(cx, name)?;
    }
    Ok(())
}

/// What changed when operators began to broadcast by themselves.
fn before_broadcasting(cx: &mut NodeContext<'_>, name: &str) -> Result<(), Fault> {
    match name {
        "Tile" if cx.opset < 6 => return Err(Fault::Attribute("Tile of opset 1".into())),
        "BatchNormalization" if cx.int("is_test", 0) == 0 && cx.node.output.len() == 1 => {
            return Err(Fault::Attribute(
                "is_test = 0 with one output (before opset 7, and the default there), which neither trains nor \
                 evaluates,"
                    .into(),
            ));
        }
        "Dropout" => {
            let training =
                Tensor::ints(DType::Bool, Shape::scalar(), vec![1 - cx.int("is_test", 0)]);
            let training = cx.constant(training)?;
            give(cx, 2, training);
        }
        "PRelu" => {
            // One slope per channel, axis 1.
            let (x, slope) = (cx.input(0)?, cx.input(1)?);
            if cx.dims(slope).len() == 1 {
                aligned(cx, x, slope, 1)?;
            }
        }
        _ if BROADCAST.contains(&name) && cx.has("axis") && cx.int("broadcast", 0) != 0 => {
            let (a, b) = (cx.input(0)?, cx.input(1)?);
            let axis = cx.axis(a, cx.int("axis", 0))?;
            aligned(cx, a, b, axis)?;
        }
        _ => {}
    }
    Ok(())
}

/// Appends axes of size 1 to the second operand, so that its first lies at `axis` of the first.
fn aligned(cx: &mut NodeContext<'_>, a: ValueId, b: ValueId, axis: usize) -> Result<(), Fault> {
    let (rank, mut dims) = (cx.dims(a).len(), cx.dims(b));
    let single = dims.iter().product::<usize>() == 1;
    if !single && axis + dims.len() <= rank {
        dims.resize(rank - axis, 1);
        let b = cx.reshape(b, dims)?;
        give(cx, 1, b);
    }
    Ok(())
}

fn give(cx: &mut NodeContext<'_>, operand: usize, value: ValueId) {
    if cx.inputs.len() <= operand {
        cx.inputs.resize(operand + 1, None);
    }
    cx.inputs[operand] = Some(Bound::Value(value));
}

/// The attribute as an operand: integers are i64, a number has the dtype of the first operand.
fn value(cx: &NodeContext<'_>, attribute: &AttributeProto) -> Result<Tensor, Fault> {
    const FLOAT: i32 = 1;
    const INT: i32 = 2;
    const FLOATS: i32 = 6;
    Ok(match attribute.r#type {
        FLOAT => {
            let ty = cx.ty(cx.input(0)?).with_shape(Shape::scalar());
            Tensor::splat(ty, super::context::decimal(attribute.f))
        }
        INT => Tensor::vector_i64(vec![attribute.i]),
        FLOATS => {
            let values: Vec<f64> = attribute.floats.iter().map(|x| f64::from(*x)).collect();
            Tensor::floats(DType::F32, [values.len()], values)
        }
        _ => Tensor::vector_i64(attribute.ints.clone()),
    })
}
