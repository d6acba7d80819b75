//! Follows the axis of tokens from an input through the graph.
//!
//! A value either has an axis of tokens, along which each element depends on one token only, or is the same whatever the tokens are.
//! Attention is the operation that may join tokens; the sums and counts of a loss, which have no axis of tokens any more, end the walk.

use frit_ir::ops::{MatMul, Transpose};
use frit_ir::{Code, Diagnostic, Graph, Node, NodeId, Op, Shape, Tensor, ValueId};
use std::collections::{HashMap, HashSet};

/// What must change so that documents stay apart.
#[derive(Default)]
pub(super) struct Uses {
    /// Attention among tokens.
    pub(super) attention: Vec<NodeId>,
    /// Operands that have a value per position.
    pub(super) positions: Vec<Positions>,
}

/// An operand with one element per position along an axis, which meets tokens there.
pub(super) struct Positions {
    pub(super) node: NodeId,
    pub(super) operand: usize,
    /// The axis, of the operand.
    pub(super) axis: usize,
    /// The axes of the result, of which the first is the batch.
    pub(super) rank: usize,
}

/// How a value depends on tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Not at all.
    Free,
    /// It is random: its elements depend on nothing.
    Random,
    /// Element by element.
    Along(Tokens),
    /// As a sum over tokens: of their losses, or of their parts of the gradient of what all of them read.
    Total,
}

/// An axis of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tokens {
    /// Elements from one token to the next.
    stride: usize,
    /// Whether the batch is the outermost axis.
    batch_first: bool,
    /// Whether it is a label, or was compared with one.
    in_loss: bool,
    /// Whether a function of the model computes it from gradients.
    in_gradient: bool,
}

impl Tokens {
    /// Whether its sums over tokens are no values of a document.
    fn may_be_summed(self) -> bool {
        self.in_loss || self.in_gradient
    }
}

/// Finds what must change, from the input `ids[B, T]` on; `labels` are inputs of labels.
///
/// # Errors
/// If an operation joins tokens in a way that is not known to stay within a document.
pub(super) fn follow(graph: &Graph, ids: ValueId, labels: &[ValueId]) -> Result<Uses, Diagnostic> {
    let [batch, length] = graph.ty(ids).shape.dims() else { return Ok(Uses::default()) };
    let mut walk = Walk {
        graph,
        batch: *batch,
        length: *length,
        labels,
        places: HashMap::new(),
        masks: masks(graph),
        uses: Uses::default(),
    };
    for &id in graph.order() {
        let node = graph.node(id);
        let places = walk.node(id, node).map_err(|reason| {
            let what = format!("`{}` {reason}: documents cannot be kept apart", node.op.name());
            Diagnostic::error(Code::DocumentsMix, what)
                .at(&node.origin)
                .help("remove data.document_separator and give each document an example of its own")
        })?;
        for (value, place) in node.outputs.iter().zip(places) {
            walk.places.insert(*value, place);
        }
    }
    Ok(walk.uses)
}

/// Nodes whose results only serve as masks of attention, which are cut at the bounds of documents in any case.
fn masks(graph: &Graph) -> HashSet<NodeId> {
    let users = graph.users();
    let returned: HashSet<ValueId> = graph.outputs.iter().map(|o| o.value).collect();
    let mut masks = HashSet::new();
    for &id in graph.order().iter().rev() {
        let node = graph.node(id);
        let is_mask = |value: &ValueId| {
            let mut users = users[value.0 as usize].iter();
            !returned.contains(value)
                && users.all(|user| {
                    let by = graph.node(*user);
                    let elsewhere = || by.inputs.iter().take(3).any(|input| input == value);
                    masks.contains(user) || matches!(by.op, Op::Attention(_)) && !elsewhere()
                })
        };
        if !node.op.is_leaf() && node.outputs.iter().all(is_mask) {
            masks.insert(id);
        }
    }
    masks
}

struct Walk<'a> {
    graph: &'a Graph,
    batch: usize,
    length: usize,
    labels: &'a [ValueId],
    places: HashMap<ValueId, Place>,
    masks: HashSet<NodeId>,
    uses: Uses,
}

