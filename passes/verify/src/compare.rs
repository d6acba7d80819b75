//! Whether two graphs compute the same outputs.

use crate::explain::difference;
use crate::reading::{Known, Ranks, Reading};
use crate::term::{Algebra, TermId, Terms};
use crate::unstated::Unstated;
use frit_ir::interpret::leaf_key;
use frit_ir::ops::{ParamKind, ReduceKind, StateName, UnaryFn};
use frit_ir::sharding::sharded_values;
use frit_ir::{Graph, Node, Op, Origin, Output, OutputKind, Region, TensorType, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// An output that two graphs compute differently, or that cannot be shown to be the same.
#[derive(Clone, Debug)]
pub struct Difference {
    /// Which output.
    pub output: String,
    /// Where the node is that computes it in the second graph.
    pub origin: Origin,
    /// What is known.
    pub what: String,
}

impl From<Unstated> for Difference {
    fn from(unstated: Unstated) -> Difference {
        let what = format!("`{}` has no statement: {}", unstated.what, unstated.reason);
        Difference { output: String::new(), origin: unstated.origin, what }
    }
}

/// Stack of the thread that compares: terms are as deep as models between two reductions.
const STACK: usize = 1 << 30;

/// Runs this in a thread whose stack suffices for a [`Comparer`].
pub fn on_large_stack<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, run);
        thread.expect("the system has a thread").join().expect("comparison does not panic")
    })
}

/// Compares graphs. What several have in common is read once.
#[derive(Default)]
pub struct Comparer {
    terms: Terms,
}

impl Comparer {
    /// Of graphs over the real numbers.
    pub fn of_real_numbers() -> Comparer {
        Comparer::default()
    }

    /// Of graphs whose values are also rounded to f16, bf16 and narrower dtypes wherever the graphs have them.
    pub fn of_rounded_numbers() -> Comparer {
        Comparer { terms: Terms::of(Algebra::Rounded) }
    }

    /// Of graphs of which every bit matters.
    pub fn of_bits() -> Comparer {
        Comparer { terms: Terms::of(Algebra::Bits) }
    }

    /// Compares the outputs of two graphs: those of the second must be those of the first, by name and kind, and what is carried on must be
    /// computed in the same part of a step. Returns the differences.
    pub fn compare(&mut self, before: &Graph, after: &Graph, ranks: Ranks) -> Vec<Difference> {
        let mut found = self.compare_stated(before, after, ranks);
        let keys: BTreeSet<String> = after.outputs.iter().map(|o| key_of(after, o)).collect();
        for output in before.outputs.iter().filter(|o| o.kind == OutputKind::Result) {
            let key = key_of(before, output);
            if !keys.contains(&key) {
                let origin = before.def(output.value).origin.clone();
                found.push(Difference {
                    output: key,
                    origin,
                    what: "the output is missing".into(),
                });
            }
        }
        found
    }

    /// The same with what is stated of a graph, which need not have all outputs of kind `Result`.
    pub fn compare_stated(
        &mut self,
        before: &Graph,
        after: &Graph,
        ranks: Ranks,
    ) -> Vec<Difference> {
        self.within_limit(|t| {
            let (first, of_first) = Reading::with_constants(t, before, ranks);
            let expected = outputs(before, &first);
            let (second, of_second) = Reading::with_constants(t, after, ranks);
            let mut found = differences(t, &expected, &outputs(after, &second));
            found.extend(of_another_part(before, after));
            found.extend(ill_formed(after));
            if t.before_gradients {
                found.extend(of_other_parameters((before, &of_first), (after, &of_second)));
            }
            found
        })
    }

    /// What a comparison finds, or that it has too many terms. Those of comparisons before count only the first time.
    fn within_limit(&mut self, compare: impl Fn(&mut Terms) -> Vec<Difference>) -> Vec<Difference> {
        let were_none = self.terms.is_empty();
        let mut found = compare(&mut self.terms);
        if self.terms.exhausted().is_some() && !were_none {
            self.terms = self.terms.anew();
            found = compare(&mut self.terms);
        }
        if self.terms.exhausted().is_none() {
            return found;
        }
        self.terms = self.terms.anew();
        let what = format!(
            "it is not shown, because its statement has more than {} terms",
            self.terms.limit.0
        );
        vec![Difference { output: String::new(), origin: Origin::none(), what }]
    }

