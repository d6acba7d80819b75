//! The update: finite check, clipping, optimizer, learning rate and loss scale, in region update.
//!
//! In: outputs `LossSum`, `LossCount` and one `Gradient` per trainable parameter. Out: carries for parameters and
//! state, metrics `loss`, `grad_norm`, `lr`, `loss_scale`, `found_inf`, `tokens`, and the gradients, in the order in
//! which `grad_stats` reads them. The concat of [statistics, count, loss sum] is what `shard` sums over ranks. Buffers
//! that the forward pass updates are averaged over ranks and committed only if the step is taken ([`buffers`]).
//! Parameters may have a learning rate or weight decay of their own ([`ParamGroups`]). With the optimizer `muon` some
//! are stepped by AdamW ([`muon`]).
//!
//! With accumulation, `grad_sum`, `loss_sum` and `loss_count` are states to which every micro-step adds
//! in region backward. A carry replaces them after each micro-step; the runtime sets these three to
//! zero after an update, whether or not the step was taken.

mod buffers;
mod groups;
mod muon;
mod reproducible;
mod vectors;

use crate::loss_scale::LossScaling;
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{
    BinaryFn, Cast, Concat, Constant, GradStats, Hyper, LearningRate, MuonRule, Op, OptimizerKind,
    OptimizerStep, Param, ParamKind, Reshape, ScheduleKind, Split, State, StateName,
    UpdateLossScale, statistics_dtype, training,
};
use frit_ir::plan::MetricName;
use frit_ir::{
    Code, DType, Diagnostic, Graph, Origin, OutputKind, Region, Shape, Tensor, TensorType, ValueId,
    counted, nearest,
};
use groups::Settings;
pub use groups::{ParamGroup, ParamGroups};
use std::collections::{BTreeMap, HashMap};

/// The contract of [`Update`].
pub const INFO: PassInfo = PassInfo {
    name: "update",
    summary: "add the optimizer, its state and the loss scaler",
    requires: &[Property::Differentiated, Property::LossScaled],
    ensures: &[Property::Updated],
    breaks: &[Property::Canonical],
    numerics: Numerics::Bitwise,
};

/// Adds the update region.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// The optimizer.
    pub optimizer: OptimizerKind,
    /// More about `muon`.
    pub muon: MuonRule,
    /// The learning rate over time.
    pub schedule: ScheduleKind,
    /// Initial values of hyper-parameters, by key of the configuration.
    pub hypers: BTreeMap<&'static str, f64>,
    /// Parameters with a learning rate or weight decay of their own.
    pub groups: ParamGroups,
    /// Whether a moving average of the parameters is kept.
    pub ema: bool,
    /// As given to the pass `loss_scale`.
    pub scaling: LossScaling,
    /// Micro-steps per update (A).
    pub accumulation: usize,
    /// Static number of loss elements of one rank's micro-batch (C).
    pub capacity: f64,
    /// Number of ranks (N).
    pub world_size: usize,
    /// Whether the step is the same for every A and N of one product; see [`reproducible`].
    pub reproducible: bool,
}

