//! Equality saturation: casts, transposes, reshapes and gathers are moved to where they cost least.
//!
//! In: a sharded graph. Out: a graph that computes the same bits with fewer bytes moved and
//! communicated. Windows of the graph ([`window`]) become e-graphs ([`language`]), are saturated with
//! [`rules`], and the cheapest equal nodes are taken ([`extract`]). Before that, [`softmax`] brings every softmax
//! to the last axis. README.md beside this file says how
//! they fit together and what the costs are.

mod extract;
mod language;
#[cfg(test)]
pub(crate) mod once;
mod rebuild;
pub mod rules;
mod saturate;
pub(crate) mod softmax;
#[cfg(test)]
mod tests;
mod window;

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property};
use frit_ir::ops::Op;
use frit_ir::sharding::sharded_values;
use frit_ir::{Diagnostic, Graph, Origin, ValueId};
use rules::Rule;
use saturate::Solution;
use std::collections::{BTreeMap, HashMap};

/// The contract of [`Simplify`].
pub const INFO: PassInfo = PassInfo {
    name: "simplify",
    summary: "move casts, layout changes and gathers to where they cost least",
    requires: &[Property::Sharded],
    ensures: &[],
    breaks: &[Property::Canonical],
    numerics: Numerics::Bitwise,
};

/// The contract of [`Simplify`] with approximate rules.
pub const INFO_APPROXIMATE: PassInfo = PassInfo { numerics: Numerics::LowersPrecision, ..INFO };

/// Rewrites windows of the graph to the cheapest equal ones.
#[derive(Clone, Copy, Debug)]
pub struct Simplify {
    /// Also apply rules that may change results by rounding.
    pub approximate: bool,
    /// Whether a parameter may be cast before it is gathered.
    pub narrow_gathers: bool,
}

impl Default for Simplify {
    fn default() -> Self {
        Simplify { approximate: false, narrow_gathers: true }
    }
}

impl Pass for Simplify {
    fn info(&self) -> &'static PassInfo {
        if self.approximate { &INFO_APPROXIMATE } else { &INFO }
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        let mut rules = rules::all();
        rules.retain(|r| self.approximate || r.statement.claim.is_bits());
        rules.retain(|r| self.narrow_gathers || r.statement.name != rules::CAST_BEFORE_GATHER);
        let before = float_casts(graph);
        let rewritten = softmax::over_last_axis(graph)?;
        let moved = self.run_with(&rules, graph, context)?;
        let changed = Changed::when(rewritten || moved == Changed::Yes);
        let after = float_casts(graph);
        let message = format!(
            "{} casts of {} bytes before, {} of {} after",
            before.0, before.1, after.0, after.1
        );
        context.remark(&Origin::none(), message);
        Ok(changed)
    }
}

/// The casts between float types, and the bytes that they read and write on one rank.
fn float_casts(graph: &Graph) -> (usize, usize) {
    let sharded = sharded_values(graph);
    let mut total = (0, 0);
    for (_, node) in graph.nodes().filter(|(_, n)| matches!(n.op, Op::Cast(_))) {
        let (from, to) = (graph.ty(node.inputs[0]), graph.ty(node.outputs[0]));
        if from.dtype.is_float() && to.dtype.is_float() {
            let parts = if sharded[node.inputs[0].0 as usize] { graph.world_size } else { 1 };
            total = (total.0 + 1, total.1 + (from.bytes() + to.bytes()) / parts);
        }
    }
    total
}

impl Simplify {
    fn run_with(
        &self,
        rules: &[Rule],
        graph: &mut Graph,
        context: &mut PassContext,
    ) -> Result<Changed, Diagnostic> {
        let windows = window::windows(graph);
        // Windows of one form are solved once.
        let mut solved: HashMap<window::Form<'_>, Solution> = HashMap::new();
        let mut stops: BTreeMap<String, usize> = BTreeMap::new();
        let mut replaced: HashMap<ValueId, ValueId> = HashMap::new();
        let (order, mut places) = (graph.order().to_vec(), rebuild::Places::new());
        let mut improved: BTreeMap<String, (Origin, usize)> = BTreeMap::new();
        for window in &windows {
            let solution = solved
                .entry(window.form())
                .or_insert_with(|| saturate::solve(window, rules, graph.world_size));
            *stops.entry(solution.stop.clone()).or_default() += 1;
            let Some(program) = &solution.program else { continue };
            rebuild::rebuild(graph, window, program, &mut replaced, &mut places)?;
            let origin = &graph.node(window.nodes[0].id).origin;
            let entry = improved.entry(solution.summary.clone());
            entry.or_insert_with(|| (origin.clone(), 0)).1 += 1;
        }
        for (summary, (origin, times)) in improved {
            context.remark(&origin, format!("{summary}; {times} times"));
        }
        for (stop, windows) in stops {
            context.remark(&Origin::none(), format!("{windows} windows: {stop}"));
        }
        context.remark(&Origin::none(), format!("{} of them differ", solved.len()));
        if replaced.is_empty() {
            return Ok(Changed::No);
        }
        graph.substitute(&replaced);
        graph.remove_dead();
        *graph = rebuild::in_order(graph, &order, &places)?;
        Ok(Changed::Yes)
    }
}
