//! Equality saturation: casts, transposes, reshapes and gathers are moved to where they cost least.
//!
//! In: a sharded graph. Out: a graph that computes the same bits with fewer bytes moved and
//! communicated. Windows of the graph ([`window`]) become e-graphs ([`language`]), are saturated with
//! [`rules`], and the cheapest equal nodes are taken ([`extract`]). README.md beside this file says how
//! they fit together and what the costs are.

mod extract;
mod language;
mod rebuild;
pub mod rules;
mod saturate;
#[cfg(test)]
mod tests;
mod window;

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property};
use frit_ir::{Diagnostic, Graph, Origin, ValueId};
use rules::{Exactness, Rule};
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
#[derive(Clone, Copy, Debug, Default)]
pub struct Simplify {
    /// Also apply rules that may change results by rounding.
    pub approximate: bool,
}

impl Pass for Simplify {
    fn info(&self) -> &'static PassInfo {
        if self.approximate { &INFO_APPROXIMATE } else { &INFO }
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        let mut rules = rules::all();
        rules.retain(|r| self.approximate || r.exactness == Exactness::Exact);
        self.run_with(&rules, graph, context)
    }
}

impl Simplify {
    fn run_with(
        &self,
        rules: &[Rule],
        graph: &mut Graph,
        context: &mut PassContext,
    ) -> Result<Changed, Diagnostic> {
        // Windows of one form are solved once.
        let mut solved: HashMap<String, Solution> = HashMap::new();
        let mut stops: BTreeMap<String, usize> = BTreeMap::new();
        let mut replaced: HashMap<ValueId, ValueId> = HashMap::new();
        let (order, mut places) = (graph.order().to_vec(), rebuild::Places::new());
        let mut improved: BTreeMap<String, (Origin, usize)> = BTreeMap::new();
        for window in window::windows(graph) {
            let solution = solved
                .entry(window.key())
                .or_insert_with(|| saturate::solve(&window, rules, graph.world_size));
            *stops.entry(solution.stop.clone()).or_default() += 1;
            let Some(program) = &solution.program else { continue };
            rebuild::rebuild(graph, &window, program, &mut replaced, &mut places)?;
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
        if replaced.is_empty() {
            return Ok(Changed::No);
        }
        graph.substitute(&replaced);
        graph.remove_dead();
        *graph = rebuild::in_order(graph, &order, &places)?;
        Ok(Changed::Yes)
    }
}
