//! Reverse-mode differentiation: adds the gradient of the loss sum for every trainable parameter.
//!
//! In: a graph with one scalar output of kind `LossSum`. Out: one output of kind `Gradient` per
//! trainable parameter that the loss depends on, with the parameter's name, dtype and shape; outputs
//! of kind `Result` are gone. The cotangent of the loss sum is `loss_scale(%scale) {factor}` with
//! factor = 1 / (C·A), where `%scale` is a new state leaf `loss_scale` (first value 1) whose dynamics
//! the passes `loss_scale` and `update` add. Nodes that this pass adds are in region backward.
//!
//! Many short matmuls by one weight, as in the steps of an unrolled recurrence, give it the gradient of one (`steps`).
//!
//! Of a function with a gradient of its own, `custom` writes that out instead; its other nodes receive no cotangents.
//!
//! Numerics: gradients run in the dtype of their forward node, with two exceptions that keep sums in f32. A view (cast,
//! transpose, reshape, slice, pad) of an f32 parameter has f32 cotangents, which the rules of matmuls, embeddings and
//! broadcasts write directly. Two or more cotangents of a low-precision cast of an f32 value are cast back each and
//! summed in f32.

mod builder;
mod custom;
mod lost;
mod rules;
mod steps;

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property};
use builder::{Builder, RuleError};
use custom::{Functions, Seed};
use frit_ir::ops::{Cast, LossScale, Op, Param, ParamKind, State, StateName};
use frit_ir::{Code, DType, Diagnostic, Graph, NodeId, Origin, OutputKind, TensorType, ValueId};
use lost::{End, Lost};

/// The contract of [`Differentiate`].
pub const INFO: PassInfo = PassInfo {
    name: "differentiate",
    summary: "add the gradient of the loss for every trainable parameter",
    requires: &[Property::HasLoss],
    ensures: &[Property::Differentiated],
    breaks: &[Property::Canonical],
    numerics: Numerics::Bitwise,
};

/// Adds gradients of the loss sum, seeded with scale / (capacity · accumulation).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Differentiate {
    /// Micro-steps per update (A).
    pub accumulation: usize,
    /// Static number of loss elements of one rank's micro-batch (C).
    pub capacity: f64,
}

impl Pass for Differentiate {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        let loss = loss_sum(graph)?;
        let factor = 1.0 / (self.capacity * self.accumulation as f64);
        if !(factor.is_finite() && factor > 0.0) {
            return Err(Diagnostic::error(Code::LossEmpty, "the loss has no elements")
                .at(&graph.def(loss).origin)
                .help(
                    "bind a batch, and every axis that the loss is over, of at least one element",
                ));
        }
        let forward: Vec<NodeId> = graph.order().to_vec();
        let varied = varied_values(graph);
        let mut sweep = Sweep { cotangents: vec![Vec::new(); graph.n_values()], varied };
        if sweep.varied[loss.0 as usize] {
            let (seed, cotangent) = seed(graph, loss, factor)?;
            sweep.cotangents[loss.0 as usize].push(cotangent);
            let functions = Functions::new(graph, &forward, seed);
            sweep.run(graph, &forward, &functions)?;
        }
        sweep.finish(graph, context, loss, &forward)?;
        graph.outputs.retain(|o| o.kind != OutputKind::Result);
        graph.remove_dead();
        Ok(Changed::Yes)
    }
}

/// The loss sum, checked to be a float scalar.
fn loss_sum(graph: &Graph) -> Result<ValueId, Diagnostic> {
    let mut losses = graph.outputs.iter().filter(|o| o.kind == OutputKind::LossSum);
    let (Some(loss), None) = (losses.next(), losses.next()) else {
        return Err(Diagnostic::error(
            Code::PassFailed,
            "differentiate needs exactly one loss_sum output",
        ));
    };
    let ty = graph.ty(loss.value);
    if ty.shape.rank() != 0 || !ty.dtype.is_float() {
        return Err(Diagnostic::error(
            Code::PassFailed,
            format!("the loss must be a float scalar, not {ty}"),
        )
        .at(&graph.def(loss.value).origin));
    }
    Ok(loss.value)
}

