//! Replaces gathers with constant regular indices by slices and broadcasts.
//!
//! PyTorch's advanced indexing with index grids, and selecting one element of an axis, are exported as gathers. If every index is
//! `c + a·j` for one coordinate `j` of the result, or constant, the gather reads a strided box and repeats it along the coordinates
//! that no index depends on.

use super::{Rewrite, Rewritten, Rule, add, known_value};
use crate::rule::{Claim, Statement};
use frit_ir::ops::{Expand, Gather, GatherNd, Reshape, Slice, Transpose};
use frit_ir::{Graph, GraphError, NodeId, Op, Shape, ValueId};

/// Rules about gathers.
pub(super) const RULES: &[Rule] = &[Rule {
    statement: Statement {
        name: "gather-of-regular-indices",
        equation: "gather(x, i) = expand(transpose(slice(x))) if i is constant, and regular along each axis",
        claim: Claim::Tested {
            bits: true,
            test: "canonicalize::gather::tests::every_small_table_of_indices",
            why: "the condition is on the values of a table: every table of up to four indices or pairs is tried",
        },
    },
    apply: to_box,
}];

fn to_box(graph: &mut Graph, id: NodeId) -> Rewritten {
    let node = graph.node(id);
    let (lead, depth) = match &node.op {
        Op::Gather(Gather { axis }) => (*axis, None),
        Op::GatherNd(GatherNd { batch_dims }) => (*batch_dims, Some(())),
        _ => return Ok(Rewrite::None),
    };
    let Some(ids) = known_value(graph, node.inputs[1]) else { return Ok(Rewrite::None) };
    let data = graph.ty(node.inputs[0]).shape.dims();
    let dims = ids.shape().dims();
    // A gather along an axis has tuples of one index and shares no axis with the data.
    let (grid, depth) = match (depth, dims.split_last()) {
        (Some(()), Some((depth, outer))) => (outer[lead..].to_vec(), *depth),
        _ => (dims.to_vec(), 1),
    };
    let sizes = &data[lead..lead + depth];
    let columns = ids.as_ints().and_then(|values| columns(values, &grid, sizes));
    match columns {
        Some(columns) => build(graph, id, lead, &grid, &columns).map(Rewrite::To),
        None => Ok(Rewrite::None),
    }
}

/// The indices into one axis of the data.
#[derive(Clone, Copy, Debug)]
struct Column {
    start: usize,
    step: isize,
    /// The coordinate of the grid that the index depends on.
    along: Option<usize>,
}

/// Reads tuples of indices into axes of these sizes, for a grid of places, perhaps repeated. `None`
/// unless they are regular and in range.
fn columns(values: &[i64], grid: &[usize], sizes: &[usize]) -> Option<Vec<Column>> {
    let depth = sizes.len();
    let strides = Shape::from(grid).strides();
    let places: usize = grid.iter().product();
    if values.is_empty() || depth == 0 {
        return None;
    }
    let resolved: Option<Vec<i64>> = values
        .iter()
        .enumerate()
        .map(|(i, &index)| {
            let size = sizes[i % depth] as i64;
            (-size..size).contains(&index).then_some(if index < 0 { index + size } else { index })
        })
        .collect();
    let resolved = resolved?;
    let mut columns = Vec::with_capacity(depth);
    for d in 0..depth {
        let at = |place: usize| resolved[place * depth + d];
        let steps: Vec<(usize, i64)> = (0..grid.len())
            .filter(|&j| grid[j] > 1)
            .map(|j| (j, at(strides[j]) - at(0)))
            .filter(|(_, step)| *step != 0)
            .collect();
        let (along, step) = match steps[..] {
            [] => (None, 1),
            [(j, step)] => (Some(j), step),
            _ => return None,
        };
        let expected = |place: usize| {
            let coordinate = along.map_or(0, |j| place / strides[j] % grid[j]);
            at(0) + coordinate as i64 * step
        };
        let tuples = resolved.len() / depth;
        if !(0..tuples).all(|tuple| at(tuple) == expected(tuple % places)) {
            return None;
        }
        if along.is_some() && columns.iter().any(|c: &Column| c.along == along) {
            return None;
        }
        columns.push(Column { start: at(0) as usize, step: step as isize, along });
    }
    Some(columns)
}

