//! Solves one window: fills an e-graph, applies the rules to saturation, extracts.

use super::extract::{Choice, Extractor};
use super::language::{EGraph, Facts, Term, stage};
use super::rules::Rule;
use super::window::{Operand, Window};
use egg::{Id, StopReason};
use frit_ir::Region;
use frit_ir::ops::Op;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Rounds of rules.
const MAX_ITERATIONS: usize = 10;
/// Terms of an e-graph.
const MAX_TERMS: usize = 4_000;

/// An operation of a solution.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) op: Op,
    pub(super) region: Region,
    /// Values from outside, or earlier steps.
    pub(super) inputs: Vec<Operand>,
    /// The node of the window that this is, if it is one.
    pub(super) original: Option<u32>,
    /// The node of the window for which it was created.
    pub(super) made_for: u32,
}

/// The replacement of a window.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) steps: Vec<Step>,
    /// For each root of the window, the term that computes it.
    pub(super) roots: Vec<Operand>,
}

/// The result for all windows of one form.
#[derive(Clone, Debug)]
pub(super) struct Solution {
    /// Nothing if the window is as cheap as it can be.
    pub(super) program: Option<Program>,
    /// The gain, in one line.
    pub(super) summary: String,
    /// Why saturation ended.
    pub(super) stop: String,
}

/// The e-graph of a window.
pub(super) struct Filled {
    pub(super) egraph: EGraph,
    /// The class of each node.
    pub(super) nodes: Vec<Id>,
}

impl Filled {
    pub(super) fn new(window: &Window) -> Self {
        let mut egraph = EGraph::new(Facts::new(window.leaf_data.clone()));
        let leaves: Vec<Id> =
            (0..window.leaves.len() as u32).map(|i| egraph.add(Term::Leaf(i))).collect();
        let mut nodes: Vec<Id> = Vec::with_capacity(window.nodes.len());
        for (node, number) in window.nodes.iter().zip(0..) {
            egraph.analysis.making_for = number;
            let inputs = node.inputs.iter().map(|i| match i {
                Operand::Leaf(i) => leaves[*i as usize],
                Operand::Node(i) => nodes[*i as usize],
            });
            let inputs = inputs.collect();
            let op = egraph.analysis.intern(&node.op);
            nodes.push(egraph.add(Term::Node(op, node.region, inputs)));
        }
        egraph.rebuild();
        Filled { egraph, nodes }
    }

    /// Applies the rules; returns the stop reason and the rules that matched.
    pub(super) fn saturate(&mut self, rules: &[Rule]) -> (StopReason, BTreeSet<&'static str>) {
        let egraph = &mut self.egraph;
        let mut fired = BTreeSet::new();
        for _ in 0..MAX_ITERATIONS {
            let mut found = Vec::new();
            for class in egraph.classes() {
                for term in &class.nodes {
                    for rule in rules {
                        if let Some(expr) = rule.find(egraph, class.id, term) {
                            found.push((class.id, expr, rule.statement.name));
                        }
                    }
                }
            }
            let mut changed = false;
            for (class, expr, name) in found {
                egraph.analysis.making_for = egraph[class].data.made_for;
                let new = expr.add(egraph);
                if egraph.union(class, new) {
                    changed = true;
                    fired.insert(name);
                }
                if egraph.total_number_of_nodes() > MAX_TERMS {
                    egraph.rebuild();
                    return (StopReason::NodeLimit(MAX_TERMS), fired);
                }
            }
            egraph.rebuild();
            if !changed {
                return (StopReason::Saturated, fired);
            }
        }
        (StopReason::IterationLimit(MAX_ITERATIONS), fired)
    }