impl Pass for Update {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        let names: Vec<(String, ValueId)> = of_kind(graph, OutputKind::Gradient);
        if names.is_empty() {
            return Err(nothing_trains(graph));
        }
        let (loss, count) = (one(graph, OutputKind::LossSum)?, one(graph, OutputKind::LossCount)?);
        for group in &self.groups.groups {
            if !names.iter().any(|(name, _)| group.covers(name)) {
                let message = format!("a parameter group matches nothing: scope {}", group.scope);
                let names = names.iter().map(|(name, _)| name.as_str());
                let help = nearest::advice(&group.scope, names)
                    + "; `frit inspect --view units` lists the names of parameters";
                context.warn(Diagnostic::warning(Code::GroupCoversNothing, message).help(help));
            }
        }
        let params: HashMap<String, ValueId> = graph
            .params()
            .filter(|(_, p)| p.kind == ParamKind::Trainable)
            .map(|(v, p)| (p.name.clone(), v))
            .collect();
        let trained: Vec<(String, ValueId)> =
            names.iter().map(|(name, _)| (name.clone(), params[name])).collect();
        self.about_vectors(graph, &trained).into_iter().for_each(|w| context.warn(w));
        let scale = graph.nodes().find_map(|(_, n)| match &n.op {
            Op::State(s) if s.name == StateName::LossScale => Some(n.outputs[0]),
            _ => None,
        });
        let kinds = self.kinds(graph, &names, context)?;
        let buffers = buffers::renewed(graph);
        let rng = graph.nodes().find_map(|(_, n)| match &n.op {
            Op::State(s) if s.name == StateName::Rng => Some(n.outputs[0]),
            _ => None,
        });
        graph.outputs.clear();
        let mut b = Emit {
            graph,
            hypers: HashMap::new(),
            rates: HashMap::new(),
            origin: Origin::none().by(INFO.name),
        };
        let scale = match scale {
            Some(scale) => scale,
            None => b.state(
                &StateName::LossScale,
                None,
                TensorType::scalar(DType::F32),
                self.scaling.init(),
                Region::Update,
            )?,
        };
        let micro_step = self.micro_step(&mut b)?;
        let mut gradients = Vec::with_capacity(names.len());
        for (name, value) in names {
            let param = *params.get(&name).ok_or_else(|| {
                Diagnostic::error(
                    Code::PassFailed,
                    format!("gradient `{name}` belongs to no parameter"),
                )
            })?;
            b.origin = b.graph.def(param).origin.by(INFO.name);
            let dtype = statistics_dtype(b.graph.ty(param).dtype);
            let value = b.cast(value, dtype, Region::Backward)?;
            let value = match micro_step {
                Some(k) => self.tree_sum(&mut b, k, Some(&name), value)?,
                None => self.accumulate(&mut b, &StateName::GradSum, Some(&name), value)?,
            };
            b.graph.add_output(&name, value, OutputKind::Gradient);
            gradients.push((name, param, value));
        }
        b.origin = Origin::none().by(INFO.name);
        let mut loss = b.cast(loss, DType::F32, Region::Backward)?;
        let mut count = b.cast(count, DType::F32, Region::Backward)?;
        let mut staged = vec![];
        if self.reproducible {
            ([loss, count], staged) =
                self.piecewise(&mut b, micro_step, [loss, count], &buffers)?;
        } else {
            loss = self.accumulate(&mut b, &StateName::LossSum, None, loss)?;
            count = self.accumulate(&mut b, &StateName::LossCount, None, count)?;
        }
        if let Some(rng) = rng {
            // The next micro-step draws other masks.
            let value = Tensor::ints(DType::I64, [5], vec![0, 0, 1, 0, 0]);
            let one = b.add(Op::Constant(Constant { value }), &[], Region::Backward)?[0];
            let next = b.add(Op::Binary(BinaryFn::Add), &[rng, one], Region::Backward)?[0];
            b.carry(&StateName::Rng, None, next, rng);
        }
        if !self.reproducible {
            staged = self.stage(&mut b, &buffers)?;
        }
        b.origin = Origin::none().by(INFO.name);
        let found_inf = self.emit_update(&mut b, scale, (&gradients, &kinds), (loss, count))?;
        self.commit(&mut b, &buffers, staged, found_inf)?;
        Ok(Changed::Yes)
    }
}

/// Parameters that an error lists.
const MAX_LISTED: usize = 8;

