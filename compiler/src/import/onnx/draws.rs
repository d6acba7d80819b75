//! Recognizes patterns of random operators.
//!
//! A uniform draw compared with a constant probability becomes a Dropout mask, which evaluation can remove because it knows
//! the probability. Both PyTorch exporters write `Tensor.bernoulli_(p)`, as in torchvision.ops.StochasticDepth, as
//! `Less(RandomUniform, p)`, and the `drop_path` of transformers as `Floor(RandomUniform + p)`: each is one with probability p.
//!
//! Scaling and shifting is fused into the draw: `torch.randint(a, b)` is `Floor(RandomUniform · (b − a) + a)`, which rounding
//! could otherwise bring to b.

use super::messages::{AttributeProto, GraphProto, NodeProto, TensorProto};
use frit_ir::ops::{BinaryFn, Random};
use frit_ir::{Graph, Op, Tensor};
use std::collections::HashMap;

/// Casts that an exporter puts behind a number, at most.
const MAX_CASTS: usize = 8;

const FLOAT: i32 = 1;
const BOOL: i32 = 9;

/// The graph with masks in the place of such numbers; `None` if it has none.
pub(super) fn as_masks(graph: &GraphProto) -> Option<GraphProto> {
    let mut readers: HashMap<&str, Vec<usize>> = HashMap::new();
    for (i, node) in graph.node.iter().enumerate() {
        // Of what it only takes the dtype from, CastLike reads nothing.
        let n = if node.op_type == "CastLike" { 1 } else { node.input.len() };
        node.input.iter().take(n).for_each(|name| readers.entry(name).or_default().push(i));
    }
    let cast_like = |name: &str, like: &str| {
        graph.node.iter().position(|n| {
            n.op_type == "CastLike"
                && n.output[..] == [name]
                && matches!(&n.input[..], [_, l] if l == like)
        })
    };
    let only_reader = |name: &str| match readers.get(name)?[..] {
        [i] if graph.output.iter().all(|o| o.name != name) => Some(i),
        _ => None,
    };
    // What stands in the place of a node, by its index.
    let mut instead: HashMap<usize, Vec<NodeProto>> = HashMap::new();
    let draws = |n: &NodeProto| is_uniform(n) && !n.input.is_empty();
    for (i, uniform) in graph.node.iter().enumerate().filter(|(_, n)| draws(n)) {
        let Some(drawn) = uniform.output.first() else { continue };
        let Some(reads) = only_reader(drawn) else { continue };
        let reader = &graph.node[reads];
        let Some(result) = reader.output.first() else { continue };
        match (reader.op_type.as_str(), &reader.input[..]) {
            ("Less", [first, p]) if first == drawn => {
                let cast = cast_like(p, drawn);
                let p = cast.map_or(p, |i| &graph.node[i].input[0]);
                if !is_number(graph, p) {
                    continue;
                }
                instead.insert(reads, mask(uniform, reader, p));
                instead.extend(cast.map(|i| (i, vec![])));
            }
            ("Add", [a, b]) => {
                let p = if a == drawn { b } else { a };
                if !is_number(graph, p) {
                    continue;
                }
                let floors = only_reader(result);
                let is_floor = |n: &NodeProto| n.op_type == "Floor" && !n.output.is_empty();
                let Some(floors) = floors.filter(|i| is_floor(&graph.node[*i])) else {
                    continue;
                };
                instead.insert(reads, vec![]);
                instead.insert(floors, number(uniform, &graph.node[floors], p));
            }
            _ => continue,
        }
        instead.insert(i, vec![]);
    }
    if instead.is_empty() {
        return None;
    }
    let mut result = GraphProto { node: Vec::new(), ..graph.clone() };
    for (i, node) in graph.node.iter().enumerate() {
        match instead.remove(&i) {
            Some(nodes) => result.node.extend(nodes),
            None => result.node.push(node.clone()),
        }
    }
    Some(result)
}

/// Whether this name is one known number: stored, or cast from such.
fn is_number(graph: &GraphProto, name: &str) -> bool {
    let scalar = |t: &TensorProto| t.dims.iter().all(|n| *n == 1);
    let mut name = name;
    for _ in 0..MAX_CASTS {
        if let Some(tensor) = graph.initializer.iter().find(|t| t.name == name) {
            return scalar(tensor);
        }
        let Some(node) = graph.node.iter().find(|n| n.output.iter().any(|o| o == name)) else {
            return false;
        };
        match (node.op_type.as_str(), node.input.first()) {
            ("Constant", _) => {
                return node.attribute.iter().all(|a| match a.name.as_str() {
                    "value" => a.t.as_deref().is_some_and(scalar),
                    "value_float" => true,
                    _ => false,
                });
            }
            ("Cast" | "CastLike" | "Identity", Some(input)) => name = input,
            _ => return false,
        }
    }
    false
}

