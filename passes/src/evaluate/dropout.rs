//! Removes dropout: every use of a random mask is replaced by its mean.
//!
//! `select(mask, x / keep, 0)` is `x`; `select(mask, a, b)` is `keep · a + (1 − keep) · b`; a mask cast to
//! a number is `keep`; attention keeps all weights. Source: Srivastava et al. 2014, §4.

use super::INFO;
use crate::pass::{PassContext, bug};
use frit_ir::ops::{Attention, BinaryFn, Constant, Expand};
use frit_ir::{
    Code, DType, Diagnostic, Graph, NodeId, Op, Origin, Region, Tensor, TensorType, ValueId,
};
use std::collections::HashMap;

/// The most elements of a tensor of equal numbers that is stored.
const MAX_FILLED: usize = 1 << 22;

pub(super) fn remove(graph: &mut Graph, context: &mut PassContext) -> Result<(), Diagnostic> {
    let users = graph.users();
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    for id in graph.order().to_vec() {
        let Op::RandomMask(mask) = &graph.node(id).op else { continue };
        let keep = mask.keep;
        let value = graph.node(id).outputs[0];
        context.remark(&graph.node(id).origin, "dropout is off");
        for (user, value) in readers(graph, &users, value) {
            if let Some(undropped) = undropped(graph, user, value)? {
                map.extend(graph.node(user).outputs.clone().into_iter().zip(undropped));
                continue;
            }
            let mean = mean(graph, user, value, keep)?;
            map.insert(graph.node(user).outputs[0], mean);
        }
        // A mask that the model hands out: everything is kept.
        if graph.outputs.iter().any(|o| o.value == value) {
            let origin = graph.node(id).origin.by(INFO.name);
            let ty = graph.ty(value).clone();
            let all = filled(graph, ty, 1.0, &origin)?;
            graph.outputs.iter_mut().filter(|o| o.value == value).for_each(|o| o.value = all);
        }
    }
    graph.substitute(&map);
    Ok(())
}

/// The nodes that read a mask, in the shape that it has or is given, and what they read.
fn readers(graph: &Graph, users: &[Vec<NodeId>], mask: ValueId) -> Vec<(NodeId, ValueId)> {
    let (mut masks, mut found) = (vec![mask], vec![]);
    while let Some(mask) = masks.pop() {
        for &user in &users[mask.0 as usize] {
            match graph.node(user).op {
                Op::Reshape(_) => masks.push(graph.node(user).outputs[0]),
                _ => found.push((user, mask)),
            }
        }
    }
    found
}

/// The results of the node `user`, if it is an attention that drops weights by this mask, without dropout.
fn undropped(
    graph: &mut Graph,
    user: NodeId,
    mask: ValueId,
) -> Result<Option<Vec<ValueId>>, Diagnostic> {
    let node = graph.node(user).clone();
    let Op::Attention(op) = &node.op else { return Ok(None) };
    if op.masks(&node.inputs)[1] != Some(&mask) {
        return Ok(None);
    }
    let operands = &node.inputs[..node.inputs.len() - 1];
    let op = Op::Attention(Attention { keep: None, ..op.clone() });
    let results = graph.add(op, operands, node.origin.by(INFO.name), Region::Forward);
    results.map(Some).map_err(bug(INFO.name))
}

/// The mean of the node `user`, if it reads a mask that is true with probability `keep`.
fn mean(graph: &mut Graph, user: NodeId, mask: ValueId, keep: f64) -> Result<ValueId, Diagnostic> {
    let node = graph.node(user).clone();
    let origin = node.origin.by(INFO.name);
    match &node.op {
        Op::Select if node.inputs[0] == mask && graph.ty(node.outputs[0]).dtype.is_float() => {
            let ty = graph.ty(node.outputs[0]).clone();
            let (kept, other) = (node.inputs[1], node.inputs[2]);
            let zero = graph.constant(other).is_some_and(|c| c.as_splat() == Some(0.0));
            let mean = match (zero, unscaled(graph, kept, keep)) {
                (true, Some(x)) => x,
                (true, None) => scaled(graph, kept, keep, &origin)?,
                _ => {
                    let (a, b) = (
                        scaled(graph, kept, keep, &origin)?,
                        scaled(graph, other, 1.0 - keep, &origin)?,
                    );
                    add(graph, Op::Binary(BinaryFn::Add), &[a, b], &origin)?
                }
            };
            if *graph.ty(mean) == ty {
                return Ok(mean);
            }
            add(graph, Op::Expand(Expand { shape: ty.shape }), &[mean], &origin)
        }
        Op::Cast(cast) if cast.to.is_float() => {
            let ty = TensorType::new(cast.to, graph.ty(node.outputs[0]).shape.clone());
            filled(graph, ty, keep, &origin)
        }
        op => Err(Diagnostic::error(
            Code::DropoutEscapes,
            format!("dropout cannot be turned off: its mask is read by `{}`", op.name()),
        )
        .at(&node.origin)
        .help(
            "use the mask in a `select` of floats, in attention, or cast to a float: of labels that are dropped, look up both and \
             choose between the embeddings; or set the probability to 0",
        )),
    }
}

