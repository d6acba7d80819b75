//! Where a graph rounds what an output is made of.

use crate::compare::key_of;
use crate::lemmas::{is_exact, is_narrow};
use frit_ir::{DType, Graph, Op};
use std::collections::BTreeMap;

/// The roundings on the way to an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roundings {
    /// The output, by its kind and name.
    pub output: String,
    /// Operations whose results are rounded, by dtype and name. Inside a region some of them need not be.
    pub operations: BTreeMap<(DType, &'static str), usize>,
}

/// The roundings on the way to each output of a graph: operations that compute results of less than 32 bits.
pub fn roundings(graph: &Graph) -> Vec<Roundings> {
    let found = graph.outputs.iter().map(|output| {
        let mut operations = BTreeMap::new();
        for id in graph.ancestors([output.value]) {
            let node = graph.node(id);
            match &node.op {
                Op::Fusion(fusion) => {
                    fusion.body.nodes().for_each(|(_, n)| count(&fusion.body, n, &mut operations));
                }
                _ => count(graph, node, &mut operations),
            }
        }
        Roundings { output: key_of(graph, output), operations }
    });
    found.collect()
}

fn count(graph: &Graph, node: &frit_ir::Node, to: &mut BTreeMap<(DType, &'static str), usize>) {
    let widens = matches!(node.op, Op::Cast(_))
        && node
            .inputs
            .iter()
            .all(|v| graph.ty(*v).dtype.widens_to(graph.ty(node.outputs[0]).dtype));
    if is_exact(&node.op) || widens {
        return;
    }
    let narrow = node.outputs.iter().map(|v| graph.ty(*v).dtype).find(|dtype| is_narrow(*dtype));
    if let Some(dtype) = narrow {
        *to.entry((dtype, node.op.name())).or_default() += 1;
    }
}
