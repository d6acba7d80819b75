//! Keeps the documents of packed sequences apart.
//!
//! In: a canonical graph whose input of tokens `[B, T]` holds documents one after the other, each ended by the separator. Out: the same,
//! where a token attends to tokens of its own document only, positions count from the beginning of the document, and the label of a
//! separator, which is the first token of another document, is ignored. No value of a document depends on another document then:
//! [`tokens`] follows the axis of tokens, and refuses a graph that joins tokens in any other way.

mod tokens;

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{
    Cast, CompareFn, Constant, CumSum, Embedding, LogicalFn, Reduce, ReduceFn, Reshape, Slice,
    Transpose,
};
use frit_ir::{
    Code, DType, Diagnostic, Graph, GraphError, NodeId, Op, Origin, Region, Shape, Tensor,
    TensorType, ValueId, counted,
};
use std::collections::HashMap;
use tokens::Positions;

/// The contract of [`Documents`].
pub const INFO: PassInfo = PassInfo {
    name: "documents",
    summary: "keep the documents of packed sequences apart",
    requires: &[Property::Canonical, Property::Raised],
    ensures: &[],
    breaks: &[Property::Canonical],
    numerics: Numerics::Bitwise,
};

/// Keeps documents apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Documents {
    /// The token that ends a document; without one the graph is left alone.
    pub separator: Option<i64>,
    /// Inputs of labels, with the label that the loss ignores.
    pub labels: Vec<(String, i64)>,
}

impl Pass for Documents {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        let Some(separator) = self.separator else { return Ok(Changed::No) };
        let labels: Vec<(ValueId, i64)> = inputs(graph)
            .filter_map(|(name, value)| {
                let (_, ignored) = self.labels.iter().find(|(label, _)| label == name)?;
                Some((value, *ignored))
            })
            .collect();
        let ids = self.ids(graph)?;
        let label_values: Vec<ValueId> = labels.iter().map(|(value, _)| *value).collect();
        let uses = tokens::follow(graph, ids, &label_values)?;
        let given = inputs(graph).filter(|(name, value)| {
            last_part(name) == "position_ids" && graph.ty(*value).shape == graph.ty(ids).shape
        });
        let given: Vec<ValueId> = given.map(|(_, value)| value).collect();

        let origin = graph.def(ids).origin.by(INFO.name);
        let (attentions, positions) = (uses.attention.len(), uses.positions.len() + given.len());
        context.remark(
            &origin,
            format!(
                "documents end with token {separator}: {} and {} keep to them",
                counted(attentions, "attention"),
                counted(positions, "use") + " of positions"
            ),
        );
        let mut b = Builder { graph, origin, tables: HashMap::new() };
        b.keep_apart(ids, separator, &labels, &uses, &given).map_err(bug(INFO.name))?;
        graph
            .sort()
            .map_err(|_| Diagnostic::error(Code::PassFailed, "cycle after pass `documents`"))?;
        Ok(Changed::Yes)
    }
}

impl Documents {
    /// The input of tokens: the one of integers `[B, T]` whose elements look up rows of a table, and that is no label.
    fn ids(&self, graph: &Graph) -> Result<ValueId, Diagnostic> {
        let users = graph.users();
        let mut found = Vec::new();
        for (name, value) in inputs(graph) {
            let ty = graph.ty(value);
            let is_label = self.labels.iter().any(|(label, _)| label == name);
            let looks_up = |id: &NodeId| {
                let node = graph.node(*id);
                matches!(node.op, Op::Embedding(_) | Op::Gather(_)) && node.inputs[1] == value
            };
            let other = ["position_ids", "token_type_ids"].contains(&last_part(name));
            let fits = ty.shape.rank() == 2 && matches!(ty.dtype, DType::I64 | DType::I32);
            if fits && !is_label && !other && users[value.0 as usize].iter().any(looks_up) {
                found.push((name.to_string(), value));
            }
        }
        match &found[..] {
            [(_, value)] => {
                // A table may have more rows than there are tokens, not fewer.
                let rows = users[value.0 as usize].iter().map(|id| graph.node(*id));
                let rows = rows.filter_map(|node| match &node.op {
                    Op::Embedding(_) => graph.ty(node.inputs[0]).shape.dims().first().copied(),
                    _ => None,
                });
                let separator = self.separator.and_then(|id| usize::try_from(id).ok());
                match (separator, rows.min()) {
                    (Some(separator), Some(rows)) if separator >= rows => {
                        let what = format!(
                            "data.document_separator = {separator} is no token of the model, which has {rows}"
                        );
                        let help = "give the token that ends a document in the data";
                        Err(Diagnostic::error(Code::DocumentsMix, what).help(help))
                    }
                    _ => Ok(*value),
                }
            }
            found => {
                let names: Vec<String> = found.iter().map(|(n, _)| format!("`{n}`")).collect();
                let what = match names.is_empty() {
                    true => "no input of tokens [batch, T]".to_string(),
                    false => format!("several inputs of tokens: {}", names.join(", ")),
                };
                let what = format!("data.document_separator is set, and the model has {what}");
                let help = "remove it; it is for models that read one sequence of tokens";
                Err(Diagnostic::error(Code::DocumentsMix, what).help(help))
            }
        }
    }
}

