//! Derives the valid range of inputs that are read as indices or labels: token ids, labels of a cross-entropy.
//!
//! In: the raised graph before padding, so that sizes are the model's own. Out: the same graph, and [`PassContext::index_ranges`] by
//! input. An input is tracked through operations that pass its elements on unchanged or shifted by a constant; for a slice, the range
//! applies to that part. Other computed indices have no range here: the kernels that read them check them.
//!
//! Of labels it is also known of which inputs of tokens the logits of a place see its own and none behind it (`causal.rs`).
//!
//! A range is what the operation accepts. As in ONNX's Gather, negative indices of gathers and embeddings count from the end; a
//! cross-entropy takes classes from 0 and its `ignore_index`.

mod causal;

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property};
use frit_ir::ops::BinaryFn;
use frit_ir::plan::{IndexKind, IndexRange};
use frit_ir::{DType, Diagnostic, Graph, Node, Op, ValueId};
use std::collections::BTreeMap;
use std::ops::Range;

/// The contract.
pub static INFO: PassInfo = PassInfo {
    name: "index_ranges",
    summary: "determine the ranges of inputs that are read as indices or labels",
    requires: &[Property::Raised],
    ensures: &[Property::IndexRanges],
    breaks: &[],
    numerics: Numerics::Bitwise,
};

/// The pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct IndexRanges {}

impl Pass for IndexRanges {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        context.index_ranges = of(graph);
        Ok(Changed::No)
    }
}

/// The ranges by the name of the input, each once.
fn of(graph: &Graph) -> BTreeMap<String, Vec<IndexRange>> {
    let mut flows: Vec<Vec<Flow>> = vec![Vec::new(); graph.n_values()];
    let mut found: BTreeMap<String, Vec<IndexRange>> = BTreeMap::new();
    for (_, node) in graph.nodes() {
        for used in uses(graph, node) {
            for flow in &flows[used.indices.0 as usize] {
                if let Some(mut range) = flow.range(&used) {
                    if used.kind == IndexKind::Class {
                        range.causal = causal::inputs(graph, node, &flow.input);
                    }
                    found.entry(flow.input.clone()).or_default().push(range);
                }
            }
        }
        for (index, value) in node.outputs.iter().enumerate() {
            flows[value.0 as usize] = passed_on(graph, node, index, &flows);
        }
    }
    for ranges in found.values_mut() {
        ranges.sort();
        let asked = |r: &IndexRange| (r.lo, r.hi, r.ignore, r.within.clone());
        ranges.dedup_by(|again, first| {
            let same = asked(again) == asked(first);
            if same {
                first.causal.retain(|input| again.causal.contains(input));
            }
            same
        });
    }
    found
}

/// Elements of an input on their way.
#[derive(Clone, Debug)]
struct Flow {
    input: String,
    /// The sum of the constants added to them.
    shift: i64,
    /// Which of the input's elements are there still, by axis.
    within: Vec<Range<usize>>,
    /// The size of the input's axes.
    whole: Vec<usize>,
    place: Place,
}

/// Where elements of an input are in a value.
#[derive(Clone, Debug)]
enum Place {
    /// The axes are still the input's, whose first element has this position along each.
    Axes(Vec<i64>),
    /// In row-major order, from this element of the input on, and there are no others.
    Consecutive(usize),
    Unknown,
}

impl Flow {
    fn of(name: &str, dims: &[usize]) -> Flow {
        Flow {
            input: name.into(),
            shift: 0,
            within: dims.iter().map(|size| 0..*size).collect(),
            whole: dims.to_vec(),
            place: Place::Axes(vec![0; dims.len()]),
        }
    }

    /// The range of the input's elements that `used` asks for; `None` if it reads none of them.
    fn range(&self, used: &Use) -> Option<IndexRange> {
        let mut flow = self.clone();
        if let Some((axis, columns)) = &used.columns {
            flow = flow.cut(&used.dims, *axis, columns.clone())?;
        }
        if flow.within.iter().any(Range::is_empty) {
            return None;
        }
        let ends = |w: &Range<usize>| (w.start, w.end);
        let is_whole = flow.within.iter().zip(&flow.whole).all(|(w, size)| *w == (0..*size));
        Some(IndexRange {
            lo: used.lo.saturating_sub(self.shift),
            hi: used.hi.saturating_sub(self.shift),
            ignore: used.ignore.and_then(|value| value.checked_sub(self.shift)),
            within: if is_whole { vec![] } else { flow.within.iter().map(ends).collect() },
            kind: used.kind,
            of: used.of.clone(),
            causal: vec![],
        })
    }

