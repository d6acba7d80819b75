//! Where a graph rounds what an output is made of.

use crate::compare::key_of;
use crate::lemmas::is_exact;
use frit_ir::{DType, Graph, Node, Op, ValueId};
use std::collections::BTreeSet;

/// Operations whose results are rounded, by dtype and name.
type Operations = BTreeSet<(DType, &'static str)>;

/// The roundings on the way to an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roundings {
    /// The output, by its kind and name.
    pub output: String,
    /// Operations whose results are rounded, by dtype and name. Inside a region some of them need not be.
    pub operations: BTreeSet<(DType, &'static str)>,
}

/// The roundings on the way to each output of a graph: operations that compute results of less than 32 bits.
pub fn roundings(graph: &Graph) -> Vec<Roundings> {
    let mut before: Vec<Operations> = vec![Operations::new(); graph.n_values()];
    for (_, node) in graph.nodes() {
        let mut all = Operations::new();
        node.inputs.iter().for_each(|v| all.extend(&before[v.0 as usize]));
        match &node.op {
            Op::Fusion(fusion) => {
                all.extend(fusion.body.nodes().filter_map(|(_, n)| rounding(&fusion.body, n)));
            }
            _ => all.extend(rounding(graph, node)),
        }
        node.outputs.iter().for_each(|v| before[v.0 as usize].clone_from(&all));
    }
    let outputs = graph.outputs.iter().map(|output| Roundings {
        output: key_of(graph, output),
        operations: before[output.value.0 as usize].clone(),
    });
    outputs.collect()
}

/// The outputs on the way to which a region reads a value that it rounds to less than 32 bits itself: a kernel may keep such values in
/// f32 ([`Fusion`](frit_ir::ops::Fusion)).
pub fn kept_wide(graph: &Graph) -> BTreeSet<String> {
    let mut wide = vec![false; graph.n_values()];
    for (_, node) in graph.nodes() {
        let own = match &node.op {
            Op::Fusion(fusion) => keeps_wide(&fusion.body),
            _ => false,
        };
        let is_wide = own || node.inputs.iter().any(|v| wide[v.0 as usize]);
        node.outputs.iter().for_each(|v| wide[v.0 as usize] = is_wide);
    }
    let outputs = graph.outputs.iter().filter(|output| wide[output.value.0 as usize]);
    outputs.map(|output| key_of(graph, output)).collect()
}

/// Whether a node of a region reads what another rounds.
fn keeps_wide(body: &Graph) -> bool {
    let rounded = body.nodes().filter(|(_, n)| rounding(body, n).is_some());
    let rounded: BTreeSet<ValueId> = rounded.flat_map(|(_, n)| n.outputs.clone()).collect();
    body.nodes().any(|(_, n)| n.inputs.iter().any(|v| rounded.contains(v)))
}

/// To what a node rounds.
fn rounding(graph: &Graph, node: &Node) -> Option<(DType, &'static str)> {
    let to = |dtype: DType| node.inputs.iter().all(|v| graph.ty(*v).dtype.widens_to(dtype));
    let narrow =
        node.outputs.iter().map(|v| graph.ty(*v).dtype).find(|dtype| dtype.is_low_precision())?;
    let widens = matches!(node.op, Op::Cast(_)) && to(narrow);
    (!is_exact(&node.op) && !widens).then(|| (narrow, node.op.name()))
}