/// Draws what is only read to be moved and scaled as it is read.
pub(super) fn as_read(graph: &mut Graph) {
    let users = graph.users();
    for id in graph.order().to_vec() {
        let node = graph.node(id);
        let Op::Binary(f) = node.op else { continue };
        let (a, b) = (node.inputs[0], node.inputs[1]);
        let out = graph.ty(node.outputs[0]).clone();
        let splat = |v| graph.constant(v).and_then(Tensor::as_splat);
        let (drawn, number) = match (f, splat(a), splat(b)) {
            (BinaryFn::Add | BinaryFn::Mul | BinaryFn::Sub, None, Some(x)) => (a, x),
            (BinaryFn::Add | BinaryFn::Mul, Some(x), None) => (b, x),
            _ => continue,
        };
        let from = graph.def(drawn);
        let Op::Random(random) = &from.op else { continue };
        let read =
            users[drawn.0 as usize].len() > 1 || graph.outputs.iter().any(|o| o.value == drawn);
        if read || *graph.ty(drawn) != out {
            continue;
        }
        let Random { offset, scale, .. } = *random;
        let (offset, scale) = match f {
            BinaryFn::Mul if number >= 0.0 => (offset * number, scale * number),
            BinaryFn::Mul => continue,
            BinaryFn::Sub => (offset - number, scale),
            _ => (offset + number, scale),
        };
        let as_read = Op::Random(Random { offset, scale, ..random.clone() });
        let inputs = from.inputs.clone();
        if as_read.infer(&[graph.ty(inputs[0])]).is_ok() {
            let node = graph.node_mut(id);
            (node.op, node.inputs) = (as_read, inputs);
        }
    }
}

/// Whether the node draws numbers between 0 and 1 in the shape of its operand.
fn is_uniform(node: &NodeProto) -> bool {
    let number = |name: &str, default: f32| {
        node.attribute.iter().find(|a| a.name == name).map_or(default, |a| a.f)
    };
    node.op_type == "RandomUniformLike" && number("low", 0.0) == 0.0 && number("high", 1.0) == 1.0
}

/// `Dropout(x, 1 − p, true)`, of whose results the mask takes the place of what `reader` makes.
fn mask(uniform: &NodeProto, reader: &NodeProto, p: &str) -> Vec<NodeProto> {
    let result = &reader.output[0];
    let inner = |what: &str| format!("{result}/{what}");
    let node = |op: &str, inputs: &[&str], outputs: &[&str]| NodeProto {
        op_type: op.into(),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: outputs.iter().map(|s| s.to_string()).collect(),
        attribute: vec![],
        ..reader.clone()
    };
    let constant = |name: &str, value: TensorProto| {
        let value = AttributeProto {
            name: "value".into(),
            t: Some(value.into()),
            r#type: 4,
            ..AttributeProto::default()
        };
        NodeProto { attribute: vec![value], ..node("Constant", &[], &[name]) }
    };
    let one = TensorProto { data_type: FLOAT, float_data: vec![1.0], ..TensorProto::default() };
    let yes = TensorProto { data_type: BOOL, int32_data: vec![1], ..TensorProto::default() };
    let [wide, ones, ratio, training, kept] = ["p", "one", "ratio", "training", "kept"].map(inner);
    let to = AttributeProto {
        name: "to".into(),
        i: i64::from(FLOAT),
        r#type: 2,
        ..AttributeProto::default()
    };
    vec![
        constant(&ones, one),
        constant(&training, yes),
        NodeProto { attribute: vec![to], ..node("Cast", &[p], &[&wide]) },
        node("Sub", &[&ones, &wide], &[&ratio]),
        node("Dropout", &[&uniform.input[0], &ratio, &training], &[&kept, result]),
    ]
}

/// The same, where `reader` makes a number of the mask.
fn number(uniform: &NodeProto, reader: &NodeProto, p: &str) -> Vec<NodeProto> {
    let result = reader.output[0].clone();
    let drawn = NodeProto { output: vec![format!("{result}/mask")], ..reader.clone() };
    let mut nodes = mask(uniform, &drawn, p);
    let dtype = uniform.attribute.iter().find(|a| a.name == "dtype");
    let (op, attribute, input) = match dtype {
        Some(dtype) => {
            let to = AttributeProto { name: "to".into(), ..dtype.clone() };
            ("Cast", vec![to], vec![drawn.output[0].clone()])
        }
        None => ("CastLike", vec![], vec![drawn.output[0].clone(), uniform.input[0].clone()]),
    };
    let output = vec![result];
    nodes.push(NodeProto { op_type: op.into(), input, output, attribute, ..reader.clone() });
    nodes
}
