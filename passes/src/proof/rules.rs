//! All rules with one face: a statement, and a function that applies it to the root of a graph.

use crate::rule::Statement;
use crate::{canonicalize, raise, simplify};
use frit_ir::interpret::leaf_key;
use frit_ir::{Graph, Op, ValueId};
use std::collections::HashMap;

/// A rule of some pass.
pub(super) struct Rule {
    /// The pass.
    pub(super) pass: &'static str,
    pub(super) statement: Statement,
    apply: Box<dyn Fn(&mut Graph) -> bool>,
}

impl Rule {
    fn new(
        pass: &'static str,
        statement: Statement,
        apply: impl Fn(&mut Graph) -> bool + 'static,
    ) -> Self {
        Rule { pass, statement, apply: Box::new(apply) }
    }

    /// The graph after the rule was applied to the node of its output, if it applies there.
    pub(super) fn apply(&self, graph: &Graph) -> Option<Graph> {
        let mut after = graph.clone();
        (self.apply)(&mut after).then_some(after)
    }
}

/// Every rule of the passes that rewrite, in their order.
pub(super) fn all() -> Vec<Rule> {
    let mut all = Vec::new();
    for &rule in canonicalize::RULES.iter().copied().flatten() {
        let apply = move |graph: &mut Graph| canonicalize::apply_once(&rule, graph);
        all.push(Rule::new("canonicalize", rule.statement, apply));
    }
    all.push(Rule::new("canonicalize", canonicalize::loss::BIAS, |graph| {
        let root = graph.value(graph.outputs[0].value).def;
        let before = graph.node(root).inputs.clone();
        canonicalize::loss::move_cut_behind_bias(graph, root).expect("it fits");
        graph.node(root).inputs != before
    }));
    for &rule in raise::RULES {
        all.push(Rule::new("raise", rule.statement, move |graph| raise::apply_once(&rule, graph)));
    }
    for rule in simplify::rules::all() {
        let apply = move |graph: &mut Graph| simplify::once::apply_once(&rule, graph);
        all.push(Rule::new("simplify", rule.statement, apply));
    }
    all.push(Rule::new("simplify", simplify::softmax::LAST_AXIS, |graph| {
        simplify::softmax::over_last_axis(graph).expect("it fits")
    }));
    all
}

#[test]
fn every_statement_has_a_rule() {
    let rules: Vec<_> = all().iter().map(|rule| (rule.pass, rule.statement.name)).collect();
    let stated: Vec<_> =
        crate::rule::statements().iter().map(|(pass, s)| (*pass, s.name)).collect();
    assert_eq!(rules, stated);
    let distinct: std::collections::BTreeSet<_> = stated.iter().collect();
    assert_eq!(distinct.len(), stated.len());
}

/// One graph with the roots of both: equal nodes are one, and leaves of one name.
pub(super) fn side_by_side(before: &Graph, after: &Graph) -> (Graph, [ValueId; 2]) {
    let mut joined = before.clone();
    let mut made: HashMap<(Op, Vec<ValueId>), Vec<ValueId>> = HashMap::new();
    for (_, node) in before.nodes() {
        made.insert((node.op.clone(), node.inputs.clone()), node.outputs.clone());
    }
    let root = copy(after, after.outputs[0].value, &mut joined, &mut made);
    (joined, [before.outputs[0].value, root])
}

fn copy(
    from: &Graph,
    v: ValueId,
    to: &mut Graph,
    made: &mut HashMap<(Op, Vec<ValueId>), Vec<ValueId>>,
) -> ValueId {
    let node = from.def(v);
    let inputs: Vec<ValueId> = node.inputs.iter().map(|x| copy(from, *x, to, made)).collect();
    let result = node.outputs.iter().position(|o| *o == v).expect("its own result");
    let outputs = made.entry((node.op.clone(), inputs.clone())).or_insert_with(|| {
        to.add(node.op.clone(), &inputs, node.origin.clone(), node.region).expect("it fits")
    });
    outputs[result]
}

/// The value as an expression, with names for sizes.
pub(super) fn describe(
    graph: &Graph,
    v: ValueId,
    names: &HashMap<usize, (String, String)>,
) -> String {
    let node = graph.def(v);
    if let Some(name) = leaf_key(&node.op) {
        return name;
    }
    if let Op::Constant(c) = &node.op {
        return c.value.as_splat().map_or("table".into(), |x| format!("{x}"));
    }
    let json = serde_json::to_value(&node.op).expect("an operation is JSON");
    let attributes = json.get(node.op.name()).and_then(|a| a.as_object());
    let attributes: Vec<String> = attributes
        .into_iter()
        .flatten()
        .filter(|(_, value)| !value.is_null() && **value != serde_json::Value::Bool(false))
        .map(|(key, value)| format!("{key}={}", named(value, names)))
        .collect();
    let inputs: Vec<String> = node.inputs.iter().map(|x| describe(graph, *x, names)).collect();
    let braces =
        if attributes.is_empty() { String::new() } else { format!("{{{}}}", attributes.join(",")) };
    format!("{}{braces}({})", node.op.name(), inputs.join(","))
}

fn named(value: &serde_json::Value, names: &HashMap<usize, (String, String)>) -> String {
    match value {
        serde_json::Value::Array(items) => {
            let items: Vec<String> = items.iter().map(|item| named(item, names)).collect();
            format!("[{}]", items.join(","))
        }
        serde_json::Value::Object(fields) => {
            let fields: Vec<String> = fields
                .iter()
                .map(|(key, value)| format!("{key}={}", named(value, names)))
                .collect();
            fields.join(",")
        }
        other => {
            let number = other.as_u64().and_then(|n| names.get(&(n as usize)));
            number.map_or_else(|| other.to_string().replace('"', ""), |(text, _)| text.clone())
        }
    }
}