/// The `x` of `x · factor` with `factor · keep` = 1; `x` itself if nothing is ever kept.
fn unscaled(graph: &Graph, value: ValueId, keep: f64) -> Option<ValueId> {
    if keep == 0.0 {
        return Some(value);
    }
    // In a low dtype the product may be one of f32, rounded.
    let dtype = graph.ty(value).dtype;
    let mut node = graph.def(value);
    if let Op::Cast(_) = node.op {
        node = graph.def(node.inputs[0]);
    }
    let narrow = |v: ValueId| match (&graph.def(v).op, graph.ty(v).dtype == dtype) {
        (_, true) => Some(v),
        (Op::Cast(_), _) => Some(graph.def(v).inputs[0]).filter(|x| graph.ty(*x).dtype == dtype),
        _ => None,
    };
    let factor = |v: ValueId| graph.constant(v).and_then(Tensor::as_splat);
    // Factors are rounded to the operand's dtype, and the probability may have been rounded to f32.
    let tolerance = match graph.ty(node.outputs[0]).dtype {
        DType::BF16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => 1e-6,
    };
    let is_inverse = |f: f64, of: f64| (f * of - 1.0).abs() <= tolerance;
    match (&node.op, &node.inputs[..]) {
        (Op::Binary(BinaryFn::Mul), &[a, b]) => match (factor(a), factor(b)) {
            (_, Some(f)) if is_inverse(f, keep) => narrow(a),
            (Some(f), _) if is_inverse(f, keep) => narrow(b),
            _ => None,
        },
        (Op::Binary(BinaryFn::Div), &[a, b])
            if factor(b).is_some_and(|f| is_inverse(f, 1.0 / keep)) =>
        {
            narrow(a)
        }
        _ => None,
    }
}

fn scaled(graph: &mut Graph, x: ValueId, by: f64, origin: &Origin) -> Result<ValueId, Diagnostic> {
    let dtype = graph.ty(x).dtype;
    let dtype = if dtype.is_float() { dtype } else { DType::F32 };
    let value = Tensor::splat(TensorType::scalar(dtype), by);
    let by = add(graph, Op::Constant(Constant { value }), &[], origin)?;
    add(graph, Op::Binary(BinaryFn::Mul), &[x, by], origin)
}

/// One number everywhere; a large tensor is broadcast of one element.
fn filled(
    graph: &mut Graph,
    ty: TensorType,
    number: f64,
    origin: &Origin,
) -> Result<ValueId, Diagnostic> {
    let large = ty.shape.numel() > MAX_FILLED;
    let own = if large { TensorType::scalar(ty.dtype) } else { ty.clone() };
    let constant = Op::Constant(Constant { value: Tensor::splat(own, number) });
    let value = add(graph, constant, &[], origin)?;
    if !large {
        return Ok(value);
    }
    add(graph, Op::Expand(Expand { shape: ty.shape }), &[value], origin)
}

fn add(graph: &mut Graph, op: Op, inputs: &[ValueId], at: &Origin) -> Result<ValueId, Diagnostic> {
    graph.add1(op, inputs, at.clone(), Region::Forward).map_err(bug(INFO.name))
}

#[cfg(test)]
mod tests {
    use super::remove;
    use crate::PassContext;
    use frit_ir::text;

    #[test]
    fn attention_keeps_all_weights() {
        let text = r#"graph @g world=1 {
 %s: i64[5] = state {init = 0.0, name = "rng", ty = {"dtype": "i64", "shape": [5]}}
 %r: bool[1, 2, 2] = random_mask %s {id = 0, keep = 0.5, shape = [1,2,2]}
 %m: bool[1, 1, 2, 2] = reshape %r {shape = [1,1,2,2]}
 %x: f32[1, 1, 2, 3] = input {name = "x", ty = {"dtype": "f32", "shape": [1,1,2,3]}}
 %y: f32[1, 1, 2, 3], %l: f32[1, 1, 2] = attention %x, %x, %x, %m {keep = 0.5, scale = 1.0}
 return %y as "y"
 return %l as "l"
}"#;
        let mut graph = text::parse(text).expect("parses");
        remove(&mut graph, &mut PassContext::default()).expect("evaluates");
        graph.sort().expect("no cycle");
        graph.remove_dead();
        let nodes: Vec<_> = graph.nodes().map(|(_, n)| (n.op.name(), n.inputs.len())).collect();
        assert_eq!(nodes, [("input", 0), ("attention", 3)], "{graph}");
    }

    #[test]
    fn masks_are_read_by_choices_and_casts_alone() {
        let text = r#"graph @g world=1 {
 %s: i64[5] = state {init = 0.0, name = "rng", ty = {"dtype": "i64", "shape": [5]}}
 %m: bool[2] = random_mask %s {id = 0, keep = 0.5, shape = [2]}
 %y: bool[2] = not %m loc("drop", "", "")
 return %y as "y"
}"#;
        let mut graph = text::parse(text).expect("parses");
        let error = remove(&mut graph, &mut PassContext::default()).expect_err("a negation");
        assert_eq!((error.code.as_str(), &*error.origin.source), ("E230", "drop"), "{error}");
    }
}
