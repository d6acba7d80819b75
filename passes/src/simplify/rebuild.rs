//! Writes a solution back: new nodes with the origins of those for which they are made.

use super::INFO;
use super::saturate::Program;
use super::window::{Operand, Window};
use crate::pass::bug;
use frit_ir::ops::{AllGather, Op};
use frit_ir::{Diagnostic, Graph, ValueId};
use std::collections::HashMap;

/// Adds the nodes of `program` and records which value replaces each root of the window.
pub(super) fn rebuild(
    graph: &mut Graph,
    window: &Window,
    program: &Program,
    replaced: &mut HashMap<ValueId, ValueId>,
) -> Result<(), Diagnostic> {
    let mut made: Vec<ValueId> = Vec::with_capacity(program.steps.len());
    let value = |made: &[ValueId], operand: &Operand| match operand {
        Operand::Leaf(i) => window.leaves[*i as usize],
        Operand::Node(i) => made[*i as usize],
    };
    for step in &program.steps {
        let inputs: Vec<ValueId> = step.inputs.iter().map(|i| value(&made, i)).collect();
        let original = step.original.map(|i| graph.node(window.nodes[i as usize].id));
        if let Some(node) = original
            && node.inputs == inputs
        {
            made.push(node.outputs[0]);
            continue;
        }
        let origin = match original {
            Some(node) => node.origin.clone(),
            None => graph.node(window.nodes[step.made_for as usize].id).origin.by(INFO.name),
        };
        let op = match &step.op {
            Op::AllGather(gather) => Op::AllGather(AllGather { unit: window.units[gather.unit] }),
            op => op.clone(),
        };
        made.push(graph.add1(op, &inputs, origin, step.region).map_err(bug(INFO.name))?);
    }
    for (root, new) in window.roots.iter().zip(&program.roots) {
        let old = graph.node(window.nodes[*root as usize].id).outputs[0];
        let new = value(&made, new);
        if old == new {
            continue;
        }
        if graph.ty(old) != graph.ty(new) {
            return Err(Diagnostic::error(
                "B001",
                "internal error in pass `simplify`: a type changed",
            )
            .at(&graph.def(old).origin)
            .help("this is a bug in frit; please report it with the model"));
        }
        if graph.value(new).name.is_none()
            && let Some(name) = graph.value(old).name.clone()
        {
            graph.set_name(new, &name);
        }
        replaced.insert(old, new);
    }
    Ok(())
}
