//! Names of the state that Frit keeps between steps, such as optimizer moments and the loss scale.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What state is: `adam_m`, or of one parameter or buffer of the model `adafactor_v.fc.weight`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum StateName {
    /// First moment of Adam.
    AdamM,
    /// Second moment of Adam.
    AdamV,
    /// Momentum of SGD.
    Momentum,
    /// Momentum of Lion.
    LionM,
    /// Momentum of Muon.
    MuonMomentum,
    /// Second moment of Adafactor of the parameter of this name.
    AdafactorV(String),
    /// Moving average of a parameter.
    Ema,
    /// Gradients summed over micro-steps.
    GradSum,
    /// What waits at this level of a sum in a binary tree over the micro-steps of a step; see [`super::reproducible`].
    Partial(usize),
    /// Which micro-step of the step is next, `i64`.
    MicroStep,
    /// Losses summed over micro-steps.
    LossSum,
    /// Elements over which `loss_sum` sums.
    LossCount,
    /// By how much the buffer of this name changed since the last update.
    BufferChange(String),
    /// The factor of the loss.
    LossScale,
    /// Steps since the loss scale changed.
    GrowthTracker,
    /// Steps taken.
    Step,
    /// The random generator, `i64[5]`: seed, rank, count, ranks, accumulation; see [`super::random`].
    Rng,
    /// The amax of tensors that are rounded to fp8, `f32[tensors, history]`, the latest first.
    AmaxHistory,
}

/// Those that are of no parameter or buffer.
const PLAIN: [StateName; 15] = [
    StateName::AdamM,
    StateName::AdamV,
    StateName::Momentum,
    StateName::LionM,
    StateName::MuonMomentum,
    StateName::Ema,
    StateName::GradSum,
    StateName::MicroStep,
    StateName::LossSum,
    StateName::LossCount,
    StateName::LossScale,
    StateName::GrowthTracker,
    StateName::Step,
    StateName::Rng,
    StateName::AmaxHistory,
];

impl StateName {
    /// Its word, without the parameter or buffer that it is of.
    pub fn word(&self) -> &'static str {
        match self {
            StateName::AdamM => "adam_m",
            StateName::AdamV => "adam_v",
            StateName::Momentum => "momentum",
            StateName::LionM => "lion_m",
            StateName::MuonMomentum => "muon_momentum",
            StateName::AdafactorV(_) => "adafactor_v",
            StateName::Ema => "ema",
            StateName::GradSum => "grad_sum",
            StateName::Partial(_) => "partial",
            StateName::MicroStep => "micro_step",
            StateName::LossSum => "loss_sum",
            StateName::LossCount => "loss_count",
            StateName::BufferChange(_) => "buffer_change",
            StateName::LossScale => "loss_scale",
            StateName::GrowthTracker => "growth_tracker",
            StateName::Step => "step",
            StateName::Rng => "rng",
            StateName::AmaxHistory => "amax_history",
        }
    }

    /// Whether it says nothing between two steps: a sum over the micro-steps of one, or their number.
    pub fn is_within_step(&self) -> bool {
        use StateName::{BufferChange, GradSum, LossCount, LossSum, MicroStep, Partial};
        matches!(self, GradSum | LossSum | LossCount | BufferChange(_) | Partial(_) | MicroStep)
    }

    /// Whether it is a sum over micro-steps, or a part of one; of gradients if it belongs to a parameter.
    pub fn is_sum(&self) -> bool {
        matches!(self, StateName::GradSum | StateName::Partial(_))
    }

    /// Whether it has one element per parameter element, so that its layout is that of the flat group.
    pub fn is_per_element(&self) -> bool {
        use StateName::{AdamM, AdamV, Ema, LionM, Momentum, MuonMomentum};
        let of_optimizer = matches!(self, AdamM | AdamV | Momentum | LionM | MuonMomentum | Ema);
        of_optimizer || self.is_sum()
    }
}

impl fmt::Display for StateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StateName::AdafactorV(of) | StateName::BufferChange(of) => {
                write!(f, "{}.{of}", self.word())
            }
            StateName::Partial(level) => write!(f, "{}.{level}", self.word()),
            _ => f.write_str(self.word()),
        }
    }
}

impl FromStr for StateName {
    type Err = String;

    fn from_str(text: &str) -> Result<StateName, String> {
        if let Some(of) = text.strip_prefix("adafactor_v.") {
            return Ok(StateName::AdafactorV(of.into()));
        }
        if let Some(of) = text.strip_prefix("buffer_change.") {
            return Ok(StateName::BufferChange(of.into()));
        }
        if let Some(Ok(level)) = text.strip_prefix("partial.").map(str::parse) {
            return Ok(StateName::Partial(level));
        }
        PLAIN.into_iter().find(|name| name.word() == text).ok_or_else(|| {
            let words = PLAIN.map(|name| format!("`{}`", name.word())).join(", ");
            format!(
                "unknown state `{text}`, expected one of {words}, `adafactor_v.PARAMETER`, \
                 `buffer_change.BUFFER`, `partial.LEVEL`"
            )
        })
    }
}

impl From<StateName> for String {
    fn from(name: StateName) -> String {
        name.to_string()
    }
}

impl TryFrom<String> for StateName {
    type Error = String;

    fn try_from(text: String) -> Result<StateName, String> {
        text.parse()
    }
}
