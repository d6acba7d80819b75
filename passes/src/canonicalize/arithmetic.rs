//! Simplifies arithmetic, logic and selection with neutral constants, and orders commutative operands.

use super::{Rewrite, Rewritten, Rule, add, constant};
use crate::rule::{Claim, Statement};
use frit_ir::ops::{BinaryFn, CompareFn, Expand, LogicalFn, ReduceFn};
use frit_ir::{DType, Graph, GraphError, NodeId, Op, Tensor, ValueId};

/// Rules about arithmetic, logic and selection.
pub(super) const RULES: &[Rule] = &[
    Rule {
        statement: Statement::floats(
            "neutral-operand",
            "x · 1 = x / 1 = x + (−0) = x − 0 = x; of integers x + 0 = x, too",
            &[
                "mul(x:<T=f16|bf16|f32|i32|i64|u8>[],1:<T>[])",
                "mul(1:<T=f16|bf16|f32|i32>[],x:<T>[])",
                "div(x:<T=f16|bf16|f32|i32>[],1:<T>[])",
                "add(x:<T=f16|bf16|f32|f64>[],-0:<T>[])",
                "add(-0:<T=f16|bf16|f32|f64>[],x:<T>[])",
                "add(x:<T=i32|i64|u8>[],0:<T>[])",
                "sub(x:<T=f16|bf16|f32|f64|i32|i64|u8>[],0:<T>[])",
            ],
        ),
        apply: neutral,
    },
    Rule {
        statement: Statement {
            name: "power-of-one",
            equation: "x¹ = x",
            claim: Claim::Tested {
                bits: true,
                test: "canonicalize::arithmetic::tests::first_powers_are_their_bases",
                why: "SMT-LIB has no powers: every f16 and bf16 is tried, and every 4,099th f32",
            },
        },
        apply: power_of_one,
    },
    Rule {
        statement: Statement::bits(
            "logic-with-neutral",
            "x ∧ true = x ∨ false = x ⊕ false = x",
            &[
                "and(x:bool[a],1:bool[<|b,a>])",
                "and(1:bool[<|b,a>],x:bool[a])",
                "<or|xor>(x:bool[a],0:bool[<|b,a>])",
                "<or|xor>(0:bool[<|b,a>],x:bool[a])",
            ],
        ),
        apply: logic_with_neutral,
    },
    Rule {
        statement: Statement::bits(
            "logic-known",
            "x ∧ false = false, x ∨ true = true",
            &[
                "and(x:bool[<a|b,a>],0:bool[<|a>])",
                "or(x:bool[<a|b,a>],1:bool[<|a>])",
                "and(0:bool[],x:bool[a])",
            ],
        ),
        apply: logic_known,
    },
    Rule {
        statement: Statement::floats(
            "logic-of-same",
            "x ∧ x = x ∨ x = x",
            &["<and|or>(x:<bool|i32|i64|u8>[],x)"],
        ),
        apply: logic_of_same,
    },
    Rule {
        statement: Statement::bits(
            "select-known",
            "select(true, a, b) = a, select(false, a, b) = b, select(c, a, a) = a",
            &[
                "select(<0|1>:bool[<|c,a,b>],x:f32[a,b],y:f32[<a,b|b|>])",
                "select(c:bool[<|a|b,a>],x:f32[a],x)",
            ],
        ),
        apply: select,
    },
    Rule {
        statement: Statement::floats(
            "reduce-of-one",
            "max(x) = min(x) = x over axes of one element, kept; of floats a sum stays, as that of −0 alone is 0",
            &[
                "reduce{f=\"<max|min>\",axes=<[0]|[0,1]|[]>,keep_dims=true}(x:<f16|bf16|f32|f64|i32|i64>[1,1])",
            ],
        ),
        apply: reduce_of_one,
    },
    Rule {
        statement: Statement::floats(
            "constant-last",
            "c + x = x + c, and so for ·, =, ≠, ∧, ∨, ⊕",
            &[
                "add(@c:<T=f16|i32|u8>[],x:<T>[])",
                "mul(@c:<T=f8e5m2|u8>[],x:<T>[])",
                "<eq|ne>(@c:<T=f16|bf16|f32|f64|i32>[],x:<T>[])",
                "<and|or|xor>(@c:<T=i32|u8>[],x:<T>[])",
            ],
        ),
        apply: constant_last,
    },
];