/// That no parameter of a graph has a gradient, and why.
fn nothing_trains(graph: &Graph) -> Diagnostic {
    let params: Vec<&Param> = graph.params().map(|(_, param)| param).collect();
    let (message, help) = match params.len() {
        0 => (
            "no parameter is trained: the model has none".into(),
            "of an ONNX model only initializers train, not nodes `Constant`: export it with its weights as initializers, \
             from PyTorch with `torch.onnx.export(…, optimize=False)`, which otherwise merges or removes parameters; or set \
             loss.kind = \"none\" to evaluate only",
        ),
        n => (
            format!("no parameter is trained, of {}", counted(n, "parameter")),
            "the notes say why: check params.trainable, params.frozen and params.ignored, and what is between these \
             parameters and the loss",
        ),
    };
    let why = |p: &&Param| format!("`{}`: {}", p.name, p.reason.trim_end_matches('.'));
    let notes: Vec<String> = params.iter().take(MAX_LISTED).map(why).collect();
    let left = params.len().saturating_sub(MAX_LISTED);
    let more = (left > 0).then(|| format!("and {left} more"));
    let error = Diagnostic::error(Code::NothingTrains, message).help(help);
    notes.into_iter().chain(more).fold(error, Diagnostic::note)
}

impl Update {
    /// The sum over micro-steps so far; the value itself if there is one micro-step per update.
    fn accumulate(
        &self,
        b: &mut Emit<'_>,
        name: &StateName,
        of: Option<&str>,
        value: ValueId,
    ) -> Result<ValueId, Diagnostic> {
        if self.accumulation == 1 {
            return Ok(value);
        }
        let ty = b.graph.ty(value).clone();
        let state = b.state(name, of, ty, 0.0, Region::Backward)?;
        let sum = b.add(Op::Binary(BinaryFn::Add), &[state, value], Region::Backward)?[0];
        b.carry(name, of, sum, state);
        Ok(sum)
    }

    fn emit_update(
        &self,
        b: &mut Emit<'_>,
        scale: ValueId,
        (gradients, kinds): (&[(String, ValueId, ValueId)], &[OptimizerKind]),
        (loss, count): (ValueId, ValueId),
    ) -> Result<ValueId, Diagnostic> {
        let values: Vec<ValueId> = gradients.iter().map(|g| g.2).collect();
        let exact = self.reproducible;
        let stats = b.update(Op::GradStats(GradStats { exact }), &values)?[0];
        let one = Op::Reshape(Reshape { shape: Shape::from([1]) });
        let count_1 = b.update(one.clone(), &[count])?[0];
        let loss_1 = b.update(one, &[loss])?[0];
        let all = b.update(Op::Concat(Concat { axis: 0 }), &[stats, count_1, loss_1])?[0];
        let all = if exact { b.update(Op::RoundStats, &[all])?[0] } else { all };
        let clip = self.hyper(b, "optimizer.clip_grad_norm")?;
        let capacity = self.capacity * (self.accumulation * self.world_size) as f64;
        let unscaled =
            b.update(Op::Unscale(training::Unscale { capacity }), &[all, scale, clip])?;
        let [factor, found_inf, grad_norm, mean_loss] = unscaled[..] else {
            return Err(Diagnostic::error(Code::PassFailed, "`unscale` must have four results"));
        };
        let step =
            b.state(&StateName::Step, None, TensorType::scalar(DType::F32), 0.0, Region::Update)?;
        let lr = self.learning_rate(b, "optimizer.lr", None, step)?;
        let common = [self.hyper(b, "optimizer.clip_grad_value")?, step, factor, found_inf];
        for ((name, param, gradient), &kind) in gradients.iter().zip(kinds) {
            b.origin = b.graph.def(*param).origin.by(INFO.name);
            let own = self.groups.of(name, b.graph.ty(*param).shape.rank(), kind);
            let scalars = [self.own_hypers(b, kind, &own, step)?, common.to_vec()].concat();
            let next = self.step(b, (name, kind), [*param, *gradient], &scalars)?;
            if self.ema {
                let (dtype, decay) = (b.graph.ty(*param).dtype, self.hyper(b, "optimizer.ema")?);
                let ty = b.graph.ty(*param).with_dtype(statistics_dtype(dtype));
                let average = b.state(&StateName::Ema, Some(name), ty, 0.0, Region::Update)?;
                let operands = [average, next, decay, step, found_inf];
                let new = b.update(Op::EmaStep, &operands)?[0];
                b.carry(&StateName::Ema, Some(name), new, average);
            }
        }
        b.origin = Origin::none().by(INFO.name);
        let next_step = b.update(Op::UpdateStep, &[step, found_inf])?[0];
        b.carry(&StateName::Step, None, next_step, step);
        self.rescale(b, scale, found_inf)?;
        // The count over all ranks is element 2 of the vector that `shard` reduces.
        let sizes = vec![2, 1, 1];
        let total = b.update(Op::Split(Split { axis: 0, sizes }), &[all])?[1];
        let tokens = b.update(Op::Reshape(Reshape { shape: Shape::scalar() }), &[total])?[0];
        for (name, value) in [
            (MetricName::Loss, mean_loss),
            (MetricName::GradNorm, grad_norm),
            (MetricName::Lr, lr),
            (MetricName::LossScale, scale),
            (MetricName::FoundInf, found_inf),
            (MetricName::Tokens, tokens),
        ] {
            b.graph.add_output(name.word(), value, OutputKind::Metric);
        }
        Ok(found_inf)
    }