    /// The same comparer for graphs of which gradients are still to be taken, or not: what passes them on, or does not, must then stay.
    pub fn before_gradients(&mut self, before_gradients: bool) -> &mut Comparer {
        self.terms.before_gradients = before_gradients;
        self
    }

    /// Compares the step of one rank with that of all. Expected is that gradients are the means over ranks
    /// when they are applied (in a reproducible step their sums), that the numbers
    /// of which the loss and the norm are made, and the results of these names, are sums over ranks, and that everything else stays
    /// what it is on one rank.
    pub fn compare_distributed(
        &mut self,
        before: &Graph,
        after: &Graph,
        ranks: Ranks,
        sums: &[&str],
    ) -> Vec<Difference> {
        self.within_limit(|t| {
            let mut expected = distributed(t, before, after, ranks);
            for output in before.outputs.iter().filter(|o| sums.contains(&o.name.as_str())) {
                expected.entry(key_of(before, output)).and_modify(|output| {
                    output.term = ranks.reduced(t, output.term, ReduceKind::Sum, ALL);
                });
            }
            let second = Reading::new(t, after, ranks);
            let mut found = differences(t, &expected, &outputs(after, &second));
            found.extend(of_other_statistics(before));
            found.extend(placement(after));
            found.extend(of_another_part(before, after));
            found.extend(ill_formed(after));
            found
        })
    }
}

/// The team of all ranks: those that share a copy, and all copies.
const ALL: [bool; 2] = [true; 2];

/// What an output is.
#[derive(Clone)]
struct Stated {
    term: TermId,
    kind: OutputKind,
    ty: TensorType,
    /// Where it is computed.
    origin: Origin,
}

/// Outputs by their keys.
type Outputs = BTreeMap<String, Stated>;

fn differences(t: &Terms, expected: &Outputs, found: &Outputs) -> Vec<Difference> {
    let mut differences = vec![];
    let mut report = |key: &str, origin: &Origin, what: String| {
        differences.push(Difference { output: key.into(), origin: origin.clone(), what });
    };
    for (key, Stated { kind, origin, .. }) in expected {
        if !found.contains_key(key) && *kind != OutputKind::Result {
            report(key, origin, "the output is missing".into());
        }
    }
    for (key, Stated { term, ty, origin, .. }) in found {
        match expected.get(key) {
            None => report(key, origin, "the output is new".into()),
            Some(other) if !is_alike(&other.ty, ty) => {
                report(key, origin, format!("it is of type {ty}, not {}", other.ty));
            }
            Some(other) if other.term == *term => {}
            Some(other) => report(key, origin, difference(t, other.term, *term)),
        }
    }
    differences
}

/// Whether types differ at most by how floats are rounded.
fn is_alike(a: &TensorType, b: &TensorType) -> bool {
    a.shape == b.shape && (a.dtype == b.dtype || a.dtype.is_float() && b.dtype.is_float())
}

/// What is carried on by each micro-step in one graph, and by the update of a step in the other. Where a leaf is kept as it is, it does
/// not matter.
fn of_another_part(before: &Graph, after: &Graph) -> Vec<Difference> {
    let carries = |graph: &Graph| -> BTreeMap<String, (bool, Origin)> {
        let carries = graph.outputs.iter().filter(|o| matches!(o.kind, OutputKind::Carry(_)));
        let computed = carries.map(|o| (key_of(graph, o), graph.def(o.value)));
        let computed = computed.filter(|(_, node)| !node.op.is_leaf());
        let part = |node: &Node| (node.region == Region::Update, node.origin.clone());
        computed.map(|(key, node)| (key, part(node))).collect()
    };
    let expected = carries(before);
    let mut found = vec![];
    for (output, (by_update, origin)) in carries(after) {
        if expected.get(&output).is_some_and(|(other, _)| *other != by_update) {
            let what = match by_update {
                true => "the update of a step replaces it, not each micro-step".into(),
                false => "each micro-step replaces it, not the update of a step".into(),
            };
            found.push(Difference { output, origin, what });
        }
    }
    found
}