/// For every value whether it is a float that depends on a trainable parameter.
pub(crate) fn varied_values(graph: &Graph) -> Vec<bool> {
    let mut varied = vec![false; graph.n_values()];
    for (_, node) in graph.nodes() {
        let any = match &node.op {
            Op::Param(p) => p.kind == ParamKind::Trainable,
            _ => node.inputs.iter().any(|v| varied[v.0 as usize]),
        };
        for output in &node.outputs {
            varied[output.0 as usize] = any && graph.ty(*output).dtype.is_float();
        }
    }
    varied
}

/// The seed, and the cotangent of the loss sum: the same in its dtype.
fn seed(graph: &mut Graph, loss: ValueId, factor: f64) -> Result<(Seed, ValueId), Diagnostic> {
    let origin = graph.def(loss).origin.clone();
    let dtype = graph.ty(loss).dtype;
    let mut b = Builder::new(graph, &origin);
    let state = State {
        name: StateName::LossScale,
        of: None,
        ty: TensorType::scalar(DType::F32),
        init: 1.0,
        sharded: false,
    };
    let scale = b.emit(Op::State(state), &[])?;
    let seed = b.emit(Op::LossScale(LossScale { factor }), &[scale])?;
    b.graph.set_name(scale, StateName::LossScale.word());
    Ok((Seed { value: seed, factor }, b.cast(seed, dtype)?))
}

/// The walk from the loss to the parameters.
struct Sweep {
    /// Cotangents found so far of each forward value.
    cotangents: Vec<Vec<ValueId>>,
    varied: Vec<bool>,
}

impl Sweep {
    fn run(
        &mut self,
        graph: &mut Graph,
        forward: &[NodeId],
        functions: &Functions,
    ) -> Result<(), Diagnostic> {
        let mut unsupported: Vec<(Origin, String)> = Vec::new();
        for &id in forward.iter().rev() {
            let node = graph.node(id).clone();
            let needs: Vec<bool> = node.inputs.iter().map(|v| self.varied[v.0 as usize]).collect();
            if !needs.contains(&true) {
                continue;
            }
            let mut cotangents = Vec::with_capacity(node.outputs.len());
            for &output in &node.outputs {
                cotangents.push(self.total(graph, output)?);
            }
            if cotangents.iter().all(Option::is_none) {
                continue;
            }
            let mut builder = Builder::new(graph, &node.origin);
            builder.needs = needs;
            let gradients = match &node.op {
                Op::CustomGradient(op) => functions.vjp(&mut builder, &node, op, &cotangents),
                _ => rules::vjp(&mut builder, &node, &cotangents),
            };
            match gradients {
                Ok(gradients) => self.hand_on(graph, &node.inputs, gradients)?,
                Err(RuleError::Unsupported(what)) => unsupported.push((node.origin, what)),
                Err(RuleError::Bug(diagnostic)) => return Err(*diagnostic),
            }
        }
        match unsupported.first() {
            None => Ok(()),
            Some((origin, _)) => Err(unsupported_error(origin, &unsupported)),
        }
    }

    /// Records the cotangents of the operands of a node.
    fn hand_on(
        &mut self,
        graph: &mut Graph,
        inputs: &[ValueId],
        gradients: Vec<Option<ValueId>>,
    ) -> Result<(), Diagnostic> {
        for (&input, gradient) in inputs.iter().zip(gradients) {
            let Some(gradient) = gradient else { continue };
            if !self.varied[input.0 as usize] {
                continue;
            }
            if graph.ty(gradient).shape != graph.ty(input).shape {
                return Err(Diagnostic::error(
                    Code::PassFailed,
                    format!(
                        "internal error in pass `differentiate`: a cotangent of {} for a value {}",
                        graph.ty(gradient),
                        graph.ty(input)
                    ),
                )
                .at(&graph.def(input).origin)
                .help("this is a bug in frit; please report it with the model"));
            }
            self.cotangents[input.0 as usize].push(gradient);
        }
        Ok(())
    }