    /// Only these places along an axis of a value of these sizes; `None` if nobody knows which elements of the input these are.
    fn cut(mut self, dims: &[usize], axis: usize, places: Range<usize>) -> Option<Flow> {
        match &mut self.place {
            Place::Axes(before) => {
                let at = |place: usize| {
                    (place as i64 - before[axis]).clamp(0, self.whole[axis] as i64) as usize
                };
                let kept = at(places.start)..at(places.end);
                let within = &mut self.within[axis];
                *within = within.start.max(kept.start)..within.end.min(kept.end);
                before[axis] -= places.start as i64;
            }
            Place::Consecutive(first) => {
                let step: usize = dims[axis + 1..].iter().product();
                if dims[..axis].iter().any(|size| *size != 1) {
                    return None;
                }
                *first += places.start * step;
                self.within = around(*first..*first + places.len() * step, &self.whole);
            }
            Place::Unknown => return None,
        }
        Some(self)
    }

    /// The same elements under axes of other sizes.
    fn reshaped(mut self, numel: usize) -> Flow {
        if let Place::Axes(_) = self.place {
            let mut strides = vec![1; self.whole.len()];
            for axis in (1..strides.len()).rev() {
                strides[axis - 1] = strides[axis] * self.whole[axis];
            }
            let first = self.within.iter().zip(strides).map(|(w, stride)| w.start * stride).sum();
            let is_all = around(first..first + numel, &self.whole) == self.within
                && self.within.iter().map(Range::len).product::<usize>() == numel;
            self.place = if is_all { Place::Consecutive(first) } else { Place::Unknown };
        }
        self
    }

    /// The same elements in other places.
    fn moved(mut self) -> Flow {
        self.place = Place::Unknown;
        self
    }
}

/// The smallest ranges along axes of these sizes that contain consecutive elements.
fn around(elements: Range<usize>, sizes: &[usize]) -> Vec<Range<usize>> {
    let mut within = vec![0..0; sizes.len()];
    let (mut begin, mut last) = (elements.start, elements.end.saturating_sub(1));
    for (within, size) in within.iter_mut().zip(sizes).rev() {
        let size = *size;
        // Elements of several rows are at all places along the row.
        *within = match (elements.is_empty(), begin / size.max(1) == last / size.max(1)) {
            (true, _) => 0..0,
            (_, true) => begin % size..last % size + 1,
            (_, false) => 0..size,
        };
        (begin, last) = (begin / size.max(1), last / size.max(1));
    }
    within
}

/// Indices that an operation reads, and the range that it accepts.
struct Use {
    indices: ValueId,
    /// Their sizes.
    dims: Vec<usize>,
    lo: i64,
    hi: i64,
    ignore: Option<i64>,
    /// The axis and the places along it that are meant, if not all are.
    columns: Option<(usize, Range<usize>)>,
    kind: IndexKind,
    of: String,
}

fn uses(graph: &Graph, node: &Node) -> Vec<Use> {
    let dims = |operand: usize| graph.ty(node.inputs[operand]).shape.dims();
    let name = |operand: usize| {
        let def = graph.def(node.inputs[operand]);
        match &def.op {
            Op::Param(param) => param.name.clone(),
            _ => node.origin.to_string(),
        }
    };
    let counted = |indices: usize, size: usize, kind| Use {
        indices: node.inputs[indices],
        dims: dims(indices).to_vec(),
        lo: -(size as i64),
        hi: size as i64 - 1,
        ignore: None,
        columns: None,
        kind,
        of: name(0),
    };
    let tuples = |batch_dims: usize| {
        let last = dims(1).len() - 1;
        let column = |d: usize| Use {
            columns: (dims(1)[last] > 1).then(|| (last, d..d + 1)),
            ..counted(1, dims(0)[batch_dims + d], IndexKind::Place)
        };
        (0..dims(1)[last]).map(column).collect()
    };
    match &node.op {
        Op::Embedding(_) => vec![counted(1, dims(0)[0], IndexKind::Row)],
        Op::Gather(op) => vec![counted(1, dims(0)[op.axis], IndexKind::Place)],
        Op::GatherElements(op) => vec![counted(1, dims(0)[op.axis], IndexKind::Place)],
        Op::ScatterElements(op) => vec![counted(1, dims(0)[op.axis], IndexKind::Place)],
        Op::GatherNd(op) => tuples(op.batch_dims),
        Op::ScatterNd(_) => tuples(0),
        Op::CrossEntropy(op) => {
            let classes = op.classes_of(&graph.ty(node.inputs[0]).shape);
            vec![Use {
                lo: 0,
                ignore: (op.ignore_index != i64::MIN).then_some(op.ignore_index),
                of: node.origin.to_string(),
                ..counted(1, classes, IndexKind::Class)
            }]
        }
        _ => vec![],
    }
}

