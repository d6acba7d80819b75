//! What a micro-step leaves to the next one, and what the update of a step replaces.
//!
//! Of N ranks with A micro-steps per update, each micro-step's loss has C elements unless labels are ignored. The gradients given are
//! those of scale / (C·A) times the loss sum, and ranks average them, so that C·A·N / (scale · count) times their sum over micro-steps is
//! the gradient of the mean over the elements that count (in a reproducible step, those of scale / (C·A·N) times the loss sum are given,
//! and ranks add them). A step whose gradients are not all finite is skipped: it leaves all but the loss
//! scale as it was.

use super::writer::Writer;
use super::{buffers, optimizer::Group};
use crate::unstated::Unstated;
use frit_ir::ops::{
    BinaryFn, Concat, GradStats, MuonRule, OptimizerKind, ParamKind, ScheduleKind, Split,
    StateName, Unscale, UpdateLossScale, statistics_dtype,
};
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, Shape, Tensor, TensorType, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// How parameters are trained.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// The optimizer; with Muon, AdamW steps what is no matrix of a hidden layer.
    pub optimizer: OptimizerKind,
    /// More about Muon.
    pub muon: MuonRule,
    /// The parameters that Muon steps unless a group says otherwise, by name: the [`matrices`](super::matrices) of the model with its loss.
    /// A pass behind may leave what they compute as it is and no longer show that they are matrices.
    pub matrices: BTreeSet<String>,
    /// The learning rate over steps.
    pub schedule: ScheduleKind,
    /// Hyper-parameters by key of the configuration, without those that have no value (`auto`). Those of parameters of their own are
    /// `optimizer.group.I.lr` and `optimizer.group.I.weight_decay` of group I, `optimizer.weight_decay_of_vectors` of parameters of at
    /// most one axis, and `optimizer.adamw_lr` and `optimizer.adamw_weight_decay` of what AdamW steps beside Muon; the first that has a
    /// value decides, of groups the last.
    pub hypers: BTreeMap<String, f64>,
    /// Parameters with settings of their own.
    pub groups: Vec<Group>,
    /// Whether a moving average of the parameters is kept.
    pub ema: bool,
    /// The loss scale of the first step.
    pub init_scale: f64,
    /// Whether the loss scale is multiplied by `precision.backoff_factor` when a step is skipped, and by `precision.growth_factor` after
    /// `precision.growth_interval` steps without.
    pub dynamic_scale: bool,
    /// Micro-steps per update (A).
    pub accumulation: usize,
    /// Elements of one rank's loss in a micro-step, if no label is ignored (C).
    pub capacity: f64,
    /// Number of ranks (N).
    pub ranks: usize,
    /// Whether sums over micro-steps and ranks do not depend on A and N but by their product; ranks add gradients instead of averaging them.
    pub reproducible: bool,
}

/// What every parameter's step reads.
pub(super) struct Scalars {
    /// Steps taken before this one.
    pub(super) step: ValueId,
    /// What a gradient is multiplied by.
    pub(super) factor: ValueId,
    /// Not 0 if the step is skipped.
    pub(super) found_inf: ValueId,
}