    /// The sum of the cotangents of a value, if it has any.
    ///
    /// The sum of several for a low-precision cast of an f32 value is taken in f32 and stays there;
    /// the rule of `cast` then has nothing left to do.
    fn total(&self, graph: &mut Graph, value: ValueId) -> Result<Option<ValueId>, Diagnostic> {
        let parts = &self.cotangents[value.0 as usize];
        if let [] | [_] = parts[..] {
            return Ok(parts.first().copied());
        }
        let origin = graph.def(value).origin.clone();
        let parts = steps::joined(&mut Builder::new(graph, &origin), parts)?;
        let (&first, rest) = parts.split_first().expect("invariant: there are cotangents");
        if rest.is_empty() {
            return Ok(Some(first));
        }
        let def = graph.def(value);
        let narrowed = matches!(&def.op, Op::Cast(Cast { to }) if to.is_low_precision())
            && graph.ty(def.inputs[0]).dtype == DType::F32;
        let widest = parts.iter().map(|v| graph.ty(*v).dtype).max_by_key(|d| d.mantissa_bits());
        let dtype = if narrowed { DType::F32 } else { widest.unwrap_or(DType::F32) };
        let mut b = Builder::new(graph, &origin);
        let mut sum = b.cast(first, dtype)?;
        for &part in rest {
            let part = b.cast(part, dtype)?;
            sum = b.add(sum, part)?;
        }
        Ok(Some(sum))
    }

    /// Makes the gradients of the trainable parameters outputs; one without a gradient is frozen.
    fn finish(
        &self,
        graph: &mut Graph,
        context: &mut PassContext,
        loss: ValueId,
        forward: &[NodeId],
    ) -> Result<(), Diagnostic> {
        let trainable: Vec<(ValueId, Param)> = graph
            .params()
            .filter(|(_, p)| p.kind == ParamKind::Trainable)
            .map(|(v, p)| (v, p.clone()))
            .collect();
        let mut without = Vec::new();
        for (value, param) in trainable {
            let origin = graph.def(value).origin.clone();
            let gradient = match param.ty.shape.numel() {
                0 => None,
                _ => self.total(graph, value)?,
            };
            if let Some(gradient) = gradient {
                let gradient = Builder::new(graph, &origin).cast(gradient, param.ty.dtype)?;
                if graph.value(gradient).name.is_none() {
                    graph.set_name(gradient, &format!("grad.{}", param.name));
                }
                graph.add_output(&param.name, gradient, OutputKind::Gradient);
            } else {
                without.push((value, param));
            }
        }
        let reached = |v: ValueId| self.cotangents.get(v.0 as usize).is_some_and(|c| !c.is_empty());
        let lost = Lost::new(graph, loss, forward, &reached);
        let ends: Vec<End> = without.iter().map(|(value, _)| lost.end(*value)).collect();
        let mut found = Vec::new();
        for ((value, param), end) in without.into_iter().zip(ends) {
            let def = graph.value(value).def;
            if let Op::Param(p) = &mut graph.node_mut(def).op {
                p.kind = ParamKind::Frozen;
                p.reason = end.reason(false);
            }
            found.push((param, end));
        }
        lost::warnings(&found).into_iter().for_each(|w| context.warn(w));
        Ok(())
    }
}

fn unsupported_error(first: &Origin, all: &[(Origin, String)]) -> Diagnostic {
    let mut error = Diagnostic::error(
        Code::NoGradientRule,
        format!("{} node(s) on the path to the loss have no gradient rule", all.len()),
    )
    .at(first)
    .help("freeze the parameters before them, or express them by other operations");
    for (origin, what) in all {
        error = error.note(format!("{what} at {origin}"));
    }
    error
}