/// What makes the outputs of a graph ambiguous: two of the same key; and a leaf that the update reads although each micro-step replaces it,
/// so that it is no longer what the micro-step read.
fn ill_formed(graph: &Graph) -> Vec<Difference> {
    let (mut keys, mut found) = (BTreeSet::new(), vec![]);
    let mut report = |output: String, origin: &Origin, what: String| {
        found.push(Difference { output, origin: origin.clone(), what });
    };
    let mut replaced = BTreeSet::new();
    for output in &graph.outputs {
        let (key, node) = (key_of(graph, output), graph.def(output.value));
        if keys.contains(&key) {
            report(key.clone(), &node.origin, "another output has the same name".into());
        }
        keys.insert(key);
        if let OutputKind::Carry(leaf) = output.kind
            && node.region != Region::Update
            && output.value != leaf
        {
            replaced.insert(leaf);
        }
    }
    for (_, node) in graph.nodes().filter(|(_, n)| n.region == Region::Update) {
        if let Some(leaf) = node.inputs.iter().find(|v| replaced.contains(v)) {
            let what = format!(
                "the update reads `{}`, which each micro-step replaces",
                leaf_key(&graph.def(*leaf).op).unwrap_or_default()
            );
            report(String::new(), &node.origin, what);
        }
    }
    found
}

/// Parameters that the loss depends on in one of two graphs only: they would be trained in one, and frozen in the other.
fn of_other_parameters(
    before: (&Graph, &HashMap<ValueId, Known>),
    after: (&Graph, &HashMap<ValueId, Known>),
) -> Vec<Difference> {
    let (first, second) = (trained(before), trained(after));
    let only = |of: &BTreeMap<String, Origin>, other: &BTreeMap<String, Origin>, what: &str| {
        let names = of.iter().filter(|(name, _)| !other.contains_key(*name));
        let difference = |(name, origin): (&String, &Origin)| Difference {
            output: format!("gradient {name}"),
            origin: origin.clone(),
            what: what.into(),
        };
        names.map(difference).collect::<Vec<_>>()
    };
    let mut found = only(&first, &second, "the loss no longer depends on the parameter");
    found.extend(only(&second, &first, "the loss depends on the parameter, as it did not before"));
    found
}

/// The trainable parameters that floats on the way to the loss depend on, and where they are; nothing without a loss. Of a choice whose
/// condition is known only what is chosen counts.
fn trained((graph, constants): (&Graph, &HashMap<ValueId, Known>)) -> BTreeMap<String, Origin> {
    let losses = graph.outputs.iter().filter(|o| o.kind == OutputKind::LossSum);
    let mut reached: BTreeSet<ValueId> = losses.map(|o| o.value).collect();
    let mut found = BTreeMap::new();
    for (_, node) in graph.nodes().rev() {
        if !node.outputs.iter().any(|v| reached.contains(v)) {
            continue;
        }
        let condition = match &node.op {
            Op::Select => constants.get(&node.inputs[0]).and_then(Known::as_splat),
            _ => None,
        };
        match (&node.op, condition) {
            // Nothing depends on a parameter without elements.
            (Op::Param(param), _)
                if param.kind == ParamKind::Trainable && param.ty.shape.numel() > 0 =>
            {
                found.insert(param.name.clone(), node.origin.clone());
            }
            (Op::Unary(UnaryFn::Detach), _) => {}
            (_, Some(condition)) => {
                reached.insert(node.inputs[if condition == 0.0 { 2 } else { 1 }]);
            }
            _ => reached.extend(node.inputs.iter().filter(|v| graph.ty(**v).dtype.is_float())),
        }
    }
    found
}

/// The outputs of a graph by a key that does not depend on the numbers of its values.
fn outputs(graph: &Graph, reading: &Reading) -> Outputs {
    let stated = |o: &Output| Stated {
        term: reading.of(o.value),
        kind: o.kind,
        ty: graph.ty(o.value).clone(),
        origin: graph.def(o.value).origin.clone(),
    };
    graph.outputs.iter().map(|o| (key_of(graph, o), stated(o))).collect()
}

