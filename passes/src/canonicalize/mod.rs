//! Canonicalizes the graph.
//!
//! In: any graph. Out: an equivalent graph in which constants are folded, equal nodes merged, dead nodes removed, and no-ops removed:
//! casts to the same dtype, identity layouts, operations with neutral constants, broadcasts that the consumer performs itself. Gathers
//! with regular indices are slices, many slices that share out an axis one split. Cross-entropy reads padded rows of logits. Every rewrite
//! is bit-exact (`x + 0` stays: it turns −0 into 0):
//! [`RULES`] says how that is proved.

mod arithmetic;
mod broadcast;
mod cse;
mod fold;
mod gather;
pub(crate) mod layout;
pub(crate) mod loss;
mod tiles;

pub(crate) use fold::known_value;
pub(crate) use loss::read_padded_logits;

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use crate::rule::Statement;
use frit_ir::ops::Constant;
use frit_ir::{Code, Diagnostic, Graph, GraphError, NodeId, Op, Origin, Tensor, ValueId};
use std::collections::HashMap;

/// The contract of [`Canonicalize`].
pub const INFO: PassInfo = PassInfo {
    name: "canonicalize",
    summary: "fold constants, merge equal nodes, remove dead and identity nodes",
    requires: &[],
    ensures: &[Property::Canonical],
    breaks: &[],
    numerics: Numerics::Bitwise,
};

/// Sweeps over the graph before the pass gives up on a fixed point; each sweep removes or simplifies
/// at least one node, so real graphs need a handful.
const MAX_SWEEPS: usize = 100;

/// Brings the graph to its canonical form.
#[derive(Clone, Copy, Debug, Default)]
pub struct Canonicalize {}

impl Pass for Canonicalize {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        let before = graph.len();
        let changed = canonicalize(graph)?;
        if changed == Changed::Yes {
            let message = format!("{before} nodes became {}", graph.len());
            context.remark(&Origin::none(), message);
        }
        Ok(changed)
    }
}

/// Rewrites until nothing changes.
pub(crate) fn canonicalize(graph: &mut Graph) -> Result<Changed, Diagnostic> {
    let mut changed = graph.remove_dead() > 0;
    let mut allowance = fold::Allowance::FULL;
    for _ in 0..MAX_SWEEPS {
        let rewritten = sweep(graph)?;
        let folded = fold::fold(graph, &mut allowance).map_err(bug(INFO.name))?;
        let merged = cse::merge(graph);
        let removed = graph.remove_dead() > 0;
        if !(rewritten || folded || merged) {
            return Ok(Changed::when(changed || removed));
        }
        changed = true;
    }
    Ok(Changed::when(changed))
}

/// Applies every rule once to every node, in order. Whether any applied.
fn sweep(graph: &mut Graph) -> Result<bool, Diagnostic> {
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    let mut edited = false;
    for id in graph.order().to_vec() {
        let inputs = &graph.node(id).inputs;
        if inputs.iter().any(|v| map.contains_key(v)) {
            let resolved = inputs.iter().map(|v| resolve(&map, *v)).collect();
            graph.node_mut(id).inputs = resolved;
        }
        match rewrite(graph, id).map_err(bug(INFO.name))? {
            Rewrite::None => {}
            Rewrite::Edited => edited = true,
            Rewrite::To(value) => {
                map.insert(graph.node(id).outputs[0], value);
            }
        }
    }
    edited |= !map.is_empty();
    graph.substitute(&map);
    sort(graph)?;
    Ok(edited)
}

/// Restores topological order.
pub(crate) fn sort(graph: &mut Graph) -> Result<(), Diagnostic> {
    graph.sort().map_err(|cycle| {
        Diagnostic::error(
            Code::PassFailed,
            format!("a rewrite made a cycle of {} nodes", cycle.len()),
        )
        .help("this is a bug in frit; please report it with the model")
    })
}

fn resolve(map: &HashMap<ValueId, ValueId>, mut value: ValueId) -> ValueId {
    while let Some(&next) = map.get(&value) {
        value = next;
    }
    value
}

/// The effect of a rule on a node.
enum Rewrite {
    /// It does not apply.
    None,
    /// The node's operands or attributes changed in place.
    Edited,
    /// The node's only result equals this value.
    To(ValueId),
}

impl From<Option<ValueId>> for Rewrite {
    fn from(value: Option<ValueId>) -> Self {
        value.map_or(Rewrite::None, Rewrite::To)
    }
}

type Rewritten = Result<Rewrite, GraphError>;

/// A rewrite of one node.
#[derive(Clone, Copy)]
pub struct Rule {
    /// What it states.
    pub statement: Statement,
    apply: fn(&mut Graph, NodeId) -> Rewritten,
}

impl std::fmt::Debug for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.statement)
    }
}

/// The rules, in the order in which they are tried.
pub const RULES: &[&[Rule]] =
    &[layout::RULES, arithmetic::RULES, broadcast::RULES, gather::RULES, tiles::RULES, loss::RULES];

fn rewrite(graph: &mut Graph, id: NodeId) -> Rewritten {
    for rule in RULES.iter().copied().flatten() {
        match (rule.apply)(graph, id)? {
            Rewrite::None => {}
            done => return Ok(done),
        }
    }
    Ok(Rewrite::None)
}

/// Applies the rule to the node of the first output. Whether it applied.
#[cfg(test)]
pub(crate) fn apply_once(rule: &Rule, graph: &mut Graph) -> bool {
    let root = graph.outputs[0].value;
    let id = graph.value(root).def;
    match (rule.apply)(graph, id).expect("the rule makes what fits") {
        Rewrite::None => return false,
        Rewrite::Edited => {}
        Rewrite::To(value) => graph.replace_uses(root, value),
    }
    sort(graph).expect("there is no cycle");
    true
}

/// Adds a node that stands for (part of) the node `id`.
fn add(graph: &mut Graph, id: NodeId, op: Op, inputs: &[ValueId]) -> Result<ValueId, GraphError> {
    let node = graph.node(id);
    let (origin, region) = (node.origin.clone(), node.region);
    graph.add1(op, inputs, origin, region)
}

/// Adds a constant that stands for (part of) the node `id`.
fn constant(graph: &mut Graph, id: NodeId, value: Tensor) -> Result<ValueId, GraphError> {
    add(graph, id, Op::Constant(Constant { value }), &[])
}
