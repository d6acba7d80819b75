//! Lints: static checks of precision.
//!
//! In: the forward graph with its final dtypes, the finished plan, and the configuration. Out: one diagnostic per finding, with the id
//! of its row in [`catalog`], severity, scope and remedy. Lints change nothing. Findings that differ only in the index of their block are
//! merged into one, with a note that lists the other scopes.

mod casts;
pub mod catalog;
mod constants;
mod dtypes;
mod losses;
mod overflow;
pub mod range;
mod scaling;
mod speed;

use crate::cost::Device;
use crate::loss_scale::LossScaling;
use catalog::Level;
use frit_ir::ops::Param;
use frit_ir::plan::{Plan, Target};
use frit_ir::{DType, Diagnostic, Graph, Node, NodeId, Op, Origin, Severity, ValueId};
use range::{Leaves, Ranges, Spread};
use std::collections::BTreeMap;

/// Inputs of the lints besides graph and plan.
pub struct Facts<'a> {
    /// Target of the plan.
    pub target: &'a Target,
    /// The autocast dtype.
    pub compute: DType,
    /// The dtype in which gradients are reduced.
    pub reduce: DType,
    /// The dtype in which parameters are gathered, if the configuration gives one.
    pub gather: Option<DType>,
    /// Whether parameters are sharded.
    pub sharded: bool,
    /// Number of ranks.
    pub ranks: usize,
    /// Micro-steps per step.
    pub accumulation: usize,
    /// How the loss is scaled.
    pub scaling: LossScaling,
    /// Learning rate times weight decay, where weights are multiplied by one minus it.
    pub decay: Option<f64>,
    /// Declared ranges of inputs.
    pub inputs: &'a BTreeMap<String, (f64, f64)>,
    /// The dtype of a parameter in the model's file.
    pub stored: &'a dyn Fn(&str) -> Option<DType>,
    /// The values of a parameter.
    pub spread: &'a dyn Fn(&Param) -> Option<Spread>,
}

/// Lints of the forward graph, loss included, whose dtypes are final.
pub fn forward(graph: &Graph, facts: &Facts<'_>) -> Vec<Diagnostic> {
    let has_f16 = computes_in(graph, DType::F16).is_some();
    let nothing = |_: &Param| None;
    // Weights are only looked at where their size matters.
    let leaves = Leaves {
        input: &|name| facts.inputs.get(name).copied(),
        param: if has_f16 { facts.spread } else { &nothing },
    };
    let ranges = Ranges::of(graph, &leaves);
    let mut found = Findings::default();
    scaling::lint(graph, facts, &mut found);
    dtypes::lint(graph, facts, &mut found);
    constants::lint(graph, &ranges, &mut found);
    overflow::lint(graph, &ranges, &mut found);
    losses::lint(graph, &mut found);
    casts::widened(graph, &mut found);
    found.list()
}

/// Lints of a finished plan whose durations are those of `device`, of which the model or the configuration may state that it rounds values.
pub fn plan(plan: &Plan, device: &Device, rounds: bool) -> Vec<Diagnostic> {
    let mut found = Findings::default();
    casts::ping_pong(plan, rounds, &mut found);
    speed::lint(plan, device, &mut found);
    found.list()
}

/// Findings, merged over repeated blocks.
#[derive(Default)]
struct Findings {
    found: Vec<(Diagnostic, Vec<String>)>,
    /// Index by lint, scope without numbers, and what was found there.
    at: BTreeMap<(&'static str, String, String), usize>,
}

impl Findings {
    /// Adds a finding of the lint `id`; `what` distinguishes findings of one scope.
    fn add(&mut self, id: &'static str, origin: &Origin, what: &str, message: String) {
        let lint = catalog::find(id);
        let key = (id, blocks(&origin.scope), what.to_string());
        if let Some(&i) = self.at.get(&key) {
            let (first, scopes) = &mut self.found[i];
            let scope = origin.scope.to_string();
            if origin.scope != first.origin.scope && !scopes.contains(&scope) {
                scopes.push(scope);
            }
            return;
        }
        let severity = match lint.level {
            Level::Error => Severity::Error,
            Level::Info => Severity::Info,
            Level::Warning | Level::Defect | Level::Impossible => Severity::Warning,
        };
        let diagnostic = Diagnostic::new(id, severity, message).at(origin).help(lint.remedy);
        self.at.insert(key, self.found.len());
        self.found.push((diagnostic, vec![]));
    }

    fn list(self) -> Vec<Diagnostic> {
        let noted = |(d, scopes): (Diagnostic, Vec<String>)| {
            if scopes.is_empty() { d } else { d.note(format!("also in {}", scopes.join(", "))) }
        };
        self.found.into_iter().map(noted).collect()
    }
}

/// A scope with its numbers left out: equal for the blocks of one stack.
fn blocks(scope: &str) -> String {
    scope.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// The first node that computes in this dtype, rather than converting to it or moving it.
fn computes_in(graph: &Graph, dtype: DType) -> Option<&Node> {
    graph.nodes().map(|(_, n)| n).find(|n| {
        let moves = n.op.is_leaf() || n.op.is_layout() || matches!(n.op, Op::Cast(_));
        !moves && n.outputs.iter().chain(&n.inputs).any(|v| graph.ty(*v).dtype == dtype)
    })
}

/// The node that defines a value, skipping casts and layout operations.
fn source(graph: &Graph, mut v: ValueId) -> (ValueId, NodeId) {
    loop {
        let id = graph.value(v).def;
        let node = graph.node(id);
        let moves = matches!(
            node.op,
            Op::Cast(_)
                | Op::Reshape(_)
                | Op::Transpose(_)
                | Op::Expand(_)
                | Op::Slice(_)
                | Op::Split(_)
        );
        if !moves {
            return (v, id);
        }
        v = node.inputs[0];
    }
}

#[cfg(test)]
mod tests;
