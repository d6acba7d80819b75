//! One rule, once, without saturation or costs: for the proof of the rule.

use super::language::Term;
use super::rules::{Expr, Rule};
use super::saturate::Filled;
use super::window;
use egg::Id;
use frit_ir::{Graph, Origin, ValueId};
use std::collections::HashMap;

/// Applies the rule to the node of the first output. Whether it applied.
pub(crate) fn apply_once(rule: &Rule, graph: &mut Graph) -> bool {
    let y = graph.outputs[0].value;
    let root = graph.value(y).def;
    for window in window::windows(graph) {
        let Some(at) = window.nodes.iter().position(|node| node.id == root) else { continue };
        let filled = Filled::new(&window);
        let (egraph, class) = (&filled.egraph, filled.egraph.find(filled.nodes[at]));
        let found = egraph[class].nodes.iter().find_map(|term| rule.find(egraph, class, term));
        let Some(found) = found else { return false };
        let mut values: HashMap<Id, ValueId> = HashMap::new();
        for (node, id) in window.nodes.iter().zip(&filled.nodes) {
            values.insert(egraph.find(*id), graph.node(node.id).outputs[0]);
        }
        for class in egraph.classes() {
            for term in &class.nodes {
                if let Term::Leaf(i) = term {
                    values.insert(class.id, window.leaves[*i as usize]);
                }
            }
        }
        let new = make(graph, &found, &values);
        graph.replace_uses(y, new);
        graph.sort().expect("there is no cycle");
        return true;
    }
    false
}

fn make(graph: &mut Graph, expr: &Expr, values: &HashMap<Id, ValueId>) -> ValueId {
    match expr {
        Expr::Class(id) => values[id],
        Expr::Make(op, region, inputs) => {
            let inputs: Vec<ValueId> = inputs.iter().map(|e| make(graph, e, values)).collect();
            graph.add1(op.clone(), &inputs, Origin::none(), *region).expect("it fits")
        }
    }
}