/// The places of a node's results, or how it joins tokens.
type Placed = Result<Vec<Place>, String>;

const JOINS: &str = "reads along the axis of tokens";

impl Walk<'_> {
    fn place(&self, value: ValueId) -> Place {
        self.places.get(&value).copied().unwrap_or(Place::Free)
    }

    fn shape(&self, value: ValueId) -> &Shape {
        &self.graph.ty(value).shape
    }

    /// The axis of tokens of a shape, and how many other elements are merged into it from the left.
    fn axis(&self, tokens: Tokens, shape: &Shape) -> Option<(usize, usize)> {
        let mut inner = 1;
        for (axis, size) in shape.dims().iter().enumerate().rev() {
            if inner == tokens.stride && size % self.length == 0 && *size > 0 {
                return Some((axis, size / self.length));
            }
            inner *= size;
        }
        None
    }

    fn axis_of(&self, tokens: Tokens, value: ValueId) -> Result<(usize, usize), String> {
        let shape = self.shape(value);
        self.axis(tokens, shape).ok_or_else(|| format!("has tokens within an axis of {shape}"))
    }

    fn node(&mut self, id: NodeId, node: &Node) -> Placed {
        let all = |place: Place| Ok(vec![place; node.outputs.len()]);
        if let Op::Input(_) = node.op {
            return Ok(vec![self.input(node.outputs[0])]);
        }
        if self.masks.contains(&id) {
            return self.mask(node);
        }
        if matches!(node.op, Op::Random(_) | Op::RandomMask(_)) {
            return all(Place::Random);
        }
        let places: Vec<Place> = node.inputs.iter().map(|v| self.place(*v)).collect();
        if places.iter().all(|p| !matches!(p, Place::Along(_))) {
            return all(match () {
                () if places.contains(&Place::Total) => Place::Total,
                () if places.contains(&Place::Random) => Place::Random,
                () => Place::Free,
            });
        }
        if node.op.is_pointwise() {
            return self.aligned(id, node, &places).map(|place| vec![place]);
        }
        match (&node.op, places[0]) {
            (Op::Attention(_), _) => self.attention(id, node, &places),
            (Op::MatMul(op), _) => self.matmul(op, node, &places),
            (Op::Embedding(_), Place::Free) => self.looked_up(0, node, places[1]),
            (Op::Gather(op), Place::Free) => self.looked_up(op.axis, node, places[1]),
            (Op::Concat(op), _) => {
                let place = self.aligned(id, node, &places)?;
                self.kept(place, node.outputs[0], |axis| axis != op.axis)
            }
            (Op::GatherElements(op), Place::Along(_)) if places[1] != Place::Free => {
                let place = self.aligned(id, node, &places)?;
                self.kept(place, node.outputs[0], |axis| axis != op.axis)
            }
            (Op::CustomGradient(op), _) => {
                let leaks = |(x, dx): (usize, usize)| {
                    matches!(places[x], Place::Along(_)) && places[dx] == Place::Total
                };
                match op.pairs(places.len()).any(leaks) {
                    true => Err("has a gradient that joins tokens".into()),
                    false => Ok(places[..op.results].to_vec()),
                }
            }
            (Op::Cotangent(_), Place::Along(tokens)) => {
                Ok(vec![Place::Along(Tokens { in_gradient: true, ..tokens })])
            }
            (Op::EnterPrecision(_) | Op::LeavePrecision(_), place) => Ok(vec![place]),
            (Op::CrossEntropy(_), Place::Along(tokens)) => {
                let classes = self.shape(node.inputs[0]).dims().len() - 1;
                let (axis, _) = self.axis_of(tokens, node.inputs[0])?;
                match axis < classes && matches!(places[1], Place::Along(_)) {
                    true => self.at(Tokens { in_loss: true, ..tokens }, axis, node),
                    false => Err(JOINS.into()),
                }
            }
            (_, Place::Along(tokens)) if places[1..].iter().all(|p| *p == Place::Free) => {
                self.unary(node, tokens)
            }
            _ => Err("is not known to treat each token by itself".into()),
        }
    }

    /// An input: of tokens if it has the batch and the tokens as its first axes.
    fn input(&self, value: ValueId) -> Place {
        match self.shape(value).dims() {
            [batch, length, rest @ ..] if (*batch, *length) == (self.batch, self.length) => {
                let in_loss = self.labels.contains(&value);
                let stride = rest.iter().product();
                Place::Along(Tokens { stride, batch_first: true, in_loss, in_gradient: false })
            }
            _ => Place::Free,
        }
    }

    /// A part of a mask, which may depend on inputs and on nothing that was computed from tokens.
    fn mask(&self, node: &Node) -> Placed {
        let computed = node.inputs.iter().any(|value| {
            let is_input = matches!(self.graph.def(*value).op, Op::Input(_));
            !is_input && matches!(self.place(*value), Place::Along(_))
        });
        match computed {
            true => Err("computes a mask of attention from tokens".into()),
            false => Ok(vec![Place::Free; node.outputs.len()]),
        }
    }

    /// Operands that are broadcast to the result.
    fn aligned(&mut self, id: NodeId, node: &Node, places: &[Place]) -> Result<Place, String> {
        let result = self.shape(node.outputs[0]).clone();
        let rank = result.rank();
        let mut found: Option<(usize, usize, Tokens)> = None;
        for (value, place) in node.inputs.iter().zip(places) {
            let Place::Along(tokens) = *place else { continue };
            let (axis, merged) = self.axis_of(tokens, *value)?;
            let own = self.shape(*value).rank();
            let batch_first = tokens.batch_first && own == rank;
            let (from_right, others) = match found {
                Some((other, outer, _)) if (other, outer) != (own - axis, merged) => {
                    return Err("joins two axes of tokens".into());
                }
                Some((_, _, others)) => (own - axis, others),
                None => (own - axis, Tokens { batch_first, ..tokens }),
            };
            let both = Tokens {
                stride: others.stride,
                batch_first: others.batch_first && batch_first,
                in_loss: others.in_loss || tokens.in_loss,
                in_gradient: others.in_gradient || tokens.in_gradient,
            };
            found = Some((from_right, merged, both));
        }
        let Some((from_right, merged, tokens)) = found else { return Ok(Place::Free) };
        for (operand, (value, place)) in node.inputs.iter().zip(places).enumerate() {
            let dims = self.shape(*value).dims();
            let Some(axis) = dims.len().checked_sub(from_right) else { continue };
            match place {
                // A part of a gradient must not depend on that of another document.
                Place::Total if !tokens.in_loss => {
                    return Err("reads a sum over tokens".into());
                }
                Place::Free if dims[axis] > 1 && !self.is_uniform(*value, axis) => {
                    let differs = dims.len() == rank && !self.repeats(*value);
                    if merged != 1 || !tokens.batch_first || differs {
                        return Err(format!(
                            "has a value per position, {}, for tokens {result}",
                            self.graph.ty(*value)
                        ));
                    }
                    self.uses.positions.push(Positions { node: id, operand, axis, rank });
                }
                _ => {}
            }
        }
        let stride = result.dims()[rank - from_right + 1..].iter().product();
        Ok(Place::Along(Tokens { stride, ..tokens }))
    }

    /// Whether a constant is the same at all positions.
    fn is_uniform(&self, value: ValueId, axis: usize) -> bool {
        self.graph.constant(value).is_some_and(|tensor| uniform(tensor, axis))
    }

    /// Whether a value is the same for all of its first axis, which is the batch.
    fn repeats(&self, value: ValueId) -> bool {
        let dims = self.shape(value).dims();
        let node = self.graph.def(value);
        // An operand of lower rank, or of one element along the axis, is broadcast.
        let broadcast = |operand: &ValueId| {
            let own = self.shape(*operand).dims();
            own.len() < dims.len() || own[0] == 1 || self.repeats(*operand)
        };
        dims[0] == 1
            || match &node.op {
                Op::Constant(constant) => uniform(&constant.value, 0),
                Op::Embedding(_) => self.repeats(node.inputs[1]),
                Op::Gather(op) => op.axis == 0 && self.repeats(node.inputs[1]),
                Op::Reshape(_) => {
                    self.shape(node.inputs[0]).dims().first() == Some(&dims[0])
                        && self.repeats(node.inputs[0])
                }
                Op::Transpose(op) => op.perm[0] == 0 && self.repeats(node.inputs[0]),
                Op::Expand(_) => broadcast(&node.inputs[0]),
                op if op.is_pointwise() => node.inputs.iter().all(broadcast),
                _ => false,
            }
    }

    /// A result whose axis of tokens must be one that the operation leaves alone.
    fn kept(&self, place: Place, value: ValueId, leaves: impl Fn(usize) -> bool) -> Placed {
        match place {
            Place::Along(tokens) if !leaves(self.axis_of(tokens, value)?.0) => Err(JOINS.into()),
            _ => Ok(vec![place]),
        }
    }

    /// Results with tokens along this axis.
    fn at(&self, tokens: Tokens, axis: usize, node: &Node) -> Placed {
        let place = |value: &ValueId| {
            let inner = self.shape(*value).dims()[axis + 1..].iter().product();
            Place::Along(Tokens { stride: inner, ..tokens })
        };
        Ok(node.outputs.iter().map(place).collect())
    }

    /// Rows of a table, one for each index.
    fn looked_up(&self, axis: usize, node: &Node, ids: Place) -> Placed {
        let Place::Along(tokens) = ids else { return Err(JOINS.into()) };
        let inner: usize = self.shape(node.inputs[0]).dims()[axis + 1..].iter().product();
        let batch_first = tokens.batch_first && axis == 0;
        Ok(vec![Place::Along(Tokens { stride: tokens.stride * inner, batch_first, ..tokens })])
    }

    /// An operation on one value of tokens.
    fn unary(&self, node: &Node, tokens: Tokens) -> Placed {
        let value = node.inputs[0];
        let (axis, _) = self.axis_of(tokens, value)?;
        let unless = |joins: bool| match joins {
            true => Err(JOINS.to_string()),
            false => self.at(tokens, axis, node),
        };
        match &node.op {
            Op::Reshape(_) => match self.axis(tokens, self.shape(node.outputs[0])) {
                Some(_) => Ok(vec![Place::Along(tokens)]),
                None => Err("merges tokens with other axes".into()),
            },
            Op::Transpose(Transpose { perm }) => {
                let to = perm.iter().position(|p| *p == axis).unwrap_or(axis);
                let batch_first = tokens.batch_first && perm[0] == 0;
                self.at(Tokens { batch_first, ..tokens }, to, node)
            }
            Op::Expand(_) => {
                let shift = self.shape(node.outputs[0]).rank() - self.shape(value).rank();
                let batch_first = tokens.batch_first && shift == 0;
                self.at(Tokens { batch_first, ..tokens }, axis + shift, node)
            }
            Op::Slice(op) => {
                let whole = |axis: usize| {
                    op.step[axis] == 1 && op.size[axis] == self.shape(value).dims()[axis]
                };
                let batch_first = tokens.batch_first && whole(0);
                match whole(axis) {
                    true => self.at(Tokens { batch_first, ..tokens }, axis, node),
                    false => Err(JOINS.into()),
                }
            }
            Op::Split(op) => unless(op.axis == axis),
            Op::Softmax(op) => unless(op.axis == axis),
            Op::LogSoftmax(op) => unless(op.axis == axis),
            Op::LayerNorm(op) => unless(op.axis <= axis),
            Op::RmsNorm(op) => unless(op.axis <= axis),
            Op::ArgReduce(op) => unless(op.axis == axis),
            Op::TopK(op) => unless(op.axis == axis),
            Op::Gather(op) if op.axis != axis => {
                let added = self.shape(node.inputs[1]).rank();
                let to = if op.axis < axis { axis + added - 1 } else { axis };
                let batch_first = tokens.batch_first && op.axis != 0;
                self.at(Tokens { batch_first, ..tokens }, to, node)
            }
            Op::Reduce(op) if op.axes.contains(&axis) => match tokens.may_be_summed() {
                true => Ok(vec![Place::Total]),
                false => Err(JOINS.into()),
            },
            Op::Reduce(op) => {
                let before = op.axes.iter().filter(|a| **a < axis).count();
                let to = if op.keep_dims { axis } else { axis - before };
                let batch_first = tokens.batch_first && !op.axes.contains(&0);
                self.at(Tokens { batch_first, ..tokens }, to, node)
            }
            _ => Err("is not known to treat each token by itself".into()),
        }
    }

    fn matmul(&self, op: &MatMul, node: &Node, places: &[Place]) -> Placed {
        let result = self.shape(node.outputs[0]).rank();
        let in_gradient = |p: &Place| matches!(p, Place::Along(tokens) if tokens.in_gradient);
        let in_gradient = places.iter().any(in_gradient);
        let mut found: Option<(usize, Tokens)> = None;
        for (i, (value, place)) in node.inputs.iter().zip(places).enumerate() {
            let Place::Along(tokens) = *place else { continue };
            let (axis, _) = self.axis_of(tokens, *value)?;
            let rank = self.shape(*value).rank();
            let swapped = [op.trans_a, op.trans_b][i];
            // Counted from the right, with neither operand transposed.
            let from_right = match (rank - axis, swapped) {
                (1, true) => 2,
                (2, true) => 1,
                (n, _) => n,
            };
            if from_right == [1, 2][i] {
                return if in_gradient { Ok(vec![Place::Total]) } else { Err(JOINS.into()) };
            }
            let batch_first = tokens.batch_first && rank == result && (rank > 2 || axis == 0);
            let tokens = Tokens { batch_first, in_gradient, ..tokens };
            found = match found {
                None => Some((from_right, tokens)),
                Some((other, first)) if other == from_right && other > 2 => {
                    let batch_first = batch_first && first.batch_first;
                    Some((other, Tokens { batch_first, ..tokens }))
                }
                Some(_) => {
                    return Err("multiplies tokens with tokens, and is no known attention".into());
                }
            };
        }
        let Some((from_right, tokens)) = found else { return Err(JOINS.into()) };
        // A matrix for each position would be one of another document.
        let per_position = node.inputs.iter().zip(places).any(|(value, place)| {
            let dims = self.shape(*value).dims();
            let at = dims.len().checked_sub(from_right).map_or(1, |axis| dims[axis]);
            from_right > 2 && !matches!(place, Place::Along(_)) && at > 1
        });
        match per_position {
            true => Err("has a matrix per position".into()),
            false => self.at(tokens, result - from_right, node),
        }
    }

    /// Attention `(q, k, v)` with tokens along the third of four axes.
    fn attention(&mut self, id: NodeId, node: &Node, places: &[Place]) -> Placed {
        let fits = |operand: usize| match places[operand] {
            Place::Along(tokens) => {
                tokens.batch_first && self.axis_of(tokens, node.inputs[operand]) == Ok((2, 1))
            }
            _ => false,
        };
        let Place::Along(tokens) = places[0] else {
            return Err("attends to tokens from elsewhere".into());
        };
        if places[1..3].iter().all(|p| *p == Place::Free) {
            return self.at(tokens, 2, node);
        }
        if !(0..3).all(fits) {
            return Err("attends to tokens in a layout that is not known".into());
        }
        self.uses.attention.push(id);
        self.at(tokens, 2, node)
    }
}

/// Whether a tensor is the same all along an axis.
fn uniform(tensor: &Tensor, axis: usize) -> bool {
    let dims = tensor.shape().dims();
    let inner: usize = dims[axis + 1..].iter().product();
    let elements = tensor.to_f64s();
    let same = |block: &[f64]| block.chunks(inner).all(|row| row == &block[..inner]);
    elements.chunks((inner * dims[axis]).max(1)).all(same)
}
