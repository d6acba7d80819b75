//! Writes to the elements selected by a data-dependent mask.
//!
//! PyTorch's exporters write `Tensor.masked_scatter` and `x[mask] = y` as a ScatterND at the coordinates found by NonZero, whose
//! number depends on data. Each becomes one [`MASKED_SCATTER`] that uses the mask directly, so all sizes are static.
//! Multimodal models use this to insert image features among text embeddings.

use super::messages::{AttributeProto, GraphProto, NodeProto};
use std::collections::HashMap;

/// Domain of operators that the importer writes for itself.
pub(super) const DOMAIN: &str = "frit";
/// `(data, mask, source)`: data, with the elements of the source in their order where the mask is true; with
/// [`ROWS`], with the rows of the source, or with its one row everywhere.
pub(super) const MASKED_SCATTER: &str = "MaskedScatter";
/// Whether the source broadcasts to the rows that the mask selects.
pub(super) const ROWS: &str = "rows";
/// Whether the mask broadcasts to the data, so that its axes are the last of them; else they are the first.
pub(super) const BROADCAST: &str = "broadcast";
/// Maximum number of nodes between the coordinates and uses of their count.
const REACH: usize = 6;

/// Puts masks in the place of coordinates.
pub(super) fn by_mask(graph: &mut GraphProto) {
    let made = graph.node.iter().flat_map(|n| n.output.iter().map(move |o| (o.as_str(), n)));
    let makers = Makers(made.collect());
    let found = graph.node.iter().enumerate();
    let found: Vec<(usize, NodeProto)> =
        found.filter_map(|(i, node)| Some((i, makers.masked_scatter(node)?))).collect();
    for (i, node) in found {
        graph.node[i] = node;
    }
}

/// The node that makes each value.
struct Makers<'a>(HashMap<&'a str, &'a NodeProto>);

impl<'a> Makers<'a> {
    /// First operand of what makes a value, if that is of this kind.
    fn behind(&self, value: &str, op: &str) -> Option<&'a String> {
        self.0.get(value).filter(|n| n.op_type == op).and_then(|n| n.input.first())
    }

    /// What takes the place of a ScatterND at the coordinates of a mask.
    fn masked_scatter(&self, node: &NodeProto) -> Option<NodeProto> {
        let [data, coordinates, updates] = &node.input[..] else { return None };
        let reduces = |a: &AttributeProto| a.name == "reduction" && &a.s[..] != b"none";
        if node.op_type != "ScatterND" || node.attribute.iter().any(reduces) {
            return None;
        }
        let mut mask = self.behind(self.behind(coordinates, "Transpose")?, "NonZero")?;
        // Moving selected rows is cheaper than moving elements.
        let expanded = mask;
        for _ in 0..REACH {
            mask = self.behind(mask, "Expand").unwrap_or(mask);
        }
        let broadcasts = i64::from(!std::ptr::eq(mask, expanded));
        // As many elements as are selected, of more; or rows of which there are as many.
        let counted = |n: &NodeProto, size: usize| {
            n.input.get(size).is_some_and(|v| self.is_count(v, coordinates, REACH))
        };
        let updated = self.0.get(updates.as_str()).copied();
        let repeated = self.behind(updates, "Reshape").and_then(|v| self.0.get(v.as_str()));
        let (source, rows) = match (updated, repeated) {
            (Some(n), _) if n.op_type == "Slice" && counted(n, 2) => (&n.input[0], 0),
            (_, Some(n)) if n.op_type == "Expand" && counted(n, 1) => (&n.input[0], 1),
            _ => (updates, 0),
        };
        let flag = |name: &str, i| AttributeProto {
            name: name.into(),
            i,
            r#type: 2,
            ..AttributeProto::default()
        };
        Some(NodeProto {
            op_type: MASKED_SCATTER.into(),
            domain: DOMAIN.into(),
            input: vec![data.clone(), mask.clone(), source.clone()],
            attribute: vec![flag(ROWS, rows), flag(BROADCAST, broadcasts)],
            ..node.clone()
        })
    }

    /// Whether an integer is computed of how much is selected: of how many coordinates there are, or of a sum.
    fn is_count(&self, value: &str, coordinates: &str, reach: usize) -> bool {
        let Some(node) = self.0.get(value).filter(|_| reach > 0) else { return false };
        match node.op_type.as_str() {
            "Shape" => node.input.first().is_some_and(|v| v == coordinates),
            "ReduceSum" => true,
            "Concat" | "Gather" | "Reshape" | "Squeeze" | "Unsqueeze" => {
                node.input.first().is_some_and(|v| self.is_count(v, coordinates, reach - 1))
            }
            _ => false,
        }
    }
}