    /// The learning rate that follows the schedule from the base rate of this key.
    fn learning_rate(
        &self,
        b: &mut Emit<'_>,
        key: &str,
        default: Option<f64>,
        step: ValueId,
    ) -> Result<ValueId, Diagnostic> {
        if let Some(&rate) = b.rates.get(key) {
            return Ok(rate);
        }
        let base = match default {
            Some(default) => b.hyper(key, default)?,
            None => self.hyper(b, key)?,
        };
        let mut operands = vec![base];
        for key in self.schedule.hypers() {
            operands.push(self.hyper(b, key)?);
        }
        operands.push(step);
        let op = Op::LearningRate(LearningRate { kind: self.schedule });
        let rate = b.update(op, &operands)?[0];
        b.rates.insert(key.into(), rate);
        Ok(rate)
    }

    /// The optimizer's scalar operands for a parameter with these settings.
    fn own_hypers(
        &self,
        b: &mut Emit<'_>,
        kind: OptimizerKind,
        own: &Settings,
        step: ValueId,
    ) -> Result<Vec<ValueId>, Diagnostic> {
        let mut values = Vec::new();
        for &key in kind.hypers() {
            let value = match (key, &own.lr, &own.weight_decay) {
                ("optimizer.lr", Some((key, x)), _) => {
                    self.learning_rate(b, key, Some(*x), step)?
                }
                ("optimizer.lr", None, _) => self.learning_rate(b, key, None, step)?,
                ("optimizer.weight_decay", _, Some((key, x))) => b.hyper(key, *x)?,
                _ => self.hyper(b, key)?,
            };
            values.push(value);
        }
        Ok(values)
    }

    /// Adds the step of one parameter with its gradient; returns the parameter's new value.
    fn step(
        &self,
        b: &mut Emit<'_>,
        (name, kind): (&str, OptimizerKind),
        [param, gradient]: [ValueId; 2],
        scalars: &[ValueId],
    ) -> Result<ValueId, Diagnostic> {
        let states = kind.states(name);
        let dtype = statistics_dtype(b.graph.ty(param).dtype);
        let ty = TensorType::new(dtype, kind.state_shape(&b.graph.ty(param).shape));
        // State that has not the parameter's elements is not part of a flat group.
        let of = kind.has_states_by_element().then_some(name);
        let mut leaves = Vec::new();
        for state in &states {
            leaves.push(b.state(state, of, ty.clone(), 0.0, Region::Update)?);
        }
        let operands = [&[param, gradient][..], &leaves, scalars].concat();
        let muon = if kind == OptimizerKind::Muon { self.muon } else { MuonRule::default() };
        let op = Op::OptimizerStep(OptimizerStep { kind, muon });
        let results = b.update(op, &operands)?;
        b.graph.add_output(name, results[0], OutputKind::Carry(param));
        for ((state, leaf), next) in states.iter().zip(leaves).zip(&results[1..]) {
            b.carry(state, of, *next, leaf);
        }
        Ok(results[0])
    }