/// The inputs whose elements result `index` of a node contains.
fn passed_on(graph: &Graph, node: &Node, index: usize, flows: &[Vec<Flow>]) -> Vec<Flow> {
    let of = |operand: usize| flows[node.inputs[operand].0 as usize].iter().cloned();
    let dims = |operand: usize| graph.ty(node.inputs[operand]).shape.dims();
    let integer = |dtype: DType| matches!(dtype, DType::I64 | DType::I32);
    match &node.op {
        Op::Input(input) if !input.ty.dtype.is_float() => {
            vec![Flow::of(&input.name, input.ty.shape.dims())]
        }
        Op::Cast(cast) if integer(cast.to) => of(0).collect(),
        Op::Reshape(op) => of(0).map(|flow| flow.reshaped(op.shape.numel())).collect(),
        Op::Transpose(_) | Op::Expand(_) => of(0).map(Flow::moved).collect(),
        Op::Concat(_) => (0..node.inputs.len()).flat_map(of).map(Flow::moved).collect(),
        Op::Slice(op) => {
            let axes =
                (0..dims(0).len()).filter(|a| op.size[*a] != dims(0)[*a] || op.step[*a] != 1);
            let axes: Vec<usize> = axes.collect();
            if axes.iter().any(|a| op.step[*a] != 1) {
                return vec![];
            }
            let cut = |flow: Flow| {
                axes.iter().try_fold(flow, |flow, &axis| {
                    let dims = [&op.size[..axis], &dims(0)[axis..]].concat();
                    flow.cut(&dims, axis, op.start[axis]..op.start[axis] + op.size[axis])
                })
            };
            of(0).filter_map(cut).collect()
        }
        Op::Split(op) => {
            let begin: usize = op.sizes[..index].iter().sum();
            of(0).filter_map(|f| f.cut(dims(0), op.axis, begin..begin + op.sizes[index])).collect()
        }
        Op::Pad(op) => {
            let pad = |mut flow: Flow| match &mut flow.place {
                Place::Axes(before) => {
                    before.iter_mut().zip(&op.low).for_each(|(at, low)| *at += *low as i64);
                    flow
                }
                _ => flow.moved(),
            };
            of(0).map(pad).collect()
        }
        Op::Binary(f @ (BinaryFn::Add | BinaryFn::Sub)) => {
            let (left, right) = (constant(graph, node.inputs[0]), constant(graph, node.inputs[1]));
            let (operand, by) = match (f, left, right) {
                (BinaryFn::Sub, _, Some(by)) => (0, by.checked_neg()),
                (_, _, Some(by)) => (0, Some(by)),
                (BinaryFn::Add, Some(by), _) => (1, Some(by)),
                _ => return vec![],
            };
            let same = graph.ty(node.outputs[0]).shape.dims() == dims(operand);
            let shifted = |mut flow: Flow| {
                flow.shift = flow.shift.checked_add(by?)?;
                Some(if same { flow } else { flow.moved() })
            };
            of(operand).filter_map(shifted).collect()
        }
        _ => vec![],
    }
}

