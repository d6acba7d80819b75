//! Which tokens the logits of a place can see.
//!
//! Of every value a bound is known of the places of tokens on which its elements depend, by their own place along one axis. What is not
//! known to keep places apart depends on all that its operands depend on, so logits are found to see nothing behind their own place only
//! where that is so.

use frit_ir::ops::Attention;
use frit_ir::{DType, Graph, Node, Op, Shape, ValueId};

/// The last tokens on which elements depend. The element at flat index `i` has the place `p = i / inner % len`, and depends on tokens up to
/// the place `p + ahead`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    inner: usize,
    len: usize,
    ahead: isize,
}

impl Seen {
    /// No token, wherever it stands.
    const NONE: isize = isize::MIN / 4;

    /// Tokens up to this place, for all elements.
    fn up_to(place: isize) -> Seen {
        Seen { inner: 1, len: 1, ahead: place }
    }

    /// Places along an axis of a shape.
    fn along(axis: usize, ahead: isize, shape: &Shape) -> Seen {
        let (len, inner) = (shape.dims()[axis], shape.dims()[axis + 1..].iter().product());
        Seen { inner, len, ahead }
    }

    /// Whether all elements have one bound.
    fn is_uniform(self) -> bool {
        self.len == 1
    }

    /// The last token that any element depends on.
    fn last(self) -> isize {
        self.ahead + self.len.saturating_sub(1) as isize
    }

    /// The axis of places, and how often they repeat along it.
    fn axis(self, shape: &Shape) -> Option<(usize, usize)> {
        let mut inner = 1;
        for (axis, size) in shape.dims().iter().enumerate().rev() {
            if inner == self.inner && *size > 0 && size.is_multiple_of(self.len) {
                return Some((axis, size / self.len));
            }
            inner *= size;
        }
        None
    }

    /// The axis that is that of places.
    fn own_axis(self, shape: &Shape) -> Option<usize> {
        self.axis(shape).filter(|(_, times)| *times == 1).map(|(axis, _)| axis)
    }
}

/// The inputs, of batch and places as `labels`, of which the logits of `node`, a cross-entropy, see at each place its own token and none
/// behind it.
pub(super) fn inputs(graph: &Graph, node: &Node, labels: &str) -> Vec<String> {
    let integers = || {
        graph.nodes().filter_map(|(_, node)| match &node.op {
            Op::Input(input) if !input.ty.dtype.is_float() => Some((input, node.outputs[0])),
            _ => None,
        })
    };
    let Some((_, own)) = integers().find(|(input, _)| input.name == labels) else {
        return vec![];
    };
    let dims = graph.ty(own).shape.dims();
    let [_, length] = *dims else { return vec![] };
    if !is_reshaped(graph, node.inputs[1], own) {
        return vec![];
    }
    let logits = node.inputs[0];
    let classes = graph.ty(logits).shape.dims().last().copied();
    let is_behind = |tokens: ValueId| {
        let Seen { inner, len, ahead } = walk(graph, tokens)[logits.0 as usize];
        Some(inner) == classes && len == length && ahead == 0
    };
    let others = integers().filter(|(_, v)| *v != own && graph.ty(*v).shape.dims() == dims);
    others.filter(|(_, tokens)| is_behind(*tokens)).map(|(input, _)| input.name.clone()).collect()
}

/// Whether a value has the elements of another in their order.
fn is_reshaped(graph: &Graph, mut value: ValueId, of: ValueId) -> bool {
    while value != of {
        let def = graph.def(value);
        let (Op::Reshape(_) | Op::Cast(_)) = def.op else { return false };
        value = def.inputs[0];
    }
    true
}

/// What every value sees of an input.
fn walk(graph: &Graph, tokens: ValueId) -> Vec<Seen> {
    let mut all = vec![Seen::up_to(Seen::NONE); graph.n_values()];
    all[tokens.0 as usize] = Seen::along(1, 0, &graph.ty(tokens).shape);
    for &id in graph.order() {
        let node = graph.node(id);
        let operands: Vec<Seen> = node.inputs.iter().map(|v| all[v.0 as usize]).collect();
        let Some(last) = operands.iter().map(|seen| seen.last()).max() else { continue };
        if last < 0 {
            continue;
        }
        let step = Step { graph, node, operands };
        for (index, value) in node.outputs.iter().enumerate() {
            all[value.0 as usize] = step.result(index).unwrap_or(Seen::up_to(last));
        }
    }
    all
}