    /// The terms of the graph itself, for the classes that have one, and the nodes that they are.
    pub(super) fn original(&self) -> (Choice, HashMap<Term, u32>) {
        let mut choice = Choice::new();
        for class in self.egraph.classes() {
            if let Some(leaf) = class.nodes.iter().position(|t| matches!(t, Term::Leaf(_))) {
                choice.insert(class.id, leaf);
            }
        }
        let mut nodes = HashMap::new();
        for (number, (class, term)) in self.terms().into_iter().enumerate() {
            let found = self.egraph[class].nodes.iter().position(|t| *t == term);
            let legal = match &term {
                Term::Leaf(_) => true,
                Term::Node(_, region, _) => stage(*region) <= self.egraph[class].data.stage,
            };
            if let (Some(found), true) = (found, legal) {
                choice.entry(class).or_insert(found);
            }
            nodes.entry(term).or_insert(number as u32);
        }
        (choice, nodes)
    }

    /// The term of each node as it is now, with its class.
    fn terms(&self) -> Vec<(Id, Term)> {
        let find = |id: Id| self.egraph.find(id);
        let terms = self.nodes.iter().map(|&id| {
            let term = self.egraph.id_to_node(id).clone();
            (find(id), egg::Language::map_children(term, find))
        });
        terms.collect()
    }

    pub(super) fn roots(&self, window: &Window) -> Vec<Id> {
        window.roots.iter().map(|&r| self.egraph.find(self.nodes[r as usize])).collect()
    }

    /// Cost of the window as it is: each different node once.
    pub(super) fn cost_before(&self, world_size: usize) -> u64 {
        let extractor = Extractor::new(&self.egraph, world_size);
        let terms: BTreeMap<Id, Term> =
            self.nodes.iter().map(|&id| (id, self.egraph.id_to_node(id).clone())).collect();
        terms.iter().map(|(id, term)| extractor.cost(*id, term)).sum()
    }
}

/// The cheapest program found for a window.
pub(super) fn solve(window: &Window, rules: &[Rule], world_size: usize) -> Solution {
    let mut filled = Filled::new(window);
    let before = filled.cost_before(world_size);
    let (stop, fired) = filled.saturate(rules);
    let stop = match stop {
        StopReason::Saturated => "saturated".to_string(),
        StopReason::NodeLimit(n) => format!("stopped at {n} terms"),
        StopReason::IterationLimit(n) => format!("stopped after {n} iterations"),
        other => format!("stopped: {other:?}"),
    };
    let (original, numbers) = filled.original();
    let roots = filled.roots(window);
    let extractor = Extractor::new(&filled.egraph, world_size);
    let best = extractor.extract(&roots, &original).filter(|(_, cost)| *cost < before);
    let Some((choice, after)) = best else {
        return Solution { program: None, summary: String::new(), stop };
    };
    let program = program(&filled, &extractor, &roots, &choice, &numbers);
    let summary = format!(
        "{} nodes: cost {} bytes instead of {} by {}",
        window.nodes.len(),
        after / 16,
        before / 16,
        fired.into_iter().collect::<Vec<_>>().join(", ")
    );
    Solution { program, summary, stop }
}

fn program(
    filled: &Filled,
    extractor: &Extractor<'_>,
    roots: &[Id],
    choice: &Choice,
    numbers: &HashMap<Term, u32>,
) -> Option<Program> {
    let egraph = &filled.egraph;
    let mut made: HashMap<Id, Operand> = HashMap::new();
    let mut steps = Vec::new();
    for class in extractor.reach(roots, choice)? {
        let term = &egraph[class].nodes[choice[&class]];
        let operand = match term {
            Term::Leaf(i) => Operand::Leaf(*i),
            Term::Node(op, region, inputs) => {
                steps.push(Step {
                    op: egraph.analysis.op(*op).clone(),
                    region: *region,
                    inputs: inputs.iter().map(|i| made[&egraph.find(*i)]).collect(),
                    original: numbers.get(term).copied(),
                    made_for: egraph[class].data.made_for,
                });
                Operand::Node(steps.len() as u32 - 1)
            }
        };
        made.insert(class, operand);
    }
    Some(Program { steps, roots: roots.iter().map(|r| made[r]).collect() })
}