    /// The leaf of a hyper-parameter of the configuration.
    fn hyper(&self, b: &mut Emit<'_>, key: &str) -> Result<ValueId, Diagnostic> {
        let default = self.hypers.get(key).copied();
        let default = default.ok_or_else(|| {
            Diagnostic::error(Code::PassFailed, format!("the hyper-parameter `{key}` has no value"))
        })?;
        b.hyper(key, default)
    }

    /// The next loss scale, if it changes.
    fn rescale(
        &self,
        b: &mut Emit<'_>,
        scale: ValueId,
        found_inf: ValueId,
    ) -> Result<(), Diagnostic> {
        let LossScaling::Dynamic { .. } = self.scaling else { return Ok(()) };
        let tracker = b.state(
            &StateName::GrowthTracker,
            None,
            TensorType::scalar(DType::F32),
            0.0,
            Region::Update,
        )?;
        let operands = [
            scale,
            tracker,
            found_inf,
            self.hyper(b, "precision.growth_factor")?,
            self.hyper(b, "precision.backoff_factor")?,
            self.hyper(b, "precision.growth_interval")?,
        ];
        let next = b.update(Op::UpdateLossScale(UpdateLossScale {}), &operands)?;
        b.carry(&StateName::LossScale, None, next[0], scale);
        b.carry(&StateName::GrowthTracker, None, next[1], tracker);
        Ok(())
    }
}

fn of_kind(graph: &Graph, kind: OutputKind) -> Vec<(String, ValueId)> {
    let of_kind = graph.outputs.iter().filter(|o| o.kind == kind);
    of_kind.map(|o| (o.name.clone(), o.value)).collect()
}

fn one(graph: &Graph, kind: OutputKind) -> Result<ValueId, Diagnostic> {
    match of_kind(graph, kind)[..] {
        [(_, value)] => Ok(value),
        _ => Err(Diagnostic::error(
            Code::PassFailed,
            format!("update needs exactly one {kind:?} output"),
        )),
    }
}

/// Adds nodes of this pass.
struct Emit<'g> {
    graph: &'g mut Graph,
    hypers: HashMap<String, ValueId>,
    /// Learning rates by the key of their base rate.
    rates: HashMap<String, ValueId>,
    origin: Origin,
}

impl Emit<'_> {
    fn add(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        region: Region,
    ) -> Result<Vec<ValueId>, Diagnostic> {
        self.graph.add(op, inputs, self.origin.clone(), region).map_err(bug(INFO.name))
    }

    fn update(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, Diagnostic> {
        self.add(op, inputs, Region::Update)
    }

    fn cast(&mut self, value: ValueId, to: DType, region: Region) -> Result<ValueId, Diagnostic> {
        if self.graph.ty(value).dtype == to {
            return Ok(value);
        }
        Ok(self.add(Op::Cast(Cast { to }), &[value], region)?[0])
    }

    /// The leaf of a hyper-parameter, made once.
    fn hyper(&mut self, name: &str, default: f64) -> Result<ValueId, Diagnostic> {
        if let Some(&value) = self.hypers.get(name) {
            return Ok(value);
        }
        let value = self.update(Op::Hyper(Hyper { name: name.into(), default }), &[])?[0];
        self.graph.set_name(value, name);
        self.hypers.insert(name.into(), value);
        Ok(value)
    }

    fn state(
        &mut self,
        name: &StateName,
        of: Option<&str>,
        ty: TensorType,
        init: f64,
        region: Region,
    ) -> Result<ValueId, Diagnostic> {
        let of_param = of.map(String::from);
        let state = State { name: name.clone(), of: of_param, ty, init, sharded: false };
        let value = self.add(Op::State(state), &[], region)?[0];
        self.graph.set_name(value, &qualified(name, of));
        Ok(value)
    }

    fn carry(&mut self, name: &StateName, of: Option<&str>, next: ValueId, state: ValueId) {
        self.graph.add_output(&qualified(name, of), next, OutputKind::Carry(state));
    }
}

/// `adam_m.fc1.weight`, or the name alone for state of the whole.
fn qualified(name: &StateName, of: Option<&str>) -> String {
    of.map_or_else(|| name.to_string(), |of| format!("{name}.{of}"))
}
