//! Invariants of structure.
//!
//! V101  an operand is a result of a live, earlier node
//! V102  an output, and the leaf that a carry names, is a result of a live node
//! V103  leaves of one kind have distinct keys
//! V104  a carry names a `param` or `state` leaf
//! V105  the carried value has the type of that leaf
//! V106  a leaf is carried at most once
//! V107  outputs of one kind have distinct names
//! V108  loss sum, loss count and metrics are scalars
//! V109  a gradient is named after a parameter and has its shape
//! V110  a program has at least one rank
//! V111  the leaves of a fusion's body are inputs and constants; it contains no collective,
//!       optimizer or fusion, and only plain outputs

use super::Report;
use crate::interpret::leaf_key;
use crate::{Code, Graph, NodeId, Op, Origin, Output, OutputKind};
use std::collections::{HashMap, HashSet};

pub(super) fn check(graph: &Graph, report: &mut Report) {
    operands(graph, report);
    outputs_are_live(graph, report);
    if !report.broken.is_empty() {
        return;
    }
    leaves(graph, report);
    outputs(graph, report);
    if graph.world_size == 0 {
        report.add(Code::NoRanks, &Origin::none(), "the program runs on no rank");
    }
    for (_, node) in graph.nodes() {
        if let Op::Fusion(fusion) = &node.op {
            body(&fusion.body, &node.origin, report);
        }
    }
}

fn operands(graph: &Graph, report: &mut Report) {
    let mut before: HashSet<NodeId> = HashSet::new();
    for (id, node) in graph.nodes() {
        for (i, input) in node.inputs.iter().enumerate() {
            if !before.contains(&graph.value(*input).def) {
                let message =
                    format!("operand {i} of `{}` is not defined before it", node.op.name());
                report.add(Code::OperandUndefined, &node.origin, message);
            }
        }
        before.insert(id);
    }
}

fn outputs_are_live(graph: &Graph, report: &mut Report) {
    for output in &graph.outputs {
        let carried = match output.kind {
            OutputKind::Carry(leaf) => Some(leaf),
            _ => None,
        };
        for value in std::iter::once(output.value).chain(carried) {
            if !graph.is_live(graph.value(value).def) {
                let message = format!("output `{}` names a removed value", output.name);
                report.add(Code::OutputUndefined, &Origin::none(), message);
            }
        }
    }
}

fn leaves(graph: &Graph, report: &mut Report) {
    let mut keys = HashSet::new();
    for (_, node) in graph.nodes() {
        if let Some(key) = leaf_key(&node.op)
            && !keys.insert((std::mem::discriminant(&node.op), key.clone()))
        {
            report.add(Code::LeafTwice, &node.origin, format!("two leaves have the key `{key}`"));
        }
    }
}

fn outputs(graph: &Graph, report: &mut Report) {
    let params: HashMap<&str, _> =
        graph.params().map(|(v, p)| (p.name.as_str(), graph.ty(v))).collect();
    let mut names = HashSet::new();
    let mut carried = HashSet::new();
    for output in &graph.outputs {
        let Output { name, value, kind } = output;
        let ty = graph.ty(*value);
        let origin = &graph.def(*value).origin;
        if let OutputKind::Carry(leaf) = *kind {
            if !matches!(graph.def(leaf).op, Op::Param(_) | Op::State(_)) {
                let op = graph.def(leaf).op.name();
                report.add(
                    Code::CarryWithoutLeaf,
                    origin,
                    format!("`{name}` is carried into a `{op}`"),
                );
            }
            if ty != graph.ty(leaf) {
                let leaf = graph.ty(leaf);
                report.add(
                    Code::CarriedType,
                    origin,
                    format!("`{name}`: {ty} is carried into {leaf}"),
                );
            }
            if !carried.insert(leaf) {
                report.add(Code::CarriedTwice, origin, format!("`{name}` is carried twice"));
            }
            continue;
        }
        if !names.insert((std::mem::discriminant(kind), name)) {
            report.add(Code::OutputTwice, origin, format!("two outputs are named `{name}`"));
        }
        let is_scalar =
            matches!(kind, OutputKind::LossSum | OutputKind::LossCount | OutputKind::Metric);
        if is_scalar && ty.shape.rank() != 0 {
            report.add(Code::NotAScalar, origin, format!("`{name}` must be a scalar, not {ty}"));
        }
        if *kind == OutputKind::Gradient {
            match params.get(name.as_str()) {
                None => report.add(
                    Code::GradientWithoutParameter,
                    origin,
                    format!("there is no parameter `{name}`"),
                ),
                Some(param) if param.shape != ty.shape => {
                    let message =
                        format!("the gradient of `{name}` is {ty}, the parameter {param}");
                    report.add(Code::GradientWithoutParameter, origin, message);
                }
                Some(_) => {}
            }
        }
    }
}

fn body(graph: &Graph, origin: &Origin, report: &mut Report) {
    let before = report.broken.len();
    operands(graph, report);
    outputs_are_live(graph, report);
    if report.broken.len() > before {
        return;
    }
    leaves(graph, report);
    for (_, node) in graph.nodes() {
        let foreign = matches!(
            node.op,
            Op::Param(_)
                | Op::State(_)
                | Op::Hyper(_)
                | Op::AllGather(_)
                | Op::ReduceScatter(_)
                | Op::AllReduce(_)
                | Op::OptimizerStep(_)
                | Op::Adafactor(_)
                | Op::MuonMomentum(_)
                | Op::MuonStep(_)
                | Op::EmaStep
                | Op::Fusion(_)
        );
        if foreign {
            let message = format!("`{}` in the body of a fusion", node.op.name());
            report.add(Code::FusionBody, origin, message);
        }
    }
    if graph.outputs.iter().any(|o| o.kind != OutputKind::Result) {
        report.add(Code::FusionBody, origin, "an output of a fusion's body is not a plain output");
    }
}