/// The operand that the result equals bit for bit, if the other is neutral.
fn neutral(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let Op::Binary(f) = node.op else { return Ok(Rewrite::None) };
    let (a, b) = (node.inputs[0], node.inputs[1]);
    let ty = graph.ty(node.outputs[0]);
    let float = ty.dtype.is_float();
    // −0 is the neutral element of float addition, +0 that of subtraction.
    let is_neutral = |v: ValueId, right: bool| {
        let Some(c) = graph.constant(v).and_then(Tensor::as_splat) else { return false };
        match f {
            BinaryFn::Mul => c == 1.0,
            BinaryFn::Div => right && c == 1.0,
            BinaryFn::Add => c == 0.0 && (!float || c.is_sign_negative()),
            BinaryFn::Sub => right && c == 0.0 && (!float || c.is_sign_positive()),
            _ => false,
        }
    };
    if is_neutral(b, true) && graph.ty(a) == ty {
        return Ok(Rewrite::To(a));
    }
    let first = is_neutral(a, false) && graph.ty(b) == ty;
    Ok(if first { Rewrite::To(b) } else { Rewrite::None })
}

fn power_of_one(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let Op::Binary(BinaryFn::Pow) = node.op else { return Ok(Rewrite::None) };
    let (x, exponent) = (node.inputs[0], node.inputs[1]);
    let is_one = graph.constant(exponent).and_then(Tensor::as_splat) == Some(1.0);
    let same_type = graph.ty(x) == graph.ty(node.outputs[0]);
    Ok(if is_one && same_type { Rewrite::To(x) } else { Rewrite::None })
}

/// Puts a constant first operand of a commutative operation second, which rules rely on.
fn constant_last(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let commutes = matches!(
        node.op,
        Op::Binary(BinaryFn::Add | BinaryFn::Mul)
            | Op::Compare(CompareFn::Eq | CompareFn::Ne)
            | Op::Logical(_)
    );
    if !commutes {
        return Ok(Rewrite::None);
    }
    let (a, b) = (node.inputs[0], node.inputs[1]);
    if graph.constant(a).is_none() || graph.constant(b).is_some() {
        return Ok(Rewrite::None);
    }
    graph.set_inputs(id, vec![b, a])?;
    Ok(Rewrite::Edited)
}

/// An operand that is one known bool.
struct Known {
    operand: ValueId,
    is_true: bool,
    other: ValueId,
}

/// The function of a logical node on bools, and its known operands.
fn known_operands(graph: &Graph, id: NodeId) -> Option<(LogicalFn, Vec<Known>)> {
    let node = graph.node(id);
    let Op::Logical(f) = node.op else { return None };
    if graph.ty(node.outputs[0]).dtype != DType::Bool {
        return None;
    }
    let (a, b) = (node.inputs[0], node.inputs[1]);
    let known = [(b, a), (a, b)].into_iter().filter_map(|(operand, other)| {
        let value = graph.constant(operand).and_then(Tensor::as_splat)?;
        Some(Known { operand, is_true: value != 0.0, other })
    });
    Some((f, known.collect()))
}

fn logic_with_neutral(graph: &mut Graph, id: NodeId) -> Rewritten {
    let Some((f, known)) = known_operands(graph, id) else { return Ok(Rewrite::None) };
    let neutral = f == LogicalFn::And;
    let Some(found) = known.into_iter().find(|known| known.is_true == neutral) else {
        return Ok(Rewrite::None);
    };
    let y = graph.node(id).outputs[0];
    to_shape_of(graph, id, found.other, y).map(Rewrite::To)
}

