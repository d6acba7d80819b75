//! Invariants of sharding.
//!
//! V301  a sharded value is used only by pointwise operations (alone or fused), `optimizer_step`,
//!       `ema_step`, `grad_stats`, `all_gather`, and an `all_reduce` of its unit over replicas
//! V302  the operand of an `all_gather` is sharded
//! V303  the other operands of a pointwise operation or optimizer step on a sharded value are
//!       scalars, sharded values of the same shape, or state that the optimizer replicates
//! V304  the gradient of a sharded parameter with an optimizer step comes from exactly one
//!       `reduce_scatter`, and from at most one `all_reduce`
//! V305  the gradient of a replicated parameter with an optimizer step comes from at most one
//!       `all_reduce`, and from no `reduce_scatter`
//! V306  collectives of a parameter are tagged with its unit
//! V307  a carried value is sharded if and only if its leaf is
//! V308  results, loss and metrics are not sharded

use super::Report;
use crate::ops::{FusionKind, Param};
use crate::sharding::sharded_values;
use crate::{Code, Graph, Node, Op, OutputKind, ValueId};
use std::collections::HashSet;

pub(super) fn check(graph: &Graph, report: &mut Report) {
    let sharded = sharded_values(graph);
    let is_sharded = |v: ValueId| sharded[v.0 as usize];
    for (_, node) in graph.nodes() {
        uses(graph, node, &is_sharded, report);
        match &node.op {
            Op::AllGather(gather) => {
                let unit = param_of(graph, node.inputs[0]).and_then(|p| p.unit);
                if let Some(unit) = unit.filter(|unit| *unit != gather.unit) {
                    let message = format!("gathered in unit {}, not {unit}", gather.unit);
                    report.add(Code::CollectiveUnit, &node.origin, message);
                }
            }
            Op::OptimizerStep(_) => gradient(graph, node, report),
            _ => {}
        }
    }
    for output in &graph.outputs {
        let (found, origin) = (is_sharded(output.value), &graph.def(output.value).origin);
        let name = &output.name;
        match output.kind {
            OutputKind::Carry(leaf) if found != is_sharded(leaf) => {
                let how = |sharded| if sharded { "sharded" } else { "whole" };
                let (from, to) = (how(found), how(is_sharded(leaf)));
                report.add(
                    Code::CarrySharding,
                    origin,
                    format!("`{name}`: a {from} value into a {to} leaf"),
                );
            }
            OutputKind::Carry(_) | OutputKind::Gradient => {}
            _ if found => {
                report.add(Code::ShardedResult, origin, format!("output `{name}` is sharded"))
            }
            _ => {}
        }
    }
}

/// Whether the operation acts on each element by itself.
fn is_elementwise(op: &Op) -> bool {
    match op {
        Op::Fusion(fusion) => fusion.kind == FusionKind::Pointwise,
        op => op.is_pointwise(),
    }
}

fn uses(graph: &Graph, node: &Node, is_sharded: &impl Fn(ValueId) -> bool, report: &mut Report) {
    let name = node.op.name();
    let Some(&first) = node.inputs.iter().find(|v| is_sharded(**v)) else {
        if matches!(node.op, Op::AllGather(_)) {
            report.add(
                Code::GatheredReplicated,
                &node.origin,
                "`all_gather` of a value that is not sharded",
            );
        }
        return;
    };
    let elementwise =
        is_elementwise(&node.op) || matches!(node.op, Op::OptimizerStep(_) | Op::EmaStep);
    let replicas = matches!(&node.op, Op::AllReduce(op) if op.unit.is_some());
    if !elementwise && !replicas && !matches!(node.op, Op::GradStats(_) | Op::AllGather(_)) {
        report.add(Code::ShardedUse, &node.origin, format!("`{name}` of a sharded value"));
    }
    let shape = &graph.ty(first).shape;
    let whole_states = match &node.op {
        Op::OptimizerStep(op) if !op.kind.has_states_by_element() => 2..2 + op.kind.n_states(),
        _ => 0..0,
    };
    for (i, input) in node.inputs.iter().enumerate().filter(|_| elementwise) {
        let own = &graph.ty(*input).shape;
        let fits = match is_sharded(*input) {
            true => own == shape && !whole_states.contains(&i),
            false => own.numel() == 1 || whole_states.contains(&i),
        };
        if !fits {
            let message = format!("operand {i} of `{name}` does not fit a part of {shape}");
            report.add(Code::ShardedOperands, &node.origin, message);
        }
    }
}

/// The parameter whose value this is, seen through casts.
fn param_of(graph: &Graph, mut value: ValueId) -> Option<&Param> {
    loop {
        let def = graph.def(value);
        match &def.op {
            Op::Param(param) => return Some(param),
            Op::Cast(_) => value = def.inputs[0],
            _ => return None,
        }
    }
}

/// Checks the reductions on the way of an optimizer step's gradient.
fn gradient(graph: &Graph, step: &Node, report: &mut Report) {
    let Some(param) = param_of(graph, step.inputs[0]) else { return };
    let (mut scatters, mut reduces) = (0, 0);
    let mut seen = HashSet::new();
    let mut stack = vec![step.inputs[1]];
    while let Some(value) = stack.pop() {
        let id = graph.value(value).def;
        if !seen.insert(id) {
            continue;
        }
        let def = graph.node(id);
        let unit = match &def.op {
            Op::ReduceScatter(op) => {
                scatters += 1;
                Some(op.unit)
            }
            Op::AllReduce(op) => {
                reduces += usize::from(op.unit.is_some());
                op.unit
            }
            _ => None,
        };
        if let (Some(unit), Some(expected)) = (unit, param.unit)
            && unit != expected
        {
            let message = format!("`{}` is reduced in unit {unit}, not {expected}", param.name);
            report.add(Code::CollectiveUnit, &def.origin, message);
        }
        // A value before a reduction may be shared by the gradients of several parameters; a reduction further up would
        // be a second one of the same gradient.
        let passes_on = is_elementwise(&def.op) || unit.is_some();
        if passes_on {
            let full = |v: &&ValueId| graph.ty(**v).shape == param.ty.shape;
            stack.extend(def.inputs.iter().filter(full));
        }
    }
    let name = &param.name;
    if param.sharded && (scatters != 1 || reduces > 1) {
        let message = format!(
            "the gradient of `{name}` has {scatters} reduce_scatters, not one, and {reduces} all_reduces"
        );
        report.add(Code::ShardedGradient, &step.origin, message);
    }
    if !param.sharded && (scatters > 0 || reduces > 1) {
        let message = format!(
            "the gradient of the replicated `{name}` has {scatters} reduce_scatters and {reduces} \
             all_reduces"
        );
        report.add(Code::ReplicatedGradient, &step.origin, message);
    }
}