/// The one integer that every element of a constant is.
fn constant(graph: &Graph, mut value: ValueId) -> Option<i64> {
    while let Op::Expand(_) | Op::Reshape(_) = graph.def(value).op {
        value = graph.def(value).inputs[0];
    }
    let (first, rest) = graph.constant(value)?.as_ints()?.split_first()?;
    rest.iter().all(|x| x == first).then_some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(nodes: &str, expected: &[&str]) {
        let line = |line: &str| {
            let line = line.trim();
            let Some((name, ty)) = line.strip_prefix("input %").and_then(|l| l.split_once(": "))
            else {
                return line.to_string();
            };
            let (dtype, shape) = ty.split_once('[').expect("a type");
            let ty = format!("{{\"dtype\": \"{dtype}\", \"shape\": [{shape}}}");
            format!("%{name}: {dtype}[{shape} = input {{name = \"{name}\", ty = {ty}}}")
        };
        let lines: Vec<String> = nodes.lines().map(line).collect();
        let text = format!("graph @g world=1 {{\n{}\n}}", lines.join("\n"));
        let mut graph = frit_ir::text::parse(&text).expect("the text is a graph");
        let mut context = PassContext::default();
        IndexRanges {}.run(&mut graph, &mut context).expect("it cannot fail");
        let line = |(input, r): (&String, &IndexRange)| format!("{input} {r} {:?}", r.within);
        let ranges = context.index_ranges.iter();
        let found: Vec<String> =
            ranges.flat_map(|(input, all)| all.iter().map(move |r| line((input, r)))).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn inputs_have_the_ranges_of_what_reads_them() {
        check(
            "input %x: f32[4, 16]
             input %w: f32[50, 16]
             input %ids: i64[4, 8]
             input %labels: i64[4]
             %e: f32[4, 8, 16] = embedding %w, %ids
             %l: f32[4], %lse: f32[4] = cross_entropy %x, %labels {ignore_index = -100}
             return %l as \"l\"
             return %e as \"e\"",
            &["ids -50..=49 []", "labels 0..=15 or -100 []"],
        );
        // One reads every element, the other only what is left after the first place.
        check(
            "input %x: f32[4, 7, 16]
             input %w: f32[50, 16]
             input %ids: i32[4, 8]
             %e: f32[4, 8, 16] = embedding %w, %ids
             %cut: i32[4, 7] = slice %ids {start = [0, 1], size = [4, 7], step = [1, 1]}
             %l: f32[4, 7], %lse: f32[4, 7] = cross_entropy %x, %cut {ignore_index = -100}
             return %l as \"l\"
             return %e as \"e\"",
            &["ids -50..=49 []", "ids 0..=15 or -100 [(0, 4), (1, 8)]"],
        );
    }

    #[test]
    fn what_is_shifted_cut_and_padded_is_the_inputs() {
        check(
            "input %x: f32[4, 8, 16]
             input %labels: i64[4, 8]
             %one: i64[] = constant {splat = 1, ty = {\"dtype\": \"i64\", \"shape\": []}}
             %from_zero: i64[4, 8] = sub %labels, %one
             %wide: i64[4, 9] = pad %from_zero {low = [0, 0], high = [0, 1], value = -100.0}
             %cut: i64[4, 8] = slice %wide {start = [0, 1], size = [4, 8], step = [1, 1]}
             %flat: i64[32] = reshape %cut {shape = [32]}
             %logits: f32[32, 16] = reshape %x {shape = [32, 16]}
             %l: f32[32], %lse: f32[32] = cross_entropy %logits, %flat {ignore_index = -100}
             return %l as \"l\"",
            &["labels 1..=16 or -99 [(0, 4), (1, 8)]"],
        );
        // Labels of all examples in one row, without the first.
        check(
            "input %x: f32[31, 16]
             input %labels: i64[4, 8]
             %flat: i64[32] = reshape %labels {shape = [32]}
             %cut: i64[31] = slice %flat {start = [1], size = [31], step = [1]}
             %l: f32[31], %lse: f32[31] = cross_entropy %x, %cut {ignore_index = -100}
             return %l as \"l\"",
            &["labels 0..=15 or -100 []"],
        );
        // One example with ids and places in one row.
        check(
            "input %a: f32[5, 16]
             input %b: f32[7, 16]
             input %packed: i64[1, 8]
             %rows: i64[2, 4] = reshape %packed {shape = [2, 4]}
             %ids: i64[1, 4] = slice %rows {start = [0, 0], size = [1, 4], step = [1, 1]}
             %places: i64[1, 4] = slice %rows {start = [1, 0], size = [1, 4], step = [1, 1]}
             %x: f32[1, 4, 16] = embedding %a, %ids
             %y: f32[1, 4, 16] = embedding %b, %places
             return %x as \"x\"
             return %y as \"y\"",
            &["packed -7..=6 [(0, 1), (4, 8)]", "packed -5..=4 [(0, 1), (0, 4)]"],
        );
        // Each column has a table of its own.
        check(
            "input %a: f32[5, 16]
             input %b: f32[7, 16]
             input %ids: u8[4, 2]
             %wide: i32[4, 2] = cast %ids {to = \"i32\"}
             %first: i32[4, 1], %second: i32[4, 1] = split %wide {axis = 1, sizes = [1, 1]}
             %x: f32[4, 1, 16] = embedding %a, %first
             %y: f32[4, 1, 16] = embedding %b, %second
             return %x as \"x\"
             return %y as \"y\"",
            &["ids -7..=6 [(0, 4), (1, 2)]", "ids -5..=4 [(0, 4), (0, 1)]"],
        );
        // And each row.
        check(
            "input %a: f32[5, 16]
             input %b: f32[7, 16]
             input %edges: i64[2, 9]
             %from: i64[1, 9] = slice %edges {start = [0, 0], size = [1, 9], step = [1, 1]}
             %to: i64[1, 9] = slice %edges {start = [1, 0], size = [1, 9], step = [1, 1]}
             %x: f32[1, 9, 16] = embedding %a, %from
             %y: f32[1, 9, 16] = embedding %b, %to
             return %x as \"x\"
             return %y as \"y\"",
            &["edges -7..=6 [(1, 2), (0, 9)]", "edges -5..=4 [(0, 1), (0, 9)]"],
        );
    }

    #[test]
    fn what_is_computed_has_no_range() {
        check(
            "input %w: f32[50, 16]
             input %ids: i64[4]
             input %x: f32[4]
             %square: i64[4] = mul %ids, %ids
             %a: f32[4, 16] = embedding %w, %square
             %c: i64[4] = cast %x {to = \"i64\"}
             %b: f32[4, 16] = embedding %w, %c
             return %a as \"a\"
             return %b as \"b\"",
            &[],
        );
    }
}