fn logic_known(graph: &mut Graph, id: NodeId) -> Rewritten {
    let Some((f, known)) = known_operands(graph, id) else { return Ok(Rewrite::None) };
    let decides = |known: &Known| f != LogicalFn::Xor && known.is_true == (f == LogicalFn::Or);
    let Some(found) = known.into_iter().find(decides) else { return Ok(Rewrite::None) };
    let y = graph.node(id).outputs[0];
    let value = f64::from(u8::from(found.is_true));
    let value = Tensor::splat(graph.ty(found.operand).with_shape([]), value);
    let value = constant(graph, id, value)?;
    to_shape_of(graph, id, value, y).map(Rewrite::To)
}

fn logic_of_same(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let idempotent = matches!(node.op, Op::Logical(LogicalFn::And | LogicalFn::Or));
    Ok(match node.inputs[..] {
        [a, b] if idempotent && a == b => Rewrite::To(a),
        _ => Rewrite::None,
    })
}

fn select(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    if node.op != Op::Select {
        return Ok(Rewrite::None);
    }
    let (condition, a, b, y) = (node.inputs[0], node.inputs[1], node.inputs[2], node.outputs[0]);
    let taken = match graph.constant(condition).and_then(Tensor::as_splat) {
        Some(c) => {
            if c != 0.0 {
                a
            } else {
                b
            }
        }
        None if a == b => a,
        None => return Ok(Rewrite::None),
    };
    to_shape_of(graph, id, taken, y).map(Rewrite::To)
}

fn to_shape_of(
    graph: &mut Graph,
    id: NodeId,
    value: ValueId,
    like: ValueId,
) -> Result<ValueId, GraphError> {
    let shape = graph.ty(like).shape.clone();
    if graph.ty(value).shape == shape {
        return Ok(value);
    }
    add(graph, id, Op::Expand(Expand { shape }), &[value])
}

/// A largest or smallest of one element. Sums stay: the sum of −0 alone is 0.
fn reduce_of_one(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let Op::Reduce(op) = &node.op else { return Ok(Rewrite::None) };
    let x = node.inputs[0];
    let trivial = |axis: &usize| graph.ty(x).shape.0[*axis] == 1;
    let selects = matches!(op.f, ReduceFn::Max | ReduceFn::Min);
    let same_shape = op.keep_dims || op.axes.is_empty();
    let found = same_shape && selects && op.axes.iter().all(trivial);
    Ok(if found { Rewrite::To(x) } else { Rewrite::None })
}

#[cfg(test)]
mod tests {
    use frit_ir::interpret::{Options, eval_op};
    use frit_ir::ops::BinaryFn;
    use frit_ir::{DType, Op, Tensor};

    #[test]
    fn first_powers_are_their_bases() {
        let f32s = (0..=u32::MAX).step_by(4_099).map(|bits| f64::from(f32::from_bits(bits)));
        let f16s = (0..=u16::MAX).map(|bits| {
            let (sign, exponent, rest) = (bits >> 15, (bits >> 10) & 31, f64::from(bits & 1023));
            let size = match exponent {
                31 if rest == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                0 => rest * 2f64.powi(-24),
                e => (1.0 + rest / 1024.0) * 2f64.powi(i32::from(e) - 15),
            };
            if sign == 1 { -size } else { size }
        });
        let bf16s = (0..=u16::MAX).map(|bits| f64::from(f32::from_bits(u32::from(bits) << 16)));
        let all: [(DType, Vec<f64>); 3] = [
            (DType::F16, f16s.collect()),
            (DType::BF16, bf16s.collect()),
            (DType::F32, f32s.collect()),
        ];
        for (dtype, values) in all {
            let n = values.len();
            let x = Tensor::floats(dtype, [n], values.clone());
            assert!(values.iter().zip(x.to_f64s()).all(|(a, b)| bits(*a) == bits(b)), "{dtype}");
            let one = Tensor::floats(dtype, [], vec![1.0]);
            let y = eval_op(&Op::Binary(BinaryFn::Pow), &[&x, &one], Options::default());
            let y = y.expect("it evaluates").remove(0).to_f64s();
            assert!(values.iter().zip(y).all(|(a, b)| bits(*a) == bits(b)), "{dtype}");
        }
    }

    /// The bits of a number; those of one NaN for all.
    fn bits(x: f64) -> u64 {
        if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() }
    }
}