/// The name of an output that is the same in every graph that has it, and no other output has: its kind, and what it is for.
pub fn key_of(graph: &Graph, output: &Output) -> String {
    match output.kind {
        OutputKind::Carry(leaf) => carry_of(graph, leaf),
        kind => format!("{} {}", format!("{kind:?}").to_lowercase(), output.name),
    }
}

/// The name of what a leaf becomes. A parameter may have the name of a state.
fn carry_of(graph: &Graph, leaf: ValueId) -> String {
    let op = &graph.def(leaf).op;
    format!("carry {} {}", op.name(), leaf_key(op).unwrap_or_default())
}

/// What in the step of one rank is not as [`distributed`] reads it: which values are sums over ranks follows from where they are.
fn of_other_statistics(before: &Graph) -> Vec<Difference> {
    let mut found = vec![];
    let mut report = |node: &Node, what: &str| {
        let origin = node.origin.clone();
        found.push(Difference { output: String::new(), origin, what: what.into() });
    };
    let gradients: BTreeSet<ValueId> = (before.outputs.iter())
        .filter(|o| o.kind == OutputKind::Gradient)
        .map(|o| o.value)
        .collect();
    let mut unscales = 0;
    for (_, node) in before.nodes() {
        match &node.op {
            Op::Unscale(_) => {
                unscales += 1;
                let mut statistics = before.def(node.inputs[0]);
                if matches!(statistics.op, Op::RoundStats) {
                    statistics = before.def(statistics.inputs[0]);
                }
                let [of_gradients, count, loss] = statistics.inputs[..] else {
                    report(node, "the statistics are not [of gradients, count, loss]");
                    continue;
                };
                let is_one = |v: ValueId| before.ty(v).shape.dims() == [1];
                let are_of_gradients = matches!(before.def(of_gradients).op, Op::GradStats(_));
                let is_concat = matches!(statistics.op, Op::Concat(_));
                if !(is_concat && are_of_gradients && is_one(count) && is_one(loss)) {
                    report(node, "the statistics are not [of gradients, count, loss]");
                }
            }
            Op::GradStats(_) if !node.inputs.iter().all(|v| gradients.contains(v)) => {
                report(node, "statistics are of what is no gradient of the step");
            }
            Op::OptimizerStep(_) if !gradients.contains(&node.inputs[1]) => {
                report(node, "a parameter is updated by what is no gradient of the step");
            }
            _ => {}
        }
    }
    if unscales > 1 {
        let what = format!("{unscales} nodes unscale the gradients");
        found.push(Difference { output: String::new(), origin: Origin::none(), what });
    }
    found
}

/// The outputs of the step of one rank, on all ranks.
fn distributed(t: &mut Terms, before: &Graph, after: &Graph, ranks: Ranks) -> Outputs {
    let early = Reading::unread(after, ranks).reduced_early;
    let unread = || Reading::unread(before, ranks).reduced_early(early);
    let (mut local, mut step) = (unread(), unread());
    local.read(t, before, &mut HashMap::new());
    // The operand of `unscale` is [statistics, count, loss], in a reproducible step once they are rounded.
    let unscale = before.nodes().find(|(_, n)| matches!(n.op, Op::Unscale(_)));
    let mut statistics = unscale.map(|(_, n)| before.def(n.inputs[0]));
    let reproducible = statistics.filter(|n| matches!(n.op, Op::RoundStats));
    if let Some(round) = reproducible {
        statistics = Some(before.def(round.inputs[0]));
    }
    for output in before.outputs.iter().filter(|o| o.kind == OutputKind::Gradient) {
        let gradient = local.of(output.value);
        let applied = match reproducible {
            Some(_) => ReduceKind::Sum,
            None => ReduceKind::Mean,
        };
        let applied = ranks.reduced(t, gradient, applied, ALL);
        step.give(output.value, applied);
    }
    let parts = statistics.map_or(&[][..], |n| &n.inputs);
    for part in parts.iter().skip(1) {
        let sum = ranks.reduced(t, local.of(*part), ReduceKind::Sum, ALL);
        step.give(*part, sum);
    }
    step.read(t, before, &mut HashMap::new());
    let (mut of_step, of_rank) = (outputs(before, &step), outputs(before, &local));
    for output in &before.outputs {
        let OutputKind::Carry(leaf) = output.kind else { continue };
        let Op::State(state) = &before.def(leaf).op else { continue };
        if state.name.is_within_step() {
            let key = carry_of(before, leaf);
            let mut carried = of_rank[&key].clone();
            if early && state.name == StateName::GradSum {
                let over = [true, ranks.shards == 1];
                carried.term = ranks.reduced(t, carried.term, ReduceKind::Mean, over);
            }
            of_step.insert(key, carried);
        }
    }
    of_step
}

