//! Raises decomposed composite operations to single nodes.
//!
//! In: a canonical graph. Out: the same graph with attention, normalizations, activations, softmax, softplus and embeddings as single nodes,
//! canonical again. One file per composite; each matches by structure, from the node that defines the result up to its sources, and never
//! by name. Later nodes are tried first, so that the largest form (a norm with scale and bias) wins.

mod activation;
mod attention;
mod cross_entropy;
mod embedding;
mod logarithm;
mod mask;
mod matcher;
mod norm;
mod softmax;

use crate::canonicalize::{canonicalize, sort};
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property};
use crate::rule::Statement;
use frit_ir::{Diagnostic, Graph, GraphError, NodeId, Op, ValueId};
use matcher::Matcher;

/// The contract of [`Raise`].
pub const INFO: PassInfo = PassInfo {
    name: "raise",
    summary: "recognize composite operations that exporters decompose",
    requires: &[Property::Canonical],
    ensures: &[Property::Raised, Property::Canonical],
    breaks: &[],
    numerics: Numerics::Reassociates,
};

/// Finds composite operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Raise {}

/// An operand of a node that replaces a pattern.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A value of the graph.
    Old(ValueId),
    /// The first result of an earlier node of the replacement.
    New(usize),
}

/// The nodes that replace a pattern; the first result of the last one is the pattern's result.
#[derive(Debug)]
struct Raised {
    nodes: Vec<(Op, Vec<Step>)>,
}

impl Raised {
    fn new() -> Self {
        Raised { nodes: Vec::new() }
    }

    fn push(&mut self, op: Op, operands: Vec<Step>) -> Step {
        self.nodes.push((op, operands));
        Step::New(self.nodes.len() - 1)
    }
}

/// A composite, and how it is recognized.
#[derive(Clone, Copy)]
pub struct Rule {
    /// What it states.
    pub statement: Statement,
    /// The replacement of the value, if it is the result of a composite.
    apply: fn(&Matcher<'_>, ValueId) -> Option<Raised>,
}

impl std::fmt::Debug for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.statement)
    }
}

/// The rules, each once over the whole graph, in this order: a later composite may contain an earlier one.
pub const RULES: &[Rule] = &[
    embedding::RULE,
    softmax::RULE,
    norm::RULE,
    activation::RULE,
    logarithm::RULE,
    attention::RULE,
    cross_entropy::RULE,
];

impl Pass for Raise {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        let mut changed = false;
        for rule in RULES {
            changed |= apply(graph, context, rule)?;
        }
        if changed {
            canonicalize(graph)?;
        }
        Ok(Changed::when(changed))
    }
}

fn apply(graph: &mut Graph, context: &mut PassContext, rule: &Rule) -> Result<bool, Diagnostic> {
    let mut changed = false;
    let mut rest = graph.order().to_vec();
    // Inner parts of a match are dead only once it is replaced, so matches are made one at a time; a
    // node that did not match is not tried again.
    while let Some((y, raised)) = next_match(graph, &mut rest, rule) {
        let origin = graph.def(y).origin.by(INFO.name);
        let new = build(graph, y, raised).ok().filter(|new| graph.ty(*new) == graph.ty(y));
        let Some(new) = new else {
            // The operation does not take these types; leave the parts.
            graph.remove_dead();
            continue;
        };
        let op = graph.def(new).op.name();
        let pattern = rule.statement.name;
        context.remark(&origin, format!("raised to {op} (pattern `{pattern}`)"));
        if let Some(name) = graph.value(y).name.clone() {
            graph.set_name(new, &name);
        }
        graph.replace_uses(y, new);
        sort(graph)?;
        graph.remove_dead();
        changed = true;
    }
    Ok(changed)
}

/// The last of the remaining nodes that matches; it and later ones are removed from the list.
fn next_match(graph: &Graph, rest: &mut Vec<NodeId>, rule: &Rule) -> Option<(ValueId, Raised)> {
    let matcher = Matcher::new(graph);
    while let Some(id) = rest.pop() {
        if !graph.is_live(id) || graph.node(id).op.is_leaf() {
            continue;
        }
        let y = graph.node(id).outputs[0];
        if let Some(raised) = (rule.apply)(&matcher, y) {
            return Some((y, raised));
        }
    }
    None
}

/// Applies the rule to the node of the first output. Whether it applied.
#[cfg(test)]
pub(crate) fn apply_once(rule: &Rule, graph: &mut Graph) -> bool {
    let y = graph.outputs[0].value;
    let Some(raised) = (rule.apply)(&Matcher::new(graph), y) else { return false };
    let new = build(graph, y, raised).expect("the rule makes what fits");
    graph.replace_uses(y, new);
    sort(graph).expect("there is no cycle");
    true
}

fn build(graph: &mut Graph, y: ValueId, raised: Raised) -> Result<ValueId, GraphError> {
    let (origin, region) = (graph.def(y).origin.by(INFO.name), graph.def(y).region);
    let mut made: Vec<ValueId> = Vec::with_capacity(raised.nodes.len());
    for (op, operands) in raised.nodes {
        let resolve = |step: &Step| match *step {
            Step::Old(v) => v,
            Step::New(i) => made[i],
        };
        let inputs: Vec<ValueId> = operands.iter().map(resolve).collect();
        made.push(graph.add(op, &inputs, origin.clone(), region)?[0]);
    }
    Ok(made.last().copied().unwrap_or(y))
}
