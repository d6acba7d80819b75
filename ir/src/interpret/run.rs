//! Evaluation of whole graphs, on one rank or on several in lockstep.

use super::call::Call;
use super::{EvalError, Evaluate, Evaluated, Options, collective, eval_op};
use crate::ops::{Fusion, Init};
use crate::{Graph, Node, Op, Tensor, TensorData, TensorType, ValueId};
use std::collections::HashMap;

/// The name by which a leaf is fed: its own, with `.` and its parameter's for state that belongs to
/// one; `None` if `op` is a constant or no leaf.
pub fn leaf_key(op: &Op) -> Option<String> {
    match op {
        Op::Input(input) => Some(input.name.clone()),
        Op::Param(param) => Some(param.name.clone()),
        Op::State(state) => Some(match &state.of {
            Some(param) => format!("{}.{param}", state.name),
            None => state.name.to_string(),
        }),
        Op::Hyper(hyper) => Some(hyper.name.clone()),
        _ => None,
    }
}

/// Evaluates the graph on one rank. Feeds are named by [`leaf_key`]; other leaves have their initial values. Returns
/// the outputs with their names, in order.
///
/// # Errors
/// If a value is missing, has the wrong type, or an operation fails.
pub fn run(
    graph: &Graph,
    feeds: &HashMap<String, Tensor>,
    options: Options,
) -> Result<Vec<(String, Tensor)>, EvalError> {
    let mut ranks = run_ranks(graph, std::slice::from_ref(feeds), options)?;
    Ok(ranks.remove(0))
}

/// Evaluates the graph on as many ranks as there are feeds, in lock step. Values have their logical,
/// full shape on every rank.
///
/// # Errors
/// As [`run`].
pub fn run_ranks(
    graph: &Graph,
    feeds: &[HashMap<String, Tensor>],
    options: Options,
) -> Result<Vec<Vec<(String, Tensor)>>, EvalError> {
    evaluate(graph, feeds.len(), options, |rank, node| leaf(node, &feeds[rank], options))
        .map(|ranks| ranks.into_iter().map(|outputs| named(graph, outputs)).collect())
}

fn named(graph: &Graph, outputs: Vec<Tensor>) -> Vec<(String, Tensor)> {
    graph.outputs.iter().map(|o| o.name.clone()).zip(outputs).collect()
}

/// The outputs of the body, whose inputs in order are the operands.
impl Evaluate for Fusion {
    fn evaluate(&self, call: &Call<'_>) -> Evaluated {
        let (mut operands, options) = (call.inputs.iter(), Options { exact: call.exact });
        let mut ranks =
            evaluate(&self.body, 1, options, |_, node| match (&node.op, operands.next()) {
                (Op::Input(_), Some(operand)) => Ok((*operand).clone()),
                _ => Err(EvalError::Leaf(node.op.name())),
            })?;
        Ok(ranks.remove(0))
    }
}

/// Outputs per rank, with `leaf` for the value of every leaf except constants.
fn evaluate(
    graph: &Graph,
    n_ranks: usize,
    options: Options,
    mut leaf: impl FnMut(usize, &Node) -> Result<Tensor, EvalError>,
) -> Result<Vec<Vec<Tensor>>, EvalError> {
    let mut uses = uses(graph);
    let mut values: Vec<Vec<Option<Tensor>>> = vec![vec![None; graph.n_values()]; n_ranks];
    for (_, node) in graph.nodes() {
        let at = |error| EvalError::At {
            op: node.op.name(),
            origin: node.origin.clone(),
            error: Box::new(error),
        };
        let mut results = Vec::with_capacity(n_ranks);
        if node.op.is_leaf() && !matches!(node.op, Op::Constant(_)) {
            for rank in 0..n_ranks {
                results.push(vec![leaf(rank, node)?]);
            }
        } else {
            let operands: Vec<Vec<&Tensor>> =
                values.iter().map(|of_rank| operands(node, of_rank)).collect();
            let firsts: Vec<&Tensor> = operands.iter().filter_map(|o| o.first().copied()).collect();
            if let Some(combined) = collective::combine(&node.op, &firsts, options.exact) {
                results.extend(combined.into_iter().map(|t| vec![t]));
            } else {
                for operands in &operands {
                    results.push(eval_op(&node.op, operands, options).map_err(at)?);
                }
            }
        }
        for (of_rank, results) in values.iter_mut().zip(results) {
            for (output, tensor) in node.outputs.iter().zip(results) {
                of_rank[output.0 as usize] = Some(tensor);
            }
        }
        node.inputs.iter().for_each(|v| uses[v.0 as usize] -= 1);
        for value in node.inputs.iter().chain(&node.outputs) {
            if uses[value.0 as usize] == 0 {
                values.iter_mut().for_each(|of_rank| of_rank[value.0 as usize] = None);
            }
        }
    }
    Ok(values
        .iter()
        .map(|of_rank| graph.outputs.iter().map(|o| get(of_rank, o.value).clone()).collect())
        .collect())
}

/// How often each value is read, as operand or as output.
fn uses(graph: &Graph) -> Vec<usize> {
    let mut uses: Vec<usize> = graph.users().iter().map(Vec::len).collect();
    for output in &graph.outputs {
        uses[output.value.0 as usize] += 1;
    }
    uses
}

fn operands<'a>(node: &Node, values: &'a [Option<Tensor>]) -> Vec<&'a Tensor> {
    node.inputs.iter().map(|v| get(values, *v)).collect()
}

fn get(values: &[Option<Tensor>], id: ValueId) -> &Tensor {
    values[id.0 as usize].as_ref().expect("invariant: values are defined before use")
}

/// The value of a leaf: its feed, else its initial value.
fn leaf(
    node: &Node,
    feeds: &HashMap<String, Tensor>,
    options: Options,
) -> Result<Tensor, EvalError> {
    let key = leaf_key(&node.op).ok_or_else(|| EvalError::Leaf(node.op.name()))?;
    let expected = node.op.infer(&[])?.remove(0);
    if let Some(tensor) = feeds.get(&key) {
        if let Op::Param(param) = &node.op
            && tensor.ty == param.ty
        {
            // As the model has it, whatever it is held in.
            return Ok(tensor.cast(expected.dtype));
        }
        if tensor.ty != expected {
            let found = tensor.ty.clone();
            return Err(EvalError::FeedType { name: key, expected, found });
        }
        return Ok(tensor.clone());
    }
    let first = match &node.op {
        Op::Param(param) => match param.init {
            Init::Constant(x) => Some(x),
            _ => None,
        },
        Op::State(state) => Some(state.init),
        Op::Hyper(hyper) => Some(hyper.default),
        _ => None,
    };
    let x = first.ok_or(EvalError::MissingFeed(key))?;
    Ok(splat(expected, x, options))
}

fn splat(ty: TensorType, x: f64, options: Options) -> Tensor {
    if options.exact && ty.dtype.is_float() {
        let data = TensorData::Float(vec![x; ty.shape.numel()]);
        return Tensor::exact(ty, data);
    }
    Tensor::splat(ty, x)
}