/// A graph with gradients and no update, with the update of one rank: the same graph with carries of parameters and states, gradients
/// as they are summed so far, and metrics as its outputs.
///
/// # Errors
/// If there is no loss, a gradient is of no parameter, a hyper-parameter has no value, or Muon is to step what is no matrix.
pub fn updated(gradients: &Graph, update: &Update) -> Result<Graph, Unstated> {
    let mut w = Writer::of(gradients, Region::Backward);
    let outputs = std::mem::take(&mut w.graph.outputs);
    let only = |kind: OutputKind| {
        let found = outputs.iter().find(|o| o.kind == kind);
        found.map(|o| o.value).ok_or_else(|| unstated(format!("the graph has no {kind:?}")))
    };
    let params: HashMap<String, ValueId> = gradients
        .params()
        .filter(|(_, p)| p.kind == ParamKind::Trainable)
        .map(|(value, p)| (p.name.clone(), value))
        .collect();

    let micro_step = update.micro_step(&mut w)?;
    let mut trained = Vec::new();
    for output in outputs.iter().filter(|o| o.kind == OutputKind::Gradient) {
        let name = &output.name;
        let param = params.get(name).copied();
        let param =
            param.ok_or_else(|| unstated(format!("the graph has no parameter `{name}`")))?;
        let gradient = w.cast(output.value, statistics_dtype(w.dtype(param)))?;
        let gradient = match micro_step {
            Some(k) => update.tree_sum(&mut w, k, Some(name), gradient)?,
            None => update.summed(&mut w, &StateName::GradSum, Some(name), gradient)?,
        };
        w.graph.add_output(name, gradient, OutputKind::Gradient);
        trained.push((name, param, gradient));
    }
    let mut buffers = buffers::of(&outputs);
    let mut loss = w.cast(only(OutputKind::LossSum)?, DType::F32)?;
    let mut count = w.cast(only(OutputKind::LossCount)?, DType::F32)?;
    if update.reproducible {
        [loss, count] = update.pieces(&mut w, micro_step, [loss, count], &mut buffers)?;
        w.region = Region::Backward;
    } else {
        loss = update.summed(&mut w, &StateName::LossSum, None, loss)?;
        count = update.summed(&mut w, &StateName::LossCount, None, count)?;
    }
    if let Some(rng) = w.find_state(&StateName::Rng) {
        // Every micro-step draws other numbers: its third element counts them.
        let one = w.constant(Tensor::vector_i64(vec![0, 0, 1, 0, 0]))?;
        let next = w.binary(BinaryFn::Add, rng, one)?;
        w.carry(&StateName::Rng, None, next, rng);
    }

    w.region = Region::Update;
    let scale = update.scale(&mut w)?;
    let of_gradients: Vec<ValueId> = trained.iter().map(|t| t.2).collect();
    let exact = update.reproducible;
    let finite_and_squares = w.one(Op::GradStats(GradStats { exact }), &of_gradients)?;
    let row = |w: &mut Writer, x| w.reshape(x, Shape::from([1]));
    let sums = [finite_and_squares, row(&mut w, count)?, row(&mut w, loss)?];
    let mut sums = w.one(Op::Concat(Concat { axis: 0 }), &sums)?;
    if exact {
        sums = w.one(Op::RoundStats, &[sums])?;
        let sizes = vec![2, 1, 1];
        let counted = w.all(Op::Split(Split { axis: 0, sizes }), &[sums])?[1];
        count = w.reshape(counted, Shape::scalar())?;
    }
    let clip = update.hyper(&mut w, "optimizer.clip_grad_norm")?;
    let capacity = update.capacity * (update.accumulation * update.ranks) as f64;
    let unscaled = w.all(Op::Unscale(Unscale { capacity }), &[sums, scale, clip])?;
    let [factor, found_inf, norm, mean] = unscaled[..] else {
        return Err(unstated("`unscale` has not four results"));
    };
    let step = w.state(&StateName::Step, None, TensorType::scalar(DType::F32))?;
    let scalars = Scalars { step, factor, found_inf };

    for (name, param, gradient) in &trained {
        let kind = update.kind_of(name);
        update.step(&mut w, (name, kind), [*param, *gradient], &scalars)?;
    }
    let next = w.one(Op::UpdateStep, &[step, found_inf])?;
    w.carry(&StateName::Step, None, next, step);
    update.rescale(&mut w, scale, found_inf)?;
    for buffer in &buffers {
        update.buffer(&mut w, buffer, found_inf)?;
    }
    let lr = update.learning_rate(&mut w, "optimizer.lr", step)?;
    for (name, value) in [
        ("loss", mean),
        ("grad_norm", norm),
        ("lr", lr),
        ("loss_scale", scale),
        ("found_inf", found_inf),
        ("tokens", count),
    ] {
        w.graph.add_output(name, value, OutputKind::Metric);
    }
    Ok(w.graph)
}

impl Update {
    /// The sum over the micro-steps so far.
    fn summed(
        &self,
        w: &mut Writer,
        name: &StateName,
        of: Option<&str>,
        value: ValueId,
    ) -> Result<ValueId, Unstated> {
        if self.accumulation == 1 {
            return Ok(value);
        }
        let before = w.state(name, of, w.graph.ty(value).clone())?;
        let sum = w.binary(BinaryFn::Add, before, value)?;
        w.carry(name, of, sum, before);
        Ok(sum)
    }

    /// The loss scale; where no gradient depends on it, there is none yet.
    fn scale(&self, w: &mut Writer) -> Result<ValueId, Unstated> {
        let name = StateName::LossScale;
        let leaf = match w.find_state(&name) {
            Some(leaf) => leaf,
            None => w.state(&name, None, TensorType::scalar(DType::F32))?,
        };
        let id = w.graph.value(leaf).def;
        if let Op::State(state) = &mut w.graph.node_mut(id).op {
            state.init = self.init_scale;
        }
        Ok(leaf)
    }

    /// The loss scale of the next step, if it changes.
    fn rescale(&self, w: &mut Writer, scale: ValueId, found_inf: ValueId) -> Result<(), Unstated> {
        if !self.dynamic_scale {
            return Ok(());
        }
        let tracker = StateName::GrowthTracker;
        let before = w.state(&tracker, None, TensorType::scalar(DType::F32))?;
        let mut operands = vec![scale, before, found_inf];
        for key in ["growth_factor", "backoff_factor", "growth_interval"] {
            operands.push(self.hyper(w, &format!("precision.{key}"))?);
        }
        let next = w.all(Op::UpdateLossScale(UpdateLossScale {}), &operands)?;
        w.carry(&StateName::LossScale, None, next[0], scale);
        w.carry(&tracker, None, next[1], before);
        Ok(())
    }
}

pub(super) fn unstated(reason: impl Into<String>) -> Unstated {
    Unstated::new("update", &Origin::none(), reason)
}