/// The box that the columns cut from the data, as the result of node `id`.
fn build(
    graph: &mut Graph,
    id: NodeId,
    lead: usize,
    grid: &[usize],
    columns: &[Column],
) -> Result<ValueId, GraphError> {
    let data = graph.node(id).inputs[0];
    let from = graph.ty(data).shape.0.clone();
    let (depth, rank) = (columns.len(), from.len());
    let mut cut = Slice { start: vec![0; rank], size: from.clone(), step: vec![1; rank] };
    for (d, column) in columns.iter().enumerate() {
        let n = column.along.map_or(1, |j| grid[j]);
        let step = if n == 1 { 1 } else { column.step };
        (cut.start[lead + d], cut.size[lead + d], cut.step[lead + d]) = (column.start, n, step);
    }
    let boxed = add(graph, id, Op::Slice(cut), &[data])?;
    // Columns in the order of their coordinates; those without one have size 1 and go first.
    let mut order: Vec<usize> = (0..depth).collect();
    order.sort_by_key(|&d| columns[d].along.map_or(0, |j| j + 1));
    let perm =
        (0..lead).chain(order.into_iter().map(|d| lead + d)).chain(lead + depth..rank).collect();
    let turned = add(graph, id, Op::Transpose(Transpose { perm }), &[boxed])?;
    let depends = |j: usize| columns.iter().any(|c| c.along == Some(j));
    let kept = (0..grid.len()).map(|j| if depends(j) { grid[j] } else { 1 });
    let shape: Vec<usize> = from[..lead]
        .iter()
        .copied()
        .chain(kept)
        .chain(from[lead + depth..].iter().copied())
        .collect();
    let placed = add(graph, id, Op::Reshape(Reshape { shape: Shape(shape) }), &[turned])?;
    let shape = graph.ty(graph.node(id).outputs[0]).shape.clone();
    add(graph, id, Op::Expand(Expand { shape }), &[placed])
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::interpret::{Options, run};
    use frit_ir::ops::{Constant, Input};
    use frit_ir::{DType, Origin, OutputKind, Region, Tensor, TensorType};

    /// Whether the gather becomes a view; its meaning stays the same either way.
    fn becomes_view(op: Op, data: &[usize], ids: &[usize], values: Vec<i64>) -> bool {
        let mut g = Graph::new("g");
        let ty = TensorType::new(DType::F32, data);
        let numbers = (0..ty.shape.numel()).map(|i| i as f64).collect();
        let feeds = [("x".to_string(), Tensor::floats(DType::F32, data, numbers))].into();
        let add = |g: &mut Graph, op: Op, inputs: &[ValueId]| {
            g.add1(op, inputs, Origin::none(), Region::Forward).expect("it fits")
        };
        let x = add(&mut g, Op::Input(Input { name: "x".into(), ty }), &[]);
        let value = Tensor::ints(DType::I64, ids, values);
        let ids = add(&mut g, Op::Constant(Constant { value }), &[]);
        let y = add(&mut g, op, &[x, ids]);
        g.add_output("y", y, OutputKind::Result);
        let before = run(&g, &feeds, Options::default()).expect("runs");
        crate::canonicalize::canonicalize(&mut g).expect("canonicalizes");
        let after = run(&g, &feeds, Options::default()).expect("runs");
        assert_eq!(before[0].1.to_f64s(), after[0].1.to_f64s());
        assert_eq!(before[0].1.ty, after[0].1.ty);
        !g.nodes().any(|(_, n)| matches!(n.op, Op::Gather(_) | Op::GatherNd(_)))
    }

    #[test]
    fn every_small_table_of_indices() {
        let tables = |n: u32, size: i64| {
            let names = 2 * size;
            (0..names.pow(n)).map(move |table| -> Vec<i64> {
                (0..n).map(|i| table / names.pow(i) % names - size).collect()
            })
        };
        let gather = |axis| Op::Gather(Gather { axis });
        let nd = |batch_dims| Op::GatherNd(GatherNd { batch_dims });
        let mut views = 0;
        for values in tables(3, 3) {
            views += usize::from(becomes_view(gather(0), &[3, 2], &[3], values.clone()));
            views += usize::from(becomes_view(gather(1), &[2, 3], &[3, 1], values.clone()));
            views += usize::from(becomes_view(nd(0), &[3, 2], &[3, 1], values));
        }
        for values in tables(4, 2) {
            views += usize::from(becomes_view(gather(1), &[2, 2, 2], &[2, 2], values.clone()));
            views += usize::from(becomes_view(nd(1), &[2, 2], &[2, 2, 1], values.clone()));
            views += usize::from(becomes_view(nd(0), &[2, 2, 3], &[2, 2], values));
        }
        assert!(views > 300, "{views}");
    }

    #[test]
    fn regular_indices_are_views() {
        let gather = |axis| Op::Gather(Gather { axis });
        assert!(becomes_view(gather(1), &[2, 5, 3], &[], vec![-2]));
        assert!(becomes_view(gather(0), &[4, 3], &[2, 3], vec![1, 2, 3, 1, 2, 3]));
        assert!(becomes_view(gather(2), &[2, 2, 5], &[3], vec![4, 2, 0]));
        assert!(!becomes_view(gather(0), &[5], &[3], vec![0, 1, 3]));
        assert!(!becomes_view(gather(0), &[9], &[2, 2], vec![0, 1, 2, 3]));
        let nd = |batch_dims| Op::GatherNd(GatherNd { batch_dims });
        // x[i, j] for a grid, and its transpose.
        let grid =
            |f: fn(i64, i64) -> [i64; 2]| (0..6).flat_map(move |p| f(p / 3, p % 3)).collect();
        assert!(becomes_view(nd(0), &[2, 3], &[2, 1, 3, 2], grid(|i, j| [i, j])));
        assert!(becomes_view(nd(0), &[3, 2, 2], &[2, 3, 2], grid(|i, j| [j, i])));
        assert!(becomes_view(nd(0), &[3, 2], &[2, 3, 2], grid(|_, j| [j, 1])));
        assert!(!becomes_view(nd(0), &[3, 3], &[2, 3, 2], grid(|_, j| [j, j])));
        assert!(becomes_view(nd(1), &[2, 4], &[2, 3, 1], vec![1, 2, 3, 1, 2, 3]));
        assert!(!becomes_view(nd(1), &[2, 4], &[2, 3, 1], vec![1, 2, 3, 0, 1, 2]));
    }
}
