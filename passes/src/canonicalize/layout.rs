//! Removes casts and layout operations that do nothing, and merges layout operations with the layout before them.

use super::{Rewrite, Rewritten, Rule, add};
use crate::rule::Statement;
use frit_ir::ops::{Cast, MatMul, Reshape, Slice, Transpose, UnaryFn};
use frit_ir::{DType, Graph, Node, NodeId, Op, Shape, ValueId};

/// Rules about casts, layout operations and matmuls.
pub(super) const RULES: &[Rule] = &[
    Rule {
        statement: Statement::bits(
            "cast-same",
            "cast[T](x: T) = x",
            &[r#"cast{to="<T=f32|bf16|i64|bool>"}(x:<T>[*])"#],
        ),
        apply: cast_same,
    },
    Rule {
        statement: Statement::floats(
            "cast-of-cast",
            "cast[C](cast[B](x: A)) = cast[C](x) if B holds every A, and C does or is a float or bool, or neither A nor B is a float",
            CASTS,
        ),
        apply: cast_of_cast,
    },
    Rule {
        statement: Statement::bits(
            "reshape-same",
            "reshape(x) = x if the shape stays",
            &["reshape{shape=[<dims>]}(x:f32[*])"],
        ),
        apply: reshape_same,
    },
    Rule {
        statement: Statement::bits(
            "expand-same",
            "expand(x) = x if the shape stays",
            &["expand{shape=[<dims>]}(x:f32[*])"],
        ),
        apply: expand_same,
    },
    Rule {
        statement: Statement::bits(
            "slice-whole",
            "slice(x) = x if the shape stays and no axis is reversed",
            &[
                "slice{start=[0,0],size=[a,b],step=[1,1]}(x:f32[a,b])",
                "slice{start=[0,0],size=[a,1],step=[1,<3|-1>]}(x:f32[a,1])",
            ],
        ),
        apply: slice_whole,
    },
    Rule {
        statement: Statement::bits(
            "pad-nothing",
            "pad(x) = x if the shape stays",
            &["pad{low=[0,0],high=[0,0],value=0.0}(x:f32[a,b])"],
        ),
        apply: pad_nothing,
    },
    Rule {
        statement: Statement::bits(
            "split-into-one",
            "split(x) = x into one part",
            &["split{axis=0,sizes=[a]}(x:f32[a,b])", "split{axis=1,sizes=[b]}(x:f32[a,b])"],
        ),
        apply: split_into_one,
    },
    Rule {
        statement: Statement::bits(
            "concat-of-one",
            "concat(x) = x, and operands without elements are left out",
            &[
                "concat{axis=<axis>}(x:f32[*])",
                "concat{axis=0}(x:f32[a,b],y:f32[0,b])",
                "concat{axis=0}(y:f32[0,b],x:f32[a,b])",
                "concat{axis=1}(x:f32[a,b],y:f32[a,0],z:f32[a,c])",
            ],
        ),
        apply: concat,
    },
    Rule {
        statement: Statement::bits(
            "reshape-of-reshape",
            "reshape(reshape(x)) = reshape(x)",
            &[
                "reshape{shape=[c,a*b]}(reshape{shape=[b*c,a]}(x:f32[a,b,c]))",
                "reshape{shape=[a*b*c]}(reshape{shape=[a,b*c]}(x:f32[a*b,c]))",
                "reshape{shape=[a,b,c]}(reshape{shape=[a*b*c]}(x:f32[a*b,1,c]))",
            ],
        ),
        apply: reshape_of_reshape,
    },
    Rule {
        statement: Statement::bits(
            "reshape-unmerges",
            "reshape(transpose(reshape(x))) = transpose(reshape(x)) if the inner reshape merges first axes that the outer splits again",
            &[
                "reshape{shape=[a,b,<c,d|d,c>]}(transpose{perm=[0,<1,2|2,1>]}(reshape{shape=[a*b,c,d]}(x:f32[a,b,c,d])))",
                "reshape{shape=[a,b,d,c]}(transpose{perm=[0,2,1]}(reshape{shape=[a*b,c,d]}(x:f32[a*b*c,d])))",
                "reshape{shape=[a,b,c,3,d]}(transpose{perm=[0,2,1]}(reshape{shape=[a*b*c,d,3]}(x:f32[a,b,c,d,3])))",
                "reshape{shape=[a,b,3,c,d]}(transpose{perm=[0,3,1,2]}(reshape{shape=[a*b,c,d,3]}(x:f32[a,b,c,d,3])))",
            ],
        ),
        apply: reshape_unmerges,
    },
    Rule {
        statement: Statement::bits(
            "transpose-identity",
            "transpose(x) = x if every axis stays",
            &["transpose{perm=<identity>}(x:f32[*])"],
        ),
        apply: transpose_identity,
    },
    Rule {
        statement: Statement::bits(
            "transpose-of-transpose",
            "transpose(transpose(x)) = transpose(x)",
            &["transpose{perm=<perm>}(transpose{perm=<perm>}(x:f32[*]))"],
        ),
        apply: transpose_of_transpose,
    },
    Rule {
        statement: Statement::bits(
            "expand-of-expand",
            "expand(expand(x)) = expand(x)",
            &[
                "expand{shape=[c,a,b]}(expand{shape=[a,b]}(x:f32[<a,1|1,b|b|1|>]))",
                "expand{shape=[c,a,b]}(expand{shape=[1,a,b]}(x:f32[1,b]))",
            ],
        ),
        apply: expand_of_expand,
    },
    Rule {
        statement: Statement::bits(
            "slice-of-slice",
            "slice(slice(x)) = slice(x) if there are elements",
            &[
                "slice{start=[a,1],size=[a,a],step=[1,2]}(slice{start=[a,b],size=[b,b],step=[1,3]}(x:f32[d,e]))",
                "slice{start=[b],size=[a],step=[<1|-2>]}(slice{start=[d],size=[c],step=[<1|-1|2|-2>]}(x:f32[g]))",
            ],
        ),
        apply: slice_of_slice,
    },
    Rule {
        statement: Statement::bits(
            "matmul-of-transpose",
            "matmul(transpose(a), b) = matmul{trans_a}(a, b), and so for b; transposes of the last two axes",
            &[
                "matmul{trans_a=false,trans_b=false}(transpose{perm=[1,0]}(x:f32[a,b]),y:f32[a,c])",
                "matmul{trans_a=true,trans_b=false}(transpose{perm=[1,0]}(x:f32[a,b]),y:f32[b,c])",
                "matmul{trans_a=false,trans_b=false}(x:f32[a,b],transpose{perm=[1,0]}(y:f32[c,b]))",
                "matmul{trans_a=true,trans_b=true}(x:f32[b,a],transpose{perm=[1,0]}(y:f32[b,c]))",
                "matmul{trans_a=false,trans_b=false}(transpose{perm=[1,0]}(x:f32[b,a]),transpose{perm=[1,0]}(y:f32[c,b]))",
                "matmul{trans_a=false,trans_b=false}(transpose{perm=[0,2,1]}(x:f32[d,b,a]),y:f32[<d,|>b,c])",
                "matmul{trans_a=false,trans_b=true}(x:f32[d,a,b],transpose{perm=[0,2,1]}(y:f32[d,b,c]))",
            ],
        ),
        apply: matmul_of_transpose,
    },
    Rule {
        statement: Statement::floats(
            "neg-of-neg",
            "−(−x) = x",
            &["neg(neg(x:<f16|bf16|f32|f64|i32|i64>[]))"],
        ),
        apply: neg_of_neg,
    },
    Rule {
        statement: Statement::floats("not-of-not", "¬¬x = x", &["not(not(x:<bool|i32|i64|u8>[]))"]),
        apply: not_of_not,
    },
];

/// Left sides of the rules about a cast of a cast.
pub(crate) const CASTS: &[&str] = &[
    r#"cast{to="<f16|bf16|f32|f64>"}(cast{to="<f32|f64>"}(x:<f16|bf16>[]))"#,
    r#"cast{to="<f16|bf16|f32>"}(cast{to="f64"}(x:f32[]))"#,
    r#"cast{to="<f16|f32|i32|i64|u8|bool>"}(cast{to="<f16|f32|i32|i64>"}(x:<bool|u8>[]))"#,
    r#"cast{to="<bf16|f32|i32|u8|bool>"}(cast{to="i64"}(x:i32[]))"#,
    r#"cast{to="<f16|f32|i32|i64|bool>"}(cast{to="f64"}(x:i32[]))"#,
];

/// The node and the one that computes its first operand.
fn pair(graph: &Graph, id: NodeId) -> Option<(&Node, &Node)> {
    let node = graph.node(id);
    node.inputs.first().map(|x| (node, graph.def(*x)))
}

/// Whether the result has the type of the first operand.
fn keeps_type(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    node.inputs.first().is_some_and(|x| graph.ty(*x) == graph.ty(node.outputs[0]))
}

/// The operand, if `fits` says so of the operation and the type stays.
fn operand_if(graph: &Graph, id: NodeId, fits: fn(&Op) -> bool) -> Rewritten {
    let node = graph.node(id);
    Ok(match fits(&node.op) && keeps_type(graph, id) {
        true => Rewrite::To(node.inputs[0]),
        false => Rewrite::None,
    })
}

fn cast_same(graph: &mut Graph, id: NodeId) -> Rewritten {
    operand_if(graph, id, |op| matches!(op, Op::Cast(_)))
}

fn reshape_same(graph: &mut Graph, id: NodeId) -> Rewritten {
    operand_if(graph, id, |op| matches!(op, Op::Reshape(_)))
}

fn expand_same(graph: &mut Graph, id: NodeId) -> Rewritten {
    operand_if(graph, id, |op| matches!(op, Op::Expand(_)))
}

fn pad_nothing(graph: &mut Graph, id: NodeId) -> Rewritten {
    operand_if(graph, id, |op| matches!(op, Op::Pad(_)))
}

/// A slice of the full size may still reverse an axis.
fn slice_whole(graph: &mut Graph, id: NodeId) -> Rewritten {
    operand_if(graph, id, |op| match op {
        Op::Slice(op) => op.step.iter().zip(&op.size).all(|(s, n)| *s > 0 || *n <= 1),
        _ => false,
    })
}

fn split_into_one(graph: &mut Graph, id: NodeId) -> Rewritten {
    operand_if(graph, id, |op| matches!(op, Op::Split(op) if op.sizes.len() == 1))
}

fn neg_of_neg(graph: &mut Graph, id: NodeId) -> Rewritten {
    undone(graph, id, UnaryFn::Neg)
}

fn not_of_not(graph: &mut Graph, id: NodeId) -> Rewritten {
    undone(graph, id, UnaryFn::Not)
}

/// `x` of `f(f(x))`.
fn undone(graph: &Graph, id: NodeId, f: UnaryFn) -> Rewritten {
    let is_f = |op: &Op| *op == Op::Unary(f);
    let node = graph.node(id);
    if !is_f(&node.op) {
        return Ok(Rewrite::None);
    }
    let inner = graph.def(node.inputs[0]);
    Ok(if is_f(&inner.op) { Rewrite::To(inner.inputs[0]) } else { Rewrite::None })
}

/// Whether `cast[to](cast[via](x: from))` is `cast[to](x)`: the inner cast loses nothing, and the outer one treats its
/// results as it treats x. An integer out of range is cut to the width, a float to the nearest integer in range.
pub(crate) fn is_one_cast(from: DType, via: DType, to: DType) -> bool {
    let alike = from.is_float() == via.is_float();
    from.widens_to(via) && (alike || to.is_float() || to == DType::Bool || from.widens_to(to))
}

fn cast_of_cast(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let Op::Cast(Cast { to }) = node.op else { return Ok(Rewrite::None) };
    let Op::Cast(Cast { to: via }) = graph.def(node.inputs[0]).op else {
        return Ok(Rewrite::None);
    };
    let source = graph.def(node.inputs[0]).inputs[0];
    let from = graph.ty(source).dtype;
    if !is_one_cast(from, via, to) {
        return Ok(Rewrite::None);
    }
    if from == to {
        return Ok(Rewrite::To(source));
    }
    add(graph, id, Op::Cast(Cast { to }), &[source]).map(Rewrite::To)
}

fn concat(graph: &mut Graph, id: NodeId) -> Rewritten {
    let Op::Concat(op) = &graph.node(id).op else { return Ok(Rewrite::None) };
    let inputs = graph.node(id).inputs.clone();
    let kept: Vec<ValueId> =
        inputs.iter().copied().filter(|v| graph.ty(*v).shape.0[op.axis] > 0).collect();
    match kept[..] {
        [only] => Ok(Rewrite::To(only)),
        [] => Ok(Rewrite::None),
        _ if kept.len() < inputs.len() => {
            graph.set_inputs(id, kept)?;
            Ok(Rewrite::Edited)
        }
        _ => Ok(Rewrite::None),
    }
}

fn reshape_of_reshape(graph: &mut Graph, id: NodeId) -> Rewritten {
    let Some((node, inner)) = pair(graph, id) else { return Ok(Rewrite::None) };
    let (Op::Reshape(_), Op::Reshape(_)) = (&node.op, &inner.op) else { return Ok(Rewrite::None) };
    let (op, source) = (node.op.clone(), inner.inputs[0]);
    add(graph, id, op, &[source]).map(Rewrite::To)
}

/// `reshape(transpose(reshape(x)))` where the transpose leaves the first axis, which the inner reshape
/// merged, in front, and the outer reshape splits it again: `x` split, then transposed. Exporters emit
/// it for batched transposes.
fn reshape_unmerges(graph: &mut Graph, id: NodeId) -> Rewritten {
    let Some((node, transpose)) = pair(graph, id) else { return Ok(Rewrite::None) };
    let (Op::Reshape(outer), Op::Transpose(inner)) = (&node.op, &transpose.op) else {
        return Ok(Rewrite::None);
    };
    let merged = transpose.inputs[0];
    let Op::Reshape(_) = &graph.def(merged).op else { return Ok(Rewrite::None) };
    let middle = graph.ty(merged).shape.dims();
    let Some(lead) = (outer.shape.rank() + 1).checked_sub(middle.len()) else {
        return Ok(Rewrite::None);
    };
    if lead == 0 || inner.perm.first() != Some(&0) {
        return Ok(Rewrite::None);
    }
    let (front, tail) = outer.shape.dims().split_at(lead);
    let permuted = inner.perm[1..].iter().map(|&p| middle[p]);
    if front.iter().product::<usize>() != middle[0] || !permuted.eq(tail.iter().copied()) {
        return Ok(Rewrite::None);
    }
    let perm = (0..lead).chain(inner.perm[1..].iter().map(|p| p - 1 + lead)).collect();
    let split = Shape([front, &middle[1..]].concat());
    let split = add(graph, id, Op::Reshape(Reshape { shape: split }), &[merged])?;
    add(graph, id, Op::Transpose(Transpose { perm }), &[split]).map(Rewrite::To)
}

fn transpose_identity(graph: &mut Graph, id: NodeId) -> Rewritten {
    operand_if(graph, id, |op| match op {
        Op::Transpose(op) => op.perm.iter().copied().eq(0..op.perm.len()),
        _ => false,
    })
}

fn transpose_of_transpose(graph: &mut Graph, id: NodeId) -> Rewritten {
    let Some((node, before)) = pair(graph, id) else { return Ok(Rewrite::None) };
    let (Op::Transpose(outer), Op::Transpose(inner)) = (&node.op, &before.op) else {
        return Ok(Rewrite::None);
    };
    let perm = outer.perm.iter().map(|&p| inner.perm[p]).collect();
    let source = before.inputs[0];
    add(graph, id, Op::Transpose(Transpose { perm }), &[source]).map(Rewrite::To)
}

fn expand_of_expand(graph: &mut Graph, id: NodeId) -> Rewritten {
    let Some((node, before)) = pair(graph, id) else { return Ok(Rewrite::None) };
    let (Op::Expand(op), Op::Expand(_)) = (&node.op, &before.op) else {
        return Ok(Rewrite::None);
    };
    let (op, source) = (Op::Expand(op.clone()), before.inputs[0]);
    add(graph, id, op, &[source]).map(Rewrite::To)
}

fn slice_of_slice(graph: &mut Graph, id: NodeId) -> Rewritten {
    let Some((node, before)) = pair(graph, id) else { return Ok(Rewrite::None) };
    let (Op::Slice(op), Op::Slice(inner)) = (&node.op, &before.op) else {
        return Ok(Rewrite::None);
    };
    if op.size.contains(&0) {
        return Ok(Rewrite::None);
    }
    let axes = 0..op.start.len();
    let start = |i: usize| inner.start[i] as isize + op.start[i] as isize * inner.step[i];
    let both = Slice {
        start: axes.clone().map(|i| start(i) as usize).collect(),
        size: op.size.clone(),
        step: axes.map(|i| op.step[i] * inner.step[i]).collect(),
    };
    let source = before.inputs[0];
    add(graph, id, Op::Slice(both), &[source]).map(Rewrite::To)
}

/// A transpose of an operand's last two axes becomes a flag of the matmul.
fn matmul_of_transpose(graph: &mut Graph, id: NodeId) -> Rewritten {
    let Op::MatMul(op) = &graph.node(id).op else { return Ok(Rewrite::None) };
    let swapped = |v: ValueId| match &graph.def(v).op {
        Op::Transpose(t) if swaps_last_two(&t.perm) => Some(graph.def(v).inputs[0]),
        _ => None,
    };
    let inputs = &graph.node(id).inputs;
    let (a, b) = (inputs[0], inputs[1]);
    let (new_a, new_b) = (swapped(a), swapped(b));
    if new_a.is_none() && new_b.is_none() {
        return Ok(Rewrite::None);
    }
    let op = MatMul {
        trans_a: op.trans_a != new_a.is_some(),
        trans_b: op.trans_b != new_b.is_some(),
        out: op.out,
    };
    let operands = [new_a.unwrap_or(a), new_b.unwrap_or(b)];
    add(graph, id, Op::MatMul(op), &operands).map(Rewrite::To)
}

/// Whether the permutation only swaps the last two axes.
fn swaps_last_two(perm: &[usize]) -> bool {
    let n = perm.len();
    n >= 2 && perm[n - 2..] == [n - 1, n - 2] && perm[..n - 2].iter().copied().eq(0..n - 2)
}

#[cfg(test)]
mod tests {
    use super::is_one_cast;
    use frit_ir::DType;

    /// 300 as u8 is 44, and 300.0 as u8 is 255.
    #[test]
    fn an_integer_out_of_range_is_cut_and_a_float_is_not() {
        assert!(!is_one_cast(DType::I32, DType::F64, DType::U8));
        assert!(is_one_cast(DType::I32, DType::I64, DType::U8));
        assert!(is_one_cast(DType::I32, DType::F64, DType::I32));
        assert!(is_one_cast(DType::I32, DType::F64, DType::BF16));
    }
}