/// The part of a name after its last dot or slash.
fn last_part(name: &str) -> &str {
    name.rsplit(['.', '/']).next().unwrap_or(name)
}

/// The inputs of a graph.
fn inputs(graph: &Graph) -> impl Iterator<Item = (&str, ValueId)> {
    graph.nodes().filter_map(|(_, node)| match &node.op {
        Op::Input(input) => Some((input.name.as_str(), node.outputs[0])),
        _ => None,
    })
}

struct Builder<'a> {
    graph: &'a mut Graph,
    origin: Origin,
    /// Values per position, in the shape of the operand, by the original and the axis.
    tables: HashMap<(ValueId, usize, usize), ValueId>,
}

impl Builder<'_> {
    fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, GraphError> {
        self.graph.add1(op, inputs, self.origin.clone(), Region::Forward)
    }

    fn constant(&mut self, value: Tensor) -> Result<ValueId, GraphError> {
        self.add(Op::Constant(Constant { value }), &[])
    }

    fn number(&mut self, like: ValueId, value: f64) -> Result<ValueId, GraphError> {
        let ty = TensorType::scalar(self.graph.ty(like).dtype);
        self.constant(Tensor::splat(ty, value))
    }

    fn reshape(&mut self, x: ValueId, shape: Vec<usize>) -> Result<ValueId, GraphError> {
        self.add(Op::Reshape(Reshape { shape: Shape(shape) }), &[x])
    }

    fn transpose(&mut self, x: ValueId, perm: Vec<usize>) -> Result<ValueId, GraphError> {
        self.add(Op::Transpose(Transpose { perm }), &[x])
    }

    fn cast(&mut self, x: ValueId, to: DType) -> Result<ValueId, GraphError> {
        if self.graph.ty(x).dtype == to { Ok(x) } else { self.add(Op::Cast(Cast { to }), &[x]) }
    }

    fn keep_apart(
        &mut self,
        ids: ValueId,
        separator: i64,
        labels: &[(ValueId, i64)],
        uses: &tokens::Uses,
        given: &[ValueId],
    ) -> Result<(), GraphError> {
        let &[batch, length] = self.graph.ty(ids).shape.dims() else { return Ok(()) };
        let dtype = self.graph.ty(ids).dtype;
        let separator = self.constant(Tensor::ints(dtype, [], vec![separator]))?;
        let ends = self.add(Op::Compare(CompareFn::Eq), &[ids, separator])?;
        let same = self.same_document(ends, batch, length)?;
        for id in &uses.attention {
            self.mask(*id, same)?;
        }
        if !(uses.positions.is_empty() && given.is_empty()) {
            let positions = self.positions(same, batch, length)?;
            for at in &uses.positions {
                self.by_position(at, positions)?;
            }
            for value in given {
                let own = self.cast(positions, self.graph.ty(*value).dtype)?;
                self.graph.replace_uses(*value, own);
            }
        }
        for (value, ignored) in labels {
            let ignored =
                self.constant(Tensor::ints(self.graph.ty(*value).dtype, [], vec![*ignored]))?;
            let apart = self.add(Op::Select, &[ends, ignored, *value])?;
            self.graph.replace_uses(*value, apart);
            let node = self.graph.value(apart).def;
            self.graph.set_inputs(node, vec![ends, ignored, *value])?;
        }
        Ok(())
    }

    /// Whether two tokens are of one document: `[B, T, T]`. A separator belongs to the document that it ends.
    fn same_document(
        &mut self,
        ends: ValueId,
        batch: usize,
        length: usize,
    ) -> Result<ValueId, GraphError> {
        let ends = self.cast(ends, DType::I64)?;
        let before = CumSum { axis: 1, exclusive: true, reverse: false };
        let number = self.add(Op::CumSum(before), &[ends])?;
        let of_query = self.reshape(number, vec![batch, length, 1])?;
        let of_key = self.reshape(number, vec![batch, 1, length])?;
        self.add(Op::Compare(CompareFn::Eq), &[of_query, of_key])
    }

    /// How many tokens of its document are before each token: `i64[B, T]`.
    fn positions(
        &mut self,
        same: ValueId,
        batch: usize,
        length: usize,
    ) -> Result<ValueId, GraphError> {
        let all = Tensor::vector_i64((0..length as i64).collect());
        let token = self.constant(all.reshaped([length, 1]))?;
        let other = self.constant(all.reshaped([1, length]))?;
        let before = self.add(Op::Compare(CompareFn::Lt), &[other, token])?;
        let both = self.add(Op::Logical(LogicalFn::And), &[same, before])?;
        // Exact: there are fewer than 2^24 tokens.
        let both = self.cast(both, DType::F32)?;
        let sum = Reduce { f: ReduceFn::Sum, axes: vec![2], keep_dims: false };
        let count = self.add(Op::Reduce(sum), &[both])?;
        debug_assert_eq!(self.graph.ty(count).shape.dims(), [batch, length]);
        self.cast(count, DType::I64)
    }

    /// Limits attention to tokens of the same document.
    fn mask(&mut self, id: NodeId, same: ValueId) -> Result<(), GraphError> {
        let &[batch, length, _] = self.graph.ty(same).shape.dims() else { return Ok(()) };
        let same = self.reshape(same, vec![batch, 1, length, length])?;
        let node = self.graph.node(id);
        let mut inputs = node.inputs.clone();
        let Op::Attention(attention) = &node.op else { return Ok(()) };
        let [mask, kept] = attention.masks(&node.inputs).map(Option::<&ValueId>::copied);
        let mask = match mask {
            None => same,
            Some(mask) if self.graph.ty(mask).dtype == DType::Bool => {
                self.add(Op::Logical(LogicalFn::And), &[mask, same])?
            }
            Some(mask) => {
                let never = self.number(mask, f64::NEG_INFINITY)?;
                self.add(Op::Select, &[same, mask, never])?
            }
        };
        inputs.truncate(3);
        inputs.push(mask);
        inputs.extend(kept);
        self.graph.set_inputs(id, inputs)
    }

    /// Replaces an operand that has a value per position by the values at the positions of the tokens.
    fn by_position(&mut self, at: &Positions, positions: ValueId) -> Result<(), GraphError> {
        let mut inputs = self.graph.node(at.node).inputs.clone();
        let value = inputs[at.operand];
        let key = (value, at.axis, at.rank);
        let chosen = match self.tables.get(&key) {
            Some(known) => *known,
            None => self.chosen(value, at, positions)?,
        };
        self.tables.insert(key, chosen);
        inputs[at.operand] = chosen;
        self.graph.set_inputs(at.node, inputs)
    }

    /// A slice of the first axis.
    fn first_example(&mut self, value: ValueId) -> Result<ValueId, GraphError> {
        let mut size = self.graph.ty(value).shape.dims().to_vec();
        if size[0] == 1 {
            return Ok(value);
        }
        size[0] = 1;
        let slice = Slice { start: vec![0; size.len()], step: vec![1; size.len()], size };
        self.add(Op::Slice(slice), &[value])
    }

    /// The values of an operand at the positions of the tokens, with the batch as first of `at.rank` axes.
    fn chosen(
        &mut self,
        value: ValueId,
        at: &Positions,
        positions: ValueId,
    ) -> Result<ValueId, GraphError> {
        // Its axes but that of the batch, all of which it then has.
        let own = self.graph.ty(value).shape.dims().to_vec();
        let missing = at.rank - own.len();
        let dims: Vec<usize> = vec![1; missing].into_iter().chain(own).skip(1).collect();
        let axis = at.axis + missing - 1;
        let first: Vec<usize> =
            [axis].into_iter().chain((0..dims.len()).filter(|i| *i != axis)).collect();
        let value = match missing {
            0 => self.first_example(value)?,
            _ => value,
        };
        let value = self.reshape(value, dims.clone())?;
        let value = self.transpose(value, first.clone())?;
        let moved: Vec<usize> = first.iter().map(|i| dims[*i]).collect();
        let width = moved[1..].iter().product();
        let table = self.reshape(value, vec![moved[0], width])?;
        let rows = self.add(Op::Embedding(Embedding { padding_idx: None }), &[table, positions])?;
        let batch = self.graph.ty(positions).shape.dims()[0];
        let rows =
            self.reshape(rows, [batch].into_iter().chain(moved.iter().copied()).collect())?;
        let mut back = vec![0; first.len() + 1];
        for (from, to) in first.iter().enumerate() {
            back[to + 1] = from + 1;
        }
        self.transpose(rows, back)
    }
}