/// An operation with what its operands see.
struct Step<'a> {
    graph: &'a Graph,
    node: &'a Node,
    operands: Vec<Seen>,
}

impl Step<'_> {
    fn shape(&self, operand: usize) -> &Shape {
        &self.graph.ty(self.node.inputs[operand]).shape
    }

    /// What a result sees; `None` if elements are not known to see less than the operands do.
    fn result(&self, index: usize) -> Option<Seen> {
        let shape = &self.graph.ty(self.node.outputs[index]).shape;
        let first = self.operands[0];
        let only_first = self.operands[1..].iter().all(|seen| seen.last() < 0);
        match &self.node.op {
            op if op.is_pointwise() || matches!(op, Op::Expand(_)) => self.aligned(shape),
            Op::Reshape(_) | Op::EnterPrecision(_) | Op::LeavePrecision(_) => Some(first),
            Op::CustomGradient(_) => Some(self.operands[index]),
            Op::Concat(op) => self.concatenated(op.axis, shape),
            Op::MatMul(op) => self.product([op.trans_a, op.trans_b], shape),
            Op::Attention(op) => self.attention(op, shape),
            Op::Embedding(_) => self.looked_up(0),
            Op::Gather(op) => self.looked_up(op.axis),
            _ if !only_first || first.is_uniform() => None,
            Op::Transpose(op) => {
                let axis = first.own_axis(self.shape(0))?;
                let to = op.perm.iter().position(|from| *from == axis)?;
                Some(Seen::along(to, first.ahead, shape))
            }
            Op::Slice(op) => {
                let axis = first.own_axis(self.shape(0))?;
                let (start, step) = (op.start[axis] as isize, op.step[axis]);
                let further = (step - 1).max(0) * (op.size[axis].max(1) - 1) as isize;
                Some(Seen::along(axis, first.ahead + start + further, shape))
            }
            Op::Split(op) => {
                let axis = first.own_axis(self.shape(0))?;
                let begin: usize = op.sizes[..index].iter().sum();
                let begin = if axis == op.axis { begin as isize } else { 0 };
                Some(Seen::along(axis, first.ahead + begin, shape))
            }
            Op::Pad(op) => {
                let axis = first.own_axis(self.shape(0))?;
                Some(Seen::along(axis, first.ahead - op.low[axis] as isize, shape))
            }
            Op::CumSum(op) if !op.reverse || first.own_axis(self.shape(0)) != Some(op.axis) => {
                first.own_axis(self.shape(0)).map(|_| first)
            }
            Op::Softmax(op) => self.beside(|axis| axis == op.axis, shape),
            Op::LogSoftmax(op) => self.beside(|axis| axis == op.axis, shape),
            Op::LayerNorm(op) => self.beside(|axis| axis >= op.axis, shape),
            Op::RmsNorm(op) => self.beside(|axis| axis >= op.axis, shape),
            Op::Reduce(op) => {
                let axis = first.own_axis(self.shape(0)).filter(|a| !op.axes.contains(a))?;
                let before = op.axes.iter().filter(|a| **a < axis).count();
                let to = if op.keep_dims { axis } else { axis - before };
                Some(Seen::along(to, first.ahead, shape))
            }
            _ => None,
        }
    }

    /// Operands that are broadcast to the result.
    fn aligned(&self, shape: &Shape) -> Option<Seen> {
        let ahead = self.operands.iter().map(|seen| seen.ahead).max()?;
        let mut found = None;
        for (operand, seen) in self.operands.iter().enumerate().filter(|(_, s)| !s.is_uniform()) {
            let own = self.shape(operand);
            let (axis, times) = seen.axis(own)?;
            let place = (own.rank() - axis, times, seen.len);
            (*found.get_or_insert(place) == place).then_some(())?;
        }
        let (from_right, times, len) = found?;
        let axis = shape.rank() - from_right;
        let inner = shape.dims()[axis + 1..].iter().product();
        (shape.dims()[axis] == times * len).then_some(Seen { inner, len, ahead })
    }

    /// A result whose places are along an axis that the operation does not read along.
    fn beside(&self, reads: impl Fn(usize) -> bool, shape: &Shape) -> Option<Seen> {
        let first = self.operands[0];
        let (axis, _) = first.axis(self.shape(0)).filter(|(axis, _)| !reads(*axis))?;
        let inner = shape.dims()[axis + 1..].iter().product();
        Some(Seen { inner, ..first })
    }

    fn concatenated(&self, along: usize, shape: &Shape) -> Option<Seen> {
        let mut begin = 0;
        let mut ahead = Seen::NONE;
        let mut are_places = true;
        for (operand, seen) in self.operands.iter().enumerate() {
            let own = self.shape(operand);
            let size = own.dims()[along];
            // Steps of a recurrence have a place each.
            are_places &= match seen.is_uniform() {
                true => size == 1 || seen.last() < 0,
                false => seen.own_axis(own) == Some(along),
            };
            ahead = ahead.max(seen.ahead - begin);
            begin += size as isize;
        }
        if are_places {
            return Some(Seen::along(along, ahead, shape));
        }
        let operand = self.operands.iter().position(|seen| !seen.is_uniform())?;
        let axis = self.operands[operand].own_axis(self.shape(operand)).filter(|a| *a != along)?;
        let is_same = |(i, seen): (usize, &Seen)| {
            seen.is_uniform() || seen.own_axis(self.shape(i)) == Some(axis)
        };
        let ahead = self.operands.iter().map(|seen| seen.ahead).max()?;
        let all = self.operands.iter().enumerate().all(is_same);
        all.then(|| Seen::along(axis, ahead, shape))
    }

    /// A matmul: of places along the rows of one operand, the columns of the other, or the batch of both.
    fn product(&self, swapped: [bool; 2], shape: &Shape) -> Option<Seen> {
        let ahead = self.operands[0].ahead.max(self.operands[1].ahead);
        let mut found = None;
        for (i, seen) in self.operands.iter().enumerate().filter(|(_, s)| !s.is_uniform()) {
            let (axis, times) = seen.axis(self.shape(i))?;
            let right = self.shape(i).rank() - axis;
            let right = if swapped[i] && right <= 2 { 3 - right } else { right };
            let place = (right, times, seen.len);
            // The axis that is summed over.
            let joins = right == [1, 2][i];
            (!joins && *found.get_or_insert(place) == place).then_some(())?;
        }
        let (from_right, times, len) = found?;
        let axis = shape.rank().checked_sub(from_right)?;
        let inner = shape.dims()[axis + 1..].iter().product();
        (shape.dims()[axis] == times * len).then_some(Seen { inner, len, ahead })
    }

    /// Rows of a table without tokens, one for each index.
    fn looked_up(&self, axis: usize) -> Option<Seen> {
        let [table, indices] = [self.operands[0], self.operands[1]];
        let row: usize = self.shape(0).dims()[axis + 1..].iter().product();
        (table.last() < 0).then_some(Seen { inner: indices.inner * row, ..indices })
    }

    /// Attention, whose third axis of four has the places.
    fn attention(&self, op: &Attention, shape: &Shape) -> Option<Seen> {
        const PLACES: usize = 2;
        // Along the keys, that of a mask is the last.
        let has_places = |operand: usize, axis: usize| {
            let seen = self.operands[operand];
            seen.is_uniform() || seen.own_axis(self.shape(operand)) == Some(axis)
        };
        let has_mask = op.masks(&self.operands)[0].is_some();
        let mask = has_mask.then(|| self.shape(3).rank() - 1);
        let apart = (0..3).all(|i| has_places(i, PLACES));
        // What is kept has the axes of scores.
        let kept = op.keep.map(|_| self.operands.len() - 1);
        let joined = mask.is_some_and(|axis| !has_places(3, axis))
            || kept.is_some_and(|kept| !has_places(kept, PLACES + 1));
        if !apart || joined {
            return None;
        }
        let by_sight = match (op.causal, op.window) {
            (true, _) => Some(0),
            (false, Some(window)) => Some(window as isize - 1),
            (false, None) => None,
        };
        let by_mask = mask.and_then(|_| furthest(self.graph, self.node.inputs[3]));
        let further = [by_sight, by_mask].into_iter().flatten().min()?;
        let keys = self.operands[1..].iter().map(|seen| seen.ahead).max()?;
        Some(Seen::along(PLACES, self.operands[0].ahead.max(keys + further), shape))
    }
}

