//! The optimizer's step of one parameter: which rule, with which hyper-parameters, on which state.

use super::update::{Scalars, Update, unstated};
use super::writer::{Stated, Writer};
use crate::unstated::Unstated;
use frit_ir::ops::{
    LearningRate, MuonRule, Op, OptimizerKind, OptimizerStep, StateName, statistics_dtype,
};
use frit_ir::{OutputKind, TensorType, ValueId, pattern};

/// Parameters with settings of their own.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Pattern of their names, or of the scope that holds them: the name without its last part.
    pub scope: String,
    /// With Muon, which of the two rules steps them, if the group says so.
    pub kind: Option<OptimizerKind>,
}

impl Group {
    fn covers(&self, name: &str) -> bool {
        let scope = name.rfind('.').map_or("", |end| &name[..end]);
        [name, scope].iter().any(|name| pattern::matches(&self.scope, name))
    }
}

impl Update {
    /// The rule that steps a parameter: Muon leaves all to AdamW but the matrices of hidden layers, unless a group says otherwise.
    pub(super) fn kind_of(&self, name: &str) -> OptimizerKind {
        match self.optimizer {
            OptimizerKind::Muon => {
                let mut groups = self.groups.iter().rev().filter(|g| g.covers(name));
                let hidden = self.matrices.contains(name);
                let usual = if hidden { OptimizerKind::Muon } else { OptimizerKind::Adamw };
                groups.find_map(|g| g.kind).unwrap_or(usual)
            }
            kind => kind,
        }
    }

    /// The key of the learning rate or the weight decay of a parameter: the first of these that the configuration gives a value.
    fn own_key(&self, what: &str, name: &str, vector: bool, kind: OptimizerKind) -> String {
        let groups = self.groups.iter().enumerate().rev().filter(|(_, g)| g.covers(name));
        let of_groups = groups.map(|(i, _)| format!("optimizer.group.{i}.{what}"));
        let of_vectors = vector.then(|| format!("optimizer.{what}_of_vectors"));
        let beside_muon = self.optimizer == OptimizerKind::Muon && kind == OptimizerKind::Adamw;
        let of_adamw = beside_muon.then(|| format!("optimizer.adamw_{what}"));
        let mut keys = of_groups.chain(of_vectors).chain(of_adamw);
        keys.find(|key| self.hypers.contains_key(key)).unwrap_or(format!("optimizer.{what}"))
    }

    /// The learning rate of the step about to be taken, that follows the schedule from the base rate of this key.
    pub(super) fn learning_rate(&self, w: &mut Writer, base: &str, step: ValueId) -> Stated {
        let mut operands = vec![self.hyper(w, base)?];
        for key in self.schedule.hypers() {
            operands.push(self.hyper(w, key)?);
        }
        operands.push(step);
        w.one(Op::LearningRate(LearningRate { kind: self.schedule }), &operands)
    }

    /// The step of one parameter, its state and its moving average.
    pub(super) fn step(
        &self,
        w: &mut Writer,
        (name, kind): (&str, OptimizerKind),
        [param, gradient]: [ValueId; 2],
        scalars: &Scalars,
    ) -> Result<(), Unstated> {
        let shape = w.shape(param).clone();
        let dtype = statistics_dtype(w.dtype(param));
        let of = kind.has_states_by_element().then_some(name);
        let names = kind.states(name);
        let mut operands = vec![param, gradient];
        for state in &names {
            let ty = TensorType::new(dtype, kind.state_shape(&shape));
            operands.push(w.state(state, of, ty)?);
        }
        let before = operands[2..].to_vec();
        for &key in kind.hypers() {
            let vector = shape.rank() <= 1;
            operands.push(match key {
                "optimizer.lr" => {
                    let key = self.own_key("lr", name, vector, kind);
                    self.learning_rate(w, &key, scalars.step)?
                }
                "optimizer.weight_decay" => {
                    self.hyper(w, &self.own_key("weight_decay", name, vector, kind))?
                }
                _ => self.hyper(w, key)?,
            });
        }
        operands.push(self.hyper(w, "optimizer.clip_grad_value")?);
        operands.extend([scalars.step, scalars.factor, scalars.found_inf]);
        let muon = if kind == OptimizerKind::Muon { self.muon } else { MuonRule::default() };
        let next = w.all(Op::OptimizerStep(OptimizerStep { kind, muon }), &operands)?;
        w.graph.add_output(name, next[0], OutputKind::Carry(param));
        for ((state, before), after) in names.iter().zip(before).zip(&next[1..]) {
            w.carry(state, of, *after, before);
        }
        if self.ema {
            let average = w.state(&StateName::Ema, Some(name), TensorType::new(dtype, shape))?;
            let decay = self.hyper(w, "optimizer.ema")?;
            let operands = [average, next[0], decay, scalars.step, scalars.found_inf];
            let after = w.one(Op::EmaStep, &operands)?;
            w.carry(&StateName::Ema, Some(name), after, average);
        }
        Ok(())
    }

    /// The leaf of a hyper-parameter.
    pub(super) fn hyper(&self, w: &mut Writer, key: &str) -> Stated {
        let default = self.hypers.get(key);
        let default = default.ok_or_else(|| unstated(format!("`{key}` has no value")))?;
        w.hyper(key, *default)
    }
}
