//! The gradient as the certificate states it: a differentiation of its own, from one lemma per operation.
//!
//! In: the graph before the pass `differentiate`, with one scalar output of kind `LossSum`. Out: that graph with one output of kind
//! `Gradient` for each trainable parameter that the loss depends on, and without outputs of kind `Result`; other parameters are
//! frozen. What a lemma says holds over the real numbers: the element types of what is added only have to fit.
//!
//! Reverse mode: the cotangent of the loss sum is the seed, `loss_scale · 1/(capacity · accumulation)`; the cotangent of a value is
//! the sum, over its uses, of what the lemma of the using operation gives, summed over the axes along which the use broadcast it.

mod function;
mod lemmas;
mod term;
#[cfg(test)]
pub(crate) mod tests;

use crate::unstated::Unstated;
use frit_ir::ops::{LossScale, Op, Param, ParamKind, State, StateName};
use frit_ir::{DType, Graph, Node, Origin, OutputKind, TensorType, ValueId};
use function::Calls;
use std::collections::HashMap;
use term::{Term, Writer};

/// That the gradient of this is not stated.
fn unstated(node: &Node, reason: impl Into<String>) -> Unstated {
    Unstated::new(node.op.name(), &node.origin, reason)
}

/// One use of an operation, as its lemma sees it.
struct Site<'w> {
    /// The operands.
    x: Vec<Term<'w>>,
    /// The results.
    y: Vec<Term<'w>>,
    /// Cotangents of the results, of their types; `None` where the loss does not depend on one.
    dy: Vec<Option<Term<'w>>>,
    /// Whether the cotangent of an operand is asked for.
    needed: Vec<bool>,
}

/// Cotangents of the operands of a use, in order: each in a shape to which the operand broadcasts, `None` where it is zero.
type Cotangents<'w> = Vec<Option<Term<'w>>>;

/// The cotangents for a use of an operation; `None` if there is no lemma.
type Lemma<'a> = dyn for<'w> Fn(&Op, &Site<'w>) -> Option<Cotangents<'w>> + 'a;

/// The graph with the gradient of the loss sum for each trainable parameter, as the certificate states it.
///
/// Values of `forward` keep their ids.
///
/// # Errors
/// If an operation between a trainable parameter and the loss has no lemma.
pub fn differentiated(
    forward: &Graph,
    accumulation: usize,
    capacity: f64,
) -> Result<Graph, Unstated> {
    by(forward, (capacity * accumulation as f64).recip(), &lemmas::cotangents)
}

/// The same by these lemmas, with the factor of the seed.
fn by(forward: &Graph, factor: f64, lemma: &Lemma<'_>) -> Result<Graph, Unstated> {
    let losses: Vec<ValueId> =
        forward.outputs.iter().filter(|o| o.kind == OutputKind::LossSum).map(|o| o.value).collect();
    let &[loss] = &losses[..] else {
        let reason = format!("{} loss sums", losses.len());
        return Err(Unstated::new("graph", &Origin::none(), reason));
    };
    if forward.ty(loss).shape.rank() != 0 || !forward.ty(loss).dtype.is_float() {
        let reason = format!("a loss of type {}", forward.ty(loss));
        return Err(unstated(forward.def(loss), reason));
    }
    let writer = Writer::new(forward);
    let gradients = sweep(forward, &writer, loss, factor, lemma)?;
    let mut graph = writer.into_graph();
    graph.outputs.retain(|o| o.kind != OutputKind::Result);
    for (param, gradient) in gradients {
        let def = graph.value(param).def;
        let Op::Param(leaf) = &mut graph.node_mut(def).op else { continue };
        match gradient {
            None => leaf.kind = ParamKind::Frozen,
            Some(gradient) => {
                let name = leaf.name.clone();
                graph.add_output(&name, gradient, OutputKind::Gradient);
            }
        }
    }
    graph.remove_dead();
    Ok(graph)
}

/// The trainable parameters in order, with their gradients.
fn sweep<'w>(
    forward: &Graph,
    writer: &'w Writer,
    loss: ValueId,
    factor: f64,
    lemma: &Lemma<'_>,
) -> Result<Vec<(ValueId, Option<ValueId>)>, Unstated> {
    let varied = varied(forward);
    let calls = Calls::of(forward);
    let term = |v: &ValueId| writer.term(*v);
    let mut found: HashMap<ValueId, Term<'w>> = HashMap::new();
    writer.at(&forward.def(loss).origin);
    let seed = seed(writer, factor);
    if varied[loss.0 as usize] {
        found.insert(loss, seed.cast(forward.ty(loss).dtype));
    }
    for (_, node) in forward.nodes().rev() {
        let needed: Vec<bool> = node.inputs.iter().map(|v| varied[v.0 as usize]).collect();
        if !needed.contains(&true) || node.outputs.iter().all(|v| !found.contains_key(v)) {
            continue;
        }
        writer.at(&node.origin);
        let cotangent = |v: &ValueId| found.get(v).map(|dy| dy.cast(forward.ty(*v).dtype));
        let dy: Cotangents<'w> = node.outputs.iter().map(cotangent).collect();
        let (x, y) = (node.inputs.iter().map(term), node.outputs.iter().map(term));
        let site = Site { x: x.collect(), y: y.collect(), dy, needed };
        let cotangents = match &node.op {
            Op::CustomGradient(op) => Some(calls.cotangents(forward, op, &site, (seed, factor))),
            op => lemma(op, &site),
        };
        let Some(cotangents) = cotangents else {
            return Err(unstated(node, "no lemma gives its gradient"));
        };
        for ((x, needed), dx) in site.x.iter().zip(&site.needed).zip(cotangents) {
            let Some(dx) = dx.filter(|_| *needed) else { continue };
            let dx = dx.sum_to(x.dims());
            let total = found.get(&x.id).map_or(dx, |others| *others + dx);
            found.insert(x.id, total);
        }
        if let Some(error) = writer.refused() {
            return Err(unstated(node, error.to_string()));
        }
    }
    let trainable = forward.params().filter(|(_, p)| p.kind == ParamKind::Trainable);
    let gradient = |(value, param): (ValueId, &Param)| {
        let found = found.get(&value).filter(|_| param.ty.shape.numel() > 0);
        (value, found.map(|gradient| gradient.cast(param.ty.dtype).id))
    };
    Ok(trainable.map(gradient).collect())
}

/// Whether each value is a float that depends on a trainable parameter.
fn varied(graph: &Graph) -> Vec<bool> {
    let mut varied = vec![false; graph.n_values()];
    for (_, node) in graph.nodes() {
        let depends = match &node.op {
            Op::Param(param) => param.kind == ParamKind::Trainable,
            _ => node.inputs.iter().any(|x| varied[x.0 as usize]),
        };
        for y in &node.outputs {
            varied[y.0 as usize] = depends && graph.ty(*y).dtype.is_float();
        }
    }
    varied
}

/// The cotangent of the loss sum: the state `loss_scale` times `factor`.
fn seed(writer: &Writer, factor: f64) -> Term<'_> {
    let scale = State {
        name: StateName::LossScale,
        of: None,
        ty: TensorType::scalar(DType::F32),
        init: 1.0,
        sharded: false,
    };
    let scale = writer.apply(Op::State(scale), &[])[0];
    writer.apply(Op::LossScale(LossScale { factor }), &[scale])[0]
}