/// How many places ahead of a query the furthest key is that a constant mask of queries and keys shows. None if a query is shown no key:
/// the same finite number on all scores hides none.
fn furthest(graph: &Graph, mask: ValueId) -> Option<isize> {
    /// Scores below this have no weight.
    const MASKED: f64 = -1e4;
    let tensor = graph.constant(mask)?;
    let [.., queries, keys] = *tensor.shape().dims() else { return None };
    let is_shown = |x: f64| if tensor.dtype() == DType::Bool { x != 0.0 } else { x >= MASKED };
    // A mask of one row is that of all queries.
    if queries < 2 || keys == 0 {
        return None;
    }
    let rows = tensor.to_f64s();
    let last = rows.chunks_exact(keys).map(|row| row.iter().rposition(|x| is_shown(*x)));
    let ahead =
        last.enumerate().map(|(i, last)| last.map(|key| key as isize - (i % queries) as isize));
    ahead.collect::<Option<Vec<_>>>()?.into_iter().max()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the logits `%z` of these nodes see no token of `%ids: i64[2, 4]` behind their place.
    fn is_causal(nodes: &str) -> bool {
        let input = |name: &str, dtype: &str, shape: &str| {
            let ty = format!("{{\"dtype\": \"{dtype}\", \"shape\": [{shape}]}}");
            format!("%{name}: {dtype}[{shape}] = input {{name = \"{name}\", ty = {ty}}}\n")
        };
        let leaves = [
            input("ids", "i64", "2, 4"),
            input("labels", "i64", "2, 4"),
            input("table", "f32", "9, 6"),
            input("w", "f32", "6, 9"),
            input("m", "f32", "4, 4"),
            "%e: f32[2, 4, 6] = embedding %table, %ids\n".into(),
            "%x: f32[2, 1, 4, 6] = reshape %e {shape = [2, 1, 4, 6]}\n".into(),
        ];
        let loss = "%l: f32[2, 4], %s: f32[2, 4] = cross_entropy %z, %labels {ignore_index = -100}";
        let leaves = leaves.concat();
        let text = format!("graph @g world=1 {{\n{leaves}{nodes}\n{loss}\nreturn %l as \"l\"\n}}");
        let graph = frit_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
        let mut nodes = graph.nodes().map(|(_, node)| node);
        let loss = nodes.find(|n| matches!(n.op, Op::CrossEntropy(_))).expect("a loss");
        match &inputs(&graph, loss, "labels")[..] {
            [] => false,
            [ids] => ids == "ids",
            more => panic!("{more:?}"),
        }
    }

    /// The same of an attention with these attributes and a mask.
    fn attends(attributes: &str, mask: &str) -> bool {
        let operand = if mask.is_empty() { "" } else { ", %mask" };
        is_causal(&format!(
            "{mask}
             %a: f32[2, 1, 4, 6], %r: f32[2, 1, 4] = attention %x, %x, %x{operand} {{scale = 1.0{attributes}}}
             %back: f32[2, 4, 6] = reshape %a {{shape = [2, 4, 6]}}
             %z: f32[2, 4, 9] = matmul %back, %w"
        ))
    }

    /// A constant mask that shows these keys to the four queries.
    fn shows(shown: [[u8; 4]; 4]) -> String {
        let floats = shown.concat().into_iter().map(|x| if x == 1 { "0.0" } else { "-1e9" });
        let floats = floats.collect::<Vec<_>>().join(", ");
        format!(
            "%mask: f32[4, 4] = constant {{ty = {{\"dtype\": \"f32\", \"shape\": [4, 4]}}, values = [{floats}]}}"
        )
    }

    #[test]
    fn attention_sees_what_its_sight_and_its_mask_show() {
        assert!(attends(", causal = true", ""));
        assert!(attends(", causal = true, window = 2", ""));
        assert!(!attends("", ""));
        assert!(!attends(", window = 2", ""));
        assert!(attends(", window = 1", ""));
        let behind = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]];
        let mut one_ahead = behind;
        one_ahead[1][2] = 1;
        assert!(attends("", &shows(behind)));
        assert!(!attends("", &shows(one_ahead)));
        assert!(attends(", causal = true", &shows(one_ahead)));
        let mut none = behind;
        none[0][0] = 0;
        assert!(!attends("", &shows(none)));
        // A mask that is fed may show anything.
        assert!(!attends("", "%mask: f32[4, 4] = neg %m"));
        // One that hides padding by the tokens at the keys sees no more than the keys.
        let padding =
            "%zero: i64[] = constant {splat = 0, ty = {\"dtype\": \"i64\", \"shape\": []}}
             %pad: bool[2, 4] = ne %ids, %zero
             %mask: bool[2, 1, 1, 4] = reshape %pad {shape = [2, 1, 1, 4]}";
        assert!(attends(", causal = true", padding));
        assert!(!attends("", padding));
    }

    #[test]
    fn places_are_followed_through_rows_steps_and_borders() {
        let z = "%z: f32[2, 4, 9] = matmul %y, %w";
        let of = |nodes: &str| is_causal(&format!("{nodes}\n{z}"));
        assert!(of("%y: f32[2, 4, 6] = gelu %e"));
        // As rows of a matrix.
        assert!(is_causal(
            "%rows: f32[8, 6] = reshape %e {shape = [8, 6]}
             %p: f32[8, 9] = matmul %rows, %w
             %z: f32[2, 4, 9] = reshape %p {shape = [2, 4, 9]}"
        ));
        // Along the columns of a matrix and back.
        assert!(of("%t: f32[2, 6, 4] = transpose %e {perm = [0, 2, 1]}
             %y: f32[2, 4, 6] = transpose %t {perm = [0, 2, 1]}"));
        // Sums over places.
        assert!(of("%y: f32[2, 4, 6] = cum_sum %e {axis = 1, exclusive = false, reverse = false}"));
        assert!(!of("%y: f32[2, 4, 6] = cum_sum %e {axis = 1, exclusive = false, reverse = true}"));
        assert!(!of("%y: f32[2, 4, 6] = matmul %m, %e"));
        assert!(!of("%y: f32[2, 4, 6] = softmax %e {axis = 1}"));
        assert!(of("%y: f32[2, 4, 6] = softmax %e {axis = 2}"));
        // The token before, and the one behind.
        let moved = |first: usize| {
            let (low, high) = if first == 0 { (1, 0) } else { (0, 1) };
            of(&format!(
                "%part: f32[2, 3, 6] = slice %e {{start = [0, {first}, 0], size = [2, 3, 6], step = [1, 1, 1]}}
                 %other: f32[2, 4, 6] = pad %part {{low = [0, {low}, 0], high = [0, {high}, 0], value = 0.0}}
                 %y: f32[2, 4, 6] = add %e, %other"
            ))
        };
        assert!(moved(0));
        assert!(!moved(1));
        // Steps of a recurrence, in order and backwards.
        let steps = |order: [usize; 4]| {
            let mut text = String::from(
                "%zero: f32[] = constant {splat = 0.0, ty = {\"dtype\": \"f32\", \"shape\": []}}
                 %h0: f32[2, 6] = expand %zero {shape = [2, 6]}\n",
            );
            for (i, at) in order.into_iter().enumerate() {
                let next = i + 1;
                text += &format!(
                    "%s{i}: f32[2, 1, 6] = slice %e {{start = [0, {at}, 0], size = [2, 1, 6], step = [1, 1, 1]}}
                     %x{i}: f32[2, 6] = reshape %s{i} {{shape = [2, 6]}}
                     %h{next}: f32[2, 6] = add %h{i}, %x{i}
                     %o{at}: f32[2, 1, 6] = reshape %h{next} {{shape = [2, 1, 6]}}\n"
                );
            }
            of(&(text + "%y: f32[2, 4, 6] = concat %o0, %o1, %o2, %o3 {axis = 1}"))
        };
        // Behind a start vector: every place sees the tokens before it and not its own.
        let start = "%first: f32[2, 3, 6] = slice %e {start = [0, 0, 0], size = [2, 3, 6], step = [1, 1, 1]}\n";
        let padded =
            "%y: f32[2, 4, 6] = pad %first {low = [0, 1, 0], high = [0, 0, 0], value = 0.0}";
        assert!(!of(&format!("{start}{padded}")));
        assert!(!of(&format!(
            "{start}%zero: f32[] = constant {{splat = 0.0, ty = {{\"dtype\": \"f32\", \"shape\": []}}}}
             %sos: f32[2, 1, 6] = expand %zero {{shape = [2, 1, 6]}}
             %y: f32[2, 4, 6] = concat %sos, %first {{axis = 1}}"
        )));
        assert!(steps([0, 1, 2, 3]));
        assert!(!steps([3, 2, 1, 0]));
    }
}