/// Where a graph reads the part of a rank as if it were the whole, or keeps one as the other.
fn placement(graph: &Graph) -> Vec<Difference> {
    let sharded = sharded_values(graph);
    let is = |v: &ValueId| sharded[v.0 as usize];
    let by_element = |op: &Op| {
        op.is_pointwise()
            || matches!(
                op,
                Op::OptimizerStep(_) | Op::EmaStep | Op::ScaledCast(_) | Op::ByParamGroup(_)
            )
            || matches!(op, Op::AllGather(_) | Op::AllReduce(_) | Op::GradStats(_) | Op::Fusion(_))
    };
    let mut found = vec![];
    for (_, node) in graph.nodes() {
        if matches!(node.op, Op::GradStats(_))
            && node.inputs.iter().any(is)
            && !node.inputs.iter().all(is)
        {
            let what = "statistics are of parts of a rank and of wholes at once".into();
            found.push(Difference { output: String::new(), origin: node.origin.clone(), what });
        }
        if node.inputs.iter().any(is) && !by_element(&node.op) {
            let what = format!("`{}` reads the part of a rank as the whole", node.op.name());
            found.push(Difference { output: String::new(), origin: node.origin.clone(), what });
        }
    }
    for output in &graph.outputs {
        let OutputKind::Carry(leaf) = output.kind else { continue };
        if is(&leaf) != is(&output.value) {
            let what = "the part of a rank is kept as the whole, or the whole as a part".into();
            let origin = graph.def(output.value).origin.clone();
            found.push(Difference { output: output.name.clone(), origin, what });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::term::Limit;
    use frit_ir::text;

    /// tanh(x + … + x·x·…) of so many operations.
    fn chain(n: usize) -> Graph {
        let ty = r#"{"dtype":"f32","shape":[4]}"#;
        let mut lines = format!("%x0: f32[4] = input {{name = \"x\", ty = {ty}}}\n");
        for k in 0..n {
            lines += &format!("%y{k}: f32[4] = tanh %x{k}\n%x{}: f32[4] = mul %y{k}, %x0\n", k + 1);
        }
        let text = format!("graph @g world=1 {{\n{lines}return %x{n} as \"y\"\n}}");
        text::parse(&text).unwrap_or_else(|e| panic!("{e:?}\n{text}"))
    }

    #[test]
    fn a_comparison_of_too_many_terms_ends_and_shows_nothing() {
        let (small, large) = (chain(5), chain(300));
        for algebra in [Algebra::Real, Algebra::Rounded, Algebra::Bits] {
            let mut comparer = Comparer { terms: Terms::of(algebra) };
            comparer.terms.limit = Limit(100);
            for _ in 0..2 {
                let found = comparer.compare(&large, &large, Ranks::ONE);
                assert_eq!(found.len(), 1);
                assert!(found[0].what.contains("more than 100 terms"), "{}", found[0].what);
                let found = comparer.compare_distributed(&large, &large, Ranks::ONE, &[]);
                assert!(found[0].what.contains("more than 100 terms"), "{}", found[0].what);
                // Others are compared as before.
                assert!(comparer.compare(&small, &small, Ranks::ONE).is_empty());
                assert!(!comparer.compare(&small, &chain(6), Ranks::ONE).is_empty());
            }
            // Many comparisons have more terms together.
            for n in 1..20 {
                assert!(comparer.compare(&chain(n), &chain(n), Ranks::ONE).is_empty());
            }
        }
    }
}
